"""playbooks/site.yml on a fresh lab node, over SSH: announced, done, repeated, damaged and repaired, removed.

The tests of this file share one node and run in their order: building the driver takes minutes.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playbook_runs import Run, Site, yaml_list

from gpunode.cli import run as run_gpunode
from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = (
    "roles/nvidia_driver/",
    "plugins/",
    "playbooks/",
    "gpunode/provisioning/context",
    "gpunode/provisioning/answers",
    "gpunode/provisioning/manifest",
    "gpunode/provisioning/roles",
    "gpunode/provisioning/state",
)

SYSTEM = os.environ.get("GPUNODE_TEST_SITE_OS", "debian-12")
OWN_FILES = {
    "/etc/apt/sources.list.d/gpunode-nvidia-driver.sources",
    "/etc/apt/preferences.d/gpunode-nvidia-driver.pref",
    "/etc/apt/apt.conf.d/52gpunode-nvidia-driver",
    "/etc/modprobe.d/gpunode-nouveau.conf",
    "/etc/systemd/system/nvidia-persistenced.service.d/gpunode.conf",
}
STATE_FILE = "/var/lib/gpunode/nvidia_driver/packages-before"
FILES = "Deploy files and directories that packages need"
PACKAGES = "Change packages"
# The roles under test alone: what else site.yml brings is tested with those roles.
PARTS = [f"nvidia_{role}_{part}" for role in ("repository", "driver") for part in ("install", "configure")]
ALWAYS = ("-e", "nvidia_driver_source=debian", "--tags", ",".join([*PARTS, "nvidia_driver_service"]))
IMAGES = "Run commands that apply the files"

DKMS_WORDS = """
KERNEL=$(ls /lib/modules)
MODULE=$(basename /usr/src/nvidia-current-* | sed s,current-,current/,)
"""

# apt's lists, archives and marks, and folders left behind in /tmp; not the caches that apt makes when asked.
APT_FILES = r"""
find /var/lib/apt /var/cache/apt -type f ! -name '*cache.bin' -printf '%p %s %T@\n' | sort
find /tmp /var/tmp -mindepth 1 -maxdepth 1 -name '*apt*' | sort
"""

FOREIGN_PACKAGE = """
mkdir -p /tmp/foreign/DEBIAN
cat > /tmp/foreign/DEBIAN/control <<END
Package: nvidia-fabricmanager
Version: 580.95.05-1
Architecture: all
Maintainer: NVIDIA CORPORATION <cudatools@nvidia.com>
Description: made by a test
END
dpkg-deb --build /tmp/foreign /tmp/foreign.deb
dpkg --install /tmp/foreign.deb
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    lab = Lab(f"test-site-{os.getpid()}")
    try:
        lab.up(1, SYSTEM)
        yield Site(lab, *ALWAYS)
    finally:
        lab.down()


@dataclass
class Bare:
    """The node before anything happened to it."""

    packages: set[str]
    snapshot: list[str]
    apt_files: str


@pytest.fixture(scope="module")
def bare(site: Site) -> Bare:
    return Bare(site.packages(), site.snapshot(), site.sh(APT_FILES))


@pytest.fixture(scope="module")
def announced(site: Site, bare: Bare) -> Run:
    return site.play("--check", "--diff")


@pytest.fixture(scope="module")
def provisioned(site: Site, announced: Run) -> Run:
    run = site.play()
    assert run.rc == 0, run.output
    return run


def test_a_typing_error_is_refused_with_the_right_name_before_anything_changes(site: Site, bare: Bare) -> None:
    run = site.play("-e", "nvidia_driver_flavor=open")
    assert run.rc != 0
    assert "unknown variable nvidia_driver_flavor; did you mean nvidia_driver_flavour?" in run.output
    assert site.snapshot() == bare.snapshot


def test_all_reasons_to_refuse_are_reported_at_once(site: Site, bare: Bare) -> None:
    run = site.play("-e", '{"preflight_min_free_mib": {"/": 99000111, "/usr": 99000222}}', "-e", "gpunode_rebot=x")
    assert run.rc != 0
    for part in ("99000111 MiB are needed", "did you mean gpunode_reboot?"):
        assert part in run.output
    assert site.snapshot() == bare.snapshot


def test_check_mode_announces_and_changes_nothing(site: Site, bare: Bare, announced: Run) -> None:
    assert announced.rc == 0, announced.output
    assert announced.paths >= OWN_FILES
    assert "Components: contrib non-free non-free-firmware" in announced.output
    named = {package.partition("=")[0] for package in yaml_list(announced.output, "install")}
    assert {"nvidia-kernel-dkms", "libcuda1", "nvidia-smi", "dkms"} <= named
    assert {"nvidia-kernel-dkms", "nvidia-alternative"} <= yaml_list(announced.output, "hold")
    assert site.snapshot() == bare.snapshot
    assert site.sh(APT_FILES) == bare.apt_files


def test_the_real_run_changes_what_was_announced(site: Site, bare: Bare, announced: Run, provisioned: Run) -> None:
    assert provisioned.paths == announced.paths
    assert set(provisioned.changed) == set(announced.changed)
    assert yaml_list(announced.output, "hold") == site.held()

    # In a line of packages(): name, version, state.
    before, after = (
        dict(line.split()[:2] for line in packages if line.endswith(" installed"))
        for packages in (bare.packages, site.packages())
    )
    new = {f"{name}={version}" for name, version in after.items() if before.get(name) != version}
    assert new == yaml_list(announced.output, "install")
    assert before.keys() - after.keys() == yaml_list(announced.output, "remove")

    files = set(site.sh("find /etc /var/lib /usr/local -xdev -name '*gpunode*' -type f").split())
    lab_files = {"/etc/ssh/sshd_config.d/10-gpunode-lab.conf", "/etc/sudoers.d/gpunode-lab"}
    assert {path for path in files if "gpunode-lab" not in path} == OWN_FILES, files ^ lab_files


def test_a_second_run_changes_nothing(site: Site, provisioned: Run) -> None:
    before, fetched = site.snapshot(), site.sh("stat -c %Y /var/lib/apt/lists /var/cache/apt/*.bin")
    run = site.play()
    assert run.rc == 0, run.output
    assert run.recap["changed"] == 0
    assert site.snapshot() == before
    assert site.sh("stat -c %Y /var/lib/apt/lists /var/cache/apt/*.bin") == fetched


def test_a_run_that_begins_at_a_role_ends_well(site: Site, provisioned: Run) -> None:
    run = site.play("--start-at-task", "gpunode.node.nvidia_driver : Plan the role")
    assert run.rc == 0, run.output
    assert run.changed == {}
    assert "gpunode.node.nvidia_driver : Plan the role" in run.output
    assert "gpunode.node.nvidia_repository : Plan the role" not in run.output


def test_what_is_damaged_is_announced_and_repaired_and_nothing_else(site: Site, provisioned: Run) -> None:
    before = site.snapshot()
    module = site.sh(
        "find /lib/modules -name 'nvidia-current*.ko*' | grep -v -e modeset -e drm -e uvm -e peermem"
    ).split()
    assert len(module) == 1
    site.sh(f"apt-mark unhold nvidia-smi; rm {module[0]}; systemctl disable --quiet nvidia-persistenced.service")
    for path in OWN_FILES:
        site.sh(f"echo damaged > {path}")

    tasks = {"Build and install the module for kernels that lack it", "Set units"}
    announced = site.play("--check")
    assert announced.paths == OWN_FILES, announced.output
    run = site.play()
    assert run.rc == 0, run.output
    assert {path for path in run.paths if not path.startswith("/boot/")} == OWN_FILES
    by_name = {task for task in run.changed if not OWN_FILES & set(task.split())}
    assert by_name == tasks | {FILES, PACKAGES, IMAGES}
    assert site.snapshot() == before
    assert site.sh(f"test -s {module[0]} && echo there") == "there\n"
    assert site.play().recap["changed"] == 0


def test_a_package_that_is_gone_comes_back_in_the_same_version(site: Site, provisioned: Run) -> None:
    before = site.snapshot()
    site.sh("apt-get purge -y -q --allow-change-held-packages nvidia-smi")
    run = site.play()
    assert run.rc == 0, run.output
    assert set(run.changed) == {PACKAGES}
    assert site.snapshot() == before


def test_mixed_origins_are_refused_before_anything_changes(site: Site, provisioned: Run) -> None:
    site.sh(FOREIGN_PACKAGE)
    before = site.snapshot()
    run = site.play()
    after = site.snapshot()
    site.sh("dpkg --purge nvidia-fabricmanager")
    assert run.rc != 0
    assert "the driver's packages are mixed" in run.output
    assert "nvidia-fabricmanager" in run.output
    assert after == before


def test_unattended_upgrades_leave_the_driver_alone_and_nothing_else(site: Site, provisioned: Run) -> None:
    listed = site.sh("apt-config dump Unattended-Upgrade::Package-Blacklist")
    patterns = set(re.findall(r'"\^(.+)\$"', listed))
    assert patterns == site.held()
    assert "Unattended-Upgrade::Origins-Pattern::" in site.sh("apt-config dump Unattended-Upgrade")


def judged(site: Site, capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[tuple[str, str], str]]:
    """The exit code of ``gpunode validate`` over SSH, and the status of each check and component."""
    capfd.readouterr()
    rc = run_gpunode(["validate", "-i", str(site.lab.inventory_path), "--format", "json"])
    report = json.loads(capfd.readouterr().out)
    assert report["nodes"][0]["simulated"] is True
    findings = report["nodes"][0]["findings"]
    return rc, {(finding["check"], finding["component"]): finding["status"] for finding in findings}


def test_validate_reports_what_is_there_and_the_missing_gpu(
    site: Site, provisioned: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    rc, statuses = judged(site, capfd)
    kernel = site.sh("ls /lib/modules").split()[0]
    module = site.sh(f"find /lib/modules/{kernel} -name nvidia-current.ko").strip()
    assert rc == 3
    assert statuses["gpu.present", "node"] == "error"
    assert statuses["driver.module-built", f"kernel {kernel}"] == "pass"
    assert statuses["driver.module-built", f"kernel {os.uname().release}"] == "skip"
    assert {statuses[check, "node"] for check in ("driver.closure", "driver.held", "driver.origin")} == {"pass"}
    assert "fail" not in statuses.values()
    vermagic = site.sh(f"modinfo -F vermagic {module}")
    assert vermagic.startswith(f"{kernel} ")
    version = site.sh("dpkg-query -W -f '${Version}' nvidia-kernel-dkms").partition("-")[0]
    assert site.sh(f"modinfo -F version {module}").strip() == version


@pytest.mark.parametrize(
    ("harm", "heal", "check"),
    [
        ("apt-mark unhold libcuda1", "apt-mark hold libcuda1", "driver.held"),
        ("dkms uninstall $MODULE -k $KERNEL", "dkms install $MODULE -k $KERNEL", "driver.module-built"),
        (FOREIGN_PACKAGE, "dpkg --purge nvidia-fabricmanager", "driver.origin"),
    ],
    ids=["hold-removed", "module-not-built", "second-origin"],
)
def test_validate_finds_a_fault_by_its_own_name_alone(  # noqa: PLR0917
    site: Site, provisioned: Run, capfd: pytest.CaptureFixture[str], harm: str, heal: str, check: str
) -> None:
    _, before = judged(site, capfd)
    site.sh(DKMS_WORDS + harm)
    try:
        rc, after = judged(site, capfd)
    finally:
        site.sh(DKMS_WORDS + heal)
    changed = {key: status for key, status in after.items() if before.get(key) != status}
    assert rc == 1
    assert {key[0] for key, status in changed.items() if status != "skip"} == {check}, changed
    assert judged(site, capfd)[1] == before


def test_validate_through_ansible_does_not_pass_without_a_gpu(site: Site, provisioned: Run) -> None:
    run = site.play(playbook="validate.yml")
    assert run.rc != 0
    assert "error gpu.present" in run.output
    for check in ("driver.closure", "driver.held", "driver.origin", "driver.nouveau", "node.units-failed"):
        assert f"pass {check}: " in run.output
    expected = site.play("-e", '{"gpunode_expect": {"gpus": 0}}', playbook="validate.yml")
    assert re.search(r"(pass|skip) gpu\.present: ", expected.output)
    assert "error gpu.present" not in expected.output


def test_a_failed_build_shows_the_compilers_errors(site: Site, provisioned: Run) -> None:
    tree = site.sh("ls -d /usr/src/nvidia-current-*").strip()
    version = tree.rpartition("-")[2]
    site.sh(f"dkms remove nvidia-current/{version} --all; dkms add {tree}")
    site.sh(f"echo '#error broken by a test' > {tree}/nvidia/nv.c")
    run = site.play()
    assert run.rc != 0
    assert "#error broken by a test" in run.output


def test_a_reboot_is_for_other_machines_than_the_controller(site: Site) -> None:
    pending = ("--check", "-e", "gpunode_reboot=when_needed", "-e", "gpunode_reboot_required=set-by-a-test")
    assert site.play(*pending, playbook="reboot.yml").changed.keys() == {"Reboot"}
    kept = site.play(*pending, "-e", "gpunode_reboot=never", playbook="reboot.yml")
    assert not kept.changed
    assert "a reboot is pending: set-by-a-test (gpunode_reboot: never)" in kept.output
    local = (
        "-e",
        "gpunode_hosts=all",
        "-i",
        "localhost,",
        "-l",
        "localhost",
        "-c",
        "local",
        "-e",
        f"ansible_python_interpreter={sys.executable}",
    )
    run = site.play(*pending, *local, playbook="reboot.yml")
    assert run.rc == 0, run.output
    assert not run.changed


def test_absent_restores_the_node(site: Site, bare: Bare, provisioned: Run) -> None:
    state = ("-e", "nvidia_driver_state=absent")
    before = site.snapshot()
    announced = site.play("--check", *state)
    assert announced.rc == 0, announced.output
    assert announced.paths >= OWN_FILES
    assert site.snapshot() == before

    run = site.play(*state)
    assert run.rc == 0, run.output
    assert site.packages() == bare.packages
    assert not site.held()
    assert site.sh("find / -xdev -path /proc -prune -o -name 'nvidia*.ko*' -path '*updates*' -print") == ""
    assert STATE_FILE not in site.sh("find /var/lib/gpunode")
    left = [line for line in site.snapshot() if line not in bare.snapshot]
    assert not [line for line in left if "nvidia" in line or "gpunode" in line], left

    again = site.play(*state)
    assert again.rc == 0, again.output
    assert again.recap["changed"] == 0
