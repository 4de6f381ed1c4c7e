"""The role slurm_node: gres.conf from facts, when slurmd restarts, and what is refused."""

from base64 import b64encode
from typing import Any

import pytest
from node_samples import by_path, file, node
from plan_samples import context_of, settings_of

from gpunode.errors import UsageError
from gpunode.facts.pci import PciDevice
from gpunode.provisioning import slurm_gres, slurm_node
from gpunode.provisioning.manifest import Manifest, compared
from gpunode.provisioning.state import NodeState

H100, L40S = "2330", "26b9"
CONF = """\
ClusterName=test
SlurmctldHost=head
GresTypes=gpu
TaskPlugin=task/affinity,task/cgroup
Prolog=/usr/local/sbin/gpunode-prolog
HealthCheckProgram=/usr/local/sbin/gpunode-prolog
RebootProgram=/usr/local/sbin/gpunode-reboot
NodeName=gpu[01-04] Sockets=2 CoresPerSocket=4 ThreadsPerCore=2 Gres=gpu:h100:2
"""
CPU = {"architecture": "x86_64", "model_name": "x", "cpus": 16, "sockets": 2, "cores_per_socket": 4}
SETS = {"online": range(16), "present": range(16), "possible": range(16), "smt": "on", "first_core": (0, 8)}
# Two threads of a core are 8 apart: node 0 has the cores of processors 0-3, node 1 those of 4-7.
NUMA = [
    {"node": at, "cpus": cpus, "memory_total_mib": 1, "memory_free_mib": 1, "distances": [10, 20]}
    for at, cpus in enumerate(("0-3,8-11", "4-7,12-15"))
]


def gpu(slot: str, device: str = H100, cpus: str = "0-3,8-11") -> dict[str, Any]:
    row = {"slot": slot, "vendor_id": "10de", "device_id": device, "subsystem_id": None, "class_id": "030200"}
    return {**row, "driver": "nvidia", "local_cpus": cpus}


def driver_gpu(slot: str, minor: int | None) -> dict[str, Any]:
    return {"slot": slot, "model": None, "uuid": None, "minor": minor, "excluded": False, "firmware": None}


# The device files are in another order than the addresses.
TWO = [gpu("0000:18:00.0"), gpu("0000:9a:00.0", cpus="4-7,12-15")]
MINORS = [driver_gpu("0000:18:00.0", 1), driver_gpu("0000:9a:00.0", 0)]


def smi(*, mig: bool = False, links: str = "NV18") -> dict[str, Any]:
    gpus = [
        {"index": at, "pci_bus_id": device["slot"], "mig_mode": mig, "processes": []} for at, device in enumerate(TWO)
    ]
    names = ["GPU0", "GPU1"]
    matrix = {name: {other: "X" if name == other else links for other in names} for name in names}
    topology = {"gpus": names, "nics": [], "nic_names": {}, "links": matrix, "cpu_affinity": {}, "numa_affinity": {}}
    return {"smi": {"document": {"driver_version": "580", "gpus": gpus}}, "topology": {"document": topology}}


def state(texts: dict[str, str] | None = None, facts: dict[str, Any] | None = None, **more: Any) -> NodeState:
    known = {
        "own_name": {"name": "gpu02.example.com", "addresses": []},
        "pci": TWO,
        "driver_gpus": MINORS,
        "cpu": {**CPU, "threads_per_core": 2},
        "cpu_sets": {key: list(value) if isinstance(value, range) else value for key, value in SETS.items()},
        "numa": NUMA,
        "gpu_processes": [],
        "slurm": None,
        **smi(),
    }
    return node(texts=texts or {}, facts={**known, **(facts or {})}, **more)


def plan(machine: NodeState | None = None, **changes: Any) -> Manifest:
    known = machine if machine is not None else state()
    requested = settings_of("slurm_node", **{"state": "present", "conf": CONF, **changes})
    return compared(slurm_node.ROLE.plan(known, requested, context_of()), known)


def lines(manifest: Manifest) -> list[str]:
    content = by_path(manifest, slurm_node.GRES).content
    assert content is not None
    return [line for line in content.splitlines() if not line.startswith("#")]


def test_gres_conf_has_models_devices_cores_and_links_in_the_order_of_the_addresses() -> None:
    manifest = plan()
    assert manifest.refusals == ()
    assert lines(manifest) == [
        "Name=gpu Type=h100 File=/dev/nvidia1 Cores=0-3 Links=-1,18",
        "Name=gpu Type=h100 File=/dev/nvidia0 Cores=4-7 Links=18,-1",
    ]
    cgroup = by_path(manifest, slurm_node.CGROUP).content
    assert cgroup is not None
    assert "ConstrainDevices=yes\n" in cgroup
    assert manifest.notes == ()


def test_cores_are_left_out_where_slurm_conf_has_other_processors() -> None:
    other = CONF.replace("Sockets=2 CoresPerSocket=4 ThreadsPerCore=2", "CPUs=16")
    assert lines(plan(conf=other))[0] == "Name=gpu Type=h100 File=/dev/nvidia1 Links=-1,18"
    unknown = plan(state(facts={"numa": None}))
    assert "Cores" not in "".join(lines(unknown))
    assert [note for note in unknown.notes if "has no cores" in note]


def test_gpus_without_a_type_in_slurm_conf_have_none_and_without_nvlink_no_links() -> None:
    gres = lines(plan(state(facts=smi(links="SYS")), conf=CONF.replace("gpu:h100:2", "gpu:2")))
    assert gres[0] == "Name=gpu File=/dev/nvidia1 Cores=0-3"


@pytest.mark.parametrize(
    ("device", "types", "expected"),
    [
        (H100, ("h100", "l40s"), "h100"),
        (L40S, ("h100", "L40S"), "L40S"),
        (L40S, ("h100", "a100"), None),
        (L40S, ("anything",), "anything"),
        (L40S, (), None),
        (L40S, None, "l40s"),
    ],
)
def test_a_type_is_the_one_of_slurm_conf(device: str, types: tuple[str, ...] | None, expected: str | None) -> None:
    pci = PciDevice.model_validate(gpu("0000:18:00.0", device))
    gpu_type = slurm_gres.type_of(pci, types) if types != () else None
    assert gpu_type == expected


def test_the_cores_of_a_machine_with_interleaved_processors() -> None:
    """Even processors on one socket, odd ones on the other: Slurm counts socket by socket."""
    rows = [{**NUMA[0], "cpus": "0,2,4,6"}, {**NUMA[1], "cpus": "1,3,5,7"}]
    facts = {"numa": rows, "cpu_sets": {"online": [*range(8)], "present": [*range(8)], "possible": [], "smt": "off"}}
    node_facts = state(facts=facts).facts
    assert slurm_gres.near_cores(node_facts, PciDevice.model_validate(gpu("x", cpus="1,3,5,7"))) == "4-7"
    assert slurm_gres.near_cores(node_facts, PciDevice.model_validate(gpu("x", cpus="0-99"))) is None


@pytest.mark.parametrize(
    ("facts", "changes", "words"),
    [
        ({}, {"conf": CONF.replace("gpu[01-04]", "gpu[05-08]")}, "no NodeName line for gpu02"),
        ({}, {"conf": CONF.replace("h100:2", "h100:8")}, "gives gpu02 8 GPUs, the bus has 2"),
        (smi(mig=True), {}, "MIG is on"),
        ({}, {"conf": CONF.replace("gpu:h100:2", "gpu:a100:1,gpu:l40s:1")}, "names the types a100, l40s"),
        ({}, {"conf": ""}, "no /etc/slurm/slurm.conf"),
    ],
)
def test_what_contradicts_the_node_is_refused(facts: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    refusals = plan(state(facts=facts), **changes).refusals
    assert [line for line in refusals if words in line]


def test_slurmd_waits_for_the_driver() -> None:
    manifest = plan(state(facts={"driver_gpus": [], "smi": None}))
    assert (manifest.refusals, manifest.pending_reasons, manifest.files) == ((), (), ())
    assert [note for note in manifest.notes if "waits for the driver" in note]


def test_the_number_of_gpus_does_not_change_under_jobs() -> None:
    slurm = {
        "folder": "/etc/slurm/",
        "configured": 8,
        "device_files": 8,
        "autodetect": None,
        "constrains_devices": True,
    }
    busy = state(facts={"slurm": slurm, "gpu_processes": None})
    assert [line for line in plan(busy).refusals if "Slurm would abort the jobs" in line]
    assert plan(state(facts={"slurm": slurm})).refusals == ()


def test_slurmd_starts_after_the_device_files_and_needrestart_leaves_it_alone() -> None:
    text = by_path(plan(), slurm_node.DROP_IN).content
    assert text is not None
    assert "After=nvidia-persistenced.service" in text
    assert "for file in /dev/nvidia1 /dev/nvidia0; do" in text
    assert "[ $$n -lt 120 ]" in text
    perl = by_path(plan(), slurm_node.NEEDRESTART).content
    assert perl is not None
    assert "$nrconf{override_rc}{qr(^slurmd)} = 0;" in perl


def unit(name: str) -> dict[str, Any]:
    return {"name": name, "load": "loaded", "active": "active", "sub": "running", "enabled": "enabled"}


def settled(manifest: Manifest) -> dict[str, Any]:
    files = [managed for managed in manifest.files if managed.content is not None and managed.encoding == "utf-8"]
    texts = {
        managed.path: str(managed.content)
        for managed in files
        if managed.path in (slurm_node.CONF, slurm_node.GRES, slurm_node.CGROUP)
    }
    return {
        "texts": texts,
        "files": {managed.path: file(str(managed.content), mode=managed.mode) for managed in files},
        "facts": {"units": [unit("slurmd.service"), unit("munge.service")]},
        "installed": {"slurmd": "22.05.8", "slurm-client": "22.05.8", "munge": "1"},
    }


def test_slurmd_is_restarted_only_if_a_file_that_it_reads_changes() -> None:
    first = plan()
    done = settled(first)
    assert [(unit.name, unit.state) for unit in plan(state(**done)).units] == [
        ("munge.service", "started"),
        ("slurmd.service", "started"),
    ]
    done["files"][slurm_node.GRES] = file("Name=gpu File=/dev/nvidia0\n")
    done["texts"][slurm_node.GRES] = "Name=gpu File=/dev/nvidia0\n"
    again = plan(state(**done))
    assert ("slurmd.service", "restarted") in [(unit.name, unit.state) for unit in again.units]
    # A file of others is kept beside the role's.
    assert by_path(again, slurm_node.GRES).backup


def test_a_configless_node_writes_no_files_of_slurm_and_names_the_lines_for_the_controller() -> None:
    manifest = plan(conf="", controllers=["head", "head2:6817"])
    paths = {file.path for file in manifest.files if file.content is not None}
    assert not paths & {slurm_node.CONF, slurm_node.GRES, slurm_node.CGROUP}
    text = by_path(manifest, slurm_node.DROP_IN).content
    assert text is not None
    assert 'Environment="SLURMD_OPTIONS=--conf-server head,head2:6817"' in text
    assert "ConditionPathExists=\n" in text
    assert [note for note in manifest.notes if "NodeName=gpu02 Name=gpu Type=h100-sxm" in note.replace("_", "-")], (
        manifest.notes
    )


def test_the_key_of_munge_is_in_no_diff_and_no_message() -> None:
    key = b64encode(b"k" * 128).decode()
    secret = by_path(plan(munge_key=key), slurm_node.KEY)
    assert (secret.data, secret.mode, secret.owner, secret.private) == (b"k" * 128, "0400", "munge", True)
    for wrong in ("short", "/nowhere", b64encode(b"x").decode()):
        with pytest.raises(UsageError) as caught:
            plan(munge_key=wrong)
        assert "slurm_node_munge_key" in str(caught.value)
        assert b64encode(b"x").decode() not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"controllers": ["a b"], "conf": ""},
        {"controllers": ["head"]},
        {"version": "; rm"},
        {"cgroup": {"a b": "c"}},
        {"prolog_settings": {"GPUNODE": "$(reboot)"}},
        {"wait_s": -1},
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        plan(**wrong)


def test_what_slurm_conf_does_not_call_is_a_note() -> None:
    notes = plan(conf=CONF.replace("RebootProgram", "#")).notes
    assert [note for note in notes if "RebootProgram=/usr/local/sbin/gpunode-reboot" in note]
    notes = plan(conf=CONF.replace("task/cgroup", "task/none")).notes
    assert [note for note in notes if "can open the GPUs of others" in note]


def removal(machine: NodeState) -> Manifest:
    settings = settings_of("slurm_node", state="absent", conf=CONF)
    return slurm_node.ROLE.plan(machine, settings, context_of({"slurm_node": {"state": "absent", "conf": CONF}}))


def test_a_removal_takes_the_roles_files_alone_and_waits_for_idle_gpus() -> None:
    done = settled(plan())
    gone = {file.path for file in removal(state(**done)).files if file.content is None}
    assert {slurm_node.CONF, slurm_node.GRES, slurm_node.CGROUP, slurm_node.DROP_IN, slurm_node.PROLOG} <= gone
    foreign = {**done, "texts": {slurm_node.CONF: "# other\n", slurm_node.GRES: "Name=gpu\n"}}
    assert not {slurm_node.CONF, slurm_node.GRES} & {file.path for file in removal(state(**foreign)).files}
    busy = {**done, "facts": {"gpu_processes": None}}
    assert removal(state(**busy)).refusals
