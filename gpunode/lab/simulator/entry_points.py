"""Which tool is which module, and the small scripts in /usr/lib/gpunode-lab/bin that start them."""

from __future__ import annotations

TOOLS = {
    "boot": "boot",
    "dcgmi": "dcgmi",
    "modprobe": "modprobe",
    "nv-fabricmanager": "fabric_manager",
    "nv-hostengine": "host_engine",
    "nvidia-cdi-hook": "cdi_hook",
    "nvidia-container-cli": "container_cli",
    "nvidia-container-runtime": "container_runtime",
    "nvidia-ctk": "ctk",
    "nvidia-imex": "imex",
    "nvidia-modprobe": "nvidia_modprobe",
    "nvidia-persistenced": "persistenced",
    "nvidia-smi": "smi",
    "nvlsm": "nvlsm",
    "rmmod": "rmmod",
}
"""Tool to the module of this package whose ``main(argv)`` it is."""


def entry_points() -> dict[str, str]:
    """Tool to module, as in ``TOOLS``."""
    return dict(TOOLS)


def script(tool: str) -> str:
    """The text of /usr/lib/gpunode-lab/bin/TOOL, to be put there with mode 0755."""
    return (
        "#!/usr/bin/python3 -sS\n"
        "import sys\n"
        "sys.dont_write_bytecode = True\n"
        'sys.path.insert(0, "/usr/lib/gpunode-lab")\n'
        f"from simulator.{TOOLS[tool]} import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
