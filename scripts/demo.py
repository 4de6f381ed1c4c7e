"""The main use case, end to end, on simulated GPU servers: write a site from a first look at bare nodes, provision
them, break one, and let validate find the fault.

Exits 0 if the result is the expected one, 1 if it is not, 3 if a step failed.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

from demo_steps import BIN, GPUNODE, LOGS, Demo, quiet, run, shown, statuses

LAB = "demo"
SITE = LOGS / "site"
"""What gpunode init writes: the inventory, and the settings of the example inference."""
HARDWARE = ("hgx-h100-8", "l40s-4", "t4-1")
HEALTHY = ("hgx-h100-8-1", "t4-1-1")
BROKEN = "l40s-4-1"
HARDENED = "t4-1-1"
"""The node with settings in force: SSH hardening, automatic updates and clocks. With all settings on all nodes, the
demo takes more than five minutes.
"""
AS_BEFORE: dict[str, Any] = {
    **dict.fromkeys(("accounts_state", "firewall_state", "ssh_hardening_state", "updates_state"), "keep"),
    "dcgm_state": "absent",
    "gpu_settings_rules": [],
    "gpunode_profile": "training",
}
NOT_IN_FORCE = {
    HARDENED: {"accounts_state": "keep", "firewall_state": "keep"},
    "hgx-h100-8-1": AS_BEFORE,
    BROKEN: AS_BEFORE,
}
"""Node to the variables that leave settings of the site as they are on it."""
FAULT = (BROKEN, "gpu2", "pcie-narrow")
FOUND_BY = "link.pcie-width"
"""The only check that fails because of the fault."""
WRONG = {"fail", "error"}
# Checks that have to pass, so that a node of which nothing was read is not taken for a healthy one.
EVERYWHERE = {
    *("container.cdi", "container.runtime", "driver.closure", "driver.held", "driver.library-matches-module"),
    *("driver.module-built", "driver.module-loaded", "gpu.answers", "gpu.persistence", "gpu.present", "host.limits"),
    *("host.ssh-settings", "link.pcie-speed", "link.pcie-width", "node.units-failed"),
}
OF_NVSWITCHES = {
    *("fabric.manager", "fabric.manager-version", "fabric.state", "link.topology", "nvlink.count", "nvlink.state"),
    *("rdma.gpudirect", "rdma.ports"),
}
OF_SETTINGS = {"driver.automatic-updates", "gpu.settings", "node.security-updates"}
PASS = {"hgx-h100-8-1": EVERYWHERE | OF_NVSWITCHES, "l40s-4-1": EVERYWHERE, "t4-1-1": EVERYWHERE | OF_SETTINGS}


def passed_checks(report: dict[str, Any], host: str) -> set[str]:
    """Return the checks that passed on a node for all that they judged."""
    return {check for check, seen in statuses(report, host).items() if "pass" in seen and not seen & WRONG}


def wrong_checks(report: dict[str, Any], host: str) -> set[str]:
    """Return the checks that failed on a node, or could not be determined."""
    return {check for check, seen in statuses(report, host).items() if seen & WRONG}


def surprises(report: dict[str, Any], rc: int, *, broken: bool) -> list[str]:
    """Return how a report differs from the expected one."""
    expected = {host: set[str]() for host in HEALTHY} | {BROKEN: {FOUND_BY} if broken else set()}
    wrong = []
    for host, checks in expected.items():
        if wrong_checks(report, host) != checks:
            seen = ", ".join(sorted(wrong_checks(report, host))) or "nothing"
            wrong.append(f"{host}: {seen} failed, expected {', '.join(checks) or 'nothing'}")
        if missing := PASS[host] - passed_checks(report, host) - checks:
            wrong.append(f"{host}: {', '.join(sorted(missing))} did not pass")
    if rc != int(broken):
        wrong.append(f"validate exited with {rc}, expected {int(broken)}")
    return wrong


def leave_out() -> None:
    """Write the variables of each node beside those of the site."""
    (SITE / "host_vars").mkdir()
    for node, values in NOT_IN_FORCE.items():
        # JSON is YAML, and there is no other writer before the virtual environment.
        lines = "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items())
        (SITE / "host_vars" / f"{node}.yml").write_text(f"---\n{lines}", encoding="utf-8")


def main() -> int:
    print(
        f"Three simulated GPU servers. The first run takes some minutes; what the commands print is in {shown(LOGS)}/."
    )
    demo = Demo(LAB, 7)
    demo.prepare("Docker engine and virtual environment")
    hardware = [part for name in HARDWARE for part in ("--hardware", name)]
    demo.nodes("three bare servers, their GPUs simulated", *hardware)
    for node in (*HEALTHY, BROKEN):
        quiet(GPUNODE, "lab", "fault", "--name", LAB, node, "--heal", limit_s=120)  # of an earlier demo
    demo.marker.unlink(missing_ok=True)
    shutil.rmtree(SITE, ignore_errors=True)  # of an earlier demo
    first_look = ("init", str(SITE), "-i", demo.inventory, "--example", "inference")
    demo.gpunode("a first look at them, which writes their site", *first_look, limit_s=300)
    leave_out()
    inventory = shown(SITE / "hosts.yml")
    provision = ("provision", "-i", inventory, "-e", "gpunode_reboot=when_needed")
    title = f"provisioning three nodes, {HARDENED} with SSH hardening, automatic updates and clocks"
    demo.gpunode(title, *provision, limit_s=1800)
    validate = ("-i", inventory, "--level", "quick")
    rc, report = demo.verdict("validating: three healthy nodes", *validate)
    wrong = surprises(report, rc, broken=False)
    demo.gpunode(f"a badly seated riser in {BROKEN}", "lab", "fault", "--name", LAB, *FAULT, limit_s=120)
    rc, report = demo.verdict("validating: two healthy nodes and one that is not", *validate)
    wrong += surprises(report, rc, broken=True)
    code = demo.finished(wrong)
    if code:
        return code
    print(f"""
The result is as expected: {FOUND_BY} names the GPU, the other nodes passed. The GPUs, the driver's tools and the
packages are simulated, and every report states that; apt, dkms, systemd and SSH are real.
The settings: {shown(SITE)}/group_vars/gpu_nodes.yml, with a line on each. host_vars/ beside it leaves some of them out,
to save minutes: without its files, a node gets the firewall, the accounts, DCGM and the rest too.
NVIDIA's real driver: make demo-real.

What next:
  {BIN}/gpunode lab ssh --name {LAB} {BROKEN}       look around: nvidia-smi, lspci, systemctl
  {BIN}/gpunode lab fault --name {LAB} {BROKEN} --list
                                                    what else can break
  {BIN}/gpunode {" ".join(provision)}
                                                    once more: it changes nothing
  {BIN}/gpunode lab down --name {LAB}               remove the nodes
  inventory/ and docs/getting-started.md            your own servers""")
    return 0


if __name__ == "__main__":
    run(main, "demo")
