"""Playbooks run on a lab node as a user runs them, and what of it can be compared."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from programs import beside_python, run_program

from gpunode.content import ansible_environment
from gpunode.lab import Lab, LabNode

ROOT = Path(__file__).resolve().parents[2]

# Hash and target of everything in /etc, all packages with their selections, all units with their states. Left out is
# what comes and goes by itself: units that live as long as a login, services that D-Bus starts for one question, and
# what a timer starts, mounts of a service's credentials, and mounts that a container had while it started.
SNAPSHOT = r"""
cd /
find etc -xdev -type f -print0 | sort -z | xargs -0 sha256sum
find etc -xdev -type l -printf '%p -> %l\n' | sort
echo ---
dpkg-query -W -f '${Package}:${Architecture} ${Version} ${Status}\n' | sort
if command -v rpm >/dev/null; then rpm --query --all --queryformat '%{NAME} %{EVR}\n' | sort; fi
echo ---
{ systemctl list-unit-files --no-legend --no-pager
  systemctl list-units --all --plain --no-legend --no-pager | awk '{print $1, $2, $3, $4}'
} | grep -v -e ' not-found ' |
  grep -v -E -e '^(session-|(run-)?user)' -e '\.(slice|device|scope) ' -e '^systemd-(timedate|hostname|locale)d' \
    -e '^systemd-tmpfiles-clean' -e '^run-credentials-' -e '^var-lib-docker-overlay2-\S*\.mount ' | sort
"""

WITHOUT_GPU = {
    "preflight_require_gpu": False,
    "preflight_min_free_mib": {},
    "nvidia_driver_source": "debian",
}
"""Variables of a node without a GPU and with a small disk."""
KERNEL_TUNING_ALONE = {"gpunode_roles": ["kernel_tuning"], **WITHOUT_GPU}


@dataclass
class Run:
    """One run of a playbook: its exit code, and the messages of each task that was not plainly ok."""

    rc: int
    output: str
    changed: dict[str, list[str]] = field(default_factory=dict)
    """Task to the items that changed; an empty text stands for the task itself."""

    @property
    def recap(self) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", self.output.rpartition("PLAY RECAP")[2])}

    @property
    def paths(self) -> set[str]:
        """Files that changed tasks name: in their name, in an item, or at the head of a diff."""
        items = [word for all_of in self.changed.values() for item in all_of for word in item.split()]
        words = {word for task in self.changed for word in task.split()}
        words |= {word.rpartition("=")[2] for word in items}
        words |= set(re.findall(r"(?m)^--- before: (\S+)", self.output))
        return {word for word in words if word.startswith("/")}


class RunsCommands(Protocol):
    """A node that commands are run on: a lab node, a virtual machine."""

    def run(self, argv: Sequence[str], *, timeout_s: float = ...) -> "subprocess.CompletedProcess[str]": ...


class HasInventory(Protocol):
    """Nodes with an inventory: a lab, a virtual machine."""

    @property
    def inventory_path(self) -> Path: ...

    def nodes(self) -> Sequence[RunsCommands]: ...


class Playbooks:
    """A node and the playbooks run on it."""

    lab: HasInventory
    node: RunsCommands

    def __init__(self, lab: HasInventory, *always: str) -> None:
        self.lab = lab
        self.node = lab.nodes()[0]
        self.always = always

    def play(self, *arguments: str, playbook: str = "site.yml", limit_s: float = 1200) -> Run:
        """Run a playbook as a user does."""
        always = self.always if playbook == "site.yml" else ()
        file = ROOT / "playbooks" / playbook
        argv = [beside_python("ansible-playbook"), "-i", self.lab.inventory_path, file, "--diff", *always, *arguments]
        environment = {**ansible_environment(), "ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORCE_COLOR": "0"}
        done = run_program(argv, cwd=ROOT, env=environment, limit_s=limit_s)
        ended = Run(done.returncode, done.stdout + done.stderr)
        task = ""
        for line in done.stdout.splitlines():
            if match := re.match(r"TASK \[(?:[\w.]+ : )?(.*)\] \*", line):
                task = match[1]
            elif match := re.match(r"changed: \[[^\]]+\](?: => \(item=(.*)\))?", line):
                ended.changed.setdefault(task, []).append(match[1] or "")
        return ended

    def sh(self, script: str) -> str:
        """Run a shell script as root on the node; its output."""
        done = self.node.run(["bash", "-euc", script], timeout_s=300)
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout)

    def snapshot(self) -> list[str]:
        return self.sh(SNAPSHOT).splitlines()

    def packages(self) -> set[str]:
        """Installed packages, and what is left of others."""
        return set(self.sh("dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\n'").splitlines())

    def held(self) -> set[str]:
        return set(self.sh("apt-mark showhold").split())


class Site(Playbooks):
    """The same with a lab node."""

    lab: Lab
    node: LabNode


def gpunode(*arguments: object, limit_s: float = 600) -> str:
    """Run gpunode as a user does; what it prints. It must succeed."""
    done = run_program([beside_python("gpunode"), *arguments], limit_s=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def yaml_list(output: str, key: str) -> set[str]:
    """The list under ``key`` in what a debug task printed, and the lines ``KEY NAME`` of what packages will do."""
    block = re.search(rf"(?m)^ +{key}:\n((?: +- \S+\n)+)", output)
    listed = set(re.findall(r"- (\S+)", block[1])) if block else set()
    return listed | set(re.findall(rf"(?m)^{key} (\S+)$", output))
