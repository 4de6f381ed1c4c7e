"""kernel_tuning: what follows from facts and settings, what is refused, and when it is pending."""

from typing import Any

import pytest
from node_samples import after, by_path, contents, context, file, node, planned

from gpunode.errors import UsageError
from gpunode.provisioning import kernel_boot, kernel_tuning
from gpunode.provisioning.kernel_tuning import MARKER, SETPCI, KernelTuningResult
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.state import BOOT_ID, NodeState

ROLE = "kernel_tuning"
LIMITS = {"defaults": {"memlock": "infinity", "nofile": "524288"}, "settings": []}
SYSCTL = {
    "vm.swappiness": "10",
    "vm.max_map_count": "1048576",
    "vm.zone_reclaim_mode": "0",
    "kernel.numa_balancing": "0",
}
METAL: dict[str, Any] = {
    "virtualization": "none",
    "sysctl": SYSCTL,
    "limits": LIMITS,
    "transparent_hugepages": "madvise",
    "nics": (),
    "numa": (),
    "cpu_frequency": {"driver": "intel_pstate", "governors": {"powersave": 8}, "preferences": {}},
    "iommu": {"units": ["dmar0"], "group_types": {1: "DMA-FQ"}},
    "command_line": "ro quiet",
    "gpu_processes": (),
    "pci_acs": (),
}
BOOTED = {BOOT_ID: "now\n", kernel_tuning.THP: "always [madvise] never\n"}
GRUB = {kernel_boot.UPDATE_GRUB: file("")}
NO_GRUB = {kernel_boot.UPDATE_GRUB: {"kind": "absent"}}
COMMAND_LINE = {kernel_boot.KERNEL_COMMAND_LINE: "root=/dev/sda1 ro\n"}
KERNELS = tuple(
    {"release": release, "package": None, "running": False, "newest": False, "headers": False}
    for release in ("6.1.0-40-amd64", "6.12.0-9.el10")
)
# Debian has them in /boot alone; packages of rpm with the modules, from where they are copied.
IMAGES = {
    path: file("")
    for path in (
        "/boot/vmlinuz-6.1.0-40-amd64",
        "/boot/vmlinuz-6.12.0-9.el10",
        "/boot/vmlinuz-0-rescue",
        "/lib/modules/6.12.0-9.el10/vmlinuz",
    )
}
UNIT = {"load": "loaded", "active": "active", "sub": "running"}


def metal(texts: dict[str, str] | None = None, files: dict[str, Any] | None = None, **facts: Any) -> NodeState:
    return node(texts={**BOOTED, **(texts or {})}, files={**GRUB, **(files or {})}, facts={**METAL, **facts})


def result(manifest: Manifest) -> KernelTuningResult:
    assert isinstance(manifest.result, KernelTuningResult)
    return manifest.result


def argvs_of(manifest: Manifest) -> list[list[str]]:
    """The commands of the boot loader."""
    return [[*command.argv] for command in manifest.commands]


def settled(state: NodeState, manifest: Manifest) -> NodeState:
    """The node after the role: files, units, boot loader."""
    facts = state.facts.model_dump()
    facts["units"] = [{**UNIT, "name": unit.name, "enabled": "enabled"} for unit in manifest.units if unit.enabled]
    facts["cpu_frequency"]["governors"] = {"performance": 8}
    return after(manifest, state, facts=facts)


def test_bare_metal_gets_all_and_is_settled_afterwards() -> None:
    state = metal()
    plan = planned(ROLE, state)
    texts = contents(plan)
    assert "vm.swappiness = 10" in str(texts[kernel_tuning.SYSCTL])
    assert "iommu=pt" in str(texts[kernel_boot.GRUB])
    assert 'apply "performance" ""' in str(texts[f"{kernel_tuning.UNITS}/{kernel_tuning.CPU_UNIT}"])
    assert texts[f"{kernel_tuning.UNITS}/{kernel_tuning.ACS_UNIT}"] is None
    assert argvs_of(plan) == [[kernel_boot.UPDATE_GRUB]]
    assert plan.reboot_reasons == ("iommu=pt is added to the kernel command line",)
    assert plan.pending
    again = planned(ROLE, settled(state, plan))
    assert again.pending_reasons == ()
    assert again.reboot_reasons == plan.reboot_reasons


def test_a_booted_command_line_needs_no_reboot_and_a_lost_one_is_not_asked_for_again() -> None:
    state = settled(metal(), planned(ROLE, metal()))
    document = state.model_dump()
    document["contents"][BOOT_ID] = "another\n"
    lost = planned(ROLE, NodeState.model_validate(document))
    assert lost.reboot_reasons == ()
    assert any("booted without" in note for note in lost.notes)
    document["facts"]["command_line"] = "ro iommu=pt"
    manifest = planned(ROLE, NodeState.model_validate(document))
    assert (manifest.reboot_reasons, manifest.notes, manifest.pending_reasons) == ((), (), ())


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("training", {"performance"}),
        ("inference", {"performance", "50"}),
        ("development", set()),
        ("hpc", {"performance", "50"}),
    ],
)
def test_processors_follow_the_profile(profile: str, expected: set[str]) -> None:
    run = context(others={"preflight": {"gpunode_profile": profile}})
    unit = contents(planned(ROLE, metal(), run))[f"{kernel_tuning.UNITS}/{kernel_tuning.CPU_UNIT}"]
    assert {word for word in ("performance", "50") if f'"{word}"' in str(unit)} == expected
    assert (unit is None) is (not expected)


def test_a_governor_that_was_changed_is_set_again() -> None:
    state = settled(metal(), planned(ROLE, metal()))
    document = state.model_dump()
    document["facts"]["cpu_frequency"]["governors"] = {"performance": 7, "powersave": 1}
    plan = planned(ROLE, NodeState.model_validate(document))
    assert plan.pending_reasons == (f"{kernel_tuning.CPU_UNIT} has to be restarted",)


def test_tuned_keeps_the_processors() -> None:
    plan = planned(ROLE, metal(units=[{**UNIT, "name": "tuned.service"}]))
    assert contents(plan)[kernel_tuning.CPU_PROGRAM] is None
    assert any("tuned.service" in note for note in plan.notes)


@pytest.mark.parametrize("path", ["/proc/sys/vm/swappiness", kernel_tuning.THP])
def test_a_value_that_runs_otherwise_is_pending(path: str) -> None:
    other = {"sysctl": {**SYSCTL, "vm.swappiness": "60"}} if "vm" in path else {"transparent_hugepages": "always"}
    state = settled(metal(**other), planned(ROLE, metal(**other)))
    plan = planned(ROLE, state)
    assert len(plan.pending_reasons) == 1
    assert (plan.kernel_values or {})[path]


def test_a_setting_that_the_kernel_does_not_know_is_named_and_the_others_are_set() -> None:
    requested = {"vm.nothing": 1, "net.core.somaxconn": 8192}
    first = planned(ROLE, metal(), sysctl=requested)
    assert first.questions["sysctl"].body == {"paths": ["/proc/sys/net/core/somaxconn", "/proc/sys/vm/nothing"]}
    run = context(answers={"sysctl": {"/proc/sys/net/core/somaxconn": "4096\n", "/proc/sys/vm/nothing": None}})
    plan = planned(ROLE, metal(), run, sysctl=requested)
    (note,) = plan.notes
    assert kernel_tuning.SYSCTL in note
    assert "vm.nothing" in note
    text = str(contents(plan)[kernel_tuning.SYSCTL])
    assert "net.core.somaxconn = 8192" in text
    assert "vm.nothing" not in text
    assert "net.core.somaxconn is 4096, not 8192" in plan.pending_reasons


def test_a_derived_setting_is_left_alone_on_request() -> None:
    text = str(contents(planned(ROLE, metal(), sysctl={"vm.swappiness": None}))[kernel_tuning.SYSCTL])
    assert "swappiness" not in text
    assert "max_map_count" in text


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"sysctl": {"vm swappiness": 1}}, "kernel_tuning_sysctl"),
        ({"sysctl": {"vm.swappiness": "1\nkernel.panic = 1"}}, None),
        ({"sysctl": {"../../etc/passwd": 1}}, "kernel_tuning_sysctl"),
        ({"idle_latency_us": "fast"}, "kernel_tuning_idle_latency_us"),
        ({"command_line": ["a b"]}, "kernel_tuning_command_line"),
        ({"command_line": ['x"; reboot #']}, "kernel_tuning_command_line"),
        ({"module_options": {"nvme": "install /bin/sh"}}, "kernel_tuning_module_options"),
    ],
)
def test_malformed_settings_are_named(settings: dict[str, Any], word: str | None) -> None:
    if word is None:
        # Several words of a value become one line: no second setting can come in.
        text = str(contents(planned(ROLE, metal(), **settings))[kernel_tuning.SYSCTL])
        assert "vm.swappiness = 1 kernel.panic = 1\n" in text
        return
    with pytest.raises(UsageError, match=word):
        planned(ROLE, metal(), **settings)


@pytest.mark.parametrize(
    ("facts", "files", "why"),
    [
        ({"virtualization": "kvm"}, {}, "not bare metal"),
        ({}, {"/sys/bus/pci/drivers/vfio-pci/0000:17:00.0": {"kind": "link"}}, "vfio-pci"),
        ({}, {path: {"kind": "absent"} for path in SETPCI}, "pciutils"),
    ],
)
def test_acs_is_refused_where_it_guards_something(facts: dict[str, Any], files: dict[str, Any], why: str) -> None:
    existing = {SETPCI[0]: file(""), **files}
    plan = planned(ROLE, metal(files=existing, **facts), acs="off")
    assert contents(plan)[kernel_tuning.ACS_PROGRAM] is None
    assert any(why in note for note in plan.notes)
    assert contents(plan)[kernel_tuning.LIMITS]


@pytest.mark.parametrize(("bridge", "state"), [("0000:00:01.0", "restarted"), ("0000:00:07.0", None)])
def test_acs_is_switched_off_by_a_unit_on_bare_metal(bridge: str, state: str | None) -> None:
    redirects = ({"slot": bridge, "enabled": ["ReqRedir"]},)
    adapter = {"slot": "0000:17:00.0", "vendor_id": "15b3", "device_id": "1021", "subsystem_id": None, "driver": None}
    card = ({**adapter, "class_id": "020700", "ports": ["0000:16:00.0", "0000:00:01.0"]},)
    facts: dict[str, Any] = {"pci_acs": redirects, "pci_io": card}
    plan = planned(ROLE, metal(files={SETPCI[0]: file("")}, **facts), acs="off")
    assert "vfio-pci" in str(contents(plan)[kernel_tuning.ACS_PROGRAM])
    machine = metal(files={SETPCI[0]: file("")}, **facts)
    settings_there = planned(ROLE, settled(machine, plan), acs="off")
    assert [unit.state for unit in settings_there.units if unit.name == kernel_tuning.ACS_UNIT] == [state]


@pytest.mark.parametrize(
    ("name", "value", "breaks"),
    [
        ("net.ipv4.ip_forward", 0, "Docker"),
        ("kernel.yama.ptrace_scope", 2, "profilers"),
        ("net.ipv4.ip_forward", 1, None),
    ],
)
def test_a_value_that_breaks_containers_or_profilers_is_reported(name: str, value: int, breaks: str | None) -> None:
    state = metal(sysctl={**SYSCTL, name: "1"})
    notes = planned(ROLE, state, sysctl={name: value}).notes
    assert [breaks in note for note in notes if breaks] == ([True] if breaks else [])
    assert bool(notes) is (breaks is not None)


def test_a_container_gets_files_and_its_kernel_is_left_alone() -> None:
    plan = planned(ROLE, metal(virtualization="docker", sysctl={"vm.swappiness": "60"}))
    assert plan.kernel_values == {}
    assert "vm.swappiness = 10" in str(contents(plan)[kernel_tuning.SYSCTL])
    assert plan.questions == {}


def test_services_get_the_limit_and_wait_on_a_busy_node() -> None:
    low: dict[str, Any] = {"limits": {**LIMITS, "defaults": {"memlock": "8388608"}}}
    running = [{**UNIT, "name": "slurmd.service"}]
    idle = planned(ROLE, metal(units=running, **low))
    assert "systemd's DefaultLimitMEMLOCK is 8388608" in idle.pending_reasons
    assert result(idle).reexec
    assert result(idle).starters == ("slurmd.service",)
    process = {"pid": 7, "user": "ann", "name": "python3", "type": "C"}
    busy = planned(ROLE, metal(units=running, gpu_processes=(process,), **low))
    assert not result(busy).reexec
    assert any("GPUs are in use" in note for note in busy.notes)
    waiting = planned(ROLE, metal({MARKER: "slurmd.service\n"}, units=running))
    assert [unit.name for unit in waiting.units if unit.state == "restarted"][-1] == "slurmd.service"
    held = planned(ROLE, metal({MARKER: "slurmd.service\n"}, units=running, gpu_processes=(process,)))
    assert held.restarts == {"slurmd.service": "the new limit of locked memory"}


def test_docker_is_not_restarted_under_containers_that_would_end() -> None:
    engine = {"started": 1.0, "info": {"version": "28", "running": 2, "live_restore": False}}
    running = [{**UNIT, "name": "docker.service"}]
    state = metal({MARKER: "docker.service\n"}, units=running).model_copy(update={"engine": engine})
    plan = planned(ROLE, state)
    assert plan.restarts == {"docker.service": "the new limit of locked memory"}
    assert not [unit for unit in plan.units if unit.name == "docker.service"]


@pytest.mark.parametrize(
    ("program", "texts", "argvs"),
    [
        (kernel_boot.GRUBBY, {}, [[kernel_boot.GRUBBY, "--update-kernel=ALL", "--args=iommu=pt"]]),
        (
            kernel_boot.KERNEL_INSTALL,
            COMMAND_LINE,
            [
                [kernel_boot.KERNEL_INSTALL, "add", "6.1.0-40-amd64", "/boot/vmlinuz-6.1.0-40-amd64"],
                [kernel_boot.KERNEL_INSTALL, "add", "6.12.0-9.el10", "/lib/modules/6.12.0-9.el10/vmlinuz"],
            ],
        ),
    ],
)
def test_other_boot_loaders(program: str, texts: dict[str, str], argvs: list[list[str]]) -> None:
    state = metal(texts, files={**NO_GRUB, **IMAGES, program: file("")}, kernels=KERNELS)
    plan = planned(ROLE, state)
    assert argvs_of(plan) == argvs
    if texts:
        assert by_path(plan, kernel_boot.KERNEL_COMMAND_LINE).content == "root=/dev/sda1 ro iommu=pt\n"
    removed = planned(ROLE, settled(state, plan), state="absent")
    assert removed.pending
    if program == kernel_boot.GRUBBY:
        assert argvs_of(removed) == [[program, "--update-kernel=ALL", "--remove-args=iommu=pt"]]
    else:
        assert argvs_of(removed) == argvs
        assert by_path(removed, kernel_boot.KERNEL_COMMAND_LINE).content == "root=/dev/sda1 ro\n"


@pytest.mark.parametrize(
    ("texts", "files"),
    [
        ({}, {}),
        # kernel-install cannot add a kernel without an image.
        (COMMAND_LINE, {kernel_boot.KERNEL_INSTALL: file("")}),
    ],
)
def test_without_a_known_boot_loader_the_arguments_are_reported(texts: dict[str, str], files: dict[str, Any]) -> None:
    plan = planned(ROLE, metal(texts, files={**NO_GRUB, **files}, kernels=KERNELS))
    assert argvs_of(plan) == []
    assert any("add iommu=pt by hand" in note for note in plan.notes)


def test_absent_removes_what_is_there_and_nothing_is_pending_on_a_node_without_it() -> None:
    assert planned(ROLE, metal(), state="absent").pending_reasons == ()
    state = settled(metal({kernel_tuning.ROLE.kernel_memory: "{}"}), planned(ROLE, metal()))
    plan = planned(ROLE, state, state="absent")
    assert {each.path for each in plan.files if each.content is None} >= {kernel_tuning.SYSCTL, kernel_boot.GRUB}
    assert result(plan).reexec
    assert plan.pending
    assert {unit.name for unit in plan.units} == {kernel_tuning.CPU_UNIT}


def test_everything_that_the_plan_reads_is_looked_at() -> None:
    looked = {*kernel_tuning.ROLE.look.paths, *kernel_tuning.ROLE.look.contents}
    for state in ("present", "absent"):
        assert {each.path for each in planned(ROLE, metal(), state=state).files} <= looked
