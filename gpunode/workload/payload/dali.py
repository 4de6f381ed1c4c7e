"""DALI: whether it loads, and whether a pipeline writes data to the GPU."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from gpunode.workload.payload.isolate import SkipPart

BATCH = 4


def run() -> dict[str, Any]:
    """Return the values of ``frameworks.dali``. Raises SkipPart if the image has no DALI, or there is no GPU."""
    try:
        spec = importlib.util.find_spec("nvidia.dali")
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise SkipPart("DALI is not in the image")
    if not Path("/dev/nvidiactl").exists():
        raise SkipPart("no GPU for DALI")
    dali = importlib.import_module("nvidia.dali")
    functions = importlib.import_module("nvidia.dali.fn")
    pipeline = dali.Pipeline(batch_size=BATCH, num_threads=1, device_id=0)
    with pipeline:
        pipeline.set_outputs(functions.random.uniform(device="gpu", range=[0.0, 1.0], shape=[16, 16]))
    pipeline.build()
    (batch,) = pipeline.run()
    return {"device": "cuda", "version": str(dali.__version__), "samples": len(batch)}
