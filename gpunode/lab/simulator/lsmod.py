"""``lsmod`` of a simulated node, also on hosts without /proc/modules in their kernel."""

from __future__ import annotations

import sys

from . import modules


def main(argv: list[str]) -> int:  # noqa: ARG001 (as lsmod, which takes none)
    """Run as lsmod; return its exit status."""
    sys.stdout.write("Module                  Size  Used by\n")
    for name, size, count, users in modules.listing():
        sys.stdout.write(f"{name:<19} {size:>8}  {count} {','.join(users)}".rstrip() + "\n")
    return 0
