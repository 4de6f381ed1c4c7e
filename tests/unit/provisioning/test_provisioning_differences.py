"""What counts as pending: a manifest against a state, one difference after another; unknown is pending."""

import hashlib
from typing import Any

import pytest
from node_samples import APT_STATE, DNF_STATE, node

from gpunode.facts.running import Unit
from gpunode.provisioning.manifest import (
    ManagedFile,
    ManagedFolder,
    Manifest,
    UnitState,
    compared,
)
from gpunode.provisioning.state import AptState, DnfState, FileState, NodeState
from gpunode.provisioning.transaction import Transaction

PATH = "/etc/x"
GOOD: dict[str, Any] = {"kind": "file", "mode": "0644", "owner": "root", "group": "root"}
GOOD |= {"sha256": hashlib.sha256(b"text\n").hexdigest()}
UNIT = Unit(name="u.service", load="loaded", active="active", sub="running", enabled="enabled")


def why(
    manifest: dict[str, Any], state: NodeState | None = None, files: dict[str, dict[str, Any]] | None = None
) -> tuple[str, ...]:
    machine = state or node()
    more = {path: FileState.model_validate(row) for path, row in (files or {}).items()}
    machine = machine.model_copy(update={"files": {**machine.files, **more}})
    return compared(Manifest(role="x", **manifest), machine).pending_reasons


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        (GOOD, None),
        ({**GOOD, "sha256": "0" * 64}, "differs"),
        ({**GOOD, "mode": "0600"}, "has mode 0600, not 0644"),
        ({**GOOD, "owner": "ada"}, "belongs to ada:root"),
        ({"kind": "absent"}, "is missing"),
        ({"kind": "link"}, "is a link"),
        ({"kind": "unknown"}, "could not be determined"),
        (None, "could not be determined"),
    ],
)
def test_each_difference_of_a_file_is_pending(actual: dict[str, Any] | None, words: str | None) -> None:
    reasons = why({"files": (ManagedFile(path=PATH, content="text\n"),)}, files={PATH: actual} if actual else {})
    assert (words is None and reasons == ()) or (words is not None and len(reasons) == 1 and words in reasons[0])


def test_a_file_that_has_to_go_is_pending_while_it_is_there() -> None:
    gone = {"files": (ManagedFile(path=PATH, content=None),)}
    assert why(gone, files={PATH: GOOD}) == (f"{PATH} must be removed",)
    assert why(gone, files={PATH: {"kind": "absent"}}) == ()


def test_a_keyring_is_compared_by_its_bytes() -> None:
    digest = hashlib.sha256(b"\x99\x01").hexdigest()
    ring = ManagedFile(path=PATH, content="mQE=", encoding="base64")
    assert why({"files": (ring,)}, files={PATH: {**GOOD, "sha256": digest}}) == ()


def test_folders_are_made_and_removed_only_where_they_are_empty() -> None:
    folder = ManagedFolder(path=PATH)
    assert why({"folders": (folder,)}, files={PATH: {"kind": "folder", "mode": "0755"}}) == ()
    assert len(why({"folders": (folder,)}, files={PATH: {"kind": "folder", "mode": "0700"}})) == 1
    empty = ManagedFolder(path=PATH, state="absent_if_empty")
    assert why({"folders": (empty,)}, files={PATH: {"kind": "folder", "entries": 1}}) == ()
    assert len(why({"folders": (empty,)}, files={PATH: {"kind": "folder", "entries": 0}})) == 1


def with_apt(**apt: Any) -> NodeState:
    return node().model_copy(update={"apt": AptState.model_validate({**APT_STATE, **apt})})


@pytest.mark.parametrize(
    ("apt", "words"),
    [
        ({"held": ["libcuda1"]}, None),
        ({}, "libcuda1 is not held"),
        ({"installed": {}, "held": ["libcuda1"]}, "libcuda1 is not installed"),
        ({"installed": {"libcuda1": "570.1-1"}, "held": ["libcuda1"]}, "installed at 570.1-1, not 580.*"),
        ({"held": ["libcuda1"], "unfinished": ["libcuda1"]}, "libcuda1 is half-configured"),
        ({"held": ["libcuda1"], "policy_left": True}, "policy-rc.d"),
        ({"held": ["libcuda1"], "left": ["gcc"]}, "an interrupted run left its transaction"),
        ({"held": ["libcuda1", "linux-image"]}, "linux-image is held"),
        ({"held": ["libcuda1"], "installed": {"libcuda1": "580.1-1", "old-driver": "1"}}, "old-driver must be removed"),
    ],
)
def test_each_difference_of_packages_is_pending(apt: dict[str, Any], words: str | None) -> None:
    change = Transaction(
        manager="apt", install=("libcuda1=580.*",), hold=("libcuda*",), unhold=("linux-image",), remove=("old-*",)
    )
    reasons = why({"packages": change}, with_apt(**{"installed": {"libcuda1": "580.1-1"}, **apt}))
    assert (words is None and reasons == ()) or (words is not None and any(words in line for line in reasons)), reasons


def test_a_package_manager_that_is_unknown_is_pending() -> None:
    assert why({"packages": Transaction(manager="dnf")}) == ("the state of dnf is unknown",)
    broken = node(dnf=True).model_copy(update={"dnf": DnfState.model_validate({**DNF_STATE, "error": "x"})})
    assert why({"packages": Transaction(manager="dnf")}, broken) == ("the state of dnf is unknown",)
    assert why({"packages": Transaction(manager="apt")}, broken) == ("the state of apt is unknown",)


@pytest.mark.parametrize(("locks", "pending"), [(("a-0:1-1.*",), ()), ((), ("not locked: a-0:1-1.*",))])
def test_a_package_that_dnf_should_hold_is_pending_without_its_lock(
    locks: tuple[str, ...], pending: tuple[str, ...]
) -> None:
    state = node({"a": "1-1", "b": "1-1"}, dnf=True)
    assert state.dnf is not None
    known = state.dnf.model_copy(update={"locks": locks})
    assert (
        why({"packages": Transaction(manager="dnf", hold=("a*",))}, state.model_copy(update={"dnf": known})) == pending
    )


@pytest.mark.parametrize(
    ("dnf", "words"),
    [
        ({"own_locks": ["a-0:1-1.*"], "streams": {"m": "s"}}, None),
        ({"own_locks": [], "streams": {"m": "s"}}, "not locked: a-0:1-1.*"),
        ({"own_locks": ["a-0:1-1.*"], "streams": {}}, "the module stream m:s is not enabled"),
        ({"own_locks": ["a-0:1-1.*"], "streams": {"m": "s"}, "locks": ["a-2.*"]}, "the lock a-2.* prevents the change"),
        ({"own_locks": ["a-0:1-1.*"], "streams": {"m": "s"}, "installed": {}}, "a is not installed"),
    ],
)
def test_each_difference_on_a_node_with_dnf_is_pending(dnf: dict[str, Any], words: str | None) -> None:
    change = Transaction(manager="dnf", install=("a=1-*",), stream="m:s", hold=("a",), drop_locks=("a-2.*",))
    state = node({"a": "1-1"}, dnf=True)
    assert state.dnf is not None
    known = DnfState.model_validate({**state.dnf.model_dump(), **dnf})
    reasons = why({"packages": change}, state.model_copy(update={"dnf": known}))
    assert (words is None and reasons == ()) or (words is not None and reasons == (words,))


@pytest.mark.parametrize(
    ("requested", "actual", "words"),
    [
        ({"enabled": True, "state": "started"}, {}, None),
        ({"enabled": True}, {"enabled": "disabled"}, "is not enabled"),
        ({"enabled": False}, {}, "is enabled"),
        ({"state": "started"}, {"active": "failed"}, "does not run"),
        ({"state": "stopped"}, {}, "runs"),
        ({"state": "restarted"}, {}, "has to be restarted"),
        ({"enabled": True}, {"load": "not-found"}, "is not known"),
        ({"enabled": False, "state": "stopped"}, {"load": "not-found"}, None),
    ],
)
def test_each_difference_of_a_unit_is_pending(
    requested: dict[str, Any], actual: dict[str, Any], words: str | None
) -> None:
    state = node()
    facts = state.facts.model_copy(update={"units": (UNIT.model_copy(update=actual),)})
    reasons = why({"units": (UnitState(name="u.service", **requested),)}, state.model_copy(update={"facts": facts}))
    assert (words is None and reasons == ()) or (words is not None and len(reasons) == 1 and words in reasons[0])


def test_the_roles_own_reasons_come_first() -> None:
    reasons = why({"pending_reasons": ("own",), "files": (ManagedFile(path=PATH, content=None),)}, files={PATH: GOOD})
    assert reasons == ("own", f"{PATH} must be removed")
