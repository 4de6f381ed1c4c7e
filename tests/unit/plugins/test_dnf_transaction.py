"""Which packages dnf_transaction picks, and what it leaves alone; signatures, units, and locks that roles share."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import dnf_transaction as module
from ansible_collections.gpunode.node.plugins.module_utils.package_engine import OPTIONS


@dataclass(frozen=True, order=True)
class Package:
    """A package of the sack; ``installed`` or available."""

    name: str
    version: str
    installed: bool = False
    arch: str = "x86_64"

    @property
    def evr(self) -> str:
        return f"{self.version}-1"


class Query:
    """Packages, as a query of dnf has them."""

    def __init__(self, packages: Iterable[Package]) -> None:
        self.packages = tuple(packages)

    def __iter__(self) -> Iterator[Package]:
        return iter(self.packages)

    def __bool__(self) -> bool:
        return bool(self.packages)

    def filter(self, name: str | None = None, version: str | None = None, **_: object) -> "Query":
        return Query(
            package for package in self.packages if name in (None, package.name) and version in (None, package.version)
        )

    def installed(self) -> "Query":
        return Query(package for package in self.packages if package.installed)

    def available(self) -> "Query":
        return Query(package for package in self.packages if not package.installed)


class Base:
    """A base of dnf with these packages; ``done`` are the changes that its solver was given."""

    def __init__(self, *packages: Package) -> None:
        self.conf = SimpleNamespace(arch="x86_64")
        self.sack = SimpleNamespace(query=lambda: Query(packages), evr_cmp=lambda a, b: (a > b) - (a < b))
        self.transaction = SimpleNamespace(install_set=[], remove_set=[])
        self.done: list[str] = []

    def __enter__(self) -> "Base":
        return self

    def __exit__(self, *_: object) -> None: ...

    def package_install(self, package: Package) -> None:
        self.done.append(f"install {package.name} {package.version}")

    def package_remove(self, package: Package) -> None:
        self.done.append(f"remove {package.name} {package.version}")


def question(**parts: Any) -> dict[str, Any]:
    return {**{name: option.get("default") for name, option in OPTIONS.items()}, "simulate": False, **parts}


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have dnf take a name for every package that begins with it."""

    def subject(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            get_best_query=lambda sack: Query(
                package for package in sack.query() if package.name.startswith(name.rstrip("*"))
            )
        )

    monkeypatch.setattr(module, "dnf", SimpleNamespace(subject=SimpleNamespace(Subject=subject)))


@pytest.mark.usefixtures("subjects")
def test_a_name_that_several_packages_answer_to_is_refused() -> None:
    base = Base(
        Package("perl", "5"), Package("perl-doc", "5"), Package("vim-enhanced", "8"), Package("vim-enhanced", "9")
    )
    with pytest.raises(module.TransactionRefusedError, match=r"per\* may be perl, perl-doc"):
        module.best_of(base, "per*")
    assert module.best_of(base, "perl").name == "perl"
    assert module.best_of(base, "vim") == Package("vim-enhanced", "9")
    assert module.best_of(Base(Package("perl-doc", "5", installed=True), Package("perl", "5")), "per*") is None


def test_of_the_closure_what_is_not_installed_does_not_come() -> None:
    base = Base(
        *(Package(name, "2") for name in ("driver", "library", "tool")),
        *(Package(name, "1", installed=True) for name in ("library", "old")),
    )
    module.mark(base, question(bound=["driver"], closure=["library", "old", "tool"]), "2")
    assert sorted(base.done) == ["install driver 2", "install library 2", "remove old 1"]


def test_a_bound_package_with_a_pattern_is_refused() -> None:
    base = Base(Package("driver", "2"))
    assert module.release_for(base, question(bound=["driver"]))[0] == "2"
    with pytest.raises(module.TransactionRefusedError, match="driver=1"):
        module.release_for(base, question(bound=["driver=1-*"]))


def test_the_record_of_a_failed_transaction_has_what_it_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "packages-before"

    def fails() -> None:
        assert record.read_text(encoding="utf-8").split("\n")[1:3] == ["half", "not"]
        raise OSError("a script of half failed")

    base = Base(Package("bash", "5", installed=True))
    base.transaction = SimpleNamespace(remove_set=[])
    monkeypatch.setattr(base, "do_transaction", fails, raising=False)
    monkeypatch.setattr(module, "configured", lambda *_: base)
    answer: dict[str, Any] = {"install": {"half": "1", "not": "1"}, "remove": [], "stream": None}
    monkeypatch.setattr(module, "resolved", lambda *_: answer)
    monkeypatch.setattr(module, "fetch", lambda _: None)
    monkeypatch.setattr(
        module, "dnf", SimpleNamespace(exceptions=SimpleNamespace(TransactionCheckError=KeyError, Error=OSError))
    )
    monkeypatch.setattr(module.dnf_state, "packages", lambda: {"installed": {"bash": "5", "half": "1"}})
    assert module.carried_out(question(memory=str(record)))["error"] == "a script of half failed"
    assert record.read_text(encoding="utf-8").split("\n")[1:] == ["half", ""]


def test_what_an_earlier_role_would_have_done_is_not_announced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Base(Package("old", "1", installed=True))
    base.transaction = SimpleNamespace(
        install_set=[Package("library", "2"), Package("tool", "1")], remove_set=[Package("old", "1")]
    )
    monkeypatch.setattr(base, "resolve", lambda **_: None, raising=False)
    for name, value in (("going_of", ["old"]), ("orphans", []), ("streams", None), ("elsewhere", {}), ("mark", None)):
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    monkeypatch.setattr(module, "release_for", lambda *_: (None, {}, []))
    first = module.resolved(base, question())
    assert (first["install"], first["remove"]) == ({"library": "2-1", "tool": "1-1"}, ["old"])
    planned = {"packages": {"library": "2-1", "tool": "0-1"}, "purge": ["old"]}
    then = module.resolved(base, question(planned=planned))
    assert (then["install"], then["remove"]) == ({"tool": "1-1"}, [])


@pytest.mark.parametrize("coming", [{"library": "2-1"}, {}], ids=["packages", "nothing to fetch"])
@pytest.mark.parametrize("only", [True, False])
def test_a_download_leaves_the_locks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coming: dict[str, str], only: bool
) -> None:
    locks = tmp_path / "versionlock.list"
    locks.write_text("bash-5.*\n", encoding="utf-8")
    monkeypatch.setattr(module, "LOCKLIST", str(locks))
    base = Base(Package("library", "1", installed=True))
    monkeypatch.setattr(base, "do_transaction", lambda: None, raising=False)
    monkeypatch.setattr(module, "configured", lambda *_: base)
    monkeypatch.setattr(module, "resolved", lambda *_: {"install": coming, "remove": [], "stream": None})
    monkeypatch.setattr(module, "fetch", lambda base: base.done.append("fetched"))
    monkeypatch.setattr(
        module, "dnf", SimpleNamespace(exceptions=SimpleNamespace(TransactionCheckError=OSError, Error=OSError))
    )
    module.carried_out(question(hold=["library"], drop_locks=["bash-5.*"], download_only=only))
    assert base.done == (["fetched"] if coming else [])
    assert (locks.read_text(encoding="utf-8") == "bash-5.*\n") is only


class Exceptions:
    class Error(Exception):
        """As dnf.exceptions has it."""


class OtherKey:
    """dnf where the repository's key is not the one that signed; its words are those of dnf 4 on such a node."""

    def __init__(self) -> None:
        self.transaction = SimpleNamespace(install_set=["nvidia-persistenced-3:580.95.05-1.el9.x86_64"])

    def download_packages(self, packages: list[str]) -> None:
        assert packages

    def package_signature_check(self, package: str) -> tuple[int, str]:
        return 1, f"Public key for {package}.rpm is not installed"

    def package_import_key(self, package: str) -> None:
        raise Exceptions.Error(
            f"Public key for {package}.rpm is not installed. Failing package is: {package}\n GPG Keys"
        )


def test_a_package_of_another_key_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "dnf", SimpleNamespace(exceptions=Exceptions))
    with pytest.raises(
        module.TransactionRefusedError, match=r"^repository-unsigned: .*Public key for nvidia-persistenced"
    ) as caught:
        module.fetch(OtherKey())
    assert "\n" not in str(caught.value)


def test_a_unit_of_a_removed_package_is_stopped_and_not_left_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "usr/lib/systemd/system"
    enabled = tmp_path / "multi-user.target.wants"
    for folder in (shipped, enabled):
        folder.mkdir(parents=True)
    (shipped / "kept.service").write_text("", encoding="utf-8")
    for name in ("gone.service", "kept.service", "foreign.service"):
        (enabled / name).symlink_to(shipped / name)
    ran: list[list[str]] = []
    monkeypatch.setattr(module, "run", lambda argv, _limit_s: ran.append(argv))
    package = SimpleNamespace(files=[str(shipped / "gone.service"), str(shipped / "kept.service"), "/usr/bin/tool"])
    module.end_units(module.units_of([package]), str(tmp_path))
    assert sorted(link.name for link in enabled.iterdir()) == ["foreign.service", "kept.service"]
    assert ran == [["systemctl", "stop", "gone.service"], ["systemctl", "daemon-reload"]]


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
    simulated = module.change_locks(str(path), CUDA, **arguments, write=False)
    answer: tuple[list[str], list[str]] = module.change_locks(str(path), CUDA, **arguments, write=True)
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
    with pytest.raises(module.TransactionRefusedError, match="restore these marks"):
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
    lines = module.lines_of_holds(base, {"hold": ["nccl*"], "state": "present"}, answer)
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
    assert module.lines_of_holds(base, {"state": "absent", **question}, answer) == lines
