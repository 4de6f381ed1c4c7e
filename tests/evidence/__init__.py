"""Facts of the outside world that tests compare with, as data of the project: README.md describes their origin."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
INDEXES = HERE.parents[1] / "gpunode" / "lab" / "packages" / "data" / "recorded"


def _loaded(path: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), loader)  # noqa: S506 (a safe one)
    return content


@cache
def compat() -> dict[str, Any]:
    """Which versions, GPUs and systems go together. Not to be changed."""
    return _loaded(HERE / "compat.yml")


@cache
def index(name: str) -> dict[str, Any]:
    """One recorded package index, without what the lab assumes beside it. Not to be changed."""
    return _loaded(INDEXES / f"{name}.yml")
