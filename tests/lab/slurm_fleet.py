"""A fleet in the lab as upgrades meet it: HGX nodes with slurmd, a node with slurmctld, and jobs that hold GPUs."""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playbook_runs import SNAPSHOT, Site
from programs import beside_python
from slurm_conf import slurm_conf

from gpunode.lab import Lab, LabNode

HARDWARE = "hgx-h100-8"
FIRST = "580.95.05"
SECOND = "595.91.07"
ROLES = ("nvidia_repository", "nvidia_driver", "nvidia_fabric", "gpu_settings")
EXTRA = json.dumps({"gpunode_roles": list(ROLES)})
JOB_S = 30
SETTINGS = {
    "CommunicationParameters": "NoAddrCache",
    "SlurmdTimeout": "120",
    "JobCompType": "jobcomp/filetxt",
    "JobCompLoc": "/var/log/slurm_jobs",
}
"""Of ``slurm.conf``."""
# A job that computes, as far as the node's tools can see: nvidia-smi lists it, and it holds the device files.
JOB = f"""#!/bin/sh
fault=/usr/lib/gpunode-lab/bin/fault
echo "begin $SLURM_JOB_ID" >> /var/log/gpunode-test-jobs
$fault gpu0 gpu-busy && sleep {JOB_S} && $fault gpu0 gpu-busy --heal || exit
echo "end $SLURM_JOB_ID" >> /var/log/gpunode-test-jobs
"""
# A mirror that was cleaned up: the variant of each index that had the release, for repositories/inside/serve.py.
RELEASE_GONE = r"""
import json, re, sys
from pathlib import Path
sys.path.insert(0, "/srv/gpunode")
import publish
keys, found = publish.Keys(publish.KEYS), 0
for repository in json.loads(Path("/srv/gpunode/plan.json").read_text()).values():
    folder = publish.ROOT / repository["path"]
    if repository["kind"] != "flat":
        continue
    stanzas = [stanza for stanza in (folder / "Packages").read_text().split("\n\n") if stanza.strip()]
    version = re.compile(r"^Version: (\d+:)?" + re.escape(sys.argv[1]) + "-", re.MULTILINE)
    left = [stanza for stanza in stanzas if not version.search(stanza)]
    if len(left) == len(stanzas):
        continue
    found += len(stanzas) - len(left)
    to = publish.FAULTS / "release-gone" / repository["path"]
    to.mkdir(parents=True, exist_ok=True)
    (to / "Packages").write_text("".join(f"{stanza}\n\n" for stanza in left))
    publish._DATE = re.search("^Date: (.+)$", (folder / "Release").read_text(), re.MULTILINE)[1]
    publish._sign(to, to, repository["release"], keys, repository["key"])
assert found, "no repository has this release"
Path("/srv/on/release-gone").touch()
"""
SCONTROL = """#!/bin/bash
exec ssh -F {config} {controller} -- "sudo scontrol $(printf '%q ' "$@")"
"""


@dataclass
class Upgraded:
    """One run of ``gpunode upgrade``."""

    rc: int
    output: str
    errors: str
    journal: dict[str, object]

    @property
    def states(self) -> dict[str, str]:
        return {name: node["state"] for name, node in self.nodes.items()}

    @property
    def nodes(self) -> dict[str, dict[str, Any]]:
        nodes = self.journal["nodes"]
        assert isinstance(nodes, dict)
        return nodes

    def times(self, name: str) -> list[tuple[str, str]]:
        times = self.nodes[name]["times"]
        assert isinstance(times, list)
        return [(step, at) for step, at in times]

    @property
    def shown(self) -> str:
        return f"exit {self.rc}\n{self.output}\n{self.errors}"


@dataclass
class Fleet:
    """The nodes, Slurm, and ``gpunode upgrade`` with a state folder of its own."""

    lab: Lab
    folder: Path
    names: list[str] = field(default_factory=list)
    """Of the GPU nodes."""
    earlier: list[Path] = field(default_factory=list)
    """Journals of the runs before the one that was started last."""

    def node(self, name: str) -> LabNode:
        return self.lab.node(name)

    def sh(self, name: str, script: str, limit_s: float = 900) -> str:
        """Run a shell script as root on a node; its output."""
        done = self.node(name).run(
            ["bash", "-euc", script], timeout_s=limit_s, env={"DEBIAN_FRONTEND": "noninteractive"}
        )
        assert done.returncode == 0, f"{name}: {script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return str(done.stdout)

    def on_all(self, script: str) -> dict[str, str]:
        with ThreadPoolExecutor(len(self.names)) as pool:
            return dict(zip(self.names, pool.map(lambda name: self.sh(name, script), self.names), strict=True))

    @property
    def controller(self) -> str:
        """The node that has slurmctld and no GPU."""
        return next(node.name for node in self.lab.nodes() if node.hardware is None)

    def snapshots(self) -> dict[str, list[str]]:
        """Hashes of /etc, packages and units of each node."""
        return {name: text.splitlines() for name, text in self.on_all(SNAPSHOT).items()}

    def loaded(self) -> dict[str, str]:
        return {
            name: text.strip()
            for name, text in self.on_all("grep -o -m 1 '[0-9]*[.][0-9]*[.][0-9]*' /proc/driver/nvidia/version").items()
        }

    def boots(self) -> dict[str, str]:
        return self.on_all("cat /proc/sys/kernel/random/boot_id")

    def leftovers(self) -> dict[str, str]:
        """Leases and marks."""
        return self.on_all("cd /var/lib/gpunode 2>/dev/null && ls change.json drained.json 2>/dev/null || true")

    def scontrol(self, *words: str) -> str:
        return self.sh(self.controller, f"scontrol {' '.join(words)}", 60)

    def service(self, name: str) -> tuple[str, str]:
        """State and reason of a node in Slurm."""
        output = self.scontrol("show", "node", name)
        reason = re.search(r"^ *Reason=(.*?)(?: \[.*)?$", output, re.MULTILINE)
        state = re.search(r"State=(\S+)", output)
        assert state, f"no state of {name}: {output!r}"
        return state[1], reason[1] if reason else ""

    def until(self, name: str, expected: str, limit_s: float = 180) -> tuple[str, str]:
        """Wait for a part of a state; the state at the end."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end and not re.search(expected, self.service(name)[0]):
            time.sleep(2)
        return self.service(name)

    @contextmanager
    def drained_by_an_administrator(self, name: str, reason: str) -> Iterator[None]:
        self.scontrol("update", f"nodename={name}", "state=drain", f"reason='{reason}'")
        try:
            yield
        finally:
            self.scontrol("update", f"nodename={name}", "state=resume")

    def submit(self, jobs: int) -> None:
        """Queue jobs that are not requeued if their node fails: each shows in Slurm's list how it ended."""
        self.sh(self.controller, f"cat > /tmp/job <<'END'\n{JOB}END\n")
        self.sh(self.controller, f"cd /tmp && sbatch --no-requeue --output=/dev/null --array=1-{jobs} /tmp/job")

    def ended(self) -> dict[str, str]:
        """Cancel what waits, let what runs end; job to the state that it ended in."""
        self.sh(self.controller, "scancel --state=PENDING --user=root")
        end = time.monotonic() + 300
        while time.monotonic() < end and self.sh(self.controller, "squeue --noheader").strip():
            time.sleep(2)
        text = self.sh(self.controller, "cat /var/log/slurm_jobs 2>/dev/null || true; : > /var/log/slurm_jobs")
        lines = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in text.splitlines()]
        # A job that was cancelled while it waited had no node.
        return {line["JobId"]: line["JobState"] for line in lines if line["NodeList"] not in ("(null)", "")}

    def begun_and_ended(self) -> tuple[set[str], set[str]]:
        """Jobs that began and that reached their last line, by the nodes' own lists."""
        words = [
            line.split()
            for text in self.on_all(
                "cat /var/log/gpunode-test-jobs 2>/dev/null || true; rm -f /var/log/gpunode-test-jobs"
            ).values()
            for line in text.splitlines()
        ]
        return {job for word, job in words if word == "begin"}, {job for word, job in words if word == "end"}

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(self.folder / "state"),
            "ANSIBLE_NOCOLOR": "1",
        }

    def start(self, *words: str, limit: str = "", verb: str = "upgrade") -> "subprocess.Popen[str]":
        """Start ``gpunode upgrade``, or ``rollback``, in a process group of its own."""
        argv = [
            *(str(beside_python("gpunode")), verb, "-i", str(self.lab.inventory_path)),
            *(("-i", str(self.domains)) if self.domains.exists() else ()),
            *(
                "--limit",
                limit or ",".join(self.names),
                "--scheduler",
                "slurm",
                "-e",
                EXTRA,
                "--forks",
                "2",
                "-v",
                *words,
            ),
        ]
        self.earlier = self.runs()
        return subprocess.Popen(
            argv,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def upgrade(self, *words: str, limit: str = "", verb: str = "upgrade", limit_s: float = 3000) -> Upgraded:
        """Run ``gpunode upgrade``, or ``rollback``, to its end."""
        return self.finished(self.start(*words, limit=limit, verb=verb), limit_s)

    @property
    def domains(self) -> Path:
        """A second inventory, if a test wrote one."""
        return self.folder / "domains.yml"

    @contextmanager
    def one_domain(self, domain: str, *names: str) -> Iterator[None]:
        """These nodes change together."""
        hosts = {name: {"gpunode_failure_domain": domain} for name in names}
        self.domains.write_text(json.dumps({"all": {"hosts": hosts}}))
        try:
            yield
        finally:
            self.domains.unlink()

    @contextmanager
    def repository_without(self, release: str) -> Iterator[None]:
        """The vendor's repository, signed as ever, without the packages of a release in its index."""
        vendor = self.lab.vendor().container
        done = vendor.exec_run(["timeout", "-k", "5", "120", "python3", "-I", "-c", RELEASE_GONE, release])
        assert done.exit_code == 0, done.output
        try:
            yield
        finally:
            vendor.exec_run(["rm", "/srv/on/release-gone"])

    def finished(self, process: "subprocess.Popen[str]", limit_s: float = 3000) -> Upgraded:
        try:
            output, errors = process.communicate(timeout=limit_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
        return Upgraded(process.returncode, output, errors, self.journal())

    def runs(self) -> list[Path]:
        return sorted((self.folder / "state" / "gpunode" / "upgrades").glob("*/journal.json"))

    def journal(self) -> dict[str, object]:
        """The journal of the latest run."""
        paths = self.runs()
        return dict(json.loads(paths[-1].read_text())) if paths else {}

    def wait_for(self, name: str, state: str, process: "subprocess.Popen[str]", limit_s: float = 1800) -> None:
        """Wait until the journal has a state, or an act that began, of a node."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            nodes = {} if self.runs() == self.earlier else self.journal().get("nodes", {})
            assert isinstance(nodes, Mapping)
            if name in nodes and any(step == state for step, _ in nodes[name]["times"]):
                return
            assert process.poll() is None, process.communicate()
            time.sleep(1)
        raise AssertionError(f"{name} did not reach {state} within {limit_s} s")


def set_up(lab: Lab, folder: Path, count: int) -> Fleet:
    """Start the nodes, install the first release on all of them, and Slurm."""
    lab.up(1, "debian-12")
    lab.up(count, "debian-12", [HARDWARE])
    fleet = Fleet(lab, folder, [node.name for node in lab.nodes() if node.hardware])
    # apt's simulation has a limit of its own: two nodes at a time on two processors.
    always = ("--forks", "2", "--limit", ",".join(fleet.names), "-e", EXTRA)
    site = Site(lab, *always, "-e", f"nvidia_driver_version={FIRST}")
    done = site.play(limit_s=3000)
    assert done.rc == 0, done.output[-5000:]
    install_slurm(fleet)
    return fleet


def install_slurm(fleet: Fleet, **settings: str) -> None:
    """Install Slurm on all nodes, and a scontrol on this machine that asks the controller."""
    _install_slurm(fleet, settings)
    folder, lab = fleet.folder, fleet.lab
    tool = folder / "bin" / "scontrol"
    tool.parent.mkdir(parents=True, exist_ok=True)
    config = lab.inventory_path.parent / "ssh_config"
    tool.write_text(SCONTROL.format(config=config, controller=fleet.controller))
    tool.chmod(0o755)
    for name in fleet.names:
        assert re.search("IDLE", fleet.until(name, "IDLE")[0]), fleet.service(name)


def _install_slurm(fleet: Fleet, settings: Mapping[str, str]) -> None:
    def address(name: str) -> str:
        return str(fleet.node(name).container.name)

    install = "apt-get update -q && apt-get install -qy --no-install-recommends munge slurm-client"
    fleet.sh(fleet.controller, f"{install} slurmctld")
    fleet.on_all(f"{install} slurmd")
    key = fleet.sh(fleet.controller, "base64 -w 0 /etc/munge/munge.key").strip()
    nodes = {name: f"NodeAddr={address(name)} CPUs=1" for name in fleet.names}
    config = slurm_conf(f"{fleet.controller}({address(fleet.controller)})", nodes, **SETTINGS, **settings)
    common = f"""
    echo {key} | base64 -d > /etc/munge/munge.key
    cat > /etc/slurm/slurm.conf <<'END'
{config}
END
    mkdir -p /var/spool/slurmctld /var/spool/slurmd
    systemctl restart munge
    """
    fleet.sh(fleet.controller, f"{common}\nsystemctl enable --quiet munge slurmctld; systemctl restart slurmctld")
    fleet.on_all(f"{common}\nsystemctl enable --quiet munge slurmd; systemctl restart slurmd")
