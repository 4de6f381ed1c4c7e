"""``gpunode env``: what each format prints, and that programs can read it."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpunode.cli import run
from gpunode.cli.reference import schema_of
from gpunode.facts import facts_from_bundle
from gpunode.probe.bundle import Bundle
from gpunode.tuning import Setting, docker_args, env_file, shell, tune

sys.path.append(str(Path(__file__).parents[2] / "contract"))
from machines import HGX
from machines import bundle as machine_bundle

RECORDED = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-provisioned.json"


def document(**changes: Any) -> dict[str, Any]:
    return {**json.loads(RECORDED.read_text(encoding="utf-8")), **changes}


@pytest.fixture
def bundle(tmp_path: Path) -> str:
    path = tmp_path / "node.json"
    path.write_text(json.dumps(document()))
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert run(["env", *arguments]) == 0
    return capsys.readouterr().out


def test_json_is_one_document_of_its_schema(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(printed(capsys, "--replay", bundle, "--format", "json"))
    jsonschema.validate(answer, json.loads(schema_of("env")), cls=jsonschema.Draft202012Validator)
    (node,) = answer["nodes"]
    assert node["simulated"] is True
    assert {setting["name"] for setting in node["environment"]} >= {"NCCL_DEBUG", "CUDA_DEVICE_ORDER"}
    assert all(skipped["reason"] for skipped in node["left_alone"])


def test_text_contains_each_reason(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--replay", bundle)
    assert "NCCL_DEBUG=WARN\n        prints the cause of failures" in text
    assert "left alone" not in text
    assert "NCCL_IB_DISABLE: debugging only" in printed(capsys, "--replay", bundle, "-v")


def test_docker_arguments_are_one_line_of_plain_words(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = printed(capsys, "--replay", bundle, "--format", "docker-args")
    assert line.count("\n") == 1
    assert shlex.split(line) == line.split()
    assert "--env NCCL_DEBUG=WARN" in line
    assert "--ulimit memlock=-1" in line


def test_arguments_without_a_gpu_are_reported_beside_them(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "--replay", bundle, "--format", "docker-args"]) == 0
    answer = capsys.readouterr()
    assert "nvidia.com/gpu" not in answer.out
    assert answer.err == "deb12-1: no GPUs among the arguments: no NVIDIA GPU on the node\n"
    assert run(["env", "--replay", bundle, "--format", "shell"]) == 0
    assert capsys.readouterr().err == ""


def test_a_shell_takes_the_environment(bundle: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "env.sh"
    script.write_text(printed(capsys, "--replay", bundle, "--format", "shell", "--workload", "tensorflow"))
    answer = subprocess.run(
        ["sh", "-c", f". {script}; echo $TF_GPU_THREAD_MODE"], capture_output=True, text=True, timeout=10, check=True
    )
    assert answer.stdout == "gpu_private\n"


def test_an_env_file_has_comments_and_values_alone(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--replay", bundle, "--format", "env-file")
    for line in text.splitlines():
        name, _, value = line.partition("=")
        assert line.startswith("#") or (name.isupper() and value and '"' not in value)
    assert "#   --shm-size" in text


def test_zsh_finds_no_program_in_a_value() -> None:
    setting = Setting(name="NCCL_IB_HCA", value="=mlx5_0:1", reason="it is near", source="none")
    tuning = tune(facts_from_bundle(Bundle.model_validate(document())), "pytorch")
    text = shell(tuning.model_copy(update={"environment": (setting,)}))
    assert "export NCCL_IB_HCA='=mlx5_0:1'\n" in text


def test_what_a_host_calls_itself_becomes_no_line_of_a_script() -> None:
    evil = Bundle.model_validate(document(host="x\nreboot\n"))
    tuning = tune(facts_from_bundle(evil), "pytorch")
    for text in (shell(tuning), env_file(tuning)):
        assert "\nreboot" not in text
    assert "reboot" not in " ".join(docker_args(tuning))


@pytest.mark.parametrize("form", ["docker-args", "shell", "env-file"])
def test_settings_of_two_nodes_are_not_mixed(
    form: str, bundle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(document(host="other")))
    assert run(["env", "--replay", bundle, str(other), "--format", form]) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert "supports one node, got 2" in answer.err
    assert printed(capsys, "--replay", bundle, str(other)).count("pytorch, training (simulated)") == 2


def test_a_node_out_of_reach_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "nobody@127.0.0.1:1", "--timeout", "10"]) == 3
    answer = capsys.readouterr()
    assert answer.out == ""
    assert answer.err.startswith("nobody@127.0.0.1:1: ")


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--replay"], "--replay needs a bundle"),
        (["--replay", "/nowhere.json"], "no such file"),
        (["--replay", "-i", "x", "y"], "--replay contacts no node"),
        (["--replay", "y", "--parallel", "4", "--timeout", "9"], "--replay contacts no node: --parallel, --timeout"),
        (["--workload", "mining"], "mining"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", *arguments]) == 2
    assert output in capsys.readouterr().err


@pytest.fixture
def hgx(tmp_path: Path) -> str:
    path = tmp_path / "hgx.json"
    path.write_text(json.dumps(machine_bundle(HGX)))
    return str(path)


def test_a_slice_is_in_every_format(hgx: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--replay", hgx, "--gpus", "0,1")
    assert "pytorch, training, gpu0, gpu1" in text
    assert "DataLoader(num_workers)=7" in text
    (node,) = json.loads(printed(capsys, "--replay", hgx, "--idle", "3", "--format", "json"))["nodes"]
    jsonschema.validate(node["part"]["gpus"], {"type": "array", "minItems": 3, "maxItems": 3})
    line = printed(capsys, "--replay", hgx, "--idle", "2", "--format", "docker-args")
    assert shlex.split(line) == line.split()
    assert line.count("--device nvidia.com/gpu=") == 2
    assert "# In the program: DataLoader(num_workers) 7" in printed(
        capsys, "--replay", hgx, "--gpus", "1", "--format", "env-file"
    )


def test_gpus_in_use_are_refused_and_nothing_is_printed(
    hgx: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = machine_bundle(HGX)
    listing = busy["commands"]["nvidia-smi-xml"]
    process = "<process_info><pid>4242</pid><type>C</type><process_name>python3</process_name></process_info>"
    listing["stdout"] = re.sub(r"<processes>\s*", f"<processes>{process}", listing["stdout"], count=1)
    path = tmp_path / "busy.json"
    path.write_text(json.dumps({**busy, "host": "busy"}))
    assert run(["env", "--replay", str(path), "--gpus", "0,1", "--format", "docker-args"]) == 1
    answer = capsys.readouterr()
    assert answer.out == ""
    assert answer.err.startswith("busy: gpu0 is in use: python3 (pid 4242")
    assert run(["env", "--replay", str(path), hgx, "--gpus", "0,1", "--format", "json"]) == 1
    assert [node["host"] for node in json.loads(capsys.readouterr().out)["nodes"]] == ["hgx-h100-8"]
    assert run(["env", "--replay", str(path), "--idle", "8"]) == 1
    assert "8 idle GPUs were requested, 7 of 8 are: gpu0 is in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--gpus", "0", "--idle", "1"], "cannot be combined"),
        (["--gpus", "x"], "is not a GPU"),
        (["--gpus", "9"], "has 0-7"),
        (["--idle", "0"], "--idle"),
        (["--idle", "two"], "--idle"),
        (["--gpus", "0", "--format", "nccl-conf"], "is for the whole node"),
    ],
)
def test_a_slice_that_cannot_be_meant(
    arguments: list[str], output: str, hgx: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["env", "--replay", hgx, *arguments]) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert output in answer.err
