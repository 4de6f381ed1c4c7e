"""The plan of gpu_tools: what is installed, what no repository offers, and who may profile."""

import json
from typing import Any

import pytest
from plan_samples import context_of, planned, state_of

from gpunode.errors import UsageError
from gpunode.provisioning.gpu_tools import FOLDER, LINKS, OPTIONS, RECORD, ROLE, GpuToolsResult, Venv
from gpunode.provisioning.manifest import AptChange, Manifest
from gpunode.provisioning.state import NodeState

ALL = {"htop": ["3.2.2-2"], "fio": ["3.33-3"], "linux-perf": ["6.1"], "python3-venv": ["3.11"]}
TOOLS = ["nvtop", "htop", "perf"]


def state(installed: tuple[str, ...] = (), loaded: bool = False, **more: Any) -> NodeState:
    """A Debian node with these packages."""
    facts = {
        "host": "node",
        "collected_at": "2026-11-20T10:00:00Z",
        "packages": [],
        "kernels": [{"release": "6.1.0-9", "package": None, "running": True, "newest": True, "headers": True}],
        "loaded_driver": {"version": "580.95.05", "flavour": "open"} if loaded else None,
        "driver_parameters": {"RmProfilingAdminOnly": "1"} if loaded else None,
    }
    return state_of(facts, {"installed": dict.fromkeys(installed, "1")}, **more)


def made(node: NodeState, offered: dict[str, Any] | None = None, **settings: Any) -> Manifest:
    """The plan after the node answered which packages it is offered."""
    answers = {} if offered is None else {"answers": {"offers": {"offered": offered}}}
    given = {"state": "present", "tools": TOOLS, **settings}
    return planned("gpu_tools", node, {"gpu_tools": given}, **answers)


def result(manifest: Manifest) -> GpuToolsResult:
    assert isinstance(manifest.result, GpuToolsResult)
    return manifest.result


def test_by_default_nothing_is_installed() -> None:
    found = planned("gpu_tools", state())
    assert not [file for file in found.files if file.content is not None]
    assert found.questions == {}


def test_what_is_missing_is_asked_for_and_installed_as_far_as_it_is_offered() -> None:
    first = made(state(("htop",)))
    assert first.questions["offers"].body == {
        "names": ["nvtop", "linux-perf", "linux-tools-6.1.0-9", "linux-tools-generic"]
    }
    found = made(state(("htop",)), ALL)
    assert isinstance(found.packages, AptChange)
    assert found.packages.install == ("htop", "linux-perf")
    assert found.notes == ("nvtop: no configured repository has nvtop; the other tools were installed",)
    record = next(file for file in found.files if file.path == RECORD)
    assert json.loads(record.content or "") == {"programs": ["htop", "perf"]}


def test_a_settled_node_is_asked_nothing() -> None:
    assert made(state(("nvtop", "htop", "linux-tools-generic"))).questions == {}


def test_ubuntus_perf_is_that_of_its_kernel() -> None:
    found = made(state(("htop", "nvtop")), {"linux-tools-6.1.0-9": ["1"], "linux-tools-generic": ["1"]})
    assert isinstance(found.packages, AptChange)
    assert found.packages.install == ("nvtop", "htop", "linux-tools-6.1.0-9")


def test_nsight_is_that_of_the_newest_series() -> None:
    offers = {
        f"cuda-nsight-{tool}-{series}": ["1"] for tool in ("systems", "compute") for series in ("12-9", "13-0", "13-2")
    }
    found = made(state(("htop",)), offers, tools=["htop"], nsight=True)
    assert isinstance(found.packages, AptChange)
    assert found.packages.install == ("htop", "cuda-nsight-systems-13-2", "cuda-nsight-compute-13-2")
    assert "nvidia-driver*" in found.packages.never
    lacking = made(state(("htop",)), {}, tools=["htop"], nsight=True)
    assert "role nvidia_repository" in lacking.notes[0]


def test_a_package_manager_that_cannot_be_asked_refuses() -> None:
    node = state()
    context = context_of({"gpu_tools": {"state": "present"}}, answers={"offers": {"error": "no lists"}})
    assert "no lists" in ROLE.plan(node, context.settings_of("gpu_tools"), context).refusals[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tools": ["gdb"]}, "gpu_tools_tools: gdb is not a tool"),
        ({"python": {"visdom": ""}}, "gpu_tools_python: visdom is not a tool"),
        ({"python": {"py-spy": "; rm"}}, "is not a version"),
    ],
)
def test_an_unknown_tool_or_version_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        made(state(), ALL, **settings)


def test_a_python_tool_is_made_for_its_version_and_linked() -> None:
    node = state(("htop", "python3-venv"))
    found = made(node, ALL, tools=["htop"], python={"py-spy": "0.4.0"})
    assert result(found).venvs == (
        Venv(name="py-spy", path=f"{FOLDER}/py-spy", version="0.4.0", locked=False, programs=("py-spy",)),
    )
    assert [note for note in found.notes if "without hashes" in note] != []
    locked = made(node, ALL, tools=["htop"], python={"py-spy": "", "tensorboard": ""})
    assert [(one.locked, bool(one.version)) for one in result(locked).venvs] == [(True, True)] * 2
    assert locked.notes == ()
    place = f"{FOLDER}/py-spy"
    files = {
        f"{place}/bin/py-spy": {"kind": "file"},
        f"{LINKS}/py-spy": {"kind": "link", "target": f"{place}/bin/py-spy"},
        place: {"kind": "folder"},
    }
    there = state(("htop", "python3-venv"), files=files, contents={f"{place}/gpunode-version": "0.4.0\n"})
    assert result(made(there, tools=["htop"], python={"py-spy": "0.4.0"})).venvs == ()
    assert result(made(there, tools=["htop"], python={"py-spy": "0.4.1"})).venvs[0].version == "0.4.1"
    leaving = made(there, tools=["htop"])
    assert result(leaving).leaving == (f"{LINKS}/py-spy", place)


def test_who_may_profile_is_a_choice_and_a_reason_for_a_reboot() -> None:
    node = state(("htop",), loaded=True)
    found = made(node, tools=["htop"], profiling="everybody")
    text = {file.path: file.content for file in found.files}[OPTIONS]
    assert text is not None
    assert "options nvidia NVreg_RestrictProfilingToAdminUsers=0" in text
    assert len(found.reboot_reasons) == 1
    assert made(node, tools=["htop"], profiling="admins").reboot_reasons == ()
    assert made(node, tools=["htop"]).reboot_reasons == ()


def test_removal_leaves_what_was_there_before() -> None:
    node = state(("htop", "fio"), contents={ROLE.record: "htop\n", RECORD: "{}"}, files={RECORD: {"kind": "file"}})
    found = planned("gpu_tools", node, {"gpu_tools": {"state": "absent"}})
    assert [reason for reason in found.due_reasons if reason.endswith("must be removed")] == [
        "fio must be removed",
        f"{RECORD} must be removed",
    ]
