"""A thousand nodes through ``gpunode plan``: seconds and memory, printed; the memory is held under a limit."""

import json
import subprocess
import sys
import time
from pathlib import Path

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
XML = Path(__file__).parents[2] / "fixtures" / "smi" / "two-l40s-simulated.xml"
HOSTS = 1000
LIMIT_MB = 300
GPUS = ("26b9", "2330", "20b2", "1eb8", "2901")
PLAN = """
import resource, sys
from gpunode.cli import VERBS, run
VERBS.setdefault("plan", "Decide a matched stack")
code = run(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def write_bundles(folder: Path) -> int:
    """Bundles of a thousand hosts with eight GPUs of five kinds, as large as real ones; returns their bytes."""
    document = json.loads(BUNDLE.read_text(encoding="utf-8"))
    smi = XML.read_text(encoding="utf-8")
    size = 0
    for number in range(HOSTS):
        files = dict(document["files"])
        for slot in range(8):
            place = f"0000:{16 + slot:02x}:00.0"
            files["/sys/bus/pci/devices/"] = (files["/sys/bus/pci/devices/"] or "") + f"{place}\n"
            pci = GPUS[number % len(GPUS)].upper()
            files[f"/sys/bus/pci/devices/{place}/uevent"] = (
                f"PCI_CLASS=30200\nPCI_ID=10DE:{pci}\nPCI_SLOT_NAME={place}\n"
            )
        # What nvidia-smi prints of eight GPUs is most of a real bundle.
        padded = dict(document["commands"])
        padded["nvidia-smi-xml"] = {
            **padded["uname"],
            "argv": ["nvidia-smi", "-q", "-x"],
            "stdout": smi + " " * 200_000,
        }
        text = json.dumps(document | {"host": f"node{number:04}", "files": files, "commands": padded})
        (folder / f"node{number:04}.json").write_text(text, encoding="utf-8")
        size += len(text)
    return size


def test_a_thousand_nodes_in_seconds_and_little_memory(tmp_path: Path) -> None:
    size = write_bundles(tmp_path)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PLAN, "plan", "--replay", tmp_path, "--driver", "production", "--source", "nvidia"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    peak_mb = int(done.stderr.split()[-1]) * 1024 / 1e6
    print(f"{HOSTS} bundles of {size / 1e6:.0f} MB: {seconds:.1f} s, peak {peak_mb:.0f} MB")
    assert f"{HOSTS} decided" in done.stdout
    assert done.stdout.count("200 node(s): ") == len(GPUS)
    assert peak_mb < LIMIT_MB
