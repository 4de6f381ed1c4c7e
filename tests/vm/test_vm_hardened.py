"""What has to work on a GPU node works after all hardening roles as before: containers, profilers, squashfs, two rails.

One machine with a kernel of its own: what people do there is tried, the roles are run, the machine is rebooted, and
the same is tried again.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from machine import Machine, StartVm
from playbook_runs import WITHOUT_GPU, Playbooks
from programs import run_program
from vm_fixtures import image_with

pytestmark = [pytest.mark.vm, pytest.mark.timeout(5400)]

PY_SPY = "py-spy==0.4.1"
PACKAGES = (
    *("apparmor", "busybox-static", "docker.io", "fuse-overlayfs", "iputils-ping", "linux-perf", "podman"),
    *("slirp4netns", "squashfs-tools", "uidmap"),
)
CONTROLLER = "10.0.2.2"
"""QEMU's own address in the machine's network: logins through the forwarded port come from there."""
SETUP = r"""
grep -q ^admin: /etc/subuid || usermod --add-subuids 100000-165535 --add-subgids 100000-165535 admin
cat > /usr/local/sbin/rails <<'END'
#!/bin/sh
# Two interfaces in one network, each with a table of its own, as multi-rail RoCE is set up.
set -eu
ip netns add peer
ip -n peer link add bridge type bridge
for rail in 1 2; do
    ip link add rail$rail type veth peer name port$rail netns peer
    ip address add 10.88.0.$rail/24 dev rail$rail
    sysctl -qw net.ipv4.conf.rail$rail.rp_filter=0 net.ipv4.conf.rail$rail.arp_ignore=1 \
        net.ipv4.conf.rail$rail.arp_announce=2
    ip link set rail$rail up
    ip -n peer link set port$rail master bridge up
    ip route add 10.88.0.0/24 dev rail$rail src 10.88.0.$rail table 10$rail
    ip rule add from 10.88.0.$rail table 10$rail
done
sysctl -qw net.ipv4.conf.all.rp_filter=0
ip -n peer address add 10.88.0.9/24 dev bridge
ip -n peer link set bridge up
END
cat > /etc/systemd/system/rails.service <<'END'
[Unit]
After=network-pre.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh /usr/local/sbin/rails
[Install]
WantedBy=multi-user.target
END
cat > /usr/local/bin/answers.py <<'END'
import socket, sys
with socket.create_server(("", int(sys.argv[1])), backlog=64) as server:
    while True:
        with server.accept()[0] as one:
            one.sendall(b"works\n")
END
cat > /etc/systemd/system/rank.service <<'END'
[Service]
ExecStart=/usr/bin/python3 /usr/local/bin/answers.py 29500
[Install]
WantedBy=multi-user.target
END
cat > /etc/systemd/system/peer.service <<'END'
[Unit]
Requires=rails.service
After=rails.service
[Service]
NetworkNamespacePath=/run/netns/peer
ExecStart=/usr/bin/python3 /usr/local/bin/answers.py 7000
[Install]
WantedBy=multi-user.target
END
cat > /usr/local/bin/waits.py <<'END'
import time
def waits_here():
    time.sleep(1000000)
waits_here()
END
cat > /etc/systemd/system/job.service <<'END'
[Service]
User=admin
ExecStart=/usr/bin/python3 /usr/local/bin/waits.py
[Install]
WantedBy=multi-user.target
END
systemctl daemon-reload
systemctl enable --now rails.service rank.service peer.service job.service docker.service
tar -c -C / bin/busybox | docker import - box >/dev/null
tar -c -C / -f /home/admin/box.tar bin/busybox
"""
AS_ROOT = {
    "docker": "docker run --rm box /bin/busybox echo works",
    "docker reaches the node's other networks": (
        "docker run --rm box /bin/busybox timeout 60 /bin/busybox nc 10.88.0.9 7000 < /dev/null"
    ),
    "perf record": (
        "perf record -q -e cpu-clock -F 99 -o /tmp/perf -- busybox timeout 3 busybox yes > /dev/null || true; "
        "perf script -i /tmp/perf -F comm 2>&1 | grep busybox > /dev/null && echo works"
    ),
    "squashfs": (
        "mkdir -p /tmp/tree /tmp/mounted; echo works > /tmp/tree/file; "
        "mksquashfs /tmp/tree /tmp/image -noappend -quiet > /dev/null; "
        "mount -t squashfs -o loop /tmp/image /tmp/mounted; cat /tmp/mounted/file; umount /tmp/mounted"
    ),
    "both rails answer": (
        "for rail in 1 2; do ip netns exec peer ping -q -c 2 -W 5 10.88.0.$rail > /dev/null; "
        'ip netns exec peer timeout 60 bash -c "cat < /dev/tcp/10.88.0.$rail/29500"; done'
    ),
}
AS_USER = {
    "podman without root": (
        "podman image exists localhost/box || podman import -q box.tar localhost/box >/dev/null; "
        "podman run --rm --network slirp4netns localhost/box /bin/busybox echo works"
    ),
    "py-spy attaches": "./py-spy dump --pid $(pgrep -o -f '[w]aits.py') | grep -o waits_here",
    "perf of an own program": "perf stat -x, -e task-clock:u busybox true 2>&1 | cut -d, -f3",
    "user namespace": "unshare --user --map-root-user id -u",
}
PROFILE = {
    "gpunode_roles": ["kernel_tuning", "docker", "updates", "accounts", "ssh_hardening", "firewall"],
    **WITHOUT_GPU,
    "docker_source": "distribution",
    "docker_no_new_privileges": True,
    "updates_state": "present",
    "accounts_state": "present",
    "ssh_hardening_state": "present",
    "ssh_hardening_admin_users": ["admin"],
    "ssh_hardening_revert_s": 300,
    "accounts_revert_s": 300,
    "firewall_state": "present",
    "firewall_ssh_networks": [CONTROLLER],
    "firewall_cluster_networks": ["10.88.0.0/24"],
    "firewall_revert_s": 300,
}


class Node(Playbooks):
    """The machine, and what is tried on it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.machine = machine

    def as_user(self, script: str) -> str:
        """Return what a script prints that the login user runs, or why it failed."""
        done = run_program([*self.machine.ssh, script], limit_s=600)
        return done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr.strip()[-300:]}"

    def as_root(self, script: str) -> str:
        """Return what a script prints that root runs, or why it failed."""
        done = self.machine.run(["bash", "-euo", "pipefail", "-c", script], 600)
        return done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr.strip()[-300:]}"

    def tried(self) -> dict[str, str]:
        """Return each thing that people do, with what came of it."""
        outputs = {name: self.as_root(script) for name, script in AS_ROOT.items()}
        return {**outputs, **{name: self.as_user(script) for name, script in AS_USER.items()}}


@pytest.fixture(scope="module")
def py_spy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of py-spy's wheel: it needs nothing else."""
    folder = tmp_path_factory.mktemp("py-spy")
    install = ["-I", "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder), PY_SPY]
    subprocess.run([sys.executable, *install], check=True, timeout=300)
    return folder / "bin" / "py-spy"


@pytest.fixture(scope="module")
def vm(start_vm: StartVm) -> Machine:
    return start_vm(image=image_with(*PACKAGES))


@pytest.fixture(scope="module")
def node(vm: Machine, py_spy: Path) -> Node:
    vm.sh(SETUP, timeout_s=600)
    with py_spy.open("rb") as program:
        subprocess.run(
            [*vm.ssh, "cat > py-spy && chmod 0755 py-spy"],
            stdin=program,
            check=True,
            timeout=300,
            start_new_session=True,
        )
    return Node(vm)


def test_what_people_do_works_after_hardening(node: Node, vm: Machine) -> None:
    key = (vm.image.key.with_suffix(".pub")).read_text(encoding="ascii").strip()
    before = node.tried()
    assert not [f"{name}: {text}" for name, text in before.items() if "failed" in text or not text], before

    settings = {**PROFILE, "accounts_admins": [{"name": "admin", "keys": [key]}]}
    run = node.play("-e", json.dumps(settings), limit_s=3000)
    assert run.rc == 0, run.output
    assert "gpunode" in node.sh("nft list tables")
    assert "authenticationmethods publickey" in node.sh("sshd -T")
    assert node.sh("sysctl -n kernel.dmesg_restrict").strip() == "1"
    assert node.tried() == before

    vm.reboot()
    assert "gpunode" in node.sh("nft list tables")
    assert node.tried() == before

    again = node.play("-e", json.dumps(settings), limit_s=3000)
    assert again.rc == 0, again.output
    assert again.recap["changed"] == 0, again.output
