"""Package indexes as repositories publish them, from names and versions recorded of real ones."""

import gzip
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from evidence import index


def recorded(system: str) -> list[tuple[str, str]]:
    """Names with every version that was recorded of them in one repository."""
    return [
        (name, version.split()[0])
        for name, row in index(system)["packages"].items()
        for version in (*row.get("versions", ()), *row.get("versions_derived", ()))
    ]


def deb_repository(folder: Path, packages: Iterable[tuple[str, str]], name: str = "Packages.gz") -> Path:
    """A flat Debian repository."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(
        f"Package: {package}\nVersion: {version}\nArchitecture: amd64\nFilename: ./{package}_{version}.deb\n"
        "Description: recorded\n more lines\n"
        for package, version in packages
    )
    content = text.encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder


def rpm_repository(folder: Path, packages: Iterable[tuple[str, str]]) -> Path:
    """An RPM repository with repomd.xml and a compressed primary index."""
    (folder / "repodata").mkdir(parents=True, exist_ok=True)
    rows = "".join(_rpm(name, version) for name, version in packages)
    primary = gzip.compress(
        f'<?xml version="1.0" encoding="UTF-8"?>\n<metadata xmlns="http://linux.duke.edu/metadata/common">{rows}</metadata>'.encode()
    )
    digest = hashlib.sha256(primary).hexdigest()
    (folder / "repodata" / f"{digest}-primary.xml.gz").write_bytes(primary)
    (folder / "repodata" / "repomd.xml").write_text(
        '<?xml version="1.0" encoding="UTF-8"?>\n<repomd xmlns="http://linux.duke.edu/metadata/repo">'
        f'<data type="primary"><checksum type="sha256">{digest}</checksum>'
        f'<location href="repodata/{digest}-primary.xml.gz"/></data></repomd>\n',
        encoding="utf-8",
    )
    return folder


def _rpm(name: str, version: str) -> str:
    epoch, _, rest = version.rpartition(":")
    upstream, _, release = rest.partition("-")
    attributes = f"epoch={quoteattr(epoch or '0')} ver={quoteattr(upstream)} rel={quoteattr(release or '1')}"
    return f'<package type="rpm"><name>{escape(name)}</name><arch>noarch</arch><version {attributes}/></package>'


def moved_on(packages: Iterable[tuple[str, str]], old: str, new: str) -> list[tuple[str, str]]:
    """The same names with the versions of another release: what a repository looks like one release later."""
    return [(name, re.sub(rf"\b{re.escape(old)}\b", new, version)) for name, version in packages if old in version]
