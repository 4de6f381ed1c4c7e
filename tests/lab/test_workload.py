"""The workload in a lab node's own Docker engine, over SSH: it runs, reports faults, and leaves nothing."""

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import run_program

from gpunode.facts.models.measured import MEASURED
from gpunode.lab import Lab, LabNode
from gpunode.lab.engine import connect
from gpunode.lab.workload_image import KINDS, REPOSITORY, write_workload_image
from gpunode.workload.container import LABEL, LIMIT_LABEL

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]
CONCERNS = ("gpunode/workload/", "gpunode/onnode/watchdog", "gpunode/fleet/", "gpunode/cli/options")

PLAIN = "plain"  # neither sudo nor the group docker
MEMBER = "member"  # the group docker, no sudo
GONE_S = 15
"""How long the node may take to notice a connection that ended."""
INSTALL = "apt-get update -q && apt-get install -qy --no-install-recommends docker.io"


@dataclass
class Place:
    """One node with an engine of its own, and images as files."""

    lab: Lab
    node: LabNode
    folder: Path

    def root(self, script: str, limit_s: float = 120) -> str:
        """What a script run as root answers; it must succeed."""
        done = self.run(script, limit_s)
        assert done.returncode == 0, f"{script}: {done.stderr}{done.stdout}"
        return done.stdout.strip()

    def run(self, script: str, limit_s: float) -> "subprocess.CompletedProcess[str]":
        return self.node.run(["sh", "-c", script], timeout_s=limit_s, env={"DEBIAN_FRONTEND": "noninteractive"})

    @property
    def containers(self) -> list[str]:
        """All containers of our runs on the node, running or not."""
        return self.root("docker ps -aq --filter name=gpunode-validate-").split()

    def image(self, kind: str) -> Path:
        """An image of the lab as a file."""
        path = self.folder / f"{kind}.tar"
        if not path.exists():
            write_workload_image(connect(), kind, path, print)
        return path

    def inventory(self, user: str) -> Path:
        """The lab's inventory with another user."""
        inventory = yaml.safe_load(self.lab.inventory_path.read_text())
        inventory["gpu_nodes"]["vars"]["ansible_user"] = user
        if user in (PLAIN, MEMBER):
            inventory["gpu_nodes"]["vars"]["ansible_become"] = False
        path = self.folder / f"{user}.yml"
        path.write_text(yaml.safe_dump(inventory))
        return path

    def command(self, *options: str, user: str = "admin") -> list[str]:
        """``gpunode validate`` of this node, as far as the workload goes."""
        only = ("--select", "container.runs", "--format", "json", "--save", str(self.folder))
        return [sys.executable, "-m", "gpunode", "validate", "-i", str(self.inventory(user)), *only, *options]

    def validate(self, *options: str, user: str = "admin", limit_s: float = 300) -> tuple[int, dict[str, Any]]:
        """Exit code, and the finding of ``container.runs``."""
        done = run_program(self.command(*options, user=user), limit_s=limit_s)
        assert done.stdout, done.stderr
        (finding,) = json.loads(done.stdout)["nodes"][0]["findings"]
        return done.returncode, finding

    def records(self) -> dict[str, dict[str, Any]]:
        """The records of the bundle that was saved last, by name."""
        bundle = json.loads((self.folder / f"{self.node.name}.json").read_text())
        return {record["record"]: record for record in bundle["results"]}

    def refused(self, *options: str, words: Sequence[str], user: str = "admin") -> None:
        """The workload does not run, one line has the reason, and nothing remains on the node."""
        rc, finding = self.validate(*options, user=user)
        assert (rc, finding["status"]) == (3, "error")
        assert not [word for word in words if word not in finding["message"]], finding["message"]
        assert len(finding["message"].splitlines()) == 1

    @contextmanager
    def under_way(self, limit_s: int = 75) -> Iterator["subprocess.Popen[str]"]:
        """``gpunode validate`` with a payload that takes its whole time, its container running."""
        process = subprocess.Popen(
            self.command("--image-file", str(self.image("hangs")), "--workload-timeout", str(limit_s)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            until(lambda: bool(self.root("docker ps -q --filter name=gpunode-validate-")), 60)
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=30)


def until(true: Callable[[], bool], limit_s: float) -> float:
    """Wait for it; how long that took."""
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < limit_s, f"not within {limit_s} s"
        time.sleep(0.5)
    return time.monotonic() - started


@pytest.fixture(scope="module")
def host(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    (node,) = lab.up(1, "debian-12")
    machine = Place(lab, node, tmp_path_factory.mktemp("workload"))
    machine.root(INSTALL, limit_s=300)
    for user in (PLAIN, MEMBER):
        machine.root(f"useradd --create-home --shell /bin/sh {user} && cp -r /home/admin/.ssh /home/{user}/")
        machine.root(f"chown -R {user} /home/{user}/.ssh")
    machine.root(f"usermod -aG docker {MEMBER}")
    # What a run that was cut between making and starting its container would leave, and somebody else's container.
    machine.validate("--image-file", str(machine.image("python")))
    python = machine.root(f"docker images -q {REPOSITORY}")
    machine.root(f"docker create --name left --label {LABEL}=payload --label {LIMIT_LABEL}=1 {python} python3")
    machine.root(f"docker create --name foreign {python} python3")
    yield machine
    assert machine.root("docker ps -a --format '{{.Names}}'").split() in (["foreign"], ["foreign", "left"])


# --- it runs


def test_the_payload_runs_in_the_nested_engine(host: Place) -> None:
    rc, finding = host.validate("--image-file", str(host.image("torch")), limit_s=600)
    assert (rc, finding["status"]) == (0, "pass"), finding
    records = host.records()
    assert records["versions.torch"]["values"]["version"].startswith("2.13.0")
    assert records["frameworks.tensor"]["error"] is None
    assert {record["device"] for record in records.values()} == {"cpu"}
    assert all(record["simulated"] for record in records.values())
    record = records["container"]
    assert record["container"]["engine"].startswith("docker 20.10.")
    assert (record["values"]["complete"], record["values"]["brought"], record["container"]["gpus"]) == (
        True,
        True,
        "none",
    )
    assert host.containers == []


@pytest.mark.timeout(1500)
def test_level_deep_runs_to_its_end_and_is_marked(host: Place) -> None:
    """On a processor, so no figure is a GPU's; a directory that is not there costs its own records alone."""
    options = ("--level", "deep", "--image-file", str(host.image("torch")), "--burn", "2", "--storage", "/nowhere")
    rc, finding = host.validate(*options, limit_s=1400)
    assert (rc, finding["status"]) == (0, "pass"), finding
    records = host.records()
    assert set(records) > MEASURED
    assert {record["device"] for record in records.values()} == {"cpu"}
    assert all(record["simulated"] for record in records.values())
    assert records["container"]["values"]["level"] == "deep"
    assert records["nccl.all-reduce"]["values"]["backend"] == "gloo"
    assert records["nccl.pairs"]["values"]["ranks"] == 4
    broken = {name for name, record in records.items() if record["error"] is not None}
    assert broken <= {"storage.fio", "storage.dataloader"}
    assert "/nowhere" in records["storage.dataloader"]["error"]
    assert host.root("ls -d /nowhere 2>/dev/null || echo absent") == "absent"
    assert host.containers == []


def test_the_image_is_not_transferred_twice(host: Place) -> None:
    host.validate("--image-file", str(host.image("python")))
    assert host.records()["container"]["values"]["brought"] is False


def test_without_container_the_nodes_python_runs_it_and_nothing_stays(host: Place) -> None:
    before = host.root("ls -A /tmp /home/admin /root")
    _, finding = host.validate("--no-container")
    assert finding["status"] == "skip", finding  # it does not mention containers
    assert "on the host itself, in no container" in finding["message"]
    assert host.records()["container"]["values"]["kind"] == "done"
    assert host.records()["container"]["container"] is None
    assert host.records()["versions.system"]["values"]["python"].startswith("3.11.")
    assert host.root("ls -A /tmp /home/admin /root") == before


def test_what_an_earlier_run_left_is_swept_and_nothing_else(host: Place) -> None:
    left = host.root("docker ps -aq --filter name=left")
    if left:  # it has to be a minute old before it counts as left
        made = host.root("docker inspect -f '{{.Created}}' left")[:19]
        until(lambda: int(host.root(f"echo $(( $(date +%s) - $(date -d {made}Z +%s) ))")) > 62, 90)
    host.validate("--image-file", str(host.image("python")))
    assert host.root("docker ps -a --format '{{.Names}}'") == "foreign"


# --- who may


def test_a_user_with_a_sudo_password_validates_with_k(host: Place) -> None:
    assert "docker" not in host.root("id -Gn operator").split()
    password = (host.lab.state.folder / "operator-password").read_text().strip()
    command = host.command("-K", "--image-file", str(host.image("python")), user="operator")
    output = with_terminal(command, "BECOME password: ", password)
    assert '"status": "pass"' in output, output
    assert password not in output
    assert host.records()["container"]["values"]["kind"] == "done"


def test_a_member_of_the_group_docker_needs_no_sudo(host: Place) -> None:
    rc, finding = host.validate("--image-file", str(host.image("python")), user=MEMBER)
    assert (rc, finding["status"]) == (0, "pass"), finding


def test_a_user_without_either_gets_one_clear_line(host: Place) -> None:
    host.refused(
        *("--image-file", str(host.image("python"))),
        user=PLAIN,
        words=["user plain may not use the node's Docker engine", "no permission on its socket", "-K", "group docker"],
    )


def test_a_user_who_should_become_root_and_cannot_gets_one_clear_line(host: Place) -> None:
    inventory = host.inventory(PLAIN)
    inventory.write_text(inventory.read_text().replace("ansible_become: false", "ansible_become: true"))
    argv = [sys.executable, "-m", "gpunode", "validate", "-i", str(inventory), "--format", "json"]
    done = run_program(argv, limit_s=120)
    (finding,) = json.loads(done.stdout)["nodes"][0]["findings"]
    assert (done.returncode, finding["check"], finding["status"]) == (3, "node.reachable", "error")
    assert finding["message"] == "sudo requires a password: use -K, or set ansible_become_password"


# --- it ends whatever happens


def test_kill_9_of_the_controller_leaves_no_container(host: Place) -> None:
    with host.under_way() as process:
        os.killpg(process.pid, signal.SIGKILL)
        until(lambda: not host.containers, GONE_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_controller_leaves_no_container(host: Place, number: int) -> None:
    with host.under_way() as process:
        process.send_signal(number)
        process.wait(timeout=10)
        until(lambda: not host.containers, GONE_S)


def test_a_connection_that_ends_leaves_no_container(host: Place) -> None:
    with host.under_way() as process:
        host.root("pkill -KILL -f '^sshd: admin'")
        until(lambda: not host.containers, GONE_S)
        out, _ = process.communicate(timeout=90)
        (finding,) = json.loads(out)["nodes"][0]["findings"]
        assert finding["status"] == "error"
        assert "ended early" in finding["message"] or "Docker engine" in finding["message"], finding["message"]


def test_a_network_that_falls_silent_leaves_no_container_after_the_limit(host: Place) -> None:
    """The end is not signalled: only the limit inside the container remains."""
    with host.under_way(limit_s=40) as process:
        host.root("iptables -I INPUT -p tcp --dport 22 -j DROP && iptables -I OUTPUT -p tcp --sport 22 -j DROP")
        try:
            assert until(lambda: not host.containers, 90) > 5
            out, _ = process.communicate(timeout=90)
        finally:
            host.root("iptables -D INPUT -p tcp --dport 22 -j DROP && iptables -D OUTPUT -p tcp --sport 22 -j DROP")
        (finding,) = json.loads(out)["nodes"][0]["findings"]
        assert finding["status"] == "error"


# --- bad input


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bare", ["has no python3", "--image"]),
        ("floods", ["more than 4 MiB on stdout"]),
    ],
)
def test_an_image_that_cannot_do_it_is_named(host: Place, kind: str, words: list[str]) -> None:
    assert kind in KINDS
    host.refused("--image-file", str(host.image(kind)), words=words)
    assert host.containers == []


def test_an_image_without_torch_is_reported_in_its_records(host: Place) -> None:
    host.validate("--image-file", str(host.image("python")))
    assert host.records()["versions.torch"]["skipped"] == "PyTorch is not in the image"


def test_an_image_of_a_registry_out_of_reach(host: Place) -> None:
    host.refused(
        *("--image", "registry.invalid/there/is:none"),
        words=["registry.invalid/there/is:none is not on the node", "registry cannot be reached", "--image-file"],
    )


def test_a_full_disk_is_named(host: Place) -> None:
    host.root("mkdir -p /small && mount -t tmpfs -o size=60m tmpfs /small")
    host.root('echo \'{"data-root": "/small"}\' > /etc/docker/daemon.json && systemctl restart docker')
    try:
        host.refused("--image-file", str(host.image("python")), words=["no space left on the node's disk"])
    finally:
        host.root("rm /etc/docker/daemon.json && systemctl restart docker && umount -l /small")


def test_an_engine_that_does_not_run(host: Place) -> None:
    host.root("systemctl stop docker.socket docker.service")
    try:
        host.refused("--image-file", str(host.image("python")), words=["engine does not run", "role docker"])
    finally:
        host.root("systemctl start docker.socket docker.service")


def test_a_node_without_an_engine(host: Place) -> None:
    host.root("mv /usr/bin/docker /usr/bin/docker.away")
    try:
        host.refused("--image-file", str(host.image("python")), words=["no Docker engine", "role docker"])
    finally:
        host.root("mv /usr/bin/docker.away /usr/bin/docker")


def with_terminal(argv: Sequence[str], prompt: str, answer: str, limit_s: float = 120) -> str:
    """Run a program with a terminal of its own, answer its prompt once, and return all that it showed."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvp(argv[0], list(argv))  # noqa: S606
    shown, deadline, answered = "", time.monotonic() + limit_s, False
    try:
        while True:
            assert time.monotonic() < deadline, f"{shlex.join(argv)} did not end: {shown}"
            if not select.select([terminal], [], [], 1)[0]:
                continue
            try:
                data = os.read(terminal, 65536)
            except OSError:  # how a terminal signals that it was closed
                data = b""
            if not data:
                return shown
            shown += data.decode(errors="replace")
            if prompt in shown and not answered:
                answered = True
                os.write(terminal, answer.encode() + b"\n")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)
