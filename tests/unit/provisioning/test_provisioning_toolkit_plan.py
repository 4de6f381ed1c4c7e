"""The plan of the role nvidia_container_toolkit: repository, runtime, specification, containerd, migration, removal."""

import json
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from node_samples import after, by_path, contents, context, file, node, planned
from test_provisioning_cuda import bare
from test_provisioning_keys import Keys, keys, needs_gpg

from gpunode.provisioning.containerd import BEFORE as CONTAINERD_BEFORE
from gpunode.provisioning.containerd import CHECKED, CONFIG, DROP_IN, MARKER, SUMS
from gpunode.provisioning.docker_daemon import DAEMON, KEPT
from gpunode.provisioning.docker_daemon import UNIT as DOCKER_UNIT
from gpunode.provisioning.keys import armored
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.nvidia_container_toolkit import ENV, KEY, PREFERENCES, ROLE, SOURCES, YUM
from gpunode.provisioning.repository import QUESTION
from gpunode.provisioning.state import NodeState
from gpunode.provisioning.toolkit import BEGIN, END, FLAGS, NO_GIDS, REFRESH_ENV
from gpunode.provisioning.transaction import lock_lines

__all__ = ["keys"]
BEFORE = ROLE.record
REFRESH = "nvidia-cdi-refresh.service"
FOUR = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
AT = dict.fromkeys(FOUR, "1.20.0-1")
DOCKER = {"docker.io": "26.1.5+dfsg1-9"}
RUNS = {
    "started": 50.0,
    "info": {"version": "26.1.5+dfsg1", "running": 0, "live_restore": True, "cgroup_driver": "systemd"},
    "options": ["live-restore", "exec-opt"],
    "hook_changed": 40.0,
}
FACTS = bare("1eb8").model_dump(mode="json")
SPEC = {
    "path": "/var/run/cdi/nvidia.yaml",
    "size_bytes": 9,
    "cdi_version": "0.7.0",
    "kind": "nvidia.com/gpu",
    "devices": ["0", "all"],
    "driver_versions": ["580.95.05"],
    "missing": [],
}
LOADED = {
    "loaded_driver": {"version": "580.95.05", "flavour": "open"},
    "driver_library_version": "580.95.05",
    "gpu_processes": [],
    "cdi_specs": [SPEC],
    "units": [
        {"name": f"nvidia-cdi-refresh.{kind}", "load": "loaded", "active": "active", "sub": "x", "enabled": "enabled"}
        for kind in ("path", "service")
    ],
}
NVIDIAS = {"nvidia_driver": {"source": "nvidia", "version": "580.95.05"}}


@pytest.fixture
def site_key(tmp_path: Path, keys: Keys) -> str:
    path = tmp_path / "site.asc"
    path.write_text(armored(keys.packets["pinned"]))
    return str(path)


def restarted(manifest: Manifest) -> set[str]:
    """Units that are restarted."""
    return {unit.name for unit in manifest.units if unit.state == "restarted"}


def toolkit(state: NodeState, key: str = "", /, **settings: Any) -> Manifest:
    run = context(others={**NVIDIAS, **settings.pop("others", {})})
    return planned("nvidia_container_toolkit", state, run, **{"key": key, "version": "1.20.0", **settings})


def test_the_publishers_key_is_asked_for() -> None:
    manifest = toolkit(node(facts=FACTS))
    assert manifest.questions[QUESTION].body == {"url": "https://nvidia.github.io/libnvidia-container/gpgkey"}


@needs_gpg
def test_four_packages_at_one_version_with_their_pins(site_key: str) -> None:
    manifest = toolkit(node(DOCKER, engine=RUNS, facts=FACTS), site_key)
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert set(manifest.packages.install) == {f"{name}=1.20.0-*" for name in FOUR}
    assert set(manifest.packages.hold) == set(FOUR)
    assert manifest.packages.files.keys() == {KEY, SOURCES, PREFERENCES}
    text = contents(manifest)[SOURCES] or ""
    assert "URIs: https://nvidia.github.io/libnvidia-container/stable/deb/amd64\nSuites: /\nArchitectures" in text
    assert (contents(manifest)[PREFERENCES] or "").count("Pin-Priority: -1") == 1


@needs_gpg
def test_with_dnf_metadata_is_verified_and_packages_are_locked_at_what_came(site_key: str) -> None:
    facts = {key: FACTS[key] for key in ("pci", "packages", "module_files", "dkms", "loaded_driver")}
    manifest = toolkit(node(dnf=True, facts=facts), site_key)
    assert manifest.packages is not None
    assert manifest.packages.manager == "dnf"
    assert manifest.packages.hold == FOUR
    assert {"gpgcheck=0", "repo_gpgcheck=1"} <= set((contents(manifest)[YUM] or "").splitlines())
    locked = toolkit(node(AT, dnf=True, facts=facts), site_key).packages
    assert locked is not None
    assert locked.manager == "dnf"
    assert "libnvidia-container1-0:1.20.0-1.*" in lock_lines(AT, locked.hold)


def test_the_cuda_repository_can_be_the_one() -> None:
    manifest = toolkit(node(facts=FACTS), repository="cuda")
    assert manifest.questions == {}
    assert contents(manifest)[SOURCES] is None
    assert "release o=*nvidia.github.io" in (contents(manifest)[PREFERENCES] or "")


def settled(key: str, **settings: Any) -> tuple[NodeState, Manifest]:
    first = node({**AT, **DOCKER}, {REFRESH_ENV: "# shipped\n"}, engine=RUNS, facts={**FACTS, **LOADED}, held=FOUR)
    manifest = toolkit(first, key, **settings)
    return after(manifest, first), manifest


@needs_gpg
def test_a_settled_node_has_nothing_pending(site_key: str) -> None:
    state, first = settled(site_key)
    assert json.loads(contents(first)[DAEMON] or "") == {
        "runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}},
        "features": {"cdi": True},
    }
    manifest = toolkit(state, site_key)
    assert manifest.pending_reasons == ()
    assert restarted(manifest) == set()
    # The plan with the result deploys nothing that an engine would have to load.
    assert {each.path for each in manifest.files if each.phase == "last"} == {ENV}
    assert NO_GIDS not in (contents(manifest)[REFRESH_ENV] or "")


@needs_gpg
def test_what_is_damaged_is_pending_and_nothing_else(site_key: str) -> None:
    state, _ = settled(site_key)
    document = state.model_dump()
    document["files"][PREFERENCES] = file("# damaged\n")
    document["apt"]["held"] = FOUR[1:]
    assert set(toolkit(NodeState.model_validate(document), site_key).pending_reasons) == {
        f"{PREFERENCES} differs",
        f"{FOUR[0]} is not held",
    }
    facts = state.facts.model_dump(mode="json")
    stale = {**facts, "cdi_specs": [{**SPEC, "driver_versions": ["570.1"]}, {**SPEC, "path": "/etc/cdi/nvidia.yaml"}]}
    manifest = toolkit(NodeState.model_validate({**state.model_dump(), "facts": stale}), site_key)
    assert contents(manifest)["/etc/cdi/nvidia.yaml"] is None
    assert restarted(manifest) == {REFRESH}
    assert "generated for driver 570.1" in manifest.problems[0]


@needs_gpg
def test_an_old_engine_gets_the_runtime_and_a_specification_that_it_reads(site_key: str) -> None:
    old = {**RUNS, "info": {**RUNS["info"], "version": "20.10.24"}}  # type: ignore[dict-item]
    state = node({**AT, "docker.io": "20.10.24"}, {REFRESH_ENV: ""}, engine=old, facts={**FACTS, **LOADED})
    manifest = toolkit(state, site_key)
    daemon = json.loads(contents(manifest)[DAEMON] or "")
    assert daemon.keys() == {"runtimes", "exec-opts"}
    assert NO_GIDS in (contents(manifest)[REFRESH_ENV] or "")


@needs_gpg
def test_a_hook_that_came_after_the_daemon_needs_a_restart(site_key: str) -> None:
    state, _ = settled(site_key)
    late = state.model_copy(update={"engine": {**RUNS, "hook_changed": 60.0}})
    manifest = toolkit(late, site_key)
    assert restarted(manifest) == {"docker.service"}
    assert any("--gpus" in reason for reason in manifest.pending_reasons)


@pytest.mark.parametrize("status", [0, 1])
def test_what_containerd_prints_of_its_configuration_is_never_shown(tmp_path: Path, status: int) -> None:
    program = tmp_path / "containerd"
    program.write_text(f"#!/bin/sh\necho S3CRET; echo S3CRET >&2; exit {status}\n", encoding="ascii")
    program.chmod(0o755)
    done = run(CHECKED, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "S3CRET" not in done.stdout + done.stderr
    assert ("containerd config dump" in done.stderr) is bool(status)


@needs_gpg
def test_containerd_is_registered_where_something_uses_it(site_key: str) -> None:
    facts = {**FACTS, **LOADED, "tool_versions": {"containerd": "1.7.24", "podman": "5.4.2"}}
    state = node(AT, {CONFIG: "version = 2 # the site's own\n"}, facts=facts, held=FOUR)
    manifest = toolkit(state, site_key)
    register, _, record = manifest.commands
    assert "containerd.service" in restarted(manifest)
    assert [mark.path for mark in manifest.marks] == [MARKER]
    assert register.argv[-2:] == (f"--drop-in-config={DROP_IN}", "--cdi.enabled")
    assert "runtimes.runc" in (contents(manifest)[CONFIG] or "")
    assert by_path(manifest, CONTAINERD_BEFORE).content == "version = 2 # the site's own\n"
    # As nvidia-ctk and the role leave it.
    text = (contents(manifest)[CONFIG] or "") + "imports = []\n"
    files = {CONFIG: file(text), DROP_IN: file("drop-in")}
    sums = "".join(f"{each['sha256']}  {path}\n" for path, each in files.items())
    texts = {CONFIG: text, SUMS: f"# {' '.join(register.argv)}\n{sums}", CONTAINERD_BEFORE: "x"}
    done = toolkit(node(AT, texts, files=files, facts=facts, held=FOUR), site_key)
    assert (done.commands, record.changes) == ((), False)
    assert not any("containerd" in reason for reason in done.pending_reasons if "conf.d" in reason)
    harmed = {**files, DROP_IN: file("other")}
    assert toolkit(node(AT, texts, files=harmed, facts=facts, held=FOUR), site_key).commands
    # A restart that was held back by a process on a GPU is made by a later run.
    busy = {**facts, "gpu_processes": [{"pid": 7, "name": "python3", "type": "C", "user": "anna"}]}
    waits = toolkit(node(AT, {**texts, MARKER: "x\n"}, files=files, facts=busy, held=FOUR), site_key)
    assert "anna" in waits.restarts["containerd.service"]
    free = toolkit(node(AT, {**texts, MARKER: "x\n"}, files=files, facts=facts, held=FOUR), site_key)
    assert "containerd.service" in restarted(free)


@needs_gpg
def test_daemon_json_survives_the_purge_of_the_package_that_owns_it(site_key: str) -> None:
    text = '{"dns": ["10.1.2.3"]}'
    old = {**DOCKER, "nvidia-docker2": "2.14.0-1", "nvidia-container-runtime": "3.14.0-1"}
    manifest = toolkit(node(old, {DAEMON: text}, engine=RUNS, facts=FACTS), site_key)
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert set(manifest.packages.remove) == {"nvidia-docker2", "nvidia-container-runtime"}
    assert (by_path(manifest, KEPT).content, by_path(manifest, KEPT).phase) == (text, "before")
    gone = toolkit(node({**DOCKER, **AT}, {KEPT: text}, engine=RUNS, facts={**FACTS, **LOADED}), site_key)
    assert json.loads(contents(gone)[DAEMON] or "")["dns"] == ["10.1.2.3"]
    assert contents(gone)[KEPT] is None


def test_none_and_a_stack_without_one_change_nothing() -> None:
    assert toolkit(node(AT, facts=FACTS), version="none") == Manifest(role="nvidia_container_toolkit")
    # No branch of Debian's archive knows the toolkit that is requested.
    impossible = {"nvidia_driver": {"source": "debian"}, "cuda": {"toolkit": "13.0"}}
    manifest = toolkit(node(facts=FACTS), version="keep", others=impossible)
    assert manifest.pending_reasons == ()
    assert manifest.notes[0].startswith("no container toolkit: ")
    assert "is not a workload" in toolkit(node(facts=FACTS), env="jax").refusals[0]


@needs_gpg
def test_absent_restores_the_engines(site_key: str) -> None:
    state, _ = settled(site_key)
    document = state.model_dump()
    document["contents"][BEFORE] = "bash\n"
    document["files"][BEFORE] = file("bash\n")
    manifest = toolkit(NodeState.model_validate(document), site_key, state="absent")
    assert contents(manifest)[DAEMON] is None
    assert contents(manifest)[SPEC["path"]] is None  # type: ignore[index]
    assert contents(manifest)[ENV] is None
    # A removal of the packages that fails leaves the restart of the engine to the next run.
    early = [each.path for each in manifest.files if each.phase == "before"]
    (unit,) = (unit for unit in manifest.units if unit.name == DOCKER_UNIT)
    assert early.index(str(unit.mark)) < early.index(DAEMON)
    assert {f"{name} must be removed" for name in FOUR} <= set(manifest.pending_reasons)
    assert toolkit(node(facts=FACTS), site_key, state="absent").pending_reasons == ()


@needs_gpg
def test_absent_removes_a_specification_that_the_probe_could_not_read(site_key: str) -> None:
    state = node(
        {**AT, **DOCKER}, {BEFORE: "bash\n"}, engine=RUNS, facts={**FACTS, **LOADED, "cdi_specs": []}, held=FOUR
    )
    manifest = toolkit(state, site_key, state="absent")
    assert contents(manifest)[SPEC["path"]] is None  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        (f"{BEGIN}\n{FLAGS}={NO_GIDS}\n{END}\n", None),
        (f"# shipped\n{BEGIN}\n{FLAGS}={NO_GIDS}\n{END}\n", "# shipped\n"),
    ],
    ids=["ours", "shipped"],
)
def test_absent_leaves_nothing_of_ours_in_the_environment_of_the_refresh_unit(text: str, stays: str | None) -> None:
    state = node({**AT, **DOCKER}, {BEFORE: "bash\n", REFRESH_ENV: text}, engine=RUNS, facts=FACTS, held=FOUR)
    (environment,) = [row for row in toolkit(state, state="absent").files if row.path == REFRESH_ENV]
    assert (environment.content, environment.phase) == (stays, "before")
