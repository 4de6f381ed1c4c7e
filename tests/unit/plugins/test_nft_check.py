"""nft judges rules without loading them."""

import subprocess
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import nft_check


def answered(monkeypatch: pytest.MonkeyPatch, result: Any) -> dict[str, Any]:
    def run(argv: list[str], **more: Any) -> Any:
        assert argv == ["/usr/sbin/nft", "-c", "-f", "-"]
        assert more["input"] == b"rules"
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(nft_check.subprocess, "run", run)
    answer: dict[str, Any] = nft_check.answered({"text": "rules"})
    return answer


def test_accepted_rules_have_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answered(monkeypatch, subprocess.CompletedProcess([], 0, b"", b"")) == {"error": None}


def test_rejected_rules_have_one_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    output = b"/dev/stdin:7:3-5: Error: syntax error\n\n  tcp dport nonsense\n            ^^^^^^^^\n"
    error = answered(monkeypatch, subprocess.CompletedProcess([], 1, b"", output))["error"]
    assert error.startswith("/dev/stdin:7:3-5: Error: syntax error; tcp dport nonsense")
    assert answered(monkeypatch, subprocess.CompletedProcess([], 3, b"", b"")) == {"error": "exit status 3"}


@pytest.mark.parametrize("problem", [FileNotFoundError(2, "No such file"), subprocess.TimeoutExpired("nft", 60)])
def test_an_nft_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    assert answered(monkeypatch, problem)["error"]
