"""What the host's own tools print: kernel log, lspci, ibstat, numactl, lscpu, driver version; and single values."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from gpunode.facts.errors import ParseError
from gpunode.facts.parsers import values
from gpunode.facts.parsers.kinds import decoded, parsed

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text(encoding="utf-8")


class Meaning(NamedTuple):
    meaning: str
    severity: str
    action: str


class TestKernelLog:
    def test_all_forms(self) -> None:
        events = parsed("dmesg", sample("dmesg.mixed"))["events"]
        assert [(event["kind"], event["xid"], event["pci_bus_id"], event["time"]) for event in events] == [
            ("nouveau", None, "0000:65:00.0", "12.345678"),
            ("xid", 79, "0000:1a:00.0", "100.000003"),
            ("nvrm", None, "0000:1a:00.0", "100.000004"),
            ("sxid", 20034, "0001:c4:00.0", "200.500000"),
            ("sxid", 12028, "0001:c4:00.0", "200.600000"),
            ("xid", 43, "0000:9d:00.0", "Feb 27 10:20:30"),
            ("xid", 31, "0000:9e:00.0", "Feb 27 10:20:31"),
            ("xid", 154, "0000:9f:00.0", "2025-02-27T10:20:32,123456+00:00"),
            ("nvrm", None, None, "2025-02-27T10:20:33.000000+01:00"),
            ("xid", 48, "0000:a0:00.0", "Thu Feb 27 10:20:34 2025"),
            ("nvrm", None, "0000:1a:00.0", "9000000"),
        ]
        assert [event["severity"] for event in events if event["kind"] == "sxid"] == ["fatal", "non-fatal"]
        assert events[1]["process"] is None
        assert events[1]["message"] == "GPU has fallen off the bus."
        assert events[5]["process"] == {"pid": 4242, "name": "python3"}
        assert events[9]["process"] == {"pid": 17, "name": "a b c"}
        assert events[6]["message"] == "Ch 0000001f, engmask 00000101"

    def test_lines_with_the_time_since_the_one_before(self) -> None:
        (event,) = parsed("dmesg", "[   12.345678 <    0.000010>] NVRM: Xid (PCI:0000:1a:00): 79, x\n")["events"]
        assert event["xid"] == 79

    @pytest.mark.parametrize(
        "line", ["  [   12.345678] NVRM: Xid (PCI:0000:1a:00): 79, x", "NVRM: Xid (PCI:0000:1a:00): 79"]
    )
    def test_a_log_without_a_time_at_the_start_is_refused(self, line: str) -> None:
        """It could be the second line of a message, which users can write: no event, and not a log without one."""
        with pytest.raises(ParseError):
            parsed("dmesg", f"{line}\n")

    def test_meanings_are_handed_in(self) -> None:
        events = parsed("dmesg", sample("dmesg.mixed"), {79: Meaning("gone", "critical", "restart")})["events"]
        assert (events[1]["meaning"], events[1]["severity"], events[1]["action"]) == ("gone", "critical", "restart")
        assert events[5]["meaning"] is None

    @pytest.mark.parametrize(
        "line",
        [
            "[    1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.95.05",
            "[    1.0] Command line: BOOT_IMAGE=/vmlinuz modprobe.blacklist=nouveau nouveau.modeset=0",
            "Jun  9 03:04:05 host systemd-networkd[871]: ib3: lost carrier",
            "6,812,9120034,-;nvidia-nvswitch1: open (major=509)",
            "kern  :info  : 2025-01-21T04:41:44,283302+00:00 EXT4-fs mounted",
            "<6>[    3.141592] mlx5_core 0000:83:00.1: 126.016 Gb/s available",
        ],
    )
    def test_no_event(self, line: str) -> None:
        assert parsed("dmesg", f"{line}\n") == {"events": []}

    def test_it_may_not_read(self) -> None:
        error = parsed("dmesg", "dmesg: read kernel buffer failed: Operation not permitted\n")["error"]
        assert error["kind"] == "permission"


class TestLspci:
    def test_numbers_and_links(self) -> None:
        bridge, gpu, nic = parsed("lspci", sample("lspci.vvnn"))["devices"]
        assert gpu == {
            "slot": "0000:1a:00.0",
            "class": "3D controller",
            "class_id": "0302",
            "vendor_id": "10de",
            "device_id": "2330",
            "subsystem_id": "10de:16c1",
            "description": "NVIDIA Corporation GH100 [H100 SXM5 80GB]",
            "link": {"speed_gt_per_s": 2.5, "width": 8, "speed_max_gt_per_s": 32, "width_max": 16},
            "kernel_driver": "nvidia",
        }
        assert bridge["link"] is None
        assert (nic["link"], nic["kernel_driver"]) == (None, "mlx5_core")

    def test_names_alone(self) -> None:
        other, gpu, nic = parsed("lspci", sample("lspci.plain"))["devices"]
        assert (gpu["slot"], gpu["vendor_id"], gpu["device_id"], gpu["class_id"]) == ("01:00.0", "10de", "25b9", None)
        assert (other["class"], other["vendor_id"]) == ("VGA compatible controller", None)
        assert (nic["device_id"], nic["link"]) == (None, None)

    def test_numbers_alone(self) -> None:
        (device,) = parsed("lspci", "0000:1a:00.0 0302: 10de:2330 (rev a1)\n")["devices"]
        assert (device["class_id"], device["vendor_id"], device["device_id"]) == ("0302", "10de", "2330")

    @pytest.mark.parametrize(
        "text",
        [
            "0000:1a:00.0 3D controller [0302]: NVIDIA [10de:2330]\n0000:1b:00.0 3D controller [0302]: NVIDIA [10de:23",
            "0000:1a:00.0 3D contr",
            "-[0000:00]-+-00.0\n",
        ],
    )
    def test_refused(self, text: str) -> None:
        with pytest.raises(ParseError):
            parsed("lspci", text)


class TestIbstat:
    def test_two_adapters(self) -> None:
        answer = parsed("ibstat", sample("ibstat.two"))
        first, second = answer["cas"]
        assert (first["name"], first["type"], first["firmware"]) == ("mlx5_0", "MT4129", "28.43.1014")
        assert first["ports"] == [
            {
                "port": 1,
                "state": "Active",
                "physical_state": "LinkUp",
                "rate_gbit_per_s": 400,
                "lid": 77,
                "guid": "0x0123456789abcdee",
                "link_layer": "InfiniBand",
            }
        ]
        assert [(port["state"], port["rate_gbit_per_s"]) for port in second["ports"]] == [
            ("Down", 10),
            ("Initializing", 40),
        ]
        assert answer["messages"] == []

    def test_ibstatus(self) -> None:
        (ca,) = parsed("ibstat", sample("ibstat.status"))["cas"]
        assert [(port["state"], port["physical_state"], port["rate_gbit_per_s"]) for port in ca["ports"]] == [
            ("Active", "LinkUp", 200),
            ("Down", "Disabled", 2.5),
        ]
        assert ca["ports"][0]["lid"] == 0x33
        assert ca["ports"][0]["guid"] is None

    def test_a_listing_that_broke_off_reports_it(self) -> None:
        text = sample("ibstat.two")
        answer = parsed("ibstat", text[: text.index("\t\tRate: 40 ") + len("\t\tRate: 4")])
        assert answer["cas"][1]["ports"][1]["rate_gbit_per_s"] is None
        assert answer["messages"] == ["mlx4_0 port 2: the listing breaks off"]
        answer = parsed(
            "ibstat", text[: text.index("\tPort 2:")] + "ibpanic: [1] main: stat of IB device 'mlx5_9' failed\n"
        )
        assert answer["messages"] == [
            "ibpanic: [1] main: stat of IB device 'mlx5_9' failed",
            "mlx4_0: 1 of 2 ports are listed",
        ]

    def test_nothing_but_an_error(self) -> None:
        assert parsed("ibstat", "ibpanic: [77] main: can't init\n")["error"]["kind"] == "other"


class TestCpu:
    def test_numactl(self) -> None:
        answer = parsed("numactl", sample("numactl.three"))
        assert answer["nodes"][2] == {
            "node": 8,
            "cpus": [],
            "memory_total_mib": 97280,
            "memory_free_mib": 97003,
        }
        assert answer["distances"][2] == [82, 83, 10]

    def test_numactl_without_numa(self) -> None:
        assert parsed("numactl", "No NUMA available on this system\n")["error"]["kind"] == "other"

    def test_numactl_without_distances(self) -> None:
        text = sample("numactl.three")
        text = text[: text.index("node distances")] + "No distance information available.\n"
        assert parsed("numactl", text)["distances"] == []

    @pytest.mark.parametrize("end", ["node 8 size", "node 8 cpus", "node distances", "  8:  82", "82  83  10"])
    def test_numactl_cut(self, end: str) -> None:
        text = sample("numactl.three")
        cut = text[: text.index(end)]
        with pytest.raises(ParseError):
            parsed("numactl", cut)

    def test_lscpu(self) -> None:
        assert parsed("lscpu", sample("lscpu.modern")) == {
            "architecture": "x86_64",
            "model_name": "AMD EPYC 9654 96-Core Processor",
            "cpus": 8,
            "sockets": 2,
            "cores_per_socket": 2,
            "threads_per_core": 2,
            "nodes": [{"node": 0, "cpus": "0,1,4,5"}, {"node": 1, "cpus": "2-3,6-7"}],
        }

    def test_lscpu_as_json(self) -> None:
        nodes = [{"field": "NUMA node0 CPU(s):", "data": "0-3"}]
        entries = [
            {"field": "Architecture:", "data": "aarch64"},
            {"field": "CPU(s):", "data": "4", "children": [{"field": "On-line CPU(s) list:", "data": "0-3"}]},
            {"field": "NUMA node(s):", "data": "1", "children": nodes},
        ]
        answer = parsed("lscpu", json.dumps({"lscpu": entries}))
        assert (answer["architecture"], answer["cpus"], answer["sockets"]) == ("aarch64", 4, None)
        assert answer["nodes"] == [{"node": 0, "cpus": "0-3"}]

    @pytest.mark.parametrize("end", ["NUMA node1 CPU(s)", "-3,6-7", "6-7\n"])
    def test_lscpu_cut(self, end: str) -> None:
        text = sample("lscpu.modern")
        with pytest.raises(ParseError):
            parsed("lscpu", text[: text.index(end)])

    def test_lscpu_of_another_locale(self) -> None:
        with pytest.raises(ParseError, match="C locale"):
            parsed("lscpu", "Architektur:  x86_64\nKern(e) pro Sockel:  8\n")


class TestDriverVersion:
    def test_open(self) -> None:
        assert parsed("driver-version", sample("driver-version.open")) == {
            "version": "580.95.05",
            "flavour": "open",
            "gcc": "13.3.0",
            "built": "Tue Sep 23 10:11:16 UTC 2025",
        }

    def test_proprietary_on_arm(self) -> None:
        text = "NVRM version: NVIDIA UNIX aarch64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
        answer = parsed(
            "driver-version", text + "GCC version:  gcc version 11.4.1 20231218 (Red Hat 11.4.1-3) (GCC) \n"
        )
        assert (answer["version"], answer["flavour"], answer["gcc"]) == ("535.104.05", "proprietary", "11.4.1")

    def test_ubuntus_compiler(self) -> None:
        text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n"
        answer = parsed(
            "driver-version", text + "GCC version:  x86_64-linux-gnu-gcc-13 (Ubuntu 13.2.0-23ubuntu4) 13.2.0\n"
        )
        assert answer["gcc"] == "13.2.0"

    def test_without_date_and_compiler(self) -> None:
        text = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  565.57.01  Release Build  (root@host)  \n"
        assert parsed("driver-version", text) == {
            "version": "565.57.01",
            "flavour": "open",
            "gcc": None,
            "built": None,
        }

    @pytest.mark.parametrize(
        "date", ["Mon 03 Aug 2026 10:00:01 AM UTC", "Mo 3. Aug 10:00:01 CEST 2026", "Tue Sep  2 10:11:16 UTC 2025"]
    )
    @pytest.mark.parametrize("before", ["Release Build  (root@gpu-1)  ", "Release Build  ", ""])
    def test_the_date_is_that_of_the_builders_locale(self, date: str, before: str) -> None:
        text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  {before}{date}\n"
        assert parsed("driver-version", text)["built"] == date

    def test_a_date_that_is_cut_is_none(self) -> None:
        text = (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (a@b)  Tue Sep 23 10:1"
        )
        assert parsed("driver-version", text)["built"] is None

    def test_clang_is_no_gcc(self) -> None:
        text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n"
        assert parsed("driver-version", text + "GCC version:  clang version 18.1.3\n")["gcc"] is None
        assert parsed("driver-version", text + "GCC version:  Ubuntu clang version 18.1.3 (1ubuntu1)\n")["gcc"] is None

    @pytest.mark.parametrize(
        "text", ["NVRM version: NVIDIA UNIX x86_64 Kernel Module  525.8", "NVRM version:", "525.85.05"]
    )
    def test_refused(self, text: str) -> None:
        with pytest.raises(ParseError):
            parsed("driver-version", text)


class TestValues:
    @pytest.mark.parametrize(
        ("text", "address"),
        [
            ("00000000:1A:00.0", "0000:1a:00.0"),
            ("0000:1a:00", "0000:1a:00.0"),
            ("1a:00.1", "0000:1a:00.1"),
            ("0:1A:0", "0000:1a:00.0"),
            ("00010000:E1:00.0", "10000:e1:00.0"),
            ("N/A", None),
            ("1a:00:00:00", None),
            (None, None),
        ],
    )
    def test_bus_id(self, text: str | None, address: str | None) -> None:
        assert values.bus_id(text) == address

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("12 W", 12), ("12.50 W", 12.5), ("12", None), ("12 C", None), ("N/A", None), ("-3 W", -3), ("1e5 W", None)],
    )
    def test_a_quantity_without_its_unit_is_cut(self, text: str, expected: float | None) -> None:
        assert values.quantity(text, "W") == expected

    @pytest.mark.parametrize("text", ["N/A", "[Not Supported]", "Unknown Error", "", "[N/A]", "GPU is lost", "None"])
    def test_nothing(self, text: str) -> None:
        assert values.is_nothing(text)
        assert values.text_or_none(text) is None

    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
    def test_encodings(self, encoding: str) -> None:
        assert decoded("NVRM version: ü\n".encode(encoding)) == "NVRM version: ü\n"

    def test_bytes_that_are_no_text(self) -> None:
        assert decoded(b"a\xff\xfeb") == "a��b"
