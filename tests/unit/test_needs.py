"""Packages that tests need: installed where root can, without their services, and the command elsewhere."""

import importlib.util
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
from programs import run_program

ROOT = Path(__file__).parents[2]
APT_GET = """#!/bin/sh
PATH=/usr/bin:/bin
echo "$@" >> {folder}/calls
case "$*" in *" install "*) ;; *) exit 0 ;; esac
{folder}/policy-rc.d && exit 70
printf '#!/bin/sh\\n' > {folder}/bin/nft && chmod 755 {folder}/bin/nft
{more}
"""


@pytest.fixture
def needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, on a Debian of its own with a stub as apt-get; its tier `some` needs nft."""
    spec = importlib.util.spec_from_file_location("needs_of_a_test", ROOT / "scripts" / "needs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "needs_of_a_test", module)
    spec.loader.exec_module(module)
    (tmp_path / "bin").mkdir()
    release = tmp_path / "os-release"
    release.write_text('ID=mint\nID_LIKE="ubuntu debian"\n', encoding="utf-8")
    monkeypatch.setattr(module, "OS_RELEASE", release)
    monkeypatch.setattr(module, "POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setattr(module, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(module, "SYSTEM_FOLDERS", str(tmp_path / "bin"))
    monkeypatch.setattr(module, "NEEDS", {"some": {"nft": "nftables"}})
    monkeypatch.setattr(module.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    stub(tmp_path, "true")
    return module


def stub(folder: Path, more: str) -> None:
    """Let apt-get do this after it has installed nft."""
    (folder / "bin" / "apt-get").write_text(APT_GET.format(folder=folder, more=more), encoding="ascii")
    (folder / "bin" / "apt-get").chmod(0o755)


SYSTEMCTL = """#!/bin/sh
PATH=/usr/bin:/bin
case "$1" in
  list-unit-files) for unit in ours.service $(ls {folder}/enabled); do echo "$unit enabled enabled"; done ;;
  disable) shift; for unit; do rm {folder}/enabled/$unit; done ;;
esac
"""


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text(encoding="ascii").splitlines()


def test_a_missing_package_is_installed_once_without_its_services(needs: ModuleType, tmp_path: Path) -> None:
    assert needs.install("some") is None
    assert [line.split()[-1] for line in calls(tmp_path)] == ["update", "nftables"]
    assert not (tmp_path / "policy-rc.d").exists()
    assert needs.install("some") is None
    assert len(calls(tmp_path)) == 2
    assert needs.install("gpu") is None


def test_services_that_come_with_a_package_do_not_start_with_the_system(needs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "enabled").mkdir()
    (tmp_path / "enabled" / "theirs.service").touch()
    (tmp_path / "bin" / "systemctl").write_text(SYSTEMCTL.format(folder=tmp_path), encoding="ascii")
    (tmp_path / "bin" / "systemctl").chmod(0o755)
    stub(tmp_path, f"touch {tmp_path}/enabled/nft.service {tmp_path}/enabled/of-a-dependency.socket")
    assert needs.install("some") is None
    assert [path.name for path in (tmp_path / "enabled").iterdir()] == ["theirs.service"]


@pytest.mark.parametrize(
    ("before", "after"), [("#!/bin/sh\nexit 0\n", "#!/bin/sh\nexit 0\n"), ("left by a killed run", None)]
)
def test_the_policy_for_services_is_restored(needs: ModuleType, tmp_path: Path, before: str, after: str | None) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text(needs.DENIED if after is None else before, encoding="ascii")
    policy.chmod(0o750)
    with suppress(KeyboardInterrupt), needs.no_services():
        assert policy.read_text(encoding="ascii") == needs.DENIED
        assert policy.stat().st_mode & 0o777 == 0o755
        raise KeyboardInterrupt
    assert (policy.read_text(encoding="ascii") if policy.exists() else None) == after
    assert after is None or policy.stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in tmp_path.iterdir() if "policy" in path.name) == ([policy.name] if after else [])


@pytest.mark.parametrize("case", ["user", "fedora", "fails", "hangs"])
def test_where_nothing_can_be_installed_the_command_is_named(
    needs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if case == "user":
        monkeypatch.setattr(needs.os, "geteuid", lambda: 1000)
    elif case == "fedora":
        needs.OS_RELEASE.write_text("ID=fedora\n", encoding="utf-8")
    elif case == "fails":
        stub(tmp_path, f"rm {tmp_path}/bin/nft; echo 'E: no network'; exit 100")
    else:
        stub(tmp_path, f"rm {tmp_path}/bin/nft; sleep 60")
        monkeypatch.setattr(needs, "INSTALL_LIMIT_S", 0.5)
    started = time.monotonic()
    assert needs.install("some") == "missing: nft; run as root: apt-get install nftables"
    assert time.monotonic() - started < 30
    assert (case in ("user", "fedora")) != (tmp_path / "calls").exists()
    assert case != "fails" or "E: no network" in capfd.readouterr().err
    assert not (tmp_path / "policy-rc.d").exists()


DPKG = """#!/bin/sh
PATH=/usr/bin:/bin
echo "dpkg $*" >> {folder}/calls
case "$1" in
  --audit) [ ! -e {folder}/half ] || echo "The following packages are only half configured" ;;
  --configure) rm {folder}/half ;;
esac
"""


@pytest.mark.parametrize("how", ["exit 100", "kill -INT $PPID; sleep 60"])
def test_an_installation_that_ended_half_way_is_finished_by_the_next(
    needs: ModuleType, tmp_path: Path, how: str
) -> None:
    (tmp_path / "bin" / "dpkg").write_text(DPKG.format(folder=tmp_path), encoding="ascii")
    (tmp_path / "bin" / "dpkg").chmod(0o755)
    stub(tmp_path, f"cd {tmp_path}; rm bin/nft; touch half; {how}")
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if "INT" in how:
            with pytest.raises(KeyboardInterrupt):
                needs.install("some")
        else:
            assert needs.install("some") == "missing: nft; run as root: apt-get install nftables"
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not (tmp_path / "policy-rc.d").exists()
    stub(tmp_path, "true")
    (tmp_path / "calls").unlink()
    assert needs.install("some") is None
    assert [line.split()[-1] for line in calls(tmp_path)] == ["--audit", "-a", "update", "nftables"]


def test_what_skipped_tests_ask_for_is_installed() -> None:
    text = (ROOT / "scripts" / "needs.py").read_text(encoding="utf-8")
    packages = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name not in ("test_needs.py", "test_run_tests.py"):
            lines = re.findall(r"(?:skip\(|reason=).*apt-get install ([a-z0-9 -]+)\"", path.read_text(encoding="utf-8"))
            packages |= {package for line in lines for package in line.split()}
    assert {"openssh-server", "slurmd", "gcc"} <= packages
    assert {package for package in packages if f'"{package}"' not in text} == set()


PIP = """import json, sys
if "--dry-run" in sys.argv:
    rows = [{{"metadata": {{"name": name}}}} for name in {names}]
    open(sys.argv[sys.argv.index("--report") + 1], "w").write(json.dumps({{"install": rows}}))
else:
    open({folder!r} + "/installed", "a").write("1")
"""


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize("names", [["torch", "sympy"], ["torch", "nvidia-cublas-cu12"]])
def test_a_framework_is_installed_once_and_never_with_cuda(
    needs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], framework: str
) -> None:
    made = "nvidia-cublas-cu12" not in names

    def bounded(argv: list[object], **_more: object) -> int:
        words = [str(word) for word in argv]
        if "venv" in words:
            Path(words[-1]).mkdir(parents=True)
            return 0
        (tmp_path / "pip.py").write_text(PIP.format(names=names, folder=str(tmp_path)), encoding="utf-8")
        return run_program([sys.executable, tmp_path / "pip.py", *words], limit_s=60).returncode

    monkeypatch.delenv(f"GPUNODE_{framework.upper()}_PYTHON", raising=False)
    monkeypatch.setattr(needs, "TORCH_FOLDER", tmp_path / "torch")
    monkeypatch.setattr(needs, "bounded", bounded)
    for _ in range(2):
        python, line = getattr(needs, f"{framework}_python")()
        assert (python is not None) == made
        assert made or "no CPU build" in line
    installed = tmp_path / "installed"
    assert (installed.read_text(encoding="ascii") if installed.exists() else "") == ("1" if made else "")
