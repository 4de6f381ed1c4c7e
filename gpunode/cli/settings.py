"""Values of options from gpunode.toml, the environment and Ansible's configuration, and where each came from.

Order: command line, GPUNODE_VERB_OPTION, GPUNODE_OPTION, the site's file, the user's file, Ansible's inventory,
default.
"""

import configparser
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gpunode.cli.verbs import command_of
from gpunode.errors import UsageError
from gpunode.text import printable, suggestion
from gpunode.whole import exists, trusted_users

FILES = frozenset({"FILE", "DIR", "INVENTORY", "KIND=FILE", "KEY=VALUE|@FILE"})
"""Metavars of options with a file."""
NAME = "gpunode.toml"
PROJECT = "pyproject.toml"
SHARED = ("inventory", "limit", "parallel", "timeout", "expect", "policy", "quiet", "no-color")
"""Options that a file may set for all verbs that have them."""
WITHOUT_INVENTORY = frozenset({"init", "config", "explain"})
"""Verbs that act on the inventory of their own command line alone."""
NOT_SET = frozenset({"help", "version"})
META, QUIET_KEY = "gpunode.settings", "gpunode.quiet"
"""Keys of what a context keeps: the settings, and whether it has -q."""
MOST_BYTES = 1 << 20

Table = Mapping[str, Any]
Values = dict[str, Any]


@dataclass(frozen=True)
class SettingsFile:
    """A file with settings."""

    path: Path
    table: Table


@dataclass
class OptionSettings:
    """What the files set, the site's first, and the origin of each value that a verb got."""

    files: Sequence[SettingsFile] = ()
    origins: dict[str, str] = field(default_factory=dict)
    """By the name of a parameter."""

    def apply(self, parent: click.Context, name: str, command: click.Command) -> None:
        """Give a verb and its subcommands their variables of the environment and the values of the files."""
        known = {name: command}
        parent.default_map = {name: self._values(command, (name,))}
        parent.meta[META] = self
        for file in self.files:
            _refuse_unknown(file, known)

    def _values(self, command: click.Command, path: tuple[str, ...]) -> Values:
        values: Values = {}
        for option, param in options_of(command):
            if option == "inventory" and path[0] in WITHOUT_INVENTORY:
                continue
            param.envvar = variables(path, option)
            value, origin = self._value(path, option, param)
            if origin is not None:
                values[param.name or ""] = value
                self.origins[".".join((*path, option))] = origin
        if isinstance(command, click.Group):
            for name, each in command.commands.items():
                values[name] = self._values(each, (*path, name))
        return values

    def _value(self, path: tuple[str, ...], option: str, param: click.Option) -> tuple[Any, str | None]:
        for file in self.files:
            table: Any = file.table
            for name in path:
                table = table.get(name) if isinstance(table, Mapping) else None
            for where, key in ((table, ".".join((*path, option))), (file.table if option in SHARED else None, option)):
                if isinstance(where, Mapping) and option in where:
                    return _checked(where[option], param, file.path, key), str(file.path)
        if option == "inventory" and (inventory := _inventory_of_ansible()):
            return inventory
        return None, None


def options_of(command: click.Command) -> Iterator[tuple[str, click.Option]]:
    """Yield the options of a command by their names without dashes."""
    for param in command.params:
        name = next((text[2:] for text in param.opts if text.startswith("--")), "")
        if isinstance(param, click.Option) and name and name not in NOT_SET and not param.hidden:
            yield name, param


def variables(path: Sequence[str], option: str) -> list[str]:
    """Return the variables of the environment of an option, the verb's own first."""
    variable = "_".join(["gpunode", *path, option]).replace("-", "_").upper()
    return [variable, *([f"GPUNODE_{option.replace('-', '_').upper()}"] if option in SHARED else [])]


def origin_of(context: click.Context, param: click.Parameter) -> str | None:
    """Return where the value of an option came from, if it is neither the command line nor the default."""
    source = context.get_parameter_source(param.name or "")
    if source is ParameterSource.ENVIRONMENT:
        names = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
        return next((name for name in names if os.environ.get(name)), None)
    settings = context.meta.get(META)
    if source is ParameterSource.DEFAULT_MAP and isinstance(settings, OptionSettings):
        path = context.command_path.split()[1:]
        option = next((text[2:] for text in param.opts if text.startswith("--")), "")
        return settings.origins.get(".".join((*path, option)))
    return None


class NodesOption(click.Option):
    """An option that selects nodes: a configured value gives way to other nodes of the command line."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        value, source = super().consume_value(ctx, opts)
        if source is not ParameterSource.COMMANDLINE and any(_is_set(opts.get(name)) for name in OTHER_NODES):
            return (() if self.multiple else None), ParameterSource.DEFAULT
        return value, source


OTHER_NODES = (
    *("hosts", "bundles", "replay", "gpus", "platform", "system", "diff", "on_node", "print_probe", "listing"),
    *("run", "resume", "records", "dumps"),
)
"""Parameters that name nodes themselves, or that need none."""


def _is_set(value: Any) -> bool:
    return len(value) > 0 if isinstance(value, list | tuple) else isinstance(value, str) or value is True


def name_inventory(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Print a configured inventory and its origin: what a verb acts on must be visible."""
    origin = origin_of(ctx, param)
    if value and origin is not None and not ctx.resilient_parsing and not ctx.meta.get(QUIET_KEY):
        click.echo(printable(f"gpunode: -i {' '.join(value)} ({origin})"), err=True)
    return value


def read_settings(words: Sequence[str]) -> OptionSettings:
    """Return the settings for a command line: of the site, then of the user. Raises UsageError."""
    files = [file for file in (_site_file(words), _user_file()) if file is not None]
    return OptionSettings(files)


def configured_format(words: Sequence[str]) -> str:
    """Return the only ``format`` that the environment or a file sets for the verb of a command line; empty: none.

    Raise nothing: this is for a command line that was refused.
    """
    paths = [tuple(words[:length]) for length in (2, 1) if len(words) >= length]

    def configured(option: str) -> Any:
        names = [name for path in paths for name in variables(path, option)]
        values = [os.environ[name] for name in names if name in os.environ]
        for table in [] if values else [file.table for file in read_settings(words).files]:
            for path in paths:
                setting: Any = table
                for name in (*path, option):
                    setting = setting.get(name) if isinstance(setting, Mapping) else None
                values += [] if setting is None else [setting]
        return next((value[0] if isinstance(value, list) and len(value) == 1 else value for value in values), None)

    try:
        value = configured("format") if configured("output") in (None, "-") else None
    except UsageError:
        return ""
    return value if isinstance(value, str) else ""


def _site_file(words: Sequence[str]) -> SettingsFile | None:
    """Return the file beside the inventory or in the folder above it, else the one of the current folder or above."""
    folders = list(_folders_of_inventory(words))
    if not folders:
        cwd = _here()
        folders = [cwd, *cwd.parents]
    home = _home()
    for folder in folders:
        if (file := _read(folder / NAME)) or (file := _read(folder / PROJECT)):
            return file
        if (folder / ".git").exists() or folder == home:
            return None
    return None


def _folders_of_inventory(words: Sequence[str]) -> Iterator[Path]:
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, mark, value = word.partition("=")
        text = following if word in ("-i", "--inventory") else value if mark and name == "--inventory" else ""
        if text and exists(Path(text)):
            path = Path(text).absolute()
            folder = path if path.is_dir() else path.parent
            yield from (folder, folder.parent)
            return


def _user_file() -> SettingsFile | None:
    base, home = os.environ.get("XDG_CONFIG_HOME"), _home()
    folder = Path(base) if base else home and home / ".config"
    return None if folder is None else _read(folder / "gpunode" / NAME)


def _here() -> Path:
    """Return the current directory. Raises UsageError if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current directory does not exist any more: change to another one") from None


def _home() -> Path | None:
    """Return the user's home; None for a user without one, as in some containers."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def _expanded(text: str, origin: str | Path) -> Path:
    """Return a path without ~ and ~USER. Raises UsageError."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{origin}: {text}: no home directory of this user is known") from None


def _read(path: Path) -> SettingsFile | None:
    """Return a file's settings; None if there are none, and for a file that another user could have written. Raises
    UsageError if it cannot be read.
    """
    try:
        inode = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(inode.st_mode):
        return None
    try:
        with path.open("rb") as stream:
            text = stream.read(MOST_BYTES).decode()
        if path.name == PROJECT and "tool.gpunode" not in text:
            return None
        table = tomllib.loads(text)
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, RecursionError) as err:
        if path.name == PROJECT:
            return None
        raise UsageError(f"{path}: not valid TOML: {err}") from None
    if path.name == PROJECT:
        table = table.get("tool", {}).get("gpunode", {})
    return SettingsFile(path, table) if table and _is_ours(path, inode) else None


def _is_ours(path: Path, inode: os.stat_result) -> bool:
    trusted = trusted_users() or {0, os.geteuid()}
    for each, name in ((inode, path), (path.parent.stat(), path.parent)):
        if each.st_uid not in trusted or each.st_mode & 0o002:
            click.echo(printable(f"gpunode: {path} is not read: another user may write {name}"), err=True)
            return False
    return True


def _refuse_unknown(file: SettingsFile, known: Mapping[str, click.Command]) -> None:
    """Raise UsageError for a name in a file that is not a verb, a shared option, or an option of the running verb."""
    from gpunode.cli.verbs import VERBS  # noqa: PLC0415 (root loads this module first)

    for key, value in file.table.items():
        if isinstance(value, Mapping):
            if key not in VERBS:
                raise UsageError(f"{file.path}: unknown verb [{key}]: {suggestion(key, VERBS)}")
            if key in known:
                _refuse_unknown_options(file, value, known[key], key)
        elif key not in SHARED:
            raise UsageError(f"{file.path}: unknown option {key}: {suggestion(key, SHARED)}")


def _refuse_unknown_options(file: SettingsFile, table: Table, command: click.Command, path: str) -> None:
    names = {name for name, _ in options_of(command)}
    if path == "validate":
        names |= _options_of_other_kinds()
    groups = command.commands if isinstance(command, click.Group) else {}
    for key, value in table.items():
        if isinstance(value, Mapping) and key in groups:
            _refuse_unknown_options(file, value, groups[key], f"{path}.{key}")
        elif key not in names:
            raise UsageError(f"{file.path}: [{path}] unknown option {key}: {suggestion(key, {*names, *groups})}")


def _options_of_other_kinds() -> set[str]:
    """Return the options of ``validate`` and of ``validate --fabric``."""
    # By name, as the group of all verbs loads them: these modules import this one.
    commands: list[click.Command] = [import_module("gpunode.cli.fabric").validate_fabric, command_of("validate")]
    return {name for command in commands for name, _ in options_of(command)}


def _checked(value: Any, param: click.Option, path: Path, key: str) -> Any:
    """Return a value in the form of its option; a relative path begins at the file's folder. Raises UsageError."""
    if param.is_flag and not isinstance(value, bool):
        raise UsageError(f"{path}: {key}: expected true or false, found {value!r}")
    items = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not param.multiple:
        raise UsageError(f"{path}: {key}: expected one value, found a list")
    if any(isinstance(item, Mapping | list) for item in items):
        raise UsageError(f"{path}: {key}: expected a value, found {type(items[0]).__name__}")
    if isinstance(param.type, click.Path) or param.metavar in FILES:
        items = [_from(path, str(item)) for item in items]
    return items if param.multiple else items[0]


def _from(file: Path, text: str) -> str:
    """Return a path relative to the file with it; a list of hosts, and a value with a name in front, as they are."""
    return text if "," in text or "=" in text else str(file.parent / _expanded(text, file))


def _inventory_of_ansible() -> tuple[list[str], str] | None:
    """Return the existing inventories of ANSIBLE_INVENTORY, or of the ansible.cfg that Ansible would read here."""
    text, origin, folder = os.environ.get("ANSIBLE_INVENTORY", ""), "ANSIBLE_INVENTORY", _here()
    if not text:
        config = Path(os.environ.get("ANSIBLE_CONFIG") or "ansible.cfg")
        parser = configparser.ConfigParser(interpolation=None)
        try:
            config = config / "ansible.cfg" if config.is_dir() else config
            parser.read(config, encoding="utf-8")
            text = parser.get("defaults", "inventory", fallback="")
        except (configparser.Error, OSError, UnicodeDecodeError):
            return None
        origin, folder = str(config), config.absolute().parent
    paths = [folder / _expanded(part.strip(), origin) for part in text.split(",") if part.strip()]
    existing = [str(path) for path in paths if exists(path)]
    return (existing, origin) if existing else None
