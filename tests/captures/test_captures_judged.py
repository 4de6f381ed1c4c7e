"""Recorded outputs of real machines, judged: the healthy ones have no fault, the faulty ones have the one they have.

A capture is put in the place of that tool's output in a healthy node's facts; no capture is copied anywhere. Each of
them is named here: healthy, faulty (with the check and what it must report), or in part (an excerpt, in which values
are missing, that has no fault).
"""

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from captured import FOLDER, each, in_folder

sys.path.append(str(Path(__file__).parents[1] / "contract"))

from bundles import hgx, t4

from gpunode.checks import Expectation, Finding, Status, judge, registry
from gpunode.facts import facts_from_bundle, rdma
from gpunode.facts.gpu import GpuProcess
from gpunode.facts.kernel_log import parse as parse_log
from gpunode.facts.models.smi import Nvlink, PeerAccess, Smi, SmiLog, Topology
from gpunode.facts.modules import LoadedDriver
from gpunode.facts.network import IbDevice, IbPort
from gpunode.facts.node import NodeFacts
from gpunode.facts.parsers.kinds import parsed
from gpunode.facts.pci import Iommu, PciDevice, PciLink
from gpunode.probe.bundle import Bundle

# Faults of these captures: check, component, words of its message. Others of the capture's have no fault.
FAULTY: dict[str, tuple[tuple[str, Status, str], ...]] = {
    "smi-q/gpud-nvidia-smi-query.535.129.03.out.0.valid.a10.txt": (
        ("gpu.remapped-rows", Status.FAIL, "a row waits to be remapped (4 uncorrectable"),
    ),
    "smi-q/gpud-nvidia-smi-query.535.161.08.out.0.valid.txt": (
        ("gpu.throttling", Status.FAIL, "slowed down: power brake"),
    ),
    "smi-q/gpud-nvidia-smi-query.535.183.01.out.0.valid.txt": (
        ("gpu.throttling", Status.FAIL, "slowed down: power brake, slowdown for heat"),
    ),
    "smi-q/azure-bad_nvsmi8_output.txt": (
        ("gpu.retired-pages", Status.FAIL, "pages wait to be retired (63 are)"),
        ("gpu.retired-pages", Status.FAIL, "pages wait to be retired (6 are)"),
        ("gpu.retired-pages", Status.FAIL, "65 pages retired, 5 of them for double-bit errors"),
    ),
    "smi-q/stas00-A100-xid63-ecc-remap-pending-excerpt.txt": (
        ("gpu.remapped-rows", Status.FAIL, "a row waits to be remapped (0 uncorrectable, 1 correctable"),
        ("gpu.count", Status.FAIL, "1 GPU on the bus, 8 with the driver"),
    ),
    "smi-q/stas00-ecc-sram-uncorr-excerpt.txt": (
        ("gpu.ecc-uncorrected", Status.FAIL, "1 uncorrectable error since the driver was loaded, 5 in the card's life"),
    ),
    "smi-q/stas00-retired-pages-pending-excerpt.txt": (
        ("gpu.retired-pages", Status.FAIL, "pages wait to be retired (2 are)"),
    ),
    "smi-xml/telegraf-a100-sxm4-v12.xml": (("gpu.count", Status.FAIL, "1 GPU on the bus, 4 with the driver"),),
    "smi-nvlink/azure-bad_nvlink_status.txt": (("nvlink.state", Status.FAIL, "all links are inactive"),),
    "dmesg/congphase-syslog-xid79.log": (
        ("gpu.xid", Status.FAIL, "The GPU has fallen off the bus"),
        ("driver.log", Status.FAIL, "RmInitAdapter failed! (0x62:0x0:1835)"),
    ),
    "dmesg/gpud-dmesg-with-xid-119.log": (("gpu.xid", Status.FAIL, "Xid 119, 5 times"),),
    "dmesg/gpud-memory-dmesg.decode.iso.log": (
        ("gpu.xid", Status.WARN, "Xid 13, 16 times"),
        ("host.killed-processes", Status.WARN, "killed"),
    ),
    "ib/gpud-ibstat.47.0.h100.some.down.0.txt": (("rdma.ports", Status.WARN, "switched off (Disabled)"),),
    "ib/gpud-ibstat.47.0.h100.some.down.1.txt": (("rdma.ports", Status.WARN, "switched off (Disabled)"),),
    "ib/gpud-ibstat.47.0.h100.some.down.with.polling.1.txt": (("rdma.ports", Status.WARN, "Polling"),),
}
# Excerpts: no fault, and values that are not in them are not determined.
IN_PART = frozenset(
    {
        "smi-q/azure-orig_nvsmi8_output.txt",
        "smi-xml/telegraf-gtx-1070-ti.xml",
    }
)
# Cut on purpose: no answer.
REFUSED = frozenset({"smi-q/gpud-nvidia-smi-query.535.183.01.out.0.invalid.txt"})
# On Windows, which has no persistence mode.
WINDOWS = frozenset(
    {
        "smi-q/utku-win-rtx-2080-super-610.62-q-idle.txt",
        "smi-xml/telegraf-old-tesla_t4.xml",
        "smi-xml/telegraf-rtx-3080-v12.xml",
    }
)
KINDS = ("smi-xml", "smi-q", "smi-nvlink", "smi-topo", "dmesg", "lspci", "ib")
# What nvidia-smi -q reports nothing of: links between GPUs, and services.
OF_SMI = {check.id for check in registry} - {
    "fabric.manager",
    "link.p2p",
    "link.topology",
    "nvlink.count",
    "nvlink.errors",
    "nvlink.speed",
    "nvlink.state",
}
NOT_OF_A_KIND = frozenset({"smi-topo/autodl-2x2080ti-topo-p2p.txt"})


def names() -> list[str]:
    return [name for name in in_folder(*KINDS) if name not in NOT_OF_A_KIND | REFUSED and "ibstatus" not in name]


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8", errors="backslashreplace")


def facts(document: dict[str, Any]) -> NodeFacts:
    return facts_from_bundle(Bundle.from_json(json.dumps(document), "a test's bundle"))


def device(slot: str, device_id: str, subsystem_id: str | None = None, **more: Any) -> PciDevice:
    vendor, _, number = device_id.partition(":")
    fields = {"class_id": "030200", "driver": "nvidia", **more}
    return PciDevice(slot=slot, vendor_id=vendor, device_id=number, subsystem_id=subsystem_id, **fields)


def with_smi(document: dict[str, Any]) -> NodeFacts:
    """A node with the GPUs that nvidia-smi reports; of links between them nothing is known."""
    gpus = document["gpus"]
    for gpu in gpus:
        gpu["pci_bus_id"] = gpu["pci_bus_id"] or f"0000:{gpu['index'] + 16:02x}:00.0"
        if not (gpu["pci_device_id"] or "").startswith("10de:"):
            # Not in an excerpt, or made unrecognisable by who published it.
            gpu["pci_device_id"] = "10de:ffff"
    pci = tuple(
        device(gpu["pci_bus_id"], gpu["pci_device_id"], gpu["pci_subsystem_id"], link=link_of(gpu)) for gpu in gpus
    )
    held = tuple(f"/dev/nvidia{gpu['minor_number']}" for gpu in gpus)
    processes = tuple(
        GpuProcess(pid=process["pid"], name=process["name"], type=process["type"], gpu=f"gpu{gpu['index']}")
        for gpu in gpus
        for process in gpu["processes"] or ()
    )
    driver = document["driver_version"] or "535.261.03"
    passed_on = any(gpu["virtualization_mode"] in ("Pass-Through", "VGPU") for gpu in gpus)
    daemon = GpuProcess(pid=900, name="nvidia-persiste", type=None, devices=held)
    node = facts(t4())
    return node.model_copy(
        update={
            "smi": Smi[SmiLog](document=document),
            "pci": pci,
            "pci_ports": (),
            "gpu_processes": (daemon, *processes),
            "topology": Smi[Topology](document={"gpus": ["GPU0"], "links": {"GPU0": {}}}),
            "peer_access": Smi[PeerAccess](document={"gpus": ["GPU0"], "links": {"GPU0": {}}}),
            "nvlink": Smi[Nvlink](document={"gpus": []}),
            "nvlink_errors": Smi[Nvlink](document={"gpus": []}),
            "loaded_driver": LoadedDriver(version=driver, flavour=None),
            "driver_library_version": driver,
            "module_files": tuple(file.model_copy(update={"version": driver}) for file in node.module_files or ()),
            "cdi_specs": (),
            "virtualization": "kvm" if passed_on else "none",
            "iommu": Iommu(units=(), group_types={}),
        }
    )


def link_of(gpu: dict[str, Any]) -> PciLink | None:
    """What the kernel would report of a link that nvidia-smi reports."""
    speeds = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
    pcie = gpu["pcie"]
    return PciLink(
        speed_gt_per_s=speeds.get(pcie["gen_current"]),
        speed_max_gt_per_s=speeds.get(pcie["gen_max"]),
        width=pcie["width_current"],
        width_max=pcie["width_max"],
    )


def with_nvlink(document: dict[str, Any]) -> NodeFacts:
    """The HGX node with as many GPUs, of the model, and in the order of the listing."""
    node = facts(hgx())
    assert node.smi is not None
    assert node.smi.document is not None
    document_of_node = node.smi.document.model_dump()
    some = document_of_node["gpus"][0]
    device_ids = {"A100": "10de:20b2", "H100": "10de:2330", "H200": "10de:2335", "L40S": "10de:26b9"}
    gpus = [
        some
        | {
            "index": gpu["index"],
            "name": gpu["name"],
            "pci_device_id": next((number for word, number in device_ids.items() if word in gpu["name"]), "10de:1e81"),
            "pci_subsystem_id": None,
            "mig_mode": "MIG mode" in (gpu["message"] or ""),
        }
        for gpu in document["gpus"]
    ]
    smi = Smi[SmiLog](document=document_of_node | {"gpus": gpus, "attached_gpus": len(gpus)})
    return node.model_copy(update={"smi": smi, "nvlink": Smi[Nvlink](document=document)})


def with_topology(document: dict[str, Any]) -> NodeFacts:
    node = facts(hgx())
    models = {"NV18": "10de:2330", "NV12": "10de:20b2"}
    model = models.get(document["links"]["GPU0"].get("GPU1", ""), "10de:1e81")
    pci = tuple(device(f"0000:{number + 16:02x}:00.0", model) for number in range(len(document["gpus"])))
    return node.model_copy(update={"topology": Smi[Topology](document=document), "pci": pci})


def with_lspci(document: dict[str, Any]) -> NodeFacts:
    node = facts(hgx())
    pci = tuple(
        device(
            row["slot"],
            f"{row['vendor_id']}:{row['device_id']}",
            # Without -nn the class has a name and no number.
            class_id="030200" if "3D controller" in row["class"] else "068000",
            link=PciLink(**row["link"]) if row["link"] else None,
        )
        for row in document["devices"]
        if row["vendor_id"] == "10de"
    )
    return node.model_copy(update={"pci": pci})


def with_ibstat(document: dict[str, Any]) -> NodeFacts:
    states = {"Active": "ACTIVE", "Down": "DOWN", "Initializing": "INIT"}
    devices = tuple(
        IbDevice(
            name=ca["name"],
            firmware=ca["firmware"],
            board_id=None,
            type=ca["type"],
            slot=None,
            numa_node=None,
            ports=tuple(
                IbPort(
                    port=port["port"],
                    state=states[port["state"]],
                    physical_state=port["physical_state"],
                    rate_gbit_per_s=port["rate_gbit_per_s"],
                    rate=f"{port['rate_gbit_per_s']} Gb/sec",
                    link_layer=port["link_layer"],
                    lid=port["lid"],
                    counters={"symbol_error": 0},
                )
                for port in ca["ports"]
            ),
        )
        for ca in document["cas"]
    )
    return facts(hgx()).model_copy(update={"infiniband": devices})


def node_with(name: str) -> tuple[NodeFacts, set[str]]:
    """The node, and the checks that look at what the capture reports."""
    text = read(name)
    match name.partition("/")[0]:
        case "smi-xml":
            return with_smi(parsed("nvidia-smi-xml", text)), OF_SMI
        case "smi-q":
            return with_smi(parsed("nvidia-smi-q", text)), OF_SMI
        case "smi-nvlink":
            return with_nvlink(parsed("nvidia-smi-nvlink", text)), {"nvlink.count", "nvlink.state", "nvlink.speed"}
        case "smi-topo":
            return with_topology(parsed("nvidia-smi-topo", text)), {"link.topology"}
        case "lspci":
            links = {"link.pcie-width", "link.pcie-speed"} if "-vvv" in name else set()
            return with_lspci(parsed("lspci", text)), {"gpu.present", "gpu.model", *links}
        case "ib":
            return with_ibstat(parsed("ibstat", text)), {"rdma.ports", "rdma.errors"}
    log = parse_log(text, "dmesg").model_copy(update={"complete": True})
    checks = {"gpu.xid", "nvswitch.sxid", "driver.log", "host.pcie-errors", "host.killed-processes"}
    return facts(hgx()).model_copy(update={"kernel_log": log}), checks


@cache
def found_in(name: str) -> list[Finding]:
    node, checks = node_with(name)
    return judge(node, Expectation(), only=checks)


def messages(findings: list[Finding], *statuses: Status) -> list[str]:
    return [
        f"{finding.check} [{finding.component}]: {finding.message}"
        for finding in findings
        if finding.status in statuses
    ]


@pytest.mark.parametrize("name", each(name for name in names() if name not in FAULTY))
def test_a_healthy_capture_has_no_fault(name: str) -> None:
    findings = found_in(name)
    assert messages(findings, Status.FAIL) == []
    if name not in IN_PART:
        # Models that the catalog does not have are undetermined, and that alone.
        allowed = {"gpu.model", *({"gpu.persistence"} if name in WINDOWS else ())}
        errors = [finding for finding in findings if finding.check not in allowed]
        assert messages(errors, Status.ERROR) == []


@pytest.mark.parametrize("name", each(FAULTY))
def test_a_faulty_capture_has_the_fault_that_it_has(name: str) -> None:
    findings = found_in(name)
    for check, status, words in FAULTY[name]:
        matching = [finding for finding in findings if finding.check == check and words in finding.message]
        assert {finding.status for finding in matching} == {status}, messages(findings, Status.FAIL, Status.WARN)
        assert all(finding.remedy for finding in matching)
    known = {check for check, status, _ in FAULTY[name] if status is Status.FAIL}
    assert {finding.check for finding in findings if finding.status is Status.FAIL} == known


@pytest.mark.captures("dmesg/azure-1dev_6flap_syslog.txt", "dmesg/gpud-pstore-dmesg.txt")
def test_links_that_went_up_and_down() -> None:
    flaps = [event for line in read("dmesg/azure-1dev_6flap_syslog.txt").splitlines() if (event := rdma.event_of(line))]
    assert [(event.interface, event.up) for event in flaps] == [("ib6", False)] * 6 + [("ib6", True)] * 6
    lines = read("dmesg/gpud-pstore-dmesg.txt").splitlines()
    (up,) = [event for line in lines if (event := rdma.event_of(line))]
    assert (up.interface, up.slot, up.up) == ("enp65s0f0np0", "0000:41:00.0", True)


@pytest.mark.captures(*names())
def test_the_tally(capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counter(finding.status.value for name in names() for finding in found_in(name))
    healthy = [name for name in names() if name not in FAULTY]
    with capsys.disabled():
        print(f"\n{len(names())} captures judged: {len(healthy)} healthy, {len(FAULTY)} faulty; {dict(counts)}")
    assert set(FAULTY) <= set(names())
    assert counts["pass"] > 1000
