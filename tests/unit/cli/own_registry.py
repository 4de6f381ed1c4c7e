"""Own checks are registered for the whole process: tests that load some restore the registry."""

from collections.abc import Iterator
from contextlib import contextmanager

from gpunode.checks import registry
from gpunode.judging import own_checks


@contextmanager
def restored_registry() -> Iterator[None]:
    kept = {name: value.copy() if hasattr(value, "copy") else value for name, value in vars(registry).items()}
    files = dict(own_checks._files)
    try:
        yield
    finally:
        vars(registry).update(kept)
        own_checks._files.clear()
        own_checks._files.update(files)
