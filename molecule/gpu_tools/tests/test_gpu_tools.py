"""Tests of a node with the tools, run on the node itself."""

import json

from testinfra.host import Host


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_the_recorded_programs_are_there_and_start(host: Host) -> None:
    programs = json.loads(output(host, "cat /etc/gpunode/tools.json"))["programs"]
    assert {"fio", "htop", "iostat", "lspci", "nvme", "perf", "strace", "ib_write_bw"} <= set(programs)
    with host.sudo():
        assert [name for name in programs if not host.exists(name)] == []
    assert output(host, "fio --version").startswith("fio-")


def test_what_the_archive_does_not_offer_is_left_out(host: Host) -> None:
    # Debian 12 has it in contrib, which the node's sources do not name.
    assert not host.package("nvtop").is_installed


def test_everybody_may_profile_when_the_module_is_loaded(host: Host) -> None:
    text = output(host, "cat /etc/modprobe.d/gpunode-profiling.conf")
    assert "options nvidia NVreg_RestrictProfilingToAdminUsers=0" in text
