"""Files that a node with simulated hardware gets before its first boot: its description and the simulator."""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from gpunode.lab.archive import Entry
from gpunode.lab.simulator import boot, kernel
from gpunode.lab.simulator.entry_points import TOOLS, script

_LIB = "usr/lib/gpunode-lab"

BOOT = f"/{_LIB}/bin/boot"
"""The command that a node runs before systemd; if it fails, the node still boots and reports the reason."""

BOOT_REPORT = boot.REPORT
"""Empty on a node where BOOT succeeded, else the reason why it failed."""

DEVICE_RULES = tuple(f"c {number}:* rwm" for number in dict.fromkeys(kernel.DEVICE_NUMBERS.values()))
"""Device files that a node may pass on to containers of its own."""

_DMESG = """\
#!/bin/sh
# The simulated kernel's log; the real dmesg formats it, but for --raw --follow: a file is not followed.
[ "$*" != "-r -w" ] || exec tail -n +1 -F /run/gpunode-lab/kmsg
exec /usr/lib/gpunode-lab/real/dmesg -F /run/gpunode-lab/kmsg "$@"
"""


def entries(hardware: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the files of a node with that description."""
    yield Entry("etc/gpunode/lab-hardware.json", json.dumps(hardware, indent=1) + "\n", 0o644)
    yield from simulator()
    for folder in ("var/lib/gpunode-lab", f"{_LIB}/real"):
        yield Entry(folder, None, 0o755)


def simulator() -> Iterator[Entry]:
    """Yield the simulator's package and the scripts that start its tools."""
    package = files("gpunode.lab.simulator")
    for source in sorted(package.iterdir(), key=lambda source: source.name):
        if source.name.endswith((".py", ".json", ".yml")):
            yield Entry(f"{_LIB}/simulator/{source.name}", source.read_text(encoding="utf-8"), 0o644)
    for tool in TOOLS:
        yield Entry(f"{_LIB}/bin/{tool}", script(tool), 0o755)
    yield Entry(f"{_LIB}/bin/dmesg", _DMESG, 0o755)
