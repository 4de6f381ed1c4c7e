"""The container engine of a node: reached over streams, detected and checked."""

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import docker
import requests
import requests.adapters
import urllib3
import urllib3.connection
from docker.errors import APIError, DockerException

from gpunode.workload.causes import shortened
from gpunode.workload.transport import LaunchFailure, ProgramStream, Transport

LOWEST_API = (1, 40)
"""Docker 19.03: the first with requests for GPUs."""
PODMAN_CDI = (5, 4)
"""The first Podman with requests for CDI devices in its Docker API; earlier ones start without a message and without
the GPU, and no other request adds one (containers/podman pull 25171, lablup/backend.ai issue 13820).
"""
API_TIMEOUT_S = 60
MAX_BODY = 16 * 1024 * 1024
"""Limit of one answer that is not a stream: an engine's version, or the list of our containers, is some KiB."""
_URL = "http://node.invalid:80"
"""Only a name: the adapter mounted for it connects to the node."""
_UNREACHABLE = (DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError, EOFError)


class _Connection(urllib3.connection.HTTPConnection):
    def __init__(self, connections: "_Connections") -> None:
        super().__init__("node.invalid", timeout=API_TIMEOUT_S)
        self._connections = connections
        self._stream: ProgramStream | None = None

    def connect(self) -> None:
        self._stream = self._connections.open()
        self.sock = self._stream.sock
        self.sock.settimeout(API_TIMEOUT_S)

    def close(self) -> None:
        super().close()
        if self._stream is not None:
            self._stream.close()


class _Connections(urllib3.HTTPConnectionPool):
    def __init__(self, transport: Transport, root: bool) -> None:
        super().__init__("node.invalid", maxsize=4)
        self._transport = transport
        self._root = root
        self.opened: list[ProgramStream] = []

    def open(self) -> ProgramStream:
        stream = self._transport.engine(root=self._root)
        self.opened.append(stream)
        return stream

    def _new_conn(self) -> _Connection:
        return _Connection(self)


class _Adapter(requests.adapters.HTTPAdapter):
    """Adapter that sends every request to the node's engine, over streams that the transport opens."""

    def __init__(self, transport: Transport, *, root: bool) -> None:
        super().__init__()
        self._connections = _Connections(transport, root)

    @property
    def complaint(self) -> str:
        """Return what the program at the other end of the last connection wrote to stderr."""
        opened = self._connections.opened
        return opened[-1].complaint() if opened else ""

    def get_connection_with_tls_context(self, *_: Any, **__: Any) -> _Connections:
        return self._connections

    def send(  # type: ignore[override]
        self, request: requests.PreparedRequest, stream: bool = False, **settings: Any
    ) -> requests.Response:
        """Do as the base class, but read an answer only up to the size limit, and do not unpack it."""
        request.headers["Accept-Encoding"] = "identity"
        response = super().send(request, stream=True, **settings)
        if not stream:
            body = response.raw.read(MAX_BODY + 1, decode_content=False)
            if len(body) > MAX_BODY:
                response.close()
                raise LaunchFailure(
                    "broke-off", f"the node's Docker engine answers with more than {MAX_BODY >> 20} MiB"
                )
            response._content = body
        return response

    def request_url(self, request: requests.PreparedRequest, _: Any) -> str:
        return str(request.path_url)

    def cut(self) -> None:
        """Cut all connections to the engine."""
        for stream in self._connections.opened:
            stream.close()
        self._connections.close()


@dataclass(frozen=True)
class Engine:
    """An engine that answers."""

    api: Any
    """``docker.APIClient``; its stubs lack half of the methods called here."""
    version: str
    api_version: str
    info: dict[str, Any] = field(repr=False)
    deadline: float
    option: str = "--workload-timeout"
    """The command-line option that sets the deadline."""
    podman: bool = False
    """Whether it is Podman, which answers as Docker does."""
    cut: Callable[[], None] = lambda: None
    """Cut all connections to it."""

    @property
    def name(self) -> str:
        """Return the product name."""
        return f"Podman {self.version}" if self.podman else f"Docker Engine {self.version}"

    @property
    def label(self) -> str:
        """Return the label for a record."""
        return f"{'podman' if self.podman else 'docker'} {self.version}"

    @property
    def knows_cdi(self) -> bool:
        """Return whether it looks for CDI specifications: if features.cdi is set, and in later engines by default."""
        if self.podman:
            numbers = re.match(r"(\d{1,3})\.(\d{1,3})", self.version)
            return numbers is not None and tuple(map(int, numbers.groups())) >= PODMAN_CDI
        return bool(self.info.get("CDISpecDirs"))

    @property
    def security(self) -> tuple[str, ...]:
        """Return what confines its containers, or itself: ``selinux``, ``apparmor``, ``rootless``, ``seccomp`` …"""
        words = (str(option).partition(",")[0] for option in self.info.get("SecurityOptions") or ())
        return tuple(word.removeprefix("name=") for word in words)

    @contextmanager
    def within(self, limit_s: float, option: str) -> Iterator["Engine"]:
        """Yield the same engine with an earlier or equal deadline, at which all connections are cut."""
        ends = min(self.deadline, time.monotonic() + limit_s)
        with _cut_at(ends, self.cut):
            yield replace(self, deadline=ends, option=option if ends < self.deadline else self.option)

    @property
    def has_nvidia_runtime(self) -> bool:
        """Return whether the runtime ``nvidia`` is registered."""
        return "nvidia" in (self.info.get("Runtimes") or {})

    @contextmanager
    def doing(self, kind: str, step: str) -> Iterator[None]:
        """Convert errors of the engine, and of its connection, to one LaunchFailure; ``kind`` if the engine refused."""
        try:
            yield
        except _UNREACHABLE as err:
            for cause in _causes(err):
                if isinstance(cause, LaunchFailure):
                    raise cause from None
            message = whole_text(err)
            text = shortened(message)
            if time.monotonic() >= self.deadline:
                raise LaunchFailure("time-limit", f"{step}: not done within the time limit ({self.option} S)") from None
            if "no space left" in message.lower():
                raise LaunchFailure("no-space", f"{step}: no space left on the node's disk ({text})") from None
            raise LaunchFailure(
                kind if isinstance(err, APIError) else "broke-off", f"{step}: {text}", message
            ) from None


@contextmanager
def connected(transport: Transport, deadline: float) -> Iterator[Engine]:
    """Yield the node's engine, as a user who may use it; closed at the end of the context.

    If root has none, the user may have a rootless one, and vice versa.

    Raises LaunchFailure: ``no-engine``, ``permission``, ``engine-too-old``, ``broke-off``.
    """
    refusals: list[LaunchFailure] = []
    for root in transport.as_root:
        adapter = _Adapter(transport, root=root)
        try:
            engine = _engine(adapter, deadline)
        except LaunchFailure as err:
            adapter.cut()
            if err.kind not in ("permission", "no-engine"):
                raise
            refusals.append(err)
            continue
        try:
            with _cut_at(deadline, adapter.cut):
                yield engine
        finally:
            engine.api.close()
            adapter.cut()
        return
    for refusal in refusals:
        if refusal.kind == "no-engine":
            raise refusal
    raise LaunchFailure(
        "permission",
        f"user {transport.user} may not use the node's Docker engine: {'; '.join(map(str, refusals))} (log in as root, "
        "pass the sudo password with -K, or add the user to the group docker)",
    )


@contextmanager
def _cut_at(deadline: float, cut: Callable[[], None]) -> Iterator[None]:
    """Cut the connections at the deadline: the SDK waits without limit for a pull."""
    watch = threading.Timer(max(0.0, deadline - time.monotonic()), cut)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _engine(adapter: _Adapter, deadline: float) -> Engine:
    def client(version: str) -> docker.APIClient:
        # The version is given, because the SDK would request it before the adapter is in place.
        api = docker.APIClient(_URL, version=version, timeout=API_TIMEOUT_S)
        api.trust_env = False  # no proxy is between
        api.mount(_URL, adapter)
        return api

    first = client(".".join(map(str, LOWEST_API)))
    try:
        version_answer = first.version(api_version=False)
        version, api_version = str(version_answer["Version"]), str(version_answer["ApiVersion"])
        if tuple(map(int, api_version.split("."))) < LOWEST_API:
            raise LaunchFailure(
                "engine-too-old",
                f"Docker Engine {version} (API {api_version}) is too old to pass GPUs to containers: use 19.03 or "
                "later (role docker)",
            )
        api = client(api_version)
        names = {str(part.get("Name")) for part in version_answer.get("Components") or ()}
        podman = "Podman Engine" in names
        return Engine(api, version, api_version, api.info(), deadline, podman=podman, cut=adapter.cut)
    except _UNREACHABLE as err:
        raise _why(err, adapter, deadline) from None
    except (KeyError, ValueError, TypeError, AttributeError):
        raise LaunchFailure("no-engine", "the service on the node is not a Docker engine") from None


def _why(err: Exception, adapter: _Adapter, deadline: float) -> LaunchFailure:
    for cause in _causes(err):
        if isinstance(cause, LaunchFailure):
            return cause
    message = adapter.complaint
    text = message.lower()
    if "permission denied" in text:
        return LaunchFailure("permission", "no permission on its socket")
    if time.monotonic() >= deadline:
        return LaunchFailure("time-limit", "the Docker engine did not answer within the time limit")
    if "unknown command" in text or "is not a docker command" in text or "unknown flag" in text:
        return LaunchFailure("engine-too-old", f"the node's docker is older than 18.09 ({message}): role docker")
    if "cannot connect" in text or "no such file" in text or "connection refused" in text:
        return LaunchFailure(
            "no-engine",
            "the node's Docker engine does not run: see systemctl status docker, or run the role docker (a rootless "
            "engine: docker "
            "context use rootless)",
        )
    return LaunchFailure("broke-off", f"the node's Docker engine does not answer: {message or one_line(err)}")


def _causes(err: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception and all its causes: urllib3 and requests wrap what a connection raises."""
    seen: set[int] = set()
    waiting = [err]
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting += [cause.__cause__, cause.__context__, getattr(cause, "reason", None)]
        waiting += [part for part in cause.args if isinstance(part, BaseException)]


def whole_text(err: object) -> str:
    """Return the engine's message, or the exception's, unchanged."""
    return str(getattr(err, "explanation", None) or err)


def one_line(err: object) -> str:
    """Return the message as one line without control codes, of a long one the beginning and the end."""
    return shortened(whole_text(err))


def raw_socket(response: Any) -> socket.socket:
    """Return the socket behind the return value of ``attach_socket``."""
    with contextlib.suppress(AttributeError):
        return response._sock  # type: ignore[no-any-return]
    return response  # type: ignore[no-any-return]
