"""``gpunode lab`` on bad input: one line, and the documented exit code. No engine is asked."""

from pathlib import Path

import pytest

from gpunode.cli import run
from gpunode.lab.state import HOME_VARIABLE
from gpunode.lab.workload_image import KINDS


@pytest.fixture(autouse=True)
def no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "labs"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (["up", "--name", "No Such"], 2, "--name 'No Such'"),
        (["up", "--os", "debian-11"], 2, "known: debian-12, debian-13"),
        (["up", "-n", "0"], 2, "-n 0: a lab has 1 to 64 nodes"),
        (["up", "-n", "65"], 2, "-n 65: a lab has 1 to 64 nodes"),
        (["up", "--mirror", "nowhere"], 2, "'nowhere' is not the URL of a Debian mirror"),
        (["up", "--mirror", "http://m.example/debian"], 3, "Docker engine"),
        (["up", "--hardware", "gh200-1"], 2, "--hardware gh200-1: a machine of aarch64, a lab shows x86_64 alone"),
        (["up", "--hardware", "h100"], 2, "--hardware h100: unknown hardware; known: hgx-h100-8, hgx-h200-8"),
        (["up", "-n", "33", "--hardware", "t4-1", "--hardware", "v100-2"], 2, "a lab has 1 to 64 nodes"),
        (["image", "jax", "--output", "x.tar"], 2, "jax"),
        (["fault", "l40s-4-1", "xid", "--heal", "--list"], 2, "--heal and --list"),
        (["fault", "l40s-4-1", "xid", "--list"], 2, "--list shows all faults: leave out xid"),
        (["fault", "l40s-4-1", "xid"], 3, "Docker engine"),
        (["image", "bare", "--output", "/no/such/folder/x.tar"], 2, "--output /no/such/folder/x.tar"),
        (["image", "bare", "--output", "/tmp"], 2, "--output /tmp: expected a file"),
        (["down"], 3, "Docker engine"),
        (["-v", "down", "-v"], 3, "Docker engine"),
        (["ssh", "-v", "deb12-1"], 2, "gpunode lab up --name default"),
        (["status"], 3, "Docker engine"),
        (["inventory"], 2, "gpunode lab up --name default"),
        (["inventory", "--path", "--name", "other"], 2, "gpunode lab up --name other"),
        (["ssh", "deb12-1"], 2, "gpunode lab up --name default"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", *argv]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gpunode: ")
    assert captured.err.count("\n") == 1
    assert line in captured.err


def test_the_help_names_every_workload_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", "image", "--help"]) == 0
    reported = capsys.readouterr().out
    assert all(kind in reported for kind in KINDS)


def test_nothing_is_left_of_a_refused_lab(tmp_path: Path) -> None:
    assert run(["lab", "up", "--mirror", "http://m.example/debian"]) == 3
    assert not (tmp_path / "labs").exists()
