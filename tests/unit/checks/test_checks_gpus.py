"""What the checks on GPUs and their links report in the cases that the simulated nodes do not show."""

from itertools import combinations
from typing import Any

import pytest

from gpunode.checks import Expectation, Finding, Status, registry
from gpunode.checks.links import MOST_REPLAYS, most_replays
from gpunode.checks.performance_links import NVLS_RANKS
from gpunode.facts.gpu import GpuProcess
from gpunode.facts.kernel_log import KernelEvent, KernelLog
from gpunode.facts.models.smi import Nvlink, Smi, SmiLog, Topology
from gpunode.facts.modules import LoadedDriver
from gpunode.facts.network import IbDevice
from gpunode.facts.node import NodeFacts
from gpunode.facts.packages import Kernel, Package
from gpunode.facts.pci import PciDevice, PciLink, PciPort
from gpunode.facts.running import Unit
from gpunode.facts.settings import EnvironmentSetting, Limit, Limits
from gpunode.facts.updates import AutomaticUpdates

SLOT = "0000:1a:00.0"
L40S, A100_PCIE, H100, V100, B200, T4 = "26b9", "20b5", "2330", "1db6", "2901", "1eb8"
GH200, GB200 = "2342", "2941"
FULL = PciLink(speed_gt_per_s=16.0, speed_max_gt_per_s=16.0, width=16, width_max=16)


def device(number: str = L40S, slot: str = SLOT, **more: Any) -> PciDevice:
    fields = {"subsystem_id": None, "class_id": "030200", "driver": "nvidia", "link": FULL, **more}
    return PciDevice(slot=slot, vendor_id="10de", device_id=number, **fields)


def smi_gpu(number: str = L40S, **more: Any) -> dict[str, Any]:
    """One GPU as nvidia-smi's parser gives it, as far as a test needs it."""
    return {"index": 0, "pci_bus_id": SLOT, "pci_device_id": f"10de:{number}", "minor_number": 0, **more}


def node(*gpus: dict[str, Any], **facts: Any) -> NodeFacts:
    seen = gpus or (smi_gpu(),)
    fields = {
        "pci": tuple(device(gpu["pci_device_id"][5:], gpu["pci_bus_id"]) for gpu in seen),
        "pci_ports": (),
        "smi": Smi[SmiLog](document={"attached_gpus": len(seen), "gpus": list(seen)}),
        "loaded_driver": LoadedDriver(version="580.95.05", flavour="open"),
        "architecture": "x86_64",
        "virtualization": "none",
        "units": (),
        "gpu_processes": (),
        "infiniband": (),
        "topology": Smi[Topology](document={"gpus": ["GPU0"], "links": {"GPU0": {}}}),
        "nvlink": Smi[Nvlink](document={"gpus": []}),
        "nvlink_errors": Smi[Nvlink](document={"gpus": []}),
        **facts,
    }
    return NodeFacts(host="node", collected_at="2026-11-20T12:00:00Z", **fields)


def judged(check: str, facts: NodeFacts, **expected: Any) -> list[Finding]:
    return registry[check].findings(facts, Expectation(**expected))


def one(check: str, facts: NodeFacts, **expected: Any) -> tuple[str, str]:
    (finding,) = judged(check, facts, **expected)
    return finding.status.value, finding.message


# What is hidden


OF_THE_CARD = [
    "gpu.clocks",
    "gpu.ecc-corrected",
    "gpu.ecc-mode",
    "gpu.ecc-uncorrected",
    "gpu.power-limit",
    "gpu.recovery",
    "gpu.remapped-rows",
    "gpu.retired-pages",
    "gpu.temperature",
    "gpu.throttling",
]


@pytest.mark.parametrize("check", OF_THE_CARD)
def test_of_a_vgpu_the_card_is_not_judged(check: str) -> None:
    status, message = one(check, node(smi_gpu(virtualization_mode="VGPU")))
    assert (status, message) == ("skip", "a vGPU: visible only on its host")


def test_of_a_vgpu_its_own_settings_are_judged() -> None:
    assert one("gpu.compute-mode", node(smi_gpu(virtualization_mode="VGPU", compute_mode="Prohibited")))[0] == "fail"


@pytest.mark.parametrize("check", OF_THE_CARD)
def test_a_lost_gpu_is_reported_once(check: str) -> None:
    lost = node(smi_gpu(errors=["GPU is lost"], throttle_reasons=None))
    assert one(check, lost)[0] == "skip"
    assert one("gpu.answers", lost)[0] == "fail"


@pytest.mark.parametrize("check", ["link.pcie-width", "link.pcie-speed", "link.numa", "host.iommu", "host.acs"])
def test_in_a_virtual_machine_there_is_no_verdict_on_buses(check: str) -> None:
    slow = PciLink(speed_gt_per_s=2.5, speed_max_gt_per_s=16.0, width=4, width_max=16)
    pci = (device(link=slow), device(slot="0000:3d:00.0", link=slow))
    facts = node(virtualization="kvm", pci=pci, iommu={"units": ("dmar0",), "group_types": {}}, pci_acs=(), numa=())
    assert {finding.status for finding in judged(check, facts)} == {Status.SKIP}
    assert all("virtual machine" in finding.message for finding in judged(check, facts))


@pytest.mark.parametrize(
    ("number", "status"), [(L40S, "error"), ("ffff", "skip"), ("2684", "skip")], ids=["for servers", "unknown", "4090"]
)
def test_a_value_that_is_not_reported_is_an_error_where_the_model_has_it(number: str, status: str) -> None:
    assert one("gpu.throttling", node(smi_gpu(number)))[0] == status
    assert one("gpu.ecc-mode", node(smi_gpu(number)))[0] == status


# GPUs


@pytest.mark.parametrize(
    ("requested", "status"),
    [("L40S", "pass"), ("NVIDIA L40S", "pass"), ("10de:26b9", "pass"), ("H100", "fail"), ("L40Z", "error")],
)
def test_the_model_that_the_site_sets(requested: str, status: str) -> None:
    assert one("gpu.model", node(), model=requested)[0] == status


def test_a_model_that_the_catalog_has_not_is_no_guess() -> None:
    status, message = one("gpu.model", node(smi_gpu("ffff")))
    assert (status, "10de:ffff" in message) == ("error", True)


def test_a_product_name_stands_in_for_a_pci_id_that_the_catalog_has_not() -> None:
    status, message = one("gpu.model", node(smi_gpu("ffff", name="NVIDIA H100 80GB HBM3")))
    assert (status, "10de:ffff" in message, "H100 SXM5 80GB" in message) == ("warn", True, True)


def test_a_product_name_of_another_model_than_the_pci_id() -> None:
    status, message = one("gpu.model", node(smi_gpu(H100, name="NVIDIA GB200")))
    assert (status, "NVIDIA GB200" in message, "H100" in message) == ("fail", True, True)


def test_two_models_of_sxm_modules_in_one_node() -> None:
    mixed = [smi_gpu(H100), smi_gpu("2335", index=1, pci_bus_id="0000:2a:00.0")]
    assert [finding.status.value for finding in judged("gpu.model", node(*mixed))] == ["pass", "warn"]


@pytest.mark.parametrize(
    ("reasons", "status", "words"),
    [
        ([], "pass", "nothing slows it down"),
        (["gpu_idle", "sw_power_cap", "applications_clocks_setting"], "pass", "nothing"),
        (["hw_slowdown"], "fail", "hardware slowdown"),
        (["hw_slowdown", "hw_power_brake_slowdown", "sw_power_cap"], "fail", "slowed down: power brake"),
        (["sw_thermal_slowdown", "hw_thermal_slowdown"], "fail", "hardware slowdown for heat, slowdown for heat"),
        (["sw_thermal_slowdown", "gpu_idle"], "warn", "slowdown for heat"),
    ],
)
def test_each_reason_counts_whatever_else_holds(reasons: list[str], status: str, words: str) -> None:
    verdict = one("gpu.throttling", node(smi_gpu(throttle_reasons=reasons)))
    assert (verdict[0], words in verdict[1]) == (status, True), verdict


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({"temperature_c": 84, "slowdown_temperature_c": 90}, "pass"),
        ({"temperature_c": 86, "slowdown_temperature_c": 90}, "warn"),
        ({"temperature_c": 90, "slowdown_temperature_c": 90}, "fail"),
        ({"temperature_c": 80, "tlimit_c": 7, "slowdown_tlimit_c": -2}, "pass"),
        ({"temperature_c": 80, "tlimit_c": 2, "slowdown_tlimit_c": -2}, "warn"),
        ({"temperature_c": 80, "tlimit_c": -2, "slowdown_tlimit_c": -2}, "fail"),
        ({"temperature_c": 80}, "error"),
        ({"temperature_c": 35, "tlimit_c": 0, "slowdown_tlimit_c": -2, "throttle_reasons": []}, "error"),
        (
            {
                "temperature_c": 40,
                "slowdown_temperature_c": 90,
                "memory_temperature_c": 95,
                "memory_max_temperature_c": 95,
            },
            "fail",
        ),
    ],
)
def test_a_card_is_judged_by_its_own_limits(values: dict[str, Any], status: str) -> None:
    assert one("gpu.temperature", node(smi_gpu(**values)))[0] == status


@pytest.mark.parametrize(
    ("mode", "held", "status"),
    [(True, (), "pass"), (False, (), "fail"), (False, ("/dev/nvidia0",), "pass"), (False, ("/dev/nvidia1",), "fail")],
)
def test_the_daemon_may_hold_what_nvidia_smi_calls_disabled(mode: bool, held: tuple[str, ...], status: str) -> None:
    daemon = GpuProcess(pid=9, name="nvidia-persiste", type=None, devices=held)
    unit = Unit(name="nvidia-persistenced.service", load="loaded", active="active", sub="running")
    findings = judged("gpu.persistence", node(smi_gpu(persistence_mode=mode), gpu_processes=(daemon,), units=(unit,)))
    assert findings[0].status.value == status


@pytest.mark.parametrize(
    ("processes", "status"),
    [
        ((), "warn"),
        ((GpuProcess(pid=1, name="python", type="C", gpu="gpu0"),), "pass"),
        ((GpuProcess(pid=1, name="python", type="C", gpu="gpu1"),), "warn"),
        ((GpuProcess(pid=1, name="python", type=None, devices=("/dev/nvidia-uvm", "/dev/nvidia0")),), "pass"),
        ((GpuProcess(pid=1, name="nvidia-persiste", type=None, devices=("/dev/nvidia0",)),), "warn"),
    ],
)
def test_memory_belongs_to_somebody(processes: tuple[GpuProcess, ...], status: str) -> None:
    assert one("gpu.memory-used", node(smi_gpu(memory_used_mib=4096), gpu_processes=processes))[0] == status


@pytest.mark.parametrize(
    ("number", "mode", "status"),
    [
        (GH200, None, "skip"),
        (GB200, None, "skip"),
        ("ffff", "ATS", "skip"),
        (L40S, "HMM", "warn"),
        (L40S, None, "warn"),
    ],
)
def test_memory_that_the_operating_system_manages(number: str, mode: str | None, status: str) -> None:
    assert one("gpu.memory-used", node(smi_gpu(number, memory_used_mib=4096, addressing_mode=mode)))[0] == status


@pytest.mark.parametrize(
    ("number", "driver", "flavour", "status", "words"),
    [
        (B200, "580.95.05", "proprietary", "fail", "needs the open kernel modules"),
        (B200, "580.95.05", "open", "pass", "fits"),
        (V100, "580.95.05", "open", "fail", "needs the proprietary kernel modules"),
        (V100, "590.44.01", "proprietary", "fail", "branch 580 is the last"),
        (V100, "580.95.05", None, "pass", "fits"),
        ("ffff", "580.95.05", "open", "skip", "does not have"),
    ],
)
def test_the_driver_fits_the_gpu(number: str, driver: str, flavour: str | None, status: str, words: str) -> None:
    facts = node(smi_gpu(number), loaded_driver=LoadedDriver(version=driver, flavour=flavour))
    verdict = one("driver.expected", facts)
    assert (verdict[0], words in verdict[1]) == (status, True), verdict


@pytest.mark.parametrize(
    ("requested", "status"), [("580", "pass"), ("580.95.05", "pass"), ("58", "fail"), ("570", "fail")]
)
def test_the_driver_that_the_site_sets(requested: str, status: str) -> None:
    expect = Expectation.model_construct(driver=requested)
    (finding,) = registry["driver.expected"].findings(node(), expect)
    assert finding.status.value == status


@pytest.mark.parametrize(
    ("requested", "status"),
    [("6.8.0-60-generic", "pass"), ("6.8.0-60", "pass"), ("6.8", "pass"), ("6", "pass"), ("6.8.0-6", "fail"),
     ("6.80", "fail"), ("6.8.0-60-g", "fail"), ("6.8.0-61-generic", "fail")],
)  # fmt: skip
def test_the_kernel_that_the_site_sets(requested: str, status: str) -> None:
    runs = Kernel(release="6.8.0-60-generic", package=None, running=True, newest=True, headers=True)
    expect = Expectation(kernel=requested)
    (finding,) = registry["node.versions"].findings(node(kernels=(runs,), packages=()), expect)
    assert finding.status.value == status


def test_gpus_of_one_kind_are_one_finding_of_the_driver() -> None:
    two = node(smi_gpu(), smi_gpu(index=1, pci_bus_id="0000:3d:00.0"))
    assert len(judged("driver.expected", two)) == 1


# Links


def port(**link: Any) -> PciPort:
    whole = {"speed_gt_per_s": 16.0, "speed_max_gt_per_s": 16.0, "width": 16, "width_max": 16, **link}
    return PciPort(slot="0000:19:00.0", vendor_id="8086", device_id="347a", link=PciLink(**whole), numa_node=0)


@pytest.mark.parametrize(
    ("now", "above", "state", "status"),
    [
        (16.0, 16.0, "P0", "pass"),
        (8.0, 16.0, "P0", "fail"),
        (8.0, 8.0, "P0", "pass"),
        (2.5, 16.0, "P8", "skip"),
        (2.5, 16.0, "P5", "skip"),
        (2.5, 16.0, None, "skip"),
        (8.0, 16.0, "P2", "fail"),
    ],
)
def test_a_slow_link_of_an_idle_gpu_is_no_fault(now: float, above: float, state: str | None, status: str) -> None:
    link = PciLink(speed_gt_per_s=now, speed_max_gt_per_s=16.0, width=16, width_max=16)
    pci = (device(link=link, ports=("0000:19:00.0",)),)
    facts = node(smi_gpu(performance_state=state), pci=pci, pci_ports=(port(speed_max_gt_per_s=above),))
    assert one("link.pcie-speed", facts)[0] == status


@pytest.mark.parametrize(
    ("width", "above", "status"), [(16, 16, "pass"), (8, 16, "fail"), (8, 8, "pass"), (8, None, "warn"), (4, 8, "fail")]
)
def test_the_width_is_judged_by_both_ends(width: int, above: int | None, status: str) -> None:
    link = PciLink(speed_gt_per_s=16.0, speed_max_gt_per_s=16.0, width=width, width_max=16)
    pci = (device(link=link, ports=("0000:19:00.0",)),)
    facts = node(smi_gpu(performance_state="P8"), pci=pci, pci_ports=(port(width_max=above),))
    assert one("link.pcie-width", facts)[0] == status


@pytest.mark.parametrize(("number", "state"), [("2342", "D0"), (L40S, "D3cold")])
def test_links_that_report_nothing(number: str, state: str) -> None:
    link = PciLink(speed_gt_per_s=2.5, speed_max_gt_per_s=32.0, width=1, width_max=16)
    facts = node(smi_gpu(number), pci=(device(number, link=link, power_state=state),))
    assert one("link.pcie-width", facts)[0] == "skip"


def listing(*active: bool | None, speed: float = 25.0) -> Smi[Nvlink]:
    links: list[dict[str, Any]] = [
        {"link": number, "active": each, "speed_gb_per_s": speed if each else None, "errors": {}}
        for number, each in enumerate(active)
    ]
    none_active = bool(active) and not any(active)
    return Smi[Nvlink](document={"gpus": [{"index": 0, "links": links, "message": None, "all_inactive": none_active}]})


@pytest.mark.parametrize(
    ("number", "links", "status"),
    [
        (H100, listing(*[True] * 18), "pass"),
        (H100, listing(*[True] * 17, False), "fail"),
        (H100, listing(*[False] * 18), "fail"),
        (A100_PCIE, listing(*[False] * 12), "skip"),
        (A100_PCIE, listing(*[True] * 8, *[False] * 4), "warn"),
        (A100_PCIE, listing(*[True] * 12), "pass"),
        (L40S, listing(), "skip"),
        ("ffff", listing(True, True), "pass"),
        ("ffff", listing(True, False), "fail"),
        ("ffff", listing(False, False), "skip"),
    ],
)
def test_the_state_of_nvlink(number: str, links: Smi[Nvlink], status: str) -> None:
    assert one("nvlink.state", node(smi_gpu(number), nvlink=links))[0] == status


@pytest.mark.parametrize(("awake", "status"), [(True, "skip"), (None, "skip"), (False, "fail")])
def test_a_sleeping_nvlink_is_not_down(awake: bool | None, status: str) -> None:
    links = listing(*[awake] * 17, None)
    assert links.document is not None
    (gpu,) = links.document.model_dump()["gpus"]
    gpu["all_inactive"] = False
    for link in gpu["links"]:
        link["state"] = {True: "active", False: "inactive"}.get(link["active"], "sleep")
    asleep = Smi[Nvlink](document={"gpus": [gpu]})
    assert one("nvlink.state", node(smi_gpu(B200), nvlink=asleep))[0] == status


@pytest.mark.parametrize(
    ("number", "links", "status"),
    [
        (H100, listing(*[True] * 18), "pass"),
        (H100, listing(*[True] * 12), "fail"),
        (H100, listing(), "error"),
        ("ffff", listing(True), "skip"),
    ],
)
def test_the_number_of_nvlinks(number: str, links: Smi[Nvlink], status: str) -> None:
    assert one("nvlink.count", node(smi_gpu(number), nvlink=links))[0] == status


@pytest.mark.parametrize(
    ("number", "speed", "status"),
    [
        (H100, 26.562, "pass"),
        (H100, 26.5, "pass"),
        (H100, 25.0, "warn"),
        (H100, 12.5, "fail"),
        (B200, 53.125, "pass"),
        (B200, 50.0, "warn"),
        (B200, 25.0, "fail"),
        ("20b2", 25.0, "pass"),
        ("20b2", 23.0, "fail"),
    ],
)
def test_the_speed_of_nvlinks(number: str, speed: float, status: str) -> None:
    assert one("nvlink.speed", node(smi_gpu(number), nvlink=listing(*[True] * 18, speed=speed)))[0] == status


def matrix(*ways: str, number: int = 4) -> Smi[Topology]:
    """A matrix with these ways between 0 and 1, 0 and 2 ... 2 and 3."""
    names = [f"GPU{index}" for index in range(number)]
    links: dict[str, dict[str, str]] = {name: {} for name in names}
    for (gpu, other), way in zip(combinations(names, 2), ways, strict=True):
        links[gpu][other] = links[other][gpu] = way
    return Smi[Topology](document={"gpus": names, "links": links})


def of_models(*numbers: str, **more: Any) -> list[dict[str, Any]]:
    return [
        smi_gpu(number, index=at, pci_bus_id=f"0000:{at + 16:02x}:00.0", **more) for at, number in enumerate(numbers)
    ]


@pytest.mark.parametrize(
    ("models", "ways", "status"),
    [
        ([H100] * 4, ["NV6"] * 6, "pass"),
        ([H100] * 4, ["SYS", *["NV6"] * 5], "fail"),
        ([H100] * 4, ["SYS"] * 6, "fail"),
        (["ffff"] * 4, ["SYS", *["NV6"] * 5], "fail"),
        # Bridges between two, and between four of five.
        ([A100_PCIE] * 4, ["NV12", *["SYS"] * 4, "NV12"], "pass"),
        ([A100_PCIE] * 4, ["SYS"] * 6, "pass"),
        # A display card beside three that are linked.
        ([L40S, H100, H100, H100], [*["SYS"] * 3, *["NV6"] * 3], "pass"),
    ],
)
def test_topology_without_nvswitches(models: list[str], ways: list[str], status: str) -> None:
    assert one("link.topology", node(*of_models(*models), topology=matrix(*ways)))[0] == status


@pytest.mark.parametrize(("virtualization", "mig", "status"), [("kvm", False, "pass"), ("none", True, "pass")])
def test_nvlink_that_is_hidden_is_not_missed(virtualization: str, mig: bool, status: str) -> None:
    gpus = of_models(*[H100] * 4, mig_mode=mig)
    facts = node(*gpus, topology=matrix(*["SYS"] * 6), virtualization=virtualization)
    assert one("link.topology", facts)[0] == status


def test_the_cube_of_eight_v100_lacks_nvlink_between_some() -> None:
    # DGX-1: two meshes of four, and a link from each GPU to its like in the other.
    ways = ["NV1" if gpu // 4 == other // 4 or other - gpu == 4 else "SYS" for gpu, other in combinations(range(8), 2)]
    facts = node(*of_models(*[V100] * 8), topology=matrix(*ways, number=8))
    assert one("link.topology", facts)[0] == "pass"


def test_in_mig_mode_nothing_is_reported_of_nvlink() -> None:
    facts = node(smi_gpu(H100, mig_mode=True), nvlink=listing(*[False] * 18))
    assert one("nvlink.state", facts) == ("skip", "the driver reports no NVLink of a GPU in MIG mode")


def test_a_guest_on_a_host_that_divides_the_board() -> None:
    facts = node(smi_gpu(H100), nvlink=listing(*[False] * 18), virtualization="kvm")
    assert one("nvlink.state", facts)[0] == "skip"


@pytest.mark.parametrize(
    ("counters", "status"),
    [
        ({"replay": 0, "recovery": 0, "crc": 0}, "pass"),
        ({"replay": 3, "recovery": 0}, "warn"),
        ({"replay": 0, "recovery": 1}, "fail"),
        ({"link_recovery_successful": 5, "effective_ber": 1e-200, "replay": 0}, "pass"),
        ({"fec_errors_0": 36140749276, "raw_errors_lane_0": 82, "total_link_recovery_events": 1, "rx": 0}, "pass"),
        ({"effective": 0, "plr_xmit_retry_blocks": 12, "plr_rcv_codes": 9}, "pass"),
        ({"symbol": 3, "rx": 0}, "warn"),
        ({"link_recovery_failed_events": 1}, "fail"),
        ({"something_new": 7}, "error"),
        ({}, "error"),
    ],
)
def test_the_errors_of_nvlink(counters: dict[str, float], status: str) -> None:
    links = [{"link": 0, "active": None, "speed_gb_per_s": None, "errors": counters}]
    errors = Smi[Nvlink](document={"gpus": [{"index": 0, "links": links}]})
    assert one("nvlink.errors", node(smi_gpu(H100), nvlink=listing(*[True] * 18), nvlink_errors=errors))[0] == status


# Fabric


def eight(number: str, **more: Any) -> NodeFacts:
    return node(*(smi_gpu(number, index=at, pci_bus_id=f"0000:{at + 16:02x}:00.0") for at in range(8)), **more)


def unit(name: str, active: str = "active", load: str = "loaded") -> Unit:
    return Unit(name=name, load=load, active=active, sub="running" if active == "active" else "dead")


def test_a_platform_with_hidden_switches_needs_its_services_too() -> None:
    findings = judged("fabric.manager", eight(B200, units=(unit("nvidia-fabricmanager.service"),), packages=()))
    assert [(finding.component, finding.status.value) for finding in findings] == [
        ("nvidia-fabricmanager", "pass"),
        ("nvlsm", "fail"),
    ]


def test_nvlsm_without_a_unit_of_its_own_is_started_by_the_fabric_manager() -> None:
    units = (unit("nvidia-fabricmanager.service"),)
    findings = judged("fabric.manager", eight(B200, units=units, packages=(package("nvlsm", held=False),)))
    assert [(finding.component, finding.status.value) for finding in findings] == [
        ("nvidia-fabricmanager", "pass"),
        ("nvlsm", "pass"),
    ]


@pytest.mark.parametrize(("virtualization", "status"), [("none", "fail"), ("kvm", "skip")])
def test_in_a_guest_the_host_may_run_the_fabric_manager(virtualization: str, status: str) -> None:
    assert one("fabric.manager", eight(H100, virtualization=virtualization))[0] == status


def test_four_gpus_on_a_board_without_switches_need_no_fabric_manager() -> None:
    four = node(*(smi_gpu(H100, index=at, pci_bus_id=f"0000:{at + 16:02x}:00.0") for at in range(4)))
    assert one("fabric.manager", four)[0] == "skip"


@pytest.mark.parametrize(
    ("fabric", "status"),
    [
        ({"state": "Completed", "status": "Success"}, "pass"),
        ({"state": "Completed", "status": None}, "pass"),
        ({"state": "Completed", "status": "Success", "health": {"summary": "Healthy", "bandwidth": "Full"}}, "pass"),
        ({"state": "In Progress", "status": None}, "fail"),
        ({"state": "Not Started", "status": None}, "fail"),
        ({"state": "Completed", "status": "Insufficient Resources"}, "fail"),
        ({"state": "Completed", "status": "Success", "health": {"summary": "Limited Capacity"}}, "fail"),
        ({"state": "Completed", "status": "Success", "health": {"route_unhealthy": "True"}}, "fail"),
        ({"state": "Completed", "status": "Success", "health": {"summary": "Purple"}}, "warn"),
    ],
)
def test_the_state_of_the_fabric(fabric: dict[str, Any], status: str) -> None:
    assert one("fabric.state", node(smi_gpu(H100, fabric=fabric)))[0] == status


def test_gpus_of_one_node_in_two_fabrics() -> None:
    fabrics = [{"state": "Completed", "status": "Success", "clique_id": clique} for clique in (1, 2)]
    two = node(*(smi_gpu(H100, index=at, pci_bus_id=f"0000:{at + 16:02x}:00.0", fabric=fabrics[at]) for at in range(2)))
    assert [finding.status.value for finding in judged("fabric.state", two)] == ["pass", "pass", "fail"]


def test_a_hopper_board_that_reports_nothing_of_its_fabric_is_an_error() -> None:
    assert one("fabric.state", eight(H100))[0] == "error"
    assert one("fabric.state", eight("20b2"))[0] == "skip"
    assert one("fabric.state", node())[0] == "skip"


# The kernel's log


def log(*events: KernelEvent, complete: bool = True) -> KernelLog:
    return KernelLog(source="journal", complete=complete, events=events)


def xid(number: int, slot: str = SLOT, **more: Any) -> KernelEvent:
    return KernelEvent(kind="xid", message="...", xid=number, pci_bus_id=slot, **more)


@pytest.mark.parametrize(
    ("number", "status"), [(79, "fail"), (74, "fail"), (31, "warn"), (63, "pass"), (45, "pass"), (9999, "warn")]
)
def test_an_xid_is_judged_by_its_meaning(number: int, status: str) -> None:
    assert one("gpu.xid", node(kernel_log=log(xid(number))))[0] == status


OLDER = [(79, "fail"), (48, "fail"), (64, "fail"), (61, "fail"), (63, "pass"), (92, "warn"), (31, "warn"), (57, "warn")]
NEWER = [(79, "fail"), (48, "fail"), (64, "fail"), (61, "warn"), (63, "pass"), (92, "pass"), (95, "fail"), (46, "fail")]
NOT_SURE = [(95, "warn"), (46, "warn"), (109, "warn"), (94, "warn"), (121, "warn")]


@pytest.mark.parametrize(
    ("model", "number", "status"),
    [(model, *case) for model in (V100, T4) for case in OLDER + NOT_SURE] + [(H100, *case) for case in NEWER],
)
def test_an_xid_means_what_it_means_on_the_model(model: str, number: int, status: str) -> None:
    verdict = one("gpu.xid", node(smi_gpu(model), kernel_log=log(xid(number))))
    assert verdict[0] == status
    assert ("not sure for" in verdict[1]) is ((number, status) in NOT_SURE and model != H100)


def test_an_older_gpu_retires_pages_and_a_newer_one_remaps_rows() -> None:
    def message(model: str) -> str:
        return one("gpu.xid", node(smi_gpu(model), kernel_log=log(xid(64))))[1]

    assert "page" in message(V100)
    assert "page" not in message(H100)


def test_an_xid_of_a_gpu_that_left_the_bus_is_judged_by_the_others_of_the_node() -> None:
    gone = log(xid(95, slot="0000:99:00.0"))
    assert one("gpu.xid", node(smi_gpu(V100), kernel_log=gone))[0] == "warn"
    assert one("gpu.xid", node(smi_gpu(H100), kernel_log=gone))[0] == "fail"
    mixed = node(smi_gpu(V100), smi_gpu(H100, index=1, pci_bus_id="0000:1b:00.0"), kernel_log=gone)
    assert one("gpu.xid", mixed)[0] == "fail"


NEEDS_RESET = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
RECOVERED = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([NEEDS_RESET], "fail"),
        ([RECOVERED], "pass"),
        ([NEEDS_RESET, RECOVERED], "pass"),
        ([RECOVERED, NEEDS_RESET], "fail"),
        (["GPU recovery action changed from 0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)"], "fail"),
        (["something else"], "fail"),
    ],
)
def test_the_last_recovery_action_is_the_one_that_holds(messages: list[str], status: str) -> None:
    events = (xid(154).model_copy(update={"message": message}) for message in messages)
    verdict = one("gpu.xid", node(kernel_log=log(*events)))
    assert (verdict[0], messages[-1] in verdict[1]) == (status, True)


def test_the_recovery_action_of_each_gpu_is_its_own() -> None:
    events = (
        xid(154).model_copy(update={"message": NEEDS_RESET}),
        xid(154, slot="0000:99:00.0").model_copy(update={"message": RECOVERED}),
    )
    findings = judged("gpu.xid", node(kernel_log=log(*events)))
    assert [(finding.component, finding.status.value) for finding in findings] == [
        ("gpu at 0000:99:00.0", "pass"),
        ("gpu0", "fail"),
    ]


def test_xids_are_folded_by_gpu_and_number_and_report_what_to_do() -> None:
    events = (xid(79, time="10:00"), xid(31, process="python"), xid(79, time="10:05"), xid(79, slot="0000:99:00.0"))
    findings = judged("gpu.xid", node(kernel_log=log(*events)))
    assert [(finding.component, finding.measured) for finding in findings] == [
        ("gpu at 0000:99:00.0", 1),
        ("gpu0", 1),
        ("gpu0", 2),
    ]
    assert findings[2].message == "Xid 79, 2 times, last at 10:05: The GPU has fallen off the bus"
    assert findings[2].remedy is not None
    assert findings[2].remedy.startswith("Drain the node and restart it")
    assert "process python" in findings[1].message


@pytest.mark.parametrize(
    "check", ["gpu.xid", "driver.log", "host.pcie-errors", "host.machine-checks", "host.killed-processes"]
)
def test_a_log_that_lost_its_beginning_is_never_a_pass(check: str) -> None:
    assert one(check, node(kernel_log=log()))[0] == "pass"
    status, message = one(check, node(kernel_log=log(complete=False)))
    assert (status, "does not reach back to the boot" in message) == ("warn", True)


def test_a_containers_log_is_the_hosts_unless_it_is_of_simulated_hardware() -> None:
    assert one("gpu.xid", node(kernel_log=log(), virtualization="docker"))[0] == "skip"
    simulated = log().model_copy(update={"simulated": True})
    assert one("gpu.xid", node(kernel_log=simulated, virtualization="docker"))[0] == "pass"


# The host


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ([("CUDA_LAUNCH_BLOCKING", "1")], "warn"),
        ([("CUDA_LAUNCH_BLOCKING", "0")], "pass"),
        ([("NCCL_DEBUG", "info")], "warn"),
        ([("NCCL_DEBUG", "warn"), ("OMP_NUM_THREADS", "4"), ("NCCL_SOCKET_IFNAME", "eth0")], "pass"),
        ([("NCCL_P2P_DISABLE", "1")], "warn"),
        ([("CUDA_VISIBLE_DEVICES", "0,1")], "warn"),
    ],
)
def test_variables_that_harm_everybody(settings: list[tuple[str, str]], status: str) -> None:
    variables = tuple(EnvironmentSetting(path="/etc/environment", name=name, value=value) for name, value in settings)
    assert one("host.environment", node(environment=variables))[0] == status


def limits(*lines: tuple[str, str, str, str], **defaults: str) -> Limits:
    settings = tuple(
        Limit(path="x.conf", domain=domain, type=kind, item=item, value=value) for domain, kind, item, value in lines
    )
    return Limits(defaults=defaults or None, settings=settings)


@pytest.mark.parametrize(
    ("host_limits", "status", "amount"),
    [
        (limits(("*", "-", "memlock", "unlimited"), nofile="524288"), "pass", "unlimited"),
        (limits(("*", "-", "memlock", "unlimited"), ("*", "hard", "memlock", "64"), nofile="524288"), "warn", "64 KiB"),
        (limits(("alice", "-", "memlock", "unlimited"), memlock="8388608", nofile="524288"), "warn", "8192 KiB"),
        (limits(("*", "soft", "memlock", "64"), memlock="infinity", nofile="524288"), "pass", "infinity"),
        (limits(("*", "-", "memlock", "²"), nofile="²"), "warn", "²"),
        (limits(("*", "-", "memlock", "9" * 5000), nofile="9" * 5000), "warn", "9" * 5000),
    ],
)
def test_memory_may_be_locked_where_there_is_rdma(host_limits: Limits, status: str, amount: str) -> None:
    device = IbDevice(name="mlx5_0", firmware=None, board_id=None, type=None, slot=None, numa_node=None, ports=())
    by_component = {
        finding.component: finding for finding in judged("host.limits", node(limits=host_limits, infiniband=(device,)))
    }
    assert by_component["memlock"].status.value == status
    assert by_component["memlock"].message == f"{amount} of memory may be locked"
    assert [finding.component for finding in judged("host.limits", node(limits=host_limits))] == ["nofile"]


def package(name: str, *, held: bool) -> Package:
    return Package(
        name=name,
        version="535.261.03-1",
        architecture="amd64",
        source="nvidia-graphics-drivers",
        maintainer="Debian NVIDIA Maintainers <pkg-nvidia-devel@lists.alioth.debian.org>",
        installed=True,
        state="install ok installed",
        held=held,
    )


@pytest.mark.parametrize(
    ("updates", "held", "status"),
    [
        (None, False, "pass"),
        ({"enabled": False}, False, "pass"),
        ({"enabled": True}, False, "warn"),
        ({"enabled": True}, True, "pass"),
        ({"enabled": True, "kept_back": ("^libcuda1$",)}, False, "pass"),
        ({"enabled": True, "kept_back": ("^nvidia-",)}, False, "warn"),
        ({"enabled": True, "kept_back": ("[", "(x+)+$", "libcuda")}, False, "pass"),
        ({"enabled": True, "reboots": True}, True, "warn"),
        ({"enabled": True, "tool": "dnf-automatic", "kept_back": ("libcuda*",)}, False, "pass"),
    ],
)
def test_upgrades_that_the_system_makes_by_itself(updates: dict[str, Any] | None, held: bool, status: str) -> None:
    upgrades = AutomaticUpdates(**{"tool": "unattended-upgrades", **updates}) if updates is not None else None
    facts = node(automatic_updates=upgrades, packages=(package("libcuda1", held=held),))
    assert one("driver.automatic-updates", facts)[0] == status


@pytest.mark.parametrize(
    ("governors", "preferences", "status"),
    [
        ({"performance": 8}, {}, "pass"),
        ({"powersave": 8}, {"performance": 8}, "pass"),
        ({"powersave": 8}, {"balance_performance": 8}, "warn"),
        ({"schedutil": 8}, {}, "warn"),
        ({}, {}, "skip"),
    ],
)
def test_processors_run_for_performance(governors: dict[str, int], preferences: dict[str, int], status: str) -> None:
    frequency = {"driver": None, "governors": governors, "preferences": preferences}
    assert one("host.cpu-governor", node(cpu_frequency=frequency))[0] == status


@pytest.mark.parametrize(
    ("number", "name", "status"),
    [
        ("2684", "NVIDIA GeForce RTX 4090", "skip"),
        ("2b85", "NVIDIA GeForce RTX 5090", "skip"),
        ("20bf", "NVIDIA Graphics Device", "skip"),
        ("2330", "NVIDIA H100 80GB HBM3", "error"),
        (T4, "Tesla T4", "error"),
    ],
)
def test_a_missing_ecc_mode_is_an_error_where_the_model_is_known_to_have_ecc(
    number: str, name: str, status: str
) -> None:
    facts = node(smi_gpu(number, name=name, ecc={"enabled": None}))
    assert {finding.status.value for finding in registry["gpu.ecc-mode"].findings(facts, Expectation())} == {status}


@pytest.mark.parametrize(
    ("generation", "lanes", "most"), [(3, 16, 8), (4, 16, 16), (5, 16, 31), (6, 16, 62), (4, 4, 4)]
)
def test_replays_are_judged_by_the_links_rate(generation: int, lanes: int, most: int) -> None:
    """DCGM 4.6.0, DcgmHealthWatch.cpp: 0.48, 0.96, 1.92, 3.84 errors per minute and lane, rounded up for the link."""
    assert most_replays(float(MOST_REPLAYS.default), generation, lanes) == most


def test_rings_are_no_fault_on_four_gpus() -> None:
    """NVIDIA/nccl issue 1455: NVLS is faster than rings from five GPUs on."""
    assert NVLS_RANKS.default == 5
