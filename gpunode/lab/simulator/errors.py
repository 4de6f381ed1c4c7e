"""The error of a fault that cannot be."""


class FaultError(Exception):
    """A fault cannot be set or healed; the message is one line that says why and what there is."""
