"""The plan of storage: lines of fstab, what stands in the way, and what a removal restores."""

import json
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from effort import effort
from plan_samples import context_of, planned, state_of

from gpunode.errors import UsageError
from gpunode.provisioning.manifest import Manifest, UnitState
from gpunode.provisioning.state import FileState, NodeState
from gpunode.provisioning.storage import ARRAYS, BEFORE, FSTAB, HELPER, HOOKS, RECORD, ROLE, TRIM, StorageResult
from gpunode.provisioning.storage_mounts import BEGIN, END, ScratchDisks, escaped, own_lines, with_lines

TABLE = "UUID=aaaa / ext4 errors=remount-ro 0 1\n/dev/sdb1 /old ext4 noauto 0 0\n"
FACTS = {"host": "node", "collected_at": "2026-11-20T10:00:00Z", "packages": []}
DISKS = ["nvme-eui.0025388b71b2c0d1", "nvme-MODEL_SERIAL2"]
NFS = {"path": "/data", "type": "nfs", "source": "store:/export"}
FREE: dict[str, Any] = {"mounts": [], "users": [], "kind": "absent", "mode": None, "entries": None}
OFFERED = {"offered": {name: ["1"] for name in ("xfsprogs", "mdadm", "nfs-common", "rclone", "s3fs", "fuse3")}}


def state(
    table: str = TABLE, installed: tuple[str, ...] = (), contents: Mapping[str, str] = MappingProxyType({})
) -> NodeState:
    """A Debian node with this fstab."""
    files = {FSTAB: {"kind": "file", "sha256": "0" * 64, "mode": "0644", "owner": "root", "group": "root"}}
    files |= {path: {"kind": "file", "mode": "0644", "owner": "root", "group": "root"} for path in contents}
    known = {**contents, FSTAB: table}
    return state_of(FACTS, {"installed": dict.fromkeys(installed, "1")}, files=files, contents=known)


def answer(**changes: Any) -> dict[str, Any]:
    """What a node with empty disks and nothing in the way answers."""
    paths = {"/scratch": FREE, "/data": FREE, **changes.pop("paths", {})}
    trim = {"enabled": "disabled", "active": "inactive"}
    return {
        "disks": {},
        "paths": paths,
        "target": None,
        "filesystem": False,
        "refusals": [],
        "trim": trim,
        "autofs": True,
        **changes,
    }


def made(node: NodeState, seen: dict[str, Any] | None = None, **settings: Any) -> Manifest:
    """The plan with what the node answers."""
    requested = {"state": "present", **settings}
    answers = {"answers": {"disks": seen or answer(), "offers": OFFERED}}
    return planned("storage", node, {"storage": requested}, **answers)


def result_of(manifest: Manifest) -> StorageResult:
    assert isinstance(manifest.result, StorageResult)
    return manifest.result


def disks_of(manifest: Manifest) -> ScratchDisks:
    disks = result_of(manifest).disks
    assert disks is not None
    return disks


def started(manifest: Manifest) -> list[str]:
    """The mounts that are started."""
    return [unit.name for unit in result_of(manifest).start if unit.name != TRIM]


def stopped(manifest: Manifest) -> list[str]:
    return [unit.name for unit in result_of(manifest).stop if unit.name != TRIM]


def trims(units: tuple[UnitState, ...]) -> list[bool | None]:
    """Whether the timer is enabled, if it is set."""
    return [unit.enabled for unit in units if unit.name == TRIM]


def text_of(manifest: Manifest, path: str) -> str:
    return str(next(file.content for file in manifest.files if file.path == path))


def test_by_default_the_node_is_left_alone() -> None:
    manifest = planned("storage", state())
    assert not manifest.pending
    assert manifest.questions == {}


def test_disks_are_asked_for_before_anything_is_planned() -> None:
    manifest = planned("storage", state(), {"storage": {"state": "present", "scratch_disks": DISKS, "mounts": [NFS]}})
    body = manifest.questions["disks"].body
    assert body["disks"] == DISKS
    assert body["paths"] == ["/data", "/scratch"]
    assert set(body["own"]) == {"array", "filesystem"}
    assert manifest.questions["offers"].body == {"names": ["xfsprogs", "mdadm", "nfs-common"]}


def test_two_disks_are_an_array_that_is_mounted_by_its_uuid() -> None:
    manifest = made(state(), scratch_disks=DISKS)
    disks = disks_of(manifest)
    (line,) = own_lines(text_of(manifest, FSTAB))
    uuid = disks.filesystem
    assert line == f"UUID={uuid} /scratch xfs noatime,nofail,x-systemd.device-timeout=30s 0 0"
    assert text_of(manifest, FSTAB).startswith(TABLE)
    assert disks.array is not None
    assert disks.array.replace("-", "") in text_of(manifest, "/etc/mdadm/mdadm.conf.d/gpunode.conf").replace(":", "")
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == ("xfsprogs", "mdadm")
    assert (started(manifest), [folder.path for folder in result_of(manifest).mount_points]) == (
        ["scratch.mount"],
        ["/scratch"],
    )
    assert trims(result_of(manifest).start) == [True]
    assert [(folder.path, folder.mode) for folder in result_of(manifest).mounted] == [("/scratch", "1777")]
    assert "/scratch is not mounted" in manifest.pending_reasons
    # The ids alone decide who the disks belong to, in any order.
    again = made(state(), scratch_disks=DISKS[::-1])
    assert disks_of(again).filesystem == uuid
    alone = made(state(), scratch_disks=DISKS[:1])
    assert disks_of(alone).array is None
    assert disks_of(alone).filesystem != uuid


def test_remote_data_is_mounted_on_demand_and_no_boot_waits_for_it() -> None:
    manifest = made(state(), mounts=[{**NFS, "options": ["ro"], "limit_s": 5, "idle_s": 600}])
    assert own_lines(text_of(manifest, FSTAB)) == [
        "store:/export /data nfs ro,nofail,_netdev,x-systemd.automount,x-systemd.mount-timeout=5s,"
        "x-systemd.idle-timeout=600s 0 0"
    ]
    assert (started(manifest), result_of(manifest).mounted) == (["data.automount"], ())
    assert "/data is not mounted on demand" in manifest.pending_reasons
    assert result_of(manifest).disks is None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "rclone",
            "vfs_cache_mode=full,cache_dir=/scratch/cache,vfs_cache_max_size=500G,vfs_cache_max_age=8760h,x-systemd.requires-mounts-for",
        ),
        ("s3fs", "use_cache=/scratch/cache,x-systemd.requires-mounts-for=/scratch"),
    ],
)
def test_buckets_keep_what_was_read_on_the_scratch_space(kind: str, words: str) -> None:
    bucket = {"path": "/data", "type": kind, "source": "bucket:set", "cache": "/scratch/cache", "cache_gib": 500}
    manifest = made(state(), answer(paths={"/scratch/cache": FREE}), scratch_disks=DISKS, mounts=[bucket])
    assert words in own_lines(text_of(manifest, FSTAB))[1]
    assert [(folder.path, folder.mode) for folder in result_of(manifest).mounted[1:]] == [("/scratch/cache", "0700")]
    assert result_of(manifest).helper == ("link" if kind == "rclone" else None)


def test_rclone_without_a_cache_does_not_use_the_folder_for_temporary_files() -> None:
    """`env -i rclone config paths` of rclone 1.60: "Cache dir: /tmp/rclone"; units of systemd have no HOME."""
    manifest = made(
        state(), mounts=[{**NFS, "type": "rclone", "source": "bucket:set", "options": ["vfs_cache_mode=full"]}]
    )
    assert ",cache_dir=/var/cache/rclone," in own_lines(text_of(manifest, FSTAB))[0]


@pytest.mark.parametrize(
    "actual",
    [{"kind": "folder", "owner": 1000}, {"kind": "other", "owner": 0}, {"kind": "absent", "owner": 1000}],
)
def test_a_cache_directory_of_a_user_is_refused(actual: dict[str, Any]) -> None:
    """The scratch directory is writable by all users: somebody may have created the directory, or a link."""
    bucket = {"path": "/data", "type": "rclone", "source": "bucket:set", "cache": "/scratch/cache"}
    seen = answer(paths={"/scratch/cache": {**FREE, **actual}})
    assert made(state(), seen, scratch_disks=DISKS, mounts=[bucket]).refusals[0].startswith("cache: /scratch/cache is")


def test_a_settled_node_has_nothing_pending() -> None:
    first = made(state(), scratch_disks=DISKS, mounts=[NFS])
    files = {
        file.path: {"kind": "file", "sha256": None, "mode": "0644", "owner": "root", "group": "root"}
        for file in first.files
    }
    contents = {file.path: str(file.content) for file in first.files}
    node = state(contents[FSTAB], ("xfsprogs", "mdadm", "nfs-common"), contents)
    mounted: dict[str, Any] = {"kind": "folder", "mode": "1777", "entries": None, "users": []}
    seen = answer(
        target="/dev/md127",
        filesystem=True,
        trim={"enabled": "enabled", "active": "active"},
        paths={
            "/scratch": {**mounted, "mounts": [{"source": "/dev/md127", "fstype": "xfs"}]},
            "/data": {**mounted, "mounts": [{"source": "systemd-1", "fstype": "autofs"}]},
        },
    )
    again = made(node, seen, scratch_disks=DISKS, mounts=[NFS])
    assert [file.content for file in again.files] == [file.content for file in first.files]
    assert [reason for reason in again.pending_reasons if "/etc/" not in reason and "/var/" not in reason] == []
    assert (started(again), stopped(again), result_of(again).mount_points) == ([], [], ())
    assert json.loads(text_of(again, BEFORE))["trim"] == {"enabled": "disabled", "active": "inactive"}
    assert files

    changed = made(node, seen, scratch_disks=DISKS, mounts=[{**NFS, "options": ["ro"]}])
    assert stopped(changed) == ["data.mount", "data.automount"]
    assert started(changed) == ["data.automount"]
    seen["paths"]["/data"]["users"] = ["python3 (4711)"]
    held = made(node, seen, scratch_disks=DISKS, mounts=[{**NFS, "options": ["ro"]}])
    assert "python3 (4711) uses it" in held.refusals[0]


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"refusals": ["nvme-x (/dev/nvme0n1): carries xfs"]}, {}, "carries xfs"),
        ({"error": "findmnt failed"}, {}, "could not be queried: findmnt failed"),
        ({"paths": {"/scratch": {**FREE, "kind": "other"}}}, {}, "/scratch is not a directory"),
        ({"paths": {"/scratch": {**FREE, "kind": "folder", "entries": 3}}}, {}, "holds 3 entries"),
        (
            {"paths": {"/scratch": {**FREE, "kind": "folder", "mounts": [{"source": "/dev/sdc1", "fstype": "xfs"}]}}},
            {},
            "/dev/sdc1 is mounted on /scratch",
        ),
        ({"paths": {"/old": FREE}}, {"scratch_path": "/old"}, "/old already has an entry, with /dev/sdb1"),
    ],
)
def test_what_is_in_the_way_is_named_and_nothing_is_planned(
    changes: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    manifest = made(state(), answer(**changes), scratch_disks=DISKS, **settings)
    assert words in manifest.refusals[0]
    assert manifest.files == ()


def test_a_container_has_no_automounts() -> None:
    assert "no /dev/autofs" in made(state(), answer(autofs=False), mounts=[NFS]).refusals[0]


@pytest.mark.parametrize(
    "damage",
    [
        {"refusals": 5},
        {"paths": {"/data": {"kind": "folder"}}},
        {"paths": {"/data": {**FREE, "mode": "rwx"}}},
        {"trim": {"enabled": "x\ny", "active": ""}},
    ],
)
def test_an_invalid_answer_is_reported(damage: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="the answer about disks is malformed"):
        made(state(), answer(**damage), mounts=[NFS])
    silent = {key: value for key, value in answer().items() if key != "paths"}
    with pytest.raises(UsageError, match="reported nothing about /data"):
        made(state(), silent, mounts=[NFS])


LUSTRE = {"path": "/lustre", "type": "lustre", "source": "10.0.0.1@o2ib:/train"}


def test_a_node_with_hooks_settles_until_one_of_them_changes(tmp_path: Path) -> None:
    hook = tmp_path / "lustre.yml"
    hook.write_text("- debug:\n")
    settings: dict[str, Any] = {
        **BOTH,
        "hooks": [str(hook)],
        "hook_vars": {"lustre_source": "10.0.0.1@o2ib:/train"},
        "hook_mounts": [LUSTRE],
    }
    mounted = done(paths={"/lustre": {**THERE, "mounts": [{"source": "systemd-1", "fstype": "autofs"}]}})
    first = own(state(), mounted, **settings)
    assert list(first.pending_reasons) == ["hooks, their variables or mounts changed since they ran"]
    assert result_of(first).hooks == (str(hook),)
    (ran,) = result_of(first).ran
    assert "10.0.0.1" not in str(ran.content)  # a variable may be a secret
    node = state(contents={HOOKS: str(ran.content)})
    settled = own(node, mounted, **settings)
    assert (settled.pending_reasons, result_of(settled).hooks, result_of(settled).ran) == ((), (), ())
    lost = own(node, done(paths={"/lustre": {**THERE, "mounts": []}}), **settings)
    assert list(lost.pending_reasons) == ["/lustre is not mounted by a hook"]
    assert result_of(lost).hooks == (str(hook),)
    for change in ({"hook_vars": {"lustre_source": "other"}}, {"hook_mounts": [{**LUSTRE, "source": "x:/y"}]}):
        assert result_of(own(node, mounted, **{**settings, **change})).hooks == (str(hook),)
    hook.write_text("- debug: {msg: more}\n")
    assert result_of(own(node, mounted, **settings)).hooks == (str(hook),)


def test_mounts_of_hooks_are_in_the_record_that_a_validation_reads(tmp_path: Path) -> None:
    settings = {"hooks": [str(tmp_path / "x.yml")], "hook_mounts": [LUSTRE]}
    manifest = own(state(), done(paths={"/lustre": FREE}), **settings)
    (mount,) = json.loads(text_of(manifest, RECORD))["mounts"]
    assert mount == {**LUSTRE, "options": [], "remote": True}
    assert own_lines(text_of(manifest, FSTAB)) == []
    with pytest.raises(UsageError, match="nothing would mount them"):
        own(state(), done(), **BOTH, hook_mounts=[LUSTRE])
    with pytest.raises(UsageError, match="two entries use the mount point"):
        own(state(), done(), **BOTH, hooks=["/x.yml"], hook_mounts=[{**LUSTRE, "path": "/data"}])


def test_a_relative_hook_runs_each_time() -> None:
    (reason,) = own(state(), done(), **BOTH, hooks=["lustre.yml"]).pending_reasons
    assert reason.startswith("hooks are run each time: lustre.yml")


def test_an_unavailable_client_is_reported_before_any_change() -> None:
    ceph = {"path": "/data", "type": "cephfs", "source": "mon:/set"}
    assert made(state(), mounts=[ceph]).refusals == ("package: no configured repository has ceph-common",)


def test_other_disks_are_not_used_while_the_role_has_some() -> None:
    first = made(state(), scratch_disks=DISKS)
    node = state(contents={RECORD: text_of(first, RECORD)})
    assert "run storage_state: absent first" in made(node, scratch_disks=["nvme-other"]).refusals[0]
    assert made(node, scratch_disks=DISKS[::-1]).refusals == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "requires storage_scratch_disks, storage_mounts or storage_hooks"),
        ({"scratch_disks": ["nvme-*"]}, "nvme-\\* is not a disk id"),
        ({"scratch_disks": ["/dev/sda"]}, "/dev/sda is not a disk id"),
        ({"scratch_disks": ["nvme-a-part1"]}, "is a partition"),
        ({"scratch_disks": ["nvme-a", "/dev/disk/by-id/nvme-a"]}, "names a disk twice"),
        ({"scratch_disks": ["nvme-a"], "confirm_erase": ["nvme-b"]}, "nvme-b is not in storage_scratch_disks"),
        ({"scratch_disks": ["nvme-a"], "scratch_path": "scratch"}, "is not a valid mount point"),
        ({"scratch_disks": ["nvme-a"], "scratch_path": "/var"}, "is a system directory"),
        ({"scratch_disks": ["nvme-a"], "scratch_mode": "rwx"}, "is not a valid mode"),
        ({"mounts": [{**NFS, "type": "smb"}]}, r"storage_mounts\[0\].type"),
        ({"mounts": [{**NFS, "source": "a b"}]}, r"storage_mounts\[0\].source"),
        ({"mounts": [{**NFS, "options": ["a,b"]}]}, "is not a valid mount option"),
        *(
            # The first is not a valid option: the error must not print it.
            ({"mounts": [{**NFS, "options": [f"{name}=hunter{mark}2"]}]}, f"{name}: all users can read /etc/fstab")
            for name, mark in (("password", "#"), ("secret", ""))
        ),
        ({"mounts": [{**NFS, "cache": "/cache"}]}, "nfs has no cache"),
        ({"mounts": [{**NFS, "cache_hours": 5}]}, "cache_hours applies to the cache of rclone"),
        *(
            ({"mounts": [{**NFS, "type": "rclone", "options": [f"{name}=/scratch/x"]}]}, "set the cache directory as")
            for name in ("cache_dir", "cache-dir", "use_cache")
        ),
        ({"mounts": [NFS, NFS]}, "two entries use the mount point /data"),
    ],
)
def test_a_malformed_setting_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        made(state(), **settings)


def test_a_file_with_a_secret_may_be_named() -> None:
    ceph = {**NFS, "options": ["secretfile=/etc/ceph/key", "passwd_file=/etc/passwd-s3fs", "name=user"]}
    assert made(state(), mounts=[ceph]).refusals == ()


def removal(node: NodeState, seen: dict[str, Any] | None = None, **settings: Any) -> Manifest:
    answers = {"answers": {"disks": seen or answer()}}
    return planned("storage", node, {"storage": {"state": "absent", **settings}}, **answers)


def test_removal_restores_the_table_and_keeps_unconfirmed_data() -> None:
    first = made(state(), scratch_disks=DISKS, mounts=[NFS])
    contents = {path: text_of(first, path) for path in (RECORD, BEFORE)}
    node = state(text_of(first, FSTAB), ("xfsprogs", "mdadm", "nfs-common"), {**contents, ROLE.record: "mdadm\n"})
    manifest = removal(node)
    assert text_of(manifest, FSTAB) == TABLE
    assert result_of(manifest).disks is None
    assert "keeps its data" in manifest.notes[0]
    assert {"xfsprogs must be removed", "nfs-common must be removed"} <= set(manifest.pending_reasons)
    assert "mdadm must be removed" not in manifest.pending_reasons
    assert trims(result_of(manifest).stop) == [False]
    assert {"/data", "/scratch"} <= {folder.path for folder in manifest.folders}
    assert stopped(manifest) == ["scratch.mount", "data.mount", "data.automount"]

    assert result_of(removal(node, confirm_erase=DISKS)).erase == tuple(DISKS)
    assert "the role did not create it" in removal(node, confirm_erase=["nvme-theirs"]).refusals[0]
    busy = answer(paths={"/scratch": {**FREE, "users": ["sleep (7)"]}})
    assert "sleep (7) uses it" in removal(node, busy).refusals[0]


def test_a_table_without_a_line_is_restored_without_asking_findmnt() -> None:
    first = made(state("# no line\n"), mounts=[NFS])
    node = state(text_of(first, FSTAB), contents={BEFORE: text_of(first, BEFORE)})
    table = next(file for file in removal(node).files if file.path == FSTAB)
    assert (table.content, table.validate_with) == ("# no line\n", None)


def test_removal_of_nothing_is_nothing() -> None:
    manifest = planned("storage", state(), {"storage": {"state": "absent"}})
    assert (manifest.pending, manifest.questions) == (False, {})


@pytest.mark.parametrize("text", ["{", "[]", '{"disks": {"disks": ["*"], "filesystem": "x"}}', '{"disks": null}', ""])
def test_a_damaged_record_is_a_refusal(text: str) -> None:
    """It is unknown then which disks are in use."""
    node = state(contents={RECORD: text})
    assert made(node, mounts=[NFS]).refusals[0].startswith(f"record: {RECORD} is damaged")
    assert removal(node).refusals[0].startswith(f"record: {RECORD} is damaged")


@pytest.mark.parametrize(
    "change",
    [
        {"disks": ["*"]},
        {"disks": [DISKS[0], "../sda"]},
        {"disks": [1]},
        {"filesystem": "x"},
        {"array": "x"},
        {"filesystem": None},
    ],
)
def test_a_record_with_one_invalid_value_is_a_refusal(change: dict[str, Any]) -> None:
    record = json.loads(text_of(made(state(), scratch_disks=DISKS), RECORD))
    record["disks"] |= change
    node = state(contents={RECORD: json.dumps(record)})
    assert removal(node).refusals[0].startswith(f"record: {RECORD} is damaged")


def test_lines_of_others_stay_as_they_are() -> None:
    assert with_lines("a b c", []) == "a b c"
    assert with_lines(f"{TABLE}{BEGIN}\nx /y z 0 0\n{END}\nlast /l x 0 0\n", []) == f"{TABLE}last /l x 0 0\n"


HOME = "UUID=bbbb /home ext4 defaults,nofail 0 2"


def table_of(manifest: Manifest) -> list[tuple[str, str]]:
    """The lines of fstab after a run, each with its owner, and lines of others around and behind them."""
    lines = [(line, "theirs") for line in ("# static file system information", *TABLE.splitlines())]
    lines += [(BEGIN, "mark"), *((line, "ours") for line in own_lines(text_of(manifest, FSTAB))), (END, "mark")]
    return [*lines, (HOME, "theirs"), ("/dev/sdz1 none swap sw 0 0", "theirs")]


def damaged(lines: list[tuple[str, str]], rng: random.Random) -> list[tuple[str, str]]:
    """The table with lines lost, doubled, moved, joined, cut or changed in a byte; each keeps its owner."""
    rows = list(lines)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(rows))
        line, owner = rows[at]
        kind = rng.choice(["lost", "doubled", "moved", "byte", "byte", "cut", "carriage return", "separator"])
        if kind == "lost" and owner != "theirs":
            rows.pop(at)
        elif kind == "doubled":
            rows.insert(rng.randrange(len(rows)), (line, owner))
        elif kind == "moved":
            rows.insert(rng.randrange(len(rows)), rows.pop(at))
        elif kind == "byte" and line:
            where = rng.randrange(len(line))
            rows[at] = (line[:where] + chr(rng.randrange(33, 127)) + line[where + 1 :], owner)
        elif kind == "cut":
            rows[at] = (line[: rng.randrange(len(line) + 1)], owner)
        elif kind == "carriage return":
            rows[at] = (f"{line}\r", owner)
        elif kind == "separator":
            rows[at] = (f"{line} # {rng.choice(chr(11) + chr(12) + chr(0x85) + chr(0x2028))}comment", owner)
    return rows


def test_a_damaged_table_loses_no_line_of_others_and_stops_no_mount_of_theirs() -> None:
    rng = random.Random(7)  # noqa: S311
    first = made(state(), scratch_disks=DISKS, mounts=[NFS])
    kept: dict[str, int] = {"refused": 0, "planned": 0}
    for number in range(effort(150, 50_000)):
        lines = damaged(table_of(first), rng)
        text = "".join(f"{line}\n" for line, _ in lines)[: None if rng.random() < 0.9 else -1]
        contents = {path: text_of(first, path) for path in (RECORD, BEFORE)} if rng.random() < 0.8 else {}
        node = state(text, contents=contents)
        settings: dict[str, Any] = rng.choice([{"scratch_disks": DISKS, "mounts": [NFS]}, {"mounts": [NFS]}])
        manifest = removal(node) if number % 2 else made(node, answer(filesystem=True, target="/dev/md127"), **settings)
        tables = [str(file.content) for file in manifest.files if file.path == FSTAB]
        if manifest.refusals or not tables:
            kept["refused"] += bool(manifest.refusals)
            assert (manifest.refusals == ()) or (manifest.files, manifest.result) == ((), None)
            continue
        kept["planned"] += 1
        after = Counter(tables[0].split("\n"))
        foreign = Counter(line for line, owner in lines if owner == "theirs")
        assert foreign <= after, (foreign - after, text)
        theirs_too = {f"{escaped(path)}.mount" for path in ("/", "/old", "/home")} & {*stopped(manifest)}
        assert not theirs_too, text
    assert min(kept.values()) > 10, kept


def test_a_damaged_record_never_leads_to_a_new_file_system() -> None:
    """Bytes of the record change; the file system cannot be found at the same time."""
    rng = random.Random(8)  # noqa: S311
    first = made(state(), scratch_disks=DISKS)
    record, table = text_of(first, RECORD), text_of(first, FSTAB)
    refused = 0
    for _ in range(effort(150, 50_000)):
        text = record
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            cut = rng.choice([text[:at], text[:at] + chr(rng.randrange(32, 127)) + text[at + 1 :], text[at:]])
            text = cut or "{"
        node = state(rng.choice([table, TABLE]), contents={RECORD: text})
        unanswered = planned("storage", node, {"storage": {"state": "present", "scratch_disks": DISKS}})
        refused += bool(unanswered.refusals)
        assert unanswered.refusals or unanswered.questions["disks"].body["used"], text
        manifest = made(node, scratch_disks=DISKS)
        assert manifest.refusals or result_of(manifest).used, text
    assert refused > 10


@pytest.mark.parametrize(
    ("path", "name"),
    [("/scratch", "scratch"), ("/mnt/a-b", "mnt-a\\x2db"), ("/a.b/.c", "a.b-.c"), ("/data+1", "data\\x2b1")],
)
def test_units_are_named_as_systemd_does(path: str, name: str) -> None:
    assert escaped(path) == name


MADE = {"source": "/dev/md127", "fstype": "xfs"}
ON_DEMAND = {"source": "systemd-1", "fstype": "autofs"}
BUCKET = {"path": "/data", "type": "rclone", "source": "bucket:set", "cache": "/scratch/cache"}
THERE: dict[str, Any] = {"kind": "folder", "mode": "1777", "entries": None, "users": [], "owner": 0}


def done(**changes: Any) -> dict[str, Any]:
    """What a node answers on which everything is mounted."""
    paths = {
        "/scratch": {**THERE, "mounts": [MADE]},
        "/data": {**THERE, "mounts": [ON_DEMAND]},
        "/scratch/cache": {**THERE, "mounts": []},
    }
    timer = {"enabled": "enabled", "active": "active"}
    return answer(
        **{
            "target": "/dev/md127",
            "filesystem": True,
            "trim": timer,
            **changes,
            "paths": paths | changes.get("paths", {}),
        }
    )


def with_file(node: NodeState, path: str, **actual: Any) -> NodeState:
    return node.model_copy(update={"files": {**node.files, path: FileState.model_validate(actual)}})


def own(node: NodeState, seen: dict[str, Any], **settings: Any) -> Manifest:
    """The plan without what is read off the files that it names."""
    run = context_of({"storage": {"state": "present", **settings}}, answers={"disks": seen, "offers": OFFERED})
    return ROLE.plan(node, run.settings_of("storage"), run)


BOTH: dict[str, Any] = {"scratch_disks": DISKS, "mounts": [NFS]}


@pytest.mark.parametrize(
    ("seen", "settings", "pending"),
    [
        (done(), BOTH, []),
        (done(filesystem=False), BOTH, [f"{', '.join(DISKS)}: the file system must be created"]),
        (done(filesystem=False, trim={"enabled": "", "active": ""}), {"mounts": [NFS]}, []),
        (done(paths={"/scratch": {**THERE, "mounts": []}}), BOTH, ["/scratch is not mounted"]),
        (
            done(paths={"/scratch": {**THERE, "mounts": [{**MADE, "fstype": "ext4"}]}}),
            BOTH,
            ["/scratch is not mounted"],
        ),
        (
            done(paths={"/data": {**THERE, "mounts": [{"source": "store:/export", "fstype": "nfs4"}]}}),
            BOTH,
            ["/data is not mounted on demand"],
        ),
        (done(), {**BOTH, "scratch_mode": "755"}, ["/scratch does not have mode 0755"]),
        (done(paths={"/scratch/cache": FREE}), {**BOTH, "mounts": [BUCKET]}, ["/scratch/cache is missing"]),
        (done(trim={"enabled": "disabled", "active": "active"}), BOTH, ["fstrim.timer does not run"]),
        (done(trim={"enabled": "enabled", "active": "inactive"}), BOTH, ["fstrim.timer does not run"]),
        (done(trim={"enabled": "", "active": ""}), BOTH, []),
        (done(trim={"enabled": "disabled", "active": "inactive"}), {**BOTH, "trim": False}, []),
        (done(trim={"enabled": "disabled", "active": "inactive"}), {"mounts": [NFS]}, []),
    ],
)
def test_what_is_pending_besides_files_is_named(
    seen: dict[str, Any], settings: dict[str, Any], pending: list[str]
) -> None:
    node = with_file(state(), HELPER, kind="link", target="/usr/bin/rclone")
    manifest = own(node, seen, **settings)
    assert (list(manifest.pending_reasons), manifest.refusals) == (pending, ())
    has_timer = bool(seen["trim"]["enabled"])
    assert trims(result_of(manifest).start) == [True] * (
        has_timer and "scratch_disks" in settings and settings.get("trim", True)
    )
    assert len(started(manifest)) == sum("is not mounted" in line for line in pending)
    # One that is as requested is left alone: its owner may be another user.
    touched = any(folder.path == "/scratch" for folder in result_of(manifest).mounted)
    assert touched == any(line.startswith("/scratch ") for line in pending)


@pytest.mark.parametrize(
    ("actual", "pending"),
    [
        ({"kind": "link", "target": "/usr/bin/rclone"}, False),
        ({"kind": "link", "target": "/opt/rclone"}, True),
        ({"kind": "file", "target": "/usr/bin/rclone"}, True),
        ({"kind": "absent"}, True),
        (None, True),
    ],
)
def test_rclone_needs_its_helper_of_mount(actual: dict[str, Any] | None, *, pending: bool) -> None:
    node = state() if actual is None else with_file(state(), HELPER, **actual)
    manifest = own(node, done(), scratch_disks=DISKS, mounts=[BUCKET])
    assert list(manifest.pending_reasons) == ([f"{HELPER} is not a link to rclone"] if pending else [])
    assert own(node, done(), **BOTH).pending_reasons == ()


@pytest.mark.parametrize(
    ("kind", "fstype", "free"),
    [
        ("nfs", "nfs", True),
        ("nfs", "nfs4", True),
        ("nfs", "ext4", False),
        ("cephfs", "ceph", True),
        ("cephfs", "nfs4", False),
        ("s3fs", "fuse.s3fs", True),
        ("s3fs", "nfs4", False),
        ("rclone", "fuse.rclone", True),
        ("rclone", "nfs4", False),
    ],
)
def test_a_mount_of_another_kind_is_in_the_way(kind: str, fstype: str, *, free: bool) -> None:
    mounts = [ON_DEMAND, {"source": "there", "fstype": fstype}]
    seen = done(paths={"/data": {**THERE, "mounts": mounts}})
    node = state(installed=("ceph-common",))
    for disks in ([], DISKS):
        manifest = own(node, seen, scratch_disks=disks, mounts=[{**NFS, "type": kind}])
        in_the_way = ("path: there is mounted on /data: unmount it, or choose another path",)
        assert manifest.refusals == (() if free else in_the_way)


def test_files_that_a_mount_would_hide_and_the_first_users_of_one_that_leaves_are_named() -> None:
    hidden = done(paths={"/data": {**THERE, "mounts": [], "entries": 1}})
    assert own(state(), hidden, mounts=[NFS]).refusals == (
        "path: /data holds 1 entries, which a mount would hide: move them",
    )
    other = done(paths={"/data": {**THERE, "kind": "other", "mounts": [ON_DEMAND]}})
    assert own(state(), other, mounts=[NFS]).refusals == ("path: /data is not a directory",)
    table = text_of(made(state(), mounts=[NFS]), FSTAB)
    users = [f"p{number}" for number in range(6)]
    held = done(paths={"/data": {**THERE, "mounts": [ON_DEMAND], "users": users, "entries": 2}})
    assert own(state(table), held, scratch_disks=DISKS).refusals == (
        "in use: /data must be unmounted, and p0, p1, p2, p3, p4 uses it: stop that first",
    )
    assert own(state(table), held | {"paths": {"/scratch": FREE}}, scratch_disks=DISKS).refusals == ()
    foreign = done(paths={"/scratch/cache": {**THERE, "mounts": [], "owner": None}})
    assert own(state(), foreign, scratch_disks=DISKS, mounts=[BUCKET]).refusals == ()


@pytest.mark.parametrize(
    ("settings", "apt", "dnf"),
    [
        ({"scratch_disks": DISKS[:1]}, ["xfsprogs"], ["xfsprogs"]),
        ({"scratch_disks": DISKS}, ["xfsprogs", "mdadm"], ["xfsprogs", "mdadm"]),
        ({"mounts": [NFS]}, ["nfs-common"], ["nfs-utils"]),
        ({"mounts": [{**NFS, "type": "s3fs"}]}, ["s3fs"], ["s3fs-fuse"]),
        ({"mounts": [{**NFS, "type": "rclone"}]}, ["rclone", "fuse3"], ["rclone", "fuse3"]),
        (
            {"mounts": [{**NFS, "type": "cephfs"}, {**NFS, "path": "/scratch"}]},
            ["nfs-common", "ceph-common"],
            ["nfs-utils", "ceph-common"],
        ),
    ],
)
def test_only_packages_of_what_is_requested_are_asked_for(
    settings: dict[str, Any], apt: list[str], dnf: list[str]
) -> None:
    of_dnf: dict[str, Any] = {"error": None, "versionlock": True, "version": "4", "installed": {}}
    base = state()
    fedora = state_of(FACTS, dnf=of_dnf, files={FSTAB: base.files[FSTAB].model_dump()}, contents=base.contents)
    for node, names, manager in ((base, apt, "apt"), (fedora, dnf, "dnf")):
        first = planned("storage", node, {"storage": {"state": "present", **settings}})
        assert first.questions["offers"].body == {"names": names}
        answers = {"disks": answer(), "offers": {"offered": {name: ["1"] for name in names}}}
        manifest = planned("storage", node, {"storage": {"state": "present", **settings}}, answers=answers)
        assert manifest.packages is not None
        assert manifest.packages.manager == manager
        assert list(manifest.packages.install) == names
        less = {**answers, "offers": {"offered": {name: ["1"] for name in names[1:]}}}
        lacking = planned("storage", node, {"storage": {"state": "present", **settings}}, answers=less)
        assert lacking.refusals == (f"package: no configured repository has {names[0]}",)
        conf = ARRAYS[manager]
        line = text_of(manifest, conf)
        disks = result_of(manifest).disks
        uuid = ((disks and disks.array) or "").replace("-", "")
        assert line.splitlines()[-1] == (
            f"ARRAY /dev/md/gpunode-scratch metadata=1.2 UUID={uuid[:8]}:{uuid[8:16]}:{uuid[16:24]}:{uuid[24:]}"
            if uuid
            else "None"
        )
    settled = planned("storage", state(installed=tuple(apt)), {"storage": {"state": "present", **settings}})
    assert settled.questions.keys() == {"disks"}
    failed = {"disks": answer(), "offers": {"error": "no lists"}}
    silent = planned("storage", base, {"storage": {"state": "present", **settings}}, answers=failed)
    assert silent.refusals == ("storage: the node could not be queried: no lists",)


def test_what_was_there_is_remembered_from_the_first_run() -> None:
    first = {"trim": {"enabled": "masked", "active": "failed"}, "folders": ["/old", 5]}
    node = state(contents={BEFORE: json.dumps(first)})
    seen = done(paths={"/data": FREE, "/scratch/cache": FREE}, trim={"enabled": "enabled", "active": "active"})
    manifest = own(node, seen, scratch_disks=DISKS, mounts=[BUCKET])
    expected = {"trim": first["trim"], "folders": ["/data", "/old", "/scratch/cache"]}
    assert text_of(manifest, BEFORE) == json.dumps(expected, indent=1) + "\n"
    bare = own(state(contents={BEFORE: '{"folders": 5}'}), done(), scratch_disks=DISKS)
    assert json.loads(text_of(bare, BEFORE)) == {"trim": seen["trim"], "folders": []}
    assert [folder.path for folder in result_of(manifest).mount_points] == ["/data"]
    assert result_of(own(state(), done(), **BOTH, hooks=["x.yml"])).hooks == ("x.yml",)
    assert result_of(bare).hooks == ()
    (table,) = (file for file in manifest.files if file.path == FSTAB)
    assert (table.mode, table.owner, table.group) == ("0644", "root", "root")
    foreign = with_file(state(), FSTAB, kind="file", sha256="0" * 64, mode="0600", owner="adm", group="disk")
    (table,) = (file for file in own(foreign, done(), **BOTH).files if file.path == FSTAB)
    assert (table.mode, table.owner, table.group) == ("0600", "adm", "disk")
    assert table.validate_with == ("findmnt", "--tab-file", "%s", "--noheadings")


def test_the_question_for_the_disks_names_what_may_be_erased_and_what_was_made() -> None:
    first = made(state(), scratch_disks=DISKS)
    uuids = disks_of(first).model_dump(exclude={"disks"})
    settings = {"state": "present", "scratch_disks": DISKS, "mounts": [BUCKET], "confirm_erase": DISKS[:1]}
    paths = ["/data", "/scratch", "/scratch/cache"]
    expected = {"disks": DISKS, "own": uuids, "paths": paths, "erase": DISKS[:1], "used": False}
    assert planned("storage", state(), {"storage": settings}).questions["disks"].body == expected
    table = state(text_of(first, FSTAB))
    used = [state(contents={RECORD: text_of(first, RECORD)}), table]
    for node in used:
        assert planned("storage", node, {"storage": settings}).questions["disks"].body == {**expected, "used": True}
        again = own(node, done(), **BOTH, confirm_erase=DISKS[:1])
        assert disks_of(again) == disks_of(first)
        assert (result_of(again).erase, result_of(again).used) == (tuple(DISKS[:1]), True)
    other = planned("storage", table, {"storage": {"state": "present", "mounts": [NFS]}}).questions["disks"].body
    assert other == {"disks": [], "own": {}, "paths": ["/data", "/scratch"], "erase": [], "used": False}
    alone = {"state": "present", "scratch_disks": ["nvme-other"]}
    body = planned("storage", table, {"storage": alone}).questions["disks"].body
    assert (body["used"], body["own"].keys()) == (False, {"filesystem"})
    # Disks that are listed no more are not forgotten.
    assert "lists others" in own(used[0], done(), mounts=[NFS]).refusals[0]
    assert own(used[0], done(autofs=False), scratch_disks=DISKS).refusals == ()


@pytest.mark.parametrize(
    ("change", "damaged"),
    [
        ({}, False),
        ({"disks": None, "mounts": [{"remote": True}]}, False),
        ({"disks": None, "mounts": [{"remote": True}, {"remote": False}]}, True),
        ({"disks": None, "mounts": ["/data"]}, True),
        ({"disks": [], "mounts": []}, True),
        ({"schema": "gpunode.storage/2"}, True),
        ({"mounts": None}, True),
    ],
)
def test_a_record_is_one_that_the_role_writes(change: dict[str, Any], *, damaged: bool) -> None:
    record = json.loads(text_of(made(state(), scratch_disks=DISKS), RECORD))
    node = state(contents={RECORD: json.dumps({**record, **change})})
    assert ("is damaged" in " ".join(removal(node).refusals)) is damaged


def test_a_node_without_fstab_or_package_manager_is_refused() -> None:
    gone = with_file(state(contents={BEFORE: "{}"}), FSTAB, kind="absent")
    gone = gone.model_copy(update={"contents": {BEFORE: "{}"}})
    assert made(gone, mounts=[NFS]).refusals == (f"fstab: {FSTAB} is missing or cannot be read",)
    assert removal(gone).refusals == (f"fstab: {FSTAB} is missing or cannot be read",)
    for chosen in ("present", "absent"):
        bare = state().model_copy(update={"apt": None})
        assert "no-package-manager" in planned("storage", bare, {"storage": {"state": chosen}}).refusals[0]


def test_a_removal_erases_what_is_confirmed_and_removes_what_the_role_made() -> None:
    first = made(state(), answer(paths={"/scratch/cache": FREE}), scratch_disks=DISKS, mounts=[BUCKET])
    contents = {path: text_of(first, path) for path in (RECORD, BEFORE)}
    node = state(text_of(first, FSTAB), contents=contents)
    unanswered = planned("storage", node, {"storage": {"state": "absent", "confirm_erase": DISKS[:1]}})
    uuids = disks_of(first).model_dump(exclude={"disks"})
    assert unanswered.questions["disks"].body == {
        "disks": DISKS,
        "own": uuids,
        "paths": ["/data", "/scratch"],
        "erase": [],
        "used": False,
    }
    manifest = removal(node, confirm_erase=DISKS[:1])
    assert manifest.notes == (f"{DISKS[1]}: keeps its data; storage_confirm_erase erases it",)
    assert manifest.result == StorageResult(
        leaves=True,
        disks=disks_of(first),
        erase=tuple(DISKS[:1]),
        helper="absent",
        stop=(
            *(UnitState(name=name, state="stopped") for name in ("scratch.mount", "data.mount", "data.automount")),
            UnitState(name=TRIM, enabled=False, state="stopped"),
        ),
    )
    assert removal(node, confirm_erase=DISKS).notes == ()
    assert manifest.pending_reasons[:2] == ("/scratch has to be unmounted", "/data has to be unmounted")
    assert [(file.path, file.phase) for file in manifest.files] == [
        (FSTAB, "first"),
        *((path, "after") for path in (*ROLE.files, ROLE.record)),
    ]
    folders = ["/data", "/scratch", "/scratch/cache", "/etc/mdadm/mdadm.conf.d", "/etc/mdadm.conf.d"]
    assert [folder.path for folder in manifest.folders] == [*folders, "/etc/gpunode", ROLE.folder]
    failed = removal(node, answer(error="findmnt failed"))
    assert failed.refusals == ("storage: the node could not be queried: findmnt failed",)


@pytest.mark.parametrize("path", [RECORD, BEFORE, *ARRAYS.values()])
def test_a_removal_begins_at_any_trace_of_the_role(path: str) -> None:
    text = json.dumps({"schema": "gpunode.storage/1", "disks": None, "mounts": []})
    manifest = removal(state(contents={path: text}))
    assert manifest.result == StorageResult(leaves=True)
    assert FSTAB not in {file.path for file in manifest.files}
    assert removal(with_file(state(), path, kind="absent")).result is None
    assert "the role did not create it" in removal(state(contents={path: text}), confirm_erase=DISKS).refusals[0]


def test_a_removal_takes_a_package_along_that_alone_is_left() -> None:
    manifest = removal(state(installed=("mdadm",), contents={ROLE.record: "# installed by gpunode\nmdadm\n"}))
    assert "mdadm must be removed" in manifest.pending_reasons
