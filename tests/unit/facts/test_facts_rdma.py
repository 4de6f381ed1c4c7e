"""RDMA's character devices, the log of links, processors' sets, and the logs of earlier boots."""

import pytest
from facts_samples import answer, gpu_facts_with

from gpunode.facts import rdma
from gpunode.facts.rdma import LinkEvent, RdmaNode
from gpunode.probe import CommandResult

BOOT = "2026-11-20T09:00:00+0000 n kernel: Linux version 6.8.0-60-generic (buildd@lcy02) #1 SMP\n"
LINKS = BOOT + (
    "2026-11-20T10:00:00+0000 n kernel: mlx5_core 0000:41:00.0 enp65s0f0np0: Link down\n"
    "2026-11-20T10:00:40+0000 n kernel: mlx5_core 0000:41:00.0 enp65s0f0np0: Link up\n"
    "2026-11-20T11:00:00+0000 n systemd-networkd[5398]: ib6: Lost carrier\n"
)
VERBS, MAD = "/sys/class/infiniband_verbs/", "/sys/class/infiniband_mad/"
CPUS = "/sys/devices/system/cpu/"


def test_devices_with_and_without_their_files() -> None:
    facts = gpu_facts_with(
        {"rdma-nodes": answer("/dev/infiniband/uverbs0\tcharacter\n/dev/infiniband/issm0\tother\n")},
        {
            VERBS: "abi_version\nuverbs0\n",
            VERBS + "uverbs0/ibdev": "mlx5_0\n",
            MAD: "issm0\numad0\n",
            MAD + "umad0/ibdev": "mlx5_0\n",
            MAD + "umad0/port": "1\n",
            MAD + "issm0/ibdev": "mlx5_0\n",
        },
    )
    assert facts.rdma_nodes == (
        RdmaNode(name="uverbs0", kind="uverbs", device="mlx5_0", port=None, file=True),
        RdmaNode(name="issm0", kind="issm", device="mlx5_0", port=None, file=False),
        RdmaNode(name="umad0", kind="umad", device="mlx5_0", port=1, file=False),
    )


@pytest.mark.parametrize(("printed", "expected"), [("yes\n", True), ("no\n", False)])
def test_whether_the_kernel_lets_other_memory_register(printed: str, expected: bool) -> None:
    assert gpu_facts_with({"peer-memory": answer(printed)}).peer_memory is expected


def test_a_kernel_without_rdma_reports_nothing_of_other_memory_and_a_failed_look_is_a_gap() -> None:
    facts = gpu_facts_with({"rdma-nodes": answer("")})
    assert (facts.peer_memory, facts.gap("peer_memory")) == (None, None)
    assert gpu_facts_with({"peer-memory": answer("", 1)}).gap("peer_memory")
    assert gpu_facts_with({"peer-memory": answer("maybe\n")}).gap("peer_memory")


# The manual page of dcb-pfc (iproute2 6.1) shows this of an interface.
PFC = "pfc-cap 8 macsec-bypass off delay 4096 \nprio-pfc 0:off 1:off 2:off 3:off 4:off 5:off 6:on 7:on \n"


def test_flow_control_and_congestion_marks_by_priority() -> None:
    folder = "/sys/class/net/eth1/"
    sides = {
        f"{folder}ecn/roce_{side}/enable/{priority}": f"{int(priority in on)}\n"
        for side, on in (("np", (3, 6)), ("rp", (6,)))
        for priority in range(8)
    }
    files = {"/sys/class/net/": "eth1\neth2\n", folder + "mtu": "9000\n", "/sys/class/net/eth2/mtu": "9000\n", **sides}
    commands = {"dcb-pfc-eth1": answer(PFC), "dcb-pfc-eth2": answer("", 2)}
    facts = gpu_facts_with(commands, files)
    assert {nic.name: (nic.pfc, nic.ecn) for nic in facts.nics or ()} == {
        "eth1": ((6, 7), (6,)),
        "eth2": (None, None),
    }


def test_links_that_went_up_and_down() -> None:
    log = gpu_facts_with({"journal-links": answer(LINKS)}).link_log
    assert log is not None
    assert log.complete
    assert log.events == (
        LinkEvent(interface="enp65s0f0np0", slot="0000:41:00.0", up=False, time="2026-11-20T10:00:00+0000"),
        LinkEvent(interface="enp65s0f0np0", slot="0000:41:00.0", up=True, time="2026-11-20T10:00:40+0000"),
        LinkEvent(interface="ib6", slot=None, up=False, time="2026-11-20T11:00:00+0000"),
    )


def test_dmesg_stands_in_for_a_journal_that_shows_nothing() -> None:
    line = "2026-11-20T09:00:09,123456+00:00 mlx5_core 0000:41:00.0 enp65s0f0np0: Link up\n"
    log = gpu_facts_with({"journal-links": answer(""), "dmesg-links": answer(line)}).link_log
    assert log is not None
    assert (log.complete, len(log.events)) == (False, 1)


def test_a_log_without_a_line_is_a_gap() -> None:
    assert "as root" in gpu_facts_with({"journal-links": answer("")}).gaps["link_log"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # syslog's stamp, which names no year; the words in either case
        ("Mar  4 06:18:01 rack2-n7 systemd-networkd[871]: ib3: lost carrier", ("ib3", None, False, None)),
        ("Mar 14 06:18:06 rack2-n7 systemd-networkd[871]: ib3: Gained carrier", ("ib3", None, True, None)),
        # a dump of the kernel's ring buffer after a panic: level and seconds since the start
        ("<6>[   21.418007] mlx5_core 0000:83:00.1 ens6f1np1: Link up", ("ens6f1np1", "0000:83:00.1", True, None)),
        ("<6>[   21.418007] mlx5_core 0000:83:00.1: Port module event: module 1, Cable plugged", None),
        ("Mar 14 06:18:06 rack2-n7 systemd-networkd[871]: ib3: Gained IPv6LL", None),
    ],
)
def test_lines_of_other_logs(line: str, expected: tuple[str, str | None, bool, str | None] | None) -> None:
    event = rdma.event_of(line)
    assert (event and (event.interface, event.slot, event.up, event.time)) == expected


def test_processors() -> None:
    files = {CPUS + "online": "0-2,4\n", CPUS + "present": "0-7\n", CPUS + "possible": "0-15\n"}
    sets = gpu_facts_with({}, files | {CPUS + "smt/control": "off\n"}).cpu_sets
    assert sets is not None
    assert (sets.online, len(sets.present), len(sets.possible), sets.smt) == ((0, 1, 2, 4), 8, 16, "off")
    for bad in ("", "x\n", "5-1\n", "0-99999999\n", "0-99999\n", "0-9,0-9\n", "0-65535," * 9999):
        assert "cpu_sets" in gpu_facts_with({}, files | {CPUS + "smt/control": None, CPUS + "online": bad}).gaps


@pytest.mark.parametrize(
    ("text", "first", "cores"),
    [
        ("0,64\n", (0, 64), (0, 1, 0, 1)),
        ("0,16\n", (0, 16), (0, 1, 64, 65)),
        ("0-1\n", (0, 1), (0, 0, 64, 64)),
        ("0-7\n", tuple(range(8)), (0, 0, 64, 64)),
        ("0\n", (0,), (0, 1, 64, 65)),
        ("0,1,5\n", None, (0, 1, 64, 65)),
        ("1,65\n", None, (0, 1, 64, 65)),
        (None, None, (0, 1, 64, 65)),
    ],
)
def test_the_core_of_a_processor(text: str | None, first: tuple[int, ...] | None, cores: tuple[int, ...]) -> None:
    files = dict.fromkeys((CPUS + "online", CPUS + "present", CPUS + "possible"), "0-127\n")
    sets = gpu_facts_with({}, {**files, CPUS + "cpu0/topology/thread_siblings_list": text}).cpu_sets
    assert sets is not None
    assert sets.first_core == first
    assert tuple(sets.core_of(cpu) for cpu in (0, 1, 64, 65)) == cores


XID = "2026-11-1{day}T10:00:00+0000 n kernel: NVRM: Xid (PCI:0000:18:00): {xid}, pid=1, name=python, text\n"


def test_boots_before_this_one() -> None:
    lines = XID.format(day=3, xid=31) + BOOT.replace("-20T", "-14T") + XID.format(day=5, xid=79)
    lines += BOOT.replace("-20T", "-16T") + BOOT + XID.format(day=9, xid=48)
    boots = gpu_facts_with({"journal-xids": answer(lines)}).earlier_boots
    assert boots is not None
    assert [(boot.began, [event.xid for event in boot.events]) for boot in boots] == [
        ("2026-11-16T09:00:00+0000", []),
        ("2026-11-14T09:00:00+0000", [79]),
        (None, [31]),
    ]


@pytest.mark.parametrize("nothing", [answer(""), answer(BOOT), answer("", 127, "journalctl: No such file")])
def test_a_journal_of_this_boot_alone_has_no_earlier_one(nothing: CommandResult) -> None:
    assert gpu_facts_with({"journal-xids": nothing}).earlier_boots == ()


RULES = (
    "0:\tfrom all lookup local\n"
    "32764:\tfrom 10.9.0.7 lookup 101\n"
    "32765:\tfrom 10.9.1.0/24 to 10.0.0.0/8 lookup rail1\n"
    "32766:\tfrom all lookup main\n"
)
ROUTE = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    "rail0\t0000090A\t00000000\t1\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
)


def test_rules_by_source_and_connected_networks() -> None:
    more = {"rdma-nodes": answer(""), "ip-rules": answer(RULES)}
    routes = gpu_facts_with(more, {"/proc/net/route": ROUTE}).source_routes
    assert routes is not None
    assert routes.networks == {"rail0": ("10.9.0.0/24",)}
    assert routes.sources == ("10.9.0.7", "10.9.1.0/24")
    assert "source_routes" in gpu_facts_with({**more, "ip-rules": answer("garbage\n")}).gaps
    none = gpu_facts_with({"rdma-nodes": answer("")})
    assert (none.source_routes, "source_routes" in none.gaps) == (None, False)


def test_code_points_and_the_filter_in_force() -> None:
    net, conf = "/sys/class/net/", "/proc/sys/net/ipv4/conf/"
    files = {
        net: "eth1\neth2\n",
        f"{net}eth1/mtu": "1\n",
        f"{net}eth2/mtu": "1\n",
        f"{conf}all/rp_filter": "0\n",
        f"{conf}eth1/rp_filter": "1\n",
    }
    commands = {"dcb-app-eth1": answer("dscp-prio 26:3 CS6:6 \n"), "dcb-app-eth2": answer("")}
    # dcb-dcbx(8); a mode of no host is an empty line.
    commands |= {"dcb-dcbx-eth1": answer("host ieee \n"), "dcb-dcbx-eth2": answer("\n")}
    facts = gpu_facts_with(commands, files)
    assert {nic.name: nic.dcbx for nic in facts.nics or ()} == {"eth1": ("host", "ieee"), "eth2": ()}
    odd = gpu_facts_with({"dcb-dcbx-eth1": answer("Usage: dcb\n"), "dcb-dcbx-eth2": answer("", 1)}, files)
    assert [nic.dcbx for nic in odd.nics or ()] == [None, None]
    by_name = {nic.name: (nic.dscp, nic.filters_strictly) for nic in facts.nics or ()}
    assert by_name == {"eth1": (("26:3", "CS6:6"), True), "eth2": ((), None)}
