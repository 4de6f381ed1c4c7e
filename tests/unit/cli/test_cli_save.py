"""``--save`` and ``--replay``: all bundles in order, one in memory; one that is lost costs itself alone."""

import json
import os
import random
import re
import resource
import signal
import socket
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from gpunode import fleet
from gpunode.catalog import load
from gpunode.cli import run
from gpunode.errors import UsageError
from gpunode.facts import facts_from_bundle
from gpunode.isolation import AnswerLimits
from gpunode.judging.evaluator import Evaluator, NodeAnswer
from gpunode.judging.saved import bundle_files, saved_answers
from gpunode.probe.bundle import Bundle
from gpunode.provisioning.node_stack import with_request
from gpunode.report.outcomes import CollectOutcome
from gpunode.stack import Request, plan
from gpunode.stack.picture import host_of

sys.path += [str(Path(__file__).parents[2] / "contract"), str(Path(__file__).parents[2])]

from bundles import hgx
from effort import effort

Capture = pytest.CaptureFixture[str]
NODES = [f"gpu-{number}" for number in range(1, 9)]
LONG = "g" * 300


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """The bundle that each of eight nodes, one of them with a name of 300 characters, and one of 90 letters returns."""
    text = json.dumps(hgx()).encode()

    def collect(targets: list[Any], **_: object) -> Iterator[fleet.Collected]:
        for target in targets:
            yield fleet.Collected(target.name, fleet.Answer(text, host=target.name), None, 0.5)

    monkeypatch.setattr("gpunode.fleet.collect", collect)
    monkeypatch.setattr("gpunode.fleet.targets_from_hosts", lambda hosts: [fleet.Target(host, "ssh") for host in hosts])
    return Bundle.from_json(text, "the test")


def socket_at(path: Path) -> None:
    """A socket's file."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


OBSTACLES: dict[str, Callable[[Path], object]] = {
    "link to a file": lambda path: path.symlink_to("/etc/hostname"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to a folder": lambda path: path.symlink_to("/tmp"),
    "folder": lambda path: path.mkdir(),
    "full folder": lambda path: (path / "x").mkdir(parents=True),
    "FIFO": os.mkfifo,
    "socket": socket_at,
}


def judged(capsys: Capture, *words: str) -> tuple[int, dict[str, str], list[str]]:
    """Exit code, the status of each node in the report, and the lines on stderr."""
    capsys.readouterr()
    code = run(["validate", "--level", "quick", "--select", "gpu.count", "--format", "json", *words])
    out, err = capsys.readouterr()
    return code, {node["host"]: node["status"] for node in json.loads(out)["nodes"]}, err.splitlines()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(effort(4, 60)))
def test_an_obstacle_costs_its_own_bundle_alone(
    capsys: Capture, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(seed)  # noqa: S311
    hosts = chance.sample([*NODES, LONG, "節" * 90], 8)
    kinds = list(OBSTACLES) if seed == 0 else chance.choices(list(OBSTACLES), k=chance.randint(1, 7))
    struck = dict(zip([host for host in hosts if host.isascii() and host != LONG], kinds, strict=False))
    for host, kind in struck.items():
        OBSTACLES[kind](Path(f"{host}.json"))
    lost = {host for host in hosts if host in struck or not host.isascii() or host == LONG}
    code, statuses, lines = judged(capsys, *hosts, "--save", ".")
    assert statuses == dict.fromkeys(hosts, "pass")
    assert code == (3 if lost else 0)
    assert {line.partition(": bundle not saved: ")[0] for line in lines} == {f"gpunode: {host}" for host in lost}
    assert len(lines) == len(lost)
    saved = [path for path in Path().glob("*.json") if path.is_file() and not path.is_symlink()]
    assert {path.stem for path in saved} == set(hosts) - lost
    assert {Bundle.from_json(path.read_bytes(), "it").host for path in saved} == set(hosts) - lost
    assert [path for path in Path().iterdir() if path.name.startswith(".")] == []
    assert run(["collect", *hosts, "--save", ".", "--format", "json"]) == code
    out, err = capsys.readouterr()
    assert f"{len(saved)} collected into ., 0 unreachable" in err
    outcome = CollectOutcome.model_validate_json(out)
    assert outcome.exit_code == code
    assert {node.host: node.status == "unsaved" for node in outcome.nodes} == {host: host in lost for host in hosts}
    assert all(node.reason for node in outcome.nodes if node.status != "collected")


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond 4 KiB: a write fails in its middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_no_node_its_report(
    capsys: Capture, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(bundle.to_json()) > 4096
    with full_disk():
        code, statuses, lines = judged(capsys, *NODES, "--save", str(tmp_path))
    assert (code, statuses) == (3, dict.fromkeys(NODES, "pass"))
    assert len(lines) == 8
    assert list(tmp_path.iterdir()) == []


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": lambda text, chance: text[: chance.randrange(len(text))],
    "empty": lambda _text, _chance: b"",
    "another document": lambda _text, _chance: b'{"schema": "gpunode.report/1", "nodes": []}',
    "not UTF-8": lambda text, _chance: b"\xff\xfe" + text,
    "NUL bytes": lambda text, _chance: bytes(len(text)),
    "a list": lambda _text, _chance: b"[" * 5000,
}


@pytest.mark.parametrize("seed", range(effort(2, 40)))
def test_a_file_that_is_no_bundle_costs_no_other_of_the_folder_its_report(
    capsys: Capture, tmp_path: Path, seed: int
) -> None:
    """One unreadable bundle in a folder ended the replay of all."""
    chance = random.Random(seed)  # noqa: S311
    for name in NODES:
        document = {**hgx(), "host": name}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    kinds = list(DAMAGES) if seed == 0 else chance.choices(list(DAMAGES), k=chance.randint(1, 7))
    bad = dict(zip(chance.sample(NODES, len(kinds)), kinds, strict=True))
    for name, kind in bad.items():
        path = tmp_path / f"{name}.json"
        path.write_bytes(DAMAGES[kind](path.read_bytes(), chance))
    code, statuses, lines = judged(capsys, "--replay", str(tmp_path))
    wrong = {str(tmp_path / f"{name}.json") for name in bad}
    assert statuses == {**dict.fromkeys(set(NODES) - set(bad), "pass"), **dict.fromkeys(wrong, "error")}
    assert (code, lines) == (3, [])
    for verb in ("env", "plan"):
        assert run([verb, "--replay", str(tmp_path), "--format", "json"]) == 3
        captured = capsys.readouterr()
        document = json.loads(captured.out)
        assert len(document["nodes" if verb == "env" else "groups"]) >= 1
        assert all(path in captured.out + captured.err for path in wrong)
    # Alone, it is wrong usage, as is a name that was mistyped.
    for file in (*wrong, str(tmp_path / "mistyped.json")):
        assert run(["validate", "--replay", file]) == 2
        assert file in capsys.readouterr().err


MIB = 1 << 20
DURATION = re.compile(r" \(\d+\.\d s\)")
"""The time that a run took."""
FIXTURES = Path(__file__).parents[2] / "fixtures" / "bundles"


def write_bundle(path: Path, size: int = 0) -> None:
    """A bundle with the file's name as its host, with a file of ``size`` bytes in it."""
    document = {
        "schema": "gpunode.bundle/1",
        "host": path.stem,
        "collected_at": "2026-11-20T00:00:00Z",
        "commands": {},
        "files": {"/big": "x" * size},
    }
    path.write_text(json.dumps(document), encoding="utf-8")


def facts_of(places: list[str]) -> Iterator[NodeAnswer]:
    """The facts of saved bundles."""
    files = bundle_files(places)
    with Evaluator() as evaluator:
        yield from evaluator.facts_of_fleet(saved_answers(files), strict=len(files) == 1)


def test_files_and_folders_in_the_order_given(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    for name in ("gpu-2", "gpu-1"):
        write_bundle(folder / f"{name}.json")
    (folder / "notes.txt").write_text("not read")
    write_bundle(tmp_path / "single.json")
    hosts = [node.host for node in facts_of([str(tmp_path / "single.json"), str(folder)])]
    assert hosts == ["single", "gpu-1", "gpu-2"]


def test_nothing_to_read_is_reported_before_the_first_is_read(tmp_path: Path) -> None:
    write_bundle(tmp_path / "good.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty: no bundle"):
        bundle_files([str(tmp_path / "good.json"), str(tmp_path / "empty")])


def test_memory_does_not_grow_with_the_number_of_bundles(tmp_path: Path) -> None:
    for number in range(100):
        write_bundle(tmp_path / f"gpu-{number:03d}.json", MIB)
    tracemalloc.start()
    try:
        names = [node.host for node in facts_of([str(tmp_path)])]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(names) == 100
    assert peak < 10 * MIB


@pytest.mark.parametrize("kind", ["time", "memory"])
def test_a_bundle_that_costs_too_much_to_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The reading itself, and not only the facts, is the worker's."""
    real = Bundle.from_json

    def costly(text: bytes, where: str, records: object) -> Bundle:
        if where.endswith("b.json"):
            return re.fullmatch(r"(a+)+b", "a" * 60) if kind == "time" else bytes(1 << 30)  # type: ignore[return-value]
        return real(text, where)

    monkeypatch.setattr("gpunode.probe.bundle.Bundle.from_json", costly)
    monkeypatch.setattr("gpunode.judging.evaluator.AnswerLimits", lambda: AnswerLimits(cpu_s=1, memory_mib=200))
    for name in ("a", "b", "c"):
        write_bundle(tmp_path / f"{name}.json")
    nodes = list(facts_of([str(tmp_path)]))
    assert [node.host for node in nodes] == ["a", str(tmp_path / "b.json"), "c"]
    assert [node.facts is None for node in nodes] == [False, True, False]
    assert ("more than 1 s" if kind == "time" else "MiB of memory") in (nodes[1].reason or "")


@pytest.mark.parametrize("verb", ["plan", "env"])
def test_the_verbs_go_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    real = Bundle.from_json

    def costly(text: bytes, where: str, records: object) -> Bundle:
        return bytes(1 << 30) if where.endswith("b.json") else real(text, where)  # type: ignore[return-value]

    monkeypatch.setattr("gpunode.probe.bundle.Bundle.from_json", costly)
    monkeypatch.setattr("gpunode.judging.evaluator.AnswerLimits", lambda: AnswerLimits(memory_mib=200))
    for name in ("a", "b", "c"):
        write_bundle(tmp_path / f"{name}.json")
    assert run([verb, "--replay", str(tmp_path), "--format", "json"]) == 3
    captured = capfd.readouterr()
    assert "MiB of memory" in captured.out + captured.err
    document = json.loads(captured.out)
    assert [node["host"] for node in document["nodes"]] == ["a", "c"] if verb == "env" else len(document["groups"]) == 2


@pytest.mark.parametrize("variable", [{}, {"nvidia_driver_flavour": "open"}])
@pytest.mark.parametrize("version", ["999.99", "580+", "latest", "580.", "<a", "1"])
def test_a_driver_that_is_no_version_ends_no_plan_of_others(version: str, variable: dict[str, str]) -> None:
    text = (FIXTURES / "debian-12-driver.json").read_text()
    assert "535.261.03" in text
    hosts = []
    for name, answer in (("bad", text.replace("535.261.03", version)), ("good", text)):
        facts = facts_from_bundle(Bundle.from_json(answer, name))
        hosts.append(with_request(host_of(name, facts, load()), variable, Request()))
    document = plan(hosts, Request(), load(), date(2026, 11, 20))
    (good,) = [group for group in document.groups if "good" in group.hosts]
    assert good.stack is not None or good.conflict is not None


def test_many_bundles_print_results_before_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        write_bundle(tmp_path / f"gpu-{number}.json")
    select = ["validate", "--replay", str(tmp_path), "--select", "gpu.present"]
    run(select)
    usual = capsys.readouterr()
    assert usual.err == ""
    monkeypatch.setattr("gpunode.cli.validate.MANY_FILES", 3)
    run(select)
    shown = capsys.readouterr()
    assert DURATION.sub("", shown.out) == DURATION.sub("", usual.out)
    lines = shown.err.splitlines()
    assert lines[0] == "gpunode: gpu-0: error: 1 not determined, 1 skipped"
    assert lines[1] == "gpunode: 1 of 3 bundles evaluated: 1 error"
    assert [line.split(":")[1] for line in lines[2:]] == [" gpu-1", " gpu-2"]
