"""The site's file of ``--expect``."""

from pathlib import Path

from pydantic import ValidationError

from gpunode.catalog import load
from gpunode.checks import Expectation
from gpunode.errors import UsageError
from gpunode.text import unknown
from gpunode.yaml_file import first_error, read_mapping

COMPLETE_SINCE = 450
"""Driver branches from this one to the newest are all in the catalog; an older or a newer one may lack in it."""


def read_expectation(path: Path) -> Expectation:
    """Read the YAML file; raise UsageError with one line that names file, key and the expected value."""
    content, pairs = read_mapping("--expect", path, ", ".join(Expectation.model_fields))
    for key in content:
        if key not in Expectation.model_fields:
            raise UsageError(f"--expect {path}: {unknown('key', str(key), Expectation.model_fields)}")
    for name in ("driver", "kernel"):
        if type(content.get(name)) in (int, float):
            # 570.10 is not 570.1: values that YAML parses as numbers are read as they are written.
            content[name] = next((value.value for key, value in pairs if key.value == name), content[name])
    try:
        expectation = Expectation.model_validate(content, strict=True)
    except ValidationError as err:
        raise UsageError(f"--expect {path}: {first_error(err)}") from None
    _names_must_be_known(expectation, path)
    return expectation


def _names_must_be_known(expectation: Expectation, path: Path) -> None:
    """Raise UsageError for a model or a driver branch that the catalog does not have."""
    names = [("model", "model", expectation.model), ("driver", "driver", expectation.driver)]
    names += [(f"allowed: {allowed.key}", allowed.key, str(allowed.value)) for allowed in expectation.allowed or ()]
    for key, field, name in names:
        try:
            if field == "model" and name is not None:
                load().find_gpu(name)
            elif field == "driver" and name is not None and COMPLETE_SINCE <= _branch(name) <= _newest():
                load().branch_of(name)
        except UsageError as err:
            raise UsageError(f"--expect {path}: {key}: {err}") from None


def _branch(driver: str) -> int:
    return int(driver.split(".", maxsplit=1)[0])


def _newest() -> int:
    return max(int(branch) for branch in load().branches)
