"""Processors, power, RDMA adapters and the BMC in the cases that the simulated nodes do not show."""

from typing import Any

import pytest

from gpunode.checks import Expectation, Finding, registry
from gpunode.checks.rdma_links import outages
from gpunode.checks.thresholds import Overrides, in_force
from gpunode.facts.host import Cpu, CpuSets, NumaNode
from gpunode.facts.models.smi import Smi, SmiLog
from gpunode.facts.modules import LoadedDriver
from gpunode.facts.network import IbDevice, IbPort, Nic
from gpunode.facts.node import NodeFacts
from gpunode.facts.pci import PciDevice
from gpunode.facts.rdma import LinkEvent, LinkLog
from gpunode.facts.system import BmcEvent, BmcSensor


def node(**facts: Any) -> NodeFacts:
    fields = {"virtualization": "none", "architecture": "x86_64", "command_line": "ro", "infiniband": (), **facts}
    return NodeFacts(host="n", collected_at="2026-11-20T12:00:00Z", **fields)


def judged(check: str, facts: NodeFacts, **expected: Any) -> list[Finding]:
    return registry[check].findings(facts, Expectation(**expected))


def statuses(check: str, facts: NodeFacts, **expected: Any) -> list[str]:
    return [finding.status.value for finding in judged(check, facts, **expected)]


def sets(online: int, present: int, possible: int, smt: str | None = "on") -> CpuSets:
    every = [tuple(range(number)) for number in (online, present, possible)]
    return CpuSets(online=every[0], present=every[1], possible=every[2], smt=smt)


@pytest.mark.parametrize(
    ("cpu_sets", "facts", "status"),
    [
        (sets(8, 8, 8), {}, "pass"),
        (sets(8, 8, 128), {}, "pass"),
        (sets(7, 8, 8), {}, "fail"),
        (sets(7, 8, 8), {"virtualization": "kvm"}, "warn"),
        (sets(7, 8, 8), {"command_line": "ro nr_cpus=7"}, "warn"),
        (sets(4, 8, 8, "off"), {}, "pass"),
        (sets(3, 8, 8, "off"), {}, "fail"),
        (sets(0, 0, 8), {}, "error"),
    ],
)
def test_processors_that_are_offline(cpu_sets: CpuSets, facts: dict[str, Any], status: str) -> None:
    assert statuses("host.cpus-online", node(cpu_sets=cpu_sets, **facts)) == [status]


def test_a_policy_may_tolerate_offline_processors() -> None:
    with in_force(Overrides({"host.cpus-online.most-offline": {"default": 2}}, "the policy")):
        assert statuses("host.cpus-online", node(cpu_sets=sets(6, 8, 8))) == ["pass"]
        assert statuses("host.cpus-online", node(cpu_sets=sets(5, 8, 8))) == ["fail"]


def numa(with_cpus: int, of_memory: int = 0) -> tuple[NumaNode, ...]:
    return tuple(
        NumaNode(node=at, cpus="0-7" if at < with_cpus else "", memory_total_mib=1, memory_free_mib=1, distances=())
        for at in range(with_cpus + of_memory)
    )


def cpu(sockets: int | None) -> Cpu:
    return Cpu(architecture="x86_64", model_name=None, cpus=8, sockets=sockets, cores_per_socket=4, threads_per_core=1)


def gpus(number: int, device_id: str) -> tuple[PciDevice, ...]:
    return tuple(
        PciDevice(
            slot=f"{at:04x}:01:00.0",
            vendor_id="10de",
            device_id=device_id,
            subsystem_id=None,
            class_id="030200",
            driver="nvidia",
        )
        for at in range(number)
    )


@pytest.mark.parametrize(
    ("seen", "sockets", "virtualization", "status"),
    [
        (numa(2), 2, "none", "pass"),
        (numa(8), 2, "none", "pass"),
        (numa(1), 2, "none", "warn"),
        (numa(3), 2, "none", "warn"),
        ((), 1, "none", "pass"),
        ((), 2, "none", "warn"),
        (numa(1), 2, "kvm", "skip"),
        (numa(2), None, "none", "skip"),
    ],
)
def test_numa_by_sockets(seen: tuple[NumaNode, ...], sockets: int | None, virtualization: str, status: str) -> None:
    facts = node(pci=gpus(1, "26b9"), numa=seen, cpu=cpu(sockets), virtualization=virtualization)
    assert statuses("host.numa-nodes", facts) == [status]


@pytest.mark.parametrize(("seen", "status"), [(numa(2, 32), "pass"), (numa(2), "pass"), (numa(2, 24), "fail")])
def test_numa_of_gb200_by_the_platform(seen: tuple[NumaNode, ...], status: str) -> None:
    """34 with the GPUs' memory, and the sockets alone where the driver keeps it (CDMM)."""
    facts = node(pci=gpus(4, "2941"), numa=seen, cpu=cpu(2), architecture="aarch64")
    assert statuses("host.numa-nodes", facts) == [status]


def gpu(device_id: str, **reported: Any) -> NodeFacts:
    device = gpus(1, device_id)[0]
    smi_gpu = {"index": 0, "pci_bus_id": device.slot, "pci_device_id": f"10de:{device_id}", **reported}
    return node(
        pci=(device,),
        smi=Smi[SmiLog](document={"attached_gpus": 1, "gpus": [smi_gpu]}),
        loaded_driver=LoadedDriver(version="580.95.05", flavour="open"),
    )


@pytest.mark.parametrize(
    ("device_id", "watts", "limit", "status"),
    [
        ("2941", 64, 1200, "fail"),
        ("2941", 66, 1200, "pass"),
        ("2941", 1501, 1200, "fail"),
        ("2330", 67.74, 700, "pass"),
        ("2330", 8, 700, "warn"),
        ("2330", 900, 700, "warn"),
        ("2330", 45, None, "skip"),
        ("2684", 1, 450, "pass"),
    ],
)
def test_power_by_the_model(device_id: str, watts: float, limit: float | None, status: str) -> None:
    """A card for a desk (2684, RTX 4090) may draw next to nothing while it idles."""
    assert statuses("gpu.power-draw", gpu(device_id, power_w=watts, power_max_limit_w=limit)) == [status]


@pytest.mark.parametrize(
    ("state", "used", "on_bus", "status"),
    [
        ("P0", 100, "D0", "pass"),
        ("P8", 0, "D0", "pass"),
        ("P8", 80, "D0", "warn"),
        ("P2", 80, None, "pass"),
        ("P8", None, "D0", "pass"),
        ("P0", 0, "D3cold", "warn"),
        (None, 0, "D0", "error"),
    ],
)
def test_power_states(state: str | None, used: int | None, on_bus: str | None, status: str) -> None:
    facts = gpu("2330", performance_state=state, utilization_percent=used)
    facts = facts.model_copy(
        update={"pci": tuple(device.model_copy(update={"power_state": on_bus}) for device in facts.pci or ())}
    )
    assert statuses("gpu.power-state", facts) == [status]


def port(number: int = 1, state: str | None = "ACTIVE", layer: str = "InfiniBand", **more: Any) -> IbPort:
    fields = {"physical_state": "LinkUp", "rate_gbit_per_s": 400.0, "rate": None, "lid": None, **more}
    return IbPort(port=number, state=state, link_layer=layer, **fields)


def card(
    at: int, *ports: IbPort, board: str | None = "MT_1", firmware: str | None = "28.39.1002", function: int = 0
) -> IbDevice:
    return IbDevice(
        name=f"mlx5_{at}",
        firmware=firmware,
        board_id=board,
        type="MT4129",
        slot=f"0000:{at:02x}:00.{function}",
        numa_node=0,
        ports=ports or (port(),),
    )


DOWN = port(state="DOWN", physical_state="Polling")
ROCE, ROCE_DOWN = port(layer="Ethernet"), port(state="DOWN", layer="Ethernet", physical_state="Polling")
ROCE_OFF = port(state="DOWN", layer="Ethernet", physical_state="Disabled")


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((card(0), card(1), card(2)), ["pass"]),
        ((card(0), card(1), card(2, DOWN)), ["skip", "pass"]),
        ((card(0, ROCE), card(1, ROCE), card(2, ROCE_DOWN)), ["fail", "pass"]),
        ((card(0, ROCE), card(1, ROCE), card(2, ROCE_OFF)), ["skip", "pass"]),
        ((card(0, ROCE_DOWN), card(1, ROCE_DOWN)), ["pass"]),
        ((card(0, port(), port(2)), card(1, port(), port(2)), card(2)), ["fail", "pass"]),
        ((card(0), card(1), card(2, port(state=None))), ["error", "pass"]),
        ((card(0), card(1, ROCE_DOWN, board="MT_2")), ["skip"]),
        ((card(0, ROCE_DOWN, board=None),), ["skip"]),
    ],
)
def test_cards_beside_their_peers(devices: tuple[IbDevice, ...], expected: list[str]) -> None:
    assert statuses("rdma.peers", node(infiniband=devices)) == expected


def adapter(at: int, device_id: str = "1021", class_id: str = "020700", driver: str | None = "mlx5_core") -> PciDevice:
    return PciDevice(
        slot=f"0000:{at:02x}:00.0",
        vendor_id="15b3",
        device_id=device_id,
        subsystem_id=None,
        class_id=class_id,
        driver=driver,
    )


@pytest.mark.parametrize(
    ("on_bus", "expected"),
    [
        ((adapter(0), adapter(1)), ["pass"]),
        ((adapter(0), adapter(1), adapter(2)), ["fail", "pass"]),
        ((adapter(0), adapter(1), adapter(2, "101d", "020000")), ["pass"]),
        (
            (adapter(0, class_id="020000"), adapter(1, class_id="020000"), adapter(2, class_id="020000")),
            ["fail", "pass"],
        ),
        ((), ["skip"]),
    ],
)
def test_adapters_without_an_rdma_device(on_bus: tuple[PciDevice, ...], expected: list[str]) -> None:
    """An Ethernet adapter of another kind may be without RDMA on purpose."""
    assert statuses("rdma.adapters", node(infiniband=(card(0), card(1)), pci_io=on_bus)) == expected


def event(time: str, *, up: bool, name: str = "ib0") -> LinkEvent:
    return LinkEvent(interface=name, slot="0000:00:00.0", up=up, time=f"2026-11-20T{time}+0000")


def test_two_reports_of_one_change_are_one_outage() -> None:
    """The driver and systemd-networkd report the same change; Azure's log has six lines of one second."""
    events = (*[event("10:00:00", up=False)] * 6, *[event("10:00:40", up=True)] * 6, event("11:00:00", up=False))
    (first, second) = outages(events)["ib0"]
    assert (first.seconds, first.over, second.over) == (40.0, True, False)


@pytest.mark.parametrize(
    ("events", "layer", "status"),
    [
        ((), "InfiniBand", "pass"),
        ((event("10:00:00", up=False), event("10:00:29", up=True)), "InfiniBand", "pass"),
        ((event("10:00:00", up=False), event("10:00:30", up=True)), "InfiniBand", "fail"),
        ((event("10:00:00", up=False), event("10:00:30", up=True)), "Ethernet", "warn"),
        ((event("10:00:00", up=False),), "InfiniBand", "pass"),
        ((event("10:00:00", up=False, name="eno1"), event("10:09:30", up=True, name="eno1")), "InfiniBand", "fail"),
    ],
)
def test_outages_by_their_length(events: tuple[LinkEvent, ...], layer: str, status: str) -> None:
    """A link that is down now is left to rdma.ports; an adapter is known by its slot, whatever its interface's name."""
    devices = (card(0, port(layer=layer)),)
    assert statuses("rdma.flaps", node(infiniband=devices, link_log=LinkLog(complete=True, events=events))) == [status]


def test_a_policy_may_ask_for_longer_outages() -> None:
    log = LinkLog(complete=True, events=(event("10:00:00", up=False), event("10:00:30", up=True)))
    with in_force(Overrides({"rdma.flaps.long": {"default": 60}}, "the policy")):
        (finding,) = judged("rdma.flaps", node(infiniband=(card(0),), link_log=log))
    assert finding.status.value == "pass"
    assert "the policy" in (finding.source or "")


def nic(name: str, mtu: int, slot: str) -> Nic:
    return Nic(
        name=name, slot=slot, driver=None, state="up", speed_mbit_per_s=None, mtu=mtu, numa_node=None, carrier_changes=0
    )


@pytest.mark.parametrize(
    ("mtus", "least", "expected"),
    [
        ((1500, 1500), 0, ["pass"]),
        ((1500, 1500), 9000, ["fail"]),
        ((9000, 9000), 9000, ["pass"]),
        ((9000, 9216), 9000, ["warn"]),
        ((9000, 1500), 0, ["warn"]),
    ],
)
def test_mtu_of_a_roce_fabric(mtus: tuple[int, int], least: int, expected: list[str]) -> None:
    devices = (card(0, ROCE), card(1, ROCE))
    nics = tuple(nic(f"eth{at}", mtu, f"0000:{at:02x}:00.0") for at, mtu in enumerate(mtus))
    with in_force(Overrides({"rdma.mtu.least": {"default": least}} if least else {}, "the policy")):
        assert statuses("rdma.mtu", node(infiniband=devices, nics=nics)) == expected


def test_firmware_that_a_site_allows() -> None:
    devices = (card(0), card(1, firmware="28.41.1000"))
    assert statuses("rdma.firmware", node(infiniband=devices)) == ["warn"]
    both = ["28.39.1002", "28.41.1000"]
    assert statuses("rdma.firmware", node(infiniband=devices), nic_firmware=both) == ["warn"]
    assert statuses("rdma.firmware", node(infiniband=devices[:1]), nic_firmware=both) == ["pass"]
    assert statuses("rdma.firmware", node(infiniband=devices), nic_firmware=["28.41.1000"]) == ["fail"]


def bmc(sensors: tuple[BmcSensor, ...] = (), events: tuple[BmcEvent, ...] = (), access: str = "read") -> NodeFacts:
    return node(bmc_access=access, bmc_fans=sensors, bmc_power_supplies=sensors, bmc_events=events)


def sensor(reading: str, status: str = "ok") -> tuple[BmcSensor, ...]:
    return (BmcSensor(name="S1", status=status, reading=reading),)


@pytest.mark.parametrize(
    ("reading", "status", "expected"),
    [
        ("Presence detected", "ok", "pass"),
        ("Presence detected, Power Supply AC lost", "ok", "fail"),
        ("0 Watts, Presence detected, Failure detected", "ok", "fail"),
        ("Presence detected, Predictive failure", "ok", "warn"),
        ("Non-Redundant: Sufficient from Redundant", "ok", "warn"),
        ("Fully Redundant", "ok", "pass"),
        ("Redundancy Lost", "ok", "fail"),
        ("95 Watts", "cr", "fail"),
        ("95 Watts", "nc", "warn"),
        ("No Reading", "ns", "skip"),
    ],
)
def test_power_supplies(reading: str, status: str, expected: str) -> None:
    assert statuses("bmc.power-supplies", bmc(sensor(reading, status))) == [expected]


@pytest.mark.parametrize("access", ["no-device", "no-program", "no-permission"])
@pytest.mark.parametrize("check", ["bmc.events", "bmc.fans", "bmc.power-supplies"])
def test_a_bmc_that_cannot_be_asked_is_a_skip(check: str, access: str) -> None:
    assert statuses(check, bmc(access=access)) == ["skip"]


def logged(text: str, time: str | None = "2026-11-19T00:00:00", *, asserted: bool | None = True) -> BmcEvent:
    return BmcEvent(sensor="Memory #0x2b", event=text, asserted=asserted, time=time)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((logged("Uncorrectable ECC"),), "warn"),
        ((logged("Uncorrectable ECC", "2026-10-01T00:00:00"),), "pass"),
        ((logged("Uncorrectable ECC", None),), "warn"),
        ((logged("Uncorrectable ECC"), logged("Uncorrectable ECC", asserted=False)), "pass"),
        ((logged("Uncorrectable ECC", asserted=False), logged("Uncorrectable ECC")), "warn"),
        ((logged("Correctable ECC"),), "pass"),
        ((logged("S0/G0: working"),), "pass"),
        ((BmcEvent(sensor="Linux kernel panic: out", event="", asserted=None),), "warn"),
    ],
)
def test_events_that_are_not_over(events: tuple[BmcEvent, ...], expected: str) -> None:
    assert statuses("bmc.events", bmc(events=events)) == [expected]


def efa(at: int) -> IbDevice:
    """As the kernel's driver efa shows one: no link layer, no board, no counters of the link (efa_verbs.c)."""
    plain = port(layer="Unknown", rate="100 Gb/sec (4X EDR)", rate_gbit_per_s=100.0, lid=0)
    return card(at, plain, board=None, firmware="1.2").model_copy(update={"name": f"rdmap{at}s27", "type": None})


def on_aws(at: int, device_id: str = "efa2", driver: str | None = "efa") -> PciDevice:
    return adapter(at, device_id, "020000", driver).model_copy(update={"vendor_id": "1d0f"})


def test_elastic_fabric_adapters_are_recognized() -> None:
    ena = on_aws(9, "ec20", "ena")
    whole = node(infiniband=(efa(16), efa(32)), pci_io=(on_aws(16), on_aws(32), ena), nics=())
    (finding,) = judged("rdma.adapters", whole)
    assert (finding.status.value, finding.measured) == ("pass", 2)
    lost = node(infiniband=(efa(16),), pci_io=(on_aws(16), on_aws(32, driver=None), ena))
    (missing, _) = judged("rdma.adapters", lost)
    assert (missing.status.value, missing.component) == ("fail", "adapter at 0000:20:00.0")
    assert statuses("rdma.adapters", node(pci_io=(on_aws(16, driver=None), ena))) == ["fail"]
    for check in (
        "rdma.errors",
        "rdma.ports",
        "rdma.peers",
        "rdma.firmware",
        "rdma.gids",
        "rdma.flow-control",
        "rdma.mtu",
    ):
        assert set(statuses(check, whole)) <= {"pass", "skip"}, check
    # A port of InfiniBand without counters is still unknown.
    assert statuses("rdma.errors", node(infiniband=(card(0),))) == ["error"]
