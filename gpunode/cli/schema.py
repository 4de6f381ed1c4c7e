"""``gpunode schema``: print the JSON Schema of a format.

The schemas are files, ``gpunode/schemas/NAME.json``, so that a change of a format shows as a change of a file. After a
change of a model: ``gpunode schema NAME --from-model > gpunode/schemas/NAME.json``; a test compares the two.
"""

import json
from importlib.resources import files as resource_files
from typing import Any

import click
from pydantic import TypeAdapter

from gpunode.cli.checks import CheckList
from gpunode.errors import UsageError
from gpunode.facts.models.workload import Record
from gpunode.facts.parsers.kinds import ANSWERS
from gpunode.probe.bundle import Bundle
from gpunode.report import Report
from gpunode.stack import Plan, Stack
from gpunode.text import unknown
from gpunode.tuning import Tunings

MODELS: dict[str, Any] = {
    "bundle": Bundle,
    "checks": CheckList,
    "env": Tunings,
    "plan": Plan,
    "record": Record,
    "report": Report,
    "stack": Stack,
    **{f"parse-{kind}": answer for kind, answer in ANSWERS.items()},
}
"""The source of each format's schema: a model, or the union of a parser's answers."""


def from_model(name: str) -> str:
    """Return the schema of a format from its model: the expected content of the file."""
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


def from_file(name: str) -> str:
    """Return the published schema of a format."""
    return resource_files("gpunode").joinpath("schemas", f"{name}.json").read_text(encoding="utf-8")


@click.command("schema")
@click.argument("name", required=False)
@click.option("--from-model", "generate", is_flag=True, hidden=True)
@click.option("-v", "--verbose", is_flag=True, hidden=True, help="Accepted, without effect.")
def command(*, name: str | None, generate: bool, verbose: bool) -> int:  # noqa: ARG001
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
    click.echo(from_model(name) if generate else from_file(name), nl=False)
    return 0
