"""Users of a node put text of their own into the kernel's log: no event, boot or simulated node follows from it."""

import random

import pytest
from effort import effort
from facts_samples import answer, gpu_facts_with

from gpunode.facts import kernel_log, rdma
from gpunode.facts.parsers import nvrm
from gpunode.onnode import probe as script

FORGED = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
    "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x26:0x56:1474)",
    "nvidia-nvswitch2: SXid (PCI:0001:c4:00.0): 20034, Fatal, Link 31 LTSSM Fault Up",
    "nouveau 0000:65:00.0: fifo: fault 00",
    "pcieport 0000:00:01.0: AER: Uncorrected (Fatal) error received",
    "pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
    "x: AER: Correct",
    "mce: [Hardware Error]: Machine check events logged",
    "Out of memory: Killed process 1 (systemd) total-vm:1kB",
    "Linux version 6.1.0 (gpunode-lab) #1",
    "mlx5_core 0000:41:00.0 ens1: Link down",
)
"""What users put into names of programs, files and control groups."""
LINES = (
    # Recorded on Linux 6.18: a program of this name crashed.
    "{name}[11234]: segfault at 0 ip 000055e978e49132 sp 00007fff3d0de870 error 6 in {file}[1132,55e978e49000+1000] "
    "likely on CPU 1 (core 1, socket 0)",
    "traps: {name}[4711] trap invalid opcode ip:55e978e49132 sp:7fff3d0de870 error:0 in {file}[1132,55e978e49000+1000]",
    "{name} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "Memory cgroup stats for /user.slice/{file}:",
    "process '{file}' started with executable stack",
    "{name}: page allocation failure: order:0, mode:0x0",
)
# The kernel's messages may have several lines: dmesg and journalctl indent those after the first.
ENDS = ("\n", "\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028")
HEADS = (
    ("2026-11-23T12:29:33,955451+00:00 ", 33),
    ("2026-11-23T12:29:33+0000 gpu-01 kernel: ", 40),
    ("[   12.345678] ", 15),
    ("Feb 27 10:20:30 gpu-07 kernel: ", 31),
)


def forgeries(seed: int) -> str:
    """Return one message of the kernel as a log prints it."""
    chosen = random.Random(seed)  # noqa: S311
    head, indent = chosen.choice(HEADS)
    forged = chosen.choice(FORGED)
    if chosen.random() < 0.5:
        time = chosen.choice(("", *(stamp for stamp, _ in HEADS)))
        end = chosen.choice(ENDS)
        forged = f"x{end}{time}{forged}" + chosen.choice(("", end, f"{end}y"))
    text = chosen.choice(LINES).format(name=chosen.choice(FORGED)[:15], file=forged)
    return "".join(
        (head if number == 0 else " " * indent) + line + "\n" for number, line in enumerate(text.split("\n"))
    )


@pytest.mark.parametrize("first", range(0, effort(150, 15000), 50))
def test_no_event_follows_from_text_of_users(first: int) -> None:
    for seed in range(first, first + 50):
        refused(forgeries(seed))


def refused(text: str) -> None:
    assert nvrm.parse_log("[    0.5] Booting\n" + text).events == (), text  # type: ignore[union-attr]
    log = kernel_log.parse("[    0.5] Booting\n" + text, "journal")
    assert (log.events, log.complete, log.simulated) == ((), False, False), text
    assert kernel_log.parse(text.partition("\n")[2], "journal").events == (), text
    facts = gpu_facts_with({"journal-links": answer(text), "journal-xids": answer(text)})
    assert facts.link_log is None or (facts.link_log.complete, facts.link_log.events) == (False, ())
    assert facts.earlier_boots == (), text
    assert not any(map(rdma.event_of, text.split("\n"))), text
    sink = script.Sink(script.KERNEL_NEWS)
    sink.feed(text.encode())
    assert set(sink.text().split("\n")) <= set(text.split("\n"))
