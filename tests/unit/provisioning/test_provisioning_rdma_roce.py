"""RoCE settings of the role rdma: what is refused before any change, what is pending, and the program that sets them.

The double of dcb keeps the table of an interface as iproute2 6.1 (dcb/dcb_app.c, dcb_pfc.c, their manual pages) and
mlx5 (drivers/net/ethernet/mellanox/mlx5/core/en_dcbnl.c) do: an entry of a code point replaces the one before, and an
entry that is not the adapter's cannot be removed. Its error is iproute2's, of an interface without DCB.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from effort import effort
from hypothesis import given, settings
from test_provisioning_rdma import DEBIAN, OPEN, node

from gpunode.errors import UsageError
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.rdma import ROLE
from gpunode.provisioning.rdma_parts import DCB, ROCE_INTERFACE, ROCE_PROGRAM, ROCE_UNIT_FILE, unit_of
from gpunode.provisioning.state import NodeState

from plan_samples import planned  # isort: skip

SOURCE = Path(__file__).parents[3] / "roles/rdma/files/roce"
NIC = {"slot": "0000:1a:00.0", "driver": "mlx5_core", "state": "up", "speed_mbit_per_s": 400000, "mtu": 9000}
NOW = {"pfc": (), "dscp": (), "dcbx": ("host", "ieee")}
REQUESTED = {"roce_interfaces": ["rail0"], "roce_pfc": [3], "roce_dscp": {26: 3, 48: 6}, "roce_tos": 106}
AS_REQUESTED = {**NOW, "pfc": (3,), "dscp": ("26:3", "48:6")}


def port(tos: int | None = None) -> dict[str, Any]:
    empty = dict.fromkeys(("physical_state", "rate_gbit_per_s", "rate", "lid"))
    return {**empty, "port": 1, "state": "ACTIVE", "link_layer": "Ethernet", "cm_tos": tos}


def machine(nic: dict[str, Any] | None = None, *, tos: int | None = None, **more: Any) -> NodeState:
    """A machine with one adapter, of which dcb reports this."""
    card = {"name": "rail0", **NIC, "numa_node": 0, "carrier_changes": 0, **(NOW if nic is None else nic)}
    device = {"name": "mlx5_0", "slot": NIC["slot"], "ports": [port(tos)]}
    rdma = {**dict.fromkeys(("firmware", "board_id", "type", "numa_node")), **device}
    files = {DCB: {"kind": "file"}, **more.pop("files", {})}
    return node(*DEBIAN, files=files, **{"nics": [card], "infiniband": [rdma], "gpu_processes": [], **more})


def made(state: NodeState, settings: dict[str, Any] | None = None, **run: Any) -> Manifest:
    requested = {"state": "present", **(REQUESTED if settings is None else settings)}
    return planned("rdma", state, {"rdma": requested, "nvidia_driver": OPEN, **run})


def test_an_interface_is_set_now_and_at_each_boot() -> None:
    manifest = made(machine())
    texts = {file.path: file for file in manifest.files}
    assert texts[ROCE_PROGRAM].mode == "0755"
    command = f"/usr/bin/python3 -I {ROCE_PROGRAM} apply %I pfc=3 dscp=26:3,48:6 tos=106"
    lines = str(texts[ROCE_UNIT_FILE].content).splitlines()
    assert [f"ExecStart={command}", f"ExecReload={command}"] == [line for line in lines if line.startswith("Exec")]
    assert "WantedBy=sys-subsystem-net-devices-%i.device" in lines
    (unit,) = manifest.units
    assert (unit.name, unit.enabled, unit.state) == ("gpunode-roce@rail0.service", True, "reloaded")
    assert "mlx5 restarts the link" in manifest.notes[-1]
    # Nothing is asked for: nothing is there, and removed if it is.
    plain = made(machine(), {})
    assert {file.path: file.content for file in plain.files if file.path in (ROCE_PROGRAM, ROCE_UNIT_FILE)} == {
        ROCE_PROGRAM: None,
        ROCE_UNIT_FILE: None,
    }
    assert (plain.units, plain.commands, plain.notes) == ((), (), ())


def as_written(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """The files of a manifest as a node reports them."""
    import hashlib  # noqa: PLC0415

    return {
        file.path: {
            "kind": "file",
            "mode": file.mode,
            "owner": "root",
            "group": "root",
            "sha256": hashlib.sha256(file.data or b"").hexdigest(),
        }
        for file in manifest.files
        if file.content is not None
    }


def test_a_settled_node_has_nothing_pending_and_what_somebody_changed_is_set_again() -> None:
    files = {**as_written(made(machine())), ROLE.folder: {"kind": "folder", "mode": "0755", "entries": 1}}
    unit = {"name": unit_of("rail0"), "load": "loaded", "active": "active", "sub": "exited", "enabled": "enabled"}
    assert made(machine(AS_REQUESTED, tos=106, files=files, units=[unit])).pending_reasons == ()
    for nic, tos, words in (
        ({**AS_REQUESTED, "pfc": (3, 4)}, 106, "PFC is on 3, 4"),
        ({**AS_REQUESTED, "dscp": ("26:3", "26:4", "48:6")}, 106, "DSCP 26 has 3, 4"),
        ({**AS_REQUESTED, "dscp": ("48:6",)}, 106, "DSCP 26 has no priority"),
        (AS_REQUESTED, 0, "RDMA CM has another traffic class"),
    ):
        manifest = made(machine(nic, tos=tos, files=files, units=[unit]))
        assert manifest.pending_reasons == (f"gpunode-roce@rail0.service has to be reloaded: {words}",)
    failed = {**unit, "active": "failed", "sub": "failed"}
    assert made(machine(AS_REQUESTED, tos=106, files=files, units=[failed])).pending_reasons == (
        "gpunode-roce@rail0.service does not run",
    )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (machine(files={DCB: {"kind": "absent"}}), "/usr/sbin/dcb is not installed"),
        (machine(nics=[]), "rail0 is not a network interface of this node's hardware; there are: none"),
        (machine({**NOW, "pfc": None}), "dcb reports no flow control of rail0"),
        (machine({**NOW, "dcbx": ("lld-managed", "ieee")}), "firmware or an LLDP agent sets rail0"),
        (machine({**NOW, "dcbx": ()}), "firmware or an LLDP agent sets rail0"),
        (machine(infiniband=[]), "rdma_roce_tos: rail0 has no RDMA device"),
        (machine(gpu_processes=None), "could not be determined: run this again later"),
    ],
    ids=["no dcb", "unknown", "no DCB", "agent", "firmware", "no RDMA", "busy"],
)
def test_what_cannot_be_set_is_refused_before_any_change(state: NodeState, words: str) -> None:
    manifest = made(state)
    assert len(manifest.refusals) == 1
    assert manifest.refusals[0].startswith("roce: ")
    assert words in manifest.refusals[0]
    assert (manifest.files, manifest.units, manifest.commands, manifest.packages) == ((), (), (), None)


def test_jobs_on_the_gpus_are_not_cut_off_unless_that_is_allowed() -> None:
    assert made(machine(gpu_processes=None), preflight={"gpunode_allow_busy": True}).refusals == ()
    # The link stays where PFC stays.
    assert made(machine({**AS_REQUESTED, "dscp": ()}, gpu_processes=None)).refusals == ()
    # PFC that is not requested any more is restored, which restarts the link too.
    files = {
        ROCE_PROGRAM: {"kind": "file"},
        ROCE_UNIT_FILE: {"kind": "file"},
        "/run/gpunode/roce-rail0.json": {"kind": "file"},
    }
    (refusal,) = made(machine(AS_REQUESTED, files=files, gpu_processes=None), {**REQUESTED, "roce_pfc": []}).refusals
    assert "PFC of rail0 changes" in refusal
    twice = made(machine(), {**REQUESTED, "roce_pfc": [3, 3]})
    assert [b" pfc=3 " in (file.data or b"") for file in twice.files if file.path == ROCE_UNIT_FILE] == [True]


def test_what_is_not_requested_any_more_is_restored_by_the_program_that_set_it() -> None:
    files = {
        ROCE_PROGRAM: {"kind": "file"},
        ROCE_UNIT_FILE: {"kind": "file"},
        "/run/gpunode/roce-rail-1.json": {"kind": "file"},
    }
    unit = {"name": unit_of("rail-1"), "load": "loaded", "active": "active", "sub": "exited", "enabled": "enabled"}
    state = machine(AS_REQUESTED, tos=106, files=files, units=[unit])
    for manifest in (made(state), made(state, {}), planned("rdma", state, {"rdma": {"state": "absent"}})):
        stopped = manifest.units[0]
        assert (stopped.name, stopped.enabled, stopped.state, stopped.phase) == (
            r"gpunode-roce@rail\x2d1.service",
            False,
            "stopped",
            "before",
        )
        (command,) = manifest.commands
        assert (command.argv, command.phase) == (
            ("/usr/bin/python3", "-I", ROCE_PROGRAM, "restore", "rail-1"),
            "before",
        )
        assert "rail-1: flow control and code points have to be restored" in manifest.pending_reasons
    busy = planned(
        "rdma", state.model_copy(update={"facts": machine(gpu_processes=None).facts}), {"rdma": {"state": "absent"}}
    )
    assert (busy.files, len(busy.refusals)) == ((), 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"roce_pfc": [8]}, "rdma_roce_pfc"),
        ({"roce_pfc": [True]}, "rdma_roce_pfc"),
        ({"roce_pfc": ["3"]}, "rdma_roce_pfc"),
        ({"roce_dscp": {64: 3}}, "rdma_roce_dscp: 64 is not a code point"),
        ({"roce_dscp": {"ef": 3}}, "rdma_roce_dscp: ef is not a code point"),
        ({"roce_dscp": {26: 8}}, "rdma_roce_dscp: 26: 8 is not a priority"),
        ({"roce_dscp": {26: True}}, "rdma_roce_dscp: 26: True is not a priority"),
        ({"roce_tos": 256}, "rdma_roce_tos"),
        ({"roce_interfaces": ["rail0; reboot"]}, "is not a name of a network interface"),
        ({"roce_interfaces": ["-s"]}, "is not a name of a network interface"),
        ({"roce_interfaces": []}, "no interface has the settings rdma_roce_pfc, rdma_roce_dscp, rdma_roce_tos"),
        ({"roce_pfc": [], "roce_dscp": {}, "roce_tos": 0}, "set rdma_roce_pfc, rdma_roce_dscp or rdma_roce_tos"),
    ],
    ids=str,
)
def test_malformed_settings_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")) as problem:
        made(machine(), {**REQUESTED, **settings})
    assert "\n" not in str(problem.value)


ANY = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=20), st.floats(), st.lists(st.integers()))


@settings(max_examples=effort(60, 300), deadline=None)
@given(
    st.lists(st.one_of(st.text(max_size=20), st.sampled_from(["rail0", "rail-1", "..", "a b", "%n"])), max_size=3),
    st.one_of(ANY, st.lists(ANY, max_size=3)),
    st.dictionaries(st.one_of(st.integers(-1, 70), st.text(max_size=3)), ANY, max_size=3),
    ANY,
)
def test_no_setting_becomes_another_word_of_the_command(names: Any, pfc: Any, dscp: Any, tos: Any) -> None:
    given_ = {"roce_interfaces": names, "roce_pfc": pfc, "roce_dscp": dscp, "roce_tos": tos}
    try:
        manifest = made(machine(), given_)
    except UsageError:
        return
    text = next((file.content for file in manifest.files if file.path == ROCE_UNIT_FILE), None) or ""
    for line in (line for line in text.splitlines() if line.startswith("Exec")):
        for word in line.partition("apply %I ")[2].split():
            name, _, value = word.partition("=")
            assert name in ("pfc", "dscp", "tos")
            assert set(value) <= set("0123456789,:")
    assert all(ROCE_INTERFACE.fullmatch(name) for name in names if manifest.units)


@settings(max_examples=effort(40, 150), deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_names_that_a_node_reports_are_no_words_of_a_command(record: str, unit: str) -> None:
    state = machine(
        files={ROCE_PROGRAM: {"kind": "file"}, f"/run/gpunode/roce-{record}.json": {"kind": "file"}},
        units=[{"name": f"gpunode-roce@{unit}.service", "load": "loaded", "active": "active", "sub": "exited"}],
    )
    manifest = planned("rdma", state, {"rdma": {"state": "absent"}})
    for command in manifest.commands:
        assert all(ROCE_INTERFACE.fullmatch(name) for name in command.argv[4:])
    assert all(ROCE_INTERFACE.fullmatch(unit.name[13:-8].replace(r"\x2d", "-")) for unit in manifest.units)


# --- the program

DOUBLE = """#!{python}
import json, os, sys
words = [word for word in sys.argv[1:] if word != "-N"]
path = os.environ["DOUBLE"]
world = json.load(open(path))
world["calls"].append(" ".join(words))
what, act, name, given = words[0], words[1], words[3], words[4:]
rc = 0
if name not in world["tables"]:
    print("Attribute read: Operation not supported", file=sys.stderr)
    rc = 1
else:
    table = world["tables"][name]
    if act == "show" and what == "pfc":
        print("pfc-cap 8 macsec-bypass off delay 0 ")
        print("prio-pfc " + "".join("%d:%s " % (n, "on" if n in table["pfc"] else "off") for n in range(8)))
    elif act == "show" and table["dscp"]:
        print("dscp-prio " + "".join("%s:%s " % row for row in sorted(table["dscp"].items(), key=lambda r: int(r[0]))))
    elif what == "pfc":
        for key, _, value in (word.partition(":") for word in given[1:]):
            for n in range(8) if key == "all" else [int(key)]:
                table["pfc"] = sorted(set(table["pfc"]) - {{n}} | ({{n}} if value == "on" else set()))
    elif what == "app" and act in ("add", "del"):
        for code, _, priority in (word.partition(":") for word in given[1:]):
            if world.get("deaf"):
                pass
            elif act == "add":
                table["dscp"][code] = priority
            elif table["dscp"].get(code) == priority:
                del table["dscp"][code]
            else:
                print("Attribute write: No such file or directory", file=sys.stderr)
                rc = 1
json.dump(world, open(path, "w"))
sys.exit(rc)
"""


class World:
    """A root with one adapter, and the double of dcb."""

    def __init__(self, root: Path) -> None:
        self.root, self.file = root, root / "world.json"
        self.classes = root / "sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos"
        for folder in ("bin", "sys/class/net/rail0/device/infiniband/mlx5_0", "sys/class/net/eth0"):
            (root / folder).mkdir(parents=True)
        self.classes.parent.mkdir(parents=True)
        self.classes.write_text("0\n", encoding="ascii")
        double = root / "bin/dcb"
        double.write_text(DOUBLE.format(python=sys.executable), encoding="utf-8")
        double.chmod(0o755)
        self.write(tables={"rail0": {"pfc": [], "dscp": {"10": "1"}}}, calls=[])

    def write(self, **changes: Any) -> None:
        world = {**(self.read() if self.file.exists() else {}), **changes}
        self.file.write_text(json.dumps(world), encoding="utf-8")

    def read(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        return document

    @property
    def table(self) -> dict[str, Any]:
        return {**self.read()["tables"]["rail0"], "tos": self.classes.read_text(encoding="ascii").strip()}

    def run(self, *words: str) -> tuple[int, str]:
        self.write(calls=[])
        env = {"PATH": str(self.root / "bin"), "DOUBLE": str(self.file), "GPUNODE_ROCE_ROOT": str(self.root)}
        done = subprocess.run(
            [sys.executable, "-I", SOURCE, *words],
            env={**env, "LANG": os.environ.get("LANG", "C")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stderr

    def changes(self) -> list[str]:
        return [call for call in self.read()["calls"] if " show " not in call]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


BEFORE = {"pfc": [], "dscp": {"10": "1"}, "tos": "0"}


def test_the_program_sets_once_follows_its_settings_and_restores(world: World) -> None:
    assert world.run("apply", "rail0", "pfc=3", "dscp=10:2,26:3", "tos=106") == (0, "")
    assert world.table == {"pfc": [3], "dscp": {"10": "2", "26": "3"}, "tos": "106"}
    # Code points before the flow control of their priority.
    assert [call.partition(" dev ")[0] for call in world.changes()] == ["app del", "app add", "pfc set"]
    assert world.run("apply", "rail0", "pfc=3", "dscp=10:2,26:3", "tos=106") == (0, "")
    assert world.changes() == []
    # What is not requested any more is as it was before.
    assert world.run("apply", "rail0", "dscp=48:6") == (0, "")
    assert world.table == {"pfc": [], "dscp": {"10": "1", "48": "6"}, "tos": "0"}
    assert world.run("apply", "rail0", "dscp=48:6", "pfc=3,4")[0] == 0
    assert world.run("restore", "rail0") == (0, "")
    assert world.table == BEFORE
    assert not list((world.root / "run/gpunode").iterdir())
    assert world.run("restore", "rail0") == (0, "")
    assert world.changes() == []


def test_the_program_reports_what_the_driver_does_not_take(world: World) -> None:
    world.write(deaf=True)
    code, message = world.run("apply", "rail0", "dscp=26:3")
    assert (code, message.count("\n")) == (1, 1)
    assert "the driver did not take it: dscp is ['10:1'], not ['10:1', '26:3']" in message


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("apply", "eth0", "pfc=3"), 1, "dcb pfc show dev eth0: Attribute read: Operation not supported"),
        (("apply",), 2, "roce apply INTERFACE"),
        (("reset", "rail0"), 2, "roce apply INTERFACE"),
    ],
)
def test_the_program_names_what_it_cannot_set(world: World, words: tuple[str, ...], code: int, text: str) -> None:
    exit_code, message = world.run(*words)
    assert exit_code == code
    assert text in message
    assert world.table == BEFORE


def test_the_program_needs_dcb_and_survives_a_damaged_record(world: World) -> None:
    record = world.root / "run/gpunode/roce-rail0.json"
    record.parent.mkdir(parents=True)
    record.write_text("{", encoding="ascii")
    assert world.run("apply", "rail0", "pfc=3")[0] == 0
    assert json.loads(record.read_text(encoding="ascii"))["pfc"] == []
    (world.root / "bin/dcb").unlink()
    code, message = world.run("apply", "rail0", "pfc=4")
    assert (code, "dcb pfc show dev rail0: No such file" in message) == (1, True)
