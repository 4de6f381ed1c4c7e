"""The tables of published rules name checks, limits and Xids that exist, and why each rule differs."""

import re

from published_rules import rules, tables

from gpunode.catalog import load
from gpunode.checks import registry

ROWS = [row for part in rules() for row in part["rules"]]


def test_each_rule_has_a_line() -> None:
    assert len(re.findall(r"(?m)^\| (?!rule|---)", tables())) == len(ROWS)


def test_every_row_names_what_there_is_and_a_reason() -> None:
    known = {check.id for check in registry}
    for row in ROWS:
        assert set(row) <= {"rule", "ours", "limits", "xids", "why"}, row["rule"]
        assert set(row["ours"]) <= known, row["rule"]
        assert row["why"].strip().endswith("."), row["rule"]
        assert all(load().xid(number) for number in row.get("xids", ())), row["rule"]


def test_a_limit_belongs_to_a_check_of_its_row() -> None:
    for row in ROWS:
        thresholds = {limit.name for check in row["ours"] for limit in registry[check].thresholds}
        assert set(row.get("limits", ())) <= thresholds, row["rule"]


def test_what_health_validation_publishes_as_numbers_is_ours_too() -> None:
    """Their figures, as the reference has them: a change of ours has to be explained on the page."""
    limits = registry.thresholds
    power = [limits[f"gpu.power-draw.{name}-watts"].by["gb200"] for name in ("least", "most")]
    flaps = [limits["rdma.flaps.long"].default, limits["rdma.flaps.long-outages"].default]
    links = [load().gpus[model].nvlink for model in ("h100-sxm5-80gb", "gb200", "gb300")]
    speeds = [link.line_gb_per_s for link in links if link is not None]
    nodes = [load().platform(f"{name}-nvl72-tray-4").numa_nodes for name in ("gb200", "gb300")]
    assert (power, flaps, speeds, nodes) == ([65, 1500], [30, 1], [26.562, 53.125, 53.125], [34, 34])
