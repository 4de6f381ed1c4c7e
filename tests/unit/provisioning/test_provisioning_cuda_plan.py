"""The plans of the roles cuda and dcgm: bare, settled and damaged nodes, on apt and on dnf, and what goes."""

from typing import Any

import pytest
from node_samples import after, by_path, contents, context, node, planned
from test_provisioning_cuda import bare

from gpunode.provisioning import cuda, dcgm
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.state import NodeState
from gpunode.provisioning.transaction import LOCK_PLUGIN, MARK, lock_lines

FACTS = bare("2330").model_dump(mode="json")
LOADED = {"loaded_driver": {"version": "580.95.05", "flavour": "open"}, "gpu_processes": []}
TOOLKIT = {
    "cuda-toolkit-12-9": "12.9.1-1",
    "cuda-toolkit-config-common": "12.9.79-1",
    "cuda-toolkit-12-config-common": "12.9.79-1",
    "cuda-toolkit-12-9-config-common": "12.9.79-1",
}
DCGM = dict.fromkeys(
    (f"{dcgm.STEM}{part}" for part in ("-core", "-cuda13", "-proprietary", "-proprietary-cuda13")), "1:4.6.1-1"
)
UNIT = {"name": dcgm.UNIT, "load": "loaded", "active": "active", "sub": "running", "enabled": "enabled"}
NVIDIAS = context(others={"nvidia_driver": {"source": "nvidia", "version": "580.95.05"}})


def default_of(manifest: Manifest) -> str | None:
    """The toolkit that becomes the default one."""
    return next((command.argv[-1] for command in manifest.commands), None)


def toolkits(state: NodeState, **settings: Any) -> Manifest:
    return planned("cuda", state, NVIDIAS, **{"toolkit": ["12.9"], **settings})


def with_link(target: str) -> dict[str, Any]:
    return {cuda.ALTERNATIVE: {"kind": "link", "target": target}}


@pytest.mark.parametrize("dnf", [False, True], ids=["apt", "dnf"])
def test_nothing_is_requested_and_nothing_is_pending(dnf: bool) -> None:
    manifest = planned("cuda", node(dnf=dnf, facts=FACTS if not dnf else None), NVIDIAS)
    assert (manifest.pending_reasons, manifest.packages, manifest.files) == ((), None, ())


def test_a_default_without_toolkits_is_accepted() -> None:
    manifest = toolkits(node(facts=FACTS), toolkit=[], default="12.9")
    assert (manifest.refusals, manifest.pending_reasons) == ((), ())


def test_a_bare_node_gets_toolkits_pins_and_a_default() -> None:
    manifest = toolkits(node(facts=FACTS), nccl=True)
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert any(entry.startswith("cuda-toolkit-12-9") for entry in manifest.packages.install)
    assert "cuda-drivers*" in manifest.packages.never
    assert manifest.packages.files[cuda.PREFERENCES] == contents(manifest)[cuda.PREFERENCES]
    assert by_path(manifest, cuda.PROFILE).validate_with == ("/bin/sh", "-n", "%s")
    assert default_of(manifest) == "/usr/local/cuda-12.9"
    assert toolkits(node(facts=FACTS), profile=False).files[-1].content is None


def test_a_settled_toolkit_has_nothing_pending_and_each_damage_has() -> None:
    held = tuple(TOOLKIT)
    first = node(TOOLKIT, facts=FACTS, held=held, files=with_link("/usr/local/cuda-12.9"))
    settled = after(toolkits(first), first)
    assert toolkits(settled).pending_reasons == ()
    loose = node(TOOLKIT, facts=FACTS, held=held[1:], files=with_link("/usr/local/cuda-12.9"))
    assert toolkits(after(toolkits(loose), loose)).pending_reasons == (f"{held[0]} is not held",)
    other = settled.model_dump()
    other["files"][cuda.ALTERNATIVE]["target"] = "/usr/local/cuda-13.0"
    manifest = toolkits(NodeState.model_validate(other))
    assert manifest.pending_reasons == ("/usr/local/cuda is not /usr/local/cuda-12.9",)
    assert default_of(manifest) == "/usr/local/cuda-12.9"


def test_a_toolkit_that_the_resolver_refuses_is_refused() -> None:
    manifest = toolkits(node(facts=FACTS), toolkit=["12.9"], default="13.0")
    assert manifest.refusals == ("cuda_default 13.0 is not among the requested toolkits (12.9)",)


@pytest.mark.parametrize("request_", [{"toolkit": ["13.0"]}, {"version": "13.0"}], ids=["toolkit", "version"])
def test_a_request_without_a_stack_is_refused_and_not_passed_over(request_: dict[str, Any]) -> None:
    """CUDA 13.0 does not run with driver 535: no stack is resolved."""
    driver = {"source": "nvidia", "version": "535.261.03"}
    run = context(others={"nvidia_driver": driver, "cuda": request_})
    (line,) = planned("cuda", node(facts=FACTS), run, **request_).refusals
    assert line.startswith(f"cuda_{next(iter(request_))}: 13.0: no-stack: ")
    # Nothing is requested: the other roles report the conflict.
    assert planned("cuda", node(facts=FACTS), run).refusals == ()
    # With the driver on its way out, the run goes on.
    run = context(others={"nvidia_driver": {**driver, "state": "absent"}, "cuda": request_})
    manifest = planned("cuda", node(facts=FACTS), run, **request_)
    assert (manifest.refusals, len(manifest.notes)) == ((), 1)


def test_libraries_without_a_toolkit_are_reported() -> None:
    manifest = toolkits(node(facts=FACTS), toolkit=[], cudnn=True, nccl=True)
    assert (manifest.pending, manifest.refusals) == (False, ())
    assert "cuda_cudnn and cuda_nccl" in manifest.notes[0]


def test_with_dnf_the_toolkits_are_locked_at_what_came() -> None:
    facts = {key: FACTS[key] for key in ("pci", "packages", "module_files", "dkms", "loaded_driver")}
    manifest = toolkits(node(dnf=True, facts=facts))
    assert manifest.packages is not None
    assert manifest.packages.manager == "dnf"
    assert ("cuda-toolkit-12-9" in manifest.packages.hold, cuda.PREFERENCES in contents(manifest)) == (True, False)
    machine = node({"cuda-toolkit-12-9": "12.9.1-1"}, dnf=True, facts=facts)
    loose = [reason for reason in toolkits(machine).pending_reasons if reason.startswith("not locked")]
    assert loose == ["not locked: cuda-toolkit-12-9-0:12.9.1-1.*"]


@pytest.mark.parametrize("role", ["cuda", "dcgm"])
def test_with_dnf_the_plugin_that_obeys_locks_comes_where_it_is_missing(role: str) -> None:
    facts = {key: FACTS[key] for key in ("pci", "packages", "module_files", "dkms", "loaded_driver")}
    machine = node(dnf=True, facts=facts)
    assert machine.dnf is not None
    without = machine.model_copy(update={"dnf": machine.dnf.model_copy(update={"versionlock": False})})
    for state, expected in ((machine, False), (without, True)):
        packages = (toolkits(state) if role == "cuda" else dcgm_planned(state)).packages
        assert packages is not None
        assert packages.manager == "dnf"
        assert (LOCK_PLUGIN in packages.install) is expected


def test_with_dnf_an_exact_version_comes_in_any_release() -> None:
    facts = {key: FACTS[key] for key in ("packages", "module_files", "dkms", "loaded_driver")}
    pascal = bare("15f8").model_dump(mode="json")["pci"]
    manifest = toolkits(node(dnf=True, facts={**facts, "pci": pascal}), cudnn=True)
    assert manifest.packages is not None
    assert manifest.packages.manager == "dnf"
    assert "cudnn9-cuda-12=9.10.2.21-*" in manifest.packages.install


def test_with_dnf_a_default_is_chosen_only_where_the_packages_registered_one() -> None:
    facts = {key: FACTS[key] for key in ("pci", "packages", "module_files", "dkms", "loaded_driver")}
    without = toolkits(node(TOOLKIT, dnf=True, facts=facts))
    assert (default_of(without), [note for note in without.notes if cuda.ROOT in note] != []) == (None, True)
    assert toolkits(node(dnf=True, facts=facts)).notes == ()
    machine = node(TOOLKIT, dnf=True, facts=facts, files=with_link("/usr/local/cuda-13.0"))
    assert default_of(toolkits(machine)) == "/usr/local/cuda-12.9"


def test_absent_removes_what_came_and_leaves_what_was_there() -> None:
    assert planned("cuda", node(), state="absent").pending_reasons == ()
    texts = {cuda.ROLE.record: "bash\ncuda-toolkit-12-9\n"}
    manifest = planned("cuda", node(TOOLKIT, texts, held=tuple(TOOLKIT)), state="absent")
    gone = {reason.split()[0] for reason in manifest.pending_reasons if reason.endswith("must be removed")}
    assert gone >= TOOLKIT.keys() - {"cuda-toolkit-12-9"}
    assert "cuda-toolkit-12-9" not in gone


def test_absent_with_dnf_removes_what_is_locked_and_new() -> None:
    texts = {cuda.ROLE.record: "bash\ncuda-nvcc-12-9\n"}
    machine = node({"cuda-nvcc-12-9": "12.9.86-1", "cuda-crt-12-9": "12.9.86-1", "cuda-x-12-9": "1-1"}, texts, dnf=True)
    assert machine.dnf is not None
    locks = ("cuda-nvcc-12-9-0:12.9.86-1.*", "cuda-crt-12-9-0:12.9.86-1.*", "cuda-x-12-9-0:2-1.*")
    locked = machine.model_copy(update={"dnf": machine.dnf.model_copy(update={"locks": locks})})
    manifest = planned("cuda", locked, state="absent")
    assert manifest.packages is not None
    assert manifest.packages.manager == "dnf"
    assert (manifest.packages.remove, manifest.packages.hold) == ((), cuda.ROLE.held)
    assert manifest.pending_reasons[0] == "cuda-crt-12-9 must be removed"
    assert not any("cuda-x" in reason or "nvcc" in reason for reason in manifest.pending_reasons)


def dcgm_planned(state: NodeState, **settings: Any) -> Manifest:
    return planned("dcgm", state, NVIDIAS, **settings)


def test_dcgm_comes_with_its_pins_and_condition() -> None:
    manifest = dcgm_planned(node({"datacenter-gpu-manager": "1:3.3.9"}, facts=FACTS))
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.remove == ("datacenter-gpu-manager",)
    assert "Pin: version 1:4.*" in (contents(manifest)[dcgm.PREFERENCES] or "")
    assert manifest.units == ()


def test_a_settled_dcgm_has_nothing_pending() -> None:
    first = node(DCGM, facts={**FACTS, **LOADED, "units": [UNIT]}, held=tuple(DCGM))
    settled = after(dcgm_planned(first), first)
    manifest = dcgm_planned(settled)
    assert "Pin: version 1:4.6.1-*" in (contents(manifest)[dcgm.PREFERENCES] or "")
    assert manifest.pending_reasons == ()
    off = settled.model_copy(
        update={
            "facts": settled.facts.model_copy(
                update={
                    "units": tuple(
                        unit.model_copy(update={"enabled": "disabled", "active": "inactive"})
                        for unit in settled.facts.units or ()
                    )
                }
            )
        }
    )
    assert dcgm_planned(off).pending_reasons == (f"{dcgm.UNIT} is not enabled", f"{dcgm.UNIT} does not run")


def test_a_new_dcgm_is_restarted_on_an_idle_node_alone() -> None:
    marker = {dcgm.MARKER: "a new DCGM is installed\n"}
    idle = node(DCGM, marker, facts={**FACTS, **LOADED, "units": [UNIT]})
    assert dcgm_planned(idle).units[-1].state == "restarted"
    process = {"pid": 7, "name": "python3", "type": "C", "user": "anna"}
    busy = node(DCGM, marker, facts={**FACTS, **LOADED, "units": [UNIT], "gpu_processes": [process]})
    manifest = dcgm_planned(busy)
    assert manifest.units[-1].state == "started"
    assert manifest.restarts == {dcgm.UNIT: "a new DCGM is installed"}
    assert "python3 (pid 7, anna)" in manifest.notes[0]


def test_where_the_driver_goes_dcgm_is_left() -> None:
    gone = context(others={"nvidia_driver": {"state": "absent"}})
    assert planned("dcgm", node(DCGM, facts=FACTS), gone) == Manifest(role="dcgm")


@pytest.mark.parametrize("record", ["bash\n", "".join(f"{name}\n" for name in (MARK, *DCGM))], ids=["earlier", "own"])
def test_dcgm_goes_with_everything_of_it(record: str) -> None:
    manifest = planned("dcgm", node(DCGM, {dcgm.ROLE.record: record}, facts={**FACTS, "units": [UNIT]}), state="absent")
    assert {reason.split()[0] for reason in manifest.pending_reasons} >= {*DCGM, dcgm.UNIT, dcgm.ROLE.record}
    assert planned("dcgm", node(), state="absent").pending_reasons == ()


@pytest.mark.parametrize("dnf", [False, True], ids=["apt", "dnf"])
@pytest.mark.parametrize("texts", [{}, {dcgm.ROLE.record: f"{MARK}\ndatacenter-gpu-manager-4-cuda13\n"}])
def test_dcgm_that_was_there_before_stays_and_runs(texts: dict[str, str], dnf: bool) -> None:
    manifest = planned("dcgm", node(DCGM, texts, dnf=dnf, facts={"units": [UNIT]}), state="absent")
    assert manifest.units == ()
    gone = {reason.split()[0] for reason in manifest.pending_reasons}
    assert gone == {*texts, *(["datacenter-gpu-manager-4-cuda13"] if texts else [])}


def test_dcgm_of_dnf_comes_whatever_its_epoch_is_and_is_locked() -> None:
    facts = {key: FACTS[key] for key in ("pci", "packages", "module_files", "dkms", "loaded_driver")}
    manifest = dcgm_planned(node(dnf=True, facts=facts))
    assert manifest.packages is not None
    assert manifest.packages.manager == "dnf"
    assert {entry.partition("=")[2] for entry in manifest.packages.install} == {"*4.*"}
    installed = dict.fromkeys(DCGM, "4.6.0-1")
    state = node(installed, dnf=True, facts={**facts, "units": [UNIT], **LOADED})
    packages = dcgm_planned(state).packages
    assert packages is not None
    assert packages.manager == "dnf"
    lines = lock_lines(installed, packages.hold)
    assert f"{dcgm.CORE}-0:4.6.0-1.*" in lines
    assert any(reason.startswith("not locked: ") for reason in dcgm_planned(state).pending_reasons)
    assert state.dnf is not None
    locked = state.dnf.model_copy(update={"locks": lines})
    settled = after(dcgm_planned(state), state, dnf=locked.model_dump())
    assert dcgm_planned(settled).pending_reasons == ()
