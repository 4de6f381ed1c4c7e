"""Files that users write too: whatever happened to their bytes, a plan keeps the lines of others or is refused."""

import copy
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from ansible_collections.gpunode.node.plugins.module_utils import dnf_transaction, files_state
from effort import effort
from hypothesis import HealthCheck, given, settings
from node_samples import by_path, context, file, node, settings_of
from test_provisioning_accounts import OPERATOR, RECORDED, plan, result

from gpunode.errors import UsageError
from gpunode.provisioning import firewall_policy, ml_environment, storage_mounts, toolkit, updates
from gpunode.provisioning.daemon_json import merge_daemon
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.nvidia_fabric import merged
from gpunode.provisioning.roles import LOOKS, PLANS
from gpunode.provisioning.state import SshState

LINES = ("[commands]", "# a comment", "NAME=value", "upgrade_type = default", "UUID=1 /home xfs defaults 0 0", "", " x")
USERS = st.lists(st.sampled_from(LINES), min_size=1, max_size=6).map("\n".join)
DAMAGE = st.lists(
    st.tuples(
        st.integers(0, 1 << 16),
        st.integers(0, 40),
        st.sampled_from([b"", b"\xe9", b"\x0b", b"\r", b"\x00", b"\n", b"\xe2\x80\xa8", b"\xc2\x85", b"#", b"="]),
    ),
    max_size=3,
)
MANY = settings(
    max_examples=effort(60, 1000),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def damaged(data: bytes, damage: list[tuple[int, int, bytes]]) -> bytes:
    """Return the bytes with parts replaced: removed, cut, or by bytes that split or spoil text."""
    for at, length, instead in damage:
        start = at % (len(data) + 1)
        data = data[:start] + instead + data[start + length :]
    return data


def lost(before: str, after: str, section: str) -> list[str]:
    """Return lines of others that are gone: all but those of the role's section, if both marks are whole."""
    lines = before.split("\n")
    marks = [section.split("\n", maxsplit=1)[0], section.rstrip("\n").split("\n")[-1]]
    if [line for line in lines if line in marks] == marks:
        lines = lines[: lines.index(marks[0])] + lines[lines.index(marks[1]) + 1 :]
    gone = Counter(line for line in lines if line.strip()) - Counter(after.split("\n"))
    # What remains of a section without its marks may go with it.
    return [line for line in gone.elements() if line not in section.split("\n")]


def nccl(text: str | None) -> str | None:
    state = node(texts={ml_environment.NCCL: text} if text is not None else {})
    run = settings_of("ml_environment", nccl={"NCCL_IB_TC": "106"})
    return by_path(PLANS["ml_environment"](state, run, context()), ml_environment.NCCL).content


def fstab(text: str | None) -> str | None:
    problem = storage_mounts.section_problem(text or "")
    if problem:
        raise UsageError(problem)
    return storage_mounts.with_lines(text or "", [storage_mounts.scratch_mount("/scratch", "1-2", ["noatime"])])


def refresh(text: str | None) -> str | None:
    return toolkit.refresh_environment(text, True).text


SECTIONS: dict[str, Callable[[str | None], str | None]] = {
    "nccl.conf": nccl,
    "fstab": fstab,
    "cdi-refresh.env": refresh,
}


@pytest.mark.parametrize("name", SECTIONS)
@MANY
@given(before=USERS, after=USERS, damage=DAMAGE)
def test_no_line_of_others_is_lost_around_a_section(name: str, before: str, after: str, damage: Any) -> None:
    merge = SECTIONS[name]
    section = merge(None) or ""
    whole = f"{before}\n{section}{after}\n"
    assert lost(whole, merge(whole) or "", section) == []
    try:
        text = damaged(whole.encode(), damage).decode()
        made = merge(text)
    except (UsageError, UnicodeDecodeError):
        return
    assert lost(text, made or "", section) == []
    assert merge(made) == made


@MANY
@given(before=USERS, damage=DAMAGE)
def test_no_line_of_a_versionlock_list_is_lost(
    before: str, damage: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("locks") / "versionlock.list"
    section = "# BEGIN gpunode (role cuda)\na-0:1-1.*\n# END gpunode (role cuda)\n"
    data = damaged(f"{before}\n{section}bash-5.*\n".encode(), damage)
    path.write_bytes(data)
    try:
        dnf_transaction.change_locks(str(path), "gpunode (role cuda)", ["a-0:2-1.*"], [], write=True)
    except (OSError, dnf_transaction.TransactionRefusedError):
        assert path.read_bytes() == data
    else:
        assert lost(data.decode(), path.read_bytes().decode(), section) == []


@MANY
@given(text=USERS, damage=DAMAGE)
def test_no_byte_of_other_files_is_lost(text: str, damage: Any) -> None:
    try:
        text = damaged(text.encode(), damage).decode()
    except UnicodeDecodeError:
        return
    ssh = copy.deepcopy(RECORDED)
    next(account for account in ssh["accounts"] if account["name"] == "operator")["document"] = text
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFlMQ4QIoLa0nhzL10xJLycLZUvclZ1U9Ui9YZwHN8u3 new"
    (keys,) = [
        row["content"]
        for row in result(plan(ssh, admins=[{**OPERATOR, "keys": [key]}]))["guarded"]
        if row["path"].endswith("authorized_keys")
    ]
    assert keys.startswith(text)
    assert lost(text, merged(text, {"FABRIC_MODE": "1"}), "FABRIC_MODE=1") == []
    automatic, _, _ = updates.automatic_text(text, None, automatic=True, kernel=False, engine=False)
    assert lost(text, automatic or "", "\n".join(line for line in text.split("\n") if "upgrade_type" in line)) == []
    assert lost(text, firewall_policy.with_default_zone(text, "gpunode"), "DefaultZone=gpunode") == []


@MANY
@given(damage=DAMAGE)
def test_no_value_of_daemon_json_is_lost(damage: Any) -> None:
    users = {"data-root": "/scratch", "log-opts": {"labels": "a"}, "max-concurrent-downloads": 18446744073709551617}
    try:
        text = damaged(json.dumps(users, indent=1).encode(), damage).decode()
    except UnicodeDecodeError:
        return
    done = merge_daemon(text, {"live-restore": True})
    if done.problem is None:
        before, after = json.loads(text), json.loads(done.text or "{}")
        assert {**before, "live-restore": True} == after


@pytest.mark.parametrize(
    ("role", "path"),
    # The plans of a reboot and of the return to service change no file.
    [(role, path) for role, look in LOOKS.items() for path in look.contents if role not in ("reboot", "service")],
)
def test_a_document_that_cannot_be_read_is_refused_by_its_role(role: str, path: str) -> None:
    reason = f"{path} is not UTF-8 text (byte 7)"
    state = node(files={path: {**file("x"), "problem": reason}})
    run = settings_of(role, **({"state": "present"} if "state" in settings_of(role) else {}))
    try:
        manifest: Manifest = PLANS[role](state, run, context())
    except UsageError:
        manifest = Manifest(role=role)
    whole = path.startswith("/run/gpunode/") or "gpunode-" in path.rpartition("/")[2]
    assert [refusal for refusal in manifest.refusals if reason in refusal] == ([] if whole else [manifest.refusals[0]])
    assert whole or manifest.files == ()


def test_a_daemons_document_that_cannot_be_read_is_refused() -> None:
    ssh = copy.deepcopy(RECORDED)
    ssh["unreadable"] = {"/etc/ssh/sshd_config": "/etc/ssh/sshd_config is not UTF-8 text (byte 3)"}
    state = node().model_copy(update={"ssh": SshState.model_validate(ssh)})
    run = settings_of("ssh_hardening", state="present", add_include=True)
    manifest = PLANS["ssh_hardening"](state, run, context())
    assert (manifest.files, len(manifest.refusals)) == ((), 1)
    assert "sshd_config is not UTF-8 text (byte 3)" in manifest.refusals[0]


def test_why_a_document_cannot_be_read(tmp_path: Path) -> None:
    texts = {"latin": b"caf\xe9\n", "large": b"x" * ((1 << 20) + 1), "good": b"caf\xc3\xa9\n"}
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "dangling").symlink_to("none")
    paths = [str(tmp_path / name) for name in (*texts, "dangling", "none", "good/below")]
    collected = files_state.collected([], [], paths)
    problems = {Path(path).name: collected["files"][path].get("problem", "") for path in paths}
    assert problems == {
        "latin": f"{tmp_path}/latin is not UTF-8 text (byte 3)",
        "large": f"{tmp_path}/large is larger than 1024 KiB",
        "good": "",
        "dangling": f"{tmp_path}/dangling: No such file or directory",
        "none": "",
        "below": "",
    }
