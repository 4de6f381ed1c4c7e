"""Lab nodes as they are: created, reached, rebooted, interrupted, removed; Debian 12 and 13."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from programs import run_program

from gpunode.cli import run
from gpunode.errors import UndeterminedError, UsageError
from gpunode.fleet import Target, collect
from gpunode.fleet.ssh_config import resolve
from gpunode.lab import Lab, LabNode
from gpunode.lab.image import IMAGE_LABEL
from gpunode.lab.state import make_key
from gpunode.report.outcomes import LabOutcome

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

SYSTEMS = ["debian-12", "debian-13"]
BUILDS = Path("/var/tmp")


@pytest.fixture(scope="module")
def nodes(lab: Lab) -> dict[str, LabNode]:
    """Two nodes with Debian 12 and one with Debian 13, by name."""
    lab.up(2, "debian-12")
    return {node.name: node for node in lab.up(1, "debian-13")}


@pytest.fixture(params=SYSTEMS)
def node(request: pytest.FixtureRequest, nodes: dict[str, LabNode]) -> LabNode:
    """The first node of each system."""
    return next(node for node in nodes.values() if node.os == request.param)


def good(node: LabNode, *argv: str) -> str:
    """What a command run as root answers; it must succeed."""
    done = node.run(argv)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout.strip()


def ansible(lab: Lab, *argv: str, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("ansible")), "gpu_nodes", "-i", str(lab.inventory_path), *argv]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    bare = lab.state.folder.parent / "bare.cfg"  # Ansible as it comes, whatever this machine has configured
    # No connection is kept for the next call: one made under the right host key would hide a wrong one.
    bare.write_text("[defaults]\nhost_key_checking = True\n[ssh_connection]\nssh_args = -o ControlMaster=no\n")
    environment["ANSIBLE_CONFIG"] = str(bare)
    return run_program(command, limit_s=limit_s, env=environment)


# --- what a node is


def test_nodes_are_named_by_their_system(nodes: dict[str, LabNode]) -> None:
    assert {name: node.os for name, node in nodes.items()} == {
        "deb12-1": "debian-12",
        "deb12-2": "debian-12",
        "deb13-1": "debian-13",
    }
    for node in nodes.values():
        assert node.running
        assert f'VERSION_ID="{node.os.removeprefix("debian-")}"' in good(node, "cat", "/etc/os-release")
        assert good(node, "hostname") == node.name
        assert good(node, "cat", "/etc/gpunode/lab-node") == node.os


def test_systemd_runs_without_a_failed_unit(node: LabNode) -> None:
    assert good(node, "cat", "/proc/1/comm") == "systemd"
    assert good(node, "systemctl", "is-system-running") == "running"


def test_no_output_is_lost_on_a_busy_machine(node: LabNode) -> None:
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        with ThreadPoolExecutor(6) as pool:
            outputs = set(pool.map(lambda _: node.run(["echo", "x"]).stdout, range(300)))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert outputs == {"x\n"}


def test_admin_becomes_root_without_a_password(node: LabNode) -> None:
    assert node.ssh(["whoami"]).stdout == "admin\n"
    assert node.ssh(["sudo", "-n", "whoami"]).stdout == "root\n"


def test_operator_is_asked_for_a_password(node: LabNode) -> None:
    done = as_operator(node, "sudo -n whoami")
    assert done.returncode == 1
    assert "a password is required" in done.stderr
    password = node.state.password.read_text(encoding="ascii")
    assert as_operator(node, "sudo -S -p '' whoami", password).stdout == "root\n"
    assert as_operator(node, "sudo -S -p '' whoami", "wrong\n").returncode == 1


def as_operator(node: LabNode, command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = ["ssh", "-F", str(node.state.ssh_config), "-l", "operator", node.name, command]
    return run_program(argv, stdin=stdin, limit_s=30)


def test_root_imports_nothing_from_the_home_of_who_logs_in(node: LabNode) -> None:
    """By the system's own sudo with its password; the home holds modules that would leave a mark as root."""
    home, mark = "/home/operator", "/tmp/sprung"
    for name in ("json", "os", "re", "subprocess", "socket", "time"):
        text = f'open("{mark}", "a").write("{name}")'
        good(node, "sh", "-c", 'echo "$0" > "$1"', text, f"{home}/{name}.py")
    settings = resolve(node.name, [("the test", ["-F", str(node.state.ssh_config), "-l", "operator"])])
    password = node.state.password.read_text(encoding="ascii").strip()
    try:
        # Once the trap itself: what is not isolated runs into it.
        assert node.run(["sh", "-c", f"cd {home} && echo 'import socket' | python3 -"]).returncode == 0
        good(node, "rm", mark)
        (collected,) = collect([Target("node", "ssh", ssh=settings, become=True)], become_password=password)
        assert collected.answer is not None, collected.reason
        assert collected.answer.bundle().commands
        assert node.run(["test", "-e", mark]).returncode == 1
        (refused,) = collect([Target("node", "ssh", ssh=settings, become=True)], become_password="another one")  # noqa: S106
        assert refused.reason == "sudo does not accept the password"
    finally:
        node.run(["sh", "-c", f"rm -f {home}/*.py {mark}"])


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_nobody_else_gets_in(node: LabNode, user: str) -> None:
    argv = ["ssh", "-F", str(node.state.ssh_config), "-l", user, node.name, "true"]
    done = run_program(argv, limit_s=30)
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


def test_a_kernel_is_installed_and_another_one_runs(node: LabNode) -> None:
    release = good(node, "ls", "/lib/modules")
    assert good(node, "dpkg", "-S", f"/boot/vmlinuz-{release}").startswith(f"linux-image-{release}: ")
    good(node, "test", "-s", f"/boot/initrd.img-{release}")
    running = good(node, "uname", "-r")
    assert running == os.uname().release
    if running != release:
        assert node.run(["dpkg", "-S", f"/lib/modules/{running}"]).returncode != 0


def test_a_node_cannot_load_modules_into_the_hosts_kernel(node: LabNode) -> None:
    bounding = int(good(node, "sh", "-c", "awk '/^CapBnd/ {print $2}' /proc/1/status"), 16)
    for number, name in ((16, "SYS_MODULE"), (17, "SYS_RAWIO"), (24, "SYS_RESOURCE"), (25, "SYS_TIME")):
        assert not bounding >> number & 1, name
    assert bounding >> 21 & 1, "SYS_ADMIN is what systemd needs"


def test_packages_come_signed_from_main_and_dpkg_is_consistent(node: LabNode) -> None:
    assert good(node, "dpkg", "--audit") == ""
    assert node.run(["test", "-e", "/etc/apt/sources.list"]).returncode == 1
    good(node, "apt-get", "update", "--error-on=any")
    targets = good(node, "apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT)")
    code = {"debian-12": "bookworm", "debian-13": "trixie"}[node.os]
    assert set(targets.splitlines()) == {f"{code}{suite} main" for suite in ("", "-updates", "-security")}
    stanzas = good(node, "cat", "/etc/apt/sources.list.d/debian.sources").split("\n\n")
    assert all("Signed-By: /usr/share/keyrings/" in stanza for stanza in stanzas)


def test_apt_acts_at_no_moment_of_its_own(node: LabNode) -> None:
    for timer in ("apt-daily.timer", "apt-daily-upgrade.timer"):
        assert node.run(["systemctl", "is-enabled", timer]).stdout.strip() == "masked"
    assert good(node, "dpkg-query", "-W", "-f", "${Status}", "unattended-upgrades") == "install ok installed"


def test_every_node_has_keys_and_an_id_of_its_own(nodes: dict[str, LabNode]) -> None:
    keys = {good(node, "sh", "-c", "cat /etc/ssh/ssh_host_*_key.pub") for node in nodes.values()}
    ids = {good(node, "cat", "/etc/machine-id") for node in nodes.values()}
    boots = {good(node, "cat", "/proc/sys/kernel/random/boot_id") for node in nodes.values()}
    assert len(keys) == len(ids) == len(boots) == len(nodes)
    assert all(len(key.splitlines()) == 1 for key in keys)


# --- reaching it


def test_ansible_pings_and_becomes_with_host_keys_checked(lab: Lab, nodes: dict[str, LabNode]) -> None:
    done = ansible(lab, "-m", "ansible.builtin.ping")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == len(nodes)
    done = ansible(lab, "-b", "-m", "ansible.builtin.command", "-a", "id -u")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines().count("0") == len(nodes)


def test_a_changed_host_key_is_refused(lab: Lab, node: LabNode, tmp_path: Path) -> None:
    path = "/etc/ssh/ssh_host_ed25519_key"
    good(node, "cp", "-a", path, "/root/right")
    make_key(tmp_path / "wrong", "wrong")
    good(node, "sh", "-c", f"cat > {path} <<'END'\n{(tmp_path / 'wrong').read_text()}END")
    try:
        good(node, "systemctl", "restart", "ssh")
        done = node.ssh(["true"])
        assert done.returncode == 255
        assert "Host key verification failed" in done.stderr
        with pytest.raises(UndeterminedError, match="its host key differs from the generated one"):
            node.wait(limit_s=20)
        pinged = ansible(lab, "-m", "ansible.builtin.ping", "--limit", node.name)
        assert pinged.returncode == 4
        assert "UNREACHABLE" in pinged.stdout
        assert "Host key verification failed" in pinged.stdout + pinged.stderr
    finally:
        good(node, "cp", "-a", "/root/right", path)
        good(node, "systemctl", "restart", "ssh")
    assert node.wait(limit_s=20) == "running"


def test_the_verbs_report_the_same(lab: Lab, nodes: dict[str, LabNode], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", "status", "--name", lab.name]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["NODE", "OS", "HARDWARE", "STATE", "ADDRESS"]
    assert [line.split() for line in lines[1:]] == [
        [node.name, node.os, "-", "running", f"127.0.0.1:{node.port}"] for node in nodes.values()
    ]
    assert run(["lab", "status", "--format", "json", "--name", lab.name]) == 0
    outcome = LabOutcome.model_validate_json(capfd.readouterr().out)
    assert (outcome.lab, outcome.inventory, outcome.vendor) == (lab.name, str(lab.inventory_path), None)
    assert [(part.name, part.os, part.hardware, part.state, part.faults) for part in outcome.nodes] == [
        (node.name, node.os, None, "running", ()) for node in nodes.values()
    ]
    assert run(["lab", "inventory", "--path", "--name", lab.name]) == 0
    assert capfd.readouterr().out == f"{lab.inventory_path}\n"
    assert run(["lab", "inventory", "--name", lab.name]) == 0
    assert capfd.readouterr().out == lab.inventory_path.read_text()


def test_lab_ssh_exits_as_the_command_does(lab: Lab, nodes: dict[str, LabNode]) -> None:
    done = gpunode("ssh", "--name", lab.name, "deb12-1", "sh", "-c", "'echo out; exit 7'")
    assert (done.returncode, done.stdout) == (7, "out\n")
    done = gpunode("ssh", "--name", lab.name, "deb12-1", "--", "echo", "out")
    assert (done.returncode, done.stdout) == (0, "out\n")
    done = gpunode("ssh", "--name", lab.name, "deb12-9", "true")
    assert done.returncode == 2
    assert "has no node deb12-9: it has deb12-1, deb12-2, deb13-1" in done.stderr


# --- its life


def test_a_reboot_keeps_address_and_host_key(node: LabNode) -> None:
    before = good(node, "cat", "/proc/sys/kernel/random/boot_id")
    good(node, "touch", "/var/kept", "/run/gone", "/tmp/gone")
    node.restart()
    assert node.ssh(["true"]).returncode == 0
    assert good(node, "cat", "/proc/sys/kernel/random/boot_id") != before
    good(node, "test", "-e", "/var/kept")
    assert node.run(["sh", "-c", "ls /run/gone /tmp/gone"]).stdout == ""
    assert node.ssh(["systemctl", "is-system-running"]).stdout.strip() == "running"


def test_ansible_reboots_nodes(lab: Lab, nodes: dict[str, LabNode]) -> None:
    done = ansible(lab, "-b", "-m", "ansible.builtin.reboot", "-a", "reboot_timeout=60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rebooted: true") + done.stdout.count('"rebooted": true') == len(nodes)


def test_up_keeps_what_is_there_and_starts_what_stopped(lab: Lab, nodes: dict[str, LabNode]) -> None:
    before = {node.name: node.container.id for node in lab.nodes()}
    written = lab.inventory_path.read_text()
    nodes["deb12-2"].container.stop(timeout=30)
    assert run(["lab", "status", "--name", lab.name]) == 1
    again = lab.up(2, "debian-12")
    assert {node.name: node.container.id for node in again} == before
    assert all(node.running for node in again)
    assert lab.inventory_path.read_text() == written
    assert nodes["deb12-2"].ssh(["true"]).returncode == 0


def test_up_fills_a_gap(lab: Lab, nodes: dict[str, LabNode]) -> None:
    kept = nodes["deb12-2"].container.id
    nodes["deb12-1"].container.remove(force=True, v=True)
    again = {node.name: node for node in lab.up(2, "debian-12")}
    assert list(again) == ["deb12-1", "deb12-2", "deb13-1"]
    assert again["deb12-2"].container.id == kept
    assert all(node.ssh(["true"]).returncode == 0 for node in again.values())


# --- removed, also half-created


@pytest.fixture
def other() -> Iterator[Lab]:
    """A second lab, for what goes wrong."""
    lab = Lab(f"other-{os.getpid()}")
    try:
        yield lab
    finally:
        lab.down()


def gpunode(*argv: str, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpunode", "lab", *argv]
    return run_program(command, limit_s=limit_s)


def left(lab: Lab) -> list[str]:
    """Everything in Docker and on disk that belongs to a lab."""
    of_lab: dict[str, str | list[str] | bool] = {"label": f"gpunode.lab={lab.name}"}
    leftovers = [f"container {each.name}" for each in lab.client.containers.list(all=True, filters=of_lab)]
    leftovers += [f"network {each.name}" for each in lab.client.networks.list(filters=of_lab)]
    leftovers += [f"volume {each.name}" for each in lab.client.volumes.list(filters=of_lab)]
    return leftovers + ([str(lab.state.folder)] if lab.state.folder.exists() else [])


def test_down_leaves_nothing(other: Lab) -> None:
    (node,) = other.up(1, "debian-12")
    container = str(node.container.id)
    merged = node.container.attrs["GraphDriver"]["Data"].get("MergedDir", container)
    assert merged in Path("/proc/self/mountinfo").read_text()
    removed = other.down()
    assert removed == [node.container.name, f"gpunode-lab-{other.name}", str(other.state.folder)]
    assert left(other) == []
    assert merged not in Path("/proc/self/mountinfo").read_text()
    cgroups = subprocess.run(
        ["find", "/sys/fs/cgroup", "-name", f"*{container}*"], capture_output=True, text=True, timeout=60, check=False
    )
    assert cgroups.stdout == ""
    assert other.down() == []


def test_down_takes_what_is_half_made(other: Lab, nodes: dict[str, LabNode]) -> None:
    image = nodes["deb12-1"].container.image
    assert image is not None
    other.client.containers.create(image, labels={"gpunode.lab": other.name}, name=f"gpunode-lab-{other.name}-half")
    other.client.networks.create(f"gpunode-lab-{other.name}", labels={"gpunode.lab": other.name})
    assert len(left(other)) == 2
    assert gpunode("down", "--name", other.name).returncode == 0
    assert left(other) == []


def test_a_mirror_that_does_not_answer_leaves_nothing(other: Lab) -> None:
    done = gpunode("up", "--name", other.name, "--mirror", "http://127.0.0.1:9/debian")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("gpunode: mmdebstrap could not build debian-12 (exit ")
    assert left(other) == []
    assert not list(BUILDS.glob("gpunode-lab-debian-12-*"))


def test_a_lost_key_is_reported(other: Lab) -> None:
    other.up(1, "debian-12")
    other.state.key.unlink()
    with pytest.raises(UndeterminedError, match=f"gpunode lab down --name {other.name}, then up"):
        other.up(1, "debian-12")
    assert len(other.nodes()) == 1


def test_a_folder_of_another_user_is_left_alone(other: Lab) -> None:
    other.state.folder.mkdir(parents=True)
    file = other.state.folder / "mine"
    file.write_text("x")
    with pytest.raises(UsageError, match="contains mine, which does not belong to a lab"):
        other.up(1, "debian-12")
    assert file.read_text() == "x"
    file.unlink()
    other.state.folder.rmdir()


# --- interrupted


def interrupted(lab: Lab, code: str, when: Callable[[], bool], number: int, *argv: str) -> str:
    """Run ``gpunode lab up``, send it a signal once ``when`` holds; its stderr. It must end soon, with 130."""
    command = [
        sys.executable,
        "-c",
        f"{code}\nfrom gpunode.cli import main; main()",
        "lab",
        "up",
        "--name",
        lab.name,
        *argv,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as up:
        deadline = time.monotonic() + 120
        while not when():
            assert up.poll() is None, f"ended too early: {up.communicate()[1]}"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        up.send_signal(number)
        try:
            _, err = up.communicate(timeout=90)
        finally:
            if up.poll() is None:
                os.killpg(up.pid, signal.SIGKILL)
    assert up.returncode == 130, err
    assert err.splitlines()[-1] == "gpunode: interrupted"
    return err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_image_leaves_nothing(other: Lab, number: int) -> None:
    tag = f"gpunode-lab:test-{os.getpid()}"

    def images() -> set[str | None]:
        # Of this system: tests beside this one make images for others.
        return {image.id for image in other.client.images.list(filters={"label": f"{IMAGE_LABEL}=debian-12"})}

    before = images()

    def chroot_is_being_filled() -> bool:
        return any(BUILDS.glob("gpunode-lab-debian-12-*/mmdebstrap.*/var/lib/dpkg/status"))

    # A separate recipe, without an existing image.
    code = f"import gpunode.lab.recipe as recipe; recipe._SETUP += '# {tag}\\n'"
    interrupted(other, code, chroot_is_being_filled, number)
    assert left(other) == []
    assert not list(BUILDS.glob("gpunode-lab-debian-12-*"))
    assert "gpunode-lab-debian-12-" not in Path("/proc/self/mountinfo").read_text()
    assert builders() == []
    assert images() <= before


def builders() -> list[str]:
    """Processes that work in the folder of a build."""
    names = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes() + os.fsencode((process / "root").readlink())
        except OSError:
            continue
        if b"/var/tmp/gpunode-lab-debian-12-" in words:
            names.append(process.name)
    return names


def test_interrupted_nodes_leave_nothing(other: Lab, nodes: dict[str, LabNode]) -> None:
    interrupted(other, "", lambda: bool(other.nodes()), signal.SIGINT, "-n", "3")
    assert left(other) == []


def test_an_interrupt_keeps_the_nodes_that_were_there(other: Lab, nodes: dict[str, LabNode]) -> None:
    (first,) = other.up(1, "debian-12")
    written = other.inventory_path.read_text()
    interrupted(other, "", lambda: len(other.nodes()) > 1, signal.SIGINT, "-n", "4")
    assert [node.container.id for node in other.nodes()] == [first.container.id]
    assert other.inventory_path.read_text() == written
    assert first.ssh(["true"]).returncode == 0
