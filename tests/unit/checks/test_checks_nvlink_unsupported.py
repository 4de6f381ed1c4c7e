"""``nvidia-smi nvlink`` without an answer for a GPU, a link or a counter: no error, and never a pass."""

import json
import re
import sys
from pathlib import Path

import pytest

from gpunode.checks import Expectation, judge

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import facts_of, hgx

STATUS, ERRORS = "nvidia-smi-nvlink", "nvidia-smi-nvlink-errors"
WORDINGS = [
    "Not Supported",
    "Not supported",
    "not supported",
    "<not supported>",
    "[Not Supported]",
    "Unsupported",
    "N/A",
]
CHECKS = {"nvlink.count", "nvlink.state", "nvlink.speed", "nvlink.errors"}


def statuses(edit: dict[str, str]) -> dict[str, set[str]]:
    """The statuses of the checks on NVLink for eight H100 with other listings."""
    by_check: dict[str, set[str]] = {}
    document = hgx()
    for key, text in edit.items():
        document["commands"][key] = {**document["commands"][key], "stdout": text}
    for finding in judge(facts_of(json.dumps(document)), Expectation(), "quick", CHECKS):
        by_check.setdefault(finding.check, set()).add(finding.status.value)
    return by_check


def listing(key: str) -> str:
    return str(hgx()["commands"][key]["stdout"])


@pytest.mark.parametrize("wording", WORDINGS)
def test_what_is_not_supported_everywhere_is_skipped(wording: str) -> None:
    per_gpu = {key: re.sub(r"(?m)((?:^\s+Link .*\n)+)", f"\t {wording}\n", listing(key)) for key in (STATUS, ERRORS)}
    per_link = {key: re.sub(r"(?m)(Link \d+): .*$", rf"\1: {wording}", listing(key)) for key in (STATUS, ERRORS)}
    counters = {ERRORS: re.sub(r"(?m)(Link \d+: [^:\n]+: ).*$", rf"\1{wording}", listing(ERRORS))}
    assert all(text != listing(key) for edit in (per_gpu, per_link, counters) for key, text in edit.items())
    if wording != "N/A":
        # "N/A" of a whole GPU or of a link's state reports nothing about support.
        assert statuses(per_gpu) == {key: {"skip"} for key in CHECKS}
        assert statuses(per_link) == {key: {"skip"} for key in CHECKS}
    assert statuses(counters) == {**{key: {"pass"} for key in CHECKS - {"nvlink.errors"}}, "nvlink.errors": {"skip"}}


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("message", ["", "Device does not have or support Nvlink", "NVML: Not Supported"])
def test_one_gpu_alone_without_an_answer_is_undetermined(wording: str, message: str) -> None:
    """The others of its model have NVLink: it is not the model that lacks it."""
    blocks = re.split(r"(?m)(?=^GPU \d+:)", listing(STATUS))
    blocks[3] = blocks[3].partition("\n")[0] + f"\n\t {message or wording}\n"
    by_check = statuses({STATUS: "".join(blocks)})
    assert by_check["nvlink.count"] == {"pass", "error"}
    assert by_check["nvlink.state"] == {"pass", "error"}


def test_one_link_without_an_answer_is_undetermined() -> None:
    text = listing(STATUS).replace("\t Link 3: 26.562 GB/s\n", "\t Link 3: Not Supported\n", 1)
    assert text != listing(STATUS)
    assert statuses({STATUS: text})["nvlink.state"] == {"pass", "error"}
