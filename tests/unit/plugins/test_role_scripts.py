"""The scripts that roles run on a node: what they decide by themselves."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROLES = Path(__file__).parents[3] / "roles"


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROLES / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


preview = script("nvidia_driver/files/apt_preview.py")
state = script("preflight/files/apt_state.py")


def question(*names: str, constraint: str = "580.*", **patterns: str) -> dict[str, Any]:
    bound = {**dict.fromkeys(names, "@RELEASE@-*"), **patterns}
    return {"bound": bound, "required": list(bound), "constraint": constraint}


@pytest.mark.parametrize(
    ("version", "release"),
    [("580.95.05-1", "580.95.05"), ("1:4.6.0-1", "4.6.0"), ("595.91.07-0ubuntu0.24.04.1", "595.91.07"), ("12", "12")],
)
def test_a_release_is_a_version_without_epoch_and_revision(version: str, release: str) -> None:
    assert preview.upstream(version) == release


def test_the_newest_release_that_all_have_is_taken() -> None:
    there = {"driver": ["595.1-1", "580.2-1", "580.1-1"], "manager": ["595.1-1", "580.1-1"]}
    assert preview.settle(question("driver", "manager"), there) == ("580.1", None)
    assert preview.settle(question("driver", "manager", constraint="595.1"), there) == ("595.1", None)


def test_what_lacks_the_release_is_named_with_what_it_has() -> None:
    there = {"driver": ["595.1-1", "580.2-1", "580.1-1"], "manager": ["595.1-1", "580.1-1"]}
    release, said = preview.settle(question("driver", "manager", constraint="580.2"), there)
    assert release is None
    assert said == {
        "lacking": {"manager": ["595.1", "580.1"]},
        "common": ["595.1", "580.1"],
        "constraint": "580.2",
    }


def test_a_package_of_another_publisher_with_the_same_release_does_not_count() -> None:
    there = {"driver": ["580.2-1"]}
    release, _ = preview.settle(question(constraint="580.2", driver="@RELEASE@-0ubuntu*"), there)
    assert release is None
    assert preview.fitting(["580.2-1", "580.2-0ubuntu0.24.04.1"], "@RELEASE@-0ubuntu*", "580.2").endswith(".1")


def test_a_status_without_the_driver_has_everything_else() -> None:
    status = "Package: a\nStatus: install ok installed\n\nPackage: libcuda1\nArchitecture: i386\n\nPackage: b\n"
    assert preview.without(["libcuda1"], status) == "Package: a\nStatus: install ok installed\n\nPackage: b\n"


def test_files_and_keys_of_the_question_take_the_place_of_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apt, folder = tmp_path / "apt", tmp_path / "private"
    for name in ("sources.list.d", "preferences.d"):
        (apt / name).mkdir(parents=True)
    (apt / "sources.list.d" / "debian.sources").write_text("theirs")
    (apt / "sources.list.d" / "cuda.list").write_text("old")
    folder.mkdir()
    monkeypatch.setattr(preview, "APT", apt)
    files = {
        str(apt / "sources.list.d" / "cuda.list"): "",
        str(apt / "sources.list.d" / "new.sources"): "Signed-By: /etc/apt/keyrings/k.asc\n",
        "/etc/apt/apt.conf.d/52own": 'Acquire::http::Proxy::m "http://p";',
    }
    preview.lay_over(folder, {"files": files, "keys": {"/etc/apt/keyrings/k.asc": "armour"}})
    assert sorted(path.name for path in (folder / "sources.list.d").iterdir()) == ["debian.sources", "new.sources"]
    (line,) = (folder / "sources.list.d" / "new.sources").read_text().splitlines()
    assert Path(line.removeprefix("Signed-By: ")).read_text() == "armour"
    assert (folder / "apt.conf").read_text().endswith('Acquire::http::Proxy::m "http://p";')


def test_an_apt_that_refuses_is_told_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "apt-get"
    tool.write_text(
        "#!/bin/sh\necho 'W: GPG error: http://m: EXPKEYSIG 12' >&2\necho 'W: other' >&2\n"
        "echo 'E: The repository is not signed.' >&2\nexit 100\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(preview.AptError) as raised:
        preview.output_of(["apt-get", "update"])
    assert str(raised.value) == "W: GPG error: http://m: EXPKEYSIG 12; E: The repository is not signed."


def test_a_file_that_apt_cannot_read_is_told_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "apt-get"
    tool.write_text('#!/bin/sh\necho "E: Unable to parse ${2%/apt.conf}/preferences.d/x.pref (1)" >&2\nexit 100\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("APT_CONFIG", "")  # which is set for all that is asked
    with pytest.raises(preview.AptError) as raised:
        preview.answer({"files": {}})
    assert str(raised.value) == "E: Unable to parse /etc/apt/preferences.d/x.pref (1)"


def test_a_tool_that_hangs_is_killed_with_all_that_it_began(tmp_path: Path) -> None:
    with pytest.raises(preview.AptError, match="did not end within 1 s"):
        preview.output_of(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"], 1)
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


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
