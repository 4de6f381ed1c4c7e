"""Input pipelines slowed on purpose, with real files, mounts, PyTorch and Pillow: the named limit is the planted one.

The remote mount is sshfs to an SFTP server behind a relay that delays its answers; the slow network is an interface
that tc limits, and the slow disk a loop device that the kernel's block throttle limits.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from programs import run_program

from gpunode.checks.performance_steps import limit_of
from gpunode.cli import run as gpunode
from gpunode.facts.models.measured import InputValues
from gpunode.facts.models.workload import Record, values_of

PYTHON = os.environ.get("GPUNODE_TORCH_PYTHON")
SFTP = Path("/usr/lib/openssh/sftp-server")
THROTTLE = Path("/sys/fs/cgroup/blkio")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="GPUNODE_TORCH_PYTHON names no Python with PyTorch"),
    pytest.mark.alone,
    pytest.mark.timeout(600),
]
DELAY_S = 0.02
# An SFTP server behind a line with latency: what it answers arrives later, and not slower.
RELAY = """\
import queue, socket, subprocess, sys, threading, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
client, _ = server.accept()
sftp = subprocess.Popen([sys.argv[2]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
waiting = queue.Queue()
def collect():
    while data := sftp.stdout.read1(65536):
        waiting.put((time.monotonic() + float(sys.argv[3]), data))
def answer():
    while True:
        send_at, data = waiting.get()
        time.sleep(max(0.0, send_at - time.monotonic()))
        client.sendall(data)
for work in (collect, answer):
    threading.Thread(target=work, daemon=True).start()
while data := client.recv(65536):
    sftp.stdin.write(data)
    sftp.stdin.flush()
"""
IMAGES = """\
import random, sys
from PIL import Image
side, number = int(sys.argv[2]), int(sys.argv[3])
for each in range(number):
    noise = Image.frombytes("RGB", (side, side), random.Random(each).randbytes(side * side * 3))
    noise.save(f"{sys.argv[1]}/{each}.jpg", quality=90)
"""
TABLE = """\
import os, sys
import pyarrow, pyarrow.parquet
rows = [{"text": os.urandom(4000).hex(), "n": list(range(400))} for _ in range(1500)]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sys.argv[1] + "/x.parquet", compression="gzip",
    use_dictionary=False, row_group_size=500)
"""
TRAINING = """\
import io, sys, time
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
import glob
files = glob.glob(sys.argv[1] + "/*.jpg")
class Samples(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, number):
        time.sleep(float(sys.argv[2]))
        if float(sys.argv[2]) == 0:
            with Image.open(files[number % len(files)]) as image:
                image.convert("RGB").resize((224, 224)).tobytes()
        return torch.ones(8), number % 4
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for samples, labels in DataLoader(Samples(), 4, num_workers=1):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(samples), labels).backward()
    optimizer.step()
"""


def with_framework(program: str, *words: object) -> None:
    done = run_program([PYTHON, "-c", program, *words], limit_s=120)
    if "No module named" in done.stderr:
        pytest.skip(f"the Python of PyTorch lacks {done.stderr.rpartition('named')[2].strip()}")
    assert done.returncode == 0, done.stderr


def measured(archive: Path, folder: Path, before: Sequence[object] = ()) -> InputValues:
    """What level standard measures of a directory. ``before``: words that start the program in a namespace or group."""
    settings = json.dumps({"level": "standard", "data": str(folder)})
    argv = [*before, PYTHON, archive, "--tests", "input", "--settings", settings]
    done = run_program(argv, limit_s=300, env={**os.environ, "TMPDIR": str(archive.parent)})
    assert done.returncode == 0, done.stderr
    records = [Record.model_validate_json(line) for line in done.stdout.splitlines() if '"input.pipeline"' in line]
    (record,) = [record for record in records if record.record == "input.pipeline"]
    assert record.error is None, record.error
    values = values_of(record, InputValues)
    assert isinstance(values, InputValues), values
    return values


def shown(values: InputValues) -> str:
    """What the limit was computed from."""
    return f"{limit_of(values, 'cold')} {limit_of(values, 'hot')} {values.model_dump_json()}"


# --- on this machine


def test_large_images_are_limited_by_decoding(archive: Path, tmp_path: Path) -> None:
    with_framework(IMAGES, tmp_path, 1200, 24)
    values = measured(archive, tmp_path)
    assert values.kind == "images"
    assert limit_of(values, "hot")[0] == "decoding", shown(values)


def test_tiny_files_are_limited_by_python(archive: Path, tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"{number}.bin").write_bytes(b"sample " * 10)
    values = measured(archive, tmp_path)
    assert values.files == 3000
    assert limit_of(values, "hot")[0] == "Python", shown(values)


def test_a_packed_table_is_limited_by_decoding(archive: Path, tmp_path: Path) -> None:
    with_framework(TABLE, tmp_path)
    values = measured(archive, tmp_path)
    assert values.kind == "parquet"
    assert limit_of(values, "hot")[0] == "decoding", shown(values)


# --- a disk


@pytest.fixture
def slow_disk(tmp_path: Path) -> Iterator[tuple[Path, list[object]]]:
    """A file system on a loop device, and the words that start a program in a group with 4 MB/s from it."""
    limit = THROTTLE / "blkio.throttle.read_bps_device"
    if os.geteuid() != 0 or not limit.exists() or shutil.which("losetup") is None:
        pytest.skip("no cgroup v1 with a block throttle here")
    image, folder, group = tmp_path / "image", tmp_path / "disk", THROTTLE / f"gpunode-test-{os.getpid()}"
    with image.open("wb") as file:
        file.truncate(256 << 20)
    folder.mkdir()
    for argv in (["mke2fs", "-q", "-t", "ext4", image], ["mount", "-o", "loop", image, folder]):
        done = run_program(argv, limit_s=60)
        if done.returncode != 0:
            pytest.skip(f"no loop devices here: {done.stderr.strip()}")
    try:
        group.mkdir()
        device = folder.stat().st_dev
        (group / limit.name).write_text(f"{os.major(device)}:{os.minor(device)} {4 << 20}")
        yield folder, ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        run_program(["umount", "-l", folder], limit_s=60)
        with contextlib.suppress(OSError):
            group.rmdir()


def test_a_slow_disk_is_named_as_long_as_the_files_are_cold(
    archive: Path, slow_disk: tuple[Path, list[object]]
) -> None:
    folder, words = slow_disk
    for number in range(24):
        (folder / f"{number}.bin").write_bytes(os.urandom(2 << 20))
    os.sync()
    values = measured(archive, folder, words)
    assert values.proof is not None
    assert limit_of(values, "cold")[0] == "disk", shown(values)
    assert limit_of(values, "hot")[0] != "disk", shown(values)


# --- a network


@contextlib.contextmanager
def mounted(tmp_path: Path, delay_s: float, within: Sequence[str] = ()) -> Iterator[tuple[Path, Path]]:
    """A folder of an SFTP server, and its mount by sshfs."""
    missing = [name for name in ("sshfs", "fusermount3") if shutil.which(name) is None]
    if missing or not SFTP.exists() or not os.access("/dev/fuse", os.W_OK):
        pytest.skip(f"missing: {', '.join(missing) or 'FUSE or sftp-server'}")
    served, folder = tmp_path / "served", tmp_path / "mount"
    served.mkdir()
    folder.mkdir()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    argv = [*within, sys.executable, "-c", RELAY, str(port), str(SFTP), str(delay_s)]
    relay = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert relay.stdout is not None
        assert relay.stdout.readline() == b"ready\n"
        options = f"directport={port},kernel_cache,ro"
        done = run_program([*within, "sshfs", "-o", options, f"127.0.0.1:{served}", folder], limit_s=60)
        assert done.returncode == 0, done.stderr
        yield served, folder
    finally:
        run_program(["fusermount3", "-u", "-z", folder], limit_s=30)
        os.killpg(relay.pid, signal.SIGKILL)
        relay.wait(10)


def test_a_mount_with_latency_is_named_for_cold_files_and_for_opening_hot_ones(archive: Path, tmp_path: Path) -> None:
    with mounted(tmp_path, DELAY_S) as (served, folder):
        for number in range(60):
            (served / f"{number}.bin").write_bytes(os.urandom(100_000))
        values = measured(archive, folder)
    assert values.remote
    assert limit_of(values, "cold")[0] == "network", shown(values)
    # In memory or not: each file is opened at the server. A kernel that is short of memory takes single pages back.
    assert values.hot_resident is not None
    assert values.hot_resident >= 0.95
    assert limit_of(values, "hot")[0] == "network", shown(values)


@pytest.fixture
def slow_network() -> Iterator[list[str]]:
    """Words that start a program in a network of its own, in which loopback has 40 Mbit/s."""
    name = f"gpunode-{os.getpid()}"
    if os.geteuid() != 0 or shutil.which("tc") is None or shutil.which("nsenter") is None:
        pytest.skip("no tc or no nsenter here")
    words = ["nsenter", f"--net=/run/netns/{name}"]
    shape = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "40mbit", "burst", "64kb", "latency", "200ms"]
    try:
        for argv in (
            ["ip", "netns", "add", name],
            [*words, "ip", "link", "set", "lo", "mtu", "1500", "up"],
            [*words, *shape],
        ):
            done = run_program(argv, limit_s=30)
            if done.returncode != 0:
                pytest.skip(f"{' '.join(argv)}: {done.stderr.strip()}")
        yield words
    finally:
        run_program(["ip", "netns", "del", name], limit_s=30)


def test_shards_behind_a_slow_network_are_limited_by_it(archive: Path, tmp_path: Path, slow_network: list[str]) -> None:
    with mounted(tmp_path, 0.0, slow_network) as (served, folder):
        for shard in range(4):
            with tarfile.open(served / f"{shard}.tar", "w") as archive_file:
                for number in range(20):
                    path = tmp_path / "sample"
                    path.write_bytes(os.urandom(100_000))
                    archive_file.add(path, f"{number}.bin")
        values = measured(archive, folder)
    assert values.kind == "tar"
    assert limit_of(values, "cold")[0] == "network", shown(values)


# --- in a job that runs


@pytest.mark.parametrize(("sleep_s", "waits"), [(0.02, True), (0.0, False)])
def test_a_profile_distinguishes_samples_that_sleep_from_samples_that_decode(
    sleep_s: float, waits: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One loader: in both cases the main process waits; the worker sleeps, or computes on one core."""
    with_framework(IMAGES, tmp_path, 800, 8)
    (tmp_path / "train.py").write_text(TRAINING)
    words = [str(PYTHON), str(tmp_path / "train.py"), str(tmp_path), str(sleep_s)]
    options = ["--tool", "torch", "--warmup", "3", "--steps", "20", "--output", str(tmp_path / "profile")]
    assert gpunode(["profile", *options, "--format", "json", "--", *words]) == 0
    report = json.loads(capfd.readouterr().out)
    (row,) = [row for row in report["patterns"] if row["pattern"] == "data loading"]
    assert row["status"] == "look"
    assert ("wait" in row["cause"]) is waits, row
    assert ("num_workers" in row["change"]) or waits, row
