"""What the action role_plan does with a manifest that refuses the node."""

import json
import re
import zlib
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.gpunode.node.plugins.action import role_plan
from ansible_collections.gpunode.node.plugins.plugin_utils import controller
from driver_samples import BUNDLE
from node_samples import APT_STATE

from gpunode.provisioning.accounts import AccountsResult
from gpunode.provisioning.context import PARTS, Context
from gpunode.provisioning.manifest import Manifest, NodeCommand
from gpunode.provisioning.rdma import RdmaResult
from gpunode.provisioning.state import NodeState


@pytest.fixture
def action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> role_plan.ActionModule:
    monkeypatch.setattr(controller.constants, "DEFAULT_LOCAL_TMP", str(tmp_path))
    plugin = role_plan.ActionModule.__new__(role_plan.ActionModule)
    plugin.node = controller.Run("gpu1")
    return plugin


def test_a_refusal_states_that_nothing_was_changed_only_while_that_is_true(action: role_plan.ActionModule) -> None:
    manifest = Manifest(role="docker", refusals=("busy: a container runs",))
    with pytest.raises(AnsibleActionFail, match=r"nothing was changed:\n  - busy: a container runs"):
        action.refuse(manifest)
    action.node.keep("begun", "")
    with pytest.raises(AnsibleActionFail, match=r"earlier changes of this run remain:\n  - busy: a container runs"):
        action.refuse(manifest)
    action.refuse(Manifest(role="docker"))
    named = Manifest(role="docker", refusals=("could not resolve https://svc:Pa@ss@mirror.example.org/el9",))
    with pytest.raises(AnsibleActionFail, match=re.escape("https://(not shown)@mirror.example.org/el9")):
        action.refuse(named)


def test_a_plan_that_is_only_read_neither_fails_nor_is_pending(
    action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "module 1 is loaded"
    refused = Manifest(role="nvidia_driver", refusals=("no-gpu: none on the bus",), reboot_reasons=(why,))
    calls: list[str] = []
    monkeypatch.setattr(role_plan.GpunodeAction, "run", lambda *_: {})
    monkeypatch.setattr(role_plan.GpunodeAction, "begin", lambda *_: None)
    monkeypatch.setattr(role_plan.ActionModule, "refuse_unfit", lambda *_: calls.append("preflight"))
    monkeypatch.setattr(role_plan.ActionModule, "planned", lambda *_: refused)
    monkeypatch.setattr(role_plan.ActionModule, "remember_reboot", lambda *_: calls.append("reboot"))
    monkeypatch.setattr(role_plan.ActionModule, "restarts", lambda *_: [])
    monkeypatch.setattr(role_plan.ActionModule, "forced", lambda _: True)
    monkeypatch.setattr(role_plan.ActionModule, "settings", lambda *_: {})
    action._task = SimpleNamespace(args={"role": "nvidia_driver", "refuse": False}, check_mode=False)
    result = action.run()
    assert (result["pending"], result["reboot_reasons"], calls) == (False, [why], ["reboot"])
    assert result["warnings"] == ["no-gpu: none on the bus"]
    # gpunode_force repeats the changes of a role, and an empty plan has none: its tasks would find no values.
    action._task.args = {"role": "nvidia_driver"}
    for manifest, pending in ((Manifest(role="rdma"), False), (Manifest(role="rdma", result=RdmaResult()), True)):
        monkeypatch.setattr(role_plan.ActionModule, "planned", lambda *_, manifest=manifest: manifest)
        assert action.run()["pending"] is pending
    # Preflight changes nothing.
    monkeypatch.setattr(role_plan.ActionModule, "keep_fit", lambda *_: None)
    action._task.args = {"role": "preflight"}
    assert action.run()["pending"] is False
    action._task.args = {"role": "nvidia_driver"}
    # In check mode the roles that follow know which users would exist by then.
    action._task.check_mode = True
    accounts = Manifest(role="accounts", result=AccountsResult(create=("ada",)), pending_reasons=("ada is missing",))
    monkeypatch.setattr(role_plan.ActionModule, "planned", lambda *_: accounts)
    action.run()
    assert controller.planned_of(action.node.read("planned"), {"users": ["bob"]})["users"] == ["ada", "bob"]
    monkeypatch.setattr(role_plan.ActionModule, "planned", lambda *_: refused)
    calls.clear()
    with pytest.raises(AnsibleActionFail, match="no-gpu"):
        action.run()
    assert calls == ["preflight"]


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("problem", [None, "no module for 6.1"])
def test_what_a_field_of_the_result_reports_fails_the_task(
    action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch, problem: str | None, check: bool
) -> None:
    monkeypatch.setattr(role_plan.GpunodeAction, "run", lambda *_: {})
    monkeypatch.setattr(role_plan.GpunodeAction, "begin", lambda *_: None)
    monkeypatch.setattr(role_plan.ActionModule, "settings", lambda *_: {})
    manifest = Manifest(role="rdma", result=RdmaResult(problem=problem))
    monkeypatch.setattr(role_plan.ActionModule, "planned", lambda *_: manifest)
    action._task = SimpleNamespace(args={"role": "rdma", "problems": "problem", "refuse": False}, check_mode=check)
    if problem is None or check:
        assert action.run()["manifest"]["result"]["problem"] == problem
    else:
        with pytest.raises(AnsibleActionFail, match=problem):
            action.run()


@pytest.mark.parametrize(
    ("run_tags", "skip_tags", "selected"),
    [
        (["all"], [], True),
        (["docker"], [], True),
        (["docker_install"], [], True),
        (["web"], [], True),
        (["tagged"], [], True),
        (["always"], [], False),
        (["dcgm", "dockers"], [], False),
        (["all"], ["docker_service"], True),
        (["docker_install"], ["docker_service"], True),
        (["all"], ["docker"], False),
        (["all"], ["web"], False),
    ],
)
def test_a_role_begins_where_a_tag_of_it_is_selected(
    action: role_plan.ActionModule, run_tags: list[str], skip_tags: list[str], selected: bool
) -> None:
    action._task = SimpleNamespace(tags=["always", "web"])
    action.task_vars = {"ansible_run_tags": run_tags, "ansible_skip_tags": skip_tags}
    assert action.selected("docker") is selected


def begun(
    action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], **arguments: bool
) -> tuple[list[str], list[str]]:
    """Return (tasks that the first plan of docker names, plans that were made)."""
    plans: list[str] = []

    def planned(_self: object, role: str, _extra: object, _roles: object = ()) -> Manifest:
        plans.append(role)
        return Manifest(role=role, pending_reasons=("x",) if settings.get("pending") else ())

    monkeypatch.setattr(role_plan.GpunodeAction, "run", lambda *_: {})
    monkeypatch.setattr(role_plan.GpunodeAction, "begin", lambda *_: None)
    monkeypatch.setattr(role_plan.ActionModule, "planned", planned)
    monkeypatch.setattr(role_plan.ActionModule, "forced", lambda _: False)
    values = {"state": "present", "gpunode_roles": ["docker"], **settings}
    monkeypatch.setattr(role_plan.ActionModule, "settings", lambda *_: values)
    action._task = SimpleNamespace(args={"role": "docker", "begin": True, **arguments}, check_mode=False, tags=[])
    action.host = "gpu1"
    return action.run()["tasks"], plans


def test_a_role_that_depends_on_the_machine_is_refused_for_an_image(
    action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_plan.GpunodeAction, "run", lambda *_: {})
    monkeypatch.setattr(role_plan.GpunodeAction, "begin", lambda *_: None)
    monkeypatch.setattr(role_plan.ActionModule, "settings", lambda *_: {"gpunode_image": True})
    monkeypatch.setattr(role_plan.ActionModule, "selected", lambda *_: True)
    action._task = SimpleNamespace(args={"role": "kernel_tuning", "begin": True}, check_mode=False, tags=[])
    with pytest.raises(AnsibleActionFail, match="kernel_tuning is not for images"):
        action.run()


def test_the_sites_tasks_come_before_the_plan_and_after_the_role(
    action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "before.yml").touch()
    (tmp_path / "after.yml").touch()
    action.task_vars = {"playbook_dir": str(tmp_path)}
    before, after, tasks_file = (
        str(tmp_path / "before.yml"),
        str(tmp_path / "after.yml"),
        role_plan.own_tasks("docker", False),
    )
    both = {"tasks_before": "before.yml", "tasks_after": after}
    assert begun(action, monkeypatch, {}) == ([], ["preflight", "docker"])
    # The gate comes first: on a node that is refused, nothing of the site runs.
    action.node.forget("fit")
    later = str(role_plan.COMMON / "after_site.yml")
    assert begun(action, monkeypatch, both) == ([before, later], ["preflight"])
    assert begun(action, monkeypatch, {**both, "pending": "x"}, begin=False) == ([tasks_file, after], ["docker"])
    assert begun(action, monkeypatch, both, begin=False) == ([after], ["docker"])
    assert begun(action, monkeypatch, {**both, "state": "keep"}) == ([], ["docker"])
    removal = [before, later], str(role_plan.COMMON / "removal.yml")
    assert begun(action, monkeypatch, {**both, "pending": "x", "state": "absent"})[0] == removal[0]
    assert begun(action, monkeypatch, {"pending": "x", "state": "absent"})[0] == [removal[1]]
    with pytest.raises(AnsibleActionFail, match=r"docker_tasks_after: .*/other\.yml is not a file"):
        begun(action, monkeypatch, {"tasks_after": "other.yml"})


def test_a_removal_has_tasks_of_its_own_where_a_role_has_them() -> None:
    assert role_plan.own_tasks("docker", True) == role_plan.own_tasks("docker", False)
    assert role_plan.own_tasks("nvidia_driver", True) != role_plan.own_tasks("nvidia_driver", False)
    assert role_plan.own_tasks("dcgm", True) == str(role_plan.COMMON / "apply.yml")


class ListedRole(SimpleNamespace):
    """A role as a play lists it."""

    def get_name(self, include_role_fqcn: bool = True) -> str:
        return f"gpunode.node.{self.name}" if include_role_fqcn else str(self.name)

    def get_role_params(self) -> dict[str, object]:
        return dict(self.params)


def in_play(action: role_plan.ActionModule, role_name: str, **roles: dict[str, object]) -> None:
    """Put the action into a task of a role, in a play of these roles with their variables."""
    folder = controller.ROOT / "roles"
    listed = [
        ListedRole(name=name, vars=variables, params={}, tags=[], _role_path=str(folder / name))
        for name, variables in roles.items()
    ]
    listed.append(
        ListedRole(name="docker", vars={"docker_users": ["eve"]}, params={}, tags=[], _role_path="/elsewhere/docker")
    )
    role = next((play_role for play_role in listed if play_role.name == role_name), None)
    action._task = SimpleNamespace(
        args={}, tags=[], check_mode=False, _role=role, get_play=lambda: SimpleNamespace(roles=listed)
    )
    action.task_vars, action.host, action._loader = {}, "gpu1", None
    action._templar = SimpleNamespace(template=lambda value: value)


def test_preflight_judges_for_the_roles_of_the_play_that_the_run_includes(action: role_plan.ActionModule) -> None:
    in_play(action, "docker", docker={}, storage={})
    assert action.judged_for("docker") == ("docker", "storage")
    assert action.judged_for("accounts") == ("accounts", "docker", "storage")
    assert action.judged_for("preflight") == ("docker", "storage")
    action.task_vars = {"ansible_run_tags": ["docker"]}
    assert action.judged_for("docker") == ("docker",)
    # A play with preflight alone, as that of the site playbook, judges for gpunode_roles.
    in_play(action, "preflight", preflight={})
    assert {"nvidia_driver", "docker", "firewall"} <= set(action.judged_for("preflight"))
    action.task_vars = {"ansible_run_tags": ["docker_install"]}
    assert action.judged_for("preflight") == ("docker",)
    action._task = SimpleNamespace(args={}, tags=[])
    action.task_vars = {}
    assert action.judged_for("cuda") == ("cuda",)


def test_a_state_that_was_set_aside_is_restored_only_where_nothing_was_kept_or_forgotten_since(
    action: role_plan.ActionModule,
) -> None:
    node = action.node
    node.set_aside("state")
    node.take_back("state")
    assert node.read("state") is None
    node.keep("state", "1")
    node.set_aside("state")
    assert node.read("state") is None
    node.take_back("state")
    assert node.read("state") == 1
    node.set_aside("state")
    node.keep("state", "2")
    node.take_back("state")
    assert node.read("state") == 2
    node.set_aside("state")
    # A task of this collection changed the node.
    node.forget("state")
    node.take_back("state")
    assert node.read("state") is None


@pytest.mark.parametrize(
    ("args", "kept"), [({}, None), ({"unchanged": True}, 1), ({"fresh": True, "unchanged": True}, None)]
)
def test_the_plan_after_one_that_was_pending_uses_its_state_only_if_nothing_changed(
    action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch, args: dict[str, bool], kept: int | None
) -> None:
    read: list[object] = []

    def planned(*_: object) -> Manifest:
        read.append(action.node.read("state"))
        action.node.keep("state", "1")
        return Manifest(role="rdma", result=RdmaResult(), pending_reasons=("a file is missing",))

    monkeypatch.setattr(role_plan.GpunodeAction, "run", lambda *_: {})
    monkeypatch.setattr(role_plan.ActionModule, "planned", planned)
    for name, answer in (("begin", None), ("refuse_unfit", None), ("forced", False), ("settings", {})):
        monkeypatch.setattr(role_plan.ActionModule, name, lambda *_, answer=answer: answer)
    action.task_vars = {}
    action._task = SimpleNamespace(args={"role": "rdma"}, check_mode=False)
    assert action.run()["pending"]
    action._task.args = {"role": "rdma", **args}
    action.run()
    assert read == [None, kept]


def test_a_node_is_judged_once_for_each_role(action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[tuple[str, ...]] = []

    def planned(_self: object, role: str, _extra: object, roles: tuple[str, ...] = ()) -> Manifest:
        judged.append(roles)
        return Manifest(role=role)

    monkeypatch.setattr(role_plan.ActionModule, "planned", planned)
    in_play(action, "docker", docker={}, storage={})
    for role in ("docker", "storage", "docker", "cuda", "cuda"):
        action.refuse_unfit(role)
    assert judged == [("docker", "storage"), ("cuda", "docker", "storage")]


def test_the_plan_of_a_role_sees_the_variables_that_the_play_lists_with_another(
    action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra: dict[str, object] = {}
    monkeypatch.setattr(controller, "load_extra_vars", lambda _: extra)
    in_play(action, "nvidia_repository", nvidia_repository={}, nvidia_driver={"nvidia_driver_source": "debian"})
    assert action.settings("nvidia_driver")["source"] == "debian"
    assert action.settings("docker")["users"] == []
    # The tasks of the role itself have them from Ansible; the command line takes precedence.
    in_play(action, "nvidia_driver", nvidia_driver={"nvidia_driver_source": "debian"})
    assert action.settings("nvidia_driver")["source"] == "auto"
    in_play(action, "docker", nvidia_driver={"nvidia_driver_source": "debian"}, docker={})
    extra["nvidia_driver_source"] = "nvidia"
    action.task_vars = {"nvidia_driver_source": "nvidia"}
    assert action.settings("nvidia_driver")["source"] == "nvidia"


def test_a_variable_without_a_value_is_refused_where_its_default_has_one(action: role_plan.ActionModule) -> None:
    """Ansible's own validation, which site.yml leaves to the plans, refuses most of them."""
    in_play(action, "accounts", accounts={})
    action.host, action.task_vars = "gpu1", {"accounts_admins": None}
    with pytest.raises(AnsibleActionFail, match=r"role accounts: accounts_admins: no value: remove it for the default"):
        action.settings("accounts")
    action.task_vars = {}
    assert action.settings("accounts")["admins"] == []


def test_a_folder_of_templates_that_is_missing_is_refused(action: role_plan.ActionModule, tmp_path: Path) -> None:
    action.host, action.task_vars = "gpu1", {"playbook_dir": str(tmp_path)}
    (tmp_path / "templates").mkdir()
    assert action.site_path("gpunode_templates", "templates", folder=True) == str(tmp_path / "templates")
    assert action.site_path("gpunode_templates", "", folder=True) == ""
    with pytest.raises(AnsibleActionFail, match=r"gpunode_templates: .*/other is not a folder"):
        action.site_path("gpunode_templates", "other", folder=True)


@pytest.mark.parametrize("more", [{"commands": (NodeCommand(argv=("true",)),)}, {"modules": ("nvidia",)}])
def test_the_state_is_read_again_after_a_plan_with_tasks_that_run_though_nothing_is_pending(
    action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch, more: dict[str, object]
) -> None:
    monkeypatch.setattr(role_plan.GpunodeAction, "run", lambda *_: {})
    monkeypatch.setattr(role_plan.ActionModule, "planned", lambda *_: Manifest(role="rdma", **more))
    for name, answer in (("begin", None), ("refuse_unfit", None), ("selected", True), ("settings", {})):
        monkeypatch.setattr(role_plan.ActionModule, name, lambda *_, answer=answer: answer)
    action.task_vars = {}
    action._task = SimpleNamespace(args={"role": "rdma", "begin": True}, check_mode=False)
    action.node.keep("state", "1")
    assert not action.run()["pending"]
    assert action.node.read("state") == 1
    action._task.args = {"role": "rdma"}
    action.run()
    assert action.node.read("state") is None


class Reads:
    """A node that is read with the parts of its state that the module requests."""

    def __init__(self, action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[tuple[set[str], bool]] = []
        monkeypatch.setattr(role_plan.ActionModule, "call", self.call)
        in_play(action, "docker", docker={})

    def call(self, module: str, arguments: dict[str, Any]) -> dict[str, str]:
        assert module == "node_state"
        self.read.append((set(arguments["parts"]), "'dkms'" not in arguments["probe"][-2000:]))
        packages = APT_STATE if "packages" in arguments["parts"] else None
        state = {"bundle": BUNDLE.read_text(encoding="utf-8"), "apt": packages, "dnf": None}
        return {"state": b64encode(zlib.compress(json.dumps(state).encode())).decode()}


def test_a_run_reads_first_what_any_role_needs_and_after_a_change_what_the_role_needs_that_comes_next(
    action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Reads(action, monkeypatch)
    assert {*action.state(action.needs("updates")).unread} == {"checks", "clock", "packet_filter", "ssh"}
    for role in ("nvidia_driver", "docker", "updates"):
        action.state(action.needs(role))
    # Where no plan needs them, parts of roles that change nothing are not read: base, firewall and SSH.
    assert node.read == [({"engine", "packages"}, True)]
    action.node.forget("state")
    assert "builds" in action.state(action.needs("gpu_settings")).unread
    # The node is as it was then: what this role lacks is read with what the roles after it need.
    assert "builds" not in action.state(action.needs("docker")).unread
    action.state(action.needs("nvidia_driver"))
    assert node.read[1:] == [(set(), False), ({"engine", "packages"}, True)]
    action.state(frozenset(PARTS))
    assert action.state().unread == ()
    action.task_vars = {"ssh_hardening_state": "present"}
    action.state(fresh=True)
    assert [parts for parts, _ in node.read[3:]] == [{"engine", "packages", "ssh"}] * 2


def test_a_plan_that_needs_what_was_not_read_is_made_again_with_it(
    action: role_plan.ActionModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Reads(action, monkeypatch)
    action.state()
    action.node.forget("state")
    seen: list[tuple[str, ...]] = []

    def plan(state: NodeState, *_: object) -> Manifest:
        seen.append(state.unread)
        return Manifest(role="storage", notes=(str(state.facts.dkms), str(state.facts.dcgm_engine)))

    monkeypatch.setitem(role_plan.PLANS, "storage", plan)
    monkeypatch.setattr(role_plan.ActionModule, "context", lambda *_: Context(host="gpu1", settings_of=lambda _: {}))
    action.task_vars = {"storage_state": "present"}
    assert len(action.planned("storage", {}).notes) == 2
    assert [("builds" in unread, "checks" in unread) for unread in seen] == [
        (True, True),
        (False, True),
        (False, False),
    ]
    assert len(node.read) == 4
