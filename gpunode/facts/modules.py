"""Kernel modules: loaded, installed, and blacklisted."""

import re

from gpunode.facts.bundle_reader import GPU_MODULE, MODPROBE_FOLDERS, BundleReader, UnknownFactError, first_line, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.parsers import nvrm

_VERSION = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,4}){1,2}")
_MODULE_LINE = re.compile(r"([A-Za-z0-9_-]+) [0-9]+ .*")
_MODULE_PATH = re.compile(r"(?:/usr)?/lib/modules/([^/]+)/.+")
_DEPENDS = re.compile(r"(?:/usr)?/lib/modules/(?P<kernel>[^/]+)/modules\.dep:(?P<path>[^:]+)")
_DO_NOTHING = re.compile(r"(?:/usr)?/bin/(?:false|true)")


class LoadedDriver(Fact):
    """The NVIDIA kernel module in memory, from ``/proc/driver/nvidia/version`` or ``/sys/module/nvidia``."""

    version: str
    flavour: str | None


class DkmsModule(Fact):
    """One line of ``dkms status``. ``kernel`` is None for a module that was added and never built."""

    name: str
    version: str
    kernel: str | None
    architecture: str | None
    state: str
    """``added``, ``built``, ``installed``; the warning that dkms appends is cut off."""
    note: str | None = None


class ModuleFile(Fact):
    """The answer of ``modinfo`` about the nvidia module on disk, for one kernel."""

    kernel: str
    path: str
    version: str | None
    vermagic: str | None
    flavour: str | None
    """``open`` or ``proprietary``, from the licence."""
    signed: bool
    size: int | None = None
    """In bytes."""
    preferred: bool | None = None
    """True if it is the file that modprobe loads, by modules.dep; None: unknown."""


def read_modules(bundle: BundleReader) -> tuple[str, ...]:
    """Return the names of the loaded modules; empty for a kernel without loadable modules."""
    text = bundle.text("/proc/modules")
    if text is None:
        # A sandbox that hides /proc/modules hides these as well; a kernel without modules lacks the second alone.
        hidden = bundle.text("/proc/sys/kernel/tainted") is None
        if hidden or bundle.text("/proc/sys/kernel/modules_disabled") is not None:
            raise UnknownFactError("/proc/modules is not there")
        return ()
    names = []
    for line in text.splitlines():
        match = _MODULE_LINE.fullmatch(line)
        if not match:
            raise ParseError(f"expected a line of /proc/modules, found '{first_line(line)}'")
        names.append(match[1])
    return tuple(names)


def read_loaded_driver(bundle: BundleReader) -> LoadedDriver | None:
    """Return the driver from ``/proc/driver/nvidia/version``, else ``/sys/module/nvidia/version``; None: it is not
    loaded."""
    text = bundle.text("/proc/driver/nvidia/version")
    if text is not None:
        parsed = nvrm.parse_version(text)
        return LoadedDriver(version=parsed.version, flavour=parsed.flavour)
    version = bundle.text("/sys/module/nvidia/version")
    if version is not None:
        if not _VERSION.fullmatch(version.strip()):
            raise ParseError(f"expected a version in /sys/module/nvidia/version, found '{first_line(version)}'")
        return LoadedDriver(version=version.strip(), flavour=None)
    if "nvidia" in read_modules(bundle):
        raise UnknownFactError(
            "the module nvidia is loaded, but /proc/driver/nvidia and /sys/module do not report its version"
        )
    return None


def read_module_files(bundle: BundleReader) -> tuple[ModuleFile, ...]:
    """Return the GPU's module on disk for each kernel, from modinfo."""
    if bundle.folder("/lib/modules/") is None:
        return ()
    paths = bundle.output("find-modules").splitlines()
    if not any(GPU_MODULE.search(path) for path in paths):
        return ()
    modules = parse_modinfo(bundle.output("modinfo"))
    missing = set(bundle.command("modinfo").argv[1:]) - {module.path for module in modules}
    if missing:
        raise ParseError(f"modinfo does not report {sorted(missing)[0]}")
    sizes, chosen = _sizes(bundle), _chosen(bundle)
    return tuple(
        module.model_copy(
            update={
                "size": sizes.get(module.path),
                "preferred": module.path.removeprefix("/usr") in chosen[module.kernel]
                if module.kernel in chosen
                else None,
            }
        )
        for module in modules
    )


def _sizes(bundle: BundleReader) -> dict[str, int]:
    """Return the sizes of the files; empty if an older probe collected the bundle."""
    if not bundle.ran("module-files"):
        return {}
    return {path: int(size) for path, size, _ in bundle.rows("module-files", 3) if whole(size) is not None}


def _chosen(bundle: BundleReader) -> dict[str, set[str]]:
    """Return the files that modprobe loads, by kernel: modules.dep has one of several with the same name."""
    result = bundle.raw("modules-dep")
    by_kernel: dict[str, set[str]] = {}
    for line in result.stdout.splitlines() if result is not None and result.rc in (0, 1) else ():
        match = _DEPENDS.fullmatch(line)
        if match:
            path = match["path"]
            absolute = path if path.startswith("/") else f"/lib/modules/{match['kernel']}/{path}"
            by_kernel.setdefault(match["kernel"], set()).add(absolute.removeprefix("/usr"))
    return by_kernel


def parse_modinfo(text: str) -> tuple[ModuleFile, ...]:
    """Parse modinfo's answer for several files, each of which begins with ``filename:``."""
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


def read_nouveau_blacklisted(bundle: BundleReader) -> bool:
    """Return True if one setting prevents automatic loading of nouveau; False only if all settings could be read."""
    unknown = None
    try:
        if _blacklisted_on_command_line(bundle.text("/proc/cmdline") or ""):
            return True
    except UnknownFactError as err:
        unknown = err
    known: set[str] = set()
    for folder in MODPROBE_FOLDERS:
        try:
            names = [name for name in bundle.folder(folder) or () if name not in known]
            # A file overrides files of the same name in the folders after it.
            known.update(names)
            texts = [bundle.text(folder + name) for name in names if bundle.has_file(folder + name)]
        except UnknownFactError as err:
            unknown = err
            continue
        if any(_blacklisted_in(text or "") for text in texts):
            return True
    if unknown:
        raise unknown
    return False


def _blacklisted_on_command_line(text: str) -> bool:
    words = (word.partition("=")[::2] for word in text.split())
    return any(
        name in {"modprobe.blacklist", "module_blacklist"} and "nouveau" in value.split(",") for name, value in words
    )


def _blacklisted_in(text: str) -> bool:
    """Return True for ``blacklist nouveau``, ``install nouveau /bin/false`` or ``alias nouveau off``
    (modprobe.d(5))."""
    for line in text.replace("\\\n", " ").splitlines():
        words = line.split()
        if words[:2] == ["blacklist", "nouveau"] or words[:3] == ["alias", "nouveau", "off"]:
            return True
        if words[:2] == ["install", "nouveau"] and len(words) == 3 and _DO_NOTHING.fullmatch(words[2]):
            return True
    return False


_DKMS_LINE = re.compile(
    r"(?P<name>[^\s,/:]+)(?:, |/)(?P<version>[^\s,/]+?)"
    r"(?:, (?P<kernel>[^\s,]+), (?P<architecture>[^\s,:]+))?"
    r": (?P<state>added|built|installed|broken|installed-weak|installed-binary|built-binary)"
    r"(?: from (?P<origin>\S+))?"
    r"(?: ?\((?P<note>.*)\))?\s*"
)


_DKMS_REMARK = re.compile(r"\s|Deprecated feature|Error!|Warning|WARNING|File:|Manual intervention|Consult ")


def read_dkms(bundle: BundleReader) -> tuple[DkmsModule, ...]:
    """Return the modules that DKMS lists; empty if DKMS is not installed."""
    if bundle.command("dkms-status").missing:
        return ()
    return parse_dkms(bundle.output("dkms-status"))


def parse_dkms(text: str) -> tuple[DkmsModule, ...]:
    """Parse all lines; raise ParseError for one that is neither a module nor a message of dkms."""
    modules = []
    for line in text.splitlines():
        match = _DKMS_LINE.fullmatch(line)
        if match:
            notes = (f"from {match['origin']}" if match["origin"] else "", (match["note"] or "").replace(") (", "; "))
            modules.append(
                DkmsModule(
                    name=match["name"],
                    version=match["version"],
                    kernel=match["kernel"],
                    architecture=match["architecture"],
                    state=match["state"],
                    note="; ".join(note for note in notes if note) or None,
                )
            )
        elif line.strip() and not _DKMS_REMARK.match(line):
            raise ParseError(f"expected a line of dkms status, found '{first_line(line)}'")
    return tuple(modules)


class ModulesFacts(FactArea):
    """Kernel modules."""

    modules: tuple[str, ...] | None = fact(read_modules)
    """Names of the loaded kernel modules."""
    loaded_driver: LoadedDriver | None = fact(read_loaded_driver, none_means="no NVIDIA module is loaded")
    nouveau_blacklisted: bool | None = fact(read_nouveau_blacklisted)
    """``blacklist nouveau`` (or ``install nouveau /bin/false``, ``alias nouveau off``) in a modprobe.d folder, or
    ``modprobe.blacklist=nouveau`` on the kernel's command line."""
    module_files: tuple[ModuleFile, ...] | None = fact(read_module_files)
    dkms: tuple[DkmsModule, ...] | None = fact(read_dkms)
