"""Reports with every status, shape and hostile name, for the tests that hold every format."""

import random

from gpunode.checks import Finding, GpuIdentity, Hardware, Identity, RunningStack, State, Status
from gpunode.checks.actions import Action
from gpunode.judging.report import Fleet, NodeReport, Report, judged, report, unreachable

CANARY = "CANARY"
MARKUP = (
    f"<script>alert('{CANARY}')</script>",
    f"</title><img src=x onerror={CANARY}>",
    f"[red]{CANARY}[/red]",
    f"[{CANARY}](http://example.invalid) ![x](y) **b** _i_ `c`",
    f"| {CANARY} | @team #1 $x$ ~~s~~",
    f"\"'&amp;]]><!-- {CANARY} --><![CDATA[ {{{{ 7*7 }}}} {{% raw %}}",
    f"%0A::error::{CANARY}%",
    f"x\n::error title=a::{CANARY}\r\n# heading\n",
    f'{CANARY}"}} 1\n# TYPE gpunode_x counter\\',
    "```\n$(reboot) `reboot` ; reboot",
)
CONTROL = ("\x1b[2J\x1b]0;title\x07", "\u202egnp.exe\u2066", "\x00\x08\x7f\x9b31m", "\u200f\u061c\u2028", "a\tb\r\n\nc")
OTHER = ("", " ", "é\u0301漢字🚀", "\ufffe\uffff", "a" * 700, "word " * 90, "-rf", "gpu-[1-3]", "=cmd|' /C calc'!A0")
TEXTS = (*MARKUP, *CONTROL, *OTHER)
CHECKS = ("gpu.present", "link.pcie-width", "driver.held", "fabric.state", "node.reachable", "host.time")


def _finding(draw: random.Random) -> Finding:
    role = draw.random() < 0.5
    return Finding(
        check=draw.choice(CHECKS),
        status=draw.choice(list(Status)),
        component=draw.choice(("node", "gpu0", "gpu1", "gpu2", "nvlink 3/5", draw.choice(TEXTS))),
        message=draw.choice((*TEXTS, "PCIe x8 at 0000:b8:00.0; both ends support x16")),
        expected=draw.choice((None, 16, 1.5, True, draw.choice(TEXTS))),
        measured=draw.choice((None, 8, float("inf"), draw.choice(TEXTS))),
        unit=draw.choice((None, "GB/s", draw.choice(TEXTS))),
        source=draw.choice((None, "site file", draw.choice(TEXTS))),
        remedy=draw.choice((None, "Mend it. Run: gpunode provision -i INVENTORY -l HOST -t x", draw.choice(TEXTS))),
        actions=(Action(action="run_role", target="nvidia_driver:nvidia_driver_install"),) if role else (),
        recommended_state=draw.choice(list(State)),
        observed=draw.choice((None, None, None, draw.choice(TEXTS))),
    )


def _node(draw: random.Random, number: int) -> NodeReport:
    host = f"{draw.choice(('gpu-', draw.choice(TEXTS)))}{number}"
    if draw.random() < 0.15:
        return unreachable(host, draw.choice(TEXTS), draw.choice((None, 3.25)))
    gpus = tuple(GpuIdentity(index=index, name=draw.choice(TEXTS), uuid=f"GPU-{index}") for index in range(2))
    stack = RunningStack(
        os=draw.choice(TEXTS), kernel="6.1", driver=draw.choice((None, "595.91.07", draw.choice(TEXTS)))
    )
    hardware = Hardware(product=draw.choice(TEXTS), gpus=2, gpu_model=draw.choice((None, "l40s", draw.choice(TEXTS))))
    identity = Identity(simulated=draw.random() < 0.5, stack=stack, gpus=gpus, hardware=hardware)
    return judged(host, identity, [_finding(draw) for _ in range(draw.randrange(12))], draw.choice((None, 1.5)))


def hostile(seed: int, nodes: int | None = None) -> Report:
    """Return a report drawn from a seed."""
    draw = random.Random(seed)  # noqa: S311
    number = draw.randrange(6) if nodes is None else nodes
    return whole(*(_node(draw, index) for index in range(number)))


def whole(*nodes: NodeReport, fleet: Fleet | None = None) -> Report:
    """Return a report on nodes, of a run of 6 s."""
    times = ("2026-11-23T20:00:00Z", "2026-11-23T20:00:06Z")
    return report(nodes, level="quick", version="0.1.0", started_at=times[0], finished_at=times[1], fleet=fleet)


def many_findings(nodes: int, of_each: int) -> Report:
    """Return a report in which each finding has a component and a message of its own."""
    stack = RunningStack(os="Debian GNU/Linux 12", driver="595.91.07")
    return whole(
        *(
            judged(
                f"gpu-{number:03d}",
                Identity(simulated=False, stack=stack, gpus=(), hardware=Hardware(gpus=8, gpu_model="l40s")),
                [
                    Finding(
                        check=CHECKS[index % len(CHECKS)],
                        status=list(Status)[index % len(Status)],
                        component=f"gpu{index}",
                        message=f"value {number}.{index} is not the expected one",
                    )
                    for index in range(of_each)
                ],
                2.0,
            )
            for number in range(nodes)
        )
    )
