"""What a parser raises."""


class ParseError(ValueError):
    """The text is not of the kind, is cut where it must not be, or is empty.

    The message is one line: what was expected and what was found.
    """
