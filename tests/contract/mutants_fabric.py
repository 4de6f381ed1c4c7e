# ruff: noqa: E501 - lines are as long as the tools print them
"""Mutants of the checks on processors, power, RDMA adapters beside each other, the BMC, and Xids that belong together."""

from bundles import (
    GONE,
    Edit,
    Missing,
    Mutant,
    cut,
    garbled,
    grace,
    guest,
    hgx,
    hgx_4,
    hgx_b200,
    not_run,
    stdout,
    t4,
    text,
    timed_out,
)
from machines import PCI
from mutants_gpu import tag

from gpunode.checks import Expectation, Status

WARN = Status.WARN
CPUS = "/sys/devices/system/cpu/"
NODES = "/sys/devices/system/node/"
HCA = "/sys/class/infiniband/mlx5_1/"
VERSION, OPEN, CLOSED = "/proc/driver/nvidia/version", "Open Kernel Module for x86_64", "x86_64 Kernel Module"
BOOT = "2026-11-20T09:00:00+0000 n kernel: Linux version 6 (simulated)\n"
UP = "2026-11-20T09:00:09+0000 hgx-h100-8 kernel: mlx5_core 0000:3c:00.0 ib1: Link up\n"
LINK = "2026-11-20T{time}+0000 n kernel: mlx5_core 0000:3c:00.0 ib1: Link {word}\n"
LONG = UP + LINK.format(time="10:00:00", word="down") + LINK.format(time="10:00:31", word="up")
SHORT = UP + "".join(
    LINK.format(time=f"10:0{minute}:00", word="down") + LINK.format(time=f"10:0{minute}:04", word="up")
    for minute in range(5)
)
NVLINK = "NVRM: Xid (PCI:0000:19:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 14({registers})"
XID = "2026-11-{day}T{time}+0000 n kernel: NVRM: Xid (PCI:0000:19:00): {xid}, pid=4242, name=python, {text}\n"
EARLIER = BOOT.replace("-20T", "-18T") + "{xids}" + BOOT
OFF = "GPU has fallen off the bus."
AGAIN = EARLIER.replace("-18T", "-17T").format(
    xids=XID.format(day=17, time="10:00:00", xid=48, text="DBE")
) + EARLIER.format(xids=XID.format(day=18, time="10:00:00", xid=48, text="DBE"))


def xid_74(registers: str, times: int = 1) -> str:
    """A log with that line of Xid 74, as often, within seconds."""
    return BOOT + "".join(
        f"2026-11-20T10:00:0{second}+0000 n kernel: {NVLINK.format(registers=registers)}\n" for second in range(times)
    )


def draws(power: str) -> list[Edit]:
    """GPU 0 draws that power."""
    return [tag(f"{name}_power_draw", "71.50 W", power) for name in ("average", "instant")]


EFA = "PCI_CLASS=20000\nPCI_ID=1D0F:EFA2\nPCI_SUBSYS_ID=1D0F:EFA2\nPCI_SLOT_NAME=0000:3c:00.0\n"
CONF = "/proc/sys/net/ipv4/conf/"
ONE_NETWORK = text("/proc/net/route", "rail1\t0001090A", "rail1\t0000090A")

MUTANTS = [
    Mutant("host.cpus-online", "one is offline", hgx, [text(CPUS + "online", None, "0-99,101-223\n")]),
    Mutant(
        "host.cpus-online",
        "the command line leaves half out",
        hgx,
        [text(CPUS + "online", None, "0-111\n"), text("/proc/cmdline", " ro\n", " ro maxcpus=112\n")],
        becomes=WARN,
    ),
    Mutant(
        "host.cpus-online",
        "one that was added to a guest is offline",
        guest,
        [text(CPUS + "present", None, "0-16\n"), text(CPUS + "possible", None, "0-63\n")],
        becomes=WARN,
    ),
    Mutant(
        "host.numa-nodes",
        "three nodes for two sockets",
        hgx,
        [text(NODES, None, "node0\nnode1\nnode2\n"), text(NODES + "node2/cpulist", None, "224-255\n")],
        becomes=WARN,
    ),
    Mutant(
        "host.numa-nodes",
        "a part of the GPU's memory is missing",
        grace,
        [
            text(NODES, None, "node0\nnode1\nnode2\n"),
            text(NODES + "node1/cpulist", None, "\n"),
            text(NODES + "node2/cpulist", None, "\n"),
        ],
    ),
    Mutant("gpu.power-draw", "next to nothing", hgx, draws("3.10 W"), becomes=WARN),
    Mutant("gpu.power-draw", "more than the board takes", hgx, draws("1400.00 W"), becomes=WARN),
    Mutant(
        "gpu.power-state",
        "slow under load",
        hgx,
        [tag("performance_state", "P0", "P8"), tag("gpu_util", "0 %", "97 %")],
        becomes=WARN,
    ),
    Mutant("rdma.flaps", "half a minute without a link", hgx, [stdout("journal-links", UP, LONG)]),
    Mutant("rdma.flaps", "up and down", hgx, [stdout("journal-links", UP, SHORT)]),
    Mutant(
        "rdma.flaps",
        "on an adapter that may be for storage",
        hgx,
        [stdout("journal-links", UP, LONG), text(HCA + "ports/1/link_layer", None, "Ethernet\n")],
        becomes=WARN,
    ),
    Mutant(
        "rdma.flaps",
        "a log that does not reach back",
        hgx,
        [stdout("journal-links", "Linux version", "a version")],
        becomes=WARN,
    ),
    Mutant(
        "rdma.peers",
        "a card without its port",
        hgx,
        [Edit(("files", path), None, GONE) for path in hgx()["files"] if path.startswith(HCA + "ports/")],
    ),
    Mutant("rdma.adapters", "no driver took it", hgx, [text("/sys/class/infiniband/", "mlx5_1\n", "")]),
    Mutant(
        "rdma.adapters",
        "an Elastic Fabric Adapter without its driver",
        hgx,
        [text("/sys/class/infiniband/", "mlx5_1\n", ""), text(PCI + "0000:3c:00.0/uevent", None, EFA)],
    ),
    Mutant(
        "rdma.adapters",
        "gone from the bus since the boot",
        hgx,
        [stdout("journal-links", UP, UP + UP.replace("0000:3c:00.0 ib1", "0000:77:00.0 ib9"))],
    ),
    Mutant("rdma.mtu", "one interface differs", hgx, [text("/sys/class/net/ib1/mtu", None, "2044\n")], becomes=WARN),
    Mutant(
        "rdma.flow-control",
        "one interface without PFC",
        hgx_4,
        [stdout("dcb-pfc-rail1", "3:on", "3:off")],
        becomes=WARN,
    ),
    Mutant(
        "rdma.flow-control",
        "one interface that heeds no marks",
        hgx_4,
        [text("/sys/class/net/rail1/ecn/roce_np/enable/3", None, "0\n")],
        becomes=WARN,
    ),
    Mutant(
        "rdma.flow-control",
        "one interface without the priority of the code point",
        hgx_4,
        [stdout("dcb-app-rail1", "26:3 ", "")],
        becomes=WARN,
    ),
    Mutant(
        "rdma.flow-control",
        "one interface with another traffic class of RDMA CM",
        hgx_4,
        [text("/sys/kernel/config/rdma_cm/mlx5_1/ports/1/default_roce_tos", None, "0\n")],
        becomes=WARN,
    ),
    Mutant("rdma.routes", "two rails in one network, with a strict filter", hgx_4, [ONE_NETWORK]),
    Mutant(
        "rdma.routes",
        "a rule for one of them alone",
        hgx_4,
        [ONE_NETWORK, stdout("ip-rules", "32766:", "32764:\tfrom 10.9.0.7 lookup 101\n32766:")],
    ),
    Mutant(
        "rdma.routes",
        "two rails in one network, with a loose filter",
        hgx_4,
        [ONE_NETWORK, text(f"{CONF}rail0/rp_filter", None, "2\n"), text(f"{CONF}rail1/rp_filter", None, "2\n")],
        becomes=WARN,
    ),
    Mutant("rdma.gpudirect", "the proprietary modules", hgx, [text(VERSION, OPEN, CLOSED)], becomes=WARN),
    Mutant("rdma.devices", "no uverbs device", hgx, [text("/sys/class/infiniband_verbs/", "uverbs1\n", "")]),
    Mutant("rdma.devices", "no file for it", hgx, [stdout("rdma-nodes", "/dev/infiniband/umad1\tcharacter\n", "")]),
    Mutant("rdma.firmware", "one differs", hgx, [text(HCA + "fw_ver", None, "28.35.2000\n")], becomes=WARN),
    Mutant(
        "rdma.firmware",
        "one that the site does not allow",
        hgx,
        [text(HCA + "fw_ver", None, "28.35.2000\n")],
        expect=Expectation(nic_firmware=["28.39.1002", "28.41.1000"]),
    ),
    Mutant(
        "bmc.events",
        "a power supply lost its input, and that is not over",
        t4,
        [stdout("ipmi-events", "AC lost | Deasserted", "AC restored | Asserted")],
        becomes=WARN,
    ),
    Mutant("bmc.fans", "one stands still", t4, [stdout("ipmi-fans", "5500 RPM", "0 RPM")]),
    Mutant("bmc.fans", "one is below its limit", t4, [stdout("ipmi-fans", "42h | ok ", "42h | nc ")], becomes=WARN),
    Mutant(
        "bmc.power-supplies",
        "one failed",
        t4,
        [stdout("ipmi-power-supplies", "10.2 | Presence detected", "10.2 | Presence detected, Failure detected")],
    ),
    Mutant(
        "bmc.power-supplies",
        "no reserve",
        t4,
        [
            stdout(
                "ipmi-power-supplies",
                "PS2 Status       | C9h | ok  | 10.2 | Presence detected",
                "Power Supplies   | 08h | ok  | 10.3 | Non-Redundant: Sufficient from Redundant",
            )
        ],
        becomes=WARN,
    ),
    Mutant(
        "gpu.xid",
        "NVLink: possibly hardware",
        hgx,
        [stdout("journal-kernel", None, xid_74("0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0"))],
    ),
    Mutant(
        "gpu.xid",
        "NVLink: parity, once",
        hgx,
        [stdout("journal-kernel", None, xid_74("0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0"))],
        becomes=WARN,
    ),
    Mutant(
        "gpu.xid",
        "NVLink: parity, again and again on one link",
        hgx,
        [stdout("journal-kernel", None, xid_74("0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", times=3))],
    ),
    Mutant(
        "gpu.xid",
        "power smoothing is off",
        hgx_b200,
        [stdout("journal-kernel", None, BOOT + XID.format(day=20, time="10:00:00", xid=163, text="PSHC"))],
        becomes=WARN,
    ),
    Mutant(
        "gpu.xid-earlier",
        "before the boot",
        hgx,
        [stdout("journal-xids", None, EARLIER.format(xids=XID.format(day=18, time="10:00:00", xid=79, text=OFF)))],
        becomes=WARN,
    ),
    Mutant("gpu.xid-earlier", "in two boots", hgx, [stdout("journal-xids", None, AGAIN)]),
    Mutant(
        "nvlink.speed",
        "at the data sheet's rate, not the line's",
        hgx_b200,
        [stdout("nvidia-smi-nvlink", "Link 5: 53.125 GB/s", "Link 5: 50 GB/s")],
        becomes=WARN,
    ),
]

MISSING: Missing = {
    "host.cpus-online": [(hgx, [text(CPUS + "online", None, None)]), (hgx, [text(CPUS + "present", None, "some\n")])],
    "host.numa-nodes": [(hgx, [text(PCI, None, None)]), (hgx, cut("lscpu"))],
    "gpu.power-draw": [(hgx, draws("N/A")), (hgx, cut("nvidia-smi-xml"))],
    "gpu.power-state": [(hgx, [tag("performance_state", "P0", "Unknown")])],
    "rdma.flaps": [(hgx, timed_out("journal-links")), (hgx, garbled("journal-links", ""))],
    "rdma.peers": [(hgx, [text(HCA + "ports/1/state", None, None)])],
    "rdma.adapters": [(hgx, [text(PCI, None, None)])],
    "rdma.mtu": [(hgx, [text("/sys/class/net/ib1/mtu", None, None)]), (hgx, [text("/sys/class/net/", None, None)])],
    "rdma.flow-control": [(hgx_4, [text("/sys/class/net/", None, None)]), (hgx_4, [not_run("dcb-pfc-rail1")])],
    "rdma.routes": [
        (hgx_4, garbled("ip-rules")),
        (hgx_4, timed_out("ip-rules")),
        (hgx_4, [text("/proc/net/route", None, None)]),
        (hgx_4, [ONE_NETWORK, text(f"{CONF}rail1/rp_filter", None, None)]),
    ],
    "rdma.gpudirect": [(hgx, [text(VERSION, None, "garbage\n")])],
    "rdma.devices": [(hgx, [not_run("rdma-nodes")]), (hgx, garbled("rdma-nodes"))],
    "rdma.firmware": [(hgx, [text(HCA + "fw_ver", None, None)])],
    "bmc.events": [(t4, timed_out("ipmi-events")), (t4, [not_run("ipmi-devices")])],
    "bmc.fans": [(t4, garbled("ipmi-fans")), (t4, timed_out("ipmi-fans"))],
    "bmc.power-supplies": [(t4, garbled("ipmi-power-supplies")), (t4, cut("ipmi-power-supplies"))],
    "gpu.xid-earlier": [(hgx, timed_out("journal-xids")), (hgx, [not_run("journal-xids")])],
}
