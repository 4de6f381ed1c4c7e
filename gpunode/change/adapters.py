"""The adapters by the names that ``--scheduler`` has for them."""

from collections.abc import Callable, Mapping

from gpunode.change.kubernetes import KubernetesScheduler
from gpunode.change.scheduler import CommandScheduler, NoScheduler, Scheduler, SlurmScheduler
from gpunode.errors import UsageError

ADAPTERS: Mapping[str, Callable[[], Scheduler]] = {
    "none": NoScheduler,
    "slurm": SlurmScheduler,
    "kubernetes": KubernetesScheduler,
}
COMMAND = "command"


def scheduler_of(text: str) -> Scheduler:
    """Return the adapter that ``--scheduler`` names. Raises UsageError."""
    if text in ADAPTERS:
        return ADAPTERS[text]()
    kind, _, program = text.partition(":")
    if kind == COMMAND and program:
        return CommandScheduler(program)
    raise UsageError(f"--scheduler {text}: expected {', '.join(ADAPTERS)} or {COMMAND}:PROGRAM")
