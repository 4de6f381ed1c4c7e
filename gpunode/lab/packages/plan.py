"""Content of the vendor repository: every package with its fields, files and scripts. Pure."""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache

from packaging.version import Version

from gpunode.lab.packages.recorded import Offer, offers, recorded, stem
from gpunode.lab.packages.rows import (
    Content,
    PackageRow,
    Payload,
    ServedRepository,
    content_rows,
    packages,
    releases,
    repositories,
    text_of,
)

SIMULATOR = "/usr/lib/gpunode-lab/bin"
_BRACES = re.compile(r"(?<!\$)\{([a-z_]+)\}")
_LIBRARIES = {"debian": "usr/lib/x86_64-linux-gnu", "ubuntu": "usr/lib/x86_64-linux-gnu", "rhel": "usr/lib64"}
_LICENSES = {"open": "Dual MIT/GPL", "proprietary": "NVIDIA"}
_MODULES = ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm", "nvidia-peermem")
_DKMS = ("Kbuild", "Makefile", "lab.h", *(f"{name}.c" for name in _MODULES), "dkms.conf")


@dataclass
class Built:
    """A package as the builder reads it. Paths have no leading slash."""

    name: str
    version: str
    release: str
    """The upstream release of the content: 580.95.05."""
    architecture: str
    fields: dict[str, str]
    description: str
    files: list[dict[str, str]] = field(default_factory=list)
    """``path``, ``text``, ``mode``."""
    links: list[dict[str, str]] = field(default_factory=list)
    """``path``, ``to``."""
    libraries: list[dict[str, str]] = field(default_factory=list)
    """``path``, ``soname``: built with the linker."""
    modules: list[dict[str, str]] = field(default_factory=list)
    """``path``, ``name``, ``license``, ``kernel``: built with the assembler, and signed."""
    conffiles: list[str] = field(default_factory=list)
    scripts: dict[str, str] = field(default_factory=dict)
    streams: list[str] = field(default_factory=list)
    component: str = ""
    suite: str = ""
    repack: str = ""
    """The package of the tools' system from which files and scripts are copied."""


def plan() -> dict[str, object]:
    """Return everything that the builder needs, as JSON."""
    return {
        name: {
            **repository.model_dump(),
            "pin": _pin(repository),
            "packages": [asdict(built) for built in contents(repository)],
        }
        for name, repository in repositories().items()
    }


def _pin(repository: ServedRepository) -> str:
    """Return the preferences that cuda-keyring contains for the repository; empty if none are recorded."""
    if not repository.keyring:
        return ""
    return str((recorded(repository.recorded)["repository"].get("pin") or {}).get("content", ""))


def contents(repository: ServedRepository) -> list[Built]:
    """Return all packages of a repository, in all their releases."""
    return _contents(next(name for name, row in repositories().items() if row.path == repository.path))


@cache
def _contents(name: str) -> list[Built]:
    repository = repositories()[name]
    declared = [
        _built(row, values, repository)
        for name in repository.rows
        for row in packages(name)
        for values in releases()[row.over]
        if Version(values.get("series", "99")) >= Version(repository.first_cuda) or repository.kind == "suites"
    ]
    names = {built.name for built in declared} | {"cuda-keyring"}  # built with the lab's key, once it exists
    return declared + [_recorded(offer, repository) for offer in recorded_in(repository) if offer.name not in names]


def recorded_in(repository: ServedRepository) -> Iterator[Offer]:
    """Yield the packages of a repository's recorded index."""
    if repository.recorded:
        yield from offers(repository.recorded, repository.releases)


def _recorded(offer: Offer, repository: ServedRepository) -> Built:
    """Return a package of a recorded index with the lab's content."""
    content = content_rows(repository.contents).get(stem(offer.name)) or Content(description=offer.name)
    relations = {key: tuple(entries) for key, entries in offer.relations.items()}
    relations["depends"] = (*relations.get("depends", ()), *content.needs)
    row = PackageRow(
        name=offer.name,
        over="recorded",
        version=offer.version,
        architecture="all" if offer.architecture == "all" else "amd64",
        streams=content.streams or (("open", "dkms") if offer.release in repository.releases else ()),
        **content.model_dump(include={"description", "section", "users", "repack"}),
        payload=content.payload,
        **relations,
    )
    pin = f"{offer.release}-*" if "." in offer.release else f"{offer.release}.*"
    return _built(row, {"release": offer.release, "pin": pin}, repository)


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return the text with the braces filled for the names in ``values``; a shell's ``${name}`` stays."""
    return _BRACES.sub(lambda match: values.get(match[1], match[0]), text)


def _built(row: PackageRow, substitutions: Mapping[str, str], repository: ServedRepository) -> Built:
    values = {"release": "", **substitutions, "revision": substitutions.get(repository.family, "1")}
    version = filled(row.version, values)
    values |= {"version": version, "libdir": _LIBRARIES[repository.family]}
    fields = {
        "Source": filled(row.source, values),
        "Section": row.section,
        "Priority": "optional",
        "Maintainer": repository.maintainer,
    }
    for key in ("depends", "recommends", "provides", "conflicts", "breaks", "replaces"):
        fields[key.capitalize()] = ", ".join(filled(entry, values) for entry in getattr(row, key))
    built = Built(
        name=filled(row.name, values),
        version=version,
        release=values["release"],
        architecture=row.architecture,
        fields={key: value for key, value in fields.items() if value},
        description=f"{filled(row.description, values)} (simulated by gpunode lab, drives nothing)",
        streams=list(row.streams),
        scripts={str(name): text for name, text in row.scriptlets.items()},
        component=row.component,
        suite=values.get("suite", ""),
        repack=row.repack,
    )
    for part in row.parts(values["release"]):
        _add(built, part, values)
    (_rpm_scripts if repository.family == "rhel" else _debian_scripts)(built, row, values)
    return built


def _add(built: Built, part: Payload, values: Mapping[str, str]) -> None:
    if part.tool:
        text = f'#!/bin/sh\nGPUNODE_LAB_PACKAGE_VERSION={built.release} exec {SIMULATOR}/{part.tool} "$@"\n'
        _file(built, f"{part.at or 'usr/bin'}/{part.tool}", text, "0755")
    elif part.library:
        folder = filled(part.at or "{libdir}", values)
        soname = filled(part.library, values)
        stem = soname.partition(".so")[0] + ".so"
        real = f"{stem}.{built.release}"
        built.libraries.append({"path": f"{folder}/{real}", "soname": soname})
        built.links.append({"path": f"{folder}/{soname}", "to": real})
    elif part.unit:
        _file(built, f"usr/lib/systemd/system/{part.unit}", filled(text_of(f"units/{part.unit}"), values), "0644")
    elif part.file is not None:
        local = {**values, "pin": filled(part.pin, values) or values.get("pin", "")}
        text = part.text if part.text is not None else text_of(f"files/{part.source}")
        path = filled(part.file, local)
        _file(built, path, filled(text, local), part.mode)
        if part.conffile:
            built.conffiles.append(path)
    elif part.link:
        built.links.append({"path": filled(part.link, values), "to": filled(part.to, values)})
    elif part.dkms:
        local = {**values, "license": _LICENSES[part.dkms], "name": part.name}
        for name in part.only or (name for name in _DKMS if name not in part.without):
            _file(built, f"usr/src/{part.name}-{built.release}/{name}", filled(text_of(f"dkms/{name}"), local), "0644")
    elif part.module:
        folder = filled(part.at or "", values)
        built.modules += [
            {"path": f"{folder}/{name}.ko", "name": name, "license": _LICENSES[part.module], "kernel": values["kernel"]}
            for name in _MODULES
        ]


def _file(built: Built, path: str, text: str, mode: str) -> None:
    built.files.append({"path": path, "text": text, "mode": mode})


def _debian_scripts(built: Built, row: PackageRow, values: Mapping[str, str]) -> None:
    """Add the maintainer scripts: those effects of debhelper's scripts that matter on a node."""
    steps: dict[str, list[str]] = {"postinst": [], "prerm": [], "postrm": []}
    for user in row.users:
        steps["postinst"].append(_CONFIGURE.format(_USER.format(user=user)))
    for part in row.parts(values["release"]):
        if part.dkms and "dkms.conf" in (part.only or set(_DKMS) - set(part.without)):
            tree = {"name": part.name, "release": values["release"]}
            steps["postinst"].append(_CONFIGURE.format(_DKMS_BUILD.format(**tree)))
            steps["prerm"].append(_DKMS_REMOVE.format(**tree))
        if part.unit:
            unit = shlex.quote(part.unit)
            steps["postinst"].append(
                _CONFIGURE.format((_UNIT_ENABLE if part.enable else _UNIT_RELOAD).format(unit=unit))
            )
            steps["prerm"].append(_UNIT_STOP.format(unit=unit))
            steps["postrm"].append(_UNIT_PURGE.format(unit=unit))
    for key, install, remove in (
        ("depmod", _DEPMOD, _DEPMOD_REMOVE),
        ("headers", _HEADERS + _HEADER_HOOKS, _IF_REMOVED + _HEADERS_REMOVE + "fi\n"),
        ("kernel", _KERNEL, _KERNEL_REMOVE),
    ):
        if kernel := filled(getattr(row, key), values):
            tree = {"kernel": kernel, "seen": f"/usr/src/linux-headers-{kernel}"}
            steps["postinst"].append(_CONFIGURE.format(filled(install, tree)))
            steps["prerm" if key == "headers" else "postrm"].append(filled(remove, tree))
    for entry in row.alternatives:
        words = {key: filled(value, values) for key, value in entry.model_dump().items()}
        steps["postinst"].append(_CONFIGURE.format(_ALTERNATIVE.format(**words)))
        steps["prerm"].append(_ALTERNATIVE_REMOVE.format(**words))
    built.scripts = {name: "#!/bin/sh\nset -e\n" + "".join(parts) for name, parts in steps.items() if parts}


def _rpm_scripts(built: Built, row: PackageRow, values: Mapping[str, str]) -> None:
    """Add the scriptlets that change what is on a node: accounts, libraries, modules, headers and their index."""
    steps: dict[str, list[str]] = {"pre": [], "post": [], "preun": [], "postun": []}
    if built.libraries:  # done there by file triggers of glibc
        steps["post"].append("ldconfig\n")
        steps["postun"].append("ldconfig\n")
    for user in row.users:
        steps["pre"].append(_RPM_USER.format(user=user))
    for part in row.parts(values["release"]):
        if part.dkms:
            tree = {"name": part.name, "release": values["release"]}
            steps["post"].append(_RPM_DKMS_BUILD.format(**tree))
            steps["preun"].append(_RPM_DKMS_REMOVE.format(**tree))
    if kernel := filled(row.headers, values):
        tree = {"kernel": kernel, "seen": f"/usr/src/kernels/{kernel}"}
        steps["post"].append(filled(_HEADERS, tree))
        steps["preun"].append(filled(_HEADERS_REMOVE, tree))
    if kernel := filled(row.depmod, values):
        steps["post"].append(filled(_DEPMOD, {"kernel": kernel}))
    built.scripts |= {name: "".join(parts) for name, parts in steps.items() if parts}


def names(repository: ServedRepository) -> Iterator[tuple[str, str]]:
    """Yield name and version of every package."""
    for built in contents(repository):
        yield built.name, built.version


_CONFIGURE = """\
if [ "$1" = configure ]; then
{}fi
"""
_USER = """\
    if ! getent passwd {user} >/dev/null; then
        adduser --quiet --system --group --no-create-home --home /nonexistent --gecos "NVIDIA daemon" {user}
    fi
"""
_DKMS_BUILD = """\
    /usr/lib/dkms/common.postinst {name} {release} /usr/share/{name} "" "$2"
"""
_DKMS_REMOVE = """\
if [ "$(dkms status -m {name} -v {release})" ]; then
    dkms remove -m {name} -v {release} --all
fi
"""
_ALTERNATIVE = """\
    update-alternatives --install {link} {name} {path} {priority}
"""
_ALTERNATIVE_REMOVE = """\
if [ "$1" = remove ]; then
    update-alternatives --remove {name} {path}
fi
"""
_DEPMOD = """\
    depmod {kernel}
"""
_DEPMOD_REMOVE = """\
if [ "$1" = remove ]; then
    if [ -e /boot/vmlinuz-{kernel} ]; then
        depmod {kernel}
    else
        rm -f /lib/modules/{kernel}/modules.*
        rmdir --ignore-fail-on-non-empty /lib/modules/{kernel} 2>/dev/null || true
    fi
fi
"""
_KERNEL = """\
    DEB_MAINT_PARAMS="$*" run-parts --arg={kernel} --arg=/boot/vmlinuz-{kernel} /etc/kernel/postinst.d
"""
_KERNEL_REMOVE = """\
if [ "$1" = remove ] && [ -d /etc/kernel/postrm.d ]; then
    DEB_MAINT_PARAMS="$*" run-parts --arg={kernel} --arg=/boot/vmlinuz-{kernel} /etc/kernel/postrm.d
fi
"""
# Debian's headers under another release, through symbolic links: it becomes the vermagic of a module built with them.
_HEADERS = """\
    real=$(ls -d /usr/src/linux-headers-*-cloud-amd64 | sort -V | tail -n 1)
    seen={seen}
    rm -rf "$seen"
    mkdir -p "${seen%/*}"
    cp -rs "$real" "$seen"
    rm "$seen/include/generated/utsrelease.h" "$seen/include/config/kernel.release"
    echo '#define UTS_RELEASE "{kernel}"' > "$seen/include/generated/utsrelease.h"
    echo {kernel} > "$seen/include/config/kernel.release"
"""
_HEADER_HOOKS = """\
    if [ -d /etc/kernel/header_postinst.d ]; then
        DEB_MAINT_PARAMS="$*" run-parts --arg={kernel} /etc/kernel/header_postinst.d
    fi
"""
_IF_REMOVED = """\
if [ "$1" = remove ]; then
"""
_HEADERS_REMOVE = """\
    rm -rf {seen}
"""
_RPM_USER = """\
getent group {user} >/dev/null || groupadd --system {user}
getent passwd {user} >/dev/null || useradd --system --gid {user} --no-create-home --shell /sbin/nologin {user}
"""
# Like the spec file in NVIDIA/yum-packaging-dkms-nvidia: build for the running kernel and ignore a failure.
_RPM_DKMS_BUILD = """\
for step in add build "install --force"; do
    dkms $step -m {name} -v {release} -q || :
done
rm -rf /var/lib/dkms/{name}/original_module
"""
_RPM_DKMS_REMOVE = """\
dkms remove -m {name} -v {release} -q --all || :
"""
_UNIT_ENABLE = """\
    deb-systemd-helper unmask {unit} >/dev/null || true
    if deb-systemd-helper --quiet was-enabled {unit}; then
        deb-systemd-helper enable {unit} >/dev/null || true
    else
        deb-systemd-helper update-state {unit} >/dev/null || true
    fi
    if [ -d /run/systemd/system ]; then
        systemctl --system daemon-reload >/dev/null || true
        if [ -n "$2" ]; then action=restart; else action=start; fi
        deb-systemd-invoke $action {unit} >/dev/null || true
    fi
"""
_UNIT_RELOAD = """\
    if [ -d /run/systemd/system ]; then
        systemctl --system daemon-reload >/dev/null || true
        if [ -n "$2" ]; then deb-systemd-invoke try-restart {unit} >/dev/null || true; fi
    fi
"""
_UNIT_STOP = """\
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    deb-systemd-invoke stop {unit} >/dev/null || true
fi
"""
_UNIT_PURGE = """\
if [ "$1" = remove ] && [ -x /usr/bin/deb-systemd-helper ]; then
    deb-systemd-helper mask {unit} >/dev/null || true
elif [ "$1" = purge ] && [ -x /usr/bin/deb-systemd-helper ]; then
    deb-systemd-helper purge {unit} >/dev/null || true
    deb-systemd-helper unmask {unit} >/dev/null || true
fi
if [ -d /run/systemd/system ]; then
    systemctl --system daemon-reload >/dev/null || true
fi
"""
