"""An image that the roles prepared in a chroot: built by mmdebstrap, booted on two machines, settled at the first boot.

GPUNODE_IMAGE_LOGS=DIR keeps the logs of build and boots, and the reports.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from image import PACKAGES, Image, build
from machine import Hardware, Machine, StartVm
from playbook_runs import ROOT
from programs import beside_python, run_program

from gpunode.content import ansible_environment
from gpunode.lab.recipe import find_mirror

pytestmark = [pytest.mark.vm, pytest.mark.timeout(7200)]
CONCERNS = ("roles/first_boot/", "playbooks/image", "gpunode/provisioning/first_boot", "gpunode/provisioning/roles")

ANSIBLE = "ansible==12.2.0"
"""PyPI's package with the collection community.general, of which the connection chroot is used."""
CACHE = Path.home() / ".cache" / "gpunode" / "test-image"
OTHER = Hardware(
    board="q35", cpus=4, disk="if=none,id=root", nic="vmxnet3", devices=("-device", "nvme,drive=root,serial=root")
)
VARIABLES: dict[str, Any] = {
    "gpunode_roles": ["base", "docker", "gpu_tools", "updates", "kernel_tuning", "first_boot"],
    "gpunode_expect": {"gpus": 0},
    "preflight_require_gpu": False,
    "preflight_min_free_mib": {},
    "base_state": "present",
    "base_timezone": "Europe/Berlin",
    "base_journal_max": "200M",
    "docker_source": "distribution",
    "gpu_tools_state": "present",
    "gpu_tools_tools": ["htop", "numactl"],
    "updates_state": "present",
    "kernel_tuning_sysctl": {"vm.swappiness": "1"},
    # QEMU's clock has no server to compare with.
    "first_boot_skip": ["host.time"],
}
REPORT = "/var/lib/gpunode/first_boot/report.json"
GPUNODE, INVENTORY = "/opt/gpunode/first-boot/bin/gpunode", "/etc/gpunode/first-boot/inventory.json"
DEVICES = "nproc; findmnt -no SOURCE /; basename $(readlink /sys/class/net/e*/device/driver)"
SETUP = """
cp "$1/etc/resolv.conf" "$1/root/resolv.conf"
cp /etc/resolv.conf "$1/etc/resolv.conf"
for run in 1 2; do
    log={logs}/build-$run.log
    {play} -i {inventory} -e ansible_host="$1" > $log 2>&1 || {{ tail -n 40 $log; exit 1; }}
done
mv "$1/root/resolv.conf" "$1/etc/resolv.conf"
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the logs."""
    folder = Path(os.environ.get("GPUNODE_IMAGE_LOGS") or tmp_path_factory.mktemp("logs"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def wheels(folder: Path) -> Path:
    """Make the wheels of this tree and its dependencies."""
    argv = [sys.executable, "-I", "-m", "pip", "wheel", "--quiet", "--wheel-dir", folder, ROOT]
    done = run_program(argv, limit_s=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def collections() -> Path:
    """Unpack community.general of PyPI's package, once."""
    folder = CACHE / ANSIBLE.replace("==", "-")
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", CACHE, ANSIBLE]
        done = run_program(argv, limit_s=900)
        assert done.returncode == 0, done.stderr[-2000:]
        draft = folder.with_suffix(".new")
        shutil.rmtree(draft, ignore_errors=True)
        (file,) = CACHE.glob("ansible-*.whl")
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.startswith("ansible_collections/community/general/")]
            archive.extractall(draft, names)
        draft.rename(folder)
    return folder


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory, logs: Path, vm_image: Image) -> Image:
    """The image, with the roles in it: the playbook runs twice on its root."""
    folder = tmp_path_factory.mktemp("image")
    inventory = folder / "hosts.json"
    host = {"ansible_connection": "community.general.chroot", "ansible_python_interpreter": "/usr/bin/python3"}
    host |= {**VARIABLES, "first_boot_wheels": str(wheels(folder / "wheels"))}
    inventory.write_text(json.dumps({"gpu_nodes": {"hosts": {"golden": host}}}), encoding="utf-8")
    environment = ansible_environment()
    paths = f"{environment['ANSIBLE_COLLECTIONS_PATH']}:{collections()}"
    play: list[object] = ["env", f"ANSIBLE_COLLECTIONS_PATH={paths}", f"ANSIBLE_CONFIG={ROOT / 'ansible.cfg'}"]
    play += [beside_python("ansible-playbook"), str(ROOT / "playbooks" / "image.yml"), "--diff"]
    script = SETUP.format(play=shlex.join(map(str, play)), inventory=inventory, logs=logs)
    return build(folder, find_mirror(), PACKAGES, "main", script, sealed=True)


def recap(log: Path) -> dict[str, int]:
    """Return the counts of a run of Ansible."""
    text = log.read_text(encoding="utf-8").rpartition("PLAY RECAP")[2]
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}


def awaited(vm: Machine) -> dict[str, Any]:
    """Wait for the end of the first boot; return the report."""
    done = f"test -e {REPORT} && systemctl show -p ActiveState gpunode-first-boot | grep -qE 'inactive|failed'"
    vm.sh(f"until {done}; do sleep 5; done", 2700)
    report: dict[str, Any] = json.loads(vm.sh(f"cat {REPORT}"))
    return report


def identity(vm: Machine) -> list[str]:
    """Return machine id and host key."""
    return vm.sh("cat /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub").splitlines()


def kept(vm: Machine, logs: Path, name: str) -> None:
    """Keep the logs of a machine."""
    shutil.copy(vm.serial, logs / f"{name}-serial.log")
    text = vm.sh(f"journalctl --no-pager -u gpunode-first-boot -o short-monotonic; cat {REPORT}")
    (logs / f"{name}-first-boot.log").write_text(text, encoding="utf-8")


def test_the_second_run_on_the_image_changes_nothing(image: Image, logs: Path) -> None:
    assert image.host_key == ""
    first, second = (recap(logs / f"build-{run}.log") for run in (1, 2))
    assert (first["failed"], second["failed"]) == (0, 0)
    assert first["changed"] > 5
    assert second["changed"] == 0


def test_the_same_image_settles_two_machines_and_a_second_run_changes_nothing(
    image: Image, start_vm: StartVm, logs: Path
) -> None:
    machines: list[Machine] = []
    # One after the other: the emulated processors share this machine's.
    for name, hardware in (("one", Hardware()), ("other", OTHER)):
        vm = start_vm(image=image, hardware=hardware)
        machines.append(vm)
        report = awaited(vm)
        kept(vm, logs, name)
        assert (report["status"], report["problems"]) == ("good", []), report["problems"]
        assert [step["exit_code"] for step in report["steps"]] == [0, 0]
    first, other = machines
    # What an image cannot have came with the boot.
    for vm in (first, other):
        assert vm.sh("sysctl -n vm.swappiness; systemctl is-active docker") == "1\nactive\n"
        assert vm.sh(f"stat -c %a {INVENTORY}") == "600\n"
        assert vm.sh("systemctl list-units --failed --plain --no-legend") == ""
        assert "gpunode first boot: this node is settled and valid" in vm.serial.read_text(errors="replace")
    identities = [identity(vm) for vm in (first, other)]
    assert len({line for lines in identities for line in lines}) == 4, "each machine has an identity of its own"
    devices = [vm.sh(DEVICES) for vm in (first, other)]
    assert devices == ["2\n/dev/vdb\nvirtio_net\n", "4\n/dev/nvme0n1\nvmxnet3\n"]

    before = hashlib.sha256(first.sh(f"cat {REPORT}").encode()).hexdigest()
    first.reboot()
    first.sh("systemctl is-system-running --wait || true", 600)
    state = first.sh("systemctl show -p ConditionResult -p ActiveState gpunode-first-boot")
    assert state == "ActiveState=inactive\nConditionResult=no\n"
    assert hashlib.sha256(first.sh(f"cat {REPORT}").encode()).hexdigest() == before
    assert identity(first) == identities[0]
    again = json.loads(
        first.sh(
            f"{GPUNODE} provision -i {INVENTORY} --format json 2>/dev/null",
            2400,
        )
    )
    (logs / "second-boot-provision.json").write_text(json.dumps(again, indent=1), encoding="utf-8")
    assert [node["status"] for node in again["nodes"]] == ["unchanged"]
