"""The adapters to what hands out work: only one's own drain is ended, unknown is busy, an error is not an answer."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from kube_api import Api, Json, node, pod
from slurm_double import REFUSED, Slurmctld, SlurmNode

from gpunode.change.adapters import (
    ANNOTATION,
    CommandScheduler,
    KubernetesScheduler,
    NoScheduler,
    SlurmScheduler,
    scheduler_of,
)
from gpunode.change.scheduler import Availability, Scheduler, SchedulerError
from gpunode.errors import UsageError
from gpunode.fleet.process import Completed

DRAIN_ID = "gpunode-upgrade-0123456789ab"
SHOW = """\
NodeName=gpu-1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUTot=1 CPULoad=0.36
   NodeAddr=127.0.0.1 NodeHostName=gpu-1 Version=22.05.8
   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   BootTime=2026-11-23T10:00:57 SlurmdStartTime=2026-11-23T22:20:20
"""
"""Some lines of ``scontrol show node`` of Slurm 22.05; tests/integration/test_slurm.py asks a real one."""


class Scontrol:
    """scontrol with one node."""

    def __init__(self, state: str, reason: str = "") -> None:
        self.state, self.reason, self.updates = state, reason, list[str]()

    def __call__(self, argv: Sequence[str], _: str | None) -> Completed:
        if argv[1] == "update":
            self.updates.append(" ".join(argv[2:]))
            self.state = "IDLE" if argv[3] == "State=RESUME" else f"{self.state}+DRAIN"
            self.reason = argv[4].removeprefix("Reason=") if len(argv) > 4 else ""
            return Completed(0, "", "")
        reason = f"   Reason={self.reason} [root@2026-11-23T22:33:52]\n" if self.reason else ""
        return Completed(0, SHOW.format(state=self.state) + reason, "")


@pytest.mark.parametrize(
    ("state", "reason", "service", "busy"),
    [
        ("IDLE", "", Availability.IN_SERVICE, False),
        ("ALLOCATED", "", Availability.IN_SERVICE, True),
        ("IDLE+DRAIN", DRAIN_ID, Availability.OURS, False),
        ("MIXED+DRAIN", DRAIN_ID, Availability.OURS, True),
        ("IDLE+COMPLETING+DRAIN", DRAIN_ID, Availability.OURS, True),
        ("DOWN*+DRAIN", DRAIN_ID, Availability.OURS, False),
        ("IDLE+DRAIN+REBOOT_REQUESTED", DRAIN_ID, Availability.OURS, True),
        ("DOWN+DRAIN+REBOOT_ISSUED", f"{DRAIN_ID} : reboot issued", Availability.OURS, True),
        ("DOWN", f"{DRAIN_ID} : reboot issued : reboot complete", Availability.OURS, False),
        ("DOWN", f"{DRAIN_ID} : reboot issued : reboot timed out", Availability.OURS, False),
        ("DOWN", "reboot issued : reboot complete", Availability.FOREIGN, False),
        ("DOWN", f"{DRAIN_ID} : reboot issued by root", Availability.FOREIGN, False),
        ("IDLE+DRAIN", "RMA ticket 4711", Availability.FOREIGN, False),
        ("IDLE+DRAIN", f"{DRAIN_ID} and a note", Availability.FOREIGN, False),
        ("IDLE+DRAIN", f"swap [gpu3@left] {DRAIN_ID}", Availability.FOREIGN, False),
        ("DOWN*", "Not responding", Availability.FOREIGN, False),
        ("IDLE+FAIL", "", Availability.FOREIGN, False),
        ("FUTURE", "", Availability.FOREIGN, True),
    ],
)
def test_slurm_is_read_as_it_answers(state: str, reason: str, service: Availability, busy: bool) -> None:
    scontrol = Scontrol(state, reason)
    slurm = SlurmScheduler(scontrol)
    assert slurm.state("gpu-1", DRAIN_ID).service is service
    assert bool(slurm.busy("gpu-1", DRAIN_ID)) is busy
    slurm.resume("gpu-1", DRAIN_ID)
    assert scontrol.updates == (["NodeName=gpu-1 State=RESUME"] if service is Availability.OURS else [])
    if service is Availability.FOREIGN:
        with pytest.raises(SchedulerError, match="drained by others"):
            slurm.drain("gpu-1", DRAIN_ID)
        assert scontrol.updates == []


def test_slurm_drains_once() -> None:
    scontrol = Scontrol("MIXED")
    for _ in range(2):
        SlurmScheduler(scontrol).drain("gpu-1", DRAIN_ID)
    assert scontrol.updates == [f"NodeName=gpu-1 State=DRAIN Reason={DRAIN_ID}"]


@pytest.mark.parametrize(
    ("changes", "fate", "left", "rebooting"),
    [
        ({}, "boots", "", True),
        ({}, "refused", f"scontrol reboot ASAP nextstate=DOWN gpu-1: {REFUSED}", False),
        ({"program": "(null)"}, "boots", "Slurm has no RebootProgram", False),
        ({"returns": "2"}, "boots", "with ReturnToService=2 Slurm would end the drain", False),
    ],
)
def test_slurm_is_asked_for_a_reboot_once(changes: dict[str, str], fate: str, left: str, rebooting: bool) -> None:
    control = Slurmctld({"gpu-1": SlurmNode(DRAIN_ID, drained=True)}, **changes)
    control.fate, node = fate, control.nodes["gpu-1"]
    slurm = SlurmScheduler(control.scontrol)
    for _ in range(2):
        assert slurm.reboot("gpu-1", DRAIN_ID) == left
        assert slurm.rebooting("gpu-1", DRAIN_ID) is rebooting
        node.step(fate)
    for _ in range(10):
        node.step(fate)
    assert node.boots == rebooting
    assert slurm.state("gpu-1", DRAIN_ID).service is Availability.OURS
    slurm.drain("gpu-1", DRAIN_ID)
    assert (node.reason, node.drained) == (DRAIN_ID, True)
    assert not slurm.rebooting("gpu-1", DRAIN_ID)


@pytest.mark.parametrize("changes", [{}, {"program": "(null)"}, {"returns": "2"}])
def test_slurm_reboots_no_node_that_others_drained(changes: dict[str, str]) -> None:
    control = Slurmctld({"gpu-1": SlurmNode("RMA ticket 4711", drained=True)}, **changes)
    with pytest.raises(SchedulerError, match="RMA ticket 4711"):
        SlurmScheduler(control.scontrol).reboot("gpu-1", DRAIN_ID)
    assert control.nodes["gpu-1"].reboot == ""


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        (Completed(0, "requested\n", ""), ""),
        (Completed(0, "", ""), "the program reboots no nodes"),
        (Completed(2, "", "usage: drain state|drain|busy|resume NODE TOKEN\n"), "drain reboot gpu-1: usage: drain"),
    ],
)
def test_a_program_of_the_site_may_reboot(answer: Completed, left: str) -> None:
    site = CommandScheduler("drain", lambda argv, stdin: answer)  # noqa: ARG005
    assert site.reboot("gpu-1", DRAIN_ID).startswith(left)
    assert bool(site.reboot("gpu-1", DRAIN_ID)) is bool(left)
    assert NoScheduler().reboot("gpu-1", DRAIN_ID)


def test_a_program_that_hangs_may_have_requested_the_reboot() -> None:
    def hangs(argv: Sequence[str], stdin: str | None) -> Completed:
        raise SchedulerError("drain: no answer within 60 s")

    with pytest.raises(SchedulerError, match="no answer"):
        CommandScheduler("drain", hangs).reboot("gpu-1", DRAIN_ID)


@pytest.mark.parametrize(
    "answer", [Completed(1, "", "slurm_load_node error: Unable to contact slurm controller\n"), Completed(0, "", "")]
)
def test_no_answer_is_an_error(answer: Completed) -> None:
    slurm = SlurmScheduler(lambda argv, stdin: answer)  # noqa: ARG005
    for act in (slurm.state, slurm.drain, slurm.busy, slurm.resume, slurm.reboot):
        with pytest.raises(SchedulerError, match=r"gpu-1|show config"):
            act("gpu-1", DRAIN_ID)


DAEMON = pod("exporter", "DaemonSet")
STATIC = pod("etcd", "Node", annotations={"kubernetes.io/config.mirror": "hash"})
DONE = pod("job-1", "Job", "Succeeded")
SHM = pod("train", volumes=[{"name": "shm", "emptyDir": {"medium": "Memory"}}])
SCRATCH = pod("scratch", volumes=[{"name": "data", "emptyDir": {}}])
BARE = pod("notebook", None)


def kubernetes(api: Api) -> KubernetesScheduler:
    return KubernetesScheduler(api.kubectl)


def test_kubernetes_cordons_evicts_and_restores_what_was() -> None:
    before = node("gpu-1", taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}])
    api = Api(before, [DAEMON, STATIC, DONE, SHM])
    scheduler = kubernetes(api)
    assert scheduler.state("gpu-1", DRAIN_ID).service is Availability.IN_SERVICE
    scheduler.drain("gpu-1", DRAIN_ID)
    scheduler.drain("gpu-1", DRAIN_ID)
    assert (api.node["spec"]["unschedulable"], api.version) == (True, 101)
    # The node controller adds the taint.
    api.node["spec"]["taints"].append({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"})
    assert scheduler.busy("gpu-1", DRAIN_ID) == "pods: ml/train"
    assert scheduler.busy("gpu-1", DRAIN_ID) == ""
    assert api.pods == [DAEMON, STATIC, DONE]
    scheduler.resume("gpu-1", DRAIN_ID)
    version = {"metadata": {**before["metadata"], "resourceVersion": "102"}}
    assert api.node == {**before, **version}


@pytest.mark.parametrize("left", [SCRATCH, BARE], ids=["emptyDir", "no controller"])
def test_what_would_be_lost_is_waited_for(left: Json) -> None:
    api = Api(node("gpu-1"), [left])
    assert kubernetes(api).busy("gpu-1", DRAIN_ID)
    assert api.pods == [left]


def test_a_disruption_budget_is_respected() -> None:
    api = Api(node("gpu-1"), [SHM], budget=True)
    assert "disruption budget" in kubernetes(api).busy("gpu-1", DRAIN_ID)
    assert api.pods == [SHM]
    api.budget = False
    kubernetes(api).busy("gpu-1", DRAIN_ID)
    assert api.pods == []


@pytest.mark.parametrize("mark", [None, "gpunode-upgrade-ffffffffffff"])
def test_a_cordon_of_others_stays(mark: str | None) -> None:
    cordoned = node("gpu-1", unschedulable=True)
    if mark:
        cordoned["metadata"]["annotations"][ANNOTATION] = mark
    api = Api(cordoned)
    scheduler = kubernetes(api)
    assert scheduler.state("gpu-1", DRAIN_ID).service is Availability.FOREIGN
    with pytest.raises(SchedulerError, match="cordoned"):
        scheduler.drain("gpu-1", DRAIN_ID)
    scheduler.resume("gpu-1", DRAIN_ID)
    assert (api.node, api.version) == (cordoned, 100)


def test_what_others_wrote_meanwhile_is_not_lost() -> None:
    api = Api(node("gpu-1"))

    def slow(argv: Sequence[str], stdin: str | None) -> Completed:
        done = api.kubectl(argv, stdin)
        if argv[1] == "get":
            api.node = {**api.node, "metadata": {**api.node["metadata"], "resourceVersion": "150"}}
        return done

    with pytest.raises(SchedulerError, match="modified"):
        KubernetesScheduler(slow).drain("gpu-1", DRAIN_ID)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "Node"}', '{"kind": "PodList", "items": 4}', "NaN"])
def test_an_answer_of_another_shape_is_an_error(text: str) -> None:
    scheduler = KubernetesScheduler(lambda argv, stdin: Completed(0, text, ""))  # noqa: ARG005
    for act in (scheduler.state, scheduler.drain, scheduler.busy, scheduler.resume):
        with pytest.raises(SchedulerError):
            act("gpu-1", DRAIN_ID)


class Site:
    """A program of the site."""

    def __init__(self) -> None:
        self.drained = ""
        self.calls: list[str] = []

    def __call__(self, argv: Sequence[str], _: str | None) -> Completed:
        word, _name, token = argv[1:]
        self.calls.append(word)
        if word == "state":
            owner = "ours" if self.drained == token else f"foreign {self.drained}"
            return Completed(0, f"{owner if self.drained else 'in-service'}\n", "")
        if word in ("drain", "resume"):
            self.drained = token if word == "drain" else ""
        return Completed(0, "", "")


def test_a_program_of_the_site() -> None:
    site = Site()
    scheduler = CommandScheduler("/opt/drain", site)
    scheduler.drain("gpu-1", DRAIN_ID)
    scheduler.drain("gpu-1", DRAIN_ID)
    assert scheduler.busy("gpu-1", DRAIN_ID) == ""
    site.drained = "RMA ticket 4711"
    scheduler.resume("gpu-1", DRAIN_ID)
    assert scheduler.state("gpu-1", DRAIN_ID).text == "drained by others: RMA ticket 4711"
    with pytest.raises(SchedulerError, match="4711"):
        scheduler.drain("gpu-1", DRAIN_ID)
    site.drained = DRAIN_ID
    scheduler.resume("gpu-1", DRAIN_ID)
    assert site.drained == ""
    assert [call for call in site.calls if call != "state"] == ["drain", "busy", "resume"]


def test_the_option() -> None:
    schedulers: list[Scheduler] = [scheduler_of(text) for text in ("none", "slurm", "kubernetes", "command:/opt/drain")]
    assert [type(scheduler) for scheduler in schedulers] == [
        NoScheduler,
        SlurmScheduler,
        KubernetesScheduler,
        CommandScheduler,
    ]
    for wrong in ("pbs", "command:", "command", ""):
        with pytest.raises(UsageError, match="--scheduler"):
            scheduler_of(wrong)
    assert replace(NoScheduler().state("gpu-1", DRAIN_ID)).service is Availability.IN_SERVICE
