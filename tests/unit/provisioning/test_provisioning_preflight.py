"""Why preflight refuses a node, and in which words: from states of nodes alone."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driver_samples import BUNDLE, UBUNTU, facts_of
from node_samples import context, node, planned

from gpunode.provisioning import node_stack, nvidia_repository, preflight
from gpunode.provisioning.driver import plan as nvidia_driver
from gpunode.provisioning.manifest import ManagedFile, Manifest, NodeQuery
from gpunode.provisioning.order import ORDER
from gpunode.provisioning.service import LEASE
from gpunode.provisioning.state import NodeState

GPU = {"slot": "0000:10:00.0", "vendor_id": "10de", "device_id": "2330", "class_id": "030200"}
GPU |= {"subsystem_id": "10de:16c1", "driver": None}  # type: ignore[dict-item]
ROOM: dict[str, Any] = {"min_free_mib": {"/": 1}}
TRAINING = {"pid": 41, "name": "train", "type": "C", "user": "ada", "gpu": "gpu0"}
DRIVER = "nvidia_driver"


@pytest.fixture
def facts() -> dict[str, Any]:
    recorded = facts_of(BUNDLE)
    return {**recorded, "pci": [*recorded["pci"], GPU]}


def result_of(values: dict[str, Any]) -> nvidia_driver.DriverResult | None:
    """What the driver's plan comes to; None: it is unknown."""
    if "changes" not in values:
        return None
    rest: dict[str, Any] = {"closure_problems": (), "builds": (), "module_problems": (), "stage_key": False}
    return nvidia_driver.DriverResult(**{"runfile": False, **values}, **rest, key=None, exchange=None)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the plan of the driver comes to; that of the repository is settled."""
    values: dict[str, Any] = {"changes": False, "runfile": False}
    monkeypatch.setattr(nvidia_driver.ROLE, "plan", lambda *_: Manifest(role=DRIVER, result=result_of(values)))
    monkeypatch.setattr(nvidia_repository.ROLE, "plan", lambda *_: Manifest(role="nvidia_repository"))
    return values


def state_of(facts: dict[str, Any], **apt: Any) -> NodeState:
    state = node(facts=facts)
    assert state.apt is not None
    return state.model_copy(update={"apt": state.apt.model_validate({**state.apt.model_dump(), "lists": True, **apt})})


def names(state: NodeState, others: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    """The name of each reason."""
    return [line.partition(":")[0] for line in reasons(state, others, **settings)]


def reasons(state: NodeState, others: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    run = context(others=others or {})
    return list(planned("preflight", state, run, **{**ROOM, **settings}).refusals)


@pytest.mark.usefixtures("driver")
def test_a_node_that_an_upgrade_holds_is_refused_to_all_but_its_run(facts: dict[str, Any]) -> None:
    lease = '{"owner": "root@admin1 (process 7)", "token": "run-1", "since": "2026-11-23T09:00:00Z"}'
    state = state_of(facts)
    held = state.model_copy(update={"contents": {**state.contents, LEASE: lease}})
    assert names(held) == ["held", *names(state)]
    assert "gpunode upgrade of root@admin1 (process 7) holds it" in reasons(held)[0]
    assert names(held, gpunode_change="run-1") == names(state)


@pytest.mark.parametrize(
    ("pending", "settings", "expected"),
    [
        (("libcuda1 is not installed",), {}, True),
        ((), {}, False),
        (("libcuda1 is not installed",), {"gpunode_roles": ["docker"]}, False),
    ],
)
def test_whether_the_driver_changes_is_known_before_the_repository_is_there(
    facts: dict[str, Any],
    driver: dict[str, Any],
    *,
    monkeypatch: pytest.MonkeyPatch,
    pending: tuple[str, ...],
    settings: dict[str, Any],
    expected: bool,
) -> None:
    monkeypatch.setattr(
        nvidia_driver.ROLE, "plan", lambda *_: Manifest(role=DRIVER, result=result_of(driver), pending_reasons=pending)
    )
    for others in ({}, {"nvidia_driver": {"state": "absent"}}):
        manifest = planned("preflight", state_of(facts), context(others=others), **{**ROOM, **settings})
        assert isinstance(manifest.result, preflight.PreflightResult)
        assert manifest.result.driver_pending is expected


def test_a_good_node_is_not_refused(facts: dict[str, Any], driver: dict[str, Any]) -> None:
    assert reasons(state_of(facts)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"os": {"id": "rocky", "version_id": "8.10", "codename": None, "pretty_name": "Rocky Linux 8.10"}},
            "unsupported: Rocky Linux 8.10 is not supported",
        ),
        (
            {"os": {"id": "ubuntu", "version_id": "20.04", "codename": "focal", "pretty_name": "Ubuntu 20.04"}},
            "unsupported: Ubuntu 20.04 is not supported",
        ),
        ({"architecture": "riscv64"}, "architecture riscv64 is not supported"),
        ({"disk_free_mib": {"/": 0}}, "/ has 0 MiB free, 1 MiB are needed"),
        ({"secure_boot": True}, "secure boot is on"),
        ({"pci": []}, "no-gpu: "),
        (
            {"packages": None, "gaps": {"packages": "dpkg-query: killed"}},
            "packages could not be determined: dpkg-query: killed",
        ),
    ],
    ids=["old rpm system", "system", "architecture", "space", "secure boot", "no GPU", "gap"],
)
def test_each_reason_is_one_line(
    facts: dict[str, Any], driver: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    # What is resolved from such a node, the resolver's tests hold.
    lines = [
        line
        for line in reasons(state_of({**facts, **change}), gpunode_roles=[DRIVER])
        if words in line or not line.startswith(("undetermined", "no-stack"))
    ]
    assert [words in line for line in lines] == [True], lines


def test_an_image_is_built_without_a_gpu(facts: dict[str, Any], driver: dict[str, Any]) -> None:
    assert names(state_of({**facts, "pci": []})) == ["no-gpu"]
    assert names(state_of({**facts, "pci": []}), require_gpu=False) == []


@pytest.mark.parametrize(
    ("apt", "words"),
    [
        ({"lock_holder": "apt-get (pid 7)"}, "apt-get (pid 7) still holds the package lock"),
        ({"unfinished": ["libc6", "nvidia-smi"]}, "dpkg has not finished libc6:"),
        ({"runfile": True}, "runfile: a driver of NVIDIA's .run installer is installed"),
        ({"installed": {"nvidia-docker2": "2.14.0-1"}}, "nvidia-docker2: nvidia-docker2 is installed"),
    ],
)
def test_the_package_manager_has_to_be_ready(
    facts: dict[str, Any], driver: dict[str, Any], apt: dict[str, Any], words: str
) -> None:
    assert [words in line for line in reasons(state_of(facts, **apt))] == [True]


def test_what_a_run_of_ours_left_half_done_is_not_refused(facts: dict[str, Any], driver: dict[str, Any]) -> None:
    assert names(state_of(facts, unfinished=["gcc-12"])) == ["half-configured"]
    assert names(state_of(facts, unfinished=["gcc-12"], left=["gcc-12", "dkms"])) == []


def test_a_process_that_computes_refuses_a_change_of_the_driver(facts: dict[str, Any], driver: dict[str, Any]) -> None:
    busy = {**facts, "gpu_processes": [TRAINING, {**TRAINING, "pid": 42, "type": "G"}]}
    assert reasons(state_of(busy)) == []
    driver["changes"] = True
    assert reasons(state_of(busy)) == [
        "busy: GPUs are in use by train (pid 41, ada): end them, or set gpunode_allow_busy: true"
    ]
    assert reasons(state_of(busy), gpunode_allow_busy=True) == []
    assert reasons(state_of(busy), gpunode_roles=["docker"]) == []
    assert names(state_of(busy), {DRIVER: {"state": "absent"}}) == ["busy"]


def test_headers_must_be_had_for_the_newest_kernel(facts: dict[str, Any], driver: dict[str, Any]) -> None:
    kernel = next(kernel for kernel in facts["kernels"] if kernel["newest"])
    kernel["headers"] = False
    expected = f"linux-headers-{kernel['release']}"
    assert [expected in line for line in reasons(state_of(facts))] == [True]
    assert reasons(state_of(facts, headers=[expected])) == []
    assert reasons(state_of(facts, lists=False)) == []


def test_what_only_matters_for_an_installation_does_not_stop_a_removal(
    facts: dict[str, Any], driver: dict[str, Any]
) -> None:
    bad = {**facts, "disk_free_mib": {"/": 0}, "secure_boot": True}
    assert names(state_of(bad)) == ["disk-full", "secure-boot"]
    assert names(state_of(bad), {DRIVER: {"state": "absent"}}) == []


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"allow_secure_boot": True}, None),
        ({"mok_hash": "grub.pbkdf2"}, None),
        ({}, {"path": "/var/lib/dkms/mok.pub", "enrolled": False, "waits": True, "fresh": False}),
        ({}, {"path": "/var/lib/dkms/mok.pub", "enrolled": True, "waits": False, "fresh": False}),
    ],
    ids=["allowed", "to be staged", "staged", "enrolled"],
)
def test_secure_boot_is_accepted_if_the_module_will_load(
    facts: dict[str, Any], driver: dict[str, Any], settings: dict[str, Any], key: dict[str, Any] | None
) -> None:
    facts["secure_boot"] = True
    of_driver = {DRIVER: {name: settings.pop(name) for name in ("mok_hash",) if name in settings}}
    assert names(state_of(facts, key=key), of_driver, **settings) == []
    unknown = {"path": "/var/lib/dkms/mok.pub", "enrolled": False, "waits": False, "fresh": False}
    assert names(state_of(facts, key=unknown)) == ["secure-boot"]


def test_what_others_left_goes_with_the_switch(facts: dict[str, Any], driver: dict[str, Any]) -> None:
    state = state_of(facts, runfile=True, installed={"nvidia-docker2": "2.14.0-1"})
    assert names(state) == ["runfile", "nvidia-docker2"]
    assert names(state, {DRIVER: {"switch": True}}) == []


def test_a_driver_of_another_line_is_left_alone(facts: dict[str, Any], driver: dict[str, Any]) -> None:
    package = {**facts["packages"][0], "name": "nvidia-tesla-470-kernel-dkms", "installed": True}
    old = {**facts, "packages": [{**package, "source": "nvidia-graphics-drivers-tesla-470"}]}
    assert any("nvidia-tesla-470-kernel-dkms" in line for line in reasons(state_of(old), gpunode_roles=[DRIVER]))


def test_what_repository_and_driver_refuse_is_among_the_reasons(
    facts: dict[str, Any], driver: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia_driver.ROLE, "plan", lambda *_: Manifest(role=DRIVER, refusals=("closure-lags: x",)))
    assert names(state_of({**facts, "disk_free_mib": {"/": 0}})) == ["disk-full", "closure-lags"]
    refused = Manifest(role="nvidia_repository", refusals=("repository-twice: y",))
    monkeypatch.setattr(nvidia_repository.ROLE, "plan", lambda *_: refused)
    assert names(state_of(facts)) == ["repository-twice"]


def test_the_drivers_preview_counts_with_the_repository_as_it_will_be(
    facts: dict[str, Any], driver: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = {"key": NodeQuery(kind="signing_key", body={"url": "x"})}
    file = ManagedFile(path="/etc/apt/sources.list.d/gpunode-nvidia-cuda.sources", content="Types: deb\n")

    def repository(_: object, __: object, run: Any) -> Manifest:
        return Manifest(
            role="nvidia_repository", **({"files": (file,)} if "key" in run.answers else {"questions": ask})
        )

    def asking(_: object, __: object, run: Any) -> Manifest:
        if "driver" in run.answers:
            return Manifest(role=DRIVER, result=result_of({"changes": True}))
        question = NodeQuery(kind="package_transaction", body={"files": dict(run.planned.files)})
        return Manifest(role=DRIVER, questions={"driver": question})

    monkeypatch.setattr(nvidia_repository.ROLE, "plan", repository)
    monkeypatch.setattr(nvidia_driver.ROLE, "plan", asking)
    run, state = context(), state_of(facts)
    first = planned("preflight", state, run, **ROOM)
    assert first.questions == ask
    second = planned("preflight", state, run.with_answers({"key": {}}), **ROOM)
    assert second.questions["driver"].body == {"files": {file.path: "Types: deb\n"}}
    done = planned("preflight", state, run.with_answers({"key": {}, "driver": {}}), **ROOM)
    assert (done.questions, done.refusals) == ({}, ())


def test_a_typing_error_is_reported_with_its_position(
    facts: dict[str, Any], driver: dict[str, Any], tmp_path: Path
) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("all:\n  vars:\n    nvidia_driver_flavor: open\n", encoding="utf-8")
    known = ("nvidia_driver_flavor", "nvidia_driver_state", "gpunode_reboot_required", "ansible_user", "docker_users")
    run = context(variables=known, inventories=(str(inventory),))
    assert planned("preflight", state_of(facts), run, **ROOM).refusals == (
        f"{inventory}:3: unknown variable nvidia_driver_flavor; did you mean nvidia_driver_flavour?",
    )
    assert planned("preflight", state_of(facts), run, **ROOM, refuse_unknown_variables=False).refusals == ()


def test_a_node_with_dnf_gets_no_advice_that_only_apt_can_follow(facts: dict[str, Any], driver: dict[str, Any]) -> None:
    state = node(dnf=True, facts={"secure_boot": True, "pci": facts["pci"], "packages": []})
    (line,) = [line for line in reasons(state, gpunode_roles=[DRIVER]) if line.startswith("secure-boot: ")]
    assert "nvidia_driver_mok_hash" in line
    assert "ubuntu" not in line
    assert state.dnf is not None
    held = state.model_copy(update={"dnf": state.dnf.model_copy(update={"lock_holder": "dnf (pid 7)"})})
    assert "package-lock" in names(held, gpunode_roles=[DRIVER])
    silent = state.model_copy(update={"dnf": state.dnf.model_copy(update={"error": "no bindings"})})
    assert "no-dnf" in names(silent)


def test_a_firmware_that_could_not_be_read_is_noted_and_not_refused(
    facts: dict[str, Any], driver: dict[str, Any]
) -> None:
    unknown = {**facts, "secure_boot": None, "gaps": {"secure_boot": "no such file"}}
    manifest = planned("preflight", state_of(unknown), context(), **ROOM)
    assert manifest.refusals == ()
    assert any("secure boot could not be determined (no such file)" in note for note in manifest.notes)


@pytest.fixture
def precompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack with a module that the distribution built."""
    of_context = node_stack.of_context

    def answer(*run: Any) -> node_stack.NodeStack:
        resolved = of_context(*run)
        assert resolved.stack is not None
        stack = resolved.stack.model_copy(
            update={"module": resolved.stack.module.model_copy(update={"build": "precompiled"}), "warnings": ()}
        )
        return replace(resolved, group=resolved.group.model_copy(update={"stack": stack}))

    monkeypatch.setattr(node_stack, "of_context", answer)


@pytest.mark.usefixtures("driver", "precompiled")
def test_a_module_that_is_not_built_on_the_node_needs_neither_headers_nor_a_key(facts: dict[str, Any]) -> None:
    for kernel in facts["kernels"]:
        kernel["headers"] = False
    assert reasons(state_of({**facts, "secure_boot": True})) == []
    unknown = {**facts, "secure_boot": None, "gaps": {"secure_boot": "no such file"}}
    assert planned("preflight", state_of(unknown), context(), **ROOM).notes == ()
    extra: dict[str, dict[str, Any]] = {"gpu_tools": {"gpunode_extra_packages": ["bpftrace"]}}
    (note,) = planned("preflight", state_of(unknown), context(others=extra), **ROOM).notes
    assert note.startswith("gpunode_extra_packages has no effect")
    extra["gpu_tools"]["state"] = "present"
    assert planned("preflight", state_of(unknown), context(others=extra), **ROOM).notes == ()


@pytest.mark.usefixtures("driver")
def test_headers_matter_for_a_kernel_of_a_package_that_runs_or_comes(facts: dict[str, Any]) -> None:
    kernel = {**facts["kernels"][0], "headers": False, "running": False, "newest": False}
    names_of: dict[str, dict[str, Any]] = {
        "old": {},
        "running": {"running": True},
        "own": {"running": True, "package": None},
    }
    facts["kernels"] = [{**kernel, "release": name, **change} for name, change in names_of.items()]
    assert reasons(state_of(facts)) == [
        "no-headers: linux-headers-running is in no apt source of the node: run apt-get update, or boot a current "
        "kernel"
    ]


@pytest.mark.parametrize(
    ("values", "refusals", "busy"),
    [
        ({}, (), True),
        ({"changes": False}, (), False),
        ({"changes": False, "runfile": True}, (), True),
        ({"changes": False}, ("closure-lags: x", "closure-lags: x"), True),
    ],
)
def test_users_of_gpus_matter_unless_the_driver_is_sure_to_stay(
    facts: dict[str, Any],
    driver: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    refusals: tuple[str, ...],
    *,
    busy: bool,
) -> None:
    monkeypatch.setattr(
        nvidia_driver.ROLE, "plan", lambda *_: Manifest(role=DRIVER, result=result_of(values), refusals=refusals)
    )
    # Without the role for the repository, this plan is not asked for.
    monkeypatch.setattr(nvidia_repository.ROLE, "plan", None)
    state = state_of({**facts, "gpu_processes": [TRAINING]})
    roles: dict[str, Any] = {"gpunode_roles": [DRIVER]}
    assert names(state, **roles) == ["busy"] * busy + ["closure-lags"] * bool(refusals)
    drained = planned("preflight", state, context(drains=True), **{**ROOM, **roles})
    assert len(drained.refusals) == bool(refusals)


@pytest.mark.parametrize(
    ("manager", "expected"), [({}, True), ({"apt": None}, False), ({"apt": None, "dnf": "no bindings"}, False)]
)
def test_a_driver_is_not_planned_where_no_package_manager_answers(
    facts: dict[str, Any],
    driver: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    manager: dict[str, Any],
    expected: bool,
) -> None:
    calls: list[object] = []

    def counted(*run: object) -> Manifest:
        calls.append(run)
        return Manifest(role=DRIVER, result=result_of(driver))

    monkeypatch.setattr(nvidia_driver.ROLE, "plan", counted)
    state = state_of(facts).model_copy(update=dict.fromkeys(manager))
    if "dnf" in manager:
        rpm = node(dnf=True).dnf
        assert rpm is not None
        state = state.model_copy(update={"dnf": rpm.model_copy(update={"error": manager["dnf"]})})
    for others in ({}, {DRIVER: {"state": "absent"}}):
        planned("preflight", state, context(others=others), **ROOM)
    assert bool(calls) is expected
    calls.clear()
    working = state.model_copy(update={"apt": None, "dnf": node(dnf=True).dnf})
    planned("preflight", working, context(), **ROOM)
    assert calls


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("free", "required", "full"),
    [
        ({"/": 5}, {"/": 5}, []),
        ({"/": 4}, {"/": 5}, ["/ has 4"]),
        ({"/": 4, "/var": 9}, {"/usr": 5, "/var": 10}, ["/var"]),
    ],
)
def test_a_file_system_is_full_below_what_is_required_of_it(
    facts: dict[str, Any], free: dict[str, int], required: dict[str, int], full: list[str]
) -> None:
    lines = reasons(state_of({**facts, "disk_free_mib": free}), min_free_mib=required)
    assert [words in line for words, line in zip(full, lines, strict=True)] == [True] * len(full)


@pytest.mark.usefixtures("driver")
def test_packages_of_another_origin_are_named_unless_they_go(facts: dict[str, Any]) -> None:
    library = next(package for package in facts["packages"] if package["name"] == "libcuda1")
    facts["packages"].append({**library, "name": "libnvidia-compute-580-server", **UBUNTU})
    assert names(state_of(facts), gpunode_roles=[DRIVER])[:1] == ["mixed-sources"]
    assert "mixed-sources" not in names(state_of(facts), {DRIVER: {"switch": True}}, gpunode_roles=[DRIVER])
    assert "mixed-sources" not in names(state_of(facts), {DRIVER: {"state": "absent"}}, gpunode_roles=[DRIVER])


@pytest.mark.usefixtures("driver")
def test_a_driver_of_another_line_is_named_if_it_is_installed(facts: dict[str, Any]) -> None:
    legacy = {**facts["packages"][0], "source": "nvidia-graphics-drivers-legacy-390xx"}
    facts["packages"] = [{**legacy, "name": f"p{number}"} for number in range(6, 0, -1)]
    facts["packages"] += [
        {**legacy, "name": "p0", "installed": False},
        {**legacy, "name": "a", "source": "nvidia-graphics-drivers"},
    ]
    (line,) = [line for line in reasons(state_of(facts), gpunode_roles=[DRIVER]) if line.startswith("other-line")]
    assert "(p1, p2, p3, p4, p5)" in line
    assert "other-line" not in names(state_of(facts), {DRIVER: {"state": "absent"}}, gpunode_roles=[DRIVER])


@pytest.mark.usefixtures("driver")
def test_an_unfinished_package_is_named_on_each_package_manager(facts: dict[str, Any]) -> None:
    left = ["zsh", "libcuda1", "cuda-drivers-580", "nvidia-smi", "bash"]
    assert "half-configured: dpkg has not finished bash, zsh: run dpkg --configure -a" in reasons(
        state_of(facts, unfinished=left)
    )
    bare = state_of(facts).model_copy(update={"apt": None})
    assert "package-lock" not in names(bare)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("system", "words"),
    [
        ({"id": "azurelinux", "version_id": "3.0", "pretty_name": ""}, "unsupported: azurelinux 3.0 is not supported;"),
        ({"id": "rhel", "version_id": "8.10", "pretty_name": "RHEL 8"}, "unsupported: RHEL 8 is not supported;"),
        (None, None),
    ],
)
def test_only_systems_that_the_roles_know_are_recommended(
    facts: dict[str, Any], system: dict[str, Any] | None, words: str | None
) -> None:
    change = {"os": None if system is None else {"codename": None, **system}, "architecture": None, "pci": None}
    lines = [
        line
        for line in reasons(state_of({**facts, **change}), gpunode_roles=[DRIVER])
        if line.startswith("unsupported")
    ]
    assert len(lines) == (words is not None)
    for line in lines:
        assert line.startswith(words or "")
        assert line.endswith(
            "supported are Ubuntu 22.04, Ubuntu 24.04, Ubuntu 26.04, Debian 12, Debian 13, RHEL 9, RHEL 10"
        )


@pytest.mark.parametrize(("supported", "manager", "words"), [(True, "tdnf", "not tdnf: for "), (True, "dnf", None)])
def test_a_supported_system_of_another_package_manager_is_for_plans_alone(
    facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, supported: bool, manager: str, words: str | None
) -> None:
    row = SimpleNamespace(name="Azure Linux 3", supported=supported, manager=manager)
    catalog = SimpleNamespace(os_of=lambda *_: row, systems={"azl3": row})
    monkeypatch.setattr(preflight, "load", lambda: catalog)
    lines = list(preflight._unsupported(node(facts=facts).facts))
    assert [words in line for line in lines if words] == [True] * (words is not None)
    assert len(lines) == (words is not None)


@pytest.mark.usefixtures("driver")
def test_an_unknown_variable_is_named_also_if_no_file_and_no_near_name_is_known(facts: dict[str, Any]) -> None:
    run = context(variables=("gpunode_quite_something_else",))
    assert planned("preflight", state_of(facts), run, **ROOM).refusals == (
        "the variables: unknown variable gpunode_quite_something_else",
    )


@pytest.mark.usefixtures("driver")
def test_how_secure_boot_is_met_is_reported_for_each_package_manager(facts: dict[str, Any]) -> None:
    (line,) = reasons(state_of({**facts, "secure_boot": True}))
    assert "use modules that Ubuntu signs (nvidia_driver_source: ubuntu), or set preflight_allow_secure_boot" in line
    bare = state_of({**facts, "secure_boot": True}).model_copy(update={"apt": None})
    assert names(bare) == ["secure-boot"]


def test_warnings_of_the_resolver_are_noted_where_there_is_a_stack(
    facts: dict[str, Any], driver: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = node_stack.of_context(node(facts=facts).facts, context())
    assert resolved.stack is not None
    stack = SimpleNamespace(warnings=[SimpleNamespace(text="old")], module=resolved.stack.module)
    monkeypatch.setattr(node_stack, "of_context", lambda *_: SimpleNamespace(stack=stack, problems=("no-stack: x",)))
    noted = planned("preflight", state_of({**facts, "gaps": {}}), context(), **ROOM)
    assert (noted.notes, noted.refusals) == (("old",), ("no-stack: x",))
    gone = planned("preflight", state_of(facts), context(others={DRIVER: {"state": "absent"}}), **ROOM)
    assert (gone.notes, gone.refusals) == ((), ())


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    "field", ["os", "architecture", "kernels", "pci", "modules", "packages", "disk_free_mib", "gpu_processes"]
)
def test_a_fact_that_a_decision_needs_is_named_if_it_is_unknown(facts: dict[str, Any], field: str) -> None:
    unknown = {**facts, field: None, "gaps": {field: "killed"}}
    assert f"undetermined: {field} could not be determined: killed" in reasons(
        state_of(unknown), gpunode_roles=[DRIVER]
    )
    assert "undetermined" not in names(state_of({**facts, "gaps": {"nics": "killed"}}), gpunode_roles=[DRIVER])


ALONE = ("docker", "storage", "accounts", "ssh_hardening", "firewall", "updates", "kernel_tuning", "gpu_tools", "rdma")
INSTALL_NOTHING = {"accounts", "ssh_hardening", "kernel_tuning"}


@pytest.mark.parametrize("role", ALONE)
def test_a_role_is_used_alone_on_a_node_without_gpus_and_without_room_for_a_driver(
    facts: dict[str, Any], role: str
) -> None:
    """A login node, a storage node, a CPU node: what the driver needs there is not judged."""
    plain = {**facts, "pci": [], "modules": None, "secure_boot": True, "gaps": {"modules": "killed"}}
    plain |= {"disk_free_mib": {"/": 4096, "/boot": 1}}
    run = context(roles=(role,))
    assert (
        planned("preflight", state_of(plain, runfile=True), run, min_free_mib={"/": 1024, "/boot": 128}).refusals == ()
    )
    full = planned("preflight", state_of(plain), run, min_free_mib={"/": 8192}).refusals
    assert [line.partition(":")[0] for line in full] == ["disk-full"] * (role not in INSTALL_NOTHING)
    held = planned("preflight", state_of(plain, lock_holder="apt-get (pid 7)"), run).refusals
    assert [line.partition(":")[0] for line in held] == ["package-lock"] * (role not in INSTALL_NOTHING)
    old = {**plain, "os": {"id": "ubuntu", "version_id": "20.04", "codename": "focal", "pretty_name": "Ubuntu 20.04"}}
    assert [line.partition(":")[0] for line in planned("preflight", state_of(old), run).refusals] == ["unsupported"]


@pytest.mark.parametrize("role", [role.name for role in ORDER if role.for_gpus and role.name != DRIVER])
def test_a_role_for_gpus_is_refused_on_a_node_without_any(facts: dict[str, Any], role: str) -> None:
    refusals = planned("preflight", state_of({**facts, "pci": []}), context(roles=(role,)), **ROOM).refusals
    assert "no-gpu" in [line.partition(":")[0] for line in refusals]
