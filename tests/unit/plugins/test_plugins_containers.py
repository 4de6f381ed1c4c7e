"""What container engines are told: by their version, merged into files that others write too."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from plugin_loader import load

containers = load("containers")
node = load("node")
merged = containers.merged_daemon

BUNDLE = Path(__file__).parents[3] / "tests" / "fixtures" / "bundles" / "debian-12-driver.json"
OURS = {"live-restore": True, "log-opts": {"max-size": "100m"}}
FOREIGN = '{"dns": ["10.0.0.1"], "log-opts": {"tag": "x"}, "labels": ["rack=7"]}'
SETTINGS: dict[str, Any] = {
    "live_restore": True,
    "log_max_size": "100m",
    "log_max_files": 5,
    "storage_driver": "",
    "daemon": {},
}
LISTING = """Options:
      --exec-opt list      Runtime execution options
      --live-restore       Enable live restore
      --log-opt map        Default log driver options
      --registry-mirror list
      --insecure-registry list
"""


@pytest.mark.parametrize(
    ("package", "version", "source", "number"),
    [
        ("docker.io", "20.10.24+dfsg1-1+deb12u1+b6", "distribution", "20.10.24"),
        ("docker-ce", "5:28.3.3-1~debian.12~bookworm", "docker", "28.3.3"),
        ("moby-engine", "25.0.6-1", "other", "25.0.6"),
    ],
)
def test_an_installed_engine_is_known_by_its_package(package: str, version: str, source: str, number: str) -> None:
    found = containers.docker_engine({package: version, "runc": "1.1.5", "bash": "5.2"})
    assert found == {"source": source, "package": package, "version": number, "packages": sorted([package, "runc"])}


@pytest.mark.parametrize("installed", [None, {}, {"runc": "1.1", "containerd": "1.6", "podman": "4.3"}])
def test_without_an_engine_nothing_is_told_of_one(installed: dict[str, str] | None) -> None:
    none: dict[str, Any] = {"source": None, "package": None, "version": None, "packages": []}
    assert containers.docker_engine(installed) == none


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
    found = containers.container_engine(version, engine)
    assert (found["cdi"], found["additional_gids"]) == (cdi, gids)


def test_an_engine_that_is_none_is_named() -> None:
    with pytest.raises(AnsibleFilterError, match="no container engine 'lxd'"):
        containers.container_engine("1.0", "lxd")


def test_foreign_keys_survive_also_beside_ours_in_one_object() -> None:
    answer = merged(FOREIGN, OURS)
    assert json.loads(answer["text"]) == {
        "dns": ["10.0.0.1"],
        "log-opts": {"tag": "x", "max-size": "100m"},
        "labels": ["rack=7"],
        "live-restore": True,
    }
    assert answer["keys"] == ["live-restore", "log-opts.max-size"]
    assert answer["restart"] == ["log-opts.max-size"]


@pytest.mark.parametrize("text", [None, "", FOREIGN])
def test_a_second_merge_changes_nothing(text: str | None) -> None:
    first = merged(text, OURS)
    second = merged(first["text"], OURS, first["memory"])
    assert first["changed"]
    assert second == {**first, "changed": False, "keys": [], "restart": []}


def test_a_file_that_already_says_so_keeps_its_form() -> None:
    text = '{"live-restore":true,\n\n"log-opts":{"max-size":"100m"}}'
    answer = merged(text, OURS)
    assert (answer["text"], answer["changed"], answer["memory"]) == (text, False, None)


def test_what_is_no_longer_wished_gives_way_to_what_stood_there_before() -> None:
    text = '{"live-restore": false, "dns": []}'
    first = merged(text, {"live-restore": True, "features": {"cdi": True}})
    again = merged(first["text"], {"live-restore": True, "features": {"cdi": True}}, first["memory"])
    last = merged(again["text"], {}, again["memory"])
    assert json.loads(last["text"]) == json.loads(text)
    assert last["memory"] is None
    assert last["keys"] == ["features.cdi", "live-restore"]


def test_a_file_that_was_made_for_ours_goes_with_it() -> None:
    first = merged(None, OURS)
    last = merged(first["text"], {}, first["memory"])
    assert (last["text"], last["changed"]) == (None, True)


def test_an_empty_file_of_a_user_stays() -> None:
    first = merged("{}\n", OURS)
    last = merged(first["text"], {}, first["memory"])
    assert json.loads(last["text"]) == {}


def test_what_somebody_changed_since_is_theirs_when_ours_goes() -> None:
    first = merged(None, OURS)
    edited = first["text"].replace("100m", "1g")
    last = merged(edited, {}, first["memory"])
    assert json.loads(last["text"]) == {"log-opts": {"max-size": "1g"}}


def test_what_somebody_changed_is_put_right_while_it_is_wished() -> None:
    first = merged(None, OURS)
    answer = merged(first["text"].replace("100m", "1g"), OURS, first["memory"])
    assert answer["text"] == first["text"]
    assert answer["keys"] == ["log-opts.max-size"]
    assert merged(answer["text"], {}, answer["memory"])["text"] is None


def test_two_roles_share_the_file_and_do_not_fight() -> None:
    runtime = {"runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}, "features": {"cdi": True}}
    docker = merged(None, {**OURS, "features": {"cdi": False}})
    toolkit = merged(docker["text"], runtime, None, docker["memory"])
    assert json.loads(toolkit["text"])["features"] == {"cdi": False}
    assert json.loads(toolkit["text"])["runtimes"] == runtime["runtimes"]
    assert not merged(toolkit["text"], {**OURS, "features": {"cdi": False}}, docker["memory"])["changed"]
    assert not merged(toolkit["text"], runtime, toolkit["memory"], docker["memory"])["changed"]
    gone = merged(toolkit["text"], {}, toolkit["memory"], docker["memory"])
    assert gone["text"] == docker["text"]


def test_execution_options_have_owners_of_their_own() -> None:
    text = '{"exec-opts": ["isolation=process"]}'
    answer = merged(text, {"exec-opts": ["native.cgroupdriver=cgroupfs"]})
    assert json.loads(answer["text"]) == {"exec-opts": ["isolation=process", "native.cgroupdriver=cgroupfs"]}
    assert json.loads(merged(answer["text"], {}, answer["memory"])["text"]) == json.loads(text)


def test_runtimes_and_live_restore_need_no_restart_and_cdi_does() -> None:
    answer = merged(None, {"live-restore": True, "runtimes": {"nvidia": {"path": "x"}}, "features": {"cdi": True}})
    assert answer["restart"] == ["features.cdi"]
    gone = merged(answer["text"], {"runtimes": {"nvidia": {"path": "y"}}}, answer["memory"])
    assert gone["restart"] == ["features.cdi", "live-restore"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,}', "it is no JSON: .* in line 1"),
        ("[]", "it holds no object"),
        ('{"log-opts": "max-size=1m"}', "log-opts is no object, so log-opts.max-size has no place in it"),
    ],
)
def test_a_file_that_cannot_be_merged_is_refused_and_not_touched(text: str, words: str) -> None:
    answer = merged(text, OURS)
    assert not answer["changed"]
    assert re.search(words, answer["problem"])


def test_no_wish_makes_no_file() -> None:
    assert merged(None, {})["text"] is None
    assert not merged(None, None)["changed"]


def test_the_defaults_are_live_restore_and_limited_logs() -> None:
    answer = containers.docker_wishes(SETTINGS, None)
    assert answer == {
        "wished": {"live-restore": True, "log-opts": {"max-size": "100m", "max-file": "5"}},
        "notes": [],
        "problem": None,
    }


def test_other_log_drivers_are_left_alone() -> None:
    answer = containers.docker_wishes(SETTINGS, '{"log-driver": "journald"}')
    assert answer["wished"] == {"live-restore": True}
    assert "journald" in answer["notes"][0]
    by_wish = {**SETTINGS, "daemon": {"log-driver": "local"}}
    assert "log-opts" in containers.docker_wishes(by_wish, '{"log-driver": "journald"}')["wished"]


def test_a_swarm_goes_without_live_restore() -> None:
    answer = containers.docker_wishes(SETTINGS, None, swarm=True)
    assert "live-restore" not in answer["wished"]
    assert "swarm" in answer["notes"][0]


def test_further_keys_win_and_a_socket_is_refused() -> None:
    wished = containers.docker_wishes({**SETTINGS, "daemon": {"log-opts": {"max-size": "1g"}, "mtu": 1450}}, None)
    assert wished["wished"]["log-opts"] == {"max-size": "1g", "max-file": "5"}
    assert wished["wished"]["mtu"] == 1450
    refused = containers.docker_wishes({**SETTINGS, "daemon": {"hosts": ["tcp://0.0.0.0:2375"]}}, None)
    assert "docker_daemon must not set hosts" in refused["problem"]


def test_keys_that_dockerd_does_not_know_are_named() -> None:
    known = {"live-restore": 1, "log-opts": {}, "registry-mirrors": [], "insecure-registries": [], "runtimes": {}}
    assert containers.unknown_daemon_keys(known, LISTING) == []
    assert containers.unknown_daemon_keys({**known, "live-restor": 1, "userns": 2}, LISTING) == [
        "live-restor",
        "userns",
    ]


def test_running_containers_and_gpu_processes_stand_against_a_restart() -> None:
    facts = node.node_facts(BUNDLE.read_text(encoding="utf-8"), "a node")
    stays = '{"live-restore": true}'
    assert containers.restart_obstacles({}, facts, None) == []
    assert containers.restart_obstacles({"running": 3, "live_restore": True}, facts, stays) == []
    for live, text in ((False, stays), (True, None), (True, '{"live-restore": false}')):
        assert containers.restart_obstacles({"running": 1, "live_restore": live}, facts, text) == [
            "1 container runs and would end: live-restore is off"
        ]
    process = {"pid": 7, "name": "python3", "type": "C", "user": "anna"}
    busy = {**facts, "gpu_processes": [process, {**process, "name": "X", "type": "G"}]}
    assert containers.restart_obstacles({"running": 2, "live_restore": True}, busy, stays) == [
        "GPUs are in use by python3 (pid 7, anna)"
    ]
    unseen = {**facts, "gpu_processes": None, "gaps": {"gpu_processes": "/proc was not read"}}
    assert containers.restart_obstacles({}, unseen, None) == ["it could not be seen who uses the GPUs"]


@pytest.mark.parametrize(
    ("text", "command", "found"),
    [
        (None, "/usr/sbin/dockerd -H fd:// --containerd=/run/containerd/containerd.sock", []),
        ('{"hosts": ["unix:///run/docker.sock", "tcp://10.0.0.5:2376"]}', "", ["tcp://10.0.0.5:2376"]),
        ("not json", "dockerd -H tcp://0.0.0.0:2375 ; x", ["tcp://0.0.0.0:2375"]),
        ('{"hosts": "tcp://x"}', None, []),
    ],
)
def test_tcp_sockets_are_found_where_they_are_set(text: str | None, command: str | None, found: list[str]) -> None:
    assert containers.tcp_sockets(text, command) == found


def test_specifications_beside_the_units_own_are_stale() -> None:
    specs = [
        {"path": "/etc/cdi/nvidia.yaml", "kind": "nvidia.com/gpu"},
        {"path": "/var/run/cdi/nvidia.yaml", "kind": "nvidia.com/gpu"},
        {"path": "/var/run/cdi/old.json", "kind": "nvidia.com/gpu"},
        {"path": "/etc/cdi/other.yaml", "kind": "vendor.com/net"},
        {"path": "/etc/cdi/management.yaml", "kind": "management.nvidia.com/gpu"},
        {"path": "/etc/cdi/broken.yaml", "kind": None},
    ]
    assert containers.stale_cdi(specs) == ["/etc/cdi/nvidia.yaml", "/var/run/cdi/old.json"]
    assert containers.stale_cdi([{"path": "/run/cdi/nvidia.yaml", "kind": "nvidia.com/gpu"}]) == []
    assert containers.stale_cdi(None) == []


def source(file: str, *uris: str, types: str = "deb") -> dict[str, Any]:
    return {"file": file, "uris": list(uris), "types": types.split(), "suites": ["/"]}


def test_an_archive_is_found_however_it_is_written() -> None:
    mine, users = "/etc/apt/sources.list.d/own.sources", "/etc/apt/sources.list.d/nvidia-container-toolkit.list"
    uri = "https://nvidia.github.io/libnvidia-container/stable/deb"
    for written in (uri, uri + "/", uri + "/$(ARCH)", uri + "/amd64/"):
        assert containers.archive_file([source(mine, uri), source(users, written)], uri + "/amd64", mine) == users
    assert containers.archive_file([source(mine, uri)], uri, mine) is None
    assert containers.archive_file([source(users, uri, types="deb-src")], uri, mine) is None
    assert containers.archive_file([source(users, uri + "-other")], uri, mine) is None


def test_the_sources_of_nvidia_docker_are_old_and_the_toolkits_are_not() -> None:
    host = "https://nvidia.github.io"
    sources = [
        source("/etc/a.list", f"{host}/libnvidia-container/stable/debian11/amd64"),
        source("/etc/a.list", f"{host}/nvidia-docker/debian11/amd64"),
        source("/etc/b.list", f"{host}/nvidia-container-runtime/ubuntu20.04/amd64"),
        source("/etc/c.list", f"{host}/libnvidia-container/stable/deb/$(ARCH)"),
        source("/etc/d.list", f"{host}/nvidia-docker/debian11/amd64"),
        source("/etc/d.list", "http://mirror.test/debian"),
    ]
    assert containers.old_toolkit_files(sources) == ["/etc/a.list", "/etc/b.list"]
