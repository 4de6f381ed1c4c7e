"""Sources of Debian's packages on this machine: the mirror and the proxy that its own apt uses."""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from urllib.parse import urlsplit

from gpunode.errors import UndeterminedError, UsageError

MIRROR_VARIABLE = "GPUNODE_LAB_MIRROR"
LIMIT_S = 60
"""For one answer of apt's tools, which read its lists."""
_NEEDS_MIRROR = f"set a Debian mirror with --mirror URL or {MIRROR_VARIABLE}=URL (security updates: URL-security)"


@dataclass(frozen=True)
class Mirror:
    """Two archives (URLs without a closing slash) and the proxies for them.

    ``proxies`` maps ``http`` and ``https`` to a proxy's URL, as apt writes it; a proxy may carry a password, so
    proxies are never printed.
    """

    archive: str
    security: str
    proxies: tuple[tuple[str, str], ...] = ()

    @property
    def proxies_for_nodes(self) -> tuple[tuple[str, str], ...]:
        """Return the proxies that a node can reach too, without those on this machine's loopback."""
        return tuple((scheme, url) for scheme, url in self.proxies if not _is_loopback(url))


def find_mirror(requested: str | None = None) -> Mirror:
    """Return the mirror given as argument, else the one in the environment, else the one this machine's apt uses.

    Raises UsageError for an invalid URL, UndeterminedError if this machine's apt has no Debian archive configured.
    """
    proxies = _proxies(_run(["apt-config", "dump"]))
    if named := requested or os.environ.get(MIRROR_VARIABLE):
        archive = _checked(named)
        return Mirror(archive, f"{archive}-security", proxies)
    targets = _run(["apt-get", "indextargets", "--format", "$(ORIGIN)|$(RELEASE)|$(COMPONENT)|$(REPO_URI)"])
    known, security = parse_targets(targets)
    if known is None:
        raise UndeterminedError(f"apt on this machine has no Debian archive: apt-get update, or {_NEEDS_MIRROR}")
    return Mirror(known, security or f"{known}-security", proxies)


def parse_targets(text: str) -> tuple[str | None, str | None]:
    """Parse archive and security archive from the lines ``origin|release|component|uri`` of apt's index targets."""
    archive = security = None
    for line in text.splitlines():
        origin, release, component, uri = [*line.split("|", 3), "", "", ""][:4]
        if origin != "Debian" or component != "main" or not uri.startswith(("http://", "https://")):
            continue
        if release.endswith("-security"):
            security = security or uri.rstrip("/")
        elif not release.endswith(("-backports", "-updates")):
            archive = archive or uri.rstrip("/")
    return archive, security


def parse_proxies(text: str) -> tuple[tuple[str, str], ...]:
    """Parse the proxies from the output of ``apt-config dump``."""
    proxies = {}
    for line in text.splitlines():
        key, _, rest = line.partition(" ")
        for scheme in ("http", "https"):
            if key.lower() == f"acquire::{scheme}::proxy":
                url = (shlex.split(rest.rstrip(";")) or [""])[0]
                if url and url != "DIRECT":
                    proxies[scheme] = url
    return tuple(sorted(proxies.items()))


def redacted(text: str) -> str:
    """Return the text without the user names and passwords in its URLs."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def _proxies(apt_config: str) -> tuple[tuple[str, str], ...]:
    """Return apt's proxies, completed from the environment, as apt itself does."""
    proxies = {scheme: url for scheme in ("http", "https") if (url := os.environ.get(f"{scheme}_proxy"))}
    return tuple(sorted((proxies | dict(parse_proxies(apt_config))).items()))


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or set(url) & set(" \t\n\"'[]"):
        raise UsageError(f"{url!r} is not the URL of a Debian mirror: {_NEEDS_MIRROR}")
    return url.rstrip("/")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _run(argv: list[str]) -> str:
    """Return the output of one of apt's tools; empty without apt. Raises UndeterminedError if it does not end."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=LIMIT_S, check=False, start_new_session=True
        )
    except FileNotFoundError:
        return ""
    except subprocess.TimeoutExpired:
        raise UndeterminedError(f"{argv[0]} did not answer within {LIMIT_S} s: is this machine overloaded?") from None
    return done.stdout if done.returncode == 0 else ""
