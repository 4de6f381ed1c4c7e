"""mmdebstrap's command line, and one line for its failures."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import run_program, runs

from gpunode.errors import UndeterminedError
from gpunode.lab import image
from gpunode.lab.image import build_mode, command, debian_tree, reason
from gpunode.lab.recipe import SYSTEMS, Mirror, Recipe

RECIPE = Recipe(SYSTEMS["debian-12"], "amd64", Mirror("http://m.example/debian", "http://m.example/debian-security"))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, and a place for builds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "builds").mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(image, "_TEMPORARY", tmp_path / "builds")
    monkeypatch.setattr(image, "_FREE_GIB", 0)
    monkeypatch.setattr(image, "KEYRING", "/dev/null")
    return folder


FULL = "the disk is full at {}: free 3 GiB there"


def tool(folder: Path, name: str, body: str = "") -> None:
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)


def test_as_root_mounts_and_processes_are_in_namespaces() -> None:
    argv = command(RECIPE, Path("/b"), "root")
    assert argv[:3] == ["setpriv", "--pdeathsig", "KILL"]
    assert argv[3 : argv.index("mmdebstrap")] == [
        "unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc",
    ]  # fmt: skip
    assert argv[-5:-3] == ["bookworm", "/b/tree.tar"]


def test_as_a_user_mmdebstrap_makes_its_own_namespace() -> None:
    argv = command(RECIPE, Path("/b"), "unshare")
    assert argv[:2] == ["mmdebstrap", "--mode=unshare"]


def test_without_mmdebstrap_the_package_is_named(tools: Path) -> None:
    with pytest.raises(UndeterminedError, match="apt-get install mmdebstrap"):
        build_mode()


def test_without_debians_keys_the_package_is_named(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tools, "mmdebstrap")
    monkeypatch.setattr(image, "KEYRING", "/nowhere/keys.gpg")
    with pytest.raises(UndeterminedError, match="apt-get install debian-archive-keyring"):
        build_mode()


def test_a_user_needs_newuidmap(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tools, "mmdebstrap")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UndeterminedError, match=r"needs root, or newuidmap"):
        build_mode()
    tool(tools, "newuidmap")
    assert build_mode() == "unshare"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert build_mode() == "root"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "I: running\nE: Unable to locate package x\nI: done\nE: mmdebstrap failed to run\n",
            "E: Unable to locate package x",
        ),
        ("Err:1 http://u:p@m.example x InRelease\n  503\n", "Err:1 http://m.example x InRelease"),
        ("I: a\nsomething odd\n\n", "something odd"),
        ("E: mmdebstrap failed to run\n", "E: mmdebstrap failed to run"),
        ("", "no output"),
        ("Err:4 http://m.example x\n  Write error - write (28: No space left on device)\nE: mmdebstrap failed\n", FULL),
        ("tar: ./usr/lib/x.so: Cannot write: No space left on device\n", FULL),
    ],
)
def test_the_reason_is_apts_first_error_or_a_full_disk(tmp_path: Path, log: str, line: str) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build/log").write_bytes(log.encode() + bytes(9))
    assert reason(tmp_path / "build/log") == line.format(tmp_path)


def plain(recipe: Recipe, folder: Path, mode: str) -> list[str]:
    return ["mmdebstrap", str(folder)]


def test_a_failed_build_leaves_no_file(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tools, "mmdebstrap", "print('E: no such suite'); raise SystemExit(25)")
    monkeypatch.setattr(image, "command", plain)
    with pytest.raises(UndeterminedError, match=r"debian-12 \(exit 25\): E: no such suite"), debian_tree(RECIPE):
        pytest.fail("the body must not run")
    assert list((tools.parent / "builds").iterdir()) == []


@pytest.mark.parametrize("mib", [1, 4])
def test_a_disk_that_a_build_fills_is_named_and_nothing_is_left(
    tools: Path, monkeypatch: pytest.MonkeyPatch, mib: int
) -> None:
    """Its log is on that disk too."""
    disk = tools.parent / "builds"
    mount = ["/bin/mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", disk]
    if os.geteuid() != 0 or run_program(mount, limit_s=10).returncode != 0:
        pytest.skip("needs mount namespaces and root: mount -t tmpfs")
    body = "import sys; open(sys.argv[1] + '/tree.tar', 'wb').write(bytes(8 << 20))"
    tool(tools, "mmdebstrap", body)
    monkeypatch.setattr(image, "command", plain)
    try:
        with pytest.raises(UndeterminedError) as caught, debian_tree(RECIPE):
            pytest.fail("the body must not run")
        assert list(disk.iterdir()) == []
    finally:
        run_program(["/bin/umount", disk], limit_s=10)
    assert f"{disk}" in str(caught.value)
    assert "free" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_build_over_its_limit_is_killed_with_its_children(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = "import time; time.sleep(600)"
    popen = f"subprocess.Popen([{sys.executable!r}, '-c', {child!r}])"
    body = f"import subprocess\nchild = {popen}\nprint(child.pid, flush=True)\nchild.wait()"
    tool(tools, "mmdebstrap", body)
    monkeypatch.setattr(image, "command", plain)
    monkeypatch.setattr(image, "BUILD_LIMIT_S", 2)
    with pytest.raises(UndeterminedError, match=r"did not end within 2 s: \d+") as caught, debian_tree(RECIPE):
        pytest.fail("the body must not run")
    pid = int(str(caught.value).rsplit(" ", 1)[1])
    deadline = time.monotonic() + 10
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(pid)
    assert list((tools.parent / "builds").iterdir()) == []


def test_the_tree_is_there_as_long_as_it_is_used(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tools, "mmdebstrap", "import sys; open(sys.argv[1] + '/tree.tar', 'w').write('tree')")
    monkeypatch.setattr(image, "command", plain)
    stale = tools.parent / "builds/gpunode-lab-debian-12-killed"
    stale.mkdir()
    with debian_tree(RECIPE) as tar:
        assert tar.read_text() == "tree"
        assert not stale.exists()
    assert not tar.parent.exists()


def test_the_customize_hook_is_one_shell_word() -> None:
    hook = next(part for part in command(RECIPE, Path("/b"), "root") if part.startswith("--customize-hook=chroot"))
    words = hook.removeprefix("--customize-hook=chroot ")
    shown = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {words}", "sh", "/root"], capture_output=True, text=True, check=True, timeout=10
    )
    assert shown.stdout.split("\0")[:3] == ["/root", "sh", "-c"]
    assert shown.stdout.split("\0")[3] == RECIPE.setup
