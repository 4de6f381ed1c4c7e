"""The gate for answers of modules, and the secrets of plans: arbitrary documents."""

import ast
import json
import random
import signal
import time
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleActionFail
from ansible.module_utils._internal._messages import Event, WarningSummary
from ansible.plugins.callback import CallbackBase
from ansible_collections.gpunode.node.plugins.action import managed_files
from ansible_collections.gpunode.node.plugins.plugin_utils import answers, controller
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[3]
KEYS = ["ansible_facts", "add_host", "warnings", "deprecations", "_ansible_parsed", "ansible_stats", "include", "diff"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner, max_size=4),
    max_leaves=12,
)
KINDS = {"bool": bool, "str": str, "int": int, "list": list, "lines": list, "dict": dict, "document": str, "diff": list,
         "warnings": list, "message": str}  # fmt: skip


def texts(value: Any) -> list[str]:
    """Every text in a value."""
    if isinstance(value, dict):
        return [text for item in value.items() for part in item for text in texts(part)]
    return (
        [text for part in value for text in texts(part)]
        if isinstance(value, list)
        else [value] * isinstance(value, str)
    )


@settings(max_examples=effort(150, 5000), deadline=None)
@given(st.data())
def test_an_answer_has_declared_keys_of_declared_types_alone(data: st.DataObject) -> None:
    module = data.draw(st.sampled_from(sorted(answers.DECLARED)))
    keys = {**answers.DECLARED[module], **answers.MORE.get(module, {})}
    known = {**answers.ALWAYS, **answers.CRASHED, **keys}
    answer = data.draw(st.dictionaries(st.sampled_from([*known, *KEYS]) | st.text(), JSON, max_size=12))
    fields = answers.gated(answer, keys)
    assert fields.keys() <= known.keys()
    assert all(isinstance(value, KINDS[known[name]]) for name, value in fields.items())
    shown = [text for name, value in fields.items() if known[name] != "document" for text in texts(value)]
    assert [text for text in shown if answers.CONTROL.search(text) or len(text) > answers.LONGEST] == []


def test_what_modules_return_is_declared() -> None:
    """Otherwise the gate would drop what a role reads."""
    for file in sorted((ROOT / "plugins" / "modules").glob("[a-z]*.py")):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        ends = [node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "exit_json"]
        returned = {keyword.arg for node in ends for keyword in node.keywords if keyword.arg}
        known = {**answers.ALWAYS, **answers.DECLARED[file.stem], **answers.MORE.get(file.stem, {})}
        assert returned - known.keys() == set(), file.name


@pytest.mark.parametrize("size", [answers.LONGEST + 1, 10 * answers.LONGEST])
def test_long_answers_are_cut(size: int) -> None:
    assert len(answers.gated({"msg": "x" * size}, {})["msg"]) == answers.LONGEST
    assert len(answers.gated({"steps": ["x"] * size}, {"steps": "lines"})["steps"]) == answers.MOST


def test_a_modules_warnings_are_kept_as_lines() -> None:
    """As text, and as ansible-core 2.19 decodes them."""
    summary = WarningSummary(event=Event(msg="a reboot is\x1b pending"))
    lines = answers.gated({"warnings": ["one", summary, {"msg": 1}, 7] + ["more"] * 99}, {})["warnings"]
    assert lines[:3] == ["one", "a reboot is\N{REPLACEMENT CHARACTER} pending", "more"]
    assert len(lines) < answers.MOST_WARNINGS + 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> controller.Run:
    monkeypatch.setattr(controller.constants, "DEFAULT_LOCAL_TMP", str(tmp_path))
    return controller.Run("gpu1")


def test_a_sealed_plan_has_no_secret_and_is_restored_whole(run: controller.Run) -> None:
    login = '[plugins."io.containerd.grpc.v1.cri".registry.configs."r".auth]\npassword = "planted"\n'
    proxy = 'Acquire::http::Proxy "http://me:planted@proxy:3128";\n'
    files: list[dict[str, Any]] = [
        {"path": "/etc/containerd/config.toml", "content": login, "private": True},
        {"path": "/p", "content": proxy},
    ]
    packages = {"files": {"/etc/containerd/config.toml": login}, "repositories": [{"proxy": "http://me:planted@p"}]}
    document: dict[str, Any] = {
        "files": files,
        "packages": packages,
        "values": {"copy": [login], "plain": "text", "none": None},
    }
    sealed = run.sealed(document)
    assert "planted" not in json.dumps(sealed)
    assert sealed["files"][0]["path"] == "/etc/containerd/config.toml"
    assert sealed["values"] == {**document["values"], "copy": sealed["values"]["copy"]}
    files[1]["private"] = True
    assert run.unsealed(sealed) == document


@settings(max_examples=effort(60, 2000), deadline=None)
@given(JSON, st.text(min_size=1))
def test_any_document_is_restored(tmp_path_factory: pytest.TempPathFactory, document: Any, secret: str) -> None:
    run = controller.Run("gpu1")
    run.folder = tmp_path_factory.getbasetemp() / "sealed"
    whole = {"document": document, "file": {"private": True, "content": secret}}
    assert run.unsealed(run.sealed(whole)) == whole
    assert run.sealed(whole)["file"]["content"].startswith(controller.SEALED)


def test_a_reference_of_another_node_is_not_resolved(run: controller.Run) -> None:
    sealed = run.sealed({"private": True, "content": "planted"})
    with pytest.raises(FileNotFoundError):
        controller.Run("gpu2").unsealed(sealed)


def action(**variables: Any) -> controller.GpunodeAction:
    plugin = managed_files.ActionModule.__new__(managed_files.ActionModule)
    plugin.host, plugin.task_vars = "gpu1", variables
    return plugin


@pytest.mark.parametrize("name", ["docker_users", "gpunode_drain_tasks", "__gpunode_drained", "nvidia_repository_key"])
def test_a_fact_that_shadows_a_variable_is_refused_where_facts_are_variables(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    node = action(ansible_facts={"distribution": "Debian", "gpunode_restart_required": {}, name: "/x"})
    monkeypatch.setattr(controller.constants, "INJECT_FACTS_AS_VARS", True)
    with pytest.raises(AnsibleActionFail, match=f"^gpu1 has a fact named {name}"):
        node.refuse_shadowed()
    monkeypatch.setattr(controller.constants, "INJECT_FACTS_AS_VARS", False)
    node.refuse_shadowed()


@pytest.mark.parametrize(("outer", "within", "names"), [(0, 1, "gpu1: node_state"), (1, 9, "the task"), (9, 1, "gpu1")])
def test_a_module_has_a_time_limit_within_the_tasks(outer: int, within: int, names: str) -> None:
    def late(*_: object) -> None:
        raise AnsibleActionFail("the task")

    before = signal.signal(signal.SIGALRM, late)
    started = time.monotonic()
    try:
        signal.alarm(outer)
        with pytest.raises(AnsibleActionFail, match=names), action().limited(within, "node_state"):
            time.sleep(5)
        left = signal.alarm(0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < 4
    assert bool(left) == (outer == 9)


@pytest.mark.parametrize("seed", range(effort(6, 60)))
def test_differences_are_compared_in_time(seed: int) -> None:
    """Ansible compares them in its main process, for which all nodes wait."""
    chance = random.Random(seed)  # noqa: S311
    lines = [f"{number}\n" for number in range(chance.choice((1, 2, 30, 101)))]
    many, long = chance.choice(((1, 20_000), (3000, 199), (200, 1000), (70_000, 2)))
    sides = [{side: "".join(chance.choices(lines, k=long)) for side in ("before", "after")} for _ in range(5)]
    sides[0] = {"before": lines[0] * long, "after": f"{lines[0]}other\n" * (long // 2)}
    answer = {"diff": [chance.choice(sides) for _ in range(many)]}
    started = time.process_time()
    shown = CallbackBase()._get_diff(answers.gated(answer, {})["diff"])
    assert time.process_time() - started < 15
    assert len(shown) < 8 * answers.LONGEST_DIFF


def test_a_difference_of_mappings_is_compared_as_text() -> None:
    (sides,) = answers.gated({"diff": {"before": {"state": "absent"}, "after": {"state": "file"}}}, {})["diff"]
    assert '"state": "absent"' in sides["before"]
    assert '"state": "file"' in sides["after"]


def test_a_compressed_document_is_read_whole_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = b64encode(zlib.compress('{"host": "gpu1 \u00e4"}'.encode())).decode()
    assert controller.unpacked(packed) == '{"host": "gpu1 \u00e4"}'
    for malformed in ("", "{}", packed[:-8], b64encode(b"none").decode()):
        with pytest.raises((ValueError, zlib.error)):
            controller.unpacked(malformed)
    monkeypatch.setattr(controller, "LONGEST_DOCUMENT", 8)
    with pytest.raises(ValueError, match="longer than"):
        controller.unpacked(packed)


def test_messages_and_warnings_have_no_password_of_a_url() -> None:
    line = "could not reach http://ada:se/cret@proxy:3128 for http://mirror.example.org:80/a"
    fields = answers.gated({"msg": line, "warnings": [line], "module_stderr": line, "stdout": line}, {"stdout": "str"})
    shown = line.replace("ada:se/cret", "(not shown)")
    assert fields == {"msg": shown, "warnings": [shown], "module_stderr": shown, "stdout": line}
    began = time.monotonic()
    answers.covered("://a:" * (1 << 14))
    assert time.monotonic() - began < 5
