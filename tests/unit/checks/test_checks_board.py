"""Every platform of the catalog with fewer GPUs than it is built with: never a pass where the number shows it."""

import pytest

from gpunode.catalog import Platform, load
from gpunode.checks import EarlierGpus, Expectation, Finding, Status, registry
from gpunode.facts.host import Machine
from gpunode.facts.node import NodeFacts
from gpunode.facts.pci import PciDevice

PLATFORMS = [row for row in load().platforms.values() if row.gpu_count > 1]
BUILT = ("board", "server", "tray")


def device(pci_id: str, subsystem: str | None, number: int, class_id: str = "030200") -> PciDevice:
    vendor, device_id = pci_id.split(":")
    return PciDevice(
        slot=f"0000:{number:02x}:00.0",
        vendor_id=vendor,
        device_id=device_id,
        subsystem_id=subsystem,
        class_id=class_id,
        driver="nvidia",
    )


def node(row: Platform, gone: int, *, product: str | None = None, virtualization: str = "none") -> NodeFacts:
    """The platform without some of its GPUs, as the bus shows it."""
    models = [load().gpus[gpu] for gpu, number in row.gpus.items() for _ in range(number)]
    gpus = [device(gpu.pci[0], next(iter(gpu.subsystems), None), number) for number, gpu in enumerate(models)]
    shown = [] if row.nvswitch is None else [row.nvswitch] * row.nvswitches
    switches = [device(pci_id, None, 0x80 + number, "068000") for number, pci_id in enumerate(shown)]
    return NodeFacts.model_validate(
        {
            "host": "n",
            "collected_at": "2026-11-23T00:00:00Z",
            "simulated": True,
            "pci": tuple(gpus[: len(gpus) - gone] + switches),
            "virtualization": virtualization,
            "architecture": row.hosts[0],
            "machine": Machine(vendor="x", product=product, board=None, bios_version=None, bios_date=None),
        }
    )


def finding(facts: NodeFacts, expect: Expectation) -> Finding:
    (verdict,) = registry["gpu.present"].findings(facts, expect)
    return verdict


def status(facts: NodeFacts, gpus: int | None = None) -> Status:
    return finding(facts, Expectation(gpus=gpus)).status


def test_a_whole_platform_passes() -> None:
    outcomes = {
        (row.id, kind): status(node(row, 0, virtualization=kind)) for row in PLATFORMS for kind in ("none", "kvm")
    }
    assert len(outcomes) > 100
    assert {name: outcome for name, outcome in outcomes.items() if outcome is not Status.PASS} == {}


@pytest.mark.parametrize("kind", BUILT)
def test_a_board_with_gpus_gone_never_passes_unless_it_looks_like_a_smaller_one(kind: str) -> None:
    for row in [row for row in PLATFORMS if row.kind == kind]:
        gone_from(row)


def gone_from(row: Platform) -> None:
    smaller = {
        other.gpu_count
        for other in load().platforms.values()
        if set(other.gpus) == set(row.gpus) and other.nvswitch in (None, row.nvswitch) and other.kind in BUILT
    }
    for gone in range(1, row.gpu_count):
        left = row.gpu_count - gone
        outcome = status(node(row, gone))
        if left in smaller and row.nvswitch is None:
            assert outcome is Status.PASS
        elif row.nvswitch is not None or left not in (1, 2, 4):
            assert outcome is (Status.FAIL if row.sure("gpus") else Status.WARN), (row.id, left)
        else:
            assert outcome is Status.WARN, left
        assert status(node(row, gone), gpus=left) is Status.PASS, "the site excludes it"
        assert status(node(row, gone), gpus=row.gpu_count) is Status.FAIL


def test_one_gone_is_never_a_pass() -> None:
    """Whatever the model: seven of eight, three of four, on boards, with cards, in guests that have a whole board."""
    outcomes = {}
    for row in [row for row in PLATFORMS if row.gpu_count > 2]:
        (model,) = row.gpus
        elsewhere = any(model in other.gpus for other in PLATFORMS if not other.virtual)
        guest = row.virtual and (not elsewhere or load().platforms[row.board or row.id].kind in BUILT)
        outcomes[row.id] = status(node(row, 1, virtualization="kvm" if guest else "none"))
    assert len(outcomes) > 50
    assert {name: outcome for name, outcome in outcomes.items() if outcome not in (Status.FAIL, Status.WARN)} == {}
    eight = [row for row in PLATFORMS if row.gpu_count == 8 and not row.virtual]
    assert {row.id for row in eight if outcomes[row.id] is not Status.FAIL and row.sure("gpus")} == set()
    assert {row.kind for row in eight} == {"board", "server", "pcie"}


def test_adapters_distinguish_half_a_board_from_a_smaller_one() -> None:
    """HGX B200 shows no NVSwitches: its eight adapters do."""
    row = load().platforms["hgx-b200-8"]
    nic = [device("15b3:1021", "15b3:0023", 0x40 + number, "020700") for number in range(8)]
    second_port = nic[0].model_copy(update={"slot": "0000:40:00.1"})
    half = node(row, 4)
    outcomes = [status(half.model_copy(update={"pci_io": tuple(nics)})) for nics in ([*nic[:4], second_port], nic)]
    assert outcomes == [Status.WARN, Status.FAIL]


@pytest.mark.parametrize(
    ("left", "virtualization", "model", "expected"),
    [
        (8, "none", "h100-pcie", Status.PASS),
        (6, "none", "h100-pcie", Status.FAIL),
        (4, "none", None, Status.FAIL),
        (4, "none", "l40s", Status.PASS),
        (4, "kvm", "h100-pcie", Status.WARN),
    ],
)
def test_the_previous_run_speaks_before_the_board(
    left: int, virtualization: str, model: str | None, expected: Status
) -> None:
    row = next(row for row in PLATFORMS if row.gpus == {"h100-pcie": 8} and not row.virtual)
    earlier = EarlierGpus("run 17 of 2026-11-20T08:00:00Z", 8, model)
    facts = node(row, 8 - left, virtualization=virtualization)
    verdict = finding(facts, Expectation().with_earlier_gpus(earlier))
    assert (verdict.status, verdict.source == earlier.origin) == (expected, expected is not Status.PASS)
    assert finding(facts, Expectation(gpus=left).with_earlier_gpus(earlier)).status is Status.PASS


@pytest.mark.parametrize(("model", "count"), [("b200", 8), ("h100-sxm5-80gb", 8), ("a100-sxm4-80gb", 8)])
def test_a_guest_may_have_a_part_of_a_board(model: str, count: int) -> None:
    row = next(row for row in PLATFORMS if row.gpus == {model: count} and row.kind == "board")
    hidden = row.model_copy(update={"nvswitch": None})
    assert [status(node(hidden, count - left, virtualization="kvm")).value for left in (1, 2, 3, 4, 7)] == [
        *("pass", "pass", "warn", "pass", "warn")
    ]


def test_the_firmware_names_the_server() -> None:
    """Four A100 without NVSwitches are a board of their own, unless the machine is one with eight."""
    row = load().platforms["dgx-a100-8"].model_copy(update={"nvswitch": None})
    assert status(node(row, 4)) is Status.PASS
    assert status(node(row, 4, product="DGX A100 640GB")) is Status.FAIL
