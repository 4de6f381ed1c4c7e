"""The loaded module as reported without NVIDIA's tools, its device files, and libraries that must exist once."""

import re

from gpunode.facts.bundle_reader import NOT_RUN, BundleReader, UnknownFactError, first_line, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.modules import read_loaded_driver
from gpunode.facts.parsers.values import bus_id, is_nothing
from gpunode.facts.system import read_architecture
from gpunode.text import last_line

_GPUS = "/proc/driver/nvidia/gpus/"
_PARAMS = "/proc/driver/nvidia/params"
_MODULES = "/sys/module/"
_ENGINE = re.compile(r"(?m)^\s*Version\s*:\s*(\d{1,4}(?:\.\d{1,6}){1,3})\s*$")
_VERSION = re.compile(r"(?<![0-9.])[0-9]{1,4}(?:\.[0-9]{1,6}){1,3}")


class DriverGpu(Fact):
    """A GPU as the loaded module lists it in ``/proc/driver/nvidia/gpus``, without any of NVIDIA's tools."""

    VOLATILE = frozenset({"minor"})

    slot: str
    model: str | None
    uuid: str | None
    minor: int | None
    """Number of ``/dev/nvidiaN``."""
    excluded: bool | None
    """Excluded from use by NVreg_ExcludedGpus."""
    firmware: str | None


class DeviceNode(Fact):
    """One of ``/dev/nvidia*``; folders such as ``/dev/nvidia-caps`` are listed with their content."""

    VOLATILE = frozenset({"created_s"})

    path: str
    kind: str
    """``character``, ``folder``, ``file``: a regular file in place of a device is a fault."""
    mode: str
    """Octal: ``0666``."""
    user: str
    group: str
    major: int | None
    minor: int | None
    created_s: int | None = None
    """Seconds from the boot to its creation; None: an older probe, or no device."""
    linked: bool | None = None
    """True if ``/dev/char`` has a link to it, by which runc passes it to systemd; None as above."""


def read_driver_gpus(bundle: BundleReader) -> tuple[DriverGpu, ...]:
    """Return the GPUs of ``/proc/driver/nvidia/gpus/SLOT/information``; a field ``??`` or ``Unknown`` is None."""
    if read_loaded_driver(bundle) is None:
        return ()
    names = bundle.folder(_GPUS)
    bundle.require_finished(_GPUS)
    if names is None:
        raise UnknownFactError(f"{_GPUS} is not there, though the module is loaded")
    return tuple(_gpu(bundle, name) for name in names)


def _gpu(bundle: BundleReader, name: str) -> DriverGpu:
    slot = bus_id(name)
    text = bundle.text(f"{_GPUS}{name}/information")
    if slot is None or text is None:
        raise ParseError(f"expected a PCI slot with its information in {_GPUS}, found '{first_line(name)}'")
    values = {
        key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in text.splitlines()) if colon
    }
    excluded = values.get("GPU Excluded", values.get("Blacklisted", "")).lower()
    return DriverGpu(
        slot=slot,
        model=_known(values.get("Model")),
        uuid=_known(values.get("GPU UUID")),
        minor=whole(values.get("Device Minor")),
        excluded={"yes": True, "no": False}.get(excluded),
        firmware=_known(values.get("GPU Firmware")),
    )


def _known(text: str | None) -> str | None:
    return None if text is None or is_nothing(text) or "?" in text else text


def read_device_nodes(bundle: BundleReader) -> tuple[DeviceNode, ...]:
    """Return the device files ``/dev/nvidia*``."""
    links = {path: (created, linked) for path, created, linked in _device_links(bundle)}
    return tuple(
        DeviceNode(
            path=path,
            kind=kind,
            mode=mode,
            user=user,
            group=group,
            major=whole(major),
            minor=whole(minor),
            created_s=whole(links.get(path, ("", ""))[0]),
            linked={"yes": True, "no": False}.get(links.get(path, ("", ""))[1]),
        )
        for path, kind, mode, user, group, major, minor in bundle.rows("device-nodes", 7)
    )


def _device_links(bundle: BundleReader) -> list[list[str]]:
    return bundle.rows("device-links", 3) if bundle.ran("device-links") else []


def read_driver_parameters(bundle: BundleReader) -> dict[str, str]:
    """Return the ``NAME: VALUE`` lines of ``/proc/driver/nvidia/params``, values without their quotes."""
    if read_loaded_driver(bundle) is None:
        return {}
    text = bundle.text(_PARAMS)
    if text is None:
        raise UnknownFactError(f"{_PARAMS} is not there, though the module is loaded")
    parameters = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if not colon:
            raise ParseError(f"expected NAME: VALUE in {_PARAMS}, found '{first_line(line)}'")
        parameters[name.strip()] = value.strip().strip('"')
    return parameters


def read_module_parameters(bundle: BundleReader) -> dict[str, dict[str, str]]:
    """Return the values in ``/sys/module/nvidia*/parameters``; without root, those that only root may read are
    missing."""
    names = bundle.folder(_MODULES)
    bundle.require_finished(_MODULES)
    if names is None:
        raise UnknownFactError(f"{_MODULES} is not there")
    values: dict[str, dict[str, str]] = {name: {} for name in names if name == "nvidia" or name.startswith("nvidia_")}
    for path in bundle.under(_MODULES):
        name, _, rest = path[len(_MODULES) :].partition("/parameters/")
        value = bundle.value(path)
        if name in values and rest and value is not None:
            values[name][rest] = value
    return values


def read_nvidia_tool_versions(bundle: BundleReader) -> dict[str, str] | None:
    """Return the ``--version`` of fabric manager, DCGM's host engine and dcgmi."""
    keys = {
        "nv-fabricmanager": "version-nv-fabricmanager",
        "nv-hostengine": "version-nv-hostengine",
        "dcgmi": "version-dcgmi",
    }
    if not any(bundle.ran(key) for key in keys.values()) and read_loaded_driver(bundle) is None:
        return None
    return {name: version for name, key in keys.items() if (version := version_of(bundle, key)) is not None}


def read_dcgm_engine(bundle: BundleReader) -> str | None:
    """Return the host engine's version from ``dcgmi -v``, after that of dcgmi; None for an engine that does not run,
    and if the probe had no time left to ask."""
    key = "dcgmi-versions"
    if not bundle.ran(key):
        if read_loaded_driver(bundle) is None:
            return None
        raise bundle.not_collected()
    result = bundle.raw(key)
    if result is not None and last_line(result.stderr).startswith(NOT_RUN):
        return None
    _, heading, engine = bundle.command(key).stdout.partition("Hostengine build info:")
    match = _ENGINE.search(engine[:4000]) if heading else None
    if heading and match is None:
        raise ParseError(f"expected the version of DCGM's host engine, found '{first_line(engine)}'")
    return match[1] if match else None


def version_of(bundle: BundleReader, key: str) -> str | None:
    """Return the first version in the output of a program; None if the program is not installed."""
    result = bundle.command(key)
    if result.missing:
        return None
    text = first_line(result.stdout) if result.rc == 0 else ""
    match = _VERSION.search(result.stdout[:4000]) if text else None
    if match is None:
        text = first_line(result.stdout) or first_line(result.stderr)
        raise ParseError(f"expected a version from {' '.join(result.argv[:2])}, found '{text}'")
    return match[0]


class DriverFacts(FactArea):
    """The driver and its GPUs."""

    driver_gpus: tuple[DriverGpu, ...] | None = fact(read_driver_gpus)
    """As the module lists them without NVIDIA's tools; empty if no module is loaded."""
    device_nodes: tuple[DeviceNode, ...] | None = fact(read_device_nodes)
    """``/dev/nvidia*``; empty if there are none."""
    driver_parameters: dict[str, str] | None = fact(read_driver_parameters)
    """From ``/proc/driver/nvidia/params``; empty if no module is loaded."""
    module_parameters: dict[str, dict[str, str]] | None = fact(read_module_parameters)
    """Parameters by module, of ``nvidia*`` and ``nvidia_*`` in ``/sys/module``."""
    nvidia_tool_versions: dict[str, str] | None = fact(
        read_nvidia_tool_versions, none_means="no module is loaded, and they were not run"
    )
    """``{"nv-fabricmanager": "580.95.05", "nv-hostengine": "4.4.1", "dcgmi": "4.4.1"}`` as they print it; a program
    that is not installed has no key."""
    dcgm_engine: str | None = fact(read_dcgm_engine, none_means="no host engine runs")
    """Version of the running DCGM host engine, by ``dcgmi -v``."""


_CACHED = re.compile(r"\s*(lib[a-z-]{2,20}\.so[0-9.]{0,20}) \(([^)]{0,120})\) => (/.{1,4000})")
_NAME = re.compile(r".*/(lib(?:cuda|nvidia-ml|nccl|cudnn))\.so(?:\.([0-9.]{1,40}))?")
_ANY_NAME = re.compile(r".*/(lib[a-z0-9-]{1,60})\.so(?:\.([0-9.]{1,40}))?")
_NATIVE = {"x86_64": "x86-64", "aarch64": "AArch64"}


class LibraryFile(Fact):
    """One file of a library that must exist once (libcuda, libnvidia-ml, libnccl, libcudnn), or an empty one of the
    driver's others."""

    name: str
    """Without suffix: ``libcuda``."""
    path: str
    """As listed in the linker's cache, or in a well-known folder."""
    file: str
    """The target of the path."""
    version: str | None
    """From the file's name: ``580.95.05``, ``2.27.3``; None for a ``libcuda.so.1`` that is not a link."""
    in_cache: bool
    """True if the dynamic linker's cache lists it."""
    used: bool
    """True for the file that the linker loads for a program of the machine's own architecture."""
    bits: int | None = None
    """32 or 64, if the cache has it."""
    size: int | None = None
    """Of the file, in bytes; None: an older probe collected it."""


def read_libraries(bundle: BundleReader) -> tuple[LibraryFile, ...]:
    """Return every path in the linker's cache and in the probe's folders. The linker loads the first one in its
    cache."""
    # Older probes recorded no size.
    rows = [line.split("\t") for line in bundle.look("library-files")]
    malformed = next((row for row in rows if len(row) not in (2, 3)), None)
    if malformed is not None:
        raise ParseError(f"expected a path, its file and its size, found '{first_line(malformed[0])}'")
    files = [(row[0], row[1], whole(row[2]) if len(row) == 3 else None) for row in rows]
    cached: dict[str, str] = {}
    used: dict[str, str] = {}
    native = _NATIVE.get(read_architecture(bundle), "")
    for line in bundle.output("ldconfig").splitlines():
        match = _CACHED.fullmatch(line)
        if not match:
            raise ParseError(f"expected a line of ldconfig -p, found '{first_line(line)}'")
        soname, flags, path = match.groups()
        cached.setdefault(path, flags)
        if not native or native in flags:
            used.setdefault(soname, path)
    winners = set(used.values())
    return tuple(
        LibraryFile(
            name=match[1],
            path=path,
            file=file,
            version=_version(file),
            in_cache=path in cached,
            used=path in winners,
            bits=_bits(cached.get(path)),
            size=size,
        )
        for path, file, size in files
        if (match := _NAME.fullmatch(path) or (_ANY_NAME.fullmatch(path) if size == 0 else None))
    )


def _version(file: str) -> str | None:
    """Return the version in a name: ``libcuda.so.580.95.05`` has one; ``libcuda.so.1`` and ``libcuda.so`` do not."""
    match = _NAME.fullmatch(file)
    return match[2] if match and match[2] and "." in match[2] else None


def _bits(flags: str | None) -> int | None:
    if flags is None:
        return None
    return 64 if "x86-64" in flags or "AArch64" in flags or "64bit" in flags else 32


class LibrariesFacts(FactArea):
    """Libraries."""

    libraries: tuple[LibraryFile, ...] | None = fact(read_libraries)
    """libcuda, libnvidia-ml, libnccl, libcudnn: all copies in the linker's cache and in well-known folders."""
