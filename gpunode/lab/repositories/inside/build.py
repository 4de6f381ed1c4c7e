"""Build packages of the plan and the unsigned indices with the real tools; runs in the vendor's image.

Nothing here depends on a lab: keys, signatures and packages that contain a key are added later (``publish.py``).
"""

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import rpms  # type: ignore[import-not-found]
from pack import Tools, made, run  # type: ignore[import-not-found]

ROOT = Path("/srv/www")


BUILT = Path("/srv/built")
"""A folder with a file for each kind of repository that was built completely."""


def main(plan_file: str, kinds: set[str]) -> None:
    """Build the plan's packages and indices below ``ROOT``, of the repositories of these kinds."""
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        tools = Tools(Path(folder))
        for repository in plan.values():
            if repository["kind"] in kinds:
                list(pool.map(partial(_build, tools, repository), repository["packages"]))
                _index(repository)
    BUILT.mkdir(exist_ok=True)
    for kind in kinds:
        (BUILT / kind).touch()


def _build(tools: Tools, repository: dict[str, Any], package: dict[str, Any]) -> None:
    """Build a package at its path in the repository."""
    folder = ROOT / repository["path"]
    if package["suite"]:
        source = package["fields"].get("Source", package["name"])
        folder = folder / "pool" / package["suite"] / package["component"] / source[0] / source
    folder.mkdir(parents=True, exist_ok=True)
    if repository["kind"] == "rpm":
        rpms.build(tools, package, folder)
    else:
        tools.deb(package, folder)


def _index(repository: dict[str, Any]) -> None:
    """Write the repository's unsigned indices; an rpm repository's are written when its packages are signed."""
    where = ROOT / repository["path"]
    if repository["kind"] == "flat":
        (where / "Packages").write_bytes(run(["apt-ftparchive", "packages", "."], cwd=where))
    elif repository["kind"] == "suites":
        for suite in sorted({package["suite"] for package in repository["packages"]}):
            for component in repository["components"]:
                index = made(where / "dists" / suite / component / "binary-amd64/Packages")
                pool = f"pool/{suite}/{component}"
                (where / pool).mkdir(parents=True, exist_ok=True)
                index.write_bytes(run(["apt-ftparchive", "packages", pool], cwd=where))


if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
