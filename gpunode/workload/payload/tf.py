"""TensorFlow: which build it is, and whether it computes on every GPU as training wants it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from gpunode.workload.payload.isolate import Skip, Trouble

SIZE = 256


def tensorflow_module() -> Any:
    """TensorFlow. Raises Skip where the image has none."""
    if importlib.util.find_spec("tensorflow") is None:
        raise Skip("TensorFlow is not in the image")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return importlib.import_module("tensorflow")


def versions() -> dict[str, Any]:
    """Values of ``versions.tensorflow``."""
    tensorflow = tensorflow_module()
    build = dict(tensorflow.sysconfig.get_build_info())
    number = len(tensorflow.config.list_physical_devices("GPU"))
    return {
        "device": "cuda" if number else "cpu",
        "version": str(tensorflow.__version__),
        "built_with_cuda": bool(tensorflow.test.is_built_with_cuda()),
        "cuda": build.get("cuda_version"),
        "cudnn": build.get("cudnn_version"),
        "count": number,
    }


def run() -> dict[str, Any]:
    """Values of ``frameworks.tensorflow``: memory growth, mixed_float16, a product on every GPU."""
    tensorflow = tensorflow_module()
    gpus = tensorflow.config.list_physical_devices("GPU")
    for gpu in gpus:
        tensorflow.config.experimental.set_memory_growth(gpu, True)
    growth = [bool(tensorflow.config.experimental.get_memory_growth(gpu)) for gpu in gpus]
    policy = tensorflow.keras.mixed_precision.Policy("mixed_float16")
    generator = tensorflow.random.Generator.from_seed(1)
    one, other = (
        tensorflow.cast(generator.uniform((SIZE, SIZE), -4, 5, dtype=tensorflow.int32), tensorflow.float32)
        for _ in range(2)
    )
    with tensorflow.device("/CPU:0"):
        wanted = tensorflow.cast(one, tensorflow.float64) @ tensorflow.cast(other, tensorflow.float64)
    largest = 0.0
    for place in [f"/GPU:{index}" for index in range(len(gpus))] or ["/CPU:0"]:
        with tensorflow.device(place):
            found = tensorflow.identity(one) @ tensorflow.identity(other)
        if place not in found.device.replace("device:", ""):
            raise Trouble(f"the product was computed on {found.device}, not on {place}")
        off = tensorflow.cast(found, tensorflow.float64) - wanted
        largest = max(largest, float(tensorflow.reduce_max(tensorflow.abs(off))))
    layer = tensorflow.keras.layers.Dense(4, dtype=policy)
    layer(one)
    return {
        "device": "cuda" if gpus else "cpu",
        "count": len(gpus),
        "memory_growth": all(growth) if gpus else None,
        "compute_dtype": str(layer.compute_dtype),
        "thread_mode": os.environ.get("TF_GPU_THREAD_MODE"),
        "max_error": largest,
    }
