"""Messages for inventories that Ansible cannot read, with the file and the error in it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from gpunode.errors import UsageError
from gpunode.yaml_file import Expanded, load_bounded

_FILE = re.compile(r"inventory (?P<path>.+?): ")


@contextmanager
def explained() -> Iterator[None]:
    """Replace Ansible's error on reading an inventory by one that names the file, if a file is the cause."""
    try:
        yield
    except UsageError as err:
        failed = _FILE.match(str(err))
        reason = _fault(Path(failed["path"])) if failed else None
        if failed is None or reason is None:
            raise
        raise UsageError(f"{failed[0]}{reason}") from None


def _fault(path: Path) -> str | None:
    """Return the error in an inventory file; None for a program, and if no error is found."""
    if not path.is_file() or os.access(path, os.X_OK):
        return None
    try:
        content = load_bounded(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8 text"
    except Expanded as err:
        return str(err)
    except (OSError, RecursionError, ValueError, yaml.YAMLError):
        return None  # Ansible reports invalid YAML
    if isinstance(content, list):
        return "expected groups with their hosts (all: hosts: ...), found a list"
    return None
