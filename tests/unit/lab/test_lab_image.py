"""When an image is built, kept or removed. The engine and mmdebstrap are stood in for."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from docker.errors import APIError, ImageNotFound, NotFound

from gpunode.errors import UndeterminedError
from gpunode.lab import image as module
from gpunode.lab.image import FRESH_DAYS, build_container, ensure_image, remove_images
from gpunode.lab.recipe import SYSTEMS, Mirror, Recipe

RECIPE = Recipe(SYSTEMS["debian-12"], "amd64", Mirror("http://u:secret@m.example/debian", "http://m.example/s"))
TAG = f"gpunode-lab:debian-12-{RECIPE.digest}"


class InUseError(APIError):
    status_code = 409


class Engine:
    """Images by tag, as far as the lab asks for them."""

    def __init__(self) -> None:
        self.found: dict[str, SimpleNamespace] = {}
        self.used: set[str] = set()
        self.images = self.api = self

    def add(self, tag: str, days_old: float = 0) -> str:
        created = (datetime.now(UTC) - timedelta(days=days_old)).strftime("%Y-%m-%dT%H:%M:%S.123456789Z")
        self.found[tag] = SimpleNamespace(id=f"sha256:{tag}:{days_old}", attrs={"Created": created}, tags=[tag])
        return str(self.found[tag].id)

    def info(self) -> dict[str, str]:
        return {"DockerRootDir": "/"}

    def get(self, tag: str) -> SimpleNamespace:
        if tag not in self.found:
            raise ImageNotFound(tag)
        return self.found[tag]

    def import_image(self, src: Any, repository: str, tag: str, changes: list[str]) -> None:
        assert src.read() == b"tree"
        assert "LABEL gpunode.lab.image=debian-12" in changes
        self.add(f"{repository}:{tag}")

    def list(self, filters: dict[str, str]) -> list[SimpleNamespace]:
        _, _, system = filters["label"].partition("=")
        return [image for tag, image in self.found.items() if tag.startswith(f"gpunode-lab:{system}")]

    def remove(self, name: str) -> None:
        if name in self.used:
            raise InUseError("in use")
        self.found = {tag: image for tag, image in self.found.items() if image.id != name}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    @contextmanager
    def tree(recipe: Recipe) -> Iterator[Path]:
        (tmp_path / "tree.tar").write_bytes(b"tree")
        yield tmp_path / "tree.tar"

    monkeypatch.setattr(module, "debian_tree", tree)
    monkeypatch.setattr(module, "_FREE_GIB", 0)
    return Engine()


@contextmanager
def no_tree(recipe: Recipe) -> Iterator[Path]:
    raise UndeterminedError("no way to the mirror")
    yield


def test_an_image_is_built_once_and_other_recipes_of_the_system_go(engine: Any) -> None:
    engine.add("gpunode-lab:debian-12-before", 0.1)
    output: list[str] = []
    built = ensure_image(engine, RECIPE, output.append)
    assert list(engine.found) == [TAG]
    assert ensure_image(engine, RECIPE, output.append) == built
    assert output[-1] == f"image debian-12: as built before ({TAG})"
    assert "secret" not in "".join(output)


def test_an_image_that_another_checkout_has_just_built_stays(engine: Any) -> None:
    engine.add("gpunode-lab:debian-12-other", 0.02)
    ensure_image(engine, RECIPE, lambda _: None)
    assert set(engine.found) == {"gpunode-lab:debian-12-other", TAG}
    assert set(remove_images(engine, "debian-12")) == {"gpunode-lab:debian-12-other", TAG}


def test_an_old_image_is_rebuilt(engine: Any) -> None:
    fresh = engine.add(TAG, FRESH_DAYS - 0.5)
    assert ensure_image(engine, RECIPE, lambda _: None) == fresh
    old = engine.add(TAG, FRESH_DAYS + 0.5)
    assert ensure_image(engine, RECIPE, lambda _: None) != old


def test_an_old_image_is_used_where_no_new_one_can_be_made(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "debian_tree", no_tree)
    old = engine.add(TAG, 30)
    output: list[str] = []
    assert ensure_image(engine, RECIPE, output.append) == old
    assert output[-1] == "image debian-12: the old one is used: no way to the mirror"


def test_without_any_image_the_reason_is_reported(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "debian_tree", no_tree)
    with pytest.raises(UndeterminedError, match="no way to the mirror"):
        ensure_image(engine, RECIPE, lambda _: None)


def test_images_in_use_are_kept(engine: Any) -> None:
    engine.used.add(engine.add("gpunode-lab:debian-12-used"))
    engine.add("gpunode-lab:debian-13-idle")
    assert remove_images(engine) == ["gpunode-lab:debian-13-idle"]
    assert list(engine.found) == ["gpunode-lab:debian-12-used"]


def test_the_container_of_a_killed_build_goes() -> None:
    client = Mock()
    assert build_container(client, "vendor") == "gpunode-lab-build-vendor"
    client.containers.get("gpunode-lab-build-vendor").remove.assert_called_once_with(force=True, v=True)
    client.containers.get.side_effect = NotFound("none")
    assert build_container(client, "vendor") == "gpunode-lab-build-vendor"


def test_a_proxy_that_nodes_cannot_reach_is_reported(engine: Any) -> None:
    recipe = Recipe(
        RECIPE.system, "amd64", Mirror("http://m.example/debian", "s", (("http", "http://127.0.0.1:3142"),))
    )
    output: list[str] = []
    ensure_image(engine, recipe, output.append)
    assert any("loopback" in line for line in output)
