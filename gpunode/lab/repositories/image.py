"""The vendor's image: packaging tools from Debian, then every package of the plan, built once and kept."""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files as resource_files
from typing import cast

import docker
from docker.errors import ImageNotFound

from gpunode.errors import UndeterminedError
from gpunode.lab.archive import Entry, tar_of
from gpunode.lab.engine import docker_errors
from gpunode.lab.image import IMAGE_LABEL, REPOSITORY, Progress, build_container, ensure_image, remove_images
from gpunode.lab.lock import locked
from gpunode.lab.mirror import find_mirror
from gpunode.lab.packages.plan import contents, plan
from gpunode.lab.packages.rows import repositories
from gpunode.lab.recipe import LabSystem, Recipe, architecture

KIND = "vendor"
_TOOLS = (
    "apt-utils",
    "binutils",
    "createrepo-c",
    "gnupg",
    "openssl",
    "python3",
    "rpm",
)
_INSIDE = resource_files("gpunode.lab.repositories").joinpath("inside")
_BUILDING = ("build.py", "pack.py", "rpms.py")
_SERVING = ("publish.py", "runfile.py", "serve.py")
_FOLDER = "srv/gpunode"
_BUILD_LIMIT_S = 900
_LOCK_LIMIT_S = 1200


@dataclass(frozen=True)
class ToolsRecipe(Recipe):
    """The image with the packaging tools; it only builds and serves packages and is not a node's system."""

    @property
    def packages(self) -> tuple[str, ...]:
        return _TOOLS

    @property
    def files(self) -> dict[str, str]:
        return {}

    @property
    def setup(self) -> str:
        fetch = " ".join(sorted(_repacked()))
        debs = f"/{_FOLDER}/debs"
        return f"set -eu; mkdir -p {debs}; cd {debs}; apt-get download {fetch}; rm -f /etc/apt/sources.list"

    @property
    def init(self) -> tuple[str, ...]:
        return ("/usr/bin/python3", f"/{_FOLDER}/serve.py")


def _repacked() -> set[str]:
    """Return the Debian packages from which some of the vendors' packages are built."""
    return {name for row in repositories().values() for built in contents(row) for name in built.repack.split()}


def ensure_vendor_image(client: docker.DockerClient, progress: Progress, mirror: str | None = None) -> str:
    """Return the id of an image that holds all packages of the plan; build it if there is none.

    Raises UndeterminedError with what to do if it cannot be built.
    """
    if architecture() != "amd64":
        raise UndeterminedError("the lab's vendor repository exists only for x86_64: use a lab without --hardware")
    recipe = ToolsRecipe(LabSystem("vendor-tools", "bookworm", "vendor"), "amd64", find_mirror(mirror))
    inputs = list(_inputs())
    digest = hashlib.sha256(json.dumps([recipe.digest, *inputs]).encode()).hexdigest()[:12]
    tag = f"{REPOSITORY}:{KIND}-{digest}"
    with locked(f"image {KIND}", _LOCK_LIMIT_S, progress), docker_errors("looking for the vendor's image"):
        try:
            return str(client.images.get(tag).id)
        except ImageNotFound:
            tools = ensure_image(client, recipe, progress)
            return _build(client, tools, tag, inputs, progress)


def _inputs() -> Iterator[tuple[str, str]]:
    """Yield the files that decide the packages: name in the image and content."""
    for name in _BUILDING:
        yield name, _INSIDE.joinpath(name).read_text(encoding="utf-8")
    yield "plan.json", json.dumps(plan(), sort_keys=True)


def serving() -> bytes:
    """Return the archive that a container gets before its first start: the programs that publish and serve."""
    return _tar((name, _INSIDE.joinpath(name).read_text(encoding="utf-8")) for name in _SERVING)


def _tar(files: Iterable[tuple[str, str]]) -> bytes:
    return tar_of(Entry(f"{_FOLDER}/{name}", text, 0o644) for name, text in files)


def _build(client: docker.DockerClient, tools: str, tag: str, inputs: list[tuple[str, str]], progress: Progress) -> str:
    started = time.monotonic()
    progress("vendor repository: building its packages")
    labels = {IMAGE_LABEL: KIND}
    argv = ["timeout", "-k", "5", str(_BUILD_LIMIT_S), "python3", f"/{_FOLDER}/build.py", f"/{_FOLDER}/plan.json"]
    container = client.containers.create(
        tools, argv, name=build_container(client, KIND), network_mode="none", labels=labels
    )
    try:
        container.put_archive("/", _tar(inputs))
        container.start()
        done = container.wait(timeout=_BUILD_LIMIT_S + 30)
        if done["StatusCode"] != 0:
            output = container.logs(tail=5).decode(errors="replace").split("\n")
            raise UndeterminedError(f"vendor repository: building failed: {' '.join(output)[-300:]}")
        repository, _, name = tag.partition(":")
        command = json.dumps(["/usr/bin/python3", f"/{_FOLDER}/serve.py"])
        image = container.commit(repository, name, changes=[f"CMD {command}", f"LABEL {IMAGE_LABEL}={KIND}"])
    finally:
        container.remove(force=True, v=True)
    remove_images(client, KIND, keep=image.id)
    progress(f"vendor repository: built in {time.monotonic() - started:.0f} s")
    return cast(str, image.id)
