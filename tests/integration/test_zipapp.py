"""gpunode as one file: started by a Python that has nothing of it, as root, as somebody without a home."""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SYSTEMS = Path(f"/usr/bin/python{VERSION}")
BARE = [str(SYSTEMS if SYSTEMS.exists() else Path(sys.base_prefix) / "bin" / f"python{VERSION}"), "-I", "-S"]
"""A Python without any installed package."""
BUNDLE = ROOT / "tests" / "fixtures" / "bundles" / "debian-12-driver.json"
NOBODY = 65534
Ran = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built for this Python alone."""
    out = tmp_path_factory.mktemp("zipapp") / "gpunode.pyz"
    argv = [sys.executable, "-m", "gpunode", "zipapp", str(out), "--python", VERSION]
    done = subprocess.run(argv, check=False, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    bare = subprocess.run([*BARE, "-c", "import pydantic"], check=False, timeout=60, capture_output=True, text=True)
    assert "ModuleNotFoundError" in bare.stderr
    return out


def start(archive: Path, *words: str | Path, cache: Path | None, **environment: str) -> Ran:
    """Run the archive with the bare Python; without ``cache`` where it would go by itself."""
    env = {
        "PATH": "/usr/bin:/bin",
        "GPUNODE_HISTORY": "off",
        **({"GPUNODE_UNPACK_DIR": str(cache)} if cache else {}),
        **environment,
    }
    argv = [*BARE, str(archive), *map(str, words)]
    return subprocess.run(
        argv, check=False, timeout=120, capture_output=True, text=True, env=env, cwd="/", stdin=subprocess.DEVNULL
    )


def test_it_has_all_that_it_needs(archive: Path, tmp_path: Path) -> None:
    for words, holds in (
        (["--version"], "gpunode, version"),
        (["schema", "report"], '"$schema"'),
        (["catalog", "show", "H100"], "H100"),
        (["checks"], "gpu.present"),
        (["collect", "--help"], "--save"),
    ):
        done = start(archive, *words, cache=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert holds in done.stdout
    assert len(list(tmp_path.iterdir())) == 1


def test_it_judges_a_saved_bundle_as_the_installed_one_does(archive: Path, tmp_path: Path) -> None:
    words = ["validate", "--replay", str(BUNDLE), "--format", "json"]
    packed = start(archive, *words, cache=tmp_path)
    argv = [sys.executable, "-m", "gpunode", *words]
    other = subprocess.run(argv, check=False, timeout=120, capture_output=True, text=True)
    assert (packed.returncode, packed.stderr) == (other.returncode, other.stderr)
    assert json.loads(packed.stdout)["nodes"] == json.loads(other.stdout)["nodes"]


def test_it_judges_this_machine(archive: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    done = start(archive, "validate", "--save", saved, "--format", "json", cache=tmp_path / "cache")
    (node,) = json.loads(done.stdout)["nodes"]
    assert done.returncode in (0, 1, 3)
    assert ("node.reachable", "pass") in {(finding["check"], finding["status"]) for finding in node["findings"]}
    assert json.loads((saved / "localhost.json").read_text())["commands"]["uname"]["rc"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start it as another user")
@pytest.mark.skipif(not SYSTEMS.exists(), reason=f"no {SYSTEMS}: another user may not be able to run ours")
def test_a_user_without_a_home_leaves_nothing_behind(archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="gpunode-test-", dir="/var/tmp") as folder:
        open_folder = Path(folder)
        open_folder.chmod(0o777)
        public = open_folder / "gpunode.pyz"
        public.write_bytes(archive.read_bytes())
        done = subprocess.run(
            [*("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"), *BARE, public, "validate"],
            check=False,
            timeout=120,
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin:/bin", "TMPDIR": folder},
            cwd="/",
        )
        assert done.returncode in (0, 1, 3), done.stderr
        assert "localhost" in done.stdout
        assert [path.name for path in open_folder.iterdir()] == ["gpunode.pyz"]


def test_starting_twice_at_once_works(archive: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        ran = list(pool.map(lambda _: start(archive, "--version", cache=tmp_path), range(4)))
    assert [done.returncode for done in ran] == [0] * 4
    assert len(list(tmp_path.iterdir())) == 1


def test_files_that_others_may_write_are_not_used(archive: Path, tmp_path: Path) -> None:
    assert start(archive, "--version", cache=tmp_path).returncode == 0
    (kept,) = tmp_path.iterdir()
    kept.chmod(0o777)
    done = start(archive, "--version", cache=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gpunode: cannot be unpacked in {tmp_path}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "change", [{"pythons": ["3.99"]}, {"machines": ["m68k"]}], ids=["another Python", "another processor"]
)
def test_an_unfit_archive_reports_what_it_is_for(archive: Path, tmp_path: Path, change: dict[str, str]) -> None:
    other = rewritten(archive, tmp_path / "other.pyz", lambda made: {**made, **change})
    done = start(other, "--version", cache=tmp_path / "cache")
    assert (done.returncode, done.stdout) == (2, "")
    assert str(next(iter(change.values()))[0]) in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def rewritten(archive: Path, out: Path, change: Callable[[dict[str, object]], dict[str, object]]) -> Path:
    """The same archive with another word about what it was made for."""
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(out, "w") as target:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename == "made-for.json":
                data = json.dumps(change(json.loads(data))).encode()
            target.writestr(entry, data)
    return out
