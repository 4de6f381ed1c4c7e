"""Figures out of the answers of ``gpunode.facts.parsers``: nvbandwidth, nccl-tests, the bandwidth samples of CUDA."""

from collections.abc import Iterator, Mapping
from typing import Any

from gpunode.expectations.assess import Figure
from gpunode.expectations.limits import Where

Answer = Mapping[str, Any]
NVBANDWIDTH_BYTES = 512 * 2**20
"""Its buffers, unless ``--bufferSize`` says otherwise."""
P2P_BYTES = 160_000_000
"""What p2pBandwidthLatencyTest copies at once: 40,000,000 numbers of 4 bytes."""
HOST_TESTS = {"host_to_device_memcpy_ce": "host_to_device", "device_to_host_memcpy_ce": "device_to_host"}
PEER_TESTS = frozenset({"device_to_device_memcpy_read_ce", "device_to_device_memcpy_write_ce"})
COLLECTIVES = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
"""Where nccl-tests calls a collective otherwise than we do."""


def of_nvbandwidth(answer: Answer, message_bytes: int = NVBANDWIDTH_BYTES) -> Iterator[Figure]:
    """Yield one figure for each GPU and direction, and for each ordered pair of GPUs."""
    for test in answer["tests"]:
        if test["status"] != "passed" or test["unit"] != "GB/s" or not test["matrix"]:
            continue
        if test["name"] in HOST_TESTS and len(test["matrix"]) == 1:
            for gpu, cell in enumerate(test["matrix"][0]):
                if cell is not None:
                    yield Figure(HOST_TESTS[test["name"]], cell, Where(gpu), message_bytes)
        elif test["name"] in PEER_TESTS:
            yield from _pairs(test["matrix"], message_bytes)


def _pairs(matrix: list[list[float | None]], message_bytes: int) -> Iterator[Figure]:
    for first, row in enumerate(matrix):
        for second, cell in enumerate(row):
            if first != second and cell is not None:
                yield Figure("peer_to_peer", cell, Where(first, second), message_bytes)


def of_p2p_bandwidth(answer: Answer) -> Iterator[Figure]:
    """Yield one figure for each ordered pair of GPUs, with peer access where the GPUs have it."""
    matrix = answer["unidirectional_gb_per_s"] or answer["unidirectional_no_p2p_gb_per_s"]
    yield from _pairs(matrix or [], P2P_BYTES)


def of_bandwidth_test(answer: Answer) -> Iterator[Figure]:
    """Yield the figures of the largest size."""
    metrics = {
        "host_to_device": "host_to_device",
        "device_to_host": "device_to_host",
        "device_to_device": "on_device",
    }
    for direction, metric in metrics.items():
        rows = [row for row in answer["sizes"] if row["direction"] == direction]
        if rows:
            largest = max(rows, key=lambda row: row["size_bytes"])
            yield Figure(metric, largest["gb_per_s"], Where(), largest["size_bytes"])


def of_nccl_run(run: Answer, collective: str | None = None, nodes: int | None = None) -> Figure | None:
    """Return the bus bandwidth of the largest message of a run, the better of both placements.

    ``collective`` and ``nodes`` stand in for what the log does not say. None where the run has no rows, its collective
    is unknown, or a single GPU took part.
    """
    name = run["collective"] or collective
    if name is None or not run["rows"] or run["ranks"] == 1:
        return None
    largest = max(run["rows"], key=lambda row: row["size_bytes"])
    placements = [largest[key] for key in ("out_of_place", "in_place") if largest[key] is not None]
    values = [place["busbw_gb_per_s"] for place in placements if place["busbw_gb_per_s"] is not None]
    if not values:
        return None
    where = Where(ranks=run["ranks"], nodes=run["nodes"] or nodes or 1)
    return Figure(f"{COLLECTIVES.get(name, name)}_busbw", max(values), where, largest["size_bytes"])
