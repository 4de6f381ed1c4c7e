"""Ranks in two and four containers of this machine's engine, by Gloo: they meet, compute, and name who is missing."""

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import APIError

from gpunode.facts.models.measured import VALUES, NcclValues, PairsValues, TrainingValues
from gpunode.facts.models.workload import Record, values_of
from gpunode.lab.engine import connect
from gpunode.lab.workload_image import ensure_workload_image
from gpunode.workload.container import LABEL
from gpunode.workload.distributed import PORT, GroupRequest, GroupResult, Member, measure_group
from gpunode.workload.payload.group import START_S

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]
CONCERNS = ("gpunode/workload/",)
RANK_LIMIT_S = 40
"""The machine is shared: PyTorch alone may take that long to load."""


class LocalWay:
    """The engine of this machine."""

    as_root = (False,)
    user = "root"

    def engine(self, *, root: bool) -> Any:  # noqa: ARG002
        return _Stream()

    def python(self, program: str, arguments: tuple[str, ...]) -> Any:
        raise NotImplementedError


class _Stream:
    def __init__(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect("/var/run/docker.sock")

    def complaint(self) -> str:
        return ""

    def close(self) -> None:
        self.sock.close()


@dataclass
class Ground:
    """A network of its own, and what runs in it."""

    client: docker.DockerClient
    network: str
    image: str

    def run(self, members: int, **changes: Any) -> GroupResult:
        request = {"rank_limit_s": RANK_LIMIT_S, "run_limit_s": 400.0, **changes}
        return measure_group(
            [Member(LocalWay()) for _ in range(members)], GroupRequest(self.image, self.network, **request)
        )

    def listed(self, alias: str | None = None) -> list[str]:
        """Containers of the group, or that of one member."""
        filters: dict[str, Any] = {"network": self.network, "label": LABEL if alias is None else f"{LABEL}={alias}"}
        return [str(container["Id"]) for container in self.client.api.containers(all=True, filters=filters)]

    def need_none_left(self) -> None:
        """The engine removes a container by itself a moment after its end."""
        until = time.monotonic() + 15
        while self.listed() and time.monotonic() < until:
            time.sleep(0.2)
        assert self.listed() == []


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    client = connect()
    network = client.networks.create(f"gpunode-group-{secrets.token_hex(4)}", internal=True)
    try:
        yield Ground(client, str(network.name), ensure_workload_image(client, "torch", print))
    finally:
        network.remove()


def read(result: GroupResult) -> dict[str, Any]:
    """The values of all records, each of the shape that its model has."""
    values_by_name = {}
    for document in result.records:
        record = Record.model_validate(document)
        values = values_of(record, VALUES[record.record])
        assert not isinstance(values, str), values
        assert record.device == "cpu"
        values_by_name[record.record] = values
    return values_by_name


def test_two_containers_reduce_and_train_together(ground: Ground) -> None:
    result = ground.run(2)
    assert result.failures == {}
    values = read(result)
    assert list(values) == ["nccl.all-reduce", "nccl.all-gather", "ddp.replicated", "ddp.sharded"]
    reduced: NcclValues = values["nccl.all-reduce"]
    assert (reduced.backend, reduced.ranks, reduced.nodes) == ("gloo", 2, 2)
    assert [row.wrong for row in reduced.rows] == [0, 0, 0]
    trained: TrainingValues = values["ddp.replicated"]
    assert (trained.ranks, trained.wrong) == (2, 0)
    assert trained.busbw_gb_per_s is not None
    ground.need_none_left()


def test_four_containers_run_every_collective_and_try_each_link(ground: Ground) -> None:
    result = ground.run(4, level="deep", tests="nccl")
    assert result.failures == {}
    values = read(result)
    assert [name for name in values if name != "nccl.pairs"] == [
        f"nccl.{name}"
        for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send-recv")
    ]
    for name, measured in values.items():
        assert (measured.ranks, measured.nodes, measured.backend) == (4, 4, "gloo")
        if name != "nccl.pairs":
            assert {row.wrong for row in measured.rows} == {0}, name
    links: PairsValues = values["nccl.pairs"]
    # Six links; on a busy machine one may be slow, and each is known all the same.
    assert (links.links, links.cleared + len(links.bad)) == (6, 6)


@pytest.mark.parametrize(("members", "dies"), [(2, 1), (4, 2)])
def test_a_container_that_is_killed_is_named_and_leaves_nothing(ground: Ground, members: int, dies: int) -> None:
    """As soon as it has joined: the others name it within their limit, and end."""
    killed_at: list[float] = []

    def kill() -> None:
        until = time.monotonic() + 300
        while time.monotonic() < until:
            for container in ground.listed(f"rank-{dies}"):
                if _has_joined(ground.client, container):
                    ground.client.api.kill(container)
                    killed_at.append(time.monotonic())
                    return
            time.sleep(0.2)

    killer = threading.Thread(target=kill)
    killer.start()
    result = ground.run(members, tests="nccl", run_limit_s=540.0)
    ended = time.monotonic()
    killer.join(10)
    assert killed_at, f"nothing was killed: {result}"
    assert list(result.failures) == [dies], result
    broken = [record for record in result.records if record["error"]]
    assert broken
    for record in broken:
        assert record["values"]["missing"] == [dies], record
        assert f"rank {dies} of {members}" in record["error"]
        assert f"rank {dies}: the payload" in record["error"]
    # One part waited for it, no longer than its limit and a little; the others know that it does not come back.
    assert len(broken) == 1
    assert {f"rank {dies} of {members}" in str(record["undetermined"]) for record in result.records[-1:]} == {True}
    assert ended - killed_at[0] < START_S + 2 * RANK_LIMIT_S + 60
    ground.need_none_left()


def _has_joined(client: docker.DockerClient, container: str) -> bool:
    """Whether a rank in the container is connected with rank 0's port."""
    try:
        pid = client.api.inspect_container(container)["State"]["Pid"]
        rows = [row for name in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    except (APIError, OSError):
        return False
    # Remote address and port in hexadecimal, and the state: 01 is established.
    return any(row.split()[2].endswith(f":{PORT:04X}") and row.split()[3] == "01" for row in rows)
