"""Run the tiers of tests that this machine supports, and report which it could not run, and why.

On a branch, tests in lab nodes and virtual machines, and molecule scenarios, are selected by what changed since it left
origin/main (or since the commit in GPUNODE_TEST_SINCE), the working tree included. On main itself, or if git has no
answer, their core runs: the lab tests without a constant CONCERNS or the name of a role, and the scenario `default`,
which is the whole of site.yml. Only the core runs too if a change concerns more than AT_MOST files or scenarios beyond
it, so that a wide change stays within CI's limit: the table then names what was omitted. `--all` runs everything.
"""

import argparse
import ast
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

import needs

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".venv" / "bin"
# Every scenario depends on these.
FOUNDATION = (
    "plugins/",
    "playbooks/",
    "roles/common/",
    "roles/preflight/",
    "gpunode/provisioning/preflight",
    # Every plan depends on these.
    "gpunode/provisioning/context",
    "gpunode/provisioning/answers",
    "gpunode/provisioning/manifest",
    "gpunode/provisioning/order",
    "gpunode/provisioning/role",
    "gpunode/provisioning/state",
    "playbooks/molecule_",
    ".config/",
    "requirements.lock",
    "ansible.cfg",
)
AT_MOST = {"lab": 3, "molecule": 1, "vm": 1}
"""Maximum number of files and scenarios that a change may add to the core."""
ALLOWED_SKIPS = {
    "no GPU": r"no NVIDIA driver is loaded on this machine",
    "no build of PyTorch or TensorFlow for this Python": r"GPUNODE_(TORCH|TENSORFLOW)_PYTHON names no Python with",
    "a container without privileges": (
        r"(no )?devices (cannot|may) be made|loop devices need root and|no mount namespace here"
        r"|no sshd in a namespace here|needs mount namespaces"
    ),
    "no access to npm's registry": r"axe-core cannot be downloaded",
    "another processor": r"the library is for x86_64",
    "not in the recorded repositories": r"no toolkit is recorded of NVIDIA's repository",
}
"""Why a test may be skipped where root can install what it needs, as patterns of the beginning of a skip's reason. Any
other skip is a failure there: a missing package or file of the project must not look like a success.
"""
FORKING = (
    ("tests/unit/plugins", "tests/unit/fleet"),
    ("tests/unit/cli", "tests/unit/judging", "tests/unit/stack"),
)
"""Folders of unit tests that fork often. Each group has a run of pytest to itself: with all tests in one process, each
fork copies hundreds of MB of page tables and costs four times as much.
"""
MEMORY = Path("/dev/shm")  # noqa: S108 (the folder in it is made there, for this user alone)
MEMORY_GIB = 4
"""Free memory with which temporary files of unit and contract tests are kept there; they take up to 1 GiB."""
OWN_PACKAGES = {**{tier: tier for tier in ("lint", "unit", "contract", "integration")}, "alone": "integration"}
"""Tiers for which packages are installed before they run, and the tier that lists them; others install their own."""
SIDE_BY_SIDE = ("integration", "lab", "molecule")
"""Tiers that run at the same time if they are chosen: each waits for its nodes, or for a service, much of its time."""
LABS_AT_ONCE = 2
LAB_FILE_LIMIT_S = 3600


@dataclass
class Tally:
    """The result of one tier. ``not_run`` is the reason why it could not be run at all."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    not_run: str | None = None
    broken: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    skips: Counter[str] = field(default_factory=Counter)
    """Number of skipped tests by reason."""
    untested: int = 0
    """Number of tests that were not selected, because the recorded outputs that they need are not fetched."""


def joined(tallies: Iterable[Tally]) -> Tally:
    """Return the result of several runs of one tier."""
    whole = Tally()
    for tally in tallies:
        whole.passed += tally.passed
        whole.failed += tally.failed
        whole.skipped += tally.skipped
        whole.untested += tally.untested
        whole.broken += tally.broken
        whole.skips.update(tally.skips)
    return whole


class Running:
    """The programs that run, also in threads; once it is ended, none is started any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, argv: Sequence[str], env: Mapping[str, str], output: IO[bytes] | None) -> "subprocess.Popen[bytes]":
        """Start a program in a process group of its own."""
        with self._lock:
            if self._ended:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
            )
            self._processes.append(process)
            return process

    def end(self) -> None:
        """End all of them."""
        with self._lock:
            self._ended = True
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
        for process in self._processes:
            if process.poll() is None:
                end_group(process)


RUNNING = Running()


def run(
    argv: Sequence[str | Path], *, limit_s: float, env: dict[str, str] | None = None, output: IO[bytes] | None = None
) -> int:
    """Run one program with its output passed through, or in a file; return 124 if it ran past its limit.

    Compiled modules are kept, in .cache, even if the environment disables them: without them, half of what pytest's
    workers do at their start is to compile the tests again.
    """
    path = os.pathsep.join([str(BIN), os.environ["PATH"], needs.SYSTEM_FOLDERS])
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    kept.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / ".cache" / "bytecode"))
    process = RUNNING.start([str(part) for part in argv], {**kept, "PATH": path, **(env or {})}, output)
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        print(f"run_tests: {argv[0]} ran past {limit_s:.0f} s", file=sys.stderr)
        return 124
    finally:
        # Ctrl-C too must leave nothing behind: the group gets time to clean up its lab nodes.
        if process.poll() is None:
            end_group(process)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a program and all processes that it started."""
    for number, grace_s in ((signal.SIGINT, 60), (signal.SIGTERM, 10)):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(timeout=grace_s)
            break
    # What a shell starts in the background ignores SIGINT, and outlives it.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)


def side_by_side(
    jobs: Mapping[str, Callable[[IO[bytes] | None], Tally]], *, at_once: int, live: str | None = None
) -> dict[str, Tally]:
    """Run jobs in threads and return their results with the seconds of each. A job gets a file for its output, which is
    printed when the job ends; that of the job ``live`` is passed through.
    """

    def timed(name: str) -> Tally:
        started = time.monotonic()
        tally = jobs[name](outputs[name])
        tally.seconds = time.monotonic() - started
        return tally

    with ExitStack() as stack:
        outputs = {name: None if name == live else stack.enter_context(tempfile.TemporaryFile()) for name in jobs}
        pool = stack.enter_context(ThreadPoolExecutor(at_once))
        try:
            begun = {pool.submit(timed, name): name for name in jobs}
            for ended in as_completed(begun):
                ended.result()  # may raise: the others end then
                if output := outputs[begun[ended]]:
                    output.seek(0)
                    sys.stdout.flush()
                    sys.stdout.buffer.write(output.read())
                    sys.stdout.flush()
        except BaseException:
            RUNNING.end()  # before the pool waits for its threads
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return {name: future.result() for future, name in begun.items()}


@contextmanager
def in_memory() -> Iterator[dict[str, str]]:
    """Yield the environment with which temporary files are in memory, where it suffices and can be used as a disk:
    the tests that write many small files wait for the disk for longer than they take.
    """
    for folder in MEMORY.glob("gpunode-*"):  # of a run that was killed
        owner = folder.name.removeprefix("gpunode-")
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)
    folder = MEMORY / f"gpunode-{os.getpid()}"
    try:
        available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
        free = min(shutil.disk_usage(MEMORY).free, int(available[1]) << 10 if available else 0)
        folder.mkdir(mode=0o700)
        # The kernels before 6.6 lack them there.
        os.setxattr(folder, "user.gpunode", b"")
        usable = free > MEMORY_GIB << 30 and not os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        usable = False
    try:
        yield {"TMPDIR": str(folder)} if usable else {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_tier(
    *arguments: str, limit_s: float, env: dict[str, str] | None = None, output: IO[bytes] | None = None
) -> Tally:
    """Run pytest on some folders and count the results in its report."""
    folders = [argument for argument in arguments if argument.startswith("tests/")]
    if not any((ROOT / folder).exists() for folder in folders):
        return Tally(not_run="there are no such tests yet")
    present = [argument for argument in arguments if not argument.startswith("tests/") or (ROOT / argument).exists()]
    with tempfile.TemporaryDirectory(prefix="gpunode-tests-") as folder:
        report = Path(folder) / "report.xml"
        rc = run([BIN / "pytest", *present, f"--junitxml={report}"], limit_s=limit_s, env=env, output=output)
        if not report.exists():
            return Tally(failed=1, broken=[f"pytest wrote no report (exit {rc})"])
        tree = ElementTree.parse(report).getroot()
    suites = list(tree.iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    tally = Tally(passed=total - failed - skipped, failed=failed, skipped=skipped)
    # tests/conftest.py writes it there.
    tally.untested = sum(int(tag.get("value", "0")) for tag in tree.iter("property") if tag.get("name") == "captures")
    if rc not in (0, 1):
        tally.failed += 1
        tally.broken.append(f"pytest exit {rc}")
    if rc == 1 and not failed:
        tally.failed += 1
    tally.skips.update(skip_reason(skipped) for skipped in tree.iter("skipped"))
    holes = [reason for reason in tally.skips if not allowed_skip(reason)]
    if holes and needs.can_install():
        number = sum(tally.skips[reason] for reason in holes)
        tally.skipped -= number
        tally.failed += number
        tally.broken.append(f"{number} skipped for a reason that is not in ALLOWED_SKIPS")
    return tally


def skip_reason(skipped: ElementTree.Element) -> str:
    """Return why a test was skipped, from its element of pytest's report; for a module it is in the text."""
    message = skipped.get("message", "")
    if message == "collection skipped":
        message = (skipped.text or "").rpartition("Skipped: ")[2].rstrip("')\"")
    return message or "no reason given"


def allowed_skip(reason: str) -> bool:
    """Return whether a test may be skipped for this reason on a machine where root can install packages."""
    return any(re.match(pattern, reason) for pattern in ALLOWED_SKIPS.values())


def cannot_run(why: str) -> Tally:
    """Return the result of a tier that lacks a program: a failure where root could have installed it."""
    if needs.can_install():
        return Tally(failed=1, broken=[f"not run: {why}"])
    return Tally(not_run=why)


def tool_tier(
    commands: Mapping[str, Sequence[str | Path]], output: IO[bytes] | None = None, *, limit_s: float
) -> Tally:
    """Run programs with a result in their exit code only."""
    tally = Tally()
    for name, argv in commands.items():
        rc = run(argv, limit_s=limit_s, output=output)
        if rc:
            tally.failed += 1
            tally.broken.append(f"{name} (exit {rc})")
        else:
            tally.passed += 1
    return tally


def lint() -> Tally:
    programs = (f"roles/slurm_node/files/gpunode-{name}" for name in ("prolog", "reboot"))
    shell = ["scripts/bootstrap", "scripts/docker-engine", *programs]
    commands: dict[str, Sequence[str | Path]] = {
        "mypy": [BIN / "mypy"],
        # Its syntax check has no inventory, so no group would match.
        "ansible-lint": ["env", "ANSIBLE_HOST_PATTERN_MISMATCH=ignore", BIN / "ansible-lint", "--strict", "--offline"],
        "yamllint": [BIN / "yamllint", "--strict", "."],
        "ruff check": [BIN / "ruff", "check", "."],
        "ruff format": [BIN / "ruff", "format", "--check", "."],
    }
    if needs.here("shellcheck"):
        commands["shellcheck"] = ["shellcheck", "-S", "warning", *shell]
    jobs = {name: partial(tool_tier, {name: argv}, limit_s=600) for name, argv in commands.items()}
    return joined(side_by_side(jobs, at_once=processors()).values())


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def in_parallel(dist: str = "worksteal", workers: int | None = None) -> list[str]:
    """Return the options with which pytest uses every processor, or so many workers; for tests that share no port and
    no machine. With ``loadfile`` the tests of one file run one after the other.
    """
    return ["-n", str(workers or processors()), "--dist", dist]


def unit(*, everything: bool = False) -> Tally:
    """Run the tests that need no other machine; those with damaged text use a sample of it, or everything."""
    limit_s = 7200 if everything else 2700
    rest = (
        "tests/unit",
        "tests/property",
        "tests/captures",
        *(f"--ignore={path}" for path in itertools.chain(*FORKING)),
    )

    def chosen(*arguments: str) -> Callable[[IO[bytes] | None], Tally]:
        return lambda output: pytest_tier(*arguments, "-q", *in_parallel(), limit_s=limit_s, env=env, output=output)

    with in_memory() as more:
        env = {**more, **({"GPUNODE_TEST_ALL": "1"} if everything else {})}
        jobs = {folders[0]: chosen(*folders) for folders in (rest, *FORKING)}
        # One of them alone waits for a quarter of its time: for its workers' start, and for programs.
        return joined(side_by_side(jobs, at_once=2, live=rest[0]).values())


def contract(*, everything: bool = False) -> Tally:
    """Run the tests that hold all checks, roles and pages to one contract; on damaged bundles as ``unit`` does."""
    env = {"GPUNODE_TEST_ALL": "1"} if everything else {}
    limit_s = 3600 if everything else 900
    with in_memory() as more:
        return pytest_tier("tests/contract", "tests/bench", "-q", *in_parallel(), limit_s=limit_s, env={**env, **more})


def on_loopback(
    marks: str, options: Sequence[str] = (), output: IO[bytes] | None = None, *, env: dict[str, str]
) -> Tally:
    """Run those tests with real programs on this machine that have these marks."""
    folders = ("tests/integration", "tests/fleet", "-q", "-m", marks)
    return pytest_tier(*folders, *options, limit_s=2700, env=env, output=output)


def interpreters() -> dict[str, str]:
    """Return the environment that names a Python with each framework, made where it is missing and can be."""
    env = {}
    for variable, made in (
        (needs.TORCH_VARIABLE, needs.torch_python()),
        (needs.TENSORFLOW_VARIABLE, needs.tensorflow_python()),
        (needs.S3_SERVER_VARIABLE, needs.s3_python()),
    ):
        python, line = made
        print(line, flush=True)
        env.update({variable: str(python)} if python else {})
    return env


def integration(_output: IO[bytes] | None = None) -> Tally:
    """Run the tests with a real sshd, Slurm, nftables, PyTorch, TensorFlow and real Ansible programs, on loopback.

    They wait for a third of their time, so there is one worker more than processors. Those with the marker ``waiting``
    have a process of their own beside them.
    """
    env = interpreters()
    # In the order of tests/integration/conftest.py; else the files with few tests, which are long ones, came last.
    many = [*in_parallel("loadfile", processors() + 1), "--no-loadscope-reorder"]
    marks = {"waiting": ("waiting", ()), "rest": ("not alone and not waiting", many)}
    jobs = {name: partial(on_loopback, *arguments, env=env) for name, arguments in marks.items()}
    return joined(side_by_side(jobs, at_once=len(jobs), live="rest").values())


def alone() -> Tally:
    """Run those that measure times, or take every processor; nothing runs beside them."""
    return on_loopback("alone", env=interpreters())


def git(*arguments: str) -> str | None:
    """Return git's output; None if it fails, or is not installed."""
    argv = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, start_new_session=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def changed() -> list[str] | None:
    """Return paths that differ from where this branch left origin/main; None if unknown: everything is to run."""
    since = os.environ.get("GPUNODE_TEST_SINCE") or git("merge-base", "HEAD", "origin/main")
    if not since:
        return None
    tracked, new = git("diff", "--name-only", since), git("ls-files", "--others", "--exclude-standard")
    if tracked is None or new is None:
        return None
    return [*tracked.splitlines(), *new.splitlines()] or None


def concerned(*beginnings: str) -> bool:
    """Return whether a path with such a prefix changed; False if the changes are unknown."""
    return any(path.startswith(beginnings) for path in changed() or ())


@dataclass
class Chosen:
    """The files or scenarios of a tier to run, and those left to `--all`."""

    run: list[str]
    left_out: list[str] = field(default_factory=list)


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, empty if it has none: the linters report that."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError:
        return ast.Module([], [])


@cache
def imports_of(path: Path, root: Path) -> tuple[Path, ...]:
    """Return the files of the modules that a module imports."""
    files: list[Path] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            files += [file for name in names if (file := root / f"{name.replace('.', '/')}.py").is_file()]
    return tuple(files)


@cache
def plan_of(role: str, root: Path) -> frozenset[str]:
    """Return the modules of a role's plan, as paths: the one that declares the role, those beside it in a folder of its
    own, and what they import in gpunode/provisioning, but for what every plan depends on.
    """
    room = root / "gpunode" / "provisioning"
    head = re.compile(rf'^ROLE = Role\(\s*name="{role}"', re.MULTILINE)
    declaring = [path for path in room.rglob("*.py") if head.search(path.read_text(encoding="utf-8"))]
    waiting = [*declaring, *(path for file in declaring if file.parent != room for path in file.parent.glob("*.py"))]
    modules: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in modules and not str(path.relative_to(root)).startswith(FOUNDATION):
            modules.add(path)
            waiting += (other for other in imports_of(path, root) if room in other.parents)
    return frozenset(str(path.relative_to(root)) for path in modules)


def concerns(test: Path, root: Path) -> tuple[str, ...]:
    """Return the prefixes of the paths that a test in nodes or machines concerns, with the plans of its roles; none if
    they are not limited.

    They are the role in its name (``test_docker``, ``test_vm_storage``) and its constant ``CONCERNS``. The constant is
    read without an import, which would need all that the test needs.
    """
    role = f"roles/{re.sub('^test_(vm_)?', '', test.stem)}/"
    listed = [role] if (root / role).is_dir() else []
    for node in parsed(test).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="CONCERNS")], value=ast.Tuple() as value):
                listed += ast.literal_eval(value)
            case ast.Assign(targets=[ast.Name(id="CONCERNS")]) | ast.AnnAssign(target=ast.Name(id="CONCERNS")):
                raise SystemExit(f"{test}: CONCERNS must be a tuple of paths, without an annotation")
    roles = [path.removeprefix("roles/").removesuffix("/") for path in listed if re.fullmatch(r"roles/\w+/", path)]
    return (*listed, *sorted(path for role in roles for path in plan_of(role, root)))


def bounded(core: list[str], concerned: list[str], at_most: int) -> Chosen:
    """Return the core with what a change concerns, or only the core if that is too much."""
    if len(concerned) > at_most:
        return Chosen(core, concerned)
    return Chosen(sorted([*core, *concerned]))


def lab_files(*, everything: bool) -> Chosen:
    """Return the lab tests to run, as paths. Those that concern no paths in particular are the core."""
    paths = {f"tests/lab/{file.name}": concerns(file, ROOT) for file in sorted((ROOT / "tests/lab").glob("test_*.py"))}
    if everything:
        return Chosen(list(paths))
    core = [file for file, prefixes in paths.items() if not prefixes]
    more = [file for file, prefixes in paths.items() if prefixes and concerned(file, *prefixes)]
    return bounded(core, more, AT_MOST["lab"])


def scenarios(*, everything: bool) -> Chosen:
    """Return the molecule scenarios to run. `default` runs all roles."""
    names = sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))
    if everything:
        return Chosen(names)
    more = [
        name
        for name in names
        if name != "default"
        and concerned(f"molecule/{name}/", f"roles/{name}/", *sorted(plan_of(name, ROOT)), *FOUNDATION)
    ]
    return bounded([name for name in names if name == "default"], more, AT_MOST["molecule"])


def no_lab_here() -> Tally | None:
    """Return the result of a tier of lab nodes if they are not possible on this machine; None if they are."""
    if os.geteuid() != 0:
        return Tally(not_run="not root: the lab builds its images as root")
    if missing := needs.install("lab"):
        return cannot_run(missing)
    try:
        import docker  # noqa: PLC0415

        docker.from_env(timeout=10).ping()
    except Exception as err:
        return Tally(not_run=f"the Docker engine does not answer (scripts/docker-engine starts one): {err}")
    return None


def lab_file(file: str, output: IO[bytes] | None) -> Tally:
    print(f"{file} …", flush=True)
    return pytest_tier(file, "-v", limit_s=LAB_FILE_LIMIT_S, output=output)


def lab(_output: IO[bytes] | None = None, *, everything: bool = False) -> Tally:
    """Run the tests in lab nodes: those of one file share nodes, and two files have nodes at the same time.

    Each file has a pytest of its own: a worker of pytest-xdist has no time to remove its nodes after Ctrl-C.
    """
    if impossible := no_lab_here():
        return impossible
    chosen = lab_files(everything=everything)
    jobs = {file: partial(lab_file, file) for file in chosen.run}
    tally = joined(side_by_side(jobs, at_once=min(processors(), LABS_AT_ONCE)).values())
    tally.left_out = chosen.left_out
    return tally


def lab_debian_13() -> Tally:
    """Run the playbooks on the other system: one more DKMS build, so only if everything is requested."""
    if impossible := no_lab_here():
        return impossible
    return pytest_tier("tests/lab/test_site.py", "-v", limit_s=2400, env={"GPUNODE_TEST_SITE_OS": "debian-13"})


def lab_matrix() -> Tally:
    """Run every system with every branch on every machine: hours."""
    if impossible := no_lab_here():
        return impossible
    return pytest_tier("tests/lab/test_matrix.py", "-v", limit_s=21600, env={"GPUNODE_TEST_ALL": "1"})


def molecule(output: IO[bytes] | None = None, *, everything: bool = False) -> Tally:
    if impossible := no_lab_here():
        return impossible
    chosen = scenarios(everything=everything)
    commands: dict[str, Sequence[str | Path]] = {name: [BIN / "molecule", "test", "-s", name] for name in chosen.run}
    for name in commands:
        # Of a run that was killed: its inventory names an address that another node may have by now.
        run([BIN / "molecule", "reset", "-s", name], limit_s=60, output=output)
    tally = tool_tier(commands, output, limit_s=1800)
    tally.left_out = chosen.left_out
    return tally


def vm_files(*, everything: bool) -> Chosen:
    """Return the tests in virtual machines to run, as paths: each boots a kernel several times, so there is no core."""
    paths = {f"tests/vm/{file.name}": concerns(file, ROOT) for file in sorted((ROOT / "tests/vm").glob("test_*.py"))}
    if everything:
        return Chosen(list(paths))
    return bounded([], [file for file, prefixes in paths.items() if concerned(file, *prefixes)], AT_MOST["vm"])


def vm(*, everything: bool = False) -> Tally:
    if os.geteuid() != 0:
        return Tally(not_run="not root: the machines' image is built as root")
    chosen = vm_files(everything=everything)
    if not chosen.run:
        why = "left to --all" if chosen.left_out else "nothing changed that needs a kernel of its own"
        return Tally(not_run=why, left_out=chosen.left_out)
    if missing := needs.install("vm"):
        return cannot_run(missing)
    return pytest_tier(*chosen.run, "-v", limit_s=7200 if everything else 1800)


def mutation() -> Tally:
    """Run the tests on a sample of the changes that `make mutation` tries, other ones at each commit.

    Where 90 % of all changes are noticed, fewer than 80 % of so few are in one run of a hundred.
    """
    if run([BIN / "pip", "install", "--quiet", "--require-hashes", "-r", "scripts/mutation.txt"], limit_s=300):
        return cannot_run("cosmic-ray cannot be installed (scripts/mutation.txt)")
    options = ("--places", "3", "--at-least", "80", "--limit-s", "1800")
    return tool_tier({"mutation_tests": [BIN / "python", "scripts/mutation_tests.py", *options]}, limit_s=2700)


def gpu() -> Tally:
    if not Path("/proc/driver/nvidia/version").exists():
        return Tally(not_run="no NVIDIA driver is loaded on this machine")
    return pytest_tier("tests/gpu", "-v", limit_s=1800)


Tier = Callable[..., Tally]
TIERS: dict[str, Tier] = {
    "lint": lint,
    "unit": unit,
    "contract": contract,
    "integration": integration,
    "lab": lab,
    "molecule": molecule,
    "alone": alone,
    "vm": vm,
    "gpu": gpu,
}
WHOLE: dict[str, Tier] = {
    "unit": partial(unit, everything=True),
    "contract": partial(contract, everything=True),
    "lab": partial(lab, everything=True),
    "molecule": partial(molecule, everything=True),
    "vm": partial(vm, everything=True),
    "lab-debian-13": lab_debian_13,
    "lab-matrix": lab_matrix,
    "mutation": mutation,
}
"""Used in place of, or in addition to, the above if everything is requested."""


def describe(name: str, tally: Tally) -> str:
    """Return one line of the closing table."""
    if tally.not_run:
        return f"  {name:<14} not run: {tally.not_run}"
    row = f"  {name:<14} {tally.passed:>5} passed {tally.failed:>4} failed {tally.skipped:>4} skipped"
    row += f" {tally.seconds:>7.0f} s"
    row += f"  {', '.join(tally.broken)}" if tally.broken else ""
    if tally.left_out:
        names = ", ".join(Path(path).stem for path in tally.left_out)
        row += f"\n{'':<17}left to `make test-all`, the change concerns too many: {names}"
    if tally.untested:
        row += f"\n{'':<17}captures: not fetched (make captures): {tally.untested} tests not selected"
    return row


def skips(tallies: dict[str, Tally]) -> list[str]:
    """Return the table of skipped tests by reason; where root can install packages, failures are marked."""
    rows = [(name, reason, number) for name, tally in tallies.items() for reason, number in tally.skips.items()]
    if not rows:
        return ["\nNo test was skipped."]
    lines = ["\nSkipped tests by reason:"]
    for name, reason, number in sorted(rows):
        failure = "" if allowed_skip(reason) or not needs.can_install() else "  (failure: not in ALLOWED_SKIPS)"
        lines.append(f"  {name:<14} {number:>5}  {' '.join(reason.split())[:160]}{failure}")
    return lines


def install_packages(*names: str) -> None:
    """Install what tiers need, and print what could not be installed."""
    for name in names:
        if name in OWN_PACKAGES and (missing := needs.install(OWN_PACKAGES[name])):
            print(missing, flush=True)


def run_tiers(names: Sequence[str], tiers: Mapping[str, Tier]) -> dict[str, Tally]:
    """Run tiers in their order, those of ``SIDE_BY_SIDE`` together; return their results."""
    tallies: dict[str, Tally] = {}
    for name in names:
        if name in tallies:
            continue
        together = [tier for tier in SIDE_BY_SIDE if tier in names]
        if name in together and len(together) > 1 and no_lab_here() is None:
            print(f"== {', '.join(together)}", flush=True)
            install_packages(*together)
            tallies |= side_by_side({tier: tiers[tier] for tier in together}, at_once=len(together), live=together[0])
            continue
        print(f"== {name}", flush=True)
        started = time.monotonic()
        install_packages(name)
        tallies[name] = tiers[name]()
        tallies[name].seconds = time.monotonic() - started
    return tallies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=list(TIERS | WHOLE), help="run this tier alone (repeatable)")
    parser.add_argument("--all", action="store_true", help="also the tiers that take long")
    chosen = parser.parse_args()
    # In a shell's background SIGINT is ignored, and so it would be in the programs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    started = time.monotonic()
    tiers = TIERS | WHOLE if chosen.all else WHOLE | TIERS
    tallies = run_tiers(chosen.only or list(tiers if chosen.all else TIERS), tiers)
    print("\nTiers:")
    for name, tally in tallies.items():
        print(describe(name, tally))
    print(*skips(tallies), sep="\n")
    passed, failed, skipped = (
        sum(getattr(t, key) for t in tallies.values()) for key in ("passed", "failed", "skipped")
    )
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped in {time.monotonic() - started:.0f} s")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("run_tests: interrupted", file=sys.stderr)
        sys.exit(130)
