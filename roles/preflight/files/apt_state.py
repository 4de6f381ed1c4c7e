"""Print what apt and dpkg hold on this node, as JSON: sources, packages, who has the package lock.

Runs as ``python3 -`` with the standard library alone: python3-apt may not be there yet. Without dpkg: ``null``.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock", "/var/lib/apt/lists/lock")


def output_of(argv):
    """Standard output of a command; empty where it fails, for the callers then know nothing."""
    try:
        done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def deb822_entries(text):
    """Stanzas of a .sources file as field dicts; a field's further lines are joined by line ends."""
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
    """Lines of a .list file in the same shape; ``arch`` gets the name that it has in the other format."""
    for line in text.splitlines():
        found = re.match(r"\s*(deb|deb-src)\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if found:
            kind, options, uri, suite, components = found.groups()
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
    """(file, suite) of a source to what its Release file says; only of what was fetched already."""
    form = "$(SOURCESENTRY)|$(RELEASE)|$(ORIGIN)|$(CODENAME)"
    seen = {}
    for line in output_of(["apt-get", "indextargets", "--format", form, "Created-By: Packages"]).splitlines():
        parts = line.split("|")
        if len(parts) == 4:
            entry, suite, origin, codename = parts
            seen[entry.rpartition(":")[0], suite] = {"origin": origin, "codename": codename}
    return seen


def sources():
    """Every enabled entry of the node's sources, with the file that it stands in."""
    seen = origins()
    apt = Path("/etc/apt")
    found = []
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))):
        if path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for entry in (deb822_entries if path.suffix == ".sources" else one_line_entries)(text):
            known = {suite: seen[str(path), suite] for suite in entry["suites"] if (str(path), suite) in seen}
            found.append({"file": str(path), "origins": known, **entry})
    return found


def packages():
    """(installed: name to version, unfinished: names of packages that dpkg left half-done)."""
    form = "${db:Status-Status}\\t${Package}\\t${Version}\\n"
    installed, unfinished = {}, []
    for line in output_of(["dpkg-query", "-W", "-f", form]).splitlines():
        status, name, version = line.split("\t")
        if status == "installed":
            installed[name] = version
        elif status not in ("config-files", "not-installed"):
            unfinished.append(name)
    return installed, unfinished


def lock_holder():
    """``NAME (pid N)`` of the process that holds a package lock, None where nobody does."""
    inodes = {Path(path).stat().st_ino for path in LOCKS if Path(path).exists()}
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        held = re.search(r" (\d+) [0-9a-f]+:[0-9a-f]+:(\d+) ", line)
        if held and int(held[2]) in inodes:
            return f"{process_name(held[1])} (pid {held[1]})"
    return None


def process_name(pid):
    """The short name of a process, or a word for one that is gone or not in our view."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "a process"


def main():
    """Print one JSON document."""
    if not Path("/var/lib/dpkg/status").exists():
        json.dump(None, sys.stdout)
        return
    installed, unfinished = packages()
    state = {
        "sources": sources(),
        "lists": any(Path("/var/lib/apt/lists").glob("*_Packages*")),
        "headers": output_of(["apt-cache", "pkgnames", "linux-headers-"]).split(),
        "installed": installed,
        "unfinished": unfinished,
        "architecture": output_of(["dpkg", "--print-architecture"]).strip(),
        "lock_holder": lock_holder(),
        "runfile": Path("/usr/bin/nvidia-uninstall").exists(),
    }
    json.dump(state, sys.stdout)


if __name__ == "__main__":
    main()
