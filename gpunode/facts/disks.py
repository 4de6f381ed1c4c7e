"""Block devices, NVMe controllers and their health, file systems."""

import json
import re
from typing import Any, Literal

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.pci import slot_of

_BLOCK = "/sys/block/"
_NVME = "/sys/class/nvme/"
HealthState = Literal["read", "no-program", "no-permission", "unknown"]
NO_PROGRAM = 127
_REFUSED = re.compile(r"Permission denied|Operation not permitted", re.IGNORECASE)
_DF_LINE = re.compile(
    r"(\S{1,40})\s{1,40}([0-9-]{1,19})\s{1,40}([0-9-]{1,19})\s{1,40}([0-9-]{1,19})\s{1,40}([0-9-]{1,19}) (/.*)"
)
_LINE_LIMIT = 9000


class Disk(Fact):
    """One physical block device."""

    name: str
    """``nvme0n1``, ``sda``."""
    model: str | None
    size_bytes: int
    rotational: bool | None
    read_only: bool | None


class Nvme(Fact):
    """One NVMe controller. Its health is None unless ``health`` is ``read``."""

    VOLATILE = frozenset({"available_spare_percent", "temperature_c"})
    COUNTERS = frozenset({"media_errors", "percentage_used"})

    name: str
    """``nvme0``."""
    model: str | None
    firmware: str | None
    state: str | None
    """``live``."""
    slot: str | None
    numa_node: int | None
    health: Literal["read", "no-program", "no-permission", "unknown"] = "unknown"
    """``read``: ``nvme smart-log`` printed the health; otherwise the reason why it is unknown."""
    critical_warning: int | None = None
    """A bit field; 0 is good."""
    media_errors: int | None = None
    percentage_used: int | None = None
    available_spare_percent: int | None = None
    temperature_c: int | None = None


class StoredMount(Fact):
    """One mount of the role storage: as recorded, and as found."""

    VOLATILE = frozenset({"free_mib"})

    path: str
    source: str
    type: str
    remote: bool
    options: tuple[str, ...]
    """The recorded options that the kernel shows unchanged."""
    mounted_type: str | None
    """None: nothing is mounted."""
    mounted_options: tuple[str, ...]
    same_device: bool | None
    """None if the source is not a UUID."""
    size_mib: int | None
    free_mib: int | None
    problem: str | None
    """Why the mount does not respond."""


class LocalMount(Fact):
    """The root, or a mounted file system of ``/etc/fstab`` on a block device."""

    path: str
    source: str
    type: str
    read_only: bool
    """Of the file system itself: the kernel sets it after an error, also if the mount still has ``rw``."""
    fstab_read_only: bool | None
    """As ``/etc/fstab`` requests it; None: it has no entry."""


class RemoteMount(Fact):
    """A mounted network file system, whoever mounted it."""

    path: str
    source: str
    type: str
    """As the kernel has it: ``nfs4`` for version 4 of NFS, ``fuse.PROGRAM``."""
    read_only: bool
    options: tuple[str, ...]
    """Of the mount and of the file system, as the kernel has them (``nconnect=16``), without names and secrets."""


class FileSystem(Fact):
    """One local file system, from ``df``."""

    VOLATILE = frozenset({"free_mib", "inodes_free_percent"})

    mount: str
    type: str
    size_mib: int
    free_mib: int
    inodes_free_percent: int | None
    """None if the file system does not count inodes (btrfs, vfat)."""


def read_disks(bundle: BundleReader) -> tuple[Disk, ...]:
    """Return the hardware devices of ``/sys/block``."""
    names = bundle.entries(_BLOCK)
    if names is None:
        raise UnknownFactError(f"{_BLOCK} is not there")
    disks = []
    for name in names:
        sectors = bundle.number(f"{_BLOCK}{name}/size")
        if sectors is None:
            raise ParseError(f"expected the number of sectors in {_BLOCK}{first_line(name)}/size")
        disks.append(
            Disk(
                name=name,
                model=bundle.value(f"{_BLOCK}{name}/device/model"),
                size_bytes=sectors * 512,
                rotational=_switch(bundle.value(f"{_BLOCK}{name}/queue/rotational")),
                read_only=_switch(bundle.value(f"{_BLOCK}{name}/ro")),
            )
        )
    return tuple(disks)


def _switch(text: str | None) -> bool | None:
    return {"0": False, "1": True}.get(text or "")


def read_nvmes(bundle: BundleReader) -> tuple[Nvme, ...]:
    """Return the controllers in sysfs, with their health from ``nvme smart-log`` if it is available."""
    return tuple(_nvme(bundle, name) for name in bundle.entries(_NVME) or ())


def _nvme(bundle: BundleReader, name: str) -> Nvme:
    folder = f"{_NVME}{name}/"
    health = _health(bundle, f"nvme-{name}")
    sensor = next((path for path in bundle.under(folder) if path.endswith("/temp1_input")), None)
    millidegrees = bundle.number(sensor) if sensor else None
    node = bundle.number(folder + "device/numa_node")
    return Nvme(
        name=name,
        model=bundle.value(folder + "model"),
        firmware=bundle.value(folder + "firmware_rev"),
        state=bundle.value(folder + "state"),
        slot=slot_of(bundle, folder + "device/uevent"),
        numa_node=node if node is not None and node >= 0 else None,
        health=_health_state(bundle, f"nvme-{name}", health),
        critical_warning=_integer(health.get("critical_warning")),
        media_errors=_integer(health.get("media_errors")),
        percentage_used=_integer(health.get("percent_used", health.get("percentage_used"))),
        available_spare_percent=_integer(health.get("avail_spare", health.get("available_spare"))),
        temperature_c=None if millidegrees is None else round(millidegrees / 1000),
    )


def _health(bundle: BundleReader, key: str) -> dict[str, Any]:
    """Return the answer of ``nvme smart-log``; empty if there is none: no root, no program, no such log page."""
    try:
        answer = json.loads(bundle.output(key))
    except (UnknownFactError, ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _health_state(bundle: BundleReader, key: str, health: dict[str, Any]) -> HealthState:
    if _integer(health.get("critical_warning")) is not None:
        return "read"
    answer = bundle.raw(key)
    if answer is None or answer.timed_out:
        return "unknown"
    if answer.rc == NO_PROGRAM:
        return "no-program"
    return "no-permission" if answer.rc != 0 and _REFUSED.search(answer.stderr + answer.stdout) else "unknown"


def _integer(value: object) -> int | None:
    """Return a number of nvme-cli, which prints long ones as text; newer versions print ``critical_warning`` as an
    object."""
    if isinstance(value, dict):
        value = value.get("value")
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return whole(value) if isinstance(value, str) else None


def read_file_systems(bundle: BundleReader) -> tuple[FileSystem, ...]:
    """Return the rows of ``df -l -k --output=fstype,size,avail,itotal,iavail,target``, which fails if it has none."""
    result = bundle.command("df-local")
    if result.rc != 0 and "no file systems processed" in result.stderr:
        return ()
    lines = bundle.output("df-local", good=(0, 1)).splitlines()
    if not lines or not lines[0].startswith("Type"):
        raise ParseError(f"expected df's heading, found '{first_line(result.stdout) or first_line(result.stderr)}'")
    file_systems = []
    for line in lines[1:]:
        match = _DF_LINE.fullmatch(line) if len(line) < _LINE_LIMIT else None
        if not match:
            raise ParseError(f"expected a line of df, found '{first_line(line)}'")
        inodes, inodes_free = whole(match[4]), whole(match[5])
        file_systems.append(
            FileSystem(
                mount=match[6],
                type=match[1],
                size_mib=(whole(match[2]) or 0) // 1024,
                free_mib=(whole(match[3]) or 0) // 1024,
                inodes_free_percent=100 * inodes_free // inodes if inodes and inodes_free is not None else None,
            )
        )
    return tuple(file_systems)


def read_local_mounts(bundle: BundleReader) -> tuple[LocalMount, ...]:
    """Return the root and the mounted file systems of fstab on block devices."""
    mounts = []
    for path, source, kind, superblock, fstab in bundle.rows("local-mounts", 5):
        requested = _is_read_only(path, fstab) if fstab else None
        read_only = _is_read_only(path, superblock)
        mounts.append(LocalMount(path=path, source=source, type=kind, read_only=read_only, fstab_read_only=requested))
    if not any(mount.path == "/" for mount in mounts):
        raise ParseError("expected the root among the mounts, found it not")
    return tuple(mounts)


def _is_read_only(path: str, flag: str) -> bool:
    if flag not in ("ro", "rw"):
        raise ParseError(f"expected ro or rw for {first_line(path)}, found '{first_line(flag)}'")
    return flag == "ro"


def read_remote_mounts(bundle: BundleReader) -> tuple[RemoteMount, ...]:
    """Return the mounted network file systems."""
    return tuple(
        RemoteMount(
            path=path,
            source=source,
            type=kind,
            read_only=_is_read_only(path, superblock),
            options=tuple(options.split(",")) if options else (),
        )
        for path, source, kind, superblock, options in bundle.rows("remote-mounts", 5)
    )


def read_storage(bundle: BundleReader) -> tuple[StoredMount, ...] | None:
    """Return the mounts that the role storage recorded, with their state; None if it recorded none."""
    if not bundle.ran("storage"):
        bundle.require_finished("storage")
        if not bundle.looked_for_records():
            raise bundle.not_collected()
        return None
    mounts = []
    for path, source, kind, mark, options, mounted, flags, same, size, free, problem in bundle.rows("storage", 11):
        if mark not in ("remote", "scratch"):
            raise ParseError(f"expected remote or scratch, found '{first_line(mark)}'")
        mounts.append(
            StoredMount(
                path=path,
                source=source,
                type=kind,
                remote=mark == "remote",
                options=tuple(options.split(",")) if options else (),
                mounted_type=mounted or None,
                mounted_options=tuple(flags.split(",")) if flags else (),
                same_device={"yes": True, "no": False}.get(same),
                size_mib=whole(size),
                free_mib=whole(free),
                problem=problem or None,
            )
        )
    return tuple(mounts)


class DisksFacts(FactArea):
    """Disks and what is mounted."""

    storage: tuple[StoredMount, ...] | None = fact(read_storage, none_means="the role storage set up none")
    """Mounts of the role storage."""
    disks: tuple[Disk, ...] | None = fact(read_disks)
    nvmes: tuple[Nvme, ...] | None = fact(read_nvmes, needs_root=True)
    file_systems: tuple[FileSystem, ...] | None = fact(read_file_systems)
    local_mounts: tuple[LocalMount, ...] | None = fact(read_local_mounts)
    # Volatile: an automounter mounts at the first access, and Kubernetes for each pod.
    remote_mounts: tuple[RemoteMount, ...] | None = fact(read_remote_mounts, volatile=True)
