"""The role base: what a bare server needs before a driver: name, time, names, proxy, authorities, logs, users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gpunode.errors import UndeterminedError
from gpunode.frozen import Frozen
from gpunode.provisioning import base_files as texts
from gpunode.provisioning.answers import docker_of
from gpunode.provisioning.base_settings import BaseSettings, host_and_port
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import (
    ManagedFile,
    ManagedFolder,
    Manifest,
    NodeCommand,
    RevertibleChange,
    UnitState,
    file_reasons,
)
from gpunode.provisioning.role import Role, Texts
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.templates import with_section
from gpunode.tuning.kernel import in_container

HOSTS, RESOLV, ENVIRONMENT, DNF = "/etc/hosts", "/etc/resolv.conf", "/etc/environment", "/etc/dnf/dnf.conf"
CHRONY = {"apt": "/etc/chrony/chrony.conf", "dnf": "/etc/chrony.conf"}
CHRONY_UNIT = {"apt": "chrony.service", "dnf": "chronyd.service"}
LOCALE_GEN = "/etc/locale.gen"
SHARED = (HOSTS, RESOLV, ENVIRONMENT, DNF, *CHRONY.values())
"""Files of others with a section of the role. The list of locales keeps its section: the locale stays."""
LOCALE_FILES = ("/etc/locale.conf", "/etc/default/locale")
APT_PROXY = "/etc/apt/apt.conf.d/80gpunode-proxy"
SYSTEMD = "/etc/systemd/system.conf.d/gpunode-base.conf"
RESOLVED = "/etc/systemd/resolved.conf.d/gpunode.conf"
NETWORK_MANAGER = "/etc/NetworkManager/conf.d/90-gpunode-dns.conf"
JOURNAL = "/etc/systemd/journald.conf.d/gpunode-base.conf"
SYSLOG = "/etc/rsyslog.d/90-gpunode.conf"
CLOUD = "/etc/cloud/cloud.cfg.d/99-gpunode.cfg"
CLOUD_FOLDER = CLOUD.rpartition("/")[0]
SSSD = "/etc/sssd/sssd.conf"
SSHD = "/etc/ssh/sshd_config.d/50-gpunode-sssd.conf"
NSSWITCH = "/etc/nsswitch.conf"
WAITING = "/var/lib/gpunode/guard/base/record.json"
"""A change of sshd that no login has confirmed yet."""
SSSD_UNIT, SYSLOG_UNIT, RESOLVED_UNIT = "sssd.service", "rsyslog.service", "systemd-resolved.service"
MANAGER_UNIT, JOURNAL_UNIT, DOCKER = "NetworkManager.service", "systemd-journald.service", "docker.service"
ANCHORS = {
    "apt": "/usr/local/share/ca-certificates/gpunode-{}.crt",
    "dnf": "/etc/pki/ca-trust/source/anchors/gpunode-{}.pem",
}
TRUST = {"apt": ("update-ca-certificates",), "dnf": ("update-ca-trust", "extract")}
FRESH = {"apt": ("update-ca-certificates", "--fresh"), "dnf": TRUST["dnf"]}
TIME_DAEMONS = ("systemd-timesyncd", "ntp", "ntpsec")
"""They conflict with chrony: a node has one of them."""
DIRECTORY = {"apt": ("sssd-ldap", "libnss-sss", "libpam-sss"), "dnf": ("sssd-ldap", "sssd-client", "authselect")}


class BaseResult(Frozen):
    """What the role's own tasks do."""

    trust: tuple[str, ...] = ()
    """Command that makes the node trust the authorities; empty: none is new."""
    synchronized: tuple[str, ...] = ()
    """Command that waits for the clock."""


ROLE = Role(
    name="base",
    title="Host name, time, name servers, proxy, authorities, logs and users of a directory",
    about=(
        "What a bare server needs before its driver, each part only if the site sets it: chrony, host name and "
        "C(/etc/hosts), name servers, proxy and certificates, time zone and locale, limits of the journal, forwarding "
        "with rsyslog, users of an LDAP directory (SSSD).",
        "Parts that could lock out whoever runs this are reverted unless a new login succeeds. By default the node is "
        "not changed.",
    ),
    settings=BaseSettings,
    for_images=True,
    reads=("engine", "clock"),
    result=BaseResult,
    files=(APT_PROXY, SYSTEMD, RESOLVED, NETWORK_MANAGER, JOURNAL, SYSLOG, CLOUD, SSSD, SSHD),
    folders=tuple(path.rpartition("/")[0] for path in (SYSTEMD, RESOLVED, JOURNAL)),
    # A node without chrony, authorities or its locale is worse than one with packages that it does not need.
    packages=("rsyslog", "rsyslog-gnutls", "sssd-ldap", "sssd-client", "libnss-sss", "libpam-sss"),
    more=Look(
        paths=(CLOUD_FOLDER, WAITING),
        globs=tuple(path.format("*") for path in ANCHORS.values()),
        contents=(*SHARED, LOCALE_GEN, *LOCALE_FILES, NSSWITCH),
    ),
)


@ROLE.present
def present(state: NodeState, settings: BaseSettings, context: Context) -> Manifest:
    """Return the manifest of the role. Raises UsageError for a shared file with damaged marks of the role."""
    manager = state.package_manager
    text = ROLE.texts(context)
    first = [*_names(state, settings, text), *_proxy(state, settings, text), *_authorities(state, settings)]
    resolver, resolver_units, refusals = _resolver(state, settings, text)
    guarded = tuple(_directory(state, settings, manager, text))
    logs = [*_journal(settings, manager, text), *_syslog(state, settings, manager, text)]
    clock = _clock(state, settings, manager)
    locale = _locale(state, settings)
    first += resolver
    pending = state.kind(WAITING) == "file" or any(True for file in guarded for _ in file_reasons(file, state))
    commands, reasons = _commands(state, settings, locale)
    if settings.hostname and (host := state.facts.own_name) is not None and host.name != settings.hostname:
        refusals += tuple(_renamed(state, host.name))
    units = [*resolver_units, *_units(state, settings, manager, logs, clock), *_engine(state, first)]
    trust = any(True for file in first if _is_anchor(file.path) for _ in file_reasons(file, state))
    return Manifest(
        role=ROLE.name,
        files=(
            *(file.model_copy(update={"phase": "first"}) for file in first),
            *(file.model_copy(update={"phase": "after"}) for file in (*clock, *locale, *logs)),
            *(file.model_copy(update={"phase": "guarded"}) for file in guarded),
        ),
        folders=(ManagedFolder(path=ROLE.folder),),
        packages=ROLE.transaction(
            state,
            settings,
            _packages(settings, manager),
            remove=[name for name in TIME_DAEMONS if settings.ntp_servers and name in state.installed],
        ),
        units=tuple(units),
        commands=commands,
        guarded=_guarded(state, settings.revert_s, SSSD_UNIT) if pending else None,
        refusals=refusals,
        notes=tuple(_notes(state, settings, context)),
        restarts=dict(_deferred(state, first)),
        pending_reasons=(
            *reasons,
            *(["an earlier change waits for its confirmation"] if state.kind(WAITING) == "file" else []),
        ),
        result=BaseResult(trust=TRUST[manager] if trust else (), synchronized=_wait(state, settings, clock)),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal with the lines of shared files that the role replaced."""
    manager = state.package_manager
    files = [file for file in manifest.files if file.path != SSHD]
    guarded = [file.model_copy(update={"phase": "guarded"}) for file in manifest.files if file.path == SSHD]
    shared = [
        ManagedFile(path=path, content=texts.original(path, text), phase="after", **state.attributes(path))
        for path in SHARED
        if (text := state.contents.get(path)) is not None
    ]
    anchors = [ManagedFile(path=path, content=None, phase="after") for path in _anchors(state)]
    changes = {file.path for file in (*files, *shared) if any(True for _ in file_reasons(file, state))}
    leaving = {reason.partition(" ")[0] for reason in manifest.pending_reasons if reason.endswith("must be removed")}
    watched: list[tuple[str, str, Literal["restarted", "reloaded"]]] = [
        (RESOLVED, RESOLVED_UNIT, "restarted"),
        (NETWORK_MANAGER, MANAGER_UNIT, "reloaded"),
        (JOURNAL, JOURNAL_UNIT, "restarted"),
    ]
    if "rsyslog" not in leaving:
        watched.append((SYSLOG, SYSLOG_UNIT, "restarted"))
    if not in_container(state.facts):
        watched.append((CHRONY[manager], CHRONY_UNIT[manager], "restarted"))
    units = [
        UnitState(name=name, state=requested)
        for path, name, requested in watched
        # The state of journald is not read.
        if path in changes and (name == JOURNAL_UNIT or state.unit(name) is not None)
    ]
    gone = ROLE.stopped(state, SSSD_UNIT) if SSSD in changes else ()
    pending = state.kind(WAITING) == "file" or any(True for file in guarded for _ in file_reasons(file, state))
    return manifest.updated(
        files=(*files, *guarded, *shared, *anchors),
        units=(*gone, *units),
        commands=(NodeCommand(argv=FRESH[manager]),) if anchors else (),
        guarded=_guarded(state, ROLE.of(context).revert_s) if pending else None,
        result=BaseResult(),
    )


def brings_users(state: NodeState, context: Context) -> bool:
    """Return whether, in check mode, users of a directory that the node does not know yet would come with the role."""
    settings = ROLE.of(context)
    unit = state.unit(SSSD_UNIT)
    runs = unit is not None and unit.active == "active"
    return context.check and settings.state == "present" and bool(settings.ldap_uris) and not runs


def _shared(state: NodeState, path: str, text: str) -> ManagedFile:
    """Return a shared file with its mode and owner."""
    return ManagedFile(path=path, content=text, **state.attributes(path))


def _before(state: NodeState, path: str) -> str:
    """Return a shared file without the role's lines. Raises UsageError."""
    return texts.original(path, state.contents.get(path) or "")


def _names(state: NodeState, settings: BaseSettings, text: Texts) -> Iterator[ManagedFile]:
    """Yield /etc/hosts, and what keeps cloud-init from replacing it at the next boot."""
    host = settings.hostname or (state.facts.own_name.name if state.facts.own_name is not None else "")
    rows = {host: settings.address, **settings.hosts} if settings.address and host else dict(settings.hosts)
    before = _before(state, HOSTS)
    if rows or before != (state.contents.get(HOSTS) or ""):
        yield _shared(state, HOSTS, texts.hosts_text(before, host, rows))
    keeps = state.kind(CLOUD_FOLDER) == "folder" and (rows or settings.hostname)
    yield ManagedFile(path=CLOUD, content=text("cloud.cfg.j2") if keeps else None)


def _renamed(state: NodeState, now: str) -> Iterator[str]:
    """Yield why the node must not be renamed."""
    for name in ("slurmd.service", "kubelet.service", "k3s.service", "rke2-agent.service"):
        unit = state.unit(name)
        if unit is not None and unit.active == "active":
            yield (
                f"base_hostname: {name} runs and has registered this node as {now}: remove the node from its cluster "
                "first, or set the name that it has"
            )


def _resolver(
    state: NodeState, settings: BaseSettings, text: Texts
) -> tuple[list[ManagedFile], list[UnitState], tuple[str, ...]]:
    """Return the files of the node's resolver, its unit to restart, and why it cannot be set."""
    link = state.files.get(RESOLV)
    managed = link is not None and link.kind == "link" and "systemd/resolve" in (link.target or "")
    by_manager = not managed and (unit := state.unit(MANAGER_UNIT)) is not None and unit.active == "active"
    requested = bool(settings.dns_servers or settings.dns_search)
    values = {"servers": settings.dns_servers, "search": settings.dns_search}
    content = text("resolved.conf.j2", **values) if requested and managed else None
    resolved = ManagedFile(path=RESOLVED, content=content)
    content = text("network-manager.conf.j2", **values) if requested and by_manager else None
    network = ManagedFile(path=NETWORK_MANAGER, content=content)
    units = [
        unit.model_copy(update={"phase": "before"})
        for unit in (
            *(ROLE.restarted(state, RESOLVED_UNIT, resolved) if managed else ()),
            *(
                unit.model_copy(update={"state": "reloaded"})
                for unit in (ROLE.restarted(state, MANAGER_UNIT, network) if by_manager else ())
            ),
        )
    ]
    files, refusals = [resolved, network], tuple[str, ...]()
    if requested and by_manager and not settings.dns_servers:
        refusals = ("base_dns_search: NetworkManager takes domains only with base_dns_servers: set both",)
    elif managed or by_manager:
        pass
    elif link is not None and link.kind == "file":
        before = _before(state, RESOLV)
        if requested or before != (state.contents.get(RESOLV) or ""):
            files.append(_shared(state, RESOLV, texts.resolver_text(before, settings) if requested else before))
    elif requested:
        target = link.target or link.kind if link is not None else "unknown"
        refusals = (
            f"base_dns_servers: {RESOLV} ({target}) belongs to a program that this role does not know "
            "(systemd-resolved, NetworkManager or a plain file): set the name servers there",
        )
    return files, units, refusals


def _proxy(state: NodeState, settings: BaseSettings, text: Texts) -> Iterator[ManagedFile]:
    """Yield the proxy of the package manager, of logins and of services, and the authorities for Python."""
    manager = state.package_manager
    rows = [*texts.environment_rows(settings, manager)]
    before = _before(state, ENVIRONMENT)
    if rows or before != (state.contents.get(ENVIRONMENT) or ""):
        lines = [f'{name}="{value}"' for name, value in rows]
        yield _shared(state, ENVIRONMENT, with_section(before, texts.BEGIN, lines, texts.END))
    yield ManagedFile(path=SYSTEMD, content=text("system.conf.j2", rows=rows) if rows else None)
    if manager == "apt":
        proxies = {"http": settings.proxy_http, "https": settings.proxy_https or settings.proxy_http}
        content = text("apt-proxy.conf.j2", proxies=proxies, hosts=texts.direct_hosts(settings))
        yield ManagedFile(path=APT_PROXY, content=content if settings.proxy_http else None)
        return
    now, before = state.contents.get(DNF), _before(state, DNF)
    if settings.proxy_http or before != (now or ""):
        yield _shared(state, DNF, texts.dnf_text(before, settings.proxy_https or settings.proxy_http))


def _authorities(state: NodeState, settings: BaseSettings) -> Iterator[ManagedFile]:
    """Yield the site's certificates; those that are not listed any more are removed."""
    anchor = state.by_manager(**ANCHORS)
    requested = {anchor.format(name): text for name, text in settings.ca_certificates.items()}
    for path in dict.fromkeys((*requested, *_anchors(state))):
        yield ManagedFile(path=path, content=requested.get(path))


def _anchors(state: NodeState) -> list[str]:
    return [path for path in state.files if _is_anchor(path) and state.exists(path)]


def _is_anchor(path: str) -> bool:
    return any(path.startswith(anchor.partition("{")[0]) for anchor in ANCHORS.values())


def _clock(state: NodeState, settings: BaseSettings, manager: str) -> list[ManagedFile]:
    """Return chrony's configuration."""
    path = CHRONY[manager]
    now, before = state.contents.get(path), _before(state, path)
    if settings.ntp_servers:
        return [_shared(state, path, texts.chrony_text(before, settings.ntp_servers))]
    return [_shared(state, path, before)] if now is not None and before != now else []


def _wait(state: NodeState, settings: BaseSettings, clock: list[ManagedFile]) -> tuple[str, ...]:
    """Return the command that waits for the clock; empty: none is needed."""
    unit = state.unit(state.by_manager(**CHRONY_UNIT))
    changes = any(True for file in clock for _ in file_reasons(file, state)) or unit is None or unit.active != "active"
    if not settings.ntp_servers or not settings.ntp_wait_s or in_container(state.facts) or not changes:
        return ()
    # Every second: tries, largest correction in seconds, any skew, interval.
    return ("chronyc", "waitsync", str(settings.ntp_wait_s), "0.1", "0", "1")


def _locale(state: NodeState, settings: BaseSettings) -> list[ManagedFile]:
    """Return Debian's list of the locales that are generated."""
    if state.manager != "apt":
        return []
    now, before = state.contents.get(LOCALE_GEN), _before(state, LOCALE_GEN)
    if not settings.locale or settings.locale.startswith(("C.", "POSIX")) or settings.locale == "C":
        return [_shared(state, LOCALE_GEN, before)] if now is not None and before != now else []
    encoding = settings.locale.partition(".")[2].partition("@")[0] or "ISO-8859-1"
    line = f"{settings.locale} {'UTF-8' if encoding.lower() in ('utf-8', 'utf8') else encoding}"
    return [_shared(state, LOCALE_GEN, with_section(before, texts.BEGIN, [line], texts.END))]


def _commands(
    state: NodeState, settings: BaseSettings, locale: list[ManagedFile]
) -> tuple[tuple[NodeCommand, ...], tuple[str, ...]]:
    """Return commands for what systemd keeps, and why they are pending."""
    host, sync = state.facts.own_name, state.facts.time_sync
    commands, reasons = [], []
    if settings.hostname and (host is None or host.name != settings.hostname):
        commands.append(NodeCommand(argv=("hostnamectl", "set-hostname", settings.hostname)))
        reasons.append(f"the host name is {host.name if host is not None else 'unknown'}, not {settings.hostname}")
    if settings.timezone and (sync is None or sync.timezone != settings.timezone):
        commands.append(NodeCommand(argv=("timedatectl", "set-timezone", settings.timezone)))
        reasons.append(f"the time zone is {(sync and sync.timezone) or 'unknown'}, not {settings.timezone}")
    if any(True for file in locale for _ in file_reasons(file, state)):
        commands.append(NodeCommand(argv=("locale-gen",)))
    lines = {line.strip().replace('"', "") for path in LOCALE_FILES for line in _lines(state, path)}
    if settings.locale and f"LANG={settings.locale}" not in lines:
        commands.append(NodeCommand(argv=("localectl", "set-locale", f"LANG={settings.locale}")))
        reasons.append(f"the locale is not {settings.locale}")
    return tuple(commands), tuple(reasons)


def _lines(state: NodeState, path: str) -> list[str]:
    return (state.contents.get(path) or "").split("\n")


def _journal(settings: BaseSettings, manager: str, text: Texts) -> Iterator[ManagedFile]:
    rows = texts.journal_rows(settings, forwards=manager == "apt" and bool(settings.syslog_server))
    yield ManagedFile(path=JOURNAL, content=text("journald.conf.j2", rows=rows) if rows else None)


def _syslog(state: NodeState, settings: BaseSettings, manager: str, text: Texts) -> Iterator[ManagedFile]:
    if not settings.syslog_server:
        yield ManagedFile(path=SYSLOG, content=None)
        return
    host, port = host_and_port(settings.syslog_server)
    values = {"host": host, "port": port, "protocol": settings.syslog_protocol, "bundle": texts.BUNDLES[manager]}
    # The program that judges the file comes with its package.
    judge = ("rsyslogd", "-N1", "-f", "%s") if "rsyslog" in state.installed else None
    yield ManagedFile(path=SYSLOG, content=text("rsyslog.conf.j2", **values), validate_with=judge)


def _directory(state: NodeState, settings: BaseSettings, manager: str, text: Texts) -> Iterator[ManagedFile]:
    """Yield the files of the directory's users."""
    uses = bool(settings.ldap_uris)
    # Debian and Ubuntu start the responders by their sockets, which refuse one that is listed.
    values = {"rows": texts.sssd_rows(settings, manager), "lists_services": manager == "dnf"}
    content = text("sssd.conf.j2", **values) if uses else None
    actual = state.files.get(SSSD)
    # Later releases of SSSD run as a user of their own, and give the file to its group when they start.
    sssd_owned = actual is not None and actual.group == "sssd" and actual.mode in ("0600", "0640")
    rights = {"mode": actual.mode, "group": "sssd"} if actual is not None and sssd_owned else {"mode": "0600"}
    yield ManagedFile.model_validate({"path": SSSD, "content": content, "private": True, **rights})
    yield ManagedFile(path=SSHD, content=text("sshd.conf.j2") if uses and settings.ldap_ssh_keys else None)


def _guarded(state: NodeState, limit_s: int, *more: str) -> RevertibleChange:
    """Return the change of sshd, and of further units, which the node reverts unless a new login succeeds."""
    daemon = next((name for name in ("ssh.service", "sshd.service") if state.unit(name) is not None), "ssh.service")
    return RevertibleChange(
        units=(daemon,),
        checks=(("sshd", "-t"),),
        # Started at the first login if a socket owns the port.
        activate=tuple(("systemctl", "try-restart", name) for name in (*more, daemon)),
        limit_s=limit_s,
    )


def _packages(settings: BaseSettings, manager: str) -> list[str]:
    names = ["chrony"] if settings.ntp_servers else []
    names += ["ca-certificates"] if settings.ca_certificates else []
    if settings.syslog_server:
        names += ["rsyslog", *(["rsyslog-gnutls"] if settings.syslog_protocol == "tls" else [])]
    if settings.locale and not settings.locale.startswith(("C", "POSIX")):
        names.append("locales" if manager == "apt" else f"glibc-langpack-{settings.locale.partition('_')[0]}")
    return [*names, *(DIRECTORY[manager] if settings.ldap_uris else ())]


def _units(
    state: NodeState, settings: BaseSettings, manager: str, logs: list[ManagedFile], clock: list[ManagedFile]
) -> Iterator[UnitState]:
    """Yield the units of what is set; those of packages that are not installed yet come with the next plan."""
    known = set(state.installed)
    if settings.ntp_servers and "chrony" in known and not in_container(state.facts):
        (unit,) = ROLE.restarted(state, CHRONY_UNIT[manager], *clock) or (
            UnitState(name=CHRONY_UNIT[manager], state="started"),
        )
        yield unit.model_copy(update={"enabled": True})
    elif clock and state.unit(CHRONY_UNIT[manager]) is not None and not in_container(state.facts):
        yield from ROLE.restarted(state, CHRONY_UNIT[manager], *clock)
    yield from ROLE.restarted(state, JOURNAL_UNIT, *(file for file in logs if file.path == JOURNAL))
    changed = ROLE.restarted(state, SYSLOG_UNIT, *(file for file in logs if file.path == SYSLOG))
    if settings.syslog_server and "rsyslog" in known:
        (unit,) = changed or (UnitState(name=SYSLOG_UNIT, state="started"),)
        yield unit.model_copy(update={"enabled": True})
    elif state.unit(SYSLOG_UNIT) is not None:
        yield from changed
    if settings.ldap_uris and "sssd-ldap" in known:
        yield UnitState(name=SSSD_UNIT, enabled=True, state="started")


def _stale(state: NodeState, first: list[ManagedFile]) -> bool:
    """Return whether dockerd runs with an older proxy or older authorities than the node's."""
    try:
        started = docker_of(state).started
    except UndeterminedError:
        return False
    if started is None:
        return False
    read = [file for file in first if file.path == SYSTEMD or _is_anchor(file.path)]
    times = [
        actual.mtime for file in read if (actual := state.files.get(file.path)) is not None and file.content is not None
    ]
    changes = any(True for file in read for _ in file_reasons(file, state))
    return changes or any(time is not None and time > started for time in times)


def _may_restart(state: NodeState) -> bool:
    """Return whether a restart of dockerd ends no container."""
    info = docker_of(state).info
    return info is not None and (info.running == 0 or info.live_restore)


def _engine(state: NodeState, first: list[ManagedFile]) -> Iterator[UnitState]:
    if _stale(state, first) and _may_restart(state):
        yield UnitState(name=DOCKER, state="restarted", reason="it reads proxy and authorities when it starts")


def _deferred(state: NodeState, first: list[ManagedFile]) -> Iterator[tuple[str, str]]:
    if _stale(state, first) and not _may_restart(state):
        yield DOCKER, "it reads proxy and authorities when it starts, and its containers would end"


def _notes(state: NodeState, settings: BaseSettings, context: Context) -> Iterator[str]:
    if settings.ntp_servers and in_container(state.facts):
        yield "in a container the clock is the host's: chrony is configured and not started"
    if settings.ldap_uris and state.manager == "dnf":
        lines = [line.split() for line in _lines(state, NSSWITCH)]
        if not any(words[:1] == ["passwd:"] and "sss" in words for words in lines):
            yield "nsswitch.conf does not ask SSSD: run authselect select sssd on the node"
    home = settings.ldap_home.partition("%")[0]
    mounts = [f"{str(mount['path']).rstrip('/')}/" for mount in context.settings_of("storage")["mounts"]]
    if home and not any(home.startswith(mount) for mount in mounts):
        yield f"base_ldap_home: {home} is on no mount of storage_mounts: homes have to exist there before a first login"
    if settings.proxy_http and "@" in settings.proxy_http:
        yield f"the password of the proxy is readable by all users of the node, in {ENVIRONMENT}"
