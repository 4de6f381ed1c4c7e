"""A role's section in a file that others write too: the lines between two marks."""

from collections.abc import Callable, Sequence

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


MUTED = "#gpunode# "
"""In front of a line of others that the role's section replaces."""


def with_section(text: str, begin: str, lines: Sequence[str], end: str, *, after: str = "") -> str:
    """Return the text with these lines in the role's section; without the section if there are none.

    A new section is at the end, or below the first line ``after``.
    """
    part = [begin, *lines, end] if lines else []
    existing = text.split("\n")
    if [line for line in existing if line in (begin, end)] == [begin, end]:
        return "\n".join([*existing[: existing.index(begin)], *part, *existing[existing.index(end) + 1 :]])
    if after in existing and after:
        at = existing.index(after) + 1
        return "\n".join([*existing[:at], *part, *existing[at:]])
    return completed(text) + "".join(f"{line}\n" for line in part) if part else text


def muted(text: str, matches: Callable[[str], bool]) -> str:
    """Return the text with matching lines as comments that ``unmuted`` restores."""
    return "\n".join(f"{MUTED}{line}" if matches(line) else line for line in text.split("\n"))


def unmuted(text: str) -> str:
    """Return the text with the lines that ``muted`` made comments."""
    return "\n".join(line.removeprefix(MUTED) for line in text.split("\n"))
