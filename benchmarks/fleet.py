# ruff: noqa: T201 (output is its purpose)
"""Measure the controller's cost of querying many nodes: gpunode, clush, pdsh, Ansible and plain Fabric, in one run.

All of them call the same real sshds on this machine's loopback (tests/fleet/endpoints.py), 32 nodes at a time, and
each node answers with a bundle of its own. Programs in Python find their modules compiled, as an installed program
does, independent of PYTHONDONTWRITEBYTECODE. gpunode sends its probe and reads the answers; ``validate`` judges them as
well; the others fetch the same text by a command that sends nothing. The sshds run on the same machine, so the elapsed
time includes theirs: compare processor time and memory.

    python benchmarks/fleet.py [--nodes 94] [--rounds 3]

pdsh is measured if it is installed (apt-get install pdsh).
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "fleet"))

from endpoints import SSHD, Endpoints, endpoints  # noqa: E402
from fleet_bundles import healthy  # noqa: E402
from measure import Cost, machine, measured, with_bytecode  # noqa: E402

from gpunode.names import fold  # noqa: E402

BIN = Path(sys.executable).parent
PARALLEL = "32"
LIMIT_S = 600.0
COMMAND = "python3 -I -"


@dataclass(frozen=True)
class Tool:
    """One tool that queries all nodes. ``in_stdout`` False: the answers are written to files."""

    name: str
    argv: list[str | Path]
    env: Mapping[str, str] = field(default_factory=dict)
    in_stdout: bool = True


def tools(standing: Endpoints, names: Sequence[str], folder: Path) -> list[Tool]:
    """Return the tools installed on this machine, with their commands for these nodes."""
    config = standing.ssh_config
    hosts: list[str | Path] = ["-i", standing.inventory, "--limit", ",".join(names)]
    installed = [
        Tool(
            "gpunode collect",
            [BIN / "gpunode", "collect", *hosts, "--parallel", PARALLEL, "--save", folder],
            in_stdout=False,
        ),
        Tool(
            "gpunode validate",
            [BIN / "gpunode", "validate", "--level", "quick", *hosts, "--parallel", PARALLEL, "--format", "json"],
            in_stdout=False,
        ),
        Tool(
            "plain Fabric",
            [sys.executable, ROOT / "benchmarks" / "plain_fabric.py", config, COMMAND, *names],
        ),
        Tool("clush", [BIN / "clush", "-q", "-f", PARALLEL, "-w", fold(names), "--options", f"-F {config}", COMMAND]),
        Tool(
            "ansible -m raw",
            [BIN / "ansible", "all", *hosts, "-f", PARALLEL, "-m", "ansible.builtin.raw", "-a", COMMAND],
            # A master connection would outlive the run, and its cost would be missing.
            {"ANSIBLE_SSH_ARGS": f"-F {config} -o ControlMaster=no", "ANSIBLE_SSH_USETTY": "False"},
        ),
    ]
    pdsh = shutil.which("pdsh")
    if pdsh is None:
        print("pdsh is not installed and was not measured", file=sys.stderr)
        return installed
    argv: list[str | Path] = [pdsh, "-R", "ssh", "-f", PARALLEL, "-w", ",".join(names), COMMAND]
    return [*installed, Tool("pdsh", argv, {"PDSH_SSH_ARGS_APPEND": f"-F {config}"})]


def run(tool: Tool, nodes: int, folder: Path, env: Mapping[str, str]) -> Cost:
    """Measure one run; SystemExit if not every node's answer arrived."""
    shutil.rmtree(folder, ignore_errors=True)
    cost = measured(tool.argv, timeout_s=LIMIT_S, env={**env, **tool.env})
    answers = cost.stdout.count("gpunode.bundle/1") if tool.in_stdout else nodes
    if cost.rc != 0 or answers != nodes:
        raise SystemExit(f"{tool.name}: exit {cost.rc}, {answers} of {nodes} answers\n{cost.stderr[-2000:]}")
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=94, help="two or more")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    if SSHD is None:
        raise SystemExit("no sshd on this machine: apt-get install openssh-server")
    names = [f"gpu-{number:03d}" for number in range(1, chosen.nodes + 1)]
    bundles = {name: healthy(number, name) for number, name in enumerate(names, start=1)}
    size = statistics.mean(len(text.encode()) for text in bundles.values()) / 1024
    costs: dict[str, list[Cost]] = {}
    starts: dict[str, list[Cost]] = {}
    with tempfile.TemporaryDirectory(prefix="gpunode-benchmark-") as folder:
        saved = Path(folder) / "saved"
        sshds = Path(folder) / "sshds"
        sshds.mkdir()
        env = with_bytecode(Path(folder) / "bytecode")
        with endpoints(sshds, bundles, {}) as standing:
            for tool in tools(standing, names[:1], saved):  # so that all bytecode is there
                run(tool, 1, saved, env)
            for number in range(chosen.rounds):
                print(f"round {number + 1} of {chosen.rounds}", file=sys.stderr)
                for tool in tools(standing, names[:1], saved):
                    starts.setdefault(tool.name, []).append(run(tool, 1, saved, env))
                for tool in tools(standing, names, saved):
                    costs.setdefault(tool.name, []).append(run(tool, len(names), saved, env))
    print(f"{len(names)} nodes, {size:.0f} KiB each, {PARALLEL} at a time, median of {chosen.rounds} rounds,", end=" ")
    print("bytecode compiled before;", end=" ")
    print(f"{datetime.now(UTC):%Y-%m-%d}, {machine()}\n")
    print("| | one node | each further node | memory at most | elapsed |")
    print("|---|---|---|---|---|")
    for name, runs in costs.items():
        start, cpu = _median(starts[name], "cpu_s"), _median(runs, "cpu_s")
        further = (cpu - start) / (len(names) - 1)
        memory, wall = _median(runs, "memory_mib"), _median(runs, "wall_s")
        print(f"| {name} | {1000 * start:.0f} ms | {1000 * further:.0f} ms | {memory:.0f} MiB | {wall:.1f} s |")


def _median(costs: Sequence[Cost], key: str) -> float:
    return statistics.median(float(getattr(cost, key)) for cost in costs)


if __name__ == "__main__":
    main()
