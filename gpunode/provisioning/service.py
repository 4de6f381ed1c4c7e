"""Plans of the playbooks that no role has: a node's return to service, its reboot, the way back from a change.

A node that this project drained returns only when nothing is pending. The drain is recorded on the node, with the
findings before the change: a later run knows that it may end this drain, and what to compare with.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from gpunode.catalog.origins import upstream_version
from gpunode.checks.next_boot import why_not_to_boot
from gpunode.facts import NodeFacts
from gpunode.frozen import Frozen
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import Manifest, NodeQuery
from gpunode.provisioning.running_driver import gpus_in_use, installed_driver
from gpunode.provisioning.state import BOOT_ID, Look, NodeState
from gpunode.text import listed

SERVICE = "service"
MARK = "/var/lib/gpunode/drained.json"
LEASE = "/var/lib/gpunode/change.json"
"""Written by ``gpunode upgrade`` (gpunode/onnode/lease.py) for as long as a run of it owns the node."""
SERVICE_LOOK = Look(contents=(MARK, LEASE, BOOT_ID))
Short = Annotated[str, Field(max_length=200)]
REBOOT = "reboot"
MACHINE_ID = "/etc/machine-id"
REBOOT_LOOK = Look(contents=(BOOT_ID, MACHINE_ID))
WAY_BACK = "way_back"
WAY_BACK_LOOK = Look()
# libcuda1 and libcudadebugger1, libnvcuvid1 and libnvoptix1, libxnvctrl0: parts of the driver without its name.
_OF_DRIVER = re.compile(r"nvidia|^lib(cuda|nv|xnvctrl)|^cuda-drivers")


class FindingBefore(Frozen):
    """One check that did not pass before the change."""

    check: Short
    component: Short
    status: Short


class Drain(Frozen):
    """Content of the mark."""

    since: Short
    """Time of the drain, ISO 8601."""
    token: Short = ""
    """Names the drain of ``gpunode upgrade``."""
    findings: Annotated[tuple[FindingBefore, ...], Field(max_length=5000)]


class ServiceResult(Frozen):
    """What the playbooks read."""

    drained: bool
    busy: bool
    """GPUs are in use, or this is unknown."""
    drain_wait_s: int
    """How long a drained node may be busy."""
    before: tuple[FindingBefore, ...]


def plan_service(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return a manifest with pending changes if a drained node may return once its validation is not worse than before.

    ``settings`` are those of preflight.
    """
    before = recorded(state.contents.get(MARK))
    result = ServiceResult(
        drained=drained(state),
        busy=gpus_in_use(state.facts) and not settings["gpunode_allow_busy"],
        drain_wait_s=settings["gpunode_drain_wait_s"],
        before=before.findings if before is not None else (),
    )
    if not result.drained:
        return Manifest(role=SERVICE, result=result)
    owner = holder(state)
    if owner is not None:
        return Manifest(role=SERVICE, result=result, notes=(f"the node stays drained: {owner}",))
    pending = [f"a reboot is pending: {reason}" for reason in context.reasons_to_reboot(state.boot_id)]
    pending += [f"a restart of {unit} is pending: {reason}" for unit, reason in sorted(context.restarts.items())]
    if pending:
        return Manifest(role=SERVICE, result=result, notes=(f"the node stays drained: {'; '.join(pending)}",))
    lost = f"{MARK} is not readable: every check must pass" if before is None else ""
    return Manifest(
        role=SERVICE,
        result=result,
        notes=(lost,) if lost else (),
        pending_reasons=("the node is to return to service",),
    )


def holder(state: NodeState, token: str = "") -> str | None:
    """Return who holds the node by ``gpunode upgrade``; None if nobody does, or the run with ``token``."""
    text = state.contents.get(LEASE)
    if text is None:
        return None
    try:
        lease = json.loads(text)
        owner, lease_token, since = (str(lease[name])[:200] for name in ("owner", "token", "since"))
    except (ValueError, TypeError, KeyError, RecursionError):
        return f"gpunode upgrade holds it, and {LEASE} is not readable"
    return None if lease_token == token else f"gpunode upgrade of {owner} holds it since {since} ({LEASE})"


def drained(state: NodeState) -> bool:
    """Return whether the node carries the mark of a drain; True if that is unknown."""
    return state.kind(MARK) != "absent"


def recorded(text: str | None) -> Drain | None:
    """Return the content of the mark; None if it is unknown or damaged."""
    try:
        return Drain.model_validate(json.loads(text or ""))
    except (ValidationError, ValueError, RecursionError):
        return None


class RebootResult(Frozen):
    """What the playbooks read."""

    reasons: str


def plan_reboot(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return a manifest with pending changes if the node is to be rebooted now. ``settings`` are those of preflight."""
    updates = state.facts.reboot_required or () if settings["gpunode_reboot_for_updates"] else ()
    required = (f"updates: {listed(updates, 5)}",) if updates else ()
    reasons = "; ".join(dict.fromkeys((*context.reasons_to_reboot(state.boot_id), *required)))
    if not reasons:
        return Manifest(role=REBOOT)
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
        return Manifest(role=REBOOT, notes=(pending,), pending_reasons=(pending,), result=RebootResult(reasons=reasons))
    return Manifest(role=REBOOT, notes=(note,))


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


class WayBackResult(Frozen):
    """What the playbook keeps on the node."""

    release: str
    packages: tuple[str, ...]


def plan_way_back(state: NodeState, _: Mapping[str, object], context: Context) -> Manifest:
    """Return a manifest that refuses if a package of the installed release is not offered any more.

    A plan of playbooks/prepare.yml: it refuses a node that could not get its release again, before anything changes.
    """
    release = installed_driver(state.facts)
    names = sorted(
        package.name
        for package in state.facts.packages or ()
        if package.installed and _OF_DRIVER.search(package.name) and upstream_version(package.version) == release
    )
    if not release or not names:
        return Manifest(
            role=WAY_BACK, refusals=("way-back: no driver of one release is installed: there is no way back",)
        )
    answer = context.answers.get("offers")
    if answer is None:
        return Manifest(role=WAY_BACK, questions={"offers": NodeQuery(kind="package_offers", body={"names": names})})
    if answer.get("error"):
        return Manifest(
            role=WAY_BACK, refusals=(f"way-back: what the repositories offer is unknown: {answer['error']}",)
        )
    offered = answer.get("offered") or {}
    gone = [name for name in names if release not in map(upstream_version, offered.get(name, ()))]
    if not gone:
        return Manifest(role=WAY_BACK, result=WayBackResult(release=release, packages=tuple(names)))
    return Manifest(
        role=WAY_BACK,
        refusals=(
            f"way-back: the repositories no longer offer {release} of {listed(gone, 3)}, so the node could not get its "
            "release again (gpunode upgrade --no-rollback continues without a way back)",
        ),
    )
