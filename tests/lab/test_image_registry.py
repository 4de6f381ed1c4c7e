"""What a release does with the validator image, with a registry on this machine: it is pushed, the registry's digest is
written into the catalog, and an engine pulls exactly that.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import docker
import pytest
import requests
import validator_image
import yaml
from docker.errors import ImageNotFound
from image_registry import registry

from gpunode.errors import UndeterminedError, UsageError
from gpunode.lab.engine import connect
from gpunode.lab.workload_image import ensure_workload_image
from gpunode.workload.engine import Engine
from gpunode.workload.image import provide
from gpunode.workload.transport import LaunchFailure

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]
CONCERNS = ("scripts/validator_image", "gpunode/workload/image")

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("hub")) as address:
        yield address


@pytest.fixture(scope="module")
def image() -> str:
    """An image that is quick to build, in place of one with a framework."""
    return ensure_workload_image(connect(), "python", print)


@pytest.fixture
def target(hub: str) -> Iterator[str]:
    name = f"{hub}/gpunode/validator:1"
    yield name
    with suppress(ImageNotFound):
        connect().images.remove(name)


def digest_in(hub: str) -> str:
    """The digest of the manifest that the registry serves."""
    url = f"http://{hub}/v2/gpunode/validator/manifests/1"
    answer = requests.get(url, headers={"Accept": MANIFEST}, timeout=30)
    answer.raise_for_status()
    return f"sha256:{hashlib.sha256(answer.content).hexdigest()}"


Release = Callable[[], tuple[str, str]]


@pytest.fixture
def release(image: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    """Do what a release does; returns name and digest in the catalog's row."""

    def done() -> tuple[str, str]:
        catalog = tmp_path / "libraries.yml"
        catalog.write_text(validator_image.CATALOG.read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(validator_image, "CATALOG", catalog)
        monkeypatch.setattr(validator_image, "ensure", lambda *_: image)
        assert validator_image.main(["cuda", "--push", target, "--catalog"]) == 0
        rows = yaml.load(catalog.read_text(encoding="utf-8"), yaml.BaseLoader)["workload_images"]  # noqa: S506
        assert rows["validator-tensorflow-cuda"]["digest"] == "unpublished"
        return rows["validator-cuda"]["image"], rows["validator-cuda"]["digest"]

    return done


def test_the_catalog_gets_the_digest_of_the_registry(hub: str, target: str, release: Release) -> None:
    assert release() == (target, digest_in(hub))


def test_an_engine_pulls_that_and_nothing_else(hub: str, image: str, target: str, release: Release) -> None:
    """By the launcher's own code, with the engine of this machine in place of a node's."""
    client = connect()
    name, digest = release()
    client.images.remove(name)
    # The tag moves to other content: who has the catalog's digest still gets what was released.
    other = client.images.get(ensure_workload_image(client, "bare", print))
    other.tag(*target.rsplit(":", 1))
    client.images.push(target.rpartition(":")[0], tag="1")
    client.images.remove(target)
    assert digest_in(hub) != digest
    engine = Engine(client.api, "", "", client.api.info(), deadline=time.monotonic() + 300)
    try:
        pulled = [provide(engine, f"{name}@{digest}", None, print) for _ in range(2)]
    finally:
        client.images.remove(f"{target.rpartition(':')[0]}@{digest}")
    assert {pulled_image.id for pulled_image in pulled} == {client.images.get(image).id}
    assert [pulled_image.brought for pulled_image in pulled] == [True, False]
    with pytest.raises(LaunchFailure, match="is not on the node and cannot be pulled"):
        provide(engine, f"{name}@sha256:{'0' * 64}", None, print)


def test_what_cannot_be_pushed_is_one_line(image: str, hub: str) -> None:
    client: docker.DockerClient = connect()
    for name in (f"{hub}/gpunode/validator", "validator", ":1"):
        with pytest.raises(UsageError, match="is not REPOSITORY:TAG"):
            validator_image.push(client, image, name, print)
        # Before anything is built.
        assert validator_image.main(["cuda", "--push", name]) == 2
    with pytest.raises(UndeterminedError, match=r"pushing 127\.0\.0\.1:1/gpunode/validator:1") as caught:
        validator_image.push(client, image, "127.0.0.1:1/gpunode/validator:1", print)
    client.images.remove("127.0.0.1:1/gpunode/validator:1")
    assert len(str(caught.value).splitlines()) == 1
