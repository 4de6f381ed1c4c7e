"""Loads a filter file without Ansible's collection loader."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[3] / "plugins" / "filter"


def load(name: str) -> ModuleType:
    """The module ``plugins/filter/NAME.py``."""
    spec = importlib.util.spec_from_file_location(f"filter_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
