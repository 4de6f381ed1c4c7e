"""A node that answers with Ansible's templates: what the controller then writes, reads and runs, over real SSH."""

import json
import re
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleet_sshd import Server

from gpunode.catalog import load
from gpunode.cli import run
from gpunode.stack import NodePicture, PlanHost, Request, lock_document, plan

Start = Callable[..., Server]
pytest_plugins = ("fleet_fixtures",)
BUNDLE = Path(__file__).parents[1] / "fixtures" / "bundles" / "debian-12-driver.json"
RELEASE = "6.1.0-56-cloud-amd64"
"""The kernel in that bundle."""

# Only the probe is answered with the bundle; whatever else is started on the node runs as it is.
HOSTILE = """#!/bin/sh
token=$(printf '%s' "$SSH_ORIGINAL_COMMAND" | sed -n 's/.*echo \\(gpunode-[0-9a-f]*\\) ready.*/\\1/p')
[ -n "$token" ] || exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"
echo "$token ready"
cat >/dev/null
exec cat BUNDLE
"""


def hostile(start_sshd: Start, folder: Path, document: dict[str, Any]) -> Path:
    """An inventory of one node, over SSH; its probe answers with the document."""
    (folder / "answer.json").write_text(json.dumps(document))
    script = folder / "answer"
    script.write_text(HOSTILE.replace("BUNDLE", str(folder / "answer.json")))
    script.chmod(0o755)
    server = start_sshd(f"ForceCommand {script}")
    options = f"-F none -o UserKnownHostsFile={server.folder}/known_hosts -o IdentitiesOnly=yes -o IdentityAgent=none"
    host = {
        "ansible_host": "127.0.0.1",
        "ansible_port": server.port,
        "ansible_ssh_private_key_file": str(server.folder / "identity"),
        "ansible_ssh_common_args": options,
        "ansible_python_interpreter": sys.executable,
        "ansible_become": False,
    }
    inventory = folder / "inventory" / "hosts.yml"
    inventory.parent.mkdir()
    inventory.write_text(yaml.safe_dump({"all": {"hosts": {"node1": host}}}))
    return inventory


def replaced(value: Any, old: str, new: str) -> Any:
    """The document with a text in place of another, in keys too."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {replaced(key, old, new): replaced(item, old, new) for key, item in value.items()}
    return [replaced(item, old, new) for item in value] if isinstance(value, list) else value


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ANSIBLE_CONFIG", "ANSIBLE_INVENTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def provision_checked(inventory: Path) -> None:
    """As far as the variable gpunode_stack is read: what follows would ask the vendors' servers."""
    tags = ["--tags", "nvidia_driver_configure", "-e", "nvidia_driver_state=absent", "-e", "gpunode_hosts=all"]
    tags += ["-e", "preflight_require_gpu=false"]
    run(["provision", "-i", str(inventory), "--check", *tags])


@pytest.mark.parametrize("where", ["release", "package", "version"])
def test_a_node_runs_nothing_on_the_controller(
    start_sshd: Start, folder: Path, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    marker = folder / "MARKER"
    # Neither a line end nor a blank in it: so it would stand in an answer of uname, too.
    template = f"{{{{lookup('pipe','touch${{IFS}}{marker}')}}}}"
    old = {"release": RELEASE, "package": "nvidia-kernel-dkms", "version": "535.261.03"}[where]
    document = replaced(json.loads(BUNDLE.read_text()), old, f"{old}{template}")
    inventory = hostile(start_sshd, folder, document)
    planned = run(["plan", "-i", str(inventory), "--write"])
    output = capfd.readouterr()
    locks = list(inventory.parent.rglob("gpunode_stack.yml"))
    if locks:
        provision_checked(inventory)
    assert not marker.exists(), f"plan --write ended with {planned}"
    assert not any("{" in lock.read_text() for lock in locks)
    if where != "release":
        assert (planned, locks) == (2, [])
        assert "nothing was locked" in output.err


@pytest.mark.parametrize("verb", ["plan", "provision"])
def test_a_lock_that_an_older_release_poisoned_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    marker = folder / "MARKER"
    inventory = folder / "inventory" / "hosts.yml"
    inventory.parent.mkdir()
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    inventory.write_text(yaml.safe_dump({"all": {"hosts": {"node1": host}}}))
    (stack,) = [group.stack for group in decided().groups]
    document = lock_document(stack)
    document["gpunode_stack"]["kernel"] = f"6.1.0{{{{lookup('pipe','touch {marker}')}}}}"
    lock = inventory.parent / "group_vars" / "all" / "gpunode_stack.yml"
    lock.parent.mkdir(parents=True)
    lock.write_text(yaml.safe_dump(document))
    assert run([verb, "-i", str(inventory), *(["--check"] if verb == "provision" else ["--write"])]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"gpunode: {lock}: gpunode_stack: kernel is ")
    assert "gpunode plan --write" in line
    assert not marker.exists()


def decided() -> Any:
    """Return a plan that has a stack."""
    picture = NodePicture(os="ubuntu-24.04", arch="x86_64", platform="hgx-h100-8")
    return plan([PlanHost("node1", picture)], Request(), load(), date(2026, 11, 20))


def test_what_an_honest_node_reports_is_locked_and_provision_reads_it(
    start_sshd: Start, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    inventory = hostile(start_sshd, folder, json.loads(BUNDLE.read_text()))
    assert run(["plan", "-i", str(inventory), "--write"]) == 0
    (lock,) = inventory.parent.rglob("gpunode_stack.yml")
    assert f"kernel: {RELEASE}" in lock.read_text()
    assert "text: !unsafe " in lock.read_text()
    assert run(["plan", "-i", str(inventory)]) == 0
    assert "drift: newer-available: 535.261.03" in capfd.readouterr().out
    provision_checked(inventory)
    out = capfd.readouterr().out
    assert re.search(r"node1 +: ok=[1-9]", out)
    assert "no stack could be resolved" not in out


def appended(value: Any, payload: str) -> Any:
    """The document with the payload at the end of each line of each text, and of the keys of commands and files."""
    if isinstance(value, str):
        return value if value == "gpunode.bundle/1" else "\n".join(line + payload for line in value.split("\n"))
    if isinstance(value, dict):
        return {key: appended(item, payload) for key, item in value.items()}
    return [appended(item, payload) for item in value] if isinstance(value, list) else value


def test_no_verb_runs_or_shows_what_a_node_answers(
    start_sshd: Start, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = folder / "MARKER"
    payload = f"{{{{lookup('pipe','touch {marker}')}}}}$(touch {marker})\x1b[2J\x9b1m<b>../.."
    document = appended(json.loads(BUNDLE.read_text()), payload)
    for part in ("commands", "files"):
        document[part] |= {key + payload: value for key, value in document[part].items()}
    inventory = hostile(start_sshd, folder, document)
    saved = folder / "saved"
    live = ["-i", str(inventory)]
    replay = ["--replay", str(saved)]
    codes = {}
    for name, words in {
        "write": ["plan", *live, "--write"],
        "collect": ["collect", *live, "--save", str(saved)],
        "validate": ["validate", "--level", "quick", *live],
        "env": ["env", *live],
        "validate saved": ["validate", *replay],
        "plan saved": ["plan", *replay],
        "env saved": ["env", *replay, "--format", "shell"],
    }.items():
        codes[name] = run(words)
    captured = capfd.readouterr()
    assert codes == {**dict.fromkeys(codes, 0), "write": 2, "validate": codes["validate"], "plan saved": 3} | {
        "validate saved": codes["validate"]
    }
    assert codes["validate"] in (1, 3)
    control = [chr(number) for number in (*range(9), 11, 12, *range(14, 32), *range(0x7F, 0xA0))]
    assert [char for char in control if char in captured.out + captured.err] == []
    assert "Traceback" not in captured.err
    assert list(inventory.parent.rglob("gpunode_stack.yml")) == []
    assert [path.name for path in saved.iterdir()] == ["node1.json"]
    assert not marker.exists()
