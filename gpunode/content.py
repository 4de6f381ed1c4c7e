"""Location of the Ansible half, and the environment in which Ansible's programs find it."""

import os
import sys
from pathlib import Path

from gpunode.errors import UsageError

_PACKAGE = Path(__file__).resolve().parent
_INSTALLED = _PACKAGE.parent / "ansible_collections" / "gpunode" / "node"
_MARK = "galaxy.yml"
LOCK = "requirements.lock"


def collection_root() -> Path:
    """Return the folder of the collection ``gpunode.node``: roles/, playbooks/, plugins/, ansible.cfg.

    The checkout that contains the package takes precedence over the copy that a wheel installs beside the package.
    Raises UsageError if neither exists.
    """
    for folder in (_PACKAGE.parent, _INSTALLED):
        if (folder / _MARK).is_file() and (folder / "ansible.cfg").is_file():
            return folder
    raise UsageError(f"the roles and playbooks are not in {_PACKAGE.parent} or {_INSTALLED}: reinstall gpunode")


def lock_file() -> Path:
    """Return requirements.lock: all dependencies with their hashes. Raises UsageError if it is missing."""
    for file in (_PACKAGE.parent / LOCK, _PACKAGE / LOCK):
        if file.is_file():
            return file
    raise UsageError(f"{LOCK} is not in {_PACKAGE}: reinstall gpunode")


def ansible_environment() -> dict[str, str]:
    """Return the process environment, with what Ansible's programs need to find the collection.

    The user's own settings take precedence: ``ANSIBLE_CONFIG``, or an ``ansible.cfg`` in the current folder, is kept,
    and ours is the default in place of ``~/.ansible.cfg`` and ``/etc/ansible/ansible.cfg``. Ours is the first path in
    ``ANSIBLE_COLLECTIONS_PATH``, followed by the paths that were set there, or else by Ansible's defaults.
    """
    root = collection_root()
    env = dict(os.environ)
    if not env.get("ANSIBLE_CONFIG") and not Path("ansible.cfg").is_file():
        env["ANSIBLE_CONFIG"] = str(root / "ansible.cfg")
    shipped = root.parents[2] if root == _INSTALLED else root / "collections"
    configured = env.get("ANSIBLE_COLLECTIONS_PATH") or "~/.ansible/collections:/usr/share/ansible/collections"
    env["ANSIBLE_COLLECTIONS_PATH"] = f"{shipped}{os.pathsep}{configured}"
    return env


def ansible_program(name: str) -> str:
    """Return the path of an Ansible program (``ansible-playbook`` …): the one installed beside our own interpreter.

    Raises UsageError if it is missing.
    """
    for folder in (Path(sys.executable).parent, Path(sys.prefix) / "bin"):
        path = folder / name
        if path.is_file():
            return str(path)
    raise UsageError(f"{name} is missing next to {sys.executable}: reinstall gpunode with its dependency ansible-core")
