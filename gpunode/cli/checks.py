"""``gpunode checks``: what is checked."""

import json
import sys
from typing import Literal

import click
from pydantic import BaseModel, ConfigDict, Field
from rich.text import Text

from gpunode.checks import Action, Category, Level, State, registry
from gpunode.checks.actions import action
from gpunode.checks.registry import Scope
from gpunode.checks.thresholds import Threshold
from gpunode.report.console import PlainConsole


class ThresholdEntry(BaseModel):
    """One number that a check compares with."""

    model_config = ConfigDict(extra="forbid")

    name: str
    default: float | int
    unit: str
    means: str
    source: str
    by: dict[str, float | int]
    """Values of GPU models and architectures, by the ids of the catalog."""
    least: float | int
    most: float | int | None
    """What a policy may set."""


class CheckEntry(BaseModel):
    """One check."""

    model_config = ConfigDict(extra="forbid")

    id: str
    level: Level
    needs: list[str]
    """Facts without which the check is an error."""
    needs_gpu: bool
    """The check is skipped on a node without an NVIDIA GPU."""
    means: str
    remedy: str
    category: Category
    scope: Scope
    state: State
    """What a node should get on a failure."""
    actions: list[Action]
    active: bool
    """Something runs on a GPU for it; a passive check reads existing state."""
    needs_root: bool
    bare_metal: bool
    """A virtual machine cannot see it, or could not mend it."""
    architectures: list[str]
    """GPU and processor architectures that it applies to; empty: all."""
    thresholds: list[ThresholdEntry]


class CheckList(BaseModel):
    """The document ``gpunode.checks/1``."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_name: Literal["gpunode.checks/1"] = Field("gpunode.checks/1", alias="schema")
    checks: list[CheckEntry]


def check_list() -> CheckList:
    """All registered checks, in the order of their ids."""
    return CheckList(
        checks=[
            CheckEntry(
                id=check.id,
                level=check.level,
                needs=list(check.needs),
                needs_gpu=check.needs_gpu,
                means=check.means,
                remedy=check.remedy,
                category=check.category,
                scope=check.scope,
                state=check.state,
                actions=[action(text) for text in check.actions],
                active=check.active,
                needs_root=check.needs_root,
                bare_metal=check.bare_metal,
                architectures=list(check.architectures),
                thresholds=[threshold_entry(threshold) for threshold in check.thresholds],
            )
            for check in registry
        ]
    )


def threshold_entry(threshold: Threshold) -> ThresholdEntry:
    """Return a threshold as the document has it."""
    return ThresholdEntry(
        name=threshold.name,
        default=threshold.default,
        unit=threshold.unit,
        means=threshold.means,
        source=threshold.source,
        by=dict(threshold.by),
        least=threshold.least,
        most=threshold.most,
    )


@click.command("checks")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("-v", "--verbose", is_flag=True, help="Show the facts that each check needs as well.")
def command(*, form: str, verbose: bool) -> int:
    """List the checks: id, level, what each needs, what it means, and what to do when it fails.

    \b
    Example:
      gpunode checks --format json | jq -r '.checks[].id'
    """
    document = check_list()
    if form == "json":
        click.echo(json.dumps(document.model_dump(by_alias=True), indent=1))
        return 0
    console = PlainConsole(sys.stdout)
    for entry in document.checks:
        console.show(Text.assemble((entry.id, "bold"), f"  {entry.level}{'  needs a GPU' if entry.needs_gpu else ''}"))
        console.show(Text(entry.means), 4)
        if verbose:
            console.show(Text(f"needs: {', '.join(entry.needs) or 'nothing'}", "dim"), 4)
        console.show(Text(f"to do: {entry.remedy}", "dim"), 4)
    return 0
