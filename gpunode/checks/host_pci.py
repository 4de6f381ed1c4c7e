"""Checks on the PCI path between GPUs and their peers: IOMMU and Access Control Services."""

from collections.abc import Iterator

from gpunode.checks.compare import at_most, passed, undetermined, warned
from gpunode.checks.links import GUEST, gpus_of
from gpunode.checks.machine import is_guest
from gpunode.checks.registry import CheckResult, Skip, Status, registry
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

PASSTHROUGH = "identity"
SOURCE = "sichek, gpud: P2P on bare metal"


def _no_peers(node: NodeFacts) -> str | None:
    """Return why the path between peers is not checked; None if it is."""
    if is_guest(node):
        return GUEST
    if node.architecture == "aarch64":
        return "this machine's GPUs reach memory through the SMMU (ATS): it belongs there"
    if len(node.gpus_on_bus or ()) < 2 and not node.infiniband:
        return "one GPU and no RDMA: no peer"
    return None


@registry.check(
    "host.iommu",
    needs=("pci", "iommu", "virtualization", "architecture", "infiniband"),
    needs_gpu=True,
    means="Addresses of GPUs are not translated on bare metal (IOMMU off, or in passthrough): translation "
    "routes every transfer between GPUs, and between GPU and network adapter, through the processor.",
    remedy="Add iommu=pt to the kernel's command line and reboot, or switch the IOMMU off in the firmware.",
    state="observe",
    actions=("fix_configuration",),
    bare_metal=True,
    architectures=("x86_64",),
)
def iommu(node: NodeFacts) -> Iterator[CheckResult]:
    reason = _no_peers(node)
    if reason is not None or node.iommu is None:
        raise Skip(reason or "not seen")
    if not node.iommu.units:
        yield passed("no IOMMU is enabled", expected=PASSTHROUGH, measured="off", source=SOURCE)
        return
    types = {}
    for component, device in gpus_of(node):
        if device.iommu_group is None:
            types[component] = "unknown"
        else:
            types[component] = node.iommu.group_types.get(device.iommu_group, "unknown")
    kinds = sorted(set(types.values()))
    translated = [f"{component} {kind}" for component, kind in types.items() if kind not in (PASSTHROUGH, "unknown")]
    if translated:
        message = f"addresses are translated: {listed(translated)}"
        yield warned(message, expected=PASSTHROUGH, measured=listed(kinds), source=SOURCE)
    elif "unknown" in kinds:
        yield undetermined("an IOMMU is enabled, and the kernel does not report its mode for the GPUs")
    else:
        message = "the IOMMU passes addresses of GPUs through"
        yield passed(message, expected=PASSTHROUGH, measured=listed(kinds), source=SOURCE)


@registry.check(
    "host.acs",
    needs=("pci", "pci_acs", "virtualization", "architecture", "infiniband"),
    needs_gpu=True,
    means="No bridge above a GPU sends traffic between peers up to the processor (ACS redirection) on bare metal.",
    remedy="Switch ACS off in the firmware, or for each bridge with setpci -s SLOT ECAP_ACS+6.w=0000 at every boot.",
    state="observe",
    actions=("fix_configuration",),
    bare_metal=True,
    architectures=("x86_64",),
)
def acs(node: NodeFacts) -> Iterator[CheckResult]:
    reason = _no_peers(node)
    if reason is not None:
        raise Skip(reason)
    above = {slot for device in node.gpus_on_bus or () for slot in device.ports}
    redirecting = sorted(bridge.slot for bridge in node.pci_acs or () if bridge.redirects and bridge.slot in above)
    good = f"{counted(len(above), 'bridge')} above GPUs, none redirects traffic"
    bad = f"{counted(len(redirecting), 'bridge')} above GPUs redirect traffic: {listed(redirecting)}"
    yield at_most(len(redirecting), 0, good, bad, fault=Status.WARN, unit="bridges", source=SOURCE)
