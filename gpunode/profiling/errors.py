"""The error of this room."""

from gpunode.errors import UndeterminedError


class ProfileError(UndeterminedError):
    """A command was not profiled, or its profile cannot be read."""
