"""Kernel modules: in memory, on disk, and kept out by configuration."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.node import LoadedDriver, ModuleFile
from gpunode.facts.parsers import driver_version
from gpunode.facts.probed import GPU_MODULE, MODPROBE_FOLDERS
from gpunode.facts.seen import Seen, Unseen, first_line

_VERSION = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,4}){1,2}")
_MODULE_LINE = re.compile(r"([A-Za-z0-9_-]+) [0-9]+ .*")
_MODULE_PATH = re.compile(r"(?:/usr)?/lib/modules/([^/]+)/.+")
_DO_NOTHING = re.compile(r"(?:/usr)?/bin/(?:false|true)")


def loaded(seen: Seen) -> tuple[str, ...]:
    """Names of the loaded modules; none where the kernel was built without loadable modules."""
    text = seen.text("/proc/modules")
    if text is None:
        # A sandbox that hides /proc/modules hides these as well; a kernel without modules lacks the second alone.
        hidden = seen.text("/proc/sys/kernel/tainted") is None
        if hidden or seen.text("/proc/sys/kernel/modules_disabled") is not None:
            raise Unseen("/proc/modules is not there")
        return ()
    names = []
    for line in text.splitlines():
        match = _MODULE_LINE.fullmatch(line)
        if not match:
            raise ParseError(f"expected a line of /proc/modules, found '{first_line(line)}'")
        names.append(match[1])
    return tuple(names)


def loaded_driver(seen: Seen) -> LoadedDriver | None:
    """From ``/proc/driver/nvidia/version``, else ``/sys/module/nvidia/version``; None: no such module is loaded."""
    text = seen.text("/proc/driver/nvidia/version")
    if text is not None:
        parsed = driver_version.parse(text)
        return LoadedDriver(version=parsed.version, flavour=parsed.flavour)
    version = seen.text("/sys/module/nvidia/version")
    if version is not None:
        if not _VERSION.fullmatch(version.strip()):
            raise ParseError(f"expected a version in /sys/module/nvidia/version, found '{first_line(version)}'")
        return LoadedDriver(version=version.strip(), flavour=None)
    if "nvidia" in loaded(seen):
        raise Unseen("the module nvidia is loaded, but /proc/driver/nvidia and /sys/module do not report its version")
    return None


def files(seen: Seen) -> tuple[ModuleFile, ...]:
    """The GPU's module as it lies on disk for each kernel, in modinfo's words."""
    if seen.folder("/lib/modules/") is None:
        return ()
    paths = seen.output("find-modules").splitlines()
    if not any(GPU_MODULE.search(path) for path in paths):
        return ()
    found = parse_modinfo(seen.output("modinfo"))
    missing = set(seen.command("modinfo").argv[1:]) - {module.path for module in found}
    if missing:
        raise ParseError(f"modinfo does not report {sorted(missing)[0]}")
    return found


def parse_modinfo(text: str) -> tuple[ModuleFile, ...]:
    """Read modinfo's answer for several files, each of which begins with ``filename:``."""
    blocks: list[dict[str, str]] = []
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if name == "filename" and colon:
            blocks.append({})
        if not blocks:
            raise ParseError(f"expected modinfo's line 'filename:', found '{first_line(line)}'")
        if colon and name:
            blocks[-1].setdefault(name, value.strip())
    return tuple(_module_file(block) for block in blocks)


def _module_file(block: dict[str, str]) -> ModuleFile:
    path = block["filename"]
    match = _MODULE_PATH.fullmatch(path)
    if not match:
        raise ParseError(f"expected a path in /lib/modules from modinfo, found '{first_line(path)}'")
    licence = block.get("license", "")
    return ModuleFile(
        kernel=match[1],
        path=path,
        version=block.get("version") or None,
        vermagic=block.get("vermagic") or None,
        flavour={"NVIDIA": "proprietary", "Dual MIT/GPL": "open"}.get(licence),
        signed=bool(block.get("signer") or block.get("sig_id")),
    )


def nouveau_blacklisted(seen: Seen) -> bool:
    """True where one setting keeps nouveau from being loaded by itself; False only where all of them were seen."""
    unseen = None
    try:
        if _blacklisted_on_command_line(seen.text("/proc/cmdline") or ""):
            return True
    except Unseen as err:
        unseen = err
    known: set[str] = set()
    for folder in MODPROBE_FOLDERS:
        try:
            names = [name for name in seen.folder(folder) or () if name not in known]
            # A file hides those of the same name in the folders after it.
            known.update(names)
            texts = [seen.text(folder + name) for name in names if seen.asked(folder + name)]
        except Unseen as err:
            unseen = err
            continue
        if any(_blacklisted_in(text or "") for text in texts):
            return True
    if unseen:
        raise unseen
    return False


def _blacklisted_on_command_line(text: str) -> bool:
    words = (word.partition("=")[::2] for word in text.split())
    return any(
        name in {"modprobe.blacklist", "module_blacklist"} and "nouveau" in value.split(",") for name, value in words
    )


def _blacklisted_in(text: str) -> bool:
    """``blacklist nouveau``, ``install nouveau /bin/false`` or ``alias nouveau off`` in a file of modprobe.d(5)."""
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split()
        if words[:2] == ["blacklist", "nouveau"] or words[:3] == ["alias", "nouveau", "off"]:
            return True
        if words[:2] == ["install", "nouveau"] and len(words) == 3 and _DO_NOTHING.fullmatch(words[2]):
            return True
    return False
