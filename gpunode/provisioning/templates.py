"""Texts of files that roles write: Jinja2 templates, and sections in files that others write too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, FunctionLoader, StrictUndefined, TemplateError

from gpunode.content import collection_root
from gpunode.errors import UsageError

MUTED = "#gpunode# "
"""In front of a line of others that the role's section replaces."""


def mark_of(role: str) -> str:
    """Return the text by which files of a role are recognized."""
    return f"Managed by gpunode (role {role})"


def rendered(role: str, name: str, site: str = "", **values: Any) -> str:
    """Return the text of a template of a role, with ``mark``, which names the role that manages the file.

    ``site``: folder in which ``ROLE/NAME`` replaces the role's own template. Raises UsageError if one cannot be
    rendered.
    """
    try:
        # Some templates are common to several roles.
        template = _environment(site).select_template([f"{role}/{name}", f"common/{name}"])
        return template.render(mark=mark_of(role), **values)
    except TemplateError as err:
        where = f"gpunode_templates: {site}/{role}/{name}" if site else f"template {role}/{name}"
        line = getattr(err, "lineno", None)
        raise UsageError(f"{where}{f', line {line}' if line else ''}: {err.message or err}") from None


def program(role: str, name: str) -> str:
    """Return a program for nodes, a file of the role."""
    return (collection_root() / "roles" / role / "files" / name).read_text(encoding="utf-8")


def preload() -> None:
    """Compile the templates of all roles, before Ansible forks."""
    for path in sorted(collection_root().glob("roles/*/templates/*.j2")):
        _environment("").get_template(f"{path.parts[-3]}/{path.name}")


@cache
def _environment(site: str) -> Environment:
    """Return the environment with the site's templates before those of the roles."""
    loader = FunctionLoader(_role_template)
    # The texts are configuration files, not HTML.
    return Environment(  # noqa: S701
        loader=ChoiceLoader([FileSystemLoader(site), loader]) if site else loader,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )


def _role_template(name: str) -> tuple[str, str, None] | None:
    role, _, file = name.partition("/")
    path: Path = collection_root() / "roles" / role / "templates" / file
    return (path.read_text(encoding="utf-8"), str(path), None) if path.is_file() else None


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
