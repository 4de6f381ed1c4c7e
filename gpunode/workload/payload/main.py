"""The payload's command line: runs parts one by one and prints one record a line.

Exit codes: 0 it came to its end, whatever it found; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpunode.workload.payload import dali, image, libcuda, nvml, pytorch, tf
from gpunode.workload.payload.isolate import Outcome, isolated

SCHEMA = "gpunode.record/1"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


class Part:
    """One thing to try: its name, what tries it, how long it may take."""

    def __init__(
        self, name: str, run: Callable[..., dict[str, Any]], limit_s: float, wants: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.run = run
        self.limit_s = limit_s
        self.wants = wants
        """Keys of the settings that ``run`` is given, in this order; None where the settings lack one."""


VERSIONS = (
    Part("versions.system", image.system, 30),
    Part("versions.limits", image.limits, 30),
    Part("versions.nvml", nvml.versions, 60),
    Part("versions.cuda", libcuda.versions, 120),
    Part("versions.torch", pytorch.versions, 180),
    Part("versions.tensorflow", tf.versions, 180),
)
FRAMEWORKS = (
    Part("frameworks.amp", pytorch.amp, 180),
    Part("frameworks.compile", pytorch.compiled, 420, ("compile_min_capability",)),
    Part("frameworks.cudnn", pytorch.convolution, 180),
    Part("frameworks.dataloader", pytorch.dataloader, 180),
    Part("frameworks.memory", pytorch.memory, 180),
    Part("frameworks.tensorflow", tf.run, 300),
    Part("frameworks.dali", dali.run, 180),
)
TENSOR = Part("frameworks.tensor", pytorch.tensor, 180)
COUNT_LIMIT_S = 180


class Clock:
    """How much time is left for all parts together."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self._until = None if limit_s is None else time.monotonic() + limit_s

    def left(self, wanted_s: float) -> float:
        """``wanted_s``, or what is left where that is less; 0 or below: nothing is."""
        return wanted_s if self._until is None else min(wanted_s, self._until - time.monotonic())


def records(tests: list[str], settings: dict[str, Any], clock: Clock) -> Iterator[dict[str, Any]]:
    """All records of the tests, as they come."""
    if "versions" in tests:
        for part in VERSIONS:
            yield attempt(part, "node", (), clock)
    if "frameworks" in tests:
        yield from tensors(clock)
        for part in FRAMEWORKS:
            yield attempt(part, "node", tuple(settings.get(key) for key in part.wants), clock)


def tensors(clock: Clock) -> Iterator[dict[str, Any]]:
    """One record of every GPU that PyTorch counts; one of the processor where it counts none."""
    counted = isolated(pytorch.count, (), clock.left(COUNT_LIMIT_S))
    if counted.error is not None or counted.skipped is not None:
        yield record(TENSOR, "node", counted)
        return
    number = counted.values["count"]
    for index in range(number):
        yield attempt(TENSOR, f"cuda:{index}", (index,), clock)
    if number == 0:
        yield attempt(TENSOR, "node", (None,), clock)


def attempt(part: Part, component: str, arguments: tuple[Any, ...], clock: Clock) -> dict[str, Any]:
    """The record of one part."""
    limit_s = clock.left(part.limit_s)
    if limit_s <= 0:
        return record(
            part, component, Outcome(0.0, undetermined=f"not run: the {clock.limit_s:g} s for all are used up")
        )
    return record(part, component, isolated(part.run, arguments, limit_s))


def record(part: Part, component: str, outcome: Outcome) -> dict[str, Any]:
    """The record as it is printed; the launcher adds the container."""
    return {
        "record": part.name,
        "schema": SCHEMA,
        "device": outcome.device or (default_device() if outcome.error is not None else "cpu"),
        "component": component,
        "seconds": round(outcome.seconds, 3),
        "values": outcome.values,
        "error": outcome.error,
        "skipped": outcome.skipped,
        "undetermined": outcome.undetermined,
        "container": None,
        "simulated": False,
    }


def default_device() -> str:
    """What a part that broke was tried on: the GPU where there is one to be tried."""
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def run(arguments: list[str]) -> int:
    """Run what the arguments say, records to stdout."""
    parser = argparse.ArgumentParser(prog="payload", description=__doc__.splitlines()[0])
    parser.add_argument("--tests", default="versions", help="versions, frameworks, or both with a comma")
    parser.add_argument("--settings", default="{}", help="a JSON object: compile_min_capability")
    parser.add_argument("--limit", type=float, help="seconds for all parts together")
    chosen = parser.parse_args(arguments)
    tests = [name.strip() for name in chosen.tests.split(",")]
    for name in tests:
        if name not in ("versions", "frameworks"):
            parser.error(f"--tests: there is no test '{name}'; there are versions and frameworks")
    try:
        settings = json.loads(chosen.settings)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        parser.error("--settings: expected a JSON object")
    with scratch():
        number = 0
        for line in records(tests, settings, Clock(chosen.limit)):
            say(line)
            number += 1
    say({"record": "end", "records": number})
    return 0


@contextlib.contextmanager
def scratch() -> Iterator[None]:
    """Compilers keep what they made in a folder that is gone afterwards, not in the home of whoever runs this."""
    try:
        folder = tempfile.mkdtemp(prefix="gpunode-")
    except OSError:
        # Nothing can be written anywhere: the parts that need it say so themselves.
        yield
        return
    os.environ.update({name: str(Path(folder, name.lower())) for name in CACHES})
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def say(line: dict[str, Any]) -> None:
    """One line of JSON, at once: what is known is told even where the next part takes the machine down."""
    sys.stdout.write(json.dumps(line, sort_keys=True) + "\n")
    sys.stdout.flush()
