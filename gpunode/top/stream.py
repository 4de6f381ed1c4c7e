"""One connection per node for as long as somebody looks, each in a thread, with the program that samples there."""

import contextlib
import threading
import time
from collections.abc import Sequence
from random import uniform

import paramiko

from gpunode.fleet import NodeFailure, Target
from gpunode.fleet.asking import Turn
from gpunode.fleet.connection import Gateways
from gpunode.fleet.session import Session, begin
from gpunode.onnode import program_text
from gpunode.probe.bundle import redacted
from gpunode.text import last_line, now
from gpunode.top.model import BEAT_S, NodeModel, TopDocument
from gpunode.top.samples import GPU_FIELDS

WHAT = "the sampler"
LIMIT_S = 24 * 3600.0
"""The node ends the program by itself after this; it is started again."""
SILENCE_S = 30.0
LINE_BYTES = 4096
WINDOW_S, WINDOW_BYTES = 10.0, 4 << 20
"""Maximum that a node may send in a time: 64 GPUs with 512 processes at an interval of 1 s send a tenth of it."""
RETRY_S, RETRY_MOST_S = 5.0, 60.0
_LOADER = "import sys;exec(compile(sys.stdin.buffer.read(int(sys.argv[1])),'gpunode-top','exec'))"


def node_program() -> bytes:
    """Return the program that runs on a node."""
    return program_text("top").encode()


class FleetModel:
    """All nodes, for threads that feed them and one that reads."""

    def __init__(self, hosts: Sequence[str], interval_s: int, window_s: float) -> None:
        self.lock = threading.Lock()
        self.interval_s, self.window_s = interval_s, window_s
        self.nodes = [NodeModel(host, interval_s, window_s) for host in hosts]

    def snapshot(self) -> TopDocument:
        """Return what is known now."""
        with self.lock:
            nodes = tuple(node.snapshot() for node in self.nodes)
        return TopDocument(at=now(), interval_s=self.interval_s, window_s=self.window_s, nodes=nodes)


class Watch:
    """The streams of all nodes. A context manager: at its end nothing is left on the nodes."""

    def __init__(  # noqa: PLR0913
        self,
        targets: Sequence[Target],
        model: FleetModel,
        *,
        parallel: int,
        timeout_s: float,
        become_password: str | None = None,
        again: bool = True,
    ) -> None:
        """Set up; ``timeout_s`` is the limit for a login, ``again`` whether lost nodes are connected again."""
        self._targets, self._model = targets, model
        self._slots = threading.Semaphore(parallel)
        self._timeout_s, self._become_password, self._again = timeout_s, become_password, again
        self._gateways = Gateways()
        self._over = threading.Event()
        self._turns: dict[str, Turn] = {}
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Watch":
        for target, node in zip(self._targets, self._model.nodes, strict=True):
            # Daemon threads: one that hangs in the resolver must not keep the process from exiting.
            self._threads.append(threading.Thread(target=self._follow, args=(target, node), daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for turn in list(self._turns.values()):
            turn.abort()
        self._gateways.close()
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _follow(self, target: Target, node: NodeModel) -> None:
        wait_s = RETRY_S
        while not self._over.is_set():
            began = time.monotonic()
            turn = self._turns[target.name] = Turn(target, self._gateways, self._timeout_s, self._become_password)
            try:
                self._connected(turn, node)
                reason = "the connection ended"
            except Exception as err:
                # An unexpected error on one node must not end the others.
                reason = turn.reason(err)
            with self._model.lock:
                # A refused login is not tried again: repeated failures lock accounts.
                retry = self._again and (node.answered or reason.startswith("unreachable"))
                node.set_status("failed", reason)
            if not retry:
                return
            wait_s = RETRY_S if time.monotonic() - began > RETRY_MOST_S else min(2 * wait_s, RETRY_MOST_S)
            self._over.wait(wait_s * uniform(0.7, 1.0))  # noqa: S311 (spreads the logins)

    def _connected(self, turn: Turn, node: NodeModel) -> None:
        try:
            with self._slots:
                if self._over.is_set():
                    return
                turn.allow(self._timeout_s)
                session, rest = self._started(turn)
                turn.unlimited()
            self._read(session, node, rest, turn.secrets)
        except (OSError, EOFError, paramiko.SSHException) as err:
            raise NodeFailure(f"the connection was lost: {err or type(err).__name__}") from None
        finally:
            turn.end()

    def _started(self, turn: Turn) -> tuple[Session, bytes]:
        """Log in and start the program; return its session and the first bytes of its output."""
        connected = turn.login()
        text = node_program()
        arguments = ("-I", "-c", _LOADER, str(len(text)), str(self._model.interval_s), *GPU_FIELDS)
        program = connected.python(limit_s=LIMIT_S, arguments=arguments, label=WHAT)
        session = connected.session(program, turn.ends)
        first, _ = begin(session, program, connected.password, turn.ends)
        session.write(text, max(0.1, turn.ends - time.monotonic()))
        return session, bytes(first)

    def _read(self, session: Session, node: NodeModel, rest: bytes, secrets: Sequence[str]) -> None:
        """Feed the model until the node, its program, or the watch ends."""
        now = heard = window = time.monotonic()
        beat_due, taken, complaints = now, 0, b""
        while not self._over.is_set():
            if session.ended:
                last = last_line(complaints.decode(errors="replace"))
                status = session.exit_status
                raise NodeFailure(f"{WHAT} ended with exit code {status}{f': {last}' if last else ''}")
            out, err = session.read(0.5)
            now = time.monotonic()
            complaints = (complaints + err)[-4096:]
            if now - window > WINDOW_S:
                window, taken = now, 0
            taken += len(out) + len(err)
            *lines, rest = (rest + out).split(b"\n")
            if taken > WINDOW_BYTES or len(rest) > LINE_BYTES:
                raise NodeFailure("the node sends too much: not a sampler's output")
            if out:
                heard = now
            with self._model.lock:
                for line in lines:
                    node.feed(redacted(line[:LINE_BYTES].decode(errors="replace"), secrets))
                beat = node.beat() if now >= beat_due else None
            if beat is not None:
                beat_due = now + BEAT_S
                with contextlib.suppress(TimeoutError):
                    session.write(f"{beat}\n".encode(), BEAT_S)
            if now - heard > SILENCE_S:
                raise NodeFailure(f"no answer for {SILENCE_S:.0f} s: the node or the connection hangs")
