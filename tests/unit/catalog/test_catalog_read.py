"""Catalog files as text, and a catalog that was read before processes are forked."""

import pytest
import yaml

from gpunode.catalog import catalog as module
from gpunode.catalog import origins
from gpunode.catalog.catalog import Catalog
from gpunode.catalog.read import NULL, parse

TEXTS = ["~", "null", "Null", "NULL", "", "nullx", "nil", "no", "1.0", "20e6", "0x1", "2026-01-01", "=", "<<", "'~'"]


@pytest.mark.parametrize("text", TEXTS)
def test_only_null_is_no_text(text: str) -> None:
    value = parse(f"section: {{row: {{field: {text}}}}}", "a.yml").sections["section"]["row"]["field"]
    assert value == (None if tag_of(text or "~") == NULL else text.strip("'"))


def tag_of(text: str) -> str:
    node = yaml.compose(f"[{text}]")
    assert isinstance(node, yaml.SequenceNode)
    return str(node.value[0].tag)


def test_a_prepared_catalog_reads_no_file_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog()
    origins.table.cache_clear()
    catalog.prepare()
    monkeypatch.setattr(module, "_packaged", None)
    assert origins.table.cache_info().currsize == 1
    match = catalog.gpu_by_pci("10de:2330")
    assert match is not None
    assert match.gpu is not None
    assert catalog.platforms_with({match.gpu.id: 8})
    assert catalog.branches
    assert catalog.pci_parts
    assert all(catalog.rows(name) for name in ("cuda_majors", "cudnn", "forward_compat", "nccl", "wheels"))
    with pytest.raises(TypeError):
        _ = catalog.systems
