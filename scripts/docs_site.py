"""Build the documentation as a site: ``.venv/bin/python scripts/docs_site.py [FOLDER]``.

Pages of docs/ and the README files are copied, with links that lead within the site; reference pages (each check, role,
verb, format and kind of the catalog) are generated from the program. Zensical makes HTML of them, in a virtual
environment of its own from scripts/docs.txt; once that exists, nothing is downloaded.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml
from click.testing import CliRunner
from docs_tables import with_tables

from gpunode.checks import registry
from gpunode.cli.reference import format_names, schema_of
from gpunode.cli.root import root
from gpunode.cli.verbs import VERBS

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "scripts" / "docs.txt"
TOOLS = ROOT / ".cache" / "docs"
LIMIT_S = 900
FRONT = "README.md"
NAVIGATION = {
    "Start": ("README", "getting-started", "lab"),
    "How-to": (
        "roles",
        "molecule",
        "images",
        "stack",
        "env",
        "training-guide",
        "policy",
        "own-checks",
        "contributing-recipes",
    ),
    "Operate": (
        "fleet",
        "upgrade",
        "reports",
        "reports-html",
        "slurm",
        "monitoring",
        "top",
        "fabric",
        "history",
        "failures",
    ),
    "Measure": ("workload", "measurements", "expectations", "profile"),
    "Reference": ("checks", "facts", "catalog", "parse", "published-rules", "simulator", "lab-vendor"),
    "Background": ("architecture", "comparison", "workload-hardware", "SECURITY", "CONTRIBUTING"),
    "Status": ("status", "guides", "driver-matrix", "CHANGELOG"),
}
"""Section -> pages by name. A page of docs/ that no section names belongs to the section of ``UNNAMED``."""
UNNAMED = "How-to"
STYLE = ".md-typeset a, .md-nav__link--active, .md-nav__link--active * { color: #3344b8 }\n"
"""The theme's blue has too little contrast on the background of the current page's entry."""
SCRIPT = """const reach = () => {
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) wide.tabIndex = 0
}
reach()
new MutationObserver(reach).observe(document.body, {childList: true, subtree: true})
"""
"""Wide tables and lines of code are scrolled with the keyboard too."""
ANSIBLE_MARKUP = re.compile(r"\b[A-Z]\(([^()]*)\)")
CODE_OR_LINK = re.compile(r"(?ms)^( *)```.*?^\1```[^\n]*$|`[^`\n]*`|\]\((?P<target>[^)\s]+)\)")
ITEM = re.compile(r" *(?:[-*]|\d+\.) ")


def main() -> int:
    """Write the pages below dist/docs, and build the site."""
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "dist" / "docs"
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "pages"
    write_pages(pages)
    (pages / "site.css").write_text(STYLE, encoding="utf-8")
    (pages / "site.js").write_text(SCRIPT, encoding="utf-8")
    settings = folder / "mkdocs.yml"
    settings.write_text(yaml.safe_dump(site_settings(pages), sort_keys=False), encoding="utf-8")
    command = [str(generator()), "build", "--strict", "--config-file", str(settings)]
    code = subprocess.run(command, check=False, timeout=LIMIT_S, start_new_session=True).returncode
    if code == 0:
        print(f"{sum(1 for _ in pages.rglob('*.md'))} pages: {folder / 'site' / 'index.html'}")
    return code


def generator() -> Path:
    """Return the generator's program; install it if scripts/docs.txt is not what was installed."""
    program, stamp = TOOLS / "bin" / "zensical", TOOLS / "docs.sha256"
    wanted = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if not (program.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted):
        venv.create(TOOLS, clear=True, with_pip=True)
        command = [str(TOOLS / "bin" / "pip"), "install", "--quiet", "--require-hashes", "-r", str(LOCK)]
        subprocess.run(command, check=True, timeout=LIMIT_S, start_new_session=True)
        stamp.write_text(wanted, encoding="utf-8")
    return program


def write_pages(folder: Path) -> None:
    """Write all pages of the site, and the files that they link to."""
    copied = sources()
    for source, target in copied.items():
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            path.write_text(for_site(ROOT / source, copied, folder), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / source, path)
    for target, text in generated():
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        path.write_text(old + text, encoding="utf-8")


def sources() -> dict[str, str]:
    """Return the copied files: path in the repository -> path in the site."""
    targets = {FRONT: "index.md"}
    targets |= {name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.is_file():
            targets[str(path.relative_to(ROOT))] = str(path.relative_to(ROOT / "docs"))
    for path in sorted(ROOT.glob("roles/*/README.md")):
        targets[str(path.relative_to(ROOT))] = f"roles/{path.parent.name}.md"
    return targets


def for_site(source: Path, copied: Mapping[str, str], folder: Path) -> str:
    """Return a page with its tables, and links and lists as the site's generator reads them; copy linked files."""
    text = with_tables(source.read_text(encoding="utf-8"))
    page = copied[str(source.relative_to(ROOT))]

    def relinked(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or re.match(r"https?://|#", target):
            return match[0]
        name, mark, anchor = target.partition("#")
        path = (source.parent / name).resolve()
        wanted = str(path.relative_to(ROOT))
        if wanted not in copied and path.is_file():
            copy = folder / "files" / wanted
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        new = copied.get(wanted, f"files/{wanted}")
        return f"]({os.path.relpath(new, Path(page).parent)}{mark}{anchor})"

    text = spaced("".join(cells(line) for line in CODE_OR_LINK.sub(relinked, text).splitlines(keepends=True)))
    if page == "checks.md":
        ids = "|".join(re.escape(check.id) for check in registry)
        text = re.sub(rf"(?m)^\| `({ids})` \|", r"| [`\1`](checks/\1.md) |", text)
    return text


def cells(line: str) -> str:
    """Return a line; in a table, code with an escaped bar as HTML, which the site's generator would print escaped."""
    if not line.startswith("|"):
        return line
    return re.sub(
        r"`([^`]*\\\|[^`]*)`", lambda match: f"<code>{html(match[1].replace(chr(92) + '|', '|'))}</code>", line
    )


def html(text: str) -> str:
    """Return text for HTML within a table's cell."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "&#124;")


def spaced(text: str) -> str:
    """Return text in which a list begins after an empty line, and what belongs to an item is indented by four."""
    lines: list[str] = []
    in_list, fence, shift = False, "", 0
    for line in text.splitlines():
        if fence:
            lines.append(" " * shift + line if line.strip() else line)
            fence = "" if line.strip() == fence else fence
            continue
        indent = len(line) - len(line.lstrip())
        if in_list and line.strip() and not indent and not ITEM.match(line) and not lines[-1].strip():
            in_list = False
        if ITEM.match(line) and not in_list and indent == 0:
            if lines and lines[-1].strip():
                lines.append("")
            in_list = True
        shift = -indent % 4 if in_list else 0
        lines.append(" " * shift + line if line.strip() else line)
        fence = "```" if line.lstrip().startswith("```") else ""
    return "\n".join(lines) + "\n"


def generated() -> Iterator[tuple[str, str]]:
    """Yield the generated pages: path, and text that follows what is there."""
    for check in registry:
        yield f"checks/{check.id}.md", check_page(check.id)
    for specs in sorted(ROOT.glob("roles/*/meta/argument_specs.yml")):
        yield f"roles/{specs.parents[1].name}.md", types_of(specs)
    for verb in VERBS:
        yield f"verbs/{verb}.md", verb_page(verb)
    yield "formats.md", formats()
    yield "catalog-rows.md", catalog_rows()


def printed(*arguments: str) -> str:
    """Return what the program prints."""
    result = CliRunner().invoke(root, arguments, prog_name="gpunode", catch_exceptions=False)
    return result.stdout


def check_page(check: str) -> str:
    """Return the page of a check, as ``gpunode checks ID`` prints it."""
    head, *lines = printed("checks", check).splitlines()
    parts = [f"# {check}", f"Category {plain(head.removeprefix(check).strip())}."]
    for line in lines:
        text = line.strip()
        if not line.startswith(" "):
            parts.append(f"\n## {plain(text)}\n")
        elif text.startswith("gpunode "):
            parts.append(f"\n```console\n{text}\n```\n")
        else:
            parts.append(f"{'    ' if line.startswith('    ') else ''}- {plain(text)}")
    return "\n\n".join(parts[:2]) + "\n" + "\n".join(parts[2:]) + "\n"


def plain(text: str) -> str:
    """Return text without meaning as Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>#|!])", r"\\\1", text.replace("&", "&amp;"))


def types_of(specs: Path) -> str:
    """Return the table of a role's variables with their types and defaults."""
    lines = [
        "",
        "## Variables by type",
        "",
        "| variable | type | default | choices | description |",
        "|---|---|---|---|---|",
    ]
    document = yaml.safe_load(specs.read_text(encoding="utf-8"))
    for part in document["argument_specs"].values():
        lines += [f"| {' | '.join(row)} |" for row in options(part.get("options", {}))]
    return "\n".join(lines) + "\n"


def options(entries: Mapping[str, Mapping[str, Any]], above: str = "") -> Iterator[list[str]]:
    """Yield the cells of each variable, those of its keys too."""
    for name, entry in entries.items():
        kind = f"{entry.get('type', 'str')}{' of ' + entry['elements'] if 'elements' in entry else ''}"
        default = "" if "default" not in entry else code(json.dumps(entry["default"], ensure_ascii=False))
        choices = ", ".join(code(str(choice)) for choice in entry.get("choices", ()))
        described = entry.get("description", "")
        text = " ".join(described) if isinstance(described, list) else str(described)
        yield [code(above + name), kind, default, choices, " ".join(ANSIBLE_MARKUP.sub(r"\1", plain(text)).split())]
        yield from options(entry.get("options", {}), f"{above}{name}.")


def code(text: str) -> str:
    """Return text as code within a table's cell."""
    return f"<code>{html(text)}</code>" if text else ""


def verb_page(verb: str) -> str:
    """Return the help of a verb and its subcommands."""
    parts = [f"# gpunode {verb}", VERBS[verb] + ".", fenced(printed(verb, "--help"))]
    command = root.get_command(click.Context(root), verb)
    for name in command.list_commands(click.Context(command)) if isinstance(command, click.Group) else ():
        parts += [f"## gpunode {verb} {name}", fenced(printed(verb, name, "--help"))]
    return "\n\n".join(parts) + "\n"


def fenced(text: str) -> str:
    """Return text as a block of code."""
    return f"```text\n{text.strip(chr(10))}\n```"


def formats() -> str:
    """Return the page of the formats: the keys of each document."""
    parts = [
        "# Formats",
        "`gpunode schema NAME` prints the whole JSON Schema of a format. These are the keys of each document.",
    ]
    for name in format_names():
        schema = json.loads(schema_of(name))
        rows = [
            f"| {code(key)} | {plain(summary(value))} |" for key, value in sorted(schema.get("properties", {}).items())
        ]
        parts.append(f"## {name}")
        parts.append("\n".join(["| key | content |", "|---|---|", *rows]) if rows else "One of several documents.")
    return "\n\n".join(parts) + "\n"


def summary(schema: Mapping[str, Any]) -> str:
    """Return the first paragraph of a key's description, else its type."""
    kind = str(schema.get("type", schema.get("$ref", "").rpartition("/")[2]))
    return " ".join(str(schema.get("description", kind)).partition("\n\n")[0].split())


def catalog_rows() -> str:
    """Return the page of the catalog's rows by kind."""
    parts = ["# Rows of the catalog", "`gpunode catalog show NAME` prints a row with its sources."]
    for kind in json.loads(printed("catalog", "list", "--format", "json")):
        parts += [f"## {kind['kind']}", fenced(printed("catalog", "list", kind["kind"]))]
    return "\n\n".join(parts) + "\n"


def navigation(folder: Path) -> list[dict[str, Any]]:
    """Return the sections with their pages; pages of checks are reached from the list of checks."""
    pages = {path.stem: path.name for path in sorted(folder.glob("*.md"))} | {"README": "index.md"}
    sections = {name: [pages[page] for page in named if page in pages] for name, named in NAVIGATION.items()}
    named = {page for section in sections.values() for page in section}
    generated_pages = [path.name for path in sorted(folder.glob("*.md")) if path.stem in ("formats", "catalog-rows")]
    sections["Reference"] += generated_pages
    sections[UNNAMED] += [page for page in sorted(pages.values()) if page not in named and page not in generated_pages]
    entries: list[dict[str, Any]] = [
        {name: [{title(folder / page): page} for page in section]} for name, section in sections.items()
    ]
    reference = next(entry["Reference"] for entry in entries if "Reference" in entry)
    for label, part in (("Roles", "roles"), ("Verbs", "verbs")):
        reference.append({label: [{path.stem: f"{part}/{path.name}"} for path in sorted((folder / part).glob("*.md"))]})
    return entries


def title(page: Path) -> str:
    """Return the first heading of a page, without markup."""
    heading = re.search(r"(?m)^# (.+)$", page.read_text(encoding="utf-8"))
    return heading[1].replace("`", "") if heading else page.stem


def site_settings(pages: Path) -> dict[str, Any]:
    """Return the settings of the site."""
    features = [
        "navigation.tabs",
        "navigation.top",
        "navigation.prune",
        "toc.follow",
        "search.highlight",
        "content.code.copy",
    ]
    return {
        "site_name": "gpunode",
        "docs_dir": "pages",
        "site_dir": "site",
        "use_directory_urls": False,
        "theme": {"name": "material", "font": False, "features": features},
        "plugins": ["search"],
        "extra_css": ["site.css"],
        "extra_javascript": ["site.js"],
        "markdown_extensions": [
            "tables",
            {"toc": {"permalink": True}},
            "pymdownx.superfences",
            {"pymdownx.highlight": {"anchor_linenums": False}},
        ],
        "nav": navigation(pages),
    }


if __name__ == "__main__":
    sys.exit(main())
