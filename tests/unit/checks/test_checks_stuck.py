"""host.stuck-processes: users choose the names of their processes, and vfork puts them into state D."""

import pytest

from gpunode.checks import Expectation, registry
from gpunode.facts.node import NodeFacts
from gpunode.facts.running import Process


@pytest.mark.parametrize(
    ("name", "waits_in", "status"),
    [
        ("nvidia-smi", "rm_ioctl", "fail"),
        ("python", "os_acquire_mutex", "fail"),
        ("nvidia-smi", None, "fail"),
        ("nvidia-smi", "io_schedule", "warn"),
        # Recorded on Linux 6.18: a user's program that set its name, called vfork, and let the child sleep.
        ("nvidia-smi", "kernel_clone", "pass"),
    ],
)
def test_the_function_counts_and_not_the_name(name: str, waits_in: str | None, status: str) -> None:
    stuck = (Process(pid=78, name=name, waits_in=waits_in),)
    facts = NodeFacts(host="n", collected_at="2026-11-20T12:00:00Z", stuck_processes=stuck)
    (finding,) = registry["host.stuck-processes"].findings(facts, Expectation())
    assert finding.status.value == status
