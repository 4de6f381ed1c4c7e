"""A role's section in a file that others write too: the lines between two marks."""

from gpunode.errors import UsageError


def around(path: str, text: str, begin: str, end: str) -> str:
    """Return the text without the role's section, every other byte unchanged.

    Raise UsageError if a mark is lost or repeated: lines of others would then count as the role's.
    """
    lines = text.split("\n")
    marks = [line for line in lines if line in (begin, end)]
    if not marks:
        return text
    if marks != [begin, end]:
        raise UsageError(
            f"{path}: expected one line '{begin}' and below it one line '{end}': restore these marks around the lines "
            "that gpunode wrote, or remove those lines and the marks"
        )
    return "\n".join([*lines[: lines.index(begin)], *lines[lines.index(end) + 1 :]])


def completed(text: str) -> str:
    """Return the text with an end of its last line, so that lines can be added."""
    return text if not text or text.endswith("\n") else f"{text}\n"
