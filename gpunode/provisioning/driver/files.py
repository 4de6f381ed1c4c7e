"""Files of the role nvidia_driver on a node, and the sources of drivers on systems with apt."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpunode.provisioning.driver.model import DriverPlan, DriverSettings
from gpunode.provisioning.manifest import ManagedFile
from gpunode.provisioning.role import Texts
from gpunode.stack.naming import any_revision

SOURCES_FILE = "/etc/apt/sources.list.d/gpunode-nvidia-driver.sources"
PREFERENCES = "/etc/apt/preferences.d/gpunode-nvidia-driver.pref"
UNATTENDED = "/etc/apt/apt.conf.d/52gpunode-nvidia-driver"
NOUVEAU = "/etc/modprobe.d/gpunode-nouveau.conf"
DRACUT = "/etc/dracut.conf.d/90-gpunode-nouveau.conf"
OPTIONS = "/etc/modprobe.d/gpunode-nvidia.conf"
PERSISTENCED = "/etc/systemd/system/nvidia-persistenced.service.d/gpunode.conf"
STAGED = "/var/lib/gpunode/nvidia_driver/key-staged"
"""The boot id of the boot in which the key that signs modules was staged."""
ALL = (SOURCES_FILE, PREFERENCES, UNATTENDED, NOUVEAU, DRACUT, OPTIONS, PERSISTENCED, STAGED)
PIN_PRIORITY = 1001
_DKMS = ("dkms", "dh-dkms")
_PINNED = (
    "nvidia-*",
    "libnvidia-*",
    "libcuda1",
    "libcudadebugger1",
    "libnvcuvid1",
    "libnvoptix1",
    "libegl-nvidia0",
    "libgles-nvidia*",
    "libglx-nvidia0",
    "libnvsdm*",
    "libxnvctrl0",
    "cuda-drivers*",
    "firmware-nvidia-gsp",
    "xserver-xorg-video-nvidia*",
)
# Suites of one release by their names in sources, after the codename.
_SUITES = ("", "-updates", "-security", "/updates")
# Options about which files are fetched, not whether they are trusted; the node's own values are kept.
_NOT_COPIED = {"types", "uris", "suites", "components", "enabled", "description"}


def sources_text(plan: DriverPlan, text: Texts) -> str | None:
    """Return the file of apt sources for the components with the driver; None if the node's own sources have them."""
    components, system = SOURCES[plan.stack.source].components, plan.node.os
    if not components or system is None or plan.state.apt is None:
        return None
    rows = [row.model_dump() for row in plan.state.apt.sources]
    stanzas = missing_components(rows, str(system.codename), components, SOURCES_FILE)
    return text("components.sources.j2", stanzas=stanzas) if stanzas else None


def preferences_text(plan: DriverPlan, release: str, text: Texts) -> str:
    """Return the preferences that pin the closure to a release, or to a pattern of releases."""
    source = SOURCES[plan.stack.source]
    names = [f"src:{name}" for name in source.pin_sources] or list(source.pin_packages)
    pin = {"packages": names, "pin": f"version {any_revision(release)}", "priority": PIN_PRIORITY}
    return text("preferences.pref.j2", why="all packages of the driver come in this one version.", pins=[pin])


def unattended_text(names: Iterable[str], text: Texts) -> str:
    """Return the list for unattended upgrades; the next run reads from it what this role holds."""
    why = "the driver changes only on request, other upgrades continue."
    return text("unattended.conf.j2", why=why, names=list(names))


def common_files(settings: DriverSettings, text: Texts, *, dracut: bool) -> Iterator[ManagedFile]:
    """Yield the files that do not depend on the package manager; ``dracut``: it builds the initramfs."""
    yield ManagedFile(path=DRACUT, content=text("dracut.conf.j2") if dracut else None)
    options = settings.module_options
    yield ManagedFile(path=OPTIONS, content=text("modprobe.conf.j2", options=options) if options else None)
    if settings.persistence:
        yield ManagedFile(path=PERSISTENCED, content=text("nvidia-persistenced.conf.j2"))


@dataclass(frozen=True)
class DriverSource:
    """Package names of one source of drivers, on a system with apt."""

    pin_packages: tuple[str, ...] = ()
    """Patterns of packages that are pinned to one version."""
    pin_sources: tuple[str, ...] = ()
    """Source packages of which all packages are pinned; they take precedence over ``pin_packages``."""
    components: tuple[str, ...] = ()
    """Components of the distribution's archive with the driver."""
    profiles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Packages in addition to the stack's, by the role's profile."""
    flavours: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same by the flavour of the module."""
    dkms: Mapping[str, str] = field(default_factory=dict)
    """Name of the module in DKMS by flavour, if it is not ``nvidia``."""
    optional: tuple[str, ...] = ()
    """Installed if the source has them in the driver's release."""
    lift: tuple[str, ...] = ()
    """May come from any source if the preferred one is too old."""
    restore: tuple[str, ...] = ()
    """Return to the distribution's version on removal."""


SOURCES: Mapping[str, DriverSource] = {
    # nvidia-persistenced and nvidia-modprobe have versions of their own there.
    "debian": DriverSource(
        restore=_DKMS,
        pin_sources=("nvidia-graphics-drivers", "nvidia-open-gpu-kernel-modules"),
        components=("contrib", "non-free", "non-free-firmware"),
        profiles={
            "headless": (
                "firmware-nvidia-gsp",
                "libcuda1",
                "libnvidia-cfg1",
                "libnvidia-ml1",
                "libnvidia-nvvm4",
                "libnvidia-pkcs11-openssl3",
                "libnvidia-ptxjitcompiler1",
                "nvidia-alternative",
                "nvidia-legacy-check",
                "nvidia-smi",
            ),
            "full": ("firmware-nvidia-gsp", "nvidia-driver-full"),
        },
        flavours={"proprietary": ("nvidia-kernel-support",), "open": ("nvidia-open-kernel-support",)},
        dkms={"proprietary": "nvidia-current", "open": "nvidia-current-open"},
    ),
    "nvidia": DriverSource(lift=_DKMS, pin_packages=_PINNED, optional=("nvidia-persistenced", "nvidia-modprobe")),
    "ubuntu": DriverSource(restore=_DKMS, pin_packages=_PINNED),
}
LIFTED = SOURCES["nvidia"].lift
"""Packages that a removal returns to the distribution's version."""


def missing_components(
    sources: Iterable[Mapping[str, Any]], codename: str, components: Iterable[str], own_file: str
) -> list[dict[str, Any]]:
    """Return stanzas that add ``components`` to the distribution's own archives, as far as no other file has them.

    ``sources`` is what ``apt_state.py`` reports: per entry ``{file, types, uris, suites, components, options,
    origins}``; entries of ``own_file`` are ignored. Debian's own archive is identified by its Release file (origin
    Debian), by its keyring if nothing was fetched yet, and by its component ``main``. Returned is
    ``[{uris, suites, components, options}]``, one stanza per archive, in the order of the sources.
    """
    entries = [entry for entry in sources if entry["file"] != own_file and "deb" in entry["types"]]
    requested = list(components)
    release = {codename + suffix for suffix in _SUITES}
    present: dict[tuple[str, str], set[str]] = {}
    for entry in entries:
        for pair in _archives(entry):
            present.setdefault(pair, set()).update(entry["components"])
    stanzas: dict[tuple[Any, ...], dict[str, Any]] = {}
    done: set[tuple[str, str]] = set()
    for entry in entries:
        if "main" not in entry["components"]:
            continue
        options = {key: value for key, value in entry["options"].items() if key.lower() not in _NOT_COPIED}
        for uri, suite in _archives(entry):
            lacking = tuple(name for name in requested if name not in present[uri, suite])
            if (uri, suite) in done or not lacking or not _is_debians(entry, suite, release):
                continue
            done.add((uri, suite))
            key = (uri, lacking, tuple(sorted(options.items())))
            stanza = {"uris": [uri], "suites": [], "components": list(lacking), "options": options}
            stanzas.setdefault(key, stanza)["suites"].append(suite)
    return list(stanzas.values())


def _archives(entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(uri, suite) for uri in entry["uris"] for suite in entry["suites"]]


def _is_debians(entry: Mapping[str, Any], suite: str, release: set[str]) -> bool:
    """Return True for an archive of the running Debian release; its Release file takes precedence over its keyring."""
    seen = entry["origins"].get(suite)
    if seen is not None:
        return bool(seen["origin"] == "Debian" and seen["codename"] in release)
    keyring = next((value for key, value in entry["options"].items() if key.lower() == "signed-by"), "")
    return suite in release and (not keyring or "debian-archive" in keyring or "BEGIN PGP" in keyring)
