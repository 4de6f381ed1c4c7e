"""The filter behind /etc/gpunode/container.env."""

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from plugin_loader import FOLDER, load

from gpunode.facts import facts_from_bundle
from gpunode.probe.bundle import Bundle

FILTER = load("node").container_env
BUNDLE = FOLDER.parents[1] / "tests" / "fixtures" / "bundles" / "debian-12-provisioned.json"


@pytest.fixture
def facts() -> dict[str, Any]:
    bundle = Bundle.from_json(BUNDLE.read_text(encoding="utf-8"), "a fixture")
    return facts_from_bundle(bundle).model_dump(mode="json")


def test_the_file_is_what_docker_reads(facts: dict[str, Any]) -> None:
    text = FILTER(facts)
    assert text.startswith("# gpunode env: pytorch, ")
    assert "\nNCCL_DEBUG=WARN\n" in text
    assert text.endswith("\n")
    assert FILTER(facts) == text
    assert "TF_GPU_THREAD_MODE=gpu_private" in FILTER(facts, "tensorflow")


def test_wrong_input_is_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(AnsibleFilterError, match="unknown workload: mining"):
        FILTER(facts, "mining")
    with pytest.raises(AnsibleFilterError, match="not a NodeFacts document"):
        FILTER({"host": "x"})
    with pytest.raises(AnsibleFilterError, match="true or false"):
        FILTER(facts, "pytorch", "false")


def test_the_filter_is_documented() -> None:
    for name in load("node").FilterModule().filters():
        assert (FOLDER / f"{name}.yml").exists()
