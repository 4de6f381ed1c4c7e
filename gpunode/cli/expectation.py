"""The site's file of ``--expect``."""

from pathlib import Path

import yaml
from pydantic import ValidationError

from gpunode.catalog import load
from gpunode.checks import Expectation
from gpunode.cli.nearest import unknown
from gpunode.errors import UsageError

Pairs = list[tuple[yaml.Node, yaml.Node]]


def read_expectation(path: Path) -> Expectation:
    """Read the YAML file; raise UsageError with one line that names file, key and what would be right."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        written = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as err:
        raise UsageError(f"--expect {path}: {err.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--expect {path}: not UTF-8 text") from None
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise UsageError(f"--expect {path}: not YAML{line}: {getattr(err, 'problem', None) or 'unreadable'}") from None
    if content is None:
        raise UsageError(f"--expect {path}: says nothing; known: {', '.join(Expectation.model_fields)}")
    if not isinstance(content, dict):
        raise UsageError(f"--expect {path}: expected KEY: VALUE lines, found {_kind(content)}")
    pairs = _pairs(written)
    _each_key_once(pairs, path)
    for key in content:
        if key not in Expectation.model_fields:
            raise UsageError(f"--expect {path}: {unknown('key', str(key), Expectation.model_fields)}")
    if type(content.get("driver")) in (int, float):
        # 570.10 is no 570.1: what YAML takes for a number is taken as it is written.
        content["driver"] = next((value.value for key, value in pairs if key.value == "driver"), content["driver"])
    try:
        expectation = Expectation.model_validate(content, strict=True)
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"--expect {path}: {place}: {first['msg']}, found {first['input']!r}") from None
    _model_must_be_known(expectation, path)
    return expectation


def _pairs(written: yaml.Node | None) -> Pairs:
    return written.value if isinstance(written, yaml.MappingNode) else []


def _each_key_once(pairs: Pairs, path: Path) -> None:
    """Raise UsageError for a key that stands twice: YAML takes the last and says nothing."""
    lines: dict[str, int] = {}
    for key, _ in pairs:
        line = key.start_mark.line + 1
        if key.value in lines:
            raise UsageError(f"--expect {path}: {key.value} stands twice, in line {lines[key.value]} and line {line}")
        lines[key.value] = line


def _model_must_be_known(expectation: Expectation, path: Path) -> None:
    if expectation.model is None:
        return
    try:
        load().find_gpu(expectation.model)
    except UsageError as err:
        raise UsageError(f"--expect {path}: model: {err}") from None


def _kind(content: object) -> str:
    if isinstance(content, list):
        return "a list"
    return "text" if isinstance(content, str) else f"a {type(content).__name__}"
