"""The function of each tool, and the small scripts in /usr/lib/gpunode-lab/bin that start them."""

from __future__ import annotations

import sys
from pathlib import Path

from .node import package_release

TOOLS = {
    "boot": "boot",
    "dcgmi": "dcgm:dcgmi",
    "fault": "faults",
    "lsmod": "modprobe:lsmod",
    "modprobe": "modprobe",
    "nv-fabricmanager": "daemons:fabric_manager",
    "nv-hostengine": "dcgm:host_engine",
    "nvidia-cdi-hook": "container_runtime:cdi_hook",
    "nvidia-container-cli": "container_runtime:container_cli",
    "nvidia-container-runtime": "container_runtime",
    "nvidia-container-runtime-hook": "container_runtime:hook",
    "nvidia-ctk": "ctk",
    "nvidia-cuda-mps-control": "entry_points:unsimulated",
    "nvidia-cuda-mps-server": "entry_points:unsimulated",
    "nvidia-debugdump": "entry_points:unsimulated",
    "nvidia-imex": "daemons:imex",
    "nvidia-imex-ctl": "entry_points:unsimulated",
    "nvidia-modprobe": "entry_points:unsimulated",
    "nvidia-persistenced": "persistenced",
    "nvidia-settings": "entry_points:unsimulated",
    "nvidia-smi": "smi",
    "nvidia-xconfig": "entry_points:unsimulated",
    "nvlsm": "daemons:nvlsm",
    "nvswitch-audit": "entry_points:unsimulated",
    "rmmod": "modprobe:rmmod",
}
"""Tool to the module of this package that has its ``main(argv)``, or to ``module:function``."""

COMM_LENGTH = 15
BYTECODE = "/run/gpunode-lab/bytecode"
"""Where root's first call writes Python's bytecode; removed by a reboot; nothing is written beside the simulator."""


def script(tool: str) -> str:
    """Return the text of /usr/lib/gpunode-lab/bin/TOOL, to be installed with mode 0755.

    The process gets the tool's name, so that ``ps``, the journal and fuser show it like the real one.
    """
    module, _, function = TOOLS[tool].partition(":")
    return (
        "#!/usr/bin/python3 -IS\n"
        "import sys\n"
        f'sys.pycache_prefix = "{BYTECODE}"\n'
        'sys.path.insert(0, "/usr/lib/gpunode-lab")\n'
        f'open("/proc/self/comm", "w").write("{tool[:COMM_LENGTH]}")\n'
        f"from simulator.{module} import {function or 'main'} as main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )


def unsimulated(argv: list[str]) -> int:
    """Run a program of the driver that is not simulated: print the version on request, else report this."""
    tool = Path(sys.argv[0]).name
    if {"-v", "--version", "-V"}.intersection(argv):
        sys.stdout.write(f"{tool}:  version {package_release() or 'unknown'}\n")
        return 0
    sys.stderr.write(f"{tool}: a simulated GPU node has nothing behind this program (gpunode lab)\n")
    return 1
