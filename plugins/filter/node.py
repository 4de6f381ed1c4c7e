"""The Ansible face of the probe, the facts and the checks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from gpunode.catalog import load
    from gpunode.catalog.origins import publisher
    from gpunode.checks import Expectation, judge, registry
    from gpunode.checks.words import listed
    from gpunode.errors import GpunodeError
    from gpunode.facts import NodeFacts, facts_from_bundle
    from gpunode.isolation import Exceeded, Workers
    from gpunode.printable import printable
    from gpunode.probe import Bundle, script_text
    from gpunode.variables import plain
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None

MANAGERS = ("apt", "dnf")
ARCHITECTURES = ("x86_64", "aarch64")
# Facts without which nothing can be said of the node.
NEEDED = ("os", "architecture", "kernels", "pci", "modules", "packages", "disk_free_mib", "gpu_processes")


def _need_gpunode() -> None:
    if MISSING is not None:
        raise AnsibleFilterError(
            f"the Python package gpunode is needed beside Ansible on the controller ({MISSING}): "
            "install it into the environment that ansible-playbook runs from, with pip install gpunode"
        )


def _node(facts: Mapping[str, Any]) -> NodeFacts:
    _need_gpunode()
    try:
        return NodeFacts.model_validate(plain(facts))
    except ValueError as err:
        raise AnsibleFilterError(f"not a NodeFacts document: {err}") from None


def probe_script(interpreter: str) -> dict[str, Any]:
    """Arguments for ``ansible.builtin.command`` that run the probe under ``interpreter``: ``argv`` and ``stdin``."""
    _need_gpunode()
    return {"argv": [str(interpreter), "-I", "-"], "stdin": script_text()}


def node_facts(output: str, host: str = "the node") -> dict[str, Any]:
    """What the probe printed, as a NodeFacts document. Raises AnsibleFilterError where it is no bundle."""
    _need_gpunode()
    # Ansible waits for the slowest node of a task, and sets no limit of its own to a filter.
    try:
        with Workers(_facts, most=1) as apart:
            facts: dict[str, Any] = json.loads(apart(str(output), f"the probe's answer from {host}"))
    except GpunodeError as err:
        raise AnsibleFilterError(str(err)) from None
    except Exceeded as err:
        raise AnsibleFilterError(f"the probe's answer from {host}: {err}") from None
    return facts


def _facts(text: str, where: str) -> bytes:
    return facts_from_bundle(Bundle.from_json(text, where)).model_dump_json().encode()


def with_publishers(facts: Mapping[str, Any], apt: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a NodeFacts document whose packages name their publisher by apt's lists.

    ``apt`` is what ``apt_state.py`` printed. A package that no known repository lists, or repositories of two
    publishers, stays as it is: name, version and maintainer then decide.
    """
    node, lists = _node(facts), plain((apt or {}).get("publishers") or {})
    packages = []
    for package in node.packages or ():
        named = {publisher(str(release), str(label)) for release, label in lists.get(package.name, ())} - {None}
        packages.append(package.model_copy(update={"published": named.pop()}) if len(named) == 1 else package)
    known = node.packages is not None
    return (node.model_copy(update={"packages": tuple(packages)}) if known else node).model_dump(mode="json")


def findings(
    facts: Mapping[str, Any], checks: Iterable[str] | None = None, expect: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Findings of a NodeFacts document, of the named checks alone where some are named.

    Raises AnsibleFilterError for a check that does not exist and for a document that is none.
    """
    _need_gpunode()
    wanted = None if checks is None else [str(check) for check in checks]
    unknown = [check for check in wanted or () if check not in registry]
    if unknown:
        raise AnsibleFilterError(f"no such check: {', '.join(unknown)}")
    try:
        expectation = Expectation.model_validate(plain(expect or {}))
    except ValueError as err:
        raise AnsibleFilterError(f"not an expectation: {err}") from None
    return [finding.model_dump(mode="json") for finding in judge(_node(facts), expectation, only=wanted)]


def finding_line(finding: Mapping[str, Any]) -> str:
    """One finding as one line: status, check, component, message, and the next step where there is one."""
    component = "" if finding["component"] == "node" else f" {finding['component']}"
    remedy = f" Next: {finding['remedy']}" if finding["remedy"] else ""
    return printable(f"{finding['status']} {finding['check']}{component}: {finding['message']}.{remedy}")


def preflight_problems(
    facts: Mapping[str, Any], apt: Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> list[str]:
    """Why the node must not be provisioned as it is, one line each: its name, the reason, what to do.

    ``facts`` is a NodeFacts document, ``apt`` what ``apt_state.py`` or ``dnf_state.py`` printed. ``settings``:
    ``min_free_mib`` by mount point; ``allow_secure_boot``, ``allow_busy``; ``removing`` where the driver goes away;
    ``settled`` where none of its packages would change; ``switch`` where what stands in the way may go;
    ``precompiled`` where the distribution signs the modules;
    ``mok_hash`` where a password for enrolling a key was given.
    """
    node = _node(facts)
    switches = ("allow_busy", "allow_secure_boot", "removing", "settled", "switch", "precompiled", "mok_hash")
    loose = [name for name in switches if not isinstance(settings[name], bool)]
    if loose:
        raise AnsibleFilterError(f"{', '.join(loose)} must be true or false, not text: use | bool")
    lines = [*_unseen(node), *_unsupported(node), *_package_manager(apt or {})]
    if not settings["switch"] and not settings["removing"]:
        lines += [*_mixed_origins(node), *_left_by_others(apt or {})]
    if not settings["settled"] and not settings["allow_busy"]:
        lines += _busy(node)
    if not settings["removing"]:
        lines += [*_other_line(node), *_too_full(node, settings["min_free_mib"])]
        if not settings["precompiled"]:
            lines += _no_headers(node, apt or {})
            if not settings["allow_secure_boot"]:
                lines += _secure_boot(node, apt or {}, settings["mok_hash"])
    return list(map(printable, lines))


def preflight_notes(facts: Mapping[str, Any], stack: Mapping[str, Any]) -> list[str]:
    """What is worth knowing of a node that is not refused, one line each."""
    node = _node(facts)
    lines = [str(warning["text"]) for warning in stack["warnings"]]
    reason = node.gap("secure_boot")
    if reason is not None and stack["module"]["build"] == "dkms":
        lines.append(
            f"secure boot could not be seen ({reason}): where it is on, a module built by DKMS loads only after its "
            "key was enrolled"
        )
    return list(map(printable, lines))


def _unseen(node: NodeFacts) -> Iterator[str]:
    for field in NEEDED:
        reason = node.gap(field)
        if reason is not None:
            yield f"unseen: {field} could not be seen: {reason}"


def _unsupported(node: NodeFacts) -> Iterator[str]:
    """The roles install through apt or dnf; what the catalog knows of other systems is for plan alone."""
    if node.os is not None:
        row = load().os_of(node.os.id, node.os.version_id)
        name = node.os.pretty_name or f"{node.os.id} {node.os.version_id}"
        known = ", ".join(one.name for one in load().systems.values() if one.supported and one.manager in MANAGERS)
        if row is not None and row.supported and row.manager not in MANAGERS:
            yield f"unsupported: {name}: the roles install through apt and dnf alone, not {row.manager}: for {known}"
        elif row is None or not row.supported:
            yield f"unsupported: {name} is not supported; supported are {known}"
    if node.architecture is not None and node.architecture not in ARCHITECTURES:
        yield (
            f"unsupported: architecture {node.architecture} is not supported; "
            f"supported are {' and '.join(ARCHITECTURES)}"
        )


def _package_manager(apt: Mapping[str, Any]) -> Iterator[str]:
    if apt.get("lock_holder"):
        yield f"package-lock: {apt['lock_holder']} still holds the package lock: let it end, then run this again"
    # What dpkg left half-done of the driver itself, the role nvidia_driver finishes.
    unfinished = [name for name in apt.get("unfinished", ()) if not re.search(r"nvidia|libcuda|cuda-drivers", name)]
    if unfinished:
        yield (f"half-configured: dpkg has not finished {', '.join(sorted(unfinished))}: run dpkg --configure -a")


def _left_by_others(apt: Mapping[str, Any]) -> Iterator[str]:
    """What other installers left, and the switch takes away."""
    if apt.get("runfile"):
        yield (
            "runfile: a driver from NVIDIA's .run installer is there: take it away with /usr/bin/nvidia-uninstall, or "
            "set nvidia_driver_switch: true to have it replaced"
        )
    if "nvidia-docker2" in apt.get("installed", ()):
        yield (
            "nvidia-docker2: nvidia-docker2 is installed, which the container toolkit superseded: set "
            "nvidia_driver_switch: true to have it replaced, or take it away (apt-get remove nvidia-docker2)"
        )


def _mixed_origins(node: NodeFacts) -> Iterator[str]:
    for finding in judge(node, Expectation(), only=["driver.origin"]):
        if finding.status == "fail":
            yield (
                f"mixed-sources: the driver's packages are mixed: {finding.message}: name the one that is to be with "
                "nvidia_driver_source, and set nvidia_driver_switch: true to have the others replaced"
            )


def _other_line(node: NodeFacts) -> Iterator[str]:
    """Debian's lines for old GPUs stand beside the current one, which does not know those GPUs any more."""
    found = [
        package.name
        for package in node.packages or ()
        if package.installed and re.match(r"nvidia-graphics-drivers-(tesla|legacy)", package.source)
    ]
    if found:
        yield (
            f"other-line: a driver of another line is installed ({', '.join(sorted(found)[:5])}): it is left as it is; "
            "to have the current one instead, purge it first"
        )


def _busy(node: NodeFacts) -> Iterator[str]:
    users = [process.title for process in node.gpu_processes or () if process.computes]
    if users:
        yield f"busy: GPUs are in use by {listed(users, 5)}: end them, or set gpunode_allow_busy: true"


def _too_full(node: NodeFacts, wanted: Mapping[str, Any]) -> Iterator[str]:
    for mount, free in (node.disk_free_mib or {}).items():
        if free < int(wanted.get(mount, 0)):
            yield f"disk-full: {mount} has {free} MiB free, {wanted[mount]} MiB are needed (preflight_min_free_mib)"


def _secure_boot(node: NodeFacts, apt: Mapping[str, Any], mok_hash: bool) -> Iterator[str]:
    key = apt.get("key") or {}
    if node.secure_boot and not key.get("enrolled") and not key.get("waits") and not mok_hash:
        row = load().os_of(node.os.id, node.os.version_id) if node.os is not None else None
        ways = (
            "have a person enrol it (mokutil --import)"
            if row is not None and row.manager == "dnf"
            else "give nvidia_driver_mok_hash (mokutil --generate-hash) to have it staged for a person at the console, "
            "take modules that Ubuntu signs (nvidia_driver_source: ubuntu)"
        )
        yield (
            f"secure-boot: secure boot is on and the key of modules built by DKMS is not known to be enrolled: {ways}, "
            "or set preflight_allow_secure_boot: true"
        )


def _no_headers(node: NodeFacts, apt: Mapping[str, Any]) -> Iterator[str]:
    """For the running and the newest kernel. Before the first ``apt-get update`` nobody knows which there are."""
    for kernel in node.kernels or ():
        wanted = f"linux-headers-{kernel.release}"
        matters = kernel.package and (kernel.running or kernel.newest) and not kernel.headers
        if matters and apt.get("lists") and wanted not in apt["headers"]:
            yield f"no-headers: {wanted} is in no apt source of the node: run apt-get update, or take a current kernel"


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {
            "probe_script": probe_script,
            "node_facts": node_facts,
            "with_publishers": with_publishers,
            "findings": findings,
            "finding_line": finding_line,
            "preflight_problems": preflight_problems,
            "preflight_notes": preflight_notes,
        }
