"""``nvidia-smi``: parses the request, and fails if the driver could not answer it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from . import smi_links, smi_mig, smi_query, smi_report, smi_settings, smi_table, state
from .node import NodeSnapshot, SimulatedGpu, loaded, numbers, package_release

SUCCESS, INVALID, NOT_FOUND = 0, 2, 6
NO_DRIVER, NO_LIBRARY, MISMATCH, UNKNOWN = 9, 12, 18, 255
HANG_S = 3600

NO_DRIVER_TEXT = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)
NO_LIBRARY_TEXT = (
    "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display Driver "
    "is properly installed and present in your system.\n"
    "Please also try adding directory that contains libnvidia-ml.so to your system PATH.\n"
)


class SmiError(Exception):
    """nvidia-smi ends with this text on stdout and this exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def main(argv: list[str]) -> int:
    """Run nvidia-smi with these arguments, again and again with ``-l``; return its exit code."""
    argv, every_s = without_loop(argv)
    code = _once(argv)
    while every_s is not None and code == SUCCESS:
        sys.stdout.flush()
        time.sleep(every_s)
        code = _once(argv)
    return code


def without_loop(argv: list[str]) -> tuple[list[str], float | None]:
    """Return the arguments without ``-l`` or ``-lms``, and the seconds of either."""
    for option, unit_s in (("-l", 1.0), ("--loop", 1.0), ("-lms", 0.001), ("--loop-ms", 0.001)):
        for index, word in enumerate(argv if argv[:1] and argv[0].startswith("-") else []):
            name, equals, value = word.partition("=")
            if name == option:
                after = index + (1 if equals else 2)
                value = value or "".join(argv[index + 1 : after])
                return argv[:index] + argv[after:], int(value) * unit_s if value.isdigit() else 5.0
    return argv, None


def _once(argv: list[str]) -> int:
    try:
        return _run(argv)
    except SmiError as err:
        sys.stdout.write(err.text)
        return err.code
    except smi_links.UnsimulatedError:
        sys.stdout.write("Simulated by gpunode lab: of dmon only -s t -d SECONDS -c COUNT is simulated\n")
        return INVALID
    except smi_query.UnknownFieldError as err:
        sys.stdout.write(f'Field "{err}" is not a valid field to query.\n\n')
        return INVALID


def _run(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"NVIDIA System Management Interface -- v{package_release() or 'unknown'}\n\n")
        sys.stdout.write("Simulated by gpunode lab: no GPU is behind this. What it answers to: docs/simulator.md\n")
        return SUCCESS
    node = ready()
    if argv[:1] == ["--version"]:
        return _print(_version(node))
    if argv[:1] == ["topo"]:
        return _topo(node, argv[1:])
    if argv[:1] == ["dmon"]:
        return smi_links.run(argv[1:], ready)
    if argv[:1] == ["mig"]:
        return _mig(node, argv[1:])
    if argv[:1] == ["nvlink"]:
        return _nvlink(node, argv[1:])
    options = parse(argv)
    gpus = chosen(node, options.get("id"))
    if "list" in options:
        return _print(smi_table.listing(gpus))
    setting = smi_settings.run(gpus, options)
    if setting is not None:
        sys.stdout.write(setting[1])
        return setting[0]
    queries: dict[str, Callable[[list[str], set[str]], str]] = {
        "query-gpu": lambda fields, form: smi_query.query_gpu(node, gpus, fields, form),
        "query-compute-apps": lambda fields, form: smi_query.query_apps(gpus, fields, form),
        "query-retired-pages": lambda fields, form: smi_query.query_pages(gpus, fields, form),
    }
    for name in set(queries).intersection(options):
        return _print(queries[name]([field.strip() for field in options[name].split(",")], _format(options)))
    if "query" in options:
        return _query(node, gpus, options)
    if argv and not set(options) <= {"id"}:
        raise invalid(argv[0])
    return _print(smi_table.table(node, gpus))


def ready() -> NodeSnapshot:
    """Return the node if module and library match and a GPU exists. Raises SmiError with nvidia-smi's failure."""
    node = loaded()
    if node.library is None:
        raise SmiError(NO_LIBRARY, NO_LIBRARY_TEXT)
    if node.release is None:
        raise SmiError(NO_DRIVER, NO_DRIVER_TEXT)
    if node.has_fault("smi-hangs"):
        time.sleep(HANG_S)
    if node.in_container and not state.path("/dev/nvidiactl").exists():
        raise SmiError(UNKNOWN, "Failed to initialize NVML: Unknown Error\n")
    if node.release != node.library:
        short = ".".join(node.library.split(".")[:2])
        text = f"Failed to initialize NVML: Driver/library version mismatch\nNVML library version: {short}\n"
        raise SmiError(MISMATCH, text)
    if not node.gpus:
        raise SmiError(NOT_FOUND, "No devices were found\n")
    return node


LONG = {
    "--list-gpus": "list", "--query": "query", "--xml-format": "xml", "--id": "id", "--display": "display",
    "--format": "format", "--persistence-mode": "pm", "--power-limit": "pl", "--ecc-config": "e",
    "--compute-mode": "c", "--gpu-reset": "r", "--applications-clocks": "ac",
    "--reset-applications-clocks": "rac", "--lock-gpu-clocks": "lgc", "--reset-gpu-clocks": "rgc",
    "--lock-memory-clocks": "lmc", "--reset-memory-clocks": "rmc", "--multi-instance-gpu": "mig",
    "--accounting-mode": "am",
}  # fmt: skip
SHORT = {
    "-L": "list", "-q": "query", "-x": "xml", "-i": "id", "-d": "display", "-pm": "pm", "-pl": "pl",
    "-e": "e", "-c": "c", "-r": "r", "-ac": "ac", "-rac": "rac", "-lgc": "lgc", "-rgc": "rgc",
    "-lmc": "lmc", "-rmc": "rmc", "-mig": "mig", "-am": "am",
}  # fmt: skip
WITHOUT_VALUE = frozenset({"list", "query", "xml", "r", "rac", "rgc", "rmc"})
QUERIES = ("query-gpu", "query-compute-apps", "query-retired-pages")


def parse(argv: list[str]) -> dict[str, str]:
    """Return options by their names; raise SmiError for an unknown option."""
    options: dict[str, str] = {}
    left = list(argv)
    while left:
        word = left.pop(0)
        key, equals, value = word.partition("=")
        name = key[2:] if key.startswith("--") and key[2:] in QUERIES else LONG.get(key) or SHORT.get(key)
        if name is None:
            raise invalid(word)
        if name in WITHOUT_VALUE:
            options[name] = ""
        elif equals:
            options[name] = value
        elif left:
            options[name] = left.pop(0)
        else:
            raise SmiError(INVALID, f"Missing value for option: '{word}'\nPlease run 'nvidia-smi -h' for help.\n")
    return options


def invalid(word: str) -> SmiError:
    """Return the error for an argument that nvidia-smi does not support."""
    return SmiError(
        INVALID, f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n\n{word}\n"
    )


def chosen(node: NodeSnapshot, which: str | None) -> list[SimulatedGpu]:
    """Return the GPUs of ``-i``: indices, UUIDs or bus ids. Raises SmiError for an unknown one."""
    if which is None:
        return node.gpus
    gpus = []
    for word in which.split(","):
        match = [gpu for gpu in node.gpus if _is_named(gpu, word.strip())]
        if not match:
            raise SmiError(NOT_FOUND, "No devices were found\n")
        gpus += match
    return gpus


def _is_named(gpu: SimulatedGpu, word: str) -> bool:
    bus = gpu.bus_id.lower()
    return word in (str(gpu.index), gpu.uuid) or word.lower() in (bus, bus[4:])


def _print(text: str) -> int:
    sys.stdout.write(text)
    return SUCCESS


def _format(options: dict[str, str]) -> set[str]:
    requested = {word.strip() for word in options.get("format", "").split(",")}
    if "csv" not in requested:
        raise SmiError(INVALID, 'Missing format option. "--format=csv" is required with --query.\n')
    return requested


def _query(node: NodeSnapshot, gpus: list[SimulatedGpu], options: dict[str, str]) -> int:
    if "xml" in options:
        return _print(smi_report.xml_document(node, gpus))
    sections = None
    if "display" in options:
        sections = [word.strip().upper() for word in options["display"].split(",")]
        unknown = [word for word in sections if word not in smi_report.SECTIONS]
        if unknown:
            raise SmiError(INVALID, f'Display type "{unknown[0]}" is not a valid display type.\n\n')
    return _print(smi_report.text_document(node, gpus, sections))


def _version(node: NodeSnapshot) -> str:
    driver = node.driver
    short = ".".join(driver.split(".")[:2])
    lines = [
        f"NVIDIA-SMI version  : {package_release() or driver}",
        f"NVML version        : {short}",
        f"DRIVER version      : {driver}",
        f"CUDA Version        : {node.cuda}",
    ]
    if numbers(driver)[0] >= 610:
        lines[2:] = [
            'DRIVER version      : Deprecated, see "KMD version" instead',
            'CUDA version        : Deprecated, see "CUDA UMD version" instead',
            f"KMD version         : {driver}",
            f"CUDA UMD version    : {node.cuda}",
        ]
    return "\n".join(lines) + "\n"


def _topo(node: NodeSnapshot, argv: list[str]) -> int:
    if argv in (["-m"], ["--matrix"]):
        return _print(smi_links.matrix(node))
    if argv in (["-p2p", "r"], ["--p2pstatus", "r"]):
        return _print(smi_links.peers(node))
    raise invalid("topo")


def _mig(node: NodeSnapshot, argv: list[str]) -> int:
    which, argv = _without_id(argv)
    root = os.geteuid() == 0 or bool(os.environ.get("GPUNODE_LAB_ROOT"))
    try:
        code, text = smi_mig.run(chosen(node, which), argv, root)
    except smi_mig.MigError as err:
        code, text = err.code, err.text
    sys.stdout.write(text)
    return code


def _without_id(argv: list[str]) -> tuple[str | None, list[str]]:
    """Return the value of ``-i``, and the other arguments."""
    if "-i" not in argv[:-1]:
        return None, argv
    index = argv.index("-i")
    return argv[index + 1], argv[:index] + argv[index + 2 :]


def _nvlink(node: NodeSnapshot, argv: list[str]) -> int:
    which, argv = _without_id(argv)
    listings = {
        "-s": smi_links.status, "--status": smi_links.status, "-e": smi_links.errors,
        "--errorcounters": smi_links.errors,
    }  # fmt: skip
    if len(argv) != 1 or argv[0] not in listings:
        raise invalid("nvlink")
    return _print(listings[argv[0]](chosen(node, which)))
