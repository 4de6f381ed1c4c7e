"""Texts of files that roles write: Jinja2 templates in ``roles/ROLE/templates``, which a site can replace."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, FunctionLoader, StrictUndefined, TemplateError

from gpunode.content import collection_root
from gpunode.errors import UsageError


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
