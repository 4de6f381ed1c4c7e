"""The plan of the role docker: what is pending on a bare, a settled, a damaged and a busy node, and what goes."""

import json
from base64 import b64encode
from typing import Any

import pytest
from node_samples import Planned, after, by_path, contents, context, file, node, planned, settings_of
from test_provisioning_keys import Keys, keys, needs_gpg

from gpunode.provisioning.context import Context
from gpunode.provisioning.docker import (
    DATA_ROOT,
    KEY,
    MOUNT,
    PURGES,
    ROLE,
    RPM_KEY,
    SOURCES,
    UNATTENDED,
    USERS,
    YUM,
    DockerResult,
)
from gpunode.provisioning.docker_daemon import DAEMON, KEPT, LIVE, MEMORY, RELOAD, RESTART
from gpunode.provisioning.keys import armored
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.repository import QUESTION
from gpunode.provisioning.state import NodeState
from gpunode.provisioning.transaction import MARK

__all__ = ["keys"]
BEFORE = ROLE.record
DEBIAN = {"docker.io": "20.10.24+dfsg1-1+deb12u1", "containerd": "1.6.20", "runc": "1.1.5"}
CE = {
    "docker-ce": "5:28.3.3-1~debian.12~bookworm",
    "docker-ce-cli": "5:28.3.3-1~debian.12~bookworm",
    "containerd.io": "1.7.27-1",
}
OPTIONS = ["default-shm-size", "live-restore", "log-opt", "log-driver", "exec-opt", "storage-driver", "registry-mirror"]
INFO = {
    "version": "20.10.24+dfsg1",
    "running": 0,
    "live_restore": True,
    "swarm": "inactive",
    "cgroup_driver": "systemd",
}
RUNS = {"started": 50.0, "info": INFO, "command": "", "options": OPTIONS, "group": [], "hook_changed": None}
UNIT = {"name": "docker.service", "load": "loaded", "active": "active", "sub": "running", "enabled": "enabled"}
FOREIGN = '{"dns": ["10.1.2.3"], "log-opts": {"tag": "x", "max-size": "1m"}}'


def units(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"units": list(rows)}


@pytest.fixture
def settled() -> NodeState:
    """A node as the role leaves it, with a running engine of the distribution."""
    first = node(DEBIAN, {DAEMON: FOREIGN}, engine=RUNS, facts=units(UNIT))
    return after(planned("docker", first), first)


def steps(manifest: Manifest) -> list[str | None]:
    """What is done with the running daemon."""
    return [unit.state for unit in manifest.units if unit.state != "started"]


def special(manifest: Manifest) -> DockerResult:
    """What the role's own tasks do."""
    assert isinstance(manifest.result, DockerResult)
    return manifest.result


def daemon(manifest: Manifest) -> Any:
    return json.loads(by_path(manifest, DAEMON).content or "null")


def test_a_bare_node_asks_for_the_publishers_key_first() -> None:
    manifest = planned("docker", node())
    assert manifest.questions[QUESTION].body == {"url": "https://download.docker.com/linux/debian/gpg"}
    refused = planned("docker", node(), context(answers={QUESTION: {"error": "https://x: HTTP status 503"}}))
    assert refused.refusals[0].startswith("repository-unreachable: https://x: HTTP status 503")
    for answer in ({"key": b64encode(b"<html>").decode()}, {"key": "abcde"}, {}):
        foreign = planned("docker", node(), context(answers={QUESTION: answer}))
        assert foreign.refusals[0].startswith("repository-key-differs: ")
        assert "docker_repository_key" in foreign.refusals[0]
    for address in ("http://mirror.test/gpg", "ftp://mirror.test/gpg", "file:/srv/gpg"):
        (line,) = planned("docker", node(), repository_key=address).refusals
        assert line.startswith(f"docker_repository_key: {address}: ")
        assert "https only" in line


@needs_gpg
def test_a_bare_node_gets_dockers_engine_from_a_mirror(tmp_path: Any, keys: Keys) -> None:
    key = tmp_path / "site.asc"
    key.write_text(armored(keys.packets["pinned"]))
    manifest = planned(
        "docker", node(), repository_url="http://mirror.test/docker", repository_key=str(key), version="28.3.3"
    )
    assert manifest.refusals == ()
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert [entry.partition("=")[0] for entry in manifest.packages.install[:3]] == [
        "docker-ce",
        "docker-ce-cli",
        "containerd.io",
    ]
    assert manifest.packages.files.keys() == {KEY, SOURCES}
    text = contents(manifest)[SOURCES] or ""
    assert "URIs: http://mirror.test/docker/debian\nSuites: bookworm\nComponents: stable\n" in text
    assert f"Signed-By: {KEY}\n" in text
    assert "docker-ce is not installed" in manifest.pending_reasons
    assert manifest.units == ()


@needs_gpg
def test_a_node_with_dnf_gets_dockers_rpms(tmp_path: Any, keys: Keys) -> None:
    assert planned("docker", node(dnf=True)).questions[QUESTION].body["url"].endswith("/linux/centos/gpg")
    key = tmp_path / "site.asc"
    key.write_text(armored(keys.packets["pinned"]))
    manifest = planned("docker", node(dnf=True), repository_key=str(key), version="28.3.3")
    assert manifest.packages is not None
    assert manifest.packages.manager == "dnf"
    assert manifest.packages.install[:3] == ("docker-ce=*:28.3.3-*", "docker-ce-cli=*:28.3.3-*", "containerd.io")
    text = contents(manifest)[YUM] or ""
    assert text.splitlines()[1:] == [
        "[gpunode-docker]",
        "name=Docker's packages",
        "baseurl=https://download.docker.com/linux/centos/9/$basearch/stable",
        "enabled=1",
        "gpgcheck=1",
        f"gpgkey=file://{RPM_KEY}",
    ]
    assert UNATTENDED not in contents(manifest)
    refused = planned("docker", node(dnf=True), source="distribution")
    assert "do not ship Docker" in refused.refusals[0]


def test_a_bare_node_gets_the_distributions_where_that_is_requested() -> None:
    manifest = planned("docker", node(), source="distribution", extra_packages=["docker-compose"])
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == ("docker.io", "docker-compose")
    assert contents(manifest)[SOURCES] is None
    # dockerd cannot judge a file before it is there.
    assert by_path(manifest, DAEMON).validate_with is None


def test_in_check_mode_the_planned_engine_counts() -> None:
    run = context(check=True, planned=Planned(packages={"docker.io": "26.1.5+dfsg1-9"}))
    manifest = planned("docker", node(), run, source="distribution")
    assert '"^docker[.]io$"' in (contents(manifest)[UNATTENDED] or "")
    assert by_path(manifest, DAEMON).validate_with is None


def test_foreign_keys_survive_and_the_file_is_kept_as_it_was() -> None:
    first = node(DEBIAN, {DAEMON: FOREIGN}, engine=RUNS, facts=units(UNIT))
    manifest = planned("docker", first)
    assert daemon(manifest) == {
        "dns": ["10.1.2.3"],
        "log-opts": {"tag": "x", "max-size": "100m", "max-file": "5"},
        "live-restore": True,
        "default-shm-size": "1g",
    }
    files = contents(manifest)
    assert files["/etc/docker/daemon.json.before-gpunode"] == FOREIGN
    order = [each.path for each in manifest.files]
    assert order.index(MEMORY.format("docker")) < order.index(DAEMON)
    assert by_path(manifest, MEMORY.format("docker")).mode == "0600"
    assert by_path(manifest, DAEMON).expect_sha256 == first.files[DAEMON].sha256


def test_an_option_of_the_command_line_is_noted_and_the_file_leaves_it_out() -> None:
    started = "{ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd -H fd:// --default-shm-size=1G }"
    first = node(DEBIAN, {DAEMON: FOREIGN}, engine={**RUNS, "command": started}, facts=units(UNIT))
    manifest = planned("docker", first)
    assert "default-shm-size" not in daemon(manifest)
    assert "default-shm-size is not set" in manifest.notes[0]
    more = planned("docker", node(DEBIAN, {DAEMON: FOREIGN}, engine=RUNS, facts=units(UNIT)), shm_size="8g")
    assert daemon(more)["default-shm-size"] == "8g"


def test_a_smaller_size_of_shared_memory_replaces_that_of_the_role(settled: NodeState) -> None:
    manifest = planned("docker", settled, shm_size="512m")
    assert daemon(manifest)["default-shm-size"] == "512m"
    assert steps(manifest) == ["reloaded"]


def test_a_new_engine_validates_its_file() -> None:
    state = node(CE, engine={**RUNS, "info": {**INFO, "version": "28.3.3"}}, texts={KEY: "x"}, facts=units(UNIT))
    manifest = planned("docker", state, context(answers={QUESTION: {"text": "x"}}))
    assert by_path(manifest, DAEMON).validate_with == ("dockerd", "--validate", "--config-file=%s")


def test_a_settled_node_has_nothing_pending(settled: NodeState) -> None:
    manifest = planned("docker", settled)
    assert manifest.pending_reasons == ()
    assert manifest.refusals == ()
    assert steps(manifest) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": "0600"}, f"{UNATTENDED} has mode 0600, not 0644"),
        ({"sha256": "0" * 64}, f"{UNATTENDED} differs"),
        ({"owner": "operator"}, f"{UNATTENDED} belongs to operator:root, not root:root"),
        ({"kind": "absent"}, f"{UNATTENDED} is missing"),
        ({"kind": "unknown"}, f"{UNATTENDED} could not be determined"),
    ],
)
def test_a_damaged_file_is_pending_and_nothing_else(settled: NodeState, change: dict[str, str], reason: str) -> None:
    document = settled.model_dump()
    document["files"][UNATTENDED].update(change)
    assert planned("docker", NodeState.model_validate(document)).pending_reasons == (reason,)


def test_a_disabled_unit_and_a_missing_package_are_pending(settled: NodeState) -> None:
    off = settled.model_copy(update={"facts": settled.facts.model_copy(update={"units": ()})})
    assert planned("docker", off).pending_reasons == ("docker.service is not known",)
    assert settled.apt is not None
    apt = settled.apt.model_copy(update={"installed": {"docker.io": DEBIAN["docker.io"]}})
    assert (
        "docker-compose is not installed"
        in planned("docker", settled.model_copy(update={"apt": apt}), extra_packages=["docker-compose"]).pending_reasons
    )


def test_a_damaged_value_is_written_reloaded_or_restarted(settled: NodeState) -> None:
    text = (settled.contents[DAEMON] or "").replace("100m", "9g")
    document = settled.model_dump()
    document["contents"][DAEMON] = text
    document["files"][DAEMON] = file(text)
    manifest = planned("docker", NodeState.model_validate(document))
    assert steps(manifest) == ["restarted"]
    assert [mark.path for mark in manifest.marks] == [RESTART]
    assert "docker.service has to be restarted: daemon.json: log-opts.max-size" in manifest.pending_reasons
    # live-restore and the like need no restart.
    manifest = planned("docker", settled, live_restore=True, daemon={"registry-mirrors": ["https://m.test"]})
    assert steps(manifest) == ["reloaded"]
    assert [mark.path for mark in manifest.marks] == [RELOAD]


def test_a_run_that_broke_off_behind_the_file_is_finished_by_the_next(settled: NodeState) -> None:
    document = settled.model_dump()
    for path, text in ((RESTART, "daemon.json: log-opts.max-size\n"), (RELOAD, "live-restore\n")):
        document["contents"][path] = text
        document["files"][path] = file(text, mtime=60.0)
    manifest = planned("docker", NodeState.model_validate(document))
    assert steps(manifest) == ["reloaded", "restarted"]
    assert {unit.mark for unit in manifest.units} == {None, RELOAD, RESTART}
    assert manifest.marks == ()
    # Somebody restarted the daemon since.
    document["engine"]["started"] = 70.0
    assert steps(planned("docker", NodeState.model_validate(document))) == ["reloaded"]


def test_a_busy_node_gets_its_file_and_no_restart(settled: NodeState) -> None:
    document = settled.model_dump()
    document["engine"]["info"].update(running=2, live_restore=False)
    text = (settled.contents[DAEMON] or "").replace('"live-restore": true', '"live-restore": false')
    document["contents"][DAEMON] = text
    document["files"][DAEMON] = file(text)
    busy = NodeState.model_validate(document)
    manifest = planned("docker", busy, live_restore=False, log_max_files=7)
    assert daemon(manifest)["log-opts"]["max-file"] == "7"
    assert "restarted" not in steps(manifest)
    assert "2 containers run and would end" in manifest.notes[0]
    assert manifest.restarts == {"docker.service": "daemon.json: log-opts.max-file"}
    # With live-restore switched on by a reload the restart hurts nobody: once it is in force.
    manifest = planned("docker", busy, log_max_files=7)
    assert steps(manifest) == ["reloaded", "restarted"]
    assert manifest.units[-1].ready == LIVE
    allowed = context(others={"preflight": {"gpunode_allow_busy": True}})
    assert "restarted" in steps(planned("docker", busy, allowed, live_restore=False, log_max_files=7))


def test_a_restart_held_back_is_reported_and_not_pending(settled: NodeState) -> None:
    document = settled.model_dump()
    document["engine"]["info"].update(running=1, live_restore=False)
    document["contents"][RESTART] = "daemon.json: log-opts.max-file\n"
    document["files"][RESTART] = file(document["contents"][RESTART], mtime=60.0)
    manifest = planned("docker", NodeState.model_validate(document))
    assert manifest.pending_reasons == ()
    assert "A restart is pending: daemon.json: log-opts.max-file" in manifest.notes[0]


def test_a_daemon_that_does_not_answer_counts_as_busy(settled: NodeState) -> None:
    silent = settled.model_copy(update={"engine": {**RUNS, "info": None}})
    manifest = planned("docker", silent, log_max_files=7)
    assert "restarted" not in steps(manifest)
    assert "dockerd does not answer" in manifest.notes[0]
    refused = planned("docker", silent, source="docker", switch=True)
    assert any("dockerd does not answer" in line for line in refused.refusals)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"daemon": {"hosts": ["tcp://0.0.0.0:2375"]}}, "docker_daemon must not set hosts"),
        ({"daemon": {"live-restor": True}}, "Docker 20.10.24 does not support live-restor in /etc/docker/daemon.json"),
        ({"source": "docker"}, "set docker_source to auto to keep it, or docker_switch to true"),
    ],
)
def test_what_cannot_be_is_refused(settled: NodeState, settings: dict[str, Any], words: str) -> None:
    assert any(words in line for line in planned("docker", settled, **settings).refusals)


def test_a_malformed_file_is_refused_with_its_name() -> None:
    manifest = planned("docker", node(DEBIAN, {DAEMON: "{,}"}, engine=RUNS))
    assert manifest.refusals[0].startswith("/etc/docker/daemon.json: it is not JSON")
    memory = MEMORY.format("docker")
    manifest = planned("docker", node(DEBIAN, {DAEMON: "{}", memory: "x"}, engine=RUNS))
    assert memory in manifest.refusals[0]


def test_users_are_added_once(settled: NodeState) -> None:
    manifest = planned("docker", settled, users=["operator"])
    assert [command.argv for command in manifest.commands] == [("gpasswd", "--add", "operator", "docker")]
    assert set(manifest.pending_reasons) == {"operator is not in the group docker", f"{USERS} is missing"}
    machine = settled.model_copy(update={"engine": {**RUNS, "group": ["operator"]}})
    again = planned("docker", machine, users=["operator"])
    assert (again.pending_reasons, again.commands) == ((), ())


def test_in_check_mode_users_that_accounts_would_create_are_not_looked_up(settled: NodeState) -> None:
    run = context(check=True, planned=Planned(users=("ada",)))
    manifest = planned("docker", settled, run, users=["ada", "operator"])
    assert [command.argv[2] for command in manifest.commands] == ["ada", "operator"]
    assert special(manifest).known == ("operator",)
    ldap = {"state": "present", "ldap_uris": ["ldaps://ldap.example.com"], "ldap_search_base": "dc=example,dc=com"}
    directory = context(check=True, others={"base": ldap})
    assert special(planned("docker", settled, directory, users=["operator"])).known == ()


def data(kind: str, owner: int = 0) -> Context:
    """A run with the answer about /scratch/docker."""
    folder: dict[str, Any] = {"kind": kind, "mode": None, "owner": owner, "entries": None, "mounts": [], "users": []}
    return context(answers={DATA_ROOT: {"paths": {"/scratch/docker": folder}}})


@pytest.mark.parametrize(
    ("kind", "owner", "refused"),
    [("folder", 0, False), ("absent", 0, False), ("folder", 1000, True), ("absent", 1000, True), ("other", 0, True)],
)
def test_the_data_are_in_a_folder_of_root_alone(settled: NodeState, kind: str, owner: int, refused: bool) -> None:
    """Users can write to the scratch directory: they could create the folder with containers in it."""
    keys = {"daemon": {"data-root": "/scratch/docker"}}
    assert planned("docker", settled, **keys).questions[DATA_ROOT].body["paths"] == ["/scratch/docker"]
    manifest = planned("docker", settled, data(kind, owner), **keys)
    assert any("/scratch/docker or a directory above it" in line for line in manifest.refusals) is refused
    folders = [("/scratch/docker", "0710")] if kind == "absent" else []
    assert [(folder.path, folder.mode) for folder in special(manifest).folders] == folders
    assert ("/scratch/docker is missing" in manifest.pending_reasons) is (kind == "absent")


@pytest.mark.parametrize("daemon_keys", [{"data-root": "/scratch/docker"}, {}])
def test_the_daemon_waits_for_the_mount_of_its_data(settled: NodeState, daemon_keys: dict[str, str]) -> None:
    """By the role's variable, and by the file of the node's owner."""
    text = json.dumps({"data-root": "/scratch/docker"})
    first = node(DEBIAN, {} if daemon_keys else {DAEMON: text}, engine=RUNS, facts=units(UNIT))
    manifest = planned("docker", first, data("folder"), daemon=daemon_keys)
    assert "[Unit]\nRequiresMountsFor=/scratch/docker\n" in (contents(manifest)[MOUNT] or "")
    assert contents(planned("docker", settled))[MOUNT] is None
    assert contents(planned("docker", first, state="absent"))[MOUNT] is None


def test_a_socket_that_is_open_to_the_network_is_reported(settled: NodeState) -> None:
    open_one = settled.model_copy(update={"engine": {**RUNS, "command": "dockerd -H tcp://0.0.0.0:2375"}})
    assert "tcp://0.0.0.0:2375" in planned("docker", open_one).notes[0]


@pytest.mark.parametrize("texts", [{}, {DAEMON: FOREIGN}], ids=["no file", "a file that all users read"])
def test_a_proxys_password_is_for_root_alone(texts: dict[str, str]) -> None:
    def mode(proxy: str) -> str:
        manifest = planned("docker", node(DEBIAN, texts), daemon={"proxies": {"https-proxy": proxy}})
        return by_path(manifest, DAEMON).mode

    assert (mode("http://proxy:3128"), mode("http://me:secret@proxy:3128")) == ("0644", "0600")


@pytest.mark.parametrize("record", ["bash\n", f"{MARK}\ncontainerd\ndocker.io\nrunc\n"], ids=["earlier", "own"])
def test_absent_restores_the_file_and_removes_what_came(settled: NodeState, record: str) -> None:
    document = settled.model_dump()
    document["contents"].update({BEFORE: record, USERS: "operator\nanna\n"})
    document["files"].update({BEFORE: file(record), USERS: file("operator\nanna\n")})
    document["engine"]["group"] = ["operator"]
    state = NodeState.model_validate(document)
    manifest = planned("docker", state, state="absent")
    assert manifest.refusals == ()
    assert daemon(manifest) == json.loads(FOREIGN)
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.state == "absent"
    assert {"docker.io must be removed", "containerd must be removed", "operator is in the group docker"} <= set(
        manifest.pending_reasons
    )
    (command,) = manifest.commands
    assert (command.argv, command.may_fail) == (("gpasswd", "--delete", "operator", "docker"), True)
    assert {contents(manifest).get(path, "stays") for path in PURGES} == {None}
    assert manifest.units == ()
    document["engine"]["info"]["running"] = 1
    refused = planned("docker", NodeState.model_validate(document), state="absent")
    assert "1 container runs: stop them" in refused.refusals[0]


@pytest.mark.parametrize("kubelet", [True, False])
def test_absent_leaves_the_containerd_of_kubelet(settled: NodeState, kubelet: bool) -> None:
    record = f"{MARK}\ncontainerd\ndocker.io\n"
    document = settled.model_dump()
    document["contents"][BEFORE] = record
    document["files"][BEFORE] = file(record)
    for folder in ("/var/lib/docker", "/var/lib/containerd"):
        document["files"][folder] = {"kind": "folder", "mode": "0710", "entries": 3}
    kubernetes = {"kubernetes_node": {"state": "present"}} if kubelet else {}
    run = context(others={"docker": {"remove_data": True}, **kubernetes})
    manifest = planned("docker", NodeState.model_validate(document), run, state="absent")
    assert "docker.io must be removed" in manifest.pending_reasons
    assert ("containerd must be removed" in manifest.pending_reasons) is not kubelet
    assert manifest.packages is not None
    assert ({"containerd", "containerd.io"} <= {*manifest.packages.remove_new}) is not kubelet
    assert ("containerd" in manifest.packages.never) is kubelet
    # It stays in the record: a removal that comes later, without kubelet, removes it.
    assert any(file.path == BEFORE for file in manifest.files) is not kubelet
    manual = ("apt-mark", "manual", "containerd")
    assert any(command.argv == manual for command in manifest.commands) is kubelet
    assert special(manifest).data == (("/var/lib/docker",) if kubelet else ("/var/lib/docker", "/var/lib/containerd"))


@pytest.mark.parametrize("record", ["docker.io\ncontainerd\nrunc\n", f"{MARK}\ndocker-compose\n"])
def test_absent_on_a_node_without_anything_has_nothing_pending(record: str) -> None:
    assert planned("docker", node(), state="absent").pending_reasons == ()
    # An engine that was there before the role stays.
    state = node(DEBIAN, {BEFORE: record}, engine=RUNS, facts=units(UNIT))
    manifest = planned("docker", state, state="absent")
    assert manifest.packages is None
    assert manifest.pending_reasons == (f"{BEFORE} must be removed",)


def test_data_goes_only_where_that_is_requested() -> None:
    full = {"kind": "folder", "mode": "0710", "entries": 3}
    state = node(files={"/var/lib/docker": full})
    assert special(planned("docker", state, state="absent")).data == ()
    run = context(others={"docker": {"remove_data": True}})
    manifest = planned("docker", state, run, state="absent")
    assert special(manifest).data == ("/var/lib/docker",)
    assert manifest.pending


def test_a_daemon_json_that_a_purge_removed_is_restored_from_its_copy() -> None:
    state = node(DEBIAN, {KEPT: FOREIGN}, engine=RUNS, facts=units(UNIT))
    manifest = planned("docker", state)
    assert daemon(manifest)["dns"] == ["10.1.2.3"]
    assert contents(manifest)[KEPT] is None
    assert settings_of("docker")["state"] == "present"
