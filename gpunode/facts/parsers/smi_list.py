"""``nvidia-smi -L``: GPUs and their MIG devices."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.models.smi import Failure, ListedGpu, ListedMigDevice, SmiList
from gpunode.facts.parsers import smi_error
from gpunode.facts.parsers.values import MOST_GPUS, found_text, lines_of, shorten, text_or_none

GPU_LINE = re.compile(r"\s*GPU (?P<index>\d{1,4}): (?P<name>.*?)\s*\((?P<key>UUID|S/N): (?P<id>[^()]*)\)\s*")
_LOST_LINE = re.compile(r"\s*GPU (?P<index>\d{1,4}): (?P<name>Unknown Error|GPU is lost|ERR!)\s*")
_MIG_LINE = re.compile(r"\s+MIG (?P<name>\S+)\s+Device\s+(?P<index>\d{1,4}): \(UUID: (?P<uuid>MIG-[^()]*)\)\s*")
_LINE_LIMIT = 1000


def parse(text: str) -> SmiList | Failure:
    """Parse the list.

    ``messages`` are lines that nvidia-smi prints beside the list; a lost GPU is named only there. If nvidia-smi failed,
    return its error. Raise ParseError for other text and for a truncated line.
    """
    gpus: list[ListedGpu] = []
    messages: list[str] = []
    for raw in lines_of(text):
        line = raw[:_LINE_LIMIT]
        gpu = GPU_LINE.fullmatch(line) or _LOST_LINE.fullmatch(line)
        device = _MIG_LINE.fullmatch(line)
        if gpu:
            gpus.append(_gpu(gpu))
            if len(gpus) > MOST_GPUS:
                raise ParseError(f"expected the list of nvidia-smi -L, found more than {MOST_GPUS} GPUs")
        elif device and gpus:
            entry = ListedMigDevice(name=device["name"], index=int(device["index"]), uuid=device["uuid"])
            gpus[-1] = gpus[-1].model_copy(update={"mig_devices": (*gpus[-1].mig_devices, entry)})
        elif smi_error.is_remark(line):
            messages.append(line.strip())
        elif line.strip():
            raise ParseError(
                f"expected lines of nvidia-smi -L such as 'GPU 0: NAME (UUID: ...)', found '{shorten(line)}'"
            )
    if gpus:
        if len({gpu.index for gpu in gpus}) < len(gpus):
            raise ParseError("expected every GPU once in nvidia-smi -L, found an index twice")
        return SmiList(gpus=tuple(gpus), messages=tuple(messages))
    error = smi_error.find(text)
    if error is None:
        raise ParseError(f"expected lines of nvidia-smi -L such as 'GPU 0: NAME (UUID: ...)', {found_text(text)}")
    return error


def _gpu(match: re.Match[str]) -> ListedGpu:
    groups = match.groupdict()
    uuid = groups["id"] if groups.get("key") == "UUID" else None
    return ListedGpu(index=int(groups["index"]), name=text_or_none(groups["name"]), uuid=text_or_none(uuid))
