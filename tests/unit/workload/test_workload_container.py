"""The exact request for the payload's container; the Docker SDK makes it, no engine is asked."""

import time
from dataclasses import replace
from typing import Any

import docker
import pytest

from gpunode.facts import NodeFacts
from gpunode.facts.driver import DeviceNode
from gpunode.workload.container import (
    Confinement,
    ContainerJob,
    Devices,
    Network,
    PythonProgram,
    _create,
    _memory,
    _plain,
    _user,
)
from gpunode.workload.devices import open_to_all
from gpunode.workload.engine import Engine
from gpunode.workload.image import Image
from gpunode.workload.transport import LaunchFailure

GIB = 2**30
INFO = {"MemTotal": 64 * GIB, "MemoryLimit": True, "SwapLimit": True}


class Recorder(docker.APIClient):
    """Keeps what would be sent."""

    def __init__(self, user: str = "") -> None:
        super().__init__("http://node.invalid:80", version="1.51")
        self.sent: dict[str, Any] = {}
        self.user = user

    def create_container(self, image: str, **values: Any) -> dict[str, str]:  # type: ignore[override]
        self.sent = {"image": image, **values}
        return {"Id": "made"}

    def inspect_image(self, image: str) -> dict[str, Any]:  # noqa: ARG002
        return {"Config": {"User": self.user}}


def engine(user: str = "", **info: Any) -> Engine:
    """An engine of which nothing is asked."""
    return Engine(Recorder(user), "28.5.1", "1.51", {**INFO, **info}, time.monotonic() + 60)


def job(**changes: Any) -> ContainerJob:
    """What is run."""
    image = Image("registry/image:1", "sha256:0", brought=False)
    return ContainerJob(image, Devices("cdi", ("0", "1")), PythonProgram("code", ("a",), b""), 60.0, **changes)


def request(of: Engine, confinement: Confinement | None = None, **changes: Any) -> dict[str, Any]:
    """What the engine is sent for a container."""
    _create(of, job(**changes), confinement or Confinement(user=_user(of, job(**changes))))
    sent: dict[str, Any] = of.api.sent
    return sent


def test_the_request_is_exactly_this() -> None:
    sent = request(engine())
    host = sent.pop("host_config")
    assert sent.pop("name").startswith("gpunode-validate-")
    assert sent == {
        "image": "sha256:0",
        "entrypoint": ["python3", "-I", "-B", "-c", "code", "a"],
        "command": [],
        "environment": {"HOME": "/tmp", "USER": "gpunode", "LOGNAME": "gpunode", "NVIDIA_VISIBLE_DEVICES": "void"},
        "user": "65534:65534",
        "labels": {"gpunode.validate": "payload", "gpunode.validate.limit-s": "60"},
        "working_dir": "/",
        "stdin_open": True,
        "tty": False,
    }
    assert host == {
        "AutoRemove": True,
        "NetworkMode": "none",
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": True,
        "LogConfig": {"Type": "none", "Config": {}},
        "ShmSize": 8 * GIB,
        "Tmpfs": {"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={4 * GIB}"},
        "Memory": 48 * GIB,
        "MemorySwap": 48 * GIB,
        "PidsLimit": 32768,
        "Ulimits": [
            {"Name": "memlock", "Soft": -1, "Hard": -1},
            {"Name": "stack", "Soft": 64 * 2**20, "Hard": 64 * 2**20},
        ],
        "DeviceRequests": [
            {
                "Driver": "cdi",
                "Count": 0,
                "DeviceIDs": ["nvidia.com/gpu=0", "nvidia.com/gpu=1"],
                "Capabilities": [],
                "Options": {},
            }
        ],
    }


@pytest.mark.parametrize(
    ("user", "runs"), [("", True), ("root", True), ("0:0", True), ("1000:1000", False), ("app", False)]
)
def test_the_images_own_user_stays_where_it_is_not_root(user: str, runs: bool) -> None:
    assert (request(engine(user))["user"] == "65534:65534") is runs


def test_gpus_that_are_not_open_to_all_need_the_images_user() -> None:
    assert request(engine(), as_nobody=False)["user"] is None
    nodes = [("/dev/nvidia0", "0666"), ("/dev/nvidiactl", "0666"), ("/dev/nvidia-caps/nvidia-cap1", "0400")]

    def facts(*extra: tuple[str, str]) -> NodeFacts:
        made = tuple(
            DeviceNode(path=path, kind="character", mode=mode, user="root", group="video", major=195, minor=0)
            for path, mode in (*nodes, *extra)
        )
        return NodeFacts(host="a", collected_at="2026-11-22T00:00:00Z", simulated=False, device_nodes=made)

    assert open_to_all(facts())
    assert not open_to_all(facts(("/dev/nvidia1", "0660")))


def test_a_plain_container_is_given_the_engines_own_limits_and_is_confined_all_the_same() -> None:
    plain, usual = (request(engine(), plain=plain)["host_config"] for plain in (True, False))
    assert (plain.get("ShmSize"), plain["Ulimits"]) == (None, [])
    assert {key for key in usual if plain.get(key) != usual[key]} == {"ShmSize", "Ulimits"}


def test_the_nvidia_runtime_gets_its_gpus_by_its_own_variables() -> None:
    of = engine()
    _create(of, replace(job(), devices=Devices("nvidia", ("0", "2"))), Confinement())
    assert of.api.sent["host_config"]["Runtime"] == "nvidia"
    assert not of.api.sent["host_config"]["DeviceRequests"]
    assert of.api.sent["environment"] == {
        "NVIDIA_VISIBLE_DEVICES": "0,2",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }


def test_a_refusal_that_is_known_is_reported_with_its_cause_whatever_stands_before_it() -> None:
    reported = "failed to create shim task: " + "x" * 5000 + "unsatisfied condition: cuda>=12.8, please update"
    refused = _plain(LaunchFailure("start", "starting a container of registry/image:1: cut", reported), engine(), job())
    assert refused.kind == "image"
    assert "registry/image:1 requires a driver with CUDA 12.8" in str(refused)
    other = LaunchFailure("start", "starting: no known words")
    assert _plain(other, engine(), job()) is other


@pytest.mark.parametrize("info", [{"MemoryLimit": False}, {"MemTotal": 0}, {"MemTotal": "64G"}, {"MemTotal": -1}])
def test_without_a_sound_word_on_memory_there_is_no_limit(info: dict[str, Any]) -> None:
    assert _memory(engine(**info)) is None
    assert not request(engine(**info))["host_config"].get("Memory")


def test_each_restriction_is_given_up_for_its_own_reason_alone() -> None:
    whole = Confinement(user="65534:65534")
    assert whole.without("error setting rlimits for ready process") == Confinement(limits=False, user="65534:65534")
    assert whole.without("open /etc/ld.so.cache: Read-only file system") == Confinement(
        user="65534:65534", read_only=False
    )
    assert whole.without("exec: python3: permission denied") == Confinement()
    assert whole.without("no such image") is None
    unlimited = whole.without(
        "error setting cgroup config for procHooks process: memory.max: no such file or directory"
    )
    assert unlimited == Confinement(user="65534:65534", memory=False)
    assert not request(engine(), unlimited)["host_config"].get("Memory")
    # crun, as Podman has it, in a container of its own.
    without_pids = whole.without("crun: the requested cgroup controller `pids` is not available: OCI runtime error")
    assert without_pids == Confinement(user="65534:65534", pids=False)
    assert request(engine(), without_pids)["host_config"]["PidsLimit"] == 0
    assert Confinement(limits=False, user=None, read_only=False).without("rlimit, read-only file system") is None


def test_the_directory_to_measure_is_the_only_thing_of_the_node_inside() -> None:
    assert not request(engine())["host_config"].get("Mounts")
    mounts = request(engine(), storage="/data")["host_config"]["Mounts"]
    assert mounts == [{"Target": "/data", "Source": "/data", "Type": "bind", "ReadOnly": False}]
    mounts = request(engine(), data="/train")["host_config"]["Mounts"]
    assert mounts == [{"Target": "/train", "Source": "/train", "Type": "bind", "ReadOnly": True}]
    assert len(request(engine(), data="/data", storage="/data")["host_config"]["Mounts"]) == 1
    # One that is not there does not keep the rest from being measured; an engine makes none by itself.
    refusal = 'invalid mount config for type "bind": bind source path does not exist: /data'
    without = Confinement(user="65534:65534").without(refusal)
    assert without == Confinement(user="65534:65534", absent=("/data",))
    assert not request(engine(), without, storage="/data")["host_config"].get("Mounts")
    (kept,) = request(engine(), without, storage="/data", data="/train")["host_config"]["Mounts"]
    assert kept["Source"] == "/train"
    assert without is not None
    assert without.without(refusal) is None


def test_a_container_of_a_group_is_found_by_its_name_and_reaches_nothing_but_the_groups_network() -> None:
    sent = request(engine(), network=Network("fabric", "rank-2"))
    assert sent["host_config"]["NetworkMode"] == "fabric"
    assert sent["networking_config"] == {"EndpointsConfig": {"fabric": {"Aliases": ["rank-2"]}}}
    assert sent["host_config"]["CapDrop"] == ["ALL"]
    assert request(engine())["host_config"]["NetworkMode"] == "none"
