"""The check on GPUDirect RDMA: adapters access GPU memory without a copy in main memory."""

from collections.abc import Iterator

from gpunode.catalog import load
from gpunode.catalog.driver_rules import against_dma_buf, against_gpudirect, kernel_number
from gpunode.checks.compare import passed, warned
from gpunode.checks.rdma import ports
from gpunode.checks.rdma_links import NO_DEVICE
from gpunode.checks.registry import CheckResult, Skip, Undetermined, registry
from gpunode.checks.thresholds import Threshold
from gpunode.errors import UsageError
from gpunode.facts.modules import LoadedDriver
from gpunode.facts.node import NodeFacts
from gpunode.text import listed

PEERMEM = "nvidia_peermem"
CLIENTS = ("nv_mem", "nv_mem_nc")
UNREGISTERED = (
    "Rebuild the driver's modules against the installed OFED (dkms build nvidia/VERSION --force, dkms install "
    "nvidia/VERSION --force), then modprobe -r nvidia_peermem && modprobe nvidia_peermem; ls "
    "/sys/kernel/mm/memory_peers must list nv_mem. NCCL up to 2.22.3 looks for nothing else; later releases also "
    "accept the loaded module."
)
SOURCE = "NVIDIA's NCCL guide, GPUDirect RDMA; catalog (sources.yml, ncclgdr)"
LEAST_RATE = Threshold(
    "rdma.gpudirect.least-rate",
    100,
    "Gbit/s",
    "Slower RoCE ports are treated as storage and management ports, without GPUDirect RDMA.",
    source="our choice: adapters of training networks have 100 Gbit/s and more",
    least=1,
)


@registry.check(
    "rdma.gpudirect",
    needs=("infiniband", "modules", "kernels", "loaded_driver", "peer_memory", "peer_memory_clients"),
    needs_gpu=True,
    means="On a node with GPUs and an active InfiniBand port, or a RoCE port at the policy's rate, adapters "
    "access GPU memory directly: over dma-buf (open kernel modules, kernel 5.12, CUDA 11.7, Turing or younger), "
    "or over nvidia-peermem, which has to be registered with the kernel's RDMA: loaded is not registered.",
    remedy="Use the open kernel modules (nvidia_driver_flavour: open), or run the role rdma, which loads "
    "nvidia-peermem if the kernel has its interface (rdma_source: doca installs it); NCCL_DEBUG=INFO shows the "
    "path that NCCL uses.",
    state="observe",
    actions=("fix_configuration",),
    thresholds=(LEAST_RATE,),
)
def gpudirect(node: NodeFacts) -> Iterator[CheckResult]:
    models = load().models_of((device.pci_id, device.subsystem_id) for device in node.gpus_on_bus or ())
    reason = _not_expected(node) or "; ".join(against_gpudirect(models))
    if reason:
        raise Skip(reason)
    driver = node.loaded_driver
    if driver is None:
        raise Skip("no NVIDIA module is loaded")
    loaded = PEERMEM in (node.modules or ())
    if loaded and _registered(node):
        yield passed("over nvidia-peermem, which is registered", measured="peermem", source=SOURCE)
        return
    state = "loaded and not registered" if loaded else "not loaded"
    if driver.flavour is None or not models:
        subject = "the flavour of the loaded module" if models else "which GPUs these are"
        raise Undetermined(f"nvidia-peermem is {state}, and {subject} could not be determined")
    against = against_dma_buf(models, driver.flavour, _cuda(driver), kernel_number(node.running_kernel))
    if against:
        lacking = {False: "; this kernel has no interface for it", None: "", True: ""}[node.peer_memory]
        message = (
            f"GPU memory is reached over main memory: no dma-buf ({listed(against)}), and nvidia-peermem is {state}"
        )
        source = f"{SOURCE}; NVIDIA/nccl issue 1939" if loaded else SOURCE
        remedy = UNREGISTERED if loaded else None
        yield warned(message + lacking, expected="dma-buf", measured="none", source=source, remedy=remedy)
    else:
        yield passed("over dma-buf", expected="dma-buf", measured="dma-buf", source=SOURCE)


def _registered(node: NodeFacts) -> bool:
    """Return True if nvidia-peermem is among the kernel's clients, as far as the kernel lists them.

    Without such a list NCCL up to 2.22.3 does not use the module either (NVIDIA/nccl issue 1676).
    """
    return node.peer_memory is not False and any(name in (node.peer_memory_clients or ()) for name in CLIENTS)


def _not_expected(node: NodeFacts) -> str | None:
    """Return why no GPUDirect RDMA is expected of a node; None if it is expected."""
    if not node.infiniband:
        return NO_DEVICE
    active = [port for _, _, port in ports(node) if port.state == "ACTIVE"]
    if not active:
        return "no RDMA port is active"
    fast = [port for port in active if (port.rate_gbit_per_s or 0.0) >= LEAST_RATE.value]
    if any(port.link_layer == "InfiniBand" for port in active) or any(port.link_layer == "Ethernet" for port in fast):
        return None
    return f"no InfiniBand port is active, and no RoCE port at {LEAST_RATE.value:g} Gbit/s or more"


def _cuda(driver: LoadedDriver) -> str | None:
    """Return the CUDA of the driver's branch; None if the catalog does not have the branch."""
    try:
        return load().branch_of(driver.version.split(".")[0]).native_cuda if driver.version else None
    except UsageError:
        return None
