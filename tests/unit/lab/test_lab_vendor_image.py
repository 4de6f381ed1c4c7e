"""The vendor's images: one for apt from a node's tree, one for dnf from that; what is there is not built again."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import ImageNotFound

from gpunode.errors import UndeterminedError
from gpunode.lab.recipe import Mirror
from gpunode.lab.repositories import image as module
from gpunode.lab.repositories.image import VendorImages

PROXY = "http://u:secret@127.0.0.1:3142"


class Engine:
    """Images by tag, and containers that end as requested."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.made: list[SimpleNamespace] = []
        self.code = 0
        self.ends = True
        self.bases: list[str] = []
        self.images = self.containers = self

    def base(self, *_: object) -> str:
        self.bases.append("base")
        return "base"

    def get(self, tag: str) -> SimpleNamespace:
        if tag not in self.found:
            raise ImageNotFound(tag)
        return SimpleNamespace(id=self.found[tag])

    def create(self, base: str, argv: list[str], **options: Any) -> SimpleNamespace:
        container = SimpleNamespace(base=base, argv=argv, options=options, files=[], status="created", removed=False)
        container.attrs = {"State": {"ExitCode": self.code}}
        container.put_archive = lambda _path, data: container.files.append(data)
        container.start = lambda: setattr(container, "status", "exited" if self.ends else "running")
        container.reload = lambda: None
        container.logs = lambda **_: b"Get:1 http://m\nE: Failed to fetch http://u:p@m/x.deb  503\nlast line"
        container.remove = lambda **_: setattr(container, "removed", True)
        container.commit = lambda repository, name, **_: self.commit(f"{repository}:{name}")
        self.made.append(container)
        return container

    def commit(self, tag: str) -> SimpleNamespace:
        self.found[tag] = f"id of {tag}"
        return SimpleNamespace(id=self.found[tag])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    engine = Engine()
    monkeypatch.setattr(module, "architecture", lambda: "amd64")
    monkeypatch.setattr(
        module, "find_mirror", lambda mirror: Mirror(mirror or "http://m", "http://s", (("http", PROXY),))
    )
    monkeypatch.setattr(module, "build_container", lambda _client, kind: kind)
    monkeypatch.setattr(module, "remove_images", lambda *_arguments, **_options: [])
    monkeypatch.setattr(module, "ensure_image", engine.base)
    return engine


def images(engine: Any, **options: Any) -> VendorImages:
    return VendorImages(engine, lambda _: None, **options)


def test_packages_for_dnf_are_built_only_where_they_are_needed(engine: Any) -> None:
    apt = images(engine).ensure()
    assert [container.base for container in engine.made] == ["base"]
    assert images(engine).ensure() == apt
    both = images(engine).ensure(rpm=True)
    assert [container.base for container in engine.made] == ["base", apt]
    assert [container.argv[-1].split("plan.json ")[1].split() for container in engine.made] == [
        ["flat", "suites"],
        ["rpm"],
    ]
    assert [container.options["network_mode"] for container in engine.made] == ["host", "none"]
    # The larger image serves both.
    assert images(engine).ensure() == images(engine).ensure(rpm=True) == both
    assert images(engine, mirror="http://other").ensure() != both
    assert all(container.removed for container in engine.made)


def test_a_base_is_made_ahead_only_for_a_build(engine: Any) -> None:
    images(engine).ensure_base()
    assert engine.bases == ["base"]
    images(engine).ensure()
    images(engine).ensure_base()
    assert engine.bases == ["base"] * 2


def test_the_proxys_password_is_in_a_file_that_the_build_removes(engine: Any) -> None:
    images(engine).ensure()
    (container,) = engine.made
    assert "secret" not in str(container.argv) + str(container.options)
    assert any(PROXY.encode() in data for data in container.files)
    assert f"rm -rf /{module._PROXY_FILE} " in container.argv[-1]


def test_a_failed_build_is_apts_first_error_and_leaves_nothing(engine: Any) -> None:
    engine.code = 100
    with pytest.raises(
        UndeterminedError, match=r"building failed \(exit 100\): E: Failed to fetch http://m/x.deb  503$"
    ):
        images(engine).ensure()
    assert engine.made[0].removed
    assert engine.found == {}


def test_a_build_ends_when_it_is_interrupted(engine: Any) -> None:
    engine.ends = False
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(UndeterminedError, match="interrupted"):
        images(engine, stop=stop).ensure()
    assert engine.made[0].removed
    assert engine.found == {}
