"""The container engine of a node: reached over streams, found out and judged."""

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
from gpunode.workload.way import LaunchFailure, ProgramStream, Transport

LOWEST_API = (1, 40)
"""Docker 19.03: the first that can be asked for GPUs."""
PODMAN_CDI = (5, 4)
"""The first Podman whose Docker API honours a request for CDI devices; earlier ones start without a word and without
the GPU, and no other request brings one in (containers/podman pull 25171, lablup/backend.ai issue 13820)."""
API_TIMEOUT_S = 60
MAX_BODY = 16 * 1024 * 1024
"""Of one answer that is no stream: what an engine says of itself, or of all containers of ours, is some KiB."""
_URL = "http://node.invalid:80"
"""Only a name: the adapter mounted for it leads to the node."""
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
    def __init__(self, way: Transport, root: bool) -> None:
        super().__init__("node.invalid", maxsize=4)
        self._way = way
        self._root = root
        self.opened: list[ProgramStream] = []

    def open(self) -> ProgramStream:
        stream = self._way.engine(root=self._root)
        self.opened.append(stream)
        return stream

    def _new_conn(self) -> _Connection:
        return _Connection(self)


class _Adapter(requests.adapters.HTTPAdapter):
    """Takes every request to the node's engine, over streams that the way opens."""

    def __init__(self, way: Transport, *, root: bool) -> None:
        super().__init__()
        self._connections = _Connections(way, root)

    @property
    def complaint(self) -> str:
        """What the program at the other end of the last connection said on stderr."""
        opened = self._connections.opened
        return opened[-1].complaint() if opened else ""

    def get_connection_with_tls_context(self, *_: Any, **__: Any) -> _Connections:
        return self._connections

    def send(  # type: ignore[override]
        self, request: requests.PreparedRequest, stream: bool = False, **settings: Any
    ) -> requests.Response:
        """As the base, with an answer that is read here no longer than an engine's is, and not unpacked."""
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
        """End all that goes on with the engine."""
        for stream in self._connections.opened:
            stream.close()
        self._connections.close()


@dataclass(frozen=True)
class Engine:
    """An engine that answers."""

    api: Any
    """``docker.APIClient``, whose stubs lack half of what is called here."""
    version: str
    api_version: str
    info: dict[str, Any] = field(repr=False)
    deadline: float
    option: str = "--workload-timeout"
    """Of the command line: what sets the deadline."""
    podman: bool = False
    """It is Podman, answering as Docker does."""
    cut: Callable[[], None] = lambda: None
    """End all that goes on with it."""

    @property
    def name(self) -> str:
        """As people call it."""
        return f"Podman {self.version}" if self.podman else f"Docker Engine {self.version}"

    @property
    def label(self) -> str:
        """For a record."""
        return f"{'podman' if self.podman else 'docker'} {self.version}"

    @property
    def knows_cdi(self) -> bool:
        """True where it looks for CDI specifications: where features.cdi says so, later engines by themselves."""
        if self.podman:
            numbers = re.match(r"(\d{1,3})\.(\d{1,3})", self.version)
            return numbers is not None and tuple(map(int, numbers.groups())) >= PODMAN_CDI
        return bool(self.info.get("CDISpecDirs"))

    @property
    def security(self) -> tuple[str, ...]:
        """What confines its containers, or itself: ``selinux``, ``apparmor``, ``rootless``, ``seccomp`` …"""
        words = (str(one).partition(",")[0] for one in self.info.get("SecurityOptions") or ())
        return tuple(word.removeprefix("name=") for word in words)

    @contextmanager
    def within(self, limit_s: float, option: str) -> Iterator["Engine"]:
        """The same engine with a deadline of its own, at which whatever goes on is cut; never later than its own."""
        ends = min(self.deadline, time.monotonic() + limit_s)
        with _cut_at(ends, self.cut):
            yield replace(self, deadline=ends, option=option if ends < self.deadline else self.option)

    @property
    def has_nvidia_runtime(self) -> bool:
        """True where the runtime ``nvidia`` is registered with it."""
        return "nvidia" in (self.info.get("Runtimes") or {})

    @contextmanager
    def doing(self, kind: str, what: str) -> Iterator[None]:
        """Turn what the engine, or the way to it, raises into one LaunchFailure; ``kind`` where it is its refusal."""
        try:
            yield
        except _UNREACHABLE as err:
            for cause in _causes(err):
                if isinstance(cause, LaunchFailure):
                    raise cause from None
            said = whole_text(err)
            text = shortened(said)
            if time.monotonic() >= self.deadline:
                raise LaunchFailure("time-limit", f"{what}: not done within the time limit ({self.option} S)") from None
            if "no space left" in said.lower():
                raise LaunchFailure("no-space", f"{what}: no space left on the node's disk ({text})") from None
            raise LaunchFailure(kind if isinstance(err, APIError) else "broke-off", f"{what}: {text}", said) from None


@contextmanager
def found(way: Transport, deadline: float) -> Iterator[Engine]:
    """Return the engine behind the way, as who may use it; closed at the end of the context.

    Where root has none, the user may have a rootless one, and the other way round.

    Raises LaunchFailure: ``no-engine``, ``permission``, ``engine-too-old``, ``broke-off``.
    """
    refusals: list[LaunchFailure] = []
    for root in way.as_root:
        adapter = _Adapter(way, root=root)
        try:
            engine = _asked(adapter, deadline)
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
        f"user {way.user} may not use the node's Docker engine: {'; '.join(map(str, refusals))} (log in as root, "
        "pass the sudo password with -K, or add the user to the group docker)",
    )


@contextmanager
def _cut_at(deadline: float, cut: Callable[[], None]) -> Iterator[None]:
    """The SDK waits without limit for a pull: what holds it is taken away when the time is over."""
    watch = threading.Timer(max(0.0, deadline - time.monotonic()), cut)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _asked(adapter: _Adapter, deadline: float) -> Engine:
    def client(version: str) -> docker.APIClient:
        # The version is said, for the SDK would ask for it before the adapter is in place.
        api = docker.APIClient(_URL, version=version, timeout=API_TIMEOUT_S)
        api.trust_env = False  # no proxy stands between
        api.mount(_URL, adapter)
        return api

    first = client(".".join(map(str, LOWEST_API)))
    try:
        told = first.version(api_version=False)
        version, api_version = str(told["Version"]), str(told["ApiVersion"])
        if tuple(map(int, api_version.split("."))) < LOWEST_API:
            raise LaunchFailure(
                "engine-too-old",
                f"Docker Engine {version} (API {api_version}) is too old to pass GPUs to containers: use 19.03 or "
                "later (role docker)",
            )
        api = client(api_version)
        names = {str(part.get("Name")) for part in told.get("Components") or ()}
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
    said = adapter.complaint
    text = said.lower()
    if "permission denied" in text:
        return LaunchFailure("permission", "no permission on its socket")
    if time.monotonic() >= deadline:
        return LaunchFailure("time-limit", "the Docker engine did not answer within the time limit")
    if "unknown command" in text or "is not a docker command" in text or "unknown flag" in text:
        return LaunchFailure("engine-too-old", f"the node's docker is older than 18.09 ({said}): role docker")
    if "cannot connect" in text or "no such file" in text or "connection refused" in text:
        return LaunchFailure(
            "no-engine",
            "the node's Docker engine does not run: see systemctl status docker, or run the role docker (a rootless "
            "engine: docker "
            "context use rootless)",
        )
    return LaunchFailure("broke-off", f"the node's Docker engine does not answer: {said or one_line(err)}")


def _causes(err: BaseException | None) -> Iterator[BaseException]:
    """The exception and all that it stands for: urllib3 and requests wrap what a connection raises."""
    seen: set[int] = set()
    waiting = [err]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__, getattr(one, "reason", None)]
        waiting += [part for part in one.args if isinstance(part, BaseException)]


def whole_text(err: object) -> str:
    """Return the engine's own words, or the exception's, as they came."""
    return str(getattr(err, "explanation", None) or err)


def one_line(err: object) -> str:
    """Return the same as one line without control codes, of a long one the beginning and the end."""
    return shortened(whole_text(err))


def raw_socket(response: Any) -> socket.socket:
    """The socket behind what ``attach_socket`` gives."""
    with contextlib.suppress(AttributeError):
        return response._sock  # type: ignore[no-any-return]
    return response  # type: ignore[no-any-return]
