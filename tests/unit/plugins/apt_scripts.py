"""The parts of the modules that ask apt, each with the part that they share: a test changes names of both."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

MODULE_UTILS = Path(__file__).parents[3] / "plugins" / "module_utils"
PACKAGE = "ansible_collections.gpunode.node.plugins.module_utils"
SCRIPTS = ("apt_release", "apt_transaction", "apt_state")
SHARED = ("apt_private", "apt_release")


class Together(ModuleType):
    """A module with the names of the shared parts, which are changed there too."""

    shared: tuple[ModuleType, ...]

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        for part in self.shared:
            if name in vars(part):
                setattr(part, name, value)


def fresh(name: str) -> ModuleType:
    """Return a module that no other test has changed."""
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", MODULE_UTILS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(name: str) -> ModuleType:
    """Return a part with those that it shares with others, for this test alone."""
    places = {part: f"{PACKAGE}.{part}" for part in SHARED}
    known = {full_name: sys.modules[full_name] for full_name in places.values() if full_name in sys.modules}
    try:
        for part, full_name in places.items():
            sys.modules[full_name] = fresh(part)
        shared = tuple(sys.modules[full_name] for full_name in places.values() if not full_name.endswith(name))
        module = fresh(name)
    finally:
        for full_name in places.values():
            sys.modules.pop(full_name, None)
        sys.modules.update(known)
    names = {key: value for part in shared for key, value in vars(part).items()}
    vars(module).update({**names, **vars(module), "shared": shared})
    module.__class__ = Together
    return module
