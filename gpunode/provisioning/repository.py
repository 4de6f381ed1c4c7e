"""NVIDIA's CUDA repository for apt: its URL, its key, its priority, and what it replaces."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from gpunode.catalog import load
from gpunode.catalog.origins import key_to_fetch
from gpunode.facts import NodeFacts
from gpunode.provisioning.documents import node_of
from gpunode.provisioning.keys import KeyRefusedError, key_of_file
from gpunode.stack import picture_from_facts
from gpunode.variables import plain

VENDOR = "https://developer.download.nvidia.com/compute/cuda/repos"
KEYRING = "cuda-keyring_1.1-1_all.deb"
FOLDERS = {"x86_64": "x86_64", "aarch64": "sbsa"}
RELEASE = "release o=NVIDIA, l=NVIDIA CUDA"
# Like Debian's backports: never preferred to a package that the distribution has too, but installed packages are
# upgraded. The driver's closure is bound by pins of its own, above 1000.
PRIORITY = 100
HEAD = "# Managed by gpunode (role nvidia_repository): "
NVIDIAS = re.compile(r"^https?://developer\.download\.nvidia\.(com|cn)/compute/(cuda|machine-learning)/repos/")
DOCA = re.compile(r"linux\.mellanox\.com/public/repo/doca|/doca/")


def repository_offer(
    facts: NodeFacts | Mapping[str, Any], apt: Mapping[str, Any], source: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return NVIDIA's repository for a node.

    ``source`` is the stack's. ``settings``: ``state`` (``auto``: present where the source is nvidia), ``url`` (empty:
    NVIDIA's own), ``key`` (a file on the controller, or empty), ``proxy``, ``paths``: ``sources``, ``preferences``,
    ``proxy``, ``key``. Returned: ``wanted``, ``url``, ``files`` (path to text; empty: absent), ``key_files``
    (path to armoured text), ``fetch`` (the input of ``repository_key.py``, None if the site sets the key),
    ``old_lists``, ``old_packages``, ``problems``.
    """
    node, given = node_of(facts), plain(settings)
    paths = given["paths"]
    state = str(given["state"])
    requested = state == "present" or (state == "auto" and source == "nvidia")
    offer: dict[str, Any] = {
        "wanted": requested,
        "url": "",
        "files": dict.fromkeys((paths["sources"], paths["preferences"], paths["proxy"]), ""),
        "key_files": {},
        "fetch": None,
        "old_lists": [],
        "old_packages": [],
        "problems": [],
    }
    if not requested:
        return offer
    picture = picture_from_facts(node, load())
    folder = _folder(picture.os)
    if folder is None or picture.arch is None:
        offer["problems"].append(f"no-repository: NVIDIA has no repository for {picture.os} on {picture.arch}")
        return offer
    base = str(given["url"] or VENDOR).rstrip("/")
    if not re.match(r"(https?|file|ftp)://[^\s]+$|file:/[^\s]+$", base):
        offer["problems"].append(f"nvidia_repository_url: {base} is not a valid URL: write http://HOST/PATH")
        return offer
    url = f"{base}/{folder}/{FOLDERS[picture.arch]}/"
    offer["url"] = url
    offer["files"] = {
        paths[
            "sources"
        ]: f"{HEAD}NVIDIA's CUDA repository.\nTypes: deb\nURIs: {url}\nSuites: /\nSigned-By: {paths['key']}\n",
        paths["preferences"]: _preferences(apt["sources"]),
        paths["proxy"]: _proxy(url, str(given["proxy"] or "")),
    }
    key, problem = site_key(str(given["key"] or ""))
    if problem:
        offer["problems"].append(problem)
    offer["key_files"] = {paths["key"]: key} if key else {}
    if not given["key"]:
        offer["fetch"], problem = key_to_fetch(folder, picture.arch, url, KEYRING)
        offer["problems"] += [problem] if problem else []
    offer["old_lists"], problems = _old_lists(apt["sources"], url, paths["sources"])
    offer["problems"] += problems
    offer["files"] |= dict.fromkeys(offer["old_lists"], "")
    offer["old_packages"] = [name for name in ("cuda-keyring",) if name in apt["installed"]]
    return offer


def _folder(system: str | None) -> str | None:
    row = load().systems.get(system or "")
    origin = row.origins.get("nvidia") if row else None
    return str(origin.repository) if origin else None


def _preferences(sources: list[dict[str, Any]]) -> str:
    text = f"{HEAD}the distribution's own packages come first.\nPackage: *\nPin: {RELEASE}\nPin-Priority: {PRIORITY}\n"
    if any(DOCA.search(uri) for entry in sources for uri in entry["uris"]):
        text += (
            f"\n# DOCA brings these tools itself.\nPackage: mft mft-* kernel-mft*\nPin: {RELEASE}\nPin-Priority: -1\n"
        )
    return text


def _proxy(url: str, proxy: str) -> str:
    parts = urlsplit(url)
    if not proxy or parts.scheme not in ("http", "https"):
        return ""
    comment = HEAD.replace("#", "//", 1)
    return f'{comment}how the repository is reached.\nAcquire::{parts.scheme}::Proxy::{parts.hostname} "{proxy}";\n'


def site_key(path: str) -> tuple[str, str | None]:
    """Return (the armored key in a file on the controller, the error in it)."""
    try:
        return key_of_file(path) if path else "", None
    except KeyRefusedError as err:
        return "", f"nvidia_repository_key: {err}"


def _old_lists(sources: list[dict[str, Any]], url: str, own: str) -> tuple[list[str], list[str]]:
    """Return (files of sources that name only NVIDIA's repository, messages on others that name it among others)."""
    by_file: dict[str, list[bool]] = {}
    for entry in sources:
        if entry["file"] != own:
            same = [bool(NVIDIAS.match(uri)) or uri.rstrip("/") == url.rstrip("/") for uri in entry["uris"]]
            by_file.setdefault(entry["file"], []).extend(same)
    old = sorted(file for file, same in by_file.items() if all(same) and file != "/etc/apt/sources.list")
    shared = sorted(file for file, same in by_file.items() if any(same) and file not in old)
    text = "also configures NVIDIA's repository: remove those lines, gpunode has its own file for it"
    return old, [f"repository-twice: {file} {text}" for file in shared]
