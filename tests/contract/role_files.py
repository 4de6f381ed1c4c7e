"""Defaults, specifications and metadata of the roles: ``python tests/contract/role_files.py`` writes them."""

import json
import re
import textwrap
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gpunode.catalog import Catalog
from gpunode.catalog import load as load_catalog
from gpunode.provisioning.preflight import MANAGERS
from gpunode.provisioning.role import PackageSettings, Role, Settings
from gpunode.provisioning.roles import ROLES

FOLDER = Path(__file__).parents[2] / "roles"
TYPES = {str: "str", int: "int", bool: "bool", float: "float", list: "list", tuple: "list", dict: "dict"}
WIDTH = 120
PUBLISHERS = {"debian": "Debian", "ubuntu": "Ubuntu", "rhel": "EL"}
"""Galaxy's names of the publishers of systems."""
CODENAMES = {"ubuntu-26.04": "resolute"}
"""Names that Galaxy uses and the catalog lacks: the schema of ansible-lint."""
MARKUP = re.compile(r"\b[VOCMI]\(([^)]*)\)")


class _Dumper(yaml.SafeDumper):
    """YAML with lists below their keys, and texts of several lines that yamllint accepts."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


_Dumper.add_representer(
    list,
    lambda dumper, rows: dumper.represent_sequence(
        "tag:yaml.org,2002:seq",
        rows,
        flow_style=len(rows) < 15 and all(not isinstance(row, dict) and len(str(row)) < 40 for row in rows),
    ),
)
_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, _style(text)))


def _style(text: str) -> str | None:
    try:
        alone: Any = yaml.safe_load(text or "''")
    except yaml.YAMLError:
        alone = None
    return None if alone == text else ">" if len(text) > 60 else '"'


def dumped(value: Any, width: int = WIDTH) -> str:
    """A value as YAML."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)


def kind(annotation: Any) -> dict[str, Any]:
    """The type of a field as the keys of an argument specification."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(arguments[0])
    if origin in (Union, types.UnionType):
        members = [member for member in arguments if member is not types.NoneType]
        return kind(members[0]) if len(members) == 1 else {"type": "raw"}
    if origin is Literal:
        return {"type": "str", "choices": list(arguments)}
    if origin in (list, tuple):
        inner = kind(arguments[0])
        return {"type": "list", "elements": inner.pop("type"), **inner}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {"type": "dict", "options": {name: option(field) for name, field in annotation.model_fields.items()}}
    return {"type": TYPES.get(origin or annotation, "raw")}


def plain(value: Any) -> Any:
    """A default as YAML has it."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def option(field: FieldInfo) -> dict[str, Any]:
    """One entry of the argument specification."""
    typed = kind(field.annotation)
    inner = {name: typed.pop(name) for name in ("options",) if name in typed}
    extra = field.json_schema_extra
    spec: Any = dict(extra.get("spec", {})) if isinstance(extra, dict) else {}  # type: ignore[arg-type]
    if "options" in spec:
        inner = {"options": kind(spec.pop("options"))["options"]}
    default = {"required": True} if field.is_required() else {"default": plain(field.default)}
    if field.default is None:
        default = {}
    return {**typed, **default, **spec, "description": field.description, **inner}


def fields(role: Role[Any]) -> list[tuple[str, FieldInfo]]:
    """The variables of a role, those that all roles have at the end."""
    pairs = role.settings.model_fields.items()
    return sorted(pairs, key=lambda pair: [pair[0] in base.model_fields for base in (PackageSettings, Settings)])


def specification(role: Role[Any]) -> str:
    """``meta/argument_specs.yml`` of a role."""
    options = {role.variable(name): option(field) for name, field in fields(role)}
    main = {"short_description": role.title, "description": list(role.about), "options": options}
    text = dumped({"argument_specs": {"main": main}})
    return "---\n" + text


def defaults(role: Role[Any]) -> str:
    """``defaults/main.yml`` of a role: each variable below its description."""
    parts = []
    for name, field in fields(role):
        text = MARKUP.sub(r"\1", field.description or "")
        choices = kind(field.annotation).get("choices", [])
        if not all(choice in text for choice in choices):
            text += f" One of {', '.join(choices)}."
        lines = textwrap.wrap(text, WIDTH - 2, break_on_hyphens=False)
        value = dumped({role.variable(name): plain(field.default)}, 150)
        if not role.variable(name).startswith(role.prefix):
            value = value.replace("\n", " # noqa: var-naming[no-role-prefix]\n", 1)
        parts.append("".join(f"# {line}\n" for line in lines) + value)
    return "---\n" + "\n".join(parts)


def platforms(catalog: Catalog) -> dict[str, list[str]]:
    """The supported systems as Galaxy names them: releases by publisher."""
    releases: dict[str, list[str]] = {name: [] for name in PUBLISHERS.values()}
    for system in catalog.systems.values():
        if system.supported and system.manager in MANAGERS:
            publisher, _, version = system.id.partition("-")
            releases[PUBLISHERS[publisher]].append(system.codename or CODENAMES.get(system.id, version))
    return releases


def metadata(role: Role[Any], catalog: Catalog) -> str:
    """``meta/main.yml`` of a role."""
    lines = (
        "---",
        "galaxy_info:",
        "  author: The gpunode maintainers",
        f"  description: {json.dumps(role.title) if ': ' in role.title else role.title}",
        "  license: Apache-2.0",
        '  min_ansible_version: "2.19"',
        "  platforms:",
    )
    rows = []
    for name, versions in platforms(catalog).items():
        listed = ", ".join(json.dumps(version) if version.isdigit() else version for version in versions)
        rows.append(f"    - {{ name: {name}, versions: [{listed}] }}")
    return "\n".join((*lines, *rows)) + "\n"


def files(role: Role[Any], catalog: Catalog) -> dict[Path, str]:
    """The generated files of a role."""
    folder = FOLDER / role.name
    return {
        folder / "meta/main.yml": metadata(role, catalog),
        folder / "defaults/main.yml": defaults(role),
        folder / "meta/argument_specs.yml": specification(role),
    }


if __name__ == "__main__":
    known = load_catalog()
    for role in ROLES.values():
        for path, text in files(role, known).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
