"""``validate`` on measurements: a site's figures, a baseline, saved outputs of programs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpunode.cli import run
from gpunode.judging.expectation import in_common
from gpunode.judging.report import unreachable

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import hgx_measured
from machine_measured import nccl_tests
from machine_packages import OF_TOOLKIT
from machines import HGX

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "node.json"
    path.write_text(json.dumps(hgx_measured()), encoding="utf-8")
    return path


def judged(capsys: Capture, bundle: Path, *arguments: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    run(["validate", "--replay", str(bundle), "--format", "json", *map(str, arguments)])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def of(report: dict[str, Any], check: str) -> list[dict[str, Any]]:
    return [finding for finding in report["nodes"][0]["findings"] if finding["check"] == check]


def refused(capsys: Capture, *arguments: str | Path) -> str:
    capsys.readouterr()
    assert run(["validate", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_a_saved_bundle_with_measurements_is_judged_as_deep_as_it_was_looked_at(capsys: Capture, bundle: Path) -> None:
    report = judged(capsys, bundle)
    assert report["level"] == "deep"
    first = of(report, "performance.host-copy")[0]
    assert (first["component"], first["status"], first["measured"], first["expected"]) == ("gpu0", "pass", 55.0, 48.0)
    assert first["source"].startswith("catalog (expectations.yml host-h100-sxm")
    figure = first["figure"]
    assert (figure["metric"], figure["limit_of"]) == ("host_to_device", "PCIe 5.0 x16 without packet headers")
    assert figure["ratio"] == pytest.approx(55 / figure["limit"], abs=1e-3)


def test_the_origin_of_an_expectation_is_printed_with_what_misses_it(
    capsys: Capture, bundle: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site.yml"
    site.write_text("figures: {host_to_device: 56, gemm_bf16: 650.5}\n")
    capsys.readouterr()
    only = ("--select", "performance.host-copy,performance.gemm")
    assert run(["validate", "--replay", str(bundle), "--expect", str(site), *only]) == 1
    text = capsys.readouterr().out
    assert "expected at least 56" in text
    assert "expected by: site file (figures)" in text
    assert "performance.gemm" not in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("figures: {host_to_devise: 5}\n", "host_to_devise"),
        ("figures: {host_to_device: -5}\n", "above 0"),
        ("figures: {host_to_device: .nan}\n", "above 0"),
        ("figures: {host_to_device: fast}\n", "host_to_device"),
        ("figures: {}\n", "figures"),
    ],
)
def test_a_site_file_with_wrong_figures_is_refused(
    capsys: Capture, bundle: Path, tmp_path: Path, content: str, words: str
) -> None:
    site = tmp_path / "site.yml"
    site.write_text(content)
    assert words in refused(capsys, "--replay", bundle, "--expect", site)


def test_a_baseline_is_a_saved_report_of_the_node(capsys: Capture, bundle: Path, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(judged(capsys, bundle)))
    assert {finding["status"] for finding in of(judged(capsys, bundle, "--baseline", earlier), "performance.gemm")} == {
        "pass"
    }
    document = hgx_measured()
    for record in document["results"]:
        if record["record"] == "gemm.fp64" and record["component"] == "cuda:2":
            record["values"]["tflops"] *= 0.88
        if record["record"] == "gemm.fp64" and record["component"] == "cuda:3":
            record["values"]["tflops"] *= 0.94
    bundle.write_text(json.dumps(document))
    by_gpu = {
        finding["component"]: finding
        for finding in of(judged(capsys, bundle, "--baseline", earlier), "performance.gemm")
        if finding["figure"]["metric"] == "gemm_fp64"
    }
    assert {name: finding["status"] for name, finding in by_gpu.items()} == {
        **{f"gpu{number}": "pass" for number in range(8)},
        "gpu2": "fail",
        "gpu3": "warn",
    }
    assert by_gpu["gpu2"]["source"].startswith("baseline earlier.json of ")
    assert by_gpu["gpu2"]["measured"] / by_gpu["gpu2"]["figure"]["baseline"] == pytest.approx(0.88, abs=1e-3)
    run(["validate", "--replay", str(bundle), "--baseline", str(earlier), "--format", "html"])
    page = capsys.readouterr().out
    assert page.count('<th scope="col">Baseline</th>') == 1
    assert '<span class="by">-12.0 %</span>' in page
    run(["validate", "--replay", str(bundle), "--format", "html"])
    assert "Baseline</th>" not in capsys.readouterr().out
    other = json.loads(earlier.read_text())
    other["nodes"][0]["host"] = "another"
    earlier.write_text(json.dumps(other))
    # A report of another node contains nothing about this one, and stderr reports that.
    run(["validate", "--replay", str(bundle), "--baseline", str(earlier)])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "earlier.json" in line
    assert json.loads(bundle.read_text())["host"] in line
    assert "fail" not in {
        finding["status"] for finding in of(judged(capsys, bundle, "--baseline", earlier), "performance.gemm")
    }


@pytest.mark.parametrize("content", ["", "[]", "{}", "garbage", '{"schema": "gpunode.report/1"}', "[" * 100_000])
def test_a_baseline_that_is_not_a_report_is_refused(
    capsys: Capture, bundle: Path, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "earlier.json"
    path.write_text(content)
    assert "not a report" in refused(capsys, "--replay", bundle, "--baseline", path)


def test_a_baseline_without_figures_of_a_real_gpu_is_refused(capsys: Capture, bundle: Path, tmp_path: Path) -> None:
    report = judged(capsys, bundle)
    report["nodes"][0]["simulated"] = True
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(report))
    assert "no figure of a real GPU" in refused(capsys, "--replay", bundle, "--baseline", path)
    assert "cannot be read" in refused(capsys, "--replay", bundle, "--baseline", tmp_path / "absent.json")


def test_a_figure_of_another_message_size_is_not_a_baseline(capsys: Capture, bundle: Path, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(judged(capsys, bundle)))
    document = hgx_measured()
    for record in document["results"]:
        if record["record"] == "nccl.broadcast":
            record["values"]["rows"][2] |= {"size_bytes": 2**30, "busbw_gb_per_s": 320.0}
        if record["record"] == "nccl.all-gather":
            record["values"]["rows"][2] |= {"busbw_gb_per_s": 320.0}
    bundle.write_text(json.dumps(document))
    figures = {
        finding["figure"]["metric"]: (finding["status"], finding["figure"]["message_bytes"])
        for finding in of(judged(capsys, bundle, "--baseline", earlier), "performance.collectives")
    }
    assert figures["broadcast_busbw"] == ("pass", 2**30)
    assert figures["all_gather_busbw"] == ("warn", 2**33)


def test_a_saved_log_is_judged_for_its_node(capsys: Capture, bundle: Path, tmp_path: Path) -> None:
    document = hgx_measured()
    document["results"] = [record for record in document["results"] if not record["record"].startswith("tools.")]
    bundle.write_text(json.dumps(document))
    log = tmp_path / "all_reduce_perf.log"
    for rate, status in ((471.0, "pass"), (300.0, "fail")):
        log.write_text(nccl_tests(HGX, rate))
        (finding,) = of(judged(capsys, bundle, "--log", f"nccl-tests={log}"), "performance.nccl-tests")
        assert (finding["status"], finding["measured"], finding["figure"]["metric"]) == (
            status,
            rate,
            "all_reduce_busbw",
        )


def test_a_saved_log_asks_for_no_other_measurement(capsys: Capture, bundle: Path, tmp_path: Path) -> None:
    """A bundle that was collected without a workload: nothing else becomes an error because a log is there."""
    document = hgx_measured() | {"results": []}
    bundle.write_text(json.dumps(document))
    before = {(finding["check"], finding["status"]) for finding in judged(capsys, bundle)["nodes"][0]["findings"]}
    log = tmp_path / "all_reduce_perf.log"
    log.write_text(nccl_tests(HGX, 471.0))
    findings = judged(capsys, bundle, "--log", f"nccl-tests={log}")["nodes"][0]["findings"]
    assert {(finding["check"], finding["status"]) for finding in findings} - before == {
        ("performance.nccl-tests", "pass")
    }


def test_a_log_that_cannot_be_judged_is_refused(capsys: Capture, bundle: Path, tmp_path: Path) -> None:
    log = tmp_path / "some.log"
    log.write_text("garbage\n")
    replay = ("--replay", bundle, "--log")
    assert "not valid as nccl-tests" in refused(capsys, *replay, f"nccl-tests={log}")
    assert "KIND=FILE" in refused(capsys, *replay, "nccl-tests")
    assert "kind" in refused(capsys, *replay, f"dmesg={log}")
    assert "cannot be read" in refused(capsys, *replay, f"nccl-tests={tmp_path / 'absent'}")
    log.write_text("x" * 60_000)
    assert "at most" in refused(capsys, *replay, f"nccl-tests={log}")
    log.write_text(nccl_tests(HGX, 471.0))
    assert "does not name its collective" in refused(capsys, *replay, f"nccl-tests={log}")
    log = log.rename(tmp_path / "all_reduce_perf.log")
    assert "--replay" in refused(capsys, "gpu-01", "--log", f"nccl-tests={log}")
    second = tmp_path / "second.json"
    second.write_text(bundle.read_text())
    for leaves_out in (("--skip", "performance.nccl-tests"), ("--select", "gpu.count")):
        assert "performance.nccl-tests evaluates it" in refused(capsys, *replay, f"nccl-tests={log}", *leaves_out)
    assert "2 bundles" in refused(capsys, "--replay", bundle, second, "--log", f"nccl-tests={log}")


def test_measured_figures_become_a_file_for_expect(capsys: Capture, bundle: Path, tmp_path: Path) -> None:
    document = hgx_measured()
    for record in document["results"]:
        if record["record"] == "gemm.fp64" and record["component"] == "cuda:2":
            record["values"]["tflops"] = 52.0
        if record["record"] == "gemm.bf16" and record["component"] == "cuda:2":
            record["values"]["tflops"] = 100.0
    bundle.write_text(json.dumps(document))
    site = tmp_path / "site.yml"
    judged(capsys, bundle, "--write-expect", site)
    written = yaml.safe_load(site.read_text())
    figures = written.pop("figures")
    assert written == {
        "gpus": 8,
        "model": "h100-sxm5-80gb",
        "driver": "580.95.05",
        "kernel": HGX.kernel,
        "packages": {
            "datacenter-gpu-manager-4-cuda13": "1:4.4.1-1",
            **dict.fromkeys(OF_TOOLKIT, "1.18.0-1"),
        },
        "mig": False,
        "nics": 8,
        "nic_rate_gbit_per_s": 400.0,
        "nic_firmware": ["28.39.1002"],
    }
    # The least of eight; a GPU that failed does not count.
    assert (figures["gemm_fp64"], figures["gemm_bf16"]) == (46.8, 631.8)
    assert figures["host_to_device"] == 49.5
    findings = of(judged(capsys, bundle, "--expect", site), "performance.gemm")
    assert {finding["source"] for finding in findings} == {"site file (figures)"}
    assert {finding["component"] for finding in findings if finding["status"] == "fail"} == {"gpu2"}


def test_only_what_all_measured_nodes_share_is_written() -> None:
    nodes = [unreachable(host, "not used", None) for host in ("a", "b")]
    settings: dict[str, dict[str, Any]] = {
        "a": {"mig": False, "nics": 8, "nic_firmware": ["1"], "packages": {"libnccl2": "2.27", "docker-ce": "29.0"}},
        "b": {"mig": False, "nics": 7, "packages": {"libnccl2": "2.27", "docker-ce": "28.5"}},
    }
    assert in_common(nodes, settings) == {"mig": False, "packages": {"libnccl2": "2.27"}}
    assert in_common(nodes, {"a": settings["a"]}) == {}, "of the other node nothing is known"


def test_a_file_for_expect_is_refused_before_and_not_written_without_figures(
    capsys: Capture, bundle: Path, tmp_path: Path
) -> None:
    existing = tmp_path / "there.yml"
    existing.write_text("gpus: 8\n")
    assert "exists" in refused(capsys, "--replay", bundle, "--write-expect", existing)
    assert existing.read_text() == "gpus: 8\n"
    assert "not a directory" in refused(capsys, "--replay", bundle, "--write-expect", tmp_path / "no" / "site.yml")
    assert "--level standard" in refused(capsys, "gpu-01", "--level", "quick", "--write-expect", tmp_path / "new.yml")
    bundle.write_text(json.dumps(hgx_measured() | {"simulated": True}))
    message = refused(capsys, "--replay", bundle, "--write-expect", tmp_path / "new.yml")
    assert "no passed figure of a real GPU" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node.json", "there.yml"]
