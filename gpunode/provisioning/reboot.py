"""Decision on a reboot of a node: the roles' reasons, the settings, and who uses its GPUs."""

from collections.abc import Mapping
from typing import Any

from gpunode.checks.next_boot import why_not_to_boot
from gpunode.facts import NodeFacts
from gpunode.frozen import Frozen
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.running_driver import gpus_in_use
from gpunode.provisioning.service import drained, holder
from gpunode.provisioning.state import BOOT_ID, Look, NodeState
from gpunode.text import listed

ROLE = "reboot"
MACHINE_ID = "/etc/machine-id"
LOOK = Look(contents=(BOOT_ID, MACHINE_ID))


class RebootResult(Frozen):
    """What the playbooks read."""

    reasons: str


def plan(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return a manifest with pending changes if the node is to be rebooted now. ``settings`` are those of preflight."""
    updates = state.facts.reboot_required or () if settings["gpunode_reboot_for_updates"] else ()
    required = (f"updates: {listed(updates, 5)}",) if updates else ()
    reasons = "; ".join(dict.fromkeys((*context.reasons_to_reboot(state.boot_id), *required)))
    if not reasons:
        return Manifest(role=ROLE)
    pending = f"a reboot is pending: {reasons}"
    if settings["gpunode_reboot"] != "when_needed":
        note = f"{pending} (gpunode_reboot: never)"
    elif (owner := holder(state, settings["gpunode_change"])) is not None:
        note = f"{pending}; {owner}"
    elif is_controller(state, context):
        # The run must not end itself.
        note = f"{pending}; Ansible runs on this machine: reboot it by hand"
    elif gpus_in_use(state.facts) and not (settings["gpunode_allow_busy"] or (context.drains and not drained(state))):
        note = f"{pending}; GPUs are in use, or this is unknown: run this again, or set gpunode_allow_busy: true"
    elif unbuilt := without_module(state.facts):
        note = f"{pending}; {unbuilt}"
    else:
        return Manifest(role=ROLE, notes=(pending,), pending_reasons=(pending,), result=RebootResult(reasons=reasons))
    return Manifest(role=ROLE, notes=(note,))


def without_module(facts: NodeFacts) -> str | None:
    """Return why the next kernel would start without the running one's driver, or with one of another version than the
    library; None if it would not."""
    running = facts.running_kernel
    coming = next((kernel.release for kernel in facts.kernels or () if kernel.newest and kernel.image), None)
    coming = facts.next_boot.kernel if facts.next_boot is not None else coming
    if facts.module_files is None:
        return None
    built = {module.kernel for module in facts.module_files}
    if coming is not None and coming != running and coming not in built and running in built:
        return (
            f"the node is not rebooted, because kernel {coming} would start without the NVIDIA module that {running} "
            f"has: dkms autoinstall -k {coming} builds it, and /var/lib/dkms/nvidia*/*/build/make.log shows why the "
            "build failed"
        )
    fault = why_not_to_boot(facts) if built else None
    return None if fault is None else f"the node is not rebooted, because the next boot has no working driver: {fault}"


def is_controller(state: NodeState, context: Context) -> bool:
    """Return whether the node is the machine that Ansible runs on; True if that could not be determined.

    One boot has one id, also in a container on the same kernel; machines created from one image may share a machine id,
    which is used if a boot id is unknown.
    """
    if context.local:
        return True
    for path, controller_id in ((BOOT_ID, context.boot_id), (MACHINE_ID, context.machine_id)):
        node_id = (state.contents.get(path) or "").strip()
        if controller_id and node_id:
            return controller_id == node_id
    return True
