"""GPUs in Slurm's configuration: slurm.conf, gres.conf and cgroup.conf, as far as they concern this node."""

import re
from collections.abc import Iterator

from gpunode.facts.bundle_reader import BundleReader, first_line
from gpunode.facts.driver import version_of
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.network import read_own_name

_SETTING = re.compile(r"([A-Za-z]\w{0,60})\s{0,9}=\s{0,9}(\"[^\"]{0,4000}\"|[^\s#]{1,4000})")
_PARTS = re.compile(r"(?:[^,\[]|\[[^\]]{0,2000}\])+")
_RANGES = re.compile(r"\[([0-9,-]{1,2000})\]")
_LINE_LIMIT = 8000
_GPU = re.compile(r"gpu(?::(?P<type>[A-Za-z_][\w.-]{0,60}))?(?::(?P<number>\d{1,5}))?(?:\([^)]{0,60}\))?", re.I)
_DEVICE = re.compile(r"/dev/nvidia(?:(\d{1,4})|\[([0-9,-]{1,200})\])")
_DEVICES_MOST = 1024
_CONTROLLER = re.compile(r"SLURM_VERSION\s{0,40}=\s{0,9}(\d{1,4}(?:\.\d{1,4}){1,3})")


class Slurm(Fact):
    """GPUs in Slurm's configuration on this node."""

    folder: str
    configured: int | None
    """GPUs of this node by slurm.conf; None: it names none."""
    device_files: int | None
    """GPU device files of this node by gres.conf; None: it names none, as with AutoDetect."""
    autodetect: str | None
    """``nvml``, ``nvidia`` …"""
    constrains_devices: bool
    """True if jobs can open the GPUs that they were given, and no others."""


def read_slurm(bundle: BundleReader) -> Slurm | None:
    """Return the GPUs that Slurm's configuration gives this node; None if there is no slurm.conf."""
    folder = next(iter(bundle.look("slurm")), None)
    if folder is None:
        return None
    name = read_own_name(bundle).name.partition(".")[0]
    configured = None
    for settings in of_node(bundle.text(f"{folder}slurm.conf") or "", name):
        configured = gpus_of(settings["gres"]) if "gres" in settings else configured
    files: set[int] = set()
    autodetect = None
    for settings in of_node(bundle.text(f"{folder}gres.conf") or "", name):
        autodetect = settings.get("autodetect", autodetect)
        if settings.get("name", "").lower() == "gpu":
            files |= devices_of(settings.get("file", ""))
    cgroup = _settings(bundle.text(f"{folder}cgroup.conf") or "")
    constrained = [settings["constraindevices"].lower() for settings in cgroup if "constraindevices" in settings]
    return Slurm(
        folder=folder,
        configured=configured,
        device_files=len(files) or None,
        autodetect=None if autodetect is None or autodetect.lower() == "off" else autodetect.lower(),
        constrains_devices=constrained[-1:] == ["yes"],
    )


class SlurmVersions(Fact):
    """Versions of Slurm that have to fit."""

    daemon: str
    """Of slurmd on this node."""
    controller: str | None
    """Of the slurmctld that answered; None: it was not asked, as from a prolog, or without scontrol."""


def read_slurm_versions(bundle: BundleReader) -> SlurmVersions | None:
    """Return the versions of slurmd and its controller; None without a configuration or without slurmd."""
    daemon = version_of(bundle, "version-slurmd") if bundle.look("slurm") else None
    if daemon is None:
        return None
    # Debian's slurmd comes without scontrol.
    if not bundle.ran("slurm-controller") or bundle.command("slurm-controller").missing:
        return SlurmVersions(daemon=daemon, controller=None)
    text = bundle.output("slurm-controller")
    match = _CONTROLLER.search(text[:4000])
    if match is None:
        raise ParseError(f"expected SLURM_VERSION from scontrol show config, found '{first_line(text)}'")
    return SlurmVersions(daemon=daemon, controller=match[1])


def _settings(text: str) -> Iterator[dict[str, str]]:
    """Yield the settings of each line, names in lower case: they are case-insensitive."""
    for line in text.splitlines():
        if len(line) > _LINE_LIMIT:
            raise ParseError(f"expected a line of Slurm's configuration, found {len(line)} characters")
        yield {name.lower(): value.strip('"') for name, value in _SETTING.findall(line.partition("#")[0])}


def of_node(text: str, name: str) -> Iterator[dict[str, str]]:
    """Yield the lines that apply to a node: without NodeName, with DEFAULT, and with its name."""
    for settings in _settings(text):
        nodes = settings.get("nodename", "DEFAULT")
        if nodes.upper() == "DEFAULT" or covers(nodes, name):
            yield settings


def covers(expression: str, name: str) -> bool:
    """Return True if a list of hosts (``gpu[001-120,130],login``) has the name."""
    for part in _PARTS.findall(expression):
        pieces = _RANGES.split(part)
        pattern = "".join(re.escape(piece) if not index % 2 else r"(\d{1,9})" for index, piece in enumerate(pieces))
        match = re.fullmatch(pattern, name)
        ranges = pieces[1::2]
        if match and all(_within(number, text) for number, text in zip(match.groups(), ranges, strict=True)):
            return True
    return False


def _within(number: str, ranges: str) -> bool:
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ParseError(f"expected ranges of numbers in a list of hosts, found '{first_line(part)}'")
        # 001-120: the numbers have the width of the first.
        wide = len(number) == len(first) or (len(number) > len(first) and not number.startswith("0"))
        if wide and int(first) <= int(number) <= int(last or first):
            return True
    return False


def gpus_of(text: str) -> int:
    """Return the GPUs of ``Gres=gpu:h100:8,nic:4``: without a number one."""
    return sum(int(match["number"] or 1) for match in _gpu_parts(text))


def types_of(text: str) -> tuple[str, ...]:
    """Return the types of GPUs in ``Gres=gpu:h100:8,nic:4``, each once."""
    return tuple(dict.fromkeys(match["type"] for match in _gpu_parts(text) if match["type"]))


def _gpu_parts(text: str) -> Iterator[re.Match[str]]:
    """Yield the GPUs of a list of resources; commas in round brackets are within a part."""
    for part in re.split(r",(?![^(]{0,60}\))", text):
        match = _GPU.fullmatch(part.replace(":no_consume", "").strip())
        if match:
            yield match


def devices_of(text: str) -> set[int]:
    """Return the numbers of ``File=/dev/nvidia[0-3],/dev/nvidia6``; raise ParseError for more than a node can have."""
    numbers: set[int] = set()
    for single, ranges in _DEVICE.findall(text):
        for part in (single or ranges).split(","):
            first, _, last = part.partition("-")
            if not first.isdigit() or not (last or first).isdigit() or int(last or first) - int(first) > _DEVICES_MOST:
                raise ParseError(f"expected GPU device files in gres.conf, found '{first_line(text)}'")
            numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


class SlurmFacts(FactArea):
    """Slurm."""

    slurm: Slurm | None = fact(read_slurm, none_means="the node has no slurm.conf")
    slurm_versions: SlurmVersions | None = fact(
        read_slurm_versions, none_means="the node has no slurm.conf, or no slurmd"
    )
