"""The plan of kubernetes_node: containerd's file, modules, settings, swap, and what is refused."""

import tomllib
from typing import Any

import pytest
from plan_samples import context_of, planned, state_of

from gpunode.errors import UsageError
from gpunode.provisioning.containerd import CONFIG, MARKER, kubernetes_config
from gpunode.provisioning.kubernetes_node import (
    BEFORE,
    BRIDGE,
    FILE_SYSTEMS,
    MODULES,
    SWAP,
    SWAPS,
    SYSCTL,
    VALUES,
    uses_containerd,
)
from gpunode.provisioning.manifest import ManagedFile, Manifest
from gpunode.provisioning.state import NodeState
from gpunode.provisioning.transaction import MARK

CRI = "io.containerd.grpc.v1.cri"
PATHS = {f"/proc/sys/{name.replace('.', '/')}": value for name, value in VALUES.items()}
HEAD = "Filename Type Size Used Priority\n"
READY = {SWAPS: HEAD, FILE_SYSTEMS: "nodev\toverlay\n", **{path: f"{value}\n" for path, value in PATHS.items()}}
SITES = f"""\
version = 2
disabled_plugins = ["cri", "io.containerd.internal.v1.opt"] # the packager's own
[plugins."{CRI}"]
  sandbox_image = "a.example/pause:1" # ours
  [plugins."{CRI}".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."{CRI}".containerd.runtimes.runc.options]
      SystemdCgroup = false # of old
      Root = "/x"
"""


def node(text: str | None = None, installed: tuple[str, ...] = (), memory: Any = None, **more: Any) -> NodeState:
    facts = {
        "host": "node",
        "collected_at": "2026-11-20T10:00:00Z",
        "virtualization": "none",
        "memory": memory,
        "gpu_processes": more.pop("processes", []),
        "packages": [],
    }
    contents = {CONFIG: text, **more.pop("contents", {})}
    return state_of(facts, {"installed": dict.fromkeys(installed, "1")}, contents=contents, **more)


def plan(state: NodeState, answer: Any = None, **settings: Any) -> Manifest:
    answers = {"swaps": READY | (answer or {})}
    return planned("kubernetes_node", state, {"kubernetes_node": {"state": "present", **settings}}, answers=answers)


def text_of(manifest: Manifest, path: str) -> str | None:
    (file,) = [file for file in manifest.files if file.path == path]
    return file.content


def test_by_default_nothing_is_changed() -> None:
    assert not planned("kubernetes_node", node()).manages


def test_a_bare_node_is_asked_and_gets_everything() -> None:
    first = planned("kubernetes_node", node(), {"kubernetes_node": {"state": "present"}})
    assert set(first.questions["swaps"].body["paths"]) == {SWAPS, FILE_SYSTEMS, *PATHS}
    bare = {SWAPS: f"{HEAD}/dev/sda2 partition 1 0 -2\n", FILE_SYSTEMS: "nodev\tproc\n", **dict.fromkeys(PATHS)}
    manifest = plan(node(), bare)
    assert manifest.modules == ("overlay", "br_netfilter")
    assert manifest.kernel_values == PATHS
    assert [command.argv for command in manifest.commands] == [("swapoff", "-a")]
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == ("containerd",)
    assert (text_of(manifest, MODULES) or "").splitlines()[1:] == ["overlay", "br_netfilter"]
    assert "net.ipv4.ip_forward = 1" in (text_of(manifest, SYSCTL) or "")
    assert text_of(manifest, SWAP) == "", "systemd reads an empty unit file as masked"
    assert "swap is on: /dev/sda2" in manifest.pending_reasons


def test_a_module_that_is_built_into_the_kernel_is_not_missing() -> None:
    assert plan(node()).modules == ()
    assert plan(node(), {BRIDGE: None}).modules == ("br_netfilter",)


def test_in_a_container_no_module_is_loaded_and_only_its_own_settings_are_set() -> None:
    state = node()
    facts = state.facts.model_copy(update={"virtualization": "docker"})
    manifest = plan(state.model_copy(update={"facts": facts}), {BRIDGE: None, FILE_SYSTEMS: ""})
    assert manifest.modules == ()
    assert BRIDGE not in (manifest.kernel_values or {})


@pytest.mark.parametrize("installer", ["k3s", "rke2"])
def test_an_installer_with_a_containerd_of_its_own_gets_none(installer: str) -> None:
    manifest = plan(node(), installer=installer)
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == ()
    assert CONFIG not in {file.path for file in manifest.files}
    assert not uses_containerd(context_of({"kubernetes_node": {"state": "present", "installer": installer}}))
    assert uses_containerd(context_of({"kubernetes_node": {"state": "present"}}))


def test_the_containerd_of_docker_stays() -> None:
    manifest = plan(node(installed=("containerd.io", "docker-ce")))
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == ()
    assert [unit.name for unit in manifest.units] == ["containerd.service", "containerd.service"]


def test_swap_in_use_that_does_not_fit_into_memory_is_refused() -> None:
    memory = {"total_mib": 8000, "available_mib": 500, "swap_total_mib": 4000, "swap_free_mib": 3000}
    memory |= {"hugepages_total": 0, "hugepages_free": 0, "hugepage_size_kib": 2048}
    on = {SWAPS: f"{HEAD}/swapfile file 1 0 -2\n"}
    (line,) = plan(node(memory=memory), on).refusals
    assert line.startswith("swap-in-use: 1000 MiB")
    assert plan(node(memory={**memory, "available_mib": 2000}), on).refusals == ()
    kept = plan(node(memory=memory), on, swap="keep")
    assert (kept.refusals, kept.commands, text_of(kept, SWAP)) == ((), (), None)


def test_a_sites_file_is_changed_in_its_place_and_kept_for_the_removal() -> None:
    manifest = plan(node(SITES, ("containerd",)))
    text = text_of(manifest, CONFIG) or ""
    document = tomllib.loads(text)
    assert document["disabled_plugins"] == ["io.containerd.internal.v1.opt"]
    options = document["plugins"][CRI]["containerd"]["runtimes"]["runc"]["options"]
    assert options == {"SystemdCgroup": True, "Root": "/x"}
    assert "# the packager's own" in text
    assert "# ours" in text
    assert text_of(manifest, BEFORE) == SITES
    assert [(unit.name, unit.state) for unit in manifest.units] == [
        ("containerd.service", "started"),
        ("containerd.service", "restarted"),
    ]
    assert MARKER in {mark.path for mark in manifest.marks}
    settled = plan(node(text, ("containerd",), contents={BEFORE: SITES}))
    assert text_of(settled, CONFIG) == text
    assert [unit.state for unit in settled.units] == ["started"]
    gone = planned("kubernetes_node", node(text, contents={BEFORE: SITES}), {"kubernetes_node": {"state": "absent"}})
    assert (text_of(gone, CONFIG), text_of(gone, BEFORE)) == (SITES, None)


def restored(text: str | None, before: str) -> ManagedFile:
    """The configuration of a removal."""
    machine = node(text, contents={BEFORE: before})
    (config,) = [
        file
        for file in planned("kubernetes_node", machine, {"kubernetes_node": {"state": "absent"}}).files
        if file.path == CONFIG
    ]
    return config


def test_a_removal_keeps_a_copy_of_what_others_added() -> None:
    text = text_of(plan(node(SITES, ("containerd",))), CONFIG) or ""
    assert not restored(text, SITES).backup
    assert restored(f'{text}\n[plugins."{CRI}".registry]\n', SITES).backup
    # A file that the role created is removed; it records that there was none.
    manifest = plan(node(installed=("containerd",)))
    assert text_of(manifest, BEFORE) == ""
    assert restored(text_of(manifest, CONFIG), "").content is None
    assert restored(None, "").content is None


def test_containerd_stays_while_an_engine_needs_it() -> None:
    record = "/var/lib/gpunode/kubernetes_node/packages-before"
    for engine in ((), ("docker-ce",)):
        machine = node(installed=("containerd.io", *engine), contents={record: f"{MARK}\ncontainerd.io\n"})
        gone = planned("kubernetes_node", machine, {"kubernetes_node": {"state": "absent"}})
        assert ("containerd.io must be removed" in gone.pending_reasons) is not bool(engine)
        assert gone.packages is not None
        assert ("containerd.io" in gone.packages.remove_new) is not bool(engine)


@pytest.mark.parametrize(
    ("value", "state", "refused"),
    [
        (0, "present", True),
        (False, "present", True),
        ("1", "present", False),
        (None, "present", False),
        (0, "absent", False),
    ],
)
def test_a_setting_that_kubelet_needs_has_one_owner(value: Any, state: str, refused: bool) -> None:
    tuning = {"state": state, "sysctl": {"net.ipv4.ip_forward": value}}
    settings: dict[str, Any] = {"kubernetes_node": {"state": "present"}, "kernel_tuning": tuning}
    refusals = planned("kubernetes_node", node(), settings, answers={"swaps": READY}).refusals
    assert any("net.ipv4.ip_forward = 0: kubelet needs 1" in line for line in refusals) is refused


def test_a_restart_waits_for_processes_on_the_gpus() -> None:
    busy = node(SITES, ("containerd",), processes=[{"pid": 7, "name": "python3", "type": "C"}])
    manifest = plan(busy)
    assert "containerd.service" in manifest.restarts
    assert [unit.state for unit in manifest.units] == ["started"]


@pytest.mark.parametrize(
    ("text", "sandbox", "cri"),
    [
        (None, {"sandbox_image": "r.example/pause:3"}, CRI),
        ('disabled_plugins = ["cri"]\n', {"sandbox_image": "r.example/pause:3"}, CRI),
        ("version = 3\n", None, "io.containerd.cri.v1.runtime"),
    ],
)
def test_other_files_are_extended(text: str | None, sandbox: Any, cri: str) -> None:
    config, problem = kubernetes_config(text, "r.example/pause:3")
    assert problem is None
    document = tomllib.loads(config)
    plugin = document["plugins"][cri]
    assert plugin["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is True
    assert not document.get("disabled_plugins")
    if sandbox:
        assert plugin.items() >= sandbox.items()
    else:
        pinned = document["plugins"]["io.containerd.cri.v1.images"]["pinned_images"]
        assert pinned == {"sandbox": "r.example/pause:3"}
    assert kubernetes_config(config, "r.example/pause:3") == (config, None)


@pytest.mark.parametrize(
    "text",
    ["version = 1\n", "version = \n", "version = 2\nplugins = {}\n", "[plugins.x]\n"],
)
def test_a_file_that_cannot_be_extended_is_refused(text: str) -> None:
    (line,) = plan(node(text)).refusals
    assert line.startswith(CONFIG)


@pytest.mark.parametrize("image", ['a"\nx = 1', "pause 3", "https://registry.example.com/pause"])
def test_a_sandbox_image_is_a_name_without_quotes_and_lines(image: str) -> None:
    with pytest.raises(UsageError, match="kubernetes_node_sandbox_image"):
        plan(node(), sandbox_image=image)
