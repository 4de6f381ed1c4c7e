"""Rebuild gpunode/catalog/open_modules.tsv: ``scripts/listed_gpus.py CLONE [RELEASE=README.txt …]``.

CLONE is a clone of NVIDIA/open-gpu-kernel-modules: the README of each release is read that section ``branches`` of the
catalog has as a point; tags of developer betas are not points. Releases without a list are omitted.
README.txt is the one of the driver itself, for a release without a tag: its list has the same ids. Debian's package
nvidia-driver contains it (usr/share/doc/nvidia-driver/README.txt.gz).
"""

import re
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from gpunode.catalog import load, open_modules

CLONE, *FILES = sys.argv[1:]
TARGET = Path(open_modules.__file__).with_name(open_modules.FILE)
ROW = re.compile(r"\|[^|]+\|\s*([0-9A-Fa-f]{4})((?: [0-9A-Fa-f]{4}){2})?\s*\|")
ROW_OF_TEXT = re.compile(r" ?\S.*?\s{2,}([0-9A-F]{4})((?: [0-9A-F]{4}){2})?(?:\s+\S+)?\s*$")
LIST_OF_TEXT = "Appendix A. Supported NVIDIA GPU Products"


def git(*words: str) -> str:
    """Return the output of a git command in the clone."""
    command = ["git", "-C", CLONE, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def ids(row: re.Pattern[str], text: str) -> set[str]:
    """Return the ids of a README's rows, ``2335:10de:18be`` or ``2684``."""
    rows = (match for match in map(row.match, text.splitlines()) if match)
    return {(match[1] + (match[2] or "")).lower().replace(" ", ":") for match in rows}


points = {point for branch in load().branches.values() for point in branch.points}
by_release = {tag: ids(ROW, git("show", f"{tag}:README.md")) for tag in points.intersection(git("tag").split())}
newest = max(by_release, key=Version, default="")
known = set().union(*by_release.values())
for name, _, path in (word.partition("=") for word in FILES):
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    # Older GPUs are in the same list: those that no tag has are left out.
    by_release[name] = ids(ROW_OF_TEXT, text.rpartition(LIST_OF_TEXT)[2]) & known
releases = sorted((release for release, held in by_release.items() if held), key=Version)
listed = {key: [release for release in releases if key in by_release[release]] for key in sorted(known)}
if not releases:
    sys.exit(f"{CLONE}: no tag is a release with a list of GPUs: is it a clone of NVIDIA/open-gpu-kernel-modules?")
day = git("log", "-1", "--format=%cs", newest).strip()
new = TARGET.with_suffix(".new")
new.write_text(open_modules.tsv(listed, releases, f"tags to {newest} of {day}"), encoding="utf-8")
new.replace(TARGET)
sys.stdout.write(f"{TARGET}: {len(listed)} ids in {len(releases)} releases\n")
