"""The plan of gpu_tools: what is installed, what no repository offers, and who may profile."""

import json
from typing import Any

import pytest
from plan_samples import context_of, planned, state_of

from gpunode.errors import UsageError
from gpunode.provisioning.gpu_tools import FOLDER, LINKS, OPTIONS, RECORD, ROLE, GpuToolsResult, Venv
from gpunode.provisioning.manifest import ManagedFile, Manifest
from gpunode.provisioning.roles import PLANS
from gpunode.provisioning.site_files import RECORD as SITE_FILES
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
    requested = {"state": "present", "tools": TOOLS, **settings}
    return planned("gpu_tools", node, {"gpu_tools": requested}, **answers)


def result(manifest: Manifest) -> GpuToolsResult:
    assert isinstance(manifest.result, GpuToolsResult)
    return manifest.result


def test_by_default_nothing_is_installed() -> None:
    manifest = planned("gpu_tools", state())
    assert not [file for file in manifest.files if file.content is not None]
    assert manifest.questions == {}


def test_what_is_missing_is_asked_for_and_installed_as_far_as_it_is_offered() -> None:
    first = made(state(("htop",)))
    assert first.questions["offers"].body == {
        "names": ["nvtop", "linux-perf", "linux-tools-6.1.0-9", "linux-tools-generic"]
    }
    manifest = made(state(("htop",)), ALL)
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == ("htop", "linux-perf")
    assert manifest.notes == ("nvtop: no configured repository has nvtop; the other tools were installed",)
    record = next(file for file in manifest.files if file.path == RECORD)
    assert json.loads(record.content or "") == {"programs": ["htop", "perf"]}


def test_a_settled_node_is_asked_nothing() -> None:
    assert made(state(("nvtop", "htop", "linux-tools-generic"))).questions == {}


def test_ubuntus_perf_is_that_of_its_kernel() -> None:
    manifest = made(state(("htop", "nvtop")), {"linux-tools-6.1.0-9": ["1"], "linux-tools-generic": ["1"]})
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == ("nvtop", "htop", "linux-tools-6.1.0-9")


def test_nsight_is_that_of_the_newest_series() -> None:
    offers = {
        f"cuda-nsight-{tool}-{series}": ["1"] for tool in ("systems", "compute") for series in ("12-9", "13-0", "13-2")
    }
    manifest = made(state(("htop",)), offers, tools=["htop"], nsight=True)
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == ("htop", "cuda-nsight-systems-13-2", "cuda-nsight-compute-13-2")
    assert "nvidia-driver*" in manifest.packages.never
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
    manifest = made(node, ALL, tools=["htop"], python={"py-spy": "0.4.0"})
    assert result(manifest).venvs == (
        Venv(name="py-spy", path=f"{FOLDER}/py-spy", version="0.4.0", locked=False, programs=("py-spy",)),
    )
    assert [note for note in manifest.notes if "without hashes" in note] != []
    locked = made(node, ALL, tools=["htop"], python={"py-spy": "", "tensorboard": ""})
    assert [(venv.locked, bool(venv.version)) for venv in result(locked).venvs] == [(True, True)] * 2
    assert locked.notes == ()
    folder = f"{FOLDER}/py-spy"
    files = {
        f"{folder}/bin/py-spy": {"kind": "file"},
        f"{LINKS}/py-spy": {"kind": "link", "target": f"{folder}/bin/py-spy"},
        folder: {"kind": "folder"},
    }
    machine = state(("htop", "python3-venv"), files=files, contents={f"{folder}/gpunode-version": "0.4.0\n"})
    assert result(made(machine, tools=["htop"], python={"py-spy": "0.4.0"})).venvs == ()
    assert result(made(machine, tools=["htop"], python={"py-spy": "0.4.1"})).venvs[0].version == "0.4.1"
    leaving = made(machine, tools=["htop"])
    assert result(leaving).leaving == (f"{LINKS}/py-spy", folder)


def test_who_may_profile_is_a_choice_and_a_reason_for_a_reboot() -> None:
    node = state(("htop",), loaded=True)
    manifest = made(node, tools=["htop"], profiling="everybody")
    text = {file.path: file.content for file in manifest.files}[OPTIONS]
    assert text is not None
    assert "options nvidia NVreg_RestrictProfilingToAdminUsers=0" in text
    assert len(manifest.reboot_reasons) == 1
    assert made(node, tools=["htop"], profiling="admins").reboot_reasons == ()
    assert made(node, tools=["htop"]).reboot_reasons == ()


def test_removal_leaves_what_was_there_before() -> None:
    node = state(("htop", "fio"), contents={ROLE.record: "htop\n", RECORD: "{}"}, files={RECORD: {"kind": "file"}})
    manifest = planned("gpu_tools", node, {"gpu_tools": {"state": "absent"}})
    assert [reason for reason in manifest.pending_reasons if reason.endswith("must be removed")] == [
        "fio must be removed",
        f"{RECORD} must be removed",
    ]


MOTD = {"path": "/etc/motd", "content": "hello\n"}


def test_packages_of_the_site_are_in_the_same_transaction_and_leave_with_the_role() -> None:
    extra = ["bpftrace=0.17*", "htop"]
    first = made(state(("htop",)), tools=[], gpunode_extra_packages=extra)
    assert first.questions["offers"].body == {"names": ["bpftrace"]}
    manifest = made(state(("htop",)), {"bpftrace": ["0.17.0-1"]}, tools=[], gpunode_extra_packages=extra)
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == ("bpftrace=0.17*", "htop")
    (line,) = made(state(), {"htop": ["1"]}, tools=[], gpunode_extra_packages=extra).refusals
    assert line.endswith("no configured repository has bpftrace")
    gone = made(state(("htop",)), state="absent", gpunode_extra_packages=extra).packages
    assert gone is not None
    assert gone.manager == "apt"
    assert {"bpftrace", "htop"} <= {*gone.remove_new}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpunode_extra_packages": ["a b"]}, "'a b' is not a package"),
        ({"gpunode_extra_packages": ["-o=x"]}, "is not a package"),
        ({"gpunode_extra_packages": ["nvidia-driver-cuda"]}, "belongs to the role nvidia_driver"),
        ({"gpunode_extra_files": [{**MOTD, "path": "etc/motd"}]}, "not the absolute path"),
        ({"gpunode_extra_files": [{**MOTD, "path": "/etc/../x"}]}, "not the absolute path"),
        ({"gpunode_extra_files": [{**MOTD, "path": "/etc/x/"}]}, "not the absolute path"),
        ({"gpunode_extra_files": [MOTD, MOTD]}, "/etc/motd is listed twice"),
        ({"gpunode_extra_files": [{**MOTD, "mode": "rw"}]}, "not a valid mode"),
        ({"gpunode_extra_files": [{**MOTD, "path": OPTIONS}]}, "belongs to the role gpu_tools"),
        ({"gpunode_extra_files": [{**MOTD, "path": "/etc/ssh/gpunode-banner"}]}, "belongs to the role ssh_hardening"),
    ],
)
def test_packages_and_files_that_are_none_of_the_sites_are_refused(settings: dict[str, Any], words: str) -> None:
    node = state()
    context = context_of({"gpu_tools": {"state": "present", "tools": [], **settings}}, answers={"offers": {}})
    (line,) = PLANS["gpu_tools"](node, context.settings_of("gpu_tools"), context).refusals
    assert words in line


def sited(
    existing: dict[str, str | None], record: str | None, *paths: str, private: bool = False, **settings: Any
) -> dict[str, ManagedFile]:
    """The files of the manifest with these files of the site, on a node with those in ``existing``."""
    files = {path: {"kind": "absent" if text is None else "file"} for path, text in existing.items()}
    requested = [{"path": path, "content": "ours\n", "private": private} for path in paths]
    node = state(files=files, contents={SITE_FILES: record})
    manifest = made(node, tools=[], gpunode_extra_files=requested, **settings)
    assert not manifest.refusals
    shown = [file for file in manifest.files if file.path in {*existing, *paths, SITE_FILES}]
    return {f"{file.path} {file.phase}": file for file in shown}


def test_files_of_the_site_are_recorded_before_they_are_written_and_removed_if_the_role_made_them() -> None:
    first = sited({"/etc/motd": "theirs\n", "/etc/x": None}, None, "/etc/motd", "/etc/x")
    record = first[f"{SITE_FILES} before"].content or ""
    assert json.loads(record) == {"/etc/motd": True, "/etc/x": False}
    assert [first[f"{path} after"].backup for path in ("/etc/motd", "/etc/x")] == [True, False]
    both: dict[str, str | None] = {"/etc/motd": "ours\n", "/etc/x": "ours\n"}
    again = sited(both, record, "/etc/motd", "/etc/x")
    assert again[f"{SITE_FILES} before"].content == record
    assert not again["/etc/motd after"].backup
    # One leaves and one comes: until the removal, both are recorded.
    swapped = sited({**both, "/etc/y": None}, record, "/etc/motd", "/etc/y")
    assert json.loads(swapped[f"{SITE_FILES} before"].content or "").keys() == {"/etc/motd", "/etc/x", "/etc/y"}
    # Its text may have been private.
    assert (swapped["/etc/x after"].content, swapped["/etc/x after"].private) == (None, True)
    final = swapped[f"{SITE_FILES} last"].content or ""
    assert json.loads(final) == {"/etc/motd": True, "/etc/y": False}
    # What was there before stays.
    for state_of_role in ("present", "absent"):
        left = sited(both, record, state=state_of_role)
        assert "/etc/motd after" not in left
        assert left["/etc/x after"].content is None
        assert [file.content for name, file in left.items() if name.startswith(SITE_FILES)] == [None]


def test_a_text_that_was_private_is_in_no_diff_when_it_becomes_public() -> None:
    first = sited({"/etc/x": None}, None, "/etc/x", private=True)
    record = first[f"{SITE_FILES} before"].content
    both: dict[str, str | None] = {"/etc/x": "a secret\n", "/etc/y": None}
    public = sited(both, record, "/etc/x", "/etc/y")
    assert (public["/etc/x after"].private, public["/etc/y after"].private) == (True, False)
    # Until the text is replaced it is recorded as private.
    assert public[f"{SITE_FILES} before"].content != public[f"{SITE_FILES} last"].content
    assert sited(both, public[f"{SITE_FILES} before"].content, "/etc/x")["/etc/x after"].private
    assert not sited(both, public[f"{SITE_FILES} last"].content, "/etc/x")["/etc/x after"].private


def test_a_text_that_becomes_private_is_recorded_as_private_before_it_is_written() -> None:
    existing: dict[str, str | None] = {"/etc/x": "public\n", "/etc/y": "ours\n"}
    record = sited(dict.fromkeys(existing), None, *existing)[f"{SITE_FILES} before"].content
    # Another file is removed in the same run, after which the final record is written.
    private = sited(existing, record, "/etc/x", private=True)
    early = private[f"{SITE_FILES} before"].content or ""
    assert json.loads(early) == {"/etc/x": False, "/etc/y": False, "private": ["/etc/x"]}
    assert json.loads(private[f"{SITE_FILES} last"].content or "") == {"/etc/x": False, "private": ["/etc/x"]}


def test_a_damaged_record_removes_nothing() -> None:
    for text in ("", "[1]", "{", '{"x": false}', "null", '{"private": 1}'):
        assert [*sited({}, text)] == [f"{SITE_FILES} before"]
