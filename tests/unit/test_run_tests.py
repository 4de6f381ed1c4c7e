"""Which tests a change needs."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"
ON_NODES = ("integration", "lab", "molecule")


def git(root: Path, *argv: str) -> None:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(root), *settings, *argv], check=True, timeout=30)


def commit(root: Path, message: str) -> None:
    git(root, "add", ".")
    git(root, "commit", "-q", "--allow-empty", "-m", message)


def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setitem(sys.modules, "run_tests", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, its root a fresh repository with one commit."""
    module = script(monkeypatch)
    git(tmp_path, "init", "-q")
    commit(tmp_path, "first")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.delenv("GPUNODE_TEST_SINCE", raising=False)
    return module


@pytest.fixture
def since_the_commit(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with tests and scenarios to choose from, and the first commit as the base."""
    for name in ("test_lab_nodes.py", "test_docker.py", "test_dcgm.py"):
        touch(runner, f"tests/lab/{name}")
    for name in ("default", "docker", "dcgm"):
        touch(runner, f"molecule/{name}/molecule.yml")
        touch(runner, f"roles/{name}/tasks/main.yml")
    touch(runner, "tests/lab/test_dcgm.py", 'CONCERNS = ("plugins/modules/",)\nraise ImportError\n')
    for name, part in (("docker", "docker_daemon"), ("dcgm", "engines")):
        touch(runner, f"gpunode/provisioning/{part}.py")
        plan = f'from gpunode.provisioning import {part}\n\nROLE = Role(\n    name="{name}",\n)\n'
        (runner.ROOT / f"gpunode/provisioning/{name}.py").write_text(plan, encoding="utf-8")
    commit(runner.ROOT, "tests")
    monkeypatch.setenv("GPUNODE_TEST_SINCE", "HEAD")
    return runner


def touch(runner: ModuleType, path: str, text: str = "changed\n") -> None:
    target = runner.ROOT / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def test_without_a_base_nothing_is_known(runner: ModuleType) -> None:
    assert runner.changed() is None
    assert not runner.concerned("roles/dcgm/")


def test_where_nothing_changed_the_core_runs(since_the_commit: ModuleType) -> None:
    assert since_the_commit.lab_files(everything=False).run == ["tests/lab/test_lab_nodes.py"]
    assert since_the_commit.scenarios(everything=False).run == ["default"]


def test_everything_is_everything(since_the_commit: ModuleType) -> None:
    assert len(since_the_commit.lab_files(everything=True).run) == 3
    assert since_the_commit.scenarios(everything=True).run == ["dcgm", "default", "docker"]


@pytest.mark.parametrize(
    ("path", "files", "scenarios"),
    [
        ("roles/dcgm/tasks/main.yml", {"test_dcgm"}, {"dcgm"}),
        ("roles/preflight/tasks/main.yml", set(), {"dcgm", "docker"}),
        ("plugins/modules/dcgm.py", {"test_dcgm"}, {"dcgm", "docker"}),
        ("gpunode/provisioning/docker_daemon.py", {"test_docker"}, {"docker"}),
        ("gpunode/provisioning/dcgm.py", {"test_dcgm"}, {"dcgm"}),
        ("gpunode/provisioning/engines.py", {"test_dcgm"}, {"dcgm"}),
        ("tests/lab/test_docker.py", {"test_docker"}, set()),
        ("docs/lab.md", set(), set()),
    ],
)
def test_a_change_runs_what_stands_on_it(
    since_the_commit: ModuleType, path: str, files: set[str], scenarios: set[str]
) -> None:
    file = since_the_commit.ROOT / path
    if not file.exists():
        touch(since_the_commit, path)
    file.write_text(f"{file.read_text(encoding='utf-8')}changed again\n", encoding="utf-8")
    assert since_the_commit.changed() == [path]
    chosen = {Path(file).stem for file in since_the_commit.lab_files(everything=False).run}
    assert chosen == files | {"test_lab_nodes"}
    chosen = since_the_commit.scenarios(everything=False)
    assert {*chosen.run, *chosen.left_out} == scenarios | {"default"}


def test_a_wide_change_runs_the_core_and_names_the_rest(
    since_the_commit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(since_the_commit, "AT_MOST", {"lab": 1, "molecule": 1})
    for role in ("dcgm", "docker"):
        touch(since_the_commit, f"roles/{role}/tasks/main.yml", "changed again\n")
    files, scenarios = since_the_commit.lab_files(everything=False), since_the_commit.scenarios(everything=False)
    assert files.run == ["tests/lab/test_lab_nodes.py"]
    assert files.left_out == ["tests/lab/test_dcgm.py", "tests/lab/test_docker.py"]
    assert (scenarios.run, scenarios.left_out) == (["default"], ["dcgm", "docker"])
    tally = since_the_commit.Tally(passed=1, left_out=files.left_out)
    assert "test_dcgm, test_docker" in since_the_commit.describe("lab", tally)


def test_tests_in_virtual_machines_run_for_what_they_concern_alone(since_the_commit: ModuleType) -> None:
    touch(since_the_commit, "tests/vm/machine.py")
    touch(since_the_commit, "tests/vm/test_vm_machine.py", 'CONCERNS = ("tests/vm/",)\n')
    touch(since_the_commit, "tests/vm/test_other.py")
    commit(since_the_commit.ROOT, "machines")
    assert len(since_the_commit.vm_files(everything=True).run) == 2
    touch(since_the_commit, "docs/lab.md")
    assert since_the_commit.vm_files(everything=False).run == []
    (since_the_commit.ROOT / "tests/vm/machine.py").write_text("changed again\n", encoding="utf-8")
    assert since_the_commit.vm_files(everything=False).run == ["tests/vm/test_vm_machine.py"]


def test_the_paths_that_tests_concern_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    root = SCRIPT.parents[1]
    module = script(monkeypatch)
    files = [*root.glob("tests/lab/test_*.py"), *root.glob("tests/vm/test_*.py")]
    prefixes = {prefix for file in files for prefix in module.concerns(file, root)}
    assert len(prefixes) > 50
    assert {
        prefix for prefix in prefixes if not any(root.glob(prefix if prefix.endswith("/") else f"{prefix}*"))
    } == set()
    core = {file.stem for file in files if file.parent.name == "lab" and not module.concerns(file, root)}
    assert core == {"test_lab_nodes", "test_driver_nvidia"}


def test_a_role_stands_for_the_modules_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script(monkeypatch)
    root = SCRIPT.parents[1]
    roles = {path.parents[1].name for path in root.glob("roles/*/tasks/main.yml")} - {"common", "preflight"}
    assert [role for role in sorted(roles) if not module.plan_of(role, root)] == []
    docker, driver = module.plan_of("docker", root), module.plan_of("nvidia_driver", root)
    assert {"gpunode/provisioning/docker.py", "gpunode/provisioning/docker_daemon.py"} <= docker
    assert {f"gpunode/provisioning/driver/{name}.py" for name in ("plan", "apt", "dnf")} <= driver
    assert not [path for path in docker | driver if path.startswith(module.FOUNDATION)]
    assert docker < set(module.concerns(root / "tests/lab/test_docker.py", root))


CAPTURED = """
import pytest

@pytest.mark.captures
@pytest.mark.parametrize("number", range(3))
def test_of_all(number):
    assert number

@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.captures(one)) for one in ("a/b", "a/altered")])
def test_of_one(name):
    assert 1

def test_of_none():
    assert 1
"""


@pytest.mark.parametrize("options", [("-n", "2"), ("-k", "of_one or of_none")])
def test_without_the_recorded_outputs_the_table_reports_how_many_tests_were_not_selected(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    tests = runner.ROOT / "tests"
    (tests / "captures").mkdir(parents=True)
    for name in ("conftest.py", "captured.py"):
        (tests / name).write_text((SCRIPT.parents[1] / "tests" / name).read_text(encoding="utf-8"), encoding="utf-8")
    digest = hashlib.sha256(b"text").hexdigest()
    rows = f"file\tsha256\na/b\t{digest}\na/altered\t{digest}\n"
    (tests / "captures" / "manifest.tsv").write_text(rows, encoding="utf-8")
    (tests / "test_captured.py").write_text(CAPTURED, encoding="utf-8")
    (runner.ROOT / "pytest.ini").write_text("[pytest]\npythonpath = tests\nmarkers = captures\n", encoding="utf-8")
    folder = runner.ROOT / "captures" / "a"
    folder.mkdir(parents=True)
    (folder / "b").write_text("text", encoding="utf-8")
    (folder / "altered").write_text("Text", encoding="utf-8")
    monkeypatch.setenv("GPUNODE_CAPTURES", str(folder.parent))
    tally = runner.pytest_tier("tests/test_captured.py", "-q", "-p", "no:cacheprovider", *options, limit_s=60)
    number = 1 if "-k" in options else 4
    assert (tally.passed, tally.failed, tally.skipped) == (2, 0, 0)
    lines = runner.describe("unit", tally).splitlines()
    assert lines[1].strip() == f"captures: not fetched (make captures): {number} tests not selected"
    if "-k" in options:
        (folder / "altered").write_text("text", encoding="utf-8")
        tally = runner.pytest_tier("tests/test_captured.py", "-q", "-p", "no:cacheprovider", *options, limit_s=60)
        assert (tally.passed, tally.failed, tally.untested) == (3, 0, 0)


def test_everything_is_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script(monkeypatch)
    passed: list[dict[str, str]] = []

    def tier(*_arguments: str, env: dict[str, str], **_options: object) -> object:
        passed.append(env)
        return module.Tally(passed=1, untested=2)

    monkeypatch.setattr(module, "pytest_tier", tier)
    runs = len(module.FORKING) + 1
    assert module.TIERS["unit"]() == module.Tally(passed=runs, untested=2 * runs)
    assert module.WHOLE["unit"]().passed == runs
    assert [{key: value for key, value in env.items() if key != "TMPDIR"} for env in passed] == [{}] * runs + [
        {"GPUNODE_TEST_ALL": "1"}
    ] * runs


def test_each_unit_test_is_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script(monkeypatch)
    runs: list[tuple[str, ...]] = []

    def tier(*words: str, **_options: object) -> object:
        runs.append(words)
        return module.Tally()

    monkeypatch.setattr(module, "pytest_tier", tier)
    module.unit()
    # They run at the same time, so in any order.
    *first, rest = sorted(([word for word in words if "tests/" in word] for words in runs), key=len)
    separate = [folder for folders in first for folder in folders]
    assert len(separate) == len(set(separate)) > 3
    assert all((SCRIPT.parents[1] / folder).is_dir() for folder in separate)
    assert rest == ["tests/unit", "tests/property", "tests/captures", *(f"--ignore={folder}" for folder in separate)]


def test_each_test_on_loopback_is_in_one_run_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script(monkeypatch)
    runs = []

    def tier(*arguments: str, **_options: object) -> object:
        runs.append((arguments[arguments.index("-m") + 1], "-n" in arguments))
        return module.Tally(3, 1, 2, broken=[arguments[arguments.index("-m") + 1]], skips=Counter({"no nft": 2}))

    monkeypatch.setattr(module, "pytest_tier", tier)
    monkeypatch.setattr(module.needs, "torch_python", lambda: (None, "no PyTorch"))
    monkeypatch.setattr(module.needs, "tensorflow_python", lambda: (None, "no TensorFlow"))
    monkeypatch.setattr(module.needs, "s3_python", lambda: (None, "no S3 server"))
    whole = module.integration()
    assert sorted(runs) == [("not alone and not waiting", True), ("waiting", False)]
    assert sorted(whole.broken) == sorted(marks for marks, _ in runs)
    assert (whole.passed, whole.failed, whole.skipped, whole.skips) == (6, 2, 4, Counter({"no nft": 4}))
    assert module.alone().passed == 3
    assert runs[2:] == [("alone", False)]


@pytest.mark.parametrize("names", [("unit", *ON_NODES, "alone"), ("unit", "molecule", "alone", "lab")])
def test_tiers_that_wait_run_at_the_same_time_and_what_is_alone_does_not(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], names: tuple[str, ...]
) -> None:
    module = script(monkeypatch)
    together = [name for name in ON_NODES if name in names]
    all_of_them = threading.Barrier(len(together), timeout=20)

    def tier(name: str, output: IO[bytes] | None = None) -> object:
        if name in module.SIDE_BY_SIDE:
            all_of_them.wait()  # breaks unless the others run too
        assert module.run(["echo", f"by {name}"], limit_s=20, output=output) == 0
        return module.Tally(passed=1)

    monkeypatch.setattr(module, "no_lab_here", lambda: None)
    installed: list[str] = []
    monkeypatch.setattr(module.needs, "install", installed.append)
    tallies = module.run_tiers(names, {name: partial(tier, name) for name in names})
    order = ["unit", *together, "alone"]
    assert [(name, tally.passed) for name, tally in tallies.items()] == [(name, 1) for name in order]
    lines = capfdbinary.readouterr().out.decode().split("\n")
    assert lines[:3] == ["== unit", "by unit", f"== {', '.join(together)}"]
    assert sorted(lines[3:-3]) == [f"by {name}" for name in together]
    assert lines[-3:] == ["== alone", "by alone", ""]
    assert installed == ["unit", *(["integration"] * ("integration" in names)), "integration"]


def test_each_file_of_lab_tests_has_a_pytest_of_its_own_and_all_count(
    since_the_commit: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module, both = since_the_commit, threading.Barrier(2, timeout=20)
    touch(module, "tests/lab/test_other_nodes.py")
    monkeypatch.setattr(module, "no_lab_here", lambda: None)
    monkeypatch.setattr(module, "processors", lambda: 2)

    def tier(file: str, *_words: str, output: IO[bytes], **_options: object) -> object:
        both.wait()
        output.write(f"of {file}\n".encode())
        return module.Tally(passed=2, skipped=1)

    monkeypatch.setattr(module, "pytest_tier", tier)
    tally = module.lab()
    assert (tally.passed, tally.skipped) == (4, 2)
    printed = capfd.readouterr().out
    assert [printed.count(f"of tests/lab/test_{name}.py\n") for name in ("lab_nodes", "other_nodes")] == [1, 1]


def test_an_interrupt_ends_what_runs_side_by_side_and_starts_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = script(monkeypatch)
    mark = tmp_path / "started later"

    def waiting(output: IO[bytes] | None) -> object:
        return module.tool_tier({"first": ["sleep", "600"], "second": ["touch", mark]}, output, limit_s=900)

    def interrupted(_output: IO[bytes] | None) -> object:
        end = time.monotonic() + 20
        while not module.RUNNING._processes:
            assert time.monotonic() < end
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module.side_by_side({"one": interrupted, "other": waiting}, at_once=2)
    (process,) = module.RUNNING._processes
    assert process.returncode is not None
    assert not mark.exists()


@pytest.mark.parametrize("gib", [0, 1 << 20])
def test_temporary_files_are_in_memory_where_there_is_enough_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int
) -> None:
    module = script(monkeypatch)
    monkeypatch.setattr(module, "MEMORY", tmp_path)
    monkeypatch.setattr(module, "MEMORY_GIB", gib)
    kept = [f"gpunode-{os.getppid()}", "gpunode-x", "other"]
    for name in (*kept, "gpunode-4194305"):  # above the kernel's highest process id
        (tmp_path / name).mkdir()
    with module.in_memory() as environment:
        folder = tmp_path / f"gpunode-{os.getpid()}"
        assert environment == ({} if gib else {"TMPDIR": str(folder)})
        (folder / "left").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


TESTS = """
import pytest

@pytest.mark.skipif(True, reason="no nft: apt-get install nftables")
@pytest.mark.parametrize("number", range(3))
def test_of_packages(number):
    raise AssertionError

def test_of_a_gpu():
    pytest.skip("no NVIDIA driver is loaded on this machine: 0 GPUs")

def test_that_passes():
    assert 1
"""
MODULE = """
import pytest
pytest.skip("tests/evidence/rows.yml is missing", allow_module_level=True)
"""


@pytest.mark.parametrize("root", [True, False])
def test_a_skip_that_is_not_allowed_is_a_failure_where_root_can_install(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, root: bool
) -> None:
    (runner.ROOT / "tests").mkdir()
    (runner.ROOT / "tests" / "test_some.py").write_text(TESTS, encoding="utf-8")
    (runner.ROOT / "tests" / "test_module.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setattr(runner.needs, "can_install", lambda: root)
    tally = runner.pytest_tier("tests/test_some.py", "tests/test_module.py", "-q", "-p", "no:cacheprovider", limit_s=60)
    assert tally.skips == Counter(
        {
            "no nft: apt-get install nftables": 3,
            "no NVIDIA driver is loaded on this machine: 0 GPUs": 1,
            "tests/evidence/rows.yml is missing": 1,
        }
    )
    assert (tally.passed, tally.failed, tally.skipped) == ((1, 4, 1) if root else (1, 0, 5))
    lines = runner.skips({"integration": tally})
    assert sum("nftables" in line and " 3 " in line for line in lines) == 1
    assert sum("failure" in line for line in lines) == (2 if root else 0)


def test_a_tier_without_its_programs_is_a_failure_where_root_can_install(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.os, "geteuid", lambda: 0)
    monkeypatch.setattr(runner.needs, "install", lambda tier: f"missing: dockerd of {tier}")
    monkeypatch.setattr(runner.needs, "can_install", lambda: True)
    assert runner.lab().failed == runner.molecule().failed == 1
    monkeypatch.setattr(runner.needs, "can_install", lambda: False)
    assert (runner.lab().failed, runner.lab().not_run) == (0, "missing: dockerd of lab")


def test_allowed_skips_are_few_and_each_is_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script(monkeypatch)
    assert len(module.ALLOWED_SKIPS) <= 6
    sources = [path.read_text(encoding="utf-8") for path in sorted((SCRIPT.parents[1] / "tests").rglob("*.py"))]
    reasons = {reason for text in sources for reason in re.findall(r"(?:skip\(|reason=)f?\"([^\"]+)\"", text)}
    reasons.add(module.gpu().not_run or "no NVIDIA driver is loaded on this machine")
    assert len(reasons) > 20
    unused = [
        name for name, pattern in module.ALLOWED_SKIPS.items() if not any(re.match(pattern, text) for text in reasons)
    ]
    assert unused == []
    assert not any(module.allowed_skip(text) for text in reasons if "apt-get install" in text or "is missing" in text)
    assert not module.allowed_skip("no reason given")


def test_the_page_lists_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (SCRIPT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| `([a-z]+)` \| .* \| .* \|$", page.partition("| tier |")[2].partition("\n\n")[0])
    module = script(monkeypatch)
    assert rows == list(module.TIERS)
    assert set(module.needs.NEEDS) <= set(rows)


def test_a_program_is_ended_with_what_ignores_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script(monkeypatch)
    argv = ["sh", "-c", "trap 'exit 1' INT; sleep 600 & echo $!; wait"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        child = Path("/proc") / process.stdout.readline().decode().strip() / "stat"
        module.end_group(process)
        end = time.monotonic() + 10
        while child.exists() and child.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < end
            time.sleep(0.02)


def test_changes_of_the_code_are_tried_if_everything_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script(monkeypatch)
    programs: list[str] = []

    def run(argv: list[str], **_options: object) -> int:
        programs.append(Path(argv[0]).name)
        return 1 if "scripts/mutation_tests.py" in argv else 0

    monkeypatch.setattr(module, "run", run)
    assert "mutation" not in module.TIERS
    tally = module.WHOLE["mutation"]()
    assert (tally.passed, tally.failed, programs) == (0, 1, ["pip", "python"])
    monkeypatch.setattr(module, "run", lambda *_argv, **_options: 1)
    monkeypatch.setattr(module.needs, "can_install", lambda: False)
    assert "cosmic-ray" in (module.WHOLE["mutation"]().not_run or "")


def test_each_folder_of_a_tier_has_tests() -> None:
    folders = set(re.findall(r'"(tests/\w+)"', SCRIPT.read_text(encoding="utf-8")))
    assert {"tests/unit", "tests/lab", "tests/vm", "tests/gpu"} <= folders
    assert [folder for folder in folders if not any((SCRIPT.parents[1] / folder).glob("test_*.py"))] == []
