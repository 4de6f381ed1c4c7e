"""What the action role_plan does with a manifest that refuses the node."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.gpunode.node.plugins.action import role_plan
from ansible_collections.gpunode.node.plugins.plugin_utils import controller

from gpunode.provisioning.manifest import Manifest


@pytest.fixture
def action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> role_plan.ActionModule:
    monkeypatch.setattr(controller.constants, "DEFAULT_LOCAL_TMP", str(tmp_path))
    found = role_plan.ActionModule.__new__(role_plan.ActionModule)
    found.node = controller.Run("gpu1")
    return found


def test_a_refusal_states_that_nothing_was_changed_only_while_that_is_true(action: role_plan.ActionModule) -> None:
    manifest = Manifest(role="docker", refusals=("busy: a container runs",))
    with pytest.raises(AnsibleActionFail, match=r"nothing was changed:\n  - busy: a container runs"):
        action.refuse(manifest)
    action.node.keep("begun", "")
    with pytest.raises(AnsibleActionFail, match=r"earlier changes of this run remain:\n  - busy: a container runs"):
        action.refuse(manifest)
    action.refuse(Manifest(role="docker"))


def test_a_plan_that_is_only_read_neither_fails_nor_is_due(
    action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "module 1 is loaded"
    refused = Manifest(role="nvidia_driver", refusals=("no-gpu: none on the bus",), reboot_reasons=(why,))
    asked: list[str] = []
    monkeypatch.setattr(role_plan.GpunodeAction, "run", lambda *_: {})
    monkeypatch.setattr(role_plan.GpunodeAction, "begin", lambda *_: None)
    monkeypatch.setattr(role_plan.ActionModule, "refuse_unfit", lambda _: asked.append("preflight"))
    monkeypatch.setattr(role_plan.ActionModule, "planned", lambda *_: refused)
    monkeypatch.setattr(role_plan.ActionModule, "remember_reboot", lambda *_: asked.append("reboot"))
    monkeypatch.setattr(role_plan.ActionModule, "restarts", lambda *_: [])
    monkeypatch.setattr(role_plan.ActionModule, "forced", lambda _: True)
    monkeypatch.setattr(role_plan.ActionModule, "settings", lambda *_: {})
    action._task = SimpleNamespace(args={"role": "nvidia_driver", "refuse": False}, check_mode=False)
    result = action.run()
    assert (result["due"], result["reboot_reasons"], asked) == (False, [why], ["reboot"])
    assert result["warnings"] == ["no-gpu: none on the bus"]
    # gpunode_force repeats the changes of a role, and an empty plan has none: its tasks would find no values.
    action._task.args = {"role": "nvidia_driver"}
    for manifest, due in ((Manifest(role="rdma"), False), (Manifest(role="rdma", values={"state": "present"}), True)):
        monkeypatch.setattr(role_plan.ActionModule, "planned", lambda *_, manifest=manifest: manifest)
        assert action.run()["due"] is due
    # In check mode the roles that follow know which users would exist by then.
    action._task.check_mode = True
    accounts = Manifest(role="accounts", values={"create": ["ada"]}, due_reasons=("ada is missing",))
    monkeypatch.setattr(role_plan.ActionModule, "planned", lambda *_: accounts)
    action.run()
    assert controller.planned_of(action.node.read("planned"), {"users": ["bob"]})["users"] == ["ada", "bob"]
    monkeypatch.setattr(role_plan.ActionModule, "planned", lambda *_: refused)
    asked.clear()
    with pytest.raises(AnsibleActionFail, match="no-gpu"):
        action.run()
    assert asked == ["preflight"]
