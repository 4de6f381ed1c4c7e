"""The driver's user space: library, nvidia-smi, and the processes that use GPUs."""

import re
from collections.abc import Mapping
from typing import Any

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line
from gpunode.facts.errors import ParseError
from gpunode.facts.models.smi import Failure, Smi, SmiGpu, SmiLog
from gpunode.facts.modules import loaded_driver
from gpunode.facts.node import GpuProcess, GpuUsage
from gpunode.facts.parsers import smi_query, smi_xml
from gpunode.facts.parsers.values import bus_id
from gpunode.facts.tools import answer

_LIBRARY = re.compile(r".*/libnvidia-ml\.so\.([0-9]{1,4}(?:\.[0-9]{1,4}){1,2})")


def library_version(bundle: BundleReader) -> str | None:
    """Return the version of the libnvidia-ml.so.1 in the linker's cache, by the name of its target; None: there is
    none."""
    cache = bundle.output("ldconfig")
    if "libnvidia-ml.so.1 (" not in cache:
        return None
    path = bundle.output("readlink-libnvidia-ml").strip()
    match = _LIBRARY.fullmatch(path)
    if not match:
        raise ParseError(f"expected the name libnvidia-ml.so.VERSION, found '{first_line(path)}'")
    return match[1]


def smi(bundle: BundleReader) -> Smi[SmiLog] | None:
    """Return the answer of ``nvidia-smi -q -x``; None if nvidia-smi is not installed or no module is loaded."""
    if not bundle.ran("nvidia-smi-xml") and loaded_driver(bundle) is None:
        return None
    result = bundle.command("nvidia-smi-xml")
    if result.missing:
        return None
    found: Smi[SmiLog] = bundle.once("nvidia-smi-xml", lambda: answer(result, smi_xml.parse, Smi[SmiLog]))
    return found


def usage_again(bundle: BundleReader) -> tuple[GpuUsage, ...] | None:
    """Return the second sample of utilization and power; None if the probe took none."""
    if not bundle.ran_any():
        raise UnknownFactError("no command was run")
    if not bundle.ran("nvidia-smi-usage"):
        return None
    found = smi_query.parse(bundle.output("nvidia-smi-usage"))
    if isinstance(found, Failure):
        raise ParseError(found.error.message)
    return tuple(_usage(row) for row in found.rows)


def _usage(row: Mapping[str, Any]) -> GpuUsage:
    by_name = {name.partition(" [")[0]: value for name, value in row.items()}
    names = ("utilization.gpu", "utilization.memory", "power.draw")
    used, memory, power = (value if isinstance(value := by_name.get(name), int | float) else None for name in names)
    slot = bus_id(str(by_name.get("pci.bus_id")))
    if slot is None:
        raise ParseError("a row without a PCI address")
    return GpuUsage(pci_bus_id=slot, utilization_percent=used, memory_utilization_percent=memory, power_w=power)


def processes(bundle: BundleReader) -> tuple[GpuProcess, ...]:
    """Return the processes that nvidia-smi lists, and others that hold a GPU's device file.

    Raise UnknownFactError unless one of the two lists is complete: without root the open files of other users are
    hidden.
    """
    if _no_driver(bundle):
        return ()
    gpus = _smi_gpus(bundle)
    listed = [(gpu, process) for gpu in gpus for process in gpu.processes or ()]
    complete = bool(gpus) and all(gpu.processes is not None for gpu in gpus)
    holders = bundle.command("device-holders")
    if not complete and holders.rc != 0:
        raise UnknownFactError(f"processes at the GPUs: {first_line(holders.stderr)}; run the probe as root")
    held = _rows(holders.stdout, 4)
    owners = {**_rows(_process_owners(bundle), 3), **held}
    from_smi = tuple(
        GpuProcess(
            pid=process.pid,
            name=process.name,
            type=process.type,
            user=_known(owners[process.pid][0]) if process.pid in owners else None,
            gpu=f"gpu{gpu.index}",
            devices=tuple(held[process.pid][2].split()) if process.pid in held else (),
        )
        for gpu, process in listed
    )
    named = {process.pid for process in from_smi}
    others = (
        GpuProcess(pid=pid, name=_known(row[1]), type=None, user=_known(row[0]), devices=tuple(row[2].split()))
        for pid, row in held.items()
        if pid not in named
    )
    return (*from_smi, *others)


def _no_driver(bundle: BundleReader) -> bool:
    try:
        return loaded_driver(bundle) is None
    except (UnknownFactError, ParseError):
        return False


def _smi_gpus(bundle: BundleReader) -> tuple[SmiGpu, ...]:
    try:
        answer = smi(bundle)
    except (UnknownFactError, ParseError):
        return ()
    return answer.document.gpus if answer and answer.document else ()


def _process_owners(bundle: BundleReader) -> str:
    return bundle.command("process-owners").stdout if bundle.ran("process-owners") else ""


def _rows(text: str, width: int) -> dict[int, list[str]]:
    """Return the probe's tab-separated lines by the process number in their first field."""
    rows = {}
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) != width or not re.fullmatch(r"[0-9]{1,9}", fields[0]):
            raise ParseError(f"expected {width} fields about a process, found '{first_line(line)}'")
        rows[int(fields[0])] = fields[1:]
    return rows


def _known(word: str) -> str | None:
    return None if word == "?" else word
