"""Rebuild gpunode/catalog/pci_ids.tsv: ``scripts/pci_gpus.py /usr/share/misc/pci.ids``.

GPUs with a chip that is not in the catalog's section ``chips`` are counted and omitted.
"""

import re
import sys
from pathlib import Path

from gpunode.catalog import load, pci_ids

SOURCE = Path(sys.argv[1])
TARGET = Path(pci_ids.__file__).with_name(pci_ids.FILE)

text = SOURCE.read_text(encoding="utf-8", errors="replace")
day = re.search(r"^#\s+Date:\s+(\d{4}-\d\d-\d\d)", text, re.MULTILINE)
if day is None:
    sys.exit(f"{SOURCE}: no line `Date:`: is it a pci.ids file?")
gpus = list(pci_ids.parse(text.splitlines()))
known = [gpu for gpu in gpus if gpu.chip in load().chips]
new = TARGET.with_suffix(".new")
new.write_text(pci_ids.tsv(known, day[1]), encoding="utf-8")
new.replace(TARGET)
sys.stdout.write(f"{TARGET}: {len(known)} GPUs, {len(gpus) - len(known)} of unknown chips left out\n")
