"""Lab nodes for tests: a home of their own for the labs, and always taken down."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpunode.errors import GpunodeError
from gpunode.lab import Lab
from gpunode.lab.engine import connect
from gpunode.lab.image import build_mode
from gpunode.lab.state import HOME_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def lab_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the labs of this run keep their state; skips where this machine can have no lab nodes."""
    if os.geteuid() != 0:
        pytest.skip("lab nodes need root")
    if shutil.which("ssh") is None:
        pytest.skip("lab nodes need an SSH client: apt-get install openssh-client")
    try:
        connect().close()
        build_mode()
    except GpunodeError as err:
        pytest.skip(str(err))
    home = tmp_path_factory.mktemp("labs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(home))
        yield home


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A lab without nodes yet, with a name of its own; taken down after the module."""
    stem = request.path.stem.removeprefix("test_").replace("_", "-")
    lab = Lab(f"{stem}-{os.getpid()}")
    try:
        yield lab
    finally:
        lab.down()
