"""Read the state of apt and dpkg on this node: sources, packages, the holder of the package lock.

Standard library only: python3-apt may not be installed.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils.apt_private import (
    APT,
    SOURCES,
    AptError,
    names_left,
    output_of,
    passing_over_damaged,
    rows_of_dpkg,
)

LOCK_TABLE = Path("/proc/locks")
LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock")
# apt rewrites an outdated cache on every call, but reading the state must change nothing. Without a cache apt is slow.
CACHE = Path("/var/cache/apt/pkgcache.bin")
# The lists alone, without what is installed: apt reads dpkg's status on top of it in a tenth of the time.
LISTS_CACHE = Path("/var/cache/apt/srcpkgcache.bin")
LISTED = ("/var/lib/apt/lists", "/etc/apt", "/etc/apt/sources.list.d")
CACHED = ("/var/lib/dpkg/status", *LISTED, "/etc/apt/preferences.d")
NO_INSTALLED = ("-o", "Dir::Cache::pkgcache=")
NO_CACHE = (*NO_INSTALLED, "-o", "Dir::Cache::srcpkgcache=")
# Packages of which the publisher is read: those of a driver, and the tools that build its modules.
GPU_STACK = re.compile(r"nvidia|libcuda|libnv|libxnvctrl|cuda-drivers|^(dh-)?dkms$")
POLICY = Path("/usr/sbin/policy-rc.d")
UNATTENDED = ("apt-daily.service", "apt-daily-upgrade.service")
OWN_LIST = Path("/etc/apt/apt.conf.d/52gpunode-nvidia-driver")


def output_or_empty(argv):
    """Return the standard output of a command; empty if it fails, which the callers treat as unknown."""
    try:
        return output_of(argv, 60)
    except (AptError, OSError):
        return ""


def deb822_entries(text):
    """Yield the stanzas of a .sources file as dicts of fields; continuation lines are joined by newlines."""
    for block in re.split(r"\n[ \t]*\n", text):
        fields, name = {}, None
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                if name:
                    fields[name] += "\n" + line[1:]
            elif ":" in line:
                name, value = line.split(":", 1)
                fields[name] = value.strip()
        named = {name.lower(): value for name, value in fields.items()}
        if "uris" in named and named.get("enabled", "yes").lower() not in ("no", "false", "without", "off"):
            yield {
                "types": named.get("types", "deb").split(),
                "uris": named["uris"].split(),
                "suites": named.get("suites", "").split(),
                "components": named.get("components", "").split(),
                "options": {
                    name: value
                    for name, value in fields.items()
                    if name.lower() not in ("types", "uris", "suites", "components", "enabled")
                },
            }


def one_line_entries(text):
    """Yield the lines of a .list file in the same shape; the option ``arch`` is named as in a .sources file."""
    for line in text.splitlines():
        match = re.match(r"\s*(deb|deb-src)\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if match:
            kind, options, uri, suite, components = match.groups()
            pairs = [option.split("=", 1) for option in (options or "").split() if "=" in option]
            yield {
                "types": [kind],
                "uris": [uri],
                "suites": [suite],
                "components": components.split(),
                "options": {
                    {"arch": "Architectures"}.get(name, name): value.replace(",", " ") for name, value in pairs
                },
            }


def origins():
    """Return (file, suite) of a source to origin and codename of its Release file, for sources with fetched lists."""
    form = "$(SOURCESENTRY)|$(RELEASE)|$(ORIGIN)|$(CODENAME)"
    seen = {}
    for line in output_or_empty(["apt-get", "indextargets", "--format", form, "Created-By: Packages"]).splitlines():
        parts = line.split("|")
        if len(parts) == 4:
            entry, suite, origin, codename = parts
            file = Path(entry.rpartition(":")[0])
            # If a damaged file was left out, apt reads the others through links in a private folder.
            path = APT / SOURCES / file.name if file.parent.name == SOURCES else file
            seen[str(path), suite] = {"origin": origin, "codename": codename}
    return seen


def sources():
    """Return every enabled entry of the node's sources, with its file."""
    seen = origins()
    entries = []
    for path in (APT / "sources.list", *sorted((APT / SOURCES).glob("*"))):
        if path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for entry in (deb822_entries if path.suffix == ".sources" else one_line_entries)(text):
            known = {suite: seen[str(path), suite] for suite in entry["suites"] if (str(path), suite) in seen}
            entries.append({"file": str(path), "origins": known, **entry})
    return entries


def packages():
    """Return the ``installed`` packages (name to version), and the names of ``unfinished`` and ``held`` ones."""
    installed, unfinished, held = {}, [], []
    for name, version, status, want in rows_of_dpkg():
        if want == "hold":
            held.append(name)
        if status in ("installed", "triggers-awaited", "triggers-pending"):
            installed[name] = version
        elif status not in ("config-files", "not-installed"):
            unfinished.append(name)
    return {"installed": installed, "unfinished": unfinished, "held": held}


def publishers(installed):
    """Return each installed package of the GPU stack to (Origin, Label) of the repositories that list its version."""
    names = [name for name in installed if GPU_STACK.search(name)]
    if not names:
        return {}
    form = "$(REPO_URI)|$(ORIGIN)|$(LABEL)"
    targets = output_or_empty(["apt-get", "indextargets", "--format", form, "Created-By: Packages"]).splitlines()
    repositories = [line.split("|") for line in targets if line.count("|") == 2]
    by_name: dict[str, list[list[str]]] = {}
    name, exact = "", False
    for line in output_or_empty(["apt-cache", *read_only_options(), "policy", *names]).splitlines():
        if re.match(r"\S+:$", line):
            name, exact = line[:-1], False
        elif re.match(r" (\*\*\*|   ) \S", line):
            exact = line.startswith(" ***")
        elif exact and re.match(r" +-?\d+ \w+:/", line):
            uri = line.split()[1].rstrip("/") + "/"
            by_name.setdefault(name, []).extend(pair for known, *pair in repositories if uri == known.rstrip("/") + "/")
    return by_name


def read_only_options():
    """Return options with which apt-cache writes nothing: it uses the caches that are fresh, and no others."""
    if newer(CACHE, CACHED):
        return ()
    return NO_INSTALLED if newer(LISTS_CACHE, LISTED) else NO_CACHE


def newer(cache, paths):
    """Return whether a cache exists and was written after all of these paths."""
    return cache.exists() and all(
        Path(path).stat().st_mtime < cache.stat().st_mtime for path in paths if Path(path).exists()
    )


def policy_left():
    """Return whether a killed run left its policy-rc.d, with which no service of a package starts."""
    try:
        return "# Of gpunode," in POLICY.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def header_packages():
    """Return the names of all kernel header packages in the node's sources."""
    return output_or_empty(["apt-cache", *read_only_options(), "pkgnames", "linux-headers-"]).split()


def own_holds():
    """Return the packages that the role nvidia_driver holds: those that it excludes from unattended upgrades."""
    try:
        text = OWN_LIST.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [re.sub(r"\[(.)\]", r"\1", name) for name in re.findall(r'"\^(.+)\$";', text)]


def lock_holder():
    """Return ``NAME (pid N)`` of the process that holds a package lock; None without one.

    The kernel lists device and inode. On some file systems (btrfs, overlay) its device number differs from that of
    stat. Then the process must have the file open: a user can lock a file of their own with any inode number.
    """
    files = {(status.st_dev, status.st_ino) for path in LOCKS if Path(path).exists() for status in [Path(path).stat()]}
    for line in LOCK_TABLE.read_text(encoding="ascii", errors="replace").splitlines():
        held = re.search(r" (\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", line)
        if not held or int(held[4]) not in {inode for _, inode in files}:
            continue
        if (os.makedev(int(held[2], 16), int(held[3], 16)), int(held[4])) in files or has_open(held[1], files):
            return f"{process_name(held[1])} (pid {held[1]})"
    return None


def has_open(pid, files):
    """Return whether a process has one of the lock files open."""
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for link in links:
        # What else a user has open is not looked at: their file system may never answer.
        with suppress(OSError):
            if str(link.readlink()) in LOCKS and ((status := link.stat()).st_dev, status.st_ino) in files:
                return True
    return False


def process_name(pid):
    """Return the short name of a process; ``a process`` if it ended or is not visible."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "a process"


def unattended_run():
    """Return the active unit of apt's own upgrades; None without one. Between two steps it holds no lock."""
    argv = ["systemctl", "show", "--property=Id,ActiveState", *UNATTENDED]
    units = [dict(re.findall(r"(?m)^(\w+)=(.*)$", block)) for block in output_or_empty(argv).split("\n\n")]
    return next((unit["Id"] for unit in units if unit.get("ActiveState") == "activating"), None)


def at_work():
    """Return the process or unit that holds a package lock or is about to take it; None without one."""
    return lock_holder() or unattended_run()


def awaited(limit_s):
    """Wait for package locks; return the holder that remains at the time limit, None without one."""
    end = time.monotonic() + limit_s
    while at_work() and time.monotonic() < end:
        time.sleep(2)
    return at_work()


def collected(holder=None):
    """Return the state of apt and dpkg; None without dpkg, ``{"error": one line}`` if apt cannot be run."""
    if not Path("/var/lib/dpkg/status").exists():
        return None
    try:
        with passing_over_damaged({}):
            held = packages()
            parts = {"sources": sources(), "headers": header_packages(), "publishers": publishers(held["installed"])}
    except (AptError, OSError) as error:
        # An empty state would be refused for the wrong reason: no sources, no headers.
        return {"error": " ".join(str(error).split())}
    return {
        **parts,
        "lists": any(Path("/var/lib/apt/lists").glob("*_Packages*")),
        **held,
        "own_holds": own_holds(),
        "policy_left": policy_left(),
        "left": names_left(),
        "architecture": output_or_empty(["dpkg", "--print-architecture"]).strip(),
        "lock_holder": holder,
        "runfile": Path("/usr/bin/nvidia-uninstall").exists(),
    }
