"""How GPUs are linked, in nvidia-smi's words: topology, access to each other's memory, NVLink."""

import re
from collections.abc import Callable

from gpunode.facts.errors import ParseError
from gpunode.facts.gpu import smi
from gpunode.facts.models.smi import DocumentT, Failure, Nvlink, PeerAccess, Smi, Topology
from gpunode.facts.modules import loaded_driver
from gpunode.facts.parsers import smi_error, smi_nvlink, smi_topo
from gpunode.facts.seen import Seen, first_line
from gpunode.facts.tools import answer

_COLOUR = re.compile(r"\x1b?\[[0-9;]{0,12}m")
_GPU = re.compile(r"GPU[0-9]{1,4}")
_PEER_WORD = re.compile(r"X|OK|CNS|GNS|TNS|NS|DR|U|N/A|\(?UNKNOWN\)?", re.I)
_MODE = re.compile(r"<virtualization_mode>([^<]{1,40})</virtualization_mode>")
_LINE_LIMIT = 20_000


def topology(seen: Seen) -> Smi[Topology] | None:
    """``nvidia-smi topo -m``."""
    return _answer(seen, "nvidia-smi-topo", smi_topo.parse, Smi[Topology])


def peer_access(seen: Seen) -> Smi[PeerAccess] | None:
    """``nvidia-smi topo -p2p r``."""
    return _answer(seen, "nvidia-smi-p2p", parse_peer_access, Smi[PeerAccess])


def nvlink(seen: Seen) -> Smi[Nvlink] | None:
    """``nvidia-smi nvlink --status``; some drivers print nothing at all where no GPU has NVLink."""
    return _answer(seen, "nvidia-smi-nvlink", smi_nvlink.parse, Smi[Nvlink], empty=Nvlink())


def nvlink_errors(seen: Seen) -> Smi[Nvlink] | None:
    """``nvidia-smi nvlink -e``."""
    return _answer(seen, "nvidia-smi-nvlink-errors", smi_nvlink.parse, Smi[Nvlink], empty=Nvlink())


def _answer(
    seen: Seen,
    key: str,
    parse: Callable[[str], DocumentT | Failure],
    of: type[Smi[DocumentT]],
    empty: DocumentT | None = None,
) -> Smi[DocumentT] | None:
    if not seen.ran(key) and loaded_driver(seen) is None:
        return None
    result = seen.command(key)
    if result.missing:
        return None
    if empty is not None and result.rc == 0 and not result.stdout.strip():
        return of(document=empty)
    return answer(result, parse, of)


def parse_peer_access(text: str) -> PeerAccess | Failure:
    """Parse ``nvidia-smi topo -p2p r``; where nvidia-smi failed: its error.

    Raises ParseError for another text, and for a matrix that lacks a row or a cell.
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


def gpu_virtualization(seen: Seen) -> tuple[str, ...] | None:
    """``virtualization_mode`` of each GPU in ``nvidia-smi -q -x``."""
    answer = smi(seen)
    if answer is None or answer.document is None:
        return None
    modes = tuple(mode.strip() for mode in _MODE.findall(seen.command("nvidia-smi-xml").stdout))
    if len(modes) != len(answer.document.gpus):
        raise ParseError(f"expected a virtualization mode for each GPU, found {len(modes)}")
    return modes
