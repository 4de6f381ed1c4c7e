"""Secure boot on a simulated T4 server: refused, a key staged for a person, enrolled, the module loaded.

Real: the key that DKMS makes, its signature in the module, and mokutil, which reads and writes firmware variables.
The firmware is played: its variables are files of a folder, which libefivar takes where EFIVARFS_PATH names it. What a
person does at the console of the next boot (MokManager) is here a variable that gets another name. The lab's kernel
verifies no signature: a module that is not loaded was left alone by the role.

The tests of this file run in their order, and all but the first share one node.
"""

import json
import os
from collections.abc import Iterator

import pytest
from playbook_runs import Run, Site

from gpunode.cli import run as run_gpunode
from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("roles/nvidia_driver/", "roles/preflight/", "gpunode/provisioning/preflight")

VARIABLES = "/sys/firmware/efi/efivars"
SHIM = "605dab50-e046-4300-abb6-3dd810dd8b23"
# Docker hides the host's firmware behind an empty folder; this one is laid over it. It is gone after a reboot.
FIRMWARE = rf"""
mkdir -p /run/firmware/efi/efivars
mount --bind /run/firmware /sys/firmware
printf '\006\000\000\000\001' > {VARIABLES}/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c
printf '%s\n' '#!/bin/sh' 'EFIVARFS_PATH={VARIABLES}/ exec /usr/bin/mokutil "$@"' > /usr/local/bin/mokutil
chmod 755 /usr/local/bin/mokutil
"""
ENROL = f"mv {VARIABLES}/MokNew-{SHIM} {VARIABLES}/MokListRT-{SHIM} && rm {VARIABLES}/MokAuth-{SHIM}"
LOADED = "cat /proc/driver/nvidia/version 2> /dev/null || true"
# What mokutil --generate-hash printed for a password that is used nowhere.
HASH = "$6$OqKzvdKYVlM3aR$LcBXTyP9sJRWu9CDzmEgTFojoSGll1Lbrd2VMBaQigNiQ4IwaMF0bAwHhS9bbvgssFtFIsCIIJV2jZb10NGFd/"
WITH_HASH = ("-e", json.dumps({"nvidia_driver_mok_hash": HASH}))
WAITS = "the key that signs the modules must be confirmed at the console"
BOOT = "/var/lib/gpunode/nvidia_driver/key-staged"
STAGE = "Import the key"
PARTS = [f"nvidia_{role}_{part}" for role in ("repository", "driver") for part in ("install", "configure")]
TAGS = ("--tags", ",".join([*PARTS, "nvidia_driver_service"]))


def driver_findings(site: Site, capfd: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """Status and message of each check on the driver, as ``gpunode validate`` has it."""
    capfd.readouterr()
    run_gpunode(["validate", "-i", str(site.lab.inventory_path), "--level", "quick", "--format", "json"])
    findings = json.loads(capfd.readouterr().out)["nodes"][0]["findings"]
    return {row["check"]: (row["status"], row["message"]) for row in findings if row["check"].startswith("driver.")}


def variables(site: Site) -> set[str]:
    """Names of the variables that shim and mokutil share."""
    return {name.partition("-")[0] for name in site.sh(f"ls {VARIABLES}").split() if name.endswith(SHIM)}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    lab = Lab(f"test-secure-boot-{os.getpid()}")
    try:
        lab.up(1, "debian-12", hardware=["t4-1"])
        site = Site(lab, *TAGS)
        site.sh(FIRMWARE)
        yield site
    finally:
        lab.down()


@pytest.fixture(scope="module")
def bare(site: Site) -> list[str]:
    return site.snapshot()


@pytest.fixture(scope="module")
def staged(site: Site, bare: list[str]) -> Run:
    run = site.play(*WITH_HASH, "-v")
    assert run.rc == 0, run.output
    return run


def test_what_canonical_signs_needs_no_key() -> None:
    lab = Lab(f"test-secure-boot-ubuntu-{os.getpid()}")
    try:
        lab.up(1, "ubuntu-24.04", hardware=["t4-1"])
        site = Site(lab, *TAGS)
        site.sh(FIRMWARE)
        run = site.play("--check", "-e", "nvidia_driver_source=ubuntu")
    finally:
        lab.down()
    assert run.rc == 0, run.output
    assert "Change packages" in run.changed
    for word in ("secure-boot", "mokutil", "console"):
        assert word not in run.output


def test_without_a_hash_the_node_is_refused_before_anything_changes(site: Site, bare: list[str]) -> None:
    run = site.play()
    assert run.rc != 0
    assert "- secure-boot: secure boot is on" in run.output
    assert run.recap["changed"] == 0
    assert site.snapshot() == bare


def test_check_mode_announces_the_staging(site: Site, bare: list[str]) -> None:
    run = site.play(*WITH_HASH, "--check", "-vvv")
    assert run.rc == 0, run.output
    assert STAGE in run.changed
    assert "Load kernel modules" not in run.changed
    assert WAITS in " ".join(run.output.split())
    assert HASH not in run.output
    assert site.snapshot() == bare
    assert variables(site) == set()


def test_the_key_is_staged_and_no_module_is_loaded(site: Site, staged: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert STAGE in staged.changed
    assert f"a reboot is pending: {WAITS}" in " ".join(staged.output.split())
    assert HASH not in staged.output
    assert variables(site) == {"MokNew", "MokAuth"}
    assert "DKMS module signing key" in site.sh("mokutil --list-new")
    assert site.sh(LOADED) == ""
    findings = driver_findings(site, capfd)
    assert findings["driver.signed"] == ("pass", "the module is signed")
    assert findings["driver.module-loaded"][0] == "fail"
    assert "its key may not be enrolled" in findings["driver.module-loaded"][1]


def test_a_second_run_changes_nothing_and_calls_for_the_reboot_until_there_was_one(site: Site, staged: Run) -> None:
    before = site.snapshot()
    run = site.play(*WITH_HASH)
    assert run.rc == 0, run.output
    assert run.recap["changed"] == 0, run.changed
    assert f"a reboot is pending: {WAITS}" in " ".join(run.output.split())
    assert site.snapshot() == before
    # The lab's nodes have the host's kernel, and its boot.
    site.sh(f"mv {BOOT} /root/ && echo another > {BOOT}")
    run = site.play(*WITH_HASH)
    site.sh(f"mv /root/key-staged {BOOT}")
    assert WAITS in " ".join(run.output.split())
    assert "a reboot is pending:" not in run.output
    assert site.sh(LOADED) == ""


def test_a_hash_that_mokutil_rejects_is_reported_without_it(site: Site, staged: Run) -> None:
    site.sh(f"cp -a {VARIABLES} /root/variables && mokutil --revoke-import")
    bad = "grub.pbkdf2.sha512.10000.ABCD.EF01"
    run = site.play("-v", "-e", json.dumps({"nvidia_driver_mok_hash": bad}))
    assert run.rc != 0
    assert "mokutil --generate-hash" in run.output
    assert "Failed to read hash" in run.output
    assert bad not in run.output
    assert variables(site) == set()
    site.sh(f"cp -a /root/variables/. {VARIABLES}/")


def test_once_the_key_is_enrolled_the_module_is_loaded_and_validate_is_content(
    site: Site, staged: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    site.sh(ENROL)
    run = site.play()
    assert run.rc == 0, run.output
    assert "Load kernel modules" in run.changed
    assert WAITS not in " ".join(run.output.split())
    assert "NVRM version" in site.sh(LOADED)
    findings = driver_findings(site, capfd)
    assert findings["driver.signed"] == ("pass", "the module is signed")
    assert findings["driver.module-loaded"][0] == "pass"
    assert "fail" not in {status for status, _ in findings.values()}, findings
    assert site.play(*WITH_HASH).recap["changed"] == 0
