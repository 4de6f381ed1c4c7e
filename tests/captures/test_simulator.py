"""The lab's simulated tools beside recordings of the real ones, line by line: what both print, and what one alone does.

``simulator_differences.yml`` names the recordings per hardware, and every difference with its reason.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from captured import FOLDER
from simulated import lay, node_at, nvidia_smi

from gpunode.facts.parsers.kinds import parsed
from gpunode.lab.hardware.describe import describe

HERE = Path(__file__).resolve().parent
LISTED: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    (HERE / "simulator_differences.yml").read_text(encoding="utf-8")
)["hardware"]
CASES = [(hardware, capture) for hardware, captures in LISTED.items() for capture in captures]
IDENTITY = (
    "name", "architecture", "pci_device_id", "pci_subsystem_id", "vbios_version", "memory_total_mib", "max_clocks_mhz",
    "power_default_limit_w", "power_max_limit_w",
)  # fmt: skip
PRESENT = (
    "ecc/enabled",
    "mig_mode",
    "remapped_rows/pending",
    "retired_pages/pending",
    "fabric/state",
    "memory_temperature_c",
)


@dataclass
class Compared:
    """Lines of both, and the fields with different values."""

    both: int = 0
    only_capture: set[str] = field(default_factory=set)
    only_simulator: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)


def driver_of(capture: str, text: str) -> str:
    """The driver version that the recording names, in its text or in its file name."""
    match = re.search(r"(?:driver_version>|Driver Version *: |-)(\d{3}\.\d+(?:\.\d+)?)", f"{text}\n{capture}")
    return match[1] if match else "535.104.12"


# The recordings of an H100 in MIG mode have these four instances; those of other models have none.
INSTANCES = [
    {"id": 2, "profile": "3g.40gb", "start": 4, "compute": True},
    {"id": 3, "profile": "2g.20gb", "start": 0, "compute": True},
    {"id": 9, "profile": "1g.10gb", "start": 3, "compute": True},
    {"id": 10, "profile": "1g.10gb", "start": 2, "compute": True},
]


def lay_node(folder: Path, hardware: str, driver: str, mig: bool) -> None:
    """Lay a simulated node with that hardware and driver below a folder, as its boot leaves it."""
    described = describe(hardware, "node")
    mode: dict[str, Any] = {"ecc": True, "mig": mig, "mig_pending": mig}
    if mig and "h100" in hardware:
        mode["mig_instances"] = INSTANCES
    modes = {str(gpu["index"]): mode for gpu in described["gpus"]}
    lay(folder, described, driver, modes, fabric={"state": "Completed", "status": "Success"})


def xml_lines(text: str) -> set[str]:
    """Paths of the tags of the first GPU; the contents of lists of any length are left out."""
    root = ET.fromstring(re.sub(r"<!DOCTYPE[^>]*>", "", text))  # noqa: S314 (recorded files)
    gpu = root.find("gpu")
    assert gpu is not None
    paths = {child.tag for child in root}

    def walk(node: ET.Element, path: str) -> Iterator[str]:
        for child in node:
            where = f"{path}/{child.tag}"
            yield where
            if child.tag not in ("supported_clocks", "processes", "accounted_processes"):
                yield from walk(child, where)

    return paths | set(walk(gpu, "gpu"))


def q_lines(text: str) -> set[str]:
    """Paths of the labels of the head and of the first GPU."""
    paths = set()
    stack: list[tuple[int, str]] = []
    gpus = 0
    for line in text.splitlines():
        if not line.strip() or line.startswith("="):
            continue
        indent = len(line) - len(line.lstrip())
        label = line.partition(" : ")[0].strip()
        if indent == 0 and line.startswith("GPU "):
            gpus += 1
            label = "GPU"
        if gpus > 1:
            break
        while stack and stack[-1][0] >= indent:
            stack.pop()
        stack.append((indent, label))
        path = "/".join(name for _, name in stack)
        if not path.startswith("GPU/Processes/"):
            paths.add(path)
    return paths


def topo_lines(text: str) -> set[str]:
    """Titles of the columns, the cells between GPUs, and the legend."""
    plain = re.sub(r"\x1b\[\d*m", "", text)
    titles = {f"column {title}" for title in re.findall(r"CPU Affinity|NUMA Affinity|GPU NUMA ID", plain)}
    rows = [line.split() for line in plain.splitlines() if re.match(r"GPU\d", line)]
    cells = {
        f"GPU-GPU {word}"
        for row in rows[1 if len(rows) > 1 and "GPU1" in rows[0] else 0 :]
        for word in row[1:9]
        if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", word)
    }
    return titles | cells | {line.strip() for line in plain.splitlines() if " = " in line}


def nvlink_lines(text: str) -> set[str]:
    """The links of the first GPU with their speed, or what is reported in their place."""
    block = re.split(r"(?m)^GPU \d+:", text)[1]
    return {re.sub(r"\s+", " ", line.strip()) for line in block.splitlines()[1:] if line.strip()} | {"GPU: NAME (UUID)"}


def table_lines(text: str) -> set[str]:
    """Rulers and headings, with versions and figures taken out."""
    kept = set()
    for line in text.splitlines():
        if line.startswith("|") and re.search(
            r"NVIDIA-SMI|[Pp]rocess|Persistence|Pwr:Usage|MIG|  ID  |No running|        ECC", line
        ):
            kept.add(re.sub(r"\d+\.\d+(\.\d+)?", lambda match: "9" * len(match[0]), line.rstrip()))
        elif re.fullmatch(r"[+|][-=+|]*", line.rstrip()):
            kept.add(line.rstrip())
        elif re.search(r"\d+W / .*MiB", line):
            masked = re.sub(r" *\d+(?=C|W|MiB|%)", lambda match: "9".rjust(len(match[0])), line.rstrip())
            kept.add(re.sub(r" P\d ", " P9 ", masked))
        elif re.match(r"\|   0  .*[0-9A-F]{8}:", line):
            masked = re.sub(r"[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}", "BUS", f"|   0  NAME{line.rstrip()[38:]}")
            kept.add(re.sub(r"(On |Off)(?= +\|)", "Off", masked, count=1))
    return kept


def csv_lines(text: str) -> set[str]:
    """Names of the columns."""
    return {name.strip() for name in text.splitlines()[0].split(",")}


def list_lines(text: str) -> set[str]:
    """The first GPU's line without its UUID."""
    return {re.sub(r"GPU-[0-9a-f-]+", "GPU-…", text.splitlines()[0])}


def version_lines(text: str) -> set[str]:
    """All lines of ``--version``."""
    return {line.rstrip() for line in text.splitlines() if line.strip()}


KINDS: tuple[tuple[str, tuple[str, ...], Callable[[str], set[str]]], ...] = (
    ("smi-xml/", ("-q", "-x"), xml_lines),
    ("smi-q/", ("-q",), q_lines),
    ("smi-topo/", ("topo", "-m"), topo_lines),
    ("smi-nvlink/", ("nvlink", "--status"), nvlink_lines),
    ("smi-table/", (), table_lines),
    ("smi-csv/", (), csv_lines),
    ("smi-misc/*-L.txt", ("-L",), list_lines),
    ("smi-misc/*-version.txt", ("--version",), version_lines),
)


def compare(capture: str, real: str) -> Compared:
    """Ask the simulator what the recording answers, and compare."""
    prefix, words, lines = next(kind for kind in KINDS if fnmatchcase(capture, kind[0] + "*" * (kind[0][-1] == "/")))
    if prefix == "smi-q/" and "Product Name" not in real:
        words = ("-q", "-d", "PAGE_RETIREMENT")
    if prefix == "smi-csv/":
        names = [re.sub(r" \[.*", "", name.strip()) for name in real.splitlines()[0].split(",")]
        query = "retired-pages" if "retired-pages" in capture else "gpu"
        words = (f"--query-{query}={','.join(names)}", "--format=csv")
    simulated = answer(*words)
    simulated_lines, real_lines = lines(simulated), lines(real)
    diff = Compared(len(simulated_lines & real_lines), real_lines - simulated_lines, simulated_lines - real_lines)
    if prefix == "smi-xml/":
        diff.values = other_values(parsed("nvidia-smi-xml", simulated), parsed("nvidia-smi-xml", real))
    elif "PAGE_RETIREMENT" in words:
        pass  # no GPU's name in it: the lines are all there is
    elif prefix == "smi-q/":
        diff.values = other_values(parsed("nvidia-smi-q", simulated), parsed("nvidia-smi-q", real))
    elif prefix == "smi-table/":
        diff.values = other_table_values(parsed("nvidia-smi-table", simulated), parsed("nvidia-smi-table", real))
    elif prefix == "smi-csv/":
        diff.values = other_cells(simulated, real)
    return diff


def at(gpu: dict[str, Any], path: str) -> Any:
    for step in path.split("/"):
        gpu = gpu[step]
    return gpu


def other_values(simulated: dict[str, Any], real: dict[str, Any]) -> dict[str, str]:
    """Fields that identify the model, and whether what it should have is there."""
    gpu, real_gpu = simulated["gpus"][0], real["gpus"][0]
    pairs = {name: (gpu[name], real_gpu[name]) for name in IDENTITY}
    pairs["cuda_version"] = (simulated["cuda_version"], real["cuda_version"])
    for name in ("gen_max", "gen_max_device", "width_max"):
        pairs[f"pcie/{name}"] = (gpu["pcie"][name], real_gpu["pcie"][name])
    for path in PRESENT:
        pairs[f"has {path}"] = (at(gpu, path) is not None, at(real_gpu, path) is not None)
    return {name: f"simulator {pair[0]}, capture {pair[1]}" for name, pair in pairs.items() if pair[0] != pair[1]}


def other_table_values(simulated: dict[str, Any], real: dict[str, Any]) -> dict[str, str]:
    gpu, real_gpu = simulated["gpus"][0], real["gpus"][0]
    names = ("name", "memory_total_mib", "power_limit_w", "ecc_uncorrected", "mig_mode", "compute_mode")
    return {name: f"simulator {gpu[name]}, capture {real_gpu[name]}" for name in names if gpu[name] != real_gpu[name]}


MOVING = re.compile(
    r"timestamp|bus_id|serial|uuid|pci\.(bus|domain|device$|bus_id)|count|temperature|power\.draw|utilization|clocks\.current"
    r"|memory\.(used|free)|event_reasons|persistence|addressing|accounting|pstate|hostname|module_id|hostmax"
)


def other_cells(simulated: str, real: str) -> dict[str, str]:
    """Cells of the first row that do not move from moment to moment or from node to node."""
    names = [name.strip() for name in real.splitlines()[0].split(",")]
    cells, real_cells = ([cell.strip() for cell in text.splitlines()[1].split(",")] for text in (simulated, real))
    pairs = zip(names, cells, real_cells, strict=True)
    return {name: f"simulator {a}, capture {b}" for name, a, b in pairs if a != b and not MOVING.search(name)}


def answer(*words: str) -> str:
    """Return what nvidia-smi prints for these arguments."""
    code, text = nvidia_smi(*words)
    assert code == 0
    return text


def compared(hardware: str, capture: str, folder: Path) -> Compared:
    """Lay the node that the recording is of below a folder, and compare."""
    real = (FOLDER / capture).read_text(encoding="utf-8")
    driver, mig = driver_of(capture, real), bool(LISTED[hardware][capture].get("mig"))
    with node_at(folder, driver):
        lay_node(folder, hardware, driver, mig)
        return compare(capture, real)


@pytest.mark.parametrize(
    ("hardware", "capture"),
    [pytest.param(*case, marks=pytest.mark.captures(case[1]), id=f"{case[0]}-{Path(case[1]).stem}") for case in CASES],
)
def test_every_difference_from_the_recording_is_listed_with_a_reason(
    hardware: str, capture: str, tmp_path: Path
) -> None:
    diff = compared(hardware, capture, tmp_path)
    listed = LISTED[hardware][capture]
    values = {} if listed.get("layout_only") else diff.values
    assert diff.both > 0
    for part, lines in (
        ("only_capture", diff.only_capture),
        ("only_simulator", diff.only_simulator),
        ("values", set(values)),
    ):
        known: dict[str, str] = listed.get(part) or {}
        assert all(known.values()), f"{part}: a difference without its reason"
        unlisted = sorted(line for line in lines if not any(matches(line, entry) for entry in known))
        assert not unlisted, f"{part}: {[f'{line}: {values.get(line, str())}' for line in unlisted]}"
        stale = sorted(entry for entry in known if not any(matches(line, entry) for line in lines))
        assert not stale, f"{part}: listed, and no difference any more: {stale}"


def matches(line: str, entry: str) -> bool:
    return line.startswith(entry[:-1]) if entry.endswith("*") else line == entry


@pytest.mark.captures(*(capture for _, capture in CASES))
def test_the_table_of_what_was_compared_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("hardware", "recording", "both", "only simulator", "only recording", "values that differ")]
    for number, (hardware, capture) in enumerate(CASES):
        diff = compared(hardware, capture, tmp_path / str(number))
        differ = "layout alone" if LISTED[hardware][capture].get("layout_only") else str(len(diff.values))
        rows.append(
            (hardware, capture, str(diff.both), str(len(diff.only_simulator)), str(len(diff.only_capture)), differ)
        )
    with capsys.disabled():
        print()
        for row in rows:
            print(f"{row[0]:12} {row[1]:66} {row[2]:>5} {row[3]:>15} {row[4]:>15} {row[5]:>19}")
    assert len({row[0] for row in rows[1:]}) == len(LISTED)
