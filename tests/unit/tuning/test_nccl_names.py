"""NCCL's own documentation decides which variables describe a system."""

import pytest

from gpunode.tuning.network import NCCL_SYSTEM, debugs

DOCUMENTED = """
NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_SOCKET_MAGIC NCCL_SOCKET_RETRY_CNT NCCL_SOCKET_RETRY_SLEEP_MSEC
NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_DEBUG_TIMESTAMP_FORMAT NCCL_DEBUG_TIMESTAMP_LEVELS NCCL_TOPO_DUMP_FILE
NCCL_TOPO_FILE NCCL_IB_HCA NCCL_COLLNET_ENABLE NCCL_SET_THREAD_NAME
"""
"""From env.rst of NVIDIA/nccl v2.30.7-1, section "System configuration", which has 44 names with NCCL_DEBUG."""


@pytest.mark.parametrize("name", DOCUMENTED.split())
def test_a_variable_of_the_system_is_not_for_debugging(name: str) -> None:
    assert not debugs(name, "x")


def test_the_section_is_whole() -> None:
    assert len(NCCL_SYSTEM | {"NCCL_DEBUG"}) == 44
    assert debugs("NCCL_DEBUG", "INFO")
    assert debugs("NCCL_PROTO", "Simple")
