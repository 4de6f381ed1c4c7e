"""Which packages dnf_transaction picks, and what it leaves alone, with a sack of the test in place of dnf's."""

from collections.abc import Iterable, Iterator
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
