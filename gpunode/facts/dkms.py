"""``dkms status``: version 2 separates name and version by a comma, version 3 by a slash."""

import re

from gpunode.facts.bundle_reader import BundleReader, first_line
from gpunode.facts.errors import ParseError
from gpunode.facts.node import DkmsModule

_LINE = re.compile(
    r"(?P<name>[^\s,/:]+)(?:, |/)(?P<version>[^\s,/]+?)"
    r"(?:, (?P<kernel>[^\s,]+), (?P<architecture>[^\s,:]+))?"
    r": (?P<state>added|built|installed|broken|installed-weak|installed-binary|built-binary)"
    r"(?: from (?P<origin>\S+))?"
    r"(?: ?\((?P<note>.*)\))?\s*"
)
_REMARK = re.compile(r"\s|Deprecated feature|Error!|Warning|WARNING|File:|Manual intervention|Consult ")


def modules(bundle: BundleReader) -> tuple[DkmsModule, ...]:
    """Return the modules that DKMS lists; empty if DKMS is not installed."""
    if bundle.command("dkms-status").missing:
        return ()
    return parse(bundle.output("dkms-status"))


def parse(text: str) -> tuple[DkmsModule, ...]:
    """Parse all lines; raise ParseError for one that is neither a module nor a message of dkms."""
    found = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match:
            notes = (f"from {match['origin']}" if match["origin"] else "", (match["note"] or "").replace(") (", "; "))
            found.append(
                DkmsModule(
                    name=match["name"],
                    version=match["version"],
                    kernel=match["kernel"],
                    architecture=match["architecture"],
                    state=match["state"],
                    note="; ".join(note for note in notes if note) or None,
                )
            )
        elif line.strip() and not _REMARK.match(line):
            raise ParseError(f"expected a line of dkms status, found '{first_line(line)}'")
    return tuple(found)
