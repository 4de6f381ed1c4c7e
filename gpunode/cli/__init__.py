"""The command line: each verb is loaded when it is called."""

import sys
from collections.abc import Sequence
from contextlib import suppress

from gpunode.cli.streams import guard
from gpunode.cli.verbs import VERBS, loading
from gpunode.errors import Exit

__all__ = ["VERBS", "main", "run"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 good, 1 failed, 2 wrong usage, 3 could not be determined."""
    guard()
    try:
        code = run(argv)
    except Exception as err:
        code = _defect(argv, err)
    sys.exit(code)


def _defect(argv: Sequence[str] | None, err: Exception) -> int:
    """Print an error of gpunode itself with its traceback; return 3, because 1 means that a check failed."""
    with suppress(Exception):
        from traceback import print_exception  # noqa: PLC0415

        print_exception(err)
    with suppress(Exception):
        from gpunode.cli.root import refused  # noqa: PLC0415

        line = f"gpunode: unexpected error, please report it: {type(err).__name__}: {err}"
        refused(argv, line, Exit.UNDETERMINED)
    return Exit.UNDETERMINED


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
