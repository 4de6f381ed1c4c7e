"""What a hostile node answers, through Ansible's own templating: variables, expressions and templates of all roles."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpunode.content import ansible_environment, ansible_program, collection_root

ROOT = collection_root()
CONTROL = [chr(number) for number in (*range(9), 11, 12, *range(14, 32), *range(0x7F, 0xA0))]


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


def expressions() -> dict[str, str]:
    """Every text with a template in the tasks of the roles, by a name."""
    templates: list[str] = []
    for file in sorted(ROOT.glob("roles/*/tasks/*.yml")):
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
        for path in leaves(document):
            value: Any = document
            for key in path:
                value = value[key]
            if "{{" in value or path[-1] in ("when", "that", "changed_when", "failed_when"):
                templates.append(value if "{{" in value else f"{{{{ {value} }}}}")
    return {f"hostile_{number}": text for number, text in enumerate(dict.fromkeys(templates))}


def hostile_results(texts: Iterable[str], text: str) -> dict[str, Any]:
    """The registered results that expressions read, with the payload in every field that they name."""
    results: dict[str, Any] = {}
    for name, path in re.findall(r"\b(__\w+)((?:\.\w+|\['\w+'\])+)", "\n".join(texts)):
        inner = results.setdefault(name, {})
        *parents, last = re.findall(r"\w+", path)
        for key in parents:
            if not isinstance(inner.get(key), dict):
                inner[key] = {}
            inner = inner[key]
        inner.setdefault(last, [text, {"path": text, "content": text, "argv": [text]}] if last.endswith("s") else text)
    return results


def play(folder: Path, results: Iterable[str], names: list[str]) -> list[dict[str, Any]]:
    """A play that takes hostile results as the roles do, and renders all that is made from them."""
    seen = {"register": "answer", "changed_when": False, "check_mode": False}
    rendered = {"loop": names, "ignore_errors": True, "ansible.builtin.debug": {"msg": "{{ lookup('vars', item) }}"}}
    set_facts = {name: f"{{{{ (answer.stdout | from_json)['{name}'] }}}}" for name in results}
    return [
        {
            "hosts": "node1",
            "gather_facts": False,
            "vars_files": [str(folder / "expressions.yml")]
            + [str(path) for part in ("defaults", "vars") for path in sorted(ROOT.glob(f"roles/*/{part}/main.yml"))],
            "tasks": [
                {"ansible.builtin.command": {"argv": ["cat", str(folder / "results.json")]}, **seen},
                {"ansible.builtin.set_fact": set_facts},
                {"name": "Render variables and expressions", **rendered},
                {"name": "Control", "ansible.builtin.debug": {"msg": "{{ control }}"}},
            ],
        }
    ]


def test_nothing_of_a_node_is_a_template_in_a_role(tmp_path: Path) -> None:
    marker, control = tmp_path / "MARKER", tmp_path / "CONTROL"
    texts = expressions()
    assert len(texts) > 50
    variables = {
        name: text
        for file in ROOT.glob("roles/*/vars/main.yml")
        for name, text in (yaml.safe_load(file.read_text()) or {}).items()
    }
    results = hostile_results([*texts.values(), *map(str, variables.values())], payload(marker))
    results = {name: value for name, value in results.items() if name not in variables}
    assert {"__common_plan", "__nvidia_driver_built", "__nvidia_driver_staging"} <= results.keys()
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "expressions.yml").write_text(
        yaml.safe_dump({**texts, "control": f"{{{{ lookup('pipe', 'touch {control}') }}}}"})
    )
    playbook = tmp_path / "play.yml"
    playbook.write_text(yaml.safe_dump(play(tmp_path, results, sorted(variables) + sorted(texts))))
    done = subprocess.run(
        [ansible_program("ansible-playbook"), "-i", "node1,", "-c", "local", str(playbook),
         "-e", json.dumps({"ansible_python_interpreter": sys.executable})],
        env={**ansible_environment(), "ANSIBLE_NOCOLOR": "1"}, cwd=tmp_path, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert control.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    assert not marker.exists()
    # The payloads have been there: what roles print of the node quotes them.
    assert "touch" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "CONTROL",
        "expressions.yml",
        "play.yml",
        "results.json",
    ]


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
def test_a_run_of_all_roles_with_modules_that_answer_payloads(tmp_path: Path, mode: str) -> None:
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
    inventory.write_text(yaml.safe_dump({"gpu_nodes": {"hosts": {"node1": host}}}))
    done = subprocess.run(
        [sys.executable, "-m", "gpunode", "provision", "-i", str(inventory), "--check", "--diff"],
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"}, cwd=tmp_path, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert "Refuse a node that cannot be provisioned" in done.stdout
    assert not marker.exists()
    assert [char for char in CONTROL if char in done.stdout + done.stderr] == []
    if mode != "probe is honest":
        assert "FAILED!" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hosts.yml", "python3"]
