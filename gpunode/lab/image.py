"""Images of lab nodes: built from Debian's packages, imported into Docker, kept until the recipe changes."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import docker
from docker.errors import APIError, ImageNotFound, NotFound
from docker.models.images import Image

from gpunode.errors import UndeterminedError
from gpunode.lab.bootstrap import debian_tree
from gpunode.lab.engine import docker_errors, need_space
from gpunode.lab.mirror import redacted
from gpunode.lab.recipe import Recipe

REPOSITORY = "gpunode-lab"
IMAGE_LABEL = "gpunode.lab.image"
# For the kernel of an older image, the archive may no longer have headers.
FRESH_DAYS = 7
_FREE_GIB = 3
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
