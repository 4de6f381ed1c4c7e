"""Derive the lab's recorded indexes from a collection of recorded vendor indexes (``real-indexes.yml``).

    .venv/bin/python scripts/recorded_indexes.py FILE [--check]

Writes ``gpunode/lab/packages/data/recorded/*.yml``: one file per repository, and ``assumptions.yml`` with the
assumptions for facts that are not recorded. ``--check`` writes nothing and exits 1 if a file differs.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).resolve().parent.parent / "gpunode/lab/packages/data/recorded"
HEAD = "---\n# Derived from recorded vendor indexes by scripts/recorded_indexes.py; do not edit.\n"
HEAD += "# yamllint disable rule:indentation rule:line-length\n"
# The x86_64 repositories: the lab serves only these, and names do not differ by architecture.
LEFT_OUT = ("-sbsa",)
_REPOSITORY = (
    "kind", "url", "release", "key", "pin", "dkms", "driver_revisions", "fabricmanager_revisions", "absent_names",
    "epoch", "epoch_of", "release_suffix", "modules", "release_name", "pockets", "components", "branches_in_archive",
)  # fmt: skip
_ROW = (
    "versions", "versions_derived", "branches", "follows", "depends", "depends_by_version", "depends_derived",
    "recommends", "provides", "conflicts", "breaks", "replaces", "architecture", "holds", "becomes", "was",
    "transitional_to", "virtual", "pocket", "from_repository", "note",
)  # fmt: skip


def derived(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the files by name, as text."""
    files = {
        f"{name}.yml": _text(_system(system))
        for name, system in content["systems"].items()
        if not name.endswith(LEFT_OUT)
    }
    files["assumptions.yml"] = _text({"unknown": content["unknown"], "assumptions": content["assumptions"]})
    return files


def _system(system: Mapping[str, Any]) -> dict[str, Any]:
    """Return a repository with its rows; a row's sources are numbers of the file's own list."""
    sources: list[str] = []
    rows = {}
    for name, row in system["packages"].items():
        kept = {key: row[key] for key in _ROW if row.get(key) or (key == "recommends" and key in row)}
        for source in row["sources"]:
            if source not in sources:
                sources.append(source)
        rows[name] = {**kept, "sure": row["sure"], "sources": [sources.index(source) for source in row["sources"]]}
    repository = {key: system["repository"][key] for key in _REPOSITORY if key in system["repository"]}
    return {"repository": repository, "sources": sources, "packages": rows}


def _text(content: Mapping[str, Any]) -> str:
    return HEAD + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=150, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes lists of plain values in one line, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)

    def represent_list(self, data: list[Any]) -> yaml.Node:  # type: ignore[override]
        plain = all(not isinstance(item, (dict, list)) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=plain)


_Dumper.add_representer(list, _Dumper.represent_list)


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description="Derive the lab's recorded indexes from recorded vendor indexes.")
    parser.add_argument("file", type=Path, help="real-indexes.yml")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file differs")
    arguments = parser.parse_args()
    try:
        content = yaml.safe_load(arguments.file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as err:
        parser.error(f"{arguments.file}: {' '.join(str(err).split())}")
    files = derived(content)
    there = {path.name: path.read_text(encoding="utf-8") for path in DATA.glob("*.yml")}
    differing = sorted(name for name in files.keys() | there.keys() if files.get(name) != there.get(name))
    if arguments.check:
        for name in differing:
            sys.stderr.write(f"{DATA / name}: differs from {arguments.file}: run this script without --check\n")
        return 1 if differing else 0
    DATA.mkdir(parents=True, exist_ok=True)
    for name in differing:
        target = DATA / name
        if name not in files:
            target.unlink()
            continue
        new = target.with_name(f".{name}.new")
        new.write_text(files[name], encoding="utf-8")
        new.rename(target)
    sys.stdout.write(f"{len(differing)} of {len(files)} files written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
