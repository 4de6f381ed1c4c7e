"""What srun, mpirun, sbatch, torchrun and Kubernetes are given, and how a rank reads its place from them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gpunode.cli import run
from gpunode.fabric.starters import StarterRequest, command, text
from gpunode.workload.payload.fabric import first_name, seat_from_environment
from gpunode.workload.payload.group import seat_of

EVIDENCE = Path(__file__).parents[2] / "evidence"
KUBERNETES = yaml.safe_load((EVIDENCE / "kubernetes.yml").read_text(encoding="utf-8"))
REQUEST = StarterRequest(nodes=("gpu-01", "gpu-02"), ranks=8, backend="nccl", minutes=5, image="image:1")


def settings_in(words: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(words[words.index("--settings") + 1])
    return settings


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "MASTER_ADDR": "a"}, (3, "a", 3)),
        (
            {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n-[2-3]"},
            (9, "n-2", 1),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "16", "MASTER_ADDR": "b", "SLURM_PROCID": "5"},
            (0, "b", 0),
        ),
        ({"PMI_RANK": "15", "PMI_SIZE": "16", "MPI_LOCALRANKID": "7", "MASTER_ADDR": "c"}, (15, "c", 7)),
    ],
)
def test_a_rank_reads_its_seat_from_its_starter(environment: dict[str, str], expected: tuple[int, str, int]) -> None:
    starter = settings_in(command("slurm", REQUEST))["starter"]
    seat = seat_of(seat_from_environment(starter, environment))
    assert (seat.rank, seat.meet.split(":")[1], seat.device) == expected
    assert (seat.size, seat.nodes, seat.backend) == (16, 2, "nccl")


def test_a_rank_without_a_starter_is_refused() -> None:
    starter = settings_in(command("slurm", REQUEST))["starter"]
    for environment in ({}, {"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}):
        with pytest.raises(ValueError, match=r"rank|address|invalid"):
            seat_from_environment(starter, environment)


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu-[01-16,20],login", "gpu-01"), ("a,b", "a"), ("n[7]", "n7"), ("n[1,3]", "n1"), ("", "")]
)
def test_the_first_of_slurms_names(nodes: str, first: str) -> None:
    assert first_name(nodes) == first


def test_commands_name_the_nodes_and_end_by_themselves() -> None:
    slurm, mpi = command("slurm", REQUEST), command("mpi", REQUEST)
    assert {"--nodelist=gpu-01,gpu-02", "--ntasks=16", "--ntasks-per-node=8", "--time=6", "--input=all"} <= set(slurm)
    assert mpi[mpi.index("--host") + 1] == "gpu-01:8,gpu-02:8"
    assert mpi[mpi.index("--timeout") + 1] == "330"
    # Open MPI takes no --stdin=all.
    assert mpi[mpi.index("--stdin") + 1] == "all"
    for words in (slurm, mpi):
        at = words.index("python3")
        assert words[at : at + 3] == ["python3", "-I", "-"]
        assert words[words.index("--limit") + 1] == "300"


@pytest.mark.parametrize("starter", ["slurm", "torchrun"])
def test_scripts_contain_the_payload_and_quote_the_settings(starter: Any) -> None:
    script = text(starter, REQUEST)
    (body,) = re.findall(r"<<'GPUNODE_PAYLOAD'\n(.*?)\nGPUNODE_PAYLOAD\n", script, re.DOTALL)
    compile(body, "payload", "exec")
    start = next(line for line in script.splitlines() if line.startswith(("srun", "timeout")))
    assert settings_in(shlex.split(start))["starter"]["backend"] == "nccl"


def test_the_manifest_has_one_pod_for_each_node() -> None:
    items = {manifest["kind"]: manifest for manifest in json.loads(text("kubernetes", REQUEST))["items"]}
    assert set(items) == {"ConfigMap", "Service", "Job"}
    job = items["Job"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    assert job["activeDeadlineSeconds"] == 330
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert settings_in(container["command"])["starter"]["host"] == "gpunode-fabric-0.gpunode-fabric"
    assert len(items["ConfigMap"]["data"]["payload.py"]) < 2**20


def valid(item: dict[str, Any]) -> bool:
    """Whether an object is valid by the API's schema of its kind."""
    schema = {**KUBERNETES, "$ref": f"#/definitions/{item['kind']}"}
    return bool(jsonschema.Draft7Validator(schema).is_valid(item))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_manifest_is_valid_by_the_apis_schema(backend: Any) -> None:
    document = json.loads(text("kubernetes", replace(REQUEST, backend=backend)))
    assert (document["apiVersion"], document["kind"]) == ("v1", "List")
    for item in document["items"]:
        assert valid(item), item["kind"]
        assert not valid({**item, "metdata": {}})
    job = document["items"][-1]["spec"]
    changes: list[dict[str, Any]] = [{"completions": "2"}, {"template": {"spec": {}}}, {"completionsMode": "Indexed"}]
    for change in changes:
        assert not valid({**document["items"][-1], "spec": {**job, **change}})


@pytest.mark.parametrize(
    "words",
    [
        ["gpu-01"],
        ["--engine", "mpi", "--force", "a", "b"],
        ["--engine", "mpi", "--image", "x", "a", "b"],
        ["--engine", "kubernetes", "a", "b"],
        ["--engine", "slurm", "a"],
        ["--print", "a", "b"],
        ["--backend", "gloo", "a", "b"],
        ["--records", "/nonexistent"],
        ["--records", "/nonexistent", "-l", "x"],
        ["--minutes", "0"],
    ],
)
def test_wrong_usage_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "--fabric", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


SAVED = {"--records": "slurm-1.out", "--dumps": "traces"}


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize(
    "words",
    [
        ["gpu-01"],
        ["--minutes", "5"],
        ["--ranks", "1"],
        ["--backend", "nccl"],
        ["--interface", "eth0"],
        ["--links-only"],
        ["--image", "x"],
        ["--image-file", "x"],
        ["--no-container"],
        ["--python", "python3"],
        ["--rendezvous", "a"],
        ["--force"],
        ["--engine", "slurm", "--print"],
    ],
)
def test_options_of_ranks_are_refused_with_saved_ones(
    saved: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slurm-1.out").write_text(json.dumps({"record": "fabric.links", "error": "no"}), encoding="ascii")
    shutil.copytree(Path(__file__).parent / "dumps", tmp_path / "traces")
    arguments = ["validate", "--fabric", saved, str(tmp_path / SAVED[saved])]
    assert run([*arguments, *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{words[-1] if words[-1] == '--print' else words[0].replace('gpu-01', 'HOST')} has no effect there" in err


def test_the_engine_of_saved_records_is_the_one_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "slurm-1.out"
    path.write_text(json.dumps({"record": "fabric.links", "error": "no"}), encoding="ascii")
    engines = []
    for words in ([], ["--engine", "slurm"], ["--engine", "kubernetes"]):
        assert run(["validate", "--fabric", "--records", str(path), "--format", "json", *words]) == 3
        engines.append(json.loads(capsys.readouterr().out)["fabric"]["engine"])
    assert engines == ["unknown", "slurm", "kubernetes"]


def test_a_flood_of_srun_ends_it_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexec yes\n", encoding="ascii")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    words = ["validate", "--fabric", "--engine", "slurm", "--backend", "gloo", "--no-history", "a", "b"]
    assert run(words) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "was stopped: it printed more than 64 MiB" in err


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv: util-linux")
def test_srun_ends_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    fake = tmp_path / "srun"
    fake.write_text(f"#!/bin/sh\necho $$ > {mark}\nexec sleep 60\n", encoding="ascii")
    fake.chmod(0o755)
    words = ["validate", "--fabric", "--engine", "slurm", "--backend", "gloo", "--no-history", "a", "b"]
    run_of = subprocess.Popen(
        [sys.executable, "-m", "gpunode", *words],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while time.monotonic() < end and not (mark.exists() and mark.read_text(encoding="ascii").strip()):
        time.sleep(0.05)
    pid = int(mark.read_text(encoding="ascii"))
    assert Path(f"/proc/{pid}").exists()
    run_of.kill()
    run_of.wait(10)
    end = time.monotonic() + 10
    while time.monotonic() < end and Path(f"/proc/{pid}/cmdline").exists() and state(pid) != "Z":
        time.sleep(0.05)
    assert state(pid) in ("", "Z")


def state(pid: int) -> str:
    """The state of a process; empty without one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return ""
