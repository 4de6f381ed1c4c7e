"""Ranks in two and four containers of this machine's engine, by Gloo: they meet, compute, and name who is missing."""

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import docker
import pytest

from gpunode.facts.models.measured import VALUES, NcclValues, PairsValues, TrainingValues
from gpunode.facts.models.workload import Record, values_of
from gpunode.lab.engine import connect
from gpunode.lab.workload_image import ensure_workload_image
from gpunode.workload.container import LABEL
from gpunode.workload.distributed import GroupRequest, GroupResult, Member, measure_group

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]
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

    @property
    def containers(self) -> list[Any]:
        return list(self.client.containers.list(all=True, filters={"network": self.network, "label": LABEL}))

    def need_none_left(self) -> None:
        """The engine removes a container by itself a moment after its end."""
        until = time.monotonic() + 15
        while self.containers and time.monotonic() < until:
            time.sleep(0.2)
        assert self.containers == []


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
    found = {}
    for document in result.records:
        record = Record.model_validate(document)
        values = values_of(record, VALUES[record.record])
        assert not isinstance(values, str), values
        assert record.device == "cpu"
        found[record.record] = values
    return found


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
    for name, one in values.items():
        assert (one.ranks, one.nodes, one.backend) == (4, 4, "gloo")
        if name != "nccl.pairs":
            assert {row.wrong for row in one.rows} == {0}, name
    links: PairsValues = values["nccl.pairs"]
    # Six links; on a busy machine one may be slow, and each is known all the same.
    assert (links.links, links.cleared + len(links.bad)) == (6, 6)


def test_a_container_that_is_killed_is_named_and_leaves_nothing(ground: Ground) -> None:
    """One of four, as soon as the first record is there: the others name it within their limit, and end."""
    killed_at: list[float] = []

    def kill() -> None:
        until = time.monotonic() + 200
        while time.monotonic() < until:
            for one in ground.containers:
                # The ranks run once three of its processes have loaded PyTorch's library.
                if one.labels[LABEL] == "rank-2" and one.status == "running" and _has_loaded(one):
                    one.kill()
                    killed_at.append(time.monotonic())
                    return
            time.sleep(0.2)

    killer = threading.Thread(target=kill)
    killer.start()
    result = ground.run(4, level="deep", tests="nccl", rank_limit_s=20)
    ended = time.monotonic()
    killer.join(10)
    assert killed_at, "nothing was killed"
    assert list(result.failures) == [2]
    broken = [record for record in result.records if record["error"]]
    assert broken
    for record in broken:
        assert record["values"]["missing"] == [2], record
        assert "rank 2 of 4" in record["error"]
        assert "rank 2: the payload" in record["error"]
    # One part waited for it, no longer than its limit and a little; the others know that it does not come back.
    assert len(broken) == 1
    assert {"rank 2 of 4" in str(record["undetermined"]) for record in result.records[-1:]} == {True}
    assert ended - killed_at[0] < 20 + 20 + 30
    ground.need_none_left()


def _has_loaded(one: Any) -> bool:
    """Whether a rank runs: the payload's parent, and a child beside it."""
    return len((one.top() or {}).get("Processes") or ()) >= 3
