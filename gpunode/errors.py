"""The errors a user can cause, and the exit codes of every verb."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes: the same for every verb."""

    GOOD = 0
    FAILED = 1
    USAGE = 2
    UNDETERMINED = 3


class GpunodeError(Exception):
    """Ends a verb with one line on stderr: what is wrong, where, what to do."""

    exit_code: Exit = Exit.UNDETERMINED


class UsageError(GpunodeError):
    """Wrong usage, configuration or input file."""

    exit_code = Exit.USAGE


class UndeterminedError(GpunodeError):
    """The answer could not be determined: unreachable, no engine, no data."""

    exit_code = Exit.UNDETERMINED
