"""The image that the payload runs in: present already, loaded from a file, or pulled."""

import json
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.errors import ImageNotFound, NotFound

from gpunode.errors import UsageError
from gpunode.workload.engine import Engine, one_line
from gpunode.workload.transport import LaunchFailure

Progress = Callable[[str], None]
_NO_REGISTRY = ("dial tcp", "lookup ", "timeout", "connection refused", "no such host", "unreachable", "tls:", "eof")
_GO_NAMES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}
"""An engine reports its machine in the kernel's notation, and an image's in Go's."""
_MOST_JSON = 4 * 1024 * 1024
_LOADED = ("Loaded image: ", "Loaded image ID: ")


@dataclass(frozen=True)
class Image:
    """An image on the node."""

    name: str
    id: str
    brought: bool
    """Whether this run pulled or loaded it; it stays there for the next run."""


@dataclass(frozen=True)
class ImageFile:
    """An archive as ``docker save`` writes it."""

    path: Path
    id: str
    name: str | None
    layers: tuple[str, ...] = ()
    """Digests of its unpacked layers: an engine with containerd's image store knows the image only by these."""


def read_image_file(path: Path) -> ImageFile:
    """Return the content of an archive; UsageError with one line if it is invalid, or holds several images."""
    try:
        with tarfile.open(path) as archive:
            (entry,) = _json(archive, "manifest.json")
            config, tags = str(entry["Config"]), [str(tag) for tag in entry["RepoTags"] or ()]
            layers = _json(archive, config).get("rootfs", {}).get("diff_ids", ()) if config in _names(archive) else ()
    except OSError as err:
        raise UsageError(f"--image-file {path}: {err.strerror or err}") from None
    except (tarfile.TarError, KeyError, TypeError, ValueError, AttributeError, EOFError):
        raise UsageError(f"--image-file {path}: not an archive of one image as docker save writes it") from None
    digest = config.rsplit("/", 1)[-1].removesuffix(".json")
    return ImageFile(path, f"sha256:{digest}", tags[0] if tags else None, tuple(map(str, layers)))


def _names(archive: tarfile.TarFile) -> set[str]:
    return {member.name for member in archive.getmembers() if member.isfile()}


def _json(archive: tarfile.TarFile, name: str) -> Any:
    member = archive.extractfile(name)
    text = member.read(_MOST_JSON + 1) if member else b""
    if len(text) > _MOST_JSON:
        raise ValueError(name)
    return json.loads(text)


def provide(engine: Engine, name: str, file: ImageFile | None, progress: Progress) -> Image:
    """Return the image on the node; load or pull it if necessary.

    Raises LaunchFailure: ``image``, also where it is for another architecture, ``no-space``, ``time-limit`` …
    """
    image = _of_file(engine, file) if file else _seen(engine, name)
    brought = image is None
    if image is None:
        image = _load(engine, file, progress) if file is not None else _pull(engine, name, progress)
    built_for = image.get("Architecture")
    architecture = _GO_NAMES.get(str(engine.info.get("Architecture")))
    if architecture is not None and built_for and built_for != architecture:
        raise LaunchFailure(
            "image", f"image {name} is for {built_for}, and the node is {architecture}: use another with --image"
        )
    return Image(name, str(image["Id"]), brought=brought)


def _of_file(engine: Engine, file: ImageFile) -> dict[str, Any] | None:
    """Return the archive's image if the engine has it: by its id, or by name and with the same layers."""
    image = _seen(engine, file.id)
    if image is not None or file.name is None or not file.layers:
        return image
    named = _seen(engine, file.name)
    same = named is not None and tuple((named.get("RootFS") or {}).get("Layers") or ()) == file.layers
    return named if same else None


def _seen(engine: Engine, name: str) -> dict[str, Any] | None:
    """Return the engine's data of an image; None if it has none of the name."""
    with engine.doing("image", f"looking for image {name}"):
        try:
            seen: dict[str, Any] = engine.api.inspect_image(name)
        except (ImageNotFound, NotFound):
            return None
    if not isinstance(seen, dict) or not isinstance(seen.get("Id"), str):
        raise LaunchFailure("broke-off", f"looking for image {name}: the engine's answer has no Id")
    return seen


def _load(engine: Engine, file: ImageFile, progress: Progress) -> dict[str, Any]:
    progress(f"loading {file.path.name}, {file.path.stat().st_size >> 20} MiB")
    doing = f"loading {file.path}"
    loaded: list[str] = []
    with engine.doing("image", doing), file.path.open("rb") as stream:
        for line in _lines(engine.api.load_image(stream), doing):
            text = str(line.get("stream", "")).strip()
            loaded += [text.removeprefix(start) for start in _LOADED if text.startswith(start)]
    image = next((seen for name in (file.id, *loaded) if (seen := _seen(engine, name))), None)
    if image is None:
        raise LaunchFailure("image", f"{doing}: the engine loaded it but has no image of it")
    return image


def _pull(engine: Engine, name: str, progress: Progress) -> dict[str, Any]:
    doing = f"pulling image {name}"
    layers: dict[str, tuple[int, int]] = {}
    progress(doing)
    try:
        with engine.doing("image", doing):
            # Without the controller's own logins: the node does not have them.
            answer = engine.api.pull(name, stream=True, decode=True, auth_config={})
            for line in _lines(answer, doing):
                detail = line.get("progressDetail") or {}
                if line.get("status") == "Downloading" and detail.get("total"):
                    layers[str(line.get("id"))] = (int(detail.get("current", 0)), int(detail["total"]))
                    done, total = (sum(part) for part in zip(*layers.values(), strict=True))
                    progress(f"{doing}: {done >> 20} of {total >> 20} MiB")
    except LaunchFailure as err:
        if err.kind != "image":
            raise
        raise LaunchFailure("image", _why_not_pulled(name, str(err).removeprefix(f"{doing}: "))) from None
    pulled = _seen(engine, name)
    if pulled is None:
        raise LaunchFailure("image", f"image {name} was pulled but is missing: wrong name?")
    return pulled


def _why_not_pulled(name: str, error: str) -> str:
    text = error.lower()
    instead = "load it with --image-file, or use an existing one with --image"
    if any(word in text for word in _NO_REGISTRY):
        return f"image {name} is not on the node, and its registry cannot be reached from there ({error}): {instead}"
    return f"image {name} is not on the node and cannot be pulled ({error}): {instead}"


def _lines(answers: Iterable[dict[str, Any]], doing: str) -> Iterable[dict[str, Any]]:
    """Yield the engine's progress until it reports an error."""
    for line in answers:
        if "error" in line:
            error = one_line(line["error"])
            kind = "no-space" if "no space left" in error.lower() else "image"
            prefix = f"{doing}: no space left on the node's disk" if kind == "no-space" else doing
            raise LaunchFailure(kind, f"{prefix}: {error}")
        yield line
