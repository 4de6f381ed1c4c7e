"""A settled node stays as it is, each damage is repaired alone, and a run that is killed is finished by the next one.

One node with a simulated GPU gets everything once; the tests of this file share it.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playbook_runs import ROOT, Run, Site, yaml_list

from gpunode.content import ansible_environment
from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3600)]
CONCERNS = ("plugins/", "playbooks/", "gpunode/provisioning/")

KILLS = int(os.environ.get("GPUNODE_TEST_KILLS", "4"))
"""How many moments; GPUNODE_TEST_KILLS=10 is the whole drill."""
SMALL = ("-e", '{"gpunode_roles": ["nvidia_repository", "dcgm", "docker", "nvidia_container_toolkit"]}')
DRIVERS_DAEMONS = {"nvidia-persistenced.service", "nvidia-dcgm.service"}
HARM = """
export DEBIAN_FRONTEND=noninteractive
GONE="docker.io containerd runc datacenter-gpu-manager* nvidia-container-toolkit* libnvidia-container*"
set -f
apt-get purge -y -q --allow-change-held-packages $GONE >/dev/null
set +f
find /etc/apt/*.list.d /etc/apt/preferences.d -name 'gpunode-*' ! -name '*driver*' ! -name 'gpunode-cuda*' -delete
rm -f /etc/docker/daemon.json
"""
USABLE = """
test ! -e /usr/sbin/policy-rc.d
test ! -e /var/lib/gpunode/transaction
test -z "$(dpkg --audit)"
apt-get check -qq
systemctl is-active --quiet ssh
test -z "$(find /etc /var/lib/gpunode -name '*.gpunode' -o -name '*.new')"
"""
LEFT = "ls /usr/sbin/policy-rc.d /var/lib/gpunode/transaction 2>/dev/null || true; dpkg --audit | head -c 300"
# With pipelining a module is a Python that reads its program; not this shell itself, which has it among its arguments.
ON_NODE = "for one in '-f ^/usr/bin/python3.?$' '-x apt-get' '-x dpkg'; do pkill -KILL $one || true; done"


@dataclass
class First:
    """The bare node, what check mode announced of it, and the first run."""

    before: dict[str, str]
    announced: Run
    done: Run


@pytest.fixture(scope="module")
def lab_site() -> Iterator[Site]:
    lab = Lab(f"test-converge-{os.getpid()}")
    try:
        lab.up(1, "debian-12", "t4-1")
        yield Site(lab, "-e", "gpunode_reboot=when_needed")
    finally:
        lab.down()


@pytest.fixture(scope="module")
def first(lab_site: Site) -> First:
    before, snapshot = versions(lab_site), lab_site.snapshot()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANSIBLE_DISPLAY_OK_HOSTS", "no")  # as gpunode provision --check does
        announced = lab_site.play("--check")
    assert announced.rc == 0, announced.output
    assert lab_site.snapshot() == snapshot
    done = lab_site.play()
    assert done.rc == 0, done.output
    return First(before, announced, done)


@pytest.fixture(scope="module")
def site(lab_site: Site, first: First) -> Site:
    """The node when everything is there."""
    assert first.done.rc == 0
    return lab_site


def versions(site: Site) -> dict[str, str]:
    return dict(line.split()[:2] for line in site.packages() if line.endswith(" installed"))


def unit_lines(run: Run, word: str) -> set[str]:
    return set(re.findall(rf"(?m)^{word} (\S+\.(?:service|path))$", run.output))


def test_check_mode_announces_on_a_page_what_the_first_run_then_does(lab_site: Site, first: First) -> None:
    announced, done = first.announced, first.done
    new_packages = {f"{name}={at}" for name, at in versions(lab_site).items() if first.before.get(name) != at}
    assert new_packages == yaml_list(announced.output, "install")
    assert lab_site.held() == yaml_list(announced.output, "hold")
    # Scripts of the packages enable some of them: what was announced is so afterwards, and the run does nothing besides
    # but for the daemons of a driver that is loaded by then.
    assert unit_lines(announced, "enable") >= {"nvidia-dcgm.service", "docker.service"}
    lab_site.sh("systemctl is-enabled " + " ".join(unit_lines(announced, "enable")))
    lab_site.sh("systemctl is-active " + " ".join(unit_lines(announced, "start")))
    assert unit_lines(done, "enable") <= unit_lines(announced, "enable")
    assert unit_lines(done, "start") <= unit_lines(announced, "start") | DRIVERS_DAEMONS
    # What the daemons get after the change goes by what they then know; nothing else is written in addition.
    assert {path for path in done.paths if not path.startswith("/run/")} == announced.paths
    # Two roles write daemon.json: the announcement of the second is what is there in the end.
    last = re.findall(r"(?m)^\+\+\+ after: /etc/docker/daemon\.json\n@@ .*\n((?:\+.*\n)+)", announced.output)[-1]
    assert re.sub(r"(?m)^\+", "", last) == lab_site.sh("cat /etc/docker/daemon.json")
    # A page for a person: no key in base64, no task that is settled or skipped.
    assert "BEGIN PGP" not in announced.output
    assert not re.search(r"(?m)^(ok|skipping): ", announced.output)
    assert len(announced.output.splitlines()) < 550


def test_a_second_run_changes_nothing(site: Site) -> None:
    before = site.snapshot()
    run = site.play()
    assert run.rc == 0, run.output
    assert run.recap["changed"] == 0
    assert site.snapshot() == before


def test_changes_that_are_forced_on_a_settled_node_change_nothing(site: Site) -> None:
    before = site.snapshot()
    run = site.play("-e", "gpunode_force=true")
    assert run.rc == 0, run.output
    assert run.changed == {}
    assert run.recap["changed"] == 0
    assert site.snapshot() == before


def own_files(site: Site) -> list[str]:
    """Files in /etc that are the roles' alone."""
    paths = site.sh("find /etc -xdev -type f -path '*gpunode*' ! -name '*gpunode-lab*' ! -name 'lab-*' | sort").split()
    return [path for path in paths if not path.endswith(".before-gpunode")]


def test_each_file_is_repaired_whatever_happened_to_it_and_nothing_else(site: Site) -> None:
    before, paths = site.snapshot(), own_files(site)
    assert len(paths) > 5
    harms = ("echo damaged >> {}", "chmod 0666 {}", "chown daemon {}", "rm {}")
    site.sh("\n".join(harms[number % len(harms)].format(path) for number, path in enumerate(paths)))
    announced = site.play("--check", "--diff")
    assert announced.paths >= set(paths), announced.output
    run = site.play("--diff")
    assert run.rc == 0, run.output
    assert run.paths >= set(paths)
    assert {path for path in run.paths if path.startswith("/etc/")} == set(paths)
    assert site.snapshot() == before
    assert site.play().recap["changed"] == 0


@dataclass
class Killed:
    """A run that did not end by itself."""

    after_s: float
    on_node: bool


def killed(site: Site, after_s: float, *, on_node: bool) -> None:
    """Begin a run and kill it: Ansible with all its workers, or what it started on the node."""
    program = sys.executable.rpartition("/")[0] + "/ansible-playbook"
    argv = [program, "-i", str(site.lab.inventory_path), str(ROOT / "playbooks" / "site.yml"), *SMALL]
    with subprocess.Popen(
        argv,
        cwd=ROOT,
        env={**ansible_environment(), "ANSIBLE_NOCOLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as run:
        time.sleep(after_s)
        if on_node:
            site.sh(ON_NODE)
        os.killpg(run.pid, signal.SIGKILL)


def healed(site: Site, *arguments: str) -> Run:
    """The run that follows; another package manager that still works is waited for."""
    return site.play(*SMALL, *arguments)


def test_a_run_that_is_killed_at_any_moment_is_finished_by_the_next(site: Site) -> None:
    before = site.snapshot()
    site.sh(HARM)
    began = time.monotonic()
    run = healed(site)
    took = time.monotonic() - began
    assert run.rc == 0, run.output
    assert site.snapshot() == before
    moments = random.Random(os.environ.get("GPUNODE_TEST_SEED", "12"))  # noqa: S311 - no secret
    for number in range(KILLS):
        moment = Killed(moments.uniform(0.1, 0.95) * took, on_node=bool(number % 2))
        site.sh(HARM)
        killed(site, moment.after_s, on_node=moment.on_node)
        left = site.sh(LEFT)
        run = healed(site)
        assert run.rc == 0, f"{moment}\n{run.output}"
        site.sh(USABLE)
        assert site.snapshot() == before, moment
        assert healed(site).recap["changed"] == 0, moment
        # Shown with -s: what each killed run left, so that a drill that only hit quiet moments is seen.
        print(f"killed after {moment.after_s:.0f} of {took:.0f} s, on the node: {moment.on_node}; left: {left.split()}")
