"""The scripts that ask apt, put together as the tasks that run them do it."""

import sys
from pathlib import Path
from types import ModuleType

import yaml
from jinja2 import Environment, StrictUndefined

ROLES = Path(__file__).parents[3] / "roles"
TASKS = {
    "apt_preview": ("nvidia_driver", "ask.yml"),
    "apt_transaction": ("apt_transaction", "main.yml"),
    "apt_state": ("preflight", "look.yml"),
}


def program(name: str) -> str:
    """What the task hands to the node's Python, as its option ``-c`` or as its standard input."""
    role, tasks = TASKS[name]
    found = [
        text
        for task in yaml.safe_load((ROLES / role / "tasks" / tasks).read_text(encoding="utf-8"))
        for command in [task.get("ansible.builtin.command", {})]
        for text in [*command.get("argv", [])[3:4], command.get("stdin", "")]
        if f"{name}.py" in text
    ]
    (template,) = found
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
