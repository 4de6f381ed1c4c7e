"""Texts of the files that the role base deploys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpunode.provisioning.base_settings import BaseSettings
from gpunode.provisioning.role import Value
from gpunode.provisioning.templates import MUTED, around, completed, muted, unmuted, with_section

NAME = "gpunode (role base)"
BEGIN, END = f"# BEGIN {NAME}", f"# END {NAME}"
BUNDLES = {"apt": "/etc/ssl/certs/ca-certificates.crt", "dnf": "/etc/pki/tls/certs/ca-bundle.crt"}
"""All trusted authorities, as ca-certificates of Debian and of the RHEL family write them."""
TIME_SOURCES = ("pool", "server", "peer")
RESOLVER = ("nameserver", "search", "domain")


def original(path: str, text: str) -> str:
    """Return a shared file without the role's section and with the lines that it replaced. Raises UsageError."""
    return unmuted(around(path, text, BEGIN, END)) if MUTED in text or BEGIN in text else text


def hosts_text(text: str, host: str, rows: Mapping[str, str]) -> str:
    """Return ``/etc/hosts`` in which the names have their addresses; ``text`` is the original.

    A loopback line that names the node keeps its other names.
    """
    short = host.partition(".")[0]
    kept = []

    def is_own(word: str) -> bool:
        return word.partition(".")[0] == short

    def is_ours(line: str) -> bool:
        words = line.partition("#")[0].split()
        loops = len(words) > 1 and (words[0].startswith("127.") or words[0] == "::1") and any(map(is_own, words[1:]))
        others = [word for word in words[1:] if not is_own(word)]
        if loops and others:
            kept.append(" ".join([words[0], *others]))
        return loops

    quiet = muted(text, is_ours) if host in rows else text
    lines = [f"{address} {' '.join(dict.fromkeys((name, name.partition('.')[0])))}" for name, address in rows.items()]
    return with_section(quiet, BEGIN, [*kept, *lines], END)


def chrony_text(text: str, servers: Sequence[str]) -> str:
    """Return chrony's configuration with the site's servers in place of the others."""
    quiet = muted(text, lambda line: line.split()[:1] != [] and line.split()[0].lower() in TIME_SOURCES)
    lines = [f"{server if server.startswith('pool ') else f'server {server}'} iburst" for server in servers]
    return with_section(quiet, BEGIN, lines, END)


def resolver_text(text: str, settings: BaseSettings) -> str:
    """Return ``/etc/resolv.conf`` where no program owns it."""
    quiet = muted(text, lambda line: line.split()[:1] != [] and line.split()[0] in RESOLVER)
    search = [f"search {' '.join(settings.dns_search)}"] if settings.dns_search else []
    # Nothing of the old resolver stays if only the domains are set.
    servers = [f"nameserver {server}" for server in settings.dns_servers]
    servers = servers or [line for line in text.split("\n") if line.split()[:1] == ["nameserver"]]
    return with_section(quiet, BEGIN, [*search, *servers], END)


def environment_rows(settings: BaseSettings, manager: str) -> Iterator[tuple[str, str]]:
    """Yield variables of logins and services: the proxy in both spellings, and the authorities for Python."""
    if settings.proxy_http:
        rows = {
            "http_proxy": settings.proxy_http,
            "https_proxy": settings.proxy_https or settings.proxy_http,
            "no_proxy": ",".join(settings.no_proxy),
        }
        yield from rows.items()
        yield from ((name.upper(), value) for name, value in rows.items())
    if settings.ca_certificates:
        # Their own list of authorities is not the system's.
        yield from ((name, BUNDLES[manager]) for name in ("REQUESTS_CA_BUNDLE", "PIP_CERT"))


def direct_hosts(settings: BaseSettings) -> list[str]:
    """Return the hosts that apt reaches without the proxy."""
    return [
        host for host in settings.no_proxy if not host.startswith((".", "*")) and "/" not in host and ":" not in host
    ]


def dnf_text(text: str, proxy: str) -> str:
    """Return dnf's configuration with the proxy in its section ``[main]``; without one if ``proxy`` is empty."""
    if not proxy:
        return text
    quiet = muted(text, lambda line: line.replace(" ", "").startswith("proxy="))
    if "[main]" not in quiet.split("\n"):
        quiet = f"{completed(quiet)}[main]\n"
    return with_section(quiet, BEGIN, [f"proxy={proxy}"], END, after="[main]")


def journal_rows(settings: BaseSettings, *, forwards: bool) -> dict[str, str]:
    """Return journald's settings; empty if nothing is set."""
    rows = {
        "Storage": "persistent" if settings.journal_max else "",
        "SystemMaxUse": settings.journal_max,
        "SystemKeepFree": settings.journal_keep_free,
        "MaxRetentionSec": settings.journal_retention,
        # Debian's rsyslog reads from journald's socket, that of the RHEL family from the journal.
        "ForwardToSyslog": "yes" if forwards else "",
    }
    return {name: value for name, value in rows.items() if value}


def sssd_rows(settings: BaseSettings, manager: str) -> dict[str, Value]:
    """Return SSSD's settings of the directory."""
    bundle = BUNDLES[manager]
    rows: dict[str, Value] = {
        "id_provider": "ldap",
        "auth_provider": "ldap",
        "ldap_uri": ", ".join(settings.ldap_uris),
        "ldap_search_base": settings.ldap_search_base,
        "ldap_tls_cacert": bundle,
        "ldap_tls_reqcert": "demand",
        "cache_credentials": True,
        "default_shell": settings.ldap_shell,
    }
    if any(uri.startswith("ldap://") for uri in settings.ldap_uris):
        rows["ldap_id_use_start_tls"] = True
    if settings.ldap_bind_dn:
        rows |= {"ldap_default_bind_dn": settings.ldap_bind_dn, "ldap_default_authtok": settings.ldap_bind_password}
    if settings.ldap_home:
        rows["override_homedir"] = settings.ldap_home
    if settings.ldap_groups:
        rows |= {"access_provider": "simple", "simple_allow_groups": ", ".join(settings.ldap_groups)}
    rows |= settings.ldap_options
    return {name: value for name, value in rows.items() if value is not None}
