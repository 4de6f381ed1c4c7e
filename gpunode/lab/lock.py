"""A lock between processes that leaves no file behind."""

import errno
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpunode.errors import UndeterminedError


@contextmanager
def locked(
    name: str, limit_s: float, progress: Callable[[str], None], stop: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Hold the machine-wide lock of that name; UndeterminedError if another process holds it longer than ``limit_s``,
    or when ``stop`` returns true.

    It is an abstract Unix socket, which the kernel frees when the process ends, also when it is killed.
    """
    deadline = time.monotonic() + limit_s
    reported = False
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind(f"\0gpunode-lab/{name}")
                break
            except OSError as err:
                if err.errno != errno.EADDRINUSE:
                    raise
                if not reported:
                    progress(f"{name}: waiting for another gpunode lab command")
                    reported = True
                if stop():
                    raise UndeterminedError(f"{name}: interrupted") from err
                if time.monotonic() > deadline:
                    text = f"another gpunode lab command works on {name} for more than {limit_s:g} s: wait for it"
                    raise UndeterminedError(text) from err
            time.sleep(0.2)
        yield
