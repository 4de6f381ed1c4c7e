"""Runs the tiers of tests that this machine can run, and says which it could not, and why.

On a branch, lab tests and molecule scenarios are chosen by what changed since it left origin/main (or since the commit
that GPUNODE_TEST_SINCE names), the working tree included; on main itself, or where git cannot tell, all of them run.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".venv" / "bin"
# What every lab test and every scenario stands on.
FOUNDATION = (
    "gpunode/",
    "plugins/",
    "playbooks/",
    "roles/preflight/",
    "molecule/shared/",
    ".config/",
    "scripts/",
    "pyproject.toml",
    "requirements.lock",
    "ansible.cfg",
)


@dataclass
class Tally:
    """What one tier came to. ``not_run`` is the reason where it could not be run at all."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    not_run: str | None = None
    broken: list[str] = field(default_factory=list)


def run(argv: Sequence[str | Path], *, limit_s: float, env: dict[str, str] | None = None) -> int:
    """Run one program with its output straight through; 124 where it ran past its limit."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        [str(part) for part in argv],
        cwd=ROOT,
        env={**os.environ, "PATH": path, **(env or {})},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
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
    """End a program and all that it started."""
    for number, grace_s in ((signal.SIGINT, 60), (signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            pass
        return


def pytest_tier(*arguments: str, limit_s: float, env: dict[str, str] | None = None) -> Tally:
    """Run pytest on some folders and count what its report says."""
    folders = [argument for argument in arguments if argument.startswith("tests/")]
    if not any((ROOT / folder).exists() for folder in folders):
        return Tally(not_run="there are no such tests yet")
    present = [argument for argument in arguments if not argument.startswith("tests/") or (ROOT / argument).exists()]
    with tempfile.TemporaryDirectory(prefix="gpunode-tests-") as folder:
        report = Path(folder) / "report.xml"
        rc = run([BIN / "pytest", *present, f"--junitxml={report}"], limit_s=limit_s, env=env)
        if not report.exists():
            return Tally(failed=1, broken=[f"pytest wrote no report (exit {rc})"])
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    tally = Tally(passed=total - failed - skipped, failed=failed, skipped=skipped)
    if rc not in (0, 1):
        tally.failed += 1
        tally.broken.append(f"pytest exit {rc}")
    if rc == 1 and not failed:
        tally.failed += 1
    return tally


def tool_tier(commands: dict[str, Sequence[str | Path]], *, limit_s: float) -> Tally:
    """Run programs that answer with their exit code alone."""
    tally = Tally()
    for name, argv in commands.items():
        rc = run(argv, limit_s=limit_s)
        if rc:
            tally.failed += 1
            tally.broken.append(f"{name} (exit {rc})")
        else:
            tally.passed += 1
    return tally


def lint() -> Tally:
    return tool_tier(
        {
            "ruff check": [BIN / "ruff", "check", "."],
            "ruff format": [BIN / "ruff", "format", "--check", "."],
            "mypy": [BIN / "mypy"],
            "yamllint": [BIN / "yamllint", "--strict", "."],
            "ansible-lint": [BIN / "ansible-lint", "--strict", "--offline"],
        },
        limit_s=600,
    )


def unit() -> Tally:
    return pytest_tier("tests/unit", "tests/property", "tests/captures", "-q", limit_s=900)


def contract() -> Tally:
    return pytest_tier("tests/contract", "-q", limit_s=600)


def integration() -> Tally:
    """Real sshd, real Ansible programs, on loopback."""
    return pytest_tier("tests/integration", "tests/fleet", "-q", limit_s=1200)


def git(*arguments: str) -> str | None:
    """What git says; None where it fails, or is not there."""
    argv = ["git", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, start_new_session=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def changed() -> list[str] | None:
    """Paths that differ from where this branch left origin/main; None where that says nothing: everything is to run."""
    since = os.environ.get("GPUNODE_TEST_SINCE") or git("merge-base", "HEAD", "origin/main")
    if not since:
        return None
    tracked, new = git("diff", "--name-only", since), git("ls-files", "--others", "--exclude-standard")
    if tracked is None or new is None:
        return None
    return [*tracked.splitlines(), *new.splitlines()] or None


def concerned(*folders: str) -> bool:
    """Whether a change reaches what stands on these folders and on the foundation."""
    paths = changed()
    return paths is None or any(path.startswith((*FOUNDATION, *folders)) for path in paths)


def no_lab_here() -> str | None:
    """Why lab nodes cannot be had on this machine; None where they can."""
    if os.geteuid() != 0:
        return "not root: the lab builds its images as root"
    if shutil.which("docker") is None and shutil.which("dockerd") is None:
        return "no Docker engine: run scripts/docker-engine"
    try:
        import docker  # noqa: PLC0415

        docker.from_env(timeout=10).ping()
    except Exception as err:
        return f"the Docker engine does not answer: {err}"
    if shutil.which("mmdebstrap") is None:
        return "no mmdebstrap: run scripts/docker-engine"
    return None


def lab() -> Tally:
    reason = no_lab_here()
    if reason:
        return Tally(not_run=reason)
    if not concerned("roles/", "tests/lab/"):
        return Tally(not_run="nothing that a lab node would notice has changed")
    return pytest_tier("tests/lab", "-v", limit_s=3600)


def lab_debian_13() -> Tally:
    """The playbooks on the other system: one more DKMS build, so only where everything is asked for."""
    reason = no_lab_here()
    if reason:
        return Tally(not_run=reason)
    return pytest_tier("tests/lab/test_site.py", "-v", limit_s=2400, env={"GPUNODE_TEST_SITE_OS": "debian-13"})


def molecule() -> Tally:
    reason = no_lab_here()
    if reason:
        return Tally(not_run=reason)
    names = sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))
    # The scenario `default` runs all roles.
    chosen = [
        name for name in names if concerned(f"molecule/{name}/", "roles/" if name == "default" else f"roles/{name}/")
    ]
    if not chosen:
        return Tally(not_run="no role and no scenario has changed")
    return tool_tier({name: [BIN / "molecule", "test", "-s", name] for name in chosen}, limit_s=1800)


def vm() -> Tally:
    return Tally(not_run="no test needs a kernel of its own yet")


def gpu() -> Tally:
    if not Path("/proc/driver/nvidia/version").exists():
        return Tally(not_run="no NVIDIA driver is loaded on this machine")
    return pytest_tier("tests/gpu", "-v", limit_s=1800)


TIERS: dict[str, Callable[[], Tally]] = {
    "lint": lint,
    "unit": unit,
    "contract": contract,
    "integration": integration,
    "lab": lab,
    "molecule": molecule,
    "vm": vm,
    "gpu": gpu,
}
ONLY_IN_ALL: dict[str, Callable[[], Tally]] = {"lab-debian-13": lab_debian_13}


def describe(name: str, tally: Tally) -> str:
    """One line of the closing table."""
    if tally.not_run:
        return f"  {name:<14} not run: {tally.not_run}"
    words = f"  {name:<14} {tally.passed:>5} passed {tally.failed:>4} failed {tally.skipped:>4} skipped"
    words += f" {tally.seconds:>7.0f} s"
    return words + (f"  {', '.join(tally.broken)}" if tally.broken else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=[*TIERS, *ONLY_IN_ALL], help="run this tier alone (repeatable)"
    )
    parser.add_argument("--all", action="store_true", help="also the tiers that take long")
    chosen = parser.parse_args()
    # Whoever starts this in a shell's background has SIGINT ignored, and so would the programs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    tallies: dict[str, Tally] = {}
    tiers = TIERS | ONLY_IN_ALL
    for name in chosen.only or (tiers if chosen.all else TIERS):
        print(f"== {name}", flush=True)
        started = time.monotonic()
        tallies[name] = tiers[name]()
        tallies[name].seconds = time.monotonic() - started

    print("\nTiers:")
    for name, tally in tallies.items():
        print(describe(name, tally))
    passed, failed, skipped = (
        sum(getattr(t, key) for t in tallies.values()) for key in ("passed", "failed", "skipped")
    )
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
