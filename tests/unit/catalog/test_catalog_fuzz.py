"""Whatever an overlay holds, it is taken or refused by one line; nothing breaks."""

import tempfile
from pathlib import Path
from typing import Any

import yaml
from effort import effort
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpunode.catalog import load
from gpunode.catalog.catalog import MODELS, Catalog
from gpunode.catalog.lint import lint
from gpunode.catalog.read import BadFileError, read
from gpunode.errors import UsageError

OVERLAYS = effort(20, 500)
CATALOG = load()
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10**7),
    st.floats(allow_nan=True),
    st.sampled_from(
        ["580.95.05", "13.0", "2026-02-30", "2026-11", "10de:2330", "9.0", "t4", "nvidia", "{branch}", "{", ""]
    ),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(min_size=1, max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def overlays(draw: st.DrawFn) -> dict[str, Any]:
    """Rows of ours and new ones, with fields of their models and others, and any values."""
    content: dict[str, Any] = {}
    for section in draw(st.lists(st.sampled_from([*MODELS, "gpu"]), max_size=3, unique=True)):
        fields = sorted(MODELS[section].model_fields) if section in MODELS else ["x"]
        known = list(CATALOG.rows(section)) if section in MODELS else ["x"]
        ids = st.one_of(st.sampled_from(known), st.sampled_from(["new", "999", "99.9"]))
        rows = st.dictionaries(st.sampled_from([*fields, "colour"]), VALUES, max_size=4)
        content[section] = draw(st.dictionaries(ids, st.one_of(rows, VALUES), max_size=2))
    if draw(st.booleans()):
        content["defaults"] = draw(st.one_of(VALUES, st.just({"all": {"date": "2026-11-01"}})))
    return content


@settings(max_examples=OVERLAYS, deadline=None, suppress_health_check=list(HealthCheck))
@given(overlays())
def test_any_overlay_is_accepted_or_refused_by_lines(content: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "site.yml"
        path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
        try:
            catalog = Catalog([read(path)])
        except BadFileError as err:
            assert "\n" not in str(err)  # noqa: PT017
            return
        problems = lint(catalog)
    assert all("\n" not in str(problem) and problem.line > 0 for problem in problems)
    if not problems:
        for section in MODELS:
            assert len(catalog.rows(section)) >= len(CATALOG.rows(section))


@settings(max_examples=effort(60, 400), deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_catalog_file_or_one_line(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "site.yml"
        path.write_bytes(content)
        try:
            assert read(path).sections is not None
        except BadFileError as err:
            assert "\n" not in str(err)  # noqa: PT017


@given(st.text(max_size=20))
@settings(max_examples=effort(60, 400), deadline=None)
def test_any_text_is_a_gpu_or_a_usage_error(text: str) -> None:
    try:
        assert CATALOG.find_gpu(text).gpus
    except UsageError as err:
        assert str(err)  # noqa: PT017
