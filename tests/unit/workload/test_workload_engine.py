"""The engine found and judged, images and leftovers, over a real HTTP connection to an engine of the test's own."""

import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from fake_engine import FakeEngine, FakeWay

from gpunode.workload.container import LABEL, LIMIT_LABEL, Devices, sweep
from gpunode.workload.engine import connected
from gpunode.workload.image import ImageFile, provide
from gpunode.workload.transport import LaunchFailure

SHA = "sha256:" + "7" * 64


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[ThreadingHTTPServer]:
    server = engine.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def way(server: ThreadingHTTPServer) -> FakeWay:
    return FakeWay(server)


def ends() -> float:
    return time.monotonic() + 20


def failure(way: FakeWay) -> LaunchFailure:
    with pytest.raises(LaunchFailure) as caught, connected(way, ends()):
        pass
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


def test_an_engine_that_answers(server: ThreadingHTTPServer, engine: FakeEngine) -> None:
    engine.info |= {"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"runc": {}}}
    with connected(FakeWay(server), ends()) as node_engine:
        assert (node_engine.version, node_engine.api_version, node_engine.knows_cdi) == ("28.5.1", "1.51", True)


def test_an_old_engine_is_refused_by_name(server: ThreadingHTTPServer, engine: FakeEngine) -> None:
    engine.version = {"Version": "18.06.3-ce", "ApiVersion": "1.38"}
    refused = failure(FakeWay(server))
    assert refused.kind == "engine-too-old"
    assert "Docker Engine 18.06.3-ce (API 1.38) is too old" in str(refused)


@pytest.mark.parametrize("version", [{"hello": "world"}, {"Version": "1", "ApiVersion": "new"}, [], "text"])
def test_something_else_on_the_socket(server: ThreadingHTTPServer, engine: FakeEngine, version: object) -> None:
    engine.answers["GET /version"] = (200, version)
    assert failure(FakeWay(server)).kind in ("no-engine", "broke-off")


def test_sudo_where_the_socket_refuses_the_user(server: ThreadingHTTPServer) -> None:
    denied = "permission denied while trying to connect to the Docker daemon socket"
    way = FakeWay(server, as_root=(False, True), refuse=lambda root: None if root else denied)
    with connected(way, ends()) as node_engine:
        assert node_engine.version == "28.5.1"
    assert way.opened[0] is False
    assert way.opened[-1] is True


def test_neither_group_nor_sudo_is_one_line_with_both(server: ThreadingHTTPServer) -> None:
    def refuse(root: bool) -> str | LaunchFailure:
        if root:
            return LaunchFailure("permission", "sudo requires a password: use -K")
        return "dial unix /var/run/docker.sock: connect: permission denied"

    refused = failure(FakeWay(server, as_root=(False, True), refuse=refuse))
    assert refused.kind == "permission"
    assert "user alice may not use" in str(refused)
    assert "no permission on its socket; sudo requires a password" in str(refused)


@pytest.mark.parametrize(
    ("reported", "kind"),
    [
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", "no-engine"),
        ("dial unix /var/run/docker.sock: connect: connection refused", "no-engine"),
        ("docker: 'system dial-stdio' is not a docker command.", "engine-too-old"),
        ("", "broke-off"),
    ],
)
def test_what_docker_complains_of_has_a_name(server: ThreadingHTTPServer, reported: str, kind: str) -> None:
    way = FakeWay(server, refuse=lambda _: reported or "\x00")
    assert failure(way).kind == kind


def test_podman_behind_dockers_socket_is_known_by_its_components(
    server: ThreadingHTTPServer, engine: FakeEngine
) -> None:
    # As Podman 5.4.2 of Debian 13 answers, shortened.
    engine.version = {
        "Platform": {"Name": "linux/amd64/debian-13"},
        "Components": [{"Name": "Podman Engine", "Version": "5.4.2"}, {"Name": "Conmon", "Version": "conmon 2.1.12"}],
        "Version": "5.4.2",
        "ApiVersion": "1.41",
    }
    with connected(FakeWay(server), ends()) as node_engine:
        assert (node_engine.podman, node_engine.name, node_engine.label, node_engine.knows_cdi) == (
            True,
            "Podman 5.4.2",
            "podman 5.4.2",
            True,
        )


@pytest.mark.parametrize("components", [None, [], [{}]])
def test_an_engine_without_components_is_docker(
    server: ThreadingHTTPServer, engine: FakeEngine, components: object
) -> None:
    engine.version["Components"] = components
    with connected(FakeWay(server), ends()) as node_engine:
        assert not node_engine.podman


@pytest.mark.parametrize("components", ["text", [1], 7])
def test_components_that_are_none_are_no_engine(
    server: ThreadingHTTPServer, engine: FakeEngine, components: object
) -> None:
    engine.version["Components"] = components
    assert failure(FakeWay(server)).kind == "no-engine"


def test_what_confines_containers_is_kept_for_the_record(server: ThreadingHTTPServer, engine: FakeEngine) -> None:
    engine.info["SecurityOptions"] = ["name=seccomp,profile=builtin", "name=selinux", "name=rootless"]
    with connected(FakeWay(server), ends()) as node_engine:
        assert node_engine.security == ("seccomp", "selinux", "rootless")


def test_a_rootless_engine_is_found_where_root_has_none(server: ThreadingHTTPServer) -> None:
    """With sudo's password at hand root is asked first."""
    way = FakeWay(
        server, as_root=(True, False), refuse=lambda root: "Cannot connect to the Docker daemon" if root else None
    )
    with connected(way, ends()) as node_engine:
        assert node_engine.version == "28.5.1"
    assert (way.opened[0], way.opened[-1]) == (True, False)


def test_no_engine_for_anybody_is_that_and_no_question_of_permission(server: ThreadingHTTPServer) -> None:
    way = FakeWay(
        server,
        as_root=(True, False),
        refuse=lambda root: "Cannot connect to the Docker daemon" if root else "connect: permission denied",
    )
    assert failure(way).kind == "no-engine"


LAYERS = ("sha256:" + "a" * 64, "sha256:" + "b" * 64)


@pytest.mark.parametrize(
    ("layers", "name", "brought"),
    [
        (LAYERS, "site/image:1", False),
        (LAYERS[:1], "site/image:1", True),
        ((), "site/image:1", True),
        (LAYERS, None, True),
    ],
)
def test_an_archive_is_not_loaded_again_where_containerd_keeps_the_images(
    way: FakeWay, engine: FakeEngine, layers: tuple[str, ...], name: str | None, brought: bool
) -> None:
    """There an image's id is its manifest's digest, which an archive of an older docker save does not have."""
    existing = {"Id": SHA, "RootFS": {"Type": "layers", "Layers": list(LAYERS)}}
    engine.answers["GET /images/site/image:1/json"] = (200, existing)
    engine.answers["POST /images/load"] = (200, [{"stream": "Loaded image: site/image:1\n"}])
    file = ImageFile(Path(__file__), "sha256:" + "c" * 64, name, layers)
    with connected(way, ends()) as node_engine:
        image = provide(node_engine, "site/image:1", file, lambda _: None)
    assert (image.id, image.brought) == (SHA, brought)


@pytest.mark.parametrize(
    ("machine", "built_for", "refused"),
    [
        ("x86_64", "arm64", True),
        ("aarch64", "amd64", True),
        ("x86_64", "amd64", False),
        ("x86_64", "", False),
        ("?", "arm64", False),
    ],
)
def test_an_image_for_another_architecture_is_not_started(
    server: ThreadingHTTPServer, engine: FakeEngine, machine: str, built_for: str, refused: bool
) -> None:
    engine.info["Architecture"] = machine
    engine.answers["GET /images/site/image:1/json"] = (200, {"Id": SHA, "Architecture": built_for})
    with connected(FakeWay(server), ends()) as node_engine:
        if not refused:
            provide(node_engine, "site/image:1", None, lambda _: None)
            return
        with pytest.raises(LaunchFailure, match=f"is for {built_for}") as caught:
            provide(node_engine, "site/image:1", None, lambda _: None)
    assert caught.value.kind == "image"


def test_an_answer_that_is_no_image_is_reported(server: ThreadingHTTPServer, engine: FakeEngine) -> None:
    engine.answers["GET /images/site/image:1/json"] = (200, {"Id": 5})
    with connected(FakeWay(server), ends()) as node_engine, pytest.raises(LaunchFailure) as caught:
        provide(node_engine, "site/image:1", None, lambda _: None)
    assert caught.value.kind == "broke-off"


def test_a_registry_that_is_slow_ends_with_the_images_own_limit(
    server: ThreadingHTTPServer, engine: FakeEngine
) -> None:
    gone = threading.Event()
    engine.answers["POST /images/create"] = (200, slow(gone))
    began = time.monotonic()
    try:
        with connected(FakeWay(server), ends()) as node_engine:
            with pytest.raises(LaunchFailure) as caught, node_engine.within(1.0, "--image-timeout") as bringing:
                provide(bringing, "site/image:1", None, lambda _: None)
            assert time.monotonic() - began < 10
    finally:
        gone.set()
    assert caught.value.kind == "time-limit"
    assert str(caught.value) == "pulling image site/image:1: not done within the time limit (--image-timeout S)"


def slow(gone: threading.Event) -> Iterator[dict[str, str]]:
    """A registry that gives a line, and then nothing."""
    yield {"status": "Pulling from site/image"}
    gone.wait(30)


def test_an_image_that_is_there_is_not_pulled(server: ThreadingHTTPServer, engine: FakeEngine) -> None:
    engine.answers["GET /images/site/image:1/json"] = (200, {"Id": SHA})
    with connected(FakeWay(server), ends()) as node_engine:
        image = provide(node_engine, "site/image:1", None, lambda _: None)
    assert (image.id, image.brought) == (SHA, False)
    assert not [line for line in engine.requests if line.startswith("POST")]


def test_a_pull_reports_its_progress(server: ThreadingHTTPServer, engine: FakeEngine) -> None:
    progress = [
        {"status": "Downloading", "id": "a", "progressDetail": {"current": 2**20, "total": 3 * 2**20}},
        {"status": "Downloading", "id": "b", "progressDetail": {"current": 2**20, "total": 2**20}},
        {"status": "Pull complete", "id": "a", "progressDetail": {}},
    ]
    engine.answers["POST /images/create"] = (200, progress)
    reported: list[str] = []

    def report(text: str) -> None:
        reported.append(text)
        engine.answers["GET /images/site/image:1/json"] = (200, {"Id": SHA})  # it is there from now on

    with connected(FakeWay(server), ends()) as node_engine:
        assert provide(node_engine, "site/image:1", None, report).brought
    assert reported == [f"pulling image site/image:1{rest}" for rest in ("", ": 1 of 3 MiB", ": 2 of 4 MiB")]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (
            (500, {"message": 'Get "https://r/v2/": dial tcp: lookup r: no such host'}),
            "image",
            "registry cannot be reached",
        ),
        ((404, {"message": "manifest for site/image:1 not found"}), "image", "cannot be pulled (manifest for"),
        (
            (200, [{"error": "write x: no space left on device"}]),
            "no-space",
            "no space left on the node",
        ),
        ((200, [{"error": "unauthorized: authentication required"}]), "image", "unauthorized"),
        ((200, [{"status": "done"}]), "image", "was pulled but is missing"),
    ],
)
def test_an_image_that_does_not_come_is_named(
    server: ThreadingHTTPServer, engine: FakeEngine, answer: tuple[int, object], kind: str, words: str
) -> None:
    engine.answers["POST /images/create"] = answer
    with pytest.raises(LaunchFailure) as caught, connected(FakeWay(server), ends()) as node_engine:
        provide(node_engine, "site/image:1", None, lambda _: None)
    assert caught.value.kind == kind
    assert words in str(caught.value)
    assert "site/image:1" in str(caught.value)


def test_only_our_own_leftovers_past_their_limit_are_swept(server: ThreadingHTTPServer, engine: FakeEngine) -> None:
    noon = 1795176000

    def leftover(name: str, state: str, age_s: int, limit_s: int) -> dict[str, object]:
        labels = {LABEL: "payload", LIMIT_LABEL: str(limit_s)}
        return {"Id": name, "State": state, "Created": noon - age_s, "Labels": labels}

    containers = [
        leftover("running", "running", 800, 900),
        leftover("overdue", "running", 1000, 900),
        leftover("made-just-now", "created", 5, 900),
        leftover("never-started", "created", 100, 900),
        leftover("dead", "dead", 100, 900),
    ]
    engine.answers["GET /containers/json"] = (200, containers)
    engine.answers |= {f"DELETE /containers/{container['Id']}": (204, "") for container in containers}
    with connected(FakeWay(server), ends()) as node_engine:
        assert list(sweep(node_engine)) == ["overdue", "never-started", "dead"]
    removed = [line for line in engine.requests if line.startswith("DELETE")]
    assert removed == [f"DELETE /containers/{name}" for name in ("overdue", "never-started", "dead")]


def test_gpus_are_asked_for_as_the_engine_has_them() -> None:
    (cdi,) = Devices("cdi").requests
    assert (cdi["Driver"], cdi["DeviceIDs"]) == ("cdi", ["nvidia.com/gpu=all"])
    (some,) = Devices("cdi", ("0", "gpu3")).requests
    assert some["DeviceIDs"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=gpu3"]
    (every,) = Devices("runtime").requests
    assert (every["Count"], every["Capabilities"]) == (-1, [["gpu", "compute", "utility"]])
    (two,) = Devices("runtime", ("1", "2:0")).requests
    assert (two["DeviceIDs"], two["Count"]) == (["1", "2:0"], 0)
    assert Devices("none").requests == []
