"""The check on the programs that the role gpu_tools installed."""

from collections.abc import Iterator

from gpunode.checks.compare import passed, skipped, warned
from gpunode.checks.registry import CheckResult, Skip, registry
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed


@registry.check(
    "host.tools",
    needs=("tools",),
    means="The programs that the role gpu_tools installed exist: profilers and monitors that are needed when a "
    "problem occurs.",
    remedy="Install them again: role gpu_tools, tag gpu_tools_install.",
    state="observe",
    actions=("run_role:gpu_tools:gpu_tools_install",),
    category="host",
)
def tools(node: NodeFacts) -> Iterator[CheckResult]:
    if node.tools is None:
        raise Skip("the role gpu_tools installed no programs")
    missing = sorted(name for name, path in node.tools.items() if path is None)
    count = counted(len(node.tools), "program")
    if missing:
        yield warned(f"missing: {listed(missing, 8)}", expected=len(node.tools), measured=len(missing))
    elif not node.tools:
        yield skipped("the role gpu_tools recorded no program")
    else:
        yield passed(f"{count} of the role gpu_tools found", measured=len(node.tools))
