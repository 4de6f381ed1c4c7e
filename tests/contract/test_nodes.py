"""The contract's nodes are whole: the real probe finds on each all that the facts are read from."""

import json

import pytest
from bundles import facts_of
from machines import GRACE, GUEST, HGX, HGX_4, HGX_B200, PCI, PCIE_2, PCIE_4, T4_1, V100_2, Machine, bundle

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
