"""``gpunode init``: the folder that it writes, and what it leaves out."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from gpunode.catalog import load
from gpunode.cli import init, run
from gpunode.cli.init import Host
from gpunode.content import collection_root
from gpunode.fleet import inventory
from gpunode.fleet.locks import refuse_inventory
from gpunode.stack import GpuGroup, NodePicture

EXAMPLES = sorted(init.examples())


def looked(name: str, model: str, count: int, **variables: Any) -> Host:
    """A host of which the first look found GPUs of one model."""
    picture = NodePicture(gpus=(GpuGroup(label=model, models=(model,), count=count),))
    return init._described(Host(name, variables), picture, load())


@pytest.mark.parametrize("name", EXAMPLES)
def test_provision_accepts_an_example(name: str) -> None:
    """Names and values of its variables, as ``provision`` checks them before it starts Ansible."""
    folder = collection_root() / "inventory" / "examples" / name
    read = inventory.read([str(folder / "hosts.yml")])
    refuse_inventory(collection_root(), read)
    for host, variables in read.hosts.items():
        assert host.endswith(".example.invalid")
        for role in ("ssh_hardening", "accounts", "updates"):
            assert variables[f"{role}_state"] == "present"
        assert (variables.get("firewall_state") == "present") == (name != "kubernetes")


def test_the_examples_are_those_of_the_guides() -> None:
    assert EXAMPLES == ["air-gapped", "development", "hgx-slurm", "inference", "kubernetes", "research"]


@pytest.mark.parametrize(
    ("model", "count", "expected"),
    [
        ("t4", 1, "development"),
        ("a10", 2, "inference"),
        ("a100-pcie-80gb", 4, "research"),
        ("h100-sxm5-80gb", 8, "hgx-slurm"),
    ],
)
def test_the_example_follows_from_the_gpus(model: str, count: int, expected: str) -> None:
    assert model in load().gpus
    assert init._example_for([looked("gpu-01", model, count)]) == expected


def test_hosts_are_grouped_by_their_gpus() -> None:
    hosts = [
        looked("a", "t4", 1, ansible_user="admin", ansible_port=2201),
        looked("b", "a10", 2, ansible_user="admin", ansible_port=2202),
        looked("c", "a10", 2, ansible_user="admin", ansible_port=2203),
    ]
    assert yaml.safe_load(init.inventory_text(hosts)) == {
        "gpu_nodes": {
            "children": {
                "a10_x2": {
                    "hosts": {"b": {"ansible_port": 2202}, "c": {"ansible_port": 2203}},
                    "vars": {"gpunode_expect": {"gpus": 2, "model": "A10"}},
                },
                "t4_x1": {
                    "hosts": {"a": {"ansible_port": 2201}},
                    "vars": {"gpunode_expect": {"gpus": 1, "model": "Tesla T4"}},
                },
            },
            "vars": {"ansible_user": "admin"},
        }
    }


def test_this_machine_is_read_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tmp_path / "site"
    assert run(["init", str(site), "localhost"]) == 0
    read = inventory.read([str(site / "hosts.yml")])
    assert read.hosts["localhost"]["ansible_connection"] == "local"
    assert "gpus" in read.hosts["localhost"]["gpunode_expect"]
    assert "next: gpunode plan" in capsys.readouterr().err


def test_secrets_of_an_inventory_are_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.yml"
    variables = "ansible_host: 192.0.2.7, ansible_password: hunter2, site_token: abc, nvidia_driver_version: '580'"
    old.write_text(f"all: {{hosts: {{gpu-01: {{{variables}}}}}}}\n")
    site = tmp_path / "site"
    assert run(["init", str(site), "-i", str(old), "--no-look"]) == 0
    text = (site / "hosts.yml").read_text()
    assert "192.0.2.7" in text
    assert "580" in text
    assert "hunter2" not in text
    assert "abc" not in text
    assert "not copied, set them again: ansible_password, site_token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["site", "--example", "reserch"], "unknown example reserch: did you mean research?"),
        (["nowhere/site", "--no-look"], "nowhere does not exist"),
        (["full", "--no-look"], "full exists: choose another folder"),
        ([], "the folder is missing"),
    ],
)
def test_wrong_usage_is_one_line_and_writes_nothing(
    words: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.yml").write_text("")
    assert run(["init", *words]) == 2
    err = capsys.readouterr().err
    assert problem in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_host_that_does_not_answer_ends_the_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", str(tmp_path / "site"), "--timeout", "2", "gpu-01.invalid"]) == 3
    assert "--no-look" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize(("hosts", "number"), [(["gpu-[01-40]"], 40), (["gpu-01"], 1)])
def test_the_size_of_the_fleet_is_the_number_of_hosts(tmp_path: Path, hosts: list[str], number: int) -> None:
    assert run(["init", str(tmp_path / "site"), *hosts, "--no-look", "--example", "hgx-slurm", "-q"]) == 0
    settings = yaml.safe_load((tmp_path / "site/group_vars/gpu_nodes.yml").read_text())
    assert settings["kernel_tuning_fleet_size"] == number


def test_the_size_of_an_example_fleet_is_the_number_of_its_hosts() -> None:
    folder = collection_root() / "inventory/examples/hgx-slurm"
    size = yaml.safe_load((folder / "group_vars/gpu_nodes.yml").read_text())["kernel_tuning_fleet_size"]
    assert size == len(inventory.read([str(folder / "hosts.yml")]).hosts)


@pytest.mark.parametrize("words", [["--molecule"], ["--ci", "gitlab"]])
def test_a_scenario_is_written_and_its_files_lead_to_the_collection(tmp_path: Path, words: list[str]) -> None:
    assert run(["init", str(tmp_path / "site"), "--example", "research", "--no-look", "-q", *words]) == 0
    site = tmp_path / "site"
    shared = yaml.safe_load((site / ".config/molecule/config.yml").read_text())
    default = yaml.safe_load((site / "molecule/default/molecule.yml").read_text())
    playbooks = {**shared["ansible"]["playbooks"], **default["ansible"]["playbooks"], "converge": "converge.yml"}
    named = set()
    for name in playbooks.values():
        for play in yaml.safe_load((site / "molecule/default" / name).read_text()):
            named.add(play.get("ansible.builtin.import_playbook"))
    imported = {name.removeprefix("gpunode.node.") for name in named if name}
    assert imported == {"site", "molecule_create", "molecule_destroy"}
    assert all((collection_root() / "playbooks" / f"{name}.yml").is_file() for name in imported)
