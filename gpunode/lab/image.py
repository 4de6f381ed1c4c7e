"""Images of lab nodes: built by mmdebstrap from Debian's packages, imported, kept until the recipe changes."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import docker
from docker.errors import APIError, ImageNotFound

from gpunode.errors import UndeterminedError
from gpunode.lab.engine import docker_errors, need_space
from gpunode.lab.mirror import redacted
from gpunode.lab.recipe import DPKG_OPTIONS, KEYRING, Recipe

REPOSITORY = "gpunode-lab"
IMAGE_LABEL = "gpunode.lab.image"
BUILD_LIMIT_S = 900
# An image that is older holds a kernel whose headers the archive may no longer have.
FRESH_DAYS = 7
_TEMPORARY = Path("/var/tmp")  # noqa: S108 (a disk, where /tmp may be memory; the folder in it is mkdtemp's)

Say = Callable[[str], None]


def ensure_image(client: docker.DockerClient, recipe: Recipe, say: Say) -> str:
    """The id of an image of this recipe that is not older than ``FRESH_DAYS``, built now if there is none.

    An older image of the same recipe is used, and said so, where a new one cannot be made (no way to the mirror).
    Raises UndeterminedError with what to do where nothing can be made.
    """
    tag = f"{REPOSITORY}:{recipe.system.id}-{recipe.digest}"
    cached = None
    with docker_errors("looking for the lab's image"):
        try:
            cached = client.images.get(tag)
        except ImageNotFound:
            say(f"image {recipe.system.id}: not built yet")
    if cached is not None:
        days = (datetime.now(UTC) - datetime.fromisoformat(cached.attrs["Created"][:19] + "+00:00")).days
        if days < FRESH_DAYS:
            say(f"image {recipe.system.id}: as built before ({tag})")
            return str(cached.id)
        say(f"image {recipe.system.id}: {days} days old, making a new one")
    try:
        return _build(client, recipe, tag, say)
    except UndeterminedError as err:
        if cached is None:
            raise
        say(f"image {recipe.system.id}: the old one is used: {err}")
        return str(cached.id)


def remove_images(client: docker.DockerClient, system: str | None = None, keep: str | None = None) -> list[str]:
    """Remove the lab's images (of one system; but for one id) that no container uses; the tags removed."""
    removed = []
    label = f"{IMAGE_LABEL}={system}" if system else IMAGE_LABEL
    with docker_errors("looking for the lab's images"):
        for image in client.images.list(filters={"label": label}):
            if image.id == keep:
                continue
            try:
                client.images.remove(str(image.id))
            except APIError as err:
                if err.status_code != 409:  # in use by a node, perhaps of another lab
                    raise
                continue
            removed.extend(image.tags)
    return removed


def _build(client: docker.DockerClient, recipe: Recipe, tag: str, say: Say) -> str:
    started = time.monotonic()
    mode = _mode()
    with docker_errors("asking Docker where it keeps its data"):
        need_space(Path(client.info()["DockerRootDir"]), 3)
    need_space(_TEMPORARY, 3)
    say(f"image {recipe.system.id}: building from {redacted(recipe.mirror.archive)} (about a minute)")
    if recipe.mirror.proxies != recipe.mirror.proxies_for_nodes:
        say("apt's proxy listens on this machine's loopback, where nodes cannot reach it: they go without")
    folder = Path(tempfile.mkdtemp(prefix="gpunode-lab-", dir=_TEMPORARY))
    try:
        tar = _bootstrap(recipe, folder, mode)
        spent = time.monotonic() - started
        say(f"image {recipe.system.id}: built in {spent:.0f} s, importing {tar.stat().st_size >> 20} MiB")
        image = _import(client, recipe, tar, tag)
    finally:
        shutil.rmtree(folder)
    remove_images(client, recipe.system.id, keep=image)
    say(f"image {recipe.system.id}: ready after {time.monotonic() - started:.0f} s")
    return image


def _mode() -> str:
    """mmdebstrap's mode: as root, or as a user in a user namespace where this machine allows that."""
    if shutil.which("mmdebstrap") is None:
        raise UndeterminedError(
            "mmdebstrap is missing: apt-get install mmdebstrap (or, as root, scripts/docker-engine)"
        )
    if not Path(KEYRING).exists():
        raise UndeterminedError(f"{KEYRING} is missing: apt-get install debian-archive-keyring")
    if os.geteuid() == 0:
        return "root"
    if shutil.which("newuidmap") is None:
        raise UndeterminedError(
            "building the lab's image needs root, or newuidmap (apt-get install uidmap) and /etc/subuid"
        )
    return "unshare"


def command(recipe: Recipe, folder: Path, mode: str) -> list[str]:
    """mmdebstrap's command line; the tree is built in ``folder`` and packed as ``folder/tree.tar``."""
    argv = [
        "mmdebstrap",
        f"--mode={mode}",
        "--variant=minbase",
        "--format=tar",
        f"--architectures={recipe.architecture}",
        f"--include={','.join(recipe.packages)}",
        *(f"--dpkgopt={option}" for option in DPKG_OPTIONS),
        f"--customize-hook=tar-in {folder / 'files.tar'} /",
        f'--customize-hook=chroot "$1" sh -c {shlex.quote(recipe.setup)}',
        recipe.system.codename,
        str(folder / "tree.tar"),
        *recipe.sources,
    ]
    if mode == "root":
        # Mounts and processes of the build live in namespaces of their own, which end with it, however it ends;
        # and it ends with us, however we end.
        argv = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child=KILL",
            "--mount-proc",
            *argv,
        ]
    return argv


def _bootstrap(recipe: Recipe, folder: Path, mode: str) -> Path:
    """Run mmdebstrap in ``folder``; the tree as a tar file. Whatever happens, no process of it is left."""
    if mode == "unshare":
        folder.chmod(0o1777)  # the build's users are others than ours
    (folder / "files.tar").write_bytes(recipe.tree)
    log = folder / "log"
    environment = os.environ | {"TMPDIR": str(folder), "LC_ALL": "C.UTF-8"}
    environment |= {f"{scheme}_proxy": url for scheme, url in recipe.mirror.proxies}
    with log.open("wb") as output:
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
            raise UndeterminedError(f"mmdebstrap did not end within {BUILD_LIMIT_S} s: {_reason(log)}") from None
        finally:
            if build.poll() is None:
                os.killpg(build.pid, signal.SIGKILL)
                build.wait(timeout=30)
    if rc != 0:
        raise UndeterminedError(f"mmdebstrap could not build {recipe.system.id} (exit {rc}): {_reason(log)}")
    return folder / "tree.tar"


def _reason(log: Path) -> str:
    """The most telling line of mmdebstrap's output: the first error, else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("E:", "Err:")) and not line.startswith("E: mmdebstrap")]
    return redacted((errors or lines or ["no output"])[0 if errors else -1])[:300]


def _import(client: docker.DockerClient, recipe: Recipe, tar: Path, tag: str) -> str:
    repository, _, name = tag.partition(":")
    changes = [
        f"LABEL {IMAGE_LABEL}={recipe.system.id}",
        f"LABEL gpunode.lab.recipe={recipe.digest}",
        "ENV container=docker",  # how systemd knows where it runs
        f"CMD {json.dumps(list(recipe.init))}",
    ]
    with docker_errors(f"importing {tag}"), tar.open("rb") as stream:
        # From an open file: with a path the SDK sets no time limit.
        client.api.import_image(src=stream, repository=repository, tag=name, changes=changes)
        return str(client.images.get(tag).id)
