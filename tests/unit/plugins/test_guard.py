"""The old state that a guarded change keeps, and who restores it: a folder of the test in the place of a node."""

import contextlib
import ctypes
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
from ansible_collections.gpunode.node.plugins.module_utils import as_if, file_access, guard
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
            return 0, "active\n"
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
    assert "--on-active=60s" in timer
    assert "AccuracySec=100ms" in timer
    assert " -I " in timer
    assert (guarded.folder.stat().st_mode & 0o777, guarded.folder.joinpath("record.json").stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )


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
    guarded.report("validate", ["left by a process that was killed"])
    (guarded.folder / "record.json").unlink()
    arm(guarded, config)
    assert guarded.waits(ATTEMPT)
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
    with pytest.raises(GuardError, match="by the timer on the node"):
        guarded.confirm(ATTEMPT)


@pytest.mark.parametrize("refused", ["systemd-run", "daemon-reload", "enable"])
def test_a_node_that_cannot_revert_arms_nothing(guarded: Guard, config: Path, systemd: Systemd, refused: str) -> None:
    systemd.refuse = (refused,)
    with pytest.raises(GuardError, match="Failed to connect to bus"):
        arm(guarded, config)
    assert not guarded.armed
    assert not guarded.unit.exists()


def test_units_return_to_what_they_were(guarded: Guard, config: Path, systemd: Systemd) -> None:
    systemd.enabled = {"ssh": "enabled", "socket": "masked"}
    arm(guarded, config, units=["ssh.service", "socket.socket"])
    systemd.enabled = {"ssh": "disabled", "socket": "enabled"}
    systemd.asked.clear()
    guarded.restore("at boot", booting=True)
    assert {"systemctl enable ssh.service", "systemctl mask socket.socket"} <= set(systemd.asked)
    assert "systemctl --no-block start ssh.service" in systemd.asked


def in_namespace(folder: Path, output: Path, act: Callable[[], None]) -> None:
    """Act in a child with a tmpfs of 64 KiB on a folder; a failure there is one of the test."""
    if os.geteuid() != 0:
        pytest.skip("a mount namespace needs root")

    def program(_words: Sequence[str]) -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.unshare(as_if.NEW_NAMESPACE)
        done = done or libc.mount(b"none", b"/", None, as_if.RECURSIVE | as_if.PRIVATE, None)
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
            assert [line for line in systemd.asked if line.startswith("systemd-run") and "--on-unit-inactive" in line]
            for kind, path in guarded.notices.items():
                text = path.read_text()
                assert "No space left" in text, kind
                assert "ssh" in text
                assert text.count("\n") == 1
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


STEPS = ("rename", "unlink", "symlink", "fsync", "mkdir", "sync")


def killed_at(step: int, guarded: Guard, act: Callable[[], object]) -> bool:
    """Act in a child that ends without any cleanup at its nth step; return whether it got there."""
    pid = os.fork()
    if pid == 0:
        left = step

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **more: Any) -> Any:
                nonlocal left
                if left == 0:
                    os._exit(9)
                left -= 1
                return function(*given, **more)

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


@pytest.mark.parametrize("what", ["arm", "restore", "confirm"])
def test_whatever_is_killed_ends_as_before_or_as_confirmed(guarded: Guard, config: Path, what: str) -> None:
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
        if what != "arm":
            arm(guarded, config)
            change(config)
        killed = killed_at(step, guarded, acts[what])
        guarded.restore("at boot", booting=True)
        changed = (config / "new").exists()
        assert changed or as_before(config), step
        assert not changed or (what == "confirm" and (config / "old").read_text() == "after\n"), step
        assert not guarded.armed, step
        ends.add(changed)
        left = {path.name for path in config.iterdir()} - {"old", "new", "link"}
        # A change that was never armed leaves copies, which the next one replaces.
        assert not left or what == "arm", step
        if not killed:
            break
        step += 1
    assert step > 10
    assert ends == ({True, False} if what == "confirm" else {False})


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


def test_a_command_sees_files_that_are_not_in_place(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a mount namespace needs root")
    (tmp_path / "there").write_text("now\n")
    file = {"content": "later\n", "mode": "0644", "encoding": "utf-8"}
    both = [{**file, "path": str(tmp_path / name)} for name in ("there", "new")]
    try:
        answers = as_if.answered(both, [["cat", str(one["path"])] for one in both])
    except as_if.UnavailableError as err:
        pytest.skip(str(err))
    assert answers == [(0, "later\n", "")] * 2
    assert as_if.answered([{**both[0], "content": None}], [["cat", str(both[0]["path"])]])[0][0] == 1
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
        assert [one for one in tmp_path.iterdir() if one.name.startswith((".shadow", "shadow."))] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it is about what root does in another's folder")
def test_a_revert_in_a_home_is_led_nowhere_and_waits_for_nothing() -> None:
    with world() as place:
        before = place.snapshot()
        for way, path in place.ways(place.home, ".ssh", "authorized_keys"):
            found = within(15, partial(guard.kept, str(path), USER.pw_uid))
            assert found != "hangs", way
            assert SECRET not in found, way
            entry = {"path": str(path), "kind": "file", "mode": 0o600, "uid": USER.pw_uid, "gid": USER.pw_gid}
            found = within(15, partial(guard.put_back, {**entry, "data": "b2xkCg=="}))
            assert place.snapshot() == before, way
            assert found == "True" or str(path) in found, way
            gone = {"path": str(path), "kind": "absent", "uid": USER.pw_uid}
            assert within(15, partial(guard.put_back, gone)) != "hangs", way
            assert place.snapshot() == before, way


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it is about what root does in another's folder")
def test_a_file_of_root_in_a_home_is_saved_and_put_back_as_one_of_the_user(guarded: Guard) -> None:
    with world() as place:
        path = place.home / ".ssh" / "authorized_keys"
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
