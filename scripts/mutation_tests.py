"""Change the code that guards against lockout, loss and injection, one place at a time, and print what no test notices.

cosmic-ray makes the changes, in a copy of the last commit: at some places of each module, chosen by --seed. Exit 1 if
the tests notice fewer than --at-least percent. cosmic-ray is not a dependency of the project; install it beforehand:

    .venv/bin/pip install --require-hashes -r scripts/mutation.txt
"""

import argparse
import importlib
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLAN, NODE, APT = "gpunode/provisioning", "plugins/module_utils", "plugins/test_apt_transaction.py"
GUARDS = {
    f"{PLAN}/accounts.py": ("provisioning/test_provisioning_accounts.py",),
    f"{PLAN}/keys.py": ("provisioning/test_provisioning_keys.py", "plugins/test_repository_key.py"),
    f"{PLAN}/preflight.py": ("provisioning/test_provisioning_preflight.py",),
    f"{PLAN}/reboot.py": ("provisioning/test_provisioning_reboot.py",),
    f"{PLAN}/ssh_hardening.py": ("provisioning/test_provisioning_ssh_hardening.py",),
    f"{PLAN}/ssh_login.py": (
        "provisioning/test_provisioning_ssh_login.py",
        "provisioning/test_provisioning_ssh_hardening.py",
    ),
    f"{PLAN}/storage.py": ("provisioning/test_provisioning_storage.py",),
    f"{NODE}/apt_transaction.py": (APT, "plugins/test_driver_transaction.py"),
    f"{NODE}/file_access.py": (
        "plugins/test_file_access.py",
        "plugins/test_managed_files.py",
        "cli/test_cli_foreign.py",
    ),
    f"{NODE}/guard.py": ("plugins/test_guard.py", "plugins/test_guarded_change.py"),
    f"{NODE}/managed.py": ("plugins/test_managed_files.py",),
    f"{NODE}/repository_key.py": ("plugins/test_repository_key.py",),
    f"{NODE}/scratch_disks.py": ("plugins/test_block_devices.py",),
    "gpunode/checks/actions.py": ("checks", "cli/test_cli_outputs.py", "../contract/test_declarations.py"),
    "gpunode/fleet/known_hosts.py": ("fleet/test_fleet_known_hosts.py",),
    "gpunode/judging/saved.py": ("cli/test_cli_writing.py", "cli/test_cli_foreign.py"),
    "gpunode/whole.py": ("cli/test_cli_writing.py", "cli/test_cli_foreign.py"),
}
"""The unit tests that are to notice a change, for each module."""
LEFT_OUT = ("_BitOr", "BitOr_", "RemoveDecorator")
"""Operators that change annotations and models: nearly each of their changes fails at the import."""
LIMIT_S = 240


def cosmic_ray(module: str) -> Any:
    """Import a module of cosmic-ray, which is not among the project's dependencies."""
    return importlib.import_module(f"cosmic_ray.{module}")


def places(module: str) -> dict[tuple[int, int], list[Any]]:
    """Return the possible changes of a module by their position."""
    found: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for item in cosmic_ray("commands.init")._all_work_items([Path(module)], {}):
        (change,) = item.mutations
        if not any(part in change.operator_name for part in LEFT_OUT):
            found[change.start_pos].append(change)
    return found


def survivors(module: str, tests: tuple[str, ...], number: int, seed: str) -> tuple[int, list[str]]:
    """Return how many changes of a module were tried, and the differences of those that its tests did not notice."""
    chance = random.Random(f"{seed} {module}")  # noqa: S311
    possible = sorted(places(module).items())
    python = ROOT / ".venv" / "bin" / "python"
    command = f"{python} -m pytest -x -q -p no:cacheprovider {' '.join(f'tests/unit/{name}' for name in tests)}"
    subprocess.run(command.split(), check=True, timeout=LIMIT_S, capture_output=True)
    unnoticed = []
    chosen = chance.sample(possible, min(number, len(possible)))
    for _, changes in chosen:
        result = cosmic_ray("mutating").mutate_and_test([chance.choice(changes)], command, LIMIT_S)
        if not result.is_killed:
            unnoticed.append(result.diff or "")
    return len(chosen), unnoticed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="parts of their paths (default: all)")
    parser.add_argument("--places", type=int, default=20, help="changes per module (default: 20)")
    parser.add_argument("--seed", default="1", help="another seed chooses other changes")
    parser.add_argument("--at-least", type=int, default=95, metavar="PERCENT")
    options = parser.parse_args()
    tried = missed = 0
    with tempfile.TemporaryDirectory(prefix="gpunode-mutation-") as folder:
        subprocess.run(["git", "worktree", "add", "--detach", folder, "HEAD"], cwd=ROOT, check=True, timeout=120)
        os.chdir(folder)
        # Without compiled modules, a change of the same size and second would not be noticed by Python either.
        os.environ.update(PYTHONPATH=folder, PYTHONDONTWRITEBYTECODE="1")
        try:
            for module, tests in GUARDS.items():
                if options.modules and not any(part in module for part in options.modules):
                    continue
                number, unnoticed = survivors(module, tests, options.places, options.seed)
                tried, missed = tried + number, missed + len(unnoticed)
                print(f"{module}: {number - len(unnoticed)} of {number} changes noticed", flush=True)
                for difference in unnoticed:
                    print(difference, flush=True)
        finally:
            os.chdir(ROOT)
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True, timeout=120)
    noticed = 100 * (tried - missed) / tried if tried else 0
    print(f"{tried - missed} of {tried} changes noticed ({noticed:.0f} %)")
    return 0 if noticed >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
