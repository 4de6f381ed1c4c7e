"""Write sbom.cdx.json, the software bill of materials that the wheel carries (CycloneDX): what gpunode installs.

A fresh environment gets the locked dependencies, without those of development, and cyclonedx-py describes it. The
table of licences in docs/supply-chain.md follows from it.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpunode.cli.zipapp import locked, needed

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "sbom.cdx.json"
PAGE = ROOT / "docs" / "supply-chain.md"
TOOL = ROOT / "scripts" / "sbom.txt"
LIMIT_S = 900


def run(*words: str | Path) -> None:
    """Run a program; SystemExit if it fails."""
    argv = [*map(str, words)]
    done = subprocess.run(argv, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL, start_new_session=True)
    if done.returncode:
        raise SystemExit(f"sbom: {argv[0]} failed (exit {done.returncode})")


def installed(folder: Path, requirements: Path) -> Path:
    """Return the interpreter of a new environment with these requirements and nothing else."""
    run(sys.executable, "-I", "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-I", "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-compile")
    run(*pip, "--require-hashes", "--requirement", requirements)
    return python


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gpunode-sbom-") as work:
        requirements = Path(work) / "requirements.txt"
        requirements.write_text(locked(needed(left_out=frozenset())), encoding="utf-8")
        described = installed(Path(work) / "described", requirements)
        tool = installed(Path(work) / "tool", TOOL)
        run(
            *(tool.with_name("cyclonedx-py"), "environment", described, "--pyproject", ROOT / "pyproject.toml"),
            *("--output-reproducible", "--short-PURLs", "--output-file", OUT),
        )
    document = json.loads(OUT.read_text(encoding="utf-8"))
    for component in document["components"]:
        component.pop("externalReferences", None)
    OUT.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(with_licences(PAGE.read_text(encoding="utf-8"), document), encoding="utf-8")


def with_licences(page: str, document: dict[str, Any]) -> str:
    """Return the page with the table of licences that follows from a bill of materials."""
    rows = sorted((each["name"].lower(), each["version"], licence_of(each)) for each in document["components"])
    lines = ["| package | version | licence |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return re.sub(r"(?<=<!-- licences -->\n).*?(?=<!-- end -->)", "\n".join(lines) + "\n", page, flags=re.DOTALL)


def licence_of(component: dict[str, Any]) -> str:
    """Return the licence that a package declares, as SPDX expression or in its own words."""
    declared = [each.get("license", each) for each in component.get("licenses", ())]
    formal = [one.get("expression") or one.get("id") for one in declared]
    found = [one for one in formal if one] or [one["name"].rpartition(":: ")[2] for one in declared]
    return ", ".join(dict.fromkeys(found)) or "not declared"


if __name__ == "__main__":
    main()
