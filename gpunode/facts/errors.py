"""The exception of parsers."""


class ParseError(ValueError):
    """Text in another format, truncated, or empty.

    The message is one line: what was expected and what was found.
    """
