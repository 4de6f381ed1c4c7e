"""The parts of the modules that ask apt, each with the part that they share: a test changes names of both."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

MODULE_UTILS = Path(__file__).parents[3] / "plugins" / "module_utils"
PACKAGE = "ansible_collections.gpunode.node.plugins.module_utils"
SCRIPTS = ("apt_preview", "apt_transaction", "apt_state")


class Together(ModuleType):
    """A module with the names of the shared part, which are changed there too."""

    shared: ModuleType

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in vars(self.shared):
            setattr(self.shared, name, value)


def fresh(name: str) -> ModuleType:
    """Return a module that no other test has changed."""
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", MODULE_UTILS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(name: str) -> ModuleType:
    """Return a part with the one that it shares with others, for this test alone."""
    known = {key: module for key, module in sys.modules.items() if key == f"{PACKAGE}.apt_private"}
    shared = fresh("apt_private")
    sys.modules[f"{PACKAGE}.apt_private"] = shared
    try:
        module = fresh(name)
    finally:
        del sys.modules[f"{PACKAGE}.apt_private"]
        sys.modules.update(known)
    vars(module).update({**vars(shared), **vars(module), "shared": shared})
    module.__class__ = Together
    return module
