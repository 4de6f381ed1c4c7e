"""What a node answers beside its state: packages on offer, rules that nft judges; and the runner of commands."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import commands, nft_check, package_offers
from ansible_collections.gpunode.node.plugins.module_utils.apt_private import AptError

MADISON = " htop | 3.2.2-2 | http://deb.debian.org/debian bookworm/main\n fio | 3.33-3 | http://deb\n fio | 3.30-1 | http://deb\n"


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """apt with three packages; what its sources failed with is the list."""
    failed: list[str] = []

    @contextlib.contextmanager
    def private_apt(_files: object) -> Iterator[tuple[Path, list[str]]]:
        yield tmp_path, ["-c", "apt.conf"]

    def output(argv: list[str], _limit_s: float) -> str:
        return "htop\nfio\nfio-doc\nnvtop\n" if "pkgnames" in argv else MADISON

    monkeypatch.setattr(package_offers, "private_apt", private_apt)
    monkeypatch.setattr(package_offers, "refresh", lambda _apt_get, _limit_s: failed)
    monkeypatch.setattr(package_offers, "output_of", output)
    monkeypatch.setattr("ansible_collections.gpunode.node.plugins.module_utils.apt_private.output_of", output)
    return failed


def test_apt_offers_what_has_a_version(apt: list[str]) -> None:
    assert package_offers.by_apt(["htop", "fio", "nvtop", "gone-*"]) == {
        "htop": ["3.2.2-2"],
        "fio": ["3.33-3", "3.30-1"],
    }


def test_sources_that_fail_are_an_error_where_nothing_is_offered(apt: list[str]) -> None:
    apt.append("http://deb: no route")
    assert package_offers.by_apt(["htop"])["htop"] == ["3.2.2-2"]
    with pytest.raises(AptError, match="no route"):
        package_offers.by_apt(["gone"])


def test_dnf_answers_newest_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "dnf"
    tool.write_text("#!/bin/sh\nprintf 'fio 3.35-1.el9\\nfio 3.36-1.el9\\nhtop 3.3.0-1.el9\\n\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert package_offers.by_dnf(["fio"]) == {"fio": ["3.36-1.el9", "3.35-1.el9"], "htop": ["3.3.0-1.el9"]}
    tool.write_text('#!/bin/sh\necho "$2 $3" >&2\nexit 1\n')
    repository = {"/etc/yum.repos.d/x.repo": "[gpunode-rdma]\nname=x\nbaseurl=https://mirror/doca\nenabled=1\n"}
    with pytest.raises(AptError, match="--repofrompath=gpunode-rdma-asked,https://mirror/doca repoquery"):
        package_offers.by_dnf(["doca-ofed"], repository)
    (path,) = repository
    several = {path: repository[path].replace("/doca", "/doca\n https://other/doca,https://third")}
    with pytest.raises(AptError, match=r"--repofrompath=gpunode-rdma-asked,https://mirror/doca repoquery$"):
        package_offers.by_dnf(["doca-ofed"], several)
    tool.write_text("#!/bin/sh\necho 'Error: no repository' >&2\nexit 1\n")
    with pytest.raises(AptError, match="no repository"):
        package_offers.by_dnf(["fio"])


@pytest.mark.parametrize("text", ["baseurl=https://mirror/doca\n", "[x]\nbroken line\n"])
def test_a_planned_repository_that_cannot_be_read_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(package_offers, "Path", lambda _: SimpleNamespace(exists=bool))  # a node without apt-get
    answer = package_offers.answered({"names": ["fio"], "files": {"/etc/yum.repos.d/x.repo": text}})
    assert answer["error"].startswith("/etc/yum.repos.d/x.repo cannot be parsed")
    assert "\n" not in answer["error"]
    assert "broken line" not in answer["error"]


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


def test_what_a_command_prints_and_how_it_ends() -> None:
    assert commands.run(
        ["sh", "-c", "echo out; echo $GPUNODE >&2; exit 3"], 10, {"GPUNODE": "err", "PATH": "/bin"}
    ) == (
        3,
        "out\n",
        "err\n",
    )
    status, _, errors = commands.run(["/nowhere/tool"], 10)
    assert status == 127
    assert "/nowhere/tool" in errors


def test_a_command_past_its_limit_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    begun = time.monotonic()
    status, output, _ = commands.run(["sh", "-c", f"sleep 60 & echo $! > {child}; wait"], 1.0)
    assert (status, output) == (124, "")
    assert time.monotonic() - begun < 30
    end = time.monotonic() + 10
    while running(int(child.read_text())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not running(int(child.read_text()))


def running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z" and os.getpid() != pid
