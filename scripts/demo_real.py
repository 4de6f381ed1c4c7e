"""The main use case with real packages, end to end: install NVIDIA's real driver packages on a bare lab node, and
validate it.

Exits 0 if the result is the expected one, 1 if it is not, 3 if a step failed.
"""

from __future__ import annotations

from typing import Any

from demo_steps import BIN, LOGS, Demo, run, shown, statuses

LAB = "demo-real"
NODE = "deb12-1"

# Expected on a Debian node with the driver packages, a kernel of its own and no GPU. `driver.module-built` also has a
# `skip`: the running kernel is the host's, which no package of the node owns.
TRUE_HERE = {
    "node.reachable": {"pass"},
    "gpu.present": {"error"},
    "driver.module-built": {"pass", "skip"},
    "driver.module-loaded": {"skip"},
    "driver.library-matches-module": {"skip"},
    "driver.closure": {"pass"},
    "driver.held": {"pass"},
    "driver.origin": {"pass"},
    "driver.nouveau": {"pass"},
    "gpu.count": {"skip"},
    "gpu.persistence": {"skip"},
    "node.units-failed": {"pass"},
}


def surprises(report: dict[str, Any]) -> list[str]:
    """Return how the report differs from the expected one."""
    actual = statuses(report, NODE)
    wrong = [
        f"{check}: {', '.join(sorted(actual.get(check, {'nothing'})))} where {', '.join(sorted(expected))} was expected"
        for check, expected in TRUE_HERE.items()
        if actual.get(check) != expected
    ]
    return wrong + [f"{check}: fail" for check, seen in actual.items() if "fail" in seen and check not in TRUE_HERE]


def main() -> int:
    print(f"NVIDIA's real driver on a bare Debian node; what the commands print is in {shown(LOGS)}/.")
    demo = Demo(LAB, 4)
    demo.prepare("Docker engine and virtual environment")
    demo.nodes("a bare Debian node", "-n", "1", "--os", "debian-12")
    demo.marker.unlink(missing_ok=True)
    inventory = demo.inventory
    provision = ("provision", "-i", inventory, "-e", "nvidia_driver_source=debian")
    demo.gpunode("provisioning: NVIDIA's driver, built for the node's kernel", *provision, limit_s=1800)
    rc, report = demo.verdict("validating", "-i", inventory, "--level", "quick")
    wrong = surprises(report)
    if rc != 3:
        wrong.append(f"validate exited with {rc}, expected 3")
    code = demo.finished(wrong)
    if code:
        return code
    print(f"""
The result is as expected. The driver is installed, built for the node's kernel, of one version and origin, and held.
The node has no GPU, so nothing was determined about one: exit 3, undetermined.

What next:
  {BIN}/gpunode lab ssh --name {LAB} NODE           look around (names: gpunode lab status --name {LAB})
  {BIN}/gpunode {" ".join(provision)}
                                                    once more: it changes nothing
  {BIN}/gpunode lab down --name {LAB}               take the node away
  inventory/ and docs/getting-started.md            your own servers""")
    return 0


if __name__ == "__main__":
    run(main, "demo-real")
