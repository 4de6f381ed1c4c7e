"""``rmmod`` of a simulated node."""

from __future__ import annotations

import sys

from . import modules
from .modules import ModuleError


def main(argv: list[str]) -> int:
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
