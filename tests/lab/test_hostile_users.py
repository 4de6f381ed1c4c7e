"""Users with a shell on a node during runs of site.yml: links, pipes, swaps and locks stop, mislead and reveal nothing.

The tests of this file share one node and run in their order. GPUNODE_TEST_ALL=1 adds rounds; GPUNODE_TEST_SEED chooses
the swaps.
"""

import base64
import json
import os
import random
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from effort import effort
from hostile_user import KINDS
from playbook_runs import WITHOUT_GPU, Run, Site

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3000)]
CONCERNS = ("plugins/module_utils/", "plugins/modules/", "roles/accounts/", "roles/storage/")

SEED = int(os.environ.get("GPUNODE_TEST_SEED", "12"))
RUN_S = 600
"""Within this time each run has to end."""
PROGRAM = "/usr/local/lib/hostile_user.py"
SECRETS, LOGS = "/root/drill", "/root/drill-logs"
SECRET, OWN = f"drill-secret-{secrets.token_hex(8)}", f"drill-own-{secrets.token_hex(8)}"
"""Text that only root, or only the user trent, may read; and text of the hostile users."""
UNMANAGED, MANAGED, ADMIN, OTHER = "mallory", "eve", "grace", "trent"
AS = "setpriv --reuid {0} --regid {0} --clear-groups"
OTHERS_KEYS = f"/home/{OTHER}/.ssh/authorized_keys"
TARGETS = [SECRETS, f"{SECRETS}/folder", f"{SECRETS}/secret", OTHERS_KEYS, "/etc/shadow", "/dev/zero"]
STATIC = {
    "ulink": f"ln -s {SECRETS}/secret .ssh/authorized_keys",
    "uother": f"ln -s /home/{OTHER}/.ssh/authorized_keys .ssh/authorized_keys",
    "udangling": "ln -s none .ssh/authorized_keys",
    "upipe": "mkfifo .ssh/authorized_keys",
    "udirectory": "mkdir .ssh/authorized_keys",
    "usparse": "truncate -s 2G .ssh/authorized_keys",
    "uclosed": "touch .ssh/authorized_keys; chmod 0 .ssh/authorized_keys",
    "ubytes": r"printf '\377\376' > .ssh/authorized_keys",
    "ufolder": f"rmdir .ssh; ln -s {SECRETS} .ssh",
    "ufolderpipe": "rmdir .ssh; mkfifo .ssh",
    "usocket": "python3 -Ic 'import socket; socket.socket(socket.AF_UNIX).bind(\".ssh/authorized_keys\")'",
}
"""Managed users, and what each puts at its keys."""
CACHE = "/scratch/cache"
SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/scratch")
SETTINGS: dict[str, Any] = {
    **WITHOUT_GPU,
    "accounts_state": "present",
    "accounts_sudo": "none",
    "ssh_hardening_state": "present",
    "storage_state": "present",
    "storage_mounts": [{"path": "/data", "type": "s3fs", "source": "bucket", "cache": CACHE}],
}
ROLES = ["kernel_tuning", "accounts", "storage", "docker", "ml_environment", "updates", "ssh_hardening"]
FOREIGN = f"""
find {SECRETS} /home/{OTHER} -printf '%p %y %m %U %G %n %s %C@ %l\\n' | sort
find {SECRETS} /home/{OTHER} -type f -print0 | sort -z | xargs -0 sha256sum
"""
WRITTEN = f"""
find /home/{UNMANAGED} ! -user {UNMANAGED}
find /home/{MANAGED} ! -user {MANAGED}
find {" ".join(SHARED)} -mindepth 1 ! -user {UNMANAGED} ! -user {MANAGED} ! -path '{CACHE}*' ! -path '*systemd-private*'
find / -xdev -name '*.gpunode'
"""
"""What root wrote in folders of users, and drafts."""
COPIES = r"""
find / /run /tmp /dev/shm -xdev -type f -size -8M -print0 | xargs -0 grep -lF -e "$TEXT" || true
journalctl --no-pager --all --output export | grep -aF -e "$TEXT" || true
"""


def key(number: int, name: str) -> str:
    """A line of authorized_keys with a key that nobody has."""
    blob = b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + random.Random(number).randbytes(32)  # noqa: S311 - no secret
    return f"ssh-ed25519 {base64.b64encode(blob).decode()} {name}"


class Drill(Site):
    """The node, its users, and site.yml run while they swap."""

    before: str
    written: str

    def put(self, path: str, text: str) -> None:
        """Write a file; its text is in no command line."""
        done = self.node.run(["sh", "-c", f'printf %s "$TEXT" > {path}'], env={"TEXT": text})
        assert done.returncode == 0, done.stderr

    def provision(self, *roles: str, **variables: Any) -> Run:
        extra_vars = {**SETTINGS, "gpunode_roles": [*roles], **variables}
        # A container cannot mount on demand: the mount is configured and not started.
        tags = ",".join([*roles, "storage_install", "storage_configure"]).replace("storage,", "")
        return self.play("-v", "--tags", tags, "-e", json.dumps(extra_vars), limit_s=RUN_S)

    @contextmanager
    def hostile(self, user: str, seed: int, paths: list[str], kinds: Sequence[str] = KINDS) -> Iterator[None]:
        """Let a user swap these paths, in a process group that ends with the block."""
        order = {
            "seed": seed,
            "paths": paths,
            "kinds": list(kinds),
            "targets": TARGETS,
            "text": f"{key(seed, user)} {OWN}\n",
            "secret": SECRET.rpartition("-")[0],
            "limit_s": 2 * RUN_S,
        }
        log = f"{LOGS}/{user}"
        self.put(f"{log}.json", json.dumps(order))
        started = f"cd /; setsid {AS.format(user)} python3 -I {PROGRAM} < {log}.json > {log} 2>&1 & echo $!"
        group = self.sh(started).strip()
        try:
            yield
            ended = self.sh(f"test -d /proc/{group} && echo runs || tail -5 {log}")
            assert ended == "runs\n", ended
        finally:
            self.sh(f"kill -KILL -- -{group}")
        printed = self.sh(f"cat {log}").splitlines()
        assert not [line for line in printed if not line.isdigit()], printed
        assert int(printed[-1]) > 100, "too few swaps to prove anything"

    def unharmed(self, run: Run) -> None:
        """Nothing leaked, nothing foreign was written."""
        assert SECRET not in run.output
        assert OWN not in run.output
        assert self.sh(FOREIGN) == self.before
        assert self.sh(WRITTEN) == self.written
        assert self.copies(SECRET) == {f"{SECRETS}/secret", OTHERS_KEYS}
        assert {path for path in self.copies(OWN) if not path.startswith(("/home/", LOGS, *SHARED))} == set()

    def copies(self, text: str) -> set[str]:
        """Files of the node and lines of its journal with a text."""
        done = self.node.run(["bash", "-euc", COPIES], env={"TEXT": text}, timeout_s=120)
        assert done.returncode == 0, done.stderr
        return set(done.stdout.splitlines())


def named(run: Run, paths: list[str]) -> list[str]:
    """Lines of the output that name one of these paths and what is wrong with it."""
    reasons = r"link|pipe|socket|directory|UTF-8|larger|belongs|another user|not a file|Permission|No such|changed by"
    return [
        line for line in run.output.splitlines() if re.search(reasons, line) and any(path in line for path in paths)
    ]


@pytest.fixture(scope="module")
def drill(lab: Lab) -> Drill:
    lab.up(1, "debian-12")
    drill = Drill(lab)
    for name in (UNMANAGED, MANAGED, ADMIN, OTHER, *STATIC):
        drill.sh(f"useradd --create-home --user-group --shell /bin/bash {name}")
        drill.sh(f"install -d -m 0700 -o {name} -g {name} /home/{name}/.ssh; chmod 0700 /home/{name}")
    drill.sh(f"install -d -m 0700 {SECRETS} {LOGS}; install -d -m 1777 /scratch; touch /dev/autofs")
    drill.put(PROGRAM, Path(__file__).with_name("hostile_user.py").read_text(encoding="utf-8"))
    drill.sh(f"install -d -m 0755 {SECRETS}/folder")
    drill.put(f"{SECRETS}/secret", f"{key(1, SECRET)}\n")
    drill.put(OTHERS_KEYS, f"{key(2, SECRET)}\n")
    drill.sh(f"chmod 0600 {SECRETS}/secret; chown {OTHER}: /home/{OTHER}/.ssh/authorized_keys")
    drill.sh(f"chmod 0600 /home/{OTHER}/.ssh/authorized_keys")
    drill.before, drill.written = drill.sh(FOREIGN), drill.sh(WRITTEN)
    return drill


def swapped(user: str, *more: str) -> list[str]:
    """What a user swaps: the keys most often, other files of the home, names in shared folders."""
    home = f"/home/{user}"
    keys = [f"{home}/.ssh", *[f"{home}/.ssh/authorized_keys"] * 4, f"{home}/.ssh/authorized_keys2"]
    files = (".ssh/config", ".ssh/id_ed25519", ".ssh/id_ed25519.pub", ".nccl.conf", ".bashrc", ".config", ".docker")
    names = [f"{folder}/{name}" for folder in SHARED[:3] for name in ("gpunode", "ansible", ".ansible", "nccl.conf")]
    return [*keys, *(f"{home}/{file}" for file in files), *names, *more]


def test_users_that_no_role_manages_stop_nothing(drill: Drill) -> None:
    drill.sh(f"install -d -m 0700 {CACHE}")
    admins = [{"name": ADMIN, "keys": [key(3, ADMIN)]}]
    with (
        drill.hostile(UNMANAGED, SEED, swapped(UNMANAGED, CACHE)),
        drill.hostile(MANAGED, SEED + 1, swapped(MANAGED)),
    ):
        began = time.monotonic()
        run = drill.provision(*ROLES, accounts_admins=admins)
        print(f"{time.monotonic() - began:.0f} s, {run.recap}")
    assert run.rc == 0, run.output
    drill.unharmed(run)
    assert drill.sh(f"cat /home/{ADMIN}/.ssh/authorized_keys") == f"{key(3, ADMIN)}\n"
    assert drill.sh("docker info --format '{{.LiveRestoreEnabled}}'") == "true\n"


def test_each_obstacle_of_managed_users_is_named(drill: Drill) -> None:
    for name, obstacle in STATIC.items():
        drill.sh(f"cd /home/{name}; {AS.format(name)} sh -euc {shlex.quote(obstacle)}")
    before = drill.snapshot()
    run = drill.provision("accounts", accounts_admins=[{"name": name, "keys": [key(4, name)]} for name in STATIC])
    assert run.rc != 0
    for name in STATIC:
        assert named(run, [f"/home/{name}/.ssh"]), f"{name}\n{run.output}"
    assert drill.snapshot() == before
    drill.unharmed(run)


@pytest.mark.parametrize("obstacle", [f"ln -s {SECRETS}/folder", "ln -s none", "mkfifo", "mkdir", "touch"])
def test_an_obstacle_at_a_cache_is_named(drill: Drill, obstacle: str) -> None:
    drill.sh(f"rm -rf {CACHE}; {AS.format(UNMANAGED)} {obstacle} {CACHE}")
    run = drill.provision("storage")
    assert run.rc != 0
    assert named(run, [CACHE]), run.output
    drill.unharmed(run)


def test_whoever_swaps_during_a_run_stops_the_role_at_most_and_is_named(drill: Drill) -> None:
    drill.sh(f"rm -rf {CACHE}")
    source, outcomes = random.Random(SEED), []  # noqa: S311 - no secret
    for number in range(effort(4, 20)):
        seed = source.randrange(1 << 30)
        caches = source.sample(KINDS, 2)
        with (
            drill.hostile(MANAGED, seed, swapped(MANAGED), ["text", *source.sample(KINDS, 3)]),
            drill.hostile(UNMANAGED, seed + 1, [*swapped(UNMANAGED), *[CACHE] * 10], ["nothing", "link", *caches]),
        ):
            run = drill.provision(
                *(["accounts"], ["storage"], ["accounts", "ssh_hardening"])[number % 3],
                accounts_admins=[{"name": name, "keys": [key(10 + number, name)]} for name in (ADMIN, MANAGED)],
                ssh_hardening_admin_users=[ADMIN, *([MANAGED] if number % 2 else [])],
                ssh_hardening_banner=f"round {number}",
            )
        lines = named(run, [f"/home/{MANAGED}", CACHE])
        outcomes.append(f"rc {run.rc}: {lines[0] if lines else ''}")
        assert run.rc == 0 or lines, run.output
        assert run.recap["unreachable"] == 0
        drill.unharmed(run)
    print("\n".join(outcomes))


def test_when_they_stop_a_run_succeeds(drill: Drill) -> None:
    for user in (UNMANAGED, MANAGED):
        drill.sh(f"find /home/{user} {' '.join(SHARED)} -mindepth 1 -user {user} -delete")
    admins = [{"name": name, "keys": [key(5, name)]} for name in (ADMIN, MANAGED)]
    run = drill.provision(*ROLES, accounts_admins=admins, ssh_hardening_admin_users=[ADMIN, MANAGED])
    assert run.rc == 0, run.output
    drill.unharmed(run)
    assert key(5, MANAGED) in drill.sh(f"cat /home/{MANAGED}/.ssh/authorized_keys")
    assert drill.sh(f"stat -c '%U %a' {CACHE}") == "root 700\n"
    assert drill.sh("ls /run/gpunode | grep revert || true") == ""
