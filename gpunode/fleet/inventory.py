"""The inventory as Ansible reads it: through ``ansible-inventory`` and ``ansible`` as programs, and its settings.

No code of Ansible is imported here; only the JSON output of programs is used. The inventory and the settings share one
start of Python: see ``ansible_programs``.
"""

import base64
import binascii
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from gpunode.content import ansible_environment, ansible_program
from gpunode.errors import UsageError
from gpunode.fleet import process
from gpunode.text import did_you_mean, listed, nearest
from gpunode.whole import exists
from gpunode.yaml_file import Expanded, load_bounded

TIMEOUT_S = 120.0
"""For one run of an Ansible program: a dynamic inventory may query a slow service."""
MOST_BYTES = 1 << 30
"""Of an inventory with all variables of all hosts, some KiB for each."""


@dataclass(frozen=True)
class Inventory:
    """Hosts that matched, in the order of the inventory, with their variables as merged by Ansible.

    A value may be a template (``{{ … }}``) or a vaulted value (``{"__ansible_vault": …}``): see ``resolve_values``.
    """

    sources: tuple[str, ...]
    hosts: Mapping[str, Mapping[str, Any]]
    groups: tuple[str, ...]
    vault: tuple[str, ...] = ()


def read(sources: Sequence[str], limit: str | None = None, vault: Sequence[str] = ()) -> Inventory:
    """Read inventories (paths, ``host,`` lists, anything that Ansible accepts after ``-i``), limited to a host pattern.

    ``vault`` are arguments such as ``--vault-password-file FILE``. Raises UsageError with one line for a source that
    is missing or cannot be read, an inventory without hosts, and a pattern that matches nothing.
    """
    return _read(_ask(_listing(sources, limit, vault), {}).listing, sources, limit, vault)


def _read(done: process.Completed, sources: Sequence[str], limit: str | None, vault: Sequence[str]) -> Inventory:
    if done.rc != 0:
        _explain(done.stderr, sources, limit, vault)
    try:
        listing: dict[str, Any] = json.loads(done.stdout, object_hook=_without_tag)
    except ValueError:
        raise UsageError(
            f"ansible-inventory printed no valid JSON for {_named(sources)}: {_error(done.stderr)}"
        ) from None
    groups = tuple(name for name in listing if name != "_meta")
    hosts = _hosts(listing)
    if not hosts:
        if limit is not None:
            known = read(sources, None, vault)
            raise UsageError(f"--limit {limit}: no host of {_named(sources)} is left; it has {listed(known.hosts, 5)}")
        raise UsageError(f"{_named(sources)} has no hosts: add them below all: hosts: (YAML) or one per line (INI)")
    return Inventory(tuple(sources), hosts, groups, tuple(vault))


def resolve_values(inventory: Inventory, requested: Iterable[str]) -> Inventory:
    """Return the same inventory with the variables in ``requested`` templated and decrypted, if any of them needs it.

    Ansible itself does it, in one local task for all hosts. Raises UsageError for a template that fails and for a
    vaulted value without its password; no value is ever part of the message.
    """
    names = sorted(set(requested))
    if not any(_is_raw(variables.get(name)) for variables in inventory.hosts.values() for name in names):
        return inventory
    raw = {
        host: [name for name in names if _is_raw(variables.get(name))]
        for host, variables in inventory.hosts.items()
        if any(_is_raw(variables.get(name)) for name in names)
    }
    values = _ask_ansible(inventory, raw)
    hosts = {host: {**variables, **values.get(host, {})} for host, variables in inventory.hosts.items()}
    return Inventory(inventory.sources, hosts, inventory.groups, inventory.vault)


_KINDS: Mapping[str, tuple[str | None, str | None]] = {
    "base": (None, None),
    "ssh": ("connection", "ssh"),
    "sudo": ("become", "sudo"),
}
"""The sections of ``settings``, with the kind and the name of a plugin."""


def settings(names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return settings of Ansible that the user changed (ansible.cfg, environment), by Ansible's own names.

    ``names`` maps a section, ``"base"``, ``"ssh"`` or ``"sudo"``, to the requested settings. The answer's keys are
    ``section.name``; settings at their default are missing.
    """
    return _changed(_ask([], names))


def read_with_settings(
    sources: Sequence[str], limit: str | None, names: Mapping[str, tuple[str, ...]], vault: Sequence[str] = ()
) -> tuple[Inventory, dict[str, Any]]:
    """Return the results of ``read`` and ``settings``, in one start of Ansible."""
    answer = _ask(_listing(sources, limit, vault), names)
    return _read(answer.listing, sources, limit, vault), _changed(answer)


def _listing(sources: Sequence[str], limit: str | None, vault: Sequence[str]) -> list[str]:
    limited = ["--limit", limit] if limit is not None else []
    return ["ansible-inventory", "--list", *_source_words(sources), *vault, *limited]


@dataclass(frozen=True)
class _Answer:
    listing: process.Completed
    settings: Mapping[str, Any]
    error: str | None
    """Why the settings cannot be read."""


def _changed(answer: _Answer) -> dict[str, Any]:
    if answer.error is not None:
        raise UsageError(f"ansible-config cannot read Ansible's configuration: {answer.error}")
    return dict(answer.settings)


def _ask(listing: Sequence[str], names: Mapping[str, tuple[str, ...]]) -> _Answer:
    """Run ``ansible-inventory`` with the arguments of ``listing``, if any, and look settings up."""
    ansible_program("ansible-inventory")  # raises UsageError with what is missing
    env = ansible_environment()
    # Ansible only warns of all three and continues with fewer hosts than intended.
    env["ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED"] = "True"
    env["ANSIBLE_HOST_PATTERN_MISMATCH"] = "error"
    # Further output would be mixed with the answer.
    env |= {"ANSIBLE_DEBUG": "False", "ANSIBLE_VERBOSITY": "0"}
    # In isolated mode Python does not search a user's own packages, which may include Ansible.
    argv = [sys.executable, "-I", str(Path(__file__).with_name("ansible_programs.py")), *_folder_of("ansible")]
    request = {
        "listing": listing,
        "settings": [[section, *_KINDS[section], requested] for section, requested in names.items()],
    }
    done = process.run(argv, timeout_s=TIMEOUT_S, env=env, stdin=json.dumps(request), most_bytes=MOST_BYTES)
    try:
        answer = json.loads(done.stdout)
        listed = process.Completed(*answer["listing"]) if answer["listing"] else done
        return _Answer(listed, answer["settings"], answer["error"] and _error(answer["error"]))
    except (ValueError, TypeError, KeyError):
        # A configuration that cannot be read ends the program before it begins.
        return _Answer(process.Completed(done.rc or 1, "", done.stderr), {}, _error(done.stderr))


def _folder_of(package: str) -> list[str]:
    spec = find_spec(package)
    return [str(Path(spec.origin).parents[1])] if spec is not None and spec.origin else []


def _without_tag(value: dict[str, Any]) -> Any:
    """Return text that its file marks ``!unsafe``, as text."""
    return value["__ansible_unsafe"] if value.keys() == {"__ansible_unsafe"} else value


def _explain(stderr: str, sources: Sequence[str], limit: str | None, vault: Sequence[str]) -> None:
    """Raise UsageError with the relevant line of ansible-inventory's output."""
    unmatched = re.search(r"Could not match supplied host pattern, ignoring: (\S+)", stderr)
    if unmatched and limit is not None:
        known = read(sources, None, vault)
        names = [*known.hosts, *known.groups]
        hint = did_you_mean(nearest(unmatched[1], names, most=3, likeness=0.4)) or f"it has {listed(known.hosts, 5)}"
        raise UsageError(f"--limit {limit}: {_named(sources)} has no host or group {unmatched[1]}; {hint}")
    if "no vault secrets" in stderr or "Decryption failed" in stderr:
        raise UsageError(
            f"{_named(sources)} has vaulted files and no password decrypts them: use --vault-password-file FILE, "
            f"or set vault_password_file in ansible.cfg"
        )
    failed = re.search(r"Completely failed to parse inventory source (.+)", stderr)
    if failed is None:
        raise UsageError(f"{_named(sources)} cannot be read: {_error(stderr)}")
    source = failed[1].strip()
    raise UsageError(f"inventory {source}: {_fault(Path(source)) or _why(stderr)}")


def _fault(path: Path) -> str | None:
    """Return the error in an inventory file; None for a program, and if no error is found."""
    if not (exists(path) and path.is_file()) or os.access(path, os.X_OK):
        return None
    try:
        content = load_bounded(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8 text"
    except Expanded as err:
        return str(err)
    except (OSError, RecursionError, ValueError, yaml.YAMLError):
        return None  # Ansible reports invalid YAML
    if isinstance(content, list):
        return "expected groups with their hosts (all: hosts: ...), found a list"
    return None


def _why(stderr: str) -> str:
    reasons = re.findall(r"Failed to parse inventory with '(\w+)' plugin: (.+)", stderr)
    match = re.search(r"^Origin: (\S+)", stderr, re.MULTILINE)
    if not reasons:
        return "no such file, or not a valid inventory"
    texts = dict(reasons)
    # The script and ini plugins try YAML files too; their message is used only if no other plugin has one.
    plugin = next((name for name in ("yaml", "toml", "constructed") if name in texts), reasons[-1][0])
    return f"{texts[plugin].strip().removeprefix('Failed to parse inventory: ')}" + (f" ({match[1]})" if match else "")


def _error(stderr: str) -> str:
    """Return the first line of an error of an Ansible program."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("[ERROR]", "ERROR!"))]
    line = (errors or lines or ["no reason reported"])[0]
    return re.sub(r"^(\[ERROR\]:|ERROR!)\s*", "", line)


def _hosts(listing: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return hosts in the order of the groups; only those that have variables are in ``_meta``.

    Ansible adds ``ansible_local`` to every host where facts are not injected: an answer of the node, no variable.
    """
    variables = listing.get("_meta", {}).get("hostvars", {})
    variables = {host: {k: v for k, v in values.items() if k != "ansible_local"} for host, values in variables.items()}
    names = dict.fromkeys(name for group, body in listing.items() if group != "_meta" for name in body.get("hosts", ()))
    return {name: variables.get(name, {}) for name in (*names, *(set(variables) - set(names)))}


def _is_raw(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "__ansible_vault" in value
    return isinstance(value, str) and ("{{" in value or "{%" in value)


def _ask_ansible(inventory: Inventory, raw: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    env = ansible_environment()
    # The answer contains passwords: it goes only through the pipe.
    env.update(
        ANSIBLE_LOG_PATH="/dev/null",
        ANSIBLE_STDOUT_CALLBACK="ansible.builtin.minimal",
        ANSIBLE_CALLBACK_RESULT_FORMAT="json",
        ANSIBLE_LOAD_CALLBACK_PLUGINS="False",
        ANSIBLE_NOCOLOR="1",
        ANSIBLE_NO_LOG="False",
    )

    def pair(host: str, names: Sequence[str]) -> str:
        quoted = json.dumps(host)
        return f"{quoted}:{{{','.join(f'{json.dumps(name)}:hostvars[{quoted}].{name}' for name in names)}}}"

    pairs = ",".join(pair(host, names) for host, names in raw.items())
    argv = [
        ansible_program("ansible"),
        *_source_words(inventory.sources),
        *inventory.vault,
        *("localhost", "-c", "local", "-m", "ansible.builtin.debug"),
        *("-a", json.dumps({"msg": f"{{{{ {{{pairs}}} | to_json | b64encode }}}}"})),
    ]
    done = process.run(argv, timeout_s=TIMEOUT_S, env=env)
    answer = re.search(r'"msg": "([A-Za-z0-9+/=]+)"', done.stdout)
    if done.rc != 0 or answer is None:
        variables = ", ".join(sorted({name for names in raw.values() for name in names}))
        if "vault" in (done.stdout + done.stderr).lower():
            raise UsageError(
                f"{_named(inventory.sources)}: {variables} is vaulted and no password decrypts it: use "
                "--vault-password-file FILE, or set vault_password_file in ansible.cfg"
            )
        reason = re.search(r"'[\w.]+' is undefined", done.stdout + done.stderr)
        raise UsageError(
            f"{_named(inventory.sources)}: a template in {variables} (host {listed(raw, 5)}) needs facts of a "
            f"play{f': {reason[0]}' if reason else ''}; set a plain value"
        )
    try:
        values: dict[str, dict[str, Any]] = json.loads(base64.b64decode(answer[1]))
    except (ValueError, binascii.Error):
        raise UsageError(
            f"{_named(inventory.sources)}: Ansible returned no readable values of {', '.join(raw)}"
        ) from None
    return values


def _source_words(sources: Sequence[str]) -> list[str]:
    return [word for source in sources for word in ("-i", source)]


def _named(sources: Sequence[str]) -> str:
    return f"inventory {', '.join(sources)}" if sources else "the inventory of Ansible's configuration"
