"""Conversion of a bundle into the facts of a node."""

from collections.abc import Callable, Mapping
from typing import Any

from gpunode.facts import (
    bmc,
    containers,
    disks,
    dkms,
    driver,
    exposure,
    gpu,
    gpu_settings,
    host,
    kernel_log,
    kernels,
    libraries,
    links,
    modules,
    network,
    packages,
    pci,
    rdma,
    running,
    settings,
    slurm,
    sources,
    ssh,
    system,
    tools,
    units,
    updates,
    workload,
)
from gpunode.facts.bundle_reader import BundleReader, UnknownFactError
from gpunode.facts.errors import ParseError
from gpunode.facts.node import NodeFacts
from gpunode.probe.bundle import Bundle
from gpunode.text import one_line

READERS: Mapping[str, Callable[[BundleReader], Any]] = {
    "os": system.operating_system,
    "architecture": system.architecture,
    "virtualization": system.virtualization,
    "systemd": system.systemd,
    "command_line": system.command_line,
    "kernels": kernels.kernels,
    "pci": pci.devices,
    "modules": modules.loaded,
    "loaded_driver": modules.loaded_driver,
    "nouveau_blacklisted": modules.nouveau_blacklisted,
    "module_files": modules.files,
    "dkms": dkms.modules,
    "packages": packages.packages,
    "driver_library_version": gpu.library_version,
    "smi": gpu.smi,
    "units": units.units,
    "gpu_processes": gpu.processes,
    "gpu_usage_again": gpu.usage_again,
    "gpu_settings": gpu_settings.gpu_settings,
    "storage": disks.storage,
    "tools": tools.recorded,
    "secure_boot": system.secure_boot,
    "disk_free_mib": system.disk_free_mib,
    "driver_gpus": driver.driver_gpus,
    "device_nodes": driver.device_nodes,
    "driver_parameters": driver.driver_parameters,
    "module_parameters": driver.module_parameters,
    "topology": links.topology,
    "peer_access": links.peer_access,
    "nvlink": links.nvlink,
    "nvlink_errors": links.nvlink_errors,
    "tool_runs": tools.tool_runs,
    "gpu_virtualization": links.gpu_virtualization,
    "nvidia_tool_versions": driver.nvidia_tool_versions,
    "dcgm_engine": driver.dcgm_engine,
    "tool_versions": containers.tool_versions,
    "libraries": libraries.libraries,
    "repositories": sources.repositories,
    "foreign_installs": sources.foreign_installs,
    "automatic_updates": updates.automatic_updates,
    "needrestart": updates.needrestart,
    "pending_updates": updates.pending_updates,
    "failed_reverts": updates.failed_reverts,
    "reboot_required": updates.reboot_required,
    "docker": containers.docker,
    "containers": containers.containers,
    "cdi_specs": containers.cdi_specs,
    "container_devices": containers.container_devices,
    "pci_io": pci.io_devices,
    "pci_ports": pci.ports,
    "pci_acs": pci.acs,
    "iommu": pci.iommu,
    "machine": host.machine,
    "cpu": host.cpu,
    "cpu_sets": host.cpu_sets,
    "cpu_frequency": host.cpu_frequency,
    "cpus_allowed": host.cpus_allowed,
    "numa": host.numa,
    "memory": host.memory,
    "memory_controllers": host.memory_controllers,
    "transparent_hugepages": host.transparent_hugepages,
    "disks": disks.disks,
    "nvmes": disks.nvmes,
    "file_systems": disks.file_systems,
    "local_mounts": disks.local_mounts,
    "nics": network.nics,
    "addressed": network.addressed,
    "infiniband": network.infiniband,
    "rdma_nodes": rdma.rdma_nodes,
    "peer_memory": rdma.peer_memory,
    "peer_memory_clients": rdma.peer_memory_clients,
    "own_name": network.own_name,
    "link_log": rdma.link_log,
    "packet_filter": exposure.packet_filter,
    "listeners": exposure.listeners,
    "addresses": exposure.addresses,
    "root_groups": exposure.root_groups,
    "ssh_daemon": ssh.ssh_daemon,
    "private_keys": ssh.private_keys,
    "empty_passwords": ssh.empty_passwords,
    "bmc_access": bmc.bmc_access,
    "bmc_fans": bmc.bmc_fans,
    "bmc_power_supplies": bmc.bmc_power_supplies,
    "bmc_events": bmc.bmc_events,
    "lockdown": settings.lockdown,
    "sysctl": settings.sysctl,
    "limits": settings.limits,
    "environment": settings.environment,
    "boot_settings": settings.boot_settings,
    "boot_arguments": settings.boot_arguments,
    "time_sync": running.time_sync,
    "uptime_s": running.uptime_s,
    "load_1min": running.load_1min,
    "kernel_log": kernel_log.kernel_log,
    "earlier_boots": kernel_log.earlier_boots,
    "stuck_processes": running.stuck_processes,
    "cloud_init_running": running.cloud_init_running,
    "slurm": slurm.slurm,
    "unanswered": running.unanswered,
    "records": workload.records,
}
"""One reader per field of NodeFacts; each raises UnknownFactError or ParseError with the reason if it has no answer."""


def facts_from_bundle(bundle: Bundle) -> NodeFacts:
    """Return every fact of a node. Raises nothing: a fact that cannot be read becomes a gap with its reason."""
    reader = BundleReader(bundle)
    values: dict[str, Any] = {}
    gaps: dict[str, str] = {}
    for field, read in READERS.items():
        try:
            values[field] = read(reader)
        except (UnknownFactError, ParseError) as err:
            gaps[field] = one_line(str(err))
    return NodeFacts(
        host=bundle.host, collected_at=bundle.collected_at, simulated=bundle.simulated, gaps=gaps, **values
    )
