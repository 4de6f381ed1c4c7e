"""The fixtures of virtual machines, for every test in this folder."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "lab")]
from vm_fixtures import start_vm, vm, vm_image

__all__ = ["start_vm", "vm", "vm_image"]
