"""The filters on the node's facts, and the callback that imports what they need before Ansible forks its workers."""

import importlib.util
import json
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.gpunode.node.plugins.plugin_utils.policy import unusable

from gpunode.facts import facts_from_bundle
from gpunode.probe import Bundle

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "plugins" / "filter"
BUNDLES = ROOT / "tests" / "fixtures" / "bundles"
BUNDLE = BUNDLES / "debian-12-driver.json"


def load(name: str) -> ModuleType:
    """The module ``plugins/filter/NAME.py``, without Ansible's collection loader."""
    spec = importlib.util.spec_from_file_location(f"filter_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


node = load("node")


def facts_in(path: Path) -> dict[str, Any]:
    """The facts of a bundle, as Ansible has them."""
    bundle = Bundle.from_json(path.read_text(encoding="utf-8"), "a node")
    return facts_from_bundle(bundle).model_dump(mode="json")


@pytest.fixture
def facts() -> dict[str, Any]:
    return facts_in(BUNDLE)


def test_findings_are_those_of_the_checks(facts: dict[str, Any]) -> None:
    findings = node.findings(facts, ["driver.held", "driver.closure"])
    assert {finding["check"]: finding["status"] for finding in findings} == {
        "driver.held": "pass",
        "driver.closure": "pass",
    }
    assert node.finding_line(findings[0]).startswith(f"pass {findings[0]['check']}: ")


def test_a_check_that_does_not_exist_is_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(AnsibleFilterError, match=r"unknown check: driver\.helt"):
        node.findings(facts, ["driver.helt"])


def test_invalid_facts_are_refused() -> None:
    with pytest.raises(AnsibleFilterError, match="not a NodeFacts document"):
        node.findings({"host": 1})


def test_without_the_package_the_filters_report_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "MISSING", unusable(ImportError("No module named 'gpunode'")))
    with pytest.raises(AnsibleFilterError, match=rf"-m pip install {ROOT}$"):
        node.findings({})


def test_every_filter_is_documented() -> None:
    names = [file.stem for file in FOLDER.glob("*.py")]
    assert "node" in names
    for name in names:
        for filter_name in load(name).FilterModule().filters():
            assert (FOLDER / f"{filter_name}.yml").exists(), filter_name


def test_the_fixture_is_a_bundle_of_this_project() -> None:
    assert json.loads(BUNDLE.read_text(encoding="utf-8"))["schema"] == "gpunode.bundle/1"


@pytest.fixture
def provisioned() -> dict[str, Any]:
    return facts_in(BUNDLES / "debian-12-provisioned.json")


def test_the_file_is_what_docker_reads(provisioned: dict[str, Any]) -> None:
    text = node.container_env(provisioned)
    assert text.startswith("# gpunode env: pytorch, ")
    assert "\nNCCL_DEBUG=WARN\n" in text
    assert text.endswith("\n")
    assert node.container_env(provisioned) == text
    assert "TF_GPU_THREAD_MODE=gpu_private" in node.container_env(provisioned, "tensorflow")


def test_wrong_input_is_refused(provisioned: dict[str, Any]) -> None:
    with pytest.raises(AnsibleFilterError, match="unknown workload: mining"):
        node.container_env(provisioned, "mining")
    with pytest.raises(AnsibleFilterError, match="not a NodeFacts document"):
        node.container_env({"host": "x"})
    with pytest.raises(AnsibleFilterError, match="true or false"):
        node.container_env(provisioned, "pytorch", "false")


def test_the_filter_is_documented() -> None:
    for name in node.FilterModule().filters():
        assert (FOLDER / f"{name}.yml").exists()


LOAD = f"""
import runpy, sys
{{before}}
plugin = runpy.run_path("{ROOT}/plugins/callback/preload.py")
plugin["CallbackModule"]().v2_playbook_on_start(None)
"""


def ran(code: str, before: str = "") -> str:
    argv = [sys.executable, "-c", LOAD.format(before=before) + code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_filters_need_is_imported_read_and_left_alone_by_the_collection_of_task_processes() -> None:
    code = """
import gc
from gpunode.catalog import load
from gpunode.facts import NodeFacts
print("gpunode.provisioning.node_stack" in sys.modules, "packages" in load()._sections, NodeFacts.__pydantic_complete__)
frozen = gc.get_freeze_count()
print(frozen > 0.9 * (frozen + len(gc.get_objects())), gc.isenabled())
"""
    assert ran(code) == "True True True\nTrue True\n"


def test_without_the_package_it_does_nothing() -> None:
    hide = "import importlib.util; importlib.util.find_spec = lambda name: None"
    assert ran("print('gpunode' in sys.modules)", hide) == "False\n"


def test_our_configuration_enables_it() -> None:
    settings = ConfigParser()
    settings.read(ROOT / "ansible.cfg")
    assert settings["defaults"]["callbacks_enabled"] == "gpunode.node.preload"
