"""The error of a fault that is not possible."""


class FaultError(Exception):
    """A fault cannot be set or healed; the message is one line with the reason and the possible values."""
