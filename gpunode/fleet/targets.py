"""Targets and their connections: the variables of an Ansible inventory, a name on the command line, this machine."""

import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from gpunode.errors import UsageError
from gpunode.fleet import inventory as inventories_
from gpunode.fleet.inventory import Inventory
from gpunode.fleet.ssh_config import SshSettings, resolve, split_destination
from gpunode.names import expand_all


@dataclass(frozen=True)
class Target:
    """One node to collect from. ``name`` is its name in reports: the inventory's name or the typed one."""

    name: str
    connection: Literal["ssh", "local"]
    ssh: SshSettings | None = None
    become: bool | None = None
    """True: root by sudo unless the login is root. False: as the login user. None: sudo only if a password is given."""
    python: str | None = None
    """Path of the interpreter, None to search for it."""
    password: str | None = field(default=None, repr=False)
    become_password: str | None = field(default=None, repr=False)
    key_passphrase: str | None = field(default=None, repr=False)
    policy: Any = field(default=None, compare=False)
    """The inventory's ``gpunode_policy``, unchanged."""
    rack: str | None = field(default=None, compare=False)
    """The inventory's ``gpunode_rack``."""

    @property
    def address(self) -> str:
        """Return the host name or address to connect to; ``localhost`` for this machine."""
        return self.ssh.hostname if self.ssh else "localhost"

    @property
    def port(self) -> int | None:
        """Return the TCP port, None for this machine."""
        return self.ssh.port if self.ssh else None

    @property
    def user(self) -> str | None:
        """Return the login name, None for this machine."""
        return self.ssh.user if self.ssh else None


def local_target() -> Target:
    """Return this machine, as the user who runs gpunode; sudo is used only if a password for it is given."""
    return Target("localhost", "local")


def targets_from_hosts(names: Sequence[str]) -> list[Target]:
    """Return targets for ``[USER@]HOST[:PORT]``, as ``ssh`` would connect; ``localhost`` is this machine. UsageError if
    invalid.

    ``gpu-[01-16]`` stands for sixteen hosts.
    """
    return _in_parallel(_from_host, expand_all(names))


def targets_from_inventory(
    inventories: Sequence[str], limit: str | None = None, *, vault: Sequence[str] = ()
) -> list[Target]:
    """Return the hosts of Ansible inventories, as Ansible would connect to them, limited to a host pattern.

    Raises UsageError with one line: inventory missing, unreadable or empty, pattern without a match, an option or a
    connection type that gpunode cannot honour (naming host, variable and value; never a secret).
    """
    inventory, config = inventories_.read_with_settings(inventories, limit, SETTINGS, vault)
    return targets(inventory, config)


def targets(inventory: Inventory, config: Mapping[str, Any]) -> list[Target]:
    """Return the targets of an inventory that was read already, with the ``SETTINGS`` of Ansible's configuration."""
    resolved = inventories_.resolve_values(inventory, _KNOWN_VARIABLES)
    reader = _Reader(config)
    return _in_parallel(lambda item: reader.target(*item), list(resolved.hosts.items()))


SETTINGS: dict[str, tuple[str, ...]] = {
    "base": ("DEFAULT_TRANSPORT", "DEFAULT_BECOME_METHOD", "INTERPRETER_PYTHON"),
    "ssh": (
        *("ssh_args", "ssh_common_args", "ssh_extra_args", "host_key_checking", "private_key_file", "remote_user"),
        *("port", "timeout", "pkcs11_provider", "ssh_executable", "private_key", "private_key_passphrase"),
    ),
    "sudo": ("become_exe", "become_flags", "become_pass", "become_user", "sudo_chdir"),
}
"""The relevant settings of Ansible's configuration, for ``inventory.settings``."""

# Variables by meaning; if a host has several of one line, the first is used, as in Ansible.
_VARIABLES: dict[str, tuple[str, ...]] = {
    "connection": ("ansible_connection",),
    "host": ("ansible_host", "ansible_ssh_host"),
    "port": ("ansible_port", "ansible_ssh_port"),
    "user": ("ansible_user", "ansible_ssh_user"),
    "password": ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password"),
    "key_file": ("ansible_private_key_file", "ansible_ssh_private_key_file"),
    "key_passphrase": ("ansible_private_key_passphrase", "ansible_ssh_private_key_passphrase"),
    "host_key_checking": ("ansible_host_key_checking", "ansible_ssh_host_key_checking"),
    "ssh_args": ("ansible_ssh_args",),
    "ssh_common_args": ("ansible_ssh_common_args",),
    "ssh_extra_args": ("ansible_ssh_extra_args",),
    "timeout": ("ansible_ssh_timeout",),
    "become": ("ansible_become",),
    "become_method": ("ansible_become_method",),
    "become_user": ("ansible_become_user", "ansible_sudo_user"),
    "become_password": ("ansible_become_password", "ansible_become_pass", "ansible_sudo_pass"),
    "become_exe": ("ansible_become_exe", "ansible_sudo_exe"),
    "become_flags": ("ansible_become_flags", "ansible_sudo_flags"),
    "python": ("ansible_python_interpreter",),
    "executable": ("ansible_ssh_executable",),
    "inline_key": ("ansible_private_key", "ansible_ssh_private_key"),
    "pkcs11": ("ansible_ssh_pkcs11_provider",),
    "chdir": ("ansible_sudo_chdir",),
}
POLICY = "gpunode_policy"
RACK = "gpunode_rack"
_KNOWN_VARIABLES = (*(name for names in _VARIABLES.values() for name in names), POLICY)
_CONFIGURED = {
    "connection": "base.DEFAULT_TRANSPORT",
    "port": "ssh.port",
    "user": "ssh.remote_user",
    "key_file": "ssh.private_key_file",
    "key_passphrase": "ssh.private_key_passphrase",
    "host_key_checking": "ssh.host_key_checking",
    "ssh_args": "ssh.ssh_args",
    "ssh_common_args": "ssh.ssh_common_args",
    "ssh_extra_args": "ssh.ssh_extra_args",
    "timeout": "ssh.timeout",
    "become_method": "base.DEFAULT_BECOME_METHOD",
    "become_user": "sudo.become_user",
    "become_password": "sudo.become_pass",
    "become_exe": "sudo.become_exe",
    "become_flags": "sudo.become_flags",
    "python": "base.INTERPRETER_PYTHON",
    "executable": "ssh.ssh_executable",
    "inline_key": "ssh.private_key",
    "pkcs11": "ssh.pkcs11_provider",
    "chdir": "sudo.sudo_chdir",
}
_SSH = ("ssh", "smart", "paramiko", "paramiko_ssh", "ansible.builtin.ssh", "ansible.builtin.paramiko_ssh")
_LOCAL = ("local", "ansible.builtin.local")
_ONLY = {
    "become_method": (("sudo", "ansible.builtin.sudo"), "only sudo is supported"),
    "become_user": (("root",), "the probe needs root"),
    "become_exe": (("sudo",), "sudo is run by its name"),
    "become_flags": (("-H -S -n", "-H -S", "-n", "-H", "-S", "-H -n"), "gpunode sets sudo's flags itself"),
    "executable": (("ssh",), "ssh is run by its name"),
    "inline_key": ((), "store the key in a file (ansible_ssh_private_key_file)"),
    "pkcs11": ((), "use ssh-agent"),
    "chdir": ((), "the probe needs no directory"),
}
_SECRET = frozenset({"password", "become_password", "key_passphrase", "inline_key"})


class _Reader:
    """Converter of a host's variables to a Target."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def target(self, host: str, variables: Mapping[str, Any]) -> Target:
        values = _Values(host, variables, self._config)
        values.refuse_others()
        connection = values.text("connection") or "smart"
        if connection in _LOCAL:
            ssh = None
        elif connection in _SSH:
            ssh = self._ssh(values)
        else:
            raise values.refusal("connection", "only ssh and local are supported")
        python = values.text("python")
        return Target(
            name=host,
            connection="local" if ssh is None else "ssh",
            ssh=ssh,
            become=values.flag("become", default=True),
            python=None if python is None or python.startswith("auto") else python,
            password=values.text("password"),
            become_password=values.text("become_password"),
            key_passphrase=values.text("key_passphrase"),
            policy=variables.get(POLICY),
            rack=None if variables.get(RACK) is None else str(variables[RACK])[:100],
        )

    def _ssh(self, values: "_Values") -> SshSettings:
        """Return ssh's settings from the arguments in the order of Ansible's ssh plugin: the first of each option is
        used.
        """
        options: list[tuple[str, list[str]]] = [(values.origin("ssh_args"), values.arguments("ssh_args"))]
        if not values.flag("host_key_checking", default=True):  # the user's own setting of Ansible, never ours
            options.append((values.origin("host_key_checking"), ["-o", "StrictHostKeyChecking=no"]))
        for meaning, option in (("port", "Port"), ("key_file", "IdentityFile"), ("user", "User")):
            value = values.text(meaning)
            if value is not None:
                options.append(
                    (values.origin(meaning), ["-o", f'{option}="{value}"' if option != "Port" else f"Port={value}"])
                )
        timeout = values.text("timeout")
        if timeout is not None:
            options.append((values.origin("timeout"), ["-o", f"ConnectTimeout={timeout}"]))
        options += [(values.origin(name), values.arguments(name)) for name in ("ssh_common_args", "ssh_extra_args")]
        requested = [(origin, arguments) for origin, arguments in options if arguments]
        return resolve(values.text("host") or values.host, requested, values.host)


class _Values:
    """One host's settings by meaning: its variables first, Ansible's configuration second."""

    def __init__(self, host: str, variables: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self.host = host
        self._variables = variables
        self._config = config

    def _find(self, meaning: str) -> tuple[str, Any]:
        for name in _VARIABLES[meaning]:
            if self._variables.get(name) is not None:
                return name, self._variables[name]
        setting = _CONFIGURED.get(meaning, "")
        return f"{setting.partition('.')[2]} of Ansible's configuration", self._config.get(setting)

    def origin(self, meaning: str) -> str:
        """Return the origin of a value, for messages."""
        return self._find(meaning)[0]

    def refusal(self, meaning: str, why: str) -> UsageError:
        """Return the error for a value that cannot be honoured; a secret's value is omitted."""
        origin, value = self._find(meaning)
        shown = "" if meaning in _SECRET else f" = {value!r}"
        return UsageError(f"host {self.host}: gpunode does not support {origin}{shown}: {why}")

    def text(self, meaning: str) -> str | None:
        """Return the value as text; None if it is not set or empty."""
        origin, value = self._find(meaning)
        if value is None or value == "":
            return None
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UsageError(f"host {self.host}: {origin} must be plain text, not {type(value).__name__}")
        text = str(value)
        if "\n" in text and meaning not in _SECRET:
            raise UsageError(f"host {self.host}: {origin} must be one line")
        return text

    def arguments(self, meaning: str) -> list[str]:
        """Return the value split as by a shell."""
        text = self.text(meaning)
        try:
            return shlex.split(text or "")
        except ValueError as err:
            raise UsageError(f"host {self.host}: {self.origin(meaning)} cannot be split into words: {err}") from None

    def flag(self, meaning: str, *, default: bool) -> bool:
        """Return the value as Ansible reads a boolean."""
        origin, value = self._find(meaning)
        if value is None or value == "":
            return default
        if isinstance(value, bool):
            return value
        text = str(value).lower()
        if text in ("yes", "true", "on", "1", "y", "t", "1.0"):
            return True
        if text in ("no", "false", "off", "0", "n", "f", "0.0"):
            return False
        raise UsageError(f"host {self.host}: {origin} must be true or false, not {value!r}")

    def refuse_others(self) -> None:
        """Raise UsageError for the first setting that this program would otherwise have to ignore."""
        becomes = self.flag("become", default=True)
        for meaning, (known, why) in _ONLY.items():
            value = self.text(meaning)
            needless = meaning.startswith("become") and not becomes
            if value is not None and value not in known and not needless:
                raise self.refusal(meaning, why)
        for name in self._variables:
            if name.startswith("ansible_paramiko_"):
                raise UsageError(f"host {self.host}: gpunode does not support {name}: use the ansible_ssh_ variables")


def _from_host(name: str) -> Target:
    if name in ("localhost", "127.0.0.1", "::1"):
        return Target(name, "local")
    user, host, port = split_destination(name)
    arguments = [*(["-l", user] if user else []), *(["-p", str(port)] if port else [])]
    return Target(name, "ssh", ssh=resolve(host, [("the command line", arguments)] if arguments else []), become=True)


def _in_parallel(function: Any, items: Sequence[Any]) -> list[Target]:
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(max_workers=8) as pool:
        return list(pool.map(function, items))
