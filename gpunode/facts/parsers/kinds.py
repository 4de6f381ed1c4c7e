"""The kinds of ``gpunode parse``: which parser reads which tool's output."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_type_hints

from gpunode.facts.models.base import Fact
from gpunode.facts.parsers import (
    bandwidth,
    dcgm_diag,
    dmesg,
    driver_version,
    ibstat,
    lscpu,
    lspci,
    nccl_tests,
    numactl,
    nvbandwidth,
    smi_list,
    smi_nvlink,
    smi_q,
    smi_query,
    smi_table,
    smi_topo,
    smi_xml,
)

Parser = Callable[[str], Fact]

KINDS: Mapping[str, Parser] = {
    "nvidia-smi-xml": smi_xml.parse,
    "nvidia-smi-q": smi_q.parse,
    "nvidia-smi-table": smi_table.parse,
    "nvidia-smi-query": smi_query.parse,
    "nvidia-smi-topo": smi_topo.parse,
    "nvidia-smi-nvlink": smi_nvlink.parse,
    "nvidia-smi-list": smi_list.parse,
    "nccl-tests": nccl_tests.parse,
    "nvbandwidth": nvbandwidth.parse,
    "bandwidth-test": bandwidth.parse_bandwidth_test,
    "p2p-bandwidth": bandwidth.parse_p2p,
    "dcgm-diag": dcgm_diag.parse,
    "dmesg": dmesg.parse,
    "lspci": lspci.parse,
    "ibstat": ibstat.parse,
    "numactl": numactl.parse,
    "lscpu": lscpu.parse,
    "driver-version": driver_version.parse,
}
"""Every kind with its parser."""

ANSWERS: Mapping[str, Any] = {kind: get_type_hints(parser)["return"] for kind, parser in KINDS.items()}
"""Every kind with the models that its parser returns."""


def parsed(kind: str, text: str, xids: Mapping[int, dmesg.XidMeaning] | None = None) -> dict[str, Any]:
    """Parse a tool's output into the document that ``gpunode parse`` prints; ``xids`` are the meanings for ``dmesg``.

    Raises ParseError as the kind's parser does.
    """
    answer = (partial(dmesg.parse, xids=xids) if kind == "dmesg" else KINDS[kind])(text)
    return answer.model_dump(mode="json", by_alias=True)


_BYTE_ORDER_MARKS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)


def decoded(data: bytes) -> str:
    """The text of a tool's output: UTF-8 or, with its byte order mark, UTF-16 (a redirect of PowerShell).

    Bytes that are no text become U+FFFD, so that any input has an answer.
    """
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, errors="replace")
    return data.decode("utf-8", errors="replace")
