"""Checks on the services of GPUs behind NVSwitches (fabric manager, NVLSM, IMEX), and on the GPUs' fabric state."""

import re
from collections.abc import Iterator

from gpunode.catalog import Platform, load
from gpunode.checks.compare import equals, failed, faultless, passed, skipped, undetermined
from gpunode.checks.driver import loaded_driver, same_version
from gpunode.checks.gpus import ANSWERS, MODEL, SeenGpu, model_of, of_one_gpu, seen_gpus
from gpunode.checks.machine import gpu_ids, has_part, is_guest, nvswitches, platforms
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined, registry
from gpunode.facts.node import NodeFacts
from gpunode.facts.running import NO_SYSTEMD, Unit
from gpunode.text import listed

UNITS = {"fabric-manager": "nvidia-fabricmanager.service", "nvlsm": "nvlsm.service", "imex": "nvidia-imex.service"}
PLATFORMS = "catalog (platforms.yml)"
NOT_NEEDED = "this platform needs no fabric manager"
MANAGER = "fabric.manager reports it"
FEWER = "Compare the number of GPUs with the machine's specification (gpus in the file of --expect): see gpu.present."
FABRIC_SINCE = 9.0
"""The lowest compute capability of GPUs that report a fabric."""
# Messages for the parts of a fabric's health, after NVML's fabric definitions.
WELL = frozenset({"healthy", "full", "false", "no", "none", "not supported", "n/a"})
BAD = re.compile(r"unhealthy|degraded|limited|true|yes|incorrect|insufficient|incompatible|invalid|no partition", re.I)


def needed_services(node: NodeFacts) -> tuple[str, ...]:
    """Return services that the node's platform needs, if all platforms with its GPUs agree.

    If no platform has this number of GPUs, because one fell off the bus, all platforms with this model must agree.
    NVSwitches on the bus need a fabric manager whatever the catalog has for the platform. A guest without them that
    has a part of a board needs none, as far as it can see.
    """
    known = platforms(node) or (() if has_part(node, len(node.gpus_on_bus or ())) else _with_this_model(node))
    agreed = set(known[0].services).intersection(*(platform.services for platform in known)) if known else set()
    if nvswitches(node):
        agreed.add("fabric-manager")
    return tuple(name for name in UNITS if name in agreed)


def _sure_to_need(node: NodeFacts, service: str) -> bool:
    """Return True if NVSwitches on the bus, or platforms of which the catalog is sure, need the service."""
    if service == "fabric-manager" and nvswitches(node):
        return True
    return all(platform.sure("services") for platform in platforms(node) or _with_this_model(node))


def _with_this_model(node: NodeFacts) -> tuple[Platform, ...]:
    """Return platforms that have only the model of this node's GPUs, in another number, on the same architecture."""
    ids = gpu_ids(node) or {}
    rows = [row for row in load().platforms.values() if set(row.gpus) == set(ids) and row.virtual == is_guest(node)]
    return tuple(row for row in rows if node.architecture in (None, *row.hosts))


def _unknown_platform(node: NodeFacts) -> CheckResult | None:
    """Return the result if no observation shows that the node needs no service; None if one does.

    GPU models without a fabric need none, and neither do platforms without services in the catalog.
    """
    matches = [model_of(device) for device in node.gpus_on_bus or ()]
    if any(match is None for match in matches):
        return skipped(f"the catalog does not have this GPU ({MODEL} reports it)")
    if platforms(node) or all(match and match.common.get("fabric") == "none" for match in matches):
        return None
    if is_guest(node) and not nvswitches(node):
        return skipped("a virtual machine without NVSwitches: its host may run the fabric manager")
    names = listed(sorted({" or ".join(gpu.name for gpu in match.gpus) for match in matches if match}))
    message = f"no platform in the catalog has {len(matches)} x {names}: whether it needs a fabric manager is unknown"
    return undetermined(message, source=PLATFORMS, remedy=FEWER)


@registry.check(
    "fabric.manager",
    needs=("pci", "units", "architecture", "virtualization"),
    needs_gpu=True,
    means="The services that this platform's GPUs require are active: without the fabric manager, GPUs "
    "behind NVSwitches cannot start CUDA (error 802).",
    remedy="Run systemctl enable --now UNIT; journalctl -u UNIT and /var/log/fabricmanager.log show why it does "
    "not start. Its version must match the driver.",
    state="drain",
    actions=("restart_service:nvidia-fabricmanager.service", "run_role:nvidia_fabric"),
)
def manager(node: NodeFacts) -> Iterator[CheckResult]:
    services = needed_services(node)
    units = {unit.name: unit for unit in node.units or ()}
    if not services:
        yield from _unasked(units, _unknown_platform(node))
    if services and node.systemd is False:
        raise Undetermined(f"{NO_SYSTEMD}: whether {listed(services)} runs is unknown")
    for service in services:
        unit = units.get(UNITS[service])
        by_manager = _started_by_manager(node) if service == "nvlsm" and not installed(unit) else None
        yield by_manager or _service(node, service, unit)


def _unasked(units: dict[str, Unit], unknown: CheckResult | None) -> Iterator[CheckResult]:
    """Yield results for services that nothing in the catalog requires: a running one is reported, a failed one is a
    fault."""
    services = [(service, units[name]) for service, name in UNITS.items() if name in units and installed(units[name])]
    used = [(service, unit) for service, unit in services if unit.active in ("active", "failed")]
    if unknown is None:
        yield skipped(NOT_NEEDED)
    elif not used:
        yield unknown
    for service, unit in used if unknown is not None else ():
        name = UNITS[service].removesuffix(".service")
        bad = f"{name} is {unit.active} ({unit.sub})"
        yield equals(unit.active, "active", f"{name} is active", bad, component=name)


def installed(unit: Unit | None) -> bool:
    """Return True if the unit's file exists."""
    return unit is not None and unit.load != "not-found"


def _started_by_manager(node: NodeFacts) -> CheckResult | None:
    """Return the result for an nvlsm without a unit: NVIDIA's package has none, the fabric manager's unit starts it."""
    if node.packages is None:
        return undetermined("whether nvlsm is installed is unknown", expected="installed", source=PLATFORMS).at("nvlsm")
    package = next((package for package in node.packages if package.name == "nvlsm" and package.installed), None)
    if package is None:
        return None
    message = f"nvlsm {package.version} is installed, nvidia-fabricmanager starts it"
    return passed(message, component="nvlsm", expected="installed", measured="installed", source=PLATFORMS)


def _service(node: NodeFacts, service: str, unit: Unit | None) -> CheckResult:
    name = UNITS[service].removesuffix(".service")
    if unit is None or not installed(unit):
        state, bad = "not installed", f"{name} is not installed"
        if is_guest(node) and not nvswitches(node):
            return skipped(f"{bad}: the host may run it", component=name, expected="active", source=PLATFORMS)
    else:
        state, bad = unit.active, f"{name} is {unit.active} ({unit.sub}){f' since {unit.since}' if unit.since else ''}"
    fault = Status.FAIL if _sure_to_need(node, service) else Status.WARN
    return equals(state, "active", f"{name} is active", bad, fault=fault, component=name, source=PLATFORMS)


@registry.check(
    "fabric.manager-version",
    needs=("pci", "loaded_driver", "nvidia_tool_versions", "architecture", "virtualization"),
    needs_gpu=True,
    means="The fabric manager has exactly the version of the driver in memory: with any other it refuses to run.",
    remedy="Install the fabric manager of the driver's version (nvidia-fabricmanager, before branch 580 "
    "nvidia-fabricmanager-BRANCH) and restart it on an idle node.",
    state="drain",
    actions=("run_role:nvidia_fabric",),
)
def manager_version(node: NodeFacts) -> Iterator[CheckResult]:
    version = (node.nvidia_tool_versions or {}).get("nv-fabricmanager")
    driver = loaded_driver(node).version
    if version is None:
        needed = "fabric-manager" in needed_services(node)
        reason = "no fabric manager is installed"
        unknown = _unknown_platform(node)
        pointer = f" ({MANAGER})" if needed or unknown is not None else ", and this platform needs none"
        raise Skip(f"{reason}{pointer}")
    good, bad = f"fabric manager and driver are {driver}", f"the fabric manager is {version}, the driver {driver}"
    yield faultless(good, {bad: not same_version(version, driver)}, expected=driver, measured=version)


@registry.check(
    "fabric.state",
    needs=("loaded_driver", "smi", "pci", "architecture", "virtualization"),
    needs_gpu=True,
    means="Every GPU of a fabric reports that it joined (Completed, Success) and is healthy, and all are in "
    "the same fabric.",
    remedy="Look at fabric.manager; journalctl -u nvidia-fabricmanager names the GPU or switch that failed. "
    "Restart it on an idle node, then reset the GPUs or reboot.",
    state="drain",
    actions=("restart_service:nvidia-fabricmanager.service", "reset_gpu", "restart_os"),
    scope="gpu",
    architectures=("hopper", "blackwell", "rubin"),
)
def state(node: NodeFacts) -> Iterator[CheckResult]:
    gpus = seen_gpus(node)
    members = [gpu for gpu in gpus if gpu.reported.fabric.state is not None and gpu.lost is None]
    if not members:
        yield _not_reported(node, gpus)
        return
    for gpu in gpus:
        yield of_one_gpu(_state_of, gpu, seen_by_guest=True)
    # A GPU that has not joined has no fabric yet: its ids have no meaning.
    joined = [gpu.reported.fabric for gpu in members if gpu.reported.fabric.state == "Completed"]
    cliques = {(fabric.cluster_uuid, fabric.clique_id) for fabric in joined}
    if len(cliques) > 1:
        yield failed(f"the GPUs of this node are in {len(cliques)} fabrics", expected=1, measured=len(cliques))


def _not_reported(node: NodeFacts, gpus: list[SeenGpu]) -> CheckResult:
    """Return the result if no GPU reports a state of its fabric: older models report none, others should."""
    answering = [gpu for gpu in gpus if gpu.lost is None]
    if not answering:
        return skipped(f"no GPU answers ({ANSWERS})")
    if any(gpu.match is None for gpu in answering):
        return skipped(f"no state of a fabric from a GPU that the catalog does not have ({MODEL} reports it)")
    if {gpu.known.get("fabric") for gpu in answering} == {"none"}:
        return skipped("no fabric: this model has none")
    capability = max(float(gpu.known.get("compute_capability") or 0) for gpu in answering)
    if capability < FABRIC_SINCE:
        return skipped("GPUs before Hopper report no fabric; see nvlink.state for their links")
    if is_guest(node):
        return skipped("a virtual machine, and its GPUs report no fabric; see nvlink.state for their links")
    if not needed_services(node) and _unknown_platform(node) is None:
        return skipped("no fabric: this platform has no NVSwitch; see nvlink.state for the links")
    return undetermined("nvidia-smi does not report the state of the fabric")


def _state_of(gpu: SeenGpu) -> CheckResult:
    fabric = gpu.reported.fabric
    state, status = fabric.state, fabric.status
    health = {name: word for name, word in fabric.health if word}
    odd = [f"{name.replace('_', ' ')} {word}" for name, word in health.items() if word.lower() not in WELL]
    known = any(BAD.search(word) for word in odd)
    fault, measured = Status.FAIL, f"{state}, {status}"
    if state is None:
        message, measured = "reports no fabric, the other GPUs do", "N/A"
    elif state != "Completed":
        message = f"has not joined the fabric: {state}"
    elif status not in (None, "Success"):
        message = f"could not join the fabric: {status}"
    elif odd:
        message, measured = f"the fabric {'is not healthy' if known else 'reports'}: {listed(odd)}", odd[0]
        fault = Status.FAIL if known else Status.WARN
    else:
        message, fault = "joined the fabric", Status.PASS
    return CheckResult(fault, message, expected="Completed, Success", measured=measured)
