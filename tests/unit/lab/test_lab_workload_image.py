"""Images of the workload for lab nodes: how they are distinguished, and what cannot be built."""

import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from gpunode.errors import UndeterminedError, UsageError
from gpunode.lab import workload_image
from gpunode.lab.recipe import SYSTEMS, Mirror
from gpunode.lab.workload_image import KINDS, ensure_workload_image, kind_named


def test_every_kind_has_a_digest_of_its_own_that_stays() -> None:
    digests = {kind.digest for kind in KINDS.values()}
    assert len(digests) == len(KINDS)
    assert digests == {kind.digest for kind in KINDS.values()}
    assert all(re.fullmatch(r"[0-9a-f]{12}", digest) for digest in digests)


def test_another_torch_is_another_image(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: kind.digest for name, kind in KINDS.items()}
    monkeypatch.setattr(workload_image, "TORCH", "9.9.9+cpu")
    after = {name: kind.digest for name, kind in KINDS.items()}
    assert {name for name in KINDS if before[name] != after[name]} == {"torch"}


def test_an_unknown_kind() -> None:
    with pytest.raises(UsageError, match="tensorflow: unknown workload image; known: torch, python, bare"):
        kind_named("tensorflow")


def test_the_base_boots_nothing() -> None:
    recipe = workload_image._Base(SYSTEMS["debian-12"], "amd64", Mirror("http://a", "http://b"))
    assert recipe.packages == ("python3",)
    assert set(recipe.files) == {"etc/gpunode/lab-workload"}
    assert "systemctl" not in recipe.setup


class Absent:
    """An engine without images, and with room."""

    class images:  # noqa: N801
        @staticmethod
        def get(tag: str) -> None:
            from docker.errors import ImageNotFound  # noqa: PLC0415

            raise ImageNotFound(tag)

    def info(self) -> dict[str, str]:
        return {"DockerRootDir": "/"}


def test_a_torch_that_pip_does_not_find_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workload_image, "TORCH", "0.0.0+none")
    monkeypatch.setattr(workload_image, "locked", lambda *_: nullcontext())  # the machine's own builds go on
    monkeypatch.setattr(workload_image, "_TEMPORARY", tmp_path)
    stale = tmp_path / "gpunode-lab-torch-killed"
    stale.mkdir()
    monkeypatch.setattr(workload_image, "TORCH_INDEX", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        UndeterminedError, match=r"torch 0\.0\.0\+none could not be installed for the lab's image"
    ) as err:
        ensure_workload_image(Absent(), "torch", lambda _: None)  # type: ignore[arg-type]
    assert len(str(err.value).splitlines()) == 1
    assert not list(tmp_path.iterdir())


class Saving:
    """An engine that has every image and saves it in two parts."""

    class images:  # noqa: N801
        @staticmethod
        def get(tag: str) -> str:
            return tag

    class api:  # noqa: N801
        @staticmethod
        def get_image(tag: str) -> Iterator[bytes]:  # noqa: ARG004
            yield b"one "
            yield b"two"


def test_the_image_as_a_file_keeps_link_and_mode(tmp_path: Path) -> None:
    target, link = tmp_path / "bare.tar", tmp_path / "link.tar"
    target.write_bytes(b"old")
    target.chmod(0o600)
    link.symlink_to(target)
    workload_image.write_workload_image(Saving(), "bare", link, print)  # type: ignore[arg-type]
    assert (target.read_bytes(), target.stat().st_mode & 0o777) == (b"one two", 0o600)
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare.tar", "link.tar"]


def test_a_pipe_takes_the_image_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        workload_image.write_workload_image(Saving(), "bare", pipe, print)  # type: ignore[arg-type]
        assert os.read(end, 100) == b"one two"
    finally:
        os.close(end)
    assert pipe.is_fifo()
