"""NCCL's variables in NVIDIA's two kinds: descriptions of a system, and debugging.

Source: env.rst of NCCL 2.30.7 (sources.yml, nccl_env), section "System configuration", which also has those that set
where and how NCCL logs. Variables that are not in it count as debugging: they are not to be kept in production.
"""

SYSTEM = frozenset(
    f"NCCL_{name}"
    for name in (
        *("SOCKET_IFNAME", "SOCKET_FAMILY", "SOCKET_MAGIC", "SOCKET_RETRY_CNT", "SOCKET_RETRY_SLEEP_MSEC"),
        *("SOCKET_POLL_TIMEOUT_MSEC", "SOCKET_NTHREADS", "NSOCKS_PERTHREAD", "CROSS_NIC"),
        *("IB_HCA", "IB_TIMEOUT", "IB_RETRY_CNT", "IB_GID_INDEX", "IB_ADDR_FAMILY", "IB_ADDR_RANGE"),
        *("IB_ROCE_VERSION_NUM", "IB_SL", "IB_TC", "IB_FIFO_TC", "IB_RETURN_ASYNC_EVENTS"),
        *("OOB_NET_ENABLE", "OOB_NET_IFNAME", "UID_STAGGER_THRESHOLD", "UID_STAGGER_RATE"),
        *("NET", "NET_PLUGIN", "TUNER_PLUGIN", "PROFILER_PLUGIN", "ENV_PLUGIN", "IGNORE_CPU_AFFINITY", "CONF_FILE"),
        *("COLLNET_ENABLE", "COLLNET_NODE_THRESHOLD", "CTA_POLICY", "NETDEVS_POLICY", "MULTI_RANK_GPU_ENABLE"),
        *("TOPO_FILE", "TOPO_DUMP_FILE", "SET_THREAD_NAME"),
        *("DEBUG_FILE", "DEBUG_SUBSYS", "DEBUG_TIMESTAMP_FORMAT", "DEBUG_TIMESTAMP_LEVELS"),
    )
)
QUIET = ("VERSION", "WARN")
"""Values of NCCL_DEBUG that may stay: INFO floods every job's log."""


def debugs(name: str, value: str) -> bool:
    """Return whether a variable of NCCL is for debugging, so that it must not be set for all users."""
    if name == "NCCL_DEBUG":
        return value.strip().upper() not in QUIET
    return name.startswith("NCCL_") and name not in SYSTEM
