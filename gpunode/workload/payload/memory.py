"""The memory of a GPU: most of it is allocated, written and read back, twice with opposite bits."""

from __future__ import annotations

from typing import Any

from gpunode.workload.payload.isolate import SkipPart, UndeterminedPart
from gpunode.workload.payload.pytorch import device_for, torch_module

PIECE_BYTES = 256 * 2**20
SPARE = 8
"""This fraction (1/8) of the free memory stays free: for the allocator, and for the comparison itself."""
BUSY_BYTES = 100 * 2**20
"""More than this allocated by others in the meantime: not the driver's own use."""
PATTERNS = (0x5A5A5A5A, ~0x5A5A5A5A)


def run(where: str | None) -> dict[str, Any]:
    """Return the values of ``frameworks.memory``: the device's memory, the tested part, the allocator's counters."""
    torch = torch_module()
    device = device_for(torch, where)
    if device.type != "cuda":
        raise SkipPart("no GPU with readable memory")
    free, total = torch.cuda.mem_get_info(device)
    piece_bytes = min(PIECE_BYTES, free // 32)
    words = piece_bytes // 4
    # Each word contains its own index, so that a broken address line is detected too.
    places = torch.arange(words, dtype=torch.int32, device=device)
    spare = max(free // SPARE, 4 * piece_bytes)
    pieces = taken(torch, device, places, max(1, (free - spare) // piece_bytes))
    wrong = sum(tested(torch, places, pieces, pattern) for pattern in PATTERNS)
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return {
        "device": "cuda",
        "total_mib": total // 2**20,
        "free_mib": free // 2**20,
        "tested_mib": len(pieces) * piece_bytes // 2**20,
        "wrong": wrong,
        "peak_mib": int(stats["allocated_bytes.all.peak"]) // 2**20,
        "reserved_mib": int(stats["reserved_bytes.all.current"]) // 2**20,
    }


def taken(torch: Any, device: Any, places: Any, number: int) -> list[Any]:
    """Return this number of pieces of memory; Undetermined if another process allocates at the same time."""
    free, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    pieces: list[Any] = []
    try:
        while len(pieces) < number:
            pieces.append(torch.empty_like(places))
    except torch.cuda.OutOfMemoryError:
        left, _ = torch.cuda.mem_get_info(device)
        others = (free - left) - (torch.cuda.memory_reserved(device) - reserved)
        if others > BUSY_BYTES:
            raise UndeterminedPart(f"another process used {others >> 20} MiB of it meanwhile") from None
        raise
    return pieces


def tested(torch: Any, places: Any, pieces: list[Any], pattern: int) -> int:
    """Write every piece, then read every piece; return how many words were wrong."""
    for number, piece in enumerate(pieces):
        torch.bitwise_xor(places, pattern ^ number, out=piece)
    wrong = 0
    for number, piece in enumerate(pieces):
        piece.bitwise_xor_(places)
        wrong += int((piece != (pattern ^ number)).sum())
    return wrong
