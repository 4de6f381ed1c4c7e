"""Every field of the facts is read by a check, a role, a verb or an example of a site's check, or has a reason here.

A fact that is collected and never judged hides a fault and costs the node time. The list only gets shorter. Fields are
found by name: one that shares its name with a field that is read counts as read. The table of facts
is complete, and the contract's nodes are whole: the real probe finds on each all that the facts are read from.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import facts_table
import pytest
from bundles import facts_of
from machines import GRACE, GUEST, HGX, HGX_4, HGX_B200, PCI, PCIE_2, PCIE_4, T4_1, V100_2, Machine, bundle
from pydantic import BaseModel

from gpunode.facts.node import FACTS, NodeFacts

ROOT = Path(__file__).parents[2]
READERS = (
    "checks",
    "tuning",
    "stack",
    "provisioning",
    "judging",
    "report",
    "cli",
    "workload",
    "expectations",
    "facts",
)
PROGRAMS = (ROOT / "gpunode/onnode/gpu_settings.py", ROOT / "gpunode/onnode/launcher.py")
"""What runs on nodes and reads facts; the probe writes them."""
RUNS = "two runs of a node, and the nodes of a fleet, are compared by it (gpunode/history)"
HEALTH = "fabric.state goes through all fields of the health, without their names"
SITE = "no public limit: for checks of a site (docs/own-checks.md)"
UNREAD = {
    "CdiSpec.cdi_version": RUNS,
    "ContainerSettings.docker_default_runtime": RUNS,
    "Cpu.model_name": RUNS,
    "Disk.rotational": RUNS,
    "DockerDaemon.cgroup_version": RUNS,
    "FabricHealth.access_timeout_recovery": HEALTH,
    "FabricHealth.bandwidth": HEALTH,
    "FabricHealth.incorrect_configuration": HEALTH,
    "FabricHealth.route_recovery": HEALTH,
    "FabricHealth.route_unhealthy": HEALTH,
    "IbPort.lid": "a value of the subnet manager that no limit applies to",
    "Machine.bios_date": RUNS,
    "Machine.bios_version": RUNS,
    "Memory.committed_mib": SITE,
    "Memory.hugepage_size_kib": SITE,
    "Memory.hugepages_free": SITE,
    "Memory.hugepages_total": SITE,
    "Nic.carrier_changes": "rdma.flaps takes outages from the log, which has their time",
    "NodeFacts.gpu_virtualization": "SmiGpu.virtualization_mode has the same value, and the checks read that one",
    "NodeFacts.unanswered": "driver.tools-answer and the gaps have the commands of NVIDIA, the rest concerns no GPU",
    "NumaNode.distances": RUNS,
    "NumaNode.memory_free_mib": SITE,
    "OperatingSystem.id_like": RUNS,
    "PacketFilter.tables": RUNS,
    "SmiGpu.gsp_firmware_version": RUNS,
    "SmiMigDevice.compute_instance_id": RUNS,
    "SmiMigDevice.gpu_instance_id": RUNS,
    "SmiPcie.gen_max_device": "the bus reports what the card supports, and link.pcie-speed reads that",
    "Topology.cpu_affinity": "the bus reports the near processors, and link.numa reads those",
    "Topology.numa_affinity": "the bus reports the near node, and link.numa reads that",
}
MOST_UNREAD = 30
PARTS = ROOT / "gpunode/provisioning/context.py"
"""It names facts, and reads none."""


def models(kind: object, seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """Yield a model and all models within its fields, each once."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if kind not in seen:
            seen.add(kind)
            yield kind
            for field in kind.model_fields.values():
                yield from models(field.annotation, seen)
    else:
        for part in get_args(kind):
            yield from models(part, seen)


def read() -> set[str]:
    """Return the names that are read: attributes and texts of the code, words of the examples of own checks."""
    names: set[str] = set()
    for path in [*PROGRAMS, *(file for room in READERS for file in (ROOT / "gpunode" / room).rglob("*.py"))]:
        if path == PARTS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        facts = path.is_relative_to(ROOT / "gpunode/facts")
        # What models compute from fields counts; that readers write the fields does not.
        models_only = facts and path.parent.name != "models"
        roots = [statement for statement in tree.body if isinstance(statement, ast.ClassDef)] if models_only else [tree]
        for node in (node for root in roots for node in ast.walk(root)):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not facts:
                names.update(re.findall(r"\w+", node.value) if len(node.value.split()) == 1 else ())
    names.update(re.findall(r"\w+", "\n".join(re.findall(r"(?m)^ *fact: (.*)$", EXAMPLES))))
    return names


EXAMPLES = (ROOT / "docs/own-checks.md").read_text(encoding="utf-8")


def fields() -> dict[str, str]:
    """Return every field as ``MODEL.FIELD``, with its name."""
    by_name: dict[str, str] = {}
    for model in models(NodeFacts, set()):
        name = model.__name__.partition("[")[0]
        by_name |= {f"{name}.{field}": field for field in model.model_fields}
    return by_name


def test_every_fact_is_read_or_has_a_reason() -> None:
    names = read()
    unread = {path for path, field in fields().items() if field not in names}
    assert len(fields()) > 400
    assert unread == set(UNREAD), "read a new field in a check; remove the line of one that is read, lower MOST_UNREAD"


def test_the_list_only_gets_shorter() -> None:
    assert len(UNREAD) == MOST_UNREAD
    assert all(len(reason.split()) > 3 for reason in UNREAD.values())


OF_THE_BUNDLE = {"records", "unanswered"}
"""Results of workloads, and what did not answer: of the bundle itself, and of all its commands."""


def test_the_table_has_every_fact() -> None:
    assert FACTS.keys() == facts_table.fields()
    assert {cells[0] for cells in facts_table.rows()} == {f"`{name}`" for name in FACTS}


def test_every_fact_is_read_from_something() -> None:
    assert {name for name, (commands, files) in facts_table.sources().items() if not commands | files} <= OF_THE_BUNDLE


def test_every_fact_is_described() -> None:
    plain = {name for name, (_, text) in facts_table.described().items() if not text}
    assert plain & facts_table.fields() == set()


MACHINES = (GRACE, GUEST, HGX, HGX_4, HGX_B200, PCIE_2, PCIE_4, T4_1, V100_2)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_no_fact_of_a_node_is_unknown(machine: Machine) -> None:
    assert facts_of(json.dumps(bundle(machine))).gaps == {}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_bus_driver_and_tools_agree_on_the_gpus(machine: Machine) -> None:
    document = bundle(machine)
    node = facts_of(json.dumps(document))
    assert [slot for slot in document["files"][PCI].split() if slot in machine.slots] == sorted(machine.slots)
    assert node.smi is not None
    assert node.smi.document is not None
    assert [gpu.uuid for gpu in node.smi.document.gpus] == list(machine.uuids)
    assert [gpu.pci_bus_id for gpu in node.smi.document.gpus] == list(machine.slots)


def test_a_bundle_is_the_callers_own() -> None:
    bundle(T4_1)["files"].clear()
    assert bundle(T4_1)["files"]
