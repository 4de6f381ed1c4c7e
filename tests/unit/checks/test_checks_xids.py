"""Xids that belong together: bursts, duplicates, cancelling pairs, registers of NVLink."""

from collections import Counter

import pytest

from gpunode.checks import Expectation, Finding, registry
from gpunode.checks.thresholds import Overrides, in_force
from gpunode.checks.xid_meaning import (
    CONTINUE,
    ECC,
    FABRIC,
    MECHANICAL,
    RECURRING,
    SECONDARY,
    SIGNAL,
    decode_registers,
    decode_table,
)
from gpunode.facts.kernel_log import KernelEvent, KernelLog
from gpunode.facts.node import NodeFacts
from gpunode.facts.pci import PciDevice

SLOT, OTHER = "0000:1a:00.0", "0000:3d:00.0"
H100, A100 = "2330", "20b2"


def node(*events: KernelEvent, model: str = H100) -> NodeFacts:
    device = PciDevice(
        slot=SLOT, vendor_id="10de", device_id=model, subsystem_id=None, class_id="030200", driver="nvidia"
    )
    log = KernelLog(source="journal", complete=True, events=events)
    return NodeFacts(
        host="n", collected_at="2026-11-20T12:00:00Z", pci=(device,), kernel_log=log, virtualization="none"
    )


def xid(number: int, time: str, message: str = "...", slot: str = SLOT) -> KernelEvent:
    when = f"2026-11-20T{time}+0000"
    return KernelEvent(kind="xid", message=message, xid=number, pci_bus_id=slot, time=when)


def nvlink(registers: str, time: str = "10:00:00", link: int = 14) -> KernelEvent:
    return xid(74, time, f"NVLink: fatal error detected on link {link}({registers})")


def judged(facts: NodeFacts) -> list[Finding]:
    return registry["gpu.xid"].findings(facts, Expectation())


def statuses(*events: KernelEvent, model: str = H100) -> list[str]:
    return [finding.status.value for finding in judged(node(*events, model=model))]


def test_a_burst_is_one_incident_led_by_the_most_severe() -> None:
    (finding,) = judged(node(xid(31, "10:00:00"), xid(79, "10:00:02"), xid(45, "10:02:50"), xid(45, "10:05:00")))
    assert (finding.status.value, finding.measured) == ("fail", 1)
    assert "Xid 79" in finding.message
    assert "Xid 31, 45" in finding.message


def test_silence_ends_a_burst_after_the_time_of_the_policy() -> None:
    events = (xid(31, "10:00:00"), xid(79, "10:10:00"))
    assert sorted(statuses(*events)) == ["fail", "warn"]
    with in_force(Overrides({"gpu.xid.incident-gap": {"default": 3600}}, "the policy")):
        assert statuses(*events) == ["fail"]


def test_gpus_are_judged_apart() -> None:
    assert statuses(xid(79, "10:00:00"), xid(79, "10:00:01", slot=OTHER)) == ["fail", "fail"]


def test_eight_hundred_lines_are_one_finding_that_counts_the_distinct_ones() -> None:
    lines = [xid(95, f"10:{at // 60:02}:{at % 60:02}", f"Uncontained: SM {at % 29}") for at in range(800)]
    (finding,) = judged(node(*lines))
    assert finding.measured == 800
    assert "800 times (29 distinct)" in finding.message


def test_an_xid_45_that_comes_again_and_again_is_no_fault() -> None:
    assert statuses(*[xid(45, f"10:{minute:02}:00") for minute in range(60)]) == ["pass"]


@pytest.mark.parametrize(
    ("numbers", "status"), [((163,), "warn"), ((163, 162), "pass"), ((162, 163), "warn"), ((163, 162, 163), "warn")]
)
def test_power_smoothing_that_is_back_cancels_its_end(numbers: tuple[int, ...], status: str) -> None:
    events = [xid(number, f"10:{10 * at:02}:00") for at, number in enumerate(numbers)]
    statuses = {finding.status.value for finding in judged(node(*events))}
    assert status in statuses
    assert statuses <= {status, "pass"}


@pytest.mark.parametrize(
    ("registers", "kinds"),
    [
        ("0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0", (RECURRING,)),
        ("0x100000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", (SECONDARY,)),
        ("0x30, 0xffffffff, 0x0, 0x0, 0x0, 0x0, 0x0", (ECC,)),
        ("0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", (MECHANICAL,)),
        ("0x600000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", (SIGNAL,)),
        ("0x0, 0x0, 0x0, 0x40000, 0x100000, 0x0, 0x0", (FABRIC, CONTINUE)),
    ],
)
def test_registers(registers: str, kinds: tuple[object, ...]) -> None:
    line = decode_registers(f"NVLink: fatal error detected on link 14({registers})")
    assert line is not None
    assert (line.link, line.kinds) == (14, kinds)


PARITY = "0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0"
SOLO = "0x2, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0"
TWICE = "0x8000000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0"


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([nvlink("0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0")], "pass"),
        ([nvlink("0x0, 0x0, 0x0, 0x0, 0x100000, 0x0, 0x0")], "warn"),
        ([nvlink(PARITY)] * 2, "warn"),
        ([nvlink(PARITY)] * 3, "fail"),
        ([nvlink(PARITY, link=link) for link in range(3)], "warn"),
        ([nvlink(TWICE)], "warn"),
        ([nvlink(TWICE)] * 2, "fail"),
        ([nvlink(SOLO)], "fail"),
        ([nvlink("0x0, 0x0, 0x2000, 0x0, 0x0, 0x0, 0x0")], "fail"),
        ([nvlink("0x80, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0")], "fail"),
        ([nvlink("0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0")], "fail"),
        ([xid(74, "10:00:00", "NVLink: no registers")], "fail"),
    ],
)
def test_xid_74_by_its_registers(events: list[KernelEvent], status: str) -> None:
    assert statuses(*events) == [status]


def test_a_consequence_is_left_to_what_came_with_it() -> None:
    (finding,) = judged(node(nvlink(SOLO), xid(79, "10:00:01")))
    assert "Xid 79" in finding.message
    (alone,) = judged(node(nvlink(SOLO), xid(31, "10:00:01")))
    assert (alone.status.value, "consequence" in alone.message) == ("warn", True)


def test_registers_of_other_generations_are_not_documented() -> None:
    assert statuses(nvlink(PARITY), model=H100) == ["warn"]
    assert statuses(nvlink(PARITY), model=A100) == ["fail"]


@pytest.mark.parametrize(
    ("number", "message", "status", "action"),
    [
        # Lines that drivers printed, by public reports; the actions are those of NVIDIA's decode table.
        (149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x00000000 0x0)", "fail", "reset_gpu"),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x025001c6 0x00000000 0x00000000)", "fail", "reset_gpu"),
        (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x00000000)", "pass", "none"),
        (149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 01 (0x00082226 0x00000001 0x00000000)", "pass", "none"),
        (145, "RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x040988e2 0x00000008 0x00000000)", "warn", "none"),
        (145, "RLW_REMAP Nonfatal XC1 i0 Link 12 (0x000988a2 0x00000001 0x00000000)", "warn", "none"),
        (145, "RLW_RXPIPE Nonfatal XC1 i0 Link 3 (0x000000c2 0x00000001 0x00000000)", "pass", "none"),
        (145, "RLW_RXPIPE Nonfatal XC1 i0 Link 3 (0x000004c2 0x00000001 0x00000000)", "fail", "reset_gpu"),
        (145, "RLW_RXPIPE Nonfatal XC1 i0 Link 3 (0x00000086 0x00000001 0x00000000)", "fail", "reset_gpu"),
        (144, "SAW_MVB Fatal XC0 i0 Link 3 (0x00000021 0x00000010 0x00000000)", "fail", "reset_gpu"),
        (144, "SAW_MVB Nonfatal XC0 i0 Link 3 (0x00000021 0x00000020 0x00000000)", "pass", "none"),
        (144, "SAW_MVB Fatal XC0 i0 Link 3 (0x00000021 0x00800000 0x00000000)", "fail", None),
        (144, "SAW_MVB Nonfatal XC0 i0 Link 3 (0x00000021 0x00800000 0x00000000)", "warn", "open_support_case"),
        (147, "a line without registers", "fail", None),
    ],
)
def test_nvlink_5_is_judged_by_its_decode_table(number: int, message: str, status: str, action: str | None) -> None:
    (finding,) = judged(node(xid(number, "10:00:00", message), model="2901"))
    assert finding.status.value == status
    assert action is None or finding.actions[0].action == action


def test_the_decode_table_has_the_actions_of_the_sheet() -> None:
    """95 rows: 45 to ignore, 42 resets, 8 by Xid 154. Units of one row are counted once, codes of all units too."""
    aliases = {"TLW_RX", "TLW_TX", "NVLPW", "NETIR_INT", "NETIR_LINK_DOWN"}
    counts = Counter(
        action.split("|")[0]
        for (_, unit, _), actions in decode_table().items()
        for action in actions.values()
        if unit not in aliases
    )
    assert counts == {"IGNORE": 45, "RESET_GPU": 42, "XID_154_EVAL": 8}
