"""What uses a disk and what it carries; the tree of the kernel is a folder, and signatures are wipefs' own words."""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import block_devices, scratch_disks
from ansible_collections.gpunode.node.plugins.module_utils.block_devices import DiskError
from effort import effort

erased = scratch_disks.erased
OWN = {"filesystem": "0d1f7a58-2f3a-5c0e-9a2b-6f7e8d9c0b1a"}
ARRAY = {**OWN, "array": "7f6a1c2e-8d3b-5a55-9d0e-4a1b2c3d4e5f"}
# wipefs 2.38 --json --no-act of a file that mke2fs, mkfs.xfs or mdadm wrote.
EXT4 = {
    "device": "vdc",
    "offset": "0x438",
    "type": "ext4",
    "uuid": "3b0c9c0e-6f0a-4f86-9a9c-1d6a6c1d8c55",
    "label": "x",
}
XFS = {"device": "vdc", "offset": "0x0", "type": "xfs", "uuid": OWN["filesystem"], "label": None}
MEMBER = {
    "device": "vdc",
    "offset": "0x1000",
    "type": "linux_raid_member",
    "uuid": ARRAY["array"],
    "label": "vm:scratch",
}


class Node:
    """A node with files as disks, and the output of wipefs and findmnt for them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.signed: dict[str, list[dict[str, Any]]] = {}
        self.table: list[dict[str, str]] = []
        self.calls: list[list[str]] = []
        (root / "by-id").mkdir()
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/mountinfo").write_text("22 1 8:1 / / rw,noatime shared:1 - ext4 /dev/sda1 rw\n")
        (root / "proc/swaps").write_text("Filename Type Size Used Priority\n")
        self.made = 0
        self.withheld = ""

    def disk(self, name: str, *signatures: dict[str, Any], content: bytes = b"") -> Path:
        """Add an empty disk ``virtio-NAME``."""
        self.made += 1
        base = self.root / "sys" / name
        (base / "holders").mkdir(parents=True)
        for file, text in (("dev", f"254:{self.made}"), ("size", "8192"), ("ro", "0")):
            (base / file).write_text(f"{text}\n")
        device = self.root / "dev" / name
        device.parent.mkdir(exist_ok=True)
        device.write_bytes(content.ljust(4 << 20, b"\0"))
        (self.root / "by-id" / f"virtio-{name}").symlink_to(device)
        self.signed[name] = list(signatures)
        return base

    def array(self, head: bytes = b"", tail: bytes = b"") -> None:
        """The array of the role, with this at its two ends."""
        (self.root / "dev").mkdir(exist_ok=True)
        (self.root / "dev/md127").write_bytes(head.ljust((4 << 20) - len(tail), b"\0") + tail)

    def erased(self, state: dict[str, Any]) -> None:
        """As the module does it, without O_EXCL on a device."""
        self.calls.append(["wipefs", "--all", state["device"]])
        self.signed[Path(state["device"]).name] = []

    def output(self, argv: list[str], _limit_s: float = 0) -> str:
        self.calls.append(argv)
        if argv[0] == "wipefs" and "--no-act" in argv:
            signatures = self.signed.get(Path(argv[-1]).name, [])
            return json.dumps({"signatures": signatures}) if signatures else ""
        if argv[0] == "findmnt":
            if not self.table:
                raise DiskError("findmnt failed: 1")
            return json.dumps({"filesystems": self.table})
        if argv[0] == "mdadm" and ("--create" in argv or "--assemble" in argv):
            for name in [path.name for path in (self.root / "sys").glob("vd?")]:
                (self.root / "sys" / name / "holders" / "md127").touch()
                self.signed[name] = [MEMBER]
            if "--create" in argv:
                self.array()
                self.signed["md127"] = []
        if argv[0] == "mkfs.xfs":
            self.signed[Path(argv[-1]).name] = [XFS]
        return "UnitFileState=disabled\nActiveState=inactive\n" if argv[0] == "systemctl" else ""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path)
    monkeypatch.setattr(block_devices, "BY_ID", tmp_path / "by-id")
    monkeypatch.setattr(block_devices, "BLOCK", tmp_path / "sys")
    monkeypatch.setattr(block_devices, "PROC", tmp_path / "proc")
    monkeypatch.setattr(block_devices, "FSTAB", tmp_path / "fstab")
    monkeypatch.setattr(block_devices, "output_of", made.output)
    monkeypatch.setattr(scratch_disks, "output_of", made.output)
    monkeypatch.setattr(block_devices, "withheld", lambda _device: made.withheld)
    monkeypatch.setattr(scratch_disks, "erased", made.erased)
    ends = block_devices.empty_ends
    monkeypatch.setattr(block_devices, "empty_ends", lambda path: ends(str(tmp_path / "dev" / Path(path).name)))
    return made


def asked(node: Node, *names: str, erase: tuple[str, ...] = (), uuids: dict[str, str] = OWN) -> dict[str, Any]:
    ids = [f"virtio-{name}" for name in names]
    answer: dict[str, Any] = block_devices.answered(
        {"disks": ids, "own": uuids, "erase": [f"virtio-{name}" for name in erase]}
    )
    return answer


def test_an_empty_disk_is_free(node: Node) -> None:
    node.disk("vdc")
    answer = asked(node, "vdc")
    assert answer["refusals"] == []
    assert answer["disks"]["virtio-vdc"]["bytes"] == 4 << 20
    assert (answer["target"], answer["filesystem"]) == (None, False)


def test_what_a_disk_carries_goes_where_its_id_is_confirmed(node: Node) -> None:
    node.disk("vdc", EXT4)
    node.disk("vdd", content=b"\0" * 700 + b"somebody's")
    node.disk("vde")
    with (node.root / "dev/vde").open("r+b") as stream:
        stream.seek(-5, os.SEEK_END)
        stream.write(b"\1")
    refusals = asked(node, "vdc", "vdd", "vde")["refusals"]
    assert "carries ext4 'x'" in refusals[0]
    assert "carries data of an unknown kind" in refusals[1]
    assert "carries data of an unknown kind" in refusals[2]
    assert asked(node, "vdc", "vdd", "vde", erase=("vdc", "vdd", "vde"))["refusals"] == []


def test_what_is_in_use_is_refused_even_where_it_is_confirmed(node: Node) -> None:
    for name in ("vdc", "vdd", "vde", "vdf", "vdg", "vdh"):
        node.disk(name)
    part = node.root / "sys/vdc/vdc1"
    (part / "holders").mkdir(parents=True)
    (part / "partition").write_text("1\n")
    (node.root / "sys/vdc1").symlink_to(part)
    (part / "dev").write_text("254:90\n")
    mounts = node.root / "proc/self/mountinfo"
    mounts.write_text(mounts.read_text() + "30 22 254:90 / /mnt/a\\040b rw - ext4 /dev/vdc1 rw\n")
    (node.root / "sys/vdd/holders/dm-0").touch()
    (node.root / "sys/vde/ro").write_text("1\n")
    (node.root / "sys/vdf/md").mkdir()
    (node.root / "proc/swaps").write_text("Filename Type\n/dev/vdg partition 1 0 -2\n")
    node.table = [{"source": "/dev/vdh", "target": "/old"}]
    (node.root / "fstab").write_text("LABEL=old /old ext4 noauto 0 0\n")
    names = ("vdc", "vdd", "vde", "vdf", "vdg", "vdh")
    refusals = asked(node, *names, erase=names)["refusals"]
    words = ("is mounted on /mnt/a b", "held by dm-0", "read-only", "consists of other", "is swap", "source of /old")
    assert len(refusals) == len(words)
    for line, word in zip(refusals, words, strict=True):
        assert word in line
        assert "never erased" in line


def test_a_disk_that_the_kernel_withholds_is_in_use(node: Node) -> None:
    node.disk("vdc")
    node.withheld = "Device or resource busy"
    assert "does not release it (Device or resource busy)" in asked(node, "vdc", erase=("vdc",))["refusals"][0]


def test_a_table_that_cannot_be_read_is_not_an_empty_table(node: Node) -> None:
    node.disk("vdc")
    (node.root / "fstab").write_text("# no line\n\n")
    assert asked(node, "vdc")["refusals"] == []
    (node.root / "fstab").write_text("LABEL=old /old ext4 noauto 0 0\n")
    assert asked(node, "vdc") == {"error": "findmnt failed: 1"}


def test_invalid_and_duplicate_ids_are_reported(node: Node) -> None:
    node.disk("vdc")
    (node.root / "by-id/virtio-again").symlink_to(node.root / "dev/vdc")
    refusals = asked(node, "vdc", "again", "gone")["refusals"]
    assert "is the same disk as virtio-vdc" in refusals[0]
    assert "virtio-gone: no such disk" in refusals[1]


def test_disks_of_the_role_are_known_again(node: Node) -> None:
    node.disk("vdc", XFS)
    answer = asked(node, "vdc")
    assert answer["refusals"] == []
    assert answer["target"].endswith("/vdc")
    assert answer["filesystem"] is True
    node.disk("vdd", MEMBER)
    node.disk("vde", MEMBER)
    for name in ("vdd", "vde"):
        (node.root / "sys" / name / "holders/md127").touch()
    node.signed["md127"] = [XFS]
    answer = asked(node, "vdd", "vde", uuids=ARRAY)
    assert (answer["target"], answer["filesystem"], answer["refusals"]) == ("/dev/md127", True, [])
    node.disk("vdf")
    assert "already belongs to the array" in asked(node, "vdd", "vdf", uuids=ARRAY)["refusals"][0]


def requested(*names: str, uuids: dict[str, str] = ARRAY, erase: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"disks": [f"virtio-{name}" for name in names], "name": "gpunode-scratch", "erase": list(erase), **uuids}


def written(node: Node) -> list[list[str]]:
    return [argv for argv in node.calls if argv[0] in ("mdadm", "mkfs.xfs") or "--all" in argv]


def test_two_disks_become_an_array_and_nothing_the_second_time(node: Node) -> None:
    node.disk("vdc")
    node.disk("vdd")
    announced = scratch_disks.made(requested("vdc", "vdd"), check=True)
    assert announced[-1] == "create the file system"
    assert written(node) == []
    scratch_disks.made(requested("vdc", "vdd"), check=False)
    create, mkfs = written(node)
    assert create[:2] == ["mdadm", "--create"]
    assert "--level=0" in create
    assert mkfs[-1] == "/dev/md127"
    assert "-f" in mkfs, "an array of disks that were erased may show what was on another array of them"
    assert f"uuid={OWN['filesystem']}" in mkfs
    node.calls.clear()
    assert scratch_disks.made(requested("vdc", "vdd"), check=False) == []
    assert scratch_disks.made(requested("vdc", "vdd"), check=True) == []
    assert written(node) == []


def test_a_single_disk_is_erased_where_that_is_confirmed_and_carries_the_file_system(node: Node) -> None:
    node.disk("vdc", EXT4)
    device = str(node.root / "dev/vdc")
    request = requested("vdc", uuids=OWN, erase=("virtio-vdc",))
    erase, create = scratch_disks.made(request, check=True)
    assert (erase.startswith(f"erase virtio-vdc ({device}): "), create) == (True, "create the file system")
    assert written(node) == []
    assert scratch_disks.made(request, check=False) == [erase, f"create the file system on {device}"]
    wipefs, mkfs = written(node)
    assert wipefs == ["wipefs", "--all", device]
    assert (mkfs[0], mkfs[-1], "-f" in mkfs) == ("mkfs.xfs", device, False)
    assert scratch_disks.made(request, check=False) == scratch_disks.made(request, check=True) == []


def test_nothing_is_written_where_one_disk_is_refused(node: Node) -> None:
    node.disk("vdc")
    node.disk("vdd", EXT4)
    with pytest.raises(DiskError, match=r"nothing was written: virtio-vdd .* carries ext4"):
        scratch_disks.made(requested("vdc", "vdd"), check=False)
    assert written(node) == []


def test_a_half_made_array_is_not_formatted_over_something(node: Node) -> None:
    for name in ("vdc", "vdd"):
        node.disk(name, MEMBER)
        (node.root / "sys" / name / "holders/md127").touch()
    node.signed["md127"] = [EXT4]
    node.array()
    with pytest.raises(DiskError, match="carries ext4 'x': nothing is formatted"):
        scratch_disks.made(requested("vdc", "vdd"), check=False)
    node.signed["md127"] = []
    assert scratch_disks.made(requested("vdc", "vdd"), check=True) == ["create the file system"]
    assert scratch_disks.made(requested("vdc", "vdd"), check=False) == ["create the file system on /dev/md127"]


@dataclass
class Traces:
    """What is left of a scratch file system on two disks, each trace there or lost."""

    members: int
    """How many disks have their member superblock."""
    assembled: bool
    array: list[dict[str, Any]]
    """Signatures on the array."""
    head: bytes
    tail: bytes
    used: bool
    """The record or fstab has it."""
    erase: tuple[str, ...]

    def is_lost(self) -> bool:
        """Whether nothing calls the file system used, so that nobody can know of it."""
        silent = not self.used and not self.array and not (self.head + self.tail).strip(b"\0")
        return silent if self.members == 2 else not self.used


def traces() -> Iterator[Traces]:
    rng = random.Random(4)  # noqa: S311
    both = ("virtio-vdc", "virtio-vdd")
    for _ in range(effort(100, 5000)):
        yield Traces(
            members=rng.choice([0, 2, 2]),
            assembled=rng.random() < 0.7,
            array=rng.choice([[], [], [XFS], [EXT4], [XFS, EXT4], [{**XFS, "uuid": ARRAY["array"]}]]),
            head=rng.choice([b"", b"", b"XFSB", rng.randbytes(9)]),
            tail=rng.choice([b"", b"", b"\1"]),
            used=rng.random() < 0.5,
            erase=rng.choice([(), (), ("virtio-vdc",), both, (*both, "virtio-of-another-file-system")]),
        )


def test_what_was_used_is_never_formatted_without_a_confirmation_of_all_its_disks(node: Node) -> None:
    """Traces are lost at random: superblocks of members and of the file system, the record, the assembly."""
    for name in ("vdc", "vdd"):
        node.disk(name)
    held = node.root / "sys"
    seen = set()
    for trace in traces():
        for name in ("vdc", "vdd"):
            node.signed[name] = [MEMBER] if trace.members else []
            holder = held / name / "holders/md127"
            holder.touch() if trace.members and trace.assembled else holder.unlink(missing_ok=True)
        node.array(trace.head, trace.tail)
        node.signed["md127"] = trace.array
        node.calls.clear()
        intact = trace.members == 2 and trace.array == [XFS]
        request = {**requested("vdc", "vdd", erase=trace.erase), "used": trace.used}
        question = {"disks": request["disks"], "own": ARRAY, "erase": trace.erase, "used": trace.used}
        refused = block_devices.answered(question)["refusals"]
        message = ""
        try:
            scratch_disks.made(request, check=False)
        except DiskError as err:
            message = str(err)
        formatted = [argv for argv in written(node) if argv[0] == "mkfs.xfs" or "--all" in argv or "--create" in argv]
        if intact:
            assert (formatted, message) == ([], ""), trace
        elif len(trace.erase) >= 2 or trace.is_lost():
            assert (bool(formatted), message) == (True, ""), trace
        else:
            assert formatted == [], trace
            assert "xfs_repair /dev/" in message, trace
            assert "storage_confirm_erase" in message, trace
            # An array that is not assembled can only be read by the run that assembles it.
            assert refused or (trace.members and not trace.assembled), trace
        seen.add((intact, bool(formatted), bool(message)))
    assert len(seen) == 3


def test_data_stays_unless_all_of_it_is_given_up(node: Node) -> None:
    for name in ("vdc", "vdd"):
        node.disk(name, MEMBER)
    assert scratch_disks.released(requested("vdc", "vdd"), check=False) == []
    with pytest.raises(DiskError, match="list all disks or none"):
        scratch_disks.released(requested("vdc", "vdd", erase=("virtio-vdc",)), check=False)
    assert written(node) == []


@pytest.mark.parametrize(("array", "assembled"), [(True, True), (True, False), (False, False)])
def test_disks_that_are_given_up_are_erased_after_their_array_was_stopped(
    node: Node, array: bool, assembled: bool
) -> None:
    names = ("vdc", "vdd") if array else ("vdc",)
    for name in names:
        base = node.disk(name, MEMBER if array else XFS)
        if assembled:
            (base / "holders/md127").touch()
    request = requested(*names, uuids=ARRAY if array else OWN, erase=tuple(f"virtio-{name}" for name in names))
    steps = scratch_disks.released(request, check=True)
    assert steps == [f"erase virtio-{name} ({node.root}/dev/{name})" for name in names]
    assert written(node) == []
    assert scratch_disks.released(request, check=False) == steps
    stop = [["wipefs", "--all", "/dev/md127"], ["mdadm", "--stop", "/dev/md127"]] if assembled else []
    assert written(node) == [*stop, *(["wipefs", "--all", f"{node.root}/dev/{name}"] for name in names)]


@pytest.mark.parametrize("parts", [["vdc1", "vdc2"], []])
@pytest.mark.parametrize("size", [(3 << 20) + 512, 2 << 20, 1000])
def test_both_ends_of_a_disk_are_erased(node: Node, parts: list[str], size: int) -> None:
    path = node.root / "disk"
    path.write_bytes(b"\1" * size)
    erased({"device": str(path), "parts": parts})
    end = min(1 << 20, size)
    assert path.read_bytes() == bytes(end) + b"\1" * (size - 2 * end) + bytes(min(end, size - end))
    nodes = [*(f"/dev/{part}" for part in parts), str(path)]
    reread = [["blockdev", "--rereadpt", str(path)]] if parts else []
    assert node.calls == [*(["wipefs", "--all", device] for device in nodes), scratch_disks.SETTLE, *reread]


def test_a_disk_that_is_not_empty_after_erasing_is_reported(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    path = node.root / "disk"
    path.write_bytes(b"\1" * 1000)
    monkeypatch.setattr(scratch_disks, "empty_ends", lambda _device: False)
    with pytest.raises(DiskError, match="is not empty after erasing"):
        erased({"device": str(path), "parts": []})


def test_what_is_mounted_is_not_released(node: Node) -> None:
    node.disk("vdc", XFS)
    mounts = node.root / "proc/self/mountinfo"
    mounts.write_text(f"{mounts.read_text()}30 22 254:1 / /scratch rw - xfs {node.root}/dev/vdc rw\n")
    with pytest.raises(DiskError, match="is mounted on /scratch"):
        scratch_disks.released(requested("vdc", uuids=OWN, erase=("virtio-vdc",)), check=False)
    assert written(node) == []


def test_an_unknown_timer_is_not_a_failure(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.disk("vdc")
    assert asked(node, "vdc")["trim"] == {"enabled": "disabled", "active": "inactive"}

    def output(argv: list[str]) -> str:
        if argv[0] == "systemctl":
            raise DiskError("systemctl failed: not booted with systemd")
        return node.output(argv)

    monkeypatch.setattr(block_devices, "output_of", output)
    assert asked(node, "vdc")["trim"] == {"enabled": "", "active": ""}


def test_a_mount_point_lists_what_is_below_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert block_devices.state_of(str(tmp_path), [])["entries"] == 1
    assert block_devices.state_of(str(tmp_path / "file"), [])["kind"] == "other"
    assert block_devices.state_of(str(tmp_path / "gone"), [])["kind"] == "absent"
    with (tmp_path / "file").open():
        assert any(f"({os.getpid()})" in user for user in block_devices.users(str(tmp_path)))
    remote = {"path": str(tmp_path), "fstype": "nfs4", "source": "s:/e", "number": "0:50", "options": "rw"}
    assert block_devices.state_of(str(tmp_path), [remote])["mode"] is None


@pytest.mark.skipif(os.geteuid() != 0, reason="the owner of a file can be set by root alone")
def test_a_path_below_a_folder_of_a_user_is_that_users(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "ours").mkdir(parents=True)
    os.chown(tmp_path / "theirs", 65534, 65534)
    (tmp_path / "way").symlink_to("theirs/ours")
    (tmp_path / "their-way").symlink_to("ours")
    os.lchown(tmp_path / "their-way", 65534, 65534)
    for name in ("theirs", "theirs/ours", "theirs/ours/gone", "way/gone", "their-way/gone"):
        assert block_devices.state_of(str(tmp_path / name), [])["owner"] == 65534, name
    assert block_devices.state_of(str(tmp_path / "ours"), [])["owner"] == 0
