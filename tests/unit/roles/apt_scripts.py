"""The scripts that ask apt, put together as the tasks that run them do it."""

import sys
from pathlib import Path
from types import ModuleType

import yaml
from jinja2 import Environment, StrictUndefined

ROLES = Path(__file__).parents[3] / "roles"
TASKS = {"apt_preview": ("nvidia_driver", "ask.yml"), "apt_transaction": ("apt_transaction", "main.yml")}


def program(name: str) -> str:
    """What the task hands to ``python3 -c``."""
    role, tasks = TASKS[name]
    task = yaml.safe_load((ROLES / role / "tasks" / tasks).read_text(encoding="utf-8"))[0]
    interpreter, option, template = task["ansible.builtin.command"]["argv"]
    assert (interpreter, option) == ("python3", "-c")
    assert "\\" not in template, "Ansible, other than Jinja, takes no escapes in an expression"

    def lookup(plugin: str, path: str) -> str:
        assert plugin == "ansible.builtin.file"
        return (ROLES / role / "files" / path).read_text(encoding="utf-8").rstrip()

    environment = Environment(undefined=StrictUndefined, autoescape=False)  # noqa: S701
    return environment.from_string(template).render(lookup=lookup, role_path=str(ROLES / role))


def load(name: str) -> ModuleType:
    """The whole program as a module; it does not run."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(program(name), f"{name}, as one text", "exec"), module.__dict__)  # noqa: S102
    return module
