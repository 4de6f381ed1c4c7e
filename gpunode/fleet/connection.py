"""SSH by Fabric on Paramiko, limited to what OpenSSH would accept: known hosts, keys, jump hosts, time limits."""

import logging
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import fabric
import paramiko
from paramiko.auth_strategy import AuthFailure

from gpunode.fleet.host_keys import HostKeyPolicy, HostKeys
from gpunode.fleet.login import Logins
from gpunode.fleet.process import kill_group
from gpunode.fleet.session import NodeFailure
from gpunode.fleet.ssh_config import SshSettings

# Paramiko logs errors that it also raises, and every connection that is cut on purpose.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)

CONNECT_TIMEOUT_S = 15.0
"""For TCP, the server's banner, and key exchange, each, without a ConnectTimeout in ssh's configuration."""
_CHUNK = 256 * 1024
_LARGEST_PACKET = 256 * 1024
"""Bytes: as in OpenSSH (PACKET_MAX_SIZE). Paramiko reads what the other side announces, up to 4 GiB."""


class Abort:
    """Ends all open connections of one node's work, from any thread and at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actions: list[Callable[[], None]] = []
        self._called = False

    def add(self, action: Callable[[], None]) -> None:
        """Register an action that ends a blocking call; call it at once if the end was already requested."""
        with self._lock:
            if not self._called:
                self._actions.append(action)
                return
        action()

    def __call__(self) -> None:
        """Run the registered actions; those that are added later run at once."""
        with self._lock:
            self._called = True
            actions, self._actions = self._actions, []
        for action in actions:
            with suppress(OSError, EOFError, paramiko.SSHException):
                action()


class SshSession:
    """A command on a node over one SSH channel; see ``session.Session``."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    def read(self, timeout_s: float) -> tuple[bytes, bytes]:
        """See Session."""
        channel = self._channel
        if not (channel.recv_ready() or channel.recv_stderr_ready() or self.ended):
            self._poll.poll(min(timeout_s, 0.5) * 1000)
        stdout = channel.recv(_CHUNK) if channel.recv_ready() else b""
        stderr = channel.recv_stderr(_CHUNK) if channel.recv_stderr_ready() else b""
        if not stdout and not stderr and channel.eof_received and not self.ended:
            # After the end of file the descriptor stays readable, and the exit status may still be outstanding.
            channel.status_event.wait(min(timeout_s, 0.1))
        return stdout, stderr

    def write(self, data: bytes, timeout_s: float) -> None:
        """See Session."""
        self._channel.settimeout(timeout_s)
        self._channel.sendall(data)

    def close_stdin(self) -> None:
        """See Session."""
        with suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def close(self) -> None:
        """Close the channel and its descriptors."""
        self._channel.close()

    @property
    def ended(self) -> bool:
        """See Session."""
        channel = self._channel
        if channel.recv_ready() or channel.recv_stderr_ready():
            return False
        return channel.closed or (bool(channel.eof_received) and channel.exit_status_ready())

    @property
    def exit_status(self) -> int | None:
        """See Session."""
        status = self._channel.exit_status
        return status if status >= 0 else None


class Gateways:
    """Jump hosts, one connection each for all nodes behind them: thirty logins at once would exceed its MaxStartups."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[SshSettings, ...], _Gateway] = {}
        self.abort = Abort()

    def channel(self, jumps: tuple[SshSettings, ...], host: str, port: int, deadline: float) -> paramiko.Channel:
        """Return a channel to ``host:port`` through the chain; raise NodeFailure naming the jump host that failed."""
        with self._lock:
            gateway = self._entries.setdefault(jumps, _Gateway())
        if not gateway.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise NodeFailure(f"jump host {jumps[-1].alias}: not connected within the time limit")
        try:
            if gateway.failure is None and gateway.connection is None:
                self._open(gateway, jumps, deadline)
            if gateway.connection is None:
                raise NodeFailure(gateway.failure or "not connected")
            transport = gateway.connection.transport
        finally:
            gateway.lock.release()
        try:
            channel: paramiko.Channel = transport.open_channel(
                "direct-tcpip", (host, port), ("", 0), timeout=max(0.1, deadline - time.monotonic())
            )
        except paramiko.ChannelException as err:
            raise NodeFailure(
                f"unreachable: jump host {jumps[-1].alias} cannot connect to {host}:{port} ({err.text})"
            ) from None
        except (paramiko.SSHException, EOFError, OSError) as err:
            raise NodeFailure(f"jump host {jumps[-1].alias}: the connection was lost ({_text(err)})") from None
        return channel

    def _open(self, gateway: "_Gateway", jumps: tuple[SshSettings, ...], deadline: float) -> None:
        try:
            # A jump host is shared: it stays connected until all nodes are done, so it ends with the abort of all.
            gateway.connection, _ = connect(
                replace(jumps[-1], jumps=jumps[:-1]), gateways=self, deadline=deadline, abort=self.abort
            )
        except NodeFailure as err:
            gateway.failure = str(err) if str(err).startswith("jump host") else f"jump host {jumps[-1].alias}: {err}"

    def close(self) -> None:
        """Close all of them, the nearest last."""
        with self._lock:
            entries = [*self._entries.values()]
        for gateway in reversed(entries):
            if gateway.connection is not None:
                gateway.connection.close()
        self.abort()


class _Gateway:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: fabric.Connection | None = None
        self.failure: str | None = None


def connect(  # noqa: PLR0913
    settings: SshSettings,
    *,
    gateways: Gateways,
    deadline: float,
    abort: Abort,
    password: str | None = None,
    passphrase: str | None = None,
) -> tuple[fabric.Connection, str | None]:
    """Return an open, authenticated connection, and its host key if that was accepted unchecked.

    Raises NodeFailure with one line; a host key must be known, unless the user's settings accept others. Then no
    password is sent.
    """
    left = deadline - time.monotonic()
    step = max(0.1, min(settings.connect_timeout_s or CONNECT_TIMEOUT_S, left))
    sock = _socket(settings, gateways, deadline, step, abort)
    direct = not settings.jumps and settings.proxy_command is None
    keys = HostKeys(settings, sock.getpeername()[0] if direct else None)
    policy = HostKeyPolicy(settings, keys)
    strategy = Logins(settings, password, passphrase, withheld=lambda: policy.unchecked is not None)
    config = fabric.Config(lazy=True, overrides={"load_ssh_configs": False})
    connection = fabric.Connection(
        settings.hostname,
        user=settings.user,
        port=settings.port,
        config=config,
        gateway=False,
        connect_timeout=None,
        connect_kwargs={
            "sock": sock,
            "auth_strategy": strategy,
            "timeout": step,
            "banner_timeout": step,
            "auth_timeout": max(0.1, min(30.0, left)),
            "channel_timeout": max(0.1, left),
            "transport_factory": lambda *args, **kwargs: _transport(settings, keys, *args, **kwargs),
        },
    )
    client: paramiko.SSHClient = connection.client
    client.set_missing_host_key_policy(policy)
    began = time.monotonic()
    try:
        connection.open()
    except AuthFailure:
        raise NodeFailure(strategy.explain()) from None
    except (paramiko.SSHException, EOFError, OSError) as err:
        raise NodeFailure(_explain(settings, err, step, time.monotonic() - began)) from None
    finally:
        strategy.close()
        if not connection.is_connected:
            connection.close()
            sock.close()
    return connection, policy.unchecked


def start(connection: fabric.Connection, command: str, deadline: float) -> SshSession:
    """Run a command in one session. Raises NodeFailure if the node does not open one."""
    try:
        channel = connection.transport.open_session(timeout=max(0.1, deadline - time.monotonic()))
        channel.settimeout(max(0.1, deadline - time.monotonic()))
        channel.exec_command(command)
    except (paramiko.SSHException, EOFError, OSError) as err:
        raise NodeFailure(f"the node refuses a session for a command: {_text(err)}") from None
    return SshSession(channel)


def _socket(settings: SshSettings, gateways: Gateways, deadline: float, step: float, abort: Abort) -> Any:
    if settings.jumps:
        channel = gateways.channel(settings.jumps, settings.hostname, settings.port, deadline)
        abort.add(channel.close)
        return channel
    if settings.proxy_command is not None:
        return _proxy(settings.proxy_command, abort)
    family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(settings.address_family, socket.AF_UNSPEC)
    endpoint = f"{settings.hostname}:{settings.port}"
    try:
        addresses = socket.getaddrinfo(settings.hostname, settings.port, family, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise NodeFailure(f"unreachable: the name {settings.hostname} cannot be resolved") from None
    failures: list[OSError] = []
    for kind, sort, protocol, _, address in addresses:
        sock = socket.socket(kind, sort, protocol)
        abort.add(lambda sock=sock: sock.shutdown(socket.SHUT_RDWR))  # type: ignore[misc]
        sock.settimeout(max(0.1, min(step, deadline - time.monotonic())))
        try:
            sock.connect(address)
        except OSError as err:
            failures.append(err)
            sock.close()
        else:
            return sock
    if all(isinstance(err, TimeoutError) for err in failures):
        raise NodeFailure(f"unreachable: {endpoint} does not answer within {step:.0f} s")
    reason = next(err for err in failures if not isinstance(err, TimeoutError))
    raise NodeFailure(f"unreachable: {endpoint}: {reason.strerror or reason}")


def _proxy(command: str, abort: Abort) -> socket.socket:
    """Return the connection of a ProxyCommand: ssh runs it in a shell, with its input and output as the connection."""
    local_end, remote_end = socket.socketpair()
    with remote_end:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=remote_end.fileno(),
            stdout=remote_end.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end() -> None:
        kill_group(process)
        process.wait()
        local_end.shutdown(socket.SHUT_RDWR)

    abort.add(end)
    return local_end


def _transport(settings: SshSettings, keys: HostKeys, *args: Any, **kwargs: Any) -> paramiko.Transport:
    """Return Paramiko's transport, offering only algorithms that the user's SSH configuration allows."""
    lists = dict(settings.algorithms)
    transport = paramiko.Transport(*args, **kwargs)
    _limit_packets(transport)
    accepted = lists.get("pubkeyacceptedalgorithms")
    if accepted is not None:
        known = transport.preferred_pubkeys
        transport.disabled_algorithms = {"pubkeys": [name for name in known if name not in accepted]}
    security = transport.get_security_options()
    for option, attribute in (("ciphers", "ciphers"), ("macs", "digests"), ("kexalgorithms", "kex")):
        if option in lists:
            setattr(security, attribute, _common(option, lists[option], getattr(security, attribute)))
    key_types: Sequence[str] = security.key_types
    if "hostkeyalgorithms" in lists:
        key_types = _common("hostkeyalgorithms", lists["hostkeyalgorithms"], key_types)
    # As in OpenSSH: request a type of key that is known, or a second key of the node would look like a changed one.
    types = {name for key_type in keys.types for name in _signatures(key_type)}
    security.key_types = tuple(sorted(key_types, key=lambda name: name not in types))
    return transport


def _limit_packets(transport: paramiko.Transport) -> None:
    """Let a transport refuse packets that no SSH server sends, before it reads them."""
    read_all = transport.packetizer.read_all

    def limited(n: int, check_rekey: bool = False) -> bytes:
        if n > _LARGEST_PACKET + 1024:
            raise paramiko.SSHException(f"packet of {n} bytes announced, at most {_LARGEST_PACKET} are read")
        return read_all(n, check_rekey)

    transport.packetizer.read_all = limited  # type: ignore[method-assign]


def _signatures(key_type: str) -> tuple[str, ...]:
    return ("rsa-sha2-512", "rsa-sha2-256") if key_type == "ssh-rsa" else (key_type,)


def _common(option: str, allowed: tuple[str, ...], offered: Sequence[str]) -> tuple[str, ...]:
    both = tuple(name for name in allowed if name in offered)
    if not both:
        raise NodeFailure(f"none of the {option} in the SSH configuration is known here; known: {', '.join(offered)}")
    return both


def _explain(settings: SshSettings, err: Exception, step: float, took_s: float) -> str:
    text, endpoint = _text(err), f"{settings.hostname}:{settings.port}"
    silent = "banner" in text.lower() or "no existing session" in text.lower() or isinstance(err, TimeoutError)
    if silent and took_s >= step - 0.5:
        return f"unreachable: {endpoint} accepts the connection but sends no SSH greeting within {step:.0f} s"
    if silent:
        return f"unreachable: {endpoint} accepts the connection and closes it without an SSH greeting"
    return f"the SSH connection to {endpoint} failed: {text}"


def _text(err: Exception) -> str:
    text = (getattr(err, "strerror", None) or str(err) or type(err).__name__).strip()
    return text.splitlines()[0]
