"""The whole way from a bundle to the facts; gaps; and that nothing a bundle holds makes it fail."""

import random
import time
from functools import cache

import pytest
from effort import effort
from facts_samples import VERSION, answer, facts_with, gpu_node_bundle, recorded_bundle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.facts.bundle_reader import BundleReader
from gpunode.facts.node import FACTS, MAY_BE_NONE
from gpunode.facts.parsers.smi_base import label_of
from gpunode.probe import Bundle, CommandResult

LATER = FACTS.keys() - {
    *("architecture", "command_line", "os", "secure_boot", "systemd", "virtualization", "disk_free_mib", "units"),
    *("kernels", "packages", "dkms", "module_files", "modules", "loaded_driver", "nouveau_blacklisted", "pci"),
    *("driver_library_version", "smi", "gpu_processes", "gpu_usage_again"),
}
"""Facts that the probe did not ask for when the bundle was recorded."""
KNOWN_ANYHOW = {
    "module_blocks",
    "driver_gpus",
    "driver_parameters",
    "topology",
    "peer_access",
    "nvlink",
    "nvlink_errors",
    "gpu_virtualization",
    "nvidia_tool_versions",
    "dcgm_engine",
    "tool_runs",
    "unanswered",
}
"""Of these, what follows from there being no module."""


def holds_together(facts: NodeFacts) -> bool:
    """Every field is either known or has a reason, never both and never neither."""
    return all(
        (getattr(facts, field) is None) == (field in facts.gaps)
        or (field in MAY_BE_NONE and getattr(facts, field) is None)
        for field in FACTS
    )


@cache
def gaps_of_the_gpu_node() -> frozenset[str]:
    """Return the facts that the node lacks undamaged; test_a_gpu_node holds that there are none."""
    return frozenset(facts_from_bundle(gpu_node_bundle()).gaps)


def test_every_fact_has_its_reader() -> None:
    without = NodeFacts.model_fields.keys() - FACTS.keys() - {"host", "collected_at", "simulated", "gaps"}
    assert not without, "a fact is declared as `NAME: MODEL | None = fact(read_NAME)` in gpunode/facts/AREA.py"


def test_the_recorded_node() -> None:
    facts = facts_from_bundle(recorded_bundle())
    assert set(facts.gaps) == {"secure_boot"} | (LATER - KNOWN_ANYHOW)
    assert facts.os is not None
    assert (facts.os.id, facts.os.version_id, facts.os.codename) == ("debian", "12", "bookworm")
    assert facts.architecture == "x86_64"
    assert facts.virtualization == "docker"
    assert facts.systemd is False
    assert facts.pci == ()
    assert facts.modules == ()
    assert facts.loaded_driver is None
    assert facts.nouveau_blacklisted is True
    assert facts.driver_library_version == VERSION
    assert facts.smi is None
    assert facts.gpu_processes == ()
    assert facts.disk_free_mib is not None
    assert set(facts.disk_free_mib) == {"/", "/boot", "/var", "/usr"}
    assert facts.module_files is not None
    assert [(file.kernel, file.version, file.flavour, file.signed) for file in facts.module_files] == [
        ("6.1.0-56-cloud-amd64", VERSION, "proprietary", True)
    ]
    assert facts.packages is not None
    assert {package.version for package in facts.packages if package.name == "nvidia-kernel-dkms"} == {
        "535.309.01-0+deb12u1"
    }


def test_a_gpu_node() -> None:
    facts = facts_from_bundle(gpu_node_bundle())
    assert facts.gaps == {}, "tests/unit/facts/facts_host.py lacks what the probe reads for these facts"
    assert facts.gpus_on_bus is not None
    (gpu,) = facts.gpus_on_bus
    assert (gpu.slot, gpu.device_id, gpu.subsystem_id, gpu.class_id, gpu.driver) == (
        "0000:00:1e.0",
        "1eb8",
        "10de:12a2",
        "030200",
        "nvidia",
    )
    assert facts.loaded_driver is not None
    assert (facts.loaded_driver.version, facts.loaded_driver.flavour) == (VERSION, "proprietary")
    assert facts.smi is not None
    assert facts.smi.document is not None
    assert facts.smi.document.gpus[0].persistence_mode is True
    assert facts.secure_boot is True
    assert facts.virtualization == "none"
    assert facts.units is not None
    assert [(unit.name, unit.active) for unit in facts.units] == [
        ("nvidia-persistenced.service", "active"),
        ("chrony.service", "active"),
        ("apt-daily.service", "failed"),
    ]
    assert facts.gpu_processes is not None
    assert [(process.pid, process.user, process.gpu, process.computes) for process in facts.gpu_processes] == [
        (4242, "alice", "gpu0", True),
        (900, "nvpd", None, False),
    ]


def test_an_empty_bundle_is_all_gaps() -> None:
    facts = facts_from_bundle(Bundle(host="x", collected_at="2026-11-20T00:00:00Z", commands={}, files={}))
    assert facts.gaps.keys() == FACTS.keys()
    assert all(facts.gaps.values())


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("uname", {"architecture", "kernels", "libraries"}),
        ("dkms-status", {"dkms"}),
        ("dpkg-kernels", {"kernels"}),
        ("dpkg-packages", {"packages"}),
        ("df", {"disk_free_mib"}),
        ("initramfs", {"initramfs"}),
        ("find-modules", {"module_files"}),
        ("modinfo", {"module_files"}),
        ("ldconfig", {"driver_library_version", "libraries"}),
        ("readlink-libnvidia-ml", {"driver_library_version"}),
        ("systemctl-failed", {"units", "time_sync"}),
        ("systemctl-units", {"units", "time_sync"}),
        ("systemd-detect-virt", {"virtualization"}),
        ("nvidia-smi-xml", {"smi", "gpu_virtualization"}),
        ("nvidia-smi-topo", {"topology"}),
        ("nvidia-smi-p2p", {"peer_access"}),
        ("nvidia-smi-nvlink", {"nvlink"}),
        ("nvidia-smi-nvlink-errors", {"nvlink_errors"}),
        ("version-nv-fabricmanager", {"nvidia_tool_versions"}),
        ("version-dcgmi", {"nvidia_tool_versions"}),
        ("version-docker", {"tool_versions"}),
        ("library-files", {"libraries"}),
        ("signs", {"foreign_installs", "automatic_updates", "cloud_init_running"}),
        ("repository-files", {"repositories"}),
        ("apt-config", {"automatic_updates"}),
        ("cdi-specs", {"cdi_specs"}),
        ("variables", {"environment"}),
        ("boot-settings", {"boot_settings"}),
        ("cpu-clocks", {"cpu_frequency"}),
        ("device-nodes", {"device_nodes"}),
        ("df-local", {"file_systems"}),
        ("lscpu", {"cpu"}),
        ("pci-acs", {"pci_acs"}),
        ("stuck-processes", {"stuck_processes"}),
        ("systemctl-defaults", {"limits"}),
        ("timedatectl", {"time_sync"}),
        ("journal-kernel", {"kernel_log"}),
    ],
)
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"rc": 124, "timed_out": True, "stderr": "killed: no answer within 15 s"}, "no answer within 15 s"),
        ({"truncated": True}, "its output was truncated"),
        (None, "did not read it"),
    ],
    ids=["timeout", "truncated", "not run"],
)
def test_a_lost_answer_is_a_gap_with_its_reason(
    key: str, fields: set[str], bad: dict[str, object] | None, reason: str
) -> None:
    gpu_node = gpu_node_bundle()
    commands = dict(gpu_node.commands)
    lost = commands.pop(key)
    if bad is not None:
        commands[key] = lost.model_copy(update=bad)
    elif key == "dpkg-packages":
        reason = "was read"
    gaps = facts_from_bundle(gpu_node.model_copy(update={"commands": commands})).gaps
    assert set(gaps) - gaps_of_the_gpu_node() == fields
    assert all(reason in gaps[field] for field in fields)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/proc/modules", {"modules"}),
        ("/proc/cmdline", {"command_line"}),
        ("/sys/bus/pci/devices/", {"pci", "pci_io", "pci_ports", "pci_acs", "iommu"}),
        ("/sys/bus/pci/devices/0000:00:1e.0/uevent", {"pci", "pci_io", "pci_ports", "iommu"}),
        ("/etc/os-release", {"os"}),
        ("/boot/grub/grub.cfg", {"next_boot"}),
        ("/lib/modules/", {"kernels", "module_files"}),
        ("/sys/firmware/", {"secure_boot"}),
        ("/run/systemd/system/", {"systemd", "units", "limits", "time_sync"}),
        ("/proc/driver/nvidia/gpus/", {"driver_gpus"}),
        ("/proc/driver/nvidia/params", {"driver_parameters"}),
        ("/proc/meminfo", {"memory"}),
        ("/proc/uptime", {"uptime_s"}),
        ("/proc/net/route", {"addressed"}),
        ("/proc/self/status", {"cpus_allowed"}),
        ("/sys/module/", {"module_parameters"}),
        ("/sys/class/iommu/", {"iommu"}),
        ("/sys/devices/system/edac/mc/", {"memory_controllers"}),
        ("/sys/devices/system/node/", {"numa"}),
        ("/sys/block/", {"disks"}),
        ("/sys/class/nvme/", {"nvmes"}),
        ("/sys/class/net/", {"nics"}),
        ("/sys/class/infiniband/", {"infiniband"}),
        ("/sys/kernel/security/lockdown", {"lockdown"}),
        ("/etc/docker/daemon.json", {"containers"}),
        ("/etc/security/limits.d/90-gpu.conf", {"limits"}),
        ("/run/reboot-required.pkgs", {"reboot_required"}),
        ("/run/gpunode/revert-accounts.json", {"failed_reverts"}),
        ("/var/log/nvidia-installer.log", {"foreign_installs"}),
    ],
)
def test_an_unreadable_file_is_a_gap_with_its_reason(path: str, fields: set[str]) -> None:
    gpu_node = gpu_node_bundle()
    log = answer("", 1, f"{path}: Permission denied")
    bundle = gpu_node.model_copy(
        update={"files": {**gpu_node.files, path: None}, "commands": {**gpu_node.commands, "probe-read": log}}
    )
    gaps = facts_from_bundle(bundle).gaps
    assert set(gaps) - gaps_of_the_gpu_node() == fields
    assert all("Permission denied" in gaps[field] for field in fields)


def test_gaps_are_one_line() -> None:
    facts = facts_with({"dkms-status": answer("rubbish\n" * 9), "df": answer("a\nb\n", 1, "x\ny\n")})
    assert {"dkms", "disk_free_mib"} <= set(facts.gaps)
    assert all("\n" not in reason and len(reason) < 500 for reason in facts.gaps.values())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("filler", [" ", "a", "1 ", "-", ", ", ": /", "\t", "=", "a-1-", "/nvidia-1", "<a>", "GPU "])
def test_one_endless_line_takes_linear_time(filler: str) -> None:
    line = filler * (1_000_000 // len(filler))
    gpu_node = gpu_node_bundle()
    commands = {key: result.model_copy(update={"stdout": line}) for key, result in gpu_node.commands.items()}
    files = {path: text and line for path, text in gpu_node.files.items() if not path.endswith("/")}
    folders = {path: text for path, text in gpu_node.files.items() if path.endswith("/")}
    damaged = gpu_node.model_copy(update={"commands": commands, "files": {**files, **folders}})
    started = time.process_time()
    facts = facts_from_bundle(damaged)
    assert time.process_time() - started < 20
    assert holds_together(facts)


RUBBISH = st.one_of(
    st.text(max_size=300),
    st.text(alphabet="nvidia-, :/=.0123456789\n\t()<>\x00", max_size=300),
    st.sampled_from(["", "\n", "\t" * 7, "\x00", "=\n\n=", "filename:", "filename:\n/lib/modules/x", "a: /b"]),
)


@st.composite
def damage(draw: st.DrawFn, bundle: Bundle) -> Bundle:
    """Some answers of the bundle replaced, cut, doubled or left out."""
    commands = dict(bundle.commands)
    for key in draw(st.lists(st.sampled_from(sorted(commands)), max_size=5, unique=True)):
        commands[key] = CommandResult(
            argv=draw(st.lists(RUBBISH, max_size=3)) if draw(st.booleans()) else commands[key].argv,
            rc=draw(st.sampled_from([0, 0, 0, 1, 2, 124, 126, 127, -9])),
            stdout=damaged_text(draw, commands[key].stdout),
            stderr=draw(RUBBISH),
            seconds=0.0,
            timed_out=draw(st.integers(0, 9)) == 0,
            truncated=draw(st.integers(0, 9)) == 0,
        )
    files = dict(bundle.files)
    for path in draw(st.lists(st.sampled_from(sorted(files)), max_size=5, unique=True)):
        files[path] = damaged_text(draw, files[path] or "") if draw(st.booleans()) else None
    for gone in draw(st.lists(st.sampled_from([*commands, *files]), max_size=3)):
        commands.pop(gone, None)
        files.pop(gone, None)
    return bundle.model_copy(update={"commands": commands, "files": files})


def damaged_text(draw: st.DrawFn, text: str) -> str:
    """A text replaced by rubbish, cut, with rubbish in its middle, or with its lines doubled."""
    position = draw(st.integers(0, len(text)))
    rubbish = draw(RUBBISH)
    return draw(st.sampled_from([rubbish, text[:position], text[:position] + rubbish + text[position:], text + text]))


@settings(max_examples=effort(60, 600), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_bundle_makes_it_fail(data: st.DataObject) -> None:
    facts = facts_from_bundle(data.draw(damage(gpu_node_bundle())))
    assert holds_together(facts)
    assert all(reason and "\n" not in reason for reason in facts.gaps.values())


@pytest.mark.parametrize("seed", range(effort(5, 100)))
def test_what_an_older_probe_did_not_read_is_one_reason(seed: int) -> None:
    """Nineteen errors with names of the probe's parts were printed in place of one line."""
    chance = random.Random(seed)  # noqa: S311
    gpu_node = gpu_node_bundle()
    commands = {key: run for key, run in gpu_node.commands.items() if chance.random() < 0.5}
    files = {path: text for path, text in gpu_node.files.items() if chance.random() < 0.8}
    older = gpu_node.model_copy(update={"commands": commands, "files": files, "collected_at": "2025-01-31T08:00:00Z"})
    reasons = set(facts_from_bundle(older).gaps.values())
    named = {reason for reason in reasons if "(2025-01-31) did not read it: collect it again" in reason}
    assert len(named) == 1
    assert [reason for reason in reasons if reason.endswith(("was not run", "was not read", "were not read"))] == []


PATHS = [
    "/sys/block/",
    "/sys/block",
    "/sys/block0",
    "/sys/block/sda/size",
    "/sys/block/\U0010ffff/x",
    "/sys/blocks/a",
    "/a",
]


@pytest.mark.parametrize("folder", ["/sys/block/", "/sys/", "/", "/z/", "/sys/block/sda/size"])
def test_paths_below_a_folder(folder: str) -> None:
    bundle = Bundle(host="x", collected_at="2026-11-20T00:00:00Z", commands={}, files=dict.fromkeys(PATHS))
    reader = BundleReader(bundle)
    assert reader.under(folder) == tuple(sorted(path for path in PATHS if path.startswith(folder) and path != folder))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 5000])
def test_labels_of_any_length(length: int) -> None:
    name = ("SEC-DED " * 1000)[:length]
    assert label_of(name) == label_of(name) == name.lower().replace("-", "_").replace(" ", "_").strip("_")
