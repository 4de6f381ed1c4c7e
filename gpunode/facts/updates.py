"""Automatic upgrades, pending updates, reboots that they require, and changes that could not be reverted."""

import json
import re

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.running import NO_SYSTEMD, read_units
from gpunode.facts.system import read_systemd

_SETTING = re.compile(r"([A-Za-z0-9:_-]{1,200}) \"(.*)\";")
_LINE_LIMIT = 4000
_OFF = frozenset({"0", "no", "false"})
_PENDING = "/var/lib/gpunode/updates/pending.json"
_REVERTS = tuple(f"/run/gpunode/revert-{role}.json" for role in ("accounts", "firewall", "ssh_hardening"))
_DNF_TIMERS = frozenset({"dnf-automatic.timer", "dnf-automatic-install.timer", "dnf5-automatic.timer"})


class Needrestart(Fact):
    """Settings of needrestart, which apt calls after an upgrade."""

    mode: str | None
    """``a``: restarts services by itself; ``i``: asks; ``l``: lists; None: not set."""
    spared: tuple[str, ...]
    """Patterns of services that it never restarts, as its configuration has them."""


class AutomaticUpdates(Fact):
    """Upgrades that the system installs automatically."""

    tool: str
    """``unattended-upgrades`` or ``dnf-automatic``."""
    enabled: bool
    """Switched on: for apt ``APT::Periodic::Unattended-Upgrade`` above 0, for dnf ``apply_updates`` or its timer."""
    origins: tuple[str, ...] = ()
    """Repositories from which packages are upgraded, as configured; empty for dnf, which uses all repositories."""
    kept_back: tuple[str, ...] = ()
    """Patterns of packages that are excluded."""
    reboots: bool = False


class PendingUpdate(Fact):
    """A security update of a package that is excluded from automatic upgrades."""

    package: str
    installed: str
    version: str
    since: str
    """Time at which the node first found the update, with its time zone."""


class FailedRevert(Fact):
    """A change that the node could not revert yet, after no new login had confirmed it."""

    change: str
    """Name of the change: the role that made it."""
    reasons: tuple[str, ...]


def read_automatic_updates(bundle: BundleReader) -> AutomaticUpdates | None:
    """Return the settings of unattended-upgrades (from apt) or of dnf-automatic (from its file and timers)."""
    signs = {path.rpartition("/")[2] for path in bundle.look("signs")}
    if "unattended-upgrade" in signs:
        return parse_apt_config(bundle.output("apt-config"))
    if signs & {"dnf-automatic", "automatic", "dnf5-automatic.timer"}:
        return _dnf(bundle)
    return None


def parse_apt_config(text: str) -> AutomaticUpdates:
    """Parse ``apt-config dump Unattended-Upgrade APT::Periodic``; lists are lines with a name that ends in ``::``."""
    settings: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = _SETTING.fullmatch(line[:_LINE_LIMIT])
        if not match:
            raise ParseError(f"expected NAME \"VALUE\"; from apt-config dump, found '{first_line(line)}'")
        settings.setdefault(match[1].lower().removesuffix("::"), []).append(match[2])

    def last(name: str) -> str:
        return settings.get(name, [""])[-1].lower()

    origins = settings.get("unattended-upgrade::allowed-origins", []) + settings.get(
        "unattended-upgrade::origins-pattern", []
    )
    return AutomaticUpdates(
        tool="unattended-upgrades",
        enabled=last("apt::periodic::unattended-upgrade") not in {"", *_OFF}
        and last("apt::periodic::enable") not in _OFF,
        origins=tuple(value for value in origins if value),
        kept_back=tuple(value for value in settings.get("unattended-upgrade::package-blacklist", []) if value),
        reboots=last("unattended-upgrade::automatic-reboot") in {"true", "1", "yes"},
    )


def _dnf(bundle: BundleReader) -> AutomaticUpdates:
    settings = {}
    for line in (bundle.text("/etc/dnf/automatic.conf") or "").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            settings[name.strip().lower()] = value.strip().lower()
    if not read_systemd(bundle):
        raise UnknownFactError(f"{NO_SYSTEMD}: its timers are unknown")
    active = {unit.name for unit in read_units(bundle) or () if unit.name in _DNF_TIMERS and unit.active == "active"}
    applies = settings.get("apply_updates") in {"yes", "true", "1"} or "dnf-automatic-install.timer" in active
    excluded = [
        word
        for line in (bundle.text("/etc/dnf/dnf.conf") or "").splitlines()
        for word in re.split(r"[\s,]+", line.partition("=")[2].strip())
    ]
    return AutomaticUpdates(
        tool="dnf-automatic",
        enabled=bool(active) and applies,
        kept_back=tuple(word for word in excluded if word),
        reboots=settings.get("reboot", "never") not in {"never", ""},
    )


def read_pending_updates(bundle: BundleReader) -> tuple[PendingUpdate, ...] | None:
    """Return the updates that the role updates has the node record; None if there is no record."""
    text = bundle.text(_PENDING)
    if text is None:
        return None
    try:
        rows = json.loads(text)["pending"]
        return tuple(
            PendingUpdate(**{name: row[name] for name in ("package", "installed", "version", "since")})
            for row in rows[:1000]
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ParseError(f"expected the record of pending updates in {_PENDING}, found '{first_line(text)}'") from None


def read_needrestart(bundle: BundleReader) -> Needrestart | None:
    """Return needrestart's settings; None if it is not installed."""
    if not bundle.ran("needrestart"):
        bundle.require_finished("needrestart")
        if not bundle.ran("own-name"):
            raise bundle.not_collected()
        return None
    rows = bundle.rows("needrestart", 2)
    if any(key not in {"mode", "spared"} for key, _ in rows):
        raise ParseError("expected mode and spared services of needrestart, found another line")
    return Needrestart(
        mode=next((value for key, value in rows if key == "mode"), None),
        spared=tuple(value for key, value in rows if key == "spared"),
    )


def read_failed_reverts(bundle: BundleReader) -> tuple[FailedRevert, ...]:
    """Return the changes of roles that the node could not revert yet, as ``guarded_change`` reports them."""
    reverts = []
    for path in _REVERTS:
        text = bundle.text(path)
        if text is None:
            continue
        try:
            report = json.loads(text)
            reasons = tuple(str(reason)[:_LINE_LIMIT] for reason in report["failed"][:100])
            reverts.append(FailedRevert(change=report["change"], reasons=reasons))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ParseError(f"expected a report of a failed revert in {path}, found '{first_line(text)}'") from None
    return tuple(reverts)


def read_reboot_required(bundle: BundleReader) -> tuple[str, ...]:
    """Return the names in ``/run/reboot-required.pkgs``; ``(unnamed)`` if only the flag file exists."""
    packages = tuple(dict.fromkeys((bundle.text("/run/reboot-required.pkgs") or "").split()))
    if packages:
        return packages
    return ("(unnamed)",) if "/run/reboot-required" in bundle.look("signs") else ()


class UpdatesFacts(FactArea):
    """Updates."""

    automatic_updates: AutomaticUpdates | None = fact(
        read_automatic_updates, none_means="no tool for automatic updates is installed"
    )
    needrestart: Needrestart | None = fact(read_needrestart, none_means="needrestart is not installed")
    pending_updates: tuple[PendingUpdate, ...] | None = fact(
        read_pending_updates, none_means="the role updates is not in use"
    )
    """As the role updates has the node record them."""
    failed_reverts: tuple[FailedRevert, ...] | None = fact(read_failed_reverts)
    """Unconfirmed changes of roles (SSH, accounts, firewall) that the node could not revert yet."""
    reboot_required: tuple[str, ...] | None = fact(read_reboot_required)
    """Packages that require a reboot (Debian, Ubuntu); empty: none, or the distribution does not record them."""
