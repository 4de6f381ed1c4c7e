"""``nvidia-smi dmon -s t``: PCIe rates, a row for each GPU and interval."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from .node import NodeSnapshot
from .readings import pcie_mb_per_s

HEADER = "# gpu  rxpci  txpci \n# Idx   MB/s   MB/s \n"


class UnsimulatedError(ValueError):
    """Arguments that the simulator does not support."""


def run(argv: list[str], look: Callable[[], NodeSnapshot]) -> int:
    """Print rows until ended, or ``-c`` times; return the exit code."""
    options = dict(zip(argv[::2], argv[1::2]))
    numbers = {key: value for key, value in options.items() if key != "-s"}
    known = set(options) <= {"-s", "-d", "-c"} and options.get("-s") == "t" and len(argv) % 2 == 0
    if not known or not all(value.isdigit() for value in numbers.values()):
        raise UnsimulatedError
    left = int(options["-c"]) if "-c" in options else None
    sys.stdout.write(HEADER)
    while left is None or left > 0:
        for gpu in look().gpus:
            received, sent = pcie_mb_per_s(gpu)
            shown = ("-", "-") if gpu.lost else (str(received), str(sent))
            sys.stdout.write(f"{gpu.index:5d}  {shown[0]:>5}  {shown[1]:>5} \n")
        sys.stdout.flush()
        left = left - 1 if left is not None else None
        if left != 0:
            time.sleep(int(options.get("-d", "1")))
    return 0
