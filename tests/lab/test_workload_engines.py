"""The workload over every engine that may stand behind a node's Docker command: a verdict, or the engine's own cause.

One node of Debian 13 with Docker 26.1 and Podman 5; test_workload.py has Docker 20.10.
"""

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from test_workload import Place, until

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]
CONCERNS = ("gpunode/workload/", "gpunode/onnode/watchdog", "gpunode/fleet/")

PACKAGES = "docker.io docker-cli podman containerd uidmap rootlesskit slirp4netns dbus-user-session"
INSTALL = f"apt-get update -q && apt-get install -qy --no-install-recommends {PACKAGES}"
# No overlay upon the node's own file system.
PODMAN = """\
mkdir -p /etc/containers
printf '%s\\n' '[storage]' 'driver = "vfs"' 'runroot = "/run/containers/storage"' \\
  'graphroot = "/var/lib/containers/storage"' > /etc/containers/storage.conf
"""
DOCKER_UNITS = "docker.socket docker.service"
SOCKET = "/var/run/docker.sock"


class SshPlace(Place):
    """The node over SSH alone.

    With a controller in cgroup v2 (hugetlb on a hybrid host) Docker 26 closes the node's own cgroup to ``docker exec``.
    """

    def run(self, script: str, limit_s: float) -> "subprocess.CompletedProcess[str]":
        argv = ["sudo", "-n", "env", "DEBIAN_FRONTEND=noninteractive", "sh", "-c", shlex.quote(script)]
        return self.node.ssh(argv, timeout_s=limit_s)


@pytest.fixture(scope="module")
def host(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Place:
    (node,) = lab.up(1, "debian-13")
    machine = SshPlace(lab, node, tmp_path_factory.mktemp("engines"))
    machine.root(f"{INSTALL} && {PODMAN}", limit_s=600)
    return machine


def run(host: Place, *options: str, user: str = "admin") -> tuple[str, dict[str, Any]]:
    """The status of ``container.runs``, and the launcher's record; its message is always one line."""
    _, finding = host.validate("--image-file", str(host.image("python")), *options, user=user)
    assert len(finding["message"].splitlines()) == 1
    return finding["status"], host.records()["container"]


def test_docker_26_runs_it(host: Place) -> None:
    status, record = run(host)
    assert (status, record["values"]["kind"]) == ("pass", "done")
    assert record["container"]["engine"].startswith("docker 26.1.")
    defaults = host.records()["defaults.limits"]
    assert (defaults["undetermined"], defaults["values"]["shm_bytes"]) == (None, 64 * 2**20)
    assert host.records()["versions.limits"]["values"]["shm_bytes"] == 8 * 2**30
    assert host.containers == []


def test_an_archive_is_loaded_once_where_containerd_keeps_the_images(host: Place) -> None:
    setting = '{"features": {"containerd-snapshotter": true}, "storage-driver": "native"}'
    host.root(f"echo '{setting}' > /etc/docker/daemon.json && systemctl restart docker")
    try:
        first, second = run(host), run(host)
    finally:
        host.root("rm /etc/docker/daemon.json && systemctl restart docker")
    assert (first[0], second[0]) == ("pass", "pass"), (first, second)
    assert [outcome[1]["values"]["brought"] for outcome in (first, second)] == [True, False]


@contextmanager
def podman(host: Place) -> Iterator[None]:
    """Podman where Docker's socket was, as package podman-docker has it."""
    host.root(f"systemctl stop {DOCKER_UNITS}; systemctl start podman.socket; ln -sfn /run/podman/podman.sock {SOCKET}")
    try:
        yield
    finally:
        host.root(f"systemctl stop podman.socket podman.service; rm -f {SOCKET}; systemctl start {DOCKER_UNITS}")


def test_podman_behind_dockers_socket_is_known_and_runs_it(host: Place) -> None:
    with podman(host):
        status, record = run(host)
        left = host.root("podman ps -aq")
    assert record["container"]["engine"].startswith("podman 5.")
    assert (status, record["values"]["kind"]) == ("pass", "done"), record
    assert left == ""


def test_a_rootless_engine_is_found_where_root_has_none(host: Place) -> None:
    """In a lab node, itself a container, a rootless engine may not start containers: its message has the reason."""
    tool = "/usr/share/docker.io/contrib/dockerd-rootless-setuptool.sh"
    as_admin = (
        "su - admin -c 'export XDG_RUNTIME_DIR=/run/user/$(id -u) PATH=/usr/share/docker.io/contrib:/usr/sbin:$PATH;"
    )
    # The manager of an earlier login began before its bus was installed.
    host.root(f"systemctl stop {DOCKER_UNITS}; loginctl enable-linger admin; systemctl restart user@$(id -u admin)")
    try:
        until(lambda: host.root("test -S /run/user/$(id -u admin)/bus && echo yes || true") == "yes", 30)
        done = host.root(f"{as_admin} {tool} install --force --skip-iptables' 2>&1 || true")
        host.root(f"{as_admin} docker context use rootless' 2>&1 || true")
        status, record = run(host)
    finally:
        host.root(f"{as_admin} {tool} uninstall --force' || true; loginctl disable-linger admin", limit_s=60)
        host.root(f"rm -rf /home/admin/.docker; systemctl start {DOCKER_UNITS}")
    if record["container"] and record["container"]["engine"]:
        assert "rootless" in record["values"]["security"], done
        assert status in ("pass", "error")
    else:
        assert (status, record["values"]["kind"]) == ("error", "no-engine"), (record, done)
    if status == "error":
        assert record["error"]


def test_containerd_alone_is_not_an_engine_for_it(host: Place) -> None:
    host.root("mv /usr/bin/docker /usr/bin/docker.away")
    try:
        status, record = run(host)
    finally:
        host.root("mv /usr/bin/docker.away /usr/bin/docker")
    assert (status, record["values"]["kind"]) == ("error", "no-engine")
    assert "role docker" in str(record["error"])
