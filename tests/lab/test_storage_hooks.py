"""Hooks of the role storage on a lab node: the checks know what they mount; a second run has nothing pending."""

import json
from pathlib import Path
from typing import Any

import pytest
from docker_plays import Roles
from playbook_runs import ROOT, WITHOUT_GPU, Run, Site
from programs import beside_python, run_program

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("roles/storage/", "contrib/storage/", "gpunode/checks/host_health")

EXAMPLE = ROOT / "contrib" / "storage" / "lustre.yml"
FOLDER, COUNT = "/shared", "/root/hook-runs"
# A file system that needs no server; the hook makes it as one for Lustre would.
HOOK = f"""\
- name: Count this run
  ansible.builtin.shell: echo ran >> {COUNT}
  become: true
  changed_when: true

- name: Create the mount point
  ansible.builtin.file:
    path: {FOLDER}
    state: directory
    mode: "0755"
  become: true

- name: Mount it
  ansible.builtin.shell: |
    mountpoint -q {FOLDER} && umount {FOLDER}
    mount -t tmpfs -o size={{{{ storage_hook_vars.size }}}} store {FOLDER}
  become: true
  changed_when: true
"""


LUSTRE = "10.0.0.1@o2ib:/train"
# Debian has no client for Lustre: a package with its name and a mount helper that mounts another file system.
CLIENT = f"""\
mkdir -p /srv/client/DEBIAN /srv/client/sbin /srv/packages
cat > /srv/client/sbin/mount.lustre <<'END'
#!/bin/sh
test "$1" = {LUSTRE} && exec mount -i -t tmpfs -o size=8m "$1" "$2"
END
chmod 755 /srv/client/sbin/mount.lustre
cat > /srv/client/DEBIAN/control <<'END'
Package: lustre-client
Version: 1
Architecture: all
Maintainer: gpunode's tests <nobody@localhost>
Description: stand-in for a client of Lustre
END
dpkg-deb --build /srv/client /srv/packages/lustre-client.deb
cd /srv/packages
{{ cat /srv/client/DEBIAN/control; echo Filename: ./lustre-client.deb
   echo Size: $(stat -c %s lustre-client.deb)
   echo SHA256: $(sha256sum < lustre-client.deb | cut -d' ' -f1); }} > Packages
chmod -R a+rX /srv/packages
echo 'deb [trusted=yes] file:/srv/packages ./' > /etc/apt/sources.list.d/client.list
apt-get update -q
mknod /dev/autofs c 10 235
systemctl daemon-reexec
"""


class Hooked:
    """The node, its hook, and the play of the role."""

    def __init__(self, lab: Lab, folder: Path, hook: str, **variables: Any) -> None:
        self.lab, self.folder = lab, folder
        self.hook = folder / "hook.yml"
        self.hook.write_text(hook)
        self.site = Site(lab)
        self.roles = Roles(self.site, folder, "storage")
        self.variables = {
            **WITHOUT_GPU,
            "storage_state": "present",
            "storage_hooks": [str(self.hook)],
            **{f"storage_{name}": value for name, value in variables.items()},
        }

    def play(self, *options: str) -> Run:
        return self.roles.done("-e", json.dumps(self.variables), *options)

    def runs(self) -> int:
        """How often the hook ran on the node."""
        return len(self.site.sh(f"cat {COUNT} 2>/dev/null || true").split())

    def remote_data(self) -> dict[str, str]:
        """Component to status, of ``host.remote-data``."""
        argv = [beside_python("gpunode"), "validate", "-i", self.lab.inventory_path, "--select", "host.remote-data"]
        done = run_program([*argv, "--format", "json"], limit_s=120)
        findings = json.loads(done.stdout)["nodes"][0]["findings"]
        return {finding["component"]: finding["status"] for finding in findings}


@pytest.fixture(scope="module")
def hooked(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Hooked:
    lab.up(1, "debian-12")
    return Hooked(
        lab,
        tmp_path_factory.mktemp("hooks"),
        HOOK,
        hook_vars={"size": "8m"},
        hook_mounts=[{"path": FOLDER, "type": "tmpfs", "source": "store"}],
    )


@pytest.fixture(scope="module")
def done(hooked: Hooked) -> Run:
    assert hooked.remote_data() == {"node": "skip"}
    assert hooked.play("--check").recap["changed"] > 0
    assert hooked.runs() == 0
    return hooked.play()


def test_what_a_hook_mounts_is_known_to_the_checks(hooked: Hooked, done: Run) -> None:
    assert hooked.runs() == 1
    assert hooked.remote_data() == {FOLDER: "pass"}


def test_a_second_run_has_nothing_pending(hooked: Hooked, done: Run) -> None:
    again = hooked.play()
    assert again.changed == {}
    assert again.recap["changed"] == 0
    assert "Run hooks" not in again.output
    assert hooked.runs() == 1


def test_a_mount_that_is_gone_is_a_failure_and_the_hook_repairs_it(hooked: Hooked, done: Run) -> None:
    before = hooked.runs()
    hooked.site.sh(f"umount {FOLDER}")
    assert hooked.remote_data() == {FOLDER: "fail"}
    assert hooked.play().recap["changed"] > 0
    assert hooked.runs() == before + 1
    assert hooked.remote_data() == {FOLDER: "pass"}
    assert hooked.play().recap["changed"] == 0


def test_a_change_of_the_hook_or_of_its_variables_runs_it_once(hooked: Hooked, done: Run) -> None:
    for change in (
        lambda: hooked.hook.write_text(HOOK + "# another file\n"),
        lambda: hooked.variables.update(storage_hook_vars={"size": "9m"}),
    ):
        before = hooked.runs()
        change()
        hooked.play()
        assert hooked.runs() == before + 1
        assert hooked.play().recap["changed"] == 0
        assert hooked.runs() == before + 1


def test_the_example_for_lustre_mounts_at_the_first_access(hooked: Hooked, done: Run, tmp_path: Path) -> None:
    """The hook as it is, real systemd and autofs; the client is a stand-in."""
    hooked.site.sh(CLIENT)
    variables = {"lustre_source": LUSTRE, "lustre_path": "/lustre", "lustre_packages": ["lustre-client"]}
    mounts = [{"path": "/lustre", "type": "lustre", "source": LUSTRE}]
    lustre = Hooked(hooked.lab, tmp_path, EXAMPLE.read_text(), hook_vars=variables, hook_mounts=mounts)
    lustre.play("--check")
    assert "lustre-client" not in {line.split()[0] for line in hooked.site.packages()}
    lustre.play()
    at_rest = hooked.site.sh("grep ' /lustre ' /proc/mounts").splitlines()
    assert [line.split()[2] for line in at_rest] == ["autofs"]
    assert lustre.remote_data() == {"/lustre": "pass"}
    assert hooked.site.sh("grep ' /lustre ' /proc/mounts").splitlines()[-1].split()[0] == LUSTRE
    again = lustre.play()
    assert again.recap["changed"] == 0
    assert "Run hooks" not in again.output
