"""ml_environment: what is written for everybody, what is a job's, and what is refused."""

import json
from typing import Any

import pytest
from node_samples import after, by_path, contents, context, file, node, planned

from gpunode.errors import UsageError
from gpunode.provisioning.ml_environment import (
    BEGIN,
    END,
    ENVIRONMENT,
    JOB,
    LAUNCHER,
    LOGIND,
    NCCL,
    PROFILE,
)
from gpunode.provisioning.state import NodeState
from gpunode.provisioning.transaction import MARK

ROLE = "ml_environment"
RECORD = "/var/lib/gpunode/ml_environment/packages-before"


def nic(name: str, speed: int = 200_000) -> dict[str, Any]:
    rest = dict.fromkeys(("slot", "driver", "mtu", "numa_node", "carrier_changes"))
    return {"name": name, "state": "up", "speed_mbit_per_s": speed, **rest}


def hca(name: str, layer: str) -> dict[str, Any]:
    port = {"port": 1, "state": "ACTIVE", "physical_state": "LinkUp", "rate_gbit_per_s": 400.0, "rate": None}
    rest = dict.fromkeys(("firmware", "board_id", "type", "slot", "numa_node"))
    return {"name": name, **rest, "ports": [{**port, "link_layer": layer, "lid": 1}]}


ETHERNET: dict[str, Any] = {"nics": [nic("eth0")], "addressed": ["eth0"], "infiniband": [], "machine": None}
ROCE: dict[str, Any] = {**ETHERNET, "infiniband": [hca("mlx5_0", "Ethernet"), hca("mlx5_1", "Ethernet")]}


def host(facts: dict[str, Any] | None = None, **more: Any) -> NodeState:
    return node(facts=facts or ETHERNET, **more)


def lines(text: str | None) -> list[str]:
    return [line for line in str(text).splitlines() if not line.startswith("#")]


def test_a_cloud_node_gets_its_interface_and_its_sockets() -> None:
    plan = planned(ROLE, host())
    assert lines(contents(plan)[NCCL]) == [
        "NCCL_SOCKET_IFNAME==eth0",
        "NCCL_SOCKET_NTHREADS=4",
        "NCCL_NSOCKS_PERTHREAD=4",
    ]
    assert planned(ROLE, after(plan, host())).pending_reasons == ()


def test_roce_carries_the_data_and_sockets_are_left_alone() -> None:
    assert lines(contents(planned(ROLE, host(ROCE)))[NCCL]) == ["NCCL_SOCKET_IFNAME==eth0"]


def test_what_others_wrote_stays_and_wins() -> None:
    foreign = "# ours\nNCCL_SOCKET_IFNAME=ens9\nNCCL_P2P_DISABLE=1"
    state = host(texts={NCCL: foreign})
    plan = planned(ROLE, state)
    text = str(contents(plan)[NCCL])
    assert text.startswith(f"{foreign}\n{BEGIN}\n")
    assert "NCCL_SOCKET_IFNAME==eth0" not in text
    notes = " ".join(plan.notes)
    assert "the node has no interface ens9, it has eth0" in notes
    assert "NCCL_P2P_DISABLE=1, which is not the role's, is for debugging" in notes
    assert by_path(plan, NCCL).expect_sha256 == file(foreign)["sha256"]
    settled = after(plan, state)
    assert planned(ROLE, settled).pending_reasons == ()
    assert contents(planned(ROLE, settled, state="absent"))[NCCL] == f"{foreign}\n"


def test_a_damaged_part_is_written_again() -> None:
    plan = planned(ROLE, host())
    damaged = str(contents(plan)[NCCL]).replace("=eth0", "=eth7")
    state = host(texts={NCCL: damaged})
    assert contents(planned(ROLE, state))[NCCL] == contents(plan)[NCCL]
    assert END in damaged


@pytest.mark.parametrize(
    ("requested", "why"),
    [
        ({"NCCL_SOCKET_IFNAME": "=eth9"}, "no interface eth9, it has eth0"),
        ({"NCCL_IB_HCA": "=mlx5_0,mlx5_7"}, "no HCA mlx5_7, it has mlx5_0, mlx5_1"),
    ],
)
def test_what_does_not_exist_is_named_and_the_rest_is_written(requested: dict[str, str], why: str) -> None:
    plan = planned(ROLE, host(ROCE), nccl={**requested, "NCCL_IB_TC": 106})
    (note,) = plan.notes
    assert NCCL in note
    assert next(iter(requested)) in note
    assert why in note
    assert "NCCL_IB_TC=106" in lines(contents(plan)[NCCL])
    assert not [line for line in lines(contents(plan)[NCCL]) if line.startswith(next(iter(requested)))]


def test_debugging_is_written_on_request_alone_and_reported() -> None:
    plan = planned(ROLE, host(), nccl={"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": None})
    assert "NCCL_ALGO=Ring" in lines(contents(plan)[NCCL])
    assert not [line for line in lines(contents(plan)[NCCL]) if "IFNAME" in line]
    assert any("NCCL_ALGO=Ring is for debugging" in note for note in plan.notes)


@pytest.mark.parametrize(
    "settings",
    [
        {"variables": {"CUDA_VISIBLE_DEVICES": "0"}},
        {"variables": {"PYTORCH_ALLOC_CONF": "x"}},
        {"variables": {"LD_PRELOAD": "/x.so"}},
        {"variables": {"NCCL_DEBUG": "INFO"}},
        {"variables": {"A B": "1"}},
        {"variables": {"A": "$(reboot)"}},
        {"variables": {"A": "x\ny"}},
        {"nccl": {"PATH": "/x"}},
        {"nccl": {"NCCL_IB_TC": "1\nNCCL_X=2"}},
        {"nccl_topology_file": "topo.xml"},
    ],
)
def test_what_does_not_belong_there_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"ml_environment_{next(iter(settings))}"):
        planned(ROLE, host(), **settings)


@pytest.mark.parametrize(("profile", "grows"), [("training", False), ("development", True), ("hpc", False)])
def test_variables_for_everybody_follow_the_profile(profile: str, grows: bool) -> None:
    run = context(others={"preflight": {"gpunode_profile": profile}})
    plan = planned(ROLE, host(), run, variables={"HF_HOME": "/data/hf"})
    for path in (PROFILE, ENVIRONMENT):
        text = str(contents(plan)[path])
        assert ("TF_FORCE_GPU_ALLOW_GROWTH" in text) is grows
        assert "CUDA_DEVICE_ORDER" in text
        assert "OMP_NUM_THREADS" not in text
        assert "HF_HOME" in text


def test_jobs_get_a_launcher_and_its_settings() -> None:
    plan = planned(ROLE, host())
    assert by_path(plan, LAUNCHER).mode == "0755"
    assert str(by_path(plan, LAUNCHER).content).startswith("#!/usr/bin/python3 -I\n")
    document = json.loads(str(contents(plan)[JOB]))
    assert "--shm-size" in document["docker"]
    assert "OMP_NUM_THREADS" not in document["environment"]


def test_shared_memory_outlives_a_login_unless_asked_otherwise() -> None:
    assert "RemoveIPC=no" in str(contents(planned(ROLE, host()))[LOGIND])
    assert contents(planned(ROLE, host(), remove_ipc=True))[LOGIND] is None


def test_an_allocator_is_a_package() -> None:
    change = planned(ROLE, host(), malloc="jemalloc").packages
    assert change is not None
    assert change.install == ("libjemalloc2",)
    machine = node({"libjemalloc2": "5"}, {RECORD: f"{MARK}\nlibjemalloc2\n"}, facts=ETHERNET)
    assert "libjemalloc2 must be removed" in planned(ROLE, machine, state="absent").pending_reasons
    by_dnf = planned(ROLE, node(dnf=True, facts=ETHERNET), malloc="jemalloc")
    assert by_dnf.packages is None
    assert any("by hand" in note for note in by_dnf.notes)


def test_azures_topology_file_is_used_where_there_is_one() -> None:
    single = {"/opt/microsoft/ndv5-topo.xml": file("")}
    assert "NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml" in lines(contents(planned(ROLE, host(files=single)))[NCCL])
    several = {**single, "/opt/microsoft/ndv4-topo.xml": file("")}
    plan = planned(ROLE, host(files=several))
    assert "TOPO_FILE" not in str(contents(plan)[NCCL])
    assert any("several topology files" in note for note in plan.notes)
    named = planned(ROLE, host(files=several), nccl_topology_file="/opt/microsoft/ndv4-topo.xml")
    assert "NCCL_TOPO_FILE=/opt/microsoft/ndv4-topo.xml" in lines(contents(named)[NCCL])


def test_nothing_is_pending_where_nothing_is_left() -> None:
    assert planned(ROLE, host(), state="absent").pending_reasons == ()
