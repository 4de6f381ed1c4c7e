"""The role docker in a bookworm and a trixie node: announced, done, repeated, damaged, busy, removed.

The tests of one system share a node and run in their order.
"""

import json
import os
from collections.abc import Iterator

import pytest
from docker_plays import DAEMON, TINY, Roles
from playbook_runs import Run, Site, yaml_list

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]

VERSIONS = {"debian-12": "20.10", "debian-13": "26.1"}
UNATTENDED = "/etc/apt/apt.conf.d/52gpunode-docker"
FOREIGN = {"dns": ["10.1.2.3"], "log-opts": {"tag": "{{.Name}}", "max-size": "1m"}, "labels": ["rack=7"]}
LIMITS = {"max-size": "100m", "max-file": "5"}


@pytest.fixture(scope="module", params=VERSIONS)
def roles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    lab = Lab(f"docker-{request.param[-2:]}-{os.getpid()}")
    try:
        lab.up(1, request.param)
        yield Roles(Site(lab), tmp_path_factory.mktemp("play"), "docker")
    finally:
        lab.down()


@pytest.fixture(scope="module")
def bare(roles: Roles) -> list[str]:
    """A node with a daemon.json that a user has made before there was an engine."""
    roles.site.sh(f"mkdir -p /etc/docker; echo '{json.dumps(FOREIGN)}' > {DAEMON}")
    return roles.site.snapshot()


@pytest.fixture(scope="module")
def announced(roles: Roles, bare: list[str]) -> Run:
    return roles.done("--check", "--diff")


@pytest.fixture(scope="module")
def provisioned(roles: Roles, announced: Run) -> Run:
    run = roles.done()
    roles.site.sh(TINY)
    return run


def test_check_mode_announces_and_changes_nothing(roles: Roles, bare: list[str], announced: Run) -> None:
    named = {package.partition("=")[0] for package in yaml_list(announced.output, "install")}
    assert {"docker.io", "containerd", "runc"} <= named
    assert announced.paths >= {DAEMON, UNATTENDED}
    assert '+    "live-restore": true' in announced.output
    assert roles.site.snapshot() == bare


def test_the_real_run_brings_what_was_announced(roles: Roles, announced: Run, provisioned: Run) -> None:
    assert provisioned.paths == announced.paths
    installed = {line.rpartition(" ")[0].replace(" ", "=") for line in roles.site.packages()}
    assert yaml_list(announced.output, "install") <= installed
    version = roles.site.sh("docker version --format '{{.Server.Version}}'")
    assert version.startswith(tuple(VERSIONS.values()))
    assert roles.site.sh("systemctl is-enabled docker.service").strip() == "enabled"
    assert roles.site.sh("docker run --rm tiny /bin/sh -c 'echo hello'").strip() == "hello"


def test_foreign_keys_survive_and_ours_are_in_force(roles: Roles, provisioned: Run) -> None:
    limits = {"tag": "{{.Name}}", **LIMITS}
    merged = {**FOREIGN, "log-opts": limits, "live-restore": True, "default-shm-size": "1g"}
    assert roles.daemon() == merged
    assert json.loads(roles.site.sh(f"cat {DAEMON}.before-gpunode")) == FOREIGN
    assert roles.site.sh("docker info --format '{{.LiveRestoreEnabled}}'").strip() == "true"
    roles.site.sh("docker run --name limited tiny /bin/sh -c true")
    options = json.loads(roles.site.sh("docker inspect --format '{{json .HostConfig.LogConfig.Config}}' limited"))
    roles.site.sh("docker rm limited")
    assert options == limits
    assert shared_memory(roles) == 2**30


def test_more_shared_memory_needs_no_restart(roles: Roles, provisioned: Run) -> None:
    """dockerd applies default-shm-size on a reload: running containers are not interrupted."""
    started = roles.restart_count()
    roles.done("-e", "docker_shm_size=2g")
    assert (roles.restart_count(), shared_memory(roles)) == (started, 2 * 2**30)
    roles.done()
    assert (roles.restart_count(), shared_memory(roles)) == (started, 2**30)


def shared_memory(roles: Roles) -> int:
    """Return the size of /dev/shm that a plain docker run creates."""
    size = roles.site.sh(
        "docker create --name sized tiny /bin/sh; docker inspect --format '{{.HostConfig.ShmSize}}' sized; "
        "docker rm sized"
    )
    return int(size.split()[1])


def test_no_socket_is_open_to_the_network(roles: Roles, provisioned: Run) -> None:
    assert "tcp" not in roles.site.sh("systemctl show --property=Listen docker.socket")
    refused = roles.play("-e", '{"docker_daemon": {"hosts": ["tcp://0.0.0.0:2375"]}}')
    assert refused.rc != 0
    assert "docker_daemon must not set hosts" in refused.output


def test_a_second_run_changes_nothing(roles: Roles, provisioned: Run) -> None:
    before, started = roles.site.snapshot(), roles.restart_count()
    run = roles.done()
    assert run.recap["changed"] == 0, run.changed
    assert roles.site.snapshot() == before
    assert roles.restart_count() == started


def test_what_is_damaged_is_repaired_and_nothing_else(roles: Roles, provisioned: Run) -> None:
    before = roles.site.snapshot()
    roles.site.sh(
        f'sed -i \'s/"100m"/"9g"/\' {DAEMON}; echo damaged > {UNATTENDED}; systemctl disable -q docker.service'
    )
    announced = roles.done("--check")
    run = roles.done()
    assert run.paths == announced.paths == {DAEMON, UNATTENDED}
    assert "Set units" in run.changed
    assert roles.site.snapshot() == before


def test_a_file_that_is_not_json_is_refused_and_kept(roles: Roles, provisioned: Run) -> None:
    kept = roles.site.sh(f"cp -p {DAEMON} /root/daemon.json; echo '{{,}}' > {DAEMON}; cat {DAEMON}")
    run = roles.play()
    after = roles.site.sh(f"cat {DAEMON}; mv /root/daemon.json {DAEMON}")
    assert run.rc != 0
    assert f"{DAEMON}: it is not JSON" in run.output
    assert after == kept


def test_a_key_that_dockerd_does_not_know_never_gets_into_the_file(roles: Roles, provisioned: Run) -> None:
    before = roles.daemon()
    run = roles.play("-e", '{"docker_daemon": {"live-restor": true}}')
    assert run.rc != 0
    assert "live-restor" in run.output
    assert roles.daemon() == before
    assert roles.done().recap["failed"] == 0


def test_a_busy_node_gets_its_file_and_keeps_its_containers(roles: Roles, provisioned: Run) -> None:
    off = ("-e", "docker_live_restore=false")
    roles.done(*off)
    roles.site.sh("docker run -d --name job tiny /bin/sleep 3000")
    started, running = roles.restart_count(), roles.site.sh("docker ps -q")

    more = ("-e", "docker_log_max_files=7")
    held = roles.done(*off, *more)
    assert "Docker was not restarted: 1 container" in " ".join(held.output.split())
    assert roles.daemon()["log-opts"]["max-file"] == "7"
    again = roles.done(*off, *more)
    assert again.recap["changed"] == 0, again.changed
    assert "A restart is pending: daemon.json: log-opts.max-file" in " ".join(again.output.split())
    assert (roles.restart_count(), roles.site.sh("docker ps -q")) == (started, running)

    # With live-restore in force a restart hurts nobody, and the one that was held back is made.
    roles.done(*more)
    assert roles.restart_count() != started
    assert roles.site.sh("docker ps -q") == running
    assert roles.site.sh("find /run/gpunode -name docker-restart") == ""
    roles.site.sh("docker rm -f job")
    roles.done()


def test_the_start_limit_of_systemd_does_not_stop_a_restart(roles: Roles, provisioned: Run) -> None:
    before, reset = roles.site.snapshot(), "systemctl reset-failed docker.service"
    # docker.service allows three starts in 60 s.
    roles.site.sh(f"{reset}; for i in 1 2 3; do systemctl restart docker.service; done")
    roles.done("-e", "docker_log_max_files=8")
    assert roles.site.sh("systemctl is-active docker.service").strip() == "active"
    roles.done()
    assert roles.site.snapshot() == before


def test_users_are_allowed_only_if_the_node_has_them(roles: Roles, provisioned: Run) -> None:
    refused = roles.play("-e", '{"docker_users": ["nobody-of-that-name"]}')
    assert refused.rc != 0
    assert "nobody-of-that-name" in refused.output
    assert roles.site.sh("getent group docker | cut -d : -f 4").strip() == ""
    roles.done("-e", '{"docker_users": ["operator"]}')
    assert roles.site.sh("getent group docker | cut -d : -f 4").strip() == "operator"


def test_another_source_needs_an_explicit_request(roles: Roles, provisioned: Run) -> None:
    before = roles.site.snapshot()
    run = roles.play("-e", "docker_source=docker")
    assert run.rc != 0
    assert "set docker_source to auto to keep it, or docker_switch to true" in run.output
    kept = roles.done("-e", "docker_source=auto")
    assert kept.recap["changed"] == 0, kept.changed
    assert roles.site.snapshot() == before


def test_absent_restores_the_node(roles: Roles, bare: list[str], provisioned: Run) -> None:
    state = ("-e", "docker_state=absent")
    roles.site.sh("docker run -d --name job tiny /bin/sleep 3000")
    assert "1 container runs: stop them" in roles.play(*state).output
    roles.site.sh("docker rm -f job")
    before = roles.site.snapshot()
    roles.done("--check", *state)
    assert roles.site.snapshot() == before

    roles.done(*state)
    assert roles.daemon() == FOREIGN
    left = {line.split()[0] for line in roles.site.packages()}
    assert not left & {"docker.io", "docker-cli", "containerd", "runc"}
    assert roles.site.sh("ls /var/lib/docker/image") != ""
    new = [line for line in roles.site.snapshot() if line not in bare]
    assert not [line for line in new if "gpunode" in line], new
    assert roles.done(*state).recap["changed"] == 0
