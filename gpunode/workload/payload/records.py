"""The record of one part, as it is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpunode.workload.payload.isolate import Job, Outcome, Task

SCHEMA = "gpunode.record/1"


def record(task: Task, job: Job, outcome: Outcome) -> dict[str, Any]:
    """Return the record as it is printed; the launcher adds the container."""
    fell = outcome.error is not None or outcome.undetermined is not None
    return {
        "record": task.name,
        "schema": SCHEMA,
        "device": outcome.device or (default_device(job) if fell else "cpu"),
        "component": job.component,
        "seconds": outcome.seconds,
        "values": {**{key: value for key, value in job.identity.items() if value is not None}, **outcome.values},
        "error": outcome.error,
        "skipped": outcome.skipped,
        "undetermined": outcome.undetermined,
        "container": None,
        "simulated": False,
    }


def default_device(job: Job) -> str:
    """Return the intended device of a part without a result: the GPU if there is one."""
    return "cuda" if job.identity or Path("/dev/nvidiactl").exists() else "cpu"
