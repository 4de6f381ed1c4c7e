"""The main job, from end to end: a bare lab node gets NVIDIA's real driver packages, and is judged.

Exits 0 when what was shown is what this script says it would be, 1 when it is not.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BIN = Path(__file__).resolve().parents[1] / ".venv" / "bin"
LAB = "demo"

# What is true of a Debian node with the driver packages, a kernel of its own and no GPU. `driver.module-built`
# also has a `skip`: the running kernel is the host's, which belongs to no package of the node.
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


def step(title: str, *argv: str, limit_s: float) -> int:
    """Show a command, run it with its output straight through, return its exit code."""
    print(f"\n=== {title}\n$ gpunode {' '.join(argv)}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen([BIN / "gpunode", *argv])
    try:
        rc = process.wait(timeout=limit_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        # Each verb cleans up after itself on an interrupt; from a terminal it has had the same Ctrl-C.
        process.terminate()
        process.wait(timeout=60)
        raise
    print(f"--- exit {rc} after {time.monotonic() - started:.0f} s", flush=True)
    return rc


def statuses(report: dict[str, Any]) -> dict[str, set[str]]:
    """Check id to the statuses it came to on the one node of the report."""
    found: dict[str, set[str]] = {}
    for finding in report["nodes"][0]["findings"]:
        found.setdefault(finding["check"], set()).add(finding["status"])
    return found


def surprises(report: dict[str, Any]) -> list[str]:
    """How the report differs from what this demo promises."""
    found = statuses(report)
    wrong = [
        f"{check}: {', '.join(sorted(found.get(check, {'nothing'})))} where {', '.join(sorted(wanted))} was promised"
        for check, wanted in TRUE_HERE.items()
        if found.get(check) != wanted
    ]
    return wrong + [f"{check}: fail" for check, seen in found.items() if "fail" in seen and check not in TRUE_HERE]


def main() -> int:
    if step("A bare Debian node", "lab", "up", "--name", LAB, "-n", "1", "--os", "debian-12", limit_s=900):
        return 1
    asked = [str(BIN / "gpunode"), "lab", "inventory", "--path", "--name", LAB]
    inventory = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    provision = ("provision", "-i", inventory)
    if step("The stack: NVIDIA's driver, built for the node's kernel", *provision, limit_s=1800):
        return 1
    with tempfile.TemporaryDirectory(prefix="gpunode-demo-") as folder:
        target = f"{folder}/report.json"
        outputs = ("--format", "console", "--output", "-", "--format", "json", "--output", target)
        rc = step("The verdict", "validate", "-i", inventory, *outputs, limit_s=300)
        report = json.loads(Path(target).read_text(encoding="utf-8"))

    wrong = surprises(report)
    if rc != 3:
        wrong.append(f"validate came to exit {rc} where 3 was promised")
    if wrong:
        print("\nThis is not what the demo promises:", *wrong, sep="\n  ")
        return 1
    print(f"""
This is as promised. The driver is installed, built for the node's kernel, of one version and one origin, and held.
The node has no GPU, so nothing was proven about one: exit 3, could not be determined.

What next:
  {BIN}/gpunode lab ssh --name {LAB} NODE           look around (names: gpunode lab status --name {LAB})
  {BIN}/gpunode provision -i {inventory}
                                                    once more: it changes nothing
  {BIN}/gpunode lab down --name {LAB}               take the node away
  inventory/ and docs/getting-started.md            your own servers""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
