"""Mutants of the checks on links: PCI Express, topology, NVLink, fabric, InfiniBand."""

from bundles import (
    Edit,
    Missing,
    Mutant,
    cut,
    garbled,
    hgx,
    hgx_4,
    hgx_b200,
    not_run,
    pcie_4,
    stdout,
    t4,
    text,
    timed_out,
)
from machines import HGX, PCI
from mutants_gpu import smi, tag

from gpunode.checks import Expectation, Status
from gpunode.lab.simulator import smi_links

WARN = Status.WARN
GPU0 = f"{PCI}0000:19:00.0/"
HCA = "/sys/class/infiniband/mlx5_1/ports/1/"
LINKS_OF_GPU7 = "".join(f"\t Link {link}: 26.562 GB/s\n" for link in range(18))
GPU7 = f"GPU 7: NVIDIA H100 80GB HBM3 (UUID: {HGX.uuids[7]})\n"

MUTANTS = [
    Mutant("link.pcie-width", "half the lanes", hgx, [text(GPU0 + "current_link_width", None, "8\n")]),
    Mutant(
        "link.pcie-width",
        "half the lanes below a port that reports nothing",
        t4,
        [
            text(f"{PCI}0000:3b:00.0/current_link_width", None, "8\n"),
            text(f"{PCI}0000:3a:01.0/max_link_width", None, "255\n"),
        ],
        becomes=WARN,
    ),
    Mutant(
        "link.pcie-speed",
        "trained at an older generation",
        hgx,
        [text(GPU0 + "current_link_speed", None, "8.0 GT/s PCIe\n")],
    ),
    Mutant(
        "link.pcie-replays",
        "far more than DCGM allows",
        hgx,
        [smi("<replay_counter>0<", "<replay_counter>99999999<")],
        becomes=WARN,
    ),
    Mutant(
        "link.topology",
        "a pair without NVLink",
        hgx,
        [
            stdout("nvidia-smi-topo", "GPU0\t X \tNV18", "GPU0\t X \tSYS"),
            stdout("nvidia-smi-topo", "GPU1\tNV18\t X ", "GPU1\tSYS\t X "),
        ],
    ),
    Mutant(
        "link.topology",
        "a pair without NVLink, and no NVSwitch",
        hgx_4,
        [
            stdout("nvidia-smi-topo", "GPU0\t X \tNV6", "GPU0\t X \tSYS"),
            stdout("nvidia-smi-topo", "GPU1\tNV6\t X ", "GPU1\tSYS\t X "),
        ],
    ),
    Mutant(
        "link.topology",
        "not the same in both directions",
        pcie_4,
        [stdout("nvidia-smi-topo", "GPU0\t X \tNODE", "GPU0\t X \tPHB")],
    ),
    Mutant("link.numa", "the firmware does not report it", hgx, [text(GPU0 + "numa_node", None, "-1\n")], becomes=WARN),
    Mutant(
        "link.p2p",
        "a pair on NVLink cannot reach each other",
        hgx,
        [
            stdout("nvidia-smi-p2p", " GPU0\tX\tOK", " GPU0\tX\tGNS"),
            stdout("nvidia-smi-p2p", " GPU1\tOK\tX", " GPU1\tGNS\tX"),
        ],
    ),
    Mutant(
        "link.p2p",
        "a pair on PCIe cannot reach each other",
        pcie_4,
        [
            stdout("nvidia-smi-p2p", " GPU0\tX\tOK", " GPU0\tX\tCNS"),
            stdout("nvidia-smi-p2p", " GPU1\tOK\tX", " GPU1\tCNS\tX"),
        ],
        becomes=WARN,
    ),
    Mutant(
        "nvlink.count",
        "one link less",
        hgx,
        [stdout("nvidia-smi-nvlink", "\t Link 17: 26.562 GB/s\n", "")],
    ),
    Mutant(
        "nvlink.state",
        "one link inactive",
        hgx,
        [stdout("nvidia-smi-nvlink", "Link 5: 26.562 GB/s", "Link 5: <inactive>")],
    ),
    Mutant(
        "nvlink.state",
        "all links of a GPU inactive, and none listed",
        hgx,
        [
            stdout(
                "nvidia-smi-nvlink",
                GPU7 + LINKS_OF_GPU7,
                f"{GPU7}{smi_links.ALL_INACTIVE}\n",
            )
        ],
    ),
    Mutant(
        "nvlink.speed",
        "one link slow",
        hgx,
        [stdout("nvidia-smi-nvlink", "Link 5: 26.562 GB/s", "Link 5: 13.281 GB/s")],
    ),
    Mutant(
        "nvlink.errors",
        "a link went down",
        hgx,
        [stdout("nvidia-smi-nvlink-errors", "Link 3: Recovery Errors: 0", "Link 3: Recovery Errors: 2")],
    ),
    Mutant(
        "nvlink.errors",
        "data was sent again",
        hgx,
        [stdout("nvidia-smi-nvlink-errors", "Link 3: Replay Errors: 0", "Link 3: Replay Errors: 7")],
        becomes=WARN,
    ),
    Mutant(
        "nvlink.errors",
        "a link of NVLink 5 did not come back",
        hgx_b200,
        [
            stdout(
                "nvidia-smi-nvlink-errors",
                "Link 3: Link recovery failed events: 0",
                "Link 3: Link recovery failed events: 1",
            )
        ],
    ),
    Mutant(
        "nvlink.errors",
        "a link of NVLink 5 has errors left after correction",
        hgx_b200,
        [stdout("nvidia-smi-nvlink-errors", "Link 3: Symbol Errors: 0", "Link 3: Symbol Errors: 4")],
        becomes=WARN,
    ),
    Mutant(
        "fabric.manager",
        "not active",
        hgx,
        [
            stdout(
                "systemctl-units",
                "Id=nvidia-fabricmanager.service\nLoadState=loaded\nActiveState=active\nSubState=running",
                "Id=nvidia-fabricmanager.service\nLoadState=loaded\nActiveState=inactive\nSubState=dead",
            )
        ],
    ),
    Mutant(
        "fabric.manager",
        "not installed",
        hgx,
        [
            stdout(
                "systemctl-units",
                "Id=nvidia-fabricmanager.service\nLoadState=loaded\nActiveState=active\nSubState=running",
                "Id=nvidia-fabricmanager.service\nLoadState=not-found\nActiveState=inactive\nSubState=dead",
            )
        ],
    ),
    Mutant(
        "fabric.manager",
        "no subnet manager, and no package of it",
        hgx_b200,
        [
            stdout(
                "systemctl-units",
                "Id=nvlsm.service\nLoadState=loaded\nActiveState=active\nSubState=running",
                "Id=nvlsm.service\nLoadState=not-found\nActiveState=inactive\nSubState=dead",
            )
        ],
    ),
    Mutant(
        "fabric.manager-version",
        "another version than the driver",
        hgx,
        [stdout("version-nv-fabricmanager", "580.95.05", "580.82.07")],
    ),
    Mutant("fabric.state", "not joined", hgx, [smi("<state>Completed</state>", "<state>In Progress</state>")]),
    Mutant(
        "fabric.state",
        "joining failed",
        hgx,
        [smi("<status>Success</status>", "<status>Insufficient Resources</status>")],
    ),
    Mutant("fabric.state", "bandwidth degraded", hgx, [tag("bandwidth", "N/A", "Degraded")]),
    Mutant(
        "rdma.ports",
        "no cable",
        hgx,
        [text(HCA + "state", None, "1: DOWN\n"), text(HCA + "phys_state", None, "2: Polling\n")],
    ),
    Mutant(
        "rdma.ports",
        "switched off",
        hgx,
        [text(HCA + "state", None, "1: DOWN\n"), text(HCA + "phys_state", None, "3: Disabled\n")],
        becomes=WARN,
    ),
    Mutant(
        "rdma.ports",
        "fewer than the site expects",
        hgx,
        [text(HCA + "state", None, "1: DOWN\n"), text(HCA + "phys_state", None, "3: Disabled\n")],
        expect=Expectation(nics=8),
    ),
    Mutant(
        "rdma.ports",
        "slower than the site expects",
        hgx,
        [text(HCA + "rate", None, "200 Gb/sec (4X HDR)\n")],
        expect=Expectation(nics=8, nic_rate_gbit_per_s=400),
    ),
    Mutant("rdma.errors", "the link was lost", hgx, [text(HCA + "counters/link_downed", None, "4\n")], becomes=WARN),
]

MISSING: Missing = {
    "link.pcie-width": [(hgx, [text(GPU0 + "max_link_width", None, None)]), (hgx, timed_out("systemd-detect-virt"))],
    "link.pcie-speed": [
        (hgx, [text(GPU0 + "current_link_speed", None, "Unknown\n")]),
        (hgx, cut("nvidia-smi-xml")),
    ],
    "link.pcie-replays": [
        (hgx, [smi("<replay_counter>0</replay_counter>", "")]),
        (hgx, [text("/proc/uptime", None, None)]),
    ],
    "link.topology": [(hgx, cut("nvidia-smi-topo")), (hgx, garbled("nvidia-smi-topo"))],
    "link.numa": [(hgx, [text(PCI, None, None)]), (pcie_4, timed_out("systemd-detect-virt"))],
    "link.p2p": [(hgx, [not_run("nvidia-smi-p2p")]), (hgx, garbled("nvidia-smi-p2p", "No devices were found\n"))],
    "nvlink.count": [
        (hgx, [stdout("nvidia-smi-nvlink", GPU7 + LINKS_OF_GPU7, "")]),
        (hgx, cut("nvidia-smi-nvlink")),
    ],
    "nvlink.state": [(hgx, [not_run("nvidia-smi-nvlink")]), (hgx, garbled("nvidia-smi-nvlink"))],
    "nvlink.speed": [(hgx, [stdout("nvidia-smi-nvlink", "Link 5: 26.562 GB/s", "Link 5: 26.562 GB")])],
    "nvlink.errors": [
        (hgx, cut("nvidia-smi-nvlink-errors")),
        (hgx, [stdout("nvidia-smi-nvlink-errors", None, "")]),
    ],
    "fabric.manager": [(hgx, timed_out("systemctl-units")), (hgx, [not_run("uname")])],
    "fabric.manager-version": [
        (hgx, cut("version-nv-fabricmanager")),
        (hgx, garbled("version-nv-fabricmanager")),
    ],
    "fabric.state": [
        (hgx, cut("nvidia-smi-xml")),
        (hgx, [Edit(("commands", "nvidia-smi-xml", "truncated"), None, True)]),
    ],
    "rdma.ports": [(hgx, [text(HCA + "state", None, None)])],
    "rdma.errors": [
        (
            hgx,
            [text(path, None, None) for path in hgx()["files"] if path.startswith((f"{HCA}counters/", f"{HCA}hw_"))],
        )
    ],
}
