"""Inventories that Ansible cannot read, in words that name the file and what is wrong with it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from gpunode.errors import UsageError

_FILE = re.compile(r"inventory (?P<path>.+?): ")


@contextmanager
def explained() -> Iterator[None]:
    """Around the reading of an inventory: where a file is the cause, say so in place of Ansible's inner words."""
    try:
        yield
    except UsageError as err:
        failed = _FILE.match(str(err))
        reason = _fault(Path(failed["path"])) if failed else None
        if failed is None or reason is None:
            raise
        raise UsageError(f"{failed[0]}{reason}") from None


def _fault(path: Path) -> str | None:
    """What is wrong with a file of an inventory; None for a program, and where nothing is seen."""
    if not path.is_file() or os.access(path, os.X_OK):
        return None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8 text"
    except (OSError, yaml.YAMLError):
        return None  # Ansible says where it is no YAML
    if isinstance(content, list):
        return "expected groups with their hosts (all: hosts: ...), found a list"
    return None
