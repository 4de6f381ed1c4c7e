"""The transaction of apt, with apt's and dpkg's answers in place of them."""

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from apt_scripts import load

DATABASE = {
    "libcuda1": "580.95.05-1 installed hold",
    "nvidia-kernel-open-dkms": "580.95.05-1 installed hold",
    "libc6": "2.36-9 installed install",
    "libnccl2": "2.27.3-1+cuda12.9 installed install",
    "half": "1.0-1 half-configured install",
    "gone": "1.0-1 config-files deinstall",
}


@pytest.fixture
def script() -> Any:
    return load("apt_transaction")


class Machine:
    """Answers commands; ``simulation`` is the output of a simulated apt-get."""

    def __init__(self, simulation: str = "", madison: str = "", autoremove: str = "") -> None:
        self.simulation, self.madison, self.autoremove = simulation, madison, autoremove
        self.ran: list[list[str]] = []
        self.refused: list[str] = []
        """The messages of apt-get update about sources."""
        self.targets, self.no_download = "", False
        self.error: type[Exception] = RuntimeError

    def output_of(self, argv: list[str], limit_s: int = 0) -> str:  # noqa: ARG002
        if argv[0] == "dpkg-query":
            rows = (f"{name} {rest}".split() for name, rest in DATABASE.items())
            return "".join("\t".join(row) + "\n" for row in rows)
        if "madison" in argv:
            return "".join(f"{line}\n" for line in self.madison.splitlines() if line.split(" | ")[0] in argv)
        if "indextargets" in argv:
            return self.targets
        if "--simulate" in argv:
            if "autoremove" in argv:
                return self.autoremove if argv[-1] != "autoremove" else ""
            return self.simulation
        if "--download-only" in argv:
            if self.no_download:
                raise self.error("E: Failed to fetch")
            return ""
        self.ran.append(argv)
        return ""

    @property
    def changes(self) -> list[list[str]]:
        return [argv for argv in self.ran if "update" not in argv]


def question(**parts: Any) -> dict[str, Any]:
    return {
        "state": "present",
        "install": [],
        "remove": [],
        "remove_new": [],
        "never": [],
        "restore": [],
        "hold": [],
        "memory": None,
        "simulate": False,
        "files": {},
        "planned": {},
        "bound": [],
        "unhold": [],
        "closure": [],
        "optional": [],
        "alternatives": {},
        "expendable": [],
        "download_only": False,
        "lock_wait_s": 1,
        "limit_s": 1,
        **parts,
    }


def asked(script: Any, machine: Machine, **parts: Any) -> dict[str, Any]:
    machine.error = script.AptError
    script.output_of = machine.output_of
    script.carried_out = machine.output_of
    script.captured = lambda argv, *_: (0, machine.output_of(argv), "".join(machine.refused))
    output: dict[str, Any] = script.answer(question(**parts))
    return output


@pytest.fixture(autouse=True)
def no_policy(script: Any, tmp_path: Path) -> None:
    for name in ("POLICY", "JOURNAL", "DPKG_UPDATES"):
        setattr(script, name, tmp_path / name)


def test_what_fits_is_left_alone_and_apt_is_not_asked(script: Any) -> None:
    machine = Machine(simulation="Inst libnccl2 [2.27.3-1+cuda12.9] (2.30.7-1+cuda12.9 NVIDIA [amd64])")
    output = asked(script, machine, install=["libnccl2=2.27.3-*+cuda12.9", "libc6"])
    assert (output["install"], output["remove"], machine.ran) == ({}, [], [])


@pytest.mark.parametrize("fails", [False, True])
def test_a_missing_package_comes_with_what_it_needs_and_is_held(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    lines = "Inst libnccl-dev (2.27.3-1+cuda12.9 NVIDIA [amd64])\nInst zlib1g (1.2 Debian [amd64])\nConf zlib1g (1.2)"
    memory = tmp_path / "state" / "packages-before"
    installed = dict(DATABASE)
    monkeypatch.setitem(globals(), "DATABASE", installed)

    class Apt(Machine):
        """It installs what it announced, or only the first package."""

        def output_of(self, argv: list[str], limit_s: int = 0) -> str:
            if "-y" in argv or ("--assume-yes" in argv and not {"--simulate", "--download-only"} & {*argv}):
                recorded = memory.read_text(encoding="utf-8").split()
                assert {"libnccl-dev", "zlib1g"} <= {*recorded}, "written before the transaction: it may be killed"
                installed["libnccl-dev"] = "2.27.3-1+cuda12.9 installed install"
                if fails:
                    raise script.AptError("no space left")
                installed["zlib1g"] = "1.2 installed install"
            return super().output_of(argv, limit_s)

    machine = Apt(lines, "libnccl-dev | 2.27.3-1+cuda12.9 | http://vendor")
    output = asked(script, machine, install=["libnccl-dev=2.27.3-*"], hold=["libnccl*"], memory=str(memory))
    added = memory.read_text(encoding="utf-8").split("\n", 1)[1].split()
    assert added == ["libnccl-dev", *([] if fails else ["zlib1g"])], "what is installed now and was not before"
    if fails:
        return
    assert output["install"] == {"libnccl-dev": "2.27.3-1+cuda12.9", "zlib1g": "1.2"}
    assert output["hold"] == ["libnccl-dev", "libnccl2"]
    assert machine.changes[-1] == ["apt-mark", "hold", "libnccl-dev", "libnccl2"]  # of those that are there by then


def test_a_download_changes_nothing_else(script: Any, tmp_path: Path) -> None:
    downloads: list[list[str]] = []

    class Apt(Machine):
        def output_of(self, argv: list[str], limit_s: int = 0) -> str:
            downloads.extend([argv] if "--download-only" in argv else [])
            return super().output_of(argv, limit_s)

    simulation = "Inst libcuda1 [580.95.05-1] (580.178.04-1 NVIDIA [amd64])\nRemv libnccl2 [2.27.3-1+cuda12.9]"
    machine = Apt(simulation, "libcuda1 | 580.178.04-1 | http://vendor")
    parts = {"install": ["libcuda1=580.178*"], "remove": ["libnccl2"], "hold": ["libc*"], "unhold": ["libcuda1"]}
    output = asked(script, machine, **parts, download_only=True)
    assert output["install"] == {"libcuda1": "580.178.04-1"}
    assert (output["remove"], output["hold"], output["unhold"], output["finished"]) == ([], [], [], [])
    assert len(downloads) == 1
    assert machine.changes == []
    assert not script.JOURNAL.exists()
    machine.no_download = True
    with pytest.raises(script.AptError, match="Failed to fetch"):
        asked(script, machine, **parts, download_only=True)


def test_what_others_installed_or_need_stays(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Months after the role, another team installed libnccl2, and something that depends on libc6 of the role."""

    class Apt(Machine):
        def output_of(self, argv: list[str], limit_s: int = 0) -> str:
            if "--simulate" not in argv or "remove" not in argv:
                return super().output_of(argv, limit_s)
            names = {*argv[argv.index("remove") + 1 :]}
            return "".join(
                f"Purg {name} [1]\n" for name in sorted(names | ({"libcuda1"} if "libc6" in names else set()))
            )

    memory = tmp_path / "packages-before"
    memory.write_text("# installed by gpunode\nhalf\nlibc6\n", encoding="utf-8")
    parts = {"state": "absent", "memory": str(memory), "remove_new": ["libnccl2", "libc6", "half"]}
    assert asked(script, Apt(), **parts)["remove"] == ["half"]
    # An old record does not know who installed it; it was not there before, and has not changed since.
    memory.write_text("libc6\nhalf\nlibcuda1\n", encoding="utf-8")
    info = tmp_path / "info"
    info.mkdir()
    monkeypatch.setattr(script, "DPKG_INFO", info)
    later = info / "libnccl2.list"
    later.touch()
    os.utime(memory, (1000, 1000))
    assert asked(script, Apt(), **parts)["remove"] == []
    os.utime(later, (1000, 1000 + 60))
    assert asked(script, Apt(), **parts)["remove"] == ["libnccl2"]


def test_dpkg_itself_names_edited_configuration_and_times(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two packages that a real dpkg installed into a database of the test."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("no dpkg on this machine")
    database = tmp_path / "admin"
    for name in ("info", "updates", "triggers"):
        (database / name).mkdir(parents=True)
    (database / "status").touch()
    for name in ("gone", "plain", "tuned"):
        tree = tmp_path / name
        conf = tree / str(tmp_path).lstrip("/") / f"{name}.conf"
        conf.parent.mkdir(parents=True)
        conf.write_text(f"{name}\n")
        (tree / "DEBIAN").mkdir()
        control = f"Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: x <x@y>\nDescription: x\n"
        (tree / "DEBIAN/control").write_text(control)
        (tree / "DEBIAN/conffiles").write_text(f"{tmp_path}/{name}.conf\n")
        for argv in (
            ["dpkg-deb", "--build", "--root-owner-group", tree, f"{tree}.deb"],
            ["dpkg", f"--admindir={database}", "--force-not-root,bad-path", "--install", f"{tree}.deb"],
        ):
            done = subprocess.run([str(word) for word in argv], check=False, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
    (tmp_path / "tuned.conf").write_text("mine\n")
    (tmp_path / "gone.conf").unlink()
    monkeypatch.setenv("DPKG_ADMINDIR", str(database))
    monkeypatch.setattr(script, "DPKG_INFO", database / "info")
    assert script.edited({"gone", "plain", "tuned"}) == {"tuned"}
    (tmp_path / "plain.conf").unlink()
    (tmp_path / "plain.conf").mkdir()
    assert script.edited({"gone", "plain", "tuned"}) == {"plain", "tuned"}, "what is not a file was changed"
    assert time.time() - 600 < (script.changed_at("plain") or 0) < time.time() + 1
    assert script.changed_at("never") is None


def test_edited_configuration_outlives_its_package(script: Any, tmp_path: Path) -> None:
    edited, plain = tmp_path / "nftables.conf", tmp_path / "other.conf"
    edited.write_text("mine\n")
    plain.write_text("theirs\n")
    digest = hashlib.md5(plain.read_bytes()).hexdigest()  # noqa: S324

    class Apt(Machine):
        def output_of(self, argv: list[str], limit_s: int = 0) -> str:
            if argv[0] == "dpkg-query" and "Conffiles" in argv[3]:
                rows = {"libnccl2": f" {edited} {digest}\n", "libcuda1": f" {plain} {digest} obsolete\n"}
                return "".join(f"{name}\n{rows.get(name, '')}\n" for name in argv[4:])
            return super().output_of(argv, limit_s)

    machine = Apt("Remv libnccl2 [1]\nRemv libcuda1 [1]")
    output = asked(script, machine, state="absent", remove=["libnccl2", "libcuda1"])
    assert output["remove"] == ["libcuda1", "libnccl2"]
    first, second = machine.changes
    assert (first[-3:], "--purge" in first) == (["remove", "libcuda1", "libnccl2"], False)
    assert second[-3:] == ["--purge", "remove", "libcuda1"]


def test_a_half_configured_package_is_not_there(script: Any) -> None:
    machine = Machine("Inst half [1.0-1] (1.0-1 Debian [amd64])", "half | 1.0-1 | http://vendor")
    assert asked(script, machine, install=["half"])["install"] == {"half": "1.0-1"}


def test_what_a_run_that_was_cut_short_left_is_finished_first(script: Any) -> None:
    script.JOURNAL.write_text("half\n")
    machine = Machine()
    output = asked(script, machine)
    assert output["finished"] == ["half"]
    assert machine.changes == [["dpkg", "--configure", "--pending", "--force-confdef", "--force-confold"]]
    assert not script.JOURNAL.exists()
    assert asked(script, Machine())["finished"] == []


def test_what_others_left_half_done_is_finished_only_where_apt_stops_for_it(script: Any) -> None:
    assert asked(script, Machine())["finished"] == []
    script.DPKG_UPDATES.mkdir()
    (script.DPKG_UPDATES / "0001").touch()
    assert asked(script, Machine())["finished"] == ["half"]


def test_a_transaction_that_breaks_off_leaves_its_journal(script: Any) -> None:
    machine = Machine("Inst libnccl-dev (1 NVIDIA [amd64])", "libnccl-dev | 1 | x")

    def broken(argv: list[str], *_: Any) -> str:
        raise script.AptError(f"E: {argv[0]} was stopped")

    machine.error = script.AptError
    script.output_of = machine.output_of
    script.captured = lambda argv, *_: (0, machine.output_of(argv), "")
    script.carried_out = broken
    output = script.answered(question(install=["libnccl-dev"]))
    assert "interrupted" in output["error"]
    assert script.JOURNAL.read_text() == "libnccl-dev\n"
    assert not script.POLICY.exists()


def test_a_failed_transaction_comes_with_the_errors_of_the_newest_compilation(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "MAKE_LOGS", f"{tmp_path}/*/make.log")
    monkeypatch.setattr(script.time, "time", lambda: 2000.0)
    lines = ["CC a.o", f"a.c:1: error: {'x' * 300}", "1", "2", "3", "4", "make: *** [a.o] Error 1"]
    for name, text, when in (("old", "old error: 1", 1999), ("new", "\n".join(lines), 2001), ("first", "", 2000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "make.log").write_text(text)
        os.utime(tmp_path / name / "make.log", (when, when))
    failed = question(install=["requested"])
    script.output_of = Machine().output_of
    script.captured = lambda *_: (0, "", "")
    output = script.answered(failed)
    assert "do not have requested" in output["error"]
    assert output["log"] == [lines[1][:200], "1", "2", "3", lines[6]]
    monkeypatch.setattr(script, "lay_over", lambda *_: None)
    assert "log" not in script.answered({**failed, "simulate": True})
    assert "log" not in script.answered(question())
    (tmp_path / "new" / "make.log").write_text("an error: 1\n" * 30)
    os.utime(tmp_path / "new" / "make.log", (2000, 2000))
    (tmp_path / "first" / "make.log").unlink()
    assert len(script.compiler_log(2000)) == 20
    assert script.compiler_log(2000.5) == []


def test_the_journal_gets_its_folder_and_replaces_the_one_before(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "state" / "gpunode" / "transaction"
    script.JOURNAL = path
    assert script.names_left() == []
    for names in ({"b", "a"}, {"c"}):
        script.write_names(path, names)
        assert script.names_left() == sorted(names)
    assert [file.name for file in path.parent.iterdir()] == ["transaction"]


@pytest.mark.parametrize(
    ("state", "simulate", "over"),
    [("present", False, ["own"]), ("absent", False, ["own"]), ("absent", True, []), ("present", True, None)],
)
def test_apt_on_the_node_itself_passes_over_damaged_files(
    script: Any, state: str, simulate: bool, over: list[str] | None
) -> None:
    """A simulation of an installation has a whole private folder instead; one of a removal plans no files."""
    seen: list[list[str]] = []

    @contextmanager
    def passing_over_damaged(preferences: dict[str, str]) -> Iterator[None]:
        seen.append([Path(path).name for path in preferences])
        yield

    script.passing_over_damaged = passing_over_damaged
    files = {"/etc/apt/preferences.d/own": "Package: x\n", "/etc/apt/sources.list.d/own.list": "deb x\n"}
    with script.apt_as_it_will_be(question(state=state, simulate=simulate, files=files)):
        assert seen == ([] if over is None else [over])


def test_bound_packages_come_at_the_exact_versions_of_their_preview(script: Any) -> None:
    seen: list[dict[str, str]] = []

    @contextmanager
    def passing_over_damaged(preferences: dict[str, str]) -> Iterator[None]:
        seen.append(preferences)
        yield

    solution = {"target": "580.2", "exact": ["a=580.2-1"], "install": {"a": "580.2-1"}, "remove": ["half"]}
    script.passing_over_damaged = passing_over_damaged
    script.resolved = lambda *_: dict(solution)
    machine = Machine("Inst a (580.2-1 NVIDIA [amd64])\nRemv half [1.0-1]", "a | 580.2-1 | http://vendor")
    path = "/etc/apt/preferences.d/own"
    parts: dict[str, Any] = {
        "bound": ["a=@RELEASE@-*"],
        "closure": ["half"],
        "files": {path: "Pin: version @RELEASE@-*\n"},
    }
    preview = asked(script, machine, **parts, simulate=True)
    assert {key: preview[key] for key in solution} == solution
    assert machine.changes == []
    done = asked(script, machine, **parts)
    assert (done["install"], done["remove"]) == (preview["install"], preview["remove"])
    (argv,) = [argv for argv in machine.changes if "install" in argv]
    assert argv[-2:] == ["a=580.2-1", "half-"]
    assert seen == [{path: "Pin: version 580.2-*\n"}]


def test_a_full_disk_leaves_no_part_of_the_policy(script: Any) -> None:
    """An empty policy-rc.d counts as one of the administrator: later transactions would start services."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        with pytest.raises(OSError, match="too large"), script.services_left_alone():
            raise AssertionError
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not script.POLICY.exists()
    with script.services_left_alone():
        assert script.policy_is_ours()
        assert script.POLICY.stat().st_mode & 0o777 == 0o755
    assert not script.POLICY.exists()


@pytest.mark.parametrize(
    ("install", "remove", "parts", "words"),
    [
        ({}, ["libc6"], {}, "would have to remove libc6"),
        ({}, ["libcuda1"], {}, "would have to remove libcuda1"),
        ({"libcuda1": "2-1"}, [], {}, "libcuda1 is held at 580.95.05-1"),
        ({"libnccl2": "2-1"}, [], {"never": ["libnccl*"]}, "would also touch libnccl2"),
        ({}, ["libc6"], {"expendable": ["libc6"]}, ""),
        ({}, ["libc6:i386"], {"remove": ["libc*"]}, ""),
        ({}, ["libcuda1"], {"closure": ["libcuda1"]}, ""),
        ({"libcuda1": "2-1"}, [], {"alternatives": {"a": ["libcuda1"]}}, ""),
        ({"libcuda1": "2-1"}, [], {"expendable": ["*"]}, ""),
    ],
)
def test_a_bound_transaction_is_refused_before_it_begins_and_in_its_preview(
    script: Any, install: dict[str, str], remove: list[str], parts: dict[str, Any], words: str
) -> None:
    solution = {"target": "2", "exact": ["a=2-1"], "install": {"a": "2-1", **install}, "remove": remove}
    script.resolved = lambda *_: dict(solution)
    machine = Machine()
    asks = {"bound": ["a=@RELEASE@-*"], "simulate": True, **parts}
    if not words:
        assert asked(script, machine, **asks)["remove"] == remove
        return
    for simulate in (True, False):
        with pytest.raises(script.AptError, match=words):
            asked(script, machine, **{**asks, "simulate": simulate})
    assert machine.changes == []


def test_the_preview_of_a_bound_transaction_reports_its_holds(script: Any) -> None:
    solution = {"target": "2", "exact": ["a=2-1"], "install": {"a": "2-1"}, "remove": ["libnccl2"]}
    script.resolved = lambda *_: dict(solution)
    machine = Machine("Inst a (2-1 x [amd64])\nRemv libnccl2 [1]", "a | 2-1 | x")
    parts = {"bound": ["a"], "closure": ["libnccl2"], "hold": ["a", "libc*", "libnccl2"], "unhold": ["libcuda1", "x"]}
    preview = asked(script, machine, **parts, simulate=True)
    assert (preview["hold"], preview["unhold"]) == (["a", "libc6"], ["libcuda1"])
    done = asked(script, machine, **parts)
    assert (done["hold"], done["unhold"]) == (preview["hold"], preview["unhold"])


def test_a_busy_gpu_leaves_the_holds_as_they_are(script: Any) -> None:
    machine = Machine("Inst a (2-1 x [amd64])", "a | 2-1 | x")
    output = asked(script, machine, install=["a"], unhold=["libcuda1"], gpu_users=lambda: ["python3 (pid 9)"])
    assert output["error"].startswith("busy: GPUs are in use by python3 (pid 9)")
    assert machine.changes == []


def test_a_download_leaves_the_record_as_it_is(script: Any, tmp_path: Path) -> None:
    memory = tmp_path / "packages-before"
    text = "# installed by gpunode\nlibc6\nno-longer-there\n"
    memory.write_text(text, encoding="utf-8")
    machine = Machine("Inst a (2-1 x [amd64])", "a | 2-1 | x")
    for only in (True, False):
        asked(script, machine, install=["a"], memory=str(memory), download_only=only)
        assert (memory.read_text(encoding="utf-8") == text) is only


def test_a_hold_is_released_and_reported(script: Any) -> None:
    machine = Machine()
    output = asked(script, machine, unhold=["libcuda1", "libc6"])
    assert output["unhold"] == ["libcuda1"]
    assert machine.changes == [["apt-mark", "unhold", "libcuda1"]]


def test_check_mode_reports_the_same_and_does_nothing(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "lay_over", lambda *_: None)
    lines = "Inst libnccl-dev (2.27.3-1+cuda12.9 NVIDIA [amd64])"
    parts = {"install": ["libnccl-dev"], "hold": ["libnccl-dev"]}
    real = asked(script, Machine(lines, "libnccl-dev | 2.27.3-1+cuda12.9 | x"), **parts)
    machine = Machine(lines, "libnccl-dev | 2.27.3-1+cuda12.9 | x")
    reported = asked(script, machine, simulate=True, **parts)
    assert {**reported, "done": True} == real
    assert machine.changes == []


@pytest.mark.parametrize(
    ("simulation", "parts", "words"),
    [
        ("Inst nvidia-driver (1-1 x [amd64])", {"never": ["nvidia-driver*"]}, "would also touch nvidia-driver"),
        ("Remv libc6 [2.36-9]", {}, "would have to remove libc6"),
        ("Inst libcuda1 [580.95.05-1] (595.71.05-1 x [amd64])", {}, "libcuda1 is held at 580.95.05-1"),
    ],
    ids=["a driver", "a removal", "a held package"],
)
def test_a_transaction_that_touches_something_else_is_refused(
    script: Any, simulation: str, parts: dict[str, Any], words: str
) -> None:
    machine = Machine(f"Inst requested (1-1 x [amd64])\n{simulation}", "requested | 1-1 | x")
    with pytest.raises(script.AptError, match=words):
        asked(script, machine, install=["requested"], **parts)
    assert machine.changes == []


@pytest.mark.parametrize(
    ("simulation", "parts"),
    [
        ("Inst libc6 [2.36-9] (2.36-10 x [amd64])", {}),
        ("Inst libcuda1 [580.95.05-1] (595.71.05-1 x [amd64])", {"hold": ["libcuda*"]}),
        ("Inst libcuda1 [580.95.05-1] (595.71.05-1 x [amd64])", {"install": ["requested", "libcuda1=595.*"]}),
    ],
    ids=["not held", "held by the role", "asked for"],
)
def test_a_transaction_may_change_the_version_of_what_nobody_else_holds(
    script: Any, simulation: str, parts: dict[str, Any]
) -> None:
    machine = Machine(
        f"Inst requested (1-1 x [amd64])\n{simulation}", "requested | 1-1 | x\nlibcuda1 | 595.71.05-1 | x"
    )
    output = asked(script, machine, **{"install": ["requested"], **parts})
    assert (output["done"], len(output["install"])) == (True, 2)


def test_what_earlier_transactions_bring_and_remove_is_not_planned_again(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_of_apt: list[list[str]] = []

    class Apt(Machine):
        """The plan of the earlier transactions alone, and with the one that is asked for."""

        def output_of(self, argv: list[str], limit_s: int = 0) -> str:
            if "--simulate" not in argv:
                return super().output_of(argv, limit_s)
            words = argv[argv.index("install") + 1 :]
            asked_of_apt.append(words)
            lines = "Inst requested (1-1 x)\nInst moved (2 x)\n" if "requested=1-1" in words else ""
            return f"Inst common (2 x)\nInst moved (1 x)\nRemv libcuda1 [580.95.05-1]\n{lines}"

    monkeypatch.setattr(script, "lay_over", lambda *_: None)
    planned = {"packages": {"common": "2", "moved": "1"}, "purge": ["libcuda1", "never-installed"]}
    parts = {"install": ["common=2", "requested=1-*"], "planned": planned, "simulate": True}
    output = asked(script, Apt(madison="requested | 1-1 | x"), **parts)
    assert (output["install"], output["remove"]) == ({"moved": "2", "requested": "1-1"}, [])
    before = ["common=2", "moved=1", "libcuda1-"]
    assert asked_of_apt == [before, ["requested=1-1", *before]]


def test_what_is_not_offered_is_refused_with_what_is(script: Any) -> None:
    machine = Machine(madison="fm | 595.71.05-1 | x\nfm | 580.95.05-1 | x")
    with pytest.raises(
        script.AptError, match=r"do not have fm 580\.178\.04-\*; they have 595\.71\.05-1, 580\.95\.05-1"
    ):
        asked(script, machine, install=["fm=580.178.04-*"])
    with pytest.raises(script.AptError, match="they have no package of that name"):
        asked(script, Machine(), install=["fm"])
    machine.madison = "".join(f"fm | {release} | x\n" for release in range(9, 0, -1))
    with pytest.raises(script.AptError, match=r"they have 9, 8, 7, 6, 5, 4, 3, 2$"):
        asked(script, machine, install=["fm=10"])


def test_an_older_one_goes_in_the_same_transaction(script: Any) -> None:
    machine = Machine("Remv libnccl2 [2.27.3]\nInst requested (1-1 x [amd64])", "requested | 1-1 | x")
    output = asked(script, machine, install=["requested"], remove=["libnccl2"])
    assert output["remove"] == ["libnccl2"]
    assert machine.changes[0][-4:] == ["--purge", "install", "requested", "libnccl2-"]


def test_what_came_along_goes_and_what_was_there_stays(script: Any, tmp_path: Path) -> None:
    memory = tmp_path / "packages-before"
    memory.write_text("libc6\nhalf\n", encoding="utf-8")
    gone = "Purg libnccl2 [2.27.3]\nPurg libcuda1 [580.95.05-1]"
    machine = Machine(gone, autoremove=f"{gone}\nRemv half [1.0-1]")
    parts = {"state": "absent", "memory": str(memory), "remove_new": ["libnccl*", "libc*"]}
    output = asked(script, machine, **parts)
    assert output["remove"] == ["libcuda1", "libnccl2"]
    assert machine.changes[0][-4:] == ["--purge", "remove", "libcuda1", "libnccl2"]


def test_orphans_of_the_role_go_and_those_of_others_stay(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that the role held goes too: apt does not count it as an orphan."""
    names = ("came", "loose", "kept", "nvidia-tool")
    monkeypatch.setitem(globals(), "DATABASE", {**DATABASE, **dict.fromkeys(names, "1 installed install")})
    memory = tmp_path / "packages-before"
    memory.write_text("# installed by gpunode\n" + "\n".join([*names, "libnccl2", "nvidia-kernel-open-dkms", ""]))

    class Apt(Machine):
        def output_of(self, argv: list[str], limit_s: int = 0) -> str:
            if argv[-1] == "autoremove":
                return "Remv loose [1]\n"
            return super().output_of(argv, limit_s)

    going = ["came", "libnccl2", "nvidia-kernel-open-dkms"]
    machine = Apt("".join(f"Purg {name} [1]\n" for name in going))
    machine.autoremove = "".join(f"Remv {name} [1]\n" for name in (*going, "loose", "kept", "half"))
    parts = {"remove_new": ["libnccl2"], "hold": ["nvidia-*"], "never": ["kept"], "memory": str(memory)}
    assert asked(script, machine, state="absent", **parts)["remove"] == going
    assert machine.changes[0][-5:] == ["--purge", "remove", *going]


def test_orphans_that_a_package_that_stays_needs_stay_too(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """containerd stays for kubelet, and with it runc, which came with docker.io."""
    names = ("docker.io", "containerd", "runc", "tini")
    monkeypatch.setitem(globals(), "DATABASE", {**DATABASE, **dict.fromkeys(names, "1 installed install")})
    memory = tmp_path / "packages-before"
    memory.write_text("# installed by gpunode\n" + "\n".join([*names, ""]))

    class Apt(Machine):
        def output_of(self, argv: list[str], limit_s: int = 0) -> str:
            if "remove" not in argv:
                return super().output_of(argv, limit_s)
            going = {*argv[argv.index("remove") + 1 :]}
            going |= {"docker.io", "containerd"} if "runc" in going else set()
            return "".join(f"Purg {name} [1]\n" for name in sorted(going))

    machine = Apt(autoremove="".join(f"Remv {name} [1]\n" for name in names))
    parts = {"remove_new": ["docker.io"], "never": ["containerd"], "memory": str(memory)}
    assert asked(script, machine, state="absent", **parts)["remove"] == ["docker.io", "tini"]


def test_configuration_that_a_cut_off_transaction_left_is_purged(script: Any) -> None:
    machine = Machine("Purg gone [1.0-1]\nPurg libnccl2 [2.27.3]")
    output = asked(script, machine, state="absent", remove=["libnccl2", "gone"])
    assert output["remove"] == ["gone", "libnccl2"]
    assert machine.changes[0][-4:] == ["--purge", "remove", "gone", "libnccl2"]


def test_without_a_memory_only_what_is_named_for_sure_goes(script: Any) -> None:
    machine = Machine("Purg libnccl2 [2.27.3]")
    assert asked(script, machine, state="absent", remove_new=["libnccl2"])["remove"] == []
    assert asked(script, machine, state="absent", remove=["libnccl2"])["remove"] == ["libnccl2"]


def test_services_are_held_back_and_released_again(script: Any) -> None:
    with script.services_left_alone():
        assert script.POLICY.read_text(encoding="ascii") == script.POLICY_TEXT
    assert not script.POLICY.exists()
    script.POLICY.write_text("somebody else's", encoding="ascii")
    with script.services_left_alone():
        pass
    assert script.POLICY.read_text(encoding="ascii") == "somebody else's"


def test_what_a_killed_run_left_does_not_hold_services_back_for_ever(script: Any) -> None:
    script.POLICY.write_text(script.POLICY_TEXT, encoding="ascii")
    with script.services_left_alone():
        assert script.POLICY.exists()
    assert not script.POLICY.exists()


def test_locks_that_apt_does_not_wait_for_are_waited_for(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 41 (apt-get)"
    answers = [script.AptError(held), script.AptError(held), "done"]

    def act() -> Any:
        output = answers.pop(0)
        if isinstance(output, Exception):
            raise output
        return output

    waited: list[int] = []
    monkeypatch.setattr(script.time, "sleep", waited.append)
    assert script.patient(act, 60) == "done"
    assert waited == [2, 2]
    answers[:] = [script.AptError("E: Unable to locate package x"), "never asked"]
    with pytest.raises(script.AptError, match="Unable to locate"):
        script.patient(act, 60)
    answers[:] = [script.AptError(held), "never asked"]
    with pytest.raises(script.AptError, match="held by process 41"):
        script.patient(act, -1)


def test_a_source_that_failed_stops_only_what_comes_from_it(script: Any) -> None:
    machine = Machine("Inst requested (1-1 x [amd64])", "requested | 1-1 | http://vendor/repo ./ Packages")
    machine.refused = ["W: Failed to fetch http://ppa.example/ubuntu/dists/noble/InRelease  404\n"]
    assert asked(script, machine, install=["requested"])["done"]
    machine.refused = ["E: The repository 'http://vendor/repo ./ InRelease' is not signed.\n"]
    with pytest.raises(script.AptError, match="is not signed"):
        asked(script, machine, install=["requested"])
    other = Machine("Inst requested (1-1 x [amd64])", "requested | 1-1 | http://vendor/repository ./ Packages")
    other.refused = machine.refused
    assert asked(script, other, install=["requested"])["done"], "another address that begins alike"


def test_where_nothing_is_offered_the_source_that_failed_is_named_first(script: Any) -> None:
    machine = Machine()
    machine.refused = ["W: Failed to fetch http://vendor/repo/InRelease  Could not connect\n"]
    script.PAUSES_S = ()
    with pytest.raises(script.AptError, match=r"Could not connect; the node's sources do not have requested"):
        asked(script, machine, install=["requested"])


def test_what_passes_by_itself_is_tried_again(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    size = "E: Failed to fetch http://m/P.gz  File has unexpected size (1157413 != 1127921). Mirror sync in progress?"
    waited: list[int] = []
    answers = [
        (100, "", size),
        (0, "", "W: Failed to fetch http://m/InRelease  Could not connect to m:80"),
        (0, "", ""),
    ]
    monkeypatch.setattr(script, "captured", lambda *_: answers.pop(0))
    monkeypatch.setattr(script.time, "sleep", waited.append)
    assert script.refresh(["apt-get"], 60) == []
    assert waited == [3, 10]
    answers[:] = [(100, "", size)] * 3
    assert script.refresh(["apt-get"], 60) == [size]
    answers[:] = [(100, "", "E: The repository 'http://m ./ Release' is not signed."), (0, "", "never asked")]
    assert len(script.refresh(["apt-get"], 60)) == 1
    assert len(answers) == 1
    answers[:] = [(100, "", "E: Malformed entry 1 in list file /etc/apt/sources.list.d/x.list (URI)")]
    with pytest.raises(script.AptError, match="Malformed entry"):
        script.refresh(["apt-get"], 60)


def test_dkms_of_nvidia_goes_back_to_the_distributions_with_the_driver(script: Any) -> None:
    DATABASE["dkms"] = "1:3.4.1-1ubuntu1 installed install"
    madison = (
        "dkms | 1:3.4.1-1ubuntu1 | http://vendor/cuda ./ Packages\n"
        "dkms | 3.0.11-1ubuntu13 | http://archive.example/ubuntu noble/main amd64 Packages"
    )
    lines = "Inst dkms [1:3.4.1-1ubuntu1] (3.0.11-1ubuntu13 Ubuntu [all])\nPurg libcuda1 [580.95.05-1]"
    parts = {"state": "absent", "remove": ["libcuda1"], "restore": ["dkms", "dh-dkms"]}
    try:
        machine = Machine(lines, madison)
        machine.targets = "http://vendor/cuda/|NVIDIA CUDA\nhttp://archive.example/ubuntu/|Ubuntu\n"
        output = asked(script, machine, **parts)
        assert (output["install"], output["remove"]) == ({"dkms": "3.0.11-1ubuntu13"}, ["libcuda1"])
        assert machine.changes[0][-4:] == ["--purge", "install", "dkms=3.0.11-1ubuntu13", "libcuda1-"]
        machine.ran.clear()
        machine.no_download = True
        output = asked(script, machine, **parts)
        assert (output["install"], output["remove"]) == ({}, ["libcuda1"])
        assert machine.changes[0][-3:] == ["--purge", "remove", "libcuda1"]
        DATABASE["dkms"] = "3.0.11-1ubuntu13 installed install"
        machine = Machine("Purg libcuda1 [580.95.05-1]", madison)
        assert asked(script, machine, **parts)["install"] == {}
        assert machine.changes[0][-3:] == ["--purge", "remove", "libcuda1"], "it has the distribution's already"
    finally:
        del DATABASE["dkms"]


@pytest.mark.parametrize(
    ("before", "dependent", "goes"),
    [("bash", "", True), ("bash dkms", "", False), ("bash", "zfs-dkms", False)],
    ids=["came along", "there before", "needed by others now"],
)
def test_dkms_that_came_with_the_driver_goes_with_it(
    script: Any, tmp_path: Path, before: str, dependent: str, goes: bool
) -> None:
    class Apt(Machine):
        """apt-get remove: what is named goes, and with dkms what depends on it."""

        def output_of(self, argv: list[str], limit_s: int = 0) -> str:
            if "--simulate" not in argv or "remove" not in argv:
                return super().output_of(argv, limit_s)
            names = [*argv[argv.index("remove") + 1 :], *([dependent] if dependent and "dkms" in argv else [])]
            return "".join(f"Purg {name} [1]\n" for name in names)

    memory = tmp_path / "packages-before"
    memory.write_text("".join(f"{name}\n" for name in before.split()), encoding="utf-8")
    DATABASE["dkms"] = "1:3.4.1-1ubuntu1 installed install"
    try:
        output = asked(
            script, Apt(), state="absent", remove=["libcuda1"], restore=["dkms", "dh-dkms"], memory=str(memory)
        )
    finally:
        del DATABASE["dkms"]
    assert output["remove"] == (["dkms", "libcuda1"] if goes else ["libcuda1"])


def test_rdma_core_of_doca_goes_back_to_the_distributions(script: Any) -> None:
    DATABASE["rdma-core"] = "2510.0.11-1 installed install"
    madison = (
        "rdma-core | 2510.0.11-1 | http://vendor/doca ./ Packages\n"
        "rdma-core | 44.0-2 | http://archive.example/debian bookworm/main amd64 Packages\n"
        "rdma-core | 43.0-1 | http://archive.example/debian bookworm/main amd64 Packages"
    )
    lines = "Inst rdma-core [2510.0.11-1] (44.0-2 Debian [amd64])\nPurg libcuda1 [580.95.05-1]"
    try:
        machine = Machine(lines, madison)
        machine.targets = "http://vendor/doca/|DOCA-HOST 3.2.1\nhttp://archive.example/debian/|Debian\n"
        output = asked(script, machine, state="absent", remove=["libcuda1"], restore=["rdma-core", "ibacm"])
    finally:
        del DATABASE["rdma-core"]
    assert output["install"] == {"rdma-core": "44.0-2"}
    assert machine.changes[0][-4:] == ["--purge", "install", "rdma-core=44.0-2", "libcuda1-"]


def test_dpkg_is_never_killed_and_its_process_is_reported(script: Any, tmp_path: Path) -> None:
    done = tmp_path / "done"
    with pytest.raises(script.StillRunningError, match="is still running"), script.services_left_alone():
        script.carried_out(["sh", "-c", f"sleep 2; echo out; echo err >&2; touch {done}"], 0.2)
    assert script.POLICY.exists(), "its services are held back as long as it is at work"
    end = time.monotonic() + 20
    while not done.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert done.exists()
    with pytest.raises(script.AptError, match="E: broken"):
        script.carried_out(["sh", "-c", "echo 'E: broken' >&2; exit 100"], 20)


def test_remains_of_a_killed_run_are_removed_by_the_next_unless_dpkg_is_running(script: Any, tmp_path: Path) -> None:
    script.DPKG_LOCK = tmp_path / "lock"
    script.POLICY.write_text("somebody else's", encoding="ascii")
    script.remove_left_policy()
    assert script.POLICY.exists()
    script.POLICY.write_text(script.POLICY_TEXT, encoding="ascii")
    held = f"f = open({str(script.DPKG_LOCK)!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX)"
    hold = f"import fcntl, time; {held}; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        script.remove_left_policy()
        assert script.POLICY.exists()
        holder.kill()
    script.remove_left_policy()
    assert not script.POLICY.exists()


def test_files_to_come_lie_over_the_nodes_own(script: Any, tmp_path: Path) -> None:
    sources = "Signed-By: /etc/apt/keyrings/ours.asc\n"
    files = {
        "/etc/apt/sources.list.d/ours.sources": sources,
        "/etc/apt/keyrings/ours.asc": {"b64": "a2V5"},
        "/etc/apt/preferences.d/ours.pref": "",
        "/etc/apt/apt.conf.d/52ours": 'Acquire::http::Proxy::mirror.test "http://proxy.test:3128";\n',
    }
    script.lay_over(tmp_path, files)
    text = (tmp_path / "sources.list.d" / "ours.sources").read_text(encoding="utf-8")
    key = Path(text.removeprefix("Signed-By: ").strip())
    assert key.is_relative_to(tmp_path)
    assert key.read_bytes() == b"key"
    assert not (tmp_path / "preferences.d" / "ours.pref").exists()
    assert str(tmp_path) in (tmp_path / "apt.conf").read_text(encoding="utf-8")
    assert "Proxy::mirror.test" in (tmp_path / "apt.conf").read_text(encoding="utf-8")


@pytest.mark.parametrize("state", ["present", "absent"])
def test_a_job_that_began_meanwhile_stops_the_transaction_before_anything_changes(
    script: Any, tmp_path: Path, state: str
) -> None:
    machine = Machine("Remv libnccl2 [2.27.3]\n" if state == "absent" else "Inst libnccl2 (2.30.7-1+cuda12.9 x)\n")
    machine.madison = "libnccl2 | 2.30.7-1+cuda12.9 | http://x\n"
    requested = {"remove": ["libnccl2"]} if state == "absent" else {"install": ["libnccl2=2.30.7-*"]}
    memory = tmp_path / "memory"
    output = asked(script, machine, state=state, memory=str(memory), gpu_users=lambda: ["python3 (pid 9)"], **requested)
    assert output["error"].startswith("busy: GPUs are in use by python3 (pid 9)")
    assert not output["done"]
    assert machine.changes == []
    assert not memory.exists()
    assert "error" not in asked(script, machine, state=state, gpu_users=list, **requested)


def test_names_with_an_architecture_have_the_versions_that_apt_prints_without_it(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As apt 2.6.1 prints them: the node's own architecture is left out, another one is named."""
    libc = "     libc6 | 2.36-9+deb12u14 | http://deb.debian.org/debian bookworm/main amd64 Packages\n"
    wine = "wine32:i386 | 8.0~repack-4 | http://deb.debian.org/debian bookworm/main i386 Packages\n"
    printed = {
        ("libc6", "wine32"): libc + libc + wine,
        ("libc6:amd64",): libc,
        ("libc6:i386",): "N: Unable to locate\n",
    }
    calls: list[tuple[str, ...]] = []

    def output_of(argv: list[str], limit_s: int) -> str:
        calls.append(tuple(argv[argv.index("madison") + 1 :]))
        return printed[calls[-1]]

    monkeypatch.setattr(script, "output_of", output_of)
    assert script.offered([], ["libc6", "libc6:amd64", "libc6:i386", "wine32"]) == {
        "libc6": ["2.36-9+deb12u14"],
        "libc6:amd64": ["2.36-9+deb12u14"],
        "libc6:i386": [],
        "wine32": ["8.0~repack-4"],
    }
    assert calls == list(printed)
    assert script.offered([], []) == {}
