"""Slurm's own slurmd calls gpunode as prolog and health check on a simulated HGX node: time, drain, return.

The tests of this file share one node and run in their order: building the driver takes minutes.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_plays import Roles
from playbook_runs import Site
from programs import run_program
from slurm_conf import PROGRAM, PROLOG, slurm_conf

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]
CONCERNS = ("gpunode/checks/", "gpunode/probe/", "gpunode/onnode/probe", "roles/slurm_node/files/")

ROOT = Path(__file__).parents[2]
DRIVER = "580.95.05"
PACKAGES = "munge slurmctld slurmd slurm-client"
BUDGET = 60
"""Of the prolog: a machine that builds and tests beside it is slow."""
SETTINGS = f"GPUNODE_BUDGET={BUDGET}s\n"


def archive(folder: Path) -> Path:
    """gpunode as one file, for the node's Python."""
    out = folder / "gpunode.pyz"
    argv = [sys.executable, "-m", "gpunode", "zipapp", str(out), "--python", "3.11"]
    done = run_program(argv, limit_s=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


def put(site: Site, path: Path, target: str) -> None:
    config = str(site.lab.inventory_path.parent / "ssh_config")
    copy = ["scp", "-q", "-F", config, str(path), f"{site.node.name}:/tmp/{path.name}"]
    subprocess.run(copy, check=True, timeout=120, stdin=subprocess.DEVNULL)
    site.sh(f"install -D -m 755 /tmp/{path.name} {target}")


def install(site: Site, folder: Path) -> None:
    """Slurm of the distribution, gpunode as one file, and its prolog."""
    site.sh("apt-get update -q")
    site.sh(f"DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends {PACKAGES}")
    put(site, archive(folder), "/usr/local/bin/gpunode")
    put(site, ROOT / "roles" / "slurm_node" / "files" / "gpunode-prolog", PROGRAM)
    site.sh(f"printf '{SETTINGS}' > /etc/default/gpunode-prolog")
    settings = folder / "slurm.conf"
    node = {site.node.name: "CPUs=1 Gres=gpu:8"}
    settings.write_text(slurm_conf(site.node.name, node, GresTypes="gpu", **PROLOG), encoding="ascii")
    put(site, settings, "/etc/slurm/slurm.conf")
    site.sh("echo 'Name=gpu File=/dev/nvidia[0-7]' > /etc/slurm/gres.conf")
    site.sh("mkdir -p /var/spool/slurmctld /var/spool/slurmd; systemctl restart munge slurmctld slurmd")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A node with the driver, the fabric manager, Slurm and gpunode."""
    lab = Lab(f"test-slurm-{os.getpid()}")
    folder = tmp_path_factory.mktemp("slurm")
    try:
        lab.up(1, "debian-12", ["hgx-h100-8"])
        site = Site(lab)
        roles = Roles(site, folder, "nvidia_repository", "nvidia_driver", "nvidia_fabric")
        roles.done("-e", f"nvidia_driver_version={DRIVER}")
        install(site, folder)
        yield site
    finally:
        lab.down()


def state(site: Site) -> tuple[str, str]:
    """The node's state and reason as Slurm has them."""
    output = site.sh(f"scontrol show node {site.node.name}")
    reason = re.search(r"^ *Reason=(.*?)(?: \[.*)?$", output, re.MULTILINE)
    return re.findall(r"State=(\S+)", output)[0], reason[1] if reason else ""


def until(site: Site, expected: str, seconds: float = 120) -> tuple[str, str]:
    """Wait for a state; what it is at the end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and expected not in state(site)[0]:
        time.sleep(1)
    return state(site)


def line(site: Site) -> str:
    words = f"gpunode validate --on-node --budget {BUDGET}s --format slurm || true"
    return site.sh(words).strip()


def test_the_time_that_it_takes(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """Print a table; the figures are the machine's, the order of them is ours."""
    site.sh("gpunode --version")  # unpacks once
    names = ("probe started", "checks loaded", "probe ended", "verdict")
    rows = []
    for _ in range(5):
        output = site.sh(
            "start=$(date +%s.%N); gpunode validate --on-node --budget 60s --format json -v > /tmp/report.json "
            "2> /tmp/times || true; end=$(date +%s.%N); cat /tmp/times; echo $start $end"
        )
        start, end = (float(text) for text in output.split()[-2:])
        rows.append(
            {name: float(re.findall(rf"{name} ([\d.]+) s", output)[0]) for name in names} | {"whole": end - start}
        )
    with capsys.disabled():
        print(f"\nseconds after the start, each run: {', '.join([*names, 'whole'])}")
        for row in rows:
            print("".join(f"{value:10.2f}" for value in row.values()))
    document = json.loads(site.sh("cat /tmp/report.json"))
    (node,) = document["nodes"]
    assert len(node["gpus"]) == 8
    assert not [finding for finding in node["findings"] if finding["message"].startswith("not run")]
    # Nothing but the probe is waited for: the checks are loaded while it looks.
    assert all(row["probe started"] < row["checks loaded"] for row in rows)


def test_a_job_runs_on_a_node_that_is_well(site: Site) -> None:
    assert not line(site).startswith(("drain", "unknown")), line(site)
    assert "IDLE" in until(site, "IDLE")[0]
    assert site.sh("timeout 100 srun -N1 hostname").strip() == site.node.name


def test_a_fault_drains_the_node_with_its_reason_and_the_job_does_not_run(site: Site) -> None:
    site.node.fault("pcie-narrow", "gpu3", width=4)
    try:
        expected = line(site)
        assert expected.startswith("drain: link.pcie-width gpu3: ")
        done = site.node.run(["bash", "-c", "timeout 100 srun -N1 --immediate=90 hostname"], timeout_s=120)
        assert done.stdout.strip() != site.node.name, done.stdout + done.stderr
        assert "DRAIN" in until(site, "DRAIN")[0]
        end = time.monotonic() + 120
        while (reason := state(site)[1]) == "Prolog error" and time.monotonic() < end:  # the health check names it
            time.sleep(2)
        assert reason == f"gpunode: {expected.removeprefix('drain: ')}"
    finally:
        site.node.heal("pcie-narrow", "gpu3")


def test_the_node_returns_once_it_is_well(site: Site) -> None:
    site.sh("scancel --user=root || true")
    end = time.monotonic() + 180
    while "DRAIN" in state(site)[0] and time.monotonic() < end:
        time.sleep(2)
    assert "DRAIN" not in state(site)[0], state(site)
    assert site.sh("timeout 100 srun -N1 hostname").strip() == site.node.name


def test_a_node_drained_for_another_reason_stays_drained(site: Site) -> None:
    site.sh(f"scontrol update nodename={site.node.name} state=drain reason='disk swap'")
    site.sh("/usr/local/sbin/gpunode-prolog || true")
    assert ("DRAIN" in state(site)[0], state(site)[1]) == (True, "disk swap")
    site.sh(f"scontrol update nodename={site.node.name} state=resume")
