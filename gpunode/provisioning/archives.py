"""Archives of packages that a role adds to a node's sources, and existing or obsolete entries for them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from gpunode.provisioning.context import Context
from gpunode.provisioning.keys import KeyRefusedError, key_of_file, source_problem, trusted_key
from gpunode.provisioning.manifest import ManagedFile, NodeQuestion
from gpunode.provisioning.state import AptSource, NodeState
from gpunode.provisioning.templates import rendered

OLD_TOOLKIT = re.compile(
    r"nvidia\.github\.io/(nvidia-docker|nvidia-container-runtime)\b"
    r"|nvidia\.github\.io/libnvidia-container/(?!stable/(deb|rpm)\b)"
)
"""Repositories of nvidia-docker2 and its predecessors; their packages are in the toolkit's one repository now."""
QUESTION = "signing_key"


@dataclass(frozen=True, slots=True)
class Archive:
    """One archive that a role adds to the node's sources, for apt or dnf."""

    role: str
    purpose: str
    name: str
    """Name in those of its files."""
    uri: str
    key: str
    """A file on the controller, or an https address."""
    fingerprints: Sequence[str] = ()
    """The publisher's; none: the site's own key, which is trusted without a check."""
    suite: str = "/"
    components: str = ""
    signed_packages: bool = True
    """For dnf: the packages are signed; else the metadata is."""


@dataclass(frozen=True, slots=True)
class ArchiveFiles:
    """The files of an archive; incomplete as long as it has ``questions``."""

    files: tuple[ManagedFile, ...] = ()
    questions: Mapping[str, NodeQuestion] | None = None
    refusals: tuple[str, ...] = ()

    @property
    def texts(self) -> dict[str, str]:
        """Return path to text; empty: absent."""
        return {file.path: file.content or "" for file in self.files}


def archive_paths(name: str) -> tuple[str, str, str, str]:
    """Return the files of an archive: apt's entry and key, dnf's entry and key."""
    return (
        f"/etc/apt/sources.list.d/gpunode-{name}.sources",
        f"/etc/apt/keyrings/gpunode-{name}.asc",
        f"/etc/yum.repos.d/gpunode-{name}.repo",
        f"/etc/pki/rpm-gpg/RPM-GPG-KEY-gpunode-{name}",
    )


def archive_files(archive: Archive, state: NodeState, context: Context) -> ArchiveFiles:
    """Return the archive's entry and key as files, or the question for the key, or why the key is refused."""
    sources, apt_key, yum, rpm_key = archive_paths(archive.name)
    file, key = (yum, rpm_key) if state.apt is None else (sources, apt_key)
    text, found = _key(archive, key, state, context)
    if text is None:
        return found
    given = {"purpose": archive.purpose, "uri": archive.uri, "key": key}
    render = partial(rendered, archive.role, site=context.templates, **given)
    if state.apt is None:
        entry: str | None = render(
            name="repository.repo.j2",
            id=f"gpunode-{archive.role.replace('_', '-')}",
            signed_packages=archive.signed_packages,
            proxy="",
            exclude=(),
        )
    elif archive_file(state.apt.sources, archive.uri, file):
        # apt refuses one archive with two keys: a user's entry for it stays, and is the only one.
        entry = None
    else:
        entry = render(
            name="repository.sources.j2",
            suite=archive.suite,
            components=archive.components,
            architecture=state.apt.architecture,
        )
    return ArchiveFiles((ManagedFile(path=key, content=text), ManagedFile(path=file, content=entry)))


def _key(archive: Archive, file: str, state: NodeState, context: Context) -> tuple[str | None, ArchiveFiles]:
    """Return (the key's text, no files), or (None, the question or the refusal)."""
    try:
        if re.match(r"[a-z]+://", archive.key) is None:
            return key_of_file(archive.key, archive.fingerprints), ArchiveFiles()
        if problem := source_problem(archive.key):
            return None, ArchiveFiles(refusals=(f"key-refused: {problem}",))
        there = state.contents.get(file) or ""
        with suppress(KeyRefusedError):
            return trusted_key(there.encode(), archive.key, archive.fingerprints), ArchiveFiles()
        answer = context.answers.get(QUESTION)
        if answer is None:
            question = NodeQuestion(kind="signing_key", body={"url": archive.key})
            return None, ArchiveFiles(questions={QUESTION: question})
        if answer.get("error"):
            return None, ArchiveFiles(refusals=(f"key-unreachable: {answer['error']}",))
        return trusted_key(str(answer.get("text", "")).encode(), archive.key, archive.fingerprints), ArchiveFiles()
    except KeyRefusedError as err:
        return None, ArchiveFiles(refusals=(f"key-refused: {err}",))


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
