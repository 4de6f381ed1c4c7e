"""What is named before ranks start: names, addresses, ports, MTU, versions, clocks; by generated fabrics."""

from typing import Any

import pytest
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.checks import Status
from gpunode.fabric.model import Hello, InterfaceAddress, Reached
from gpunode.fabric.preflight import (
    PORT_BASES,
    Meeting,
    Ready,
    chosen_addresses,
    dial_plan,
    differences,
    judged_dials,
    own_findings,
    port_base,
)


def address(interface: str, number: int, net: int = 1, **more: Any) -> dict[str, Any]:
    return {"interface": interface, "address": f"10.0.{net}.{number}", "prefix": 24, "mtu": 9000, **more}


def ready(number: int, *addresses: dict[str, Any], **changes: Any) -> Ready:
    fields = {"hostname": f"n{number}", "resolved": ["10.0.1.1"], "addresses": addresses, "port": 4000}
    hello = Hello.model_validate({**fields, **changes.pop("hello", {})})
    return Ready(f"n{number}", hello, 1, **changes)


def test_the_fastest_network_that_nodes_share_is_chosen() -> None:
    nodes = [
        ready(
            number,
            {"interface": "lo", "address": "127.0.0.1", "prefix": 8},
            address("docker0", 1, 9, speed_mbit_per_s=400_000),
            address("eth0", number, 1, speed_mbit_per_s=1000),
            address("ib0", number, 2, speed_mbit_per_s=200_000),
        )
        for number in range(1, 4)
    ]
    assert {chosen.interface for chosen in chosen_addresses(nodes, None).values()} == {"ib0"}
    assert {chosen.interface for chosen in chosen_addresses(nodes, "eth0").values()} == {"eth0"}
    assert chosen_addresses(nodes, "eth9") == {}
    assert chosen_addresses([ready(1, address("docker0", 1))], None) == {}


@pytest.mark.parametrize(
    ("resolved", "status"), [(["127.0.1.1"], Status.WARN), ([], Status.WARN), (["10.0.1.1"], None)]
)
def test_a_name_that_is_loopback_is_named(resolved: list[str], status: Status | None) -> None:
    findings = list(own_findings(ready(1, hello={"resolved": resolved})))
    assert [(finding.check, finding.status) for finding in findings] == ([("nodes.names", status)] if status else [])


def test_ports_in_use_are_avoided() -> None:
    free = ready(1).hello
    assert port_base(free) == PORT_BASES[0]
    assert port_base(free.model_copy(update={"taken": (PORT_BASES[0] + 3,)})) == PORT_BASES[1]
    assert port_base(free.model_copy(update={"taken": PORT_BASES})) is None


def test_nodes_that_differ_are_named() -> None:
    nodes = [ready(number, gpu_model="H100", driver="570.1", image="sha256:a") for number in range(5)]
    nodes[1] = ready(1, gpu_model="A100", driver="570.1", image="sha256:a")
    nodes[2] = ready(2, gpu_model="H100", driver="535.1", image="sha256:a")
    nodes[3] = ready(3, gpu_model="H100", driver="570.1", image="sha256:b")
    nodes[4] = ready(4, gpu_model="H100", driver="570.1", image="sha256:a", clock_offset_s=30.0)
    named = {
        name: [(finding.check, finding.status) for finding in several] for name, several in differences(nodes).items()
    }
    assert named == {
        "n0": [],
        "n1": [("nodes.models", Status.WARN)],
        "n2": [("nodes.driver", Status.WARN)],
        "n3": [("nodes.image", Status.FAIL)],
        "n4": [("nodes.clock", Status.WARN)],
    }


@given(st.integers(2, 40), st.data())
@settings(max_examples=effort(60, 3000), deadline=None)
def test_a_node_that_is_cut_off_is_named_alone(size: int, data: st.DataObject) -> None:
    names = [f"n{number}" for number in range(size)]
    bad = data.draw(st.sampled_from(names))
    meeting = Meeting({name: InterfaceAddress.model_validate(address("eth0", 1)) for name in names})
    plan = dial_plan(names)
    assert all(name not in others for name, others in plan.items())
    assert all(others for others in plan.values())
    kind = data.draw(st.sampled_from(["tcp", "mtu"]))
    wrong = Reached(tcp="no answer within 3 s") if kind == "tcp" else Reached(mtu=1500)
    good = Reached(mtu=9000)
    dials = {
        name: {other: wrong if bad in (name, other) else good for other in others} for name, others in plan.items()
    }
    verdict = judged_dials(meeting, dials)
    named = {name for name, several in verdict.findings.items() if several}
    assert named == {bad} if size > 2 else len(named) == 1
    assert set(verdict.unreachable) == (named if kind == "tcp" else set())
    checks = {finding.check for several in verdict.findings.values() for finding in several}
    assert checks == {"nodes.reach" if kind == "tcp" else "nodes.mtu"}


def test_another_mtu_of_an_interface_is_named() -> None:
    addresses = {f"n{number}": InterfaceAddress.model_validate(address("ib0", number)) for number in range(3)}
    addresses["n1"] = addresses["n1"].model_copy(update={"mtu": 2044})
    verdict = judged_dials(Meeting(addresses), {})
    assert {name: [finding.component for finding in several] for name, several in verdict.findings.items()} == {
        "n1": ["ib0"]
    }
