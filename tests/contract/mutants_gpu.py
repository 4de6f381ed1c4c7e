"""Mutants of the checks on GPUs: there, set, healthy."""

from bundles import (
    Edit,
    Missing,
    Mutant,
    cut,
    garbled,
    grace,
    guest,
    hgx,
    hgx_4,
    not_run,
    pcie_4,
    result,
    stdout,
    t4,
    text,
    timed_out,
    v100,
    with_two_gpus,
)
from machines import HGX, HGX_4, PCI

from gpunode.checks import Expectation, Status

WARN = Status.WARN
SMI = "nvidia-smi-xml"


def smi(old: str | None, new: str) -> Edit:
    """Change what nvidia-smi -q -x prints, where it is first found: of GPU 0."""
    return stdout(SMI, old, new)


def tag(name: str, old: str, new: str) -> Edit:
    """Change the value of a tag of GPU 0."""
    return smi(f"<{name}>{old}</{name}>", f"<{name}>{new}</{name}>")


def reason(name: str) -> Edit:
    """Something slows GPU 0 down."""
    return tag(f"clocks_event_reason_{name}", "Not Active", "Active")


def apart(record: str) -> list[Edit]:
    """The devices have nothing to do with each other."""
    return [
        result(hgx(), record, "skipped", new="MIG devices do not talk to each other"),
        result(hgx(), record, "values", new={}),
    ]


XML_OF_4 = pcie_4()["commands"][SMI]["stdout"]
SECOND_OF_4 = XML_OF_4[XML_OF_4.index('\t<gpu id="00000000:38') : XML_OF_4.index('\t<gpu id="00000000:B8')]
ONE_GPU_OFF_THE_BUS = [
    text(PCI, "0000:38:00.0\n", ""),
    smi("<attached_gpus>4<", "<attached_gpus>3<"),
    smi(SECOND_OF_4, ""),
]
XID = (
    "2026-11-20T09:00:00+0000 n kernel: Linux version 6 (simulated)\n"
    "2026-11-20T10:00:00+0000 n kernel: NVRM: Xid (PCI:0000:19:00): {xid}, pid=4242, name=python, {text}\n"
    "2026-11-20T10:00:01+0000 n kernel: NVRM: Xid (PCI:0000:19:00): {xid}, pid=4242, name=python, {text}\n"
)
LOG = "2026-11-20T09:00:00+0000 n kernel: Linux version 6 (simulated)\n2026-11-20T10:00:00+0000 n kernel: {line}\n"

SETTINGS, SETTINGS_REPORT = "/etc/gpunode/gpu-settings.json", "/run/gpunode/gpu-settings.json"
FOR_ONE = text(SETTINGS, '"all"', '{"indexes": [0]}')
APPLICATION_CLOCKS = "".join(
    f"\t\t<{block}><graphics_clock>{clock} MHz</graphics_clock><mem_clock>5001 MHz</mem_clock></{block}>\n"
    for block, clock in (("applications_clocks", 1005), ("default_applications_clocks", 585))
)

DOUBLE_BIT = "<double_bit_retirement>\n\t\t\t\t<retired_count>"


def usage(second: int) -> Edit:
    """The second sample: GPU 0 in full use, GPU 1 as much as given; both next to idle."""
    lines = [f"0000{slot.upper()}, {used} %, 0 %, 128.31 W" for slot, used in zip(SLOTS, (100, second), strict=True)]
    text = "pci.bus_id, utilization.gpu [%], utilization.memory [%], power.draw [W]\n" + "\n".join(lines) + "\n"
    answer = {"argv": ["nvidia-smi"], "rc": 0, "stdout": text, "stderr": "", "seconds": 0.1, "timed_out": False}
    return Edit(("commands", "nvidia-smi-usage"), None, {**answer, "truncated": False})


SLOTS = HGX.slots[:2]
USAGE = usage(100)
WAITING = [tag("gpu_util", "0 %", "100 %"), tag("gpu_util", "0 %", "100 %")]
LIFETIME = smi(
    "<aggregate>\n\t\t\t\t<sram_correctable>0</sram_correctable>",
    "<aggregate>\n\t\t\t\t<sram_correctable>10001</sram_correctable>",
)
SINGLE_BIT = "<multiple_single_bit_retirement>\n\t\t\t\t<retired_count>"


def total(kind: str, count: int) -> str:
    """Return how a card before Turing lists its errors of a kind, single or double bit."""
    return f"<total>{count}</total>\n\t\t\t\t</{kind}>"


WITHOUT_VOLATILE = [smi("<volatile>", "<unknown>"), smi("</volatile>", "</unknown>")]


MUTANTS = [
    Mutant(
        "gpu.present",
        "one GPU gone from bus and driver",
        pcie_4,
        ONE_GPU_OFF_THE_BUS,
        expect=Expectation(gpus=4),
    ),
    Mutant(
        "gpu.model",
        "one GPU is another model than the site expects",
        with_two_gpus,
        [text(f"{PCI}0000:38:00.0/uevent", "10DE:26B9", "10DE:26B5")],
        expect=Expectation(model="L40S"),
    ),
    Mutant(
        "gpu.count",
        "the driver has one GPU less than the bus",
        with_two_gpus,
        [smi("<attached_gpus>2<", "<attached_gpus>1<")],
    ),
    Mutant(
        "gpu.device-nodes",
        "the file of one GPU is missing",
        hgx,
        [stdout("device-nodes", "/dev/nvidia3\tcharacter\t0666\troot\troot\t195\t3\n", "")],
    ),
    Mutant(
        "gpu.device-nodes",
        "a plain file in the place of a device",
        t4,
        [
            stdout(
                "device-nodes",
                "/dev/nvidiactl\tcharacter\t0666\troot\troot\t195\t255",
                "/dev/nvidiactl\tfile\t0644\troot\troot\t\t",
            )
        ],
    ),
    Mutant(
        "gpu.device-nodes",
        "no /dev/nvidia-uvm",
        t4,
        [stdout("device-nodes", "/dev/nvidia-uvm\tcharacter\t0666\troot\troot\t510\t0\n", "")],
        becomes=WARN,
    ),
    Mutant(
        "gpu.answers",
        "a reading that fails",
        pcie_4,
        [smi("<memory_util>0 %</memory_util>", "<memory_util>Unknown Error</memory_util>")],
        becomes=WARN,
    ),
    Mutant(
        "gpu.answers",
        "a lost GPU",
        t4,
        [tag("performance_state", "P8", "GPU is lost")],
        skips=(
            "gpu.clocks",
            "gpu.compute-mode",
            "gpu.ecc-corrected",
            "gpu.ecc-mode",
            "gpu.ecc-uncorrected",
            "gpu.memory-size",
            "gpu.memory-used",
            "gpu.power-draw",
            "gpu.power-limit",
            "gpu.power-state",
            "gpu.recovery",
            "gpu.retired-pages",
            "gpu.temperature",
            "gpu.throttling",
            "link.pcie-replays",
        ),
    ),
    Mutant(
        "gpu.messages",
        "the infoROM of one GPU is corrupted",
        hgx,
        [
            smi("</nvidia_smi_log>\n", "</nvidia_smi_log>\nWARNING: infoROM is corrupted at gpu 0000:5D:00.0\n"),
            Edit(("commands", SMI, "rc"), None, 14),
        ],
        becomes=WARN,
    ),
    Mutant("gpu.messages", "power cables, by exit status alone", t4, [Edit(("commands", SMI, "rc"), None, 8)]),
    Mutant("gpu.answers", "off the bus, by exit status alone", t4, [Edit(("commands", SMI, "rc"), None, 15)]),
    Mutant("gpu.recovery", "a drain is recommended", pcie_4, [tag("drain_and_reset_recommended", "No", "Yes")]),
    Mutant("gpu.memory-size", "half of its memory", hgx, [smi("<total>81559 MiB", "<total>40960 MiB")]),
    Mutant("gpu.vbios", "one GPU with another", hgx, [tag("vbios_version", "96.00.A5.00.01", "2")], becomes=WARN),
    Mutant("gpu.ecc-mode", "off after the next reset", t4, [tag("pending_ecc", "Enabled", "Disabled")], becomes=WARN),
    Mutant("gpu.temperature", "hot memory", hgx, [tag("memory_temp", "39 C", "110 C")]),
    Mutant("gpu.recovery", "a reset is recommended", hgx, [tag("gpu_recovery_action", "None", "Drain and Reset")]),
    Mutant(
        "gpu.recovery",
        "an older driver asks for a reset",
        t4,
        [tag("reset_required", "No", "Yes")],
    ),
    Mutant(
        "gpu.persistence",
        "persistence mode off on one GPU, which the daemon does not hold",
        with_two_gpus,
        [tag("persistence_mode", "Enabled", "Disabled"), stdout("device-holders", " /dev/nvidia0", "")],
    ),
    Mutant(
        "gpu.persistence",
        "persistence daemon not active",
        with_two_gpus,
        [stdout("systemctl-units", "ActiveState=active\nSubState=running", "ActiveState=inactive\nSubState=dead")],
        becomes=WARN,
    ),
    Mutant("gpu.compute-mode", "no process may use it", hgx, [tag("compute_mode", "Default", "Prohibited")]),
    Mutant(
        "gpu.compute-mode",
        "one process alone may use it",
        guest,
        [tag("compute_mode", "Default", "Exclusive_Process")],
        becomes=WARN,
    ),
    Mutant(
        "gpu.mig",
        "MIG on where the site expects it off",
        hgx,
        [
            tag("current_mig", "Disabled", "Enabled"),
            tag("pending_mig", "Disabled", "Enabled"),
            *(edit for part in ("p2p", "collective") for edit in apart(f"frameworks.{part}")),
        ],
        skips=("framework.p2p", "framework.collective", "slurm.gres"),
        expect=Expectation(mig=False),
    ),
    Mutant("gpu.mig", "a change waits for a reset", hgx, [tag("pending_mig", "Disabled", "Enabled")], becomes=WARN),
    Mutant(
        "gpu.power-limit",
        "a lower limit than the default",
        hgx,
        [tag("current_power_limit", "700.00 W", "500.00 W")],
        becomes=WARN,
    ),
    Mutant("gpu.settings", "a lock that one GPU refused", hgx_4, [text(SETTINGS_REPORT, '"applied"', '"refused"')]),
    Mutant(
        "gpu.settings", "nothing was applied since the boot", hgx_4, [text(SETTINGS_REPORT, HGX_4.uuids[0], "GPU-1")]
    ),
    Mutant("gpu.settings", "another lock than the report has", hgx_4, [FOR_ONE, text(SETTINGS, "1755", "1410")]),
    Mutant(
        "gpu.settings", "a power limit out of the card's range", hgx_4, [FOR_ONE, text(SETTINGS, '"default"', "9000")]
    ),
    Mutant(
        "gpu.settings-kept",
        "the unit is not enabled",
        hgx_4,
        [
            stdout(
                "systemctl-units",
                "Id=gpunode-gpu-settings.service\nLoadState=loaded\nActiveState=active\nSubState=running\n"
                "UnitFileState=enabled",
                "Id=gpunode-gpu-settings.service\nLoadState=loaded\nActiveState=active\nSubState=exited\n"
                "UnitFileState=disabled",
            )
        ],
        becomes=WARN,
    ),
    Mutant(
        "gpu.settings-kept",
        "application clocks that somebody set by hand",
        t4,
        [smi("\t\t<clocks>\n", APPLICATION_CLOCKS + "\t\t<clocks>\n")],
        becomes=WARN,
    ),
    Mutant(
        "gpu.clocks",
        "the card offers less than its model",
        hgx,
        [smi("<sm_clock>1980", "<sm_clock>1410")],
        becomes=WARN,
    ),
    Mutant(
        "gpu.clocks",
        "busy and slow for no reason",
        t4,
        [
            tag("gpu_util", "0 %", "100 %"),
            tag("performance_state", "P8", "P0"),
            tag("clocks_event_reason_gpu_idle", "Active", "Not Active"),
        ],
        becomes=WARN,
    ),
    Mutant("gpu.stuck", "two GPUs wait for each other", hgx, [*WAITING, USAGE], becomes=WARN),
    Mutant("gpu.memory-used", "memory of nobody", hgx, [tag("used", "1 MiB", "40960 MiB")], becomes=WARN),
    Mutant("gpu.ecc-mode", "ECC off", hgx, [tag("current_ecc", "Enabled", "Disabled")], becomes=WARN),
    Mutant("gpu.ecc-uncorrected", "an error since the driver was loaded", hgx, [tag("dram_uncorrectable", "0", "2")]),
    Mutant("gpu.ecc-uncorrected", "on an older card", v100, [smi(total("double_bit", 0), total("double_bit", 1))]),
    Mutant(
        "gpu.ecc-uncorrected",
        "errors in the card's life",
        grace,
        [
            smi(
                "<aggregate>\n\t\t\t\t<sram_correctable>0</sram_correctable>\n\t\t\t\t<sram_uncorrectable_parity>0",
                "<aggregate>\n\t\t\t\t<sram_correctable>0</sram_correctable>\n\t\t\t\t<sram_uncorrectable_parity>3",
            )
        ],
        becomes=WARN,
    ),
    Mutant(
        "gpu.ecc-uncorrected",
        "SRAM in the card's life, and the driver reports no threshold",
        hgx,
        [
            smi(
                "<aggregate>\n\t\t\t\t<sram_correctable>0</sram_correctable>\n\t\t\t\t<sram_uncorrectable_parity>0",
                "<aggregate>\n\t\t\t\t<sram_correctable>0</sram_correctable>\n\t\t\t\t<sram_uncorrectable_parity>1",
            ),
            tag("sram_threshold_exceeded", "No", "N/A"),
        ],
    ),
    Mutant("gpu.ecc-uncorrected", "SRAM beyond repair", hgx, [tag("sram_threshold_exceeded", "No", "Yes")]),
    Mutant("gpu.ecc-corrected", "very many", hgx, [tag("dram_correctable", "0", "30000000")], becomes=WARN),
    Mutant("gpu.ecc-corrected", "many of SRAM", hgx, [tag("sram_correctable", "0", "10001")], becomes=WARN),
    Mutant("gpu.ecc-corrected", "many in the card's life", hgx, [LIFETIME], becomes=WARN),
    Mutant("gpu.remapped-rows", "a row waits", hgx, [tag("remapped_row_pending", "No", "Yes")]),
    Mutant("gpu.remapped-rows", "remapping failed", pcie_4, [tag("remapped_row_failure", "No", "Yes")]),
    Mutant("gpu.remapped-rows", "very many rows", hgx, [tag("remapped_row_unc", "0", "600")]),
    Mutant("gpu.retired-pages", "pages wait", t4, [tag("pending_retirement", "No", "Yes")]),
    Mutant(
        "gpu.retired-pages",
        "many pages for double-bit errors",
        t4,
        [smi(f"{DOUBLE_BIT}0", f"{DOUBLE_BIT}11")],
    ),
    Mutant("gpu.retired-pages", "the table is full", t4, [smi(f"{SINGLE_BIT}0", f"{SINGLE_BIT}62")]),
    Mutant("gpu.retired-pages", "a double-bit error", t4, [smi(f"{DOUBLE_BIT}0", f"{DOUBLE_BIT}1")], becomes=WARN),
    Mutant("gpu.retired-pages", "many single-bit", t4, [smi(f"{SINGLE_BIT}0", f"{SINGLE_BIT}11")], becomes=WARN),
    Mutant("gpu.throttling", "heat", hgx, [reason("hw_slowdown"), reason("hw_thermal_slowdown")]),
    Mutant(
        "gpu.throttling",
        "power brake beside a power limit",
        hgx,
        [reason("sw_power_cap"), reason("hw_power_brake_slowdown")],
    ),
    Mutant("gpu.throttling", "the driver slows down for heat", t4, [reason("sw_thermal_slowdown")], becomes=WARN),
    Mutant("gpu.temperature", "at the limit", t4, [tag("gpu_temp", "31 C", "93 C")]),
    Mutant("gpu.temperature", "near the limit", t4, [tag("gpu_temp", "31 C", "90 C")], becomes=WARN),
    Mutant("gpu.temperature", "past T.Limit", hgx, [tag("gpu_temp_tlimit", "56 C", "-3 C")]),
    Mutant(
        "gpu.temperature",
        "memory at its limit",
        hgx,
        [
            smi(
                "<memory_temp>39 C</memory_temp>",
                "<memory_temp>95 C</memory_temp>\n<gpu_temp_max_mem_threshold>95 C</gpu_temp_max_mem_threshold>",
            )
        ],
    ),
    Mutant(
        "gpu.xid",
        "fallen off the bus, twice",
        hgx,
        [stdout("journal-kernel", None, XID.format(xid=79, text="GPU has fallen off the bus."))],
    ),
    Mutant(
        "gpu.xid",
        "an application's fault",
        hgx,
        [stdout("journal-kernel", None, XID.format(xid=31, text="Ch 00000010"))],
        becomes=WARN,
    ),
    Mutant(
        "gpu.xid",
        "an error of which no source speaks for this model",
        t4,
        [stdout("journal-kernel", None, XID.format(xid=95, text="Uncontained: LTC TAG"))],
        becomes=WARN,
    ),
    Mutant(
        "gpu.xid",
        "a number that nobody knows",
        hgx,
        [stdout("journal-kernel", None, XID.format(xid=9999, text="something"))],
        becomes=WARN,
    ),
    Mutant(
        "gpu.xid",
        "a GPU that needs a reset",
        hgx,
        [
            stdout(
                "journal-kernel",
                None,
                XID.format(xid=154, text="GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"),
            )
        ],
    ),
    Mutant(
        "nvswitch.sxid",
        "fatal",
        hgx,
        [
            stdout(
                "journal-kernel",
                None,
                LOG.format(line="nvidia-nvswitch0: SXid (PCI:0000:83:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"),
            )
        ],
    ),
    Mutant(
        "nvswitch.sxid",
        "not fatal",
        hgx,
        [
            stdout(
                "journal-kernel",
                None,
                LOG.format(
                    line="nvidia-nvswitch0: SXid (PCI:0000:83:00.0): 22013, Non-fatal, Link 27 minion link error"
                ),
            )
        ],
        becomes=WARN,
    ),
    Mutant(
        "driver.log",
        "a GPU that could not be initialised",
        t4,
        [
            stdout(
                "journal-kernel", None, LOG.format(line="NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x0:1835)")
            )
        ],
    ),
    Mutant(
        "driver.log",
        "other trouble",
        t4,
        [stdout("journal-kernel", None, LOG.format(line="NVRM: API mismatch: the client has the version 535.247.01"))],
        becomes=WARN,
    ),
]

MISSING: Missing = {
    "gpu.present": [(with_two_gpus, [text(PCI, None, None)])],
    "gpu.model": [(hgx, [text(PCI, None, None)])],
    "gpu.count": [
        (with_two_gpus, cut(SMI)),
        (with_two_gpus, [smi("</nvidia_smi_log>", "")]),
    ],
    "gpu.device-nodes": [
        (t4, [not_run("device-nodes")]),
        (t4, [text("/proc/driver/nvidia/gpus/", None, "")]),
        (t4, [text("/proc/driver/nvidia/gpus/0000:3b:00.0/information", None, None)]),
    ],
    "gpu.answers": [(hgx, cut(SMI)), (t4, garbled(SMI))],
    "gpu.messages": [(hgx, [not_run(SMI)])],
    "gpu.memory-size": [(hgx, [smi("<total>81559 MiB", "<total>N/A")])],
    "gpu.vbios": [(hgx, cut(SMI))],
    "gpu.recovery": [(hgx, [not_run(SMI)])],
    "gpu.persistence": [
        (with_two_gpus, [smi("<persistence_mode>Enabled</persistence_mode>", "")]),
        (with_two_gpus, timed_out("systemctl-units")),
    ],
    "gpu.compute-mode": [(hgx, [smi("<compute_mode>Default</compute_mode>", "")])],
    "gpu.mig": [(hgx, cut(SMI))],
    "gpu.power-limit": [(hgx, [smi("<current_power_limit>700.00 W</current_power_limit>", "")])],
    "gpu.settings": [
        (hgx_4, cut(SMI)),
        (hgx_4, [text(SETTINGS, "{", "")]),
        (hgx_4, [text(SETTINGS, '"all"', '{"cards": 1}')]),
        (hgx_4, [text(SETTINGS_REPORT, '"gpus"', '"cards"')]),
    ],
    "gpu.settings-kept": [(hgx_4, timed_out("systemctl-units")), (hgx_4, cut(SMI))],
    "gpu.clocks": [(hgx, [smi("<sm_clock>345 MHz</sm_clock>", "")])],
    "gpu.memory-used": [
        (hgx, [smi("<used>1 MiB</used>", "")]),
        (hgx, [smi("<processes>\n\t\t</processes>", ""), Edit(("commands", "device-holders", "rc"), None, 1)]),
    ],
    "gpu.ecc-mode": [(hgx, [tag("current_ecc", "Enabled", "N/A")])],
    "gpu.ecc-uncorrected": [(v100, WITHOUT_VOLATILE), (hgx, cut(SMI))],
    "gpu.ecc-corrected": [(v100, WITHOUT_VOLATILE)],
    "gpu.stuck": [(hgx, WAITING), (hgx, [*WAITING, USAGE, *garbled("nvidia-smi-usage")])],
    "gpu.remapped-rows": [
        (hgx, [smi("<remapped_row_pending>No</remapped_row_pending>", "")]),
        (
            grace,
            [
                tag("remapped_row_corr", "0", "N/A"),
                tag("remapped_row_unc", "0", "N/A"),
                tag("remapped_row_pending", "No", "N/A"),
                tag("remapped_row_failure", "No", "N/A"),
            ],
        ),
    ],
    "gpu.retired-pages": [
        (t4, [tag("pending_retirement", "No", "N/A"), tag("pending_blacklist", "No", "N/A")]),
    ],
    "gpu.throttling": [
        (hgx, [smi("clocks_event_reasons>", "unknown_reasons>"), smi("</clocks_event_reasons>", "</unknown_reasons>")])
    ],
    "gpu.temperature": [(hgx, [smi("<gpu_temp>31 C</gpu_temp>", "")])],
    "gpu.xid": [(hgx, [not_run("journal-kernel")]), (hgx, garbled("journal-kernel"))],
    "nvswitch.sxid": [(hgx, timed_out("journal-kernel"))],
    "driver.log": [(t4, [Edit(("commands", "journal-kernel", "truncated"), None, True)])],
}
