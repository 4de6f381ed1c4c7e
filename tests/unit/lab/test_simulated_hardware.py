"""Hardware descriptions, the PCI bus they become, and what a simulated node remembers, loads and breaks."""

import os
import platform
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpunode.catalog import load
from gpunode.errors import UsageError
from gpunode.lab.hardware import describe, names
from gpunode.lab.simulator import faults, kernel, modprobe, modules, pci, persistenced, state
from gpunode.lab.simulator.modules import ModuleError
from gpunode.lab.simulator.node import NodeSnapshot
from gpunode.lab.simulator.pci import config_space
from gpunode.lab.simulator.state import FaultError

KERNEL = "6.1.0-56-cloud-amd64"


def functions(hardware: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for kind in ("bridges", "gpus", "nvswitches", "nics") for each in hardware[kind]]


# --- descriptions


@pytest.mark.parametrize("name", names())
def test_a_description_is_the_catalogs_platform(name: str) -> None:
    hardware = describe(name, "lab/node")
    if hardware["platform"] is None:  # cards of one model, and nothing else
        assert (hardware["nvswitches"], hardware["nics"], hardware["services"]) == ([], [], [])
    else:
        row = load().platform(hardware["platform"])
        assert len(hardware["gpus"]) == row.gpu_count
        assert {gpu["model"] for gpu in hardware["gpus"]} == set(row.gpus)
        assert {part["pci_device_id"] for part in hardware["nvswitches"]} == ({row.nvswitch} - {None})
        assert len(hardware["nvswitches"]) == (row.nvswitches if row.nvswitch else 0)
    for gpu in hardware["gpus"]:
        match = load().gpu_by_pci(gpu["pci_device_id"], gpu["pci_subsystem_id"])
        assert match is not None
        assert match.gpu is not None
        assert match.gpu.id == gpu["model"]
        assert gpu["power_min_w"] < gpu["power_limit_w"] <= gpu["power_max_w"]
        assert gpu["memory_total_mib"] > 0.8 * 953.67 * (match.gpu.memory_gb or 0)


@pytest.mark.parametrize("name", names())
def test_every_function_has_a_place_of_its_own_below_bridges_that_are_there(name: str) -> None:
    hardware = describe(name, "lab/node")
    every = functions(hardware)
    slots = [function["pci_bus_id"] for function in every]
    assert len(set(slots)) == len(slots)
    below = {bridge["pci_bus_id"]: bridge["bus_below"] for bridge in hardware["bridges"]}
    for function in every:
        assert set(function["bridges_above"]) <= set(below)
        if function["bridges_above"]:
            assert below[function["bridges_above"][-1]] == int(function["pci_bus_id"].split(":")[1], 16)
        assert function["numa_node"] in range(hardware["numa_nodes"])


def test_links_between_gpus_are_mirrored_and_listed_for_every_pair() -> None:
    for name in names():
        links = describe(name, "x")["topology"]
        for label, row in links.items():
            assert set(row) == set(links) - {label}
            assert all(links[other][label] == word for other, word in row.items())
    assert describe("a100-pcie-4", "x")["topology"]["GPU0"] == {"GPU1": "NV12", "GPU2": "SYS", "GPU3": "SYS"}
    assert describe("hgx-h100-8", "x")["topology"]["GPU0"]["NIC0"] == "PIX"
    assert {describe("hgx-h100-4", "x")["topology"]["GPU0"][f"GPU{other}"] for other in (1, 2, 3)} == {"NV6"}


def test_uuids_stay_with_the_node_and_are_unique() -> None:
    uuids = [[gpu["uuid"] for gpu in describe("l40s-4", node)["gpus"]] for node in ("a/1", "a/1", "a/2")]
    assert uuids[0] == uuids[1]
    assert not set(uuids[0]) & set(uuids[2])
    assert len(set(uuids[0])) == 4


def test_unknown_hardware_names_what_there_is() -> None:
    with pytest.raises(UsageError, match=r"h100: unknown hardware; known: hgx-h100-8, .*v100-2"):
        describe("h100", "x")


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("field", ["memory_mib", "root_port", "gpus"])
def test_an_entry_without_a_field_that_the_catalog_lacks_too_is_refused(
    monkeypatch: pytest.MonkeyPatch, field: str, empty: bool
) -> None:
    module = sys.modules[describe.__module__]
    entry = {**module._data()["v100-2"], "gpu": "m60", "memory_mib": 8129, "power_w": 300, "pcie": {}, field: None}
    left_out = {"platform"} if empty else {"platform", field}
    new = {name: value for name, value in entry.items() if name not in left_out}
    monkeypatch.setattr(module, "_data", lambda: {"new": new})
    with pytest.raises(UsageError, match=f"new: {field}: "):
        describe("new", "x")


@pytest.mark.parametrize("name", names())
def test_an_entry_without_any_one_field_is_described_or_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = sys.modules[describe.__module__]
    entry = module._data()[name]
    refused = dict[str, str]()
    for field in entry:
        monkeypatch.setattr(
            module, "_data", lambda field=field: {name: {key: entry[key] for key in entry if key != field}}
        )
        try:
            describe(name, "x")
        except UsageError as err:
            refused[field] = str(err)
    assert {"gpus", "root_port", "vendor"} <= refused.keys()
    for field, message in refused.items():
        named = "platform" if field == "gpu" else field
        assert message.startswith(f"hardware.yml: {name}: {named}: missing"), message


# --- the bus


def test_configuration_space_contains_ids_class_and_link() -> None:
    (gpu,) = describe("t4-1", "x")["gpus"]
    space = config_space(gpu, 1, 8, [(0x2000000000, 1 << 24)])
    assert len(space) == 4096
    assert struct.unpack_from("<HH", space, 0) == (0x10DE, 0x1EB8)
    assert space[0x09:0x0C] == bytes((0x00, 0x02, 0x03))
    assert struct.unpack_from("<HH", space, 0x2C) == (0x10DE, 0x12A2)
    at = space[0x34]
    capable, state_now = struct.unpack_from("<I", space, at + 0x0C)[0], struct.unpack_from("<H", space, at + 0x12)[0]
    assert (capable & 0xF, capable >> 4 & 0x3F) == (3, 16)
    assert (state_now & 0xF, state_now >> 4 & 0x3F) == (1, 8)


@pytest.mark.parametrize(
    ("cpus", "text"), [([0, 1, 2, 3], "0-3"), ([0], "0"), ([0, 2, 3], "0,2-3"), ([], ""), ([7, 9], "7,9")]
)
def test_ranges(cpus: list[int], text: str) -> None:
    assert pci.ranges(cpus) == text


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty node with the hardware ``hgx-h100-8``."""
    return use(tmp_path, monkeypatch, "hgx-h100-8")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same node, for tests that change nothing: its thousand files take half a second."""
    with pytest.MonkeyPatch.context() as patch:
        return use(tmp_path_factory.mktemp("shared"), patch, "hgx-h100-8")


def use(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    monkeypatch.setattr(state, "ROOT", folder)
    monkeypatch.setattr(kernel, "make_devices", lambda *_: None)  # mknod needs root
    state.write(folder / "etc/gpunode/lab-hardware.json", describe(name, "lab/node"))
    kernel.begin_log(KERNEL, name)
    with state.change() as (_, running):
        running["kernel"] = KERNEL
    pci.write(state.hardware())
    return folder


def test_sysfs_files_follow_link_and_driver(root: Path) -> None:
    gpu = state.hardware()["gpus"][3]
    folder = root / "run/gpunode-lab/sys/devices/pci0000:59/0000:59:01.0/0000:5a:00.0/0000:5b:00.0/0000:5d:00.0"
    assert (folder / "current_link_speed").read_text() == "32.0 GT/s PCIe\n"
    assert "DRIVER" not in (folder / "uevent").read_text()
    pci.bind(gpu, "nvidia")
    assert (folder / "uevent").read_text().startswith("DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:2330\n")
    pci.set_link_and_port(state.hardware(), gpu, 3, 4)
    for each in (folder, folder.parent):
        assert (each / "current_link_speed").read_text() == "8.0 GT/s PCIe\n"
        assert (each / "current_link_width").read_text() == "4\n"
    pci.remove(gpu)
    assert not folder.exists()
    assert not (root / "run/gpunode-lab/sys/slots/0000:5d:00.0").is_symlink()


# --- the kernel


def test_releases_sort_by_their_numbers() -> None:
    mixed = ["6.12.3+deb13-amd64", "6.1.0-44-cloud-amd64", "6.8.0-60-generic", "6.1.0-9-amd64", "6.1.0-44-amd64"]
    assert sorted(mixed, key=kernel.order) == [mixed[index] for index in (3, 4, 1, 2, 0)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the library is for x86_64")
def test_uname_answers_with_the_nodes_kernel(tmp_path: Path) -> None:
    library = tmp_path / "uname.so"
    library.write_bytes(kernel.uname_library("6.8.0-60-generic"))
    done = subprocess.run(
        ["uname", "-rs"], env={"LD_PRELOAD": str(library)}, capture_output=True, text=True, timeout=30, check=True
    )
    assert (done.stdout, done.stderr) == ("Linux 6.8.0-60-generic\n", "")


def test_the_boot_takes_the_newest_image(root: Path) -> None:
    (root / "boot").mkdir()
    (root / "usr/lib/gpunode-lab").mkdir(parents=True)
    assert kernel.newest() is None
    for release in ("6.8.0-60-generic", "6.8.0-100-generic"):
        (root / f"boot/vmlinuz-{release}").touch()
    assert kernel.boot() == kernel.release() == "6.8.0-100-generic"
    kernel.boot()
    assert (root / "etc/ld.so.preload").read_text() == "/usr/lib/gpunode-lab/uname.so\n"


# --- modules


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The output of modinfo for every module's file: change it to have another driver on disk."""
    about = {"version": "580.95.05", "license": "Dual MIT/GPL", "vermagic": f"{KERNEL} SMP mod_unload "}
    monkeypatch.setattr(modules, "modinfo", lambda file: about | {"name": Path(file).stem.replace("-", "_")})
    file = tmp_path / "nvidia.ko"
    file.touch()
    return about


def insert(root: Path, *names: str) -> None:
    for name in names:
        (root / f"{name}.ko").touch()
        modules.insert(str(root / f"{name}.ko"), [])


def test_loading_publishes_and_removing_unpublishes(root: Path, disk: dict[str, str]) -> None:
    insert(root, "nvidia", "nvidia-uvm", "nvidia-modeset")
    assert modules.loaded() == ["nvidia_modeset", "nvidia_uvm", "nvidia"]
    listed = (root / "run/gpunode-lab/proc-modules").read_text().splitlines()
    assert listed[-1].startswith("nvidia 14381056 2 nvidia_modeset,nvidia_uvm, Live ")
    version = (root / "run/gpunode-lab/proc/driver/nvidia/version").read_text()
    assert version.startswith("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build")
    assert state.running()["module"]["flavour"] == "open"
    with pytest.raises(ModuleError, match="Module nvidia is in use by: nvidia_modeset nvidia_uvm"):
        modules.remove("nvidia")
    for name in ("nvidia-uvm", "nvidia_modeset", "nvidia"):
        modules.remove(name)
    assert not (root / "run/gpunode-lab/proc/driver/nvidia").exists()
    assert state.running()["module"] is None
    assert state.running()["gpus"] == {}


def test_a_gpu_that_was_lost_before_the_boot_is_none_of_the_drivers(
    root: Path, disk: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(kernel, "make_devices", lambda hardware, _: made.append(len(hardware["gpus"])))
    (root / "etc/gpunode/lab-node").touch()
    faults.begin("gpu-lost", "gpu2", {})
    insert(root, "nvidia")
    assert len(NodeSnapshot().gpus) == 8  # it is still on the bus, and answers with ones
    modules.remove("nvidia")
    faults.at_boot()
    insert(root, "nvidia")
    persistenced._set(None, True)
    assert made == [8, 0, 7]
    seen = NodeSnapshot().gpus
    assert [gpu.number for gpu in seen] == [0, 1, 3, 4, 5, 6, 7]
    assert [gpu.index for gpu in seen] == list(range(7))
    bound = root / "run/gpunode-lab/proc/driver/nvidia/gpus"
    assert len(list(bound.iterdir())) == 7
    assert faults.main(["--heal"]) == 0
    assert (len(NodeSnapshot().gpus), len(list(bound.iterdir())), made[-1]) == (8, 8, 8)


def test_persistence_mode_keeps_the_module(root: Path, disk: dict[str, str]) -> None:
    insert(root, "nvidia")
    with state.change() as (_, running):
        running["gpus"]["2"]["persistence"] = True
    with pytest.raises(ModuleError, match=r"Module nvidia is in use$"):
        modules.remove("nvidia")


@pytest.mark.parametrize(
    ("name", "version", "licence", "loads"),
    [
        ("v100-2", "580.95.05", "NVIDIA", True),
        ("v100-2", "580.95.05", "Dual MIT/GPL", False),
        ("v100-2", "595.71.05", "NVIDIA", False),
        ("hgx-b200-8", "580.95.05", "Dual MIT/GPL", True),
        ("hgx-b200-8", "580.95.05", "NVIDIA", False),
        ("hgx-b200-8", "565.57.01", "Dual MIT/GPL", False),
        ("l40s-4", "595.71.05", "NVIDIA", True),
        ("t4-1", "595.71.05", "Dual MIT/GPL", True),
    ],
)
def test_a_driver_takes_the_gpus_that_it_knows(  # noqa: PLR0917
    name: str,
    version: str,
    licence: str,
    loads: bool,
    disk: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(tmp_path, monkeypatch, name)
    disk.update(version=version, license=licence)
    if loads:
        insert(tmp_path, "nvidia")
        assert modules.loaded() == ["nvidia"]
        return
    with pytest.raises(ModuleError, match="could not insert 'nvidia': No such device"):
        insert(tmp_path, "nvidia")
    assert modules.loaded() == []
    assert "NVRM: installed in this system" in (tmp_path / "run/gpunode-lab/kmsg").read_text()


def test_a_module_for_another_kernel_is_refused(root: Path, disk: dict[str, str]) -> None:
    disk["vermagic"] = "6.1.0-1-amd64 SMP"
    with pytest.raises(ModuleError, match="Exec format error"):
        insert(root, "nvidia")
    assert "version magic '6.1.0-1-amd64 SMP' should be" in (root / "run/gpunode-lab/kmsg").read_text()


def test_a_module_without_what_it_needs_is_refused(root: Path, disk: dict[str, str]) -> None:
    with pytest.raises(ModuleError, match="Unknown symbol in module"):
        insert(root, "nvidia-uvm")


@pytest.mark.parametrize(
    ("name", "mig_after", "ecc_after"), [("dgx-a100-8", True, False), ("hgx-h100-8", False, False)]
)
def test_what_gpus_come_up_with(  # noqa: PLR0917
    name: str, mig_after: bool, ecc_after: bool, disk: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(tmp_path, monkeypatch, name)
    with state.change() as (kept, _):
        kept["gpus"] = {"1": {"mig": True, "ecc": False}}
    insert(tmp_path, "nvidia")
    gpus = state.running()["gpus"]
    assert (gpus["1"]["mig"], gpus["1"]["ecc"]) == (mig_after, ecc_after)
    assert (gpus["0"]["mig"], gpus["0"]["ecc"]) == (False, True)


def test_module_options_are_in_params() -> None:
    content = modules.parameters(["NVreg_EnableGpuFirmware=0", 'NVreg_RegistryDwords="A=1;B=2"', "other=1"])
    assert (content["EnableGpuFirmware"], content["RegistryDwords"]) == ("0", '"A=1;B=2"')


def test_rmmod_reports_what_is_not_loaded(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert modprobe.rmmod(["nvidia"]) == 1
    assert capsys.readouterr().err == "rmmod: ERROR: Module nvidia is not currently loaded\n"


def test_modprobe_keeps_values_with_their_options() -> None:
    assert modprobe.split(["-S", "6.1", "-r", "nvidia", "x=1"]) == (["-S", "6.1", "-r"], ["nvidia", "x=1"])


# --- faults


def log(root: Path) -> str:
    return (root / "run/gpunode-lab/kmsg").read_text()


def test_a_fault_is_listed_logged_and_healed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = log(root)
    assert faults.main(["gpu3", "xid", "number=48"]) == 0
    assert "NVRM: Xid (PCI:0000:5d:00): 48, " in log(root)
    assert faults.main(["gpu4", "pcie-narrow", "width=4"]) == 0
    assert [fault["fault"] for fault in state.faults()] == ["xid", "pcie-narrow"]
    capsys.readouterr()
    assert faults.main(["xid", "--heal"]) == 0
    assert capsys.readouterr().out == "healed gpu3 xid number=48\n"
    assert log(root) == before
    assert faults.main(["--heal"]) == 0
    assert state.faults() == []
    folder = pci.folder(state.hardware()["gpus"][4])
    assert (folder / "current_link_width").read_text() == "16\n"


def test_the_same_fault_twice_is_refused(root: Path) -> None:
    faults.begin("throttle", "gpu1", {})
    faults.begin("throttle", "gpu2", {})
    with pytest.raises(FaultError, match=r"gpu1 throttle .*is set already"):
        faults.begin("throttle", "gpu1", {})


def test_a_reboot_ends_some_faults_and_books_what_inforom_keeps(root: Path) -> None:
    faults.begin("ecc-uncorrected", "gpu0", {"count": "3"})
    faults.begin("remap-pending", "gpu1", {})
    faults.begin("gpu-lost", "gpu2", {})
    faults.begin("smi-hangs", None, {})
    faults.at_boot()
    assert [fault["fault"] for fault in state.faults()] == ["gpu-lost"]
    kept = state.kept()["gpus"]
    assert kept["0"]["ecc_errors"]["uncorrected"] == 3
    assert kept["1"]["remapped"]["uncorrectable"] == 1
    assert set(kept) == {"0", "1"}
    assert not pci.folder(state.hardware()["gpus"][2]).exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["smoke"], "unknown fault; known: library-mismatch, gpu-lost"),
        (["gpu8", "throttle"], "this node has gpu0 to gpu7"),
        (["gpu0/link18", "nvlink-down"], "gpu0 has link0 to link17"),
        (["gpu0/link1", "throttle"], "is a fault of a whole GPU"),
        (["throttle", "reason=heat"], "known: sw_power_cap, hw_slowdown"),
        (["gpu0"], r"\[COMPONENT\] FAULT \[KEY=VALUE\]"),
        (["--heal", "smoke"], "unknown fault; known: library-mismatch, gpu-lost"),
        (["--heal", "gpu8"], "this node has gpu0 to gpu7"),
        (["--heal", "gpu0", "xid", "number=31"], r"expects only \[COMPONENT\] \[FAULT\]"),
        (["gpu0", "smi-hangs"], "omit the component"),
        (["xid", "number=many"], "expected a number"),
        (["xid", "colour=red"], "it has number, text"),
        (["smi-hangs", "x=1"], "it has none"),
        (["gpu0", "pcie-narrow", "width=3"], "the link's best is gen 5 x16"),
        (["gpu0", "gpu1", "xid"], r"\[COMPONENT\] FAULT \[KEY=VALUE\]"),
        (["library-mismatch"], "install a driver first"),
        (["fabric-manager-version"], "install it first"),
        (["gpu-busy"], "install and load a driver first"),
    ],
)
def test_wrong_arguments_are_one_line_and_change_nothing(
    shared: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "ROOT", shared)
    before = log(shared)
    assert faults.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert re.search(line, captured.err)
    assert state.faults() == []
    assert log(shared) == before


def test_a_job_of_nobody_is_one_line(root: Path) -> None:
    (root / "dev").mkdir(exist_ok=True)
    (root / "dev/nvidia0").touch()
    with pytest.raises(FaultError, match="user=nobody-here: the node has no such user"):
        faults.begin("gpu-busy", "gpu0", {"user": "nobody-here"})
    assert state.faults() == []


def test_a_fabric_completes_when_its_fault_is_healed(root: Path) -> None:
    faults.begin("fabric-not-completed", None, {})
    (root / f"proc/{os.getpid()}").mkdir(parents=True)
    with state.change() as (_, running):
        running.update(fabric={"state": "In Progress"}, fabric_manager=os.getpid())
    faults.main(["--heal", "node"])
    assert state.running()["fabric"] == {"state": "Completed", "status": "Success"}
    assert state.faults() == []


def test_a_fabric_without_its_manager_stays_as_it_is(root: Path) -> None:
    faults.begin("fabric-not-completed", None, {})
    with state.change() as (_, running):
        running.update(fabric={"state": "In Progress"}, fabric_manager=None)
    faults.heal(None, None)
    assert state.running()["fabric"] == {"state": "In Progress"}


def test_a_second_library_wins_until_it_is_healed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    (folder / "libnvidia-ml.so.580.95.05").write_bytes(b"x")
    monkeypatch.setattr("gpunode.lab.simulator.effects._run", lambda *_: None)
    faults.begin("library-mismatch", None, {})
    assert (folder / "libnvidia-ml.so.580.95.06").exists()
    faults.heal(None, None)
    assert [file.name for file in folder.iterdir()] == ["libnvidia-ml.so.580.95.05"]
