"""Running a command under a profiler, on this machine or in a running container, within a time limit."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from gpunode.errors import UsageError
from gpunode.onnode import program_text
from gpunode.profiling.activity import ProfileError, parse_nsys, parse_torch
from gpunode.profiling.patterns import ProfilePattern, RunNotes, patterns, stack_patterns
from gpunode.text import last_line, one_line

Tool = Literal["nsys", "torch", "py-spy"]
TOOLS: tuple[Tool, ...] = ("nsys", "torch", "py-spy")
ASK_S, EXPORT_S, GRACE_S = 20.0, 300.0, 15.0
MOST_TRACE_BYTES = 512 << 20
PYTHON = re.compile(r"python(\d(\.\d+)?)?$")
INSIDE = re.compile(r"/tmp/gpunode-profile-\w{6}")  # noqa: S108 (in a container)
NSYS_LEAST = (2020, 1)
"""The first with this form of ``nsys export``, from memory: unsure, so an older one is only reported."""
SIGNALS = {signal.SIGINT: "INT", signal.SIGTERM: "TERM", signal.SIGKILL: "KILL"}


class ProfiledMachine:
    """Where the command runs: on this machine, or in a container that runs already."""

    def __init__(self, container: str | None) -> None:
        self.container = container
        self._inside: str | None = None

    def ask(
        self, *command: str, stdin: bytes | None = None, limit_s: float = ASK_S
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a short command there; rc 127 if it is absent, 124 if it did not end."""
        words = [*(["docker", "exec", "-i", self.container] if self.container else []), *command]
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as err:
            return subprocess.CompletedProcess(words, 127, b"", str(err).encode())
        try:
            out, complaint = process.communicate(stdin, timeout=limit_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as err:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(err, KeyboardInterrupt):
                raise
            return subprocess.CompletedProcess(words, 124, b"", b"")
        return subprocess.CompletedProcess(words, process.returncode, out, complaint)

    def has(self, program: str) -> bool:
        """Return whether a program is there."""
        if self.container is None:
            return shutil.which(program) is not None
        return self.ask("sh", "-c", 'command -v "$1"', "sh", program).returncode == 0

    @contextlib.contextmanager
    def folder(self, output: Path) -> Iterator[str]:
        """Yield the folder there for what the profiler writes: ``output``, or one in the container."""
        if self.container is None:
            yield str(output)
            return
        made = self.ask("mktemp", "-d", "/tmp/gpunode-profile-XXXXXX")  # noqa: S108 (in the container)
        self._inside = made.stdout.decode(errors="replace").strip()
        if made.returncode or not INSIDE.fullmatch(self._inside):
            raise ProfileError(f"container {self.container}: no folder can be made: {_complaint(made)}")
        try:
            yield self._inside
        finally:
            self.ask("rm", "-rf", self._inside)

    def write(self, path: str, content: bytes) -> None:
        """Write a file there."""
        if self.container is None:
            Path(path).write_bytes(content)
            return
        done = self.ask("sh", "-c", 'cat > "$1"', "sh", path, stdin=content)
        if done.returncode:
            raise ProfileError(f"container {self.container}: {path} cannot be written: {_complaint(done)}")

    def fetch(self, folder: str, output: Path) -> None:
        """Copy what was written in the container's folder to ``output``."""
        if self.container is None:
            return
        listed = self.ask("ls", folder).stdout.decode(errors="replace").split()
        for name in listed[:64]:
            if name != "pid" and re.fullmatch(r"[\w.-]{1,100}", name):
                content = self.ask("head", "-c", str(MOST_TRACE_BYTES), f"{folder}/{name}", limit_s=EXPORT_S).stdout
                (output / name).write_bytes(content)

    def command(self, words: Sequence[str], environment: Mapping[str, str], folder: str) -> list[str]:
        """Return the command line that starts the words there; its process group's number goes to ``folder``."""
        if self.container is None:
            return list(words)
        variables = [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]
        start = f'echo $$ > {shlex.quote(folder)}/pid; exec "$@"'
        # setsid starts a group of its own, which a signal reaches as a whole.
        session = ["setsid", "-w"] if self.has("setsid") else []
        return ["docker", "exec", *variables, str(self.container), *session, "sh", "-c", start, "sh", *words]

    def end(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Send a signal to the command's process group."""
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)
        if self._inside is not None:
            kill = 'p=$(cat "$1/pid") && { kill "-$2" -- "-$p" || kill "-$2" "$p"; }'
            self.ask("sh", "-c", kill, "sh", self._inside, SIGNALS[number])


@dataclass(frozen=True)
class ProfileRequest:
    """What is profiled, and how."""

    command: tuple[str, ...]
    container: str | None = None
    gpus: tuple[int, ...] = ()
    tool: Tool | None = None
    """None: the first that is there."""
    output: Path = Path()
    limit_s: float = 600.0
    warmup: int = 5
    steps: int = 20


@dataclass
class ProfileResult:
    """The profile of a command."""

    tool: Tool
    rows: list[ProfilePattern]
    notes: RunNotes
    trace: Path | None
    exit_code: int | None
    """None: it was ended at the time limit."""
    signal: int | None
    seconds: float
    utilization: list[float] = field(default_factory=list)
    """Of all GPUs, from nvidia-smi."""
    checked: list[str] = field(default_factory=list)
    """Versions and permissions, as checked before the run."""
    remarks: list[str] = field(default_factory=list)


def profile(request: ProfileRequest) -> ProfileResult:
    """Run the command under a profiler and return its table. Raises UsageError before, ProfileError after the run."""
    machine = ProfiledMachine(request.container)
    if request.container is not None:
        _container_runs(machine)
    _gpus_exist(machine, request.gpus)
    if not machine.has(request.command[0]):
        raise UsageError(f"{request.command[0]}: no such program{_where(machine)}")
    tool, checked = choose(machine, request)
    with machine.folder(request.output) as folder:
        words, environment = prepared(machine, request, tool, folder)
        result = _run(machine, request, tool, machine.command(words, environment, folder), environment)
        result.checked = checked
        if tool == "nsys":
            _export(machine, folder)
        machine.fetch(folder, request.output)
    _understand(request, result)
    return result


def _where(machine: ProfiledMachine) -> str:
    return f" in container {machine.container}" if machine.container else ""


def _complaint(done: subprocess.CompletedProcess[bytes]) -> str:
    text = last_line(done.stderr.decode(errors="replace"))
    return text or ("no answer" if done.returncode == 124 else f"exit code {done.returncode}")


def _container_runs(machine: ProfiledMachine) -> None:
    if shutil.which("docker") is None:
        raise UsageError("--container: docker is not installed on this machine")
    done = machine.ask("true")
    if done.returncode:
        raise UsageError(f"--container {machine.container}: {_complaint(done)}")


def _gpus_exist(machine: ProfiledMachine, gpus: Sequence[int]) -> None:
    if not gpus:
        return
    done = machine.ask("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
    if done.returncode:
        raise UsageError(f"--gpus: nvidia-smi lists no GPU{_where(machine)}: {_complaint(done)}")
    known = {int(line) for line in done.stdout.decode(errors="replace").split() if line.isdigit()}
    for gpu in gpus:
        if gpu not in known:
            raise UsageError(f"--gpus: there is no GPU {gpu}; there are {', '.join(map(str, sorted(known))) or 'none'}")


def choose(machine: ProfiledMachine, request: ProfileRequest) -> tuple[Tool, list[str]]:
    """Return the profiler, and what is worth knowing about it. Raises UsageError if none can be used."""
    reasons = []
    for tool in (request.tool,) if request.tool else TOOLS:
        reason, remarks = usable(machine, request.command, tool)
        if reason is None:
            return tool, remarks
        reasons.append(f"{tool}: {reason}")
    raise UsageError(f"no profiler can be used{_where(machine)}: {'; '.join(reasons)}")


def usable(machine: ProfiledMachine, command: Sequence[str], tool: Tool) -> tuple[str | None, list[str]]:
    """Return why a profiler cannot be used, or None, and remarks on its version and permissions."""
    if tool == "nsys":
        return _usable_nsys(machine)
    if tool == "torch":
        return _usable_torch(machine, command)
    if not machine.has("py-spy"):
        return "py-spy is not installed (pip install py-spy)", []
    done = machine.ask("cat", "/proc/sys/kernel/yama/ptrace_scope")
    scope = done.stdout.strip()
    root = machine.ask("id", "-u").stdout.strip() == b"0"
    if scope == b"3" or (scope == b"2" and not root):
        return f"kernel.yama.ptrace_scope={scope.decode()} forbids it: use root, or a lower value", []
    return None, [_version(machine, "py-spy")]


def _version(machine: ProfiledMachine, program: str) -> str:
    done = machine.ask(program, "--version")
    return one_line((done.stdout or done.stderr).decode(errors="replace")) or f"{program}: {_complaint(done)}"


def _usable_nsys(machine: ProfiledMachine) -> tuple[str | None, list[str]]:
    if not machine.has("nsys"):
        return "Nsight Systems is not installed (role gpu_tools: gpu_tools_nsight)", []
    version = _version(machine, "nsys")
    match = re.search(r"(20\d\d)\.(\d+)", version)
    if match is None:
        return f"nsys --version answers: {version}", []
    remarks = [version]
    if (int(match[1]), int(match[2])) < NSYS_LEAST:
        remarks.append("this version of nsys may not export SQLite as expected")
    restricted = machine.ask("cat", "/proc/driver/nvidia/params").stdout
    if b"RmProfilingAdminOnly: 1" in restricted:
        remarks.append("hardware counters are restricted to root (RmProfilingAdminOnly: 1); the trace needs none")
    return None, remarks


def _usable_torch(machine: ProfiledMachine, command: Sequence[str]) -> tuple[str | None, list[str]]:
    name = PurePosixPath(command[0]).name
    if not PYTHON.match(name):
        # A launcher (torchrun, a script): its Python is unknown, and gets the hook with the environment.
        return None, [f"{name} is not Python itself: processes that it starts are recorded if they use PyTorch"]
    if any(re.match(r"-\w*[IES]", word) for word in command[1:2]):
        return f"{name} {command[1]} loads no sitecustomize", []
    look = "import importlib.metadata as m; print(m.version('torch'))"
    done = machine.ask(command[0], "-c", look)
    if done.returncode:
        return f"{command[0]} has no PyTorch", []
    return None, [f"PyTorch {one_line(done.stdout.decode(errors='replace'))}"]


def prepared(
    machine: ProfiledMachine, request: ProfileRequest, tool: Tool, folder: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the added environment; the hook is written to the folder."""
    environment = {}
    if request.gpus:
        environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, request.gpus))}
    words = list(request.command)
    if tool == "nsys":
        options = ["--trace=cuda,nvtx,osrt", "--sample=none", "--force-overwrite=true", f"--output={folder}/profile"]
        return ["nsys", "profile", *options, *words], environment
    if tool == "py-spy":
        options = ["--format", "raw", "--idle", "--subprocesses", "--nonblocking", "--output", f"{folder}/stacks.txt"]
        return ["py-spy", "record", *options, "--", *words], environment
    machine.write(f"{folder}/sitecustomize.py", program_text("profile_hook").encode())
    if machine.container is None:
        before = os.environ.get("PYTHONPATH", "")
    else:
        before = machine.ask("sh", "-c", 'printf %s "$PYTHONPATH"').stdout.decode(errors="replace")
    return words, {
        **environment,
        "PYTHONPATH": f"{folder}:{before}" if before else folder,
        "GPUNODE_PROFILE": folder,
        "GPUNODE_PROFILE_WARMUP": str(request.warmup),
        "GPUNODE_PROFILE_STEPS": str(request.steps),
    }


def _run(
    machine: ProfiledMachine, request: ProfileRequest, tool: Tool, words: Sequence[str], environment: Mapping[str, str]
) -> ProfileResult:
    """Run to the end, or to the time limit: then it is interrupted, as by Ctrl-C, and killed if that has no effect."""
    began = time.monotonic()
    variables = {**os.environ, **environment} if machine.container is None else None
    with _utilization(request.container) as samples:
        # A job in the background ignores Ctrl-C, and what it starts does too: the limit could only kill the command.
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            # stdout is the report's: the command's own output goes to stderr.
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), env=variables, start_new_session=True
            )
        except OSError as err:
            raise UsageError(f"{words[0]} cannot be started: {err.strerror or err}") from None
        finally:
            if ignored:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        code: int | None = None
        try:
            code = process.wait(timeout=request.limit_s)
        except subprocess.TimeoutExpired:
            for number in SIGNALS:
                machine.end(process, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=GRACE_S)
                    break
        finally:
            machine.end(process, signal.SIGKILL)
            process.wait()
    result = ProfileResult(tool, [], RunNotes(), None, code, None, time.monotonic() - began, samples)
    if code is None:
        result.remarks.append(f"the command did not end within {request.limit_s:g} s and was interrupted (--limit)")
    elif code < 0:
        result.signal = -code
    elif code > 128 and machine.container is not None:
        result.signal = code - 128
    return result


@contextlib.contextmanager
def _utilization(container: str | None) -> Iterator[list[float]]:
    """Yield a list that is filled at the end with the utilization of all GPUs, sampled each second by nvidia-smi."""
    samples: list[float] = []
    program = shutil.which("nvidia-smi") if container is None else None
    if program is None:
        yield samples
        return
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [program, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-l", "1"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield samples
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            samples.extend(float(line) for line in output.read(1 << 20).split() if line.isdigit())


def _export(machine: ProfiledMachine, folder: str) -> None:
    """Convert the report of nsys to SQLite; a failure shows in the missing file."""
    listed = machine.ask("ls", folder).stdout.decode(errors="replace").split()
    report = next((name for name in listed if name.endswith((".nsys-rep", ".qdrep"))), None)
    if report is None:
        raise ProfileError("nsys wrote no report: see its messages above")
    words = ("--type=sqlite", "--force-overwrite=true", f"--output={folder}/profile.sqlite", f"{folder}/{report}")
    done = machine.ask("nsys", "export", *words, limit_s=EXPORT_S)
    if done.returncode:
        raise ProfileError(f"nsys export failed: {_complaint(done)}")


def _understand(request: ProfileRequest, result: ProfileResult) -> None:
    """Read what the profiler wrote into the table. Raises ProfileError if there is nothing."""
    output = request.output
    if result.tool == "nsys":
        result.trace = next(iter(sorted(output.glob("profile.*rep"))), None)
        result.rows = patterns(parse_nsys(output / "profile.sqlite"), result.notes)
    elif result.tool == "py-spy":
        path = output / "stacks.txt"
        if not path.is_file():
            raise ProfileError(f"py-spy wrote no stacks{_ended(result)}")
        result.trace = path
        result.rows = stack_patterns(path.read_text(encoding="utf-8", errors="replace"))
    else:
        _from_hook(output, result)


def _ended(result: ProfileResult) -> str:
    """Return how the command ended, for a message."""
    if result.signal is not None:
        return f": the command was ended by signal {result.signal}"
    if result.exit_code is None:
        return ": the command was interrupted at the time limit"
    return f": the command ended with status {result.exit_code} after {result.seconds:.1f} s"


def _from_hook(output: Path, result: ProfileResult) -> None:
    documents: list[tuple[int, dict[str, Any]]] = []
    for path in sorted(output.glob("notes-*.json")):
        with contextlib.suppress(ValueError, OSError):
            document = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(document, dict):
                documents.append((int(document.get("pid", 0)), document))
    recorded = [(pid, notes) for pid, notes in documents if notes.get("state") == "recorded"]
    if not recorded:
        states = {str(notes.get("state")) for _, notes in documents}
        why = one_line(", ".join(sorted(states))) if states else "the hook was not loaded, or the process was killed"
        hint = "; --warmup 0 records from the first step on" if "warm-up" in why else ""
        raise ProfileError(f"no step was recorded ({why}){_ended(result)}{hint}")
    # Of several ranks the first: they run the same program.
    pid, notes = min(recorded, key=lambda process: (str(process[1].get("rank")), process[0]))
    if len(recorded) > 1:
        result.remarks.append(f"{len(recorded)} processes were recorded; the table is that of rank {notes.get('rank')}")
    known = {note.name for note in fields(RunNotes)}
    result.notes = RunNotes(**{name: value for name, value in notes.items() if name in known})
    path = output / f"trace-{pid}.json"
    if path.stat().st_size > MOST_TRACE_BYTES:
        raise ProfileError(f"{path} is larger than {MOST_TRACE_BYTES >> 20} MiB: record fewer steps (--steps)")
    result.trace = path
    result.rows = patterns(parse_torch(path.read_text(encoding="utf-8", errors="replace")), result.notes)
