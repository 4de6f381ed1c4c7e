"""One run of ranks over many nodes: each node's thread prepares its node, all meet, and the ranks start together.

A node that fails on the way is reported and left out, and the others go on. Each wait has a limit.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from gpunode.checks import Finding, Status
from gpunode.fabric import preflight
from gpunode.fabric.model import Hello, PortMeasurement, Reached
from gpunode.fabric.preflight import (
    Meeting,
    PortPair,
    Ready,
    all_ports,
    chosen_addresses,
    dial_plan,
    differences,
    finding,
    judged_dials,
    own_findings,
    port_base,
)
from gpunode.facts import NodeFacts
from gpunode.onnode import program_text
from gpunode.workload import devices, engine
from gpunode.workload.container import Devices
from gpunode.workload.distributed import GroupRequest, Member, joined, missing_ranks, run_member, seats_of
from gpunode.workload.image import ImageFile, provide
from gpunode.workload.launch import devices_for
from gpunode.workload.output import BoundedOutput
from gpunode.workload.payload.nccl import COLLECTIVES
from gpunode.workload.transport import LaunchFailure, Transport

LOADER = (
    "import sys; code = sys.stdin.buffer.read(int(sys.argv[1])).decode(); names = {'__name__': 'fabric'}; "
    "exec(code, names); names['main']([int(one) for one in sys.argv[2:]])"
)
MOST_LINE = 4 * 2**20
STEP_S = 60.0
"""For the other nodes in each step before the ranks: a node that takes longer is left out."""
CLOCK_TRIES = 3
LEAST_NODES = 2
END_S = 15.0
"""Seconds at the end of a node's time for the end of its ranks."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class FabricRequest:
    """What runs, the same for all nodes."""

    image: Callable[[NodeFacts], str]
    in_container: bool
    run_limit_s: float
    ranks: int = 1
    """Ranks of each node without a GPU."""
    force: bool = False
    interface: str | None = None
    file: ImageFile | None = None
    image_limit_s: float = 1800.0
    rank_limit_s: float = 30.0
    tests: str = "fabric,nccl,ddp"
    racks: Mapping[str, str] = field(default_factory=dict)


@dataclass
class FabricResult:
    """What is known at the end."""

    nodes: tuple[str, ...] = ()
    """Those that took part, in the order of their ranks."""
    rank_names: tuple[str, ...] = ()
    """The node of each rank."""
    ranks: int = 0
    backend: str = "gloo"
    records: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Why a node's ranks did not finish."""
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    seconds: float = 0.0


class SharedStep(Generic[Value]):
    """A step that each node completes with a value, or leaves."""

    def __init__(self, names: Sequence[str]) -> None:
        self._missing = set(names)
        self._values: dict[str, Value] = {}
        self._changed = threading.Condition()

    def put(self, name: str, value: Value) -> None:
        """Record a node's value."""
        with self._changed:
            if name in self._missing:
                self._values[name] = value
                self._missing.discard(name)
                self._changed.notify_all()

    def leave(self, name: str) -> None:
        """Leave the step without a value of a node."""
        with self._changed:
            self._missing.discard(name)
            self._changed.notify_all()

    def values(self, limit_s: float) -> dict[str, Value]:
        """Return the values of all nodes that completed it, once no other is missing, or after the limit."""
        with self._changed:
            self._changed.wait_for(lambda: not self._missing, limit_s)
            self._missing.clear()
            return dict(sorted(self._values.items()))


class FabricRun:
    """The run; ``member`` is called in a thread of each node."""

    def __init__(self, request: FabricRequest, names: Sequence[str], login_limit_s: float) -> None:
        self._request, self._login_limit_s = request, login_limit_s
        self.result = FabricResult()
        self._ready: SharedStep[Ready] = SharedStep(names)
        self._dialed: SharedStep[dict[str, Reached]] = SharedStep(names)
        self._ended: SharedStep[None] = SharedStep(names)
        self._served = [SharedStep[dict[str, list[int]]](names) for _ in range(preflight.PORT_ROUNDS)]
        self._tried = [SharedStep[None](names) for _ in range(preflight.PORT_ROUNDS)]
        self._facts: dict[str, NodeFacts] = {}
        self._rounds: list[dict[str, tuple[str, tuple[str, ...]]]] | None = None
        self._ports: list[tuple[PortPair, PortMeasurement]] = []
        self._errors: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()
        self._meeting: Meeting | None = None
        self._plan: tuple[GroupRequest, tuple[Ready, ...]] | None = None
        self._planned = False
        self._outputs: dict[int, BoundedOutput] = {}
        self._failures: dict[int, str] = {}
        self._firsts: dict[str, int] = {}
        self._over: set[int] = set()
        """First ranks of the nodes with a program that ended."""
        self._given_up: set[int] = set()
        self._started = time.monotonic()

    def leave(self, name: str) -> None:
        """Leave all steps without a node: it was not reached, or it failed."""
        steps: list[SharedStep[Any]] = [self._ready, self._dialed, self._ended, *self._served, *self._tried]
        for step in steps:
            step.leave(name)

    def add(self, name: str, outcome: Finding) -> None:
        """Add a finding of a node."""
        with self._lock:
            self.result.findings.setdefault(name, []).append(outcome)

    def member(
        self, name: str, transport: Transport, node: NodeFacts, progress: Callable[[str], None], deadline: float
    ) -> None:
        """Do one node's part. Never raises for the node's failure."""
        try:
            self._member(name, transport, node, progress, deadline)
        except LaunchFailure as err:
            self.add(name, finding("nodes.node", Status.ERROR, "node", str(err)))
        finally:
            self.leave(name)

    def _member(
        self, name: str, transport: Transport, node: NodeFacts, progress: Callable[[str], None], deadline: float
    ) -> None:
        self._facts[name] = node
        use = devices.choose(node, force=self._request.force, without=True)
        if use.busy:
            text = f"GPUs are in use: {', '.join(use.busy)}"
            self.add(name, finding("nodes.busy", Status.FAIL, "node", text, "Drain the node, or use --force."))
            return
        gpu_devices, image = Devices("none"), None
        if self._request.in_container:
            gpu_devices, image = self._prepared(transport, node, use, progress, deadline)
        ranks = len(use.indices) or self._request.ranks
        progress("meeting the other nodes")
        meeting = self._met(name, transport, node, (ranks, image), deadline)
        plan = self._decided(meeting)
        if plan is None or name not in self._firsts:
            return
        group, nodes = plan
        first = self._firsts[name]
        seats = seats_of(group, first, ranks, sum(ready.ranks for ready in nodes), len(nodes))
        settings = {"interface": meeting.addresses[name].interface, "user_site": not self._request.in_container}
        settings["fabric"] = {**group.settings["fabric"], "node": name}
        member = Member(transport, ranks, gpu_devices, settings, rdma=bool(node.rdma_nodes))
        limited = replace(group, run_limit_s=max(1.0, min(group.run_limit_s, deadline - time.monotonic())))
        progress("ranks are running")
        try:
            run_member(member, limited, self._outputs[first], seats)
        except LaunchFailure as err:
            reason = "they did not answer the ranks of other nodes" if first in self._given_up else str(err)
            self._failures[first] = self.result.failures[name] = reason
        finally:
            self._over.add(first)
            self._give_up(self._outputs[first])

    def _give_up(self, output: BoundedOutput) -> None:
        """End the nodes' programs that do not report their missing ranks, a rank's limit after others named them."""
        missing = {rank for record in output.records for rank in missing_ranks(record)}

        def stop(first: int) -> None:
            if first not in self._over:
                self._given_up.add(first)
                self._outputs[first].stop()

        ranks = missing & set(range(self.result.ranks))
        for first in {max(start for start in self._outputs if start <= rank) for rank in ranks}:
            timer = threading.Timer(self._request.rank_limit_s, stop, (first,))
            timer.daemon = True
            timer.start()

    def _prepared(
        self, transport: Transport, node: NodeFacts, use: devices.Use, progress: Callable[[str], None], deadline: float
    ) -> tuple[Devices, str]:
        """Return the devices for the container, and the id of the image, which is on the node then."""
        with engine.connected(transport, deadline) as node_engine:
            gpu_devices = devices_for(node_engine, use, node)
            with node_engine.within(self._request.image_limit_s, "--image-timeout") as bringing:
                return gpu_devices, provide(bringing, self._request.image(node), self._request.file, progress).id

    # --- before the ranks

    def _met(
        self, name: str, transport: Transport, node: NodeFacts, part: tuple[int, str | None], deadline: float
    ) -> Meeting:
        ranks, image = part
        program = program_text("fabric").encode()
        stream = transport.python(LOADER, (str(len(program)), *map(str, all_ports())))
        try:
            stream.sock.settimeout(min(STEP_S, max(1.0, deadline - time.monotonic())))
            stream.sock.sendall(program)
            lines = Lines(stream.sock)
            hello = Hello.model_validate(lines.read()["hello"])
            offset_s, error_s = _clock(lines)
            models = sorted({str(gpu.name) for gpu in node.smi_gpus})
            ready = Ready(
                name,
                hello,
                ranks,
                ", ".join(models) or None,
                node.loaded_driver.version if node.loaded_driver else None,
                image,
                offset_s,
                error_s,
            )
            for outcome in own_findings(ready):
                self.add(name, outcome)
            self._ready.put(name, ready)
            nodes = self._ready.values(self._login_limit_s + STEP_S)
            meeting = self._meeting_of(nodes)
            if name not in meeting.addresses:
                interface = f"interface {self._request.interface}" if self._request.interface else "a usable interface"
                raise LaunchFailure("address", f"no IPv4 address on {interface}: name one with --interface")
            peers = [
                [other, meeting.addresses[other].address, nodes[other].hello.port, meeting.addresses[name].mtu]
                for other in dial_plan(sorted(meeting.addresses))[name]
            ]
            dialed = lines.ask({"dial": peers})["dialed"]
            expected = {str(peer[0]) for peer in peers}
            self._dialed.put(
                name, {other: Reached.model_validate(answer) for other, answer in dialed.items() if other in expected}
            )
            self._dialed.values(STEP_S)
            self._measure_ports(name, lines, meeting, nodes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ArithmeticError) as err:
            complaint = stream.complaint()
            raise LaunchFailure("meeting", f"the node did not report its network: {complaint or _short(err)}") from None
        else:
            return meeting
        finally:
            stream.sock.close()
            stream.close()

    def _measure_ports(self, name: str, lines: "Lines", meeting: Meeting, nodes: Mapping[str, Ready]) -> None:
        """Measure the node's RDMA ports with those of other nodes, where perftest is installed."""
        rounds = self._planned_ports(meeting, nodes)
        taking = {node for servers in rounds for server, (client, _) in servers.items() for node in (server, client)}
        if name not in taking:
            return
        before = _numbers(lines.ask({"counters": 1}).get("counters"))
        for number, servers in enumerate(rounds):
            served: dict[str, list[int]] = {}
            if name in servers:
                devices = [[device, self._gid(name, device)] for device in servers[name][1]]
                served = {str(key): [int(port) for port in value] for key, value in _pairs(lines, {"serve": devices})}
            self._served[number].put(name, served)
            known = self._served[number].values(STEP_S)
            for server, (client, devices_of) in servers.items():
                if client == name and known.get(server):
                    rows = [
                        [device, self._gid(name, device), known[server][device]]
                        for device in devices_of
                        if len(known[server].get(device, ())) == len(preflight.PORT_PROGRAMS)
                    ]
                    partner = {"host": meeting.addresses[server].address, "devices": rows}
                    for device, answer in _pairs(lines, {"measure": partner}):
                        if device in devices_of:
                            measured = PortMeasurement.model_validate(answer)
                            with self._lock:
                                self._ports.append((PortPair(server, name, device), measured))
            self._tried[number].put(name, None)
            self._tried[number].values(STEP_S)
            lines.ask({"stop": 1})
        after = _numbers(lines.ask({"counters": 1}).get("counters"))
        increased = {key: after[key] - value for key, value in before.items() if after.get(key, 0) > value}
        with self._lock:
            self._errors[name] = increased

    def _planned_ports(
        self, meeting: Meeting, nodes: Mapping[str, Ready]
    ) -> list[dict[str, tuple[str, tuple[str, ...]]]]:
        with self._lock:
            if self._rounds is None:
                able = {
                    name: self._facts[name]
                    for name in meeting.addresses
                    if name in self._facts and set(nodes[name].hello.programs) >= set(preflight.PORT_PROGRAMS)
                }
                self._rounds = preflight.port_plan(able)
            return self._rounds

    def _gid(self, name: str, device: str) -> int | None:
        """Return the index of a device's RoCE v2 address; None for InfiniBand."""
        for adapter in self._facts[name].infiniband or ():
            for port in adapter.ports if adapter.name == device else ():
                indices = [gid.index for gid in port.gids if gid.type == "RoCE v2" and gid.ipv4]
                if port.link_layer == "Ethernet" and indices:
                    return indices[0]
        return None

    def _meeting_of(self, nodes: Mapping[str, Ready]) -> Meeting:
        with self._lock:
            if self._meeting is None:
                addresses = chosen_addresses(list(nodes.values()), self._request.interface)
                self._meeting = Meeting(addresses)
                for name, several in differences([nodes[name] for name in sorted(addresses)]).items():
                    self.result.findings.setdefault(name, []).extend(several)
            return self._meeting

    def _decided(self, meeting: Meeting) -> tuple[GroupRequest, tuple[Ready, ...]] | None:
        """Return what the group runs and its nodes; None if too few are left."""
        dials = self._dialed.values(STEP_S)
        nodes = self._ready.values(0.0)
        with self._lock:
            if not self._planned:
                self._planned = True
                self._plan = self._plan_of(meeting, dials, nodes)
            return self._plan

    def _plan_of(
        self, meeting: Meeting, dials: Mapping[str, Mapping[str, Reached]], nodes: Mapping[str, Ready]
    ) -> tuple[GroupRequest, tuple[Ready, ...]] | None:
        result = self.result
        verdict = judged_dials(meeting, dials)
        for name, several in verdict.findings.items():
            result.findings.setdefault(name, []).extend(several)
        bad = set(verdict.unreachable)
        bad |= {
            name
            for name, several in result.findings.items()
            if any(outcome.status is Status.FAIL for outcome in several)
        }
        left = [nodes[name] for name in dials if name not in bad or (self._request.force and name in dials)]
        with_gpu = [node for node in left if node.gpu_model is not None]
        if with_gpu:
            for node in left:
                if node.gpu_model is None:
                    text = "no usable GPU, other nodes have GPUs: it does not take part"
                    result.findings.setdefault(node.name, []).append(finding("nodes.node", Status.ERROR, "node", text))
            left = with_gpu
        result.backend = "nccl" if with_gpu else "gloo"
        if len(left) < LEAST_NODES:
            return None
        # Ranks of one rack are neighbours.
        left.sort(key=lambda node: (self._request.racks.get(node.name, ""), node.name))
        port = port_base(left[0].hello)
        if port is None:
            text = "all ports for rank 0 are in use: end the processes that listen there"
            result.findings.setdefault(left[0].name, []).append(finding("nodes.ports", Status.FAIL, "node", text))
            return None
        backend: Literal["gloo", "nccl"] = "nccl" if with_gpu else "gloo"
        first = 0
        for node in left:
            self._firsts[node.name] = first
            self._outputs[first] = BoundedOutput()
            first += node.ranks
        result.nodes, result.ranks = tuple(node.name for node in left), first
        result.rank_names = tuple(node.name for node in left for _ in range(node.ranks))
        group = GroupRequest(
            image=left[0].image if self._request.in_container else None,
            network="host",
            host=meeting.addresses[left[0].name].address,
            port=port,
            backend=backend,
            tests=self._request.tests,
            rank_limit_s=self._request.rank_limit_s,
            run_limit_s=self._request.run_limit_s,
            settings={
                "collectives": [name for name in COLLECTIVES if name != "broadcast"],
                "fabric": {"racks": dict(self._request.racks), "limit_s": self._request.run_limit_s},
            },
        )
        return group, tuple(left)

    def end(self) -> FabricResult:
        """Return the result, after all members."""
        records = {first: output.records for first, output in self._outputs.items()}
        self.result.records = joined(records, self._failures)
        for name, outcome in preflight.port_findings(self._ports, self._errors, self._facts):
            self.add(name, outcome)
        self.result.seconds = round(time.monotonic() - self._started, 1)
        return self.result


class Lines:
    """Requests to a node's program and its answers, one line of JSON each."""

    def __init__(self, sock: Any) -> None:
        self._sock, self._rest = sock, b""

    def read(self) -> dict[str, Any]:
        """Return the next line. Raises OSError, ValueError."""
        while b"\n" not in self._rest:
            data = self._sock.recv(65536)
            if not data or len(self._rest) > MOST_LINE:
                raise OSError("its output ended" if not data else "it sends too much")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        document = json.loads(line)
        if not isinstance(document, dict):
            raise TypeError("not an object")
        return document

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer."""
        self._sock.sendall(json.dumps(request).encode() + b"\n")
        return self.read()


def _pairs(lines: Lines, request: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the rows of the only value of an answer. Raises TypeError."""
    (rows,) = lines.ask(request).values()
    return list(rows.items())


def _numbers(counters: Any) -> dict[str, int]:
    """Return the counters in a node's answer, those of a few hundred ports at most."""
    pairs = counters.items() if isinstance(counters, dict) else ()
    return {
        str(key)[:100]: value for key, value in list(pairs)[:10_000] if isinstance(value, int) and abs(value) < 2**64
    }


def _clock(lines: Lines) -> tuple[float, float]:
    """Return the node's clock minus this machine's, and the error: of the fastest of several answers."""
    best = (0.0, float("inf"))
    for _ in range(CLOCK_TRIES):
        before = time.time()
        clock = float(lines.ask({"clock": 1})["clock"])
        after = time.time()
        if not math.isfinite(clock):
            raise ValueError(f"a clock at {clock}")
        if after - before < best[1]:
            best = (clock - (before + after) / 2, after - before)
    return best


def _short(err: Exception) -> str:
    return f"{type(err).__name__}: {err}".splitlines()[0][:200]
