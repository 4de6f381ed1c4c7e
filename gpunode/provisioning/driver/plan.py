"""The role nvidia_driver: install, match, hold and remove the NVIDIA driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpunode.frozen import Frozen
from gpunode.provisioning import node_stack, nvidia_repository
from gpunode.provisioning.context import Context
from gpunode.provisioning.driver import apt, dnf, files
from gpunode.provisioning.driver.model import Build, DriverPlan, DriverRequest, DriverSettings, ModuleExchange, answered
from gpunode.provisioning.driver.modules import (
    IMAGES,
    NO_KEY,
    BootImage,
    SigningKey,
    foreign_modules,
    old_images,
    refreshed_images,
)
from gpunode.provisioning.manifest import (
    ManagedFile,
    Manifest,
    NodeCommand,
    NodeQuery,
    compared,
)
from gpunode.provisioning.role import Role, Texts
from gpunode.provisioning.running_driver import must_be_idle, unserved_fabric
from gpunode.provisioning.state import DnfState, Look, NodeState
from gpunode.provisioning.transaction import RELEASE, Transaction


class DriverResult(Frozen):
    """What the role's own tasks read."""

    changes: bool
    """Packages change."""
    runfile: bool
    """A driver of a .run installer is to be removed."""
    closure_problems: tuple[str, ...]
    builds: tuple[Build, ...]
    module_problems: tuple[str, ...]
    stage_key: bool
    key: str | None
    """Path of the key that signs the modules."""
    exchange: ModuleExchange | None


ROLE = Role(
    name="nvidia_driver",
    title="Install, match, hold and remove the NVIDIA driver",
    about=(
        "Installs one version of the driver with its kernel module and what must carry that version with it, and holds "
        "it.",
        "Removes everything with O(nvidia_driver_state=absent).",
    ),
    settings=DriverSettings,
    for_gpus=True,
    reads=("builds", "gpus", "nvidia_tools"),
    result=DriverResult,
    files=files.ALL,
    folders=(files.PERSISTENCED.rpartition("/")[0],),
    packages=("linux-headers-*", dnf.HEADERS),
    more=Look(globs=IMAGES),
)


@ROLE.present
def present(state: NodeState, settings: DriverSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    resolved = node_stack.of_context(state.facts, context)
    if resolved.stack is None or resolved.problems:
        return Manifest(role=ROLE.name, refusals=resolved.problems)
    refusals = (*unserved_fabric(resolved.stack, context), *dnf.dnf_problems(state.dnf))
    if refusals:
        return Manifest(role=ROLE.name, refusals=refusals)
    request = DriverRequest(state, resolved.stack, settings, answered(context.answers.get("driver")))
    if state.apt is not None:
        plan, key, runfile = apt.planned(request, state.apt), state.apt.key, state.apt.runfile and settings.switch
    else:
        manager = state.dnf or DnfState(error="unknown")
        # A .run file is refused before.
        plan, key, runfile = dnf.planned(request, manager), manager.key, False
    if plan.asks:
        return Manifest(role=ROLE.name, questions={"driver": _question(plan, context)})
    if plan.refusals:
        return Manifest(role=ROLE.name, refusals=plan.refusals)
    signing = SigningKey(key, bool(state.facts.secure_boot) and not plan.precompiled, bool(settings.mok_hash))
    builds = () if plan.changes else plan.builds
    images = () if plan.changes else tuple(old_images(plan, check=context.check))
    load = plan.loadable and not signing.waits
    exchange = plan.exchange if settings.reload and not signing.waits else None
    stage = signing.to_stage and (context.check or not plan.changes)
    text = ROLE.texts(context)
    pending = [
        *plan.pending_reasons,
        *(["a driver of a .run installer must be removed"] if runfile else []),
        *(f"kernel {build.kernel} has no module {plan.target}" for build in builds),
        *(["the key that signs the modules is not staged"] if stage else []),
        *(f"{image.path} {image.reason}" for image in images),
        *([f"module {plan.loaded} is loaded, {plan.target} is installed"] if exchange else []),
    ]
    return Manifest(
        role=ROLE.name,
        files=tuple(state.by_manager(apt=_apt_files(plan, text), dnf=_dnf_files(state, text)))
        + tuple(files.common_files(settings, text, dracut="dracut" in state.installed)),
        packages=_change(plan, context),
        modules=("nvidia-uvm",) if load else (),
        commands=_commands(images),
        units=plan.daemon(running=load or bool(plan.loaded)),
        notes=signing.notes,
        reboot_reasons=(*plan.reboot_reasons, *signing.reboot_reasons),
        pending_reasons=tuple(pending),
        result=DriverResult(
            changes=plan.changes,
            runfile=runfile,
            closure_problems=plan.closure_problems,
            builds=builds,
            module_problems=(*plan.module_problems, *([NO_KEY] if stage and key is None else ())),
            stage_key=stage,
            key=key.path if key else None,
            exchange=exchange,
        ),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal with the driver's packages, of any source, and with the kernel's images."""
    if problems := dnf.dnf_problems(state.dnf):
        return Manifest(role=ROLE.name, refusals=tuple(problems))
    settings, others = ROLE.of(context), foreign_modules(state)
    if state.apt is not None:
        change = apt.removal(state, state.apt, settings.header_packages, keep_headers=bool(others))
    else:
        change = dnf.removal(state, keep_headers=bool(others))
    loaded = state.facts.loaded_driver.version if state.facts.loaded_driver else ""
    locked = state.dnf is not None and bool(state.dnf.own_locks)
    wait = {"idle_gpus": must_be_idle(context), "lock_wait_s": settings.lock_wait_s}
    return manifest.updated(
        packages=change.model_copy(update=wait),
        commands=_commands(refreshed_images(state)),
        notes=(f"the kernel headers stay: DKMS also builds {', '.join(others)}",) if others else (),
        reboot_reasons=(f"module {loaded} is loaded, none is installed",) if loaded else (),
        pending_reasons=("the role's locks must be removed",) if locked else (),
    )


def _commands(images: Iterator[BootImage] | tuple[BootImage, ...]) -> tuple[NodeCommand, ...]:
    return tuple(NodeCommand(argv=image.argv) for image in images)


def _change(plan: DriverPlan, context: Context) -> Transaction:
    """Return the transaction with apt's files, and with idle GPUs as a condition of changes."""
    more: dict[str, Any] = {"idle_gpus": must_be_idle(context)} if plan.changes else {}
    if plan.change.manager == "apt":
        more["files"] = _apt_texts(plan, context, plan.pinned)
    return plan.change.model_copy(update=more)


def _apt_texts(plan: DriverPlan, context: Context, pinned: str) -> dict[str, str]:
    """Return apt's files as they will be, with the closure pinned to a release."""
    repository: dict[str, str] = {}
    if plan.asks:
        # They change nothing, but preflight included them in its question before they existed: the same question has
        # its answer.
        role = nvidia_repository.ROLE
        manifest = compared(role.plan(plan.state, context.settings_of(role.name), context), plan.state)
        repository = {} if manifest.pending or manifest.questions or manifest.refusals else manifest.source_files
    text = ROLE.texts(context)
    driver_files = {
        files.PREFERENCES: files.preferences_text(plan, pinned, text),
        files.SOURCES_FILE: files.sources_text(plan, text) or "",
    }
    return {**repository, **context.planned.files, **driver_files}


def _question(plan: DriverPlan, context: Context) -> NodeQuery:
    """Return the question for a preview, with the files and repositories that are planned."""
    settings = nvidia_repository.ROLE.of(context)
    more: dict[str, Any] = {}
    if plan.question.manager == "apt":
        more["files"] = _apt_texts(plan, context, RELEASE)
    else:
        offer = nvidia_repository.offered(plan.state, settings, context, plan.stack.source)
        url = offer.archive.uri if offer.archive else ""
        repository = {"id": nvidia_repository.DNF_ID, "url": url, "proxy": settings.proxy}
        more["repositories"] = (repository,) if offer.wanted else ()
    body = plan.question.model_copy(update=more).model_dump(mode="json", exclude_defaults=True)
    return NodeQuery(kind="package_transaction", body=body)


def _apt_files(plan: DriverPlan, text: Texts) -> Iterator[ManagedFile]:
    """Yield files that apt reads before apt is used; files in the initramfs before the packages that rebuild it."""
    # A hold to release stays in the list until it is released: an aborted run forgets none.
    names = sorted({*plan.change.hold, *plan.change.unhold})
    yield ManagedFile(path=files.UNATTENDED, content=files.unattended_text(names, text))
    yield ManagedFile(path=files.PREFERENCES, content=files.preferences_text(plan, plan.pinned, text))
    yield ManagedFile(path=files.SOURCES_FILE, content=files.sources_text(plan, text))
    yield ManagedFile(path=files.NOUVEAU, content=text("nouveau.conf.j2"))


def _dnf_files(state: NodeState, text: Texts) -> Iterator[ManagedFile]:
    """Yield the file that disables nouveau, if dracut is there to put it into the images.

    NVIDIA's package disables nouveau on the kernel's command line, of the boot entries that grubby knows by then.
    """
    if "dracut" in state.installed:
        yield ManagedFile(path=files.NOUVEAU, content=text("nouveau.conf.j2"))
