"""Look for known vulnerabilities of the locked dependencies, and for risks in the CI pipelines.

pip-audit asks the package index. Exits 0 if both found nothing, 1 if one found something, 3 if the index has no data on
vulnerabilities, as many mirrors.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from sbom import LIMIT_S, TOOL, installed

ROOT = Path(__file__).resolve().parents[1]
NO_ANSWER = 3
PIPELINES = (".github/workflows/ci.yml", "inventory/ci/github.yml")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="gpunode-audit-") as work:
        tool = installed(Path(work) / "tool", TOOL)
        words = ("--disable-pip", "--require-hashes", "--progress-spinner", "off", "--format", "json")
        audit = _run(str(tool.with_name("pip-audit")), *words, "-r", "requirements.lock")
    present = [each for each in PIPELINES if (ROOT / each).exists()]
    pipelines = _run(str(Path(sys.executable).with_name("zizmor")), "--offline", "--quiet", *present)
    print(pipelines.stdout, end="")
    return verdict(audit.stdout, pipelines.returncode)


def verdict(audit: str, pipelines: int) -> int:
    """Return the exit code for the document of pip-audit and the exit code of zizmor; print what was found."""
    try:
        rows = json.loads(audit)["dependencies"]
    except (ValueError, KeyError, TypeError):
        print("audit: pip-audit has no result: is the package index reachable?", file=sys.stderr)
        return NO_ANSWER
    looked_up = [row for row in rows if "skip_reason" not in row]
    bad = [row for row in looked_up if row["vulns"]]
    for row in bad:
        print(f"{row['name']} {row['version']}: {', '.join(each['id'] for each in row['vulns'])}")
    print(f"{len(looked_up)} of {len(rows)} dependencies looked up, {len(bad)} with known vulnerabilities")
    if bad or pipelines:
        return 1
    if len(looked_up) < len(rows):
        print("audit: the package index has no data on the vulnerabilities of the others", file=sys.stderr)
        return NO_ANSWER
    return 0


def _run(*argv: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        argv, check=False, cwd=ROOT, timeout=LIMIT_S, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    sys.stderr.write(done.stderr)
    return done


if __name__ == "__main__":
    sys.exit(main())
