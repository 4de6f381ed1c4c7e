"""The trace of torch.profiler (Chrome's JSON format, written by Kineto), as activity.

Categories: ``kernel``, ``gpu_memcpy``, ``gpu_memset``, ``cuda_runtime``, ``cpu_op``, ``user_annotation``; times in
microseconds. Source: pytorch/kineto (output_json.cpp, test traces of tb_plugin), and a trace recorded with PyTorch 2.13
on a processor. No trace of a GPU was recorded: unsure.
"""

import json
import re
from collections import defaultdict
from typing import Any

from gpunode.profiling.activity import KernelRun, MemoryCopy, ProfileActivity
from gpunode.profiling.errors import ProfileError

COPY = re.compile(r"Memcpy (\w+) \((\w+) -> (\w+)\)")
LOADER = re.compile(r"enumerate\(DataLoader\)#_(Single|Multi)")


def parse(text: str) -> ProfileActivity:
    """Return the activity of a trace. Raises ProfileError for text that is not one."""
    try:
        document = json.loads(text)
    except ValueError as err:
        raise ProfileError(f"the trace is not complete JSON ({err}): the command may have been killed") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise ProfileError("the trace has no traceEvents")
    activity = ProfileActivity(0.0)
    operations: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    first, last = float("inf"), 0.0
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        try:
            start = float(event["ts"]) / 1e6
            end = start + float(event.get("dur", 0)) / 1e6
        except (KeyError, TypeError, ValueError):
            raise ProfileError("the trace has an event without a time") from None
        category, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))
        if category == "trace":
            continue
        first, last = min(first, start), max(last, end)
        arguments: Any = event.get("args") if isinstance(event.get("args"), dict) else {}
        _add(activity, operations, (category, name, start, end), arguments, event.get("tid"))
    activity.span_s = max(0.0, last - first)
    if not activity.span_s:
        raise ProfileError("the trace is empty")
    for rows in operations.values():
        _self_times(rows, activity.operations)
    return activity


def _add(
    activity: ProfileActivity,
    operations: dict[Any, list[tuple[float, float, str]]],
    event: tuple[str, str, float, float],
    arguments: dict[str, Any],
    thread: Any,
) -> None:
    category, name, start, end = event
    device = arguments.get("device")
    device = device if isinstance(device, int) else 0
    if category == "kernel":
        activity.kernels.append(KernelRun(start, end, name, device))
    elif category in ("gpu_memcpy", "gpu_memset"):
        shape = COPY.match(name)
        size = arguments.get("bytes")
        pageable = None if shape is None else "Pageable" in shape.group(2, 3)
        direction = shape[1] if shape else "memset"
        activity.copies.append(
            MemoryCopy(start, end, direction, size if isinstance(size, int) else None, pageable, device)
        )
    elif category in ("cuda_runtime", "cuda_driver"):
        activity.calls.setdefault(name, []).append((start, end))
    elif category == "cpu_op":
        operations[thread].append((start, end, name))
    elif category == "user_annotation" and (loader := LOADER.match(name)):
        activity.loading.append((start, end))
        activity.single_process = loader[1] == "Single"


def _self_times(rows: list[tuple[float, float, str]], totals: dict[str, float]) -> None:
    """Add each operation's own time of one thread, in which operations are nested."""
    open_: list[list[Any]] = []

    def close() -> None:
        start, end, name, inner = open_.pop()
        totals[name] = totals.get(name, 0.0) + max(0.0, end - start - inner)
        if open_:
            open_[-1][3] += end - start

    for start, end, name in sorted(rows, key=lambda row: (row[0], -row[1])):
        while open_ and open_[-1][1] <= start:
            close()
        open_.append([start, end, name, 0.0])
    while open_:
        close()
