"""The role updates: automatic upgrades of the node, and those left to its administrator."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from gpunode.onnode import program_text
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, NodeCommand, UnitState
from gpunode.provisioning.role import PackageSettings, Role, option
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.templates import completed

POLICY = "/etc/apt/apt.conf.d/53gpunode-updates"
NEEDRESTART = "/etc/needrestart/conf.d/gpunode.conf"
SETTINGS = "/etc/gpunode/updates.json"
PROGRAM = "/usr/local/lib/gpunode/pending_updates.py"
RECORD = "/var/lib/gpunode/updates/pending.json"
AUTOMATIC = "/etc/dnf/automatic.conf"
AUTOMATIC_BEFORE = "/var/lib/gpunode/updates/automatic-before.json"
PYTHON = "/usr/bin/python3"
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
DNF_DRIVER = ("nvidia-*", "kmod-nvidia*", "libnvidia*", "libnvsdm*", "nvlsm*", "datacenter-gpu-manager*")
DNF_CUDA = ("cuda*", "cudnn*", "libcudnn*", "libnccl*")
DNF_LIBRARIES = ("libcublas*", "libcufft*", "libcusolver*", "libcusparse*", "libcurand*", "libcufile*")
DNF_ENGINE = (
    "docker-ce*",
    "docker-buildx-plugin",
    "docker-compose-plugin",
    "moby-*",
    "containerd*",
    "podman",
    "crun",
    "runc",
)
DNF_KERNEL = ("kernel*",)
EXCLUDED = "base.excludepkgs"
_SECTION = re.compile(r"\s*\[([^\]]+)\]\s*")
_SETTING = re.compile(r"\s*([A-Za-z_]+)\s*=(.*)")
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


class UpdatesSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["keep", "present", "absent"] = option(
        "keep",
        "V(keep): nothing is changed. V(present): upgrades follow this policy. V(absent): the distribution's settings "
        "are restored.",
    )
    automatic: bool = option(True, "Install security updates automatically, as configured in the distribution's tool.")
    exclude_kernel: Literal["auto", "true", "false"] = option(
        "auto",
        "Exclude the kernel from automatic upgrades. V(auto) does so if the driver's modules are precompiled: such a "
        "module is a separate package, which may be published days after the kernel. V(true), V(false).",
    )
    exclude: tuple[str, ...] = option(
        (),
        "Further packages excluded from automatic upgrades: regular expressions for the beginning of a name, such as "
        "slurm-.",
    )


ROLE = Role(
    name="updates",
    title="Manage the upgrade policy, with automatic security updates and the GPU stack on request",
    about=(
        "Security updates are installed by the distribution's own tool. The driver's closure, CUDA, the container "
        "toolkit and the container engine are left to the roles that own them, and no upgrade reboots the node.",
        "The node records since when security updates of these packages wait; C(gpunode validate) reports old ones.",
    ),
    settings=UpdatesSettings,
    for_images=True,
    files=(POLICY, SETTINGS, PROGRAM, NEEDRESTART, RECORD),
    folders=(SETTINGS.rpartition("/")[0], PROGRAM.rpartition("/")[0]),
    packages=("unattended-upgrades", "dnf-automatic"),
    more=Look(contents=(AUTOMATIC, AUTOMATIC_BEFORE)),
)


@ROLE.present
def present(state: NodeState, settings: UpdatesSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    refusals = [
        f"updates_exclude: {regex} is not a regular expression for the beginning of a package's name (example: slurm-)"
        for regex in settings.exclude
        if _not_a_pattern(regex)
    ]
    patterns = excluded(state, settings, context)
    if state.manager == "dnf":
        return _by_dnf(state, settings, patterns, refusals)
    text = ROLE.texts(context)
    contents = {
        POLICY: text("apt.conf.j2", patterns=patterns, automatic=settings.automatic, program=PROGRAM, python=PYTHON),
        SETTINGS: json.dumps({"patterns": patterns}, indent=1) + "\n",
        PROGRAM: program_text("pending_updates"),
        NEEDRESTART: text("needrestart.conf.j2", services=KEPT_RUNNING),
    }
    modes = {PROGRAM: "0755"}
    timers = APT_TIMERS if settings.automatic else ()
    return Manifest(
        role=ROLE.name,
        files=tuple(
            ManagedFile(path=path, content=text, mode=modes.get(path, "0644"), phase="after")
            for path, text in contents.items()
        ),
        folders=(ManagedFolder(path=ROLE.folder),),
        packages=ROLE.transaction(state, settings, ["unattended-upgrades"]),
        units=tuple(_timers(state, timers)),
        refusals=tuple(refusals),
        notes=tuple(_notes(state, timers)),
        commands=(NodeCommand(argv=(PYTHON, "-I", PROGRAM), changes=False),),
    )


def excluded(state: NodeState, settings: UpdatesSettings, context: Context) -> list[str]:
    """Return the patterns of packages that automatic upgrades must not change."""
    engine = ENGINE if not context.settings_of("docker")["unattended_upgrades"] else ()
    kernel = KERNEL if _keeps_kernel(state, settings) else ()
    return list(dict.fromkeys([*DRIVER, *CUDA, *TOOLKIT, *engine, *kernel, *settings.exclude]))


def _keeps_kernel(state: NodeState, settings: UpdatesSettings) -> bool:
    """Return whether the kernel is excluded; ``auto``: if the modules are precompiled, because a new kernel has none at
    first.
    """
    if settings.exclude_kernel != "auto":
        return settings.exclude_kernel == "true"
    return any(PRECOMPILED.fullmatch(name) for name in state.installed)


def _not_a_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return True
    return not text.strip() or any(character in text for character in '"\n;{}')


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


def _by_dnf(state: NodeState, settings: UpdatesSettings, patterns: list[str], refusals: list[str]) -> Manifest:
    shell_patterns = {regex: shell_pattern(regex) for regex in settings.exclude}
    refusals += [
        f"updates_exclude: {regex}: dnf matches no regular expressions: list beginnings of names (example: slurm-)"
        for regex, pattern in shell_patterns.items()
        if pattern is None and not _not_a_pattern(regex)
    ]
    text, memory, problem = automatic_text(
        state.contents.get(AUTOMATIC),
        state.contents.get(AUTOMATIC_BEFORE),
        automatic=settings.automatic,
        kernel=KERNEL[1] in patterns,
        engine=ENGINE[0] in patterns,
        more=[pattern for pattern in shell_patterns.values() if pattern is not None],
    )
    return Manifest(
        role=ROLE.name,
        files=(
            ManagedFile(path=AUTOMATIC_BEFORE, content=memory, phase="after"),
            *([ManagedFile(path=AUTOMATIC, content=text, phase="after")] if text is not None else []),
        ),
        folders=(ManagedFolder(path=ROLE.folder),),
        packages=ROLE.transaction(state, settings, ["dnf-automatic"]),
        units=tuple(_timers(state, (DNF_TIMER,))) if settings.automatic else (),
        refusals=(*refusals, *([problem] if problem else [])),
        notes=tuple(_notes(state, (DNF_TIMER,))),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, _context: Context) -> Manifest:
    """Return the removal with the tool's own settings restored first."""
    old, text = state.contents.get(AUTOMATIC_BEFORE), state.contents.get(AUTOMATIC)
    files = [*manifest.files, ManagedFile(path=AUTOMATIC_BEFORE, content=None, phase="after")]
    if old is not None and text is not None:
        files.insert(0, ManagedFile(path=AUTOMATIC, content=restored_text(text, old)))
    return manifest.updated(files=tuple(files))


def automatic_text(  # noqa: PLR0913
    text: str | None, memory: str | None, *, automatic: bool, kernel: bool, engine: bool, more: Sequence[str] = ()
) -> tuple[str | None, str | None, str | None]:
    """Return (the file in its target state, the previous values as JSON, the error); None if there is no file.

    Packages that the file excluded before stay excluded; ``more`` are further names and shell patterns.
    """
    if text is None:
        return None, None, None
    names = [
        *DNF_DRIVER,
        *DNF_CUDA,
        *DNF_LIBRARIES,
        *(DNF_ENGINE if engine else ()),
        *(DNF_KERNEL if kernel else ()),
        *more,
    ]
    settings = {
        "commands.upgrade_type": "security",
        "commands.apply_updates": "yes" if automatic else "no",
        "commands.reboot": "never",
        EXCLUDED: "",
    }
    try:
        before: dict[str, str | None] = (
            json.loads(memory) if memory else dict.fromkeys(settings) | _read(text, settings)
        )
    except ValueError:
        return None, None, f"{AUTOMATIC}: what was there before is not JSON: remove it, and run this again"
    others = (before.get(EXCLUDED) or "").replace(",", " ").split()
    settings[EXCLUDED] = " ".join(dict.fromkeys([*others, *names]))
    return _written(text, settings), json.dumps(before, indent=1) + "\n", None


def shell_pattern(expression: str) -> str | None:
    """Return the shell pattern of a regular expression for the beginning of a name; None if it is not plain text."""
    plain = expression.replace("[.]", ".").replace("\\.", ".").replace("[+]", "+").replace("\\+", "+")
    name = plain.removesuffix("$")
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name) is None:
        return None
    return name if plain.endswith("$") else f"{name}*"


def restored_text(text: str, memory: str) -> str:
    """Return the file with the previous settings."""
    try:
        before: dict[str, str | None] = json.loads(memory)
    except ValueError:
        return text
    return _written(text, before)


def _read(text: str, settings: Mapping[str, str]) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    section = ""
    for line in text.split("\n"):
        if match := _SECTION.fullmatch(line):
            section = match[1].strip()
        elif (match := _SETTING.fullmatch(line)) and f"{section}.{match[1]}" in settings:
            values[f"{section}.{match[1]}"] = match[2].strip()
    return values


def _written(text: str, values: Mapping[str, str | None]) -> str:
    """Return the text with these settings; None removes one. Missing sections are added at the end."""
    left = dict(values)
    lines: list[str] = []
    section = ""

    def complete(name: str) -> None:
        for key in [key for key in left if key.partition(".")[0] == name]:
            value = left.pop(key)
            if value is not None:
                at = len(lines)
                while at and not lines[at - 1].strip():
                    at -= 1
                lines.insert(at, f"{key.partition('.')[2]} = {value}")

    for line in completed(text).split("\n")[:-1]:
        if match := _SECTION.fullmatch(line):
            complete(section)
            section = match[1].strip()
        elif match := _SETTING.fullmatch(line):
            key = f"{section}.{match[1]}"
            if key in values:
                value = left.pop(key, None)
                if value is not None:
                    lines.append(f"{match[1]} = {value}")
                continue
        lines.append(line)
    complete(section)
    for name in dict.fromkeys(key.partition(".")[0] for key in left):
        if any(value is not None for key, value in left.items() if key.partition(".")[0] == name):
            lines += ["", f"[{name}]"]
        complete(name)
    return "\n".join(lines) + "\n"
