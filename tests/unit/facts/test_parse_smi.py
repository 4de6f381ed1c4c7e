"""nvidia-smi's outputs: fields, generations, faults, refusals."""

from pathlib import Path
from typing import Any

import pytest

from gpunode.facts.errors import ParseError
from gpunode.facts.parsers.kinds import parsed

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text(encoding="utf-8")


class TestXml:
    def test_a_faulty_gpu(self) -> None:
        document = parsed("nvidia-smi-xml", sample("nvidia-smi-xml.faulty"))
        gpu = document["gpus"][0]
        assert (document["driver_version"], document["cuda_version"], document["attached_gpus"]) == (
            "570.133.20",
            "12.8",
            2,
        )
        assert gpu["pci_bus_id"] == "0000:1a:00.0"
        assert (gpu["pci_device_id"], gpu["pci_subsystem_id"]) == ("10de:2330", "10de:16c1")
        assert gpu["persistence_mode"] is True
        assert gpu["mig_mode"] is False
        assert gpu["ecc"] == {
            "enabled": True,
            "pending": None,
            "volatile_corrected": 11,
            "volatile_uncorrected": 5,
            "aggregate_corrected": 44,
            "aggregate_uncorrected": 18,
            "volatile_sram_corrected": 1,
            "aggregate_sram_corrected": 4,
            "aggregate_sram_uncorrected": 11,
            "sram_threshold_exceeded": True,
        }
        assert gpu["remapped_rows"] == {"correctable": 1, "uncorrectable": 2, "pending": True, "failure": False}
        assert gpu["retired_pages"] == {"single_bit": None, "double_bit": None, "pending": None}
        assert gpu["pcie"] == {
            "gen_current": 3,
            "gen_max": 4,
            "gen_max_device": 5,
            "width_current": 8,
            "width_max": 16,
            "replays": 7,
        }
        assert gpu["throttle_reasons"] == ["hw_slowdown", "hw_thermal_slowdown"]
        assert (gpu["power_w"], gpu["power_limit_w"], gpu["power_default_limit_w"]) == (512.25, 650.0, 700.0)
        assert (gpu["temperature_c"], gpu["memory_temperature_c"]) == (71, 79)
        assert (gpu["slowdown_temperature_c"], gpu["slowdown_tlimit_c"]) == (None, -2)
        assert gpu["clocks_mhz"] == {"sm": 346, "memory": 2619, "graphics": 345}
        assert gpu["application_clocks_mhz"] == {"graphics": None, "memory": None}
        assert gpu["recovery_action"] == "GPU Reset"
        assert gpu["fabric"]["clique_id"] == 12
        assert gpu["fabric"]["health"]["bandwidth"] == "Degraded"
        assert gpu["processes"] == [
            {"pid": 4711, "name": 'python3 -c "a < b"', "type": "C", "memory_used_mib": 1180},
        ]

    def test_unknown_error_is_a_fault_only_where_a_field_carries_one(self) -> None:
        gpus = parsed("nvidia-smi-xml", sample("nvidia-smi-xml.faulty"))["gpus"]
        assert gpus[0]["errors"] == []
        assert gpus[1]["errors"] == ["GPU is lost", "Unknown Error", "ERR!"]

    def test_a_lost_gpu_is_null_not_zero(self) -> None:
        gpu = parsed("nvidia-smi-xml", sample("nvidia-smi-xml.faulty"))["gpus"][1]
        assert gpu["pci_bus_id"] == "0000:3b:00.0"
        assert (gpu["serial"], gpu["uuid"], gpu["name"], gpu["temperature_c"]) == (None, None, None, None)
        assert gpu["processes"] is None
        assert gpu["throttle_reasons"] is None
        assert set(gpu["pcie"].values()) == {None}

    def test_kepler_with_driver_375(self) -> None:
        gpu = parsed("nvidia-smi-xml", sample("nvidia-smi-xml.kepler"))["gpus"][0]
        assert gpu["ecc"]["volatile_corrected"] == 6
        assert gpu["ecc"]["volatile_uncorrected"] == 2, "no total is printed: the sum of the known parts"
        assert gpu["ecc"]["aggregate_corrected"] is None
        assert gpu["retired_pages"] == {"single_bit": 8, "double_bit": 1, "pending": True}
        assert gpu["power_limit_w"] == 120.0, "the enforced one"
        assert gpu["throttle_reasons"] == ["gpu_idle"]
        assert gpu["application_clocks_mhz"] == {"graphics": 562, "memory": 2505}
        assert gpu["processes"] == []

    def test_nothing_active_is_an_empty_list(self) -> None:
        text = sample("nvidia-smi-xml.kepler").replace(">Active<", ">Not Active<")
        assert parsed("nvidia-smi-xml", text)["gpus"][0]["throttle_reasons"] == []

    def test_mig_devices(self) -> None:
        devices = (
            "<mig_mode><current_mig>Enabled</current_mig></mig_mode><mig_devices><mig_device><index>0</index>"
            "<gpu_instance_id>9</gpu_instance_id><compute_instance_id>1</compute_instance_id>"
            "<fb_memory_usage><total>9856 MiB</total></fb_memory_usage></mig_device></mig_devices>"
        )
        text = sample("nvidia-smi-xml.kepler").replace("<serial>", f"{devices}<serial>")
        gpu = parsed("nvidia-smi-xml", text)["gpus"][0]
        assert gpu["mig_mode"] is True
        assert gpu["mig_devices"] == [
            {"index": 0, "gpu_instance_id": 9, "compute_instance_id": 1, "memory_total_mib": 9856},
        ]

    def test_driver_610_names_its_versions_differently(self) -> None:
        text = sample("nvidia-smi-xml.kepler").replace(
            "<driver_version>375.26</driver_version>",
            "<driver_version>610.57.04 [Deprecated]</driver_version><kmd_version>610.57.04</kmd_version>"
            "<cuda_umd_version>13.3</cuda_umd_version>",
        )
        document = parsed("nvidia-smi-xml", text)
        assert (document["driver_version"], document["cuda_version"]) == ("610.57.04", "13.3")

    def test_remarks_around_the_document_are_messages(self) -> None:
        remark = "WARNING: infoROM is corrupted at gpu 0000:05:00.0"
        document = parsed("nvidia-smi-xml", f"{sample('nvidia-smi-xml.kepler')}{remark}\n")
        assert document["messages"] == [remark]

    def test_fewer_gpus_than_attached_are_reported(self) -> None:
        text = sample("nvidia-smi-xml.kepler").replace("<attached_gpus>1<", "<attached_gpus>4<")
        document = parsed("nvidia-smi-xml", text)
        assert document["attached_gpus"] == 4
        assert document["messages"] == ["1 of 4 attached GPUs are listed"]

    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: text[: len(text) // 2],
            lambda text: text.replace("nvidia_smi_log", "nvidia_smi_vgpu_log"),
            lambda text: text + text,
            lambda text: f"user@host:~$ cat log\n{text}",
            lambda text: text.replace("<gpu id", "<gpux id").replace("</gpu>", "</gpux>"),
            lambda text: text.replace("<nvidia_smi_log>", '<!DOCTYPE x [<!ENTITY a "b">]><nvidia_smi_log>'),
            lambda text: text.replace("<serial>", "<serial>&undefined;"),
        ],
    )
    def test_refused(self, damage: Any) -> None:
        with pytest.raises(ParseError):
            parsed("nvidia-smi-xml", damage(sample("nvidia-smi-xml.kepler")))

    def test_an_entity_is_refused(self) -> None:
        text = '<?xml version="1.0"?><!DOCTYPE nvidia_smi_log [<!ENTITY a "b">]><nvidia_smi_log><gpu/></nvidia_smi_log>'
        with pytest.raises(ParseError, match="entity 'a'"):
            parsed("nvidia-smi-xml", text)


@pytest.mark.parametrize(
    ("text", "kind", "nvml"),
    [
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n",
            "driver-library-mismatch",
            "580.95",
        ),
        ("No devices were found\n", "no-devices", None),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n\n",
            "driver-not-loaded",
            None,
        ),
        ("Failed to initialize NVML: Driver Not Loaded", "driver-not-loaded", None),
        ("Failed to initialize NVML: Unknown Error", "nvml-unknown", None),
        ("Failed to initialize NVML: Insufficient Permissions", "permission", None),
        ("Failed to initialize NVML: GPU access blocked by the operating system", "permission", None),
        ("Unable to determine the device handle for GPU0000:07:00.0: Unknown Error", "gpu-lost", None),
        (
            "Unable to determine the device handle for gpu 0000:02:00.0: GPU is lost.  Reboot the system",
            "gpu-lost",
            None,
        ),
        ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.", "library-missing", None),
    ],
)
def test_what_nvidia_smi_reports_of_its_failure(text: str, kind: str, nvml: str | None) -> None:
    for tool in ("xml", "q", "table", "query", "topo", "list", "nvlink"):
        error = parsed(f"nvidia-smi-{tool}", text)["error"]
        assert error == {"kind": kind, "message": text.split("\n", maxsplit=1)[0].strip(), "nvml_version": nvml}


class TestText:
    def test_fermi_with_driver_270(self) -> None:
        document = parsed("nvidia-smi-q", sample("nvidia-smi-q.fermi"))
        gpu = document["gpus"][0]
        assert document["driver_version"] == "270.41.19"
        assert gpu["pci_bus_id"] == "0000:1a:00.0"
        assert gpu["pci_device_id"] == "10de:06de"
        assert (gpu["memory_total_mib"], gpu["memory_used_mib"]) == (2687, 6)
        assert (gpu["ecc"]["volatile_corrected"], gpu["ecc"]["aggregate_uncorrected"]) == (1, 2)
        assert gpu["temperature_c"] == 47
        assert gpu["utilization_percent"] == 12
        assert gpu["clocks_mhz"] == {"sm": 101, "memory": 135, "graphics": 50}
        assert gpu["processes"] is None

    def test_pascal_with_driver_375(self) -> None:
        first, second = parsed("nvidia-smi-q", sample("nvidia-smi-q.pascal"))["gpus"]
        assert first["retired_pages"] == {"single_bit": 0, "double_bit": 1, "pending": True}
        assert first["pcie"]["replays"] == 3
        assert (first["power_w"], first["power_limit_w"]) == (10.07, 200.0)
        assert first["processes"] == [
            {"pid": 2222, "name": "./nbody: fast", "type": "C", "memory_used_mib": 331},
        ]
        assert second["pci_bus_id"] == "0000:81:00.0"
        assert second["processes"] == []
        assert second["ecc"]["enabled"] is None

    def test_sections_alone(self) -> None:
        gpus = parsed("nvidia-smi-q", sample("nvidia-smi-q.sections"))["gpus"]
        assert len(gpus) == 2, "a line 'GPU C2C Mode' is not a GPU"
        assert gpus[0]["ecc"]["volatile_uncorrected"] == 11 + 12 + 13
        assert gpus[0]["ecc"]["aggregate_uncorrected"] == 14 + 15 + 16
        assert gpus[0]["remapped_rows"]["failure"] is True
        assert gpus[1]["ecc"]["volatile_uncorrected"] == 0
        assert gpus[1]["name"] is None

    def test_a_fragment_without_head(self) -> None:
        lines = ("    Remapped Rows", "Correctable Error : 3", "Pending : Yes", "Remapping Failure Occurred : No")
        text = "\n        ".join(lines) + "\n"
        document = parsed("nvidia-smi-q", text)
        assert document["attached_gpus"] is None
        assert document["gpus"][0]["remapped_rows"] == {
            "correctable": 3,
            "uncorrectable": None,
            "pending": True,
            "failure": False,
        }

    def test_a_cut_list_of_processes_is_accepted(self) -> None:
        text = sample("nvidia-smi-q.pascal")
        whole = text[: text.index("GPU 0000:81")]
        cut = whole[: whole.index("            Name")]
        document = parsed("nvidia-smi-q", cut)
        assert document["gpus"][0]["processes"] == []

    @pytest.mark.parametrize("last", ["Clocks", "ECC Errors", "Temperature", "Max Clocks", "PCI"])
    def test_a_cut_block_is_refused(self, last: str) -> None:
        text = sample("nvidia-smi-q.pascal")
        with pytest.raises(ParseError, match="cut after"):
            parsed("nvidia-smi-q", text[: text.index(f"    {last}\n") + len(last) + 5])

    def test_a_cut_section_is_refused(self) -> None:
        text = sample("nvidia-smi-q.sections")
        with pytest.raises(ParseError, match="cut"):
            parsed("nvidia-smi-q", text[: text.rindex("            SRAM Correctable")])
        with pytest.raises(ParseError, match="cut"):
            parsed("nvidia-smi-q", text[: text.rindex("    Remapped Rows")])

    @pytest.mark.parametrize(
        ("driver", "last"),
        [("550.90.07", "Display Clock Setting"), ("390.157", "HW Slowdown"), (None, "Display Clock Setting")],
    )
    def test_reasons_of_clocks_are_whole_by_the_last_one_of_the_driver(self, driver: str | None, last: str) -> None:
        head = "" if driver is None else f"==============NVSMI LOG==============\n\nDriver Version : {driver}\n\n"
        gpu = "GPU 00000000:17:00.0\n" if head else ""
        names = ("Idle", "SW Power Cap", "HW Slowdown", "Sync Boost", "SW Thermal Slowdown", "Display Clock Setting")
        lines = [f"        {name} : Not Active\n" for name in names[: names.index(last) + 1]]
        begin = f"{head}{gpu}    ECC Mode\n        Current : Enabled\n    Clocks Event Reasons\n"
        document = parsed("nvidia-smi-q", begin + "".join(lines))
        assert document["gpus"][0]["ecc"]["enabled"] is True
        with pytest.raises(ParseError, match=r"'clocks_event_reasons' of .* found it cut"):
            parsed("nvidia-smi-q", begin + "".join(lines[:-1]))

    def test_elided_lines_are_no_cut(self) -> None:
        text = sample("nvidia-smi-q.pascal")
        document = parsed("nvidia-smi-q", text[: text.index("    Clocks\n")] + "    [...]\n")
        assert document["gpus"][0]["retired_pages"]["pending"] is True

    def test_two_logs_are_refused(self) -> None:
        with pytest.raises(ParseError, match="several"):
            parsed("nvidia-smi-q", sample("nvidia-smi-q.pascal") + sample("nvidia-smi-q.sections"))


class TestTable:
    def test_a_lost_gpu_leaves_a_gap(self) -> None:
        table = parsed("nvidia-smi-table", sample("nvidia-smi-table.lost"))
        assert [gpu["index"] for gpu in table["gpus"]] == [0, 2]
        assert table["errors"][0].endswith("GPU is lost.  Reboot the system to recover this GPU")
        assert "GPU 2 fan: ERR!" in table["errors"]
        assert "GPU 2 power: ERR!" in table["errors"]
        assert not any(error.startswith("GPU 0 ") for error in table["errors"])
        healthy, lost = table["gpus"]
        assert healthy["compute_mode"] == "E. Process"
        assert (healthy["ecc_uncorrected"], healthy["power_w"], healthy["power_limit_w"]) == (4, 31, 300)
        assert (lost["name"], lost["temperature_c"], lost["power_w"], lost["ecc_uncorrected"]) == (
            None,
            None,
            None,
            None,
        )
        assert table["processes"] == [
            {"gpu": 0, "pid": 40001, "name": "/opt/app/bin/train --gpus 1", "type": "C", "memory_used_mib": 8000},
            {"gpu": 0, "pid": 40002, "name": "render", "type": "C+G", "memory_used_mib": 4001},
        ]

    def test_driver_295(self) -> None:
        table = parsed("nvidia-smi-table", sample("nvidia-smi-table.fermi"))
        first = table["gpus"][0]
        assert (table["driver_version"], table["cuda_version"]) == ("295.49", None)
        assert (first["temperature_c"], first["power_w"], first["power_limit_w"]) == (61, 112, 225)
        assert (first["memory_used_mib"], first["memory_total_mib"]) == (42, 5375)
        assert first["ecc_uncorrected"] == 2, "the double bit errors"
        assert first["persistence_mode"] is None
        assert table["processes"] == [
            {"gpu": 0, "pid": 31415, "name": "./lattice", "type": None, "memory_used_mib": 31},
        ]

    def test_mig_that_waits_for_a_reset(self) -> None:
        text = sample("nvidia-smi-table.lost").replace("            Disabled |", "            Enabled* |")
        gpu = parsed("nvidia-smi-table", text)["gpus"][0]
        assert (gpu["mig_mode"], gpu["mig_mode_pending"]) == (False, True)

    def test_a_cut_row_is_refused(self) -> None:
        text = sample("nvidia-smi-table.lost")
        lines = text.splitlines(keepends=True)
        row = next(number for number, line in enumerate(lines) if line.startswith("|   2"))
        for end in (row + 1, row + 2):
            with pytest.raises(ParseError, match="cut"):
                parsed("nvidia-smi-table", "".join(lines[:end]))
        with pytest.raises(ParseError):
            parsed("nvidia-smi-table", "".join(lines[:row]) + lines[row][:40])
        assert len(parsed("nvidia-smi-table", "".join(lines[: row + 3]))["gpus"]) == 2

    def test_a_cut_list_of_processes_is_accepted(self) -> None:
        text = sample("nvidia-smi-table.lost")
        cut = text[: text.index("|    0   N/A  N/A     40002") + 30]
        assert [process["pid"] for process in parsed("nvidia-smi-table", cut)["processes"]] == [40001]

    def test_no_running_processes(self) -> None:
        text = sample("nvidia-smi-table.lost")
        start, end = text.index("|    0   N/A"), text.rindex("+---")
        table = parsed("nvidia-smi-table", f"{text[:start]}|  No running processes found   |\n{text[end:]}")
        assert table["processes"] == []

    def test_an_indented_table_without_head(self) -> None:
        lines = [f"    {line}" for line in sample("nvidia-smi-table.lost").splitlines()[4:]]
        table = parsed("nvidia-smi-table", "\n".join(lines))
        assert table["driver_version"] is None
        assert len(table["gpus"]) == 2


class TestQuery:
    def test_with_header_and_units(self) -> None:
        answer = parsed("nvidia-smi-query", sample("nvidia-smi-query.header"))
        first, second = answer["rows"]
        assert answer["columns"][5] == "memory.total [MiB]"
        assert first["memory.total [MiB]"] == 24576
        assert first["power.draw [W]"] == 28.75
        assert first["driver_version"] == "595.80", "a version is not a number"
        assert first["serial"] == "0012345678901", "an identifier is not a number"
        assert second["power.draw [W]"] is None
        assert second["utilization.gpu [%]"] is None
        assert second["ecc.errors.uncorrected.volatile.total"] is None
        assert second["mig.mode.current"] == "Enabled"

    def test_without_units(self) -> None:
        text = sample("nvidia-smi-query.header")
        for unit in (" MiB,", " W,", " %,"):
            text = text.replace(unit, ",")
        assert parsed("nvidia-smi-query", text) == parsed("nvidia-smi-query", sample("nvidia-smi-query.header"))

    def test_without_header(self) -> None:
        answer = parsed("nvidia-smi-query", sample("nvidia-smi-query.bare"))
        assert answer["columns"] == ["column_1", "column_2", "column_3 [MiB]", "column_4 [W]", "column_5"]
        assert answer["rows"][1]["column_4 [W]"] == 41.9

    def test_numbers_alone(self) -> None:
        assert parsed("nvidia-smi-query", "0, 24576, 3\n1, 24576, [N/A]\n")["rows"][1] == {
            "column_1": 1,
            "column_2": 24576,
            "column_3": None,
        }

    def test_a_comma_in_the_name_of_a_process(self) -> None:
        text = "pid, process_name, used_gpu_memory [MiB]\n4242, python train.py a, b, 311 MiB\n"
        assert parsed("nvidia-smi-query", text)["rows"] == [
            {"pid": 4242, "process_name": "python train.py a, b", "used_gpu_memory [MiB]": 311},
        ]

    def test_no_rows(self) -> None:
        assert parsed("nvidia-smi-query", "pid, process_name, used_gpu_memory [MiB]\n")["rows"] == []

    @pytest.mark.parametrize(
        "text",
        [
            "index, memory.total [MiB]\n0, 24576 MiB\n1\n",
            "index, memory.total [MiB]\n0, 24576 MiB\n1, 24576 Mi\n",
            "index, memory.total [MiB]\n0, 24576 MiB\nindex, memory.total [MiB]\n",
            "some words, and more of them\n",
        ],
    )
    def test_refused(self, text: str) -> None:
        with pytest.raises(ParseError):
            parsed("nvidia-smi-query", text)

    def test_an_unknown_field(self) -> None:
        error = parsed("nvidia-smi-query", 'Field "gpu.colour" is not a valid field to query.\n\n')["error"]
        assert error["kind"] == "other"


class TestTopology:
    def test_with_nics_and_colours(self) -> None:
        topology = parsed("nvidia-smi-topo", sample("nvidia-smi-topo.nics"))
        assert (topology["gpus"], topology["nics"]) == (["GPU0", "GPU1"], ["NIC0", "NIC1"])
        assert topology["nic_names"] == {"NIC0": "mlx5_0", "NIC1": "mlx5_bond_1"}
        assert topology["links"]["GPU1"] == {"GPU0": "NV18", "NIC0": "SYS", "NIC1": "PXB"}
        assert topology["links"]["NIC1"] == {"GPU0": "SYS", "GPU1": "PXB", "NIC0": "SYS"}
        assert topology["cpu_affinity"] == {"GPU0": "0-55,112-167", "GPU1": "56-111,168-223"}
        assert topology["numa_affinity"] == {"GPU0": "0", "GPU1": "1"}

    @pytest.mark.parametrize(
        "line",
        [
            "ibdev=mlx5_7 netdev=ib0 PCI=0000:1a:00.0",
            "netdev=ib0, ibdev=mlx5_7, PCI=0000:1a:00.0",
            "ibdev: mlx5_7 (ib0)",
        ],
    )
    def test_a_legend_with_fields(self, line: str) -> None:
        topology = parsed("nvidia-smi-topo", sample("nvidia-smi-topo.nics").replace("NIC0: mlx5_0", f"NIC0: {line}"))
        assert topology["nic_names"] == {"NIC0": "mlx5_7", "NIC1": "mlx5_bond_1"}
        assert topology["messages"] == []

    def test_a_legend_that_is_not_understood_is_reported(self) -> None:
        text = sample("nvidia-smi-topo.nics").replace("NIC0: mlx5_0", "NIC0: netdev=eth0 PCI=0000:1a:00.0")
        topology = parsed("nvidia-smi-topo", text)
        assert topology["nic_names"] == {"NIC1": "mlx5_bond_1"}
        assert topology["messages"] == ["the NIC legend was not read: NIC0: netdev=eth0 PCI=0000:1a:00.0"]

    def test_colours_that_lost_their_escape(self) -> None:
        text = sample("nvidia-smi-topo.nics").replace("\x1b", "")
        assert parsed("nvidia-smi-topo", text) == parsed("nvidia-smi-topo", sample("nvidia-smi-topo.nics"))

    def test_old_layout(self) -> None:
        topology = parsed("nvidia-smi-topo", sample("nvidia-smi-topo.old"))
        assert topology["nics"] == ["mlx5_0"]
        assert topology["nic_names"] == {}
        assert topology["links"]["mlx5_0"]["GPU2"] == "SOC"
        assert topology["cpu_affinity"]["GPU2"] is None, "the list was cut: -27,42-55"
        assert topology["numa_affinity"] == {"GPU0": None, "GPU1": None, "GPU2": None}

    def test_nics_of_rows_alone_are_mirrored(self) -> None:
        text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-7\nGPU1\tNV4\t X \t0-7\nNIC0\tPIX\tSYS\t\n"
        topology = parsed("nvidia-smi-topo", text)
        assert topology["nics"] == ["NIC0"]
        assert topology["links"]["GPU0"] == {"GPU1": "NV4", "NIC0": "PIX"}

    def test_blank_columns_between_blanks(self) -> None:
        text = (
            "        GPU0    GPU1    CPU Affinity    NUMA Affinity   GPU NUMA ID\n"
            "GPU0     X      PHB                     1               N/A\n"
            "GPU1    PHB      X      0-15            0               N/A\n"
        )
        topology = parsed("nvidia-smi-topo", text)
        assert topology["cpu_affinity"] == {"GPU0": None, "GPU1": "0-15"}
        assert topology["numa_affinity"] == {"GPU0": "1", "GPU1": "0"}

    @pytest.mark.parametrize(
        "text",
        [
            "\tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n",
            "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-7\n",
            "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-7\nGPU1\tNV4\n",
        ],
    )
    def test_refused(self, text: str) -> None:
        with pytest.raises(ParseError):
            parsed("nvidia-smi-topo", text)


class TestNvlink:
    def test_status(self) -> None:
        first, second, third = parsed("nvidia-smi-nvlink", sample("nvidia-smi-nvlink.status"))["gpus"]
        assert [link["active"] for link in first["links"]] == [True, False, True]
        assert [link["speed_gb_per_s"] for link in first["links"]] == [26.562, None, 26.562]
        assert (first["all_inactive"], second["all_inactive"], third["all_inactive"]) == (False, True, None)
        assert (third["index"], third["links"]) == (4, [])

    def test_errors(self) -> None:
        gpu = parsed("nvidia-smi-nvlink", sample("nvidia-smi-nvlink.errors"))["gpus"][0]
        assert [link["link"] for link in gpu["links"]] == [0, 3]
        assert gpu["links"][0]["errors"] == {"replay": 0, "recovery": 2, "crc_flit": 17, "crc_data": 1}
        assert gpu["links"][0]["active"] is None

    def test_status_and_errors_of_one_node(self) -> None:
        heading = "GPU 0: NVIDIA A100 (UUID: GPU-1)\n"
        text = f"{heading}\t Link 0: 25 GB/s\n{heading}\t Link 0: CRC Errors: 4\n"
        link = parsed("nvidia-smi-nvlink", text)["gpus"][0]["links"][0]
        assert (link["speed_gb_per_s"], link["errors"]) == (25, {"crc": 4})

    def test_counters_of_blackwell(self) -> None:
        text = (
            "GPU 0: NVIDIA B200 (UUID: GPU-1)\n\t Link 0: Tx packets: 12\n\t Link 0: Malformed packet Errors: 1\n"
            "\t Link 0: Effective BER: 15e-255\n\t Link 0: Link recovery failed events: 2\n"
        )
        errors = parsed("nvidia-smi-nvlink", text)["gpus"][0]["links"][0]["errors"]
        assert errors == {"malformed_packet": 1, "effective_ber": 15e-255, "link_recovery_failed_events": 2}

    def test_counters_of_the_physical_layer(self) -> None:
        text = (
            "GPU 0: NVIDIA B200 (UUID: GPU-1)\n\t Link 0: PLR Rcv Codes: 12\n\t Link 0: PLR Xmit Retry Blocks: N/A\n"
            "\t Link 0: FEC Errors - 0: 36140749276\n\t Link 0: Raw Errors Lane 0: 82\n\t Link 0: Rx bytes: 5\n"
        )
        assert parsed("nvidia-smi-nvlink", text)["gpus"][0]["links"][0]["errors"] == {
            "plr_rcv_codes": 12,
            "plr_xmit_retry_blocks": None,
            "fec_errors_0": 36140749276,
            "raw_errors_lane_0": 82,
        }

    @pytest.mark.parametrize("word", ["Sleep", "<sleep>"])
    def test_a_sleeping_link_is_neither_active_nor_down(self, word: str) -> None:
        text = f"GPU 0: NVIDIA B200 (UUID: GPU-1)\n\t Link 0: 50 GB/s\n\t Link 1: {word}\n\t Link 2: <inactive>\n"
        (gpu,) = parsed("nvidia-smi-nvlink", text)["gpus"]
        assert [(link["state"], link["active"]) for link in gpu["links"]] == [
            ("active", True),
            ("sleep", None),
            ("inactive", False),
        ]
        assert gpu["all_inactive"] is False

    def test_elided_lines_keep_the_numbers(self) -> None:
        text = "GPU 0: NVIDIA A100 (UUID: GPU-1)\n\t Link 0: 25 GB/s\n\t ...\n\t Link 11: 25 GB/s\n"
        assert [link["link"] for link in parsed("nvidia-smi-nvlink", text)["gpus"][0]["links"]] == [0, 11]

    @pytest.mark.parametrize(
        "line",
        [
            "Link 0, P2P is supported: true",
            "Link 0: 25 GB",
            "Link 0: 2",
            "Link 1",
            "Link 0: Remote Device 1: Link 3",
            "",
        ],
    )
    def test_refused(self, line: str) -> None:
        with pytest.raises(ParseError):
            parsed("nvidia-smi-nvlink", f"GPU 0: NVIDIA A100 (UUID: GPU-1)\n\t {line}\n")

    def test_two_machines_are_refused(self) -> None:
        text = "GPU 0: A (UUID: GPU-1)\n\t Link 0: 25 GB/s\nGPU 0: A (UUID: GPU-2)\n\t Link 0: 25 GB/s\n"
        with pytest.raises(ParseError, match="two GPUs"):
            parsed("nvidia-smi-nvlink", text)


class TestList:
    def test_mig(self) -> None:
        gpus = parsed("nvidia-smi-list", sample("nvidia-smi-list.mig"))["gpus"]
        assert [device["name"] for device in gpus[0]["mig_devices"]] == ["3g.20gb", "1g.5gb+me"]
        assert gpus[0]["mig_devices"][1]["uuid"] == "MIG-GPU-eeeeeeee-0000-0000-0000-000000000000/13/0"
        assert gpus[1]["mig_devices"] == []

    def test_a_lost_gpu_leaves_its_message(self) -> None:
        lost = "Unable to determine the device handle for gpu 0000:2A:00.0: Unknown Error"
        answer = parsed("nvidia-smi-list", f"GPU 0: A (UUID: GPU-1)\n{lost}\nGPU 2: A (UUID: GPU-3)\n")
        assert ([gpu["index"] for gpu in answer["gpus"]], answer["messages"]) == ([0, 2], [lost])
        assert parsed("nvidia-smi-list", "GPU 0: A (UUID: GPU-1)\n")["messages"] == []

    def test_serial_numbers_of_old_drivers(self) -> None:
        assert parsed("nvidia-smi-list", "GPU 0: Tesla K20Xm (S/N: 0325212000000)\n")["gpus"] == [
            {"index": 0, "name": "Tesla K20Xm", "uuid": None, "mig_devices": []},
        ]

    @pytest.mark.parametrize(
        "text", ["GPU 0: NVIDIA A100 (UUID: GPU-12", "GPU 0: A (UUID: x)\nGPU 0: A (UUID: x)\n", "x"]
    )
    def test_refused(self, text: str) -> None:
        with pytest.raises(ParseError):
            parsed("nvidia-smi-list", text)


def test_what_a_card_can_be_set_to() -> None:
    text = """<?xml version="1.0" ?><nvidia_smi_log><attached_gpus>1</attached_gpus><gpu id="00000000:18:00.0">
    <accounting_mode>Disabled</accounting_mode>
    <gpu_power_readings><default_power_limit>700.00 W</default_power_limit><min_power_limit>200.00 W</min_power_limit>
    <max_power_limit>700.00 W</max_power_limit></gpu_power_readings>
    <default_applications_clocks><graphics_clock>1980 MHz</graphics_clock><mem_clock>2619 MHz</mem_clock>
    </default_applications_clocks>
    <supported_clocks>
    <supported_mem_clock><value>2619 MHz</value><supported_graphics_clock>1980 MHz</supported_graphics_clock>
    <supported_graphics_clock>345 MHz</supported_graphics_clock></supported_mem_clock>
    <supported_mem_clock><value>1593 MHz</value><supported_graphics_clock>360 MHz</supported_graphics_clock>
    </supported_mem_clock></supported_clocks></gpu></nvidia_smi_log>"""
    gpu = parsed("nvidia-smi-xml", text)["gpus"][0]
    assert (gpu["power_min_limit_w"], gpu["power_max_limit_w"]) == (200.0, 700.0)
    assert gpu["supported_clocks_mhz"] == {"memory": [1593, 2619], "graphics_min": 345}
    assert gpu["default_application_clocks_mhz"] == {"graphics": 1980, "memory": 2619}
    assert gpu["accounting_mode"] is False
