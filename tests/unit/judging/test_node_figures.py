"""The table of a node's figures: computed from measured records of GPUs alone."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpunode.facts import facts_from_bundle
from gpunode.facts.bundle_reader import BundleReader
from gpunode.facts.workload import read_records
from gpunode.judging.node_figures import NodeFigure, as_json, figures
from gpunode.probe.bundle import Bundle

sys.path.append(str(Path(__file__).parents[2] / "contract"))
from bundles import hgx_measured

DOCUMENT = hgx_measured()
FACTS = facts_from_bundle(Bundle.model_validate(DOCUMENT))
MEASURED = ("steps.device", "copy.host", "gemm.bf16", "gemm.fp16", "gemm.fp32", "ddp.replicated")


def table(change: dict[str, dict[str, Any]] | None = None, **fields: Any) -> dict[str, NodeFigure]:
    records = [record for record in DOCUMENT["results"] if record["record"] in MEASURED]
    changed = [
        {**record, **fields, "values": {**record["values"], **(change or {}).get(record["record"], {})}}
        for record in records
    ]
    bundle = Bundle.model_validate({**DOCUMENT, "results": changed})
    node = FACTS.model_copy(update={"records": read_records(BundleReader(bundle))})
    return {row.figure: row for row in figures(node)}


def test_each_row_is_computed_from_its_records() -> None:
    rows = table()
    assert rows["launch of an operation"].value == 5.1
    assert rows["gain of mixed precision"].value == pytest.approx(0.028 / 0.009)
    assert "13.5" in rows["gain of mixed precision"].limit
    assert rows["gain of pinned memory"].value == pytest.approx(5)
    assert "PCIe 5.0 x16" in rows["gain of pinned memory"].limit
    assert rows["scaling from 1 to n GPUs"].value == pytest.approx(0.02 / 0.021)
    # 50 million parameters at 345 GB/s: 0.58 ms, and 7/8 of twice that.
    reduced = rows["all-reduce of the gradients"]
    assert (reduced.value, "0.58 ms" in reduced.guide, "1.01 ms" in reduced.limit) == (0.0011, True, True)


@pytest.mark.parametrize("fields", [{"device": "cpu"}, {"simulated": True}, {"error": "broke"}, {"skipped": "no"}])
def test_what_no_gpu_measured_is_not_in_the_table(fields: dict[str, Any]) -> None:
    rows = table(**fields).values()
    assert len(rows) == 5
    assert all(row.node is None and "gpunode validate" in str(row.missing) for row in rows)


def test_a_hostile_record_is_no_figure_and_the_document_stays_json() -> None:
    assert table({"steps.device": {"launch_us": float("inf")}})["launch of an operation"].node is None
    rows = list(table({"steps.device": {"fp32_step_seconds": 1e99, "mixed_step_seconds": 1e-300}}).values())
    assert json.loads(json.dumps(as_json(rows), allow_nan=False))[1]["value"] is None


def test_one_rank_and_no_bandwidth_have_no_figure() -> None:
    rows = table({"ddp.replicated": {"ranks": 1}})
    assert rows["scaling from 1 to n GPUs"].node is None
    rows = table({"ddp.replicated": {"busbw_gb_per_s": None}})
    assert (rows["scaling from 1 to n GPUs"].node is None, rows["all-reduce of the gradients"].node) == (False, None)
