"""The manifests of all roles are those that were reviewed, and a second plan has nothing pending."""

import copy

import pytest
from effort import effort
from manifest_snapshots import FOLDER, REGENERATE, converged
from node_samples import collection_root
from site_samples import ORDER, settings

SHARED = {"nvidia_driver": {"nvidia_fabric"}, "nvidia_fabric": {"nvidia_driver"}, "rdma": {"gpu_tools"}}
"""Roles that have something pending once a role is removed: the fabric manager is of the driver's closure, and
infiniband-diags a tool of both.
"""
REMOVED = [role for role in ORDER if "state" in settings(role)]


def test_every_role_has_a_snapshot() -> None:
    roles = {path.name for path in (collection_root() / "roles").iterdir() if (path / "meta").is_dir()}
    assert roles == set(ORDER) == {path.stem for path in FOLDER.iterdir()}


def test_manifests_are_those_that_were_reviewed_and_settle_the_node() -> None:
    """After each role, after its removal, and after all roles: none undoes what another did."""
    assert len(converged().unsettled) > 100
    assert {name: reasons for name, reasons in converged().unsettled.items() if reasons} == {}
    changed = [
        role
        for role, page in converged().pages.items()
        if (FOLDER / f"{role}.yml").read_text(encoding="utf-8") != page.text
    ]
    assert changed == [], f"read git diff after {REGENERATE}"


def test_absent_removes_each_folder_of_ours_that_a_file_needed() -> None:
    left = {}
    for role, page in converged().pages.items():
        bare, absent = page.parts["apt"]["bare"], page.parts["apt"].get("absent", {})
        files = [path for path, row in bare.get("files", {}).items() if not row.startswith("absent")]
        made = {path.rpartition("/")[0] for path in files if "gpunode" in path.rpartition("/")[0]}
        left[role] = sorted(made - absent.get("folders", {}).keys())
    assert {role: folders for role, folders in left.items() if folders} == {}


@pytest.mark.parametrize("role", REMOVED[:: effort(9, 1)])
def test_a_removal_leaves_the_other_roles_settled(role: str) -> None:
    for machine in converged().machines.values():
        left = copy.deepcopy(machine)
        left.absent = role
        left.apply(left.plan(role))
        # The inventory of the first boot has the variables of all roles, of this one state: absent.
        others = {other for other in ORDER if left.pending(left.plan(other))} - {"first_boot"}
        assert others <= SHARED.get(role, set())
