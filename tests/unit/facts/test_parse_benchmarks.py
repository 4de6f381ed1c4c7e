"""nvbandwidth, the CUDA samples, dcgmi diag."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpunode.facts.errors import ParseError
from gpunode.facts.parsers.kinds import parsed

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text(encoding="utf-8")


class TestNvbandwidth:
    def test_text(self) -> None:
        answer = parsed("nvbandwidth", sample("nvbandwidth.text"))
        assert (answer["version"], answer["driver_version"]) == ("0.8", "570.133.20")
        host, peers, waived, latency = answer["tests"]
        assert host == {
            "name": "host_to_device_memcpy_ce",
            "status": "passed",
            "unit": "GB/s",
            "matrix": [[24.97, 25.03]],
            "sum": 50.0,
            "min": 24.97,
            "max": 25.03,
        }
        assert (peers["matrix"], peers["min"]) == ([[None, 17.25], [17.5, None]], 17.25)
        assert (waived["status"], waived["matrix"], waived["sum"]) == ("waived", None, None)
        assert latency["unit"] == "ns"

    def test_the_diagonals_zero_is_no_measurement(self) -> None:
        text = sample("nvbandwidth.text").replace("N/A", "0.00")
        peers = parsed("nvbandwidth", text)["tests"][1]
        assert (peers["matrix"][0][0], peers["min"], peers["max"]) == (0.0, 17.25, 17.5)

    def test_json_after_rubbish(self) -> None:
        answer = parsed("nvbandwidth", sample("nvbandwidth.json"))
        assert (answer["version"], answer["driver_version"]) == ("0.6", "550.54.15")
        assert [test["status"] for test in answer["tests"]] == ["passed", "waived", "error"]
        assert answer["tests"][0]["matrix"] == [[55.12, None]]
        assert answer["tests"][0]["sum"] == 55.125

    def test_an_error_is_no_pass(self) -> None:
        text = "Running host_to_device_memcpy_ce.\n[CUDA_ERROR_OUT_OF_MEMORY] out of memory in expression cuMemAlloc\n"
        assert parsed("nvbandwidth", text)["tests"][0]["status"] == "error"

    @pytest.mark.parametrize(
        "text",
        [
            "Running host_to_device_memcpy_ce.\n",
            "Running a.\nx (GB/s)\n      0      1\n 0   1.00\n",
            "Running a.\nmemcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)\n      0      1\n 0   1.00   2.00\n",
            '{"nvbandwidth": {"testcases": []}}',
            '{"nvbandwidth": {"testcases": [{"name": "a", "status": "Splendid"}]}}',
        ],
    )
    def test_refused(self, text: str) -> None:
        with pytest.raises(ParseError):
            parsed("nvbandwidth", text)


class TestSamples:
    def test_bandwidth_test(self) -> None:
        answer = parsed("bandwidth-test", sample("bandwidth-test.quick"))
        assert answer["device"] == "Tesla T4"
        assert (answer["host_to_device_gb_per_s"], answer["device_to_host_gb_per_s"]) == (6.1235, 6.51025)
        assert answer["device_to_device_gb_per_s"] is None
        assert answer["pass"] is False

    def test_the_largest_size_counts(self) -> None:
        line = "bandwidthTest-H2D-Pinned, Bandwidth = {} GB/s, Time = 0.0 s, Size = {} bytes, NumDevsUsed = 1\n"
        answer = parsed("bandwidth-test", line.format(12.5, 64000000) + line.format(99.0, 1000))
        assert answer["host_to_device_gb_per_s"] == 12.5
        assert len(answer["sizes"]) == 2
        assert answer["pass"] is None

    def test_a_last_line_that_may_be_cut_does_not_count(self) -> None:
        text = sample("bandwidth-test.quick")
        cut = text[: text.index("6510.25") + 2]
        assert parsed("bandwidth-test", cut)["device_to_host_gb_per_s"] is None

    def test_p2p(self) -> None:
        answer = parsed("p2p-bandwidth", sample("p2p-bandwidth.three"))
        assert answer["p2p_access"] == [[True, True], [True, True]]
        assert answer["unidirectional_gb_per_s"][0][1] == 273.33
        assert answer["unidirectional_no_p2p_gb_per_s"][0][1] == 14.11
        assert answer["bidirectional_gb_per_s"][1][0] == 518.88
        assert answer["latency_us"] == [[2.21, 2.31], [2.51, 2.61]]
        assert answer["cpu_latency_no_p2p_us"] == [[3.81, 9.91], [9.01, 3.11]]

    def test_a_matrix_that_was_not_printed_is_none(self) -> None:
        text = sample("p2p-bandwidth.three")
        answer = parsed("p2p-bandwidth", text[: text.index("Bidirectional")])
        assert answer["bidirectional_gb_per_s"] is None
        assert answer["unidirectional_gb_per_s"] is not None

    @pytest.mark.parametrize("last", ["     1  14.22", "     1 274.44", "   D\\D     0      1 \n     0 1291"])
    def test_a_cut_matrix_is_refused(self, last: str) -> None:
        text = sample("p2p-bandwidth.three")
        with pytest.raises(ParseError):
            parsed("p2p-bandwidth", text[: text.index(last)])


class TestDcgm:
    def test_json_of_version_4(self) -> None:
        answer = parsed("dcgm-diag", sample("dcgm-diag.v4"))
        assert (answer["dcgm_version"], answer["driver_version"], answer["overall"]) == ("4.2.3", "570.133.20", "fail")
        memory = answer["tests"][1]
        assert (memory["name"], memory["category"], memory["status"]) == ("memory", "Hardware", "fail")
        assert memory["gpus"] == [
            {"gpu": 0, "status": "pass", "messages": []},
            {"gpu": 1, "status": "fail", "messages": ["GPU 1 has uncorrectable errors"]},
        ]

    def test_table_of_version_4(self) -> None:
        answer = parsed("dcgm-diag", sample("dcgm-diag.v4table"))
        assert (answer["dcgm_version"], answer["driver_version"], answer["level"]) == ("4.2.3", "570.133.20", 2)
        assert [test["status"] for test in answer["tests"]] == ["pass", "fail", "skip"]
        assert answer["tests"][1]["gpus"][1]["messages"] == ["A message that is longer than one line of the table"]
        assert answer["tests"][2]["messages"] == []

    def test_version_3_names_ids_in_one_text(self) -> None:
        answer = parsed(
            "dcgm-diag", _document([{"gpu_ids": "0,1", "status": "PASS"}, {"gpu_ids": "2", "status": "WARN"}])
        )
        assert answer["overall"] == "warn"
        assert [gpu["gpu"] for gpu in answer["tests"][0]["gpus"]] == [0, 1, 2]
        assert answer["dcgm_version"] == "3.1.8"

    def test_no_ids(self) -> None:
        warning = {"warning": "bad", "error_id": 1}
        test = parsed("dcgm-diag", _document([{"status": "Fail", "warnings": [warning]}]))["tests"][0]
        assert (test["status"], test["gpus"], test["messages"]) == ("fail", [], ["bad"])

    @pytest.mark.parametrize(
        ("statuses", "overall"),
        [
            (["Pass", "Skip"], "pass"),
            (["Skip", "Skip"], "skip"),
            (["Pass", "Warn"], "warn"),
            (["Warn", "Error"], "error"),
            (["Error", "Fail", "Pass"], "fail"),
            (["Not Run"], "skip"),
        ],
    )
    def test_the_worst_counts(self, statuses: list[str], overall: str) -> None:
        results = [{"gpu_id": gpu, "status": status} for gpu, status in enumerate(statuses)]
        assert parsed("dcgm-diag", _document(results))["overall"] == overall

    def test_it_reports_that_it_could_not_run(self) -> None:
        document = {"DCGM Diagnostic": {"runtime_error": "no such group"}}
        assert parsed("dcgm-diag", json.dumps(document))["error"]["message"] == "no such group"
        text = "Error: unable to establish a connection to the specified host: localhost\n"
        assert parsed("dcgm-diag", text)["error"] == {"kind": "other", "message": text.strip(), "nvml_version": None}

    def test_a_visible_fail_counts_in_a_cut_table(self) -> None:
        text = sample("dcgm-diag.v4table")
        assert parsed("dcgm-diag", text[: text.index("| Warning")])["overall"] == "fail"

    @pytest.mark.parametrize("end", ["+-----  Hardware", "| memory", "|                           | GPU1: Fail"])
    def test_a_cut_table_is_never_a_pass(self, end: str) -> None:
        text = sample("dcgm-diag.v4table").replace(
            "| memory                    | Fail", "| memory                    | Pass"
        )
        with pytest.raises(ParseError, match="closing border"):
            parsed("dcgm-diag", text[: text.index(end)])

    @pytest.mark.parametrize(
        "document",
        [
            {"DCGM Diagnostic": {"test_categories": []}},
            {"DCGM Diagnostic": {"test_categories": [{"category": "a", "tests": [{"name": "b", "results": []}]}]}},
            {"DCGM Diagnostic": {"something": "else"}},
            {"DCGM Diagnostic": []},
        ],
    )
    def test_an_unknown_layout_is_refused(self, document: dict[str, Any]) -> None:
        with pytest.raises(ParseError):
            parsed("dcgm-diag", json.dumps(document))

    def test_an_unknown_status_is_refused(self) -> None:
        with pytest.raises(ParseError, match="Splendid"):
            parsed("dcgm-diag", _document([{"gpu_id": 0, "status": "Splendid"}]))


def _document(results: list[dict[str, Any]]) -> str:
    tests = [{"name": "memory", "results": results}]
    body = {"test_categories": [{"category": "Hardware", "tests": tests}], "version": "3.1.8"}
    return json.dumps({"DCGM GPU Diagnostic": body})
