"""The image that the payload runs in: there already, loaded from a file, or pulled."""

import json
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.errors import ImageNotFound, NotFound

from gpunode.errors import UsageError
from gpunode.workload.engine import Engine, one_line
from gpunode.workload.way import LaunchFailure

Say = Callable[[str], None]
_NO_REGISTRY = ("dial tcp", "lookup ", "timeout", "connection refused", "no such host", "unreachable", "tls:", "eof")
_LOADED = ("Loaded image: ", "Loaded image ID: ")


@dataclass(frozen=True)
class Image:
    """An image on the node."""

    name: str
    id: str
    brought: bool
    """True where it was pulled or loaded by this run; it is left there for the next."""


@dataclass(frozen=True)
class ImageFile:
    """An archive as ``docker save`` writes it."""

    path: Path
    id: str
    name: str | None


def read_image_file(path: Path) -> ImageFile:
    """What an archive holds; UsageError with one line where it is none, or holds several images."""
    try:
        with tarfile.open(path) as archive:
            manifest = archive.extractfile("manifest.json")
            entries: list[Any] = json.load(manifest) if manifest else []
            (entry,) = entries
            config, tags = str(entry["Config"]), [str(tag) for tag in entry["RepoTags"] or ()]
    except OSError as err:
        raise UsageError(f"--image-file {path}: {err.strerror or err}") from None
    except (tarfile.TarError, KeyError, TypeError, ValueError, EOFError):
        raise UsageError(f"--image-file {path}: not an archive of one image as docker save writes it") from None
    digest = config.rsplit("/", 1)[-1].removesuffix(".json")
    return ImageFile(path, f"sha256:{digest}", tags[0] if tags else None)


def provide(engine: Engine, name: str, file: ImageFile | None, say: Say) -> Image:
    """The image on the node, brought there where it is not. Raises LaunchFailure (``image``, ``no-space`` …)."""
    wanted = file.id if file else name
    there = _id(engine, wanted)
    if there is not None:
        return Image(name, there, brought=False)
    if file is not None:
        return Image(name, _load(engine, file, say), brought=True)
    _pull(engine, name, say)
    pulled = _id(engine, name)
    if pulled is None:
        raise LaunchFailure("image", f"image {name} was pulled and is not there: another image was named?")
    return Image(name, pulled, brought=True)


def _id(engine: Engine, name: str) -> str | None:
    with engine.doing("image", f"looking for image {name}"):
        try:
            return str(engine.api.inspect_image(name)["Id"])
        except (ImageNotFound, NotFound):
            return None


def _load(engine: Engine, file: ImageFile, say: Say) -> str:
    say(f"loading {file.path.name}, {file.path.stat().st_size >> 20} MiB")
    doing = f"loading {file.path}"
    loaded: list[str] = []
    with engine.doing("image", doing), file.path.open("rb") as stream:
        for line in _lines(engine.api.load_image(stream), doing):
            text = str(line.get("stream", "")).strip()
            loaded += [text.removeprefix(start) for start in _LOADED if text.startswith(start)]
    found = next((identity for name in (file.id, *loaded) if (identity := _id(engine, name))), None)
    if found is None:
        raise LaunchFailure("image", f"{doing}: the engine took it and has no image of it")
    return found


def _pull(engine: Engine, name: str, say: Say) -> None:
    doing = f"pulling image {name}"
    layers: dict[str, tuple[int, int]] = {}
    say(doing)
    try:
        with engine.doing("image", doing):
            # Without the controller's own logins: they are not the node's.
            answer = engine.api.pull(name, stream=True, decode=True, auth_config={})
            for line in _lines(answer, doing):
                detail = line.get("progressDetail") or {}
                if line.get("status") == "Downloading" and detail.get("total"):
                    layers[str(line.get("id"))] = (int(detail.get("current", 0)), int(detail["total"]))
                    done, total = (sum(part) for part in zip(*layers.values(), strict=True))
                    say(f"{doing}: {done >> 20} of {total >> 20} MiB")
    except LaunchFailure as err:
        if err.kind != "image":
            raise
        raise LaunchFailure("image", _why_not_pulled(name, str(err).removeprefix(f"{doing}: "))) from None


def _why_not_pulled(name: str, said: str) -> str:
    text = said.lower()
    instead = "load it with --image-file, or name one that is there with --image"
    if any(word in text for word in _NO_REGISTRY):
        return f"image {name} is not on the node, and its registry cannot be reached from there ({said}): {instead}"
    return f"image {name} is not on the node and cannot be pulled ({said}): {instead}"


def _lines(answers: Iterable[dict[str, Any]], doing: str) -> Iterable[dict[str, Any]]:
    """The engine's progress, as long as it tells of no error."""
    for line in answers:
        if "error" in line:
            said = one_line(line["error"])
            kind = "no-space" if "no space left" in said.lower() else "image"
            prefix = f"{doing}: no space left on the node's disk" if kind == "no-space" else doing
            raise LaunchFailure(kind, f"{prefix}: {said}")
        yield line
