"""The role updates: automatic upgrades of the node, and those left to its administrator."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files as resources
from typing import Any

from gpunode.provisioning.context import Context
from gpunode.provisioning.departures import departures
from gpunode.provisioning.manifest import (
    AptChange,
    DnfChange,
    ManagedFile,
    ManagedFolder,
    Manifest,
    UnitState,
    no_package_manager,
)
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.updates_dnf import AUTOMATIC, automatic_text, restored_text, shell_pattern

ROLE = "updates"
POLICY = "/etc/apt/apt.conf.d/53gpunode-updates"
NEEDRESTART = "/etc/needrestart/conf.d/gpunode.conf"
SETTINGS = "/etc/gpunode/updates.json"
PROGRAM = "/usr/local/lib/gpunode/pending_updates.py"
MEMORY = "/var/lib/gpunode/updates"
RECORD = f"{MEMORY}/pending.json"
BEFORE = f"{MEMORY}/packages-before"
AUTOMATIC_BEFORE = f"{MEMORY}/automatic-before.json"
FOLDERS = (MEMORY, SETTINGS.rpartition("/")[0], PROGRAM.rpartition("/")[0])
LOOK = Look(
    paths=(POLICY, NEEDRESTART, SETTINGS, PROGRAM, RECORD, *FOLDERS),
    contents=(BEFORE, AUTOMATIC, AUTOMATIC_BEFORE),
)
APT_TIMERS = ("apt-daily.timer", "apt-daily-upgrade.timer")
DNF_TIMER = "dnf-automatic.timer"

DRIVER = (
    "nvidia-",
    "(lib|xserver-xorg-video-|firmware-|kmod-)nvidia",
    "libcuda1$",
    "libnv(cuvid|optix|fm|sdm|idia|scq|sm)",
    "linux-(modules|objects|signatures)-nvidia-",
    "nvlsm",
    "datacenter-gpu-manager",
)
"""The closure of the driver, which has one version, and DCGM, which depends on it."""
CUDA = ("cuda($|-)", "(lib)?cudnn[0-9-]", "(lib)?nccl[0-9-]", "libcu(blas|fft|rand|solver|sparse|pti|file|dart)")
ENGINE = (
    "docker[.]io$",
    "docker-(ce|cli|buildx|compose|ee)",
    "moby-",
    "containerd($|[.]io)",
    "runc$",
    "podman$",
    "crun$",
)
TOOLKIT = ("nvidia-container-", "libnvidia-container")
KERNEL = ("linux-(image|headers|modules|generic|virtual|kbuild|tools)($|-)", "kernel($|-)")
PRECOMPILED = re.compile(r"linux-(modules|objects|signatures)-nvidia-.+|kmod-nvidia-(?!.*dkms).+")
KEPT_RUNNING = (
    "docker",
    "containerd",
    "podman",
    "nvidia-",
    "dcgm",
    "nvlsm",
    "slurmd",
    "munge",
    "kubelet",
    "k3s",
    "rke2",
    "gpunode-",
)
"""Prefixes of units that needrestart lists and never restarts."""


def plan(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return the manifest of the role."""
    if settings["state"] == "keep":
        return Manifest(role=ROLE)
    if state.manager is None:
        return no_package_manager(ROLE)
    if settings["state"] == "absent":
        return _absent(state, settings)
    wrong = [one for one in map(str, settings["exclude"]) if _not_a_pattern(one)]
    refusals = [
        f"updates_exclude: {one} is not a regular expression for the beginning of a package's name (example: slurm-)"
        for one in wrong
    ]
    patterns = excluded(state, settings, context)
    if state.apt is None:
        return _by_dnf(state, settings, patterns, refusals)
    automatic = bool(settings["automatic"])
    return Manifest(
        role=ROLE,
        files=(
            ManagedFile(path=POLICY, content=policy_text(patterns, automatic=automatic), phase="after"),
            ManagedFile(path=SETTINGS, content=json.dumps({"patterns": patterns}, indent=1) + "\n", phase="after"),
            ManagedFile(path=PROGRAM, content=program_text(), mode="0755", phase="after"),
            ManagedFile(path=NEEDRESTART, content=needrestart_text(), phase="after"),
        ),
        folders=(ManagedFolder(path=MEMORY),),
        packages=AptChange(install=("unattended-upgrades",), memory=BEFORE, lock_wait_s=int(settings["lock_wait_s"])),
        units=tuple(_timers(state, APT_TIMERS)) if automatic else (),
        refusals=tuple(refusals),
        notes=tuple(_notes(state, APT_TIMERS if automatic else ())),
        values={"state": "present", "record": [PYTHON, "-I", PROGRAM]},
    )


PYTHON = "/usr/bin/python3"


def excluded(state: NodeState, settings: Mapping[str, Any], context: Context) -> list[str]:
    """Return the patterns of packages that automatic upgrades must not change."""
    engine = ENGINE if not context.settings_of("docker")["unattended_upgrades"] else ()
    kernel = KERNEL if _keeps_kernel(state, settings) else ()
    own = [str(one) for one in settings["exclude"]]
    return list(dict.fromkeys([*DRIVER, *CUDA, *TOOLKIT, *engine, *kernel, *own]))


def _keeps_kernel(state: NodeState, settings: Mapping[str, Any]) -> bool:
    """Return whether the kernel is excluded; ``auto``: if the modules are precompiled, because a new kernel has none at
    first.
    """
    if settings["exclude_kernel"] != "auto":
        return str(settings["exclude_kernel"]) == "true"
    return any(PRECOMPILED.fullmatch(name) for name in state.installed)


def _not_a_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return True
    return not text.strip() or any(character in text for character in '"\n;{}')


def policy_text(patterns: list[str], *, automatic: bool) -> str:
    """Return apt's part of the policy."""
    switch = "1" if automatic else "0"
    lines = [
        "// Managed by gpunode (role updates): security updates are installed automatically, the GPU stack on request.",
        f'APT::Periodic::Update-Package-Lists "{switch}";',
        f'APT::Periodic::Unattended-Upgrade "{switch}";',
        'Unattended-Upgrade::Automatic-Reboot "false";',
        "Unattended-Upgrade::Package-Blacklist {",
        *(f'  "^{pattern}";' for pattern in patterns),
        "};",
        f'APT::Update::Post-Invoke-Success {{ "test ! -e {PROGRAM} || {PYTHON} -I {PROGRAM} || true"; }};',
    ]
    return "".join(f"{line}\n" for line in lines)


def needrestart_text() -> str:
    """Return needrestart's part, in Perl, as needrestart reads it."""
    return (
        "# Managed by gpunode (role updates): services with a changed library are listed, not restarted: a "
        "restart would end jobs.\n" + "".join(f"$nrconf{{override_rc}}{{qr(^{name})}} = 0;\n" for name in KEPT_RUNNING)
    )


def program_text() -> str:
    """Return the program that records pending security updates."""
    return resources("gpunode.provisioning").joinpath("pending_updates.py").read_text(encoding="utf-8")


def _timers(state: NodeState, names: tuple[str, ...]) -> Iterator[UnitState]:
    """Yield the timers in their target state; a masked one was disabled on purpose."""
    for name in names:
        if state.unit(name) is not None:
            yield UnitState(name=name, enabled=True, state="started")


def _notes(state: NodeState, timers: tuple[str, ...]) -> Iterator[str]:
    masked = [unit.name for unit in state.facts.units or () if unit.name in timers and unit.load == "masked"]
    if masked:
        yield (
            f"{' and '.join(masked)} masked: no security update is installed automatically "
            f"(run systemctl unmask {' '.join(masked)})"
        )
    waiting = state.facts.reboot_required or ()
    if waiting:
        yield (
            f"a reboot is pending: {', '.join(waiting[:6])} "
            "(gpunode provision -i INVENTORY -l HOST -e gpunode_reboot=when_needed)"
        )


def _by_dnf(state: NodeState, settings: Mapping[str, Any], patterns: list[str], refusals: list[str]) -> Manifest:
    given = {str(one): shell_pattern(str(one)) for one in settings["exclude"]}
    refusals += [
        f"updates_exclude: {one}: dnf matches no regular expressions: list beginnings of names (example: slurm-)"
        for one, pattern in given.items()
        if pattern is None and not _not_a_pattern(one)
    ]
    text, memory, problem = automatic_text(
        state.contents.get(AUTOMATIC),
        state.contents.get(AUTOMATIC_BEFORE),
        automatic=bool(settings["automatic"]),
        kernel=KERNEL[1] in patterns,
        engine=ENGINE[0] in patterns,
        more=[pattern for pattern in given.values() if pattern is not None],
    )
    return Manifest(
        role=ROLE,
        files=(
            ManagedFile(path=AUTOMATIC_BEFORE, content=memory, phase="after"),
            *([ManagedFile(path=AUTOMATIC, content=text, phase="after")] if text is not None else []),
        ),
        folders=(ManagedFolder(path=MEMORY),),
        packages=DnfChange(install=("dnf-automatic",), memory=BEFORE, lock_wait_s=int(settings["lock_wait_s"])),
        units=tuple(_timers(state, (DNF_TIMER,))) if settings["automatic"] else (),
        refusals=(*refusals, *([problem] if problem else [])),
        notes=tuple(_notes(state, (DNF_TIMER,))),
        values={"state": "present", "record": []},
    )


def _absent(state: NodeState, settings: Mapping[str, Any]) -> Manifest:
    tool = "unattended-upgrades" if state.apt is not None else "dnf-automatic"
    packages, leaving = departures(state, (tool,), memory=BEFORE, lock_wait_s=int(settings["lock_wait_s"]))
    own = [POLICY, SETTINGS, PROGRAM, NEEDRESTART, RECORD, BEFORE, AUTOMATIC_BEFORE]
    files = [ManagedFile(path=path, content=None, phase="after") for path in own]
    old = state.contents.get(AUTOMATIC_BEFORE)
    if state.apt is None and old is not None and state.contents.get(AUTOMATIC) is not None:
        text = restored_text(state.contents[AUTOMATIC] or "", old)
        files.insert(0, ManagedFile(path=AUTOMATIC, content=text, phase="before"))
    return Manifest(
        role=ROLE,
        files=tuple(files),
        folders=tuple(ManagedFolder(path=path, state="absent_if_empty", phase="after") for path in FOLDERS),
        packages=packages,
        due_reasons=tuple(leaving),
        values={"state": "absent", "record": []},
    )
