"""A fleet for ``gpunode upgrade``: simulated nodes in place of probe, leases, playbooks and scheduler.

Each node has a folder in place of /var/lib/gpunode, in which the real program of the lease runs. The scheduler refuses
to be deceived: it records each return of a node that is not as good as before, and each foreign drain that was ended.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpunode.change import leases
from gpunode.change.adapters import CommandScheduler
from gpunode.change.journal import Journal, runs
from gpunode.change.run import RunLimits
from gpunode.checks import RunningStack
from gpunode.cli import run
from gpunode.fleet import Target
from gpunode.fleet.inventory import Inventory
from gpunode.fleet.process import Completed
from gpunode.history.snapshot import FigureValue, GpuRecord, Snapshot
from gpunode.onnode import lease as node_program
from gpunode.stack import GpuGroup, Installed, NodePicture
from gpunode.upgrade import command, nodes
from gpunode.upgrade import run as fleet_run
from gpunode.upgrade.looks import Connections, NodeLook

OLD, NEW = "580.95.05", "580.178.04"
TICKET = "RMA ticket 4711"
DRAINS = "gpunode-upgrade-"
"""Begin of the reason of a drain of ours."""


class World:
    """Nodes, each with a folder in place of /var/lib/gpunode."""

    def __init__(self, folder: Path, count: int = 5) -> None:
        self.folder = folder
        self.nodes: dict[str, dict[str, Any]] = {
            f"gpu-{number}": {"installed": OLD, "loaded": OLD, "gpus": 8, "bandwidth": 400.0, "jobs": 0}
            for number in range(1, count + 1)
        }
        self.domains: dict[str, str] = {}
        self.lost: set[str] = set()
        self.gpus = 8
        """GPUs that a node needs to be as good as before, or as was accepted."""
        self.unproven: list[str] = []
        """Nodes that returned and were not as good as before."""
        self.foreign_ended: list[str] = []
        self.boots: Callable[[str], bool] = lambda name: True  # noqa: ARG005
        """Whether a node may reboot now."""
        self.during: Callable[[str, Sequence[str]], None] = lambda playbook, names: None  # noqa: ARG005
        self.logs: list[str] = []
        self.measured: list[str] = []
        """Nodes in the order in which they were measured."""
        self.images: list[str] = []
        """The image of each of them."""

    def look(
        self,
        _: Connections,
        __: object,
        names: Iterable[str],
        *,
        image: str | None = None,
        each: Callable[[NodeLook], None] = lambda _: None,
    ) -> dict[str, NodeLook]:
        looks = {}
        for name in names:
            looks[name] = self.one(name, measured=image is not None)
            if image is not None:
                self.measured.append(name)
                self.images.append(image)
            each(looks[name])
        return looks

    def one(self, name: str, *, measured: bool = False) -> NodeLook:
        if name in self.lost:
            return NodeLook(name, "unreachable: no route to host")
        node = self.nodes[name]
        picture = NodePicture(
            os="debian-12",
            arch="x86_64",
            kernel="6.1.0-30-amd64",
            gpus=(GpuGroup(label="T4", models=("t4",), count=1),),
            installed=Installed(version=node["installed"]),
            observed=True,
        )
        gpus = [GpuRecord(index=n, name="H100", uuid=f"GPU-{name}-{n}", slot=f"{n}") for n in range(node["gpus"])]
        if node.get("exchanged"):
            gpus[3] = gpus[3].model_copy(update={"uuid": "GPU-other"})
        figure = FigureValue(metric="busbw", component="node", value=node["bandwidth"], unit="GB/s")
        snapshot = Snapshot(
            host=name,
            level="quick",
            simulated=True,
            stack=RunningStack(driver=node["loaded"], driver_packages=node["installed"]),
            gpus=tuple(gpus),
            gpus_on_bus=len(gpus),
            facts={},
            figures=(figure,) if measured and node.get("measures", True) else (),
        )
        busy = f"GPUs are in use by {node['jobs']} jobs" if node["jobs"] else ""
        return NodeLook(name, snapshot=snapshot, picture=picture, busy=busy)

    def ask(self, targets: Sequence[Target], questions: dict[str, dict[str, Any]], **_: object) -> dict[str, str]:
        answers = {}
        for target in targets:
            folder = self.folder / target.name
            lost = target.name in self.lost
            answers[target.name] = "lost" if lost else node_program.answer(questions[target.name], folder)["refused"]
        return answers

    def play(self, argv: Sequence[str], env: dict[str, str], password: str | None, log: Any) -> int:  # noqa: ARG002
        playbook = Path(argv[1]).name
        names = argv[argv.index("--limit") + 1].split(",")
        values = json.loads(argv[-1])
        with (self.folder / "events").open("a") as file:
            file.write(f"{playbook} {values.get('gpunode_reboot', '')} {' '.join(names)}\n")
        self.during(playbook, names)
        for name in names:
            if playbook == "site.yml":
                self.nodes[name]["installed"] = values["__gpunode_targets"][name]
                if values["gpunode_reboot"] == "when_needed" and self.boots(name):
                    self.nodes[name]["loaded"] = self.nodes[name]["installed"]
        if self.logs:
            line = self.logs.pop(0)
            log.write(line.encode())
            retry = Path(env["ANSIBLE_RETRY_FILES_SAVE_PATH"])
            retry.mkdir(exist_ok=True)
            (retry / playbook.replace("yml", "retry")).write_text("\n".join(re.findall(r"gpu-\d", line)))
            return 2
        return 0

    def site(self, argv: Sequence[str], _: str | None) -> Completed:
        """The site's program."""
        word, name, token = argv[1:]
        file = self.folder / f"drained-{name}"
        if word == "state":
            owner = file.read_text().strip() if file.exists() else ""
            return Completed(0, "in-service" if not owner else "ours" if owner == token else f"foreign {owner}", "")
        if word == "busy":
            jobs = self.nodes[name]["jobs"]
            return Completed(0, f"{jobs} jobs" if jobs else "", "")
        if word in ("drain", "resume"):
            with (self.folder / "events").open("a") as events:
                events.write(f"{word} {name}\n")
        if word == "drain":
            file.write_text(token)
        elif word == "resume":
            if not file.read_text().startswith(DRAINS):
                self.foreign_ended.append(name)
            node = self.nodes[name]
            good = node["loaded"] == node["installed"] and node["gpus"] == self.gpus and node["bandwidth"] >= 390
            good = good and not node.get("exchanged")
            if not good or name in self.lost:
                self.unproven.append(name)
            file.unlink()
        return Completed(0, "", "")

    @property
    def events(self) -> list[str]:
        return [line.strip() for line in (self.folder / "events").read_text().splitlines()]


def narrowed(inventory: Inventory, limit: str | None) -> Inventory:
    names = limit.split(",") if limit else list(inventory.hosts)
    return replace(inventory, hosts={name: inventory.hosts[name] for name in names})


def simulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int = 5) -> World:
    """Return a fleet that ``gpunode upgrade -i hosts.yml`` works on."""
    world = World(tmp_path / "nodes", count)
    world.folder.mkdir()
    (world.folder / "events").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def inventory(_: object, limit: str | None, *__: object) -> tuple[Inventory, dict[str, str]]:
        hosts = {
            name: {"gpunode_failure_domain": world.domains[name]} if name in world.domains else {}
            for name in world.nodes
        }
        return narrowed(Inventory(("hosts.yml",), hosts, ()), limit), {}

    monkeypatch.setattr(fleet_run, "read_with_settings", inventory)
    monkeypatch.setattr(fleet_run, "targets", lambda read, _: [Target(name, "local") for name in read.hosts])
    monkeypatch.setattr(fleet_run, "refuse_inventory", lambda *_: None)
    monkeypatch.setattr(fleet_run, "Evaluator", lambda _: nullcontext())
    monkeypatch.setattr(command, "scheduler_of", lambda _: CommandScheduler("drain", world.site))
    monkeypatch.setattr(fleet_run, "look_at", world.look)
    monkeypatch.setattr(nodes, "look_at", world.look)
    monkeypatch.setattr(nodes, "run", world.play)
    monkeypatch.setattr(leases, "ask", world.ask)
    monkeypatch.setattr(fleet_run, "RunLimits", partial(RunLimits, poll_s=0.01, power_s=0))
    return world


def upgraded(*words: str) -> int:
    return run(["upgrade", "-i", "hosts.yml", "--to", NEW, "--scheduler", "command:drain", "--validate-wait=0", *words])


def latest(tmp_path: Path) -> Journal:
    """The journal of the latest run."""
    return next(runs(tmp_path / "state" / "gpunode" / "upgrades"))


def states(tmp_path: Path) -> dict[str, str]:
    return {name: node.state.value for name, node in latest(tmp_path).record.nodes.items()}
