"""The CDI specification of a node: rewritten where it does not fit, and the only one of its kind."""

from typing import Any

import pytest
from driver_samples import BUNDLE, facts_of

from gpunode.facts import NodeFacts
from gpunode.facts.containers import CdiSpec
from gpunode.provisioning.toolkit import RefreshEnvironment, refresh_environment, refresh_reason, stale_specifications

SHIPPED = "# This file can be used\n# NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=/var/run/cdi/nvidia.yaml\n"


def test_the_flag_is_set_beside_those_of_a_user_and_removed_again() -> None:
    users = f"{SHIPPED}NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS=disable-nvsandbox-utils\n"
    for text, line in (
        (SHIPPED, "FLAGS=no-additional-gids-for-device-nodes\n"),
        (users, "FLAGS=disable-nvsandbox-utils,no-additional-gids-for-device-nodes\n"),
    ):
        written = refresh_environment(text, True).text
        assert written.startswith(text)
        assert line in written[len(text) :]
        assert refresh_environment(written, True).text == written
        assert refresh_environment(written, False).text == text


def test_a_user_who_has_set_the_flag_needs_no_second_line() -> None:
    text = 'NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS="no-additional-gids-for-device-nodes"\n'
    assert refresh_environment(text, True).text == text


def test_the_unit_writes_where_a_user_sent_it() -> None:
    assert refresh_environment(SHIPPED, False).output == "/var/run/cdi/nvidia.yaml"
    assert refresh_environment("NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=/etc/cdi/x.yaml\n", False).output == "/etc/cdi/x.yaml"
    assert refresh_environment(None, False) == RefreshEnvironment("", "/var/run/cdi/nvidia.yaml")


@pytest.fixture
def facts() -> dict[str, Any]:
    loaded = {"version": "580.95.05", "flavour": "open"}
    uvm = {"path": "/dev/nvidia-uvm", "kind": "character", "mode": "0666", "user": "root", "group": "root"}
    return {**facts_of(BUNDLE), "loaded_driver": loaded, "driver_library_version": "580.95.05"} | {
        "device_nodes": [{**uvm, "major": 509, "minor": 0}]
    }


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "path": "/var/run/cdi/nvidia.yaml",
        "size_bytes": 9,
        "cdi_version": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": ["0", "all"],
        "driver_versions": ["580.95.05"],
        "missing": [],
        **changes,
    }


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([], "does not exist"),
        ([spec(path="/etc/cdi/nvidia.yaml")], "does not exist"),
        ([spec(driver_versions=["570.10"])], "generated for driver 570.10; 580.95.05 is installed"),
        ([spec(missing=["/usr/lib/libcuda.so.570"])], "names missing files: /usr/lib/libcuda.so.570"),
        ([spec(devices=[])], "lists no device"),
        ([spec(nodes=[{"path": "/dev/nvidia-uvm", "major": 510, "minor": 0}])], "/dev/nvidia-uvm 510:0 (now 509:0)"),
    ],
)
def test_a_specification_that_does_not_fit_is_regenerated(
    facts: dict[str, Any], specs: list[dict[str, Any]], words: str
) -> None:
    assert words in (refresh_reason(NodeFacts.model_validate({**facts, "cdi_specs": specs})) or "")


def test_one_that_fits_is_left_and_so_is_a_node_without_the_driver(facts: dict[str, Any]) -> None:
    assert refresh_reason(NodeFacts.model_validate({**facts, "cdi_specs": [spec()]})) is None
    assert refresh_reason(NodeFacts.model_validate({**facts, "cdi_specs": [spec(path="/run/cdi/nvidia.yaml")]})) is None
    assert refresh_reason(NodeFacts.model_validate({**facts, "cdi_specs": [], "loaded_driver": None})) is None
    loaded = {"version": "570.10", "flavour": "open"}
    assert refresh_reason(NodeFacts.model_validate({**facts, "cdi_specs": [], "loaded_driver": loaded})) is None


def test_specifications_beside_the_units_own_are_stale() -> None:
    kinds = {
        "/etc/cdi/nvidia.yaml": "nvidia.com/gpu",
        "/var/run/cdi/nvidia.yaml": "nvidia.com/gpu",
        "/var/run/cdi/old.json": "nvidia.com/gpu",
        "/etc/cdi/other.yaml": "vendor.com/net",
        "/etc/cdi/management.yaml": "management.nvidia.com/gpu",
        "/etc/cdi/broken.yaml": None,
    }
    specs = [CdiSpec.model_validate(spec(path=path, kind=kind)) for path, kind in kinds.items()]
    assert stale_specifications(specs) == ["/etc/cdi/nvidia.yaml", "/var/run/cdi/old.json"]
    assert stale_specifications([CdiSpec.model_validate(spec(path="/run/cdi/nvidia.yaml"))]) == []
    assert stale_specifications(None) == []
