"""Copies: between host and device from each NUMA node, within a device, between each two GPUs; a device's memory."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path
from typing import Any

from gpunode.workload.payload.isolate import Trouble
from gpunode.workload.payload.measuring import (
    bandwidth,
    median_of,
    memory_needed,
    opened,
    repeated,
    significant,
    timer_of,
    wrong_elements,
)
from gpunode.workload.payload.nvml import Sampler, sensors_of, settle
from gpunode.workload.payload.pytorch import gpu, need_gpu, torch_module

MIB = 2**20
HOST_BYTES, HOST_BYTES_ON_PROCESSOR = 256 * MIB, 8 * MIB
DEVICE_BYTES, DEVICE_BYTES_ON_PROCESSOR = 1024 * MIB, 16 * MIB
PEER_BYTES = 256 * MIB
SHARE_OF_FREE = 8
"""A buffer uses at most this fraction (1/8) of the free memory: a MIG slice has less than a card."""
NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")
MAX_NODES = 16


def random_words(torch: Any, device: Any, size_bytes: int, seed: int) -> Any:
    """Return random 32-bit numbers that use all bits."""
    generator = torch.Generator(device=device).manual_seed(seed)
    least, most = -(2**31), 2**31 - 1
    return torch.randint(least, most, (size_bytes // 4,), generator=generator, device=device, dtype=torch.int32)


def size_for(torch: Any, device: Any, requested: int, on_processor: int) -> int:
    """Return the size of a buffer in bytes, a multiple of four."""
    if device.type != "cuda":
        return on_processor
    free, _ = torch.cuda.mem_get_info(device)
    return max(4, min(requested, int(free) // SHARE_OF_FREE) // 4 * 4)


def numa_nodes(folder: Path = NODES) -> dict[int, set[int]]:
    """Return the NUMA nodes that have processors for this process, with these; empty if the kernel lists none."""
    allowed = os.sched_getaffinity(0)
    nodes = {}
    for path in sorted(folder.glob("node[0-9]*"))[:MAX_NODES]:
        with contextlib.suppress(OSError, ValueError):
            cpus = listed((path / "cpulist").read_text(encoding="ascii")) & allowed
            if cpus:
                nodes[int(path.name[4:])] = cpus
    return nodes


def listed(text: str) -> set[int]:
    """Parse ``0-3,8`` to numbers."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def node_of(pci_bus_id: str | None, folder: Path = PCI) -> int | None:
    """Return the NUMA node of a GPU; None if the kernel reports none."""
    if pci_bus_id is None or not re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", pci_bus_id):
        return None
    try:
        node = int((folder / pci_bus_id / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def host(where: str | None, repetitions: int) -> dict[str, Any]:
    """Return the values of ``copy.host``: both directions, pinned and pageable, with host memory of each NUMA node."""
    torch, device = opened(where)
    torch.set_num_threads(1)
    seen = gpu(torch, 0) if device.type == "cuda" else {}
    gpu_node = node_of(seen.get("pci_bus_id"))
    allowed = os.sched_getaffinity(0)
    nodes: list[tuple[int | None, set[int]]] = [*numa_nodes().items()] or [(None, allowed)]
    copies: list[dict[str, Any]] = []
    kept: list[Any] = []
    for node, cpus in nodes:
        os.sched_setaffinity(0, cpus)
        near = None if gpu_node is None or node is None else node == gpu_node
        for pinned in (True, False) if device.type == "cuda" else (False,):
            for copy in _both_ways(torch, device, pinned=pinned, repetitions=repetitions, kept=kept):
                copies.append({**copy, "pinned": pinned, "numa_node": node, "near": near})
    os.sched_setaffinity(0, allowed)
    pci = {"pci_bus_id": seen["pci_bus_id"]} if "pci_bus_id" in seen else {}
    return {"device": device.type, **pci, "timer": timer_of(device), "copies": copies}


def _both_ways(torch: Any, device: Any, *, pinned: bool, repetitions: int, kept: list[Any]) -> list[dict[str, Any]]:
    size = size_for(torch, device, HOST_BYTES, HOST_BYTES_ON_PROCESSOR)
    with memory_needed(torch, device, "copies"):
        words = random_words(torch, torch.device("cpu"), size, 1)
        # First touched by this thread, so that the kernel allocates it on the node that the thread is bound to.
        source, back = (torch.zeros(size // 4, dtype=torch.int32, pin_memory=pinned) for _ in range(2))
        source.copy_(words)
        buffer = torch.zeros(size // 4, dtype=torch.int32, device=device)
    # PyTorch reuses freed pinned memory: the next node's buffer must not come from this one.
    kept += [source, back]
    rows = []
    for direction, target, origin in (("host_to_device", buffer, source), ("device_to_host", back, buffer)):
        work = functools.partial(target.copy_, origin, non_blocking=pinned)
        seconds = repeated(torch, device, work, warmups=2, repetitions=repetitions)
        arrived = target.cpu() if direction == "host_to_device" else target
        figures = {"direction": direction, "size_bytes": size, **bandwidth(size, seconds)}
        rows.append({**figures, "wrong": wrong_elements(arrived, words)})
    return rows


def within(where: str | None, repetitions: int) -> dict[str, Any]:
    """Return the values of ``copy.device``: each byte is read once and written once."""
    torch, device = opened(where)
    size = size_for(torch, device, DEVICE_BYTES, DEVICE_BYTES_ON_PROCESSOR)
    with memory_needed(torch, device, "copies"):
        source = random_words(torch, device, size, 2)
        target = torch.zeros_like(source)
    seconds = repeated(torch, device, lambda: target.copy_(source), warmups=3, repetitions=repetitions)
    return {
        "device": device.type,
        "timer": timer_of(device),
        "size_bytes": size,
        **bandwidth(2 * size, seconds),
        "wrong": wrong_elements(target, source),
    }


def peers(uuids: list[str], repetitions: int) -> dict[str, Any]:
    """Return the values of ``copy.peer``: each GPU to each other one, in one direction and in both at once."""
    torch = torch_module()
    devices = _all_passed(torch, uuids)
    size = min(size_for(torch, device, PEER_BYTES, PEER_BYTES) for device in devices)
    pairs = between(torch, devices, size, repetitions)
    return {"device": "cuda", "uuids": uuids, "size_bytes": size, "pairs": pairs}


def _all_passed(torch: Any, uuids: list[str]) -> list[Any]:
    """Return PyTorch's devices. Raises Trouble unless it finds as many GPUs as were passed."""
    need_gpu(torch)
    number = int(torch.cuda.device_count())
    if number != len(uuids):
        raise Trouble(f"PyTorch finds {number} GPUs, {len(uuids)} were passed")
    return [torch.device(f"cuda:{index}") for index in range(number)]


def between(torch: Any, devices: list[Any], size: int, repetitions: int) -> list[dict[str, Any]]:
    """Return the copies between each two devices in the form of ``PeerCopy``."""
    sent, received = [], []
    for index, device in enumerate(devices):
        with memory_needed(torch, device, "copies between GPUs"):
            sent.append(random_words(torch, device, size, 3 + index))
            received.append(torch.zeros_like(sent[-1]))
    rows = []
    for sender, device in enumerate(devices):
        for receiver, target in enumerate(devices):
            if sender == receiver:
                continue
            received[receiver].zero_()
            seconds = _copies(torch, [(sent[sender], received[receiver])], repetitions)
            # Both matrices came from generators of their own device: the reference is copied over the host.
            wrong = wrong_elements(received[receiver].cpu(), sent[sender].cpu())
            both = None
            if sender < receiver:
                there_and_back = [(sent[sender], received[receiver]), (sent[receiver], received[sender])]
                taken_s = _copies(torch, there_and_back, repetitions)
                both = significant(2 * size / median_of(taken_s) / 1e9)
                wrong += wrong_elements(received[sender].cpu(), sent[receiver].cpu())
            rows.append(
                {
                    "source": sender,
                    "target": receiver,
                    "direct": device.type == "cuda" and bool(torch.cuda.can_device_access_peer(sender, receiver)),
                    **bandwidth(size, seconds),
                    "both_gb_per_s": both,
                    "wrong": wrong,
                }
            )
            if target.type == "cuda":
                torch.cuda.synchronize(target)
    return rows


def _copies(torch: Any, pairs: list[tuple[Any, Any]], repetitions: int) -> list[float]:
    """Return the seconds for all copies, started at the same time, each on a stream of its source."""
    device = pairs[0][0].device
    if device.type != "cuda":

        def one_after_another() -> None:
            for source, target in pairs:
                target.copy_(source)

        return repeated(torch, device, one_after_another, warmups=1, repetitions=repetitions)
    streams = [torch.cuda.Stream(source.device) for source, _ in pairs]
    first = torch.cuda.current_stream(device)

    def at_once() -> None:
        for stream, (source, target) in zip(streams, pairs):
            stream.wait_stream(first)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            first.wait_stream(stream)

    with torch.cuda.device(device):
        return repeated(torch, device, at_once, warmups=2, repetitions=repetitions)


BYTES, BYTES_ON_PROCESSOR = 1024 * 2**20, 16 * 2**20
SCALE = 3.0
SETTLE_S = 20.0


def memory_bandwidth(where: str | None, gpu_uuid: str | None, repetitions: int) -> dict[str, Any]:
    """Return the values of ``memory.stream``.

    Small whole numbers: every sum is exact in float32, in any order of addition, and each result is compared.
    """
    torch, device = opened(where)
    size = size_for(torch, device, BYTES, BYTES_ON_PROCESSOR)
    with memory_needed(torch, device, "the arrays"):
        generator = torch.Generator(device=device).manual_seed(4)
        left, right = (torch.randint(-8, 9, (size // 4,), generator=generator, device=device).float() for _ in range(2))
        result = torch.zeros_like(left)
    total = torch.zeros((), dtype=torch.float32, device=device)
    # One sum per row: no partial sum exceeds the whole numbers that float32 represents.
    rows = left[: size // 4 // 1024 * 1024].view(-1, 1024)
    sums = torch.zeros(rows.shape[0], dtype=torch.float32, device=device)

    def read() -> None:
        torch.sum(rows, dim=1, out=sums)

    def write() -> None:
        result.fill_(SCALE)

    def triad() -> None:
        torch.add(left, right, alpha=SCALE, out=result)

    sensors = sensors_of(gpu_uuid)
    settle(sensors, SETTLE_S)
    kernels = []
    with Sampler(sensors) as sampler:
        for name, work, moved in (
            ("read", read, rows.numel() * 4),
            ("write", write, size),
            ("triad", triad, 3 * size),
        ):
            seconds = repeated(torch, device, work, warmups=3, repetitions=repetitions)
            if name == "read":
                wrong = wrong_elements(sums, rows.double().sum(dim=1).float())
            elif name == "write":
                wrong = wrong_elements(result, total + SCALE)
            else:
                wrong = wrong_elements(result - left, right * SCALE)
            kernels.append({"kernel": name, **bandwidth(moved, seconds), "wrong": wrong})
    return {
        "device": device.type,
        "timer": timer_of(device),
        "size_bytes": size,
        "kernels": kernels,
        "load": sampler.state(),
    }


WORDS = 16 * 2**20
"""64 MiB in one copy."""


def peer_access(uuids: list[str]) -> dict[str, Any]:
    """Return the values of ``frameworks.p2p``: ``access[i][j]`` and the pairs with a wrong copy."""
    torch = torch_module()
    devices = _all_passed(torch, uuids)
    number = len(devices)
    access = [
        [device == other or bool(torch.cuda.can_device_access_peer(device, other)) for other in range(number)]
        for device in range(number)
    ]
    wrong = wrong_peers(torch, devices, WORDS)
    return {"device": "cuda", "uuids": uuids, "access": access, "wrong": wrong}


def wrong_peers(torch: Any, devices: list[Any], words: int) -> list[list[int]]:
    """Return the pairs of devices with a copy that differs from its source."""
    wrong = []
    for sender, source in enumerate(devices):
        # Every device sends other data: the rest of an earlier copy cannot be mistaken for this one.
        sent = torch.arange(words, dtype=torch.int32, device=source).bitwise_xor_(sender + 1)
        for receiver, target in enumerate(devices):
            if sender != receiver:
                received = sent.to(target, copy=True)
                expected = torch.arange(words, dtype=torch.int32, device=target).bitwise_xor_(sender + 1)
                if int((received != expected).sum()):
                    wrong.append([sender, receiver])
    return wrong
