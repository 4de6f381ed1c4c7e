"""The vendor's image: a node's tree with packaging tools, then the packages of the plan, built once and kept.

The packages of systems with dnf take most of the time: a second image, made from the first, has them too.
"""

import hashlib
import json
import shlex
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files as resource_files
from typing import cast

import docker
from docker.errors import ImageNotFound
from docker.models.containers import Container

from gpunode.errors import UndeterminedError
from gpunode.lab.engine import docker_errors, locked
from gpunode.lab.image import IMAGE_LABEL, REPOSITORY, Progress, build_container, ensure_image, reason_of, remove_images
from gpunode.lab.packages.plan import contents, plan
from gpunode.lab.packages.rows import repositories
from gpunode.lab.recipe import SYSTEMS, Entry, Recipe, architecture, find_mirror, tar_of

KIND = "vendor"
KIND_RPM = "vendor-rpm"
BASE = SYSTEMS["debian-12"]
"""The system of the tree in the image."""
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
_PROXY_FILE = "etc/apt/apt.conf.d/90gpunode-build"
_BUILD_LIMIT_S = 900
_LOCK_LIMIT_S = 1200
_POLL_S = 0.5


def _repacked() -> list[str]:
    """Return the Debian packages from which some of the vendors' packages are built."""
    return sorted({name for row in repositories().values() for built in contents(row) for name in built.repack.split()})


@dataclass(frozen=True)
class VendorImages:
    """Builder of the images, on one engine from one mirror. ``stop``, once set, ends a build."""

    client: docker.DockerClient
    progress: Progress
    mirror: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def ensure_base(self) -> None:
        """Make sure that there is what ``ensure`` builds from, so that it can run beside something else."""
        with docker_errors("looking for the vendor's image"):
            try:
                self.client.images.get(self._tags[0])
            except ImageNotFound:
                self._base()

    def ensure(self, *, rpm: bool = False) -> str:
        """Return the id of an image that holds the packages for systems with apt, and with ``rpm`` those for dnf too;
        build it if there is none.

        Raises UndeterminedError with what to do if it cannot be built, or when ``stop`` is set.
        """
        apt_tag, rpm_tag = self._tags
        with (
            locked(f"image {KIND}", _LOCK_LIMIT_S, self.progress, self.stop.is_set),
            docker_errors("looking for the vendor's image"),
        ):
            for tag in [rpm_tag] if rpm else [rpm_tag, apt_tag]:
                try:
                    return str(self.client.images.get(tag).id)
                except ImageNotFound:
                    continue
            try:
                image = str(self.client.images.get(apt_tag).id)
            except ImageNotFound:
                image = self._build(self._base(), apt_tag)
            return self._build(image, rpm_tag) if rpm else image

    @cached_property
    def _recipe(self) -> Recipe:
        if architecture() != "amd64":
            raise UndeterminedError("the lab's vendor repository exists only for x86_64: use a lab without --hardware")
        return Recipe(BASE, "amd64", find_mirror(self.mirror))

    @cached_property
    def _tags(self) -> tuple[str, str]:
        """Return the tags of the image for systems with apt, and of the one with everything."""
        parts = [self._recipe.digest, _script(KIND), _script(KIND_RPM), list(_inputs())]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
        return f"{REPOSITORY}:{KIND}-{digest}", f"{REPOSITORY}:{KIND_RPM}-{digest}"

    def _base(self) -> str:
        with locked(f"image {BASE.id}", _LOCK_LIMIT_S, self.progress, self.stop.is_set):
            return ensure_image(self.client, self._recipe, self.progress)

    def _build(self, base: str, tag: str) -> str:
        """Make the image of that tag: tools and the packages for apt in a node's tree, or those for dnf in that."""
        started = time.monotonic()
        repository, _, name = tag.partition(":")
        kind = name.rpartition("-")[0]
        self.progress(f"vendor repository: building its packages for {'dnf' if kind == KIND_RPM else 'apt'}")
        container = self.client.containers.create(
            base,
            ["timeout", "-k", "5", str(_BUILD_LIMIT_S), "sh", "-c", _script(kind)],
            name=build_container(self.client, KIND),
            # As mmdebstrap on this machine: a proxy on the loopback is reached.
            network_mode="none" if kind == KIND_RPM else "host",
            labels={IMAGE_LABEL: kind},
        )
        try:
            proxies = "".join(f'Acquire::{scheme}::Proxy "{url}";\n' for scheme, url in self._recipe.mirror.proxies)
            container.put_archive("/", _tar(_inputs()))
            container.put_archive("/", tar_of([Entry(_PROXY_FILE, proxies, 0o600)]))
            self._run(container)
            command = json.dumps(["/usr/bin/python3", f"/{_FOLDER}/serve.py"])
            image = container.commit(repository, name, changes=[f"CMD {command}", f"LABEL {IMAGE_LABEL}={kind}"])
        finally:
            container.remove(force=True, v=True)
        remove_images(self.client, kind, keep=image.id)
        self.progress(f"vendor repository: built in {time.monotonic() - started:.0f} s")
        return cast(str, image.id)

    def _run(self, container: Container) -> None:
        """Run a build's container to its end."""
        container.start()
        deadline = time.monotonic() + _BUILD_LIMIT_S + 30
        while container.status != "exited":
            if self.stop.wait(_POLL_S) or time.monotonic() > deadline:
                raise UndeterminedError("vendor repository: its build was interrupted or did not end in time")
            container.reload()
        if rc := container.attrs["State"]["ExitCode"]:
            output = container.logs(tail=200).decode(errors="replace")
            why = reason_of(output, "Docker's data directory")
            raise UndeterminedError(f"vendor repository: building failed (exit {rc}): {why}")


def _inputs() -> Iterator[tuple[str, str]]:
    """Yield the files that decide the packages: name in the image and content."""
    for name in _BUILDING:
        yield name, _INSIDE.joinpath(name).read_text(encoding="utf-8")
    yield "plan.json", _plan_text()


@cache
def _plan_text() -> str:
    return json.dumps(plan(), sort_keys=True)


def serving() -> bytes:
    """Return the archive that a container gets before its first start: the programs that publish and serve."""
    return _tar((name, _INSIDE.joinpath(name).read_text(encoding="utf-8")) for name in _SERVING)


def _tar(files: Iterable[tuple[str, str]]) -> bytes:
    return tar_of(Entry(f"{_FOLDER}/{name}", text, 0o644) for name, text in files)


def _script(kind: str) -> str:
    """Return what the build's container runs."""
    build = f"exec python3 /{_FOLDER}/build.py /{_FOLDER}/plan.json"
    if kind == KIND_RPM:
        return f"{build} rpm"
    debs = f"/{_FOLDER}/debs"
    return f"""\
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get -q -o Acquire::Retries=3 update
apt-get -q -o Acquire::Retries=3 install --yes --no-install-recommends {shlex.join(_TOOLS)}
mkdir -p {debs}
cd {debs}
apt-get -q -o Acquire::Retries=3 download {shlex.join(_repacked())}
apt-get clean
rm -rf /{_PROXY_FILE} /var/lib/apt/lists/*
{build} flat suites
"""
