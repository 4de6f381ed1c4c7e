"""Bundles to judge, and edits of their raw text.

``fixtures/bundles/debian-12-driver.json`` is the probe's answer from a lab node (Debian 12) on which Debian's own
driver packages were installed, built by DKMS and held; the host's kernel name and command line were replaced. The node
has no GPU. ``with_two_gpus`` adds to it what the probe would print of a node with two GPUs: written for these tests,
simulated, never seen on a machine.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gpunode.checks import Expectation, Finding, Status, judge
from gpunode.facts import facts_from_bundle
from gpunode.probe.bundle import Bundle
from gpunode.report.model import worst

FIXTURES = Path(__file__).parents[1] / "fixtures"
DRIVER_NODE = FIXTURES / "bundles" / "debian-12-driver.json"
TWO_GPUS_XML = FIXTURES / "smi" / "two-l40s-simulated.xml"

KERNEL = "6.1.0-56-cloud-amd64"
SLOTS = ("0000:1a:00.0", "0000:3d:00.0")
UEVENT = "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:26B9\nPCI_SUBSYS_ID=10DE:1851\nPCI_SLOT_NAME={slot}\n"
NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue Jul  1 00:00:00 UTC 2025\n"
LOADED = (
    "nvidia_uvm 1540096 0 - Live 0x0000000000000000 (POE)\n"
    "nvidia 56823808 1 nvidia_uvm, Live 0x0000000000000000 (POE)\n"
)

Document = dict[str, Any]


@cache
def _driver_node_text() -> str:
    return DRIVER_NODE.read_text(encoding="utf-8")


def driver_node() -> Document:
    """Driver installed, built and held; no GPU; the running kernel is the host's."""
    document: Document = json.loads(_driver_node_text())
    return document


def with_two_gpus() -> Document:
    """The same node with two GPUs, its own kernel running and the driver loaded: everything is good."""
    document = driver_node()
    commands, files = document["commands"], document["files"]
    commands["uname"]["stdout"] = f"Linux {KERNEL} x86_64\n"
    commands["nvidia-smi-xml"] = {
        "argv": ["nvidia-smi", "-q", "-x"],
        "rc": 0,
        "stdout": TWO_GPUS_XML.read_text(encoding="utf-8"),
        "stderr": "",
        "seconds": 0.5,
        "timed_out": False,
        "truncated": False,
    }
    files["/proc/modules"] = LOADED
    files["/proc/driver/nvidia/version"] = NVRM
    files["/sys/bus/pci/devices/"] += "".join(f"{slot}\n" for slot in SLOTS)
    for slot in SLOTS:
        files[f"/sys/bus/pci/devices/{slot}/uevent"] = UEVENT.format(slot=slot)
    return apply(
        document,
        [stdout("systemctl-units", "ActiveState=inactive\nSubState=dead", "ActiveState=active\nSubState=running")],
    )


@dataclass(frozen=True)
class Edit:
    """One change of raw text. ``old`` is replaced where it is first found; it must be there. None: the whole."""

    place: tuple[str, ...]
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


def timed_out(command: str) -> list[Edit]:
    """The command did not come back in time."""
    place = ("commands", command)
    return [
        Edit((*place, "rc"), None, 124),
        Edit((*place, "timed_out"), None, True),
        Edit((*place, "stdout"), None, ""),
    ]


def apply(document: Document, edits: Sequence[Edit]) -> Document:
    """The document with the edits made; AssertionError where the text to be replaced is not there."""
    edited = deepcopy(document)
    for edit in edits:
        *parents, last = edit.place
        inner = edited
        for key in parents:
            inner = inner[key]
        if edit.new is GONE:
            del inner[last]
        elif edit.old is None:
            inner[last] = edit.new
        else:
            assert edit.old in inner[last], f"{edit.old!r} is not in {'/'.join(edit.place)}"
            inner[last] = inner[last].replace(edit.old, edit.new, 1)
    return edited


def findings(document: Document, expect: Expectation | None = None) -> list[Finding]:
    """All findings on a bundle, by the way that ``validate --replay`` goes."""
    bundle = Bundle.from_json(json.dumps(document), "a test's bundle")
    return judge(facts_from_bundle(bundle), expect or Expectation())


def verdicts(document: Document, expect: Expectation | None = None) -> Mapping[str, Status]:
    """Check id to the worst of what it found."""
    found: dict[str, list[Status]] = {}
    for finding in findings(document, expect):
        found.setdefault(finding.check, []).append(finding.status)
    return {check: worst(statuses) for check, statuses in found.items()}
