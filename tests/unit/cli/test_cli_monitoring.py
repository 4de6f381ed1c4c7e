"""``gpunode monitoring``: documents for Prometheus and Grafana, and one line for bad input."""

import json
from pathlib import Path

import pytest
import yaml

from gpunode.cli import run


def test_it_prints_what_prometheus_and_grafana_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["monitoring", "rules", "--max-age", "2m", "--job", "gpu-nodes"]) == 0
    rules = yaml.load(capsys.readouterr().out, yaml.CSafeLoader)["groups"][0]["rules"]
    assert rules[0]["expr"].endswith("> 120")
    assert 'up{job="gpu-nodes"}' in rules[1]["expr"]
    assert run(["monitoring", "dashboard"]) == 0
    assert json.loads(capsys.readouterr().out)["title"]
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("all: {hosts: {gpu-01: {ansible_host: 10.0.0.1}, gpu-02: {ansible_connection: local}}}\n")
    assert run(["monitoring", "scrape", "-i", str(inventory), "--port", "9200"]) == 0
    (job,) = yaml.safe_load(capsys.readouterr().out)["scrape_configs"]
    assert job["static_configs"] == [
        {"targets": ["10.0.0.1:9200"], "labels": {"node": "gpu-01"}},
        {"targets": ["localhost:9200"], "labels": {"node": "gpu-02"}},
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scrape"], "name the nodes: -i INVENTORY"),
        (["scrape", "-i", "/nowhere.yml"], "/nowhere.yml"),
        (["scrape", "--port", "0"], "0 is not in the range"),
        (["rules", "--job", 'x"} or up{job="'], "is not a job name"),
        (["rules", "--max-age", "soon"], "is not a duration"),
        (["rules", "--max-age", "5s"], "not in the range"),
        (["graphs"], "graphs"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["monitoring", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.strip().splitlines()) == 1, shown.err
    assert message in shown.err
