"""Files of the role nvidia_driver on a node, and their text."""

from collections.abc import Iterable, Iterator

from gpunode.provisioning.apt_sources import missing_components
from gpunode.provisioning.driver.model import DriverPlan, DriverSettings
from gpunode.provisioning.driver.sources import SOURCES
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
