"""What the host has, and one line for what it has not."""

import os
import shutil
from pathlib import Path

import docker
import pytest
import requests
from docker.errors import APIError

from gpunode.errors import UndeterminedError, UsageError
from gpunode.lab import engine
from gpunode.lab.engine import cgroup_mount, connect, docker_errors, need_space, refuse_real_driver
from gpunode.lab.lab import Lab


def test_on_cgroup_v2_every_system_gets_the_whole_tree(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    for system in ("debian-12", "debian-13"):
        assert cgroup_mount(system, tmp_path) == {str(tmp_path): {"bind": "/sys/fs/cgroup", "mode": "rw"}}


def test_on_a_hybrid_host_systemd_257_gets_the_v2_part(tmp_path: Path) -> None:
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified/cgroup.controllers").touch()
    assert list(cgroup_mount("debian-12", tmp_path)) == [str(tmp_path)]
    assert cgroup_mount("debian-13", tmp_path) == {
        str(tmp_path / "unified"): {"bind": "/sys/fs/cgroup", "mode": "rw"},
    }


def test_on_pure_v1_debian_13_is_refused(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    assert list(cgroup_mount("debian-12", tmp_path)) == [str(tmp_path)]
    with pytest.raises(UndeterminedError, match=r"debian-13 needs cgroup v2.*--os debian-12"):
        cgroup_mount("debian-13", tmp_path)


def test_an_engine_on_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    with pytest.raises(UsageError, match="unset DOCKER_HOST"):
        connect()


def test_a_missing_engine_is_reported_with_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UndeterminedError, match=r"no Docker engine on this machine.*scripts/docker-engine"):
        connect()


def test_a_stopped_engine_is_reported_with_the_command_that_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/sbin/{name}")
    with pytest.raises(UndeterminedError, match="start it") as caught:
        connect()
    assert "\n" not in str(caught.value)


def test_no_permission_on_the_socket_names_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = tmp_path / "docker.sock"
    socket.touch()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{socket}")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UndeterminedError, match="usermod -aG docker"):
        connect()


def test_a_rootless_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rootless:
        def info(self) -> dict[str, list[str]]:
            return {"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]}

    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(docker, "from_env", lambda **_: Rootless())
    with pytest.raises(UndeterminedError, match="rootless"):
        connect()


@pytest.mark.parametrize("error", [APIError("no such\nimage"), requests.ConnectionError("gone\naway")])
def test_docker_errors_become_one_line(error: Exception) -> None:
    with pytest.raises(UndeterminedError, match=r"^starting x: \S.*$") as caught, docker_errors("starting x"):
        raise error
    assert "\n" not in str(caught.value)


def test_room_is_looked_for_where_the_folder_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_space(tmp_path / "not/yet", 0)
    with pytest.raises(UndeterminedError, match=r"GiB free, the lab needs 1e\+09|needs 1000000000.0 GiB"):
        need_space(tmp_path / "not/yet", 1e9)


def test_more_nodes_than_the_kernel_has_inotify_instances_for_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "WATCHERS", tmp_path / "instances")
    (tmp_path / "instances").write_text("128\n")
    assert engine.few_watchers(12) is None
    assert engine.few_watchers(13) == (
        "13 nodes use up to 130 inotify instances, this kernel allows 128: sysctl -w fs.inotify.max_user_instances=1024"
    )


def test_the_mtu_is_given_only_where_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = "Iface\tDestination\tGateway\nlo\t0000007F\t0\neth9\t00000000\t0102\n"
    files = {"/proc/net/route": routes, "/sys/class/net/eth9/mtu": "1400\n"}
    monkeypatch.setattr(Path, "read_text", lambda self, **_: files[str(self)])
    assert engine.mtu() == 1400
    files["/sys/class/net/eth9/mtu"] = "9000\n"
    assert engine.mtu() is None
    files["/proc/net/route"] = "Iface\tDestination\tGateway\n"
    assert engine.mtu() is None


def test_a_machine_with_the_real_driver_is_refused_unless_forced(tmp_path: Path) -> None:
    refuse_real_driver(force=False, proc=tmp_path / "nvidia")
    (tmp_path / "nvidia").mkdir()
    with pytest.raises(UsageError, match=r"gpunode lab up --force"):
        refuse_real_driver(force=False, proc=tmp_path / "nvidia")
    refuse_real_driver(force=True, proc=tmp_path / "nvidia")


def test_a_lab_asks_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gpunode.lab.engine.REAL_DRIVER", tmp_path)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent")
    with pytest.raises(UsageError, match="NVIDIA driver"):
        Lab("driver").up(1)
    with pytest.raises(UndeterminedError, match="engine"):
        Lab("driver").up(1, force=True)
