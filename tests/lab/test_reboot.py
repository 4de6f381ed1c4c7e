"""The hooks of the owner around a change of the driver and around a reboot, and a run that goes on after the reboot.

The tests of this file share one node with a simulated GPU and run in their order. The hooks write on the node, beside
what they are called, which boot it was and which module was loaded.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playbook_runs import Run, Site

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("playbooks/", "plugins/", "gpunode/provisioning/service", "roles/nvidia_driver/")

FIRST, SECOND = "580.95.05", "580.178.04"
HOOK = """\
- name: Write that the hook ran
  ansible.builtin.shell: |
    module=$(grep -o -m 1 '[0-9]*[.][0-9]*[.][0-9]*' /proc/driver/nvidia/version || echo none)
    echo "{word} $(cat /proc/sys/kernel/random/boot_id) $module" >> /root/hooks
  become: true
  changed_when: false
"""
LOG = "cat /root/hooks 2>/dev/null || true"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    lab = Lab(f"test-reboot-{os.getpid()}")
    folder: Path = tmp_path_factory.mktemp("hooks")
    hooks = []
    for word in ("drain", "undrain"):
        file = folder / f"{word}.yml"
        file.write_text(HOOK.replace("{word}", word), encoding="utf-8")
        hooks += ["-e", f"gpunode_{word}_tasks={file}"]
    try:
        lab.up(1, "debian-12", "t4-1")
        yield Site(lab, *hooks, "-e", '{"gpunode_roles": ["nvidia_repository", "nvidia_driver"]}')
    finally:
        lab.down()


def called(site: Site) -> list[list[str]]:
    """What the hooks wrote since this was asked before: word, boot and module of each."""
    rows = [line.split() for line in site.sh(LOG).splitlines()]
    site.sh("rm -f /root/hooks")
    return rows


def boot(site: Site) -> str:
    return site.sh("cat /proc/sys/kernel/random/boot_id").strip()


def done(site: Site, *arguments: str) -> Run:
    run = site.play(*arguments)
    assert run.rc == 0, run.output[-4000:]
    return run


def test_check_mode_drains_nothing(site: Site) -> None:
    done(site, "--check", "-e", f"nvidia_driver_version={FIRST}")
    assert called(site) == []


def test_the_node_is_drained_while_its_driver_changes_and_returned_after_it(site: Site) -> None:
    now = boot(site)
    run = done(site, "-e", f"nvidia_driver_version={FIRST}")
    assert "Load kernel modules" in run.changed
    assert called(site) == [["drain", now, "none"], ["undrain", now, FIRST]]


def test_a_settled_node_is_not_drained(site: Site) -> None:
    run = done(site, "-e", f"nvidia_driver_version={FIRST}")
    assert run.recap["changed"] == 0
    assert called(site) == []


def test_a_node_with_a_reboot_that_nobody_allowed_stays_drained(site: Site) -> None:
    now = boot(site)
    run = done(site, "-e", f"nvidia_driver_version={SECOND}")
    assert "a reboot is pending: module " + FIRST in " ".join(run.output.split())
    assert "(gpunode_reboot: never)" in run.output
    assert "the node stays drained" in run.output
    assert called(site) == [["drain", now, FIRST]]
    assert boot(site) == now
    done(site, "-e", f"nvidia_driver_version={SECOND}")
    assert called(site) == []


def test_a_reboot_is_before_the_return_of_a_node_that_an_earlier_run_drained(site: Site) -> None:
    before = boot(site)
    run = done(site, "-e", f"nvidia_driver_version={SECOND}", "-e", "gpunode_reboot=when_needed")
    after = boot(site)
    assert after != before
    assert "Reboot" in run.changed
    assert called(site) == [["undrain", after, SECOND]]
    assert "TASK [Print the findings]" in run.output
    assert "pass driver.module-loaded" in run.output
    assert site.sh("ls /var/lib/gpunode/drained.json 2>&1 || true").startswith("ls: cannot access")
    settled = done(site, "-e", f"nvidia_driver_version={SECOND}", "-e", "gpunode_reboot=when_needed")
    assert settled.recap["changed"] == 0
    assert called(site) == []
    assert boot(site) == after


def test_a_node_stays_drained_if_its_run_fails_after_the_reboot(site: Site) -> None:
    before = boot(site)
    reason = ("-e", "gpunode_reboot_required=set-by-a-test", "-e", "gpunode_reboot=when_needed")
    expected = '{"gpunode_expect": {"gpus": 8}}'
    run = site.play("-e", f"nvidia_driver_version={SECOND}", *reason, "-e", expected)
    assert run.rc != 0
    assert "8" in run.output.rpartition("Fail if a check failed")[2]
    assert called(site) == [["drain", before, SECOND]]
    assert boot(site) != before
    # The next run without that expectation proves the node and returns it.
    done(site, "-e", f"nvidia_driver_version={SECOND}")
    assert called(site) == [["undrain", boot(site), SECOND]]
