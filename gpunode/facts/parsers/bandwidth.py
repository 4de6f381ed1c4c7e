"""The CUDA samples bandwidthTest and p2pBandwidthLatencyTest."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.models import checked
from gpunode.facts.models.outputs import BandwidthSize, BandwidthTest, P2pBandwidth
from gpunode.facts.parsers.values import found_text, lines_of, number, shorten

_DEVICE = re.compile(r"\s*Device:?\s+(\d{1,4})[:,](.*?)(?:, pciBusID:.*)?")
_SECTION = re.compile(r"\s*(Host to Device|Device to Host|Device to Device) Bandwidth\b.*")
_TABLE_UNIT = re.compile(r".*Bandwidth\s*\((GB/s|MB/s)\)\s*")
_TABLE_ROW = re.compile(r"\s*(\d{1,20})\s+(\d{1,12}(?:\.\d{1,6})?)\s*")
_CSV_ROW = re.compile(
    r"\s*bandwidthTest-(H2D|D2H|D2D)\b[^,]*, Bandwidth = (\d{1,12}(?:\.\d{1,6})?) (GB/s|MB/s), Time = [^,]*, "
    r"Size = (\d{1,20}) bytes, NumDevsUsed = .*"
)
_RESULT = re.compile(r"\s*(?:\[bandwidthTest\] test results\.\.\.\s*)?(?:Result = )?(PASS|PASSED|FAIL|FAILED)\s*")
_DIRECTIONS = {
    "Host to Device": "host_to_device",
    "Device to Host": "device_to_host",
    "Device to Device": "device_to_device",
    "H2D": "host_to_device",
    "D2H": "device_to_host",
    "D2D": "device_to_device",
}
_HEADINGS = (
    (re.compile(r"\s*P2P Connectivity Matrix\s*"), "p2p_access"),
    (re.compile(r"\s*Unidirectional P2P=Enabled Bandwidth .*Matrix \(GB/s\)\s*"), "unidirectional_gb_per_s"),
    (re.compile(r"\s*Unidirectional P2P=Disabled Bandwidth .*Matrix \(GB/s\)\s*"), "unidirectional_no_p2p_gb_per_s"),
    (re.compile(r"\s*Bidirectional P2P=Enabled Bandwidth .*Matrix \(GB/s\)\s*"), "bidirectional_gb_per_s"),
    (re.compile(r"\s*Bidirectional P2P=Disabled Bandwidth .*Matrix \(GB/s\)\s*"), "bidirectional_no_p2p_gb_per_s"),
    (re.compile(r"\s*P2P=Enabled Latency .*Matrix \(us\)\s*"), "latency_us"),
    (re.compile(r"\s*P2P=Disabled Latency .*Matrix \(us\)\s*"), "latency_no_p2p_us"),
)
_COLUMNS = re.compile(r"\s*(D\\D|GPU|CPU)((?:\s+\d{1,4})+)\s*")
_ROW = re.compile(r"\s*(\d{1,4})((?:\s+(?:\d{1,12}(?:\.\d{1,6})?|N/A))*)\s*")
_LINE_LIMIT = 20_000


def parse_bandwidth_test(text: str) -> BandwidthTest:
    """Parse bandwidthTest; ``device`` is the name of the first device, ``sizes`` has all figures (a shmoo run has 81).

    MB/s of old samples are divided by 1000. Raise ParseError for other text, or text without any result.
    """
    state = _BandwidthTest()
    lines = [line[:_LINE_LIMIT] for line in lines_of(text)]
    cut = not text.endswith(("\n", "\r")) and not _RESULT.fullmatch(lines[-1])
    for line in lines[:-1] if cut else lines:
        state.take(line)
    if not state.sizes:
        raise ParseError(f"expected results of the CUDA sample bandwidthTest, {found_text(text)}")
    return state.answer()


class _BandwidthTest:
    def __init__(self) -> None:
        self.sizes: list[BandwidthSize] = []
        self._device: str | None = None
        self._passed: bool | None = None
        self._direction: str | None = None
        self._unit: str | None = None

    def take(self, line: str) -> None:
        csv = _CSV_ROW.fullmatch(line)
        section = _SECTION.fullmatch(line)
        unit = _TABLE_UNIT.fullmatch(line)
        result = _RESULT.fullmatch(line)
        row = _TABLE_ROW.fullmatch(line)
        if csv:
            self._add(_DIRECTIONS[csv[1]], csv[4], csv[2], csv[3])
        elif section:
            self._direction, self._unit = _DIRECTIONS[section[1]], None
        elif unit:
            self._unit = unit[1]
        elif row and self._direction and self._unit:
            self._add(self._direction, row[1], row[2], self._unit)
        elif result:
            self._passed = result[1].startswith("PASS")
        elif self._device is None and (device := _DEVICE.fullmatch(line)):
            self._device = device[2].strip() or None

    def _add(self, direction: str, size: str, figure: str, unit: str) -> None:
        value = float(figure) / (1000 if unit == "MB/s" else 1)
        self.sizes.append(
            BandwidthSize.model_validate({"direction": direction, "size_bytes": int(size), "gb_per_s": value})
        )

    def answer(self) -> BandwidthTest:
        largest: dict[str, BandwidthSize] = {}
        for entry in self.sizes:
            known = largest.get(entry.direction)
            if known is None or entry.size_bytes >= known.size_bytes:
                largest[entry.direction] = entry
        figures = {
            f"{direction}_gb_per_s": largest[direction].gb_per_s if direction in largest else None
            for direction in ("host_to_device", "device_to_host", "device_to_device")
        }
        return BandwidthTest.model_validate(
            {"device": self._device, **figures, "pass": self._passed, "sizes": tuple(self.sizes)}
        )


def parse_p2p(text: str) -> P2pBandwidth:
    """Parse p2pBandwidthLatencyTest; raise ParseError for other text and for a truncated matrix."""
    matrices: dict[str, list[list[int | float | None]]] = {}
    devices: list[str] = []
    heading: str | None = None
    reading: tuple[str, int] | None = None
    for raw in lines_of(text):
        line = raw[:_LINE_LIMIT]
        title = next((name for pattern, name in _HEADINGS if pattern.fullmatch(line)), None)
        columns = _COLUMNS.fullmatch(line)
        row = _ROW.fullmatch(line)
        device = _DEVICE.fullmatch(line)
        if title:
            heading, reading = title, None
        elif columns and heading:
            name = heading if columns[1] != "CPU" else f"cpu_{heading}"
            if name in matrices:
                raise ParseError(f"expected one run of p2pBandwidthLatencyTest, found the matrix {name} twice")
            reading = (name, len(columns[2].split()))
            matrices[name] = []
        elif row and reading and len(matrices[reading[0]]) < reading[1]:
            matrices[reading[0]].append(_cells(row, reading, len(matrices[reading[0]])))
        elif device and device[2].strip() and not matrices:
            devices.append(device[2].strip())
    if heading and heading not in matrices:
        raise ParseError(f"expected a matrix below the heading of {heading}, found the text cut there")
    for name, matrix in matrices.items():
        if not matrix or len(matrix) != len(matrix[0]):
            raise ParseError(f"expected as many rows as columns in the matrix {name}, found it cut after {len(matrix)}")
    if not matrices:
        raise ParseError(f"expected matrices of the CUDA sample p2pBandwidthLatencyTest, {found_text(text)}")
    access = matrices.pop("p2p_access", None)
    names = [name for _, name in _HEADINGS[1:]] + ["cpu_latency_us", "cpu_latency_no_p2p_us"]
    output = {
        "devices": devices,
        "p2p_access": [[bool(cell) for cell in row] for row in access] if access else None,
        **{name: matrices.get(name) for name in names},
    }
    return checked(P2pBandwidth, output, "matrices of the CUDA sample p2pBandwidthLatencyTest")


def _cells(row: re.Match[str], reading: tuple[str, int], index: int) -> list[int | float | None]:
    cells = row[2].split()
    if len(cells) != reading[1] or int(row[1]) != index:
        raise ParseError(f"expected row {index} with {reading[1]} cells in {reading[0]}, found '{shorten(row[0])}'")
    return [number(cell) for cell in cells]
