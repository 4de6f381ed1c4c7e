"""What the probe sees of the roles storage and gpu_tools: mounts that are recorded, servers that hang, programs."""

import json
import time
from pathlib import Path

import pytest
from probe_node import collect, link, put, tool

from gpunode.facts import facts_from_bundle
from gpunode.onnode import probe as script

UUID = "0d1f7a58-2f3a-5c0e-9a2b-6f7e8d9c0b1a"
SCRATCH = {"path": "/scratch", "source": f"UUID={UUID}", "type": "xfs", "options": ["noatime"], "remote": False}
DATA = {"path": "/data", "source": "store:/export", "type": "nfs", "options": [], "remote": True}
DOWN = {**DATA, "path": "/down"}
MOUNTS = """\
22 1 8:1 / / rw,noatime shared:1 - ext4 /dev/sda1 rw
30 22 9:127 / /scratch rw,noatime shared:2 - xfs /dev/md127 rw,attr2
31 22 0:50 / /data rw,relatime shared:3 - autofs systemd-1 rw,fd=5
32 31 0:51 / /data ro,relatime shared:4 - nfs4 store:/export ro,vers=4.2
33 22 0:52 / /down rw,relatime shared:5 - autofs systemd-1 rw,fd=6
"""
STAT = """\
for path in "$@"; do :; done
case $path in
/scratch/.) echo '4096 1000000 600000' ;;
/data/.) echo '1048576 102400 51200' ;;
*) exec /bin/sleep 30 ;;
esac
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(script, "STORAGE_S", 1.0)
    put(tmp_path, "/etc/gpunode/storage.json", json.dumps({"mounts": [SCRATCH, DATA, DOWN]}))
    put(tmp_path, "/proc/self/mountinfo", MOUNTS)
    put(tmp_path, "/dev/md127")
    link(tmp_path, f"/dev/disk/by-uuid/{UUID}", "../../md127")
    tool(tmp_path / "bin", "stat", STAT)
    return tmp_path


def test_mounts_are_compared_and_a_server_that_hangs_costs_its_limit_alone(node: Path) -> None:
    started = time.monotonic()
    facts = facts_from_bundle(collect(node, node / "bin"))
    assert time.monotonic() - started < 20
    scratch, data, down = facts.storage or ()
    assert (scratch.mounted_type, scratch.mounted_options, scratch.same_device) == ("xfs", ("rw", "noatime"), True)
    assert (scratch.size_mib, scratch.free_mib, scratch.options) == (3906, 2343, ("noatime",))
    assert (data.mounted_type, data.free_mib, data.problem, data.remote) == ("nfs4", 51200, None, True)
    assert (down.mounted_type, down.problem) == (None, "no answer within 1 s")


def test_a_file_system_that_an_error_made_read_only_is_seen(node: Path) -> None:
    """The kernel then leaves the mount's own flag: only the superblock has it."""
    before = [line for line in MOUNTS.splitlines() if " - xfs " in line]
    assert len(before) == 1
    head, _, tail = before[0].partition(" - ")
    kind, source, options = tail.split(" ")
    after = f"{head} - {kind} {source} {options.replace('rw', 'ro', 1)}"
    put(node, "/proc/self/mountinfo", MOUNTS.replace(before[0], after))
    scratch = (facts_from_bundle(collect(node, node / "bin")).storage or ())[0]
    assert "ro" in scratch.mounted_options
    assert "rw" not in scratch.mounted_options


def test_another_device_and_an_empty_place_are_seen(node: Path) -> None:
    put(
        node,
        "/proc/self/mountinfo",
        MOUNTS.replace("/dev/md127", "/dev/sda1").replace("31 22", "").replace("32 31", ""),
    )
    put(node, "/dev/sda1")
    tool(node / "bin", "stat", "echo 'stat: cannot read: Input/output error' >&2; exit 1")
    scratch, data, _ = facts_from_bundle(collect(node, node / "bin")).storage or ()
    assert scratch.same_device is False
    assert scratch.problem == "stat: cannot read: Input/output error"
    assert data.mounted_type is None


@pytest.mark.parametrize("text", ["{", "[]", '{"mounts": [{"path": 1}]}', '{"mounts": 5}'])
def test_a_damaged_record_is_a_gap_and_no_verdict(node: Path, text: str) -> None:
    put(node, "/etc/gpunode/storage.json", text)
    facts = facts_from_bundle(collect(node, node / "bin"))
    assert facts.storage is None
    assert "storage.json" in facts.gaps["storage"]


def test_a_node_without_records_has_neither(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    facts = facts_from_bundle(collect(tmp_path, tmp_path / "bin"))
    assert (facts.storage, facts.tools) == (None, None)
    assert not {"storage", "tools"} & facts.gaps.keys()


def test_recorded_programs_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    put(tmp_path, "/etc/gpunode/tools.json", json.dumps({"programs": ["fio", "nvme", "../sh"]}))
    put(tmp_path, "/usr/bin/fio")
    facts = facts_from_bundle(collect(tmp_path, tmp_path / "bin"))
    assert facts.tools == {"fio": "/usr/bin/fio", "nvme": None}
    put(tmp_path, "/etc/gpunode/tools.json", "{}")
    assert "tools.json" in facts_from_bundle(collect(tmp_path, tmp_path / "bin")).gaps["tools"]
