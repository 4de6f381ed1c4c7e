"""Links between GPUs as nvidia-smi prints them: topology, peer access, NVLink."""

import re
from collections.abc import Callable

from gpunode.facts.bundle_reader import BundleReader, first_line
from gpunode.facts.errors import ParseError
from gpunode.facts.gpu import read_smi
from gpunode.facts.models.base import FactArea, fact
from gpunode.facts.models.smi import DocumentT, Failure, Nvlink, PeerAccess, Smi, Topology
from gpunode.facts.modules import read_loaded_driver
from gpunode.facts.parsers import smi_error, smi_nvlink, smi_topo
from gpunode.facts.tools import answer

_COLOUR = re.compile(r"\x1b?\[[0-9;]{0,12}m")
_GPU = re.compile(r"GPU[0-9]{1,4}")
_PEER_WORD = re.compile(r"X|OK|CNS|GNS|TNS|NS|DR|U|N/A|\(?UNKNOWN\)?", re.I)
_MODE = re.compile(r"<virtualization_mode>([^<]{1,40})</virtualization_mode>")
_LINE_LIMIT = 20_000


def read_topology(bundle: BundleReader) -> Smi[Topology] | None:
    """Return the answer of ``nvidia-smi topo -m``."""
    return _answer(bundle, "nvidia-smi-topo", smi_topo.parse, Smi[Topology])


def read_peer_access(bundle: BundleReader) -> Smi[PeerAccess] | None:
    """Return the answer of ``nvidia-smi topo -p2p r``."""
    return _answer(bundle, "nvidia-smi-p2p", parse_peer_access, Smi[PeerAccess])


def read_nvlink(bundle: BundleReader) -> Smi[Nvlink] | None:
    """Return the answer of ``nvidia-smi nvlink --status``; some drivers print nothing if no GPU has NVLink."""
    return _answer(bundle, "nvidia-smi-nvlink", smi_nvlink.parse, Smi[Nvlink], empty=Nvlink())


def read_nvlink_errors(bundle: BundleReader) -> Smi[Nvlink] | None:
    """Return the answer of ``nvidia-smi nvlink -e``."""
    return _answer(bundle, "nvidia-smi-nvlink-errors", smi_nvlink.parse, Smi[Nvlink], empty=Nvlink())


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
        error = smi_error.find(text)
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
