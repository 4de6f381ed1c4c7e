"""An all-reduce over all GPUs by NCCL, one process per GPU; between processes on the CPU by Gloo."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from gpunode.workload.payload.isolate import Outcome, SkipPart, Trouble, one_line
from gpunode.workload.payload.pytorch import timed, torch_module, why_no_gpu

WORDS = (1024, 16 * 2**20)
"""Float32: 4 KiB and 64 MiB. NCCL uses other algorithms for small messages than for large ones."""
WORDS_ON_PROCESSOR = (1024, 2**20)
WAIT_S = 120
_LOG = "nccl.log"
_VIA = re.compile(r"\bvia ([A-Z0-9]+(?:/[A-Za-z0-9]+)?)")
_WARNING = re.compile(r"NCCL WARN (.*)")
MAX_LOG_BYTES = 4 * 2**20


def rank(number: int, size: int, folder: str, backend: str) -> dict[str, Any]:
    """Return the result of one process of the group: wrong elements, seconds, and NCCL's transports."""
    torch = torch_module()
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available() or not getattr(distributed, f"is_{backend}_available")():
        raise SkipPart(f"PyTorch {torch.__version__} has no {backend.upper()}")
    log = Path(folder, f"{number}.{_LOG}")
    if backend == "nccl":
        reason = why_no_gpu(torch)
        if reason is not None:
            raise Trouble(f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU: {reason}")
        torch.cuda.set_device(number)
        # At a file, not over a network: the processes run on this machine.
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,GRAPH,ENV,P2P,SHM,NET", NCCL_DEBUG_FILE=str(log))
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device(f"cuda:{number}" if backend == "nccl" else "cpu")
    distributed.init_process_group(
        backend,
        init_method=Path(folder, "meeting").as_uri(),
        rank=number,
        world_size=size,
        timeout=datetime.timedelta(seconds=WAIT_S),
    )
    wrong, seconds = 0, 0.0
    # 1 + 2 + ... + size, and what an element adds: whole numbers, which float32 represents and sums exactly.
    total = size * (size + 1) // 2
    try:
        for words in WORDS if backend == "nccl" else WORDS_ON_PROCESSOR:
            places = torch.arange(words, dtype=torch.float32, device=device).remainder_(1024)
            values = places + float(number + 1)
            _, seconds = timed(torch, device, functools.partial(distributed.all_reduce, values))
            wrong += int((values != places * size + total).sum())
    finally:
        with contextlib.suppress(Exception):
            distributed.destroy_process_group()
    return {"device": device.type, "wrong": wrong, "seconds": round(seconds, 6), **sent(log)}


def sent(log: Path) -> dict[str, Any]:
    """Return the transports in NCCL's log, with the number of connections each, and its first warning."""
    try:
        with log.open(encoding="utf-8", errors="replace") as stream:
            text = stream.read(MAX_LOG_BYTES)
    except OSError:
        return {}
    warning = _WARNING.search(text)
    return {
        "transports": transports(text),
        "nvls": "NVLS multicast support is available" in text,
        "warning": one_line(warning.group(1)) if warning else None,
    }


def transports(text: str) -> dict[str, int]:
    """Parse ``{"P2P/CUMEM": 14}`` from lines such as ``Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM``."""
    return dict(sorted(Counter(_VIA.findall(text)).items()))


def together(outcomes: list[Outcome], backend: str, size: int) -> Outcome:
    """Return one outcome for the group: of the rank that failed first, or the sum of all."""
    seconds = max((outcome.seconds for outcome in outcomes), default=0.0)
    for key in ("error", "undetermined", "skipped"):
        reasons = [(number, getattr(outcome, key)) for number, outcome in enumerate(outcomes) if getattr(outcome, key)]
        if reasons:
            # If one process ends, the others report a broken connection: the one that ended first has the cause.
            number, reason = min(reasons, key=lambda pair: outcomes[pair[0]].seconds)
            group_outcome = Outcome(seconds)
            setattr(group_outcome, key, reason if key == "skipped" else f"rank {number} of {size}: {reason}")
            return group_outcome
    ways: Counter[str] = Counter()
    for outcome in outcomes:
        ways.update(outcome.values.get("transports") or {})
    warnings = [outcome.values["warning"] for outcome in outcomes if outcome.values.get("warning")]
    return Outcome(
        seconds,
        outcomes[0].device,
        {
            "backend": backend,
            "ranks": size,
            "wrong": sum(outcome.values["wrong"] for outcome in outcomes),
            "seconds": max(outcome.values["seconds"] for outcome in outcomes),
            "transports": dict(sorted(ways.items())),
            "nvls": any(outcome.values.get("nvls") for outcome in outcomes),
            "warning": warnings[0] if warnings else None,
        },
    )
