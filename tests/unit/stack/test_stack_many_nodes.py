"""Many nodes through ``gpunode plan``: seconds and memory, printed; the memory is held under a limit.

A hundred nodes, with GPUNODE_TEST_ALL=1 a thousand. Kept, their bundles, together more than 60 MB, pass the limit.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from effort import effort

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
XML = Path(__file__).parents[2] / "fixtures" / "smi" / "two-l40s-simulated.xml"
HOSTS = effort(100, 1000)
PADDING = " " * effort(600_000, 200_000)
"""Fewer nodes report more each, so that keeping them shows."""
LIMIT_MB = 130
GPUS = ("26b9", "2330", "20b2", "1eb8", "2901")
PLAN = """
import re, sys
from pathlib import Path
from gpunode.cli import provision, run
from gpunode.fleet import Answer, Collected
folder = Path(sys.argv[1])
def collect(targets, **_):
    for target in targets:
        text = (folder / f"{target.name}.json").read_bytes()
        yield Collected(target.name, Answer(text, host=target.name), None, 0.0)
provision.collect = collect
code = run(["plan", *sys.argv[2:]])
# Not ru_maxrss: that keeps the peak of the process which this one was started from.
print(re.search("VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1], file=sys.stderr)
sys.exit(code)
"""
"""The verb in a process of its own; an inventory's hosts answer from the folder, for SSH is the fleet's own test."""


def write_bundles(folder: Path) -> int:
    """Bundles of all hosts with eight GPUs of five kinds, as large as real ones; returns their bytes."""
    document = json.loads(BUNDLE.read_text(encoding="utf-8"))
    smi = XML.read_text(encoding="utf-8")
    size = 0
    for number in range(HOSTS):
        files = dict(document["files"])
        for slot in range(8):
            address = f"0000:{16 + slot:02x}:00.0"
            files["/sys/bus/pci/devices/"] = (files["/sys/bus/pci/devices/"] or "") + f"{address}\n"
            pci = GPUS[number % len(GPUS)].upper()
            files[f"/sys/bus/pci/devices/{address}/uevent"] = (
                f"PCI_CLASS=30200\nPCI_ID=10DE:{pci}\nPCI_SLOT_NAME={address}\n"
            )
        # What nvidia-smi prints of eight GPUs is most of a real bundle.
        padded = dict(document["commands"])
        padded["nvidia-smi-xml"] = {
            **padded["uname"],
            "argv": ["nvidia-smi", "-q", "-x"],
            "stdout": smi + PADDING,
        }
        text = json.dumps(document | {"host": f"node{number:04}", "files": files, "commands": padded})
        (folder / f"node{number:04}.json").write_text(text, encoding="utf-8")
        size += len(text)
    return size


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("thousand")
    return folder, write_bundles(folder)


@pytest.mark.parametrize("way", ["replay", "inventory"])
def test_many_nodes_in_seconds_and_little_memory(way: str, bundles: tuple[Path, int], tmp_path: Path) -> None:
    folder, size = bundles
    inventory = tmp_path / "hosts.ini"
    inventory.write_text("".join(f"node{number:04}\n" for number in range(HOSTS)))
    which = ["--replay", str(folder)] if way == "replay" else ["-i", str(inventory)]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PLAN, folder, *which, "--driver", "production", "--source", "nvidia"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    peak_mb = int(done.stderr.split()[-1]) * 1024 / 1e6
    print(f"{way}: {HOSTS} bundles of {size / 1e6:.0f} MB: {seconds:.1f} s, peak {peak_mb:.0f} MB")
    assert f"{HOSTS} nodes with a stack" in done.stdout
    assert done.stdout.count(f"{HOSTS // len(GPUS)} nodes: ") == len(GPUS)
    assert peak_mb < LIMIT_MB
