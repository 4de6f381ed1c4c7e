"""Packages of the GPU stack and of kernels, from dpkg's or RPM's database, and the origins of software."""

import re
from fnmatch import fnmatchcase

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line, is_word, word
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.system import uname

_KERNEL = re.compile(r"kernel(-.*)?")
_LOCK_FILES = ("/etc/dnf/plugins/versionlock.list", "/etc/yum/pluginconf.d/versionlock.list")
_LOCK_TOML = "/etc/dnf/versionlock.toml"
_SOURCE_RPM = re.compile(r"(.+)-[^-]+-[^-]+\.(?:no)?src\.rpm")


class Package(Fact):
    """One package of the node's package database that belongs to the GPU stack."""

    VOLATILE = frozenset({"published"})

    name: str
    version: str
    architecture: str
    source: str
    """Name of the source package."""
    maintainer: str
    installed: bool
    """False for a package that is half-installed, or removed with its configuration left."""
    state: str
    """As the package manager prints it: ``install ok installed``."""
    held: bool
    published: str | None = None
    """The origin (``nvidia``, ``ubuntu`` …) of the repository that lists exactly this version; None if the package
    manager's lists were not queried or no longer contain it."""


def read_packages(bundle: BundleReader) -> tuple[Package, ...]:
    """Return installed and half-installed packages, and those with configuration left."""
    if bundle.ran("dpkg-packages"):
        return parse_dpkg(bundle.output("dpkg-packages"))
    if not bundle.ran("rpm-packages"):
        raise UnknownFactError("neither dpkg's nor RPM's database was read")
    rows = (line.split("\t") for line in rpm_lines(bundle))
    locks = _rpm_locks(bundle)
    return tuple(_rpm_package(fields, locks) for fields in rows if not _KERNEL.fullmatch(fields[0]))


def parse_dpkg(text: str) -> tuple[Package, ...]:
    """Parse the probe's ``dpkg-query -W``: package, version, architecture, status, source, its version, maintainer.

    A package is held if dpkg's selection is ``hold``, which ``apt-mark hold`` sets.
    """
    packages = []
    for line in text.splitlines():
        fields = line.split("\t")
        words = fields[3].split() if len(fields) == 7 else []
        if len(words) != 3:
            raise ParseError(f"expected seven fields of dpkg-query, found '{first_line(line)}'")
        packages.append(
            Package(
                name=word(fields[0], "a package name"),
                version=fields[1] and word(fields[1], "a version"),
                architecture=fields[2],
                source=fields[4] or fields[0],
                maintainer=fields[6],
                installed=words[2] in {"installed", "triggers-awaited", "triggers-pending"},
                state=fields[3],
                held=words[0] == "hold",
            )
        )
    return tuple(packages)


def rpm_lines(bundle: BundleReader) -> list[str]:
    """Return the lines of the probe's ``rpm -qa``: name, version, release, architecture, source, vendor, packager,
    epoch."""
    lines = bundle.output("rpm-packages").splitlines()
    for line in lines:
        if line.count("\t") != 7:
            raise ParseError(f"expected eight fields of rpm -qa, found '{first_line(line)}'")
    return lines


def _rpm_package(fields: list[str], locks: tuple[str, ...]) -> Package:
    name, version, release, arch, source, vendor, packager, epoch = fields
    source_name = _SOURCE_RPM.fullmatch(source)
    spellings = (
        name,
        f"{name}-{version}-{release}.{arch}",
        f"{name}-{epoch}:{version}-{release}.{arch}",
        f"{epoch}:{name}-{version}-{release}.{arch}",
    )
    full = f"{version}-{release}" if epoch in {"0", "(none)", ""} else f"{epoch}:{version}-{release}"
    return Package(
        name=word(name, "a package name"),
        version=word(full, "a version"),
        architecture=arch,
        source=source_name[1] if source_name else name,
        maintainer=packager if vendor == "(none)" else vendor,
        installed=True,
        state="installed",
        held=any(fnmatchcase(spelling, lock) for spelling in spellings for lock in locks),
    )


def _rpm_locks(bundle: BundleReader) -> tuple[str, ...]:
    """Return the patterns of DNF's versionlock: dnf4's list, and the names in dnf5's TOML file."""
    locks = []
    for path in _LOCK_FILES:
        for line in (bundle.text(path) or "").splitlines():
            pattern = line.partition("#")[0].strip()
            if pattern and not pattern.startswith("!"):
                locks.append(pattern)
    locks += re.findall(r"(?m)^\s*name\s*=\s*[\"']([^\"']{1,200})[\"']", bundle.text(_LOCK_TOML) or "")
    return tuple(locks)


class PackagesFacts(FactArea):
    """Packages."""

    packages: tuple[Package, ...] | None = fact(read_packages)
    """Of the driver, CUDA, NCCL, cuDNN, DCGM, and of container engines and runtimes."""


_OWNER_LINE = re.compile(r"(?!diversion by |local diversion )(?P<names>.+): (?P<path>/.*)")
_KERNEL_RPM = re.compile(r"kernel(?:-(?P<variant>(?!core$|devel$)[a-z0-9-]+?))?(?P<part>-core|-devel)?")
_RELEASE_PART = re.compile(r"[0-9]+|[a-z]+|~", re.I)
_END = (1, 0, "")
_PARTS = ("-devel", None, "-core")
"""The parts of a kernel that RPM packages contain, the image last; before EL 8 the package without a suffix had all."""


class Kernel(Fact):
    """One kernel of the node: installed, running, or both."""

    release: str
    package: str | None
    """The installed package that contains its image, else its headers; None if no package does (a container's host, a
    kernel built by hand)."""
    running: bool
    newest: bool
    """True for the newest kernel with an image; if none has one (a container), for the newest with headers."""
    headers: bool
    """True if ``/lib/modules/RELEASE/build`` leads to a tree that a module can be built against."""
    image: bool = True
    """True if the kernel itself is installed, not only its headers."""


def read_kernels(bundle: BundleReader) -> tuple[Kernel, ...]:
    """Return the kernels with an image or headers in ``/lib/modules``, oldest first, always including the running
    one."""
    running, _ = uname(bundle)
    # A folder with any other name is a backup, not a kernel.
    releases = tuple(name for name in bundle.folder("/lib/modules/") or () if is_word(name))
    images = {release for release in releases if _has_image(bundle, release)}
    headers = {release for release in releases if "Makefile" in (bundle.folder(f"/lib/modules/{release}/build/") or ())}
    owners = _owners(bundle, releases) if releases else {}
    newest = max(images or headers, key=release_key, default=None)
    return tuple(
        Kernel(
            release=release,
            package=owners.get(release),
            running=release == running,
            newest=release == newest,
            headers=release in headers,
            image=release in images,
        )
        for release in sorted(images | headers | {running}, key=lambda release: (release_key(release), release))
    )


def _has_image(bundle: BundleReader, release: str) -> bool:
    """Return True if the kernel has an image; modules that DKMS built remain after a kernel is removed and do not
    count."""
    names = bundle.folder(f"/lib/modules/{release}/") or ()
    return "kernel" in names or "vmlinuz" in names


def _owners(bundle: BundleReader, releases: tuple[str, ...]) -> dict[str, str]:
    if bundle.ran("dpkg-kernels"):
        return _dpkg_owners(bundle.output("dpkg-kernels", good=(0, 1)), releases)
    if bundle.ran("rpm-packages"):
        return _rpm_owners(rpm_lines(bundle), releases)
    raise bundle.not_collected()


def _dpkg_owners(text: str, releases: tuple[str, ...]) -> dict[str, str]:
    """Return owners by ``dpkg-query -S``: of the image, else of the modules, else of the headers' link."""
    by_path: dict[str, str] = {}
    for line in text.splitlines():
        match = _OWNER_LINE.fullmatch(line)
        if match:
            name = word(match["names"].split(", ")[0].partition(":")[0], "a package name")
            by_path[match["path"].removeprefix("/usr")] = name
    owners = {}
    for release in releases:
        paths = (f"/boot/vmlinuz-{release}", f"/lib/modules/{release}/kernel", f"/lib/modules/{release}/build")
        owner = next((by_path[path] for path in paths if path in by_path), None)
        if owner:
            owners[release] = owner
    return owners


def _rpm_owners(lines: list[str], releases: tuple[str, ...]) -> dict[str, str]:
    """Return owners by name: ``kernel-core`` 5.14.0-427.el9 is ``5.14.0-427.el9.x86_64``, ``kernel-rt-core`` has
    ``+rt``."""
    owners: dict[str, tuple[int, str]] = {}
    for line in lines:
        name, version, revision, arch = line.split("\t")[:4]
        match = _KERNEL_RPM.fullmatch(name)
        if not match:
            continue
        plain = f"{version}-{revision}.{arch}"
        release = plain if match["variant"] in {None, "uek"} else f"{plain}+{match['variant']}"
        if release in releases:
            candidate = (_PARTS.index(match["part"]), f"{name}-{plain}")
            owners[release] = max(owners.get(release, candidate), candidate)
    return {release: package for release, (_, package) in owners.items()}


def release_key(release: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that places newer kernel releases later.

    Numbers compare as numbers (``6.1.0-9`` before ``6.1.0-42``) and are newer than words, as in RPM's order
    (``5.14.0-427.el9`` before ``5.14.0-427.13.1.el9``); ``~`` and ``rc`` come before everything, including the end.
    """
    parts = []
    for part in _RELEASE_PART.findall(release):
        if part[0].isdigit():
            # Nine digits are more than any release has; the order of longer numbers does not matter.
            parts.append((3, int(part[:9]), ""))
        elif part in {"~", "rc"}:
            parts.append((0, 0, ""))
        else:
            parts.append((2, 0, part))
    return (*parts, _END)


class KernelsFacts(FactArea):
    """Kernels."""

    kernels: tuple[Kernel, ...] | None = fact(read_kernels)

    @property
    def running_kernel(self) -> str | None:
        """Return the release of the running kernel; None if it is unknown."""
        return next((kernel.release for kernel in self.kernels or () if kernel.running), None)


_ONE_LINE = re.compile(r"(#?)\s{0,9}deb\s+(?:\[[^\]]{0,2000}\]\s+)?(\S{1,2000})\s+(\S{1,200}).{0,2000}")
_DEB822_KEY = re.compile(r"([A-Za-z-]{1,40}):[ \t]*(.*)")
_INI_KEY = re.compile(r"([A-Za-z_-]{1,40})\s{0,9}=\s{0,9}(.*)")
_OFF = frozenset({"no", "0", "false", "off"})
_LOG = "/var/log/nvidia-installer.log"
_LOG_VERSION = re.compile(r"installer version:\s{0,9}([0-9.]{3,20})")
_CUDA_FOLDER = re.compile(r"/usr/local/cuda-([0-9.]{1,20})/.*")
_LINE_LIMIT = 4000


class Repository(Fact):
    """One package source that concerns the GPU stack or containers."""

    path: str
    uri: str
    """Without user and password."""
    suite: str | None
    enabled: bool


class ForeignInstall(Fact):
    """Files left by another installer than the package manager."""

    kind: str
    """``driver-runfile``, ``cuda-runfile``, ``nvidia-docker``."""
    path: str
    note: str | None = None
    """A version, if the file contains one."""


def read_repositories(bundle: BundleReader) -> tuple[Repository, ...]:
    """Return the sources in files that name the GPU stack or containers; apt's two formats, and DNF's."""
    repositories: list[Repository] = []
    for path in bundle.look("repository-files"):
        text = bundle.text(path) if bundle.has_file(path) else None
        if text is None:
            continue
        lines = [line[:_LINE_LIMIT] for line in text.splitlines()]
        if path.endswith(".repo"):
            repositories += _ini(path, lines)
        elif path.endswith(".sources"):
            repositories += _deb822(path, lines)
        else:
            repositories += [
                Repository(path=path, uri=match[2], suite=match[3], enabled=not match[1])
                for line in lines
                if (match := _ONE_LINE.fullmatch(line.strip()))
            ]
    return tuple(repositories)


def _deb822(path: str, lines: list[str]) -> list[Repository]:
    """Parse stanzas of ``Key: value``; a value may continue in indented lines."""
    repositories: list[Repository] = []
    stanza: dict[str, str] = {}
    key = ""
    for line in [*lines, ""]:
        if not line.strip():
            enabled = stanza.get("enabled", "yes").lower() not in _OFF
            suite = " ".join(stanza.get("suites", "").split()) or None
            repositories += [
                Repository(path=path, uri=uri, suite=suite, enabled=enabled) for uri in stanza.get("uris", "").split()
            ]
            stanza, key = {}, ""
        elif line[0] in " \t":
            stanza[key] = stanza.get(key, "") + " " + line
        elif not line.startswith("#") and (match := _DEB822_KEY.fullmatch(line)):
            key = match[1].lower()
            stanza[key] = match[2]
    return repositories


def _ini(path: str, lines: list[str]) -> list[Repository]:
    repositories: list[Repository] = []
    section: dict[str, str] = {}
    for line in [*lines, "["]:
        if line.startswith("["):
            enabled = section.get("enabled", "1").strip().lower() not in _OFF
            uri = section.get("baseurl") or section.get("mirrorlist") or section.get("metalink")
            if uri:
                repositories.append(Repository(path=path, uri=uri.strip(), suite=section.get("name"), enabled=enabled))
            section = {}
        elif match := _INI_KEY.fullmatch(line.strip()):
            section[match[1].lower()] = match[2]
    return repositories


def read_foreign_installs(bundle: BundleReader) -> tuple[ForeignInstall, ...]:
    """Return programs that only NVIDIA's ``.run`` files or nvidia-docker install, and the driver installer's log."""
    installs = []
    for path in bundle.look("signs"):
        name = path.rpartition("/")[2]
        cuda = _CUDA_FOLDER.fullmatch(path)
        if name in {"nvidia-uninstall", "nvidia-installer"}:
            installs.append(ForeignInstall(kind="driver-runfile", path=path))
        elif name.startswith("nvidia-docker"):
            installs.append(ForeignInstall(kind="nvidia-docker", path=path))
        elif cuda and "uninstall" in name:
            installs.append(ForeignInstall(kind="cuda-runfile", path=path, note=cuda[1]))
    log = bundle.text(_LOG)
    if log is not None:
        version = _LOG_VERSION.search(log)
        installs.append(ForeignInstall(kind="driver-runfile-log", path=_LOG, note=version[1] if version else None))
    return tuple(installs)


class SourcesFacts(FactArea):
    """Sources of packages."""

    repositories: tuple[Repository, ...] | None = fact(read_repositories)
    """Package sources that name NVIDIA, CUDA, containers or Docker."""
    foreign_installs: tuple[ForeignInstall, ...] | None = fact(read_foreign_installs)
