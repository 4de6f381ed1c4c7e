"""GPUs as nvidia-smi reports them, with their processes, and their links: topology, peer access, NVLink."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.models.smi import DocumentT, Failure, Nvlink, PeerAccess, Smi, SmiGpu, SmiLog, Topology
from gpunode.facts.modules import read_loaded_driver
from gpunode.facts.parsers import smi_base, smi_links, smi_lists, smi_xml
from gpunode.facts.parsers.values import bus_id
from gpunode.facts.tools import answer

_LIBRARY = re.compile(r".*/libnvidia-ml\.so\.([0-9]{1,4}(?:\.[0-9]{1,4}){1,2})")


# /proc/PID/comm truncates names to 15 characters.
# nvidia-smi opens nvidia-uvm too (580.159.04, as `nvidia-smi -l`), as gpunode top and exporters run it.
_WATCHERS = frozenset(
    ("nvidia-persiste", "nv-hostengine", "nv-fabricmanage", "nvidia-imex", "nvlsm", "dcgm-exporter", "nvidia-smi")
)


class GpuUsage(Fact):
    """Utilization and power of one GPU at one moment."""

    VOLATILE = frozenset({"utilization_percent", "memory_utilization_percent", "power_w"})

    pci_bus_id: str
    utilization_percent: float | None
    memory_utilization_percent: float | None
    power_w: float | None


class GpuProcess(Fact):
    """One process that holds a GPU."""

    pid: int
    name: str | None
    type: str | None
    """As nvidia-smi prints it: ``C``, ``G``, ``C+G``, ``M+C``; None if nvidia-smi does not list the process."""
    user: str | None = None
    gpu: str | None = None
    """``gpu3``; None if unknown."""
    devices: tuple[str, ...] = ()
    """The device files that it holds, as far as they could be read."""

    @property
    def title(self) -> str:
        """Return the process for a message: ``python3 (pid 4242, alice)``."""
        return f"{self.name or '?'} (pid {self.pid}, {self.user or '?'})"

    @property
    def computes(self) -> bool:
        """Return True for a process that makes a GPU busy: a compute process, or one with CUDA's memory device open."""
        if self.type is not None:
            return "C" in self.type
        return self.name not in _WATCHERS and any(device.startswith("/dev/nvidia-uvm") for device in self.devices)


def read_driver_library_version(bundle: BundleReader) -> str | None:
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


def read_smi(bundle: BundleReader) -> Smi[SmiLog] | None:
    """Return the answer of ``nvidia-smi -q -x``; None if nvidia-smi is not installed or no module is loaded."""
    if not bundle.ran("nvidia-smi-xml") and read_loaded_driver(bundle) is None:
        return None
    result = bundle.command("nvidia-smi-xml")
    if result.missing:
        return None
    smi: Smi[SmiLog] = bundle.once("nvidia-smi-xml", lambda: answer(result, smi_xml.parse, Smi[SmiLog]))
    return smi


def read_gpu_usage_again(bundle: BundleReader) -> tuple[GpuUsage, ...] | None:
    """Return the second sample of utilization and power; None if the probe took none."""
    if not bundle.ran_any():
        raise UnknownFactError("no command was run")
    if not bundle.ran("nvidia-smi-usage"):
        return None
    table = smi_lists.parse_query(bundle.output("nvidia-smi-usage"))
    if isinstance(table, Failure):
        raise ParseError(table.error.message)
    return tuple(_usage(row) for row in table.rows)


def _usage(row: Mapping[str, Any]) -> GpuUsage:
    by_name = {name.partition(" [")[0]: value for name, value in row.items()}
    names = ("utilization.gpu", "utilization.memory", "power.draw")
    used, memory, power = (value if isinstance(value := by_name.get(name), int | float) else None for name in names)
    slot = bus_id(str(by_name.get("pci.bus_id")))
    if slot is None:
        raise ParseError("a row without a PCI address")
    return GpuUsage(pci_bus_id=slot, utilization_percent=used, memory_utilization_percent=memory, power_w=power)


def read_gpu_processes(bundle: BundleReader) -> tuple[GpuProcess, ...]:
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
        return read_loaded_driver(bundle) is None
    except (UnknownFactError, ParseError):
        return False


def _smi_gpus(bundle: BundleReader) -> tuple[SmiGpu, ...]:
    try:
        answer = read_smi(bundle)
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


class GpuFacts(FactArea):
    """The driver's user space."""

    driver_library_version: str | None = fact(read_driver_library_version, none_means="the linker finds none")
    """Version of the libnvidia-ml.so.1 that the linker finds."""
    smi: Smi[SmiLog] | None = fact(read_smi, none_means="nvidia-smi is not installed, or no module is loaded")
    gpu_processes: tuple[GpuProcess, ...] | None = fact(read_gpu_processes, needs_root=True, volatile=True)
    gpu_usage_again: tuple[GpuUsage, ...] | None = fact(
        read_gpu_usage_again, volatile=True, none_means="no two GPUs were in full use without reading memory"
    )
    """A second sample, 10 s after that of nvidia-smi."""

    @property
    def smi_gpus(self) -> tuple[SmiGpu, ...]:
        """Return the GPUs that nvidia-smi reports; empty if it fails."""
        return self.smi.document.gpus if self.smi and self.smi.document else ()


_COLOUR = re.compile(r"\x1b?\[[0-9;]{0,12}m")
_GPU = re.compile(r"GPU[0-9]{1,4}")
_PEER_WORD = re.compile(r"X|OK|CNS|GNS|TNS|NS|DR|U|N/A|\(?UNKNOWN\)?", re.I)
_MODE = re.compile(r"<virtualization_mode>([^<]{1,40})</virtualization_mode>")
_LINE_LIMIT = 20_000


def read_topology(bundle: BundleReader) -> Smi[Topology] | None:
    """Return the answer of ``nvidia-smi topo -m``."""
    return _answer(bundle, "nvidia-smi-topo", smi_links.parse_topology, Smi[Topology])


def read_peer_access(bundle: BundleReader) -> Smi[PeerAccess] | None:
    """Return the answer of ``nvidia-smi topo -p2p r``."""
    return _answer(bundle, "nvidia-smi-p2p", parse_peer_access, Smi[PeerAccess])


def read_nvlink(bundle: BundleReader) -> Smi[Nvlink] | None:
    """Return the answer of ``nvidia-smi nvlink --status``; some drivers print nothing if no GPU has NVLink."""
    return _answer(bundle, "nvidia-smi-nvlink", smi_links.parse_nvlink, Smi[Nvlink], empty=Nvlink())


def read_nvlink_errors(bundle: BundleReader) -> Smi[Nvlink] | None:
    """Return the answer of ``nvidia-smi nvlink -e``."""
    return _answer(bundle, "nvidia-smi-nvlink-errors", smi_links.parse_nvlink, Smi[Nvlink], empty=Nvlink())


def _answer(
    bundle: BundleReader,
    key: str,
    parse: Callable[[str], DocumentT | Failure],
    of: type[Smi[DocumentT]],
    empty: DocumentT | None = None,
) -> Smi[DocumentT] | None:
    if not bundle.ran(key) and read_loaded_driver(bundle) is None:
        return None
    result = bundle.command(key)
    if result.missing:
        return None
    if empty is not None and result.rc == 0 and not result.stdout.strip():
        return of(document=empty)
    return answer(result, parse, of)


def parse_peer_access(text: str) -> PeerAccess | Failure:
    """Parse ``nvidia-smi topo -p2p r``; if nvidia-smi failed, return its error.

    Raise ParseError for other text, and for a matrix with a missing row or cell.
    """
    lines = [_COLOUR.sub("", line[:_LINE_LIMIT]).split() for line in text.splitlines()]
    header = next((number for number, words in enumerate(lines) if words and all(map(_GPU.fullmatch, words))), None)
    if header is None:
        error = smi_base.find_error(text)
        if error is None:
            raise ParseError(f"expected the matrix of nvidia-smi topo -p2p, found '{first_line(text)}'")
        return error
    gpus = lines[header]
    links: dict[str, dict[str, str]] = {}
    for words in lines[header + 1 :]:
        if not words or not _GPU.fullmatch(words[0]):
            break
        cells = words[1:]
        if len(cells) != len(gpus) or not all(map(_PEER_WORD.fullmatch, cells)) or words[0] in links:
            raise ParseError(
                f"expected {len(gpus)} states for {words[0]} in the peer matrix, found '{first_line(' '.join(cells))}'"
            )
        links[words[0]] = {gpu: cell for gpu, cell in zip(gpus, cells, strict=True) if gpu != words[0]}
    if set(links) != set(gpus) or len(gpus) != len(set(gpus)):
        raise ParseError(f"expected a row for each of {len(gpus)} GPUs in the peer matrix, found {len(links)}")
    return PeerAccess(gpus=tuple(gpus), links=links)


def read_gpu_virtualization(bundle: BundleReader) -> tuple[str, ...] | None:
    """Return ``virtualization_mode`` of each GPU in ``nvidia-smi -q -x``."""
    answer = read_smi(bundle)
    if answer is None or answer.document is None:
        return None
    modes = tuple(mode.strip() for mode in _MODE.findall(bundle.command("nvidia-smi-xml").stdout))
    if len(modes) != len(answer.document.gpus):
        raise ParseError(f"expected a virtualization mode for each GPU, found {len(modes)}")
    return modes


class LinksFacts(FactArea):
    """Links between GPUs."""

    topology: Smi[Topology] | None = fact(
        read_topology, none_means="nvidia-smi is not installed, or no module is loaded"
    )
    """``nvidia-smi topo -m``."""
    peer_access: Smi[PeerAccess] | None = fact(
        read_peer_access, none_means="nvidia-smi is not installed, or no module is loaded"
    )
    """``nvidia-smi topo -p2p r``."""
    nvlink: Smi[Nvlink] | None = fact(read_nvlink, none_means="nvidia-smi is not installed, or no module is loaded")
    """``nvidia-smi nvlink --status``."""
    nvlink_errors: Smi[Nvlink] | None = fact(
        read_nvlink_errors, none_means="nvidia-smi is not installed, or no module is loaded"
    )
    """``nvidia-smi nvlink -e``."""
    gpu_virtualization: tuple[str, ...] | None = fact(
        read_gpu_virtualization, none_means="nvidia-smi answers with no document"
    )
    """As nvidia-smi prints it, one value per GPU in its order: ``None``, ``Pass-Through``, ``VGPU``, ``Host VGPU``
    …."""

    @property
    def gpu_links(self) -> dict[str, dict[str, str]]:
        """Return the link between every two elements of ``nvidia-smi topo -m``; empty if it fails."""
        return self.topology.document.links if self.topology and self.topology.document else {}
