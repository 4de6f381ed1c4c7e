"""The scripts that roles run on a node: what they decide by themselves."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROLES = Path(__file__).parents[3] / "roles"


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


state = script("preflight/files/apt_state.py")


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
        [sys.executable, str(ROLES / "preflight/files/apt_state.py")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    document = json.loads(said)
    assert document is None or {"sources", "installed", "held", "own_holds", "key", "interrupted"} <= document.keys()
