"""What preflight learns of the node's apt."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from apt_scripts import load, program

state = load("apt_state")


def test_holds_of_our_own_are_read_from_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "52gpunode-nvidia-driver"
    monkeypatch.setattr(state, "OWN_LIST", file)
    assert state.own_holds() == []
    file.write_text('Unattended-Upgrade::Package-Blacklist {\n  "^libcuda1$";\n  "^nvidia-firmware-580[.]95$";\n};\n')
    assert state.own_holds() == ["libcuda1", "nvidia-firmware-580.95"]


def test_who_holds_the_package_lock_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    monkeypatch.setattr(state, "LOCKS", (str(lock), str(tmp_path / "absent")))
    assert state.lock_holder() is None
    held = f"f = open({str(lock)!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('', flush=True)"
    program = f"import fcntl, time; {held}; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            assert str(state.lock_holder()).endswith(f"(pid {holder.pid})")
        finally:
            holder.kill()
    assert state.lock_holder() is None


def test_the_state_of_this_machine_is_a_document() -> None:
    said = subprocess.run(
        [sys.executable, "-"], input=program("apt_state"), capture_output=True, text=True, check=True, timeout=120
    ).stdout
    document = json.loads(said)
    assert document is None or {"sources", "installed", "held", "own_holds", "key", "interrupted"} <= document.keys()


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="this machine has no apt")
@pytest.mark.parametrize("part", ["apt.conf.d", "preferences.d", "sources.list.d"])
def test_a_damaged_file_of_ours_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(state, "APT", tmp_path)
    for name in state.PARTS:
        (tmp_path / name).mkdir()
    (tmp_path / part / "50gpunode-docker.sources").write_text("damaged\n")
    theirs = tmp_path / "sources.list.d" / "theirs.sources"
    theirs.write_text("Types: deb\nURIs: http://a.invalid/b\nSuites: bookworm\nComponents: main\n")
    with state.passing_over_damaged({}):
        assert "Package files:" in state.said_by(["apt-cache", *state.NO_CACHE, "policy"])
        assert [one["file"] for one in state.sources()] == [str(theirs)]
