"""Files of the libraries that must exist once: libcuda, libnvidia-ml, libnccl, libcudnn."""

import re

from gpunode.facts.bundle_reader import BundleReader, first_line, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models.base import Fact, FactArea, fact
from gpunode.facts.system import read_architecture

_CACHED = re.compile(r"\s*(lib[a-z-]{2,20}\.so[0-9.]{0,20}) \(([^)]{0,120})\) => (/.{1,4000})")
_NAME = re.compile(r".*/(lib(?:cuda|nvidia-ml|nccl|cudnn))\.so(?:\.([0-9.]{1,40}))?")
_ANY_NAME = re.compile(r".*/(lib[a-z0-9-]{1,60})\.so(?:\.([0-9.]{1,40}))?")
_NATIVE = {"x86_64": "x86-64", "aarch64": "AArch64"}


class LibraryFile(Fact):
    """One file of a library that must exist once (libcuda, libnvidia-ml, libnccl, libcudnn), or an empty one of the
    driver's others."""

    name: str
    """Without suffix: ``libcuda``."""
    path: str
    """As listed in the linker's cache, or in a well-known folder."""
    file: str
    """The target of the path."""
    version: str | None
    """From the file's name: ``580.95.05``, ``2.27.3``; None for a ``libcuda.so.1`` that is not a link."""
    in_cache: bool
    """True if the dynamic linker's cache lists it."""
    used: bool
    """True for the file that the linker loads for a program of the machine's own architecture."""
    bits: int | None = None
    """32 or 64, if the cache has it."""
    size: int | None = None
    """Of the file, in bytes; None: an older probe collected it."""


def read_libraries(bundle: BundleReader) -> tuple[LibraryFile, ...]:
    """Return every path in the linker's cache and in the probe's folders. The linker loads the first one in its
    cache."""
    # Older probes recorded no size.
    rows = [line.split("\t") for line in bundle.look("library-files")]
    malformed = next((row for row in rows if len(row) not in (2, 3)), None)
    if malformed is not None:
        raise ParseError(f"expected a path, its file and its size, found '{first_line(malformed[0])}'")
    files = [(row[0], row[1], whole(row[2]) if len(row) == 3 else None) for row in rows]
    cached: dict[str, str] = {}
    used: dict[str, str] = {}
    native = _NATIVE.get(read_architecture(bundle), "")
    for line in bundle.output("ldconfig").splitlines():
        match = _CACHED.fullmatch(line)
        if not match:
            raise ParseError(f"expected a line of ldconfig -p, found '{first_line(line)}'")
        soname, flags, path = match.groups()
        cached.setdefault(path, flags)
        if not native or native in flags:
            used.setdefault(soname, path)
    winners = set(used.values())
    return tuple(
        LibraryFile(
            name=match[1],
            path=path,
            file=file,
            version=_version(file),
            in_cache=path in cached,
            used=path in winners,
            bits=_bits(cached.get(path)),
            size=size,
        )
        for path, file, size in files
        if (match := _NAME.fullmatch(path) or (_ANY_NAME.fullmatch(path) if size == 0 else None))
    )


def _version(file: str) -> str | None:
    """Return the version in a name: ``libcuda.so.580.95.05`` has one; ``libcuda.so.1`` and ``libcuda.so`` do not."""
    match = _NAME.fullmatch(file)
    return match[2] if match and match[2] and "." in match[2] else None


def _bits(flags: str | None) -> int | None:
    if flags is None:
        return None
    return 64 if "x86-64" in flags or "AArch64" in flags or "64bit" in flags else 32


class LibrariesFacts(FactArea):
    """Libraries."""

    libraries: tuple[LibraryFile, ...] | None = fact(read_libraries)
    """libcuda, libnvidia-ml, libnccl, libcudnn: all copies in the linker's cache and in well-known folders."""
