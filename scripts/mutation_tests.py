"""Change the code that guards against lockout, loss and injection, one place at a time, and print what no test notices.

cosmic-ray makes the changes, in a copy of the last commit: at some places of each module, chosen by --seed. Exit 1 if
the tests notice fewer than --at-least percent. A module outside of GUARDS is tried if its path is named, with the unit
tests that import it. cosmic-ray is not a dependency of the project; install it beforehand:

    .venv/bin/pip install --require-hashes -r scripts/mutation.txt
"""

import argparse
import importlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from run_tests import git, imports_of

ROOT = Path(__file__).resolve().parents[1]
PLAN, NODE, APT = "gpunode/provisioning", "plugins/module_utils", "plugins/test_apt_transaction.py"
DEFAULTS = "../contract/test_roles.py::test_defaults_specification_and_metadata_are_those_of_the_role"
GUARDS = {
    f"{PLAN}/accounts.py": ("provisioning/test_provisioning_accounts.py", DEFAULTS),
    f"{PLAN}/keys.py": ("provisioning/test_provisioning_keys.py",),
    f"{PLAN}/preflight.py": ("provisioning/test_provisioning_preflight.py", DEFAULTS),
    f"{PLAN}/service.py": (
        "provisioning/test_provisioning_reboot.py",
        "provisioning/test_provisioning_service.py",
        "provisioning/test_provisioning_way_back.py",
    ),
    f"{PLAN}/ssh_hardening.py": ("provisioning/test_provisioning_ssh_hardening.py", DEFAULTS),
    f"{PLAN}/ssh_login.py": (
        "provisioning/test_provisioning_ssh_login.py",
        "provisioning/test_provisioning_ssh_hardening.py",
    ),
    f"{PLAN}/storage.py": ("provisioning/test_provisioning_storage.py", DEFAULTS),
    f"{NODE}/apt_transaction.py": (APT, "plugins/test_driver_transaction.py"),
    f"{NODE}/file_access.py": (
        "plugins/test_file_access.py",
        "plugins/test_managed_files.py",
        "cli/test_cli_foreign.py",
    ),
    f"{NODE}/guard.py": ("plugins/test_guard.py", "plugins/test_guarded_change.py"),
    f"{NODE}/managed.py": ("plugins/test_managed_files.py",),
    f"{NODE}/signing_key.py": ("plugins/test_signing_key.py",),
    f"{NODE}/scratch_disks.py": ("plugins/test_block_devices.py",),
    "gpunode/checks/actions.py": ("checks", "cli/test_cli_outputs.py", "../contract/test_declarations.py"),
    "gpunode/fleet/host_keys.py": ("fleet/test_fleet_host_keys.py",),
    "gpunode/judging/saved.py": ("cli/test_cli_writing.py", "cli/test_cli_foreign.py"),
    "gpunode/whole.py": ("cli/test_cli_writing.py", "cli/test_cli_foreign.py"),
}
"""The unit tests that are to notice a change, for each module."""
LEFT_OUT = re.compile(r"_BitOr|BitOr_|RemoveDecorator|(_Eq_Is|_NotEq_IsNot|_Is_Eq|_IsNot_NotEq)$")
"""Operators that change annotations and models, where nearly each change fails at the import; and those that take
identity for equality: the same for what Python keeps once, like None, small numbers and texts of the source.
"""
LIMIT_S = 240


def cosmic_ray(module: str) -> Any:
    """Import a module of cosmic-ray, which is not among the project's dependencies."""
    return importlib.import_module(f"cosmic_ray.{module}")


def places(module: str) -> dict[tuple[int, int], list[Any]]:
    """Return the possible changes of a module by their position."""
    changes: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for item in cosmic_ray("commands.init")._all_work_items([Path(module)], {}):
        (change,) = item.mutations
        if LEFT_OUT.search(change.operator_name) is None:
            changes[change.start_pos].append(change)
    return changes


def tests_of(module: str) -> tuple[str, ...]:
    """Return the unit tests that are to notice a change: those listed, else those that import the module, else those
    of its room.
    """
    unit = Path("tests/unit")
    importing = [file for file in sorted(unit.rglob("test_*.py")) if Path(module) in imports_of(file, Path())]
    tests = GUARDS.get(module) or tuple(str(file.relative_to(unit)) for file in importing) or (Path(module).parts[1],)
    if missing := [name for name in tests if not (unit / name.partition("::")[0]).exists()]:
        sys.exit(f"{module}: no unit test imports it, and there is no tests/unit/{missing[0]}")
    return tests


def survivors(module: str, number: int, seed: str, end: float) -> tuple[int, list[str]]:
    """Return how many changes of a module were tried until the end, in seconds of ``time.monotonic``, and the
    differences of those that its tests did not notice.
    """
    chance = random.Random(f"{seed} {module}")  # noqa: S311
    possible = sorted(places(module).items())
    names = " ".join(f"tests/unit/{name}" for name in tests_of(module))
    command = f"{ROOT}/.venv/bin/python -m pytest -x -q -p no:cacheprovider {names}"
    unchanged = subprocess.run(command.split(), check=False, timeout=LIMIT_S, capture_output=True, text=True)
    if unchanged.returncode:
        sys.exit(f"{module}: its tests fail without a change:\n{unchanged.stdout[-2000:]}")
    tried, unnoticed = 0, []
    for _, changes in chance.sample(possible, min(number, len(possible))):
        if time.monotonic() > end:
            break
        result = cosmic_ray("mutating").mutate_and_test([chance.choice(changes)], command, LIMIT_S)
        tried += 1
        if not result.is_killed:
            unnoticed.append(result.diff or "")
    return tried, unnoticed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="paths, or parts of paths in GUARDS")
    parser.add_argument("--places", type=int, default=20, help="changes per module (default: 20)")
    parser.add_argument("--seed", help="another seed chooses other changes (default: the commit)")
    parser.add_argument("--at-least", type=int, default=90, metavar="PERCENT")
    parser.add_argument("--limit-s", type=int, default=86400, metavar="SECONDS", help="start no change after this time")
    options = parser.parse_args()
    end = time.monotonic() + options.limit_s
    chosen = {module for module in GUARDS if not options.modules or any(part in module for part in options.modules)}
    # A change is made in a copy of the commit, which has what git knows under its path in the repository.
    tracked = set((git("ls-files", "gpunode/*.py", "plugins/*.py") or "").splitlines())
    if unknown := [
        part for part in options.modules if part not in tracked and not any(part in each for each in GUARDS)
    ]:
        parser.error(f"{', '.join(unknown)}: no module of the commit, and no part of a path in GUARDS")
    chosen |= tracked & set(options.modules)
    seed = options.seed or git("rev-parse", "HEAD") or "0"
    tried = missed = 0
    with tempfile.TemporaryDirectory(prefix="gpunode-mutation-") as folder:
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", folder, "HEAD"], cwd=ROOT, check=True, timeout=120
        )
        try:
            os.chdir(folder)
            # By default, a compiled module is that of any source of the same size and second.
            by_hash = ["compileall", "-q", "--invalidation-mode", "checked-hash", "gpunode", "plugins"]
            subprocess.run([sys.executable, "-I", "-m", *by_hash], check=True, timeout=LIMIT_S)
            os.environ.update(PYTHONPATH=folder, PYTHONDONTWRITEBYTECODE="1")
            # In any order, so that the limit does not always leave out the same.
            for module in random.Random(seed).sample(sorted(chosen), len(chosen)):  # noqa: S311
                if time.monotonic() > end:
                    break
                number, unnoticed = survivors(module, options.places, seed, end)
                tried, missed = tried + number, missed + len(unnoticed)
                print(f"{module}: {number - len(unnoticed)} of {number} changes noticed", flush=True)
                for difference in unnoticed:
                    print(difference, flush=True)
        finally:
            os.chdir(ROOT)
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True, timeout=120)
    noticed = 100 * (tried - missed) / tried if tried else 0
    print(f"{tried - missed} of {tried} changes noticed ({noticed:.0f} %), seed {seed}")
    if time.monotonic() > end:
        print(f"not all of {len(chosen)} modules were tried: the limit of {options.limit_s} s ended it")
    return 0 if noticed >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
