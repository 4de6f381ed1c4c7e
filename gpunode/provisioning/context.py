"""Input of a plan in addition to state and the role's own settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any


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
    """The node is the root of an image in a chroot: ``gpunode.provisioning.image``."""
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
