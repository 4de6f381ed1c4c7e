"""Disks of the role storage on real block devices: what carries anything is left alone, what is empty becomes XFS.

Loop devices stand for disks: the kernel, wipefs, mkfs.xfs and mount are real. Arrays, LVM and reboots are in tests/vm.
"""

import hashlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import block_devices, scratch_disks
from ansible_collections.gpunode.node.plugins.module_utils.block_devices import END_BYTES, DiskError
from ansible_collections.gpunode.node.plugins.module_utils.scratch_disks import looked_at
from effort import effort

OWN = {"filesystem": "0d1f7a58-2f3a-5c0e-9a2b-6f7e8d9c0b1a"}
SIZE = 400 << 20
NEEDS = {"losetup": "mount", "mkfs.xfs": "xfsprogs", "mke2fs": "e2fsprogs", "sfdisk": "fdisk", "wipefs": "util-linux"}


def run(*argv: object, **more: Any) -> str:
    done = subprocess.run([str(word) for word in argv], check=True, capture_output=True, text=True, timeout=120, **more)
    return str(done.stdout).strip()


class Disks:
    """Loop devices, each with an id ``loop-NAME``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.devices: dict[str, str] = {}
        self.mounts: list[Path] = []

    def add(self, name: str) -> str:
        image = self.folder / f"{name}.img"
        with image.open("wb") as file:
            file.truncate(SIZE)
        self.devices[name] = run("losetup", "--find", "--show", "--partscan", image)
        (self.folder / "by-id" / f"loop-{name}").symlink_to(self.devices[name])
        return self.devices[name]

    def mount(self, source: str) -> Path:
        mountpoint = self.folder / f"mnt{len(self.mounts)}"
        mountpoint.mkdir()
        run("mount", source, mountpoint)
        self.mounts.append(mountpoint)
        return mountpoint

    def digest(self, name: str) -> str:
        run("sync")
        with (self.folder / f"{name}.img").open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def requested(self, *names: str, erase: tuple[str, ...] = ()) -> dict[str, Any]:
        return {
            "disks": [f"loop-{name}" for name in names],
            "name": "none",
            "erase": [f"loop-{name}" for name in erase],
            **OWN,
        }

    def refused(self, name: str) -> str:
        """Why a disk is refused although it is confirmed."""
        with pytest.raises(DiskError) as raised:
            scratch_disks.made(self.requested(name, erase=(name,)), check=False)
        return str(raised.value)

    def end(self) -> None:
        for mountpoint in reversed(self.mounts):
            subprocess.run(["umount", mountpoint], check=False, timeout=60, capture_output=True)
        for device in self.devices.values():
            subprocess.run(["losetup", "--detach", device], check=False, timeout=60)


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disks]:
    if os.geteuid() != 0 or not os.access("/dev/loop-control", os.W_OK):
        pytest.skip("loop devices need root and /dev/loop-control")
    for program, package in NEEDS.items():
        if shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
            pytest.skip(f"no {program}: apt-get install {package}")
    monkeypatch.setattr(block_devices, "composed", lambda _base: False)
    monkeypatch.setattr(block_devices, "BY_ID", tmp_path / "by-id")
    # Nothing makes links here that would have to be waited for.
    monkeypatch.setattr(scratch_disks, "SETTLE", ["true"])
    (tmp_path / "by-id").mkdir()
    made = Disks(tmp_path)
    yield made
    made.end()


def test_a_loop_device_itself_is_not_a_disk(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    disks.add("a")
    monkeypatch.undo()
    monkeypatch.setattr(block_devices, "BY_ID", disks.folder / "by-id")
    assert "consists of other devices" in disks.refused("a")


def test_what_a_disk_carries_stays_unless_its_id_is_confirmed(disks: Disks) -> None:
    run("mke2fs", "-q", "-t", "ext4", "-L", "theirs", disks.add("ext4"))
    run("mkswap", "-q", disks.add("swap"))
    run("sfdisk", "--quiet", disks.add("table"), input="label: gpt\n,100M\n")
    Path(disks.add("raw")).write_bytes(b"no signature, and yet somebody needs it")
    for name, words in (("ext4", "ext4 'theirs'"), ("swap", "swap"), ("table", "gpt"), ("raw", "an unknown kind")):
        before = disks.digest(name)
        with pytest.raises(DiskError, match=f"nothing was written: .*{words}"):
            scratch_disks.made(disks.requested(name), check=False)
        scratch_disks.made(disks.requested(name, erase=(name,)), check=True)
        assert disks.digest(name) == before
        steps = scratch_disks.made(disks.requested(name, erase=(name,)), check=False)
        assert steps[0].startswith(f"erase loop-{name}")
        assert run("blkid", "--probe", "-o", "value", "-s", "UUID", disks.devices[name]) == OWN["filesystem"]


def test_what_is_in_use_is_refused_although_it_is_confirmed(disks: Disks) -> None:
    device = disks.add("whole")
    run("mke2fs", "-q", "-t", "ext4", device)
    content = os.urandom(1 << 20)
    mountpoint = disks.mount(device)
    (mountpoint / "data").write_bytes(content)
    held = disks.add("held")
    before = disks.digest("held")
    assert "is mounted on" in disks.refused("whole")
    number = os.open(held, os.O_RDONLY | os.O_EXCL)
    assert "the kernel does not release it" in disks.refused("held")
    os.close(number)
    assert disks.digest("held") == before
    run("umount", mountpoint)
    run("mount", device, mountpoint)
    assert (mountpoint / "data").read_bytes() == content


def test_a_disk_with_a_mounted_partition_is_in_use(disks: Disks) -> None:
    table = disks.add("part")
    run("sfdisk", "--quiet", table, input="label: gpt\n,100M\n")
    if not Path(f"{table}p1").exists():
        run("partx", "--add", table)  # a kernel that does not read partition tables itself
    run("mke2fs", "-q", "-t", "ext4", f"{table}p1")
    content = os.urandom(1 << 20)
    mountpoint = disks.mount(f"{table}p1")
    (mountpoint / "data").write_bytes(content)
    assert "is mounted on" in disks.refused("part")
    run("umount", mountpoint)
    run("mount", f"{table}p1", mountpoint)
    assert (mountpoint / "data").read_bytes() == content


def test_an_empty_disk_is_made_kept_and_released(disks: Disks) -> None:
    device = disks.add("a")
    empty = disks.digest("a")
    requested = disks.requested("a", erase=("a",))
    assert scratch_disks.made(requested, check=True) == ["create the file system"]
    assert disks.digest("a") == empty
    assert scratch_disks.made(requested, check=False) == [f"create the file system on {device}"]
    mountpoint = disks.mount(device)
    (mountpoint / "file").write_text("kept")
    # It is the role's own now: a confirmation that was left does nothing.
    assert scratch_disks.made(requested, check=False) == []
    with pytest.raises(DiskError, match="is mounted on"):
        scratch_disks.released(requested, check=False)
    assert (mountpoint / "file").read_text() == "kept"
    run("umount", mountpoint)
    assert scratch_disks.released(disks.requested("a"), check=False) == []
    assert scratch_disks.released(requested, check=False) == [f"erase loop-a ({device})"]
    answer = block_devices.answered({"disks": ["loop-a"], "own": OWN})
    assert (answer["refusals"], answer["disks"]["loop-a"]["carries"], answer["target"]) == ([], [], None)


def array_of(device: str) -> dict[str, Any]:
    """Two disks of the role that are assembled to this device."""
    disk = {"missing": False, "ours": True, "carries": [], "in_use": [], "parts": [], "holders": [Path(device).name]}
    return {f"disk{number}": {**disk, "device": f"/dev/null{number}"} for number in (1, 2)}


def test_a_damaged_file_system_is_repaired_and_never_made_again(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    """xfs_repair, as the message states, is the judge of what would have been lost."""
    device = disks.add("a")
    array = {"disks": ["disk1", "disk2"], "name": "none", "erase": [], **OWN, "array": OWN["filesystem"]}
    rng = random.Random(28)  # noqa: S311
    spots = (0, 0, 0, 4096, END_BYTES, SIZE // 4, SIZE - END_BYTES)
    repaired = 0
    for _ in range(effort(4, 60)):
        run("mkfs.xfs", "-q", "-f", "-m", f"uuid={OWN['filesystem']}", device)
        mountpoint = disks.mount(device)
        (mountpoint / "file").write_text("kept")
        run("umount", disks.mounts.pop())
        mountpoint.rmdir()
        with Path(device).open("r+b") as stream:
            for at in rng.sample(spots, rng.randint(1, 2)):
                size = rng.choice([1, 512, 512, 4096, END_BYTES])
                stream.seek(at)
                stream.write(rng.choice([bytes(size), rng.randbytes(size)]))
        before = disks.digest("a")
        whole = block_devices.holds(device, OWN["filesystem"])
        alone = {**disks.requested("a"), "used": True}
        for requested, looked in ((alone, looked_at), ({**array, "used": True}, lambda *_: array_of(device))):
            monkeypatch.setattr(scratch_disks, "looked_at", looked)
            if whole:
                assert scratch_disks.made(requested, check=False) == []
            else:
                with pytest.raises(DiskError, match=r"xfs_repair.*storage_confirm_erase"):
                    scratch_disks.made(requested, check=False)
            assert disks.digest("a") == before
        repair = ["xfs_repair", device]
        if not whole and subprocess.run(repair, check=False, capture_output=True, timeout=60).returncode == 0:
            mountpoint = disks.mount(device)
            repaired += (mountpoint / "file").is_file()
            run("umount", disks.mounts.pop())
            mountpoint.rmdir()
    assert repaired
