"""The list of dnf's versionlock that several roles share: each writes its own part, where it is."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import dnf_transaction

CUDA, DCGM = "gpunode (role cuda)", "gpunode (role dcgm)"
LIST = (
    f"bash-5.*\n# BEGIN {CUDA}\na-0:1-1.*\nb-0:1-1.*\n# END {CUDA}\n# BEGIN {DCGM}\nd-0:1-1.*\n# END {DCGM}\nzsh-5.*\n"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "versionlock.list"
    file.write_text(LIST, encoding="utf-8")
    return file


def written(path: Path, **question: Any) -> tuple[list[str], list[str]]:
    """Write a role's part; the lines that came, and those that went."""
    arguments = {"drop_locks": [], **question}
    simulated = dnf_transaction.change_locks(str(path), CUDA, **arguments, write=False)
    answer: tuple[list[str], list[str]] = dnf_transaction.change_locks(str(path), CUDA, **arguments, write=True)
    assert answer == simulated
    return answer


def test_a_part_that_changes_stays_where_it_is(path: Path) -> None:
    assert written(path, lock=["a-0:1-1.*"]) == ([], ["b-0:1-1.*"])
    assert path.read_text(encoding="utf-8") == LIST.replace("b-0:1-1.*\n", "")
    assert written(path, lock=["a-0:1-1.*", "b-0:1-1.*"]) == (["b-0:1-1.*"], [])
    assert path.read_text(encoding="utf-8") == LIST


def test_a_part_that_goes_leaves_those_of_others(path: Path) -> None:
    assert written(path, lock=[]) == ([], ["a-0:1-1.*", "b-0:1-1.*"])
    assert path.read_text(encoding="utf-8") == f"bash-5.*\n# BEGIN {DCGM}\nd-0:1-1.*\n# END {DCGM}\nzsh-5.*\n"
    assert written(path, lock=None) == ([], [])
    assert written(path, lock=None, drop_locks=["zsh-5.*"]) == ([], ["zsh-5.*"])
    assert path.read_text(encoding="utf-8") == f"bash-5.*\n# BEGIN {DCGM}\nd-0:1-1.*\n# END {DCGM}\n"


def test_lines_of_others_can_go_while_the_own_part_stays(path: Path) -> None:
    assert written(path, lock=None, drop_locks=["bash-5.*"]) == ([], ["bash-5.*"])
    assert path.read_text(encoding="utf-8") == LIST.replace("bash-5.*\n", "")


@pytest.mark.parametrize("lost", [f"# END {CUDA}\n", f"# BEGIN {CUDA}\n"])
def test_a_part_that_lost_a_mark_is_refused_and_no_line_is_lost(path: Path, lost: str) -> None:
    damaged = LIST.replace(lost, "")
    path.write_text(damaged, encoding="utf-8")
    with pytest.raises(dnf_transaction.TransactionRefusedError, match="restore these marks"):
        written(path, lock=["a-0:2-1.*"])
    assert path.read_text(encoding="utf-8") == damaged


def test_a_list_that_is_not_text_is_refused(path: Path) -> None:
    path.write_bytes(b"caf\xe9-5.*\n")
    with pytest.raises(OSError, match="is not UTF-8 text"):
        written(path, lock=["a-0:2-1.*"])
    assert path.read_bytes() == b"caf\xe9-5.*\n"


def test_the_first_part_makes_the_list(tmp_path: Path) -> None:
    path = tmp_path / "plugins" / "versionlock.list"
    assert written(path, lock=["a-0:1-1.*"]) == (["a-0:1-1.*"], [])
    assert path.read_text(encoding="utf-8") == f"# BEGIN {CUDA}\na-0:1-1.*\n# END {CUDA}\n"


class Sack:
    """Installed packages, as dnf's sack answers for them."""

    def __init__(self, installed: Mapping[str, str]) -> None:
        self.rows = [SimpleNamespace(name=name, evr=evr) for name, evr in installed.items()]

    def query(self) -> "Sack":
        return self

    def installed(self) -> list[SimpleNamespace]:
        return self.rows


def test_what_is_held_is_locked_as_it_is_when_the_transaction_is_done() -> None:
    base = SimpleNamespace(sack=Sack({"nccl": "2.29-1", "nccl-devel": "2.29-1", "bash": "5-1", "nccl-old": "1-1"}))
    answer = {"install": {"nccl": "1:2.30-1"}, "remove": ["nccl-old"]}
    lines = dnf_transaction.lines_of_holds(base, {"hold": ["nccl*"], "state": "present"}, answer)
    assert lines == ["nccl-1:2.30-1.*", "nccl-devel-0:2.29-1.*"]


@pytest.mark.parametrize(
    ("question", "lines"),
    [
        ({"lock_mark": CUDA, "hold": []}, []),
        ({"lock_mark": "gpunode", "hold": ["a"]}, []),
        ({"lock_mark": "gpunode", "hold": []}, None),
    ],
    ids=["own section", "shared section, asked for", "shared section"],
)
def test_a_removal_leaves_the_section_that_callers_share(question: dict[str, Any], lines: list[str] | None) -> None:
    base = SimpleNamespace(sack=Sack({}))
    answer: dict[str, Any] = {"install": {}, "remove": ["b"]}
    assert dnf_transaction.lines_of_holds(base, {"state": "absent", **question}, answer) == lines
