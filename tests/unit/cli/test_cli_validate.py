"""``gpunode validate`` and ``collect`` from the command line: what is accepted, what is refused, how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forked
import pytest

from gpunode import fleet
from gpunode.checks import Expectation, registry
from gpunode.cli import run
from gpunode.isolation import AnswerLimits
from gpunode.probe.bundle import Bundle
from gpunode.workload.payload import measurements

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import hgx, without_gpu
from machines import HGX

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
REPLAY = ["validate", "--replay", str(BUNDLE)]


class Ended:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def gpunode(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Ended:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Ended(code, *capsys.readouterr())

    return call


def refused(ended: Ended, *words: str) -> None:
    """Assert exit code 2, no report on stdout, and one line on stderr that contains all of the words."""
    assert ended.code == 2
    assert ended.out == "" or json.loads(ended.out)["message"] == ended.err.strip()
    assert len(ended.err.strip().splitlines()) == 1, ended.err
    assert not [word for word in words if word not in ended.err], ended.err


@pytest.fixture
def expect(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "expect.yml"
        path.write_text(text)
        return path

    return write


def edited_bundle(folder: Path, old: str, new: str) -> Path:
    """A complete node without a GPU, but for this edit."""
    text = json.dumps(without_gpu())
    assert old in text
    path = folder / "edited.json"
    path.write_text(text.replace(old, new, 1))
    return path


# Exit codes


def test_a_node_without_a_gpu_could_not_be_determined(gpunode: Any) -> None:
    ended = gpunode(*REPLAY)
    assert ended.code == 3
    assert "no NVIDIA GPU on the PCI bus" in ended.out
    assert ended.err == ""


def test_a_node_meant_to_have_none_is_good(gpunode: Any, expect: Any, tmp_path: Path) -> None:
    path = edited_bundle(tmp_path, "", "")
    assert gpunode("validate", "--replay", path, "--expect", expect("gpus: 0\n")).code == 0


def test_a_failed_check_is_1(gpunode: Any, tmp_path: Path) -> None:
    path = edited_bundle(
        tmp_path, "libcuda1\\t535.261.03-1\\tamd64\\thold", "libcuda1\\t535.261.03-1\\tamd64\\tinstall"
    )
    ended = gpunode("validate", "--replay", path)
    assert ended.code == 1
    assert "FAIL  driver.held  1 of 11 packages not held: libcuda1" in ended.out


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--strict"], 1)])
def test_a_warning_is_good_unless_strict(
    gpunode: Any, expect: Any, tmp_path: Path, options: list[str], code: int
) -> None:
    path = edited_bundle(tmp_path, "blacklist nouveau", "#blacklist nouveau")
    assert gpunode("validate", "--replay", path, "--expect", expect("gpus: 0\n"), *options).code == code


def test_no_check_at_all_is_wrong_usage(gpunode: Any) -> None:
    refused(gpunode(*REPLAY, "--select", "driver.held", "--skip", "driver.held"), "--skip excludes all selected checks")
    everything = ",".join(check.id for check in registry)
    refused(gpunode(*REPLAY, "--skip", everything), "--skip excludes all selected checks")


def test_only_skipped_checks_are_never_good(gpunode: Any) -> None:
    ended = gpunode(*REPLAY, "--select", "gpu.count,gpu.persistence")
    assert (ended.code, "2 skipped" in ended.out) == (3, True)


# Output


def test_json_is_one_document_and_nothing_else(gpunode: Any) -> None:
    ended = gpunode(*REPLAY, "--format", "json")
    document = json.loads(ended.out)
    assert (document["schema"], document["status"], document["level"]) == ("gpunode.report/1", "error", "quick")
    assert document["nodes"][0]["simulated"] is True
    assert document["nodes"][0]["stack"]["driver_packages"] == "535.261.03"
    assert ended.err == ""


def test_each_output_belongs_to_the_format_before_it(gpunode: Any, tmp_path: Path) -> None:
    json_file, text_file = tmp_path / "r.json", tmp_path / "r.txt"
    ended = gpunode(*REPLAY, "--format", "console", "--format", "json", "--output", json_file)
    assert "no NVIDIA GPU" in ended.out
    assert json.loads(json_file.read_text())["status"] == "error"
    ended = gpunode(*REPLAY, "--format", "console", "--output", text_file, "--format", "json", "--output", "-")
    assert json.loads(ended.out)["status"] == "error"
    assert "no NVIDIA GPU" in text_file.read_text()


def test_an_output_is_replaced_whole_and_nothing_is_left_beside_it(gpunode: Any, tmp_path: Path) -> None:
    target = tmp_path / "r.json"
    target.write_text("x" * 1_000_000)
    gpunode(*REPLAY, "--format", "json", "--output", target)
    assert json.loads(target.read_text())["schema"] == "gpunode.report/1"
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--output", "r.json"], ["--output r.json", "--format"]),
        (["--format", "json", "--output", "a", "--output", "b"], ["--output b"]),
        (["--format", "json", "--format", "console"], ["two formats for stdout"]),
        (["--format", "json", "--output", "/no/such/folder/r.json"], ["/no/such/folder"]),
        (["--format", "json", "--output", "/"], ["is a folder"]),
        (["--format", "jsn"], ["jsn", "json"]),
    ],
)
def test_outputs_that_cannot_be(gpunode: Any, options: list[str], words: list[str]) -> None:
    refused(gpunode(*REPLAY, *options), *words)


def test_select_and_skip(gpunode: Any) -> None:
    def checks(*options: str) -> set[str]:
        document = json.loads(gpunode(*REPLAY, "--format", "json", *options).out)
        return {finding["check"] for finding in document["nodes"][0]["findings"]}

    everything = checks("--level", "deep")
    assert everything == {check.id for check in registry}
    # No workload was run there, so its absence is not reported.
    assert checks() == checks("--level", "quick") == {check.id for check in registry if check.level == "quick"}
    assert checks("--select", "driver.held, driver.origin", "--select", "gpu.count") == {
        "driver.held",
        "driver.origin",
        "gpu.count",
    }
    assert checks("--skip", "gpu.present,gpu.count") == {check.id for check in registry if check.level == "quick"} - {
        "gpu.present",
        "gpu.count",
    }


def test_verbose_shows_passes(gpunode: Any) -> None:
    assert "driver.closure" not in gpunode(*REPLAY).out
    assert "driver.closure" in gpunode(*REPLAY, "-v").out


# Refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["validate", "--select", "gpu.cuont"], ["gpu.cuont", "did you mean gpu.count"]),
        (["validate", "--select", ""], ["--select: no check given"]),
        (["validate", "--select", "gpu.count", "--select", " ,"], ["--select: no check given"]),
        (["validate", "--skip", "zzz"], ["--skip", "zzz", "node.reachable"]),
        (["validate", "--level", "quick", "--select", "container.cuda"], ["--level quick", "--level standard"]),
        (["validate", "--select", "performance.memory"], ["--level standard", "use --level deep"]),
        (["validate", "--level", "quik"], ["quik"]),
        (["validate", "--level", "quick", "--image", "x", "--force"], ["--level quick runs no", "--image, --force"]),
        (["validate", "--replay", str(BUNDLE), "--no-container"], ["--replay contacts no node", "--no-container"]),
        (["validate", "--no-container", "--image", "x"], ["--no-container uses no image"]),
        (["validate", "--python", "/opt/venv/bin/python3"], ["--python names a Python", "--no-container"]),
        (["validate", "--no-container", "--python", "python3"], ["--python", "not an absolute path"]),
        (["validate", "--image-file", "/no/such.tar"], ["--image-file /no/such.tar", "No such file"]),
        (["validate", "--image-file", str(BUNDLE)], ["not an archive of one image"]),
        (["validate", "--workload-timeout", "1"], ["--workload-timeout"]),
        (["validate", "--image-timeout", "1"], ["--image-timeout"]),
        (["validate", "--storage", "/data"], ["--storage", "--level deep"]),
        (["validate", "--burn", "60", "--level", "standard"], ["--burn", "--level deep"]),
        (["validate", "--burn", "0", "--level", "standard"], ["--burn"]),
        (["validate", "--burn", "long", "--level", "deep"], ["--burn", '"long" is not a number of seconds']),
        (["validate", "--burn", "90", "--level", "deep", "--workload-timeout", "90"], ["--burn 90", "2070"]),
        (["validate", "--storage", "data", "--level", "deep"], ["--storage", '"data" is not an absolute path']),
        (["validate", "--data", "train", "--level", "deep"], ["--data", '"train" is not an absolute path']),
        (["validate", "--data", "/usr/share", "--level", "deep"], ["--data /usr/share", "--no-container"]),
        (["validate", "--model-rate", "9", "--level", "deep"], ["--model-rate applies to --data DIR"]),
        (["validate", "--data", "/data"], ["--data", "--level deep"]),
        (["validate", "--storage", "/opt/", "--level", "deep"], ["--storage /opt/", "--no-container"]),
        (["validate", "--storage", "/data/../usr/local", "--level", "deep"], ["/usr/local", "--no-container"]),
        (["validate", "--storage", "//run", "--level", "deep"], ["--storage //run", "--no-container"]),
        (["validate", "--no-container", "--image-timeout", "60"], ["--no-container", "--image-timeout"]),
        (["validate", "--workload-timeout", "nan"], ["--workload-timeout", '"nan" is not a number of seconds']),
        (["validate", "--workload-timeout", "inf"], ["--workload-timeout", "range"]),
        (["validate", "--workload", "tensorflow", "--image", "x"], ["--workload chooses the catalog's image"]),
        (["validate", "--workload", "caffe"], ["--workload", "caffe"]),
        (["validate", "--level", "quick", "--workload", "tensorflow"], ["runs no workload: --workload"]),
        (["validate", "--image", ""], ["--image: the name is empty"]),
        (["validate", "--select", "gpu.count", "--image", "x"], ["no selected check uses a", "--image"]),
        (["validate", "--timeout", "nan"], ["--timeout", '"nan" is not a number of seconds']),
        (["validate", "--replay"], ["--replay needs a bundle"]),
        (["validate", "--replay", "/no/such.json"], ["/no/such.json: no such file"]),
        (["validate", "--replay", str(BUNDLE), "gpu-node-1"], ["gpu-node-1: no such file"]),
        (["validate", "--replay", str(BUNDLE), "-i", "hosts.yml"], ["--replay contacts no node"]),
        (["validate", "--replay", str(BUNDLE), "--limit", "x"], ["--replay contacts no node"]),
        (["validate", "--replay", str(BUNDLE), "-K"], ["--replay contacts no node"]),
        (["validate", "--replay", str(BUNDLE), "--parallel", "32"], ["--replay contacts no node: --parallel"]),
        (["validate", "--replay", str(BUNDLE), "--timeout", "9", "-K"], ["--replay contacts no node: --timeout, -K"]),
        (["validate", "--replay", str(BUNDLE), "--save", "x"], ["--save", "--replay"]),
        (["validate", "node1", "-i", "hosts.yml"], ["node1", "--limit"]),
        (["validate", "--limit", "gpu*"], ["--limit needs an inventory"]),
        (["validate", "-i", "/no/such/hosts.yml"], ["/no/such/hosts.yml"]),
        (["validate", "--parallel", "0"], ["--parallel"]),
        (["validate", "--timeout", "soon"], ["--timeout", "soon"]),
        (["validate", "--fromat", "json"], ["--fromat"]),
        (["validate", "--expect", "/no/such.yml"], ["/no/such.yml", "No such file"]),
        (["collect"], ["--save"]),
        (["collect", "--save", "/proc/nowhere"], ["/proc/nowhere"]),
        (["schema", "reprot"], ["reprot", "did you mean report"]),
        (["schema", "zzz"], ["bundle, change, checks", "report"]),
        (["checks", "--format", "yaml"], ["yaml"]),
        (["valdate"], ["valdate", "did you mean validate"]),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(gpunode: Any, arguments: list[str], words: list[str]) -> None:
    refused(gpunode(*arguments), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty", "gpus"]),
        ("gpu: 8\n", ["unknown key gpu", "did you mean gpus"]),
        ("gpus: eight\n", ["gpus", "eight"]),
        ("gpus: true\n", ["gpus"]),
        ("gpus: -1\n", ["gpus", "-1"]),
        ("driver: 58\n", ["driver", "58"]),
        ("driver: true\n", ["driver", "True"]),
        ("gpus: 8\nmig: false\ngpus: 4\n", ["gpus", "duplicate key", "line 1", "line 3"]),
        ("gpus: 8\n'gpus': 8\n", ["gpus", "duplicate key"]),
        ("<<: {driver: 580}\n", ["driver", "580"]),
        ("driver: newest\n", ["driver", "newest"]),
        ("driver: 583.10\n", ["driver", "583", "580"]),
        ("model: L40Z\n", ["model", "L40Z", "L40S"]),
        ("mig: 'off'\n", ["mig", "off"]),
        ("nic_rate_gbit_per_s: -400\n", ["nic_rate_gbit_per_s", "-400"]),
        ("- gpus\n", ["a list"]),
        ("gpus: [\n", ["not YAML", "line 2"]),
        ("gpus: 8\nallowed: [{key: gpus, value: 7, until: 2026-12-31}]\n", ["allowed", "reason", "missing"]),
        ("gpus: 8\nallowed: [{key: gpus, value: 7, reason: ' ', until: 2026-12-31}]\n", ["allowed", "reason"]),
        ("gpus: 8\nallowed: [{key: gpus, value: 7, reason: x}]\n", ["allowed", "until", "missing"]),
        ("gpus: 8\nallowed: [{key: gpus, value: 7, reason: x, until: soon}]\n", ["allowed", "until", "soon"]),
        ("gpus: 8\nallowed: [{key: mig, value: true, reason: x, until: 2026-12-31}]\n", ["allowed", "no mig"]),
        ("gpus: 8\nallowed: [{key: gpus, value: -1, reason: x, until: 2026-12-31}]\n", ["allowed", "gpus", "-1"]),
        ("model: L40S\nallowed: [{key: model, value: L40Z, reason: x, until: 2026-12-31}]\n", ["allowed", "L40Z"]),
        ("driver: 580\nallowed: [{key: driver, value: '587', reason: x, until: 2026-12-31}]\n", ["allowed", "587"]),
        ("gpus: 8\nallowed: []\n", ["allowed"]),
    ],
)
def test_an_expectation_that_is_wrong(gpunode: Any, expect: Any, text: str, words: list[str]) -> None:
    path = expect(text)
    refused(gpunode(*REPLAY, "--expect", path), str(path), *words)


def test_all_that_an_expectation_may_contain(gpunode: Any, expect: Any, tmp_path: Path) -> None:
    path = tmp_path / "hgx.json"
    path.write_text(json.dumps(hgx()))
    message = "gpus: 8\nmodel: H100 SXM\ndriver: '580'\nmig: false\nnics: 8\nnic_rate_gbit_per_s: 400\n"
    message += "nic_firmware: [28.39.1002, 28.41.1000]\n"
    message += f"kernel: {HGX.kernel}\npackages: {{libnvidia-nscq: 580.95.05-0ubuntu1}}\n"
    # Figures have their tests in test_cli_measured.py.
    assert set(Expectation.model_fields) - {"figures", "allowed"} == {
        line.partition(":")[0] for line in message.splitlines()
    }
    assert gpunode("validate", "--replay", path, "--expect", expect(message)).code == 0
    for wrong, check in (
        (message.replace("gpus: 8", "gpus: 4"), "gpu.present"),
        (message.replace("H100 SXM", "H200 SXM"), "gpu.model"),
        (message.replace("'580'", "'570'"), "driver.expected"),
        (message.replace("false", "true"), "gpu.mig"),
        (message.replace("nics: 8", "nics: 16"), "rdma.ports"),
        (message.replace("400", "800"), "rdma.ports"),
        (message.replace("28.39.1002, ", ""), "rdma.firmware"),
        (message.replace(HGX.kernel, "6.99"), "node.versions"),
        (message.replace("580.95.05-", "580.95.06-"), "node.versions"),
    ):
        ended = gpunode("validate", "--replay", path, "--expect", expect(wrong), "--format", "json")
        (node,) = json.loads(ended.out)["nodes"]
        failed = [finding for finding in node["findings"] if finding["status"] == "fail"]
        assert (ended.code, {finding["check"] for finding in failed}) == (1, {check})
        assert {finding["source"] for finding in failed} == {"site file"}


@pytest.mark.parametrize(
    ("message", "value", "check"),
    [
        ("gpus: 16", "8", "gpu.present"),
        ("model: H200 SXM", "H100 SXM", "gpu.model"),
        ("driver: '570'", "'580.95.05'", "driver.expected"),
        ("mig: true", "false", "gpu.mig"),
        ("nics: 16", "8", "rdma.ports"),
        ("nic_rate_gbit_per_s: 800", "400", "rdma.ports"),
        ("nic_firmware: [1.2.3]", "[28.39.1002, 28.41.1000]", "rdma.firmware"),
        ("kernel: '6.99'", HGX.kernel, "node.versions"),
        ("packages: {libnvidia-nscq: '1'}", "{libnvidia-nscq: 580.95.05-0ubuntu1}", "node.versions"),
    ],
)
def test_a_deviation_is_allowed_until_its_end(  # noqa: PLR0917 (three fixtures, three parameters)
    gpunode: Any, expect: Any, tmp_path: Path, message: str, value: str, check: str
) -> None:
    path = tmp_path / "hgx.json"
    path.write_text(json.dumps(hgx()))

    def judged(until: str, other: str = value) -> tuple[int, list[dict[str, Any]]]:
        key = message.partition(":")[0]
        allowed = f"allowed:\n- {{key: {key}, value: {other}, reason: vendor case 17, until: {until}}}\n"
        words = ("--expect", expect(f"{message}\n{allowed}"), "--select", check, "--format", "json")
        ended = gpunode("validate", "--replay", path, *words)
        return ended.code, json.loads(ended.out)["nodes"][0]["findings"]

    code, findings = judged("2999-12-31")
    assert code == 0
    assert any(
        finding["status"] == "note" and "until 2999-12-31: vendor case 17" in finding["message"] for finding in findings
    )
    code, findings = judged("2026-01-01")
    failed = [finding for finding in findings if finding["status"] == "fail"]
    assert code == 1
    assert all(finding["source"].endswith("was allowed until 2026-01-01 (vendor case 17)") for finding in failed), (
        failed
    )
    code, findings = judged("2999-12-31", message.partition(": ")[2])
    assert {finding["source"] for finding in findings if finding["status"] == "fail"} == {"site file"}, (
        "another value explains nothing"
    )
    assert code == 1


def test_two_deviations_of_one_check(gpunode: Any, expect: Any, tmp_path: Path) -> None:
    path = tmp_path / "hgx.json"
    path.write_text(json.dumps(hgx()))
    message = "nics: 16\nnic_rate_gbit_per_s: 800\nallowed:\n"
    nics = "- {key: nics, value: 8, reason: a, until: 2999-01-01}\n"
    rate = "- {key: nic_rate_gbit_per_s, value: 400, reason: b, until: 2999-01-01}\n"
    words = ("validate", "--replay", path, "--select", "rdma.ports", "--expect")
    assert [gpunode(*words, expect(message + some)).code for some in (nics, rate, nics + rate)] == [1, 1, 0]


@pytest.mark.parametrize("requested", ["580", "580.95", "'580.95.05'", "580.95.05"])
def test_a_driver_may_stand_without_quotes(gpunode: Any, expect: Any, tmp_path: Path, requested: str) -> None:
    path = tmp_path / "hgx.json"
    path.write_text(json.dumps(hgx()))
    message = expect(f"driver: {requested}\n")
    assert gpunode("validate", "--replay", path, "--expect", message, "--select", "driver.expected").code == 0


@pytest.mark.parametrize("requested", ["570", "580.9", "999.10", "440.33.01"])
def test_another_driver_than_the_one_without_quotes(gpunode: Any, expect: Any, tmp_path: Path, requested: str) -> None:
    path = tmp_path / "hgx.json"
    path.write_text(json.dumps(hgx()))
    message = expect(f"driver: {requested}\n")
    assert gpunode("validate", "--replay", path, "--expect", message, "--select", "driver.expected").code == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"\xff\xfe\x00",
        b"[]",
        b"{}",
        b'{"schema": "gpunode.bundle/2"}',
        b"[" * 100_000,
        BUNDLE.read_bytes()[:500],
    ],
    ids=["empty", "text", "bytes", "list", "object", "other schema", "deep", "cut"],
)
def test_what_is_not_a_bundle(gpunode: Any, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thing.json"
    path.write_bytes(content)
    refused(gpunode("validate", "--replay", path), str(path), "not a gpunode.bundle/1 bundle")


def test_folders_of_bundles(gpunode: Any, tmp_path: Path) -> None:
    refused(gpunode("validate", "--replay", tmp_path), str(tmp_path), "no bundle")
    for name in ("b", "a"):
        document = json.loads(BUNDLE.read_text(encoding="utf-8"))
        (tmp_path / f"{name}.json").write_text(json.dumps({**document, "host": name}))
    ended = gpunode("validate", "--replay", tmp_path, "--format", "json")
    assert [node["host"] for node in json.loads(ended.out)["nodes"]] == ["a", "b"]
    (tmp_path / "c.json").write_text("{}")
    refused(gpunode("validate", "--replay", tmp_path / "c.json"), "c.json")


def test_a_bundle_named_twice_is_one_node(gpunode: Any, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(BUNDLE)
    ended = gpunode("validate", "--replay", BUNDLE, BUNDLE, link, tmp_path, "--format", "json")
    assert len(json.loads(ended.out)["nodes"]) == 1


def test_two_bundles_of_one_host_are_distinguished(gpunode: Any, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.json").write_bytes(BUNDLE.read_bytes())
    host = json.loads(BUNDLE.read_text(encoding="utf-8"))["host"]
    ended = gpunode("validate", "--replay", tmp_path, "--format", "json")
    hosts = [node["host"] for node in json.loads(ended.out)["nodes"]]
    assert hosts == [host, f"{host} ({tmp_path / 'b.json'})", f"{host} ({tmp_path / 'c.json'})"]


# Nodes


def some_fleet(monkeypatch: pytest.MonkeyPatch, answers: Sequence[fleet.Collected]) -> dict[str, Any]:
    """Let the fleet answer so; return what it was asked with."""
    received: dict[str, Any] = {}

    def collect(targets: Sequence[fleet.Target], **settings: Any) -> Iterator[fleet.Collected]:
        received.update(settings, targets=[target.name for target in targets])
        yield from answers

    monkeypatch.setattr(fleet, "collect", collect)
    return received


@pytest.fixture
def text() -> bytes:
    """The answer of a complete node without a GPU."""
    return json.dumps(without_gpu()).encode()


def answered(host: str, text: bytes) -> fleet.Collected:
    return fleet.Collected(host, fleet.Answer(text, host=host), None, 0.5)


def test_a_host_out_of_reach_is_an_error_beside_the_others(
    gpunode: Any, monkeypatch: pytest.MonkeyPatch, text: bytes, expect: Any
) -> None:
    some_fleet(
        monkeypatch,
        [fleet.Collected("far", None, "no route to host", 1.5), answered("near", text)],
    )
    ended = gpunode("validate", "near", "far", "--expect", expect("gpus: 0\n"), "--format", "json")
    assert ended.code == 3
    nodes = {node["host"]: node for node in json.loads(ended.out)["nodes"]}
    assert (nodes["near"]["status"], nodes["near"]["seconds"]) == ("pass", 0.5)
    assert nodes["far"]["status"] == "error"
    assert nodes["far"]["findings"][0]["message"] == "no route to host"


def test_nothing_named_is_this_machine(gpunode: Any, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    received = some_fleet(monkeypatch, [answered("localhost", text)])
    gpunode("validate", "--parallel", "3", "--timeout", "7", "--level", "quick")
    assert received == {
        "targets": ["localhost"],
        "parallel": 3,
        "timeout_s": 7.0,
        "become_password": None,
        "then": None,
    }


def test_a_workload_follows_the_probe_unless_the_level_is_quick(
    gpunode: Any, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    received = some_fleet(monkeypatch, [answered("localhost", text)])
    ended = gpunode("validate", "--image", "site/image:1", "--force", "--workload-timeout", "77", "--format", "json")
    assert json.loads(ended.out)["level"] == "standard"
    then = received["then"]
    assert (then.request.run_limit_s, then.request.force, then.request.in_container) == (77.0, True, True)
    assert then.limit_s > then.request.run_limit_s + then.request.image_limit_s == 77 + 1800
    assert then.request.image(None) == "site/image:1"
    gpunode("validate", "--no-container")
    assert not received["then"].request.in_container
    gpunode("validate", "--level", "deep", "--burn", "600")
    assert (then := received["then"].request).burn_s == then.run_limit_s - 2100 + measurements.BURN_S == 600
    gpunode("validate", "--level", "deep", "--burn", "10")
    assert received["then"].request.run_limit_s == 2100
    for options in (["--storage", "/tmp", "--no-container"], ["--storage", "/opt/data"], ["--storage", "/variable"]):
        gpunode("validate", "--level", "deep", *options)
        assert received["then"].request.storage == options[1]
    gpunode("validate", "--select", "gpu.count,driver.closure")  # nobody would read what it records
    assert received["then"] is None


def test_saved_bundles_give_the_same_verdict_again(
    gpunode: Any, monkeypatch: pytest.MonkeyPatch, text: bytes, tmp_path: Path
) -> None:
    some_fleet(
        monkeypatch,
        [answered("../rack 1/n:1", text), fleet.Collected("far", None, "no route", 1.0)],
    )
    folder = tmp_path / "new" / "folder"
    live = gpunode("validate", "x", "--save", folder, "--format", "json")
    (saved,) = list(tmp_path.rglob("*.json"))
    assert saved.parent == folder
    again = gpunode("validate", "--replay", folder, "--format", "json")
    (first,) = [node for node in json.loads(live.out)["nodes"] if node["host"] != "far"]
    (second,) = json.loads(again.out)["nodes"]
    assert {**first, "seconds": None} == second


def test_collect(gpunode: Any, monkeypatch: pytest.MonkeyPatch, text: bytes, tmp_path: Path) -> None:
    near, far = answered("near", text), fleet.Collected("far", None, "no route to host", 1.0)
    some_fleet(monkeypatch, [near])
    assert gpunode("collect", "near", "--save", tmp_path).code == 0
    assert Bundle.from_json((tmp_path / "near.json").read_bytes(), "it").host == "near"
    some_fleet(monkeypatch, [near, far])
    ended = gpunode("collect", "near", "far", "--save", tmp_path)
    assert (ended.code, ended.out) == (3, "")
    assert "far: no route to host" in ended.err


# The process


def process(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpunode", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        **settings,
    )


def test_a_password_is_asked_for_on_a_terminal_alone() -> None:
    ended = process("validate", "-K")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("gpunode: -K: no terminal")


@pytest.mark.parametrize(
    "arguments", [REPLAY, ["checks"], ["schema", "report"], [*REPLAY, "--format", "json"], ["--help"], ["--version"]]
)
def test_a_reader_that_leaves_causes_no_traceback_and_no_verdict(tmp_path: Path, arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        code = forked.run(arguments, stdout=write, stderr=tmp_path / "err")
    finally:
        os.close(write)
    assert (code, (tmp_path / "err").read_text(encoding="utf-8")) == (141, "")


@pytest.mark.parametrize("verb", ["validate", "collect", "checks", "schema"])
def test_help_has_an_example(gpunode: Any, verb: str) -> None:
    ended = gpunode(verb, "--help")
    assert ended.code == 0
    assert f"  gpunode {verb}" in ended.out.partition("Example")[2]


def test_the_list_of_checks(gpunode: Any) -> None:
    listed = [check["id"] for check in json.loads(gpunode("checks", "--format", "json").out)["checks"]]
    table = gpunode("checks").out
    assert listed == [check.id for check in registry]
    assert not [check for check in listed if check not in table]


def test_ctrl_c_ends_with_one_line_and_no_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "gpunode", "validate", f"nobody@127.0.0.1:{port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            silent.settimeout(30)
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, out, err.strip()) == (130, "", "gpunode: interrupted")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


# A node with an answer that is too expensive to parse


@pytest.mark.parametrize("kind", ["regex", "memory"])
def test_one_node_that_costs_too_much_is_an_error_beside_the_others(
    gpunode: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    from gpunode.checks import identity  # noqa: PLC0415

    def costly(node: Any) -> identity.Identity:
        if node.host == "bad":
            return re.fullmatch(r"(a+)+b", "a" * 60) if kind == "regex" else [bytes(1 << 30)]  # type: ignore[return-value]
        return identity.identify(node)

    monkeypatch.setattr("gpunode.judging.evaluator.described", costly)
    monkeypatch.setattr("gpunode.judging.evaluator.AnswerLimits", lambda: AnswerLimits(cpu_s=1, memory_mib=200))
    for host in ("a", "bad", "c"):
        (tmp_path / f"{host}.json").write_text(json.dumps({**without_gpu(), "host": host}))
    ended = gpunode("validate", "--replay", tmp_path, "--format", "json")
    nodes = json.loads(ended.out)["nodes"]
    assert ended.code == 3
    assert len(nodes) == 3
    (bad,) = [node for node in nodes if "bad" in node["host"]]
    (finding,) = bad["findings"]
    assert finding["status"] == "error"
    assert ("more than 1 s" if kind == "regex" else "MiB of memory") in finding["message"]
    assert all(len(node["findings"]) > 10 for node in nodes if node is not bad)


@pytest.mark.parametrize("words", [("validate", "--level", "quick"), ("env",), ("collect",)])
def test_an_answer_that_grows_when_it_is_saved_is_evaluated_and_saved(
    gpunode: Any, monkeypatch: pytest.MonkeyPatch, text: bytes, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The list of a command's words takes more space with a line for each: an answer within the limit exceeds it."""
    bundle = Bundle.from_json(text, "it")
    result = next(iter(bundle.commands.values()))
    long = bundle.model_copy(
        update={"commands": {**bundle.commands, "x": result.model_copy(update={"argv": ["a"] * 20_000})}}
    )
    compact = long.model_dump_json(by_alias=True).encode()
    assert len(compact) < len(long.to_json())
    monkeypatch.setattr("gpunode.probe.bundle.MAX_BYTES", len(compact) + 1)
    some_fleet(monkeypatch, [answered("long", compact), answered("good", text)])
    save = () if words[0] == "env" else ("--save", tmp_path)
    ended = gpunode(*words, "long", "good", *save)
    assert ended.code != 2
    assert ("long", "not saved" in ended.err) == ("long", False)
    if save:
        again = Bundle.from_json((tmp_path / "long.json").read_bytes(), "it")
        assert again == long.model_copy(update={"host": "long"})
