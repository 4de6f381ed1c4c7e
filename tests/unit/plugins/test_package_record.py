"""The record of a role's packages: what its transactions installed, and nothing that others did before or since."""

import os
import random
from pathlib import Path

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import package_record
from ansible_collections.gpunode.node.plugins.module_utils.package_record import MARK, note, owned, settle
from effort import effort
from node_samples import node

from gpunode.provisioning.transaction import MARK as RECORDED
from gpunode.provisioning.transaction import installed_by_role

NAMES = [f"package{number}" for number in range(8)]


def test_the_plan_and_the_node_read_the_same_mark() -> None:
    assert RECORDED == MARK


def test_what_a_role_owns_is_what_it_installed_and_nobody_removed_since(tmp_path: Path) -> None:
    """The role, other people and failing transactions install and remove packages in any order."""
    rng = random.Random(4)  # noqa: S311
    for number in range(effort(100, 5000)):
        record = tmp_path / f"record{number}"
        owner: dict[str, str] = {name: "others" for name in NAMES if rng.random() < 0.3}
        for _ in range(rng.randint(1, 12)):
            name = rng.choice(NAMES)
            match rng.choice(["role", "role", "others", "removed", "failed"]):
                case "role" if name not in owner:
                    settle(str(record), owner)
                    note(str(record), [name])
                    owner[name] = "role"
                    settle(str(record), owner)
                case "failed" if name not in owner:
                    note(str(record), [name])
                    settle(str(record), owner)
                case "others":
                    owner.setdefault(name, "others")
                case "removed":
                    owner.pop(name, None)
                    settle(str(record), owner)
        expected = {name for name, by in owner.items() if by == "role"}
        assert owned(str(record), owner, lambda _: 0.0) == expected
        if record.exists():
            state = node(dict.fromkeys(owner, "1"), texts={str(record): record.read_text()})
            installed = installed_by_role(state, str(record))
            assert installed & set(NAMES) == expected


def test_an_old_record_gives_up_what_changed_after_the_first_transaction(tmp_path: Path) -> None:
    """It lists what was there before; what came later may be of others."""
    record = tmp_path / "packages-before"
    record.write_text("bash\nlibc6\n")
    os.utime(record, (1000, 1000))
    times = {"bash": 10.0, "fio": 1000.0 + 60, "mdadm": 1000.0 + 86_400, "unknown": None}
    assert owned(str(record), times, times.get) == {"fio", "unknown"}
    note(str(record), ["strace"])
    assert record.read_text() == f"bash\nlibc6\n{MARK}\nstrace\n"
    assert record.stat().st_mtime == 1000
    times |= {"strace": 1000.0 + 90_000}
    assert owned(str(record), times, times.get) == {"fio", "unknown", "strace"}
    settle(str(record), {"bash"})
    assert owned(str(record), times, times.get) == {"fio", "unknown"}


@pytest.mark.parametrize("path", [None, "/nonexistent/record"])
def test_without_a_record_nothing_is_owned(path: str | None) -> None:
    assert owned(path, NAMES, lambda _: None) == set()
    settle(path, NAMES)
    assert package_record.lists("") == ([], [])
