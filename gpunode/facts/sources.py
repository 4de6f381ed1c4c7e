"""Origins of software: package sources, and files left by other installers."""

import re

from gpunode.facts.bundle_reader import BundleReader
from gpunode.facts.models.base import Fact, FactArea, fact

_ONE_LINE = re.compile(r"(#?)\s{0,9}deb\s+(?:\[[^\]]{0,2000}\]\s+)?(\S{1,2000})\s+(\S{1,200}).{0,2000}")
_DEB822_KEY = re.compile(r"([A-Za-z-]{1,40}):[ \t]*(.*)")
_INI_KEY = re.compile(r"([A-Za-z_-]{1,40})\s{0,9}=\s{0,9}(.*)")
_OFF = frozenset({"no", "0", "false", "off"})
_LOG = "/var/log/nvidia-installer.log"
_LOG_VERSION = re.compile(r"installer version:\s{0,9}([0-9.]{3,20})")
_CUDA_FOLDER = re.compile(r"/usr/local/cuda-([0-9.]{1,20})/.*")
_LINE_LIMIT = 4000


class Repository(Fact):
    """One package source that concerns the GPU stack or containers."""

    path: str
    uri: str
    """Without user and password."""
    suite: str | None
    enabled: bool


class ForeignInstall(Fact):
    """Files left by another installer than the package manager."""

    kind: str
    """``driver-runfile``, ``cuda-runfile``, ``nvidia-docker``."""
    path: str
    note: str | None = None
    """A version, if the file contains one."""


def read_repositories(bundle: BundleReader) -> tuple[Repository, ...]:
    """Return the sources in files that name the GPU stack or containers; apt's two formats, and DNF's."""
    repositories: list[Repository] = []
    for path in bundle.look("repository-files"):
        text = bundle.text(path) if bundle.has_file(path) else None
        if text is None:
            continue
        lines = [line[:_LINE_LIMIT] for line in text.splitlines()]
        if path.endswith(".repo"):
            repositories += _ini(path, lines)
        elif path.endswith(".sources"):
            repositories += _deb822(path, lines)
        else:
            repositories += [
                Repository(path=path, uri=match[2], suite=match[3], enabled=not match[1])
                for line in lines
                if (match := _ONE_LINE.fullmatch(line.strip()))
            ]
    return tuple(repositories)


def _deb822(path: str, lines: list[str]) -> list[Repository]:
    """Parse stanzas of ``Key: value``; a value may continue in indented lines."""
    repositories: list[Repository] = []
    stanza: dict[str, str] = {}
    key = ""
    for line in [*lines, ""]:
        if not line.strip():
            enabled = stanza.get("enabled", "yes").lower() not in _OFF
            suite = " ".join(stanza.get("suites", "").split()) or None
            repositories += [
                Repository(path=path, uri=uri, suite=suite, enabled=enabled) for uri in stanza.get("uris", "").split()
            ]
            stanza, key = {}, ""
        elif line[0] in " \t":
            stanza[key] = stanza.get(key, "") + " " + line
        elif not line.startswith("#") and (match := _DEB822_KEY.fullmatch(line)):
            key = match[1].lower()
            stanza[key] = match[2]
    return repositories


def _ini(path: str, lines: list[str]) -> list[Repository]:
    repositories: list[Repository] = []
    section: dict[str, str] = {}
    for line in [*lines, "["]:
        if line.startswith("["):
            enabled = section.get("enabled", "1").strip().lower() not in _OFF
            uri = section.get("baseurl") or section.get("mirrorlist") or section.get("metalink")
            if uri:
                repositories.append(Repository(path=path, uri=uri.strip(), suite=section.get("name"), enabled=enabled))
            section = {}
        elif match := _INI_KEY.fullmatch(line.strip()):
            section[match[1].lower()] = match[2]
    return repositories


def read_foreign_installs(bundle: BundleReader) -> tuple[ForeignInstall, ...]:
    """Return programs that only NVIDIA's ``.run`` files or nvidia-docker install, and the driver installer's log."""
    installs = []
    for path in bundle.look("signs"):
        name = path.rpartition("/")[2]
        cuda = _CUDA_FOLDER.fullmatch(path)
        if name in {"nvidia-uninstall", "nvidia-installer"}:
            installs.append(ForeignInstall(kind="driver-runfile", path=path))
        elif name.startswith("nvidia-docker"):
            installs.append(ForeignInstall(kind="nvidia-docker", path=path))
        elif cuda and "uninstall" in name:
            installs.append(ForeignInstall(kind="cuda-runfile", path=path, note=cuda[1]))
    log = bundle.text(_LOG)
    if log is not None:
        version = _LOG_VERSION.search(log)
        installs.append(ForeignInstall(kind="driver-runfile-log", path=_LOG, note=version[1] if version else None))
    return tuple(installs)


class SourcesFacts(FactArea):
    """Sources of packages."""

    repositories: tuple[Repository, ...] | None = fact(read_repositories)
    """Package sources that name NVIDIA, CUDA, containers or Docker."""
    foreign_installs: tuple[ForeignInstall, ...] | None = fact(read_foreign_installs)
