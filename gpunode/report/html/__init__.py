"""The report as one HTML file, without any outside resource.

Every text of a node passes through ``printable`` and is escaped by the templates; the page allows only its own script.
"""

import hashlib
from base64 import b64encode
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from gpunode.judging.report import Report
from gpunode.report.html.page import ROW, SHADES, WORD, page_of
from gpunode.text import counted, printable


def as_text(document: Report) -> str:
    """Return the report as one page."""
    environment = _environment()
    script = _source("report.js")
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = environment.get_template("report.html")
    return template.render(page=page_of(document), script_hash=digest, words=WORD, row=ROW, shades=SHADES)


def _source(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _shown(value: Any) -> Any:
    return printable(value) if type(value) is str else value


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["counted"] = counted
    return environment
