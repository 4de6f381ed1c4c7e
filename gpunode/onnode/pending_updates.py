"""Record since when security updates wait for packages that are kept from automatic upgrades.

Runs on a node as ``python3 -I`` after each refresh of apt's lists, with the standard library alone; the role updates
deploys this file. It changes nothing but its record.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

SETTINGS = Path("/etc/gpunode/updates.json")
RECORD = Path("/var/lib/gpunode/updates/pending.json")
LIMIT_S = 120
SECURITY = re.compile(r"-security(/|$)")
"""Suites that carry security updates: ``bookworm-security/main``, ``noble-security/restricted``."""


def output(*argv: str) -> str:
    """Return what a command prints. Raise OSError or subprocess.SubprocessError where it fails."""
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
        start_new_session=True,
    )
    return done.stdout


def installed(listing: str, patterns: list[str]) -> dict[str, str]:
    """Return the installed packages (name to version) that are kept from automatic upgrades."""
    rows = (line.split("\t") for line in listing.splitlines())
    versions = {row[0]: row[1] for row in rows if len(row) == 3 and row[2] == "installed"}
    return {name: version for name, version in versions.items() if any(re.match(pattern, name) for pattern in patterns)}


def offered(listing: str) -> dict[str, set[str]]:
    """Return the versions that suites for security updates offer, by package, from ``apt-cache madison``."""
    versions: dict[str, set[str]] = {}
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 3 or not fields[2].endswith("Packages"):
            continue
        words = fields[2].split()
        if len(words) > 1 and SECURITY.search(words[1]):
            versions.setdefault(fields[0], set()).add(fields[1])
    return versions


def newer(version: str, other: str) -> bool:
    """Return whether a version is later than another, by dpkg's rules."""
    compared = ["dpkg", "--compare-versions", version, "gt", other]
    return subprocess.run(compared, check=False, timeout=LIMIT_S, start_new_session=True).returncode == 0


def pending(
    have: dict[str, str], offers: dict[str, set[str]], before: dict[str, str], now: str
) -> list[dict[str, str]]:
    """Return the packages for which a security update waits; ``before``: package to since when, of the old record."""
    rows = []
    for name, version in sorted(have.items()):
        later = [offer for offer in offers.get(name, ()) if newer(offer, version)]
        if later:
            best = next(offer for offer in later if not any(newer(other, offer) for other in later))
            rows.append({"package": name, "installed": version, "version": best, "since": before.get(name, now)})
    return rows


def main() -> int:
    """Write the record."""
    patterns = json.loads(SETTINGS.read_text(encoding="utf-8"))["patterns"]
    have = installed(output("dpkg-query", "-W", "-f", "${Package}\t${Version}\t${db:Status-Status}\n"), patterns)
    offers = offered(output("apt-cache", "madison", *sorted(have))) if have else {}
    try:
        before = {row["package"]: row["since"] for row in json.loads(RECORD.read_text(encoding="utf-8"))["pending"]}
    except (OSError, ValueError, KeyError, TypeError):
        before = {}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record = {"schema": "gpunode.pending-updates/1", "at": now, "pending": pending(have, offers, before, now)}
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    number, draft = tempfile.mkstemp(prefix=".pending.", dir=str(RECORD.parent))
    try:
        with os.fdopen(number, "w", encoding="utf-8") as out:
            json.dump(record, out, indent=1)
            out.write("\n")
            os.fchmod(out.fileno(), 0o644)
        Path(draft).replace(RECORD)
    except BaseException:
        Path(draft).unlink()
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
