"""The role storage on real block devices: disks of others are left alone, two empty ones are there after a reboot."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from machine import Machine, StartVm
from playbook_runs import WITHOUT_GPU, Playbooks, Run
from programs import beside_python, run_program

pytestmark = [pytest.mark.vm, pytest.mark.timeout(5400)]
CONCERNS = (
    "gpunode/provisioning/storage",
    "plugins/module_utils/block_devices",
    "plugins/module_utils/scratch_disks",
    "plugins/modules/scratch_disks",
)

SIZE = 300 << 20
DISKS = 8
FOREIGN, MOUNTED, LISTED, LVM, RAID, RAW, *EMPTY = [f"virtio-disk{number}" for number in range(DISKS)]
SETTINGS = {
    "gpunode_roles": ["storage"],
    **WITHOUT_GPU,
    "storage_state": "present",
}
PREPARE = f"""
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >/dev/null
apt-get install -y -q --no-install-recommends lvm2 mdadm nfs-kernel-server </dev/null >/dev/null
cd /dev/disk/by-id
for disk in {FOREIGN} {MOUNTED} {LISTED}; do mke2fs -q -t ext4 -L $disk -E lazy_itable_init=0 $disk; done
mkdir -p /mnt/theirs /mnt/listed /srv/export
mount {MOUNTED} /mnt/theirs
echo "LABEL={LISTED} /mnt/listed ext4 noauto 0 0" >> /etc/fstab
pvcreate -q $(realpath {LVM}) && vgcreate -q theirs $(realpath {LVM}) && lvcreate -q -y -n data -L 100M theirs
mdadm --create /dev/md/theirs --run --level=1 --raid-devices=2 $(realpath {RAID}) missing
head -c 1M /dev/urandom > /srv/export/set
printf 'no signature, and yet somebody needs it' | dd of={RAW} conv=fsync,notrunc status=none
head -c 5M /dev/urandom > /mnt/theirs/data
for device in /dev/theirs/data /dev/md/theirs; do head -c 5M /dev/urandom | dd of=$device conv=fsync status=none; done
echo '/srv/export 127.0.0.1(ro,no_subtree_check,fsid=1)' > /etc/exports
exportfs -ra
sync
"""
HASHES = f"""
cd /dev/disk/by-id
sha256sum {FOREIGN} {LISTED} {RAW} /dev/theirs/data /dev/md/theirs /mnt/theirs/data /etc/fstab {" ".join(EMPTY)}
"""
HOOK = """\
- name: Ask what is mounted
  ansible.builtin.command:
    argv: [findmnt, -n, -o, FSTYPE, /scratch]
  register: hook_type
  changed_when: false

- name: Write it down
  ansible.builtin.copy:
    content: "{{ hook_type.stdout }}"
    dest: /root/hook
    mode: "0644"
"""
REMOTE = {"path": "/data", "type": "nfs", "source": "127.0.0.1:/srv/export", "options": ["ro"], "limit_s": 5}


class Node(Playbooks):
    """A virtual machine as the plays' node."""

    def apply(self, *arguments: str, **changes: object) -> Run:
        return self.play("-e", json.dumps({**SETTINGS, **changes}), *arguments)

    def judged(self) -> dict[tuple[str, str], str]:
        """Return the validator's findings about the storage: (check, component) to status."""
        chosen = ["--select", "host.scratch,host.remote-data", "--level", "quick", "--timeout", "300"]
        argv = [beside_python("gpunode"), "validate", "-i", self.lab.inventory_path, *chosen, "--format", "json"]
        done = run_program(argv, limit_s=600)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        (report,) = json.loads(done.stdout)["nodes"]
        return {
            (finding["check"], finding["component"]): finding["status"]
            for finding in report["findings"]
            if finding["check"] in ("host.scratch", "host.remote-data")
        }

    def kept(self) -> set[str]:
        """Return what a boot does not change by itself, without libraries, which stay: apt autoremove removes them."""
        lines = self.snapshot()
        cut = len(lines) - lines[::-1].index("---")
        # Units of logins, of lines in fstab and of NFS come and go at run time.
        units = self.sh("systemctl list-unit-files --no-legend --no-pager --state enabled,disabled,masked")
        every = {*lines[:cut], *units.splitlines()}
        return {line for line in every if not re.match(r"lib|\w+  etc/ld\.so\.cache", line)}


@pytest.fixture(scope="module")
def vm(start_vm: StartVm) -> Machine:
    machine = start_vm(disks=(SIZE,) * DISKS)
    machine.sh(PREPARE, 1200)
    return machine


@pytest.fixture(scope="module")
def node(vm: Machine) -> Node:
    return Node(vm)


def test_disks_of_others_are_refused_and_untouched(node: Node) -> None:
    before = node.sh(HASHES)
    foreign = [FOREIGN, MOUNTED, LISTED, LVM, RAID, RAW]
    refused = node.apply(storage_scratch_disks=[*foreign, "virtio-nowhere"])
    assert refused.rc != 0
    text = " ".join(refused.output.split())
    for words in (
        f"{FOREIGN} (/dev/vdc): carries ext4 '{FOREIGN}'",
        f"{MOUNTED} (/dev/vdd): is mounted on /mnt/theirs",
        f"{LISTED} (/dev/vde): is the source of /mnt/listed in /etc/fstab",
        f"{LVM} (/dev/vdf): is held by dm-0",
        f"{RAID} (/dev/vdg): is held by md127",
        f"{RAW} (/dev/vdh): carries data of an unknown kind",
        "virtio-nowhere: no such disk",
    ):
        assert words in text
    assert node.sh(HASHES) == before

    # What is in use is refused even where it is confirmed.
    insisted = node.apply(storage_scratch_disks=foreign, storage_confirm_erase=foreign)
    assert insisted.rc != 0
    text = " ".join(insisted.output.split())
    assert f"{FOREIGN} (" not in text
    assert f"{RAW} (" not in text
    for name in (MOUNTED, LISTED, LVM, RAID):
        assert f"{name} (/dev/" in text
    assert node.sh(HASHES) == before


def test_empty_disks_are_mounted_after_a_reboot_and_released(node: Node, vm: Machine, tmp_path: Path) -> None:
    before, clean = node.sh(HASHES), node.kept()
    requested = {"storage_scratch_disks": EMPTY, "storage_mounts": [REMOTE]}

    announced = node.apply("--check", **requested)
    assert announced.rc == 0, announced.output
    assert "/etc/fstab" in announced.paths
    assert "mdadm --create" in announced.output
    assert node.sh(HASHES) == before

    hook = tmp_path / "hook.yml"
    hook.write_text(HOOK, encoding="utf-8")
    run = node.apply(**requested, storage_hooks=[str(hook)])
    assert run.rc == 0, run.output
    assert node.sh("cat /root/hook") == "xfs"
    digest = hashlib.sha256(b"kept over a reboot\n").hexdigest()
    node.sh("echo 'kept over a reboot' > /scratch/file; sync")

    settled = node.snapshot()
    again = node.apply(**requested)
    assert again.rc == 0, again.output
    assert again.recap["changed"] == 0, again.output
    assert node.snapshot() == settled

    vm.reboot()
    assert node.sh("findmnt -n -o FSTYPE,OPTIONS /scratch").split()[0] == "xfs"
    assert "noatime" in node.sh("findmnt -n -o OPTIONS /scratch")
    assert node.sh("stat -c %a /scratch").strip() == "1777"
    assert digest in node.sh("sha256sum /scratch/file")
    assert node.sh("lsblk -n -d -o TYPE $(findmnt -n -o SOURCE /scratch)").strip() == "raid0"
    assert node.sh("systemctl is-enabled fstrim.timer").strip() == "enabled"
    # Nobody looked into it yet; the validator does.
    assert node.sh("findmnt -n -o FSTYPE /data").split() == ["autofs"]
    assert node.judged() == {("host.scratch", "/scratch"): "pass", ("host.remote-data", "/data"): "pass"}
    assert node.sh("cmp /data/set /srv/export/set && findmnt -n -t nfs4 -o TARGET").split() == ["/data"]

    node.sh("systemctl disable -q nfs-server.service")
    vm.reboot()
    assert node.judged() == {("host.scratch", "/scratch"): "pass", ("host.remote-data", "/data"): "fail"}
    assert node.sh("systemctl is-system-running --wait || true").strip() in ("running", "degraded")

    node.sh("systemd-run --quiet --unit=busy --working-directory=/scratch sleep 3000")
    busy = node.sh("systemctl show -p MainPID --value busy.service").strip()
    held = node.apply(storage_state="absent")
    assert held.rc != 0
    assert f"/scratch must be unmounted, and sleep ({busy}) uses it" in " ".join(held.output.split())
    assert digest in node.sh("sha256sum /scratch/file")
    node.sh("systemctl stop busy.service")

    removed = node.apply(storage_state="absent", storage_confirm_erase=EMPTY)
    assert removed.rc == 0, removed.output
    assert node.sh(f"cd /dev/disk/by-id; wipefs --no-act {' '.join(EMPTY)}") == ""
    assert node.sh("test ! -e /scratch && test ! -e /data && sha256sum /etc/fstab") in before
    node.sh("systemctl enable -q --now nfs-server.service")
    assert node.kept() ^ clean == set()
