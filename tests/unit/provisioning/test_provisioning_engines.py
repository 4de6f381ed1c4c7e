"""Container engines: which is installed, what it does with CDI, and what stands against its restart."""

import pytest
from driver_samples import BUNDLE, facts_of

from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.provisioning.engines import (
    InstalledEngine,
    engine_support,
    engines_before_cdi_07,
    installed_engine,
    restart_obstacles,
    tcp_addresses,
    unknown_options,
)

OPTIONS = ["exec-opt", "live-restore", "log-opt", "registry-mirror", "insecure-registry"]


@pytest.mark.parametrize(
    ("package", "version", "source", "number"),
    [
        ("docker.io", "20.10.24+dfsg1-1+deb12u1+b6", "distribution", "20.10.24"),
        ("docker-ce", "5:28.3.3-1~debian.12~bookworm", "docker", "28.3.3"),
        ("moby-engine", "25.0.6-1", "other", "25.0.6"),
    ],
)
def test_an_installed_engine_is_known_by_its_package(package: str, version: str, source: str, number: str) -> None:
    engine = installed_engine({package: version, "runc": "1.1.5", "bash": "5.2"})
    assert (engine.source, engine.package, engine.version) == (source, package, number)
    assert engine.packages == tuple(sorted([package, "runc"]))


@pytest.mark.parametrize("installed", [None, {}, {"runc": "1.1", "containerd": "1.6", "podman": "4.3"}])
def test_without_an_engine_every_field_is_empty(installed: dict[str, str] | None) -> None:
    assert installed_engine(installed) == InstalledEngine()


@pytest.mark.parametrize(
    ("engine", "version", "cdi", "gids"),
    [
        ("docker", "20.10.24+dfsg1", "none", False),
        ("docker", "24.0.9", "none", False),
        ("docker", "25.0.0", "feature", False),
        ("docker", "26.0.2", "feature", False),
        ("docker", "26.1.5+dfsg1", "feature", True),
        ("docker", "28.1.1", "feature", True),
        ("docker", "5:28.2.0-1~ubuntu.24.04~noble", "default", True),
        ("docker", "29.0.1", "default", True),
        ("docker", "100.0", "default", True),
        ("docker", None, None, None),
        ("docker", "unknown", None, None),
        ("podman", "4.9.3", "default", False),
        ("podman", "5.4.2", "default", True),
        ("podman", "3.4.4", "none", False),
        ("containerd", "1.7.15", "feature", False),
        ("containerd", "1.7.24~ds1", "feature", True),
        ("containerd", "v2.1.0", "default", True),
    ],
)
def test_what_an_engine_does_with_cdi_goes_by_its_version(
    engine: str, version: str | None, cdi: str | None, gids: bool | None
) -> None:
    support = engine_support(version, engine)
    assert (support.cdi, support.additional_gids) == (cdi, gids)


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(UsageError, match="no container engine 'lxd'"):
        engine_support("1.0", "lxd")


def test_engines_that_cannot_read_the_newest_cdi_are_named() -> None:
    engines = {
        "docker": engine_support("26.1.5"),
        "podman": engine_support("4.9.3", "podman"),
        "containerd": engine_support(None, "containerd"),
    }
    assert engines_before_cdi_07(engines) == ["podman 4.9.3"]


def test_keys_that_dockerd_does_not_know_are_named() -> None:
    known = {"live-restore": 1, "log-opts": {}, "registry-mirrors": [], "insecure-registries": [], "runtimes": {}}
    assert unknown_options(known, OPTIONS) == []
    assert unknown_options({**known, "live-restor": 1, "userns": 2}, OPTIONS) == [
        "live-restor",
        "userns",
    ]


def test_running_containers_and_gpu_processes_stand_against_a_restart() -> None:
    facts = facts_of(BUNDLE)
    node = NodeFacts.model_validate(facts)
    stays = '{"live-restore": true}'
    assert restart_obstacles(0, False, node, None) == []
    assert restart_obstacles(3, True, node, stays) == []
    for live, text in ((False, stays), (True, None), (True, '{"live-restore": false}'), (True, "{")):
        assert restart_obstacles(1, live, node, text) == ["1 container runs and would end: live-restore is off"]
    process = {"pid": 7, "name": "python3", "type": "C", "user": "anna"}
    busy = NodeFacts.model_validate({**facts, "gpu_processes": [process, {**process, "name": "X", "type": "G"}]})
    assert restart_obstacles(2, True, busy, stays) == ["GPUs are in use by python3 (pid 7, anna)"]
    unknown = {**facts, "gpu_processes": None, "gaps": {"gpu_processes": "/proc was not read"}}
    assert restart_obstacles(0, False, NodeFacts.model_validate(unknown), None) == [
        "the processes that use the GPUs could not be determined"
    ]


@pytest.mark.parametrize(
    ("text", "command", "addresses"),
    [
        (None, "/usr/sbin/dockerd -H fd:// --containerd=/run/containerd/containerd.sock", []),
        ('{"hosts": ["unix:///run/docker.sock", "tcp://10.0.0.5:2376"]}', "", ["tcp://10.0.0.5:2376"]),
        ("not json", "dockerd -H tcp://0.0.0.0:2375 ; x", ["tcp://0.0.0.0:2375"]),
        ('{"hosts": "tcp://x"}', None, []),
    ],
)
def test_tcp_sockets_are_found_where_they_are_set(text: str | None, command: str | None, addresses: list[str]) -> None:
    assert tcp_addresses(text, command) == addresses
