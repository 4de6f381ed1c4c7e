"""Write sbom.cdx.json, the software bill of materials that the wheel carries (CycloneDX): what gpunode installs.

A fresh environment gets the locked dependencies, without those of development, and cyclonedx-py describes it. The
site's table of licences follows from it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gpunode.cli.zipapp import locked, needed

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "sbom.cdx.json"
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


if __name__ == "__main__":
    main()
