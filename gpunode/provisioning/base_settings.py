"""The variables of the role base, checked before a node is changed."""

from __future__ import annotations

import re
import zoneinfo
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from gpunode.provisioning.role import PackageSettings, Value, option

HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,62})(\.[A-Za-z0-9]([A-Za-z0-9-]{0,62}))*")
LOCALE = re.compile(r"[A-Za-z]{1,8}(_[A-Z]{2})?(\.[A-Za-z0-9-]{1,12})?(@[a-z]{1,12})?")
_SIZE = re.compile(r"[1-9][0-9]{0,6}[KMGT]")
_SPAN = re.compile(r"[1-9][0-9]{0,4}(day|week|month|year)")
_PROXY = re.compile(r"https?://[^\s\"'\\;]{1,400}")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----\n[A-Za-z0-9+/=\n]{100,20000}-----END CERTIFICATE-----")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PLAIN = re.compile(r"[^\x00-\x1f\x7f]{0,1000}")
_OPTION = re.compile(r"[a-z][a-z0-9_]{0,80}")
Certificates = Annotated[dict[str, str], Field(max_length=50)]


class BaseSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["keep", "present", "absent"] = option(
        "keep",
        "V(keep): nothing is changed. V(present): what is set below. V(absent): what the role deployed is removed; "
        "host name, time zone, locale and chrony stay.",
    )
    hostname: str = option("", "Host name of the node, such as its C(inventory_hostname). Empty: not changed.")
    address: str = option(
        "",
        "Address of the node that its name leads to in C(/etc/hosts), in place of 127.0.1.1: the one that other nodes "
        "reach. Empty: not changed.",
    )
    hosts: Annotated[dict[str, str], Field(max_length=10_000)] = option(
        {}, "Further lines of C(/etc/hosts): name to address."
    )
    ntp_servers: Annotated[tuple[str, ...], Field(max_length=32)] = option(
        (),
        "Time servers of the site for chrony, in place of the distribution's; V(pool NAME) for a pool. Empty: not "
        "changed.",
    )
    ntp_wait_s: Annotated[int, Field(ge=0, le=600)] = option(
        60,
        "How long to wait, in seconds, until the clock is within 0.1 s of the servers; then the run fails. V(0): no.",
    )
    dns_servers: Annotated[tuple[str, ...], Field(max_length=8)] = option(
        (), "Addresses of name servers, for systemd-resolved, NetworkManager, or C(/etc/resolv.conf)."
    )
    dns_search: Annotated[tuple[str, ...], Field(max_length=16)] = option(
        (), "Domains in which short names are looked up."
    )
    proxy_http: str = option("", "Proxy for http, in apt or dnf, logins and services. Empty: none.", no_log=True)
    proxy_https: str = option("", "Proxy for https. Empty: that for http.", no_log=True)
    no_proxy: tuple[str, ...] = option(
        ("localhost", "127.0.0.1", "::1"), "Hosts, domains and networks that are reached without the proxy."
    )
    ca_certificates: Certificates = option(
        {},
        "Certificates of the site's authorities, name to text (PEM) or to a file on the controller; trusted by the "
        "whole node.",
    )
    timezone: str = option("", "Time zone, such as Etc/UTC or Europe/Berlin. Empty: not changed.")
    locale: str = option("", "Locale of the system, such as C.UTF-8 or en_US.UTF-8. Empty: not changed.")
    journal_max: str = option(
        "", "Maximum size of the journal on disk, such as 4G. Empty: not set here; O(accounts_journal_max) wins."
    )
    journal_keep_free: str = option("", "Space that the journal leaves free, such as 10G. Empty: journald's default.")
    journal_retention: str = option("", "Age at which entries are removed, such as 3month. Empty: none.")
    syslog_server: str = option("", "HOST or HOST:PORT that rsyslog forwards the log to. Empty: no forwarding.")
    syslog_protocol: Literal["tcp", "udp", "tls"] = option(
        "tcp", "Transport of forwarded messages: V(tcp), V(udp), or V(tls) (verified with the system's authorities)."
    )
    ldap_uris: Annotated[tuple[str, ...], Field(max_length=8)] = option(
        (), "LDAP servers for users and groups (SSSD), such as ldaps://ldap.example.com. Empty: not changed."
    )
    ldap_search_base: str = option("", "Where the directory's users and groups are, such as dc=example,dc=com.")
    ldap_bind_dn: str = option("", "Account that reads the directory. Empty: anonymous.")
    ldap_bind_password: str = option("", "Its password.", no_log=True)
    ldap_groups: tuple[str, ...] = option((), "Groups of the directory that may log in. Empty: all users.")
    ldap_home: str = option(
        "",
        "Home of the directory's users, such as /nfs/home/%u on a mount of O(storage_mounts). Empty: the directory's.",
    )
    ldap_shell: str = option("/bin/bash", "Shell of users for whom the directory has none.")
    ldap_ssh_keys: bool = option(
        True, "Let sshd accept the public keys that the directory has, beside those in C(authorized_keys)."
    )
    ldap_options: dict[str, Value] = option(
        {}, "Further settings of SSSD's domain, such as { ldap_schema: rfc2307bis }; they replace the role's."
    )
    revert_s: int = option(
        60,
        "Seconds within which a new login must confirm the change of sshd before the node restores the old; 0: never.",
    )

    @field_validator("hostname")
    @classmethod
    def _host(cls, value: str) -> str:
        if value and (HOST.fullmatch(value) is None or value.replace(".", "").isdigit()):
            raise ValueError(f"{value!r} is not a host name (letters, digits, hyphens and dots)")
        return value

    @field_validator("address")
    @classmethod
    def _own_address(cls, value: str) -> str:
        return real_address(value) if value else value

    @field_validator("hosts")
    @classmethod
    def _hosts(cls, value: dict[str, str]) -> dict[str, str]:
        for name, address in value.items():
            if HOST.fullmatch(name) is None:
                raise ValueError(f"{name!r} is not a host name")
            real_address(address)
        return value

    @field_validator("ntp_servers")
    @classmethod
    def _servers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for server in value:
            if not is_host(server.removeprefix("pool ")):
                raise ValueError(f"{server!r} is not a host name or address (pool NAME for a pool)")
        return value

    @field_validator("dns_servers")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            ip_address(address)
        return value

    @field_validator("dns_search")
    @classmethod
    def _domains(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for domain in value:
            if HOST.fullmatch(domain) is None:
                raise ValueError(f"{domain!r} is not a domain")
        return value

    @field_validator("proxy_http", "proxy_https")
    @classmethod
    def _proxy(cls, value: str) -> str:
        if value and _PROXY.fullmatch(value) is None:
            # The text may contain a password.
            raise ValueError("not the URL of a proxy (example: http://proxy.example.com:3128)")
        return value

    @field_validator("no_proxy", "ldap_groups")
    @classmethod
    def _words(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            if not word or re.search(r"[\s,;\"'\\$%#]", word):
                raise ValueError(f"{word!r} contains a blank or a special character")
        return value

    @field_validator("ca_certificates")
    @classmethod
    def _authorities(cls, value: dict[str, str]) -> dict[str, str]:
        return {name: _certificate(name, text) for name, text in value.items()}

    @field_validator("timezone")
    @classmethod
    def _zone(cls, value: str) -> str:
        if value and (known := _time_zones()) and value not in known:
            raise ValueError(f"{value!r} is not a time zone (examples: Etc/UTC, Europe/Berlin)")
        return value

    @field_validator("locale")
    @classmethod
    def _is_locale(cls, value: str) -> str:
        return like(LOCALE, value, "locale (examples: C.UTF-8, en_US.UTF-8)")

    @field_validator("journal_max", "journal_keep_free")
    @classmethod
    def _size(cls, value: str) -> str:
        return like(_SIZE, value, "size (examples: 500M, 4G)")

    @field_validator("journal_retention")
    @classmethod
    def _span(cls, value: str) -> str:
        return like(_SPAN, value, "time span (examples: 30day, 3month)")

    @field_validator("syslog_server")
    @classmethod
    def _log_server(cls, value: str) -> str:
        host, port = host_and_port(value)
        if value and not (is_host(host) and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{value!r} is not HOST or HOST:PORT")
        return value

    @field_validator("ldap_uris")
    @classmethod
    def _uris(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for uri in value:
            if not re.fullmatch(r"ldaps?://[A-Za-z0-9.\[\]:-]{1,300}/?", uri):
                raise ValueError(f"{uri!r} is not the URI of an LDAP server (example: ldaps://ldap.example.com)")
        return value

    @field_validator("ldap_search_base", "ldap_bind_dn", "ldap_bind_password", "ldap_home", "ldap_shell")
    @classmethod
    def _line(cls, value: str) -> str:
        if _PLAIN.fullmatch(value) is None:
            raise ValueError("more than one line of text")
        return value

    @field_validator("ldap_options")
    @classmethod
    def _domain_options(cls, value: dict[str, Value]) -> dict[str, Value]:
        for name, text in value.items():
            if _OPTION.fullmatch(name) is None or _PLAIN.fullmatch(str(text)) is None:
                raise ValueError(f"{name!r} is not a setting of SSSD with one line of text")
        return value

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.ldap_uris and not self.ldap_search_base:
            raise ValueError("base_ldap_uris needs base_ldap_search_base")
        if bool(self.ldap_bind_dn) != bool(self.ldap_bind_password):
            raise ValueError("base_ldap_bind_dn and base_ldap_bind_password belong together")
        if self.proxy_https and not self.proxy_http:
            raise ValueError("base_proxy_https needs base_proxy_http")
        return self


def real_address(text: str) -> str:
    """Return an address that other nodes can reach. Raise ValueError for a loopback address, and for other text."""
    address = ip_address(text)
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        raise ValueError(f"{text} is not an address that other nodes reach")
    return text


def is_host(text: str) -> bool:
    """Return whether a text is a host name or an address."""
    try:
        ip_address(text)
    except ValueError:
        return HOST.fullmatch(text) is not None
    return True


def host_and_port(text: str) -> tuple[str, str]:
    """Return host and port of a log server; without a port 514, which RFC 3164 and rsyslog's examples use."""
    host, colon, port = text.rpartition(":")
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, port.removeprefix(":") or "514"
    return (host, port) if colon and ":" not in host else (text, "514")


def like(pattern: re.Pattern[str], value: str, kind: str) -> str:
    """Return a value that is empty or matches the pattern as a whole. Raises ValueError: ``kind`` is what it is not."""
    if value and pattern.fullmatch(value) is None:
        raise ValueError(f"{value!r} is not a {kind}")
    return value


@cache
def _time_zones() -> set[str]:
    """Return the time zones of this machine; the search opens some 600 files."""
    return zoneinfo.available_timezones()


def _certificate(name: str, source: str) -> str:
    """Return the text of a certificate; a path is read on the controller. Raise ValueError."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not a name of letters, digits, - and _")
    text = source
    if source.startswith("/"):
        try:
            text = Path(source).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as err:
            raise ValueError(f"{name}: {source} cannot be read: {err}") from None
    if "PRIVATE KEY" in text:
        raise ValueError(f"{name} contains a private key: only the certificate belongs here")
    certificates = _CERTIFICATE.findall(text.replace("\r\n", "\n"))
    if len(certificates) != 1:
        raise ValueError(f"{name} contains {len(certificates)} certificates in PEM, expected one")
    return f"{certificates[0]}\n"
