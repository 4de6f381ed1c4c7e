"""The programs that run on nodes: each is one file of the standard library, and goes there as text.

Nothing here imports another room, or another of these files. ``OLDEST`` is the Python that each has to run under;
``pyproject.toml`` gives it to ruff, and ``tests/contract/test_onnode.py`` holds both.
"""

from importlib.resources import files

OLDEST = {
    "fabric": (3, 8),
    "gpu_settings": (3, 9),
    "launcher": (3, 6),
    "lease": (3, 8),
    "pending_updates": (3, 8),
    "probe": (3, 6),
    "profile_hook": (3, 8),
    "top": (3, 8),
    "watchdog": (3, 8),
}
"""Program -> oldest Python."""


def program_text(name: str) -> str:
    """Return a program's source."""
    return files("gpunode.onnode").joinpath(f"{name}.py").read_text(encoding="utf-8")
