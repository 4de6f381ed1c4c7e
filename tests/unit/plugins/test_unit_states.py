"""Units by the builtin module: what changed, line by line, and what check mode announces of units that are missing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.gpunode.node.plugins.action import managed_files, unit_states
from ansible_collections.gpunode.node.plugins.plugin_utils import controller

# As systemd_service of ansible-core 2.17 answers.
GONE = {"failed": True, "msg": "Could not find the requested service docker.service: host"}
DAMAGED = {
    "failed": True,
    "msg": "Error loading unit file 'docker.service': org.freedesktop.systemd1.BadUnitSetting "
    '"Unit docker.service has a bad unit file setting."',
}
BROKEN = {"failed": True, "msg": "Unable to start service docker.service: Job for docker.service failed"}


def action(
    answer: dict[str, Any], *, check: bool, calls: list[dict[str, Any]], log: str = ""
) -> unit_states.ActionModule:
    plugin = unit_states.ActionModule.__new__(unit_states.ActionModule)
    plugin.host, plugin.task_vars = "gpu1", {}
    plugin._task = SimpleNamespace(check_mode=check)

    def execute(*, module_name: str, module_args: dict[str, Any], **_: Any) -> dict[str, Any]:
        calls.append(module_args)
        return {"stdout": log} if module_name == "ansible.builtin.command" else answer

    plugin._execute_module = execute
    return plugin


DOCKER = {"name": "docker.service", "enabled": True, "state": "started"}


@pytest.mark.parametrize(
    ("unit", "before", "lines"),
    [
        (DOCKER, {"UnitFileState": "disabled", "ActiveState": "inactive"}, ["enable", "start"]),
        (DOCKER, {"UnitFileState": "enabled", "ActiveState": "failed"}, ["start"]),
        ({"name": "docker.service", "enabled": True, "state": None}, {"UnitFileState": "disabled"}, ["enable"]),
        ({"name": "docker.service", "state": "restarted"}, {"ActiveState": "active"}, ["restart"]),
        ({"name": "docker.service", "state": "reloaded"}, {"ActiveState": "active"}, ["reload"]),
        (
            {"name": "docker.service", "enabled": False, "state": "stopped"},
            {"UnitFileState": "enabled", "ActiveState": "active"},
            ["disable", "stop"],
        ),
    ],
)
def test_each_step_is_a_line(unit: dict[str, Any], before: dict[str, Any], lines: list[str]) -> None:
    calls: list[dict[str, Any]] = []
    steps = action({"changed": True, "status": before}, check=False, calls=calls).brought(unit, reload=True)
    assert steps == [f"{line} docker.service" for line in lines]
    assert None not in calls[-1].values()
    assert calls[-1]["daemon_reload"] is True
    # After several starts in quick succession systemd would refuse the next.
    assert ([call.get("argv") for call in calls[:-1]] == [["systemctl", "reset-failed", "docker.service"]]) is (
        lines == ["restart"]
    )


@pytest.mark.parametrize("check", [False, True])
def test_a_restart_waits_until_the_daemon_is_ready_and_clears_its_record(
    check: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = {"name": "docker.service", "state": "restarted", "ready": ["docker", "info"], "mark": "/run/due"}
    calls: list[dict[str, Any]] = []
    called: list[Any] = []
    plugin = action({"changed": True, "status": {}}, check=check, calls=calls, log="true\n")
    plugin.call = lambda *arguments: called.append(arguments)
    assert plugin.brought(unit, reload=False) == ["restart docker.service"]
    assert (["docker", "info"] in [call.get("argv") for call in calls]) is not check
    plugin.brought({**unit, "state": None}, reload=False)
    assert called == ([] if check else [("managed_files", {"files": [{"path": "/run/due", "content": None}]})])
    monkeypatch.setattr(unit_states.time, "sleep", lambda _: None)
    never = action({"changed": True, "status": {}}, check=False, calls=calls, log="false\n")
    with pytest.raises(AnsibleActionFail, match="docker info did not print true within 15 s"):
        never.brought(unit, reload=False)


def test_a_unit_in_its_requested_state_adds_no_line() -> None:
    assert action({"changed": False, "status": {}}, check=False, calls=[]).brought(DOCKER, reload=False) == []


@pytest.mark.parametrize("answer", [GONE, DAMAGED])
def test_check_mode_announces_a_unit_that_is_not_installed_or_repaired_yet(answer: dict[str, Any]) -> None:
    steps = action(answer, check=True, calls=[]).brought(DOCKER, reload=False)
    assert steps == ["enable docker.service", "start docker.service"]


@pytest.mark.parametrize(("answer", "check"), [(GONE, False), (DAMAGED, False), (BROKEN, False), (BROKEN, True)])
def test_what_the_builtin_module_refuses_fails_with_its_words(answer: dict[str, Any], check: bool) -> None:
    with pytest.raises(
        AnsibleActionFail, match=r"^gpu1: docker\.service: (Could not find|Error loading|Unable to start)"
    ):
        action(answer, check=check, calls=[]).brought(DOCKER, reload=False)


def test_a_unit_that_does_not_start_is_named_with_the_end_of_its_log() -> None:
    log = (
        "failed to initialize NVML: \x1b[31mERROR_LIBRARY_NOT_FOUND\nproxy http://ada:secret@proxy:3128\n" + "x" * 5000
    )
    with pytest.raises(AnsibleActionFail) as raised:
        action(BROKEN, check=False, calls=[], log=log).brought(DOCKER, reload=False)
    text = str(raised.value)
    assert "Its log ends: failed to initialize NVML: " in text
    assert "ERROR_LIBRARY_NOT_FOUND" in text
    assert "\x1b" not in text
    assert "proxy http://(not shown)@proxy:3128" in text
    assert len(text) < 1000


def test_a_unit_that_failed_before_its_file_was_repaired_is_started_again() -> None:
    answers = [BROKEN, {"changed": True, "status": {"UnitFileState": "enabled", "ActiveState": "failed"}}]
    calls: list[dict[str, Any]] = []
    plugin = action({}, check=False, calls=calls)

    def execute(*, module_name: str, module_args: dict[str, Any], **_: Any) -> dict[str, Any]:
        calls.append(module_args)
        return {} if module_name == "ansible.builtin.command" else answers.pop(0)

    plugin._execute_module = execute
    assert plugin.brought(DOCKER, reload=True) == ["start docker.service"]
    assert [call.get("argv") or call["daemon_reload"] for call in calls] == [
        True,
        ["systemctl", "reset-failed", "docker.service"],
        False,
    ]


def test_what_the_processes_of_a_unit_wrote_comes_before_the_lines_of_systemd() -> None:
    logs = {"_SYSTEMD_UNIT=docker.service": "invalid mirror\n", "--unit=docker.service": "Start request repeated\n"}
    for own_log in (True, False):
        if not own_log:
            del logs["_SYSTEMD_UNIT=docker.service"]
        plugin = action({}, check=False, calls=[])
        plugin.printed = lambda argv: logs.get(argv[1], "")
        assert plugin.logged("docker.service") == f" Its log ends: {next(iter(logs.values())).strip()}"


def test_systemd_reads_changed_unit_files_once_also_where_no_unit_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller.constants, "DEFAULT_LOCAL_TMP", str(tmp_path))
    monkeypatch.setattr(controller.GpunodeAction, "run", lambda *_: {})
    monkeypatch.setattr(controller.GpunodeAction, "begin", lambda *_: None)
    calls: list[dict[str, Any]] = []
    units = action({"changed": False, "status": {}}, check=False, calls=calls)
    files = managed_files.ActionModule.__new__(managed_files.ActionModule)
    units.node = files.node = controller.Run("gpu1")
    files._task = SimpleNamespace(check_mode=False, args={"files": [{"path": "/x"}]})
    units._task.args = {"units": []}
    for path, reloads in (("/etc/gpunode/x", []), ("/etc/systemd/system/x.service", [True]), ("", [])):
        calls.clear()
        files.call = lambda *_, path=path: {"changed": bool(path), "changed_paths": [path]}
        files.run()
        assert units.run()["changed"] is False
        assert [call["daemon_reload"] for call in calls] == reloads


@pytest.mark.parametrize(
    ("args", "called"),
    [
        ({}, False),
        ({"files": [], "folders": []}, False),
        ({"files": [{"path": "/x", "phase": "after"}], "phase": "before"}, False),
        ({"files": [{"path": "/x", "phase": "after"}], "phase": "after"}, True),
        ({"files": [{"path": "/x"}], "phase": "before"}, True),
        ({"folders": [{"path": "/x", "phase": "after"}]}, True),
        ({"files": "malformed"}, True),
        ({"files": ["malformed"], "phase": "before"}, True),
    ],
)
def test_a_node_is_not_asked_to_write_no_file(
    monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], called: bool
) -> None:
    monkeypatch.setattr(controller.GpunodeAction, "run", lambda *_: {})
    monkeypatch.setattr(controller.GpunodeAction, "begin", lambda *_: None)
    files = managed_files.ActionModule.__new__(managed_files.ActionModule)
    calls: list[Any] = []

    def call(*arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        return {}

    files._task, files.call = SimpleNamespace(check_mode=False, args=args), call
    assert files.run().get("changed", False) is False
    assert bool(calls) is called


def test_a_unit_that_has_failed_since_its_start_is_named() -> None:
    started = ["dcgm.service", "docker.service"]
    action({}, check=False, calls=[], log="active\ninactive\n").assert_running(started)
    with pytest.raises(
        AnsibleActionFail, match=r"docker\.service was started and has failed\. Its log ends: active; fail"
    ):
        action({}, check=False, calls=[], log="active\nfailed\n").assert_running(started)
