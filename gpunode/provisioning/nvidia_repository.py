"""The plan of the role nvidia_repository."""

import hashlib
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from gpunode.provisioning import node_stack
from gpunode.provisioning.context import Context
from gpunode.provisioning.keys import KeyRefusedError, trusted_key
from gpunode.provisioning.manifest import AptChange, ManagedFile, Manifest, NodeQuestion
from gpunode.provisioning.repository import repository_offer
from gpunode.provisioning.role import Role, Settings, option
from gpunode.provisioning.rpm_repository import dnf_repository
from gpunode.provisioning.state import Look, NodeState

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
    files=(*APT_PATHS.values(), *DNF_PATHS.values(), RECORD),
    folders=(FOLDER,),
    more=Look(paths=(OLD_PIN,), contents=(*KEYS, RECORD)),
)


@dataclass(frozen=True)
class RepositoryConfig:
    """The repository of a node."""

    wanted: bool
    url: str
    files: dict[str, str]
    """Path to text; empty: absent."""
    key_path: str
    site_key: str
    """The site's key, armoured; empty: NVIDIA's, fetched and verified by the node."""
    fetch: dict[str, Any] | None
    old_lists: tuple[str, ...]
    old_packages: tuple[str, ...]
    problems: tuple[str, ...]


def offered(
    state: NodeState, settings: NvidiaRepositorySettings, context: Context, source: str | None
) -> RepositoryConfig:
    """Return NVIDIA's repository for a node with a driver from ``source`` (None: there is no stack)."""
    given = settings.model_dump()
    if settings.state == "auto" and _needed_by_others(context):
        given["state"] = "present"
    if state.dnf is not None:
        one = dnf_repository(
            state.facts,
            state.dnf.model_dump(mode="json"),
            source or "",
            {**given, "id": DNF_ID, "paths": DNF_PATHS},
        )
        key_path = DNF_PATHS["key"]
    else:
        apt = state.apt.model_dump(mode="json") if state.apt is not None else {"sources": [], "installed": {}}
        one = repository_offer(state.facts, apt, source or "", {**given, "paths": APT_PATHS})
        key_path = APT_PATHS["key"]
    return RepositoryConfig(
        wanted=one["wanted"],
        url=one["url"],
        files=one["files"],
        key_path=key_path,
        site_key=one["key_files"].get(key_path, ""),
        fetch=one["fetch"],
        old_lists=tuple(one["old_lists"]),
        old_packages=tuple(one.get("old_packages", ())),
        problems=tuple(one["problems"]),
    )


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
            question = NodeQuestion(kind="repository_key", body=body, private="@" in settings.proxy)
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
        packages=AptChange(state="absent", purge=offer.old_packages) if offer.old_packages else None,
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
