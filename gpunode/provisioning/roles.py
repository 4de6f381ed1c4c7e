"""The plan of each role, the parts of a node that ``node_state`` reads for it, and what an image can have of both."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gpunode.provisioning import preflight, service
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import Manifest, UnitState
from gpunode.provisioning.order import ORDER
from gpunode.provisioning.role import Role
from gpunode.provisioning.state import Look, NodeState

Plan = Callable[[NodeState, Mapping[str, Any], Context], Manifest]
"""(state, the role's settings without its name in front, the run) to manifest; pure."""


ROLES: dict[str, Role[Any]] = {role.name: role for role in (preflight.ROLE, *ORDER)}
LOOKS: dict[str, Look] = {name: role.look for name, role in ROLES.items()}
LOOKS |= {"reboot": service.REBOOT_LOOK, "service": service.SERVICE_LOOK, "way_back": service.WAY_BACK_LOOK}
NEEDS: dict[str, frozenset[str]] = {name: role.needs for name, role in ROLES.items()}
NEEDS |= {"reboot": frozenset({"gpus"}), "service": frozenset({"gpus"}), "way_back": frozenset({"packages"})}
"""Parts of the state that the plans need."""
IMAGE_ROLES = tuple(role.name for role in ORDER if role.for_images)
"""Those that change the root of an image."""
IMAGE_COMMANDS = frozenset(
    {"dpkg-reconfigure", "gpasswd", "locale-gen", "nvidia-ctk", "sh", "update-ca-certificates", "update-ca-trust"}
)
"""Programs that read and write files alone. Others would ask the running systemd, or change the builder's kernel."""


def _owned(files: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """Yield files of the site that a role writes: each file has one owner."""
    owners = {path: name for name, role in ROLES.items() for path in role.files}
    for path in (str(file["path"]) for file in files):
        if path in owners:
            yield f"gpunode_extra_files: {path} belongs to the role {owners[path]}"


def _first_read(role: str, plan: Plan) -> Plan:
    """Return a plan that refuses a node on which a document of the role exists and could not be read."""

    def planned(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
        if settings.get("state") == "keep":
            return plan(state, settings, context)
        reasons = [*state.unreadable(LOOKS[role].contents)]
        if role == "ssh_hardening" and state.ssh is not None:
            reasons += state.ssh.unreadable.values()
        if conflicts := [*_owned(settings.get("gpunode_extra_files") or ())]:
            return Manifest(role=role, refusals=tuple(conflicts))
        if not reasons:
            return plan(state, settings, context)
        remedy = "the role would lose its content: repair it, or move it away, then run this again"
        return Manifest(role=role, refusals=tuple(f"unreadable: {reason}: {remedy}" for reason in reasons))

    return planned


_PLANS: dict[str, Plan] = {name: role.plan for name, role in ROLES.items()}
_PLANS |= {
    "reboot": service.plan_reboot,
    "service": service.plan_service,
    "way_back": service.plan_way_back,
}
PLANS = {name: _first_read(name, plan) for name, plan in _PLANS.items()}
"""With those of the playbooks, which are no roles."""


def of_image(state: NodeState) -> NodeState:
    """Return the state of the root of an image: packages and files alone, without the machine that builds the image.

    In a chroot, systemd does not run, and kernel, memory, devices and processes are those of that machine.
    """
    kernels = state.facts.kernels
    installed = tuple(
        kernel.model_copy(update={"running": False}) for kernel in kernels or () if kernel.package is not None
    )
    facts = state.facts.model_copy(
        update={
            "kernels": None if kernels is None else installed,
            "modules": (),
            "loaded_driver": None,
            "driver_parameters": None,
            "gpu_processes": (),
            "memory": None,
            "pci": (),
            "smi": None,
            "time_sync": None,
            "own_name": None,
            # Kernel and clock are those of a host, which the plans leave alone.
            "virtualization": "systemd-nspawn",
        }
    )
    return state.model_copy(update={"facts": facts, "engine": {}, "connection": None})


def offline(manifest: Manifest) -> Manifest:
    """Return the part of a manifest that an image can have; the rest follows at the first boot.

    Units are enabled by links and not started. Reboots, restarts and problems concern a machine that runs.
    """
    guarded = manifest.guarded
    return manifest.updated(
        units=tuple(
            UnitState(name=unit.name, enabled=unit.enabled) for unit in manifest.units if unit.enabled is not None
        ),
        modules=(),
        kernel_values=None,
        commands=tuple(command for command in manifest.commands if command.argv[0] in IMAGE_COMMANDS),
        guarded=guarded.model_copy(update={"limit_s": 0, "activate": (), "restore": ()}) if guarded else None,
        reboot_reasons=(),
        restarts={},
        restart_mark=None,
        marks=(),
        problems=(),
    )
