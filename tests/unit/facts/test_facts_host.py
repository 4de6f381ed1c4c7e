"""The host: PCI, processors, memory, disks, network, settings, clock, kernel log."""

import pytest
from facts_samples import answer, gpu_facts_with

from gpunode.facts import kernel_log, settings
from gpunode.facts.disks import FileSystem
from gpunode.facts.host import Cpu, CpuFrequency, CpuNode, Machine, MemoryController
from gpunode.facts.network import Gid, IbPort
from gpunode.facts.pci import PciAcs, PciLink
from gpunode.facts.running import Process, TimeSync
from gpunode.facts.settings import EnvironmentSetting, Limit


def test_where_a_gpu_is() -> None:
    (gpu,) = gpu_facts_with().gpus_on_bus or ()
    assert gpu.link == PciLink(speed_gt_per_s=2.5, speed_max_gt_per_s=8.0, width=8, width_max=16)
    assert (gpu.numa_node, gpu.local_cpus, gpu.iommu_group, gpu.power_state) == (1, "4-7", 17, "D0")
    assert gpu.ports == ("0000:01:00.0", "0000:00:01.0")


def test_network_adapters_on_the_bus() -> None:
    (nic,) = gpu_facts_with().pci_io or ()
    assert (nic.slot, nic.driver, nic.class_id, nic.numa_node, nic.link) == (
        "0000:5e:00.0",
        "mlx5_core",
        "020700",
        None,
        None,
    )


def test_bridges() -> None:
    ports = {port.slot: port for port in gpu_facts_with().pci_ports or ()}
    assert list(ports) == ["0000:00:01.0", "0000:01:00.0", "0000:5d:00.0"]
    assert ports["0000:00:01.0"].link == PciLink(
        speed_gt_per_s=None, speed_max_gt_per_s=16.0, width=None, width_max=None
    )


def test_access_control() -> None:
    facts = gpu_facts_with()
    assert facts.pci_acs == (
        PciAcs(slot="0000:00:01.0", enabled=("SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd")),
        PciAcs(slot="0000:01:00.0", enabled=()),
    )
    assert [port.redirects for port in facts.pci_acs] == [True, False]
    hidden = answer("", 1, "the configuration space of 2 of 2 bridges cannot be seen")
    assert gpu_facts_with({"pci-acs": hidden}).gaps["pci_acs"].endswith("run the probe as root")


def test_iommu() -> None:
    iommu = gpu_facts_with().iommu
    assert iommu is not None
    assert (iommu.units, iommu.group_types) == (("dmar0",), {17: "identity"})


def test_a_bus_that_was_not_read_to_its_end_is_a_gap() -> None:
    log = answer("", 1, "pci_functions: not finished within 20 s")
    assert {"pci", "pci_io", "pci_ports", "pci_acs", "iommu"} <= set(gpu_facts_with({"probe-read": log}).gaps)


def test_machine_and_processors() -> None:
    facts = gpu_facts_with()
    assert facts.machine == Machine(
        vendor="Supermicro", product="SYS-4029GP-TRT", board=None, bios_version="3.3", bios_date="02/21/2020"
    )
    assert facts.cpu == Cpu(
        architecture="x86_64",
        model_name="Intel(R) Xeon(R) Gold 6226R CPU @ 2.90GHz",
        cpus=8,
        sockets=2,
        cores_per_socket=2,
        threads_per_core=2,
        nodes=(CpuNode(node=0, cpus="0-3"), CpuNode(node=1, cpus="4-7")),
    )
    assert facts.cpu_frequency == CpuFrequency(
        driver="intel_pstate",
        governors={"performance": 6, "powersave": 2},
        preferences={},
        idle_latencies={133: 8},
    )


@pytest.mark.parametrize(
    ("allowed", "number"),
    [("0-2,8", 4), ("5", 1), ("0-223", 224), ("3-1", None), ("0-99999", None), ("0,,2", None), ("", None)],
)
def test_processors_that_the_session_may_use(allowed: str, number: int | None) -> None:
    facts = gpu_facts_with(files={"/proc/self/status": f"Cpus_allowed_list:\t{allowed}\n"})
    assert facts.cpus_allowed == number
    assert ("cpus_allowed" in facts.gaps) is (number is None)


def test_interfaces_with_an_address_are_those_with_a_network_of_their_own() -> None:
    assert gpu_facts_with().addressed == ("bond0", "docker0", "bond0.20")
    only_default = "Iface\nppp0\t00000000\t00000000\t0001\t0\t0\t0\t00000000\t0\t0\t0\n"
    assert gpu_facts_with(files={"/proc/net/route": only_default}).addressed == ()
    assert "addressed" in gpu_facts_with(files={"/proc/net/route": "Iface\nbond0 1 2\n"}).gaps
    assert "addressed" in gpu_facts_with(files={"/proc/net/route": None}).gaps


def test_memory() -> None:
    facts = gpu_facts_with()
    assert facts.memory is not None
    assert (facts.memory.total_mib, facts.memory.swap_total_mib, facts.memory.hugepages_total) == (385024, 0, 4)
    assert (facts.memory.swap_free_mib, facts.memory.hugepage_size_kib) == (None, 2048)
    first, second = facts.numa or ()
    assert (first.node, first.cpus, first.memory_total_mib, first.distances) == (0, "0-3", 192512, (10, 21))
    assert (second.cpus, second.memory_total_mib) == ("", None)
    assert facts.memory_controllers == (
        MemoryController(name="mc0", model="Skylake Socket#0 IMC#0", corrected=12, uncorrected=None),
    )
    assert facts.transparent_hugepages == "madvise"


def test_memory_without_a_total_is_a_gap() -> None:
    assert "memory" in gpu_facts_with(files={"/proc/meminfo": "MemFree: 1 kB\n"}).gaps


def test_disks() -> None:
    facts = gpu_facts_with()
    assert [(disk.name, disk.model, disk.size_bytes, disk.rotational) for disk in facts.disks or ()] == [
        ("nvme0n1", "SAMSUNG MZQL23T8HCLS-00A07", 3840755982336, False),
        ("sda", None, 512000, None),
    ]
    (nvme,) = facts.nvmes or ()
    assert (nvme.firmware, nvme.state, nvme.slot, nvme.numa_node) == ("GDC5602Q", "live", "0000:5f:00.0", 0)
    assert (nvme.critical_warning, nvme.media_errors, nvme.percentage_used, nvme.available_spare_percent) == (
        0,
        0,
        3,
        100,
    )
    assert (nvme.temperature_c, nvme.health) == (38, "read")


@pytest.mark.parametrize(
    ("health", "state"),
    [
        (answer("", 127, "nvme: No such file"), "no-program"),
        (answer("", 1, "Permission denied"), "no-permission"),
        (answer("", 1, "Operation not permitted"), "no-permission"),
        (answer("", 1, "Input/output error"), "unknown"),
        (answer("[" * 9000), "unknown"),
        (answer("{}"), "unknown"),
        (None, "unknown"),
    ],
)
def test_health_that_was_not_reported_is_none(health: object, state: str) -> None:
    (nvme,) = gpu_facts_with({"nvme-nvme0": health}).nvmes or ()  # type: ignore[dict-item]
    assert (nvme.critical_warning, nvme.media_errors, nvme.state, nvme.health) == (None, None, "live", state)


def test_file_systems() -> None:
    root, efi, blank = gpu_facts_with().file_systems or ()
    assert root == FileSystem(mount="/", type="ext4", size_mib=258019, free_mib=78942, inodes_free_percent=97)
    assert (efi.mount, efi.inodes_free_percent) == ("/boot/efi", None)
    assert blank.mount == "/mnt/with a blank"
    none = answer("", 1, "df: no file systems processed")
    assert gpu_facts_with({"df-local": none}).file_systems == ()


def test_network() -> None:
    facts = gpu_facts_with()
    ethernet, infiniband = facts.nics or ()
    assert (ethernet.name, ethernet.slot, ethernet.driver) == ("eth0", "0000:5e:00.0", "mlx5_core")
    assert (ethernet.state, ethernet.speed_mbit_per_s, ethernet.mtu, ethernet.numa_node) == ("up", 25000, 9000, 1)
    assert (ethernet.carrier_changes, ethernet.counters) == (3, {"rx_errors": 7})
    assert (infiniband.state, infiniband.speed_mbit_per_s) == ("down", None)
    (device,) = facts.infiniband or ()
    assert (device.name, device.firmware, device.type, device.slot) == (
        "mlx5_0",
        "20.31.1014",
        "MT4123",
        "0000:5e:00.0",
    )
    assert device.ports == (
        IbPort(
            port=1,
            state="ACTIVE",
            physical_state="LinkUp",
            rate_gbit_per_s=200.0,
            rate="200 Gb/sec (4X HDR)",
            link_layer="InfiniBand",
            lid=26,
            interfaces=("ib0",),
            gids=(Gid(index=0, type="IB/RoCE v1", ipv4=False), Gid(index=3, type="RoCE v2", ipv4=True)),
            counters={"link_downed": 1, "out_of_sequence": 5},
        ),
    )


@pytest.mark.parametrize("folder", ["/sys/class/infiniband/", "/sys/class/net/", "/sys/class/nvme/", "/sys/block/"])
def test_a_folder_that_was_not_read_to_its_end_is_a_gap(folder: str) -> None:
    log = answer("", 1, f"{folder}: not finished within 20 s")
    assert [reason for reason in gpu_facts_with({"probe-read": log}).gaps.values() if folder in reason]


def test_settings() -> None:
    facts = gpu_facts_with()
    assert facts.lockdown == "integrity"
    assert facts.sysctl == {"vm.swappiness": "60", "net.ipv4.tcp_rmem": "4096 131072 33554432"}
    assert facts.limits is not None
    assert facts.limits.defaults == {"memlock": "8388608", "nofile": "524288"}
    assert facts.limits.settings == (
        Limit(path="/etc/security/limits.conf", domain="*", type="soft", item="memlock", value="unlimited"),
        Limit(path="/etc/security/limits.d/90-gpu.conf", domain="@gpu", type="-", item="nofile", value="1048576"),
    )
    assert [(setting.path, setting.value) for setting in facts.boot_settings or ()] == [
        ("/usr/lib/sysctl.d/50-default.conf", "60"),
        ("/etc/sysctl.d/90-gpunode.conf", "10"),
    ]
    assert facts.environment == (
        EnvironmentSetting(path="/etc/environment", name="CUDA_LAUNCH_BLOCKING", value="1"),
        EnvironmentSetting(path="systemd", name="NCCL_DEBUG", value="INFO"),
    )
    assert gpu_facts_with(files={"/sys/kernel/security/lockdown": None}).lockdown == "none"


def test_limits_that_pam_does_not_understand_are_left_out() -> None:
    assert settings.parse_limits("* hard\n* both nofile 1\n#* hard nofile 1\n", "x") == ()


def test_clock_and_load() -> None:
    facts = gpu_facts_with()
    assert facts.time_sync == TimeSync(
        synchronized=True, service="chrony.service", offset_s=-0.000012, timezone="Etc/UTC"
    )
    assert (facts.uptime_s, facts.load_1min) == (3600.5, 4.66)
    old = gpu_facts_with({"timedatectl": answer("", 127), "chronyc-tracking": answer("506 Cannot talk to daemon", 1)})
    assert old.time_sync == TimeSync(synchronized=None, service="chrony.service", offset_s=None, timezone=None)


def test_units_with_their_past_and_limits() -> None:
    (unit,) = [unit for unit in gpu_facts_with().units or () if unit.name == "chrony.service"]
    assert (unit.since, unit.restarts) == ("Fri 2026-11-20 09:00:01 UTC", 2)
    assert unit.limits == {"nofile": "524288", "memlock": "infinity"}


def test_processes_that_are_stuck() -> None:
    assert gpu_facts_with().stuck_processes == (
        Process(pid=77, name="dd", waits_in="io_schedule"),
        Process(pid=78, name="nvidia-smi", waits_in=None),
    )


def test_the_journal_comes_first() -> None:
    log = gpu_facts_with().kernel_log
    assert log is not None
    assert (log.source, log.complete) == ("journal", True)
    assert [(event.kind, event.xid, event.pci_bus_id, event.pid, event.fatal) for event in log.events] == [
        ("xid", 79, "0000:00:1e.0", None, None),
        ("aer", None, "0000:00:01.0", None, False),
        ("oom", None, None, 4242, None),
        ("mce", None, None, None, None),
    ]
    assert log.events[1].time == "2026-11-20T09:10:01+0000"
    assert log.events[2].message == "Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB"


@pytest.mark.parametrize(
    "journal", [answer(""), answer("", 1, "No journal files were opened"), answer("", timed_out=True)]
)
def test_dmesg_stands_in_for_the_journal(journal: object) -> None:
    message = "nvidia-nvswitch3: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
    line = f"2026-11-20T09:10:00,000000+00:00 {message}\n"
    log = gpu_facts_with({"journal-kernel": journal, "dmesg": answer(line)}).kernel_log  # type: ignore[dict-item]
    assert log is not None
    assert (log.source, log.complete) == ("dmesg", False)
    assert [(event.kind, event.xid, event.fatal) for event in log.events] == [("sxid", 20034, True)]


def test_the_log_of_simulated_hardware_is_marked_so() -> None:
    first = "2026-11-20T09:00:00,000000+00:00 Linux version 6.1.0-56-cloud-amd64 (gpunode-lab) #1 SMP PREEMPT_DYNAMIC\n"
    log = kernel_log.parse(first, "dmesg")
    assert (log.complete, log.simulated) == (True, True)
    log = kernel_log.parse(first.replace("gpunode-lab", "debian-kernel@lists.debian.org"), "dmesg")
    assert (log.complete, log.simulated) == (True, False)


def test_a_log_that_may_not_be_read_is_a_gap() -> None:
    refused = answer("", 1, "dmesg: read kernel buffer failed: Operation not permitted")
    facts = gpu_facts_with({"journal-kernel": answer("", 1), "dmesg": refused})
    assert "Operation not permitted" in facts.gaps["kernel_log"]


def test_an_uncorrected_pcie_error_is_fatal() -> None:
    message = "nvidia 0000:1a:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer"
    line = f"2026-11-20T09:10:00+0000 n kernel: {message}\n"
    (event,) = kernel_log.parse(line, "journal").events
    assert (event.kind, event.fatal, event.pci_bus_id) == ("aer", True, "0000:1a:00.0")


@pytest.mark.parametrize("text", ["Architecture:\nCPU(s): 4\n", "Architecture: x86_64\nCPU(s): x\n"])
def test_processors_without_a_value_are_a_gap(text: str) -> None:
    facts = gpu_facts_with({"lscpu": answer(text)})
    assert facts.cpu is None
    assert "cpu" in facts.gaps
