"""The plan of the role nvidia_driver."""

from collections.abc import Iterator, Mapping
from typing import Any

from gpunode.provisioning import driver_files as files
from gpunode.provisioning import node_stack, nvidia_repository
from gpunode.provisioning.context import Context
from gpunode.provisioning.driver_apt import driver_plan, driver_question, driver_removal
from gpunode.provisioning.driver_modules import (
    IMAGES,
    SigningKey,
    daemon_units,
    foreign_modules,
    headers_note,
    module_builds,
    module_problems,
    module_reasons,
    old_images,
    refreshed_images,
)
from gpunode.provisioning.driver_refusals import driver_refusals
from gpunode.provisioning.due import judged
from gpunode.provisioning.live import exchange, must_be_idle, unserved_fabric
from gpunode.provisioning.manifest import AptChange, ManagedFile, ManagedFolder, Manifest, NodeQuestion
from gpunode.provisioning.nvidia_driver_dnf import dnf_absent, dnf_present
from gpunode.provisioning.state import AptState, Look, NodeState
from gpunode.stack import Stack

ROLE = "nvidia_driver"
UNSUPPORTED = "unsupported: the driver is installed through apt or dnf, and the node has neither"
LOOK = Look(paths=(*files.ALL, *files.FOLDERS), globs=IMAGES, contents=(files.MEMORY,))


def plan(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return the manifest of the role."""
    if state.manager is None:
        return Manifest(role=ROLE, refusals=(UNSUPPORTED,))
    if settings["state"] == "absent":
        idle = must_be_idle(context)
        return _absent(state, state.apt, settings, idle) if state.apt else dnf_absent(state, settings, idle)
    found = node_stack.of_context(state.facts, context)
    if found.stack is None or found.problems:
        return Manifest(role=ROLE, refusals=found.problems)
    refusals = tuple(unserved_fabric(found.stack, state.facts, context))
    if refusals:
        return Manifest(role=ROLE, refusals=refusals)
    if state.apt is None:
        return dnf_present(state, found.stack, settings, context)
    return _present(state, state.apt, found.stack, settings, context)


def policy_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the role's settings that the policy reads."""
    names = ("profile", "extra_packages", "header_packages", "persistence", "switch", "kernel_policy")
    return {**{name: settings[name] for name in names}, "sources_file": files.SOURCES_FILE}


def _present(state: NodeState, apt: AptState, stack: Stack, settings: Mapping[str, Any], context: Context) -> Manifest:
    facts, apt_document, policy = state.facts, apt.model_dump(mode="json"), policy_settings(settings)
    answer = context.answers.get("driver")
    draft = driver_plan(facts, apt_document, stack, policy, answer)
    changes = bool(draft["missing"] or draft["going"])
    sources = files.sources_text(draft["stanzas"])
    for_apt = {**context.planned.files, files.PREFERENCES: "", files.SOURCES_FILE: sources or ""}
    if changes and answer is None:
        for_apt = {**_repository_files(state, context), **for_apt}
        question = driver_question(facts, apt_document, stack, policy)
        body = {**question, "preferences": files.PREFERENCES, "files": for_apt}
        private = "@" in nvidia_repository.ROLE.of(context).proxy
        return Manifest(role=ROLE, questions={"driver": NodeQuestion(kind="apt_preview", body=body, private=private)})
    refusals = driver_refusals(facts, apt_document, stack, policy, answer or {})
    if refusals:
        return Manifest(role=ROLE, refusals=tuple(refusals))
    key = SigningKey(state.facts, apt.key, draft, settings)
    runfile = apt.runfile and bool(settings["switch"])
    after = {
        "builds": [] if changes else module_builds(draft),
        "images": [] if changes else old_images(state, draft, context),
        "stage_key": key.to_stage and (context.check or not changes),
        "load": draft["loadable"] and not key.waits,
        "exchange": exchange(state, draft) if settings["reload"] and not key.waits else None,
    }
    return Manifest(
        role=ROLE,
        files=tuple(_files(draft, sources, settings)),
        packages=_packages(draft, answer if changes else None, settings, for_apt, idle=must_be_idle(context)),
        units=tuple(daemon_units(draft, settings)),
        notes=key.notes,
        reboot_reasons=(*draft["reboot_reasons"], *key.reboot_reasons),
        values={
            **after,
            "target": draft["target"],
            "runfile": runfile,
            "key": key.path,
            "changes": changes,
            "closure_problems": _closure_problems(draft),
            "module_problems": module_problems(draft),
        },
        due_reasons=tuple(_due(state, draft, after, runfile)),
    )


def _repository_files(state: NodeState, context: Context) -> dict[str, str]:
    """Return the files of NVIDIA's repository if they are up to date on the node.

    They change nothing, but preflight included them in its question before they existed: the same question has its
    answer.
    """
    role = nvidia_repository.ROLE
    there = judged(role.plan(state, context.settings_of(role.name), context), state)
    return {} if there.due or there.questions or there.refusals else there.source_files


def _packages(
    draft: Mapping[str, Any],
    answer: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    for_apt: Mapping[str, Any],
    *,
    idle: bool,
) -> AptChange:
    change = AptChange(
        hold=tuple(draft["closure"]),
        unhold=tuple(draft["freed"]),
        memory=files.MEMORY,
        files={**for_apt, files.PREFERENCES: files.preferences_text(draft["pins"])},
        lock_wait_s=settings["lock_wait_s"],
    )
    if answer is None:
        return change
    arguments = tuple(str(one) for one in answer.get("arguments", ()) if not str(one).endswith("-"))
    gone = tuple(answer.get("remove", ()))
    return change.model_copy(update={"install": arguments, "purge": gone, "idle_gpus": idle})


def _files(draft: Mapping[str, Any], sources: str | None, settings: Mapping[str, Any]) -> Iterator[ManagedFile]:
    """Yield files that apt reads before apt is used; files in the initramfs before the packages that rebuild it."""
    # A hold to release stays in the list until it is released: an aborted run forgets none.
    names = sorted({*draft["closure"], *draft["freed"]})
    yield ManagedFile(path=files.UNATTENDED, content=files.unattended_text(names))
    yield ManagedFile(path=files.PREFERENCES, content=files.preferences_text(draft["pins"]))
    yield ManagedFile(path=files.SOURCES_FILE, content=sources)
    yield ManagedFile(path=files.NOUVEAU, content=files.NOUVEAU_TEXT)
    yield from files.common_files(settings)


def _closure_problems(draft: Mapping[str, Any]) -> list[str]:
    """Return why the closure is not at one version after the transaction."""
    if not draft["wrong_versions"] and not draft["missing"]:
        return []
    whole = [f"not all of {', '.join(draft['missing'])} is available"] if draft["missing"] else []
    there = "; ".join([*draft["wrong_versions"], *whole])
    return [f"{draft['target']} is requested for the whole closure, found {there}"]


def _due(state: NodeState, draft: Mapping[str, Any], after: Mapping[str, Any], runfile: bool) -> Iterator[str]:
    installed = state.installed
    for name in draft["missing"]:
        if name not in installed:
            yield f"{name} is not installed"
        else:
            yield f"{name} is at {installed[name]}, {draft['target'] or 'another release'} is requested"
    yield from (f"{name} must be removed" for name in draft["going"])
    if runfile:
        yield "a driver of a .run installer must be removed"
    yield from module_reasons(draft, after)


def _absent(state: NodeState, apt: AptState, settings: Mapping[str, Any], idle: bool) -> Manifest:
    gone = driver_removal(state.facts, apt.model_dump(mode="json"), settings["header_packages"])
    others = foreign_modules(state)
    return Manifest(
        role=ROLE,
        files=tuple(ManagedFile(path=path, content=None, phase="after") for path in files.ALL),
        folders=tuple(ManagedFolder(path=path, state="absent_if_empty", phase="after") for path in files.FOLDERS),
        packages=AptChange(
            state="absent",
            purge=tuple(gone["packages"]),
            purge_new=() if others else tuple(gone["headers"]),
            never=("linux-headers-*", "linux-kbuild-*") if others else (),
            restore=tuple(gone["restore"]),
            unhold=tuple(gone["freed"]),
            memory=files.MEMORY,
            idle_gpus=idle,
            lock_wait_s=settings["lock_wait_s"],
        ),
        notes=headers_note(others),
        reboot_reasons=(f"module {gone['loaded']} is loaded, none is installed",) if gone["loaded"] else (),
        values={
            "refresh": refreshed_images(state),
        },
    )
