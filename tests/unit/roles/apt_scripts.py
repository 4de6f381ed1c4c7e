"""The parts of the modules that ask apt, as one program: the part that they share in front of the other one."""

import sys
from pathlib import Path
from types import ModuleType

MODULE_UTILS = Path(__file__).parents[3] / "plugins" / "module_utils"
SCRIPTS = ("apt_preview", "apt_transaction", "apt_state")


def program(name: str) -> str:
    """What runs alone under any Python of a node."""
    return "\n".join((MODULE_UTILS / f"{part}.py").read_text(encoding="utf-8") for part in ("apt_private", name))


def load(name: str) -> ModuleType:
    """The whole program as a module; it does not run."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(program(name), f"{name}, as one text", "exec"), module.__dict__)  # noqa: S102
    return module
