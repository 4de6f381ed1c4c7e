"""The management controller's answers: lines as ipmitool prints them on real servers, and what is not an answer.

The sensors of the ProLiant and its log are as CollegeBoreal/Laboratoires (3202/proliant/IPMI) has them, the others as
public reports print them.
"""

import pytest
from facts_samples import answer, gpu_facts_with

from gpunode.facts.system import BmcEvent, BmcSensor
from gpunode.probe import CommandResult

DEVICE = answer("/dev/ipmi0\n")
FANS = """\
Fan Block 1      | 09h | ok  |  7.1 | 21.56 percent, Transition to Running
Fans             | 0Dh | ok  |  7.5 | 0 percent, Fully Redundant
FAN5             | 45h | ns  | 29.5 | No Reading
"""
SUPPLIES = """\
Power Supply 1   | 06h | ok  | 10.1 | 0 Watts, Presence detected, Failure detected
Power Supply 2   | 07h | ok  | 10.2 | 95 Watts, Presence detected
Power Supplies   | 08h | ok  | 10.3 | Non-Redundant: Sufficient from Redundant
"""
EVENTS = """\
   0 | 06/29/2021 | 08:18:06 | Memory #0x2b | Correctable ECC logging limit reached | Asserted
   7 | 09/08/2021 | 06:34:15 | Power Supply #0x3b | Failure detected | Asserted
  12 | 09/08/2021 | 06:40:15 | Power Supply #0x3b | Failure detected | Deasserted
   e |  Pre-Init  |0000000093| System ACPI Power State #0xd5 | S0/G0: working | Asserted
  34 | 02/25/2025 | 04:50:09 PM EST | Temperature #0x02 | Upper Critical going high | Asserted | Reading 51
fe3c | 04/10/2008 | 14:50:13 | Power Unit Power Redundancy | Fully Redundant
   9 | Linux kernel panic: nothing more
"""


def test_sensors_and_events() -> None:
    facts = gpu_facts_with(
        {
            "ipmi-devices": DEVICE,
            "ipmi-fans": answer(FANS),
            "ipmi-power-supplies": answer(SUPPLIES),
            "ipmi-events": answer(EVENTS),
        }
    )
    assert facts.bmc_access == "read"
    assert facts.bmc_fans == (
        BmcSensor(name="Fan Block 1", status="ok", reading="21.56 percent, Transition to Running"),
        BmcSensor(name="Fans", status="ok", reading="0 percent, Fully Redundant"),
        BmcSensor(name="FAN5", status="ns", reading="No Reading"),
    )
    assert (facts.bmc_power_supplies or ())[0].reading.endswith("Failure detected")
    events = facts.bmc_events or ()
    assert [event.asserted for event in events] == [True, True, False, True, True, None, None]
    assert events[1] == BmcEvent(
        sensor="Power Supply #0x3b", event="Failure detected", asserted=True, time="2021-09-08T06:34:15"
    )
    assert [events[3].time, events[4].time] == [None, "2025-02-25T16:50:09"]
    assert events[6] == BmcEvent(sensor="Linux kernel panic: nothing more", event="", asserted=None)


def test_an_empty_log_is_no_gap() -> None:
    empty = answer("", 0, "SEL has no entries")
    facts = gpu_facts_with({"ipmi-devices": DEVICE, "ipmi-fans": answer(FANS), "ipmi-events": empty})
    assert facts.bmc_events == ()


@pytest.mark.parametrize(
    ("answers", "access"),
    [
        ({"ipmi-devices": answer("")}, "no-device"),
        ({"ipmi-devices": DEVICE, "ipmi-fans": answer("", 127, "ipmitool: No such file or directory")}, "no-program"),
        (
            {
                "ipmi-devices": DEVICE,
                "ipmi-fans": answer("", 1, "Could not open device at /dev/ipmi0 or /dev/ipmi/0: Permission denied"),
            },
            "no-permission",
        ),
    ],
)
def test_a_controller_that_cannot_be_asked_has_no_sensors(answers: dict[str, CommandResult], access: str) -> None:
    facts = gpu_facts_with(answers)
    assert facts.bmc_access == access
    assert (facts.bmc_fans, facts.bmc_power_supplies, facts.bmc_events) == ((), (), ())


@pytest.mark.parametrize("bad", [answer("", timed_out=True), answer("garbage\n"), answer(FANS, truncated=True)])
def test_what_is_no_answer_is_a_gap(bad: CommandResult) -> None:
    facts = gpu_facts_with({"ipmi-devices": DEVICE, "ipmi-fans": bad})
    assert facts.gaps["bmc_fans"]
    assert facts.bmc_fans is None


def test_an_older_probe_leaves_gaps() -> None:
    gaps = gpu_facts_with({"ipmi-devices": None}).gaps
    assert {"bmc_access", "bmc_fans", "bmc_power_supplies", "bmc_events"} <= set(gaps)
