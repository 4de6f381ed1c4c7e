"""What the tests of the payload with a real PyTorch share: programs that import it as it is sent."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("GPUNODE_TORCH_PYTHON")
NEEDS_TORCH = pytest.mark.skipif(PYTHON is None, reason="GPUNODE_TORCH_PYTHON names no Python with PyTorch")


def program(archive: Path, text: str, *words: str, limit_s: float = 300) -> Any:
    """What a program prints that imports the payload as it is sent."""
    answer = subprocess.run(
        [str(PYTHON), "-W", "ignore", "-c", text, *words],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
        env={**os.environ, "PYTHONPATH": str(archive), "TMPDIR": str(archive.parent)},
        cwd=archive.parent,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)
