"""The role nvidia_repository: NVIDIA's CUDA repository, its key, its priority, and what it replaces."""

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from gpunode.catalog import load
from gpunode.catalog.origins import signing_key
from gpunode.provisioning import node_stack
from gpunode.provisioning.context import Context
from gpunode.provisioning.keys import without_keys
from gpunode.provisioning.manifest import ManagedFile, Manifest
from gpunode.provisioning.repository import PackageRepository, repository_key
from gpunode.provisioning.role import Role, Settings, option
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.transaction import Transaction
from gpunode.stack import picture_from_facts

APT_PATHS = {
    "sources": "/etc/apt/sources.list.d/gpunode-nvidia-cuda.sources",
    "preferences": "/etc/apt/preferences.d/gpunode-nvidia-cuda.pref",
    "proxy": "/etc/apt/apt.conf.d/52gpunode-nvidia-repository",
    "key": "/etc/apt/keyrings/gpunode-nvidia-cuda.asc",
}
DNF_PATHS = {
    "repository": "/etc/yum.repos.d/gpunode-nvidia-cuda.repo",
    "key": "/etc/pki/rpm-gpg/RPM-GPG-KEY-gpunode-nvidia-cuda",
}
DNF_ID = "gpunode-nvidia-cuda"
VENDOR = "https://developer.download.nvidia.com/compute/cuda/repos"
KEYRING = "cuda-keyring_1.1-1_all.deb"
FOLDERS = {"x86_64": "x86_64", "aarch64": "sbsa"}
RELEASE = "release o=NVIDIA, l=NVIDIA CUDA"
# Like Debian's backports: never preferred to a package that the distribution has too, but installed packages are
# upgraded. The driver's closure is bound by pins of its own, above 1000.
PRIORITY = 100
NVIDIAS = re.compile(r"^https?://developer\.download\.nvidia\.(com|cn)/compute/(cuda|machine-learning)/repos/")
DOCA = re.compile(r"linux\.mellanox\.com/public/repo/doca|/doca/")
DOCAS = ("mft", "mft-*", "kernel-mft*")
"""Tools that DOCA brings itself."""
OLD_PIN = "/etc/apt/preferences.d/cuda-repository-pin-600"
OLD_KEYS = (
    "AE09FE4BBD223A84B2CCFCE3F60F4B3D7FA2AF80",
    "EB693B3035CD5710E231E123A4B469963BF863CC",
    "02182E60104FCDC26EAE1B8597A5D4CB8793F200",
)
"""Keys of NVIDIA that older instructions let apt trust for every repository."""
KEYS = (APT_PATHS["key"], DNF_PATHS["key"])


class NvidiaRepositorySettings(Settings):
    """Variables of the role."""

    state: Literal["auto", "present", "absent"] = option(
        "auto", "V(auto): configured if the driver comes from it. V(present): in any case. V(absent): removed."
    )
    url: str = option(
        "",
        "Directory above the directories of the systems (…/debian12/x86_64): a mirror for sites without internet. "
        "Empty: NVIDIA's own.",
    )
    key: str = option(
        "",
        "Key that signs the repository, armoured or not: a file on the controller, or an https URL that the node can "
        "reach. Empty: NVIDIA's, verified by its fingerprint.",
    )
    proxy: str = option("", "Proxy for this repository only. Empty: apt's own settings.", no_log=True)


ROLE = Role(
    name="nvidia_repository",
    title="Configure NVIDIA's CUDA repository",
    about=("Writes the repository's file, key, priority and proxy, and removes what older instructions left of it.",),
    settings=NvidiaRepositorySettings,
    for_gpus=True,
    for_images=True,
    reads=("packages",),
    files=(*APT_PATHS.values(), *DNF_PATHS.values()),
    more=Look(paths=(OLD_PIN,), contents=KEYS),
)


@dataclass(frozen=True)
class RepositoryConfig:
    """The repository of a node."""

    wanted: bool
    archive: PackageRepository | None = None
    key_path: str = ""
    files: dict[str, str] = field(default_factory=dict)
    """Path to text; empty: absent."""
    old_lists: tuple[str, ...] = ()
    old_packages: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def offered(
    state: NodeState, settings: NvidiaRepositorySettings, context: Context, source: str | None
) -> RepositoryConfig:
    """Return NVIDIA's repository for a node with a driver from ``source`` (None: there is no stack)."""
    toolkit, dcgm = context.settings_of("nvidia_container_toolkit"), context.settings_of("dcgm")
    # These install packages from it with a driver of the distribution, too.
    others = dcgm["source"] == "nvidia" or toolkit["repository"] == "cuda"
    requested = settings.state == "present" or source == "nvidia" or others
    if settings.state == "absent" or not requested:
        return RepositoryConfig(wanted=False)
    picture = picture_from_facts(state.facts, load())
    system = load().systems.get(picture.os or "")
    origin = system.origins.get("nvidia") if system else None
    if origin is None or picture.arch is None:
        problem = f"no-repository: NVIDIA has no repository for {picture.os} on {picture.arch}"
        return RepositoryConfig(wanted=True, problems=(problem,))
    base = (settings.url or VENDOR).rstrip("/")
    if not re.match(r"(https?|ftp)://[^\s]+$|file:/[^\s]+$", base):
        problem = f"nvidia_repository_url: {base} is not a valid URL: write http://HOST/PATH"
        return RepositoryConfig(wanted=True, problems=(problem,))
    folder, paths = str(origin.repository), APT_PATHS if state.dnf is None else DNF_PATHS
    url, row = f"{base}/{folder}/{FOLDERS[picture.arch]}/", None if settings.key else signing_key(folder)
    entries = list(_entries(state, paths))
    old, shared = _other_entries(entries, url)
    twice = "also configures NVIDIA's repository: remove it, gpunode has its own file for it"
    problems = [f"repository-twice: {file} {twice}" for file in shared]
    if row is None and not settings.key:
        problems.append(
            f"repository-key-unknown: the key from {url} cannot be trusted: no fingerprint or checksum of it is "
            "recorded: set the key with nvidia_repository_key"
        )
    archive = PackageRepository(
        role=ROLE.name,
        purpose="NVIDIA's CUDA repository",
        name="nvidia-cuda",
        uri=url,
        key=url + row.file if row else settings.key,
        fingerprints=(row.fingerprint,) if row and row.fingerprint else (),
        sha256=(row.sha256_without_version or "") if row else "",
        keyring=url + KEYRING if row and paths is APT_PATHS else "",
        section=DNF_ID,
        proxy=settings.proxy,
        exclude=DOCAS if any(DOCA.search(url) for _, urls in entries for url in urls) else (),
    )
    return RepositoryConfig(
        wanted=True,
        archive=archive,
        key_path=paths["key"],
        files=_texts(archive, context, paths),
        old_lists=tuple(old),
        old_packages=("cuda-keyring",) if paths is APT_PATHS and "cuda-keyring" in state.installed else (),
        problems=tuple(problems),
    )


def _entries(state: NodeState, paths: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield file and URLs of each entry of the node's sources in other files than the role's."""
    entries = [(source.file, list(source.uris)) for source in state.apt.sources] if state.apt is not None else []
    entries += [(source.file, list(source.urls)) for source in state.dnf.repositories] if state.dnf is not None else []
    yield from ((file, urls) for file, urls in entries if file not in paths.values())


def _other_entries(entries: Iterable[tuple[str, list[str]]], url: str) -> tuple[list[str], list[str]]:
    """Return (files that name only NVIDIA's repository, files that name it among others)."""
    by_file: dict[str, list[bool]] = {}
    for file, urls in entries:
        same = [bool(NVIDIAS.match(address)) or address.rstrip("/") == url.rstrip("/") for address in urls]
        by_file.setdefault(file, []).extend(same or [False])
    old = sorted(file for file, same in by_file.items() if all(same) and file != "/etc/apt/sources.list")
    return old, sorted(file for file, same in by_file.items() if any(same) and file not in old)


def _texts(archive: PackageRepository, context: Context, paths: Mapping[str, str]) -> dict[str, str]:
    """Return the role's files but the key, path to text; empty: absent."""
    text, parts, proxy = ROLE.texts(context), urlsplit(archive.uri), archive.proxy
    if paths is DNF_PATHS:
        return {paths["repository"]: archive.entry(paths["key"], context, apt=False)}
    reached = proxy and parts.scheme in ("http", "https")
    return {
        paths["sources"]: archive.entry(paths["key"], context, apt=True),
        paths["preferences"]: text("preferences.pref.j2", release=RELEASE, priority=PRIORITY, exclude=archive.exclude),
        paths["proxy"]: text("proxy.conf.j2", scheme=parts.scheme, host=parts.hostname, proxy=proxy) if reached else "",
    }


@ROLE.present
def present(state: NodeState, settings: NvidiaRepositorySettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    if settings.state == "auto" and context.settings_of("nvidia_driver")["state"] == "absent":
        return Manifest(role=ROLE.name)
    resolved = node_stack.of_context(state.facts, context)
    # The other roles refuse a node without a stack; the repository alone can still be set up.
    if resolved.problems and settings.state != "present":
        return Manifest(role=ROLE.name, refusals=resolved.problems)
    offer = offered(state, settings, context, resolved.stack.source if resolved.stack else None)
    if not offer.wanted:
        return ROLE.gone(state, settings, context)
    if offer.archive is None or offer.problems:
        return Manifest(role=ROLE.name, refusals=offer.problems)
    key, missing = repository_key(offer.archive, offer.key_path, state, context)
    if key is None:
        return Manifest(role=ROLE.name, questions=dict(missing.questions or {}), refusals=missing.refusals)
    return Manifest(
        role=ROLE.name,
        files=tuple(_files(state, offer, key, settings.proxy)),
        packages=Transaction(manager="apt", state="absent", remove=offer.old_packages) if offer.old_packages else None,
    )


def _files(state: NodeState, offer: RepositoryConfig, key: str, proxy: str) -> Iterator[ManagedFile]:
    # Two files that name the repository with different keys stop apt: the old ones are removed first.
    yield from (ManagedFile(path=path, content=None) for path in offer.old_lists)
    if state.apt is not None:
        yield ManagedFile(path=OLD_PIN, content=None)
        for path, text in sorted(state.apt.old_keys.items()):
            with suppress(ValueError, IndexError):
                rest = without_keys(data := b64decode(text), OLD_KEYS)
                if rest != data:
                    yield ManagedFile(path=path, content=b64encode(rest).decode() or None, encoding="base64")
    yield ManagedFile(path=offer.key_path, content=key)
    for path, text in offer.files.items():
        private = "@" in proxy and path in (APT_PATHS["proxy"], DNF_PATHS["repository"])
        yield ManagedFile(path=path, content=text or None, mode="0600" if private else "0644", private=private)
