"""Own checks of a site in Python: packages that name a module under the entry point ``gpunode.checks``."""

import contextlib
import io
import signal
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from gpunode.checks.compare import undetermined
from gpunode.checks.registry import CheckResult, Registry
from gpunode.facts.node import NodeFacts
from gpunode.text import one_line

GROUP = "gpunode.checks"
LOAD_S = 5
"""Limit for loading one package's module."""


class _TooSlow(BaseException):
    """Raised when the limit is reached; a BaseException, so that the module does not catch it."""


def load_packages(registry: Registry) -> None:
    """Register the checks of every installed package; a package that cannot be loaded becomes a check that reports
    it."""
    loaded = registry.packages
    for point in entry_points(group=GROUP):
        origin = f"package {point.dist.name if point.dist else point.value}"
        if (point.name, point.value) in loaded:
            continue
        loaded.add((point.name, point.value))
        try:
            with registry.loading(origin) as ids:
                _load(point)
            reason = None if ids else f"{point.value} registers no check"
        except BaseException as err:
            if isinstance(err, KeyboardInterrupt):
                raise
            reason = f"it took more than {LOAD_S} s" if isinstance(err, _TooSlow) else f"{type(err).__name__}: {err}"
        if reason is not None:
            _broken(registry, point.name, origin, reason)


def _load(point: EntryPoint) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), _limited():
        point.load()


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LOAD_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _broken(registry: Registry, name: str, origin: str, reason: str) -> None:
    """Register a check that reports that a package's checks are missing: silence would look like health."""
    words = one_line(reason, 300)
    safe = "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-") or "package"

    def judge(_: NodeFacts) -> Iterator[CheckResult]:
        yield undetermined(f"the checks of {origin} could not be loaded: {words}")

    check_id = f"own.{safe}"
    if check_id not in registry:
        registry.check(
            check_id,
            category="host",
            means=f"The checks of {origin} are loaded.",
            remedy="Repair or remove the package; gpunode checks test FILE tests its checks.",
            state="none",
            actions=("none",),
        )(judge)
