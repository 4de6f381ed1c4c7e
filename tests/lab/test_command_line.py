"""The kernel's command line by Debian's own kernel-install, on a node without GRUB.

The entries of the boot loader are looked at; nothing boots from them here.
"""

import json
import os
from collections.abc import Iterator

import pytest
from playbook_runs import KERNEL_TUNING_ALONE, Run, Site

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]
CONCERNS = ("gpunode/provisioning/kernel_boot",)

COMMAND_LINE = "root=/dev/vda1 ro quiet\n"
WORDS = ["gpunode.word=1", "gpunode.other"]


class Node(Site):
    """A node with entries of the Boot Loader Specification for its kernels."""

    def apply(self, *arguments: str, **changes: object) -> Run:
        run = self.play("-e", json.dumps({**KERNEL_TUNING_ALONE, **changes}), *arguments)
        assert run.rc == 0, run.output
        return run

    def options(self) -> list[list[str]]:
        """Return the words of each entry."""
        lines = self.sh("grep -h ^options /boot/loader/entries/*.conf || true").splitlines()
        return [line.split()[1:] for line in lines]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    lab = Lab(f"command-line-{os.getpid()}")
    try:
        lab.up(1, "debian-12", None)
        machine = Node(lab)
        # By this folder kernel-install knows that the boot loader reads entries.
        machine.sh(f"mkdir /boot/$(cat /etc/machine-id); printf '{COMMAND_LINE}' > /etc/kernel/cmdline")
        yield machine
    finally:
        lab.down()


def test_arguments_are_added_to_every_entry_and_removed_again(node: Node) -> None:
    kernels = node.sh("ls /boot/vmlinuz-*").split()
    announced = node.apply("--check", kernel_tuning_command_line=WORDS)
    assert "/etc/kernel/cmdline" in announced.paths
    assert node.options() == []

    run = node.apply(kernel_tuning_command_line=WORDS)
    assert f"{' '.join(WORDS)} is added to the kernel command line" in " ".join(run.output.split())
    assert node.sh("cat /etc/kernel/cmdline") == f"root=/dev/vda1 ro quiet {' '.join(WORDS)}\n"
    assert len(node.options()) == len(kernels) > 0
    assert all(set(COMMAND_LINE.split()) | set(WORDS) <= set(words) for words in node.options())

    before = node.snapshot()
    assert node.apply(kernel_tuning_command_line=WORDS).recap["changed"] == 0
    assert node.snapshot() == before

    node.apply(kernel_tuning_command_line=WORDS[:1])
    assert all(WORDS[0] in words and WORDS[1] not in words for words in node.options())

    node.apply(kernel_tuning_state="absent")
    assert node.sh("cat /etc/kernel/cmdline") == COMMAND_LINE
    assert len(node.options()) == len(kernels)
    assert not any(set(WORDS) & set(words) for words in node.options())
    assert node.apply(kernel_tuning_state="absent").recap["changed"] == 0
