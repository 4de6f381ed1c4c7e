"""Container images for the workload in lab nodes: Debian's Python with PyTorch for the CPU, and variants with defects.

Nothing in them computes on a GPU; workloads in them report ``device: cpu``. They are built on this machine, kept until
their recipe changes, and copied to a node as a file: ``gpunode validate --image-file``.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import docker
from docker.errors import APIError, ImageNotFound

from gpunode.errors import UndeterminedError, UsageError
from gpunode.lab.engine import docker_errors, locked, need_space
from gpunode.lab.image import IMAGE_LABEL, Progress, build_container, debian_tree
from gpunode.lab.recipe import Entry, LabSystem, Recipe, architecture, find_mirror, tar_of
from gpunode.whole import whole_file

REPOSITORY = "gpunode-lab-workload"
TORCH = "2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""Index with builds for the CPU, used only if the configured index has none."""
_PYTHON = "3.11"
_SITE = "usr/lib/python3/dist-packages"
_LEFT_OUT = ("torch/include", "torch/test")
"""Files needed only to build against PyTorch and to test it: a fifth of the wheel."""
_TORCH_PREFIX = "gpunode-lab-torch-"
_TEMPORARY = Path("/var/tmp")  # noqa: S108 (a disk, where /tmp may be memory)
_PIP_LIMIT_S = 900
_LOCK_LIMIT_S = 3000
_FREE_GIB = 4


@dataclass(frozen=True)
class ImageKind:
    """One image: its content in addition to Debian's Python, and its purpose."""

    means: str
    files: tuple[tuple[str, str], ...] = ()
    torch: bool = False
    python: bool = True

    @property
    def digest(self) -> str:
        """Return a digest that changes with the content of the image."""
        parts = [self.files, self.torch and (TORCH, _LEFT_OUT), self.python, _SETUP, _PACKAGES]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


KINDS = {
    "torch": ImageKind("Python and PyTorch for the CPU", torch=True),
    "python": ImageKind("Python without PyTorch"),
    "bare": ImageKind("no Python at all", files=(("etc/os-release", "ID=none\n"),), python=False),
    "hangs": ImageKind(
        "a PyTorch with an import that never ends",
        files=((f"{_SITE}/torch/__init__.py", "import time\ntime.sleep(86400)\n"),),
    ),
    "floods": ImageKind(
        "a Python that never stops printing",
        files=((f"usr/lib/python{_PYTHON}/sitecustomize.py", "while True:\n    print('flood ' * 1000)\n"),),
    ),
}
_PACKAGES = ("python3",)
_SETUP = """\
set -eu
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
"""


class _Base(Recipe):
    """Debian 12 with Python and without anything that boots."""

    @property
    def packages(self) -> tuple[str, ...]:
        return _PACKAGES

    @property
    def files(self) -> dict[str, str]:
        return {"etc/gpunode/lab-workload": "made by gpunode lab\n"}

    @property
    def setup(self) -> str:
        return _SETUP


def kind_named(name: str) -> ImageKind:
    """Return the kind of that name; UsageError lists the known ones."""
    if name not in KINDS:
        raise UsageError(f"{name}: unknown workload image; known: {', '.join(KINDS)}")
    return KINDS[name]


def ensure_workload_image(client: docker.DockerClient, name: str, progress: Progress) -> str:
    """Return the tag of the image of that kind on this machine's engine; build it if there is none.

    Raises UndeterminedError with what to do if it cannot be built.
    """
    full = f"{REPOSITORY}:{name}-{kind_named(name).digest}"
    if _has_image(client, full):
        return full
    with locked("image workload", _LOCK_LIMIT_S, progress):
        return _made(client, name, progress)


def _made(client: docker.DockerClient, name: str, progress: Progress) -> str:
    """Return the tag, as ``ensure_workload_image``, under the lock."""
    kind = KINDS[name]
    tag = f"{name}-{kind.digest}"
    full = f"{REPOSITORY}:{tag}"
    if _has_image(client, full):
        return full
    progress(f"workload image {name}: making it ({kind.means})")
    with docker_errors("asking Docker where it keeps its data"):
        need_space(Path(client.info()["DockerRootDir"]), _FREE_GIB)
    if not kind.python:
        with docker_errors(f"importing {full}"):
            layer = tar_of([Entry(path, text, 0o644) for path, text in kind.files])
            client.api.import_image_from_data(layer, repository=REPOSITORY, tag=tag, changes=_changes(name))
    elif kind.torch:
        with _torch_layer() as layer_file:
            _on_base(client, name, tag, layer_file, progress)
    elif kind.files:
        parents = [Entry(path, None, 0o755) for path in sorted({str(Path(path).parent) for path, _ in kind.files})]
        layer_tar = tar_of([*parents, *(Entry(path, text, 0o644) for path, text in kind.files)])
        _on_base(client, name, tag, io.BytesIO(layer_tar), progress)
    else:
        _base(client, tag)
    _remove_old(client, name, full)
    return full


def write_workload_image(client: docker.DockerClient, name: str, path: Path, progress: Progress) -> None:
    """Write the image as a file for ``--image-file``, in the format of ``docker save``."""
    tag = ensure_workload_image(client, name, progress)
    try:
        with docker_errors(f"saving {tag}"), whole_file(path) as stream:
            for chunk in client.api.get_image(tag):
                stream.write(chunk)
    except OSError as err:
        raise UsageError(f"{path}: cannot be written: {err.strerror}") from None


def _has_image(client: docker.DockerClient, tag: str) -> bool:
    with docker_errors(f"looking for {tag}"), suppress(ImageNotFound):
        client.images.get(tag)
        return True
    return False


def _changes(name: str) -> list[str]:
    return [f"LABEL {IMAGE_LABEL}=workload-{name}", "ENV PYTHONDONTWRITEBYTECODE=1", 'CMD ["python3"]']


def _base(client: docker.DockerClient, tag: str) -> None:
    # A name of its own: a node's image may be built at the same time.
    recipe = _Base(LabSystem("workload", "bookworm", "workload"), architecture(), find_mirror())
    with debian_tree(recipe) as tar, docker_errors(f"importing {REPOSITORY}:{tag}"), tar.open("rb") as stream:
        # An open file in place of a path: with a path the SDK sets no time limit.
        client.api.import_image(src=stream, repository=REPOSITORY, tag=tag, changes=_changes("python"))


def _on_base(client: docker.DockerClient, name: str, tag: str, layer: IO[bytes], progress: Progress) -> None:
    base = _made(client, "python", progress)
    with docker_errors(f"making {REPOSITORY}:{tag}"):
        container = client.containers.create(base, name=build_container(client, "workload"))
        try:
            container.put_archive("/", layer)
            container.commit(repository=REPOSITORY, tag=tag, changes=_changes(name))
        finally:
            container.remove(force=True)


@contextmanager
def _torch_layer() -> Iterator[IO[bytes]]:
    for stale in _TEMPORARY.glob(f"{_TORCH_PREFIX}*"):  # left by a killed build
        if stale.stat().st_uid == os.geteuid():
            shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_TORCH_PREFIX, dir=_TEMPORARY) as folder:
        need_space(Path(folder), _FREE_GIB)
        site = Path(folder, "site")
        _install_torch(site)
        for name in _LEFT_OUT:
            shutil.rmtree(site / name, ignore_errors=True)
        layer = Path(folder, "layer.tar")
        with tarfile.open(layer, "w") as archive:
            archive.add(site, _SITE, filter=_owned_by_root)
        shutil.rmtree(site)
        with layer.open("rb") as stream:
            yield stream


def _owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def _install_torch(site: Path) -> None:
    """Install PyTorch from the index that pip is configured with, else from PyTorch's own."""
    command = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:"]
    command += ["--python-version", _PYTHON, "--target", str(site), f"torch=={TORCH}"]
    error = ""
    for index in ([], ["--extra-index-url", TORCH_INDEX]):
        try:
            done = subprocess.run(
                [*command, *index],
                capture_output=True,
                text=True,
                timeout=_PIP_LIMIT_S,
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            error = f"pip did not end within {_PIP_LIMIT_S} s"
            continue
        if done.returncode == 0:
            return
        error = (done.stderr.strip().splitlines() or [f"pip ended with exit code {done.returncode}"])[-1]
    raise UndeterminedError(f"torch {TORCH} could not be installed for the lab's image: {error[:300]}")


def _remove_old(client: docker.DockerClient, name: str, keep: str) -> None:
    with docker_errors("looking for older workload images"):
        for image in client.images.list(filters={"label": f"{IMAGE_LABEL}=workload-{name}"}):
            if keep not in image.tags:
                with suppress(APIError):  # used by a container, or the base of another image
                    client.images.remove(str(image.id))
