"""The role gpu_settings: clocks, power limit, compute mode, ECC, MIG and accounting of GPUs, set again at boot."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError, field_validator

from gpunode.catalog import load
from gpunode.checks.gpus import LOST
from gpunode.errors import UsageError
from gpunode.frozen import Frozen, invalid_field
from gpunode.onnode import program_text
from gpunode.onnode.gpu_settings import (
    LATER,
    MEMORY,
    PROFILE,
    REPORT,
    SETTINGS,
    TITLES,
    busy,
    in_force,
    matches,
    pending,
    requested,
    resolved,
    shown,
)
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, UnitState
from gpunode.provisioning.role import Role, Settings, Texts, option
from gpunode.provisioning.state import Look, NodeState
from gpunode.text import listed

DAEMON, UNIT = "nvidia-persistenced.service", "gpunode-gpu-settings.service"
PROGRAM = "/usr/local/lib/gpunode/gpu-settings.py"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
DROP_IN = f"/etc/systemd/system/{DAEMON}.d/gpunode-persistence.conf"
DAEMON_FILES = tuple(f"{folder}/systemd/system/{DAEMON}" for folder in ("/etc", "/usr/lib", "/lib"))
_COMMAND = re.compile(r"(?m)^ExecStart=(.*\s)--no-persistence-mode\b(.*)$")
_WATTS = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,2})?) ?W?")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,2})?) ?%")


class RequestedClocks(BaseModel):
    """A pair of application clocks."""

    model_config = ConfigDict(extra="forbid")

    memory: StrictInt
    graphics: StrictInt


class GpuSettingsRule(BaseModel):
    """One element of ``gpu_settings_rules``."""

    model_config = ConfigDict(extra="forbid")

    gpus: Any = option(
        ..., "V(all), an index or a list of indexes, or a model or a list of models (name, family or PCI id)."
    )
    sm_clock_mhz: Any = option(None, "Locked SM clock in MHz, a range of two, V(max) or V(default).")
    memory_clock_mhz: Any = option(None, "Locked memory clock in MHz, a range of two, V(max) or V(default).")
    application_clocks_mhz: Literal["default"] | RequestedClocks | None = option(
        None, "C(memory) and C(graphics) in MHz, or V(default); for drivers before 590."
    )
    power_limit: Any = option(None, "Watts, a percentage of the GPU's default such as V(80%), V(max) or V(default).")
    compute_mode: Literal["default", "exclusive_process", "prohibited"] | None = option(
        None, "Compute mode, which sets how many processes may use a GPU."
    )
    ecc: StrictBool | None = option(
        None, "Whether ECC is enabled. Takes effect with the next reset of the GPU or reboot of the node."
    )
    mig: StrictBool | Annotated[list[str], Field(max_length=8)] | None = option(
        None, "Whether MIG mode is enabled, or the list of its instances' profiles such as V(3g.40gb)."
    )
    accounting: StrictBool | None = option(None, "Whether the driver keeps a record of processes that ended.")

    @field_validator("gpus")
    @classmethod
    def _selects(cls, value: Any) -> Any:
        names = value if isinstance(value, list) else [value]
        if names == ["all"]:
            return "all"
        if names and all(re.fullmatch("[0-9]{1,2}", str(name)) for name in names):
            return {"indexes": sorted({int(name) for name in names})}
        if not names or any(not isinstance(name, str) or re.fullmatch("[0-9]{1,2}|all", name) for name in names):
            raise ValueError("is all, a list of indexes, or a list of models (examples: [0, 1], H100 SXM, 10de:2330)")
        gpus = [gpu for name in names for gpu in load().find_gpu(name).gpus]
        return {"pci_ids": sorted({number for gpu in gpus for number in gpu.pci})}

    @field_validator("sm_clock_mhz", "memory_clock_mhz")
    @classmethod
    def _clock(cls, value: Any) -> Any:
        if value in (None, "max", "default"):
            return value
        pair = value if isinstance(value, list) else [value]
        numbers = [int(clock) for clock in pair if re.fullmatch("[1-9][0-9]{0,4}", str(clock))]
        if len(numbers) != len(pair) or len(pair) not in (1, 2) or numbers != sorted(numbers):
            raise ValueError(f"{value} is max, default, a clock in MHz or a range (examples: 1410, [210, 1410])")
        return numbers if len(numbers) == 2 else numbers[0]

    @field_validator("power_limit")
    @classmethod
    def _power(cls, value: Any) -> Any:
        text = str(value)
        if value in (None, "max", "default"):
            return value
        if match := _PERCENT.fullmatch(text):
            return f"{match[1]}%"
        if isinstance(value, bool) or (match := _WATTS.fullmatch(text)) is None:
            raise ValueError(f"{value} is max, default, watts or a part of the default (examples: 500, 500 W, 80%)")
        return float(match[1])

    @field_validator("mig")
    @classmethod
    def _profiles(cls, value: Any) -> Any:
        wrong = [profile for profile in value if PROFILE.fullmatch(profile) is None] if isinstance(value, list) else []
        if wrong:
            raise ValueError(f"{wrong[0]} is not the name of a MIG profile (examples: 1g.10gb, 1g.10gb+me, 3g.40gb)")
        return value


class GpuSettingsSettings(Settings):
    """Variables of the role."""

    state: Literal["present", "absent"] = option(
        "present",
        "V(present): settings are applied now and at each boot. V(absent): the values before the first change are "
        "restored.",
    )
    rules: tuple[dict[str, Any], ...] = option(
        (),
        "Settings and the GPUs that they apply to; a later rule overrides an earlier one, per setting (see README.md).",
        options=GpuSettingsRule,
    )


class GpuSettingsResult(Frozen):
    """What the role's own tasks do."""

    program: str = PROGRAM
    restore: bool = False
    """The program restores the values before the first change."""


ROLE = Role(
    name="gpu_settings",
    title="Set clocks, power limit, compute mode, ECC and MIG of GPUs, and apply them at each boot",
    about=(
        "One unit applies the rules after the persistence daemon and fabric manager, and before containers and DCGM.",
        "A clock or power limit outside the GPU's range is refused before anything is changed.",
        "Restores the values before the first change with O(gpu_settings_state=absent).",
    ),
    settings=GpuSettingsSettings,
    for_gpus=True,
    reads=("gpus",),
    result=GpuSettingsResult,
    files=(UNIT_FILE, PROGRAM, SETTINGS, DROP_IN),
    folders=("/etc/gpunode", "/usr/local/lib/gpunode", MEMORY.rpartition("/")[0], DROP_IN.rpartition("/")[0]),
    more=Look(contents=(REPORT, MEMORY, *DAEMON_FILES)),
)


@ROLE.present
def present(state: NodeState, settings: GpuSettingsSettings, context: Context) -> Manifest:
    """Return the manifest of the role. Raises UsageError for a malformed rule."""
    rules = parsed_rules(settings.rules)
    if not rules:
        return ROLE.gone(state, settings, context)
    gpus = seen_gpus(state)
    lost = [f"gpu{gpu['index']}" for gpu in gpus if LOST.intersection(gpu.get("errors") or ())]
    gpus = [gpu for gpu in gpus if f"gpu{gpu['index']}" not in lost]
    refusals = [
        f"gpu_settings_rules: {key}: gpu{gpu['index']} {gpu['name']}: {why}"
        for gpu in gpus
        for key, why in resolved(requested(rules, gpu), gpu)[1].items()
    ]
    if refusals:
        return Manifest(role=ROLE.name, refusals=tuple(refusals))
    report = read_report(state)
    changes, notes, waiting = _compared(gpus, rules, report)
    notes += [
        f"gpu_settings_rules[{number}].gpus: the node has no such GPU; it has {len(gpus)}"
        for number, rule in enumerate(rules)
        if gpus and "indexes" in rule["gpus"] and not any(matches(rule["gpus"], gpu) for gpu in gpus)
    ]
    if lost:
        notes.append(f"{listed(lost, 8)}: no setting is applied, the GPU does not respond")
    daemon = state.unit(DAEMON)
    if daemon is None and state.facts.loaded_driver is not None:
        notes.append(f"{DAEMON} is not installed: GPUs lose their settings when no process uses them")
    content = json.dumps({"schema": "gpunode.gpu-settings/1", "rules": rules}, indent=1, sort_keys=True) + "\n"
    text = ROLE.texts(context)
    drop_in = persistence_drop_in(state, text)
    unit = text("gpunode-gpu-settings.service.j2", daemon=DAEMON, program=PROGRAM)
    desired = [
        ManagedFile(path=PROGRAM, content=program_text("gpu_settings"), mode="0755", phase="after"),
        ManagedFile(path=UNIT_FILE, content=unit, phase="after"),
        ManagedFile(path=SETTINGS, content=content, phase="after"),
        ManagedFile(path=DROP_IN, content=drop_in, phase="after"),
    ]
    runnable = bool(gpus)
    units = []
    if daemon is not None:
        stale = (
            drop_in is not None
            and DROP_IN in state.files
            and state.files[DROP_IN].kind == "absent"
            and not any(map(busy, gpus))
        )
        units.append(UnitState(name=DAEMON, enabled=True, state=_state(runnable, stale)))
    units.append(UnitState(name=UNIT, enabled=True, state=_state(runnable, bool(changes))))
    return Manifest(
        role=ROLE.name,
        files=tuple(desired),
        folders=(ManagedFolder(path=MEMORY.rpartition("/")[0], mode="0700"),),
        units=tuple(units),
        notes=tuple(notes),
        reboot_reasons=tuple(waiting),
        pending_reasons=tuple(changes),
        result=GpuSettingsResult(),
    )


def _state(runnable: bool, again: bool) -> Literal["started", "restarted"] | None:
    return None if not runnable else "restarted" if again else "started"


def parsed_rules(rules: Any) -> list[dict[str, Any]]:
    """Return the rules as in the settings file. Raises UsageError that names the element and its key."""
    parsed = []
    for number, rule in enumerate(rules or []):
        try:
            checked = GpuSettingsRule.model_validate(rule)
        except ValidationError as err:
            key, why = invalid_field(err)
            raise UsageError(f"gpu_settings_rules[{number}].{key}: {why.removeprefix('Value error, ')}") from None
        except UsageError as err:
            raise UsageError(f"gpu_settings_rules[{number}].gpus: {err}") from None
        parsed.append(checked.model_dump(mode="json", exclude_none=True))
    return parsed


def seen_gpus(state: NodeState) -> list[dict[str, Any]]:
    """Return the GPUs as ``gpunode parse`` prints them, for the program that runs on nodes; none without nvidia-smi."""
    return [gpu.model_dump(mode="json") for gpu in state.facts.smi_gpus if gpu.uuid]


def read_report(state: NodeState) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the unit's report of this boot: uuid, setting, entry. Malformed parts count as not reported."""
    try:
        gpus = json.loads(state.contents.get(REPORT) or "{}")["gpus"]
        return {
            uuid: {name: entry for name, entry in gpu["settings"].items() if name in TITLES and isinstance(entry, dict)}
            for uuid, gpu in gpus.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _compared(
    gpus: list[dict[str, Any]], rules: list[dict[str, Any]], report: dict[str, dict[str, dict[str, Any]]]
) -> tuple[list[str], list[str], list[str]]:
    """Return (why the unit has to run, notes for the owner, why the node has to be rebooted)."""
    changes: list[str] = []
    notes: list[str] = []
    later: dict[str, list[str]] = {}
    for gpu in gpus:
        name = f"gpu{gpu['index']}"
        entries = report.get(gpu["uuid"], {})
        values = resolved(requested(rules, gpu), gpu)[0]
        for setting, value in values.items():
            now, entry = _now(setting, gpu, entries, value), entries.get(setting, {})
            subject = f"{name}: {TITLES[setting]}"
            if now == value:
                continue
            if pending(setting, gpu) == value:
                later.setdefault(f"{TITLES[setting]} {shown(setting, value)}", []).append(name)
            elif entry.get("value") == value and entry.get("result") == "refused":
                notes.append(f"{subject} {shown(setting, value)} was refused: {str(entry.get('message'))[:300]}")
            elif entry.get("value") == value and entry.get("result") == "pending":
                continue
            elif busy(gpu):
                notes.append(f"{subject} is not changed: a process computes on the GPU")
            else:
                changes.append(f"{subject} is {shown(setting, now)}, not {shown(setting, value)}")
        changes += [
            f"{name}: {TITLES[setting]} is no longer requested"
            for setting in entries
            if setting not in values and not busy(gpu)
        ]
    return changes, notes, [f"{title} of {listed(names, 8)} {LATER}" for title, names in later.items()]


def _now(setting: str, gpu: Mapping[str, Any], entries: Mapping[str, Any], value: Any) -> Any:
    """Return a setting's value; if nvidia-smi does not report it, the value that the unit set in this boot."""
    if setting == "mig_layout" and len(gpu.get("mig_devices") or ()) != len(value):
        return None
    if setting in ("sm_clock_mhz", "memory_clock_mhz", "mig_layout") or value == "default":
        entry = entries.get(setting, {})
        return entry.get("value") if entry.get("result") in ("applied", "kept") else None
    return in_force(setting, gpu)


def persistence_drop_in(state: NodeState, template: Texts) -> str | None:
    """Return the drop-in with which the daemon keeps GPUs initialised; None if its unit does so already.

    Ubuntu's package starts it with --no-persistence-mode.
    """
    text = next((content for path in DAEMON_FILES if (content := state.contents.get(path))), "")
    command = _COMMAND.search(text)
    if command is None:
        return None
    return template("persistence.conf.j2", command=f"{command[1]}--persistence-mode{command[2]}")


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal, which restores the values of idle GPUs first."""
    recorded = _recorded(state)
    gpus = seen_gpus(state)
    users = [f"gpu{gpu['index']}" for gpu in gpus if gpu["uuid"] in recorded and busy(gpu)]
    if users and not context.settings_of("preflight")["gpunode_allow_busy"]:
        why = f"gpu-busy: a process computes on {listed(users, 8)}, and settings are restored on idle GPUs only"
        return Manifest(role=ROLE.name, refusals=(f"{why}: run this again later, or set gpunode_allow_busy: true",))
    more = {
        "files": (*manifest.files, *(ManagedFile(path=path, content=None, phase="after") for path in (REPORT, MEMORY))),
        "units": ROLE.stopped(state, UNIT),
        "result": GpuSettingsResult(restore=bool(recorded and gpus)),
    }
    return manifest.updated(**more)


def _recorded(state: NodeState) -> Mapping[str, Any]:
    """Return the values before the first change, by UUID."""
    try:
        document = json.loads(state.contents.get(MEMORY) or "{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
