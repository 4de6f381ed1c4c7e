"""The main job, from end to end, on simulated GPU servers: bare nodes get the stack, one is broken, validate finds it.

Exits 0 when what was shown is what this script says it would be, 1 when it is not.
"""

import sys
import tempfile
from typing import Any

from demo_steps import BIN, inventory, statuses, step, verdict

LAB = "demo"
HARDWARE = ("hgx-h100-8", "l40s-4", "t4-1")
HEALTHY = ("hgx-h100-8-1", "t4-1-1")
BROKEN = "l40s-4-1"
FAULT = (BROKEN, "gpu2", "pcie-narrow")
FOUND_BY = "link.pcie-width"
"""The check that the fault turns, and no other."""
WRONG = {"fail", "error"}
# What may be skipped, for want of something to look at: containers have no sensors, no BMC, no clock, no kernel and no
# journal of earlier boots of their own …
OF_A_CONTAINER = {
    *("driver.signed", "host.acs", "host.cpu-governor", "host.iommu", "host.memory-errors", "host.nvme", "host.time"),
    *("bmc.events", "bmc.fans", "bmc.power-supplies", "gpu.xid-earlier", "host.numa-nodes", "rdma.mtu"),
    *("host.kernel-settings", "rdma.flow-control"),
}
# … and cards without NVLink, NVSwitches and RDMA have none to judge.
OF_CARDS = {
    *("fabric.manager", "fabric.manager-version", "fabric.state", "gpu.mig", "nvswitch.sxid", "rdma.errors"),
    *("nvlink.count", "nvlink.errors", "nvlink.speed", "nvlink.state", "rdma.ports"),
    *("rdma.adapters", "rdma.devices", "rdma.firmware", "rdma.flaps", "rdma.gpudirect", "rdma.peers"),
}
# Of roles that do nothing without settings of their own.
NOT_ASKED_FOR = {
    *("gpu.settings", "host.firewall", "host.remote-data", "host.scratch", "host.tools", "node.security-updates"),
}
EVERYWHERE = OF_A_CONTAINER | NOT_ASKED_FOR
MAY_BE_SKIPPED = {
    "hgx-h100-8-1": EVERYWHERE | {"gpu.retired-pages"},
    "l40s-4-1": EVERYWHERE | OF_CARDS | {"gpu.retired-pages"},
    "t4-1-1": EVERYWHERE | OF_CARDS | {"gpu.remapped-rows", "gpu.vbios", "link.numa", "link.p2p", "link.topology"},
}


def skipped_checks(report: dict[str, Any], host: str) -> set[str]:
    """Checks that had nothing to look at on a node."""
    return {check for check, seen in statuses(report, host).items() if "skip" in seen}


def wrong_checks(report: dict[str, Any], host: str) -> set[str]:
    """Checks that are not in order on a node."""
    return {check for check, seen in statuses(report, host).items() if seen & WRONG}


def surprises(report: dict[str, Any], rc: int, *, broken: bool) -> list[str]:
    """How a report differs from what this demo promises."""
    promised = {host: set[str]() for host in HEALTHY} | {BROKEN: {FOUND_BY} if broken else set()}
    wrong = []
    for host, checks in promised.items():
        if "pass" not in statuses(report, host).get("gpu.count", set()) | statuses(report, host).get(
            "gpu.present", set()
        ):
            wrong.append(f"{host}: no GPU was seen")
        if wrong_checks(report, host) != checks:
            seen = ", ".join(sorted(wrong_checks(report, host))) or "nothing"
            wrong.append(f"{host}: {seen} is wrong where {', '.join(checks) or 'nothing'} was promised")
        if unexpected := skipped_checks(report, host) - MAY_BE_SKIPPED[host]:
            wrong.append(f"{host}: {', '.join(sorted(unexpected))} skipped, which was not promised")
    if rc != int(broken):
        wrong.append(f"validate came to exit {rc} where {int(broken)} was promised")
    return wrong


def main() -> int:
    hardware = [part for name in HARDWARE for part in ("--hardware", name)]
    if step("Three bare servers, their GPUs simulated", "lab", "up", "--name", LAB, *hardware, limit_s=1200):
        return 1
    place = inventory(LAB)
    provision = ("provision", "-i", place, "-e", "gpunode_reboot=when_needed")
    if step("The matched stack, from the lab's copy of NVIDIA's repository", *provision, limit_s=1800):
        return 1
    with tempfile.TemporaryDirectory(prefix="gpunode-demo-") as folder:
        validate = ("-i", place, "--level", "quick")
        rc, report = verdict("The verdict: three healthy nodes", folder, *validate)
        wrong = surprises(report, rc, broken=False)
        if step("Somebody seats a riser badly", "lab", "fault", "--name", LAB, *FAULT, limit_s=120):
            return 1
        rc, report = verdict("The verdict: two healthy nodes and one that is not", folder, *validate)
        wrong += surprises(report, rc, broken=True)
    if wrong:
        print("\nThis is not what the demo promises:", *wrong, sep="\n  ")
        return 1
    print(f"""
This is as promised: {FOUND_BY} names the GPU, the other nodes are in order. The GPUs, the driver's tools and the
packages are simulated, and every report states that; apt, dkms, systemd and SSH are real.
NVIDIA's real driver: make demo-real.

What next:
  {BIN}/gpunode lab ssh --name {LAB} {BROKEN}       look around: nvidia-smi, lspci, systemctl
  {BIN}/gpunode lab fault --name {LAB} {BROKEN} --list
                                                    what else can break
  {BIN}/gpunode {" ".join(provision)}
                                                    once more: it changes nothing
  {BIN}/gpunode lab down --name {LAB}               take the nodes away
  inventory/ and docs/getting-started.md            your own servers""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
