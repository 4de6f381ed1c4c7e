"""The plan of the role nvidia_driver on a system with dnf."""

from collections.abc import Iterator, Mapping
from typing import Any

from gpunode.provisioning import driver_files as files
from gpunode.provisioning import nvidia_repository
from gpunode.provisioning.context import Context
from gpunode.provisioning.driver_dnf import dnf_plan, dnf_problems, dnf_refusals, dnf_removal
from gpunode.provisioning.driver_modules import (
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
from gpunode.provisioning.live import exchange, must_be_idle
from gpunode.provisioning.manifest import DnfChange, ManagedFile, ManagedFolder, Manifest, NodeQuestion
from gpunode.provisioning.state import DnfState, NodeState
from gpunode.stack import Stack

ROLE = "nvidia_driver"
HEADERS = "kernel-devel"
LOCKLIST = "/etc/dnf/plugins/versionlock.list"
MARK = "gpunode (role nvidia_driver)"
"""Suffix of the two lines around our section of the list, by which preflight distinguishes our locks from others'."""


def dnf_present(state: NodeState, stack: Stack, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return the manifest of the role on a node with dnf."""
    dnf = state.dnf or DnfState(error="unknown")
    document, policy = dnf.model_dump(mode="json"), policy_settings(settings)
    problems = dnf_problems(document)
    if problems:
        return Manifest(role=ROLE, refusals=tuple(problems))
    answer = context.answers.get("driver")
    draft = dnf_plan(state.facts, document, stack, policy, answer)
    if not draft["settled"] and answer is None:
        body = {
            **draft["question"],
            **terms(settings),
            "repository": _repository(state, stack, context),
            "simulate": True,
        }
        private = "@" in nvidia_repository.ROLE.of(context).proxy
        return Manifest(role=ROLE, questions={"driver": NodeQuestion(kind="dnf_preview", body=body, private=private)})
    refusals = dnf_refusals(state.facts, document, stack, policy, answer or {})
    if refusals:
        return Manifest(role=ROLE, refusals=tuple(refusals))
    key = SigningKey(state.facts, dnf.key, draft, settings)
    after = {
        "builds": [] if draft["changes"] else module_builds(draft),
        "images": [] if draft["changes"] else old_images(state, draft, context),
        "stage_key": key.to_stage and (context.check or not draft["changes"]),
        "load": draft["loadable"] and not key.waits,
        "exchange": exchange(state, draft) if settings["reload"] and not key.waits else None,
    }
    foreign = draft["foreign_locks"] if settings["switch"] else []
    change = DnfChange(
        lock=tuple(draft["locks"]),
        lock_mark=MARK,
        drop_locks=tuple(foreign),
        memory=files.MEMORY,
        lock_wait_s=settings["lock_wait_s"],
    )
    if draft["changes"]:
        question = draft["question"]
        change = change.model_copy(
            update={
                **{name: tuple(question[name]) for name in ("bound", "free", "closure", "remove", "expendable")},
                "ignore_locks": tuple(question["ignore_locks"]),
                "constraint": question["constraint"],
                "stream": question["stream"],
                "idle_gpus": must_be_idle(context),
                "line": {word: tuple(patterns) for word, patterns in question["line"].items()},
            }
        )
    return Manifest(
        role=ROLE,
        files=(*_nouveau(state), *files.common_files(settings)),
        packages=change,
        units=tuple(daemon_units(draft, settings)),
        notes=key.notes,
        reboot_reasons=(*draft["reboot_reasons"], *key.reboot_reasons),
        values={
            **after,
            "target": draft["target"],
            "changes": draft["changes"],
            "closure_problems": _closure_problems(draft),
            "module_problems": module_problems(draft),
            "key": key.path,
            # A .run file is refused before.
            "runfile": False,
        },
        due_reasons=(*_due(draft), *module_reasons(draft, after)),
    )


def dnf_absent(state: NodeState, settings: Mapping[str, Any], idle: bool) -> Manifest:
    """Return what is removed with the driver on a node with dnf."""
    dnf = state.dnf or DnfState(error="unknown")
    problems = dnf_problems(dnf.model_dump(mode="json"))
    if problems:
        return Manifest(role=ROLE, refusals=tuple(problems))
    gone = dnf_removal(state.facts, dnf.model_dump(mode="json"))
    loaded = state.facts.loaded_driver.version if state.facts.loaded_driver else ""
    others = foreign_modules(state)
    return Manifest(
        role=ROLE,
        files=tuple(
            ManagedFile(path=path, content=None, phase="after")
            for path in (files.NOUVEAU, files.OPTIONS, files.PERSISTENCED, files.STAGED, files.MEMORY)
        ),
        folders=tuple(ManagedFolder(path=path, state="absent_if_empty", phase="after") for path in files.FOLDERS),
        packages=DnfChange(
            state="absent",
            remove=tuple(gone["remove"]),
            remove_new=() if others else (HEADERS,),
            expendable=tuple(gone["expendable"]),
            reset=gone["reset"],
            idle_gpus=idle,
            memory=files.MEMORY,
            lock=() if dnf.own_locks else None,
            lock_mark=MARK,
            lock_wait_s=settings["lock_wait_s"],
        ),
        notes=headers_note(others),
        reboot_reasons=(f"module {loaded} is loaded, none is installed",) if loaded else (),
        values={"refresh": refreshed_images(state)},
        due_reasons=("the role's locks must be removed",) if dnf.own_locks else (),
    )


def _nouveau(state: NodeState) -> Iterator[ManagedFile]:
    """Yield the file that disables nouveau, if dracut is there to put it into the images.

    NVIDIA's package disables nouveau on the kernel's command line, of the boot entries that grubby knows by then.
    """
    if "dracut" in state.installed:
        yield ManagedFile(path=files.NOUVEAU, content=files.NOUVEAU_TEXT)


def policy_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the role's settings that the policy reads."""
    return {name: settings[name] for name in ("profile", "extra_packages", "header_packages", "switch")}


def terms(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common part of every question to dnf."""
    return {
        "locklist": LOCKLIST,
        "lock_mark": MARK,
        "lock_wait_s": settings["lock_wait_s"],
        "limit_s": 900,
    }


def _repository(state: NodeState, stack: Stack, context: Context) -> dict[str, str] | None:
    """Return NVIDIA's repository in its target state; None if the node gets none."""
    settings = nvidia_repository.ROLE.of(context)
    offer = nvidia_repository.offered(state, settings, context, stack.source)
    return {"id": nvidia_repository.DNF_ID, "url": offer.url, "proxy": settings.proxy} if offer.wanted else None


def _closure_problems(draft: Mapping[str, Any]) -> list[str]:
    wrong = [*draft["wrong_versions"], *(f"no {name}" for name in draft["missing"])]
    return [f"{draft['target']} is requested of the whole closure; there is {'; '.join(wrong)}"] if wrong else []


def _due(draft: Mapping[str, Any]) -> Iterator[str]:
    if draft["changes"]:
        yield from (f"{name} is not installed" for name in draft["missing"])
        yield from (f"{row} is installed, {draft['target']} is requested" for row in draft["wrong_versions"])
        yield f"dnf has packages to change for driver {draft['target']}"
