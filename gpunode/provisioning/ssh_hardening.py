"""The role ssh_hardening: a drop-in for sshd, checked against the logins, and its activation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from datetime import date

from pydantic import JsonValue, ValidationError

from gpunode.provisioning.base import brings_users
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import (
    ManagedFile,
    ManagedFolder,
    Manifest,
    NodeCommand,
    NodeQuery,
    RevertibleChange,
    file_reasons,
)
from gpunode.provisioning.role import Role, Texts
from gpunode.provisioning.ssh_login import contradictions, forced_command, has_include, obstacles, overridden
from gpunode.provisioning.ssh_settings import (
    BANNER,
    DROP_IN,
    LAST,
    OVERRIDES,
    RSA_BITS,
    DaemonHostKeys,
    SshHardeningSettings,
    algorithms,
    bad_options,
    daemon_settings,
    foreign_host_keys,
    host_keys,
    placed_host_keys,
)
from gpunode.provisioning.state import Content, Login, Look, NodeState, Reported, SshState, Text, effective_values

MAIN = "/etc/ssh/sshd_config"
CLIENT = "/etc/ssh/ssh_config.d/00-gpunode.conf"
SOCKET_DROP_INS = {name: f"/etc/systemd/system/{name}.d/gpunode.conf" for name in ("ssh.socket", "sshd.socket")}
MEMORY = "/var/lib/gpunode/ssh_hardening"
PUBLISHED = f"{MEMORY}/host-keys.json"
MODULI, MODULI_BEFORE = "/etc/ssh/moduli", f"{MEMORY}/moduli-before"
WAITING = "/var/lib/gpunode/guard/ssh_hardening/record.json"
LEAST_MODULUS = 3071
"""In sshd's file of groups, sizes are one bit below their usual name."""
LEAST_RSA, MOST_RSA = 1024, 16384
"""Bits of RSA: sshd's minimum, and ssh-keygen's maximum."""
GENERATOR = "/usr/lib/systemd/system-generators/sshd-socket-generator"
"""Ubuntu's from 24.04 on: it writes Port and ListenAddress of sshd's files into the socket."""
INCLUDE = "Include /etc/ssh/sshd_config.d/*.conf"
WORD = re.compile(r"[\w@.+*?!%/:-]{1,200}", re.ASCII)


ROLE = Role(
    name="ssh_hardening",
    title="Harden the SSH daemon, with automatic revert unless a new login succeeds",
    about=(
        "Key authentication only, modern algorithms supported by the installed OpenSSH, allow lists and limits, in one "
        "drop-in.",
        "The node restores the old settings unless a new login of the controller succeeds.",
    ),
    settings=SshHardeningSettings,
    reads=("ssh",),
    files=(DROP_IN, LAST, BANNER, CLIENT, PUBLISHED, *SOCKET_DROP_INS.values()),
    folders=(MEMORY,),
    more=Look(paths=(GENERATOR, MAIN, WAITING, MODULI, MODULI_BEFORE), contents=(PUBLISHED,)),
)
NO_DAEMON = "no-sshd: the node has no OpenSSH server that systemd runs"


class LoginAnswer(Reported):
    """The node's answer about sshd with the new settings."""

    unavailable: Text | None = None
    error: Text | None = None
    effective: Content | None = None
    logins: dict[Text, Content | None] | None = None


@ROLE.present
def present(state: NodeState, settings: SshHardeningSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    ssh = _daemon(state)
    if ssh is None:
        return Manifest(role=ROLE.name, refusals=(NO_DAEMON,))
    # In check mode: users of the roles accounts and base who do not exist yet; their logins cannot be tested.
    coming = set(context.planned.users)
    if brings_users(state, context):
        named = (*settings.admin_users, *settings.allow_users, *settings.forwarding_users)
        coming |= {user for user in named if ssh.account(user) is None}
    refusals = [*_bad_settings(ssh, settings), *_bad_users(ssh, settings, coming), *_bad_ports(ssh, settings)]
    if refusals:
        return Manifest(role=ROLE.name, refusals=tuple(refusals))
    published = _published(state.contents.get(PUBLISHED))
    since = min(published.values(), default=None)
    keys = host_keys(ssh, (context.today - since).days if since else None, settings.retire_days)
    rows = daemon_settings(ssh, settings, keys)
    good = set(keys.served) - {key.path for key in keys.weak}
    dates = {path: published.get(path, context.today).isoformat() for path in good}
    files = _files(ssh, settings, rows, keys, ROLE.texts(context))
    files.append(ManagedFile(path=PUBLISHED, content=json.dumps(dates, indent=1, sort_keys=True) + "\n"))
    questions: dict[str, NodeQuery] = {}
    if any("group-exchange" in name for name in algorithms(ssh, settings)["kex"]) and ssh.weak_moduli:
        questions["moduli"] = NodeQuery(kind="contents", body={"paths": [MODULI]})
        files += _moduli(state, context.answers.get("moduli", {}).get(MODULI))
    reasons = [*_reasons(state, ssh, settings, keys)]
    logins = _logins(ssh, settings, coming)
    shown = [file for file in files if file.path != PUBLISHED]
    if reasons or any(True for file in shown for _ in file_reasons(file, state)):
        tested = [file for file in shown if file.path.startswith(("/etc/ssh/sshd", BANNER))]
        body = {
            "files": [file.model_dump(include={"path", "content", "encoding", "mode"}) for file in tested],
            "logins": [login.model_dump() for login in logins],
        }
        questions["login"] = NodeQuery(kind="ssh_login", body=body)
    notes = [*overridden(rows, ssh.contents, DROP_IN), *_notes(state, ssh, settings, keys)]
    answer = context.answers.get("login")
    if answer is not None:
        refusals += _login_refusals(
            ssh, logins, rows, answer, notes, options={name.lower() for name in settings.options}
        )
    return Manifest(
        role=ROLE.name,
        files=tuple(file.model_copy(update={"phase": "guarded"}) for file in files),
        folders=(ManagedFolder(path=MEMORY),),
        # A key that no setting names yet changes nothing.
        commands=tuple(_make_key(path, kind) for path, kind in keys.make),
        guarded=_guarded(ssh, bool(settings.ports) or _has_ports(state), settings.revert_s),
        questions=questions,
        refusals=tuple(refusals),
        notes=tuple(notes) if questions else (),
        pending_reasons=tuple(reasons),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal with the groups of the key exchange as they were."""
    ssh = _daemon(state)
    if ssh is None:
        return Manifest(role=ROLE.name, refusals=(NO_DAEMON,))
    files = [*manifest.files]
    questions = {}
    if state.kind(MODULI_BEFORE) == "file":
        questions["moduli"] = NodeQuery(kind="contents", body={"paths": [MODULI_BEFORE]})
        text = context.answers.get("moduli", {}).get(MODULI_BEFORE)
        if isinstance(text, str):
            files += [ManagedFile(path=MODULI, content=text), ManagedFile(path=MODULI_BEFORE, content=None)]
    waits = state.kind(WAITING) == "file"
    more = {
        "files": tuple(file.model_copy(update={"phase": "guarded"}) for file in files),
        "guarded": _guarded(ssh, _has_ports(state), ROLE.of(context).revert_s),
        "questions": questions,
        "pending_reasons": ("an earlier change waits for its confirmation",) if waits else (),
    }
    return manifest.updated(**more)


def _daemon(state: NodeState) -> SshState | None:
    """Return the daemon; None if the node has none that systemd runs."""
    ssh = state.ssh
    has_daemon = ssh is not None and (ssh.effective is not None or ssh.unit("ssh.service", "sshd.service") is not None)
    return ssh if has_daemon else None


def _files(
    ssh: SshState,
    settings: SshHardeningSettings,
    rows: list[tuple[str, str]],
    keys: DaemonHostKeys,
    text: Texts,
) -> list[ManagedFile]:
    socket, ports = _socket(ssh), settings.ports
    late = placed_host_keys(ssh, keys)[1]
    # The same algorithms as the daemon's, and older servers stay reachable.
    client = algorithms(ssh, settings.model_copy(update={"post_quantum": "prefer"})) if settings.client else {}
    daemon = text("sshd.conf.j2", rows=rows, forwarding_users=settings.forwarding_users)
    banner = f"{settings.banner.rstrip()}\n" if settings.banner else None
    files = [
        ManagedFile(path=DROP_IN, content=daemon, mode="0600"),
        ManagedFile(path=LAST, content=text("host-keys.conf.j2", paths=late) if late else None, mode="0600"),
        ManagedFile(path=BANNER, content=banner),
        ManagedFile(path=CLIENT, content=text("ssh.conf.j2", **client) if client else None),
        *(
            ManagedFile(
                path=path,
                content=text("ssh.socket.conf.j2", ports=ports) if name == socket and ports else None,
            )
            for name, path in SOCKET_DROP_INS.items()
        ),
    ]
    if settings.add_include and not has_include(ssh.contents):
        files.append(ManagedFile(path=MAIN, content=f"{INCLUDE}\n{ssh.contents.get(MAIN) or ''}", mode="0644"))
    return files


def _bad_settings(ssh: SshState, settings: SshHardeningSettings) -> Iterator[str]:
    """Yield invalid settings, each with what to do."""
    for name, kind in OVERRIDES.items():
        unknown = [word for word in getattr(settings, name) if word not in ssh.offered.get(kind, ())]
        if unknown:
            yield (
                f"ssh_hardening_{name}: {', '.join(unknown)} is not offered by {ssh.version} on the node "
                f"(ssh -Q {kind} lists what is supported)"
            )
    for name, supported in algorithms(ssh, settings).items():
        if not supported:
            yield f"ssh_hardening_{name}: {ssh.version} on the node offers none of the role's list"
    if not LEAST_RSA <= settings.least_rsa_bits <= MOST_RSA:
        yield f"ssh_hardening_least_rsa_bits: {settings.least_rsa_bits} is not from {LEAST_RSA} to {MOST_RSA}"
    if not re.fullmatch(r"\d+:\d+:\d+", settings.max_startups):
        yield f"ssh_hardening_max_startups: {settings.max_startups!r} is not START:RATE:FULL (example: 30:50:200)"
    yield from bad_options(settings.options)
    if not has_include(ssh.contents) and not settings.add_include:
        yield (
            f"{MAIN} has no line '{INCLUDE}' outside of a Match block, so that no drop-in is read: set "
            "ssh_hardening_add_include to true, or write it there as the first line"
        )


def _bad_users(ssh: SshState, settings: SshHardeningSettings, coming: set[str]) -> Iterator[str]:
    for name in ("allow_users", "allow_groups", "forwarding_users", "admin_users", "trusted_networks"):
        for word in getattr(settings, name):
            if not WORD.fullmatch(str(word)):
                yield (
                    f"ssh_hardening_{name}: {word!r} contains blanks or characters with a special "
                    "meaning in sshd_config"
                )
    for name in ("admin_users", "forwarding_users"):
        for user in getattr(settings, name):
            if user not in coming and ssh.account(user) is None:
                yield f"ssh_hardening_{name}: the node has no account {user} with a login shell"
    for user in settings.allow_users:
        named = re.fullmatch(r"[\w.-]+", str(user), re.ASCII) and user not in coming
        if named and ssh.account(user) is None:
            yield f"ssh_hardening_allow_users: the node has no account {user} with a login shell"


def _bad_ports(ssh: SshState, settings: SshHardeningSettings) -> Iterator[str]:
    now = _ports(ssh)
    for port in settings.ports:
        if not 0 < port < 65536:
            yield f"ssh_hardening_ports: {port} is not a valid port"
        elif port not in now and port in ssh.listening:
            yield f"ssh_hardening_ports: port {port} is in use on the node (ss -tlnp 'sport = :{port}' shows by what)"
        elif port not in now and port != 22 and ssh.selinux:
            yield (
                f"ssh_hardening_ports: SELinux is enforcing and allows sshd only its own ports: run semanage "
                f"port -a -t ssh_port_t -p tcp {port} on the node, then run this again"
            )
    if settings.ports and ssh.login is not None and ssh.login.port not in settings.ports:
        yield (
            f"ssh_hardening_ports: this login came in at port {ssh.login.port}, which is not among them: list both, "
            "set ansible_port to the new one, then run this again without the old one"
        )


def _login_refusals(  # noqa: PLR0913
    ssh: SshState,
    logins: list[Login],
    rows: list[tuple[str, str]],
    reply: Mapping[str, JsonValue],
    notes: list[str],
    *,
    options: Set[str],
) -> list[str]:
    """Return why the settings are refused: sshd rejects them, they have no effect, or a user would be locked out."""
    try:
        answer = LoginAnswer.model_validate(reply)
    except ValidationError:
        answer = LoginAnswer()
    if answer.unavailable:
        notes.append(f"the settings could not be tested in advance: {answer.unavailable}")
        return []
    if answer.error:
        return [f"sshd refuses the settings: {answer.error}"]
    if answer.effective is None or answer.logins is None:
        return ["sshd's resulting configuration could not be determined"]
    refusals = list(contradictions(rows, answer.effective, ssh.contents, DROP_IN, options))
    for login in logins:
        user = login.user
        own_login = ssh.login is not None and ssh.login.user == user
        whose = "the login of this run" if own_login else "an admin user"
        text = answer.logins.get(user)
        if not text:
            refusals.append(f"{whose}, {user}: sshd -T -C user={user} failed")
            continue
        refusals += [
            f"{whose} would be locked out: {reason}"
            for reason in obstacles(ssh.account(user), user, login.address, text)
        ]
        command = forced_command(text)
        if own_login and command is not None:
            refusals.append(f"{whose} would be locked out: a Match block forces the command {command} on {user}")
    return refusals


def _logins(ssh: SshState, settings: SshHardeningSettings, coming: set[str]) -> list[Login]:
    """Return user, address and port of this run's login and of each admin user's, without users to be created."""
    address, port = (ssh.login.address, ssh.login.port) if ssh.login else ("127.0.0.1", 22)
    login_users = [ssh.login.user] if ssh.login else []
    users = [user for user in dict.fromkeys([*login_users, *settings.admin_users]) if user not in coming]
    return [Login(user=user, address=address, port=port) for user in users]


def _reasons(state: NodeState, ssh: SshState, settings: SshHardeningSettings, keys: DaemonHostKeys) -> Iterator[str]:
    """Yield why changes are pending in addition to files that differ."""
    if state.kind(WAITING) != "absent":
        yield "an earlier change waits for its confirmation"
    for path, kind in keys.make:
        yield f"{path} is missing: an {kind} host key"
    if ssh.effective is None:
        yield f"sshd's configuration could not be determined: {ssh.error}"
    socket = _socket(ssh)
    if settings.ports and not set(settings.ports) <= set(ssh.listening):
        yield f"{socket or 'sshd'} does not listen on {list(settings.ports)}"


def _notes(state: NodeState, ssh: SshState, settings: SshHardeningSettings, keys: DaemonHostKeys) -> Iterator[str]:
    socket = _socket(ssh)
    if socket and not settings.ports:
        listening = {int(port) for port in re.findall(r":(\d+)\b", ssh.units[socket].listen)}
        configured = set(_configured_ports(ssh))
        if listening and configured and listening != configured:
            obeyed = state.kind(GENERATOR) in ("file", "link")
            why = (
                "which is not loaded yet (systemctl daemon-reload)" if obeyed else "which sshd ignores behind a socket"
            )
            yield (
                f"{socket} listens on {sorted(listening)} while sshd_config sets Port {sorted(configured)}, {why}: set "
                "ssh_hardening_ports to the intended ports"
            )
    yield from _misplaced(ssh, keys)
    for key in keys.weak:
        size = f" of {key.bits} bits" if key.type == "ssh-rsa" else ""
        yield (
            f"{key.path} ({key.type}{size}) is still offered: clients learn the new host keys for "
            f"{settings.retire_days} days first"
        )
    for account in ssh.accounts:
        if account.uid >= 1000 and account.password == "set" and not account.keys:  # noqa: S105
            yield f"{account.name} has a password and no key, and cannot log in over SSH any more"


def _misplaced(ssh: SshState, keys: DaemonHostKeys) -> Iterator[str]:
    """Yield if lines of other files put the host keys into another order than the role's."""
    first, last = placed_host_keys(ssh, keys)
    foreign = [path for path in foreign_host_keys(ssh) if path in keys.served]
    order = [*first, *foreign, *last]
    if order != list(keys.served):
        yield (
            f"with the HostKey lines of other files the daemon offers {', '.join(order)}, in this order: remove those "
            f"lines, and the role offers {', '.join(keys.served)}"
        )


def _has_ports(state: NodeState) -> bool:
    """Return whether an earlier run set the socket's ports: it listens on others only after a restart of its own."""
    return any(state.kind(path) == "file" for path in SOCKET_DROP_INS.values())


def _guarded(ssh: SshState, moves_port: bool, limit_s: int) -> RevertibleChange:
    """Return the units that a revert restores, and the commands that activate the settings."""
    service = ssh.unit("ssh.service", "sshd.service") or "ssh.service"
    socket = _socket(ssh)
    if socket is None:
        # Not a reload: an sshd that was started by a socket ends after the socket is closed ("Cannot bind any
        # address").
        steps: list[tuple[str, ...]] = [("restart", service)]
    elif moves_port:
        # A socket does not start while its service runs, which a login starts again as long as the socket listens.
        # Open sessions stay: sshd's unit ends only its main process.
        steps = [("stop", socket, service), ("start", socket)]
    else:
        steps = [("try-restart", service)]
    return RevertibleChange(
        units=(service, *([socket] if socket else [])),
        checks=(("sshd", "-t"),),
        show=("sshd", "-T"),
        activate=(("systemctl", "daemon-reload"), *(("systemctl", *step) for step in steps)),
        limit_s=limit_s,
    )


def _moduli(state: NodeState, text: object) -> list[ManagedFile]:
    """Return the file of groups without the small ones, and its previous content."""
    if not isinstance(text, str):
        return []
    lines = [line for line in text.splitlines(keepends=True) if not _is_small(line)]
    kept = [] if state.kind(MODULI_BEFORE) == "file" else [ManagedFile(path=MODULI_BEFORE, content=text)]
    return [*kept, ManagedFile(path=MODULI, content="".join(lines))]


def _is_small(line: str) -> bool:
    fields = line.split()
    return line[:1].isdigit() and len(fields) > 5 and fields[4].isdigit() and int(fields[4]) < LEAST_MODULUS


def _make_key(path: str, kind: str) -> NodeCommand:
    bits = ("-b", str(RSA_BITS)) if kind == "rsa" else ()
    argv = ("ssh-keygen", "-q", "-t", kind, *bits, "-N", "", "-C", "", "-f", path)
    return NodeCommand(argv=argv, creates=path, phase="before")


def _socket(ssh: SshState) -> str | None:
    """Return the socket that accepts SSH connections in place of the daemon; None if the daemon does."""
    name = ssh.unit("ssh.socket", "sshd.socket")
    return name if ssh.active(name) else None


def _configured_ports(ssh: SshState) -> list[int]:
    return [int(port) for port in effective_values(ssh.effective or "").get("port", ()) if port.isdigit()]


def _ports(ssh: SshState) -> set[int]:
    """Return the ports on which SSH is available now."""
    socket = _socket(ssh)
    if socket is None:
        return set(_configured_ports(ssh))
    return {int(port) for port in re.findall(r":(\d+)\b", ssh.units[socket].listen)}


def _published(text: str | None) -> dict[str, date]:
    """Return since when each good host key was offered, by its path."""
    try:
        document = json.loads(text or "{}")
        return {str(path): date.fromisoformat(day) for path, day in document.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
