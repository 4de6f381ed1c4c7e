"""Images of lab nodes: built by mmdebstrap from Debian's packages, imported into Docker, kept until a change."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import docker
from docker.errors import APIError, ImageNotFound, NotFound
from docker.models.images import Image

from gpunode.errors import UndeterminedError
from gpunode.lab.engine import docker_errors, need_space
from gpunode.lab.recipe import DPKG_OPTIONS, KEYRING, Recipe, redacted

BUILD_LIMIT_S = 900
_END_LIMIT_S = 30
_FREE_GIB = 3
_FULL = "No space left on device"
_LOG_BYTES = 1 << 20
_TEMPORARY = Path("/var/tmp")  # noqa: S108 (a disk, where /tmp may be memory; the folder in it is mkdtemp's)


@contextmanager
def debian_tree(recipe: Recipe) -> Iterator[Path]:
    """Yield the path of the recipe's tree as a tar file, which is removed with the context; one build per system at a
    time.

    Raises UndeterminedError with what to do if this machine cannot build it.
    """
    mode = build_mode()
    need_space(_TEMPORARY, _FREE_GIB)
    prefix = f"gpunode-lab-{recipe.system.id}-"
    for stale in _TEMPORARY.glob(f"{prefix}*"):  # left by a killed build
        if stale.stat().st_uid == os.geteuid():
            shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=_TEMPORARY))
    try:
        if mode == "unshare":
            folder.chmod(0o1777)  # the build runs under other user ids
        _write(recipe, folder)
        _run(recipe, folder, mode)
        yield folder / "tree.tar"
    finally:
        _remove(folder)


def build_mode() -> str:
    """Return mmdebstrap's mode: as root, or as a user in a user namespace where this machine supports that."""
    if shutil.which("mmdebstrap") is None:
        raise UndeterminedError(
            "mmdebstrap is missing: apt-get install mmdebstrap (or, as root, scripts/docker-engine)"
        )
    if not Path(KEYRING).exists():
        raise UndeterminedError(f"{KEYRING} is missing: apt-get install debian-archive-keyring")
    if os.geteuid() == 0:
        return "root"
    if shutil.which("newuidmap") is None:
        need = "newuidmap (apt-get install uidmap) and a line in /etc/subuid"
        raise UndeterminedError(f"building the lab's image needs root, or {need}")
    return "unshare"


def command(recipe: Recipe, folder: Path, mode: str) -> list[str]:
    """Return mmdebstrap's command line, which builds the tree in ``folder`` and packs it as ``folder/tree.tar``."""
    argv = [
        "mmdebstrap",
        f"--mode={mode}",
        "--variant=minbase",
        "--format=tar",
        f"--architectures={recipe.architecture}",
        f"--include={','.join(recipe.packages)}",
        *(f"--dpkgopt={option}" for option in DPKG_OPTIONS),
        *(["--skip=cleanup/apt/lists"] if recipe.keeps_lists else []),
        f"--essential-hook=tar-in {folder / 'early.tar'} /",
        f"--customize-hook=tar-in {folder / 'files.tar'} /",
        f'--customize-hook=chroot "$1" sh -c {shlex.quote(recipe.setup)}',
        recipe.system.codename,
        str(folder / "tree.tar"),
        *recipe.sources,
    ]
    if mode == "root":
        # Mounts and processes of the build live in namespaces of their own, which are removed with the build, also when
        # it is killed; the build is killed when this process ends. In unshare mode mmdebstrap creates the namespaces
        # itself.
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        argv = ["setpriv", "--pdeathsig", "KILL", *namespaces, *argv]
    return argv


def _write(recipe: Recipe, folder: Path) -> None:
    """Write what the build reads, and its log full of zeros: a build that fills the disk can still write to it."""
    try:
        (folder / "early.tar").write_bytes(recipe.early_tree)
        (folder / "files.tar").write_bytes(recipe.tree)
        (folder / "log").write_bytes(bytes(_LOG_BYTES))
    except OSError as err:
        raise UndeterminedError(f"{folder}: {err.strerror}: free disk space there") from None


def _run(recipe: Recipe, folder: Path, mode: str) -> None:
    log = folder / "log"
    environment = os.environ | {"TMPDIR": str(folder), "LC_ALL": "C.UTF-8"}
    environment |= {f"{scheme}_proxy": url for scheme, url in recipe.mirror.proxies}
    with log.open("r+b") as output:
        build = subprocess.Popen(
            command(recipe, folder, mode),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            rc = build.wait(timeout=BUILD_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise UndeterminedError(f"mmdebstrap did not end within {BUILD_LIMIT_S} s: {reason(log)}") from None
        finally:
            if build.poll() is None:
                _end(build, gently=mode == "unshare")
    if rc != 0:
        raise UndeterminedError(f"mmdebstrap could not build {recipe.system.id} (exit {rc}): {reason(log)}")


def _end(build: subprocess.Popen[bytes], *, gently: bool) -> None:
    """Kill the build's process group; with ``gently``, terminate first: only mmdebstrap can remove its namespace's
    files.
    """
    if gently:
        os.killpg(build.pid, signal.SIGTERM)
        try:
            build.wait(timeout=_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass
        else:
            return
    os.killpg(build.pid, signal.SIGKILL)
    build.wait(timeout=_END_LIMIT_S)


def _remove(folder: Path) -> None:
    """Remove the folder, with retries: processes that were just killed may still create a file in it."""
    deadline = time.monotonic() + _END_LIMIT_S
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except OSError as err:
            if time.monotonic() > deadline:
                raise UndeterminedError(f"{folder} is a remainder of a build ({err.strerror}): remove it") from None
            time.sleep(0.2)


def reason(log: Path) -> str:
    """Return the most relevant line of mmdebstrap's output."""
    return reason_of(log.read_bytes().rstrip(b"\0").decode(errors="replace"), str(log.parents[1]))


def reason_of(output: str, location: str) -> str:
    """Return the most relevant line of a build's output: that the disk at ``location`` is full, else apt's first error,
    else the last line.
    """
    if _FULL in output:
        return f"the disk is full at {location}: free {_FREE_GIB} GiB there"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E:", "Err:")) and not line.startswith("E: mmdebstrap")]
    return redacted((errors or lines[-1:] or ["no output"])[0])[:300]


REPOSITORY = "gpunode-lab"
IMAGE_LABEL = "gpunode.lab.image"
# For the kernel of an older image, the archive may no longer have headers.
FRESH_DAYS = 7
# Another checkout of gpunode may have built an image for nodes that it is about to create.
_SPARED = timedelta(hours=1)

Progress = Callable[[str], None]


def ensure_image(client: docker.DockerClient, recipe: Recipe, progress: Progress) -> str:
    """Return the id of an image of this recipe that is not older than ``FRESH_DAYS``; build it if there is none.

    If a new one cannot be built (mirror unreachable), an older image of the same recipe is used and reported.
    Raises UndeterminedError with what to do if there is neither.
    """
    tag = f"{REPOSITORY}:{recipe.system.id}-{recipe.digest}"
    cached = None
    with docker_errors("looking for the lab's image"):
        try:
            cached = client.images.get(tag)
        except ImageNotFound:
            progress(f"image {recipe.system.id}: not built yet")
    if cached is not None:
        days = _age(cached).days
        if days < FRESH_DAYS:
            progress(f"image {recipe.system.id}: as built before ({tag})")
            return str(cached.id)
        progress(f"image {recipe.system.id}: {days} days old, making a new one")
    try:
        return _build(client, recipe, tag, progress)
    except UndeterminedError as err:
        if cached is None:
            raise
        progress(f"image {recipe.system.id}: the old one is used: {err}")
        return str(cached.id)


def remove_images(client: docker.DockerClient, system: str | None = None, keep: str | None = None) -> list[str]:
    """Remove the lab's images that no container uses; return the removed tags.

    With ``keep``, that id and images younger than an hour are kept.
    """
    removed = []
    label = f"{IMAGE_LABEL}={system}" if system else IMAGE_LABEL
    with docker_errors("looking for the lab's images"):
        images = client.images.list(filters={"label": label})
        # The newest first: the engine keeps an image from which another was made.
        for image in sorted(images, key=lambda image: str(image.attrs["Created"]), reverse=True):
            if keep is not None and (image.id == keep or _age(image) < _SPARED):
                continue
            try:
                client.images.remove(str(image.id))
            except APIError as err:
                if err.status_code != 409:  # used by a node, perhaps of another lab
                    raise
                continue
            removed.extend(image.tags)
    return removed


def _age(image: Image) -> timedelta:
    return datetime.now(UTC) - datetime.fromisoformat(image.attrs["Created"][:19] + "+00:00")


def build_container(client: docker.DockerClient, kind: str) -> str:
    """Return the name of the build container of that kind; remove one that a killed build left behind.

    The caller holds the lock of that kind's images.
    """
    name = f"{REPOSITORY}-build-{kind}"
    with suppress(NotFound):
        client.containers.get(name).remove(force=True, v=True)
    return name


def _build(client: docker.DockerClient, recipe: Recipe, tag: str, progress: Progress) -> str:
    started = time.monotonic()
    with docker_errors("asking Docker where it keeps its data"):
        need_space(Path(client.info()["DockerRootDir"]), _FREE_GIB)
    progress(f"image {recipe.system.id}: building from {redacted(recipe.mirror.archive)} (about a minute)")
    if recipe.mirror.proxies != recipe.mirror.proxies_for_nodes:
        progress("apt's proxy listens on this machine's loopback, which nodes cannot reach: they use none")
    with debian_tree(recipe) as tar:
        spent = time.monotonic() - started
        progress(f"image {recipe.system.id}: built in {spent:.0f} s, importing {tar.stat().st_size >> 20} MiB")
        image = _import(client, recipe, tar, tag)
    remove_images(client, recipe.system.id, keep=image)
    progress(f"image {recipe.system.id}: ready after {time.monotonic() - started:.0f} s")
    return image


def _import(client: docker.DockerClient, recipe: Recipe, tar: Path, tag: str) -> str:
    repository, _, name = tag.partition(":")
    changes = [
        f"LABEL {IMAGE_LABEL}={recipe.system.id}",
        f"LABEL gpunode.lab.recipe={recipe.digest}",
        "ENV container=docker",  # informs systemd that it runs in a container
        f"CMD {json.dumps(list(recipe.init))}",
    ]
    with docker_errors(f"importing {tag}"), tar.open("rb") as stream:
        # An open file in place of a path: with a path the SDK sets no time limit.
        client.api.import_image(src=stream, repository=repository, tag=name, changes=changes)
        return str(client.images.get(tag).id)
