"""NVIDIA's CUDA repository on a node with dnf: its URL, its key, and what it replaces."""

import re
from collections.abc import Mapping
from typing import Any

from gpunode.catalog import load
from gpunode.catalog.origins import key_to_fetch
from gpunode.facts import NodeFacts
from gpunode.provisioning.documents import node_of
from gpunode.provisioning.repository import DOCA, FOLDERS, VENDOR, site_key
from gpunode.stack import picture_from_facts
from gpunode.variables import plain

HEAD = "# Managed by gpunode (role nvidia_repository): NVIDIA's CUDA repository.\n"
NVIDIAS = re.compile(r"^https?://developer\.download\.nvidia\.(com|cn)/compute/cuda/repos/")


def dnf_repository(
    facts: NodeFacts | Mapping[str, Any], dnf: Mapping[str, Any], source: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return NVIDIA's repository for a node with dnf.

    ``settings``: ``state`` (``auto``: present where the source is nvidia), ``url``, ``key`` (a file on the controller),
    ``proxy``, ``id``, ``paths``: ``repository`` and ``key``. Returned: ``wanted``, ``url``, ``files`` and ``key_files``
    (path to text), ``fetch`` (the input of ``repository_key.py``, None if the site sets the key), ``old_lists``,
    ``problems``.
    """
    node, given = node_of(facts), plain(settings)
    paths = given["paths"]
    problems: list[str] = []
    requested = given["state"] == "present" or (given["state"] == "auto" and source == "nvidia")
    offer: dict[str, Any] = {
        "wanted": requested,
        "url": "",
        "files": {},
        "key_files": {},
        "fetch": None,
        "old_lists": [],
        "problems": problems,
    }
    if not requested:
        return offer
    picture = picture_from_facts(node, load())
    row = load().systems.get(picture.os or "")
    origin = row.origins.get("nvidia") if row else None
    if origin is None or picture.arch is None:
        problems.append(f"no-repository: NVIDIA has no repository for {picture.os} on {picture.arch}")
        return offer
    base = str(given["url"] or VENDOR).rstrip("/")
    if not re.match(r"(https?|ftp)://[^\s]+$|file:/[^\s]+$", base):
        problems.append(f"nvidia_repository_url: {base} is not a valid URL: write http://HOST/PATH")
        return offer
    url = f"{base}/{origin.repository}/{FOLDERS[picture.arch]}/"
    offer["url"] = url
    key, problem = site_key(str(given["key"] or ""))
    problems += [problem] if problem else []
    if not key and not problem:
        offer["fetch"], problem = key_to_fetch(str(origin.repository), picture.arch, url, None)
        problems += [problem] if problem else []
        if offer["fetch"]["file"] is None:
            problems.append(
                f"repository-key-unknown: no key of {origin.repository} is recorded: set it with nvidia_repository_key"
            )
    lines = [
        f"[{given['id']}]",
        "name=NVIDIA's CUDA repository",
        f"baseurl={url}",
        "enabled=1",
        "gpgcheck=1",
        f"gpgkey=file://{paths['key']}",
        *([f"proxy={given['proxy']}"] if given["proxy"] else ()),
    ]
    known = [one for one in dnf["repositories"] if one["file"] != paths["repository"]]
    if any(DOCA.search(address) for one in known for address in one["urls"]):
        lines += ["# DOCA brings these tools itself.", "excludepkgs=mft mft-* kernel-mft*"]
    offer["files"] = {paths["repository"]: HEAD + "\n".join(lines) + "\n"}
    offer["key_files"] = {paths["key"]: key} if key else {}
    by_file: dict[str, list[bool]] = {}
    for one in known:
        same = [bool(NVIDIAS.match(address)) or address.rstrip("/") == url.rstrip("/") for address in one["urls"]]
        by_file.setdefault(one["file"], []).append(bool(same) and all(same))
    offer["old_lists"] = sorted(file for file, same in by_file.items() if all(same))
    text = "also configures NVIDIA's repository: remove it, gpunode has its own file for it"
    problems += [
        f"repository-twice: {file} {text}" for file, same in sorted(by_file.items()) if any(same) and not all(same)
    ]
    return offer
