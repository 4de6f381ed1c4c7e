"""Operating system, PCI bus, units, secure boot, disk and the management controller's answers."""

import pytest
from facts_samples import UEVENT, answer, facts_with, gpu_facts_with

from gpunode.facts import pci, running, system
from gpunode.facts.errors import ParseError
from gpunode.facts.running import Unit
from gpunode.facts.system import BmcEvent, BmcSensor, OperatingSystem
from gpunode.probe import CommandResult

EFIVARS = "/sys/firmware/efi/efivars/"
SECURE_BOOT = f"{EFIVARS}SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def test_os_release_of_other_systems() -> None:
    text = (
        '# comment\nNAME="Rocky Linux"\nID=\'rocky\'\nVERSION_ID="9.4"\nID_LIKE="rhel centos fedora"\nX="a \\"b\\""\n'
    )
    assert system.parse_os_release(text) == OperatingSystem(
        id="rocky", version_id="9.4", codename=None, pretty_name=None, id_like=("rhel", "centos", "fedora")
    )


def test_the_second_os_release_stands_in() -> None:
    facts = facts_with(files={"/etc/os-release": None, "/usr/lib/os-release": "ID=ubuntu\n"})
    assert facts.os is not None
    assert facts.os.id == "ubuntu"
    assert facts_with(files={"/etc/os-release": None, "/usr/lib/os-release": None}).gaps["os"]
    assert facts_with(files={"/etc/os-release": "\n"}).gaps["os"]


def test_pci_functions_of_nvidia() -> None:
    device = pci.parse_uevent(UEVENT, "0000:00:1E.0")
    assert (device.slot, device.class_id, device.is_nvidia_gpu) == ("0000:00:1e.0", "030200", True)
    switch = pci.parse_uevent("PCI_CLASS=68000\nPCI_ID=10DE:22A3\nPCI_SUBSYS_ID=10DE:1796\n", "0000:05:00.0")
    assert (switch.class_id, switch.driver, switch.is_nvidia_gpu) == ("068000", None, False)


@pytest.mark.parametrize("text", ["", "PCI_ID=10DE:22A3\n", "PCI_CLASS=30200\nPCI_ID=rubbish\n"])
def test_a_function_without_ids_is_a_gap(text: str) -> None:
    with pytest.raises(ParseError, match="PCI_ID and PCI_CLASS"):
        pci.parse_uevent(text, "0000:00:1e.0")
    assert "pci" in gpu_facts_with(files={"/sys/bus/pci/devices/0000:00:1e.0/uevent": text}).gaps


def test_an_empty_bus_is_seen_and_a_hidden_one_is_not() -> None:
    assert facts_with(files={"/sys/bus/pci/devices/": ""}).pci == ()
    assert "cannot be read" in facts_with(files={"/sys/bus/pci/devices/": None}).gaps["pci"]


def test_a_function_that_went_away_meanwhile_is_left_out() -> None:
    assert gpu_facts_with(files={"/sys/bus/pci/devices/0000:00:1e.0/uevent": None}).pci == ()


def test_failed_units_in_old_and_new_layouts() -> None:
    text = (
        "\u25cf a.service loaded failed failed The A service\n"
        "  b.mount not-found failed failed /b\n"
        "* c.timer loaded failed failed\n"
        "x d.socket loaded failed failed\n"
    )
    assert [(unit.name, unit.load) for unit in running.parse_units(text)] == [
        ("a.service", "loaded"),
        ("b.mount", "not-found"),
        ("c.timer", "loaded"),
        ("d.socket", "loaded"),
    ]


def test_units_with_a_name_that_begins_like_a_mark() -> None:
    assert running.parse_units("xrdp.service loaded failed failed xrdp daemon\n")[0].name == "xrdp.service"


def test_a_failed_unit_of_the_stack_is_reported_once() -> None:
    show = (
        "Id=nvidia-persistenced.service\nLoadState=loaded\nActiveState=failed\nSubState=failed\nUnitFileState=enabled\n"
    )
    failed = "nvidia-persistenced.service loaded failed failed NVIDIA Persistence Daemon\n"
    facts = gpu_facts_with({"systemctl-units": answer(show), "systemctl-failed": answer(failed)})
    assert facts.units == (
        Unit(name="nvidia-persistenced.service", load="loaded", active="failed", sub="failed", enabled="enabled"),
    )


@pytest.mark.parametrize(
    "commands",
    [
        {"systemctl-failed": answer("only three words\n")},
        {"systemctl-units": answer("")},
        {"systemctl-units": answer("Id=x\n")},
        {"systemctl-failed": answer("", 1, "Failed to connect to bus", "systemctl")},
    ],
)
def test_units_that_cannot_be_determined_are_a_gap(commands: dict[str, CommandResult]) -> None:
    facts = gpu_facts_with(commands)
    assert facts.units is None
    assert facts.gaps["units"]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({SECURE_BOOT: "\x06\x00\x00\x00\x01"}, True),
        ({SECURE_BOOT: "\x06\x00\x00\x00\x00"}, False),
        ({SECURE_BOOT: None}, False),
        ({"/sys/firmware/": "acpi\nmemmap\n"}, False),
        ({SECURE_BOOT: ""}, None),
        ({EFIVARS: ""}, None),
        ({"/sys/firmware/": ""}, None),
        ({"/sys/firmware/": None}, None),
    ],
)
def test_secure_boot(files: dict[str, str | None], expected: bool | None) -> None:
    facts = gpu_facts_with(files=files)
    assert facts.secure_boot is expected
    assert ("secure_boot" in facts.gaps) is (expected is None)


def test_disk_space_by_path() -> None:
    text = (
        "Filesystem     1024-blocks     Used Available Capacity Mounted on\n"
        "/dev/sda2         10240000  9000000   1024000      90% /\n"
        "//nas/a share      2048000    48000   2000000       3% /boot\n"
    )
    facts = facts_with({"df": answer(text, 0, "", "df", "-Pk", "/", "/boot")})
    assert facts.disk_free_mib == {"/": 1000, "/boot": 1953}
    cut = facts_with({"df": answer(text, 0, "", "df", "-Pk", "/", "/boot", "/var")})
    assert "expected 3 lines" in cut.gaps["disk_free_mib"]


def test_virtualization() -> None:
    assert facts_with({"systemd-detect-virt": answer("kvm\n")}).virtualization == "kvm"
    assert facts_with({"systemd-detect-virt": answer("none\n", 1)}).virtualization == "none"
    missing = facts_with({"systemd-detect-virt": answer("", 127, "", "systemd-detect-virt")})
    assert missing.gaps["virtualization"] == "systemd-detect-virt is not installed"


@pytest.mark.parametrize(
    ("lscpu", "signs", "virtualization"),
    [
        ("Hypervisor vendor:   KVM\nVirtualization type: full\n", "/.dockerenv\n", "kvm"),
        ("Hypervisor vendor:   Xen\nVirtualization type: para\n", "", "xen"),
        ("Hypervisor vendor:   bhyve\nVirtualization type: full\n", "", "vm-other"),
        # The first domain of Xen, and a machine that can have guests, are none.
        ("Hypervisor vendor:   Xen\nVirtualization type: none\n", "", None),
        ("Virtualization:   VT-x\n", "/usr/bin/nvidia-smi\n", None),
        ("", "/usr/bin/nvidia-smi\n/.dockerenv\n", "docker"),
        ("", "/run/.containerenv\n", "podman"),
        ("", "/run/systemd/container\n", "container-other"),
        (None, None, None),
    ],
)
def test_virtualization_without_its_tool(lscpu: str | None, signs: str | None, virtualization: str | None) -> None:
    texts = {"lscpu": lscpu, "signs": signs}
    answers = {name: answer(text) for name, text in texts.items() if text is not None}
    node = facts_with({"systemd-detect-virt": answer("", 127, "", "systemd-detect-virt"), **answers})
    assert node.virtualization == virtualization
    assert node.gap("virtualization") == (None if virtualization else "systemd-detect-virt is not installed")


def test_words_of_the_node_carry_no_control_codes() -> None:
    facts = facts_with({"dkms-status": answer("\x1b[31mred\n")})
    assert "\x1b" not in facts.gaps["dkms"]


@pytest.mark.parametrize("release", ["6.1.0-99{{1}}", "6.1;id", "6.1/x", "6.1\x1b[2J", "9" * 300])
def test_a_kernel_release_that_is_no_word_is_a_gap(release: str) -> None:
    facts = facts_with({"uname": answer(f"Linux {release} x86_64\n")})
    assert "expected a kernel release" in facts.gaps["kernels"]
    assert "expected a kernel release" in facts.gaps["architecture"]


def test_a_folder_that_is_no_kernel_is_left_out() -> None:
    name = "6.1.0-99{{1}}"
    files = {"/lib/modules/": f"{name}\n", f"/lib/modules/{name}/": "kernel\n", f"/lib/modules/{name}/build/": None}
    facts = facts_with({"uname": answer("Linux 6.1.0-9-amd64 x86_64\n")}, files)
    assert [kernel.release for kernel in facts.kernels or ()] == ["6.1.0-9-amd64"]


# The sensors of the ProLiant and its log are as CollegeBoreal/Laboratoires (3202/proliant/IPMI) has them, the others as
# public reports print them.
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
