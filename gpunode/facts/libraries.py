"""Files of the libraries that must exist once: libcuda, libnvidia-ml, libnccl, libcudnn."""

import re

from gpunode.facts.bundle_reader import BundleReader, first_line
from gpunode.facts.errors import ParseError
from gpunode.facts.node import LibraryFile
from gpunode.facts.system import architecture

_CACHED = re.compile(r"\s*(lib[a-z-]{2,20}\.so[0-9.]{0,20}) \(([^)]{0,120})\) => (/.{1,4000})")
_NAME = re.compile(r".*/(lib(?:cuda|nvidia-ml|nccl|cudnn))\.so(?:\.([0-9.]{1,40}))?")
_NATIVE = {"x86_64": "x86-64", "aarch64": "AArch64"}


def libraries(bundle: BundleReader) -> tuple[LibraryFile, ...]:
    """Return every path in the linker's cache and in the probe's folders. The linker loads the first one in its
    cache."""
    files = [(path, file) for path, file in bundle.rows("library-files", 2)]
    cached: dict[str, str] = {}
    used: dict[str, str] = {}
    native = _NATIVE.get(architecture(bundle), "")
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
        )
        for path, file in files
        if (match := _NAME.fullmatch(path))
    )


def _version(file: str) -> str | None:
    """Return the version in a name: ``libcuda.so.580.95.05`` has one; ``libcuda.so.1`` and ``libcuda.so`` do not."""
    match = _NAME.fullmatch(file)
    return match[2] if match and match[2] and "." in match[2] else None


def _bits(flags: str | None) -> int | None:
    if flags is None:
        return None
    return 64 if "x86-64" in flags or "AArch64" in flags or "64bit" in flags else 32
