"""Several programs of Ansible for one start of Python: most of what each costs is importing what all of them share.

Run as a program by the interpreter beside which Ansible is installed; an argument is the folder of packages in which
Ansible lies. stdin has a JSON list of command lines
(``["ansible-inventory", "--list", …]``), stdout gets a list with ``[exit code, stdout, stderr]`` of each. Each runs in
a process that is forked when all is imported, side by side with the others.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable

Main = Callable[[list[str]], None]


def started(main: Main, argv: list[str]) -> tuple[int, int, int]:
    """Return the process of one program and the files in memory that take its stdout and stderr."""
    stdout, stderr = os.memfd_create("stdout"), os.memfd_create("stderr")
    pid = os.fork()
    if pid == 0:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os._exit(ended(main, argv))
    return pid, stdout, stderr


def ended(main: Main, argv: list[str]) -> int:
    """Return the exit code of the program, its output written."""
    code: object = 1
    try:
        main(argv)
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def text(descriptor: int) -> str:
    """Return what a file in memory holds."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        return file.read()


def main() -> None:
    """Run what stdin lists."""
    # Each of them ends before its garbage counts, and the collector would copy what they share.
    gc.disable()
    sys.path += [folder for folder in sys.argv[1:] if folder not in sys.path]
    lines: list[list[str]] = json.load(sys.stdin)
    mains = {name: importlib.import_module(f"ansible.cli.{name.partition('-')[2]}").main for name, *_ in lines}
    running = [started(mains[argv[0]], argv) for argv in lines]
    answers = []
    for pid, stdout, stderr in running:
        _, status = os.waitpid(pid, 0)
        answers.append([os.waitstatus_to_exitcode(status), text(stdout), text(stderr)])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
