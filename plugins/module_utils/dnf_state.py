"""Read the state of dnf and rpm on this node: repositories, streams, locks, running package managers.

``error``: the reason if dnf cannot be used.
"""

import configparser
import importlib
import os
import re
import time
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils import file_access
from ansible_collections.gpunode.node.plugins.module_utils.commands import run

# dnf writes the id of the process that holds a lock to these files; root's files are in the first two folders.
LOCKS = ("/var/cache/dnf/*_lock.pid", "/var/lib/dnf/*_lock.pid", "/run/dnf/*_lock.pid")
PLUGIN = Path("/etc/dnf/plugins/versionlock.conf")
LOCKLIST = "/etc/dnf/plugins/versionlock.list"
LOCK_MARK = "gpunode (role nvidia_driver)"
# rpm keeps several versions of these packages by design.
SEVERAL = re.compile(r"kernel|gpg-pubkey|kmod-(?!nvidia)")


def lock_holder():
    """Return ``NAME (pid N)`` of the process that holds one of dnf's locks; None without one."""
    for pattern in LOCKS:
        folder, name = os.path.split(pattern)
        for path in Path(folder).glob(name):
            try:
                pid = int(path.read_text(encoding="ascii").strip())
                comm = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
            except (OSError, ValueError):
                continue  # left by a process that ended
            return f"{comm} (pid {pid})"
    return None


def awaited(limit_s):
    """Wait for dnf's locks; return the holder that remains at the time limit, None without one."""
    end = time.monotonic() + limit_s
    while lock_holder() and time.monotonic() < end:
        time.sleep(1)
    return lock_holder()


def packages():
    """Return the ``installed`` packages (name to version), and those with two versions after a failed transaction."""
    form = "%{NAME}\\t%{ARCH}\\t%{EVR}\\n"
    code, output, errors = run(["rpm", "--query", "--all", "--queryformat", form], 120)
    if code != 0:
        raise OSError(f"rpm's database: {errors.strip()}")
    seen, twice = {}, set()
    for line in output.splitlines():
        name, arch, version = line.split("\t")
        if (name, arch) in seen and not SEVERAL.match(name):
            twice.add(name)
        seen[name, arch] = version
    return {"installed": {name: version for (name, _), version in seen.items()}, "twice": sorted(twice)}


def repositories():
    """Return every configured repository: its id, its file and its URLs."""
    rows = []
    for path in sorted(Path("/etc/yum.repos.d").glob("*.repo")):
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue  # dnf reports the malformed file when it runs
        for name in parser.sections():
            rows.append({"id": name, "file": str(path), "urls": parser[name].get("baseurl", "").split()})
    return rows


def streams():
    """Return each module to its enabled stream."""
    by_module = {}
    for path in Path("/etc/dnf/modules.d").glob("*.module"):
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        parser.read(path, encoding="utf-8")
        for name in parser.sections():
            if parser[name].get("state") == "enabled":
                by_module[name] = parser[name].get("stream", "")
    return by_module


def locks():
    """Return (foreign lines, lines of the role) of the list of the plugin versionlock."""
    others: list[str] = []
    own_locks: list[str] = []
    inside = False
    try:
        text = file_access.text(LOCKLIST)
    except FileNotFoundError:
        text = ""
    for line in text.split("\n"):
        if line.startswith("#"):
            inside ^= line.endswith(LOCK_MARK)
        elif line.strip():
            (own_locks if inside else others).append(line.strip())
    return others, own_locks


def collected(holder=None):
    """Return the state of dnf and rpm, with ``error`` if dnf cannot be used."""
    state = {"error": None, "lock_holder": holder, "unfinished": [], "installed": {}, "twice": [], "streams": {}}
    try:
        # This import fails under a Python without dnf's bindings.
        state["version"] = importlib.import_module("dnf.const").VERSION
        others, own_locks = locks()
        state.update(packages(), streams=streams(), repositories=repositories(), locks=others, own_locks=own_locks)
    except (ImportError, OSError, configparser.Error) as err:
        state["error"] = " ".join(str(err).split())
    state["versionlock"] = PLUGIN.exists()
    state["runfile"] = Path("/usr/bin/nvidia-uninstall").exists()
    return state
