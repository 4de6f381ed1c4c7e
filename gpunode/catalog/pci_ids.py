"""GPUs by PCI id only: the text of ``pci.ids`` in, rows of the section ``gpus`` out.

``pci.ids`` names the chip and the product of a device id. The chip determines architecture and compute capability
(section ``chips``); memory, form and market are derived from the product's name and marked as such. ``pci_ids.tsv``
beside this file contains the GPUs of one release of ``pci.ids``, one per line; ``scripts/pci_gpus.py`` rebuilds it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from gpunode.catalog.gpus import normal

NVIDIA = "10de"
MOST_LINES = 400_000
"""``pci.ids`` has a tenth of that."""
LONGEST_NAME = 120
FILE = "pci_ids.tsv"
_DEVICE = re.compile(r"\t([0-9a-f]{4})  (\S.*)")
_CHIP = re.compile(r"(?:GK|GM|GP|GV|TU|GA|GH|AD|GB|GR)(?:\d{3}|\d\d[A-Z])(?![0-9])")
_NO_GPU = re.compile(r"audio|usb|ucsi|bridge|nvswitch|pcie host|i2c|reserved dev id|engineering sample", re.IGNORECASE)
_CONSUMER = re.compile(r"GeForce|GTX|TITAN|\bMX\d|\bCMP\b|RTX Spark", re.IGNORECASE)
_WORKSTATION = re.compile(r"Quadro|NVS|RTX|\bT\d{3,4}\b|\bP\d{3,4}\b", re.IGNORECASE)
_FACTS = {"architecture", "compute_capability"}
_NAMES = ("name", "aliases", "families")
_SERIES = re.compile(r"^(GeForce|Tesla|Quadro) ")
_LARGE = {"gp100", "gv100", "ga100", "gh100", "gb100", "gb102", "gb110", "gb112", "gr100", "gr102"}
"""Chips of data-centre GPUs, unless a product's name indicates otherwise."""
_SUPERCHIP = re.compile(r"(HGX )?G[HB][23]00\b")


class PciGpu(NamedTuple):
    """One line: device id without its vendor, chip, product name ("" if ``pci.ids`` has none)."""

    device: str
    chip: str
    name: str

    @property
    def pci(self) -> str:
        """Return the id in the catalog's format."""
        return f"{NVIDIA}:{self.device}"


def parse(lines: Iterable[str]) -> Iterator[PciGpu]:
    """Yield NVIDIA's GPUs of a ``pci.ids`` file; other functions and names that match no chip are left out."""
    of_nvidia = False
    for count, line in enumerate(lines):
        if count > MOST_LINES:
            return
        if line[:1] not in ("\t", "#", "\n", ""):
            of_nvidia = line.startswith(f"{NVIDIA} ")
        match = _DEVICE.match(line) if of_nvidia else None
        chip = _CHIP.match(match[2]) if match else None
        if match is None or chip is None or _NO_GPU.search(match[2]):
            continue
        yield PciGpu(match[1], chip[0].lower(), _product(match[2]))


def _product(text: str) -> str:
    bracket = re.search(r"\[([^\[\]]+)\]\s*$", text)
    name = re.sub(r"\s+", " ", bracket[1]).strip() if bracket else ""
    return name[:LONGEST_NAME]


def tsv(gpus: Iterable[PciGpu], date: str) -> str:
    """Return the text of the bundled file."""
    lines = [f"# NVIDIA's GPUs of pci.ids: device, chip, product; release of {date}"]
    return "\n".join([*lines, *("\t".join(gpu) for gpu in sorted(gpus))]) + "\n"


@cache
def table() -> tuple[PciGpu, ...]:
    """Return the bundled lines."""
    text = files("gpunode.catalog").joinpath(FILE).read_text(encoding="utf-8")
    return tuple(PciGpu(*line.split("\t")) for line in text.splitlines() if line and not line.startswith("#"))


def table_date() -> str:
    """Return the date of the ``pci.ids`` release of the bundled lines."""
    with files("gpunode.catalog").joinpath(FILE).open(encoding="utf-8") as stream:
        return stream.readline().rsplit(" ", 1)[-1].strip()


def rows(
    gpus: Iterable[PciGpu], chips: Mapping[str, Any], written: Mapping[str, Any], date: str
) -> dict[str, dict[str, Any]]:
    """Return raw rows of the section ``gpus``, one per product; ``written``: raw rows of files, which take precedence.

    An id that a written row has is left out. Ids with one product name, architecture and compute capability are one
    row; the chip or the id is appended to a name that several rows, or a written one, share.
    """
    ids, names = _written(written)
    # A chip that an overlay made invalid has no GPUs: the linter names its row.
    chips = {key: row for key, row in chips.items() if isinstance(row, Mapping) and row.keys() >= _FACTS}
    products: dict[tuple[str, str, str], list[PciGpu]] = {}
    for gpu in gpus:
        chip = chips.get(gpu.chip)
        if chip is not None and gpu.pci not in ids:
            product = (normal(_name(gpu)), str(chip["architecture"]), str(chip["compute_capability"]))
            products.setdefault(product, []).append(gpu)
    uses = Counter(name for name, _, _ in products)
    raw_rows = {}
    for (name, architecture, capability), same in products.items():
        called = _name(same[0])
        several = uses[name] > 1 and name not in names
        full_name = (
            f"{called} ({same[0].pci})"
            if name in names
            else f"{called} ({same[0].chip.upper()})"
            if several
            else called
        )
        row = _row(full_name, same)
        row |= {"architecture": architecture, "compute_capability": capability, "date": date}
        row["unsure"] |= {"compute_capability": "of the chip"} if chips[same[0].chip].get("unsure") else {}
        if several:
            row["families"] = list(dict.fromkeys((called, _SERIES.sub("", called))))
        raw_rows[_slug(full_name)] = row
    _add_aliases(raw_rows, names)
    return raw_rows


def _name(gpu: PciGpu) -> str:
    return gpu.name or f"{gpu.chip.upper()} {gpu.pci}"


def _written(of_files: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Return PCI ids and names in rows of files; a row without a PCI id modifies one of the package's and has none."""
    ids: set[str] = set()
    names: set[str] = set()
    for key, row in of_files.items():
        if isinstance(row, Mapping) and row.get("pci"):
            ids.update(text.lower() for text in texts(row["pci"]))
            names.update(map(normal, [key, *(text for field in _NAMES for text in texts(row.get(field)))]))
    return ids, names


def texts(value: Any) -> list[str]:
    """Return a raw field's text or list of texts as a list."""
    if isinstance(value, (list, tuple)):
        return list(map(str, value))
    return [] if value is None else [str(value)]


def _add_aliases(raw_rows: dict[str, dict[str, Any]], names: set[str]) -> None:
    """Add names that users type, ``RTX 5090`` for ``GeForce RTX 5090``, if they identify one row."""
    short = {key: _SERIES.sub("", row["name"]) for key, row in raw_rows.items() if not row["name"].endswith(")")}
    uses = Counter(normal(text) for text in short.values())
    uses.update(normal(key) for key in raw_rows)
    for key, text in short.items():
        if (
            text != raw_rows[key]["name"]
            and uses[normal(text)] == 1
            and normal(text) not in names
            and not text.isdigit()
        ):
            raw_rows[key]["aliases"] = [text]


def _row(name: str, same: list[PciGpu]) -> dict[str, Any]:
    """Return the fields derived from the name; every derived one is listed in ``unsure``."""
    unsure = {"market": "from the name", "form": "from the name"}
    row: dict[str, Any] = {
        "name": name,
        "pci": [gpu.pci for gpu in same],
        "market": _market(name, same[0].chip),
        "form": "pcie",
        "known_from": "pci.ids",
        "source": ["pciids", "chips"],
        "unsure": unsure,
    }
    memory = re.search(r"\b(\d{1,3}) ?GB\b", name)
    superchip = bool(_SUPERCHIP.match(name))
    if memory and not superchip:
        row["memory_gb"] = memory[1]
    if superchip:
        row |= {"form": "superchip", "hosts": ["aarch64"]}
        unsure["hosts"] = "from the name"
    elif re.search(r"\bSXM\d?\b", name):
        row |= {"form": "sxm", "fabric": "board"}
        unsure["fabric"] = "from the name"
    elif re.search(r"\bNVL\b", name):
        row["form"] = "nvl"
    return row


def _market(name: str, chip: str) -> str:
    if _CONSUMER.search(name):
        return "consumer"
    if _WORKSTATION.search(name) and not name.startswith("Tesla"):
        return "workstation"
    if name.startswith(("Tesla", "GRID")) or re.match(r"[ABHLT]\d", name) or chip in _LARGE:
        return "datacenter"
    return "consumer"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
