"""Build the container image of gpunode's workload: Debian with Python, measuring tools, and wheels from a lock file.

Usage: scripts/validator_image.py BUILD [--tag NAME:TAG] [--output FILE] [--add DIR] [--push REPOSITORY:TAG [--catalog]]

BUILD is ``cuda`` (PyTorch with its own CUDA), ``tensorflow-cuda``, or for the processor ``cpu``, ``tensorflow-cpu``.
The base is made from Debian's packages with mmdebstrap, so that no registry of images is needed; it takes a Docker
engine and root.
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import docker
import wheels
from docker.errors import APIError, ContainerError, ImageNotFound

from gpunode.errors import GpunodeError, UndeterminedError, UsageError
from gpunode.lab.engine import connect, docker_errors, locked, need_space
from gpunode.lab.image import debian_tree
from gpunode.lab.recipe import LabSystem, Recipe, architecture, find_mirror
from gpunode.lab.workload_image import TORCH_INDEX
from gpunode.whole import whole_file

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "images" / "validator"
CATALOG = ROOT / "gpunode" / "catalog" / "libraries.yml"
REPOSITORY = "gpunode-validator"
LABEL = "io.github.gpunode.validator"
BUILDS = {"cuda": "torch", "cpu": "torch", "tensorflow-cuda": "tensorflow", "tensorflow-cpu": "tensorflow"}
"""Build -> the module that has to be importable."""
PYTHON = "3.11"
SITE = f"usr/local/lib/python{PYTHON}/dist-packages"
PACKAGES = (
    *("python3", "python3-dev", "ca-certificates", "pciutils", "numactl"),
    # torch.compile builds a C++ program for each kernel; ninja and libaio are those of DeepSpeed's extensions.
    *("gcc", "g++", "libc6-dev", "ninja-build", "libaio-dev"),
    *("fio", "iperf3", "perftest"),
)
MANIFEST = "/usr/share/gpunode-validator/packages.txt"
SETUP = f"""\
set -eu
mkdir -p {MANIFEST.rpartition("/")[0]}
dpkg-query -W -f '${{Package}} ${{Version}} ${{Architecture}}\\n' | while read -r name version arch; do
  echo "$name $version $arch $(apt-cache show "$name:$arch=$version" 2>/dev/null | sed -n 's/^SHA256: //p' | head -n 1)"
done > {MANIFEST}
rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
"""
TORCHRUN = "#!/usr/bin/python3\nfrom torch.distributed.run import main\n\nmain()\n"
LEFT_OUT = ("bin", "torch/test")
"""``bin``: scripts with the path of the building machine's Python. PyTorch's headers stay: what torch.compile and
extensions generate includes them.
"""
FREE_GIB = {"cuda": 24, "cpu": 6, "tensorflow-cuda": 24, "tensorflow-cpu": 8}
USER = "65534:65534"
ROW = re.compile(r"(?m)^  (?P<name>validator-[a-z0-9-]+):\n(?P<lines>(?:    .*\n)+)")
Say = Callable[[str], None]


class ValidatorRecipe(Recipe):
    """Debian 12 with Python, compilers and measuring tools."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the packages to install."""
        return PACKAGES

    @property
    def files(self) -> dict[str, str]:
        """Return the files of the tree."""
        return {"etc/gpunode/validator": "built by scripts/validator_image.py\n"}

    @property
    def setup(self) -> str:
        """Return what runs in the tree at last."""
        return SETUP


def lock_of(build: str) -> Path:
    """Return the lock file of a build."""
    return FOLDER / f"{build}.txt"


def version_of(build: str) -> str:
    """Return the version of the build's framework in its lock."""
    names = "|".join(("torch", "tensorflow-cpu", "tensorflow"))
    match = re.search(rf"^(?:{names})==(\S+)", lock_of(build).read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise UsageError(f"{lock_of(build)} has no framework")
    return match[1]


def digest_of(build: str, added: Path | None = None) -> str:
    """Return a digest of everything that decides the image's content but the state of Debian's archive."""
    content = [lock_of(build).read_text(encoding="utf-8"), PACKAGES, SETUP, TORCHRUN, LEFT_OUT]
    files = sorted(path for path in added.rglob("*") if path.is_file()) if added else []
    content += [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def ensure(client: docker.DockerClient, build: str, say: Say, tag: str | None = None, added: Path | None = None) -> str:
    """Return the tag of the image on this machine's engine; build it if there is none of its recipe."""
    full = tag or f"{REPOSITORY}:{build}-{digest_of(build, added)}"
    with locked(f"image validator {build}", 3600, say):
        if tag is None:
            with docker_errors(f"looking for {full}"), suppress(ImageNotFound):
                client.images.get(full)
                return full
        with docker_errors("asking Docker where it keeps its data"):
            need_space(Path(client.info()["DockerRootDir"]), FREE_GIB[build])
        _build(client, build, full, added, say)
        _try(client, build, full)
        _remove_old(client, build, full)
    return full


def _build(client: docker.DockerClient, build: str, full: str, added: Path | None, say: Say) -> None:
    recipe = ValidatorRecipe(LabSystem(f"validator-{build}", "bookworm", "validator"), architecture(), find_mirror())
    with tempfile.TemporaryDirectory(prefix="gpunode-validator-", dir="/var/tmp") as folder:
        site = Path(folder, "site")
        say(f"{build}: installing the wheels of {lock_of(build).name}")
        _install(lock_of(build), site, say)
        for name in LEFT_OUT:
            shutil.rmtree(site / name, ignore_errors=True)
        program = Path(folder, "torchrun")
        program.write_text(TORCHRUN, encoding="utf-8")
        say(f"{build}: making the tree of Debian's packages")
        with debian_tree(recipe) as tree:
            with tarfile.open(tree, "a") as archive:
                # The folder itself is in the tree, and an engine refuses a path that comes twice.
                for path in sorted(site.iterdir()):
                    archive.add(path, f"./{SITE}/{path.name}", filter=_of_root)
                if (site / "torch").exists():
                    archive.add(program, "./usr/local/bin/torchrun", filter=_executable)
                for path in sorted(added.iterdir()) if added else ():
                    archive.add(path, f"./usr/local/bin/{path.name}", filter=_executable)
            shutil.rmtree(site)
            say(f"{build}: importing {tree.stat().st_size >> 20} MiB")
            repository, _, name = full.rpartition(":")
            with docker_errors(f"importing {full}"), tree.open("rb") as stream:
                client.api.import_image(src=stream, repository=repository, tag=name, changes=_changes(build))


def _changes(build: str) -> list[str]:
    return [
        f"LABEL {LABEL}={build}",
        "LABEL org.opencontainers.image.title=gpunode-validator",
        f"LABEL org.opencontainers.image.version={build}-{version_of(build)}",
        "ENV HOME=/tmp",
        "ENV PYTHONDONTWRITEBYTECODE=1",
        # What NVIDIA's runtime reads in place of a CDI specification.
        "ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        f"USER {USER}",
        "WORKDIR /tmp",
        'CMD ["python3", "--version"]',
    ]


def _install(lock: Path, site: Path, say: Say) -> None:
    # An index that cannot be reached costs pip minutes: the configured one is asked first.
    for_cpu = re.search(r"^torch==\S*\+cpu", lock.read_text(encoding="utf-8"), re.MULTILINE)
    indexes = ((), ("--extra-index-url", TORCH_INDEX)) if for_cpu else ((),)
    wheels.install(lock, site, PYTHON, indexes, say=say)


def _of_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def _executable(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.mode = 0o755
    return _of_root(info)


def _try(client: docker.DockerClient, build: str, full: str) -> None:
    """Import the framework in the image as the workload's container does. Raises UndeterminedError."""
    module = BUILDS[build]
    program = f"import {module}; print({module}.__version__)"
    try:
        with docker_errors(f"trying {full}"):
            answer = client.containers.run(
                full,
                ["python3", "-I", "-c", program],
                remove=True,
                read_only=True,
                cap_drop=["ALL"],
                network_mode="none",
                tmpfs={"/tmp": "size=256m"},  # noqa: S108 (in the container)
            )
    except ContainerError as err:
        raise UndeterminedError(f"{full}: {module} cannot be imported: {str(err)[-300:]}") from None
    version = answer.decode(errors="replace").strip().splitlines()[-1]
    if version.partition("+")[0] != version_of(build).partition("+")[0]:
        raise UndeterminedError(f"{full} has {module} {version}, expected {version_of(build)}")


def _remove_old(client: docker.DockerClient, build: str, keep: str) -> None:
    with docker_errors("looking for older images"):
        for image in client.images.list(filters={"label": f"{LABEL}={build}"}):
            if keep not in image.tags:
                with suppress(APIError):  # used by a container
                    client.images.remove(str(image.id))


def repository_and_tag(target: str) -> tuple[str, str]:
    """Return the parts of REPOSITORY:TAG. Raises UsageError."""
    repository, _, tag = target.rpartition(":")
    if not repository or "/" in tag:
        raise UsageError(f"--push: {target} is not REPOSITORY:TAG (example: registry.example.org/gpunode/validator:1)")
    return repository, tag


def push(client: docker.DockerClient, full: str, target: str, say: Say) -> str:
    """Return the digest in the registry to which the image is pushed. Raises UndeterminedError."""
    repository, tag = repository_and_tag(target)
    client.images.get(full).tag(repository, tag)
    digest = None
    with docker_errors(f"pushing {target}"):
        for line in client.api.push(repository, tag=tag, stream=True, decode=True):
            if "error" in line:
                raise UndeterminedError(f"pushing {target}: {str(line['error'])[:300]}")
            digest = (line.get("aux") or {}).get("Digest", digest)
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", str(digest)):
        raise UndeterminedError(f"pushing {target}: the registry answered no digest")
    say(f"pushed {target}: {digest}")
    return str(digest)


def record(text: str, build: str, target: str, digest: str) -> str:
    """Return the catalog's file with the image and its digest in the row of the build. Raises UsageError."""
    for match in ROW.finditer(text):
        if match["name"] == f"validator-{build}":
            lines = re.sub(r"(?m)^    image: .*$", f"    image: {target}", match["lines"])
            lines = re.sub(r"(?m)^    digest: .*$", f"    digest: {digest}", lines)
            return text[: match.start("lines")] + lines + text[match.end("lines") :]
    raise UsageError(f"the catalog has no row for the build {build}")


def main(words: Sequence[str] | None = None) -> int:
    """Build the image, and write, push and record it as requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", choices=BUILDS)
    parser.add_argument("--tag", help="name of the image on this machine; built again")
    parser.add_argument("--output", type=Path, help="write the image as docker save does: validate --image-file")
    parser.add_argument(
        "--add", type=Path, help="folder with programs for /usr/local/bin: nccl-tests, nvbandwidth, nsys"
    )
    parser.add_argument("--push", metavar="REPOSITORY:TAG", help="push it to a registry")
    parser.add_argument("--catalog", action="store_true", help="write the pushed image's digest into the catalog")
    chosen = parser.parse_args(words)
    if chosen.catalog and not chosen.push:
        parser.error("--catalog needs --push: only a registry knows the digest")
    if chosen.add is not None and not chosen.add.is_dir():
        parser.error(f"--add {chosen.add}: not a directory")

    def say(text: str) -> None:
        print(f"validator-image: {text}", file=sys.stderr, flush=True)

    try:
        if chosen.push:
            repository_and_tag(chosen.push)
        client = connect()
        full = ensure(client, chosen.build, say, chosen.tag, chosen.add)
        if chosen.output is not None:
            with docker_errors(f"saving {full}"), whole_file(chosen.output) as stream:
                for chunk in client.api.get_image(full):
                    stream.write(chunk)
        if chosen.push:
            digest = push(client, full, chosen.push, say)
            if chosen.catalog:
                text = record(CATALOG.read_text(encoding="utf-8"), chosen.build, chosen.push, digest)
                with whole_file(CATALOG) as stream:
                    stream.write(text.encode())
    except GpunodeError as err:
        say(str(err))
        return int(err.exit_code)
    except OSError as err:
        say(f"{err.filename or chosen.output}: {err.strerror or err}")
        return 2
    print(full)
    return 0


if __name__ == "__main__":
    sys.exit(main())
