"""The command line: one module per verb, loaded when it is called."""

import sys
from collections.abc import Sequence

from gpunode.cli.streams import guard
from gpunode.cli.verbs import VERBS, loading

__all__ = ["VERBS", "main", "run"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 good, 1 failed, 2 wrong usage, 3 could not be determined."""
    guard()
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        with loading():
            # Most of the time until a verb begins goes into this; Ctrl-C may happen here too.
            from gpunode.cli.root import answer  # noqa: PLC0415

        return answer(argv)
    except KeyboardInterrupt:
        sys.stderr.write("gpunode: interrupted\n")
        return 130
