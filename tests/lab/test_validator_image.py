"""The validator's own images, built on this machine for the processor, in a lab node's engine: all of level deep, and
TensorFlow.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import validator_image
from test_workload import INSTALL, Place

from gpunode.facts.models.measured import MEASURED
from gpunode.lab import Lab
from gpunode.lab.engine import connect

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3000)]
CONCERNS = ("images/validator/", "scripts/validator_image", "scripts/wheels")

DATA = "/srv/samples"
SCRATCH = "/srv/scratch"
SAMPLES = f"""\
mkdir -p {DATA} {SCRATCH}
chmod 1777 {SCRATCH}
for number in $(seq 200); do head -c 100000 /dev/urandom > {DATA}/$number.bin; done
"""
TOOLS = {"tools.nvbandwidth", "tools.dcgm-diag", "tools.nccl-tests"}
NEEDS_A_GPU = {"copy.peer", "gemm.tf32", "gemm.fp8", *TOOLS}


def image(host: Place, build: str) -> Path:
    """The image as a file; it is built if this machine has none of its recipe."""
    path = host.folder / f"{build}.tar"
    if not path.exists():
        client = connect()
        full = validator_image.ensure(client, build, print)
        with path.open("wb") as stream:
            for chunk in client.api.get_image(full):
                stream.write(chunk)
    return path


@pytest.fixture(scope="module")
def host(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    (node,) = lab.up(1, "debian-12")
    machine = Place(lab, node, tmp_path_factory.mktemp("validator"))
    machine.root(f"{INSTALL} && {SAMPLES}", limit_s=600)
    yield machine
    assert machine.containers == []


def validated(host: Place, build: str, *options: str) -> dict[str, dict[str, Any]]:
    """The records of a run of the build's image that came to its end."""
    rc, finding = host.validate("--image-file", str(image(host, build)), *options, limit_s=2400)
    assert (rc, finding["status"]) == (0, "pass"), finding
    records = host.records()
    assert records["container"]["values"]["complete"] is True
    assert {record["device"] for record in records.values()} == {"cpu"}
    assert all(record["simulated"] for record in records.values())
    return records


def test_the_build_for_the_processor_runs_all_of_level_deep(host: Place) -> None:
    """Each part has a result, or is one that no processor has."""
    records = validated(host, "cpu", "--level", "deep", "--burn", "2", "--storage", SCRATCH, "--data", DATA)
    version = validator_image.version_of("cpu").partition("+")[0]
    assert records["versions.torch"]["values"]["version"].startswith(version)
    assert records["container"]["values"]["level"] == "deep"
    assert set(records) >= MEASURED
    broken = {name: record["error"] for name, record in records.items() if record["error"] or record["undetermined"]}
    assert broken == {}
    skipped = {name for name in MEASURED if records[name]["skipped"] is not None}
    assert skipped == NEEDS_A_GPU, {name: records[name]["skipped"] for name in skipped}
    # What the image has beside the wheels: fio, and the compilers of torch.compile.
    assert records["storage.fio"]["values"]["jobs"]
    assert records["frameworks.compile"]["values"]["max_error"] < 1e-4
    assert records["input.pipeline"]["values"]["files"] == 200


def test_the_build_with_tensorflow_runs_it(host: Place) -> None:
    records = validated(host, "tensorflow-cpu")
    assert records["versions.tensorflow"]["values"]["version"] == validator_image.version_of("tensorflow-cpu")
    for name in ("frameworks.tensorflow", "frameworks.tensorflow-training"):
        assert (records[name]["error"], records[name]["skipped"], records[name]["undetermined"]) == (None, None, None)
    assert records["frameworks.tensorflow-training"]["values"]["wrong"] == 0
    assert records["frameworks.tensorflow-training"]["values"]["xla_error"] is None
    assert records["versions.torch"]["skipped"] == "PyTorch is not in the image"
