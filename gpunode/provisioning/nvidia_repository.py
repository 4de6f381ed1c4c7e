"""The role nvidia_repository: NVIDIA's CUDA repository, its key, its priority, and what it replaces."""

import hashlib
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from gpunode.catalog import load
from gpunode.catalog.origins import key_to_fetch
from gpunode.provisioning import node_stack
from gpunode.provisioning.context import Context
from gpunode.provisioning.keys import KeyRefusedError, key_of_file, trusted_key
from gpunode.provisioning.manifest import ManagedFile, Manifest, NodeQuery
from gpunode.provisioning.repository import PackageRepository
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
FOLDER = "/var/lib/gpunode/nvidia_repository"
RECORD = f"{FOLDER}/key.sha256"
"""Digest of the key when it was written: an unchanged key is not fetched again."""
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
        "File on the controller with the key that signs the repository, armoured or not. Empty: NVIDIA's, verified by "
        "its fingerprint.",
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
    files=(*APT_PATHS.values(), *DNF_PATHS.values(), RECORD),
    folders=(FOLDER,),
    more=Look(paths=(OLD_PIN,), contents=(*KEYS, RECORD)),
)


@dataclass(frozen=True)
class RepositoryConfig:
    """The repository of a node."""

    wanted: bool
    url: str = ""
    files: dict[str, str] = field(default_factory=dict)
    """Path to text; empty: absent."""
    key_path: str = ""
    site_key: str = ""
    """The site's key, armoured; empty: NVIDIA's, fetched and verified by the node."""
    fetch: dict[str, Any] | None = None
    old_lists: tuple[str, ...] = ()
    old_packages: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def offered(
    state: NodeState, settings: NvidiaRepositorySettings, context: Context, source: str | None
) -> RepositoryConfig:
    """Return NVIDIA's repository for a node with a driver from ``source`` (None: there is no stack)."""
    if settings.state == "absent" or not (
        settings.state == "present" or source == "nvidia" or _needed_by_others(context)
    ):
        return RepositoryConfig(wanted=False)
    picture = picture_from_facts(state.facts, load())
    row = load().systems.get(picture.os or "")
    origin = row.origins.get("nvidia") if row else None
    if origin is None or picture.arch is None:
        problem = f"no-repository: NVIDIA has no repository for {picture.os} on {picture.arch}"
        return RepositoryConfig(wanted=True, problems=(problem,))
    base = (settings.url or VENDOR).rstrip("/")
    if not re.match(r"(https?|ftp)://[^\s]+$|file:/[^\s]+$", base):
        problem = f"nvidia_repository_url: {base} is not a valid URL: write http://HOST/PATH"
        return RepositoryConfig(wanted=True, problems=(problem,))
    folder, apt = str(origin.repository), state.dnf is None
    url = f"{base}/{folder}/{FOLDERS[picture.arch]}/"
    paths = APT_PATHS if apt else DNF_PATHS
    try:
        key, problems = key_of_file(settings.key) if settings.key else "", list[str]()
    except KeyRefusedError as err:
        key, problems = "", [f"nvidia_repository_key: {err}"]
    fetch = None
    if not settings.key:
        fetch, why_not = key_to_fetch(folder, picture.arch, url, KEYRING if apt else None)
        problems += [why_not] if why_not else []
        if not apt and fetch["file"] is None:
            problems.append(
                f"repository-key-unknown: no key of {folder} is recorded: set it with nvidia_repository_key"
            )
    entries = list(_entries(state, paths))
    old, shared = _other_entries(entries, url)
    problems += [
        f"repository-twice: {file} also configures NVIDIA's repository: remove it, gpunode has its own file for it"
        for file in shared
    ]
    doca = any(DOCA.search(one) for _, urls in entries for one in urls)
    return RepositoryConfig(
        wanted=True,
        url=url,
        files=_texts(url, settings.proxy, context, paths, doca=doca),
        key_path=paths["key"],
        site_key=key,
        fetch=fetch,
        old_lists=tuple(old),
        old_packages=("cuda-keyring",) if apt and "cuda-keyring" in state.installed else (),
        problems=tuple(problems),
    )


def _entries(state: NodeState, paths: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield file and URLs of each entry of the node's sources in other files than the role's."""
    found = [(one.file, list(one.uris)) for one in state.apt.sources] if state.apt is not None else []
    found += [(one.file, list(one.urls)) for one in state.dnf.repositories] if state.dnf is not None else []
    yield from ((file, urls) for file, urls in found if file not in paths.values())


def _other_entries(entries: Iterable[tuple[str, list[str]]], url: str) -> tuple[list[str], list[str]]:
    """Return (files that name only NVIDIA's repository, files that name it among others)."""
    by_file: dict[str, list[bool]] = {}
    for file, urls in entries:
        same = [bool(NVIDIAS.match(one)) or one.rstrip("/") == url.rstrip("/") for one in urls]
        by_file.setdefault(file, []).extend(same or [False])
    old = sorted(file for file, same in by_file.items() if all(same) and file != "/etc/apt/sources.list")
    return old, sorted(file for file, same in by_file.items() if any(same) and file not in old)


def _texts(url: str, proxy: str, context: Context, paths: Mapping[str, str], *, doca: bool) -> dict[str, str]:
    """Return the role's files but the key, path to text; empty: absent."""
    text, parts, exclude = ROLE.texts(context), urlsplit(url), DOCAS if doca else ()
    repository = PackageRepository(
        role=ROLE.name,
        purpose="NVIDIA's CUDA repository",
        name="nvidia-cuda",
        uri=url,
        section=DNF_ID,
        proxy=proxy,
        exclude=exclude,
    )
    if paths is DNF_PATHS:
        return {paths["repository"]: repository.entry(paths["key"], context, apt=False)}
    reached = proxy and parts.scheme in ("http", "https")
    return {
        paths["sources"]: repository.entry(paths["key"], context, apt=True),
        paths["preferences"]: text(
            "preferences.pref.j2", release=RELEASE, priority=PRIORITY, exclude=DOCAS if doca else ()
        ),
        paths["proxy"]: text("proxy.conf.j2", scheme=parts.scheme, host=parts.hostname, proxy=proxy) if reached else "",
    }


@ROLE.present
def present(state: NodeState, settings: NvidiaRepositorySettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    if settings.state == "auto" and context.settings_of("nvidia_driver")["state"] == "absent":
        return Manifest(role=ROLE.name)
    found = node_stack.of_context(state.facts, context)
    # The other roles refuse a node without a stack; the repository alone can still be set up.
    if found.problems and settings.state != "present":
        return Manifest(role=ROLE.name, refusals=found.problems)
    offer = offered(state, settings, context, found.stack.source if found.stack else None)
    if not offer.wanted:
        return ROLE.gone(state, settings, context)
    if offer.problems:
        return Manifest(role=ROLE.name, refusals=offer.problems)
    key = offer.site_key or _whole_key(state, offer)
    if not key:
        answer = context.answers.get("key")
        if answer is None:
            body = {"proxy": settings.proxy, **(offer.fetch or {})}
            question = NodeQuery(kind="repository_key", body=body)
            return Manifest(role=ROLE.name, questions={"key": question})
        if "error" in answer:
            word = "repository-key-differs" if answer.get("differs") else "repository-unreachable"
            return Manifest(
                role=ROLE.name, refusals=(f"{word}: {answer['error']}: set the key with nvidia_repository_key",)
            )
        try:
            key = trusted_key(b64decode(str(answer.get("key", ""))), offer.url, _pinned(offer))
        except ValueError as err:
            return Manifest(role=ROLE.name, refusals=(f"repository-key-differs: {err}",))
    return Manifest(
        role=ROLE.name,
        files=tuple(_files(state, offer, key, settings.proxy)),
        packages=Transaction(manager="apt", state="absent", remove=offer.old_packages) if offer.old_packages else None,
    )


def _needed_by_others(context: Context) -> bool:
    """Return whether another role installs packages from it, also with a driver of the distribution."""
    toolkit, dcgm = context.settings_of("nvidia_container_toolkit"), context.settings_of("dcgm")
    return bool(dcgm["source"] == "nvidia" or toolkit["repository"] == "cuda")


def _pinned(offer: RepositoryConfig) -> tuple[str, ...]:
    """Return the fingerprint of NVIDIA's key; none where the node verifies the checksum of its file."""
    fingerprint = (offer.fetch or {}).get("fingerprint")
    return (str(fingerprint),) if fingerprint else ()


def _whole_key(state: NodeState, offer: RepositoryConfig) -> str:
    """Return the key on the node if it is unchanged since it was written; empty: it must be fetched."""
    text, record = state.contents.get(offer.key_path), state.contents.get(RECORD)
    if text is None or record is None or hashlib.sha256(text.encode()).hexdigest() != record.strip():
        return ""
    try:
        return trusted_key(text.encode(), offer.key_path, _pinned(offer))
    except KeyRefusedError:
        return ""


def _files(state: NodeState, offer: RepositoryConfig, key: str, proxy: str) -> Iterator[ManagedFile]:
    # Two files that name the repository with different keys stop apt: the old ones are removed first.
    yield from (ManagedFile(path=path, content=None) for path in offer.old_lists)
    if state.apt is not None:
        yield ManagedFile(path=OLD_PIN, content=None)
        for path, rest in sorted(state.apt.old_keys.items()):
            yield ManagedFile(path=path, content=rest or None, encoding="base64")
    yield ManagedFile(path=offer.key_path, content=key)
    yield ManagedFile(path=RECORD, content=hashlib.sha256(key.encode()).hexdigest() + "\n")
    secret = "@" in proxy
    for path, text in offer.files.items():
        if path in ROLE.files:
            private = secret and path in (APT_PATHS["proxy"], DNF_PATHS["repository"])
            yield ManagedFile(path=path, content=text or None, mode="0600" if private else "0644", private=private)
