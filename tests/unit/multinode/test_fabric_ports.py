"""RDMA ports by perftest: the programs' output, the rounds, and which port is named; the run with stand-ins of both."""

import os
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import hgx
from test_fabric_run import LocalTransport, _on_loopback

from gpunode.checks import Status
from gpunode.fabric.model import PortMeasurement
from gpunode.fabric.preflight import PORT_ROUNDS, PortPair, port_findings, port_plan
from gpunode.fabric.run import FabricRequest, FabricRun
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.onnode import fabric as node_program
from gpunode.probe import Bundle

__all__ = ["_on_loopback"]
BANDWIDTH = """\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Device         : mlx5_0
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
Conflicting CPU frequency values detected: 1003.892000 != 1940.696000. CPU Frequency is not max.
 65536      18000            0.00               {rate}               0.740
---------------------------------------------------------------------------------------
"""
LATENCY = """\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]
 2       1000          1.27           3.34         {us}                1.34          0.10
"""


def test_the_figures_are_read() -> None:
    assert node_program.figure(BANDWIDTH.format(rate="387.91"), "ib_write_bw") == 387.91
    assert node_program.figure(LATENCY.format(us="1.33"), "ib_write_lat") == 1.33
    for text in ("", "Couldn't connect to 10.0.0.1:18515", " #bytes #iterations\nx y z w\n", BANDWIDTH[:200]):
        assert node_program.figure(text, "ib_write_bw") is None


def test_counters_of_errors_are_read(tmp_path: Path) -> None:
    rows = (("counters", "symbol_error", 7), ("hw_counters", "packet_seq_err", 0), ("counters", "port_xmit_data", 9))
    for kind, name, value in rows:
        folder = tmp_path / "mlx5_0" / "ports" / "1" / kind
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{value}\n", encoding="ascii")
    assert node_program.error_counters(str(tmp_path)) == {"mlx5_0/1 symbol_error": 7, "mlx5_0/1 packet_seq_err": 0}
    assert node_program.error_counters(str(tmp_path / "none")) == {}


@pytest.fixture(scope="module")
def node() -> NodeFacts:
    return facts_from_bundle(Bundle.model_validate(hgx()))


def test_each_node_has_two_partners(node: NodeFacts) -> None:
    rounds = port_plan({f"n{number}": node for number in range(5)})
    assert len(rounds) == PORT_ROUNDS
    met: dict[str, set[str]] = {}
    for pairs in rounds:
        for server, (client, devices) in pairs.items():
            assert len(devices) == 8
            met.setdefault(server, set()).add(client)
            met.setdefault(client, set()).add(server)
    assert all(len(others) >= 1 for others in met.values())
    assert port_plan({"n0": node}) == []
    assert port_plan({"n0": node.model_copy(update={"infiniband": ()}), "n1": node}) == []


def verdict(node: NodeFacts, rates: dict[tuple[str, str], float], size: int = 4, **more: Any) -> dict[str, list[Any]]:
    """What is found of nodes; ``rates`` by node and device are what its port reaches at most."""
    nodes = {f"n{number}": node for number in range(size)}
    measured = []
    for pairs in port_plan(nodes):
        for server, (client, devices) in pairs.items():
            for device in devices:
                rate = min(rates.get((name, device), 392.0) for name in (server, client))
                measurement = (
                    PortMeasurement(gbit_per_s=rate, latency_us=2.0) if rate else PortMeasurement(error="no route")
                )
                measured.append((PortPair(server, client, device), measurement))
    named: dict[str, list[Any]] = {}
    for name, finding in port_findings(measured, more.get("counters", {}), nodes):
        if finding.status is not Status.PASS:
            named.setdefault(name, []).append((finding.check, finding.status, finding.component))
    return named


@pytest.mark.parametrize("rate", [0.0, 180.0])
def test_a_slow_port_is_named_alone(node: NodeFacts, rate: float) -> None:
    assert verdict(node, {}) == {}
    for bad in ("n0", "n3"):
        named = verdict(node, {(bad, "mlx5_4"): rate})
        assert named == {bad: [("nodes.rdma", Status.FAIL, "mlx5_4")]}


def test_of_two_nodes_both_ends_are_named(node: NodeFacts) -> None:
    assert set(verdict(node, {("n0", "mlx5_1"): 100.0}, size=2)) == {"n0", "n1"}


def test_counters_that_increased_are_named(node: NodeFacts) -> None:
    named = verdict(node, {}, counters={"n2": {"mlx5_1/1 symbol_error": 12}})
    assert named == {"n2": [("nodes.ports-errors", Status.WARN, "node")]}


# --- the run, with programs in place of perftest

STAND_IN = """\
#!{python} -IS
import socket, sys
words = sys.argv[1:]
port, program = int(words[words.index("-p") + 1]), sys.argv[0].rpartition("/")[2]
device = words[words.index("-d") + 1]
if words[-1].count(".") == 3:
    with socket.create_connection((words[-1], port), 5) as sock:
        sock.sendall(device.encode())
        if sock.recv(20).decode() != device:
            sys.exit("another device")
    rate = "180.1" if device == "mlx5_5" else "391.2"
    sys.stdout.write({bandwidth!r}.format(rate=rate) if program == "ib_write_bw" else {latency!r}.format(us="1.5"))
else:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
        server.listen(1)
        one, _ = server.accept()
        one.sendall(one.recv(20))
"""


def test_nodes_measure_their_ports(node: NodeFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ib_write_bw", "ib_write_lat"):
        text = textwrap.dedent(STAND_IN).format(python=sys.executable, bandwidth=BANDWIDTH, latency=LATENCY)
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    bare = NodeFacts(host="n", collected_at="", simulated=False, pci=(), infiniband=node.infiniband)
    request = FabricRequest(image=lambda _: "none", in_container=False, run_limit_s=60.0, tests="fabric")
    group = FabricRun(request, ["a", "b", "c"], login_limit_s=5.0)

    def member(name: str) -> None:
        group.member(name, LocalTransport(), bare, lambda _: None, time.monotonic() + 120)

    threads = [threading.Thread(target=member, args=(name,), daemon=True) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    result = group.end()
    named = {
        (name, finding.component)
        for name, several in result.findings.items()
        for finding in several
        if finding.check == "nodes.rdma" and finding.status is Status.FAIL
    }
    assert {component for _, component in named} == {"mlx5_5"}
    measured = {
        finding.measured for several in result.findings.values() for finding in several if finding.check == "nodes.rdma"
    }
    assert 180.1 in measured
    # A slow port leaves its node in the run.
    assert len(result.nodes) == 3
