"""TensorFlow: its build, and whether it computes on every GPU as training requires."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble, UndeterminedPart

SIZE = 256


def tensorflow_module() -> Any:
    """Return TensorFlow. Raises SkipPart if the image has none, UndeterminedPart if it cannot be imported."""
    if importlib.util.find_spec("tensorflow") is None:
        raise SkipPart("TensorFlow is not in the image")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        return importlib.import_module("tensorflow")
    except Exception as err:
        # A library of the image is missing or does not match: that is not a fault of the node.
        raise UndeterminedPart(f"TensorFlow cannot be imported: {type(err).__name__}: {err}") from None


def versions() -> dict[str, Any]:
    """Return the values of ``versions.tensorflow``."""
    tensorflow = tensorflow_module()
    build = dict(tensorflow.sysconfig.get_build_info())
    number = len(tensorflow.config.list_physical_devices("GPU"))
    return {
        "device": "cuda" if number else "cpu",
        "version": str(tensorflow.__version__),
        "built_with_cuda": bool(tensorflow.test.is_built_with_cuda()),
        "cuda": build.get("cuda_version"),
        "cudnn": build.get("cudnn_version"),
        "architectures": [str(name) for name in build.get("cuda_compute_capabilities") or ()],
        "count": number,
    }


def without_code(architectures: list[str], capabilities: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the capabilities for which a build has no compiled code; none if the build does not report its code.

    ``sm_80`` is code for 8.0 and later of the same major; ``compute_90`` is PTX, which the driver has to compile.
    """
    matches = [re.fullmatch(r"sm_(\d+)(\d)[af]?", name) for name in architectures]
    built = [(int(match.group(1)), int(match.group(2))) for match in matches if match]
    if not built:
        return []
    return [has for has in capabilities if not any(code[0] == has[0] and code[1] <= has[1] for code in built)]


def capabilities_of(tensorflow: Any, gpus: list[Any]) -> list[tuple[int, int]]:
    """Return the compute capabilities of the GPUs, each once, as far as TensorFlow reports them before it starts on
    them.
    """
    details = [tensorflow.config.experimental.get_device_details(gpu) for gpu in gpus]
    return sorted({tuple(detail["compute_capability"]) for detail in details if detail.get("compute_capability")})


def ready() -> Any:
    """Return TensorFlow with memory growth. Raises as ``tensorflow_module``, and SkipPart if it would first compile for
    the GPUs, which takes many minutes.
    """
    tensorflow = tensorflow_module()
    gpus = tensorflow.config.list_physical_devices("GPU")
    architectures = [str(name) for name in tensorflow.sysconfig.get_build_info().get("cuda_compute_capabilities") or ()]
    lacking = without_code(architectures, capabilities_of(tensorflow, gpus))
    if lacking:
        those = ", ".join("{}.{}".format(*capability) for capability in lacking)
        raise SkipPart(
            f"TensorFlow {tensorflow.__version__} has no code for compute capability {those} "
            f"({', '.join(architectures)}) and would compile for many minutes first; use a newer TensorFlow"
        )
    for gpu in gpus:
        tensorflow.config.experimental.set_memory_growth(gpu, True)
    return tensorflow


def run() -> dict[str, Any]:
    """Return the values of ``frameworks.tensorflow``: memory growth, mixed_float16, a product on every GPU."""
    tensorflow = ready()
    gpus = tensorflow.config.list_physical_devices("GPU")
    growth = [bool(tensorflow.config.experimental.get_memory_growth(gpu)) for gpu in gpus]
    policy = tensorflow.keras.mixed_precision.Policy("mixed_float16")
    generator = tensorflow.random.Generator.from_seed(1)
    left, right = (
        tensorflow.cast(generator.uniform((SIZE, SIZE), -4, 5, dtype=tensorflow.int32), tensorflow.float32)
        for _ in range(2)
    )
    with tensorflow.device("/CPU:0"):
        expected = tensorflow.cast(left, tensorflow.float64) @ tensorflow.cast(right, tensorflow.float64)
    largest = 0.0
    for device in [f"/GPU:{index}" for index in range(len(gpus))] or ["/CPU:0"]:
        with tensorflow.device(device):
            product = tensorflow.identity(left) @ tensorflow.identity(right)
        if device not in product.device.replace("device:", ""):
            raise Trouble(f"the product was computed on {product.device}, not on {device}")
        off = tensorflow.cast(product, tensorflow.float64) - expected
        largest = max(largest, float(tensorflow.reduce_max(tensorflow.abs(off))))
    layer = tensorflow.keras.layers.Dense(4, dtype=policy)
    layer(left)
    return {
        "device": "cuda" if gpus else "cpu",
        "count": len(gpus),
        "memory_growth": all(growth) if gpus else None,
        "compute_dtype": str(layer.compute_dtype),
        "thread_mode": os.environ.get("TF_GPU_THREAD_MODE"),
        "max_error": largest,
    }
