"""What the next boot starts: the boot loader's kernel, its initramfs, and settings that keep the driver off."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from gpunode.facts.bundle_reader import MODPROBE_FOLDERS, BundleReader, UnknownFactError, is_word, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.packages import release_key

_GRUB = ("/boot/grub/grub.cfg", "/boot/grub2/grub.cfg")
_FIRMWARE = "/boot/efi/EFI/"
_STATES = ("/boot/grub/grubenv", "/boot/grub2/grubenv")
_LOADERS = ("/boot/loader/", "/efi/loader/", "/boot/efi/loader/")
_VARIABLE = "/sys/firmware/efi/efivars/{}-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
_OPENS = re.compile(r"\s*(menuentry|submenu|function)\b(.{0,4000})\{\s*$")
_TITLE = re.compile(r"\s+(?:'((?:[^']|'\\''){0,400})'|\"([^\"]{0,400})\"|(\S{1,400}))")
_ID = re.compile(r"(?:\$\{?menuentry_id_option\}?|--id)[ =]+['\"]?([^'\"\s]{1,400})")
_DEFAULT = re.compile(r"\s*set default=[\"']?([^\"']{0,400})[\"']?\s*$")
_LINUX = re.compile(r"\s*linux(?:16|efi)?\s+(\S{1,400})(.{0,4000})")
_BLS_LINE = re.compile(r"\s*blscfg\b")
_RELEASE = re.compile(r"(?:.*/)?(?:vmlinuz|vmlinux|kernel)-(.+?)(?:\.efi)?")
_RELEASE_OF_FOLDER = re.compile(r".*/([^/]+)/(?:linux|vmlinuz)(?:\.efi)?")
_COUNTED = re.compile(r"\+\d+(?:-\d+)?$")
_DRIVER = re.compile(r"nvidia([_-](current|tesla|legacy|open|uvm|\d+(xx)?))*")
_DO_NOTHING = re.compile(r"(?:(?:/usr)?/s?bin/)?(?:false|true)")


class ModuleImage(Fact):
    """A GPU module in an initramfs."""

    path: str
    size: int | None


class Initramfs(Fact):
    """The initramfs of one kernel that has a GPU module on disk."""

    kernel: str
    path: str
    newer: bool
    """True if it was written after the kernel's GPU module was installed: whatever it has of it is as on disk."""
    modules: tuple[ModuleImage, ...] | None
    """The GPU modules of an older one; None if it was not listed."""
    reason: str | None = None
    """Why an older one was not listed."""


class NextBoot(Fact):
    """The kernel that the boot loader starts next."""

    kernel: str
    """Its release; it may be a kernel that is not installed."""
    loader: str
    """``grub`` or ``systemd-boot``."""
    entry: str
    """Title or name of the menu's entry."""
    setting: str
    """What chose it: a file, ``saved_entry in grubenv``, a variable of the firmware."""
    arguments: str
    """The kernel's command line, without what GRUB fills in."""


class ModuleBlock(Fact):
    """A line of modprobe.d that keeps one of the driver's modules from loading."""

    place: str
    """``/etc/modprobe.d/off.conf:3``."""
    text: str
    module: str
    always: bool
    """True for ``alias nvidia off`` and ``install nvidia /bin/false``; False for ``blacklist``, which programs that
    load it by its name do not heed."""


@dataclass
class _Entry:
    """One entry of a boot menu, or a menu."""

    names: tuple[str, ...]
    """Title and id."""
    release: str | None = None
    arguments: str = ""
    entries: "list[_Entry] | None" = None
    """Of a menu."""

    def chosen(self, text: str) -> "_Entry | None":
        """Return the entry of a number or a name, ``1>gnulinux-...`` below a menu; None if there is none."""
        first, deeper, rest = text.partition(">")
        entries = self.entries or []
        number = whole(first)
        if number is not None:
            entry = entries[number] if 0 <= number < len(entries) else None
        else:
            entry = next((entry for entry in entries if first in entry.names), None)
        return entry.chosen(rest) if entry is not None and deeper else entry


def read_next_boot(bundle: BundleReader) -> NextBoot:
    """Return the kernel that the boot loader starts; UnknownFactError if it is not known: it need not be the newest."""
    info = _variable(bundle, "LoaderInfo")
    if info is not None and info.startswith("systemd-boot"):
        return _systemd_boot(bundle)
    of_firmware = [path for path in bundle.under(_FIRMWARE) if path.endswith("/grub.cfg")]
    unread: UnknownFactError | None = None
    for path in (*_GRUB, *of_firmware):
        try:
            text = bundle.text(path)
        except UnknownFactError as err:
            unread = unread or err
            continue
        if text is not None:
            return _grub(bundle, path, text)
    if unread is not None:
        raise unread
    raise UnknownFactError("neither GRUB's menu nor systemd-boot was found: which kernel starts next is unknown")


def _variable(bundle: BundleReader, name: str) -> str | None:
    """Return the text of one of systemd-boot's variables: UTF-16 after four bytes of attributes."""
    text = bundle.value(_VARIABLE.format(name))
    return None if text is None else re.sub(r"\\x[0-9a-f]{2}|[\x00-\x1f]", "", text).strip() or None


def _grub(bundle: BundleReader, path: str, text: str) -> NextBoot:
    state = _state(bundle)
    menu, defaults = _menu(bundle, text)
    if not menu.entries:
        raise UnknownFactError(f"{path} has no entry")
    once = state.get("next_entry")
    if once and "${next_entry}" in defaults:
        setting, source = once, "next_entry in grubenv"
    else:
        setting = next((value for value in reversed(defaults) if value != "${next_entry}"), "0")
        source = path
    if setting == "${saved_entry}":
        setting, source = state.get("saved_entry") or "0", "saved_entry in grubenv"
    if "$" in setting:
        raise UnknownFactError(f"{path} takes its default from {setting[:80]}")
    # GRUB starts the first entry where the default does not exist.
    chosen = menu.chosen(setting) or menu.entries[0]
    if chosen.release is None:
        raise UnknownFactError(f"{path}: the entry '{chosen.names[0][:80]}' names no kernel")
    return NextBoot(
        kernel=chosen.release, loader="grub", entry=chosen.names[0], setting=source, arguments=chosen.arguments
    )


def _state(bundle: BundleReader) -> dict[str, str]:
    for path in _STATES:
        text = bundle.text(path)
        if text is not None:
            return {name: value for name, equal, value in (line.partition("=") for line in text.splitlines()) if equal}
    return {}


def _menu(bundle: BundleReader, text: str) -> tuple[_Entry, list[str]]:
    """Return the menu of grub.cfg, and the values that it sets as the default, in their order."""
    root = _Entry(names=("",), entries=[])
    defaults: list[str] = []
    stack = [root]
    for line in text.splitlines():
        if opened := _OPENS.match(line):
            title = _TITLE.match(opened[2])
            names = [next((part for part in title.groups() if part is not None), "")] if title else [""]
            entry_id = _ID.search(opened[2])
            entry = _Entry(names=(*names, *([entry_id[1]] if entry_id else [])))
            if opened[1] == "submenu":
                entry.entries = []
            above = stack[-1].entries
            if opened[1] != "function" and above is not None:
                above.append(entry)
            stack.append(entry)
        elif line.strip() == "}":
            if len(stack) > 1:
                stack.pop()
        elif (linux := _LINUX.match(line)) and stack[-1].release is None:
            stack[-1].release, stack[-1].arguments = _release(linux[1]), linux[2].strip()
        elif _BLS_LINE.match(line) and stack[-1].entries is not None:
            stack[-1].entries += _bls_entries(bundle, "/boot/loader/")
        elif default := _DEFAULT.match(line):
            defaults.append(default[1])
    return root, defaults


def _bls_entries(bundle: BundleReader, loader: str) -> list[_Entry]:
    """Return the entries of the boot loader specification, the newest version first."""
    rows: list[tuple[str, str, _Entry]] = []
    for name in bundle.folder(f"{loader}entries/") or ():
        if not name.endswith(".conf") or not bundle.has_file(f"{loader}entries/{name}"):
            continue
        values = _values(bundle.text(f"{loader}entries/{name}") or "")
        stem = _COUNTED.sub("", name.removesuffix(".conf"))
        release = _release(values.get("linux", "")) or values.get("version")
        entry = _Entry(names=(stem, name), release=release, arguments=values.get("options", ""))
        rows.append((values.get("sort-key", ""), release or "", entry))
    # Rescue images have no release of digits at their start.
    rows.sort(key=lambda row: (row[1][:1].isdigit(), release_key(row[1]), row[2].names[0]), reverse=True)
    return [entry for _, _, entry in sorted(rows, key=lambda row: row[0])]


def _values(text: str) -> dict[str, str]:
    rows = (line.split(None, 1) for line in text.splitlines())
    return {row[0]: row[1].strip() for row in rows if len(row) == 2}


def _release(path: str) -> str | None:
    match = _RELEASE.fullmatch(path) or _RELEASE_OF_FOLDER.fullmatch(path)
    return match[1] if match is not None and is_word(match[1]) else None


def _systemd_boot(bundle: BundleReader) -> NextBoot:
    for loader in _LOADERS:
        entries = _bls_entries(bundle, loader)
        if entries:
            break
    else:
        raise UnknownFactError("systemd-boot's entries were not found: unified images name no kernel")
    default = _values(bundle.text(f"{loader}loader.conf") or "").get("default")
    settings = (
        (_variable(bundle, "LoaderEntryOneShot"), "LoaderEntryOneShot"),
        (_variable(bundle, "LoaderEntryDefault"), "LoaderEntryDefault"),
        (default, f"{loader}loader.conf"),
    )
    for pattern, source in settings:
        if pattern is None:
            continue
        if pattern.startswith("@"):
            raise UnknownFactError(f"systemd-boot starts {pattern[:40]} ({source})")
        match = next((entry for entry in entries if any(fnmatchcase(name, pattern) for name in entry.names)), None)
        if match is not None:
            return _of_systemd(match, source)
    return _of_systemd(entries[0], "the newest entry")


def _of_systemd(entry: _Entry, source: str) -> NextBoot:
    if entry.release is None:
        raise UnknownFactError(f"systemd-boot's entry '{entry.names[0][:80]}' names no kernel")
    return NextBoot(
        kernel=entry.release, loader="systemd-boot", entry=entry.names[0], setting=source, arguments=entry.arguments
    )


@dataclass
class _Images:
    """The rows of one image."""

    state: str
    modules: list[ModuleImage] = field(default_factory=list)
    reason: str | None = None


def read_initramfs(bundle: BundleReader) -> tuple[Initramfs, ...]:
    """Return the initramfs images of kernels with a GPU module on disk."""
    bundle.require_finished("module_files")
    images: dict[tuple[str, str], _Images] = {}
    for kernel, path, written, state, size, rest in bundle.rows("initramfs", 6):
        if whole(written) is None or state not in ("newer", "without", "module", "unknown"):
            raise ParseError(f"expected a state and a time of {path[:200]}, found '{state[:40]}' and '{written[:40]}'")
        image = images.setdefault((kernel, path), _Images(state))
        if state == "module":
            image.modules.append(ModuleImage(path="/" + rest.lstrip("/"), size=whole(size)))
        elif state == "unknown":
            image.reason = rest
    return tuple(
        Initramfs(
            kernel=kernel,
            path=path,
            newer=image.state == "newer",
            modules=None if image.state in ("newer", "unknown") else tuple(image.modules),
            reason=image.reason,
        )
        for (kernel, path), image in images.items()
    )


def read_module_blocks(bundle: BundleReader) -> tuple[ModuleBlock, ...]:
    """Return every setting of modprobe.d that keeps the driver's modules from loading, with file and line."""
    blocks: list[ModuleBlock] = []
    known: set[str] = set()
    for folder in MODPROBE_FOLDERS:
        names = [name for name in bundle.folder(folder) or () if name not in known]
        # A file overrides files of the same name in the folders after it.
        known.update(names)
        for name in names:
            if bundle.has_file(folder + name):
                blocks += _blocks_in(folder + name, bundle.text(folder + name) or "")
    return tuple(blocks)


def _blocks_in(path: str, text: str) -> Iterator[ModuleBlock]:
    for number, line in enumerate(text.replace("\\\n", " \n").split("\n"), start=1):
        words = line.split()
        if len(words) < 2 or not _DRIVER.fullmatch(words[1]):
            continue
        never = words[0] == "alias" and words[2:3] == ["off"]
        never = never or (words[0] == "install" and len(words) == 3 and bool(_DO_NOTHING.fullmatch(words[2])))
        if never or words[0] == "blacklist":
            yield ModuleBlock(place=f"{path}:{number}", text=" ".join(words), module=words[1], always=never)


def blocked_by_arguments(arguments: str) -> Mapping[str, bool]:
    """Return the kernel's arguments that keep the driver's module off: True for those that refuse every load."""
    blocks: dict[str, bool] = {}
    for text in arguments.split():
        name, _, value = text.partition("=")
        modules = value.split(",") if name in {"modprobe.blacklist", "module_blacklist"} else []
        if any(_DRIVER.fullmatch(module) for module in modules):
            blocks[text] = name == "module_blacklist"
    return blocks


class BootFacts(FactArea):
    """The next boot."""

    module_blocks: tuple[ModuleBlock, ...] | None = fact(read_module_blocks)
    """Lines of modprobe.d that keep nvidia or nvidia-uvm from loading."""
    initramfs: tuple[Initramfs, ...] | None = fact(read_initramfs)
    """Of the kernels that have a GPU module on disk."""
    next_boot: NextBoot | None = fact(read_next_boot)
    """The kernel that the boot loader starts next, by its own settings; a gap where these are unknown."""
