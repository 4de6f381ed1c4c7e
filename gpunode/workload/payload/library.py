"""Shared libraries by ctypes: load one, know which file it was, call a function of it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble


class DriverLibrary:
    """A loaded library of the driver."""

    def __init__(self, name: str) -> None:
        """Raise SkipPart where there is none, Trouble where it is there and cannot be loaded."""
        try:
            self._handle = ctypes.CDLL(name)
        except OSError as err:
            # The same words may be about a library that this one needs: then it is there, and broken.
            if str(err).startswith(name + ":") and "No such file" in str(err):
                raise SkipPart(f"{name} is not in the container") from None
            raise Trouble(f"{name} cannot be loaded: {err}") from None
        self.name = name
        self.path = loaded_file(name)

    def call(self, function: str, *arguments: Any) -> int:
        """The return code of a function; Trouble where the library has no package of that name."""
        return int(self._function(function)(*arguments))

    def has(self, function: str) -> bool:
        """False in a release of the library that lacks the function."""
        return hasattr(self._handle, function)

    def text(self, function: str, code: int) -> str | None:
        """What a function that names a return code says: ``const char *f(int)``."""
        try:
            named = self._function(function)
        except Trouble:
            return None
        named.restype = ctypes.c_char_p
        said = named(code)
        return said.decode(errors="replace")[:200] if said else None

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._handle, name)
        except AttributeError:
            raise Trouble(f"{self.path or self.name} has no function {name}: is it the real library?") from None


def loaded_file(name: str) -> str | None:
    """The file behind a library of this process, from its memory map."""
    stem = name.split(".so", maxsplit=1)[0] + ".so"
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths = (line.split(None, 5)[5] for line in lines if line.count("/"))
    return next((path for path in paths if Path(path).name.startswith(stem)), None)


def cuda_version(number: int) -> str:
    """13000 is CUDA 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"
