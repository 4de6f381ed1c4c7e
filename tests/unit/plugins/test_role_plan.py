"""What the action role_plan does with a manifest that refuses the node."""

from pathlib import Path

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


def test_a_refusal_says_that_nothing_was_changed_only_as_long_as_that_is_so(action: role_plan.ActionModule) -> None:
    manifest = Manifest(role="docker", refusals=("busy: a container runs",))
    with pytest.raises(AnsibleActionFail, match=r"nothing was changed:\n  - busy: a container runs"):
        action.refuse(manifest)
    action.node.keep("begun", "")
    with pytest.raises(AnsibleActionFail, match=r"earlier changes of this run remain:\n  - busy: a container runs"):
        action.refuse(manifest)
    action.refuse(Manifest(role="docker"))
