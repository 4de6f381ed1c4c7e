"""What a hostile node answers, through Ansible's own templating: variables, expressions and templates of all roles."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from gpunode.content import ansible_environment, ansible_program, collection_root
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.probe.bundle import Bundle

sys.path.append(str(Path(__file__).parents[1] / "contract"))

from bundles import hgx

ROOT = collection_root()
BUNDLE = Path(__file__).parents[1] / "fixtures" / "bundles" / "debian-12-provisioned.json"
CONTROL = [chr(number) for number in (*range(9), 11, 12, *range(14, 32), *range(0x7F, 0xA0))]
APT: dict[str, Any] = {
    "lock_holder": "x", "unfinished": ["x"], "runfile": True, "lists": True, "headers": ["x"], "architecture": "amd64",
    "installed": ["x"], "holds": ["x"], "held": ["x"], "publishers": {"cuda-drivers": [["x", "x"]]},
    "key": {"path": "x"}, "sources": [{"uri": "x", "suite": "x", "file": "x"}],
    "candidates": {"x": "x"}, "kernels": ["x"],
}  # fmt: skip


def payload(marker: Path) -> str:
    """Text that would make the marker in a template, a condition and a shell."""
    touch = f"touch {marker}"
    return (
        f"x{{{{lookup('pipe','{touch}')}}}}{{% set y = lookup('pipe','{touch}') %}}$({touch});`{touch}`\x1b[2J<b>../.."
    )


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all texts."""
    if isinstance(value, str):
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(item, (*path, key))


def put(document: Any, path: tuple[str | int, ...], text: str) -> Any:
    """Set the text at a place and return what was there."""
    for key in path[:-1]:
        document = document[key]
    before = document[path[-1]]
    document[path[-1]] = text
    return before


def hostile_facts(document: dict[str, Any], text: str, kept: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Facts with the payload in every text that the model lets through, whatever the parsers refuse; and how many.

    ``kept`` are facts that stay as they are: without a system and its packages no stack is resolved.
    """
    facts = facts_from_bundle(Bundle.model_validate(document)).model_dump(mode="json")
    taken = 0
    for path in [path for path in leaves(facts) if path[0] not in kept]:
        before = put(facts, path, text)
        try:
            NodeFacts.model_validate(
                {str(path[0]): facts[str(path[0])], **{k: facts[k] for k in ("host", "collected_at")}}
            )
            taken += 1
        except ValidationError:
            put(facts, path, before)
    return facts, taken


def all_texts(value: Any, text: str) -> Any:
    """The value with every text replaced, in keys too."""
    if isinstance(value, dict):
        return {key: all_texts(item, text) for key, item in value.items()} | {text: text}
    return (
        [all_texts(item, text) for item in value]
        if isinstance(value, list)
        else text
        if isinstance(value, str)
        else value
    )


def expressions() -> dict[str, str]:
    """Every text with a template in the tasks of the roles, by a name."""
    found: list[str] = []
    for file in sorted(ROOT.glob("roles/*/tasks/*.yml")):
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
        for path in leaves(document):
            value: Any = document
            for key in path:
                value = value[key]
            if "{{" in value or path[-1] in ("when", "that", "changed_when", "failed_when"):
                found.append(value if "{{" in value else f"{{{{ {value} }}}}")
    return {f"hostile_{number}": text for number, text in enumerate(dict.fromkeys(found))}


def play(folder: Path, templates: list[Path], names: list[str]) -> list[dict[str, Any]]:
    """A play that takes the answers as the roles do, and renders all that is made from them."""
    seen = {"register": "answer", "changed_when": False, "check_mode": False}
    rendered = {"loop": names, "ignore_errors": True, "ansible.builtin.debug": {"msg": "{{ lookup('vars', item) }}"}}
    return [
        {
            "hosts": "node1",
            "gather_facts": False,
            "vars_files": [str(folder / "expressions.yml")]
            + [str(path) for part in ("defaults", "vars") for path in sorted(ROOT.glob(f"roles/*/{part}/main.yml"))],
            "tasks": [
                {"ansible.builtin.command": {"argv": ["cat", str(folder / "facts.json")]}, **seen},
                {"ansible.builtin.set_fact": {"gpunode_node": "{{ answer.stdout | from_json }}"}},
                {"ansible.builtin.command": {"argv": ["cat", str(folder / "apt.json")]}, **seen},
                {
                    "ansible.builtin.set_fact": {
                        "gpunode_apt": "{{ answer.stdout | from_json }}",
                        "gpunode_dnf": "{{ none }}",
                    }
                },
                {
                    "ansible.builtin.set_fact": {
                        "gpunode_plan": "{{ gpunode_node | gpunode.node.node_plan(__preflight_wishes, {}) }}"
                    },
                    "ignore_errors": True,
                },
                {"name": "Render variables and expressions", **rendered},
                {
                    "name": "Render templates",
                    "ansible.builtin.template": {"src": "{{ item }}", "dest": f"{folder}/out/{{{{ item | hash }}}}"},
                    "loop": list(map(str, templates)),
                    "ignore_errors": True,
                },
                {"name": "Control", "ansible.builtin.debug": {"msg": "{{ control }}"}},
            ],
        }
    ]


@pytest.mark.parametrize("node", ["recorded", "hgx"])
def test_nothing_of_a_node_is_a_template_in_a_role(tmp_path: Path, node: str) -> None:
    marker, control = tmp_path / "MARKER", tmp_path / "CONTROL"
    text = payload(marker)
    (tmp_path / "out").mkdir()
    kept = ("os", "architecture", "kernels", "packages", "pci", "driver") if node == "hgx" else ()
    facts, taken = hostile_facts(hgx() if node == "hgx" else json.loads(BUNDLE.read_text()), text, kept)
    assert taken > 200
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    (tmp_path / "apt.json").write_text(json.dumps(all_texts(APT, text)))
    texts = expressions()
    assert len(texts) > 200
    (tmp_path / "expressions.yml").write_text(
        yaml.safe_dump({**texts, "control": f"{{{{ lookup('pipe', 'touch {control}') }}}}"})
    )
    own = {name for file in ROOT.glob("roles/*/vars/main.yml") for name in yaml.safe_load(file.read_text())}
    templates = sorted(ROOT.glob("roles/*/templates/*.j2"))
    playbook = tmp_path / "play.yml"
    playbook.write_text(yaml.safe_dump(play(tmp_path, templates, sorted(own) + sorted(texts))))
    done = subprocess.run(
        [ansible_program("ansible-playbook"), "-i", "node1,", "-c", "local", str(playbook),
         "-e", json.dumps({"ansible_python_interpreter": sys.executable})],
        env={**ansible_environment(), "ANSIBLE_NOCOLOR": "1"}, cwd=tmp_path, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert control.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    assert not marker.exists()
    # The payloads have been there: what roles say of the node quotes them.
    assert "touch" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["CONTROL", "apt.json", "expressions.yml", "facts.json", "out", "play.yml"]
    )


# Every module's answer, in a run of the whole playbook

INTERPRETER = """#!{python} -I
import json, subprocess, sys
TEXT, MODE = {text!r}, {mode!r}

def texts(value, top=False):
    if isinstance(value, dict):
        return {{key: texts(item) for key, item in value.items()}}
    if isinstance(value, list):
        return [texts(item) for item in value]
    if not isinstance(value, str) or value == "gpunode.bundle/1":
        return value
    try:
        inside = json.loads(value)
    except ValueError:
        inside = None
    if MODE == "probe is honest" and isinstance(inside, dict) and inside.get("schema") == "gpunode.bundle/1":
        return value
    if isinstance(inside, (dict, list)):
        return json.dumps(texts(inside))
    return TEXT if MODE == "replaced" else "\\n".join(line + TEXT for line in value.split("\\n"))

done = subprocess.run([{python!r}, *sys.argv[1:]], stdin=sys.stdin.buffer, capture_output=True, timeout=120)
try:
    sys.stdout.write(json.dumps(texts(json.loads(done.stdout))))
except ValueError:
    sys.stdout.buffer.write(done.stdout)
sys.stderr.buffer.write(done.stderr)
sys.exit(done.returncode)
"""


@pytest.mark.parametrize("mode", ["appended", "replaced", "probe is honest"])
def test_a_run_of_all_roles_whose_modules_answer_payloads(tmp_path: Path, mode: str) -> None:
    marker = tmp_path / "MARKER"
    interpreter = tmp_path / "python3"
    interpreter.write_text(INTERPRETER.format(python=sys.executable, text=payload(marker), mode=mode))
    interpreter.chmod(0o755)
    inventory = tmp_path / "hosts.yml"
    host = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": str(interpreter),
        "nvidia_driver_state": "absent",
    }
    inventory.write_text(yaml.safe_dump({"all": {"hosts": {"node1": host}}}))
    done = subprocess.run(
        [sys.executable, "-m", "gpunode", "provision", "-i", str(inventory), "--check", "--diff"],
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"}, cwd=tmp_path, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert "Look at the node with the probe" in done.stdout
    assert not marker.exists()
    assert [char for char in CONTROL if char in done.stdout + done.stderr] == []
    if mode != "probe is honest":
        assert "refused, nothing was changed" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts.yml", "python3"]
