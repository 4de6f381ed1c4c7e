"""The CI pipelines of this repository and of a site: valid by the services' schemas, pinned, and their steps run."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import beside_python, run_program

from gpunode.cli import run
from gpunode.cli.init import PIPELINES

ROOT = Path(__file__).parents[2]
OF_GITHUB = [".github/workflows/ci.yml", "inventory/ci/github.yml"]
OF_GITLAB = [".gitlab-ci.yml", "inventory/ci/gitlab.yml"]
BUNDLES = ROOT / "tests" / "fixtures" / "bundles"


@pytest.mark.parametrize(("schema", "files"), [("vendor.github-workflows", OF_GITHUB), ("vendor.gitlab-ci", OF_GITLAB)])
def test_the_schema_of_the_service_accepts_it(schema: str, files: list[str]) -> None:
    argv = [beside_python("check-jsonschema"), "--builtin-schema", schema, *(ROOT / name for name in files)]
    done = run_program(argv, limit_s=60)
    assert done.returncode == 0, done.stdout


def test_zizmor_finds_no_risk() -> None:
    argv = [beside_python("zizmor"), "--offline", "--quiet", *(ROOT / name for name in OF_GITHUB)]
    done = run_program(argv, limit_s=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", OF_GITHUB)
def test_actions_are_pinned_and_nothing_has_more_than_it_needs(name: str) -> None:
    text = (ROOT / name).read_text()
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)
    document = yaml.safe_load(text)
    assert document["permissions"] == {}
    assert all(job["permissions"] == {"contents": "read"} for job in document["jobs"].values())


def scripts(pipeline: Path) -> Iterator[str]:
    """The shell text of each step, in order."""
    document: dict[str, Any] = yaml.safe_load(pipeline.read_text())
    for job in document.get("jobs", {}).values():
        yield from (step["run"] for step in job["steps"] if "run" in step)
    for name, job in document.items():
        if isinstance(job, dict) and "script" in job:
            yield "\n".join(job["script"]) if name == "check" else ""


@pytest.mark.parametrize("service", list(PIPELINES))
def test_the_steps_without_a_node_run_as_the_file_has_them(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    monkeypatch.setenv("PATH", f"{beside_python('python').parent}:/usr/bin:/bin")
    assert run(["init", str(site), "--example", "research", "--no-look", "--ci", service, "-q"]) == 0
    shutil.copytree(BUNDLES, site / "bundles")
    ran = [text for text in scripts(site / PIPELINES[service]) if "config show" in text or "plan --replay" in text]
    assert any("ansible-lint" in text for text in ran)
    assert any("gpunode plan" in text for text in ran)
    for text in ran:
        done = run_program(["bash", "-euo", "pipefail", "-c", text], limit_s=300, cwd=site)
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_the_pipeline_refuses_a_mistyped_variable_and_a_wrong_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(
        "provision -i hosts.yml --list-hosts" in (ROOT / f"inventory/ci/{name}.yml").read_text() for name in PIPELINES
    )
    site = tmp_path / "site"
    assert run(["init", str(site), "--example", "research", "--no-look", "-q"]) == 0
    names = ["provision", "-i", str(site / "hosts.yml"), "--list-hosts"]
    assert run(names) == 0
    assert capsys.readouterr().out.split() == ["gpu-01.example.invalid", "gpu-02.example.invalid"]
    group_vars = site / "group_vars" / "gpu_nodes.yml"
    text = group_vars.read_text()
    for line, message in (
        ("ssh_hardning_state: present", "did you mean ssh_hardening_state"),
        ("ssh_hardening_max_auth_tries: many", "ssh_hardening_max_auth_tries"),
    ):
        group_vars.write_text(f"{text}\n{line}\n")
        assert run(names) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("service", list(PIPELINES))
def test_each_command_of_gpunode_is_one(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the steps that need a lab: verbs and options exist."""
    text = (ROOT / "inventory" / "ci" / f"{service}.yml").read_text()
    commands = re.findall(r"(?:^|[\s\"(])gpunode ((?:lab \w+|\w+)[^\n|;&)\"]*)", re.sub(r"(?m)^\s*#.*", "", text))
    assert len(commands) > 5
    for command in commands:
        words = shlex.split(command)
        verb = words[:2] if words[0] in ("lab", "config") else words[:1]
        assert run([*verb, "--help"]) == 0
        shown = capsys.readouterr().out
        for option in (word for word in words if word.startswith("--")):
            assert option in shown, command


def dry_run(service: str) -> tuple[dict[str, Any], str]:
    """The job that looks at the real nodes, and the shell text of its last step."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "inventory" / "ci" / f"{service}.yml").read_text())
    job = document["jobs"]["dry-run"] if service == "github" else document["dry-run"]
    return job, job["steps"][-1]["run"] if service == "github" else "\n".join(job["script"])


def test_the_dry_run_of_real_nodes_is_asked_for() -> None:
    job, _ = dry_run("github")
    assert job["if"].startswith("vars.GPU_NODES_DRY_RUN == 'yes' && ")
    # Rules of the environment (branches, reviewers) protect the key.
    assert job["environment"] == "gpu-nodes"
    job, _ = dry_run("gitlab")
    assert all(rule["if"].startswith('$GPU_NODES_DRY_RUN == "yes" && ') for rule in job["rules"])
    assert job["rules"][1]["when"] == "manual"


@pytest.mark.parametrize(("service", "shell"), [("github", "bash -eo pipefail"), ("gitlab", "sh -e")])
def test_the_dry_run_has_the_key_in_an_agent_and_changes_nothing(service: str, shell: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert run_program(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], limit_s=60).returncode == 0
    stub = tmp_path / "bin" / "gpunode"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\necho "gpunode $*"\necho "$ANSIBLE_SSH_COMMON_ARGS"\nssh-add -L\n')
    stub.chmod(0o755)
    _, text = dry_run(service)
    env = {"PATH": f"{stub.parent}:/usr/bin:/bin", "SSH_KEY": key.read_text().rstrip("\n"), "HOME": str(tmp_path)}
    ended = "" if service == "github" else "\nssh-agent -k"
    done = run_program([*shell.split(), "-c", text + ended], limit_s=60, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "gpunode provision -i hosts.yml --check --diff" in done.stdout
    assert f"-o UserKnownHostsFile={tmp_path}/known_hosts" in done.stdout
    assert key.with_suffix(".pub").read_text().split()[1] in done.stdout
    assert done.stdout.rstrip().endswith("killed;")
    assert "PRIVATE KEY" not in done.stdout + done.stderr
