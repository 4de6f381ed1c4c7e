"""Bundles to judge, and mutants of them: edits of raw text that one check must find."""

import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest import mock

from machine_measured import measured
from machines import (
    DRIVER_NODE,
    GRACE,
    GUEST,
    HGX,
    HGX_4,
    HGX_B200,
    PCI,
    PCIE_2,
    PCIE_4,
    T4_1,
    V100_2,
    Document,
    Machine,
    bundle,
    recorded,
)

from gpunode.checks import Expectation, Finding, Status, judge
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.facts.parsers import smi_links, smi_xml
from gpunode.judging.report import WORST_FIRST
from gpunode.probe.bundle import Bundle

__all__ = ["DRIVER_NODE", "Document"]
KERNEL = PCIE_2.kernel
PLACEHOLDER = re.compile(r"(?<![\w}])\{[A-Za-z_][^{}]*\}")
"""A name in braces that was left in a text, as of a string that lacks its ``f``; neither JSON nor a key of Perl."""


def driver_node() -> Document:
    """Recorded: driver installed, built and held; no GPU; the running kernel is the host's; an older probe."""
    return recorded()


def with_two_gpus() -> Document:
    """Two L40S, Debian's driver."""
    return bundle(PCIE_2)


def pcie_4() -> Document:
    """Four L40S in slots of their own, two sockets."""
    return bundle(PCIE_4)


def hgx() -> Document:
    """Eight H100 behind four NVSwitches, four InfiniBand adapters."""
    return bundle(HGX)


def hgx_b200() -> Document:
    """Eight B200 behind NVSwitches that do not show: NVLink 5."""
    return bundle(HGX_B200)


def hgx_4() -> Document:
    """Four H100 that are linked to each other without NVSwitches."""
    return bundle(HGX_4)


def t4() -> Document:
    """One T4, one socket."""
    return bundle(T4_1)


def v100() -> Document:
    """Two V100, which count memory errors by bits."""
    return bundle(V100_2)


def guest() -> Document:
    """A virtual machine with one L40S passed through."""
    return bundle(GUEST)


def without_gpu() -> Document:
    """The node with a T4, and the T4 taken out: the driver is installed and not loaded."""
    document = t4()
    commands, files = document["commands"], document["files"]
    for key in [key for key in commands if key.startswith(("nvidia-smi", "version-nv-", "version-dcgmi"))]:
        del commands[key]
    commands["device-nodes"]["stdout"] = commands["device-holders"]["stdout"] = ""
    gone = {"/proc/driver/nvidia/version": None, "/proc/driver/nvidia/params": None, "/proc/modules": ""}
    (slot,) = T4_1.slots
    files |= gone | {PCI: files[PCI].replace(f"{slot}\n", "")}
    return document


def measured_on(machine: Machine) -> Document:
    """A node on which the payload of level deep ran on real GPUs, according to the marks: all of it is invented."""
    document = bundle(machine)
    real = [{**record, "simulated": False} for record in document["results"]]
    real[0]["values"] = {**real[0]["values"], "level": "deep"}
    return document | {"simulated": False, "results": [*real, *measured(machine)]}


def hgx_measured() -> Document:
    """Eight H100 behind NVSwitches, measured."""
    return measured_on(HGX)


def pcie_measured() -> Document:
    """Four L40S over PCIe, measured."""
    return measured_on(PCIE_4)


def grace() -> Document:
    """One GH200: its GPU is linked to its processor (C2C)."""
    return bundle(GRACE)


@dataclass(frozen=True)
class Edit:
    """One change of raw text. ``old`` is replaced where it is first found; it must be there. None: the whole."""

    keys: tuple[str | int, ...]
    old: str | None
    new: Any


GONE = object()
"""As ``new`` of an Edit: the key is taken out of the bundle, as if the probe had not asked."""


def stdout(command: str, old: str | None, new: str) -> Edit:
    """Change what a command printed."""
    return Edit(("commands", command, "stdout"), old, new)


def text(path: str, old: str | None, new: str | None) -> Edit:
    """Change what a file held; ``new`` None: there is no such file."""
    return Edit(("files", path), old, new)


def not_run(command: str) -> Edit:
    """The probe's answer lacks the command."""
    return Edit(("commands", command), None, GONE)


def result(document: Document, record: str, *keys: str | int, new: Any) -> Edit:
    """Change a part of the first record of that name in ``document``; GONE as ``new`` takes it out."""
    names = [part["record"] for part in document["results"]]
    return Edit(("results", names.index(record), *keys), None, new)


def timed_out(command: str) -> list[Edit]:
    """The command did not come back in time."""
    keys = ("commands", command)
    return [
        Edit((*keys, "rc"), None, 124),
        Edit((*keys, "timed_out"), None, True),
        Edit((*keys, "stdout"), None, ""),
    ]


def copied(document: Document) -> Document:
    """The document again, as ``deepcopy`` makes it, in a tenth of its time."""
    again: Document = pickle.loads(pickle.dumps(document, pickle.HIGHEST_PROTOCOL))  # noqa: S301 - our own
    return again


def apply(document: Document, edits: Sequence[Edit]) -> Document:
    """The document with the edits made; AssertionError where the text to be replaced is not there."""
    edited = copied(document)
    for edit in edits:
        *parents, last = edit.keys
        inner: Any = edited
        for key in parents:
            inner = inner[key]
        if edit.new is GONE:
            del inner[last]
        elif edit.old is None:
            inner[last] = edit.new
        else:
            assert edit.old in inner[last], f"{edit.old!r} is not in {'/'.join(map(str, edit.keys))}"
            inner[last] = inner[last].replace(edit.old, edit.new, 1)
    return edited


def findings(document: Document, expect: Expectation | None = None) -> list[Finding]:
    """All findings on a bundle, by the way that ``validate --replay`` goes."""
    return judge(facts_of(json.dumps(document)), expect or Expectation(), level="deep")


# Edits mostly leave the long answers of nvidia-smi as they are, and healthy nodes are judged again and again.
_XML = lru_cache(maxsize=64)(smi_xml.parse)
_NVLINK = lru_cache(maxsize=128)(smi_links.parse_nvlink)


@lru_cache(maxsize=32)
def facts_of(text: str) -> NodeFacts:
    """Return the facts of a bundle's JSON. The same answer of nvidia-smi is parsed once."""
    with mock.patch.object(smi_xml, "parse", _XML), mock.patch.object(smi_links, "parse_nvlink", _NVLINK):
        return facts_from_bundle(Bundle.from_json(text, "a test's bundle"))


def verdicts(document: Document, expect: Expectation | None = None) -> Mapping[str, Status]:
    """Check id to the worst of what it found."""
    return by_check(findings(document, expect))


def by_check(findings: Sequence[Finding]) -> Mapping[str, Status]:
    """Check id to the worst of its findings."""
    by_id: dict[str, list[Status]] = {}
    for finding in findings:
        by_id.setdefault(finding.check, []).append(finding.status)
    return {check: min(statuses, key=WORST_FIRST.index) for check, statuses in by_id.items()}


Base = Callable[[], Document]
Missing = dict[str, list[tuple[Base, list[Edit]]]]


@dataclass(frozen=True)
class Mutant:
    """An edit that one check must find."""

    check: str
    name: str
    base: Base
    edits: list[Edit]
    becomes: Status = Status.FAIL
    skips: tuple[str, ...] = ()
    """Checks that have nothing to look at any more."""
    unknown: tuple[str, ...] = ()
    """Checks that lack their data now."""
    expect: Expectation = field(default_factory=Expectation)
    everywhere: bool = False
    """It is of every GPU of the node: each has a finding."""


def garbled(command: str, text: str = "garbage\n") -> list[Edit]:
    """The command printed something that is not an answer."""
    return [Edit(("commands", command, "stdout"), None, text)]


def cut(command: str) -> list[Edit]:
    """The command printed more than the probe keeps."""
    return [Edit(("commands", command, "truncated"), None, True)]
