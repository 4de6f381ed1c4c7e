"""The role accounts on what a lab node reported, and public keys as people give them."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from effort import effort
from hypothesis import given, settings
from node_samples import by_path, file, node, planned
from plan_samples import context_of, settings_of

from gpunode.provisioning import accounts
from gpunode.provisioning.accounts import EXCEPTIONS, HARDENING, SYSCTL, key_problem
from gpunode.provisioning.kernel_tuning import SYSCTL as TUNED
from gpunode.provisioning.manifest import Manifest, compared
from gpunode.provisioning.state import SshState, sysctl_path

RECORDED = json.loads((Path(__file__).parents[2] / "fixtures" / "ssh" / "debian-12.json").read_text(encoding="utf-8"))
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFlMQ4QIoLa0nhzL10xJLycLZUvclZ1U9Ui9YZwHN8u3 ada"
ADA = {"name": "ada", "keys": [KEY], "state": "present"}
OPERATOR = {"name": "operator", "keys": [], "state": "present"}
ENCRYPTED = (
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAACmFlczI1Ni1jdHI\n-----END OPENSSH PRIVATE KEY-----"
)


def result(manifest: Manifest) -> dict[str, Any]:
    """What the role's own tasks read."""
    return manifest.result.model_dump(mode="json") if manifest.result else {}


def plan(
    ssh: dict[str, Any] | None = None,
    *,
    texts: dict[str, str] | None = None,
    files: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    tuned: dict[str, Any] | None = None,
    **changes: Any,
) -> Manifest:
    state = node(files=files, texts=texts, facts={"virtualization": "none", **(facts or {})})
    state = state.model_copy(update={"ssh": SshState.model_validate(ssh or RECORDED)})
    requested = settings_of("accounts", **{"state": "present", "admins": [ADA], **changes})
    return compared(accounts.ROLE.plan(state, requested, context_of({"kernel_tuning": {"sysctl": tuned or {}}})), state)


NIC = {"name": "eth0", "slot": None, "driver": "mlx5_core", "state": "up", "speed_mbit_per_s": 100_000, "mtu": 9000}
NUMA = {"cpus": "0", "memory_total_mib": 1, "memory_free_mib": 1, "distances": [10, 20]}
# In a container the kernel's settings are written, and nothing is asked about them.
LARGE_NODE = node(
    facts={
        "virtualization": "docker",
        "nics": [{**NIC, "numa_node": 0, "carrier_changes": 1}],
        "numa": [{**NUMA, "node": 0}, {**NUMA, "node": 1}],
    }
)


def guarded(manifest: Manifest) -> dict[str, str | None]:
    return {row["path"]: row["content"] for row in result(manifest)["guarded"]}


def test_accounts_are_left_alone_unless_they_are_asked_for() -> None:
    assert not plan(state="keep").pending


def test_a_new_admin_gets_a_user_a_key_and_a_rule() -> None:
    manifest = plan()
    # In check mode, other roles read these names.
    assert (result(manifest)["create"], result(manifest)["homes"]) == (["ada"], {"ada": "/home/ada"})
    files = guarded(manifest)
    assert files["/home/ada/.ssh/authorized_keys"] == f"{KEY}\n"
    assert "ada ALL=(ALL:ALL) NOPASSWD: ALL" in (files[accounts.SUDO] or "")
    rule = next(row for row in result(manifest)["guarded"] if row["path"] == accounts.SUDO)
    assert (rule["mode"], rule["validate_with"][0]) == ("0440", "visudo")
    keys = next(row for row in result(manifest)["guarded"] if row["path"] != accounts.SUDO)
    assert (keys["owner"], keys["group"], keys["expect_sha256"]) == ("ada", "ada", None)
    assert manifest.pending_reasons[0] == "ada is not there"
    assert {f"{path} differs" for path in files} < set(manifest.pending_reasons)


@pytest.mark.parametrize(
    ("defaults", "base"),
    [
        ("HOME=/data/home\n", "/data/home"),
        ("# HOME=/x\nHOME=/a\nHOME=/srv/\n", "/srv"),
        ("HOME=\n", "/home"),
        ("HOME=srv\n", "/home"),
    ],
)
def test_a_new_user_lives_where_useradd_puts_users(defaults: str, base: str) -> None:
    assert accounts.USERADD in accounts.ROLE.look.contents
    manifest = plan(texts={accounts.USERADD: defaults})
    assert result(manifest)["homes"] == {"ada": f"{base}/ada"}
    assert guarded(manifest)[f"{base}/ada/.ssh/authorized_keys"] == f"{KEY}\n"
    # The home of an existing user is that of the user database.
    assert "/home/operator/.ssh/authorized_keys" in guarded(
        plan(texts={accounts.USERADD: defaults}, admins=[{**OPERATOR, "keys": [KEY]}])
    )


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60))
@settings(max_examples=effort(40, 2000), deadline=None)
def test_a_key_is_added_and_no_byte_of_the_file_changes(text: str) -> None:
    ssh = copy.deepcopy(RECORDED)
    operator = next(account for account in ssh["accounts"] if account["name"] == "operator")
    operator["document"] = text
    after = guarded(plan(ssh, admins=[{**OPERATOR, "keys": [KEY]}]))["/home/operator/.ssh/authorized_keys"]
    assert after is not None
    assert after.startswith(text)
    assert after.removeprefix(text).removeprefix("\n") == f"{KEY}\n"


def test_keys_that_are_there_stay_unless_the_list_is_exclusive() -> None:
    operator = {**OPERATOR, "keys": [KEY]}
    path = "/home/operator/.ssh/authorized_keys"
    before = next(account for account in RECORDED["accounts"] if account["name"] == "operator")["document"]
    assert guarded(plan(admins=[operator]))[path] == before + KEY + "\n"
    assert guarded(plan(admins=[operator], exclusive_keys=True))[path] == KEY + "\n"
    assert path not in guarded(plan(admins=[OPERATOR]))
    # Another comment or option makes no other key of it; a line that is a comment is not a key.
    admin, text = {**OPERATOR, "keys": [f"{KEY} of  her laptop"]}, f"no-pty {KEY.removesuffix(' ada')}\n"
    ssh = copy.deepcopy(RECORDED)
    row = next(account for account in ssh["accounts"] if account["name"] == "operator")
    row["document"] = text
    assert path not in guarded(plan(ssh, admins=[admin]))
    row["document"] = f" # {text}"
    (keys,) = (row for row in result(plan(ssh, admins=[admin]))["guarded"] if row["path"] == path)
    assert keys["content"] == f" # {text}{KEY} of her laptop\n"
    assert (keys["mode"], keys["owner"], keys["group"]) == ("0600", "operator", "users")


@pytest.mark.parametrize(
    ("document", "exclusive", "expected"),
    [
        ("ssh-ed25519 AAAA mine\r\n", False, hashlib.sha256(b"ssh-ed25519 AAAA mine\r\n").hexdigest()),
        (None, False, "absent"),
        ("ssh-ed25519 AAAA mine\n", True, None),
    ],
)
def test_a_key_that_the_user_adds_after_the_plan_is_not_lost(document: Any, exclusive: bool, expected: Any) -> None:
    ssh = copy.deepcopy(RECORDED)
    next(account for account in ssh["accounts"] if account["name"] == "operator")["document"] = document
    manifest = plan(ssh, admins=[{**OPERATOR, "keys": [KEY]}], exclusive_keys=exclusive)
    (keys,) = (row for row in result(manifest)["guarded"] if row["path"].endswith("authorized_keys"))
    assert keys["expect_sha256"] == expected
    # A change that waits for its confirmation is reverted first.
    manifest = plan(
        ssh, files={accounts.WAITING: file("")}, admins=[{**OPERATOR, "keys": [KEY]}], exclusive_keys=exclusive
    )
    (keys,) = (row for row in result(manifest)["guarded"] if row["path"].endswith("authorized_keys"))
    assert keys["expect_sha256"] is None


@pytest.mark.parametrize(
    ("admin", "named"),
    [
        ({**ADA, "keys": []}, "the user has no key"),
        ({**ADA, "keys": [ENCRYPTED]}, "private key"),
        ({**ADA, "keys": ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFlM ada"]}, "damaged"),
        ({**ADA, "keys": ["ssh-ed25519 %%%% ada"]}, "does not decode"),
        ({**ADA, "keys": [f"{KEY}\n{KEY}"]}, "2 lines"),
        ({**ADA, "keys": ["hello there"]}, "which is not a key type"),
        ({**ADA, "name": "Ada Lovelace"}, "not a valid user name"),
        ({**ADA, "name": "root"}, "root"),
        ({**ADA, "keys": [KEY, "hello there"]}, "key 2 of ada"),
        (OPERATOR, "operator is listed twice"),
    ],
)
def test_bad_input_is_refused_and_no_secret_repeated(admin: dict[str, Any], named: str) -> None:
    manifest = plan(admins=[OPERATOR, admin])
    assert [reason for reason in manifest.refusals if named in reason], manifest.refusals
    assert "b3BlbnNzaC1" not in " ".join(manifest.refusals)


def test_the_size_of_the_journal() -> None:
    (refusal,) = plan(journal_max="2 GB").refusals
    assert refusal == "accounts_journal_max: '2 GB' is not a size (examples: 500M, 2G)"
    manifest = plan(journal_max="500M")
    assert "SystemMaxUse=500M\n" in (by_path(manifest, accounts.JOURNAL).content or "")
    assert manifest.units
    manifest = plan(journal_max="")
    assert by_path(manifest, accounts.JOURNAL).content is None
    assert not manifest.units, "journald reads its settings again only where its file changes"


def test_nothing_is_planned_where_the_accounts_are_unknown() -> None:
    requested = settings_of("accounts", state="present", admins=[ADA])
    manifest = accounts.ROLE.plan(node(), requested, context_of({}))
    assert manifest.refusals == ("the accounts of the node could not be determined",)


def test_root_under_another_name_is_named() -> None:
    ssh = copy.deepcopy(RECORDED)
    assert plan(ssh).notes == ()
    next(account for account in ssh["accounts"] if account["name"] == "operator")["uid"] = 0
    (note,) = plan(ssh).notes
    assert note.startswith("operator has the user id 0 and is therefore root under another name")


@pytest.mark.parametrize(("sudo", "rule"), [("password", "ada ALL=(ALL:ALL) ALL\n"), ("none", None)])
def test_an_admin_who_is_absent_has_no_rule_and_a_rule_can_be_left_out(sudo: str, rule: str | None) -> None:
    files = {accounts.SUDO: file("of an earlier run", mode="0440")}
    manifest = plan(files=files, admins=[ADA, {**OPERATOR, "state": "absent"}], sudo=sudo)
    content = guarded(manifest)[accounts.SUDO]
    assert (content or "").partition("\n")[2] == (rule or "")
    assert (content is None) == (rule is None)
    assert accounts.SUDO not in guarded(plan(admins=[ADA], sudo="none"))


def test_absent_removes_rules_and_settings_and_locks_nobody() -> None:
    clean = plan(state="absent")
    assert not clean.pending, clean.pending_reasons
    assert (clean.result, clean.kernel_values, clean.units) == (accounts.AccountsResult(), {}, ())
    paths = (accounts.SUDO, accounts.JOURNAL, SYSCTL, accounts.ROLE.kernel_memory, accounts.WAITING)
    manifest = plan(state="absent", files={path: file("x") for path in paths})
    assert guarded(manifest) == {accounts.SUDO: None}
    assert manifest.units
    assert [(file.path, file.content) for file in manifest.files] == [(accounts.JOURNAL, None), (SYSCTL, None)]
    assert manifest.pending_reasons == (
        "an earlier change waits for its confirmation",
        f"{accounts.SUDO} must be removed",
        "the kernel's settings have to be restored",
        f"{accounts.JOURNAL} must be removed",
        f"{SYSCTL} must be removed",
        f"{accounts.JOURNAL_UNIT} has to be restarted",
    )
    folders = {path: {"kind": "folder", "entries": 1} for path in (accounts.ROLE.kernel_memory,)}
    manifest = plan(state="absent", files=folders)
    assert "the kernel's settings have to be restored" not in manifest.pending_reasons
    assert not manifest.units


def test_an_exclusive_list_without_keys_is_refused() -> None:
    assert plan(admins=[OPERATOR]).refusals == ()
    assert "the user has no key" in plan(admins=[OPERATOR], exclusive_keys=True).refusals[0]


@pytest.mark.parametrize("kind", ["link", "file", "other"])
def test_what_is_no_directory_in_the_place_of_the_folder_is_refused(kind: str) -> None:
    ssh = copy.deepcopy(RECORDED)
    next(account for account in ssh["accounts"] if account["name"] == "operator")["folder"] = kind
    assert "operator: /home/operator/.ssh is " in plan(ssh, admins=[OPERATOR]).refusals[0]


def test_keys_that_cannot_be_read_are_refused_and_not_replaced() -> None:
    ssh = copy.deepcopy(RECORDED)
    row = next(account for account in ssh["accounts"] if account["name"] == "operator")
    row |= {"document": None, "document_problem": "/home/operator/.ssh/authorized_keys is a named pipe, not a file"}
    (refusal,) = plan(ssh, admins=[OPERATOR]).refusals
    assert "operator: /home/operator/.ssh/authorized_keys is a named pipe" in refusal


def test_admins_with_a_locked_account_can_log_in_without_pam() -> None:
    """sshd refuses the keys of an account with "!", if it does not leave that to PAM."""
    ssh = copy.deepcopy(RECORDED)
    for account in ssh["accounts"]:
        account["password"] = "closed"  # noqa: S105
    assert result(plan(ssh, admins=[OPERATOR]))["lock"] == []
    ssh["effective"] = ssh["effective"].replace("usepam yes", "usepam no")
    assert result(plan(ssh, admins=[OPERATOR]))["lock"] == ["operator"]


def test_the_password_of_this_login_stays_without_a_key() -> None:
    ssh = copy.deepcopy(RECORDED)
    ssh["login"] = {"user": "root", "address": "192.0.2.1", "port": 22}
    root = next(account for account in ssh["accounts"] if account["name"] == "root")
    root |= {"password": "none", "keys": []}
    assert "root" not in result(plan(ssh))["lock"]
    root["keys"] = [{"type": "ssh-ed25519", "bits": 256, "blob": "AAAA", "options": ""}]
    assert "root" in result(plan(ssh))["lock"]


def test_unneeded_passwords_are_locked() -> None:
    ssh = copy.deepcopy(RECORDED)
    ssh["accounts"][0] |= {"password": "none"}
    assert result(plan(ssh, admins=[OPERATOR]))["lock"] == ["operator", "root"]
    assert "the password of root is not locked" in plan(ssh, admins=[OPERATOR]).pending_reasons
    assert result(plan(ssh))["lock"] == ["root"], "the password of a user who is not an admin stays"
    assert result(plan(ssh, admins=[OPERATOR], sudo="password"))["lock"] == ["root"]
    assert result(plan(ssh, admins=[OPERATOR], lock_passwords=False))["lock"] == []


def test_a_settled_node_is_left_alone() -> None:
    ssh = copy.deepcopy(RECORDED)
    first = plan(ssh, admins=[{**OPERATOR, "keys": []}], sudo="password")
    texts = {file.path: file.content or "" for file in first.files}
    files: dict[str, Any] = {path: file(text) for path, text in texts.items()}
    files[accounts.SUDO] = file(guarded(first)[accounts.SUDO] or "", mode="0440")
    files[accounts.ROLE.folder] = {"kind": "folder", "mode": "0755", "owner": "root", "group": "root", "entries": 0}
    live = {sysctl_path(name): f"{value}\n" for name, value in HARDENING.items()}
    settled = plan(ssh, files=files, texts=live, admins=[OPERATOR], sudo="password")
    assert not settled.pending, settled.pending_reasons
    other = {**live, sysctl_path("kernel.kptr_restrict"): "0\n"}
    (reason,) = plan(ssh, files=files, texts=other, admins=[OPERATOR], sudo="password").pending_reasons
    assert reason == "/proc/sys/kernel/kptr_restrict is 0, not 1"
    unset = plan(
        ssh, files={**files, SYSCTL: {"kind": "absent"}}, texts=other, admins=[OPERATOR], sudo="password", sysctl=False
    )
    assert (unset.pending, unset.kernel_values, by_path(unset, SYSCTL).content) == (False, {}, None)
    waits = {**files, accounts.WAITING: file("")}
    assert plan(ssh, files=waits, texts=live, admins=[OPERATOR], sudo="password").pending


def keys_of(text: str | None) -> set[str]:
    return {line.partition(" = ")[0] for line in (text or "").splitlines() if line and not line.startswith("#")}


@settings(max_examples=effort(40, 1000), deadline=None)
@given(tuned=st.dictionaries(st.sampled_from([*sorted(HARDENING), "vm.swappiness"]), st.sampled_from(["0", "1", None])))
def test_no_kernel_setting_is_set_by_two_roles(tuned: dict[str, Any]) -> None:
    """Also of those that the node's owner requests: kernel_tuning has them, and accounts leaves them alone."""
    kernel_tuning = planned("kernel_tuning", LARGE_NODE, sysctl=tuned, fleet_size=1000)
    kernel = next(file.content for file in kernel_tuning.files if file.path == TUNED)
    manifest = plan(tuned=tuned)
    keys = keys_of(next(file.content for file in manifest.files if file.path == SYSCTL))
    assert len(keys_of(kernel)) > 8 - len(tuned)
    assert not keys_of(kernel) & keys
    assert keys == HARDENING.keys() - tuned.keys()
    assert (manifest.kernel_values or {}).keys() == {sysctl_path(name) for name in keys}


def test_a_pattern_of_kernel_settings_has_one_owner_too() -> None:
    manifest = plan(tuned={"net.ipv4.conf.*.accept_redirects": "1"})
    keys = keys_of(next(file.content for file in manifest.files if file.path == SYSCTL))
    assert HARDENING.keys() - keys == {f"net.ipv4.conf.{name}.accept_redirects" for name in ("all", "default")}


def test_nothing_that_hurts_a_gpu_node_is_set_and_each_exception_is_explained() -> None:
    content = next(file.content or "" for file in plan().files if file.path == SYSCTL)
    lines = [line for line in content.splitlines() if line and not line.startswith("#")]
    names = {line.partition(" = ")[0] for line in lines}
    for exception, why in EXCEPTIONS.items():
        assert f"# {exception}: {why}." in content
    hostile = (
        "ip_forward",
        "rp_filter",
        "arp_ignore",
        "userns",
        "user_namespaces",
        "perf_event",
        "ptrace_scope",
        "overcommit",
        "kexec",
    )
    assert not [name for name in names for word in hostile if word in name]


def test_in_a_container_the_hosts_kernel_is_left_alone() -> None:
    assert plan(facts={"virtualization": "docker"}).kernel_values == {}
    assert plan().kernel_values


@pytest.mark.parametrize("key", [KEY, f'from="10.0.0.0/8" {KEY}', "sk-" + KEY])
def test_good_keys_and_options_are_accepted(key: str) -> None:
    expected = None if not key.startswith("sk-") else "damaged"
    assert (key_problem(key) is None) if expected is None else expected in str(key_problem(key))


def test_an_admin_user_of_a_directory_needs_no_key_in_a_file() -> None:
    """sshd asks SSSD for the keys: no password is locked, and nothing is written into the home."""
    ssh = copy.deepcopy(RECORDED)
    lena = {
        **ssh["accounts"][0],
        "name": "lena",
        "uid": 20001,
        "group": "staff",
        "home": "/nfs/home/lena",
        "groups": [],
    }
    ssh["accounts"].append({**lena, "password": "unknown", "keys": [], "document": None, "folder": "absent"})
    admins = [{"name": "lena", "keys": [], "state": "present"}]
    assert [line for line in plan(ssh, admins=admins).refusals if "lena" in line]
    command = "authorizedkeyscommand /usr/bin/sss_ssh_authorizedkeys"
    ssh["effective"] = ssh["effective"].replace("authorizedkeyscommand none", command)
    manifest = plan(ssh, admins=admins)
    assert manifest.refusals == ()
    values = result(manifest)
    assert (values["create"], [name for name in values["lock"] if name == "lena"]) == ([], [])
    assert not [row for row in values["guarded"] if "/nfs/home" in row["path"]]


def test_in_check_mode_an_admin_user_may_come_with_the_directory() -> None:
    state = node(facts={"virtualization": "none"}).model_copy(update={"ssh": SshState.model_validate(RECORDED)})
    requested = settings_of("accounts", state="present", admins=[{"name": "lena", "keys": [], "state": "present"}])
    directory = {"state": "present", "ldap_uris": ["ldaps://ldap"], "ldap_search_base": "dc=a"}
    for base, refused in (({}, True), (directory, False)):
        manifest = accounts.ROLE.plan(state, requested, context_of({"base": base}, check=True))
        assert bool(manifest.refusals) is refused
    assert accounts.ROLE.plan(state, requested, context_of({"base": directory})).refusals
