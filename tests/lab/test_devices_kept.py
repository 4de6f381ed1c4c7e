"""A container that loses its GPUs with systemctl daemon-reload: found before, found after, and cured by the remedy.

Docker, systemd and the cgroups are real; the GPUs' device files have no driver. What the toolkit's hook does is done by
hand as libnvidia-container does it with cgroup v1: it makes the device files in the container and allows them in its
cgroup, and neither the engine nor systemd knows of them.
"""

import json
from pathlib import Path

import pytest
from docker_plays import TINY
from playbook_runs import Site

from gpunode.cli import run as run_gpunode
from gpunode.lab import Lab

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not Path("/sys/fs/cgroup/devices").is_dir(), reason="cgroup v2: only the toolkit's own program allows devices"
    ),
]
CONCERNS = ("gpunode/checks/containers", "gpunode/probe/", "gpunode/onnode/probe", "gpunode/facts/containers")

DOCKER = """
apt-get update -q > /dev/null
mkdir -p /etc/docker
echo '{"exec-opts": ["native.cgroupdriver=systemd"]}' > /etc/docker/daemon.json
DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends docker.io > /dev/null
systemctl restart docker
docker info --format '{{.CgroupDriver}}'
"""
DEVICES = "for name in 0 ctl; do test -e /dev/nvidia$name || mknod -m 666 /dev/nvidia$name c 195 ${name/ctl/255}; done"
JOB = "docker run -d --name job {options} tiny /bin/sleep 3000"
LINKS = "mkdir -p /dev/char; ln -sf ../nvidia0 /dev/char/195:0; ln -sf ../nvidiactl /dev/char/195:255"
"""As nvidia-ctk system create-dev-char-symlinks makes them. Without these, runc does not name a device to systemd."""
HOOK = """
pid=$(docker inspect --format '{{.State.Pid}}' job)
group=$(sed -n 's/^[0-9]*:devices://p' /proc/$pid/cgroup)
for device in 195:0 195:255; do echo "c $device rw" > /sys/fs/cgroup/devices$group/devices.allow; done
mknod -m 666 /proc/$pid/root/dev/nvidia0 c 195 0
mknod -m 666 /proc/$pid/root/dev/nvidiactl c 195 255
"""
# There is no driver behind the device: that is the error if it is allowed.
OPENED = "docker exec job /bin/sh -c '/bin/head -c 1 /dev/nvidia0 2>&1 || true'"


@pytest.fixture(scope="module")
def site(lab: Lab) -> Site:
    lab.up(1, "debian-12", ["t4-1"])
    site = Site(lab)
    assert "systemd" in site.sh(DOCKER)
    site.sh(DEVICES)
    site.sh(TINY)
    return site


def found(site: Site, capfd: pytest.CaptureFixture[str]) -> tuple[str, str, str]:
    """Status, message and remedy of the check, as ``gpunode validate`` reports over SSH."""
    capfd.readouterr()
    run_gpunode(["validate", "-i", str(site.lab.inventory_path), "--level", "quick", "--format", "json"])
    findings = json.loads(capfd.readouterr().out)["nodes"][0]["findings"]
    (finding,) = [each for each in findings if each["check"] == "container.devices-kept"]
    print(finding["status"], finding["message"], finding["remedy"])
    return finding["status"], finding["message"], finding["remedy"] or ""


def test_a_reload_takes_the_gpus_of_a_hook_and_the_check_knows(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    assert found(site, capfd)[0] == "skip"
    name = site.sh(JOB.format(options=""))[:12]
    site.sh(HOOK)
    assert "No such device" in site.sh(OPENED)
    status, message, _ = found(site, capfd)
    assert (status, f"docker-{name}" in message) == ("warn", True)
    site.sh("systemctl daemon-reload")
    after = site.sh(OPENED)
    status, message, remedy = found(site, capfd)
    print(after)
    assert "not permitted" in after
    assert (status, f"docker-{name}" in message) == ("fail", True)
    assert "docker rm -f" in remedy
    # The remedy: links, and a new container of which the engine names the devices to systemd.
    site.sh(LINKS)
    site.sh("docker rm -f job; " + JOB.format(options="--device /dev/nvidia0 --device /dev/nvidiactl"))
    assert found(site, capfd)[0] == "pass"
    site.sh("systemctl daemon-reload")
    assert "No such device" in site.sh(OPENED)
    assert found(site, capfd)[0] == "pass"
