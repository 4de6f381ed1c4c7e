"""The callback that imports gpunode before Ansible forks its workers."""

import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[3]
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
