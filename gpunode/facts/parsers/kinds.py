"""The kinds of ``gpunode parse``: which parser reads which tool's output."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_type_hints

from gpunode.facts.models import Fact
from gpunode.facts.parsers import (
    bandwidth,
    dcgm_diag,
    host_tools,
    lscpu,
    nccl_tests,
    nvbandwidth,
    nvrm,
    smi_links,
    smi_lists,
    smi_q,
    smi_table,
    smi_xml,
)

Parser = Callable[[str], Fact]

KINDS: Mapping[str, Parser] = {
    "nvidia-smi-xml": smi_xml.parse,
    "nvidia-smi-q": smi_q.parse,
    "nvidia-smi-table": smi_table.parse,
    "nvidia-smi-query": smi_lists.parse_query,
    "nvidia-smi-topo": smi_links.parse_topology,
    "nvidia-smi-nvlink": smi_links.parse_nvlink,
    "nvidia-smi-list": smi_lists.parse_list,
    "nccl-tests": nccl_tests.parse,
    "nvbandwidth": nvbandwidth.parse,
    "bandwidth-test": bandwidth.parse_bandwidth_test,
    "p2p-bandwidth": bandwidth.parse_p2p,
    "dcgm-diag": dcgm_diag.parse,
    "dmesg": nvrm.parse_log,
    "lspci": host_tools.parse_lspci,
    "ibstat": host_tools.parse_ibstat,
    "numactl": host_tools.parse_numactl,
    "lscpu": lscpu.parse,
    "driver-version": nvrm.parse_version,
}
"""Parsers by kind."""

ANSWERS: Mapping[str, Any] = {kind: get_type_hints(parser)["return"] for kind, parser in KINDS.items()}
"""Models that the parser of each kind returns."""


def parsed(kind: str, text: str, xids: Mapping[int, nvrm.XidMeaning] | None = None) -> dict[str, Any]:
    """Return the document that ``gpunode parse`` prints; ``xids`` are the meanings for ``dmesg``.

    Raise ParseError like the parser of the kind.
    """
    answer = (partial(nvrm.parse_log, xids=xids) if kind == "dmesg" else KINDS[kind])(text)
    return answer.model_dump(mode="json", by_alias=True)


_BYTE_ORDER_MARKS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)


def decoded(data: bytes) -> str:
    """Return the text of a tool's output: UTF-8, or UTF-16 with its byte order mark (a redirect of PowerShell).

    Invalid bytes become U+FFFD, so that every input has a result.
    """
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, errors="replace")
    return data.decode("utf-8", errors="replace")
