"""``modprobe`` of a simulated node: NVIDIA's modules are "loaded", all others are left to the real kmod."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from . import modules
from .modules import ModuleError

_INSTALL_LIMIT_S = 60
_WITH_VALUE = ("-S", "--set-version", "-d", "--dirname", "-C", "--config")
_ONLY_TOLD = frozenset(
    [
        "-D",
        "--show-depends",
        "-c",
        "--showconfig",
        "--show-config",
        "--show-modversions",
        "--dump-modversions",
        "-V",
        "--version",
        "-h",
        "--help",
        "-R",
        "--resolve-alias",
        "-n",
        "--dry-run",
        "--show",
    ]
)


def main(argv: list[str]) -> int:
    """Run as modprobe; return its exit status."""
    options, names = split(argv)
    quiet = any(option in ("-q", "--quiet") or _short(option, "q") for option in options)
    if any(option in _ONLY_TOLD for option in options) or not names:
        return _real(argv)
    if any(option in ("-r", "--remove") or _short(option, "r") for option in options):
        return _remove(argv, options, names)
    # As in modprobe: with -a all names are modules, else the first one is and the rest are its parameters.
    many = any(option in ("-a", "--all") or _short(option, "a") for option in options)
    requested = names if many else names[:1]
    if not any(modules.is_simulated(name) for name in requested):
        return _real(argv)
    rest = [option for option in options if option not in ("-a", "--all", "-v", "--verbose")]
    failed = 0
    for name in requested:
        failed |= _load(rest, name, [] if many else names[1:], quiet)
    return failed


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return (options, the rest); a value that belongs to an option stays with it."""
    options: list[str] = []
    names: list[str] = []
    words = iter(argv)
    for word in words:
        if word.startswith("-") and word != "--":
            options.append(word)
            if word in _WITH_VALUE:
                options.append(next(words, ""))
        elif word != "--":
            names.append(word)
    return options, names


def _short(option: str, letter: str) -> bool:
    return option.startswith("-") and not option.startswith("--") and letter in option[1:]


def _load(options: list[str], name: str, parameters: list[str], quiet: bool) -> int:
    if not modules.is_simulated(name):
        return _real([*options, name])
    steps, answer = modules.steps([*options, name, *parameters])
    if answer.returncode != 0 or not steps:
        if not modules.underscored(name).startswith("nvidia"):
            modules.note_needed(name)
            return 0
        sys.stderr.write(answer.stderr)
        return answer.returncode
    try:
        for words in steps:
            _step(words, parameters)
    except ModuleError as err:
        if not quiet:
            sys.stderr.write(f"modprobe: ERROR: {err}\n")
        return 1
    return 0


def _step(words: list[str], parameters: list[str]) -> None:
    """Run one line of ``modprobe --show-depends``: insmod FILE OPTION…, install COMMAND…, builtin NAME."""
    if words[0] == "insmod":
        name = Path(words[1]).name.split(".ko")[0]
        if modules.is_simulated(name):
            modules.insert(words[1], words[2:])
    elif words[0] == "install":
        environment = dict(os.environ, CMDLINE_OPTS=" ".join(parameters))
        done = subprocess.run(
            ["/bin/sh", "-c", " ".join(words[1:])],
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=_INSTALL_LIMIT_S,
            check=False,
            start_new_session=True,
        )
        if done.returncode != 0:
            raise ModuleError(f"Error running install command '{' '.join(words[1:])}': retcode {done.returncode}")


def _remove(argv: list[str], options: list[str], names: list[str]) -> int:
    if not any(modules.is_simulated(name) for name in names):
        return _real(argv)
    quiet = any(option in ("-q", "--quiet") or _short(option, "q") for option in options)
    for name in names:
        requested = modules.underscored(name)
        if requested not in modules.loaded():
            continue  # As in modprobe: removing a module that is not loaded succeeds.
        try:
            modules.remove(requested)
            for below in modules.dependencies(requested):
                if below in modules.loaded() and not modules.in_use(below):
                    modules.remove(below)
        except ModuleError as err:
            if not quiet:
                sys.stderr.write("modprobe: FATAL: {}.\n".format(str(err).split(" by: ")[0]))
            return 1
    return 0


def _real(argv: list[str]) -> int:
    done = modules.kmod("modprobe", argv)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


def lsmod(_: list[str]) -> int:
    """Run as lsmod, which takes no arguments; return its exit status."""
    sys.stdout.write("Module                  Size  Used by\n")
    for name, size, count, users in modules.listing():
        sys.stdout.write(f"{name:<19} {size:>8}  {count} {','.join(users)}".rstrip() + "\n")
    return 0


def rmmod(argv: list[str]) -> int:
    """Run as rmmod; return its exit status."""
    names = [word for word in argv if not word.startswith("-")]
    if not any(modules.is_simulated(name) for name in names):
        done = modules.kmod("rmmod", argv)
        sys.stdout.write(done.stdout)
        sys.stderr.write(done.stderr)
        return done.returncode
    failed = 0
    for name in names:
        try:
            modules.remove(name)
        except ModuleError as err:
            sys.stderr.write(f"rmmod: ERROR: {err}\n")
            failed = 1
    return failed
