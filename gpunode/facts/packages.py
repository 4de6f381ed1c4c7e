"""The GPU stack's packages, from dpkg's or RPM's database."""

import re
from fnmatch import fnmatchcase

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line, word
from gpunode.facts.errors import ParseError
from gpunode.facts.models.base import Fact, FactArea, fact

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
