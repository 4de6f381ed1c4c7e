"""The roles of ``playbooks/site.yml``, in its order."""

from typing import Any

from gpunode.provisioning import (
    accounts,
    base,
    cuda,
    dcgm,
    docker,
    firewall,
    first_boot,
    gpu_monitoring,
    gpu_settings,
    gpu_tools,
    kernel_tuning,
    kubernetes_node,
    ml_environment,
    nvidia_container_toolkit,
    nvidia_fabric,
    nvidia_repository,
    rdma,
    slurm_node,
    ssh_hardening,
    storage,
    updates,
)
from gpunode.provisioning.driver import plan as driver
from gpunode.provisioning.role import Role

ORDER: tuple[Role[Any], ...] = (
    base.ROLE,
    nvidia_repository.ROLE,
    driver.ROLE,
    nvidia_fabric.ROLE,
    gpu_settings.ROLE,
    kernel_tuning.ROLE,
    rdma.ROLE,
    cuda.ROLE,
    dcgm.ROLE,
    accounts.ROLE,
    storage.ROLE,
    docker.ROLE,
    kubernetes_node.ROLE,
    nvidia_container_toolkit.ROLE,
    ml_environment.ROLE,
    gpu_tools.ROLE,
    gpu_monitoring.ROLE,
    slurm_node.ROLE,
    updates.ROLE,
    ssh_hardening.ROLE,
    firewall.ROLE,
    first_boot.ROLE,
)
