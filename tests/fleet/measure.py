"""What a program costs this machine: its processor time and memory, those of all that it starts included."""

import os
import platform
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpunode.fleet.process import descendants

_SAMPLE_S = 0.1


@dataclass(frozen=True)
class Cost:
    """How a program ended and what it took. ``cpu_s`` counts descendants that were waited for.

    ``memory_mib`` is the most that the program and all its descendants held at one time: their proportional shares
    (PSS), so that what forks share counts once; it was looked at ten times a second.
    """

    rc: int
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float
    memory_mib: float


def measured(
    argv: Sequence[str | Path], *, timeout_s: float, env: Mapping[str, str] | None = None, stdin: Path | None = None
) -> Cost:
    """Run a program in a process group of its own; raise TimeoutError, with the group killed, past ``timeout_s``."""
    outputs: dict[str, bytes] = {}
    started = time.monotonic()
    with (stdin or Path(os.devnull)).open("rb") as source:
        process = subprocess.Popen(
            [str(word) for word in argv],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env) if env is not None else None,
            start_new_session=True,
        )
    streams = {"stdout": process.stdout, "stderr": process.stderr}
    readers = [
        threading.Thread(target=lambda name=name, stream=stream: outputs.update({name: stream.read()}), daemon=True)
        for name, stream in streams.items()
    ]
    for reader in readers:
        reader.start()
    peak, pid, status, usage = 0, 0, 0, None
    try:
        while pid == 0:
            peak = max(peak, sum(map(_pss, (process.pid, *descendants(process.pid)))))
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid == 0:
                if time.monotonic() - started > timeout_s:
                    raise TimeoutError(f"{argv[0]} did not end within {timeout_s:g} s")
                time.sleep(_SAMPLE_S)
        wall = time.monotonic() - started
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        if pid == 0:
            process.wait()
        else:
            process.returncode = os.waitstatus_to_exitcode(status)
    for reader in readers:
        reader.join(10)
    assert usage is not None
    return Cost(
        rc=process.returncode,
        stdout=outputs.get("stdout", b"").decode(errors="replace"),
        stderr=outputs.get("stderr", b"").decode(errors="replace"),
        wall_s=wall,
        cpu_s=usage.ru_utime + usage.ru_stime,
        memory_mib=peak / 1024,
    )


def with_bytecode(folder: Path) -> dict[str, str]:
    """Return this environment, with compiled modules kept in ``folder``: an installed program does not compile itself.

    Without it a run would compile every module again where the environment forbids writing bytecode.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return env | {"PYTHONPYCACHEPREFIX": str(folder)}


def machine() -> str:
    """Return this machine in words, with its load."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    load = os.getloadavg()[0]
    cpu = next(model, platform.machine())
    return f"{os.cpu_count()} cores ({cpu}), load {load:.0f}, Python {platform.python_version()}"


def _pss(pid: int) -> int:
    """KiB; 0 for a process that is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0
