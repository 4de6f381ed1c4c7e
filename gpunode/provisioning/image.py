"""The root of an image as a node: packages and files alone, because nothing of the machine that will boot it is there.

In a chroot, systemd does not run, and kernel, memory, devices and processes are those of the machine that builds.
"""

from gpunode.provisioning.manifest import Manifest, UnitState
from gpunode.provisioning.order import ORDER
from gpunode.provisioning.state import NodeState

ROLES = tuple(role.name for role in ORDER if role.for_images)
COMMANDS = frozenset(
    {"dpkg-reconfigure", "gpasswd", "locale-gen", "nvidia-ctk", "sh", "update-ca-certificates", "update-ca-trust"}
)
"""Programs that read and write files alone. Others would ask the running systemd, or change the builder's kernel."""


def of_image(state: NodeState) -> NodeState:
    """Return the state without what belongs to the machine that builds the image."""
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
        commands=tuple(command for command in manifest.commands if command.argv[0] in COMMANDS),
        guarded=guarded.model_copy(update={"limit_s": 0, "activate": (), "restore": ()}) if guarded else None,
        reboot_reasons=(),
        restarts={},
        restart_mark=None,
        marks=(),
        problems=(),
    )
