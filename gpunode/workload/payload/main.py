"""The payload's command line: runs the parts in sequence and prints one record per line.

Exit codes: 0 it finished, whatever the results; 1 a rank is missing, of those that mpirun, srun or torchrun started,
which then end the rest: it may hang; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpunode.workload.payload.fabric import seat_from_environment
from gpunode.workload.payload.isolate import Clock
from gpunode.workload.payload.session import TESTS, PayloadSession

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


def run(arguments: list[str]) -> int:
    """Run the parts that the arguments select; write records to stdout."""
    parser = argparse.ArgumentParser(prog="payload", description=__doc__.splitlines()[0])
    parser.add_argument("--tests", default="versions", help=f"{', '.join(TESTS)}, or several with commas")
    parser.add_argument("--settings", default="{}", help="a JSON object: see session.PayloadSession")
    parser.add_argument("--limit", type=float, help="seconds for all parts together")
    chosen = parser.parse_args(arguments)
    tests = [name.strip() for name in chosen.tests.split(",")]
    for name in tests:
        if name not in TESTS:
            parser.error(f"--tests: there is no test '{name}'; there are {', '.join(TESTS)}")
    try:
        settings = json.loads(chosen.settings)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        parser.error("--settings: expected a JSON object")
    starter = settings.get("starter")
    if isinstance(starter, dict):
        try:
            settings["seats"] = [seat_from_environment(starter, dict(os.environ))]
        except (KeyError, ValueError) as err:
            parser.error(str(err))
    interface = settings.get("interface")
    if isinstance(interface, str):
        os.environ.update(dict.fromkeys(INTERFACES, interface))
    if settings.get("user_site"):
        add_user_site()
    # Of ranks that another program started, the first reports the results of all.
    first = not isinstance(starter, dict) or settings["seats"][0]["rank"] == 0
    missing: set[int] = set()
    with scratch() as folder:
        number = 0
        for line in PayloadSession(settings, Clock(chosen.limit), folder, progress if first else silent).records(tests):
            missing.update(line["values"].get("missing") or ())
            if first or line["error"] is not None:
                print_line(line)
                number += 1
    if first:
        print_line({"record": "end", "records": number})
    # Not the others while rank 0 is there: it would be ended before it reported, and named by those that are left.
    return 1 if isinstance(starter, dict) and missing and (first or 0 in missing) else 0


@contextlib.contextmanager
def scratch() -> Iterator[str | None]:
    """Yield a folder that is removed afterwards; None if nothing can be written.

    Compilers write their caches there, not to the user's home.
    """
    try:
        folder = tempfile.mkdtemp(prefix="gpunode-")
    except OSError:
        # Nothing can be written anywhere: the parts that need it report that themselves.
        yield None
        return
    os.environ.update({name: str(Path(folder, name.lower())) for name in CACHES})
    keep_bytecode(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def keep_bytecode(folder: str) -> None:
    """Let Python compile a framework's modules once for all processes, if they came without bytecode.

    Not if they have it: with this folder set, Python looks for bytecode nowhere else.
    """
    try:
        specs = [importlib.util.find_spec(name) for name in ("torch", "tensorflow")]
    except (ImportError, ValueError):
        return
    files = [spec.cached for spec in specs if spec is not None and spec.cached is not None]
    if files and not any(Path(file).exists() for file in files):
        sys.pycache_prefix = str(Path(folder, "bytecode"))
        sys.dont_write_bytecode = False


def add_user_site() -> None:
    """Append the user's own packages to the path: an isolated Python omits them, and HOME is another one."""
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return
    folder = Path(home, ".local", "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    # Owned by another user, or writable for others: not this user's own packages.
    with contextlib.suppress(OSError):
        status = folder.stat()
        if status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022:
            sys.path.append(str(folder))


def progress(doing: str, left_s: float) -> None:
    """Print the current step, and about how long the rest takes: not a record, and not counted as one."""
    print_line({"record": "progress", "doing": doing, "left_s": round(left_s)})


def silent(doing: str, left_s: float) -> None:
    """Do nothing."""


def print_line(line: dict[str, Any]) -> None:
    """Print one line of JSON and flush: a result is reported even if the next part crashes the machine."""
    sys.stdout.write(json.dumps(line, sort_keys=True) + "\n")
    sys.stdout.flush()
