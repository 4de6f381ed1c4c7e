"""The role nvidia_container_toolkit on a node without Docker: Podman by CDI, and containerd in its own right.

The tests share a node and run in their order. The driver and the toolkit are the lab's simulations; Podman 5.4 and
containerd 1.7 are Debian 13's own.
"""

import json
import os
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from docker_plays import TINY, Roles
from playbook_runs import Run, Site

from gpunode.cli import run as run_gpunode
from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]
CONCERNS = ("roles/nvidia_container_toolkit/", "gpunode/lab/simulator/")

ENGINES = "apt-get update -q && apt-get install -qy --no-install-recommends podman uidmap containerd"
CONFIG = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/99-nvidia.toml"
PREFERENCES = "/etc/apt/preferences.d/gpunode-nvidia-container-toolkit.pref"
STORAGE = "/etc/containers/storage.conf"
SPEC = "/run/cdi/nvidia.yaml"
CRI = "io.containerd.grpc.v1.cri"
SANDBOX = "registry.example.org/pause:3.9"
# A site's own words, and what a nested engine needs: no overlay upon the node's own, and no group of processes where
# the host has cgroup v1 beside v2.
SETTINGS = f"""
sed -i '/grpc.v1.cri"]/a sandbox_image = "{SANDBOX}" # the site'"'"'s own' {CONFIG}
systemctl restart containerd
systemctl stop netavark-dhcp-proxy.service # it runs after its installation, and ends by itself
mkdir -p /etc/containers/containers.conf.d
printf '%s\\n' '[storage]' 'driver = "vfs"' 'runroot = "/run/containers/storage"' \\
  'graphroot = "/var/lib/containers/storage"' > {STORAGE}
printf '[containers]\\nenv = ["SITE=7"]\\npids_limit = 0\\n' > /etc/containers/containers.conf.d/site.conf
"""
IMAGES = f"""
{TINY.replace("docker", "podman")}
podman save --quiet --output /tmp/tiny.tar tiny
ctr images import --snapshotter native /tmp/tiny.tar
"""
DEVICES = ["/dev/nvidia0", "/dev/nvidiactl"]
LOOK = f"/bin/ls {' '.join(DEVICES)}"
PODMAN = "podman run --rm --network none"
# ctr does not support CDI before containerd 2, and no names of runtimes: this is what the runtime class nvidia starts.
CTR = "ctr run --rm --snapshotter native --cpu-shares 0"
RUNTIME = "--runc-binary /usr/bin/nvidia-container-runtime --env NVIDIA_VISIBLE_DEVICES=all"


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    """A node with a driver, and with both engines as a site has set them."""
    lab = Lab(f"podman-{os.getpid()}")
    folder = tmp_path_factory.mktemp("play")
    try:
        lab.up(1, "debian-13", ["t4-1"])
        site = Site(lab)
        site.sh(f"{ENGINES}; {SETTINGS}")
        (folder / "driver").mkdir()
        Roles(site, folder / "driver", "nvidia_repository", "nvidia_driver").done()
        yield Roles(site, folder, "nvidia_container_toolkit")
    finally:
        lab.down()


@pytest.fixture(scope="module")
def before(roles: Roles) -> list[str]:
    return roles.site.snapshot()


@pytest.fixture(scope="module")
def provisioned(roles: Roles, before: list[str]) -> Run:
    announced = roles.done("--check")
    assert roles.site.snapshot() == before
    run = roles.done()
    assert run.paths == announced.paths
    assert {DROP_IN, CONFIG} <= run.paths
    roles.site.sh(IMAGES)
    return run


def containerd(roles: Roles) -> dict[str, Any]:
    """The section of Kubernetes in containerd's effective configuration; the plugin itself works."""
    assert roles.site.sh("ctr plugins ls id==cri").split()[-1] == "ok"
    section: dict[str, Any] = tomllib.loads(roles.site.sh("containerd config dump"))["plugins"][CRI]
    return section


def validate(capfd: pytest.CaptureFixture[str], roles: Roles, *arguments: str) -> tuple[int, dict[str, str], str]:
    """Exit code of ``gpunode validate`` over SSH, the status of each check of containers, and its whole output."""
    capfd.readouterr()
    rc = run_gpunode(["validate", "-i", str(roles.site.lab.inventory_path), "--format", "json", *arguments])
    output = capfd.readouterr().out
    findings = json.loads(output)["nodes"][0]["findings"]
    return rc, {each["check"]: each["status"] for each in findings if each["check"].startswith("container.")}, output


def test_containerd_has_the_runtime_and_keeps_the_rest(roles: Roles, provisioned: Run) -> None:
    section = containerd(roles)
    assert section["sandbox_image"] == SANDBOX
    assert section["cni"]["bin_dir"] == "/usr/lib/cni"
    assert section["enable_cdi"] is True
    runtimes = section["containerd"]["runtimes"]
    assert section["containerd"]["default_runtime_name"] == "runc"
    assert {name: each["runtime_type"] for name, each in runtimes.items()} == {
        "nvidia": "io.containerd.runc.v2",
        "runc": "io.containerd.runc.v2",
    }
    assert runtimes["nvidia"]["options"]["BinaryName"] == "/usr/bin/nvidia-container-runtime"


def test_podman_takes_nothing_but_the_specification(roles: Roles, provisioned: Run, before: list[str]) -> None:
    podman_lines = [line for line in before if "etc/containers" in line]
    assert [line for line in roles.site.snapshot() if "etc/containers" in line] == podman_lines
    assert roles.site.sh("podman info --format '{{.Store.GraphDriverName}}'").strip() == "vfs"
    assert roles.site.sh(f"{PODMAN} tiny /bin/sh -c 'echo $SITE'").strip() == "7"
    assert roles.site.sh("ls /etc/cdi 2> /dev/null || true; ls /run/cdi").split() == ["nvidia.yaml"]
    assert "additionalGids" in roles.site.sh(f"cat {SPEC}")


def test_a_container_of_podman_sees_the_gpu(roles: Roles, provisioned: Run) -> None:
    assert roles.site.sh(f"{PODMAN} --device nvidia.com/gpu=all tiny {LOOK}").split() == DEVICES
    assert roles.site.sh(f"{PODMAN} --device nvidia.com/gpu=0 tiny {LOOK}").split() == DEVICES
    assert "no such" in roles.site.sh(f"{PODMAN} tiny {LOOK} 2>&1 || echo no such")


def test_a_container_of_a_user_sees_the_gpu(roles: Roles, provisioned: Run) -> None:
    # The /proc of a lab node is covered in places, and a user may mount no other: hence the node's own processes.
    run = f"podman load --quiet --input /tmp/tiny.tar && {PODMAN} --pid host"
    seen = roles.site.node.ssh([f"{run} --device nvidia.com/gpu=all tiny {LOOK}"])
    assert seen.stdout.split()[-2:] == DEVICES, seen.stderr
    assert roles.site.node.ssh([f"{run} tiny {LOOK}"]).returncode != 0


def test_a_container_of_containerd_sees_the_gpu(roles: Roles, provisioned: Run) -> None:
    image = "localhost/tiny:latest"
    assert roles.site.sh(f"timeout 60 {CTR} {RUNTIME} {image} with {LOOK}").split() == DEVICES
    assert "no such" in roles.site.sh(f"timeout 60 {CTR} {image} without {LOOK} 2>&1 || echo no such")


def test_a_second_run_changes_nothing(roles: Roles, provisioned: Run) -> None:
    started = "systemctl show --property MainPID containerd.service"
    # What is left of the containers of the tests before goes in its own time.
    roles.site.sh("timeout 60 sh -c 'while grep -q io.containerd.runtime /proc/mounts; do sleep 1; done'")
    first, process = roles.site.snapshot(), roles.site.sh(started)
    run = roles.done()
    assert run.recap["changed"] == 0, run.changed
    assert roles.site.snapshot() == first
    assert roles.site.sh(started) == process


def test_validate_finds_nothing_wrong_and_no_docker(
    roles: Roles, provisioned: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    rc, checks, output = validate(capfd, roles, "--level", "quick")
    assert rc == 0, output
    assert set(checks.values()) <= {"pass", "skip"}
    assert (checks["container.cdi"], checks["container.runtime"]) == ("pass", "skip")
    rc, checks, output = validate(capfd, roles)
    assert (rc, checks["container.runs"]) == (3, "error")
    assert "no Docker engine on the node" in output
    assert validate(capfd, roles, "--no-container")[0] == 0


def test_what_is_damaged_is_repaired_and_nothing_else(roles: Roles, provisioned: Run) -> None:
    first = roles.site.snapshot()
    spec = roles.site.sh(f"cat {SPEC}")
    roles.site.sh(f"echo damaged > {PREFERENCES}; echo damaged > {DROP_IN}; sed -i /^imports/d {CONFIG}")
    roles.site.sh(rf"sed -i -E 's#(libcuda[.]so)[.][0-9.]+#\1.570.1.2#' {SPEC}")
    # With this, Podman does not even print its version, and devices of other vendors are not visible.
    roles.site.sh(f"sed -i.site /graphroot/d {STORAGE}")
    announced = roles.done("--check")
    run = roles.done()
    roles.site.sh(f"mv {STORAGE}.site {STORAGE}")
    assert run.paths == announced.paths == {PREFERENCES, DROP_IN}
    assert roles.site.snapshot() == first
    assert roles.site.sh(f"cat {SPEC}") == spec
    assert "nvidia" in containerd(roles)["containerd"]["runtimes"]


def test_settings_of_the_role_reach_containerd(roles: Roles, provisioned: Run) -> None:
    run = roles.done("-e", "nvidia_container_toolkit_default_runtime=true", "-e", "nvidia_container_toolkit_cdi=false")
    assert run.paths == {DROP_IN}
    section = containerd(roles)
    assert (section["containerd"]["default_runtime_name"], section["enable_cdi"]) == ("nvidia", False)
    roles.done()
    assert containerd(roles)["containerd"]["default_runtime_name"] == "runc"


def test_absent_restores_the_node(roles: Roles, provisioned: Run, before: list[str]) -> None:
    state = ("-e", "nvidia_container_toolkit_state=absent")
    roles.done(*state)
    assert sorted(set(before) ^ set(roles.site.snapshot())) == []
    assert "nvidia" not in containerd(roles)["containerd"]["runtimes"]
    assert roles.site.sh(f"ls {SPEC} 2>&1 || true").endswith("No such file or directory\n")
    assert roles.done(*state).recap["changed"] == 0
