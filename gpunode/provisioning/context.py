"""Input of a plan in addition to the role's own settings: the run, and the parts of the node's state that it needs.

Not every plan needs all parts of a state: a role declares those that its plan needs (``Role.reads``). Nothing in a
state is older than the state: it is read again after each change, with the parts that the role needs which asks. Parts
that were not read are not filled from an earlier state. Their facts are withheld: a plan that needs one of them raises
NotReadError, and the node is read again with it. A declaration that lacks a part costs time, and no plan stands on a
fact from before a change.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, NamedTuple

from pydantic import PrivateAttr

from gpunode.facts import NodeFacts
from gpunode.onnode import program_text


@dataclass(frozen=True)
class Planned:
    """In check mode: the changes that the previous roles would have made by now."""

    files: Mapping[str, Any] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    purge: tuple[str, ...] = ()
    users: tuple[str, ...] = ()

    def with_files(self, files: Mapping[str, str]) -> "Planned":
        """Return the same with more files."""
        return replace(self, files={**self.files, **files})

    def installed(self, present: Mapping[str, str]) -> dict[str, str]:
        """Return the packages that would be installed, given those that are."""
        gone = set(self.purge) - self.packages.keys()
        return {name: version for name, version in {**present, **self.packages}.items() if name not in gone}


@dataclass(frozen=True)
class Context:
    """The run for which a plan is computed."""

    host: str
    settings_of: Callable[[str], Mapping[str, Any]]
    """Settings of another role, by its name: names without the role's prefix."""
    check: bool = False
    today: date = field(default_factory=date.today)
    lock: Mapping[str, Any] | None = None
    """The stack that ``gpunode plan --write`` locked."""
    answers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Answers to the questions of the same plan, by their names."""
    planned: Planned = field(default_factory=Planned)
    roles: tuple[str, ...] = ()
    """The roles of the play, for which preflight judges the node; empty: those of ``gpunode_roles``."""
    templates: str = ""
    """Folder of the site with templates that replace those of the roles; empty: none."""
    variables: tuple[str, ...] = ()
    """Names of all variables of the host."""
    inventories: tuple[str, ...] = ()
    """Inventory sources, for messages."""
    reboot_reasons: tuple[str, ...] = ()
    """The reasons for a reboot in the plans of this run."""
    reboot_requested: tuple[str, ...] = ()
    """The reasons in ``gpunode_reboot_required``: a reboot in this run satisfies them."""
    boot_before: str = ""
    """Id of the boot in which this run decided to reboot the node; empty: it did not."""
    restarts: Mapping[str, str] = field(default_factory=dict)
    """Units with a restart that the plans of this run deferred, with the reason."""
    drains: bool = False
    """The site has tasks that drain a node: GPUs in use are a reason to wait, not to refuse."""
    image: bool = False
    """The node is the root of an image in a chroot: ``gpunode.provisioning.roles``."""
    local: bool = False
    """Ansible connects to the node without SSH."""
    boot_id: str = ""
    machine_id: str = ""
    """Machine id of the machine that Ansible runs on."""

    @property
    def allow_busy(self) -> bool:
        """Return whether changes are allowed that interrupt processes on the GPUs."""
        return bool(self.settings_of("preflight")["gpunode_allow_busy"])

    def reasons_to_reboot(self, boot_id: str) -> tuple[str, ...]:
        """Return why the node has to be rebooted, each reason once; ``boot_id``: its boot now, empty if unknown."""
        rebooted = self.boot_before and boot_id not in ("", self.boot_before)
        requested = () if rebooted else self.reboot_requested
        return tuple(dict.fromkeys(filter(None, (*self.reboot_reasons, *requested))))

    def with_answers(self, answers: Mapping[str, Mapping[str, Any]]) -> "Context":
        """Return the same context with answers of the node."""
        return replace(self, answers=dict(answers))


class StatePart(NamedTuple):
    """What belongs to a part."""

    sources: tuple[str, ...] = ()
    """Names in the probe's tables of sources."""
    facts: tuple[str, ...] = ()
    """Fields of NodeFacts that depend on one of them."""
    fields: tuple[str, ...] = ()
    """Fields of NodeState."""


PARTS: Mapping[str, StatePart] = {
    "packages": StatePart(facts=("packages",), fields=("apt", "dnf")),
    "engine": StatePart(fields=("engine",)),
    "ssh": StatePart(fields=("ssh",)),
    "builds": StatePart(sources=("dkms",), facts=("dkms",)),
    "gpus": StatePart(
        sources=("nvidia-smi-xml", "device_holders"),
        facts=("smi", "gpu_processes", "gpu_virtualization", "gpu_usage_again", "tool_runs"),
    ),
    "topology": StatePart(sources=("nvidia-smi-topo",), facts=("topology", "tool_runs")),
    "nvidia_tools": StatePart(
        sources=("version-nv-fabricmanager", "version-nv-hostengine", "version-dcgmi"),
        facts=("nvidia_tool_versions", "tool_runs"),
    ),
    "engines": StatePart(
        sources=(
            *(f"version-{name}" for name in ("docker", "containerd", "podman", "runc", "crun", "nvidia-ctk")),
            "docker_daemon",
        ),
        facts=("tool_versions", "docker", "containers"),
    ),
    "clock": StatePart(sources=("timedatectl", "chronyc-tracking"), facts=("time_sync",)),
    "packet_filter": StatePart(sources=("packet_filter",), facts=("packet_filter", "listeners", "addresses")),
    # No plan needs them, only checks.
    "checks": StatePart(
        sources=(
            *("nvidia-smi-p2p", "nvidia-smi-nvlink", "nvidia-smi-nvlink-errors", "dcgmi-versions", "apt-config"),
            *("kernel_log", "earlier_xids", "link_log", "bmc", "nvme_health", "stuck_processes", "ssh_daemon"),
        ),
        facts=(
            *("peer_access", "nvlink", "nvlink_errors", "dcgm_engine", "tool_runs", "automatic_updates", "kernel_log"),
            *("earlier_boots", "link_log", "bmc_access", "bmc_events", "bmc_fans", "bmc_power_supplies", "nvmes"),
            *("stuck_processes", "ssh_daemon", "private_keys", "empty_passwords"),
        ),
    ),
}
FIELDS: Mapping[str, str] = {field: name for name, part in PARTS.items() for field in part.fields}
"""Field of NodeState to its part."""
_OF_FACT = {
    fact: [name for name, part in PARTS.items() if fact in part.facts]
    for fact in {fact for part in PARTS.values() for fact in part.facts}
}
_PARTIAL = """\
probe = {{"__name__": "probe"}}
exec(compile({text!r}, "probe", "exec"), probe)
for table in ("COMMANDS", "FILTERED_COMMANDS", "NVIDIA_TOOLS"):
    probe[table] = tuple(row for row in probe[table] if row[0] not in {skip!r})
probe["PASSIVE"] = tuple(source for source in probe["PASSIVE"] if source.__name__ not in {skip!r})
probe["main"]()
"""


class NotReadError(Exception):
    """A plan needs ``part`` of the state, which was not read."""

    def __init__(self, part: str) -> None:
        super().__init__(f"the part {part} of the state was not read")
        self.part = part


def probe_text(unread: Collection[str]) -> str:
    """Return the source of the probe without what only the parts in ``unread`` need."""
    text = program_text("probe")
    skip = tuple(source for name in sorted(unread) for source in PARTS[name].sources)
    return _PARTIAL.format(text=text, skip=skip) if skip else text


class PartialFacts(NodeFacts):
    """Facts of which some were not read: these raise NotReadError."""

    _unread: frozenset[str] = PrivateAttr(frozenset())

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute; raise NotReadError for a fact that was not read."""
        for part in _OF_FACT.get(name, ()):
            if part in self._unread:
                raise NotReadError(part)
        return super().__getattribute__(name)

    def gap(self, field: str) -> str | None:
        """Return the reason why a field is unknown; raise NotReadError if it was not read."""
        getattr(self, field)
        return super().gap(field)


def partial(facts: NodeFacts, unread: Collection[str]) -> NodeFacts:
    """Return facts without those of the parts in ``unread``."""
    known = PartialFacts.model_construct(facts.model_fields_set, **facts.__dict__)
    known._unread = frozenset(unread)
    return known
