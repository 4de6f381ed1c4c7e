"""The node's Python that runs the workload: --python."""

import sys
import time
from pathlib import Path

import pytest

from gpunode.fleet.connection import Abort
from gpunode.fleet.node import Node
from gpunode.fleet.targets import Target
from gpunode.workload.run import NodeTransport
from gpunode.workload.transport import LaunchFailure


def run_by(python: str | None, host_python: str | None = None) -> str:
    """Return the interpreter that ran, on this machine; ``host_python``: ansible_python_interpreter."""
    node = Node(Target("localhost", "local", python=host_python), None, Abort(), None)
    stream = NodeTransport(node, time.monotonic() + 20, python).python("import sys; print(sys.executable)", ())
    text = b""
    while data := stream.sock.recv(4096):
        text += data
    stream.close()
    return text.decode().strip()


def test_the_named_python_runs_before_the_hosts_own(tmp_path: Path) -> None:
    named = tmp_path / "venv with a blank" / "python3"
    named.parent.mkdir()
    named.symlink_to(sys.executable)
    assert run_by(str(named), host_python="/usr/bin/python3") == str(named)
    assert run_by(None, host_python=sys.executable) == sys.executable


@pytest.mark.parametrize(
    ("python", "host_python", "option"),
    [("/no/python3", None, "--python"), (None, "/no/python", "ansible_python_interpreter")],
)
def test_one_that_is_missing_is_named_with_its_option(python: str | None, host_python: str | None, option: str) -> None:
    with pytest.raises(LaunchFailure, match=rf"/no/python3? is not installed on the node.*{option}") as failure:
        run_by(python, host_python)
    assert failure.value.kind == "no-python"
