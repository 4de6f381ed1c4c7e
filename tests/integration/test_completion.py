"""Tab in real shells, on a pseudo-terminal, and the man page as man(1) renders it."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from programs import run_program

LIMIT_S = 60
BIN = Path(sys.executable).parent
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
PREPARE = {
    "bash": 'bind "set enable-bracketed-paste off"; bind "set bell-style none"; PS1="ready> "',
    "zsh": 'autoload -U compinit; compinit -u -D; unsetopt zle_bracketed_paste; PS1="ready> "',
    "fish": 'function fish_prompt; echo "ready> "; end',
}
LOAD = {
    "bash": 'eval "$(gpunode completion bash)"',
    "zsh": 'eval "$(gpunode completion zsh)"',
    "fish": "gpunode completion fish | source",
}
MARK = "loaded-now"


@pytest.fixture(params=list(START))
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["pexpect.spawn[str]"]:
    """An interactive shell with gpunode's completion, in a folder with an inventory."""
    name = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    (tmp_path / "hosts.yml").write_text("gpu_nodes:\n  hosts:\n    rack7-node01:\n    rack7-node02:\n")
    env = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TERM": "dumb" if name == "bash" else "xterm",
        "LANG": "C.UTF-8",
    }
    child = pexpect.spawn(
        START[name][0],
        START[name][1:],
        env=env,
        cwd=str(tmp_path),
        encoding="utf-8",
        timeout=LIMIT_S,
        dimensions=(50, 180),
    )
    child.sendline(PREPARE[name])
    child.sendline(LOAD[name])
    child.sendline(f"echo {MARK[:6]}'{MARK[6:]}'")
    child.expect(MARK)
    yield child
    child.close(force=True)


def completed(shell: "pexpect.spawn[str]", typed: str, expected: str) -> None:
    """Type a line and Tab, twice for a list; fail if the expected text does not appear."""
    shell.send(f"{typed}\t")
    shell.expect(re.escape(expected))
    shell.send("\x03")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("gpunode vali", "gpunode validate"),
        ("gpunode validate --sel", "--select"),
        ("gpunode validate --select gpu.remapped-r", "gpu.remapped-rows"),
        ("gpunode checks link.pcie-wid", "link.pcie-width"),
        ("gpunode plan --gpu h100-pc", "h100-pcie"),
        ("gpunode validate -i hosts.yml --limit rack7-n", "rack7-node0"),
        ("gpunode validate -i hos", "hosts.yml"),
    ],
    ids=["verb", "option", "check", "page of a check", "GPU", "host", "file"],
)
def test_tab_completes(shell: "pexpect.spawn[str]", typed: str, expected: str) -> None:
    completed(shell, typed, expected)


def test_man_renders_a_page_without_a_warning() -> None:
    page = run_program([BIN / "gpunode", "man", "validate"], limit_s=LIMIT_S)
    assert page.returncode == 0
    rendered = run_program(["man", "--warnings", "-l", "-"], limit_s=LIMIT_S, stdin=page.stdout)
    assert (rendered.returncode, rendered.stderr) == (0, "")
    text = re.sub(r"\s+", " ", re.sub(".\b", "", rendered.stdout))
    assert "gpunode-validate - Validate nodes" in text
    assert "--level [quick|standard|deep]" in text
    assert "gpunode validate --level quick gpu-01" in text
