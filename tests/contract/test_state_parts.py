"""What a role's plan needs of a node's state: from these parts alone follows the same manifest as from the whole."""

import copy
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from effort import effort
from machines import GRACE, GUEST, HGX, HGX_B200, PCIE_2, T4_1, V100_2, text_of
from site_samples import ORDER, Machine, settings

from gpunode.facts.node import FACTS, facts_from_bundle
from gpunode.onnode import probe as script
from gpunode.probe import Bundle
from gpunode.provisioning.context import PARTS, NotReadError, probe_text
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.roles import NEEDS
from gpunode.provisioning.state import NodeState

BUNDLES = Path(__file__).parents[1] / "fixtures" / "bundles"
NODES = (T4_1, V100_2, PCIE_2, HGX, HGX_B200, GRACE, GUEST)
TABLES = ("COMMANDS", "FILTERED_COMMANDS", "NVIDIA_TOOLS")


def keys(part: str) -> set[str]:
    """The commands in a bundle that the sources of a part write."""
    names = {row[0] for table in TABLES for row in getattr(script, table)}
    written = {source for source in PARTS[part].sources if source in names}
    for source in (source for source in script.PASSIVE if source.__name__ in PARTS[part].sources):
        probe = Recorder()
        source(probe)
        written |= probe.commands.keys()
    return written


class Recorder(script.Probe):
    """A probe of an empty folder that records what a source would run; each device is there, and no command answers."""

    def __init__(self) -> None:
        self.temporary = tempfile.TemporaryDirectory(prefix="gpunode-parts-")
        root = Path(self.temporary.name)
        for path in ("run/docker.pid", "dev/ipmi0", "sys/class/nvme/nvme0/model"):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
        super().__init__(root=str(root), path=str(root / "none"))

    def run(self, key: str, argv: list[str], *_: object, **__: object) -> script.Answer | None:
        self.note_answer(key, script.answer(argv, 1, "", "", 0.0))
        return self.commands[key]

    def execute(self, argv: list[str], *_: object, **__: object) -> script.Answer:
        return script.answer(argv, 1, "", "", 0.0)


@cache
def recorded() -> tuple[dict[str, Any], ...]:
    """Bundles of the simulated nodes, and the recorded ones."""
    simulated = [json.loads(text_of(machine)) for machine in NODES]
    return (*simulated, *(json.loads(path.read_text(encoding="utf-8")) for path in sorted(BUNDLES.glob("*.json"))))


def facts_without(document: dict[str, Any], parts: tuple[str, ...] = ()) -> dict[str, Any]:
    """The facts of a bundle from a probe that left out what belongs to some parts."""
    left_out = set().union(*map(keys, parts))
    commands = {key: answer for key, answer in document["commands"].items() if key not in left_out}
    bundle = Bundle.from_json(json.dumps({**document, "commands": commands, "results": []}), "a test")
    return facts_from_bundle(bundle).model_dump(mode="json")


def known(facts: dict[str, Any], name: str) -> tuple[Any, Any]:
    """A fact, and why it is unknown."""
    return facts[name], facts["gaps"].get(name)


def test_parts_are_of_the_probe_the_facts_and_the_state() -> None:
    names = [row[0] for table in TABLES for row in getattr(script, table)]
    names += [source.__name__ for source in script.PASSIVE]
    sources = [source for part in PARTS.values() for source in part.sources]
    assert sorted(set(sources) - set(names)) == []
    assert len(sources) == len(set(sources))
    assert {fact for part in PARTS.values() for fact in part.facts} <= FACTS.keys()
    assert {field for part in PARTS.values() for field in part.fields} <= NodeState.model_fields.keys()
    assert set().union(*NEEDS.values()) == PARTS.keys() - {"checks"}


@pytest.mark.parametrize("part", [name for name, part in PARTS.items() if part.sources])
def test_only_the_facts_of_a_part_depend_on_its_sources(part: str) -> None:
    changed = set()
    for document in recorded():
        whole, rest = facts_without(document), facts_without(document, (part,))
        changed |= {name for name in FACTS if known(whole, name) != known(rest, name)}
    assert changed <= {*PARTS[part].facts}
    assert changed, "the sources of the part change nothing"


def test_the_program_without_parts_leaves_out_their_sources_and_no_others() -> None:
    def read(unread: frozenset[str]) -> dict[str, Any]:
        argv, text = [sys.executable, "-I", "-"], probe_text(unread)
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=120, check=True)
        commands: dict[str, Any] = json.loads(done.stdout)["commands"]
        return commands

    assert probe_text(()) == probe_text(("packages",)) == Path(script.__file__).read_text(encoding="utf-8")
    whole, rest = read(frozenset()), read(frozenset(PARTS))
    left_out = set().union(*map(keys, PARTS))
    assert whole.keys() - rest.keys() == whole.keys() & left_out
    assert len(whole.keys() & left_out) > 20


@cache
def states() -> dict[str, tuple[Machine, ...]]:
    """The nodes of the snapshots before and after each role, and with the facts of a simulated node, by role."""
    by_role: dict[str, list[Machine]] = {role: [] for role in ORDER}
    for manager in ("apt", "dnf"):
        machine = Machine(manager)
        for role in ORDER:
            by_role[role].append(copy.deepcopy(machine))
            for _ in range(5):
                now = machine.plan(role)
                if now.refusals or not machine.pending(now):
                    break
                machine.apply(now)
                by_role[role].append(copy.deepcopy(machine))
        everywhere = [machine, *(with_facts(machine, document) for document in recorded()[: effort(3, len(NODES))])]
        for role in ORDER:
            by_role[role] += copy.deepcopy(everywhere)
    return {role: tuple(machines) for role, machines in by_role.items()}


def with_facts(machine: Machine, document: dict[str, Any]) -> Machine:
    """A node of the snapshots with the facts of another one."""
    other = copy.deepcopy(machine)
    facts = facts_without(document)
    other.document["facts"] = {**facts, "os": machine.document["facts"]["os"]}
    return other


def outcome(machine: Machine, role: str) -> Manifest | str:
    """A role's manifest; the error in place of one that cannot be made for these facts."""
    try:
        return machine.plan(role)
    except NotReadError:
        raise
    except Exception as err:
        return repr(err)


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("role", ORDER)
def test_a_plan_from_the_parts_that_the_role_names_is_that_from_the_whole_state(role: str, removed: bool) -> None:
    if removed and "state" not in settings(role):
        return
    unread = tuple(sorted(PARTS.keys() - NEEDS[role]))
    compared = 0
    for machine in states()[role]:
        machine.absent = role if removed else ""
        whole = outcome(machine, role)
        machine.document["unread"] = unread
        try:
            assert outcome(machine, role) == whole
        finally:
            del machine.document["unread"]
        compared += isinstance(whole, Manifest)
    assert compared > 4


def test_a_role_that_names_too_little_gets_no_plan() -> None:
    machine = Machine("apt")
    machine.document["unread"] = ("packages",)
    with pytest.raises(NotReadError, match="packages"):
        machine.plan("docker")
    machine.document["unread"] = tuple(PARTS)
    state = NodeState.model_validate(machine.document)
    assert state.facts.units is not None
    for each in PARTS.values():
        for name in each.fields:
            with pytest.raises(NotReadError):
                getattr(state, name)
        for name in each.facts:
            with pytest.raises(NotReadError):
                getattr(state.facts, name)
            with pytest.raises(NotReadError):
                state.facts.gap(name)
    kept = NodeState.model_validate_json(state.model_dump_json())
    with pytest.raises(NotReadError):
        _ = kept.facts.model_copy(update={"host": "other"}).smi
