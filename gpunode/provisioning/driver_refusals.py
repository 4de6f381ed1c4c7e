"""Refusals to change the driver on a node with apt, one line each: name, reason, remedy."""

import re
from collections.abc import Mapping
from typing import Any

from gpunode.catalog.origins import upstream_version
from gpunode.facts import NodeFacts
from gpunode.provisioning.driver_apt import DRIVERS_OWN, FOR_KERNELS, AptDriverInput, driver_input
from gpunode.stack import Stack
from gpunode.text import listed, printable


def driver_refusals(
    facts: NodeFacts | Mapping[str, Any],
    apt: Mapping[str, Any],
    stack: Stack | Mapping[str, Any],
    settings: Mapping[str, Any],
    answer: Mapping[str, Any],
) -> list[str]:
    """Return why the driver must not be changed, one line each: name, reason, and remedy.

    ``answer`` is the output of ``apt_preview.py``; empty if it was not called. ``settings`` also has ``switch``:
    conflicting packages may be removed.
    """
    case = driver_input(facts, apt, stack, settings, answer)
    switch = bool(case.settings["switch"])
    lines = []
    if answer.get("error"):
        lines.append(_of_apt(str(answer["error"])))
    if "lacking" in answer:
        lines.append(_lacking(case))
    if case.foreign and not case.own and not switch:
        origins = sorted({str(row.origin or "an unknown publisher") for row in case.installed.values()})
        lines.append(
            f"other-source: a driver from {' and '.join(origins)} is installed, {case.stack.source} is requested: set "
            "nvidia_driver_switch: true to replace it in one transaction, or leave nvidia_driver_source: auto"
        )
    foreign = sorted(
        package.name
        for package in case.node.packages or ()
        if package.held
        and package.name not in apt.get("own_holds", ())
        and package.name in case.own
        and upstream_version(package.version) != (case.target or "?")
    )
    if foreign and case.missing and not switch:
        lines.append(
            f"held-packages: {listed(foreign, 5)} {'is' if len(foreign) == 1 else 'are'} held at another version than "
            f"{case.target or case.stack.driver.constraint}, and not by gpunode: apt-mark unhold, or set "
            "nvidia_driver_switch: true"
        )
    known = {*case.installed, *case.going, *(name for name in answer.get("remove", ()) if DRIVERS_OWN.search(name))}
    others = sorted(set(answer.get("remove", ())) - known)
    if others:
        lines.append(
            f"would-remove: apt would remove {listed(others, 5)}, which does not belong to the driver: remove it first"
        )
    return list(map(printable, lines))


def _lacking(case: AptDriverInput) -> str:
    """Return the refusal if a part of the closure is not available at the release of the rest."""
    answer, word = case.answer, case.answer["constraint"]
    gone = [name for name, there in answer["lacking"].items() if not there]
    lagging = {name: there for name, there in answer["lacking"].items() if there}
    whose = f"the repositories of source {case.stack.source}"
    unsigned = [name for name in gone if FOR_KERNELS.match(name)]
    if unsigned:
        flavour = case.stack.module.kernel_flavour
        return (
            f"package-gone: {whose} have no {unsigned[0]}, the signed modules for the installed kernel {flavour}: "
            "enable its components, choose another branch, or set nvidia_driver_source: nvidia, where DKMS builds them"
        )
    if gone:
        names = listed(sorted(gone), 5)
        return f"package-gone: {names} is in none of {whose}: check the mirror, or enable its components"
    common = answer.get("common") or []
    branch, leads_to = str(case.stack.driver.branch), sorted({release.split(".")[0] for release in common})
    if case.stack.source == "ubuntu" and len(leads_to) == 1 and leads_to != [branch]:
        return (
            f"closure-lags: branch {branch} is transitional in {whose}: its packages are available in {common[0]} and "
            f"install branch {leads_to[0]}: nvidia_driver_version: {leads_to[0]}"
        )
    near = (
        f"; all packages are available in {', '.join(common[:3])}: nvidia_driver_version: {common[0]}" if common else ""
    )
    if not lagging:
        return f"closure-lags: {whose} have no one release {word} of the whole closure{near}"
    parts = [f"{name} is available in {', '.join(there[:3])}" for name, there in sorted(lagging.items())[:3]]
    return f"closure-lags: {word} is not available for the whole closure from {whose}: {'; '.join(parts)}{near}"


# Messages of apt on a repository, and their remedies. The first that matches is used.
OF_APT = (
    (
        r"SHA1 is not considered secure|[Pp]olicy rejected|signing key.*not bound",
        "repository-key-sha1",
        "Debian 13's verifier (sqv) rejects signatures based on SHA1: set a newer key with nvidia_repository_key",
    ),
    (
        r"EXPKEYSIG|KEYEXPIRED|[Ee]xpired",
        "repository-key-expired",
        "the key that signs the repository has expired: set the current one with nvidia_repository_key",
    ),
    (
        r"NOSPLIT|does the network require authentication|<(!DOCTYPE|html)",
        "repository-answers-html",
        "a proxy or a login page answers instead of the repository: check "
        "nvidia_repository_proxy and nvidia_repository_url",
    ),
    (
        r"unexpected size|Mirror sync in progress|Hash Sum mismatch",
        "repository-mid-sync",
        "the repository is being updated, its index and its signature do not match: run this again later, or set "
        "another mirror with nvidia_repository_url",
    ),
    (
        r"NO_PUBKEY|is not signed|BADSIG|no valid OpenPGP|Missing key|couldn't be verified|[Cc]learsigned",
        "repository-unsigned",
        "signatures are always verified: sign the repository, or set its key with nvidia_repository_key",
    ),
    (
        r"Could not (resolve|connect)|[Cc]onnection (refused|failed)|Unable to connect|Failed to fetch|timed? out",
        "repository-unreachable",
        "check the network, the proxy (nvidia_repository_proxy) or the mirror (nvidia_repository_url)",
    ),
    (
        r"Unable to parse package file|Malformed entry|Malformed stanza|Invalid record in the preferences file",
        "apt-refuses",
        "apt cannot read a file on the node: repair it, or delete it if gpunode manages it: the role writes it again",
    ),
    (r"did not end within", "repository-slow", "run this again, or set a nearer mirror with nvidia_repository_url"),
    (r"[Nn]o space left|enough free space", "disk-full", "free disk space, then run this again"),
)


def _of_apt(message: str) -> str:
    for pattern, name, remedy in OF_APT:
        if re.search(pattern, message):
            return f"{name}: {remedy}; apt reported: {message}"
    return f"apt-refuses: {message}"
