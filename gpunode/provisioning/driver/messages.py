"""Messages of apt and dnf, and their remedies; and the refusal of a closure that no one release has."""

import re

from gpunode.provisioning.transaction import Preview
from gpunode.stack import Stack
from gpunode.text import listed, printable

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
"""Pattern of a message of apt, name of the refusal, and its remedy. The first that matches is used."""
OF_DNF = (
    (
        r"SHA1 is not considered secure|[Pp]olicy rejects|not bound",
        "repository-key-sha1",
        "the node's crypto policy rejects keys and signatures based on SHA1: set a newer key with "
        "nvidia_repository_key",
    ),
    (
        r"nothing provides dkms",
        "dkms-missing",
        "the modules are built by dkms, which is in EPEL: enable that repository on the node",
    ),
    (
        r"not signed as required|GPG|PGP|[Ss]ignature",
        "repository-unsigned",
        "signatures are always verified: sign the packages, or set their key with nvidia_repository_key",
    ),
    (
        r"Failed to download metadata|Cannot download|Curl error|[Cc]onnect|No more mirrors|did not end within",
        "repository-unreachable",
        "check the network, the proxy (nvidia_repository_proxy) or the mirror (nvidia_repository_url)",
    ),
    (r"[Nn]o space left|[Dd]isk space|needs .* on the .* filesystem", "disk-full", "free disk space"),
)
FOR_KERNELS = re.compile(r"linux-(modules|objects|signatures)-nvidia-")
"""Ubuntu's signed modules. They are removed with the driver and not part of its closure: they have the kernel's
version.
"""
_NAMED = re.compile(r"(would-remove|module-stream|package-lock|no-dnf):")
"""Refusals of the transaction, which have their name and remedy."""


def explained(manager: str, message: str) -> str:
    """Return an error of a package manager as one line with a name and the remedy."""
    if _NAMED.match(message):
        return printable(message)
    for pattern, name, remedy in OF_APT if manager == "apt" else OF_DNF:
        if re.search(pattern, message):
            return printable(f"{name}: {remedy}; {manager} reported: {message}")
    return printable(f"{manager}-refuses: {message}")


def lagging(answer: Preview, stack: Stack) -> str:
    """Return the refusal if a part of the closure is not available at the release of the rest."""
    word, lacking, common = answer.constraint, answer.lacking or {}, answer.common
    whose = f"the repositories of source {stack.source}"
    gone = sorted(name for name, versions in lacking.items() if not versions)
    unsigned = [name for name in gone if FOR_KERNELS.match(name)]
    if unsigned:
        return (
            f"package-gone: {whose} have no {unsigned[0]}, the signed modules for the installed kernel "
            f"{stack.module.kernel_flavour}: enable its components, choose another branch, or set "
            "nvidia_driver_source: nvidia, where DKMS builds them"
        )
    if gone:
        return f"package-gone: {listed(gone, 5)} is in none of {whose}: check the mirror, or enable its components"
    branch, leads_to = str(stack.driver.branch), sorted({release.split(".")[0] for release in common})
    if stack.source == "ubuntu" and len(leads_to) == 1 and leads_to != [branch]:
        return (
            f"closure-lags: branch {branch} is transitional in {whose}: its packages are available in {common[0]} "
            f"and install branch {leads_to[0]}: nvidia_driver_version: {leads_to[0]}"
        )
    near = f"; all packages are available in {', '.join(common[:3])}: nvidia_driver_version: " if common else ""
    near += common[0] if common else ""
    if not lacking:
        return f"closure-lags: {whose} have no one release {word} of the whole closure{near}"
    parts = [f"{name} is available in {', '.join(versions[:3])}" for name, versions in sorted(lacking.items())[:3]]
    return f"closure-lags: {word} is not available for the whole closure from {whose}: {'; '.join(parts)}{near}"
