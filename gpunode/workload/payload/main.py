"""The payload's command line: runs parts one by one and prints one record a line.

Exit codes: 0 it came to its end, whatever it found; 2 wrong arguments.
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

from gpunode.workload.payload.isolate import Clock
from gpunode.workload.payload.session import TESTS, PayloadSession

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


def run(arguments: list[str]) -> int:
    """Run what the arguments say, records to stdout."""
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
    if settings.get("user_site"):
        add_user_site()
    with scratch() as folder:
        number = 0
        for line in PayloadSession(settings, Clock(chosen.limit), folder, progress).records(tests):
            say(line)
            number += 1
    say({"record": "end", "records": number})
    return 0


@contextlib.contextmanager
def scratch() -> Iterator[str | None]:
    """A folder that is gone afterwards; None where nothing can be written.

    Compilers keep there what they made, not in the home of whoever runs this.
    """
    try:
        folder = tempfile.mkdtemp(prefix="gpunode-")
    except OSError:
        # Nothing can be written anywhere: the parts that need it say so themselves.
        yield None
        return
    os.environ.update({name: str(Path(folder, name.lower())) for name in CACHES})
    keep_bytecode(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def keep_bytecode(folder: str) -> None:
    """Have Python compile a framework's modules once for all processes, where they came without bytecode.

    Not where they have it: with a folder of its own Python looks for bytecode nowhere else.
    """
    try:
        found = [importlib.util.find_spec(name) for name in ("torch", "tensorflow")]
    except (ImportError, ValueError):
        return
    files = [one.cached for one in found if one is not None and one.cached is not None]
    if files and not any(Path(file).exists() for file in files):
        sys.pycache_prefix = str(Path(folder, "bytecode"))
        sys.dont_write_bytecode = False


def add_user_site() -> None:
    """Put the user's own packages behind all others: an isolated Python leaves them out, and HOME is another one."""
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return
    folder = Path(home, ".local", "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    # Of somebody else, or writable for others: not this user's own packages.
    with contextlib.suppress(OSError):
        status = folder.stat()
        if status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022:
            sys.path.append(str(folder))


def progress(doing: str, left_s: float) -> None:
    """Say what is being done, and about how long all that is left takes: no record, and not counted as one."""
    say({"record": "progress", "doing": doing, "left_s": round(left_s)})


def say(line: dict[str, Any]) -> None:
    """One line of JSON, at once: what is known is told even where the next part takes the machine down."""
    sys.stdout.write(json.dumps(line, sort_keys=True) + "\n")
    sys.stdout.flush()
