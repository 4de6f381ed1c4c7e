"""What the role nvidia_fabric changes: packages in the driver's version, drop-ins, settings, services."""

import hashlib
from typing import Any

import pytest
from driver_samples import BUNDLE, HGX, facts_of
from plan_samples import planned, state_of

from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.nvidia_fabric import CONFIG, IMEX_NODES, MARKER, MODULES, drop_in, merged
from gpunode.provisioning.state import NodeState
from gpunode.provisioning.templates import rendered

MANAGER = "nvidia-fabricmanager.service"
DRIVER = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "libcuda1")
FABRIC = ("nvidia-fabricmanager", "libnvidia-nscq")
SETTINGS = "# LOG_LEVEL=4\nLOG_LEVEL=4\n# BIND=0\nUNIX=1\n"


def package(name: str, version: str = "580.95.05-1") -> dict[str, Any]:
    row = {"name": name, "version": version, "architecture": "amd64", "source": name, "installed": True}
    return row | {
        "maintainer": "NVIDIA CORPORATION <cudatools@nvidia.com>",
        "state": "hold ok installed",
        "held": True,
    }


def unit(name: str, active: str = "active") -> dict[str, Any]:
    return {"name": name, "load": "loaded", "active": active, "sub": "running", "enabled": "enabled"}


@pytest.fixture
def board() -> dict[str, Any]:
    """A Debian 12 node with HGX H100 and driver 580.95.05, loaded."""
    packages = [package(name) for name in (*DRIVER, *FABRIC)]
    loaded = {"version": "580.95.05", "flavour": "open"}
    more = {"modules": ["nvidia"], "gpu_processes": [], "units": [unit(MANAGER)], "dkms": [], "module_files": []}
    return {**facts_of(BUNDLE), "pci": HGX, "packages": packages, "loaded_driver": loaded, **more}


def state(facts: dict[str, Any], **more: Any) -> NodeState:
    held = [row["name"] for row in facts["packages"] if row["held"]]
    return state_of(facts, {"held": held}, **more)


def fabric(facts: dict[str, Any], settings: dict[str, Any] | None = None, **more: Any) -> Manifest:
    return planned("nvidia_fabric", state(facts, **more), {"nvidia_fabric": settings or {}})


def without(facts: dict[str, Any], *names: str) -> dict[str, Any]:
    return {**facts, "packages": [row for row in facts["packages"] if row["name"] not in names]}


def test_what_the_board_needs_comes_in_the_drivers_version(board: dict[str, Any]) -> None:
    manifest = fabric(without(board, *FABRIC))
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert set(manifest.packages.install) == {f"{name}=580.95.05-*" for name in FABRIC}
    assert set(manifest.packages.hold) == set(FABRIC)
    assert "nvidia-driver-cuda" in manifest.packages.never
    assert {f"{name} is not installed" for name in FABRIC} <= set(manifest.pending_reasons)


def test_a_running_fabric_manager_lacks_its_drop_in_alone(board: dict[str, Any]) -> None:
    manifest = fabric(board)
    assert [file.path for file in manifest.files] == [drop_in(MANAGER)]
    assert "0x10de:0x22a3) exit 0" in str(manifest.files[0].content)
    assert manifest.units[0].state == "started"
    assert manifest.pending_reasons == (f"{drop_in(MANAGER)} could not be determined",)


def test_without_the_driver_it_is_refused(board: dict[str, Any]) -> None:
    (line,) = fabric(without(board, *DRIVER, *FABRIC)).refusals
    assert "no driver is installed" in line
    checked = planned("nvidia_fabric", state(without(board, *DRIVER, *FABRIC)), check=True)
    assert checked.refusals == ()


def test_another_release_than_the_modules_starts_nothing_and_takes_a_reboot(board: dict[str, Any]) -> None:
    manifest = fabric({**board, "nvidia_tool_versions": {"nv-fabricmanager": "580.178.04"}})
    assert manifest.reboot_reasons == ("the fabric manager is 580.178.04, module 580.95.05 is loaded",)
    assert {unit.state for unit in manifest.units} == {None}


def test_a_fabric_manager_that_does_not_run_is_started(board: dict[str, Any]) -> None:
    manifest = fabric({**board, "units": [unit(MANAGER, "inactive")]})
    assert f"{MANAGER} does not run" in manifest.pending_reasons


@pytest.mark.parametrize("active", ["inactive", "failed", "activating"])
def test_a_run_fails_with_a_fabric_manager_that_still_does_not_run(board: dict[str, Any], active: str) -> None:
    assert fabric(board).problems == ()
    (problem,) = fabric({**board, "units": [unit(MANAGER, active)]}).problems
    assert f"{MANAGER} does not run ({active})" in problem
    other = {**board, "units": [unit(MANAGER, active)], "loaded_driver": {"version": "570.1", "flavour": "open"}}
    assert fabric(other).problems == ()


def test_settings_are_merged_and_restart_an_idle_node(board: dict[str, Any]) -> None:
    file = {"kind": "file", "sha256": "0", "mode": "0640", "owner": "root", "group": "root"}
    documents = {"contents": {CONFIG: SETTINGS}, "files": {CONFIG: file}}
    manifest = fabric(board, {"manager_config": {"LOG_LEVEL": 3, "BIND": 1}}, **documents)
    (config,) = [file for file in manifest.files if file.path == CONFIG]
    assert config.content == "# LOG_LEVEL=4\nLOG_LEVEL=3\n# BIND=0\nBIND=1\nUNIX=1\n"
    assert config.mode == "0640"
    # A run that breaks off between the two leaves the restart to the next run.
    assert manifest.files[0].path == MARKER
    assert [unit.state for unit in manifest.units] == ["restarted"]
    busy = {**board, "gpu_processes": [{"pid": 1, "name": "python3", "type": "C"}]}
    waits = fabric(busy, {"manager_config": {"LOG_LEVEL": 3}}, **documents)
    assert [unit.state for unit in waits.units] == ["started"]
    assert MARKER in {file.path for file in waits.files}
    assert "wait for a restart" in waits.notes[0]
    (line,) = fabric(board, {"manager_config": {"LOG_LEVL": 3}}, **documents).refusals
    assert "LOG_LEVL is not in" in line


def test_a_restart_that_waited_for_a_busy_node_is_made_by_the_next_run(board: dict[str, Any]) -> None:
    digest = hashlib.sha256(SETTINGS.encode()).hexdigest()
    documents = {
        "contents": {CONFIG: SETTINGS, MARKER: f"{MANAGER}\n"},
        "files": {CONFIG: {"kind": "file", "sha256": digest, "mode": "0644"}},
    }
    manifest = fabric(board, {"manager_config": {"LOG_LEVEL": 4}}, **documents)
    assert manifest.restart_mark == MARKER
    assert f"{MANAGER} has to be restarted" in manifest.pending_reasons
    busy = {**board, "gpu_processes": [{"pid": 1, "name": "python3", "type": "C"}]}
    waits = fabric(busy, {"manager_config": {"LOG_LEVEL": 4}}, **documents)
    assert waits.restarts == {MANAGER: "its settings changed"}
    assert f"{MANAGER} has to be restarted" not in waits.pending_reasons
    done = {**documents, "contents": {CONFIG: SETTINGS}}
    assert fabric(board, {"manager_config": {"LOG_LEVEL": 4}}, **done).restart_mark is None
    # A transaction comes before the restart, and its record too.
    lacking = fabric(without(board, "libnvidia-nscq"), {"manager_config": {"LOG_LEVEL": 4}}, **documents)
    assert lacking.packages is not None
    assert lacking.packages.manager == "apt"
    assert lacking.restart_text == f"{MANAGER}\n"


def test_merging_what_is_set_changes_nothing() -> None:
    assert merged(SETTINGS, {"LOG_LEVEL": 4}) == SETTINGS
    assert merged(SETTINGS, {}) == SETTINGS


def test_a_board_of_nvlink_5_needs_modules(board: dict[str, Any]) -> None:
    b200 = {"vendor_id": "10de", "device_id": "2901", "class_id": "030200", "subsystem_id": None, "driver": None}
    pci = [{"slot": f"0000:{number:02x}:00.0", **b200} for number in range(16, 24)]
    manifest = fabric({**board, "pci": pci})
    assert set(manifest.modules) == {"ib_umad", "mlx5_core"}
    assert MODULES in {file.path for file in manifest.files}
    assert "0x10de:0x2901) exit 0" in str(manifest.files[0].content)


def test_a_node_that_needs_none_gets_nothing(board: dict[str, Any]) -> None:
    single = {**without(board, *FABRIC), "pci": [row for row in HGX if row["slot"] == "0000:10:00.0"], "units": []}
    manifest = fabric(single)
    assert (manifest.packages, manifest.files, manifest.units, manifest.pending_reasons) == (None, (), (), ())


@pytest.mark.parametrize("owner", ["nvidia_fabric", "nvidia_driver"])
def test_absent_removes_it_and_so_does_the_driver(board: dict[str, Any], owner: str) -> None:
    manifest = planned("nvidia_fabric", state(board), {owner: {"state": "absent"}})
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert set(manifest.packages.remove) == set(FABRIC)
    assert [(unit.name, unit.state) for unit in manifest.units] == [(MANAGER, "stopped")]
    failed = {**without(board, *FABRIC), "units": [{**unit(MANAGER, "failed"), "load": "not-found"}]}
    gone = planned("nvidia_fabric", state(failed), {owner: {"state": "absent"}})
    assert [(command.argv, command.may_fail) for command in gone.commands] == [
        (("systemctl", "reset-failed", MANAGER), True)
    ]
    assert f"{MANAGER} has failed" in gone.pending_reasons


NODES = rendered("nvidia_fabric", "nodes_config.cfg.j2", addresses=["10.0.0.1"])


@pytest.mark.parametrize(("text", "goes"), [(NODES, True), ("10.0.0.9\n", False), (None, False)])
def test_absent_removes_the_list_of_nodes_that_the_role_wrote(board: dict[str, Any], text: str, goes: bool) -> None:
    files = {IMEX_NODES: {"kind": "file" if text else "absent"}}
    run = state(board, files=files, contents={IMEX_NODES: text})
    gone = planned("nvidia_fabric", run, {"nvidia_fabric": {"state": "absent"}})
    # Before the packages: rpm keeps a changed file of its package under another name.
    assert [file.phase for file in gone.files if file.path == IMEX_NODES] == ["before"] * goes


def test_through_dnf_it_comes_at_the_drivers_release(board: dict[str, Any]) -> None:
    system = {"id": "rocky", "version_id": "9.6", "codename": None, "pretty_name": "Rocky 9.6", "id_like": ["rhel"]}
    rows = [{**package(name, "3:580.95.05-1.el9"), "maintainer": "NVIDIA CORPORATION"} for name in DRIVER]
    facts = {**board, "os": {**board["os"], **system}, "kernels": [], "packages": rows, "units": []}
    dnf = {"error": None, "installed": {row["name"]: row["version"] for row in rows}}
    manifest = planned("nvidia_fabric", state_of(facts, dnf=dnf))
    assert manifest.packages is not None
    assert manifest.packages.manager == "dnf"
    assert set(manifest.packages.bound) == set(FABRIC)
    assert manifest.packages.constraint == "580.95.05"

    rows += [{**package(name, "3:580.95.05-1.el9"), "maintainer": "NVIDIA CORPORATION"} for name in FABRIC]
    dnf = {"error": None, "installed": {row["name"]: row["version"] for row in rows}}
    settled = planned("nvidia_fabric", state_of({**facts, "packages": rows, "units": [unit(MANAGER)]}, dnf=dnf))
    assert settled.packages is None
    assert [(unit.name, unit.enabled, unit.state) for unit in settled.units] == [(MANAGER, True, "started")]
