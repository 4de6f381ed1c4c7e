"""The role nvidia_container_toolkit on simulated GPUs: by the runtime in bookworm, by CDI in trixie.

The tests of one system share a node and run in their order. The driver and the toolkit are the lab's simulations;
Docker (20.10 and 26.1), its CDI and its cgroups are real.
"""

import json
import os
import re
from collections.abc import Iterator

import pytest
from docker_plays import DAEMON, TINY, Roles
from playbook_runs import Run, Site

from gpunode.cli import run as run_gpunode
from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3000)]
CONCERNS = ("roles/docker/", "roles/nvidia_container_toolkit/", "gpunode/lab/simulator/")

SYSTEMS = ("debian-12", "debian-13")
HARDWARE = "t4-1"
FOUR = {
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
}
SPEC = "/run/cdi/nvidia.yaml"
FOREIGN = {"dns": ["10.1.2.3"], "runtimes": {"other": {"path": "/usr/bin/other"}}}
REFRESH_ENV = "/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env"
PREFERENCES = "/etc/apt/preferences.d/gpunode-nvidia-container-toolkit.pref"
SOURCES = "/etc/apt/sources.list.d/gpunode-nvidia-container-toolkit.sources"
FLAG = "no-additional-gids-for-device-nodes"
RUNTIME = "docker run --rm --runtime nvidia -e NVIDIA_VISIBLE_DEVICES=all tiny"
CDI = "docker run --rm --device nvidia.com/gpu=all tiny"


@pytest.fixture(scope="module", params=SYSTEMS)
def roles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    """A node with a driver and a user's daemon.json."""
    lab = Lab(f"ctk-{request.param[-2:]}-{os.getpid()}")
    folder = tmp_path_factory.mktemp("play")
    try:
        lab.up(1, request.param, [HARDWARE])
        site = Site(lab)
        site.sh(f"mkdir -p /etc/docker /etc/cdi; echo '{json.dumps(FOREIGN)}' > {DAEMON}")
        (folder / "driver").mkdir()
        Roles(site, folder / "driver", "nvidia_repository", "nvidia_driver").done()
        yield Roles(site, folder, "docker", "nvidia_container_toolkit")
    finally:
        lab.down()


@pytest.fixture(scope="module")
def hook(roles: Roles) -> bool:
    """The engine is too old for CDI."""
    return roles.site.node.os == "debian-12"


@pytest.fixture(scope="module")
def provisioned(roles: Roles) -> Run:
    roles.site.sh("printf 'cdiVersion: 0.5.0\\nkind: nvidia.com/gpu\\ndevices: []\\n' > /etc/cdi/nvidia.yaml")
    roles.site.sh("printf 'cdiVersion: 0.5.0\\nkind: example.org/net\\ndevices: []\\n' > /etc/cdi/other.yaml")
    before = roles.site.snapshot()
    announced = roles.done("--check")
    assert roles.site.snapshot() == before
    run = roles.done()
    roles.site.sh(TINY)
    assert run.paths == announced.paths | {"/etc/cdi/nvidia.yaml"}
    return run


def verdicts(roles: Roles, capfd: pytest.CaptureFixture[str]) -> dict[tuple[str, str], str]:
    """Status of each check of containers and its component, as ``gpunode validate`` reports over SSH."""
    capfd.readouterr()
    run_gpunode(["validate", "-i", str(roles.site.lab.inventory_path), "--level", "quick", "--format", "json"])
    findings = json.loads(capfd.readouterr().out)["nodes"][0]["findings"]
    return {(each["check"], each["component"]): each["status"] for each in findings}


def test_four_packages_at_one_version_and_held(roles: Roles, provisioned: Run) -> None:
    lines = [line.split() for line in roles.site.packages()]
    packages = {name: version for name, version, _ in lines if name in FOUR}
    assert packages.keys() == FOUR
    assert len(set(packages.values())) == 1
    assert roles.site.held() >= FOUR


def test_the_cuda_repository_does_not_provide_the_toolkit(roles: Roles, provisioned: Run) -> None:
    policy = roles.site.sh("apt-cache policy nvidia-container-toolkit")
    installed = re.search(r"Installed: (\S+)\n +Candidate: (\S+)", policy)
    assert installed is not None
    assert installed[1] == installed[2]
    # A version and its priority, then the repositories that have it.
    rows = re.findall(r"(?m)^ (?:\*\*\*|   ) (\S+) (-?\d+)\n((?: {8,}.*\n?)+)", policy)
    assert {version for version, priority, _ in rows if priority == "1001"} == {installed[1]}
    of_cuda = {version: priority for version, priority, where in rows if "compute/cuda" in where}
    assert set(of_cuda.values()) - {"1001"} <= {"-1"}, policy


def test_the_cuda_repository_can_be_the_one(roles: Roles, provisioned: Run) -> None:
    if roles.site.node.os != "debian-13":
        pytest.skip("no toolkit is recorded of NVIDIA's repository for Debian 12")
    before = roles.site.snapshot()
    roles.done("-e", "nvidia_container_toolkit_repository=cuda", "-e", "nvidia_container_toolkit_version=1.19.0")
    rows = [line.split() for line in roles.site.packages()]
    assert {version.partition("-")[0] for name, version, _ in rows if name in FOUR} == {"1.19.0"}
    assert SOURCES not in roles.site.sh("find /etc/apt")
    roles.done("-e", "nvidia_container_toolkit_version=stack")
    assert roles.site.snapshot() == before


def test_the_runtime_is_registered_and_foreign_keys_survive(roles: Roles, provisioned: Run, hook: bool) -> None:
    daemon = roles.daemon()
    assert daemon["dns"] == FOREIGN["dns"]
    assert daemon["runtimes"] == {
        "other": {"path": "/usr/bin/other"},
        "nvidia": {"args": [], "path": "nvidia-container-runtime"},
    }
    assert daemon.get("features") == (None if hook else {"cdi": True})
    assert "nvidia" in roles.site.sh("docker info --format '{{json .Runtimes}}'")
    # What nvidia-ctk itself would add: nothing.
    roles.site.sh(
        f"cp {DAEMON} /tmp/daemon.json; nvidia-ctk runtime configure --runtime=docker --config=/tmp/daemon.json"
    )
    assert json.loads(roles.site.sh("cat /tmp/daemon.json")) == daemon


def test_one_specification_is_left_with_the_flags_of_the_engine(roles: Roles, provisioned: Run, hook: bool) -> None:
    assert roles.site.sh("ls /etc/cdi /run/cdi | grep -v :").split() == ["other.yaml", "nvidia.yaml"]
    assert (FLAG in roles.site.sh(f"cat {REFRESH_ENV}")) is hook
    assert ("additionalGids" in roles.site.sh(f"cat {SPEC}")) is not hook
    units = roles.site.sh("systemctl is-enabled nvidia-cdi-refresh.path nvidia-cdi-refresh.service")
    assert units.split() == ["enabled", "enabled"]
    assert roles.site.sh("systemctl is-active nvidia-cdi-refresh.path").strip() == "active"


def test_a_container_sees_the_gpu(roles: Roles, provisioned: Run, hook: bool) -> None:
    look = "/bin/sh -c 'ls /dev/nvidia0 /dev/nvidiactl'"
    assert roles.site.sh(f"{RUNTIME} {look}").split() == ["/dev/nvidia0", "/dev/nvidiactl"]
    assert roles.site.sh(f"docker run --rm --gpus all tiny {look}").split() == ["/dev/nvidia0", "/dev/nvidiactl"]
    assert "no such" in roles.site.sh("docker run --rm tiny /bin/ls /dev/nvidia0 2>&1 || echo no such")
    if not hook:
        assert roles.site.sh(f"{CDI} {look}").split() == ["/dev/nvidia0", "/dev/nvidiactl"]


def test_a_second_run_changes_nothing(roles: Roles, provisioned: Run) -> None:
    before, started = roles.site.snapshot(), roles.restart_count()
    run = roles.done()
    assert run.recap["changed"] == 0, run.changed
    assert roles.site.snapshot() == before
    assert roles.restart_count() == started


def test_validate_finds_nothing_wrong(roles: Roles, provisioned: Run, capfd: pytest.CaptureFixture[str]) -> None:
    statuses = verdicts(roles, capfd)
    wrong = {
        key for key, status in statuses.items() if key[0].startswith("container.") and status not in ("pass", "skip")
    }
    assert not wrong
    assert statuses["container.toolkit", "node"] == "pass"
    assert statuses["container.runtime", "node"] == "pass"


STALE = rf"sed -i -E 's#(libcuda[.]so|libnvidia-ml[.]so)[.][0-9.]+#\1.570.1.2#' {SPEC}"
TWO = f"cp {SPEC} /etc/cdi/nvidia.yaml"
# As toolkit 1.19 writes it, of a driver that was reloaded since: the kernel gave its module another number.
MAJORS = (
    rf"sed -i -E 's#^( *)- path: (/dev/nvidia-uvm)$#&\n\1  major: 77\n\1  minor: 0#' {SPEC}; grep -q 'major: 77' {SPEC}"
)


@pytest.mark.parametrize(
    ("harm", "check", "repairs"),
    [
        (STALE, "container.cdi", "Set units"),
        (TWO, "container.cdi-single", "Deploy files and directories"),
        (MAJORS, "container.cdi", "Set units"),
    ],
    ids=["stale", "two", "majors"],
)
def test_a_fault_is_found_by_its_own_name_and_repaired(  # noqa: PLR0917
    roles: Roles, provisioned: Run, capfd: pytest.CaptureFixture[str], harm: str, check: str, repairs: str
) -> None:
    before = verdicts(roles, capfd)
    roles.site.sh(harm)
    after = verdicts(roles, capfd)
    changed = {
        key for key, status in after.items() if before.get(key) != status and status in ("warn", "fail", "error")
    }
    assert {key[0] for key in changed} == {check}
    assert repairs in roles.done().changed
    assert verdicts(roles, capfd) == before


def test_packages_of_two_versions_are_found_and_made_one(
    roles: Roles, provisioned: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    before = roles.site.snapshot()
    older = "$(apt-cache madison libnvidia-container1 | cut -d '|' -f 2 | tr -d ' ' | grep '^1[.]19' | head -n 1)"
    roles.site.sh(
        f"cd /root && apt-get download -q libnvidia-container1={older}"
        " && dpkg --force-all --install libnvidia-container1_*.deb"
    )
    assert verdicts(roles, capfd)["container.toolkit", "node"] == "fail"
    run = roles.done()
    assert "Change packages" in run.changed
    assert verdicts(roles, capfd)["container.toolkit", "node"] == "pass"
    assert roles.site.snapshot() == before


def test_what_is_damaged_is_repaired_and_nothing_else(roles: Roles, provisioned: Run) -> None:
    before = roles.site.snapshot()
    roles.site.sh(f"apt-mark unhold libnvidia-container1; echo damaged > {PREFERENCES}; echo damaged > {SOURCES}")
    roles.site.sh(f"sed -i s/nvidia-container-runtime/wrong/ {DAEMON}; systemctl disable -q nvidia-cdi-refresh.path")
    run = roles.done()
    assert run.paths == {PREFERENCES, SOURCES, DAEMON}
    assert roles.site.snapshot() == before


def test_a_reload_of_systemd_removes_no_device(roles: Roles, provisioned: Run, hook: bool) -> None:
    how = RUNTIME if hook else CDI
    roles.site.sh(f"{how.replace('--rm', '-d --name job')} /bin/sleep 3000")
    # There is no driver behind the simulated device: that is the error if it is allowed.
    opened = "docker exec job /bin/sh -c '/bin/head -c 1 /dev/nvidia0 2>&1 || true'"
    first = roles.site.sh(opened)
    roles.site.sh("systemctl daemon-reload; systemctl try-reload-or-restart systemd-journald")
    second = roles.site.sh(opened)
    roles.site.sh("docker rm -f job")
    assert "No such device" in first
    assert second == first


def test_absent_restores_the_node(roles: Roles, provisioned: Run) -> None:
    state = ("-e", "nvidia_container_toolkit_state=absent")
    roles.done(*state)
    assert not {line.split()[0] for line in roles.site.packages()} & FOUR
    assert roles.daemon()["runtimes"] == FOREIGN["runtimes"]
    assert "features" not in roles.daemon()
    assert roles.site.sh(f"ls {SPEC} 2>&1 || true").endswith("No such file or directory\n")
    assert roles.site.sh("find /etc -name '*gpunode-nvidia-container*'") == ""
    assert roles.done(*state).recap["changed"] == 0
