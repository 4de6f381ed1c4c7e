"""The old state that a guarded change keeps, and who restores it: a folder of the test in the place of a node."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import as_if, guard
from ansible_collections.gpunode.node.plugins.module_utils.guard import Guard, GuardError

PROGRAM = Path(guard.__file__ or "").read_text(encoding="utf-8")
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
    return Guard("ssh", tmp_path / "guard", tmp_path / "units", systemd)


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
        guarded.arm(record, PROGRAM, 60)


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


def test_what_cannot_be_restored_is_named_and_the_rest_is_restored(guarded: Guard, config: Path) -> None:
    arm(guarded, config)
    change(config)
    record = guarded.read("record.json") or {}
    record["files"].insert(0, {"path": str(config / "old" / "below"), "kind": "link", "target": "x"})
    guarded.write("record.json", record)
    outcome = guarded.restore("at once")
    assert outcome is not None
    assert [message for message in outcome["failed"] if "below" in message]
    assert as_before(config)


def test_a_folder_in_a_files_place_is_refused_before_the_change(guarded: Guard, config: Path) -> None:
    with pytest.raises(GuardError, match="old state cannot be saved"):
        arm(guarded, config, paths=[str(config)])
    assert not guarded.armed


def test_the_stored_program_restores_by_itself(tmp_path: Path, config: Path) -> None:
    """The program that the node runs at boot knows nothing of Ansible."""
    home = tmp_path / "home"
    guarded = Guard("ssh", home, tmp_path / "units", Systemd())
    arm(guarded, config, units=[], restore=[])
    change(config)
    text = (guarded.folder / "program.py").read_text()
    for name, path in {"/var/lib/gpunode/guard": home, "/etc/systemd/system": tmp_path / "units"}.items():
        text = text.replace(f'= Path("{name}")', f"= Path({str(path)!r})")
    program = tmp_path / "program.py"
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
