"""The RDMA adapters of a simulated node, read by the real probe and judged by the real checks."""

import json
import os
from pathlib import Path

import pytest

from gpunode.checks import Expectation, registry
from gpunode.facts import facts_from_bundle
from gpunode.lab.hardware import describe
from gpunode.lab.simulator import kernel, nics, pci, state
from gpunode.onnode.probe import Probe
from gpunode.probe import Bundle

CHECKS = ("rdma.devices", "rdma.adapters", "rdma.peers", "rdma.firmware", "rdma.ports", "rdma.errors")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device files")
@pytest.mark.parametrize("name", ["hgx-h100-8", "hgx-b200-8", "dgx-a100-8", "hgx-h100-8-roce"])
def test_adapters_have_what_the_checks_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    hardware = describe(name, "lab/node")
    monkeypatch.setattr(state, "ROOT", tmp_path)
    state.write(tmp_path / "etc/gpunode/lab-hardware.json", hardware)
    pci.write(hardware)
    nics.write(hardware)
    kernel.make_devices(hardware, set())
    seen = tmp_path / "run/gpunode-lab"
    (seen / "dev").symlink_to(tmp_path / "dev")
    (seen / "sys/bus/pci").mkdir(parents=True, exist_ok=True)
    (seen / "sys/bus/pci/devices").symlink_to(state.path(pci.SLOTS))
    probe = Probe(root=str(seen), path=str(tmp_path / "none"), passive_s=30)
    facts = facts_from_bundle(Bundle.from_json(json.dumps(probe.collect()), "the simulated node"))
    assert len(facts.infiniband or ()) == len(hardware["nics"])
    assert len(facts.rdma_nodes or ()) == 2 * len(hardware["nics"])
    # A RoCE port has each of its two addresses for both versions; InfiniBand's are not simulated.
    tables = {
        tuple((gid.type, gid.ipv4) for gid in port.gids) for adapter in facts.infiniband or () for port in adapter.ports
    }
    expected = [(kind, ipv4) for ipv4 in (False, True) for kind in ("IB/RoCE v1", "RoCE v2")]
    assert tables == {tuple(expected if name.endswith("-roce") else [])}
    findings = [finding for check in CHECKS for finding in registry[check].findings(facts, Expectation())]
    assert [finding for finding in findings if finding.status.value not in {"pass", "skip"}] == []
    passed = {finding.check for finding in findings if finding.status.value == "pass"}
    assert {"rdma.devices", "rdma.firmware", "rdma.ports"} <= passed
