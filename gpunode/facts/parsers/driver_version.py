"""``/proc/driver/nvidia/version``: the loaded kernel module."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.models.outputs import DriverVersion
from gpunode.facts.parsers.values import found_text, lines_of

_MODULE = re.compile(
    r"\s*NVRM version:\s+NVIDIA UNIX (?P<open>Open )?(?:Kernel Module for \S+|\S+ (?P<open_after>Open )?Kernel Module)"
    r"\s+(?P<version>\d{1,4}(?:\.\d{1,4}){1,2})\s+(?P<rest>.*)"
)
_BEFORE_DATE = re.compile(r".*\([^)]*@[^)]*\)|\s*\w+ [Bb]uild\b")
_DATE = re.compile(r"(?=.*(?<!\d)\d\d?:\d\d:\d\d(?!\d))(?=.*(?<!\d)\d{4}(?!\d)).*")
_OTHER_COMPILER = re.compile(r"\b(?:clang|LLVM)\b", re.I)
_GCC = re.compile(r"\s*GCC version:\s*(.*)")
_VERSION = re.compile(r"(?<![\w.~-])(\d{1,3}(?:\.\d{1,3}){2})(?![\w.])")


def parse(text: str) -> DriverVersion:
    """Parse the version of the loaded NVIDIA kernel module.

    ``gcc`` and ``built`` are None if the line is absent or truncated. Raise ParseError if there is no complete line
    ``NVRM version: NVIDIA UNIX …``.
    """
    lines = lines_of(text)
    module = next((match for line in lines if (match := _MODULE.fullmatch(line[:2000]))), None)
    if module is None:
        raise ParseError(f"expected a line 'NVRM version: NVIDIA UNIX ... Kernel Module ...', {found_text(text)}")
    date = _DATE.fullmatch(_BEFORE_DATE.sub("", module["rest"], count=1).strip())
    compiler = next((match[1] for line in lines if (match := _GCC.fullmatch(line[:2000]))), "")
    return DriverVersion(
        version=module["version"],
        flavour="open" if module["open"] or module["open_after"] else "proprietary",
        gcc=_compiler_version(compiler),
        built=date[0] if date else None,
    )


def _compiler_version(text: str) -> str | None:
    """Return the version of gcc after its name; distributions put their own revision in brackets before or after it."""
    if _OTHER_COMPILER.search(text):
        return None
    outside = re.sub(r"\([^()]*\)", " ", text)
    match = _VERSION.search(outside) or _VERSION.search(text)
    return match[1] if match else None
