"""The function of each tool, and the small scripts in /usr/lib/gpunode-lab/bin that start them."""

from __future__ import annotations

TOOLS = {
    "boot": "boot",
    "dcgmi": "dcgmi",
    "fault": "faults",
    "lsmod": "modprobe:lsmod",
    "modprobe": "modprobe",
    "nv-fabricmanager": "fabric_manager",
    "nv-hostengine": "host_engine",
    "nvidia-cdi-hook": "cdi_hook",
    "nvidia-container-cli": "container_cli",
    "nvidia-container-runtime": "container_runtime",
    "nvidia-container-runtime-hook": "container_runtime:hook",
    "nvidia-ctk": "ctk",
    "nvidia-cuda-mps-control": "unsimulated",
    "nvidia-cuda-mps-server": "unsimulated",
    "nvidia-debugdump": "unsimulated",
    "nvidia-imex": "imex",
    "nvidia-imex-ctl": "unsimulated",
    "nvidia-modprobe": "unsimulated",
    "nvidia-persistenced": "persistenced",
    "nvidia-settings": "unsimulated",
    "nvidia-smi": "smi",
    "nvidia-xconfig": "unsimulated",
    "nvlsm": "nvlsm",
    "nvswitch-audit": "unsimulated",
    "rmmod": "modprobe:rmmod",
}
"""Tool to the module of this package that has its ``main(argv)``, or to ``module:function``."""

COMM_LENGTH = 15
BYTECODE = "/run/gpunode-lab/bytecode"
"""Where root's first call writes Python's bytecode; removed by a reboot; nothing is written beside the simulator."""


def entry_points() -> dict[str, str]:
    """Return tool to module, as in ``TOOLS``."""
    return dict(TOOLS)


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
