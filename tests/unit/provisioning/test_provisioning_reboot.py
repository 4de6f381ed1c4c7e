"""When a node is rebooted, and what is noted where it is not."""

import json
from typing import Any

import pytest
from node_samples import context, node

from gpunode.provisioning import service
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.service import LEASE, MARK
from gpunode.provisioning.state import BOOT_ID, NodeState

SETTINGS: dict[str, Any] = json.loads(
    """{"gpunode_reboot": "when_needed", "gpunode_allow_busy": false, "gpunode_reboot_for_updates": false,
    "gpunode_change": ""}"""
)
THERE = {BOOT_ID: "other-boot\n", service.MACHINE_ID: "other-machine\n"}
HERE: dict[str, Any] = {"boot_id": "own-boot", "machine_id": "own-machine", "reboot_reasons": ("a", "", "b", "a")}
HELD = '{"owner": "root@admin1", "token": "run-1", "since": "2026-11-23T09:00:00Z"}'
BUSY = {"gpu_processes": [{"pid": 4, "name": "train", "type": "C", "user": "ada", "gpu": "gpu0"}]}


def decided(state: NodeState | None = None, settings: dict[str, Any] | None = None, **run: Any) -> Manifest:
    known = state or node(texts=THERE)
    return service.plan_reboot(known, {**SETTINGS, **(settings or {})}, context(**{**HERE, **run}))


def test_a_node_with_reasons_is_rebooted_and_all_are_named_once() -> None:
    manifest = decided()
    assert manifest.pending_reasons == ("a reboot is pending: a; b",)
    assert manifest.result == service.RebootResult(reasons="a; b")


def test_the_run_that_holds_the_node_reboots_it() -> None:
    assert decided(node(texts={**THERE, LEASE: HELD}), {"gpunode_change": "run-1"}).pending


def test_without_a_reason_nothing_is_reported() -> None:
    assert decided(reboot_reasons=()) == Manifest(role="reboot")


@pytest.mark.parametrize(
    ("state", "settings", "run", "words"),
    [
        (None, {"gpunode_reboot": "never"}, {}, "(gpunode_reboot: never)"),
        (node(texts=THERE, facts=BUSY), {}, {}, "GPUs are in use"),
        (node(texts=THERE, facts={"gpu_processes": None}), {}, {}, "GPUs are in use"),
        (None, {}, {"local": True}, "Ansible runs on this machine"),
        (None, {}, {"boot_id": "other-boot"}, "Ansible runs on this machine"),
        (None, {}, {"boot_id": "", "machine_id": "other-machine"}, "Ansible runs on this machine"),
        (node(), {}, {}, "Ansible runs on this machine"),
        (
            node(texts={**THERE, LEASE: HELD}),
            {"gpunode_change": "other"},
            {},
            "upgrade of root@admin1",
        ),
    ],
    ids=["not allowed", "busy", "unknown", "local", "same boot", "same machine", "ids unknown", "held"],
)
def test_a_reboot_that_must_not_be_is_noted(
    state: NodeState | None, settings: dict[str, Any], run: dict[str, Any], words: str
) -> None:
    manifest = decided(state, settings, **run)
    assert not manifest.pending
    assert len(manifest.notes) == 1
    assert words in manifest.notes[0]


def test_a_busy_node_is_drained_first_and_then_refused() -> None:
    busy = node(texts=THERE, facts=BUSY)
    assert decided(busy, drains=True).pending
    marked = node(texts={**THERE, MARK: "{}"}, facts=BUSY)
    assert not decided(marked, drains=True).pending


def test_updates_are_a_reason_where_that_is_requested() -> None:
    waiting = node(texts=THERE, facts={"reboot_required": ["linux-image-6.8", "libc6"]})
    assert not decided(waiting, reboot_reasons=()).pending
    manifest = decided(waiting, {"gpunode_reboot_for_updates": True}, reboot_reasons=())
    assert manifest.pending_reasons == ("a reboot is pending: updates: linux-image-6.8, libc6",)


@pytest.mark.parametrize(("boot_before", "pending"), [("", True), ("other-boot", True), ("earlier-boot", False)])
def test_a_requested_reboot_is_done_once(boot_before: str, pending: bool) -> None:
    assert decided(reboot_reasons=(), reboot_requested=("asked",), boot_before=boot_before).pending is pending


def test_a_busy_node_is_rebooted_where_that_is_allowed() -> None:
    assert decided(node(texts=THERE, facts=BUSY), {"gpunode_allow_busy": True}).pending


def test_machines_made_from_one_image_are_distinguished_by_their_boot() -> None:
    assert decided(machine_id="other-machine").pending


def kernel(release: str, *, running: bool = False, newest: bool = False, image: bool = True) -> dict[str, Any]:
    more = {"package": None, "headers": True}
    return {"release": release, "running": running, "newest": newest, "image": image, **more}


def module(release: str) -> dict[str, Any]:
    more = {"path": f"/lib/modules/{release}/updates/dkms/nvidia.ko", "version": None, "vermagic": None}
    return {"kernel": release, "flavour": None, "signed": False, **more}


OLD, NEW = kernel("6.1.0-41", running=True), kernel("6.1.0-42", newest=True)


@pytest.mark.parametrize(("old", "new"), [("6.1.0-41", "6.1.0-42"), ("6.1.0-99", "6.1.0-100")])
def test_a_kernel_without_the_driver_is_not_rebooted_into(old: str, new: str) -> None:
    kernels = [kernel(old, running=True), kernel(new, newest=True)]
    held = decided(node(texts=THERE, facts={"kernels": kernels, "module_files": [module(old)]}))
    assert not held.pending
    assert f"dkms autoinstall -k {new}" in held.notes[0]


@pytest.mark.parametrize(
    ("kernels", "built"),
    [
        ([OLD, NEW], ["6.1.0-41", "6.1.0-42"]),
        ([OLD, NEW], []),  # no driver at all
        ([{**OLD, "newest": True}], ["6.1.0-41"]),
        ([OLD, kernel("6.1.0-42", newest=True, image=False)], ["6.1.0-41"]),  # headers alone
        ([OLD, NEW], ["6.1.0-42"]),  # the running kernel has none either
        ([OLD, NEW], None),  # unknown
    ],
)
def test_other_kernels_do_not_hold_a_reboot_back(kernels: list[dict[str, Any]], built: list[str] | None) -> None:
    files = None if built is None else [module(release) for release in built]
    facts = {"kernels": kernels, "module_files": files}
    assert decided(node(texts=THERE, facts=facts)).pending


NEXT = {"kernel": "6.1.0-42", "loader": "grub", "entry": "Linux", "setting": "grub.cfg", "arguments": "ro"}
IMAGE = {"kernel": "6.1.0-42", "path": "/boot/initrd.img-6.1.0-42", "newer": False}
HOLDS = {**IMAGE, "modules": [{"path": "/usr/lib/modules/6.1.0-42/updates/dkms/nvidia.ko", "size": 5}]}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"driver_library_version": "580.95.05"}, "the library is 580.95.05"),
        ({"initramfs": [HOLDS]}, "update-initramfs -u -k 6.1.0-42"),
        ({"next_boot": {**NEXT, "kernel": "6.1.0-40"}}, "kernel 6.1.0-40"),
        ({"next_boot": {**NEXT, "arguments": "ro module_blacklist=nvidia"}}, "module_blacklist=nvidia"),
        # The other kernel is as good as the running one, and its module is the library's.
        ({}, None),
        ({"initramfs": [{**HOLDS, "modules": []}]}, None),
        ({"next_boot": None, "driver_library_version": "580.95.05"}, None),
    ],
)
def test_a_boot_without_a_working_driver_is_held_back_with_its_reason(facts: dict[str, Any], words: str | None) -> None:
    files = [{**module("6.1.0-41"), "version": "580.95.05"}, {**module("6.1.0-42"), "version": "570.86.15", "size": 7}]
    library = {"driver_library_version": "570.86.15"}
    known = {"kernels": [OLD, NEW], "module_files": files, "next_boot": NEXT, **library, **facts}
    held = decided(node(texts=THERE, facts=known))
    assert held.pending == (words is None)
    assert words is None or words in held.notes[0]
