"""The filters of the container and CUDA roles: documents in, documents out, one line where gpunode refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from plugin_loader import load

from gpunode.facts import facts_from_bundle
from gpunode.probe import Bundle

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
FILTERS: dict[str, Any] = {
    name: function
    for file in ("containers", "toolkit", "cuda", "dcgm")
    for name, function in load(file).FilterModule().filters().items()
}


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    document = facts_from_bundle(Bundle.from_json(BUNDLE.read_text(encoding="utf-8"), "a node"))
    return document.model_dump(mode="json")


def test_every_filter_has_its_documentation() -> None:
    folder = Path(__file__).parents[3] / "plugins" / "filter"
    assert [name for name in FILTERS if not (folder / f"{name}.yml").exists()] == []


def test_engines_and_daemon_json_are_plain_documents() -> None:
    engine = FILTERS["docker_engine"]({"docker.io": "26.1.5+dfsg1"})
    support = FILTERS["container_engine"](engine["version"])
    assert (engine["package"], support["cdi"], support["packages"][0]) == ("docker.io", "feature", "docker-ce")
    request = FILTERS["docker_wishes"]({"live_restore": True}, None)
    merged = FILTERS["merged_daemon"](None, request["wished"])
    keys = FILTERS["toolkit_daemon"](support, True, False, None, {})
    second = FILTERS["merged_daemon"](merged["text"], keys, None, merged["memory"])
    assert json.loads(second["text"]).keys() == {"live-restore", "runtimes", "features"}
    assert second["restart"] == ["features.cdi"]
    assert FILTERS["needs_old_cdi"]({"Docker": support}) == []
    assert json.dumps([engine, support, merged, second])


def test_a_node_is_a_plain_document(facts: dict[str, Any]) -> None:
    assert FILTERS["restart_obstacles"]({}, facts, None) == []
    assert FILTERS["cdi_refresh_reason"](facts) is None
    assert FILTERS["stale_cdi"](facts["cdi_specs"], "/nowhere") == [spec["path"] for spec in facts["cdi_specs"] or ()]
    assert FILTERS["dcgm_plan"](None, {}, {"version": "keep", "proprietary": True, "source": "auto"})["names"] == []


def test_what_gpunode_refuses_is_one_line_of_ansible(facts: dict[str, Any]) -> None:
    with pytest.raises(AnsibleFilterError, match=r"^not a stack: "):
        FILTERS["cuda_packages"](facts, {"source": "nvidia"}, ["12.9"])
    with pytest.raises(AnsibleFilterError, match=r"^the catalog has no container engine 'lxd'"):
        FILTERS["container_engine"]("1.0", "lxd")
