"""The action scheduled_reboot: who is asked, when it has ended, and what is left to ansible.builtin.reboot."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.action import scheduled_reboot
from slurm_double import Slurmctld, SlurmNode

from gpunode.change.adapters import SlurmScheduler
from gpunode.change.scheduler import SchedulerError

DRAIN_ID = "gpunode-upgrade-0123456789ab"
PERMIT = f"printf %s {DRAIN_ID} > /run/gpunode/reboot"


class Node(SlurmNode):
    """gpu-1 in Slurm, and what is run on it; each look at its boot id is a moment."""

    def __init__(self, control: Slurmctld) -> None:
        super().__init__(DRAIN_ID, drained=True)
        self.control, self.commands = control, list[str]()

    def run(self, command: str, **_: Any) -> dict[str, Any]:
        if "boot_id" not in command:
            self.commands.append(command)
        else:
            self.step(self.control.fate)
        if command.startswith("/sbin/shutdown"):
            self.booted()
        return {"rc": 0, "stdout": f"boot {self.boots}", "stderr": ""}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    control = Slurmctld({})
    gpu_node = Node(control)
    control.nodes = {"gpu-1": gpu_node}
    monkeypatch.setattr(scheduled_reboot, "scheduler_of", lambda _: SlurmScheduler(control.scontrol))
    real = time.sleep
    monkeypatch.setattr("ansible.plugins.action.reboot.time.sleep", lambda _: real(0.02))
    return gpu_node


def rebooted(node: Node) -> dict[str, Any]:
    action = scheduled_reboot.ActionModule.__new__(scheduled_reboot.ActionModule)
    arguments = {"scheduler": "slurm", "token": DRAIN_ID, "reboot_timeout": 1}
    action._task = SimpleNamespace(args=arguments, action="scheduled_reboot", check_mode=False, async_val=0)
    action._display = SimpleNamespace(display=node.commands.append)
    action._low_level_execute_command = node.run
    option = SimpleNamespace(transport="ssh", reset=lambda: None, get_option=lambda _: 10, set_option=lambda *_: None)
    action._connection = option
    action.get_distribution = lambda _: {"name": "debian", "version": "12", "family": "debian"}
    action.get_shutdown_command = lambda *_: "/sbin/shutdown"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ansible.plugins.action.ActionBase.run", lambda *_, **__: {})
        result: dict[str, Any] = action.run(None, {"inventory_hostname": "gpu-1"})
    return result


@pytest.mark.parametrize("fate", ["boots", "late"])
def test_the_scheduler_reboots_and_the_boot_id_proves_it(node: Node, fate: str) -> None:
    node.control.fate = fate
    result = rebooted(node)
    assert (result["rebooted"], result.get("failed", False)) == (True, False)
    assert node.boots == 1
    assert node.commands[0].endswith(PERMIT)
    assert not [line for line in node.commands if "shutdown" in line]


def test_what_the_scheduler_refuses_is_rebooted_over_the_connection(node: Node) -> None:
    node.control.fate = "refused"
    result = rebooted(node)
    assert result["rebooted"]
    assert not result.get("failed")
    assert [line for line in node.commands if "shutdown" in line]
    assert [line for line in node.commands if "over the connection: scontrol reboot" in line]


@pytest.mark.parametrize(
    ("fate", "why"), [("cancelled", "the reboot was withdrawn"), ("never", ", not withdrawn"), ("waits", ", withdrawn")]
)
def test_a_reboot_that_does_not_come_fails_and_is_not_forced(node: Node, fate: str, why: str) -> None:
    node.control.fate = fate
    result = rebooted(node)
    assert result["failed"]
    assert why in result["msg"]
    assert ("requested of the scheduler" in result["msg"]) is (fate != "cancelled")
    assert node.boots == 0
    assert not [line for line in node.commands if "shutdown" in line]
    assert node.commands[-1] == "rm -f /run/gpunode/reboot"
    assert not node.reboot


def test_a_request_without_an_answer_is_withdrawn(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SlurmScheduler.reboot

    def lost(adapter: SlurmScheduler, name: str, token: str) -> str:
        real(adapter, name, token)
        raise SchedulerError("no answer")

    monkeypatch.setattr(SlurmScheduler, "reboot", lost)
    node.control.fate = "waits"
    result = rebooted(node)
    assert (result["failed"], result["msg"], node.reboot) == (True, "no answer", "")
    assert node.commands[-1] == "rm -f /run/gpunode/reboot"


@pytest.mark.parametrize("reason", ["RMA ticket 4711", ""])
def test_a_node_that_others_drained_is_not_rebooted(node: Node, reason: str) -> None:
    node.drain = reason
    node.down = not reason  # without a reason
    result = rebooted(node)
    assert (result["failed"], node.boots, node.reboot) == (True, 0, "")
