"""State of a lab on the controller: its key pair, the nodes' host keys, and SSH and Ansible configuration."""

import os
import re
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from gpunode.errors import UndeterminedError, UsageError
from gpunode.lab.packages.rows import repositories, repository_of
from gpunode.lab.recipe import ADMIN

HOME_VARIABLE = "GPUNODE_LAB_HOME"
GROUP = "gpu_nodes"
FINISHED = "demo-finished"
"""Left by scripts/demo_steps.py when a demo on this lab ended well."""
_FILES = ("id_ed25519", "id_ed25519.pub", "known_hosts", "ssh_config", "inventory.yml", "operator-password", FINISHED)
_VENDOR = "http://vendor"
_KEYGEN_LIMIT_S = 30
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


class Reachable(Protocol):
    """What is needed to connect to a node."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def host_key(self) -> str: ...
    @property
    def os(self) -> str: ...
    @property
    def hardware(self) -> str | None: ...


def checked_name(name: str) -> str:
    """Return the lab's name; UsageError if it is invalid (it becomes part of container and folder names)."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r}: a lab's name is 1 to 40 lower-case letters, digits and dashes, no dash at an end"
        )
    return name


@dataclass(frozen=True)
class LabState:
    """The folder of one lab: ``GPUNODE_LAB_HOME/NAME``, else ``~/.local/state/gpunode/lab/NAME``. Mode 0700."""

    folder: Path

    @classmethod
    def of(cls, name: str) -> "LabState":
        """Return the state of the lab of that name; nothing is created yet."""
        if chosen := os.environ.get(HOME_VARIABLE):
            home = Path(chosen).absolute()
        else:
            base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
            home = Path(base).absolute() / "gpunode/lab"
        if set(str(home)) & set(" \t\n\"'%\\"):
            # ssh quotes differently in each of the places where these paths are written.
            raise UsageError(
                f"{home}: a lab's directory must not contain blanks, quotes or %: set {HOME_VARIABLE} to another"
            )
        return cls(home / checked_name(name))

    @property
    def key(self) -> Path:
        """Return the path of the private key for every node."""
        return self.folder / "id_ed25519"

    @property
    def has_key(self) -> bool:
        """Return whether the pair is complete; ssh-keygen writes the public key last."""
        return self.key.exists() and self.key.with_suffix(".pub").exists()

    @property
    def known_hosts(self) -> Path:
        """Return the path of the nodes' host keys, written before the first connection."""
        return self.folder / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        """Return the path for ``ssh -F``."""
        return self.folder / "ssh_config"

    @property
    def inventory(self) -> Path:
        """Return the path for ``ansible-playbook -i``."""
        return self.folder / "inventory.yml"

    @property
    def password(self) -> Path:
        """Return the path of the password that sudo asks the account ``operator`` for."""
        return self.folder / "operator-password"

    def vendor_key(self, name: str) -> Path:
        """Return the path of the public key of what the vendor repository signs in the name of NVIDIA, Ubuntu …"""
        return self.folder / f"vendor-{name}.asc"

    def write_vendor_keys(self, keys: Mapping[str, str]) -> None:
        """Write the vendor repository's armoured keys, which the roles copy to the nodes."""
        for name, text in keys.items():
            _write(self.vendor_key(name), text)

    def prepare(self) -> None:
        """Create the folder, the key pair and the password where they do not exist."""
        names = {path.name for path in self._lab_paths()}
        if self.folder.is_dir() and (foreign := {path.name for path in self.folder.iterdir()} - names):
            problem = f"{self.folder} contains {min(foreign)}, which does not belong to a lab"
            raise UsageError(f"{problem}: choose another --name or {HOME_VARIABLE}")
        try:
            self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as err:
            raise UndeterminedError(
                f"{self.folder}: {err.strerror}: set {HOME_VARIABLE} to a folder of your own"
            ) from None
        if not self.has_key:
            self.key.unlink(missing_ok=True)
            make_key(self.key, "gpunode-lab")
        if not self.password.exists():
            _write(self.password, secrets.token_urlsafe(18) + "\n")

    def write(self, nodes: Sequence[Reachable]) -> None:
        """Write known_hosts, ssh_config and the inventory for exactly these nodes."""
        _write(self.known_hosts, "".join(f"[{node.address}]:{node.port} {node.host_key}\n" for node in nodes))
        _write(self.ssh_config, self._ssh_config(nodes))
        _write(self.inventory, self._inventory(nodes))

    def remove(self) -> bool:
        """Remove the lab's files, and its folder if nothing else is in it; return True if there was a lab."""
        paths = [path for path in self._lab_paths() if path.exists()]
        for path in paths:
            path.unlink()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
        return bool(paths)

    def _lab_paths(self) -> list[Path]:
        """Return the paths that a lab writes, and those that a killed write leaves."""
        paths = [*(self.folder / name for name in _FILES), *map(self.vendor_key, _vendor_keys())]
        return [*paths, *map(_beside, paths)]

    def _ssh_config(self, nodes: Sequence[Reachable]) -> str:
        hosts = [f"Host {node.name}\n  HostName {node.address}\n  Port {node.port}\n" for node in nodes]
        options = {
            "User": ADMIN,
            "IdentityFile": self.key,
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "UserKnownHostsFile": self.known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
            "UpdateHostKeys": "no",
            "BatchMode": "yes",
            "ConnectTimeout": "10",
            "ServerAliveInterval": "15",
        }
        return "\n".join(hosts) + "\nHost *\n" + "".join(f"  {key} {value}\n" for key, value in options.items())

    def _inventory(self, nodes: Sequence[Reachable]) -> str:
        hosts = {
            node.name: {"ansible_host": node.address, "ansible_port": node.port} | self._variables(node)
            for node in nodes
        }
        options = {
            "UserKnownHostsFile": self.known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
            "IdentitiesOnly": "yes",
        }
        common = {
            "ansible_user": ADMIN,
            "ansible_ssh_private_key_file": str(self.key),
            "ansible_ssh_common_args": " ".join(f"-o {key}={value}" for key, value in options.items()),
            "ansible_python_interpreter": "/usr/bin/python3",
            "gpunode_lab": True,
        }
        tree = {GROUP: {"hosts": hosts, "vars": common}}
        return "# Written by gpunode lab up; changes are lost.\n" + yaml.safe_dump(tree, sort_keys=False, width=1000)

    def _variables(self, node: Reachable) -> dict[str, Any]:
        """Return the roles' variables of a node: the sources of its driver and its container engine."""
        docker = self._docker(node)
        if node.hardware is None:
            # Without a vendor's repository a node has only its own archive.
            return docker | {
                "nvidia_driver_source": "debian",
                "nvidia_container_toolkit_version": "none",
                "preflight_require_gpu": False,
            }
        known = repositories()
        signs = known[repository_of(node.os)].key
        by_rpm = known[repository_of(node.os)].kind == "rpm"
        toolkit = known["container-toolkit-rpm" if by_rpm else "container-toolkit"].key
        return docker | {
            "nvidia_repository_url": f"{_VENDOR}/compute/cuda/repos",
            "nvidia_repository_key": str(self.vendor_key(signs)),
            "nvidia_container_toolkit_url": f"{_VENDOR}/libnvidia-container",
            "nvidia_container_toolkit_key": str(self.vendor_key(toolkit)),
        }

    def _docker(self, node: Reachable) -> dict[str, Any]:
        """Return the source of Docker: systems with dnf have none, and the lab's repository is only for EL 9."""
        if not node.os.startswith("rocky-"):
            return {"docker_source": "distribution"}
        if node.os != "rocky-9":
            return {"docker_state": "absent"}
        return {
            "docker_source": "docker",
            "docker_repository_url": f"{_VENDOR}/linux",
            "docker_repository_key": str(self.vendor_key(repositories()["docker-rpm"].key)),
        }


def _vendor_keys() -> set[str]:
    return {repository.key for repository in repositories().values()}


def make_key(path: Path, comment: str) -> str:
    """Create an ed25519 key pair without a passphrase; return the public key's line (type and key)."""
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    try:
        subprocess.run(
            argv,
            check=True,
            capture_output=True,
            timeout=_KEYGEN_LIMIT_S,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise UndeterminedError("ssh-keygen is missing: apt-get install openssh-client") from None
    except subprocess.TimeoutExpired:
        raise UndeterminedError(f"ssh-keygen did not end within {_KEYGEN_LIMIT_S} s") from None
    except subprocess.CalledProcessError as err:
        raise UndeterminedError(f"ssh-keygen: {err.stderr.decode(errors='replace').strip()}") from None
    return " ".join(path.with_name(path.name + ".pub").read_text(encoding="ascii").split()[:2])


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _write(path: Path, text: str) -> None:
    """Write a file of mode 0600 in one step."""
    new = _beside(path)
    new.unlink(missing_ok=True)
    new.touch(mode=0o600, exist_ok=False)
    new.write_text(text, encoding="utf-8")
    new.replace(path)
