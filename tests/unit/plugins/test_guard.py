"""The old state that a guarded change keeps, and who restores it: a folder of the test in the place of a node."""

import contextlib
import ctypes
import errno
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
from ansible_collections.gpunode.node.plugins.module_utils import commands, file_access, guard
from ansible_collections.gpunode.node.plugins.module_utils.guard import Guard, GuardError
from effort import effort
from hostile_files import SECRET, USER, within, world
from test_managed_files import ACL, marked

PROGRAM = Path(guard.__file__ or "").read_text(encoding="utf-8")
PROGRAMS = {"program.py": PROGRAM, "file_access.py": Path(file_access.__file__ or "").read_text(encoding="utf-8")}
ATTEMPT = "t1"


class Systemd:
    """Answers systemctl calls for units in these states, and records the calls."""

    def __init__(self, **enabled: str) -> None:
        self.enabled = enabled
        self.active: dict[str, str] = {}
        self.asked: list[str] = []
        self.refuse: tuple[str, ...] = ()

    def __call__(self, argv: list[str]) -> tuple[int, str]:
        line = " ".join(argv)
        self.asked.append(line)
        if any(word in line for word in self.refuse):
            return 1, "Failed to connect to bus: No such file or directory\n"
        if argv[:2] == ["systemctl", "is-enabled"]:
            return 0, self.enabled.get(argv[2].partition(".")[0], "disabled") + "\n"
        if argv[:2] == ["systemctl", "is-active"]:
            return 0, "\n" + self.active.get(argv[2].partition(".")[0], "active") + "\n\n"
        return 0, ""


@pytest.fixture
def systemd() -> Systemd:
    return Systemd(ssh="enabled")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "old").write_text("before\n")
    (folder / "old").chmod(0o640)
    (folder / "link").symlink_to("old")
    return folder


@pytest.fixture
def guarded(tmp_path: Path, systemd: Systemd) -> Guard:
    (tmp_path / "units").mkdir()
    return Guard("ssh", tmp_path / "guard", tmp_path / "units", systemd, tmp_path / "run")


def arm(guarded: Guard, config: Path, **more: Any) -> None:
    record = {
        "name": "ssh",
        "token": ATTEMPT,
        "paths": [str(config / name) for name in ("old", "new", "link")],
        "units": ["ssh.service"],
        "restore": [["systemctl", "reload", "ssh.service"]],
        **more,
    }
    with guarded.locked():
        guarded.arm(record, PROGRAMS, 60)


def change(config: Path) -> None:
    (config / "old").write_text("after\n")
    (config / "old").chmod(0o644)
    (config / "new").write_text("after\n")
    (config / "link").unlink()


def as_before(config: Path) -> bool:
    old = config / "old"
    return (
        (old.read_text(), old.stat().st_mode & 0o777) == ("before\n", 0o640)
        and not (config / "new").exists()
        and (config / "link").readlink() == Path("old")
    )


def test_arming_keeps_the_old_state_and_starts_the_timer_and_the_unit(
    guarded: Guard, config: Path, systemd: Systemd
) -> None:
    arm(guarded, config)
    assert guarded.armed
    unit = guarded.unit.read_text()
    for name in ("ssh.service", "ssh.socket", "nftables.service", "gpunode-firewall.service", "network-pre.target"):
        assert name in unit.partition("Before=")[2].splitlines()[0].split()
    assert f"systemctl enable {guarded.unit.name}" in systemd.asked
    timer = next(line for line in systemd.asked if line.startswith("systemd-run"))
    assert {"--on-active=60s", "--on-unit-inactive=60s", "--timer-property=AccuracySec=100ms"} <= set(timer.split())
    assert timer.endswith(f" -I {guarded.folder}/program.py timer ssh")
    assert f" -I {guarded.folder}/program.py boot ssh\n" in unit
    modes = {path.name: path.stat().st_mode & 0o777 for path in (guarded.folder, *guarded.folder.iterdir())}
    del modes["lock"]  # empty, and its folder is closed
    names = (*PROGRAMS, "record.json", guard.NOT_BEGUN)
    assert modes == {"ssh": 0o700, **dict.fromkeys(names, 0o600)}
    assert guarded.unit.stat().st_mode & 0o777 == 0o644
    record = guarded.read("record.json") or {}
    assert [entry["uid"] for entry in record["files"]] == [os.geteuid(), 0, os.geteuid()]
    guarded.disarm()
    assert {path.name for path in guarded.folder.iterdir()} == {"lock"}
    assert {path.name for path in config.iterdir()} == {"old", "link"}
    assert not guarded.unit.exists()


@pytest.mark.parametrize("booting", [False, True])
def test_an_unconfirmed_change_ends_in_the_old_state(
    guarded: Guard, config: Path, systemd: Systemd, booting: bool
) -> None:
    arm(guarded, config)
    change(config)
    outcome = guarded.restore("by the timer on the node", booting)
    assert outcome is not None
    assert as_before(config)
    assert {Path(path).name for path in outcome["restored"]} == {"old", "new", "link"}
    assert outcome["failed"] == []
    assert 0 <= outcome["after_s"] < 60
    assert ("systemctl reload ssh.service" in systemd.asked) is not booting
    assert not guarded.armed
    assert not guarded.unit.exists()
    assert guarded.restore("again") is None


def test_a_revert_restores_access_list_label_and_attributes(guarded: Guard, config: Path) -> None:
    old = config / "old"
    marked(old)
    before, mode = {name: os.getxattr(old, name) for name in os.listxattr(old)}, old.stat().st_mode
    assert ACL in before
    arm(guarded, config)
    old.unlink()
    old.write_text("after\n")
    guarded.restore("by the test")
    assert (old.read_text(), old.stat().st_mode) == ("before\n", mode)
    assert {name: os.getxattr(old, name) for name in os.listxattr(old)} == before


def test_a_confirmed_change_stays_and_leaves_nothing_armed(guarded: Guard, config: Path) -> None:
    arm(guarded, config)
    change(config)
    guarded.confirm(ATTEMPT)
    assert guarded.restore("by the timer on the node") is None
    assert not as_before(config)
    assert not guarded.unit.exists()


def test_a_crash_between_confirmation_and_disarming_reverts_nothing_at_boot(guarded: Guard, config: Path) -> None:
    arm(guarded, config)
    change(config)
    guarded.write("confirmed.json", {"token": ATTEMPT, "at": 0})
    assert guarded.restore("at boot", booting=True) is None
    assert not as_before(config)
    assert not guarded.armed


def test_a_report_of_an_earlier_revert_keeps_no_later_change_from_its_confirmation(
    guarded: Guard, config: Path
) -> None:
    arm(guarded, config)
    for kind in guarded.notices:
        guarded.report(kind, ["left by a process that was killed"])
    (guarded.folder / "record.json").unlink()
    guarded.write("outcome.json", {"token": "t0"})
    arm(guarded, config)
    assert not any(path.exists() for path in guarded.notices.values())
    assert (guarded.waits(ATTEMPT), guarded.waits("t0")) == (True, False)
    guarded.write("outcome.json", {"token": ATTEMPT})
    assert not guarded.waits(ATTEMPT)
    (guarded.folder / "outcome.json").unlink()
    guarded.confirm(ATTEMPT)
    assert not guarded.armed


def test_the_confirmation_of_another_change_does_not_count(guarded: Guard, config: Path) -> None:
    arm(guarded, config)
    change(config)
    with pytest.raises(GuardError, match="was reverted before its confirmation"):
        guarded.confirm("t0")
    guarded.write("confirmed.json", {"token": "t0", "at": 0})
    assert guarded.restore("at boot", booting=True) is not None
    assert as_before(config)


def test_a_confirmation_after_the_revert_is_refused(guarded: Guard, config: Path) -> None:
    arm(guarded, config)
    guarded.restore("by the timer on the node")
    for token, why in ((ATTEMPT, "by the timer on the node"), ("t0", "its record is missing")):
        with pytest.raises(GuardError, match=f"^the change ssh was reverted before its confirmation: {why}$"):
            guarded.confirm(token)


@pytest.mark.parametrize("refused", ["systemd-run", "daemon-reload", "enable gpunode", "is-active gpunode"])
def test_a_node_that_cannot_revert_arms_nothing(guarded: Guard, config: Path, systemd: Systemd, refused: str) -> None:
    systemd.refuse = (refused,)
    with pytest.raises(GuardError, match=r"^(\S+ ?){2,3}: exit status 1: Failed to connect to bus: No such file or "):
        arm(guarded, config)
    assert not guarded.armed
    assert not guarded.unit.exists()
    assert {path.name for path in config.iterdir()} == {"old", "link"}


@pytest.mark.parametrize("booting", [False, True])
@pytest.mark.parametrize(
    ("states", "verbs"),
    [
        (("enabled active", "disabled inactive"), (["enable"], "start")),
        (("enabled active", "enabled active"), ([], "start")),
        (("enabled active", "masked failed"), (["unmask", "enable"], "start")),
        (("disabled inactive", "enabled active"), (["disable"], "stop")),
        (("disabled inactive", "disabled failed"), ([], "stop")),
        (("disabled failed", "enabled reloading"), (["disable"], "stop")),
        (("masked inactive", "enabled activating"), (["mask"], "stop")),
        (("masked inactive", "masked inactive"), ([], "stop")),
        (("static active", "static activating"), ([], "start")),
        (("unknown active", "unknown inactive"), ([], None)),
        (("enabled activating", "disabled inactive"), (["enable"], None)),
    ],
)
def test_a_unit_returns_to_what_it_was(
    guarded: Guard, systemd: Systemd, booting: bool, states: tuple[str, str], verbs: tuple[list[str], str | None]
) -> None:
    (was, now), (enabling, starting) = states, verbs

    def set_to(state: str) -> None:
        systemd.enabled["x"], systemd.active["x"] = state.split()

    set_to(was)
    unit = guarded.unit_state("x.socket")
    assert [unit["name"], unit["enabled"], unit["active"]] == ["x.socket", *was.split()]
    set_to(now)
    systemd.asked.clear()
    systemd.refuse = tuple(f"{verb} x" for verb in ("enable", "disable", "mask", "start", "stop"))
    failed = guarded.restore_units([unit], booting)
    runs = now.split()[1] in ("active", "activating", "reloading")
    pending = [starting] if starting and (booting or runs != (starting == "start")) else []
    block = "--no-block " if booting else ""
    commands = [f"systemctl {verb} x.socket" for verb in enabling] + [
        f"systemctl {block}{verb} x.socket" for verb in pending
    ]
    assert [line for line in systemd.asked if "is-" not in line] == ["systemctl daemon-reload", *commands]
    why = "exit status 1: Failed to connect to bus: No such file or directory"
    assert failed == [f"{command}: {why}" for command in commands]


def in_namespace(folder: Path, output: Path, act: Callable[[], None]) -> None:
    """Act in a child with a tmpfs of 64 KiB on a folder; a failure there is one of the test."""
    if os.geteuid() != 0:
        pytest.skip("a mount namespace needs root")

    def program(_words: Sequence[str]) -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.unshare(commands.NEW_NAMESPACE)
        done = done or libc.mount(b"none", b"/", None, commands.RECURSIVE | commands.PRIVATE, None)
        if done or libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=64k,mode=0755"):
            return 77
        act()
        return 0

    code = forked.run([], stdout=output, stderr=output, program=program)
    if code == 77:
        pytest.skip("no mount namespace here")
    assert code == 0, output.read_text()


def fill(folder: Path) -> Path:
    """Fill the file system of a folder to the last byte; return the file that does."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))
    with pytest.raises(OSError, match="No space left"):
        (folder / "one more").write_bytes(b"x" * 5000)
    (folder / "one more").unlink()
    return ballast


def in_config(config: Path) -> None:
    (config / "old").write_text("before\n")
    (config / "old").chmod(0o640)
    (config / "link").symlink_to("old")


def test_a_full_disk_does_not_stop_a_revert(guarded: Guard, config: Path, tmp_path: Path) -> None:
    """The old files are there already, under other names."""

    def act() -> None:
        in_config(config)
        arm(guarded, config)
        change(config)
        ballast = fill(config)
        outcome = guarded.restore("by the timer on the node")
        assert outcome is not None
        assert outcome["failed"] == []
        assert as_before(config)
        assert not guarded.armed
        assert {path.name for path in config.iterdir()} == {"old", "link", ballast.name}

    in_namespace(config, tmp_path / "output", act)


def test_a_revert_that_fails_is_kept_reported_and_tried_again(
    guarded: Guard, config: Path, tmp_path: Path, systemd: Systemd
) -> None:
    """The copies are gone, and the disk is full: nothing can be written until there is space."""

    def act() -> None:
        in_config(config)
        arm(guarded, config)
        change(config)
        for copy in config.glob(".*"):
            copy.unlink()
        (config / "old").unlink()
        (config / "new").unlink()
        ballast = fill(config)
        for by, booting in (("by the timer on the node", False), ("at boot", True), ("by the controller", False)):
            systemd.asked.clear()
            outcome = guarded.restore(by, booting)
            assert outcome is not None
            assert [line for line in outcome["failed"] if "No space left" in line]
            assert guarded.armed
            assert not guarded.waits(ATTEMPT)
            assert guarded.unit.exists()
            assert (guarded.folder / "program.py").exists()
            assert [line for line in systemd.asked if line.startswith("systemd-run") and " --on-active=60s " in line]
            for kind, path in guarded.notices.items():
                text = path.read_text()
                assert "No space left" in text, kind
                assert "ssh" in text
                assert text.count("\n") == 1
                assert path.stat().st_mode & 0o777 == 0o644
            with pytest.raises(GuardError, match="was reverted before its confirmation"):
                guarded.confirm(ATTEMPT)
        ballast.unlink()
        outcome = guarded.restore("by the timer on the node")
        assert outcome is not None
        assert outcome["failed"] == []
        assert as_before(config)
        assert not guarded.armed
        assert not any(path.exists() for path in (*guarded.notices.values(), guarded.unit))

    in_namespace(config, tmp_path / "output", act)


def test_what_failed_is_tried_again_and_an_outcome_is_that_of_all_attempts(
    guarded: Guard, config: Path, systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm(guarded, config)
    (config / "old").write_text("after\n")
    armed_at = json.loads((guarded.folder / "record.json").read_text())["armed_at"]
    monkeypatch.setattr(guard, "time", SimpleNamespace(time=lambda: armed_at + 12.34))
    why = "systemctl reload ssh.service: exit status 1: Failed to connect to bus: No such file or directory"
    for failed in ([why], [why], []):
        systemd.refuse = ("reload ssh",) if failed else ()
        outcome = guarded.restore("by the timer on the node")
        assert outcome == guarded.read("outcome.json")
        assert outcome is not None
        assert (outcome["restored"], outcome["failed"]) == ([str(config / "old")], failed)
        assert (outcome["token"], outcome["at"], outcome["after_s"]) == (ATTEMPT, armed_at + 12.34, 12.3)
        assert guarded.armed is bool(failed)


def test_a_report_is_one_line_without_control_characters(guarded: Guard) -> None:
    for kind in ("motd", "issue"):
        guarded.report(kind, ["a\x1b[31m\nb", "x" * 2000])
        text = guarded.notices[kind].read_text()
        assert text.startswith(f"gpunode: the change ssh could not be reverted: a?[31m?b; {'x' * 990}. This is tried")
        assert " every 60 s " in text
    guarded.report("validate", ["x"] * 200)
    notice = json.loads(guarded.notices["validate"].read_text())
    assert (notice["change"], notice["failed"]) == ("ssh", ["x"] * 100)
    guarded.notices["motd"].unlink()
    guarded.notices["motd"].mkdir()
    guarded.report("motd", ["a report that cannot be written raises nothing"])


def test_the_program_prints_what_it_did_and_fails_when_something_failed(
    guarded: Guard, config: Path, systemd: Systemd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard, "Guard", lambda name: guarded if name == "ssh" else None)
    monkeypatch.setattr(guard, "LOCK_LIMIT_S", 0)
    why = "exit status 1: Failed to connect to bus: No such file or directory"
    for by, phrase, failed in (
        ("timer", "by the timer on the node", "systemctl reload ssh.service"),
        ("boot", "at boot", "systemctl --no-block start ssh.service"),
    ):
        arm(guarded, config, paths=[str(config / name) for name in ("old", "new")])
        change(config)
        systemd.refuse = ("reload ssh", "start ssh")
        with guarded.locked():  # by a process that hangs
            assert guard.main([by, "ssh"]) == 1
        assert capsys.readouterr().out == f"reverted ssh: {config}/old, {config}/new; failed: {failed}: {why}\n"
        assert (guarded.read("outcome.json") or {})["by"] == phrase
        guarded.disarm()
        assert guard.main([by, "ssh"]) == 0
        assert not capsys.readouterr().out
        systemd.refuse = ()
        (config / "link").symlink_to("old")
        arm(guarded, config)
        assert guard.main([by, "ssh"]) == 0
        assert capsys.readouterr().out == "reverted ssh: nothing; failed: nothing\n"


def test_a_command_is_limited_with_all_that_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert guard.run(["sh", "-c", "cat; echo out; printf '\\377\\n' >&2; exit 3"]) == (3, "out\n\ufffd\n")
    assert guard.run(["/no/such/program"]) == (127, "[Errno 2] No such file or directory: '/no/such/program'")
    monkeypatch.setattr(guard, "COMMAND_LIMIT_S", 0.2)
    # The second one would hold the output open.
    assert guard.run(["sh", "-c", "sleep 30 & sleep 30"]) == (124, "it exceeded 0.2 s")
    assert [guard.last_line(text) for text in ("a\n b \n \n", " \n")] == ["b", ""]


def test_a_file_is_saved_up_to_a_size(guarded: Guard, config: Path) -> None:
    os.truncate(config / "old", 1 << 20)
    assert len(guard.kept(str(config / "old"))["data"]) > 1 << 20
    os.truncate(config / "old", (1 << 20) + 1)
    with pytest.raises(GuardError, match="old is not a file of at most 1 MiB: its old state cannot be saved"):
        arm(guarded, config)
    config.chmod(0o777)
    with pytest.raises(GuardError, match="link is not a file of"):
        guard.kept(str(config / "link"))


def test_copies_that_are_gone_or_altered_are_not_used(guarded: Guard, config: Path) -> None:
    for name in ("old", "link"):
        for copy_is in ("gone", "altered", "a folder"):
            arm(guarded, config)
            change(config)
            copy = config / f".{name}.gpunode-ssh"
            copy.unlink()
            if copy_is == "altered":
                copy.write_text("other\n")
            elif copy_is == "a folder":
                copy.mkdir()
            outcome = guarded.restore("by the timer on the node")
            assert outcome is not None
            assert outcome["failed"] == []
            assert as_before(config), (name, copy_is)
            # One that cannot be removed stops nothing.
            assert (not guarded.armed, guarded.unit.exists()) == (True, False)
            assert copy.exists() is (copy_is == "a folder")
            if copy.exists():
                copy.rmdir()


def test_a_change_is_not_confirmed_after_a_revert_that_could_write_nothing_anywhere(
    guarded: Guard,
    config: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PROGRAMS, "program.py", "")
    monkeypatch.setitem(PROGRAMS, "file_access.py", "")

    def act() -> None:
        for folder in (config, guarded.unit.parent):
            folder.mkdir()
        in_config(config)
        arm(guarded, config)
        change(config)
        for copy in config.glob(".*"):
            copy.unlink()
        (config / "new").unlink()
        fill(tmp_path)
        outcome = guarded.restore("by the timer on the node")
        assert outcome is not None
        assert [line for line in outcome["failed"] if "No space left" in line]
        assert not any(path.exists() for path in (*guarded.notices.values(), guarded.folder / "outcome.json"))
        assert guarded.armed
        with pytest.raises(GuardError, match="was reverted before its confirmation: its revert has begun"):
            guarded.confirm(ATTEMPT)
        (tmp_path / "ballast").unlink()
        guarded.restore("at boot", booting=True)
        assert as_before(config)
        assert list(guarded.folder.glob("*revert*")) == []

    in_namespace(tmp_path, tmp_path_factory.mktemp("shown") / "output", act)


def test_a_mark_that_cannot_be_set_stops_no_revert(
    guarded: Guard, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm(guarded, config)
    change(config)
    (config / "old").unlink()
    (config / "old").mkdir()

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", read_only)
    outcome = guarded.restore("by the timer on the node")
    assert outcome is not None
    assert not (config / "new").exists()
    # Part of it failed: the notice reports that it has begun.
    assert outcome["failed"]
    assert not guarded.waits(ATTEMPT)


STEPS = ("rename", "unlink", "symlink", "fsync", "mkdir", "sync")


def killed_at(step: int, guarded: Guard, act: Callable[[], object]) -> bool:
    """Act in a child that ends without any cleanup at its nth step; return whether it got there."""
    pid = os.fork()
    if pid == 0:
        left = step

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **more: Any) -> Any:
                nonlocal left
                if left == 0:
                    os._exit(9)
                left -= 1
                return function(*arguments, **more)

            return call

        code = 1
        try:
            for name in STEPS:
                setattr(os, name, counted(getattr(os, name)))
            guarded.run = counted(guarded.run)
            act()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.mark.parametrize("act", ["arm", "restore", "confirm"])
def test_whatever_is_killed_ends_as_before_or_as_confirmed(guarded: Guard, config: Path, act: str) -> None:
    """Killed at each step: the next boot finds the whole old state, or nothing to do after a whole confirmation."""
    step, ends = 0, set()
    while True:
        for path in config.iterdir():
            path.unlink()
        in_config(config)
        acts: dict[str, Callable[[], object]] = {
            "arm": lambda: arm(guarded, config),
            "restore": lambda: guarded.restore("by the timer on the node"),
            "confirm": lambda: guarded.confirm(ATTEMPT),
        }
        if act != "arm":
            arm(guarded, config)
            change(config)
        killed = killed_at(step, guarded, acts[act])
        guarded.restore("at boot", booting=True)
        changed = (config / "new").exists()
        assert changed or as_before(config), step
        assert not changed or (act == "confirm" and (config / "old").read_text() == "after\n"), step
        assert not guarded.armed, step
        ends.add(changed)
        left = {path.name for path in config.iterdir()} - {"old", "new", "link"}
        # A change that was never armed leaves copies, which the next one replaces.
        assert not left or act == "arm", step
        if not killed:
            break
        step += 1
    assert step > 10
    assert ends == ({True, False} if act == "confirm" else {False})


def test_a_folder_in_a_files_place_is_refused_before_the_change(guarded: Guard, config: Path) -> None:
    with pytest.raises(GuardError, match="old state cannot be saved"):
        arm(guarded, config, paths=[str(config)])
    assert not guarded.armed


def test_the_stored_program_restores_by_itself(tmp_path: Path, config: Path) -> None:
    """The program that the node runs at boot knows nothing of Ansible."""
    home = tmp_path / "home"
    guarded = Guard("ssh", home, tmp_path / "units", Systemd(), tmp_path / "run")
    arm(guarded, config, units=[], restore=[])
    change(config)
    text = (guarded.folder / "program.py").read_text()
    places = {"/var/lib/gpunode/guard": home, "/etc/systemd/system": tmp_path / "units", "/run": tmp_path / "run"}
    for name, path in places.items():
        assert f'= Path("{name}")' in text
        text = text.replace(f'= Path("{name}")', f"= Path({str(path)!r})")
    program = guarded.folder / "program.py"
    program.write_text(text)
    argv = [sys.executable, "-I", str(program), "boot", "ssh"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env={"PATH": "/nowhere"})
    assert done.returncode == 0, done.stderr
    assert as_before(config)
    assert json.loads((guarded.folder / "outcome.json").read_text())["by"] == "at boot"


def test_a_process_that_hangs_with_the_lock_keeps_nobody_out(
    guarded: Guard, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LOCK_LIMIT_S", 0.3)
    arm(guarded, config)
    change(config)
    with guarded.locked():
        with pytest.raises(GuardError, match=r"has held the lock of ssh for 0\.3 s"), guarded.locked():
            raise AssertionError("two hold the lock")
        with guarded.locked(insist=True):
            assert guarded.restore("by the timer on the node") is not None
    assert as_before(config)
    with contextlib.ExitStack() as held:
        held.enter_context(guarded.locked())
        waited = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: held.close())
        monkeypatch.setattr(guard, "time", waited)
        with guarded.locked():
            pass


def test_a_command_sees_files_that_are_not_in_place(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a mount namespace needs root")
    (tmp_path / "there").write_text("now\n")
    file = {"content": "later\n", "mode": "0644", "encoding": "utf-8"}
    both = [{**file, "path": str(tmp_path / name)} for name in ("there", "new")]
    try:
        answers = commands.run_with_files(both, [["cat", str(draft["path"])] for draft in both])
    except commands.UnavailableError as err:
        pytest.skip(str(err))
    assert answers == [(0, "later\n", "")] * 2
    assert commands.run_with_files([{**both[0], "content": None}], [["cat", str(both[0]["path"])]])[0][0] == 1
    assert ((tmp_path / "there").read_text(), list(tmp_path.iterdir())) == ("now\n", [tmp_path / "there"])


HASHES = ("", "!", "!!", "*", "$y$j9T$abc$def", "!$y$j9T$abc$def", "*$6$x$y", "x")


def shadow_of(rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """A password file, and the password fields of its users by name."""
    fields = {f"user{number}": rng.choice(HASHES) for number in range(rng.randint(1, 5))}
    lines = [f"{name}:{field}:19000:0:99999:7:::" for name, field in fields.items()]
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(["", "broken", "x:", ":::", "# comment"]))
    return "\n".join(lines).encode() + rng.choice([b"", b"\n"]), fields


def test_a_lock_changes_only_the_passwords_of_its_users_and_ends_without_a_trace(
    guarded: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others change their passwords, and users come, between the lock and its revert: that stays."""
    path = tmp_path / "shadow"
    monkeypatch.setattr(guard, "SHADOW", str(path))
    rng = random.Random(8)  # noqa: S311
    for _ in range(effort(60, 2000)):
        before, fields = shadow_of(rng)
        path.write_bytes(before)
        path.chmod(0o640)
        os.setxattr(path, "user.site", b"kept")
        names = guard.to_lock(before, rng.sample(sorted(fields), rng.randint(1, len(fields))))
        if not names:
            continue  # the module then leaves the file out
        record = {"token": ATTEMPT, "paths": [str(path)], "units": [], "restore": [], "locked": names}
        guarded.arm(record, PROGRAMS, 60)
        guard.lock_passwords(names)
        after = {line.split(b":")[0].decode(): line.split(b":")[1:2] for line in path.read_bytes().split(b"\n")}
        for name, field in fields.items():
            (now,) = after[name]
            assert now.startswith(b"*") if name in names else now == field.encode()
            # Neither a password nor sshd's sign of a locked account.
            assert name not in names or not now.startswith(b"*!")
        assert guard.to_lock(path.read_bytes(), names) == []
        assert path.read_bytes().count(b"\n") == before.count(b"\n")
        later = path.read_bytes()
        others = sorted(set(fields) - set(names))
        if rng.random() < 0.5:
            change = rng.choice([*others, *names])
            later = b"\n".join(
                line if line.split(b":")[0] != change.encode() else f"{change}:$new$:19001:0:99999:7:::".encode()
                for line in later.split(b"\n")
            )
            before = b"\n".join(
                line if line.split(b":")[0] != change.encode() else f"{change}:$new$:19001:0:99999:7:::".encode()
                for line in before.split(b"\n")
            )
            path.write_bytes(later)
        guarded.restore("by the timer on the node")
        assert path.read_bytes() == before
        assert path.stat().st_mode & 0o777 == 0o640
        assert os.getxattr(path, "user.site") == b"kept"
        assert [file for file in tmp_path.iterdir() if file.name.startswith((".shadow", "shadow."))] == []


@pytest.fixture
def shadow(guarded: Guard, config: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A password file with the passwords of two of three users locked by an armed change, and another file."""
    path = config / "shadow"
    path.write_bytes(OLD)
    path.chmod(0o640)
    monkeypatch.setattr(guard, "SHADOW", str(path))
    arm(guarded, config, paths=[str(config / "old"), str(path)], locked=["ada", "bob"])
    (config / "old").write_text("after\n")
    guard.lock_passwords(["ada", "bob"])
    assert path.read_bytes() == LOCKED
    return path


OLD = b"ada:$y$a:1::\nbob:!$y$b:1::\neve:$y$e:1::\n"
LOCKED = b"ada:*$y$a:1::\nbob:*$y$b:1::\neve:$y$e:1::\n"


@pytest.mark.parametrize("copy_is", ["there", "longer", "gone"])
@pytest.mark.parametrize(
    "texts",
    [
        (LOCKED, OLD),
        (OLD, OLD),
        (LOCKED.replace(b"eve:", b"eve:*"), OLD.replace(b"eve:", b"eve:*")),
        (LOCKED.replace(b"ada:*", b"ada:!*"), OLD.replace(b"ada:", b"ada:!*")),
        (LOCKED.replace(b"ada:*$y$a", b"ada:$y$n"), OLD.replace(b"ada:$y$a", b"ada:$y$n")),
        (LOCKED + b"\nada\n\nzoe:*:1::\n", OLD + b"\nada\n\nzoe:*:1::\n"),
        (LOCKED[14:], OLD[13:]),
        (b"", OLD),
        (None, OLD),
    ],
    ids=["none", "unlocked", "eve is locked", "ada is locked", "new password", "lines", "ada left", "empty", "missing"],
)
def test_of_a_password_file_that_others_changed_only_the_own_locks_are_reverted(
    guarded: Guard, config: Path, shadow: Path, texts: tuple[bytes | None, bytes], copy_is: str
) -> None:
    """Whoever an administrator locked meanwhile stays locked, and a copy that is not the old file is not used."""
    now, after = texts
    shadow.unlink()
    if now is not None:
        file_access.write(str(shadow), now, 0o640, (os.geteuid(), os.getegid()))
    copy = config / ".shadow.gpunode-ssh"
    if copy_is == "longer":
        copy.write_bytes(OLD + b"mallory::1::\n")
    elif copy_is == "gone":
        copy.unlink()
    outcome = guarded.restore("by the timer on the node")
    assert outcome is not None
    assert (shadow.read_bytes(), outcome["failed"]) == (after, [])
    assert outcome["restored"] == [str(config / "old"), *([str(shadow)] if now != OLD else [])]
    assert (config / "old").read_text() == "before\n"
    assert shadow.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in config.iterdir()} == {"old", "link", "shadow"}


def test_a_password_file_is_not_replaced_by_one_without_its_label(
    shadow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where SELinux is enforced, programs could not read it."""
    real = os.setxattr

    def refused(path: Any, name: str, value: bytes) -> None:
        if name == "security.selinux":
            raise PermissionError(1, "Operation not permitted")
        real(path, name, value)

    marked(shadow)
    if "security.selinux" not in os.listxattr(shadow):
        pytest.skip("only root sets a label")
    monkeypatch.setattr(os, "setxattr", refused)
    with pytest.raises(OSError, match="Operation not permitted"):
        guard.replace_shadow(OLD, 0o640, (0, 0))
    assert shadow.read_bytes() == LOCKED


@pytest.mark.parametrize("answer", [0, -1])
def test_the_lock_of_the_password_files_is_held_and_released(
    shadow: Path, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    calls: list[str] = []

    def lock() -> int:
        calls.append("lock")
        return answer

    libc = SimpleNamespace(lckpwdf=lock, ulckpwdf=lambda: calls.append("unlock"))
    monkeypatch.setattr(guard, "ctypes", SimpleNamespace(CDLL=lambda _: libc))
    shadow.write_bytes(b"x" * (1 << 20))
    guard.lock_passwords(["ada"])
    shadow.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(FileNotFoundError, match="shadow is missing or too large"):
        guard.lock_passwords(["ada"])
    shadow.unlink()
    with pytest.raises(FileNotFoundError, match="shadow is missing or too large"):
        guard.lock_passwords(["ada"])
    assert calls == (["lock", "unlock"] if answer == 0 else ["lock"]) * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it is about what root does in another's folder")
def test_a_revert_in_a_home_is_led_nowhere_and_waits_for_nothing() -> None:
    with world() as tree:
        before = tree.snapshot()
        for way, path in tree.ways(tree.home, ".ssh", "authorized_keys"):
            outcome = within(15, partial(guard.kept, str(path), USER.pw_uid))
            assert outcome != "hangs", way
            assert SECRET not in outcome, way
            entry = {"path": str(path), "kind": "file", "mode": 0o600, "uid": USER.pw_uid, "gid": USER.pw_gid}
            outcome = within(15, partial(guard.put_back, {**entry, "data": "b2xkCg=="}))
            assert tree.snapshot() == before, way
            assert outcome == "True" or str(path) in outcome, way
            gone = {"path": str(path), "kind": "absent", "uid": USER.pw_uid}
            assert within(15, partial(guard.put_back, gone)) != "hangs", way
            assert tree.snapshot() == before, way


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it is about a file of another user")
@pytest.mark.parametrize("copied", [True, False])
def test_a_file_of_a_user_in_a_folder_of_root_keeps_its_owner(guarded: Guard, config: Path, copied: bool) -> None:
    os.chown(config / "old", 1234, 2345)
    arm(guarded, config)
    change(config)
    if not copied:
        (config / ".old.gpunode-ssh").unlink()
    (config / "old").unlink()
    guarded.restore("by the timer on the node")
    assert as_before(config)
    assert ((config / "old").stat().st_uid, (config / "old").stat().st_gid) == (1234, 2345)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it is about what root does in another's folder")
def test_a_file_of_root_in_a_home_is_saved_and_put_back_as_one_of_the_user(guarded: Guard) -> None:
    with world() as tree:
        path = tree.home / ".ssh" / "authorized_keys"
        path.parent.mkdir(mode=0o700)
        os.chown(path.parent, USER.pw_uid, USER.pw_gid)
        path.write_text("ssh-ed25519 AAAA old\n")
        path.chmod(0o644)
        record = {
            "token": ATTEMPT,
            "paths": [str(path)],
            "owners": {str(path): USER.pw_uid},
            "units": [],
            "restore": [],
        }
        guarded.arm(record, PROGRAMS, 60)
        file_access.write(str(path), b"ssh-ed25519 AAAA new\n", 0o600, (USER.pw_uid, USER.pw_gid))
        outcome = guarded.restore("by the timer on the node")
        assert outcome is not None
        assert outcome["failed"] == []
        assert path.read_text() == "ssh-ed25519 AAAA old\n"
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (USER.pw_uid, 0o644)
        assert sorted(path.parent.iterdir()) == [path]
