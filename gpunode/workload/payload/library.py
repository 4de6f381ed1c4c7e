"""Shared libraries by ctypes: load one, find its file, call a function of it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble


class DriverLibrary:
    """A loaded library of the driver."""

    def __init__(self, name: str) -> None:
        """Load the library; raise SkipPart if there is none, Trouble if it exists and cannot be loaded."""
        try:
            self._handle = ctypes.CDLL(name)
        except OSError as err:
            # The same message may be about a library that this one needs: then this one exists, and is broken.
            if str(err).startswith(name + ":") and "No such file" in str(err):
                raise SkipPart(f"{name} is not in the container") from None
            raise Trouble(f"{name} cannot be loaded: {err}") from None
        self.name = name
        self.path = loaded_file(name)

    def call(self, function: str, *arguments: Any) -> int:
        """Return the return code of a function; Trouble if the library has no function of that name."""
        return int(self._function(function)(*arguments))

    def has(self, function: str) -> bool:
        """Return False in a release of the library that lacks the function."""
        return hasattr(self._handle, function)

    def text(self, function: str, code: int) -> str | None:
        """Return the name of a return code, from a function ``const char *f(int)``."""
        try:
            named = self._function(function)
        except Trouble:
            return None
        named.restype = ctypes.c_char_p
        result = named(code)
        return result.decode(errors="replace")[:200] if result else None

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._handle, name)
        except AttributeError:
            raise Trouble(f"{self.path or self.name} has no function {name}: is it the real library?") from None


def loaded_file(name: str) -> str | None:
    """Return the file behind a library of this process, from its memory map."""
    stem = name.split(".so", maxsplit=1)[0] + ".so"
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = (line.split(None, 5)[5] for line in lines if line.count("/"))
    return next((path for path in paths if Path(path).name.startswith(stem)), None)


def cuda_version(number: int) -> str:
    """Return CUDA 13.0 for 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"
