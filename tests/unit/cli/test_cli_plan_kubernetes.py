"""``gpunode plan --format gpu-operator|device-plugin``: the values, and what is refused."""

import pytest
import yaml

from gpunode.catalog import load
from gpunode.cli import run

NODE = ["plan", "--platform", "hgx-h100-8", "--os", "ubuntu-24.04"]


def values(text: str) -> object:
    return yaml.safe_load(text)


def test_the_operator_leaves_driver_and_toolkit_to_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    row = load().kubernetes["gpu-operator"]
    assert run([*NODE, "--driver", str(row.default_driver), "--format", "gpu-operator"]) == 0
    answer = capsys.readouterr()
    assert values(answer.out) == {"driver": {"enabled": False}, "toolkit": {"enabled": False}, "cdi": {"enabled": True}}
    assert f"--version v{row.version}" in answer.out
    assert "the component matrix lists" not in answer.out
    assert answer.err == ""


def test_another_release_of_a_listed_branch_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    listed = next(str(driver) for driver in load().kubernetes["gpu-operator"].drivers if str(driver).startswith("580."))
    assert run([*NODE, "--driver", "580.95.05", "--format", "gpu-operator"]) == 0
    assert f"the component matrix lists {listed} of this branch" in capsys.readouterr().out


def test_a_branch_that_the_operator_does_not_list_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*NODE, "--driver", "570", "--format", "gpu-operator"]) == 1
    answer = capsys.readouterr()
    assert (answer.out, len(answer.err.splitlines())) == ("", 1)
    assert "--format device-plugin" in answer.err


def test_the_device_plugin_alone_uses_cdi(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*NODE, "--driver", "570", "--format", "device-plugin"]) == 0
    helm = values(capsys.readouterr().out)
    assert isinstance(helm, dict)
    assert helm["deviceListStrategy"] == "cdi-cri"
    assert helm["cdi"] == {"nvidiaHookPath": "/usr/bin/nvidia-cdi-hook"}


def test_without_a_stack_no_file_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--gpu", "V100", "--os", "ubuntu-22.04", "--cuda", "13.0", "--format", "gpu-operator"]
    assert run(arguments) == 1
    answer = capsys.readouterr()
    assert answer.out == ""
    assert "no stack matches: " in answer.err


@pytest.mark.parametrize("more", [["--explain", "R04"], ["--diff", "a", "b"]])
def test_explanations_and_differences_are_no_values_file(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    node = NODE if more[0] == "--explain" else ["plan"]
    assert run([*node, *more, "--format", "device-plugin"]) == 2
    answer = capsys.readouterr()
    assert (answer.out, len(answer.err.splitlines())) == ("", 1)
