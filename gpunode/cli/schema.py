"""``gpunode schema``: print the JSON Schema of a format.

They are generated from the models. ``tests/contract/schemas.sha256`` has the hash of each, so that no format changes
unnoticed.
"""

import json
from typing import Any, Literal

import click
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from gpunode.change.journal import RunRecord
from gpunode.cli.checks import CheckList
from gpunode.cli.history import RunExport
from gpunode.cli.options import VERBOSE_ACCEPTED
from gpunode.errors import UsageError
from gpunode.facts.models.workload import Record
from gpunode.facts.parsers.kinds import ANSWERS
from gpunode.history.compare import Comparison
from gpunode.judging.report import Report
from gpunode.probe.bundle import Bundle
from gpunode.profiling.patterns import ProfileDocument
from gpunode.report.outcomes import CollectOutcome, ExplainOutcome, LabOutcome, ProvisionOutcome
from gpunode.stack import Plan, Stack
from gpunode.text import unknown
from gpunode.top.model import TopDocument
from gpunode.tuning import Tunings
from gpunode.tuning.advice import AdviceDocument


class ErrorDocument(BaseModel):
    """Why there is no result: wrong usage, or an answer that could not be determined."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_name: Literal["gpunode.error/1"] = Field("gpunode.error/1", alias="schema")
    message: str
    """The line on stderr: what is wrong, where, what to do."""
    exit_code: Literal[2, 3]
    """2: wrong usage or configuration; 3: could not be determined."""


MODELS: dict[str, Any] = {
    "advice": AdviceDocument,
    "bundle": Bundle,
    "change": RunRecord,
    "checks": CheckList,
    "collect": CollectOutcome,
    "comparison": Comparison,
    "env": Tunings,
    "error": ErrorDocument,
    "explain": ExplainOutcome,
    "lab": LabOutcome,
    "plan": Plan,
    "profile": ProfileDocument,
    "provision": ProvisionOutcome,
    "record": Record,
    "report": Report,
    "run": RunExport,
    "stack": Stack,
    "top": TopDocument,
    **{f"parse-{kind}": answer for kind, answer in ANSWERS.items()},
}
"""The source of each format's schema: a model, or the union of a parser's answers."""


def schema_of(name: str) -> str:
    """Return the published schema of a format, from its model."""
    schema: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"gpunode.{name}/1",
        **TypeAdapter(MODELS[name]).json_schema(by_alias=True, mode="serialization"),
    }
    if name == "bundle":
        # The probe, which has the bundle's model, does not import facts; the published schema describes the results.
        record = Record.model_json_schema(by_alias=True, mode="serialization", ref_template="#/$defs/{model}")
        schema["$defs"] |= record.pop("$defs")
        schema["$defs"]["Record"] = record
        schema["properties"]["results"]["items"] = {"$ref": "#/$defs/Record"}
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


@click.command("schema")
@click.argument("name", required=False)
@VERBOSE_ACCEPTED
def command(*, name: str | None) -> int:
    """Print the JSON Schema of a format; without NAME, the names.

    \b
    Example:
      gpunode schema report > report.schema.json
    """
    if name is None:
        click.echo("\n".join(MODELS))
        return 0
    if name not in MODELS:
        raise UsageError(unknown("format", name, MODELS))
    click.echo(schema_of(name), nl=False)
    return 0
