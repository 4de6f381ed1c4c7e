"""Repositories of packages that roles add to a node's sources, for apt and dnf, and other entries for them."""

import re
from base64 import b64decode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gpunode.provisioning.context import Context
from gpunode.provisioning.keys import KeyRefusedError, key_of_file, trusted_key
from gpunode.provisioning.manifest import ManagedFile, NodeQuery
from gpunode.provisioning.state import AptSource, NodeState
from gpunode.provisioning.templates import rendered

OLD_TOOLKIT = re.compile(
    r"nvidia\.github\.io/(nvidia-docker|nvidia-container-runtime)\b"
    r"|nvidia\.github\.io/libnvidia-container/(?!stable/(deb|rpm)\b)"
)
"""Repositories of nvidia-docker2 and its predecessors; their packages are in the toolkit's one repository now."""
QUESTION = "signing_key"


@dataclass(frozen=True, slots=True)
class PackageRepository:
    """One repository that a role adds to the node's sources."""

    role: str
    purpose: str
    name: str
    """Name in those of its files."""
    uri: str
    key: str = ""
    """A file on the controller, or an address: with https unless the key is pinned."""
    fingerprints: Sequence[str] = ()
    """The publisher's. Without them and ``sha256`` it is the site's own key, which is trusted without a check."""
    sha256: str = ""
    """Of the key's file without its Version line, where no fingerprint was ever recorded."""
    keyring: str = ""
    """Address of a Debian package with the key, for a mirror that has packages alone."""
    variable: str = ""
    """Sets the site's own key; empty: that of the role."""
    suite: str = "/"
    components: str = ""
    section: str = ""
    """For dnf: its id; empty: that of the role."""
    signed_packages: bool = True
    """For dnf: the packages are signed; else the metadata is."""
    proxy: str = ""
    """For the key, and for dnf; apt's is a setting of its own."""
    exclude: Sequence[str] = ()
    """For dnf: shell patterns of packages that are not taken from it; apt has pins."""

    def entry(self, key: str, context: Context, *, apt: bool, architecture: str = "") -> str:
        """Return the repository's entry, as apt (deb822) or dnf reads it; ``key`` is the file of its key."""
        common = {"purpose": self.purpose, "uri": self.uri, "key": key, "site": context.templates}
        if apt:
            more = {"suite": self.suite, "components": self.components, "architecture": architecture}
            return rendered(self.role, "repository.sources.j2", **common, **more)
        return rendered(
            self.role,
            "repository.repo.j2",
            **common,
            id=self.section or f"gpunode-{self.role.replace('_', '-')}",
            signed_packages=self.signed_packages,
            proxy=self.proxy,
            exclude=self.exclude,
        )


@dataclass(frozen=True, slots=True)
class RepositoryFiles:
    """The files of an archive; incomplete as long as it has ``questions``."""

    files: tuple[ManagedFile, ...] = ()
    questions: Mapping[str, NodeQuery] | None = None
    refusals: tuple[str, ...] = ()

    @property
    def texts(self) -> dict[str, str]:
        """Return path to text; empty: absent."""
        return {file.path: file.content or "" for file in self.files}


def repository_paths(name: str) -> tuple[str, str, str, str]:
    """Return the files of an archive: apt's entry and key, dnf's entry and key."""
    return (
        f"/etc/apt/sources.list.d/gpunode-{name}.sources",
        f"/etc/apt/keyrings/gpunode-{name}.asc",
        f"/etc/yum.repos.d/gpunode-{name}.repo",
        f"/etc/pki/rpm-gpg/RPM-GPG-KEY-gpunode-{name}",
    )


def repository_files(archive: PackageRepository, state: NodeState, context: Context) -> RepositoryFiles:
    """Return the archive's entry and key as files, or the question for the key, or why the key is refused."""
    sources, apt_key, yum, rpm_key = repository_paths(archive.name)
    file, key = state.by_manager(apt=(sources, apt_key), dnf=(yum, rpm_key))
    text, missing = repository_key(archive, key, state, context)
    if text is None:
        return missing
    apt = state.apt
    # apt refuses one archive with two keys: a user's entry for it stays, and is the only one.
    user_entry = apt is not None and archive_file(apt.sources, archive.uri, file)
    machine = apt.architecture if apt else ""
    entry = None if user_entry else archive.entry(key, context, apt=apt is not None, architecture=machine)
    return RepositoryFiles((ManagedFile(path=key, content=text), ManagedFile(path=file, content=entry)))


def repository_key(
    archive: PackageRepository, file: str, state: NodeState, context: Context
) -> tuple[str | None, RepositoryFiles]:
    """Return (the text of the key in ``file``, no files), or (None, the question for it or why it is refused).

    The node only fetches what the address has. A pinned key that is unchanged on the node is not fetched again.
    """
    pins, variable = (archive.fingerprints, archive.sha256), archive.variable or f"{archive.role}_key"
    if not re.match(r"[a-z]+:/", archive.key):
        try:
            return key_of_file(archive.key), RepositoryFiles()
        except KeyRefusedError as err:
            return _refused(f"{variable}: {err}")
    if not any(pins) and not archive.key.startswith("https://"):
        # Over http, anybody on the path could replace the key.
        return _refused(f"{variable}: {archive.key}: a key is fetched over https only, or a file on the controller")
    existing = state.contents.get(file) or ""
    with suppress(KeyRefusedError):
        if any(pins) and trusted_key(existing.encode(), file, *pins) == existing:
            return existing, RepositoryFiles()
    answer = context.answers.get(QUESTION)
    if answer is None:
        more = {"keyring": archive.keyring, "proxy": archive.proxy}
        body = {"url": archive.key, **{name: value for name, value in more.items() if value}}
        return None, RepositoryFiles(questions={QUESTION: NodeQuery(kind="signing_key", body=body)})
    if answer.get("error"):
        return _refused(f"repository-unreachable: {answer['error']}: check the network of the node, or set {variable}")
    try:
        data = b64decode(str(answer.get("key", "")))
        return trusted_key(data, str(answer.get("url", archive.key)), *pins), RepositoryFiles()
    except ValueError as err:
        return _refused(f"repository-key-differs: {err}: set the key with {variable}")


def _refused(why: str) -> tuple[None, RepositoryFiles]:
    return None, RepositoryFiles(refusals=(why,))


def archive_file(sources: Iterable[AptSource], uri: str, own_file: str) -> str | None:
    """Return the file in which a user already has the archive ``uri``; None if only ``own_file`` has it, or no file.

    apt refuses to work if one archive has two keys, so a second entry must not be written.
    """
    searched = _plain_uri(uri)
    for entry in sources:
        if entry.file != own_file and "deb" in entry.types and searched in map(_plain_uri, entry.uris):
            return entry.file
    return None


def old_toolkit_files(sources: Iterable[AptSource]) -> list[str]:
    """Return the source files that name only the repositories of nvidia-docker2; they conflict with ours."""
    uris: dict[str, list[str]] = {}
    for entry in sources:
        uris.setdefault(entry.file, []).extend(entry.uris)
    return sorted(file for file, all_of in uris.items() if all_of and all(map(OLD_TOOLKIT.search, all_of)))


def _plain_uri(uri: str) -> str:
    return re.sub(r"/(\$\(ARCH\)|amd64|arm64)?/*$", "", uri)
