"""A lock between processes that leaves no file behind."""

import errno
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpunode.errors import UndeterminedError


@contextmanager
def locked(name: str, limit_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the machine-wide lock of that name; UndeterminedError where another process holds it for longer.

    It is an abstract Unix socket: the kernel frees it when the process ends, however it ends.
    """
    deadline = time.monotonic() + limit_s
    told = False
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind(f"\0gpunode-lab/{name}")
                break
            except OSError as err:
                if err.errno != errno.EADDRINUSE:
                    raise
                if not told:
                    say(f"{name}: waiting for another gpunode lab command")
                    told = True
                if time.monotonic() > deadline:
                    text = f"another gpunode lab command works on {name} for more than {limit_s:g} s: wait for it"
                    raise UndeterminedError(text) from err
            time.sleep(0.2)
        yield
