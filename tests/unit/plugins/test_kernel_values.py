"""Values of the running kernel, in a folder of the test: set, recorded once, and put back."""

import json
from pathlib import Path

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import kernel_state
from ansible_collections.gpunode.node.plugins.module_utils.kernel_state import KernelChangeRefusedError

SWAP, RMEM, THP = (
    "/proc/sys/vm/swappiness",
    "/proc/sys/net/ipv4/tcp_rmem",
    "/sys/kernel/mm/transparent_hugepage/enabled",
)
MEMORY = "/var/lib/gpunode/before.json"


@pytest.fixture
def root(tmp_path: Path) -> str:
    for path, text in ((SWAP, "60\n"), (RMEM, "4096\t131072\t6291456\n"), (THP, "always [madvise] never\n")):
        file = tmp_path / path[1:]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return str(tmp_path)


def value(root: str, path: str) -> str | None:
    text: str | None = kernel_state.value_of(path, root)
    return text


def bring(root: str, check: bool = False, **requested: str) -> tuple[list[str], list[str]]:
    names = {"swap": SWAP, "rmem": RMEM}
    diffs, problems = kernel_state.applied(
        {names.get(name, f"/proc/sys/vm/{name}"): text for name, text in requested.items()},
        MEMORY,
        check=check,
        root=root,
    )
    return [diff["path"] for diff in diffs], problems


def test_values_are_read_as_words(root: str) -> None:
    assert value(root, RMEM) == "4096 131072 6291456"
    assert value(root, THP) == "madvise"
    assert value(root, "/proc/sys/vm/none") is None


def test_old_values_are_recorded_once_and_come_back(root: str) -> None:
    assert bring(root, swap="10", rmem="4096 131072 9") == ([SWAP, RMEM], [])
    assert bring(root, swap="10", rmem="4096 131072 9") == ([], [])
    assert bring(root, swap="1", rmem="4096 131072 9") == ([SWAP], [])
    before = json.loads((Path(root) / MEMORY[1:]).read_text(encoding="utf-8"))
    assert before == {SWAP: "60", RMEM: "4096 131072 6291456"}
    # A setting that is no longer requested is restored, and its record is removed.
    assert bring(root, swap="1") == ([RMEM], [])
    assert value(root, RMEM) == "4096 131072 6291456"
    assert bring(root) == ([SWAP], [])
    assert value(root, SWAP) == "60"
    assert not (Path(root) / MEMORY[1:]).exists()
    assert bring(root) == ([], [])


def test_check_mode_reports_and_changes_nothing(root: str) -> None:
    assert bring(root, True, swap="10") == ([SWAP], [])
    assert value(root, SWAP) == "60"
    assert not (Path(root) / MEMORY[1:]).exists()


def test_an_unknown_setting_is_named_and_the_others_are_set(root: str) -> None:
    changed, problems = bring(root, nothing="1", swap="10")
    assert changed == [SWAP]
    assert problems == ["/proc/sys/vm/nothing: the kernel has no such setting"]


def test_a_value_that_the_kernel_changes_is_reported(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_state, "put", lambda path, value, _root: f"{path}: the kernel refuses {value}")
    changed, problems = bring(root, swap="999")
    assert changed == []
    assert problems == [f"{SWAP}: the kernel refuses 999"]


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/sys/../../etc/passwd", "/sys/bus/pci/rescan", "proc/sys/vm/x"])
def test_other_files_are_refused(root: str, path: str) -> None:
    with pytest.raises(KernelChangeRefusedError, match="is not a kernel setting"):
        kernel_state.applied({path: "1"}, MEMORY, check=False, root=root)


@pytest.mark.parametrize("text", ["[1]", "{", '{"/etc/passwd": "x"}'])
def test_an_invalid_record_is_refused(root: str, text: str) -> None:
    record = Path(root) / MEMORY[1:]
    record.parent.mkdir(parents=True)
    record.write_text(text, encoding="utf-8")
    with pytest.raises(KernelChangeRefusedError, match=r"before\.json"):
        bring(root, swap="10")
