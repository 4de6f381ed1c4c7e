"""Why preflight refuses a node, and in which words: from states of nodes alone."""

from pathlib import Path
from typing import Any

import pytest
from driver_samples import BUNDLE, facts_of
from node_samples import context, node, planned

from gpunode.provisioning import nvidia_driver, nvidia_repository
from gpunode.provisioning.manifest import ManagedFile, Manifest, NodeQuestion
from gpunode.provisioning.state import NodeState

GPU = {"slot": "0000:10:00.0", "vendor_id": "10de", "device_id": "2330", "class_id": "030200"}
GPU |= {"subsystem_id": "10de:16c1", "driver": None}  # type: ignore[dict-item]
ROOM: dict[str, Any] = {"min_free_mib": {"/": 1}}
TRAINING = {"pid": 41, "name": "train", "type": "C", "user": "ada", "gpu": "gpu0"}
DRIVER = "nvidia_driver"


@pytest.fixture
def facts() -> dict[str, Any]:
    found = facts_of(BUNDLE)
    return {**found, "pci": [*found["pci"], GPU]}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the plan of the driver comes to; that of the repository is settled."""
    values: dict[str, Any] = {"changes": False, "runfile": False}
    monkeypatch.setattr(nvidia_driver, "plan", lambda *_: Manifest(role=DRIVER, values=values))
    monkeypatch.setattr(nvidia_repository, "plan", lambda *_: Manifest(role="nvidia_repository"))
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


@pytest.mark.parametrize(
    ("due", "settings", "expected"),
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
    due: tuple[str, ...],
    settings: dict[str, Any],
    expected: bool,
) -> None:
    monkeypatch.setattr(nvidia_driver, "plan", lambda *_: Manifest(role=DRIVER, values=driver, due_reasons=due))
    for others in ({}, {"nvidia_driver": {"state": "absent"}}):
        manifest = planned("preflight", state_of(facts), context(others=others), **{**ROOM, **settings})
        assert manifest.values["driver_due"] is expected


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
    found = [
        line
        for line in reasons(state_of({**facts, **change}), gpunode_roles=[])
        if words in line or not line.startswith(("undetermined", "no-stack"))
    ]
    assert [words in line for line in found] == [True], found


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
    wanted = f"linux-headers-{kernel['release']}"
    assert [wanted in line for line in reasons(state_of(facts))] == [True]
    assert reasons(state_of(facts, headers=[wanted])) == []
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
    assert any("nvidia-tesla-470-kernel-dkms" in line for line in reasons(state_of(old), gpunode_roles=[]))


def test_what_repository_and_driver_refuse_is_among_the_reasons(
    facts: dict[str, Any], driver: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia_driver, "plan", lambda *_: Manifest(role=DRIVER, refusals=("closure-lags: x",)))
    assert names(state_of({**facts, "disk_free_mib": {"/": 0}})) == ["disk-full", "closure-lags"]
    refused = Manifest(role="nvidia_repository", refusals=("repository-twice: y",))
    monkeypatch.setattr(nvidia_repository, "plan", lambda *_: refused)
    assert names(state_of(facts)) == ["repository-twice"]


def test_the_drivers_preview_counts_with_the_repository_as_it_will_be(
    facts: dict[str, Any], driver: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = {"key": NodeQuestion(kind="repository_key", body={"url": "x"})}
    file = ManagedFile(path="/etc/apt/sources.list.d/gpunode-nvidia-cuda.sources", content="Types: deb\n")

    def repository(_: object, __: object, run: Any) -> Manifest:
        return Manifest(
            role="nvidia_repository", **({"files": (file,)} if "key" in run.answers else {"questions": ask})
        )

    def asking(_: object, __: object, run: Any) -> Manifest:
        if "driver" in run.answers:
            return Manifest(role=DRIVER, values={"changes": True})
        question = NodeQuestion(kind="apt_preview", body={"files": dict(run.planned.files)})
        return Manifest(role=DRIVER, questions={"driver": question})

    monkeypatch.setattr(nvidia_repository, "plan", repository)
    monkeypatch.setattr(nvidia_driver, "plan", asking)
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
    (line,) = [one for one in reasons(state, gpunode_roles=[]) if one.startswith("secure-boot: ")]
    assert "nvidia_driver_mok_hash" in line
    assert "ubuntu" not in line
    assert state.dnf is not None
    held = state.model_copy(update={"dnf": state.dnf.model_copy(update={"lock_holder": "dnf (pid 7)"})})
    assert "package-lock" in names(held, gpunode_roles=[])
    silent = state.model_copy(update={"dnf": state.dnf.model_copy(update={"error": "no bindings"})})
    assert "no-dnf" in names(silent)


def test_a_firmware_that_could_not_be_read_is_noted_and_not_refused(
    facts: dict[str, Any], driver: dict[str, Any]
) -> None:
    unknown = {**facts, "secure_boot": None, "gaps": {"secure_boot": "no such file"}}
    manifest = planned("preflight", state_of(unknown), context(), **ROOM)
    assert manifest.refusals == ()
    assert any("secure boot could not be determined (no such file)" in note for note in manifest.notes)
