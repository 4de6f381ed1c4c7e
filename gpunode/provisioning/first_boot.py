"""The role first_boot: gpunode in an image, and a unit that settles and validates the machine that boots from it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from gpunode import __version__
from gpunode.content import collection_root
from gpunode.errors import UsageError
from gpunode.frozen import Frozen
from gpunode.provisioning.context import Context
from gpunode.provisioning.keys import KeyRefusedError, key_of_file
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, UnitState
from gpunode.provisioning.role import PackageSettings, Role, option
from gpunode.provisioning.state import Look, NodeState
from gpunode.variables import plain, specifications

FOLDER = "/etc/gpunode/first-boot"
INVENTORY, EXPECT, SETTINGS = (f"{FOLDER}/{name}" for name in ("inventory.json", "expect.json", "settings.json"))
VENV = "/opt/gpunode/first-boot"
RECORD = f"{VENV}/gpunode-installed"
PROGRAM = "/usr/local/sbin/gpunode-first-boot"
UNIT = "gpunode-first-boot.service"
KEYS = "gpunode-host-keys.service"
UNITS = "/etc/systemd/system/"
DONE = "/var/lib/gpunode/first_boot/done"
MACHINE_ID = "/etc/machine-id"
FORGOTTEN = (
    "/etc/ssh/ssh_host_*",
    "/var/cache/apt/archives/*.deb",
    "/var/cache/dnf/*",
    "/var/lib/dbus/machine-id",
    "/var/lib/dhcp/*.leases",
    "/var/lib/NetworkManager/*.lease",
    "/var/lib/NetworkManager/secret_key",
    "/var/lib/systemd/random-seed",
    "/var/log/journal/*",
    DONE,
    "/var/lib/gpunode/first_boot/report.json",
)
"""Identity, logs and downloads of the machine that builds. apt's lists stay: a first boot can plan with them."""
NOT_KEPT = ("gpunode_image", "gpunode_change", "gpunode_force", "gpunode_lab", "gpunode_templates")
"""Variables of one run, and a folder of the controller."""
CARRIED = ("docker_repository_key", "nvidia_container_toolkit_key", "nvidia_repository_key", "rdma_doca_key")
"""Variables with a key that may be a file of the controller: it is copied into the image."""
_FILES_OF_CONTROLLER = re.compile(r"gpu_monitoring_program|storage_hooks|[a-z_]+_tasks_(before|after)")
"""Variables with files of the controller that the first boot could not read. Certificates and munge's key are texts."""
_TEMPLATE = re.compile(r"\{[{%#]")


class FirstBootSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["keep", "present", "absent"] = option(
        "keep",
        "V(keep) (nothing is done), V(present) (the next boot settles and validates the machine once) or V(absent).",
    )
    wheels: str = option(
        "",
        "Folder of the controller with the wheels of gpunode and its dependencies (C(pip wheel --wheel-dir FOLDER .)). "
        "Empty: the controller's version, from the index that the node's pip uses.",
    )
    python: str = option("/usr/bin/python3", "Python of the node for gpunode, 3.11 or later.")
    seal: bool = option(
        False,
        "Remove SSH host keys, machine id, journal and downloaded packages, so that each machine makes its own. "
        "playbooks/image.yml sets it.",
    )
    skip: tuple[str, ...] = option((), "Checks that the validation of the first boot leaves out: ids or patterns.")
    limit_s: int = option(3600, "Seconds that provisioning and validation may take together.")

    @field_validator("wheels", "python")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and not value.startswith("/"):
            raise ValueError(f"{value} is not an absolute path")
        return value


class FirstBootResult(Frozen):
    """What the role's own tasks do."""

    venv: bool = False
    """The virtual environment has to be built."""
    wheels: str = ""
    requirement: str = "gpunode"
    record: str = ""
    """What is installed, for the next run."""
    python: str = ""
    forget: tuple[str, ...] = ()
    """Paths to be removed from an image."""
    leaves: bool = False
    """The virtual environment has to be removed."""


ROLE = Role(
    name="first_boot",
    title="Settle, validate and report at the first boot of an image",
    about=(
        "Installs gpunode in a virtual environment with the variables of the host, and a unit that provisions and "
        "validates the machine at its next boot, once, and reports on the console and in "
        "C(/var/lib/gpunode/first_boot/report.json).",
        "With O(first_boot_seal=true) it removes the identity of the machine that builds. By default the node is not "
        "changed.",
    ),
    settings=FirstBootSettings,
    for_images=True,
    result=FirstBootResult,
    files=(
        *(INVENTORY, EXPECT, SETTINGS, PROGRAM, f"{UNITS}{UNIT}", f"{UNITS}{KEYS}"),
        *(f"{FOLDER}/{name}.asc" for name in CARRIED),
    ),
    folders=(FOLDER, "/etc/gpunode", "/opt/gpunode"),
    packages=("python3-venv",),
    more=Look(paths=(VENV, MACHINE_ID), globs=FORGOTTEN, contents=(RECORD,)),
)


@ROLE.present
def present(state: NodeState, settings: FirstBootSettings, context: Context) -> Manifest:
    """Return the manifest of the role. Raises UsageError for wheels without gpunode, or a file without a key."""
    text = ROLE.texts(context)
    record = installed_of(settings)
    builds = (state.contents.get(RECORD) or "") != record
    expect = dict(context.settings_of("preflight")["gpunode_expect"])
    kept = dict(_variables(context))
    keys, refusals = _keys(kept), tuple(_not_in_the_image(kept))
    ssh = bool({"openssh-server"} & state.installed.keys())
    documents: dict[str, Any] = {
        INVENTORY: inventory(kept, keys),
        EXPECT: expect or None,
        SETTINGS: {"skip": list(settings.skip), "limit_s": settings.limit_s},
    }
    units = {
        UNIT: text("gpunode-first-boot.service.j2", program=PROGRAM, done=DONE, limit_s=settings.limit_s + 60),
        KEYS: text("gpunode-host-keys.service.j2") if ssh else None,
    }
    forget = forgotten(state) if settings.seal else ()
    return Manifest(
        role=ROLE.name,
        refusals=refusals,
        files=(
            *(
                ManagedFile(
                    path=path,
                    content=None if document is None else json.dumps(document, indent=1, sort_keys=True) + "\n",
                    mode="0600",
                    phase="after",
                    # The settings may have passwords: of the directory, of a proxy, munge's key.
                    private=path == INVENTORY,
                )
                for path, document in documents.items()
            ),
            *(
                ManagedFile(path=f"{FOLDER}/{name}.asc", content=keys.get(name), mode="0644", phase="after")
                for name in CARRIED
            ),
            ManagedFile(path=PROGRAM, content=ROLE.program("gpunode-first-boot"), mode="0755", phase="after"),
            *(ManagedFile(path=f"{UNITS}{name}", content=unit, phase="after") for name, unit in units.items()),
            # Empty, not absent: without it systemd resets all units to the distribution's presets.
            *([ManagedFile(path=MACHINE_ID, content="", mode="0444", phase="last")] if settings.seal else ()),
        ),
        folders=(ManagedFolder(path=FOLDER, mode="0700"), ManagedFolder(path=ROLE.folder)),
        packages=ROLE.transaction(state, settings, state.by_manager(apt=["python3-venv"], dnf=[])),
        units=tuple(UnitState(name=name, enabled=True) for name, unit in units.items() if unit is not None),
        pending_reasons=(
            *([f"{VENV} was not built from {settings.wheels or record.strip()}"] if builds else []),
            *(f"{path} belongs to the machine that builds" for path in forget),
        ),
        result=FirstBootResult(
            venv=builds,
            wheels=settings.wheels,
            requirement="gpunode" if settings.wheels else record.strip(),
            record=record,
            python=settings.python,
            forget=forget,
        ),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, _context: Context) -> Manifest:
    """Return the removal with the virtual environment; the report stays."""
    leaves = state.exists(VENV)
    why = (f"{VENV} must be removed",) if leaves else ()
    units = tuple(
        UnitState(name=name, enabled=False, phase="before") for name in (UNIT, KEYS) if state.unit(name) is not None
    )
    return manifest.updated(
        units=units, pending_reasons=(*manifest.pending_reasons, *why), result=FirstBootResult(leaves=leaves)
    )


def installed_of(settings: FirstBootSettings) -> str:
    """Return what the virtual environment is built from: the version, or the wheels with their digests."""
    if not settings.wheels:
        return f"gpunode=={__version__}\n"
    files = sorted(Path(settings.wheels).glob("*.whl"))
    if not any(file.name.startswith("gpunode-") for file in files):
        raise UsageError(f"first_boot_wheels: {settings.wheels} has no gpunode-*.whl: pip wheel --wheel-dir FOLDER .")
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def inventory(variables: Mapping[str, Any], keys: Iterable[str]) -> Mapping[str, Any]:
    """Return the inventory of the first boot: this host, with the variables that are kept for it.

    ``keys``: the variables with a key that is copied into the image.
    """
    local = {
        "ansible_connection": "local",
        # That of the distribution has the bindings of apt and dnf.
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    copied = {name: f"{FOLDER}/{name}.asc" for name in keys}
    return {"gpu_nodes": {"hosts": {"localhost": {**local, **variables, **copied}}}}


def _keys(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the armored text of keys that are files of the controller, by variable. Raises UsageError."""
    keys = {}
    for name in CARRIED:
        path = str(variables.get(name, ""))
        if path and "://" not in path:
            try:
                keys[name] = key_of_file(path)
            except KeyRefusedError as err:
                raise UsageError(f"{name}: {err}") from None
    return keys


def _not_in_the_image(variables: Mapping[str, Any]) -> Iterator[str]:
    """Yield a refusal for each variable with a file that the first boot could not read."""
    for name in sorted(filter(_FILES_OF_CONTROLLER.fullmatch, variables)):
        yield (
            f"first-boot: {name} names a file of this controller, which the machine does not have at its first boot: "
            "leave it out here, and provision it later over SSH"
        )


def _variables(context: Context) -> Iterator[tuple[str, Any]]:
    roles = sorted({path.parts[-3] for path in collection_root().glob("roles/*/meta/argument_specs.yml")} - {ROLE.name})
    known = specifications(collection_root())
    for role in roles:
        for field, value in context.settings_of(role).items():
            name = field if field.startswith("gpunode_") else f"{role}_{field}"
            if name not in NOT_KEPT and plain(value) != plain(known[name].get("default")):
                yield name, _literal(plain(value))


def _literal(value: Any) -> Any:
    """Return a value of an inventory with its texts that look like templates marked ``!unsafe``: they are literal."""
    if isinstance(value, dict):
        return {key: _literal(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_literal(member) for member in value]
    return {"__ansible_unsafe": value} if isinstance(value, str) and _TEMPLATE.search(value) else value


def forgotten(state: NodeState) -> tuple[str, ...]:
    """Return the paths on the node that belong to the machine that builds."""
    existing = filter(state.exists, state.files)
    return tuple(sorted(path for path in existing if any(fnmatchcase(path, pattern) for pattern in FORGOTTEN)))
