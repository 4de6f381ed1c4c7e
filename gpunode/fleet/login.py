"""Logging in by SSH: keys of the agent, keys in files, a password, in OpenSSH's order."""

import base64
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.auth_strategy import AuthFailure, AuthResult, AuthSource, AuthStrategy, InMemoryPrivateKey, SourceResult
from paramiko.auth_strategy import Password as PasswordSource
from paramiko.pkey import UnknownKeyType

from gpunode.fleet.host_keys import fingerprint
from gpunode.fleet.ssh_config import SshSettings, home


class _Agent(AgentSSH):
    """The agent at a given socket; without a path that of SSH_AUTH_SOCK. A missing agent is an agent without keys."""

    def __init__(self, path: str) -> None:
        super().__init__()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(10)
        try:
            sock.connect(path)
            self._connect(sock)  # type: ignore[attr-defined]
        except OSError:
            sock.close()

    def close(self) -> None:
        """Close the connection to the agent."""
        self._close()  # type: ignore[attr-defined]


class Logins(AuthStrategy):
    """Keys of the agent and of files in OpenSSH's order, then the password, with a record of what was tried."""

    def __init__(
        self,
        settings: SshSettings,
        password: str | None,
        passphrase: str | None,
        withheld: Callable[[], bool] = lambda: False,
    ) -> None:
        """Set up the keys; ``withheld``: whether the host key was not checked, called after the key was received."""
        super().__init__(ssh_config=None)  # type: ignore[arg-type]
        self._settings = settings
        self._password = password
        self._passphrase = passphrase
        self._withheld = withheld
        self._agent: _Agent | None = None
        self._tried: list[str] = []
        self._skipped: list[str] = []
        self._accepted: list[str] = []

    def get_sources(self) -> Iterator[AuthSource]:
        """See AuthStrategy."""
        if self._settings.public_key_allowed:
            yield from self._keys()
        if self._password is not None and self._settings.password_allowed:
            if self._withheld():
                self._skipped.append("the password (its host key was not verified)")
                return
            password = self._password
            self._tried.append("the password")
            yield PasswordSource(self._settings.user, lambda: password)

    def authenticate(self, transport: paramiko.Transport) -> AuthResult:
        """See AuthStrategy. In contrast to it, a login that needs a second step does not count as a success."""
        result = AuthResult(strategy=self)
        for source in self.get_sources():
            answer: list[str] | Exception
            try:
                answer = self._accepted = source.authenticate(transport)
            except paramiko.SSHException as err:
                answer = err
                if isinstance(err, paramiko.BadAuthenticationType):
                    self._accepted = list(err.allowed_types)
            result.append(SourceResult(source, answer))
            if transport.is_authenticated():
                return result
            if not transport.is_active():
                break
        raise AuthFailure(result=result)

    def _keys(self) -> Iterator[AuthSource]:
        user = self._settings.user
        files = [path for path in self._settings.identity_files if Path(path).is_file()]
        usual = f"{home()}/.ssh/id_"
        missing = [path for path in self._settings.identity_files if path not in files and not path.startswith(usual)]
        self._skipped += [f"{path} is not a file" for path in missing]
        public = {path: _public_blob(path) for path in files}
        agent_keys = self._agent_keys()
        listed = set(public.values())
        first = [key for key in agent_keys if key.asbytes() in listed]
        others = [] if self._settings.identities_only else [key for key in agent_keys if key.asbytes() not in listed]
        for key in (*first, *others):
            self._tried.append(f"agent key {fingerprint(key.asbytes())}")
            yield InMemoryPrivateKey(user, key)
        in_agent = {key.asbytes() for key in first}
        for path in files:
            if public[path] in in_agent and public[path] is not None:
                continue
            pkey = self._load(path)
            if pkey is not None and _too_short(pkey, self._settings):
                self._skipped.append(f"{path} has {pkey.get_bits()} bits, below RequiredRSASize")
            elif pkey is not None:
                self._tried.append(path)
                yield InMemoryPrivateKey(user, pkey)

    def _agent_keys(self) -> tuple[AgentKey, ...]:
        path = self._settings.identity_agent or os.environ.get("SSH_AUTH_SOCK", "none")
        if path == "none":
            return ()
        self._agent = _Agent(path)
        try:
            return tuple(self._agent.get_keys())
        except (OSError, paramiko.SSHException):
            return ()

    def _load(self, path: str) -> paramiko.PKey | None:
        for passphrase in (None, self._passphrase):
            try:
                return paramiko.PKey.from_path(path, passphrase.encode() if passphrase else None)  # type: ignore[arg-type]
            except TypeError:
                reason = "needs a passphrase: add it to ssh-agent"
            except OSError as err:
                reason = err.strerror or "cannot be read"
            except (ValueError, paramiko.SSHException, UnknownKeyType):
                reason = "cannot be read, or the passphrase is wrong"
        self._skipped.append(f"{path} {reason}")
        return None

    def explain(self) -> str:
        """Return one line: the user, what was tried, what was not and why."""
        parts = [f"login refused for user {self._settings.user}: "]
        parts.append(f"tried {', '.join(self._tried)}" if self._tried else "no key or password to try")
        if self._skipped:
            parts.append(f"; not tried: {', '.join(self._skipped)}")
        if self._accepted and not {"publickey", "password"} & set(self._accepted):
            parts.append(f"; the node accepts {', '.join(self._accepted)}")
        return "".join(parts) + "; set ansible_user and ansible_ssh_private_key_file, or add the key to the node"

    def close(self) -> None:
        """Close the agent."""
        if self._agent is not None:
            self._agent.close()


def _too_short(key: paramiko.PKey, settings: SshSettings) -> bool:
    return key.get_name() == "ssh-rsa" and key.get_bits() < settings.least_rsa_bits


def _public_blob(path: str) -> bytes | None:
    """Return the public half of a private key, or ``path`` itself if it is a public key."""
    for name in (f"{path}.pub", path):
        with suppress(OSError, ValueError, IndexError, UnicodeDecodeError):
            fields = Path(name).read_text(encoding="ascii").split()
            return base64.b64decode(fields[1], validate=True)
    return None
