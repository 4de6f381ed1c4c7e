"""The role accounts on a lab node: users, keys and rules, and a list of keys that locks the controller out.

The tests of this file share one node and run in their order.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playbook_runs import Run, Site

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]
CONCERNS = ("plugins/",)

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFlMQ4QIoLa0nhzL10xJLycLZUvclZ1U9Ui9YZwHN8u3 ada"
ADMINS = [{"name": "ada", "keys": [KEY]}, {"name": "operator"}]
PLAY = "- hosts: all\n  gather_facts: false\n  roles:\n    - gpunode.node.accounts\n"


class Accounts(Site):
    """A node and the role run on it."""

    file: Path

    def manage(self, *arguments: str, **variables: Any) -> Run:
        extra_vars = {"accounts_state": "present", "accounts_admins": ADMINS, **variables}
        return self.play("-e", json.dumps(extra_vars), *arguments, playbook=str(self.file))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accounts]:
    lab = Lab(f"test-accounts-{os.getpid()}")
    try:
        lab.up(1, "debian-12")
        site = Accounts(lab)
        site.file = tmp_path_factory.mktemp("plays") / "play.yml"
        site.file.write_text(PLAY, encoding="utf-8")
        yield site
    finally:
        lab.down()


@pytest.fixture(scope="module")
def managed(site: Accounts) -> Run:
    before = site.snapshot()
    announced = site.manage("--check")
    assert announced.rc == 0, announced.output
    assert site.snapshot() == before
    run = site.manage()
    assert run.rc == 0, run.output
    assert announced.paths == run.paths
    return run


def test_users_keys_and_rules_are_there(site: Accounts, managed: Run) -> None:
    assert site.sh("cat /home/ada/.ssh/authorized_keys").strip() == KEY
    assert site.sh("stat -c '%U %a' /home/ada/.ssh /home/ada/.ssh/authorized_keys").split() == [
        "ada",
        "700",
        "ada",
        "600",
    ]
    for name in ("ada", "operator"):
        assert site.sh(f"runuser -u {name} -- sudo -n id -u").strip() == "0"
        assert site.sh(f"passwd -S {name}").split()[1] == "L"


def test_a_second_run_changes_nothing(site: Accounts, managed: Run) -> None:
    before = site.snapshot()
    run = site.manage()
    assert (run.rc, run.changed) == (0, {}), run.output
    assert site.snapshot() == before


def test_a_list_of_keys_that_locks_the_controller_out_is_reverted(site: Accounts, managed: Run) -> None:
    before = site.sh("cat /home/admin/.ssh/authorized_keys")
    run = site.manage(accounts_admins=[{"name": "admin", "keys": [KEY]}], accounts_exclusive_keys=True)
    assert run.rc != 0
    words = " ".join(run.output.split())
    assert (
        "Restored: /home/admin/.ssh/authorized_keys" in words
        or "/etc/sudoers.d/zz-gpunode-admins, /home/admin" in words
    )
    assert site.sh("cat /home/admin/.ssh/authorized_keys") == before
    assert site.node.ssh(["sudo", "-n", "id", "-u"]).stdout.strip() == "0"


@pytest.mark.parametrize(
    ("admin", "reason"),
    [
        ({"name": "grace"}, "the user has no key"),
        ({"name": "grace", "keys": ["ssh-ed25519 AAAAC3NzaC1lZDI1 grace"]}, "damaged"),
        ({"name": "Grace Hopper", "keys": [KEY]}, "not a valid user name"),
    ],
)
def test_bad_input_is_refused_and_nothing_changes(
    site: Accounts, managed: Run, admin: dict[str, Any], reason: str
) -> None:
    before = site.snapshot()
    run = site.manage(accounts_admins=[*ADMINS, admin])
    assert run.rc != 0
    assert reason in " ".join(run.output.split())
    assert site.snapshot() == before


def test_absent_removes_rules_and_settings(site: Accounts, managed: Run) -> None:
    run = site.manage(accounts_state="absent")
    assert run.rc == 0, run.output
    assert "gpunode-a" not in site.sh("ls /etc/sudoers.d /etc/sysctl.d")
    assert site.manage(accounts_state="absent").changed == {}
