"""The closing sentence of long verbs: what became of how many nodes, in how long, and what comes next."""

import pytest

from gpunode.report.outcomes import ProvisionedNode, ProvisionOutcome, closing


def outcome(*became: str, check: bool = False, code: int = 0) -> ProvisionOutcome:
    nodes = tuple(
        ProvisionedNode.model_validate({"host": f"n{n}", "status": status}) for n, status in enumerate(became)
    )
    return ProvisionOutcome.model_validate({"check": check, "exit_code": code, "seconds": 61.4, "nodes": nodes})


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (outcome("changed"), "1 node: 1 changed (61 s); next: NEXT"),
        (outcome("unchanged", "unchanged"), "2 nodes: 2 unchanged (61 s); next: NEXT"),
        (outcome("changed", "unchanged", check=True), "2 nodes: 1 unchanged, 1 would change (61 s); next: AGAIN"),
        (outcome("failed", "unreachable", "changed", code=3), "3 nodes: 1 changed, 1 failed, 1 unreachable (61 s)"),
    ],
)
def test_provision_counts_its_nodes(done: ProvisionOutcome, message: str) -> None:
    assert closing(done, "AGAIN", "NEXT") == message
