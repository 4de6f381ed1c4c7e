"""The payload as it is sent: one file, any Python from 3.8 on, one record a line."""

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from gpunode.facts.models.workload import LimitValues, Record, SystemValues, values_of
from gpunode.workload.payload import PACKAGE, main, payload_script, payload_zip

SOURCES = sorted(path.name for path in files(PACKAGE).iterdir() if path.name.endswith(".py"))
SENT = [name for name in SOURCES if name != "__init__.py"]


def test_the_archive_holds_the_payload_and_nothing_else() -> None:
    with zipfile.ZipFile(io.BytesIO(payload_zip())) as archive:
        names = set(archive.namelist())
    folder = PACKAGE.replace(".", "/")
    packages = {"gpunode/__init__.py", "gpunode/workload/__init__.py", f"{folder}/__init__.py"}
    assert names == {"__main__.py", *packages, *(f"{folder}/{name}" for name in SENT)}


def test_the_same_sources_give_the_same_bytes() -> None:
    assert payload_zip() == payload_zip()


def run(*words: str, program: bytes | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    # -I: neither this folder nor PYTHONPATH lends the archive what it lacks.
    clean = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    return subprocess.run(
        [sys.executable, "-I", *words], input=program, capture_output=True, timeout=120, check=False, env=clean, cwd=cwd
    )


def lines(answer: subprocess.CompletedProcess[bytes]) -> list[dict[str, Any]]:
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines()]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "payload.pyz"
    path.write_bytes(payload_zip())
    return path


def test_every_line_is_a_record_and_the_last_one_reports_how_many(archive: Path) -> None:
    *documents, end = lines(run(str(archive), "--tests", "versions,frameworks", "--limit", "100", cwd=archive.parent))
    assert end == {"record": "end", "records": len(documents)}
    records = [Record.model_validate(line) for line in documents]
    assert [record.record for record in records] == [
        "versions.system",
        "versions.limits",
        "versions.nvml",
        "versions.cuda",
        "versions.torch",
        "versions.tensorflow",
        "frameworks.tensor",
        "frameworks.amp",
        "frameworks.matmul",
        "frameworks.cudnn",
        "frameworks.fp8",
        "frameworks.memory",
        "frameworks.compile",
        "frameworks.dataloader",
        "frameworks.p2p",
        "frameworks.collective",
        "frameworks.tensorflow",
        "frameworks.tensorflow-training",
        "frameworks.dali",
    ]
    system, limits = values_of(records[0], SystemValues), values_of(records[1], LimitValues)
    assert isinstance(system, SystemValues)
    assert system.python == ".".join(str(part) for part in sys.version_info[:3])
    assert isinstance(limits, LimitValues)
    shm = os.statvfs("/dev/shm")
    assert limits.shm_bytes == shm.f_blocks * shm.f_frsize
    # Nothing was written beside the archive.
    assert [path.name for path in archive.parent.iterdir()] == ["payload.pyz"]


def other_pythons() -> list[str]:
    """Interpreters of this machine from 3.8 on, one of each minor release."""
    places = [Path("/usr/bin"), *Path.home().glob(".pyenv/versions/*/bin")]
    pythons = {
        path.name: str(path)
        for folder in places
        for path in folder.glob("python3.*")
        if re.fullmatch(r"python3\.\d+", path.name) and int(path.name.partition(".")[2]) >= 8
    }
    return [pythons[name] for name in sorted(pythons, key=lambda name: int(name.partition(".")[2]))]


@pytest.mark.parametrize("python", other_pythons(), ids=lambda path: Path(path).name)
def test_every_python_of_this_machine_runs_it(python: str, archive: Path) -> None:
    answer = subprocess.run(
        [python, "-I", "-W", "error::SyntaxWarning", str(archive), "--tests", "versions,frameworks"],
        capture_output=True,
        timeout=300,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    *documents, end = lines(answer)
    assert end["records"] == len(documents)
    version = documents[0]["values"]["python"]
    assert ".".join(version.split(".")[:2]) == Path(python).name.removeprefix("python")
    assert [line["error"] for line in documents if line["record"].startswith("versions.")] == [None] * 6


def test_without_a_framework_its_parts_are_left_out_and_report_it(archive: Path) -> None:
    if any(__import__("importlib.util").util.find_spec(name) for name in ("torch", "tensorflow")):
        pytest.skip("this environment has a framework")
    records = {line["record"]: line for line in lines(run(str(archive), "--tests", "versions,frameworks"))[:-1]}
    for name in ("versions.torch", "frameworks.tensor", "frameworks.compile"):
        assert records[name]["skipped"] == "PyTorch is not in the image"
        assert records[name]["values"] == {}
    for name in ("frameworks.tensorflow", "frameworks.tensorflow-training"):
        assert records[name]["skipped"] == "TensorFlow is not in the image"


def test_without_a_gpu_the_devices_are_one_record_that_reports_it(archive: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    (kernel,) = lines(run(str(archive), "--tests", "gpus"))[:-1]
    assert (kernel["record"], kernel["device"], kernel["error"]) == ("gpus.kernel", "cpu", None)
    assert kernel["skipped"].startswith("none of the passed GPUs can compute")


def test_the_same_from_stdin() -> None:
    answer = run("-", "--tests", "versions", program=payload_script().encode())
    *documents, end = lines(answer)
    assert end["records"] == len(documents) == 6


def test_the_time_for_all_is_an_end(archive: Path) -> None:
    documents = lines(run(str(archive), "--tests", "versions", "--limit", "0"))
    assert [line["undetermined"] for line in documents[:-1]] == ["not run: the 0 s for all are used up"] * 6
    assert {line["error"] for line in documents[:-1]} == {None}


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--tests", "everything"], "there is no test 'everything'"),
        (["--settings", "[1]"], "expected a JSON object"),
        (["--settings", "{"], "expected a JSON object"),
        (["--limit", "soon"], "invalid float value"),
    ],
)
def test_wrong_arguments_are_refused(archive: Path, words: list[str], reported: str) -> None:
    answer = run(str(archive), *words)
    assert answer.returncode == 2
    assert reported in answer.stderr.decode()
    assert answer.stdout == b""


@pytest.mark.parametrize(
    ("rank", "missing", "code"),
    [(0, [2], 1), (1, [2], 0), (1, [0], 1), (1, [0, 2], 1), (0, [], 0), (1, [], 0), (None, [2], 0)],
)
def test_a_starter_ends_the_ranks_that_hang(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int | None,
    missing: list[int],
    code: int,
) -> None:
    """mpirun, srun and torchrun end all ranks once one fails; rank 0 reports first."""

    class Session:
        def __init__(self, *_: object) -> None:
            pass

        def records(self, _: object) -> Iterator[dict[str, Any]]:
            yield {"record": "fabric.links", "values": {"missing": missing}, "error": "named" if missing else None}

    monkeypatch.setattr(main, "PayloadSession", Session)
    settings = {"starter": {"host": "a", "port": 1, "backend": "gloo", "limit_s": 5, "nodes": 2}}
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    argument = json.dumps({} if rank is None else settings)
    assert main.run(["--tests", "fabric", "--settings", argument]) == code
    printed = [json.loads(line)["record"] for line in capsys.readouterr().out.splitlines()]
    assert ("fabric.links" in printed) == (bool(missing) or not rank)
