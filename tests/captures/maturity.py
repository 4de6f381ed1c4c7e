"""On what each check was proven, derived from the tests; and how long the data takes that it reads.

``python tests/captures/maturity.py`` writes gpunode/checks/evidence.json again from the recordings; with
``--timed BUNDLE`` the seconds too, from a bundle that was collected on a node. A test compares.

``recorded``: the check came to a verdict (pass, warn, fail) on a recording of a real machine, of a fact that it needs.
``hardware``: the same on a whole bundle in tests/fixtures/bundles that was collected on a machine with a GPU by us.
Every other check is ``simulated``: the contract's fixtures and mutants are made by the lab.
"""

import argparse
import json
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "contract"), str(Path(__file__).parents[1])]

from captured import there
from test_captures_judged import names, node_with

from gpunode.checks import Check, Expectation, Finding, Status, judge, registry
from gpunode.facts import facts_from_bundle
from gpunode.facts.bundle_reader import BundleReader, UnknownFactError
from gpunode.facts.errors import ParseError
from gpunode.facts.node import FACTS
from gpunode.probe.bundle import Bundle, CommandResult

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "gpunode" / "checks" / "evidence.json"
BUNDLES = ROOT / "tests" / "fixtures" / "bundles"
RECORDED_FACT = {
    "smi-xml": "smi",
    "smi-q": "smi",
    "smi-nvlink": "nvlink",
    "smi-topo": "topology",
    "lspci": "pci",
    "ib": "infiniband",
    "dmesg": "kernel_log",
}
"""Kind of recording to the fact that it stands for; all others of that node are simulated."""
NOT_IN_THEM = frozenset({"gpu.messages"})
"""Checks of which the recordings hold nothing: what nvidia-smi prints beside its answers was not kept with them."""
DECIDED = (Status.PASS, Status.WARN, Status.FAIL)


@cache
def recordings() -> list[str]:
    """Checks that came to a verdict on a recording of a real machine."""
    checks: set[str] = set()
    for name in names():
        fact = RECORDED_FACT[name.partition("/")[0]]
        node, looked_at = node_with(name)
        of_fact = {check.id for check in registry if check.id in looked_at and fact in check.needs}
        checks |= decided(judge(node, Expectation(), only=of_fact - NOT_IN_THEM))
    return sorted(checks)


def decided(findings: list[Finding]) -> set[str]:
    return {finding.check for finding in findings if finding.status in DECIDED}


def hardware() -> list[str]:
    """Checks that came to a verdict on a bundle of a machine with a real GPU."""
    checks: set[str] = set()
    for path in sorted(BUNDLES.glob("*.json")):
        node = facts_from_bundle(Bundle.from_json(path.read_bytes(), str(path)))
        if not node.simulated and node.gpus_on_bus:
            checks |= decided(judge(node, Expectation(), "deep"))
    return sorted(checks)


class Traced(BundleReader):
    """A bundle that remembers which commands were asked for."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.asked_for: set[str] = set()

    def command(self, key: str) -> CommandResult:
        self.asked_for.add(key)
        return super().command(key)

    def raw(self, key: str) -> CommandResult | None:
        self.asked_for.add(key)
        return super().raw(key)

    def once(self, name: str, parse: Any) -> Any:  # noqa: ARG002
        # Each fact by itself: what another one parsed before it counts for both.
        return parse()


def seconds(bundle: Bundle) -> dict[str, float]:
    """Check to the seconds of the commands that its facts are read from, as the bundle has them."""
    commands: dict[str, set[str]] = {}
    for field, source in FACTS.items():
        seen = Traced(bundle)
        with suppress(UnknownFactError, ParseError):
            source.read(seen)
        commands[field] = seen.asked_for & set(bundle.commands)
    return {check.id: round(_seconds(check, commands, bundle), 2) for check in registry if check.level == "quick"}


def _seconds(check: Check, commands: dict[str, set[str]], bundle: Bundle) -> float:
    keys = set().union(*(commands[field] for field in check.needs)) if check.needs else set()
    return sum(bundle.commands[key].seconds for key in keys)


def document(timed: Path | None = None) -> dict[str, Any]:
    """What the file should read; without a bundle, the seconds that it has."""
    old = json.loads(EVIDENCE.read_text(encoding="utf-8")) if EVIDENCE.exists() else {}
    if timed is None:
        times = {"seconds_measured_on": old.get("seconds_measured_on"), "seconds": old.get("seconds", {})}
    else:
        bundle = Bundle.from_json(timed.read_bytes(), str(timed))
        gpus = len(facts_from_bundle(bundle).gpus_on_bus or ())
        kind = "lab node" if bundle.simulated else "machine"
        times = {"seconds_measured_on": f"a {kind} with {gpus} GPUs", "seconds": seconds(bundle)}
    return {"recorded": recordings(), "hardware": hardware(), **times}


def text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--timed", type=Path, metavar="BUNDLE")
    options = parser.parse_args()
    if missing := [name for name in names() if not there(name)]:
        parser.error(f"{len(missing)} recorded outputs are missing: run `make captures` first")
    EVIDENCE.write_text(text(document(options.timed)), encoding="utf-8")
