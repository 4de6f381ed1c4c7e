# ruff: noqa: T201 (output is its purpose)
"""Measure ``site.yml`` on provisioned nodes, compared with a play of 45 builtin tasks, in one run.

Both are run on the same lab nodes, one after the other, round by round: the play of builtin tasks shows the speed of
the machine. The first table compares them; the second has for each role its tasks, its module runs and its seconds.
``site.yml`` has the callbacks of ``gpunode provision``.

    python benchmarks/converge.py [--nodes 1] [--rounds 5] [--hardware t4-1] [--os debian-12] [--inventory FILE]
        [--variables FILE]

With ``--inventory`` existing provisioned nodes are used; without, lab nodes are created and removed.
``--variables`` is for ``site.yml``: benchmarks/hardened.yml has the roles that do nothing by default,
benchmarks/tuned.yml the settings of GPUs, environment and kernel.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from gpunode.content import ansible_environment
from gpunode.fleet.playbook import CALLBACKS
from gpunode.lab import Lab

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "playbooks" / "site.yml"
LIMIT_S = 2400
FOLDER = "/tmp/gpunode-converge"  # noqa: S108 - on lab nodes


def builtin_tasks() -> list[dict[str, Any]]:
    """Return 45 tasks similar to those of a hardening or monitoring role; on a second run nothing changes."""
    tasks: list[dict[str, Any]] = [{"file": {"path": FOLDER, "state": "directory", "mode": "0755"}}]
    names = [f"{FOLDER}/{number}.conf" for number in range(10)]
    tasks += [{"copy": {"content": f"setting = {name}\n", "dest": name, "mode": "0644"}} for name in names]
    tasks += [
        {"lineinfile": {"path": f"{FOLDER}/lines{number}", "line": "a = b", "create": True}} for number in range(4)
    ]
    tasks += [
        {"stat": {"path": path}} for path in ("/etc/passwd", "/etc/ssh/sshd_config", "/etc/fstab", "/boot", "/etc")
    ]
    tasks += [
        {"file": {"path": path, "mode": mode}} for path, mode in (("/etc/passwd", "0644"), ("/etc/shadow", "0640"))
    ]
    tasks += [{"file": {"path": f"{FOLDER}/d{number}", "state": "directory", "mode": "0700"}} for number in range(5)]
    tasks += [{"file": {"path": f"{FOLDER}/none{number}", "state": "absent"}} for number in range(3)]
    tasks += [{"slurp": {"src": path}} for path in ("/etc/hosts", "/etc/hostname")]
    tasks += [{"systemd_service": {"name": "ssh.service", "state": "started", "enabled": True}}]
    tasks += [{"command": {"argv": ["sysctl", "-n", key]}, "changed_when": False} for key in SYSCTLS]
    tasks += [
        {"getent": {"database": "passwd", "key": "root"}},
        {"group": {"name": "root"}},
        {"user": {"name": "root"}},
    ]
    tasks += [{"find": {"paths": "/etc/sudoers.d"}}, {"wait_for": {"port": 22, "timeout": 5}}]
    tasks += [{"blockinfile": {"path": f"{FOLDER}/block", "block": "a = 1\nb = 2", "create": True}}]
    tasks += [{"replace": {"path": names[1], "regexp": "nothing", "replace": "something"}}]
    return [
        {"name": f"{next(iter(task)).capitalize()} {number}", **{_full(key): value for key, value in task.items()}}
        for number, task in enumerate(tasks, start=1)
    ]


SYSCTLS = ("kernel.randomize_va_space", "net.ipv4.ip_forward", "vm.swappiness", "fs.file-max", "kernel.pid_max")


def _full(key: str) -> str:
    return key if key == "changed_when" else f"ansible.builtin.{key}"


@dataclass(frozen=True)
class Cost:
    """The cost of one run of a playbook."""

    seconds: float
    rows: tuple[dict[str, Any], ...]

    @property
    def changed(self) -> int:
        """Return the tasks that changed something, of all hosts."""
        return sum(sum(row["changed"].values()) for row in self.rows if "changed" in row)

    @property
    def tasks(self) -> int:
        """Return the tasks that started."""
        return sum("start" in row for row in self.rows)

    @property
    def modules(self) -> int:
        """Return the modules that ran on nodes."""
        return sum("module" in row for row in self.rows)

    def by_role(self) -> dict[str, tuple[int, int, float]]:
        """Return role to (tasks, module runs, seconds)."""
        starts = [row for row in self.rows if "start" in row]
        ends = [row["at"] for row in starts[1:]] + [row["end"] for row in self.rows if "end" in row]
        of_task = {row["start"]: row["role"] or "(playbook)" for row in starts}
        by_role: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        for row, end in zip(starts, ends, strict=False):
            cell = by_role[of_task[row["start"]]]
            cell[0] += 1
            cell[2] += end - row["at"]
        for row in self.rows:
            if "module" in row:
                by_role[of_task.get(row["task"], "(playbook)")][1] += 1
        return {role: (int(cell[0]), int(cell[1]), cell[2]) for role, cell in by_role.items()}


def run(playbook: Path, inventory: str, *more: str) -> Cost:
    """Run a playbook and return its cost; a failed run ends the benchmark."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as costs:
        environment = {
            **ansible_environment(),
            "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "benchmarks" / "callback"),
            "ANSIBLE_CALLBACKS_ENABLED": f"converge_costs,{CALLBACKS}" if playbook == SITE else "converge_costs",
            "ANSIBLE_NOCOLOR": "1",
            "CONVERGE_COSTS": costs.name,
        }
        program = Path(sys.executable).with_name("ansible-playbook")
        argv = [str(program), "-i", inventory, str(playbook), *more]
        began = time.monotonic()
        done = subprocess.run(
            argv,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            start_new_session=True,
        )
        seconds = time.monotonic() - began
        if done.returncode != 0:
            raise SystemExit(
                f"{playbook.name} ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
            )
        rows = tuple(json.loads(line) for line in Path(costs.name).read_text(encoding="utf-8").splitlines())
    return Cost(seconds, rows)


@contextmanager
def nodes(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the inventory of provisioned nodes."""
    if arguments.inventory:
        yield arguments.inventory
        return
    lab = Lab(f"converge-{os.getpid()}")
    try:
        lab.up(arguments.nodes, arguments.os, arguments.hardware)
        inventory = str(lab.inventory_path)
        first = run(SITE, inventory, "-e", "gpunode_reboot=when_needed", *arguments.variables)
        print(f"provisioned in {first.seconds:.0f} s, {first.tasks} tasks, {first.modules} module runs\n", flush=True)
        yield inventory
    finally:
        lab.down()


def measured(builtin: Path, inventory: str, rounds: int, variables: Sequence[str]) -> dict[str, list[Cost]]:
    """Run both in turn; the first run of each, which fills caches and writes files, is not counted."""
    runs: dict[str, list[Cost]] = {"site.yml": [], "45 builtin tasks": []}
    for number in range(rounds + 1):
        for name, playbook, more in (("site.yml", SITE, variables), ("45 builtin tasks", builtin, ())):
            cost = run(playbook, inventory, *more)
            print(f"round {number}: {name}: {cost.seconds:.1f} s, changed={cost.changed}", flush=True)
            if number:
                runs[name].append(cost)
    return runs


def table(runs: dict[str, list[Cost]]) -> Iterator[str]:
    """Yield the comparison, and the roles, as Markdown."""
    yield "| settled run | tasks | module runs | median s | least to most s | changed |"
    yield "|---|---:|---:|---:|---|---:|"
    for name, costs in runs.items():
        seconds = [cost.seconds for cost in costs]
        last = costs[-1]
        yield (
            f"| {name} | {last.tasks} | {last.modules} | {statistics.median(seconds):.1f} "
            f"| {min(seconds):.1f} to {max(seconds):.1f} | {sum(cost.changed for cost in costs)} |"
        )
    ratio = statistics.median([site.seconds / builtin.seconds for site, builtin in zip(*runs.values(), strict=True)])
    yield f"\nMedian of the ratios of the rounds: {ratio:.2f}.\n"
    yield "| role | tasks | module runs | s |"
    yield "|---|---:|---:|---:|"
    for role, (tasks, modules, took) in runs["site.yml"][-1].by_role().items():
        yield f"| {role} | {tasks} | {modules} | {took:.1f} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a settled node costs.")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hardware", default="t4-1")
    parser.add_argument("--os", default="debian-12")
    parser.add_argument("--inventory")
    parser.add_argument("--variables", default=[], metavar="FILE", type=lambda file: ["-e", f"@{Path(file).resolve()}"])
    arguments = parser.parse_args(argv)
    print(f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, nodes: {arguments.nodes}\n")
    with nodes(arguments) as inventory, tempfile.TemporaryDirectory(prefix="gpunode-converge-") as folder:
        builtin = Path(folder) / "builtin.yml"
        tasks = builtin_tasks()
        play = {"name": "Builtin tasks", "hosts": "all", "gather_facts": False, "become": True, "tasks": tasks}
        builtin.write_text(yaml.safe_dump([play], sort_keys=False), encoding="utf-8")
        runs = measured(builtin, inventory, arguments.rounds, arguments.variables)
    print("\n" + "\n".join(table(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
