"""The site's policy: ``--policy FILE``, and ``gpunode_policy`` of an inventory."""

import math
from collections.abc import Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from gpunode.catalog import load
from gpunode.checks import registry
from gpunode.checks.thresholds import EVERY, NO_POLICY, Number, Policy, PolicyRule, Threshold
from gpunode.errors import UsageError
from gpunode.text import unknown
from gpunode.yaml_file import kind_of, read_mapping, shown

VARIABLE = "gpunode_policy"
KEYS = ("thresholds", "checks", "own_checks")
RULE_KEYS = ("mode", "reason", "until")
MODES = ("mute", "observe")


def today() -> date:
    """Return the date in UTC."""
    return datetime.now(UTC).date()


def read_policy(path: Path, on: date, option: str = "--policy") -> Policy:
    """Read a policy file with the rules valid on a day, and register the own checks that it names.

    Raises UsageError with one line that names file, key and the expected value.
    """
    content, _ = read_mapping(option, path, ", ".join(KEYS))
    return policy_of(content, f"{option} {path}", f"policy {path.name}", path.parent, on)


def policy_of(content: Mapping[Any, Any], where: str, source: str, folder: Path, on: date) -> Policy:
    """Return the policy of a mapping. ``where`` begins the messages, ``source`` is the name in findings."""
    for key in content:
        if key not in KEYS:
            raise UsageError(f"{where}: {unknown('key', str(key), KEYS)}")
    own_checks = frozenset[str]()
    if files := _list(content.get("own_checks"), f"{where}: own_checks"):
        from gpunode.judging.own_checks import load_files  # noqa: PLC0415 (most policies have none)

        own_checks = load_files(files, folder, where)
    rules, expired = _rules(_mapping(content.get("checks"), f"{where}: checks"), f"{where}: checks", on)
    values = _mapping(content.get("thresholds"), f"{where}: thresholds")
    thresholds = {str(name): _values(str(name), value, f"{where}: thresholds") for name, value in values.items()}
    return Policy(source, thresholds, rules, tuple(expired), own_checks)


def _rules(entries: Mapping[Any, Any], where: str, on: date) -> tuple[dict[str, PolicyRule], list[str]]:
    rules, expired = {}, []
    for name, entry in entries.items():
        if name not in registry:
            raise UsageError(f"{where}: {unknown('check', str(name), [check.id for check in registry])}")
        rule = _rule(_mapping(entry, f"{where}: {name}"), f"{where}: {name}")
        if rule.until < on:
            expired.append(f"{name}: {rule.mode} ended on {rule.until} ({rule.reason}): the check is active again")
        else:
            rules[str(name)] = rule
    return rules, expired


def _rule(entry: Mapping[Any, Any], where: str) -> PolicyRule:
    for key in entry:
        if key not in RULE_KEYS:
            raise UsageError(f"{where}: {unknown('key', str(key), RULE_KEYS)}")
    mode, reason, until = (entry.get(key) for key in RULE_KEYS)
    if mode not in MODES:
        raise UsageError(f"{where}: mode: expected {' or '.join(MODES)}, found {shown(mode)}")
    if not isinstance(reason, str) or not reason.strip():
        raise UsageError(f"{where}: reason: expected a text with the reason, found {shown(reason)}")
    if isinstance(until, str):
        try:
            until = date.fromisoformat(until)
        except ValueError:
            until = None
    if isinstance(until, datetime) or not isinstance(until, date):
        raise UsageError(f"{where}: until: expected the last day as YYYY-MM-DD, found {shown(entry.get('until'))}")
    return PolicyRule(mode, " ".join(reason.split()), until)


def _values(name: str, value: Any, where: str) -> dict[str, Number]:
    known = registry.thresholds
    if name not in known:
        raise UsageError(f"{where}: {unknown('threshold', name, known)} (gpunode checks --thresholds)")
    threshold = known[name]
    values = value if isinstance(value, Mapping) else {EVERY: value}
    if not values:
        raise UsageError(f"{where}: {name}: expected a number, or models with a number each")
    names = (EVERY, *load().architectures, *load().gpus)
    for key in values:
        if key not in names:
            raise UsageError(f"{where}: {name}: {unknown('GPU model or architecture', str(key), names)}")
    return {str(key): _number(threshold, number, f"{where}: {name}: {key}") for key, number in values.items()}


def _number(threshold: Threshold, value: Any, where: str) -> Number:
    least, most = threshold.least, threshold.most
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < least or (most is not None and value > most):
        bounds = f"from {least:g} to {most:g}" if most is not None else f"{least:g} or more"
        raise UsageError(f"{where}: expected a number {bounds} ({threshold.unit}), found {shown(value)}")
    number: Number = value
    return number


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: expected KEY: VALUE lines, found {kind_of(value)}")
    return value


def _list(value: Any, where: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(file, str) for file in value):
        raise UsageError(f"{where}: expected a list of files, found {kind_of(value)}")
    return value


class PolicyReader:
    """Reads the policies of a run: that of the option for all hosts, else those of the inventory."""

    def __init__(self, option: Path | None, on: date) -> None:
        self._on = on
        self._option = option
        self.policy = NO_POLICY if option is None else read_policy(option, on)
        self.by_host: dict[str, Policy] = {}
        """Policies of the inventory."""
        self._read: dict[str, Policy] = {}

    def add(self, host: str, value: Any) -> None:
        """Read a host's ``gpunode_policy``: the path of a file, or the policy itself. Raises UsageError."""
        if value is None or value == "" or self._option is not None:
            return
        key = repr(value)
        if key not in self._read:
            self._read[key] = self._of_inventory(host, value)
        self.by_host[host] = self._read[key]

    def _of_inventory(self, host: str, value: Any) -> Policy:
        where = f"host {host}: {VARIABLE}"
        if isinstance(value, str):
            return read_policy(Path(value), self._on, where)
        if isinstance(value, Mapping):
            return policy_of(value, where, f"policy of the inventory ({VARIABLE})", Path.cwd(), self._on)
        raise UsageError(f"{where}: expected the path of a file or a mapping, found {kind_of(value)}")
