"""TensorFlow: its build, whether it computes on every GPU as training requires, and training over all of them."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble, UndeterminedPart
from gpunode.workload.payload.measuring import significant

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


WIDTH, DEPTH, BATCH = 4096, 4, 1024
"""On a GPU: 67 million parameters, 270 MB of gradients."""
ON_PROCESSOR = (64, 3, 16)
LOGICAL = 2
"""Logical processors that take the place of GPUs."""
STEPS, WARMUPS = 10, 2
TOLERANCE = 1e-4
"""Relative to the largest gradient: devices add the same numbers in another order, in float32."""
SIDE, IMAGES, IMAGES_AT_ONCE = 224, 256, 32
LINE = 300
"""Characters of an error of XLA."""


def training(logical: int = LOGICAL) -> dict[str, Any]:
    """Return the values of ``frameworks.tensorflow-training``; on a processor with this number of logical devices."""
    tensorflow = ready()
    gpus = tensorflow.config.list_physical_devices("GPU")
    if gpus:
        places = [f"/GPU:{index}" for index in range(len(gpus))]
        tensorflow.config.experimental.enable_tensor_float_32_execution(False)
    else:
        places = [f"/CPU:{index}" for index in range(logical)]
        try:
            tensorflow.config.set_logical_device_configuration(
                tensorflow.config.list_physical_devices("CPU")[0],
                [tensorflow.config.LogicalDeviceConfiguration() for _ in places],
            )
        except RuntimeError as err:
            raise SkipPart(f"no logical processors: {err}") from None
    alone = MirroredNetwork(tensorflow, places[:1], on_gpus=bool(gpus))
    single_s = seconds(alone.step)
    together = MirroredNetwork(tensorflow, places, on_gpus=bool(gpus)) if len(places) > 1 else alone
    error, wrong = together.compared()
    step_s = seconds(together.step)
    plain, parallel = input_rates(tensorflow)
    return {
        "device": "cuda" if gpus else "cpu",
        "ranks": len(places),
        "parameters": together.parameters,
        "wrong": wrong,
        "max_gradient_error": error,
        "single_seconds": significant(single_s),
        "step_seconds": significant(step_s),
        "efficiency": significant(min(1.0, single_s / step_s)),
        **xla(tensorflow, places[0]),
        "input_samples_per_second": significant(plain),
        "parallel_samples_per_second": significant(parallel),
        "cpus": len(os.sched_getaffinity(0)),
        "intra_op_threads": int(tensorflow.config.threading.get_intra_op_parallelism_threads()),
        "inter_op_threads": int(tensorflow.config.threading.get_inter_op_parallelism_threads()),
        "thread_mode": os.environ.get("TF_GPU_THREAD_MODE"),
        "thread_count": os.environ.get("TF_GPU_THREAD_COUNT"),
    }


class MirroredNetwork:
    """The same weights on each device, the same numbers in every run; each device has its own part of the data."""

    def __init__(self, tensorflow: Any, places: list[str], *, on_gpus: bool) -> None:
        self.tensorflow, self.places = tensorflow, places
        self.width, self.depth, self.batch = (WIDTH, DEPTH, BATCH) if on_gpus else ON_PROCESSOR
        self.strategy = tensorflow.distribute.MirroredStrategy(devices=places)
        generator = tensorflow.random.Generator.from_seed(13)
        shape = (self.width, self.width)
        first = [generator.normal(shape, stddev=self.width**-0.5) for _ in range(self.depth)]
        with self.strategy.scope():
            self.weights = [tensorflow.Variable(weight) for weight in first]
        self.first = first
        self.parts = [generator.normal((self.batch, self.width)) for _ in places]
        inputs = self.strategy.experimental_distribute_values_from_function(
            lambda context: self.parts[context.replica_id_in_sync_group]
        )
        self._run = tensorflow.function(lambda: self.strategy.run(self._gradients, args=(inputs,)))

    @property
    def parameters(self) -> int:
        """Return the parameters of the network."""
        return self.depth * self.width * self.width

    def loss(self, weights: list[Any], inputs: Any) -> Any:
        """Return the mean over the samples."""
        for weight in weights:
            inputs = self.tensorflow.nn.relu(inputs @ weight)
        return self.tensorflow.reduce_mean(self.tensorflow.square(inputs - 1.0))

    def _gradients(self, inputs: Any) -> list[Any]:
        with self.tensorflow.GradientTape() as tape:
            loss = self.loss(self.weights, inputs)
        gradients = tape.gradient(loss, self.weights)
        mean = self.tensorflow.distribute.ReduceOp.MEAN
        return list(self.tensorflow.distribute.get_replica_context().all_reduce(mean, gradients))

    def step(self) -> list[Any]:
        """Run one step: forward, backward, all-reduce. Return the gradients of each device, when they are there."""
        gradients = [self.strategy.experimental_local_results(gradient) for gradient in self._run()]
        for gradient in gradients[0]:
            float(gradient[0, 0])
        return gradients

    def compared(self) -> tuple[float, int]:
        """Return the largest error of a gradient, relative to the largest gradient, and the number of wrong ones.

        The expected gradients come from one device with the data of all: the mean of equal parts' means.
        """
        tensorflow = self.tensorflow
        with tensorflow.device(self.places[0]):
            weights = [tensorflow.Variable(weight) for weight in self.first]
            expected = [tensorflow.zeros_like(weight) for weight in self.first]
            for inputs in self.parts:
                with tensorflow.GradientTape() as tape:
                    loss = self.loss(weights, tensorflow.identity(inputs)) / len(self.parts)
                expected = [total + more for total, more in zip(expected, tape.gradient(loss, weights))]
        largest, wrong = 0.0, 0
        for gradients, reference in zip(self.step(), expected):
            scale = max(1e-30, float(tensorflow.reduce_max(tensorflow.abs(reference))))
            for gradient in gradients:
                error = float(tensorflow.reduce_max(tensorflow.abs(tensorflow.identity(gradient) - reference))) / scale
                error = error if math.isfinite(error) else 1e30
                largest, wrong = max(largest, error), wrong + (error > TOLERANCE)
        return float(f"{largest:.3g}"), wrong


def xla(tensorflow: Any, device: str) -> dict[str, Any]:
    """Return what XLA does with a function: its error against the plain one, and the time to compile it."""
    generator = tensorflow.random.Generator.from_seed(17)
    with tensorflow.device(device):
        left, right = (
            tensorflow.cast(generator.uniform((256, 256), -4, 5, dtype=tensorflow.int32), tensorflow.float32)
            for _ in range(2)
        )

        def work(left: Any, right: Any) -> Any:
            return tensorflow.reduce_sum(tensorflow.nn.relu(left @ right + 1.0), axis=1)

        expected = work(left, right)
        began = time.monotonic()
        try:
            output = tensorflow.function(work, jit_compile=True)(left, right)
            error = float(tensorflow.reduce_max(tensorflow.abs(output - expected)))
        except Exception as err:
            text = " ".join(str(err).split())
            return {"xla_error": f"{type(err).__name__}: {text}"[:LINE], "xla_max_error": None, "xla_seconds": None}
        took = time.monotonic() - began
    return {
        "xla_error": None,
        "xla_max_error": error if math.isfinite(error) else 1e30,
        "xla_seconds": significant(took),
    }


def input_rates(tensorflow: Any) -> tuple[float, float]:
    """Return samples per second of tf.data: one call after the other, and with AUTOTUNE and prefetch."""
    with tensorflow.device("/CPU:0"):
        images = tensorflow.cast(
            tensorflow.random.Generator.from_seed(19).uniform((IMAGES, SIDE, SIDE, 3), 0, 255, dtype=tensorflow.int32),
            tensorflow.uint8,
        )

        def prepare(image: Any) -> Any:
            image = tensorflow.image.resize(tensorflow.cast(image, tensorflow.float32), (SIDE // 2, SIDE // 2))
            return image / 127.5 - 1.0

        rates = []
        for parallel, ahead in ((None, 1), (tensorflow.data.AUTOTUNE, tensorflow.data.AUTOTUNE)):
            source = tensorflow.data.Dataset.from_tensor_slices(images).map(prepare, num_parallel_calls=parallel)
            batches = source.batch(IMAGES_AT_ONCE).prefetch(ahead)
            took = [seconds_of(partial(deque, batches, maxlen=0)) for _ in range(3)]
            rates.append(IMAGES / min(took))
    return rates[0], rates[1]


def seconds(work: Callable[[], Any]) -> float:
    """Return the median of some runs after the warm-up."""
    for _ in range(WARMUPS):
        work()
    return statistics.median(seconds_of(work) for _ in range(STEPS))


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the duration of one run."""
    began = time.perf_counter()
    work()
    return max(1e-9, time.perf_counter() - began)
