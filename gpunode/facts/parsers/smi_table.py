"""Plain ``nvidia-smi``: its table, from the two-line rows of driver 295 to the current format."""

import re
from dataclasses import dataclass, field

from gpunode.facts.errors import ParseError
from gpunode.facts.models.smi import Failure, SmiTable, TableGpu, TableProcess
from gpunode.facts.parsers import smi_base
from gpunode.facts.parsers.values import (
    bus_id,
    flag,
    found_text,
    integer,
    is_nothing,
    lines_of,
    mebibytes,
    quantity,
    text_or_none,
    version,
)

_LINE_LIMIT = 1000
_HEAD = re.compile(r"\|\s*NVIDIA-SMI\s+\S+\s")
_DRIVER = re.compile(r"(?:Driver|KMD) Version:\s*(\S+)")
_CUDA = re.compile(r"CUDA (?:UMD )?Version:\s*(\S+)")
_BORDER = re.compile(r"[+|][-=+|]*")
_COLUMNS = re.compile(r"\|\s*(?:GPU|Nb\.)\s+Name\b")
_SECTION = re.compile(r"\|\s*(Processes|Compute processes|MIG devices|Processes\(\w+\)):?", re.I)
_GPU = re.compile(r"\s*(\d{1,4})\.?\s+(\S.*?)\s*")
_MODE = re.compile(r"(.*\S)\s+(On|Off|N/A|WDDM|TCC|MCDM|ERR!)")
_ADDRESS = re.compile(r"\s*([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\b\s*(.*)")
_MEMORY = re.compile(r"(\d{1,12}Mi?B)\s*/\s*(\d{1,12}Mi?B)\s*", re.I)
_TROUBLE = re.compile(r"\b(?:error|unable|failed|lost|mismatch|warning|corrupted|cannot|couldn't)\b", re.I)
_PROCESS_COLUMNS = {
    "instances": re.compile(
        r"\|\s*(?P<gpu>\d{1,4})\s+(?:\d+|N/A)\s+(?:\d+|N/A)\s+(?P<pid>\d{1,10})\s+(?P<type>[CGM+]{1,5})\s+"
        r"(?P<name>.*?)\s+(?P<memory>\d{1,12}Mi?B|N/A)?\s*\|"
    ),
    "types": re.compile(
        r"\|\s*(?P<gpu>\d{1,4})\s+(?P<pid>\d{1,10})\s+(?P<type>[CGM+]{1,5})\s+"
        r"(?P<name>.*?)\s+(?P<memory>\d{1,12}Mi?B|N/A)?\s*\|"
    ),
    "names": re.compile(
        r"\|\s*(?P<gpu>\d{1,4})\.?\s+(?P<pid>\d{1,10})(?P<type>)\s+(?P<name>.*?)\s+(?P<memory>\d{1,12}Mi?B|N/A)?\s*\|"
    ),
}


def parse(text: str) -> SmiTable | Failure:
    """Parse the table; its list of processes may be truncated. If nvidia-smi failed, return its error.

    Raise ParseError for other text, a truncated GPU row, and several tables in one text.
    """
    lines = [line[:_LINE_LIMIT].strip() for line in lines_of(text)]
    heads = [line for line in lines if _HEAD.match(line)]
    if len(heads) > 1:
        raise ParseError(f"expected one table of nvidia-smi, found {len(heads)} in one text")
    rows, errors = _rows(lines)
    if not rows:
        answer = smi_base.find_error(text)
        if answer is None:
            raise ParseError(f"expected the table of nvidia-smi with at least one GPU, {found_text(text)}")
        return answer
    gpus = [_gpu(row, errors) for row in rows]
    if len({gpu.index for gpu in gpus}) < len(gpus):
        raise ParseError("expected every GPU once in the table of nvidia-smi, found an index twice")
    head = heads[0] if heads else ""
    return SmiTable(
        driver_version=version(_group(_DRIVER, head)),
        cuda_version=version(_group(_CUDA, head)),
        gpus=tuple(gpus),
        processes=_processes(lines),
        errors=tuple(errors),
    )


@dataclass
class _Row:
    """The lines of one GPU, split into cells."""

    lines: list[list[str]] = field(default_factory=list)

    def cell(self, line: int, column: int) -> str:
        return self.lines[line][column] if line < len(self.lines) and column < len(self.lines[line]) else ""


def _group(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match else None


def _rows(lines: list[str]) -> tuple[list[_Row], list[str]]:
    """Return the GPUs' rows, and the lines around the table that report errors."""
    rows: list[_Row] = []
    outside: list[str] = []
    height = _height(lines)
    in_section = in_header = False
    for line in lines:
        if not line.startswith(("|", "+")):
            if smi_base.is_remark(line) or _TROUBLE.search(line):
                outside.append(line)
            continue
        if _COLUMNS.match(line):
            in_header, in_section = True, False
        elif _SECTION.match(line):
            in_section = True
        elif _BORDER.fullmatch(line):
            in_header = in_header and "=" not in line
        elif not in_section and not in_header and not _HEAD.match(line):
            _add_line(rows, line, height)
    for row in rows:
        if len(row.lines) < (height or min(2, max(len(other.lines) for other in rows))):
            raise ParseError(f"expected the whole row of GPU {row.cell(0, 0).split()[0]}, found the table cut there")
    return rows, outside


def _height(lines: list[str]) -> int | None:
    """Return the number of lines per GPU: that of the table's heading; None if the heading is missing."""
    start = next((number for number, line in enumerate(lines) if _COLUMNS.match(line)), None)
    if start is None:
        return None
    for offset, line in enumerate(lines[start : start + 6]):
        if _BORDER.fullmatch(line) and "=" in line:
            return offset
    return None


def _add_line(rows: list[_Row], line: str, height: int | None) -> None:
    cells = line.strip("|").split("|")
    first = _GPU.fullmatch(cells[0]) is not None and len(cells) > 1 and _ADDRESS.fullmatch(cells[1]) is not None
    if not line.endswith("|") or len(cells) != 3:
        raise ParseError(f"expected three cells in a row of nvidia-smi's table, {found_text(line)}: it is cut")
    if first:
        rows.append(_Row([cells]))
    elif rows and len(rows[-1].lines) < (height or 3):
        rows[-1].lines.append(cells)


def _gpu(row: _Row, errors: list[str]) -> TableGpu:
    title = _GPU.fullmatch(row.cell(0, 0))
    address = _ADDRESS.fullmatch(row.cell(0, 1))
    index = int(title[1]) if title else None
    name = title[2] if title else ""
    mode = _MODE.fullmatch(name)
    fan, temperature, performance, power, limit = _sensors(row.cell(1, 0))
    memory = _MEMORY.search(row.cell(1, 1))
    utilization, _, compute = row.cell(1, 2).strip().partition(" ")
    ecc = row.cell(0, 2).split()
    mig = row.cell(2, 2).strip()
    name = mode[1] if mode else name
    cells = {
        "name": name,
        "persistence": mode[2] if mode else "",
        "display": address[2] if address else "",
        "ecc": row.cell(0, 2),
        "fan": fan,
        "temperature": temperature,
        "performance": performance,
        "power": f"{power} / {limit}",
        "memory": row.cell(1, 1),
        "utilization": utilization,
        "compute mode": compute,
        "mig": mig,
    }
    errors.extend(f"GPU {index} {name}: {fault}" for name, cell in cells.items() if (fault := _fault(cell)))
    return TableGpu(
        index=index,
        name=text_or_none(name),
        pci_bus_id=bus_id(address[1]) if address else None,
        persistence_mode=flag(mode[2]) if mode else None,
        temperature_c=quantity(temperature, "C"),
        performance_state=text_or_none(performance),
        power_w=quantity(power, "W"),
        power_limit_w=quantity(limit, "W"),
        memory_used_mib=mebibytes(memory[1]) if memory else None,
        memory_total_mib=mebibytes(memory[2]) if memory else None,
        utilization_percent=quantity(utilization, "%"),
        ecc_uncorrected=integer(ecc[-1]) if ecc else None,
        compute_mode=text_or_none(compute),
        mig_mode=_mig_now(mig),
        mig_mode_pending=mig.endswith("*") if flag(mig.rstrip("*")) is not None else None,
    )


def _mig_now(text: str) -> bool | None:
    """Return the current mode: an asterisk marks the mode after the next reset, so that the other one is active."""
    state = flag(text.rstrip("*"))
    return not state if state is not None and text.endswith("*") else state


def _sensors(cell: str) -> tuple[str, str, str, str, str]:
    """Return fan, temperature, performance state, power and its limit. Driver 295 prints a blank between 62 and C."""
    before, _, limit = re.sub(r"(\d) C\b", r"\1C", cell.replace("Unknown Error", "ERR!")).partition(" / ")
    tokens = before.split()
    power = tokens.pop() if tokens else ""
    fan, temperature, performance = (*tokens, "", "", "")[:3]
    return fan, temperature, performance, power, limit.strip()


def _fault(cell: str) -> str | None:
    for text in ("ERR!", "Unknown Error", "GPU is lost", "GPU requires reset"):
        if text in cell:
            return text
    return None


def _processes(lines: list[str]) -> tuple[TableProcess, ...] | None:
    """Return the processes; None if no list was printed, or if the driver has none (``Not Supported``)."""
    start = next((number for number, line in enumerate(lines) if re.match(r"\|\s*(?:Compute p|P)rocesses", line)), None)
    if start is None:
        return None
    body = lines[start:]
    ruler = next((number for number, line in enumerate(body) if _BORDER.fullmatch(line) and "=" in line), None)
    if ruler is None:
        return None
    heading = " ".join(body[:ruler])
    columns = "instances" if re.search(r"\bGI\b", heading) else "types" if re.search(r"\bType\b", heading) else "names"
    processes: list[TableProcess] = []
    known = False
    for line in body[ruler + 1 :]:
        match = _PROCESS_COLUMNS[columns].fullmatch(line)
        if match:
            processes.append(_process(match))
        elif not line.startswith("|"):
            break
        known = known or match is not None or "No running" in line
    return tuple(processes) if known else None


def _process(match: re.Match[str]) -> TableProcess:
    return TableProcess(
        gpu=int(match["gpu"]),
        pid=int(match["pid"]),
        name=None if is_nothing(match["name"]) else match["name"],
        type=match["type"] or None,
        memory_used_mib=mebibytes(match["memory"]),
    )
