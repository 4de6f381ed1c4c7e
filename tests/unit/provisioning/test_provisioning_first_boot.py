"""The plan of first_boot: what an image gets and loses, its program, and what of a manifest an image can have."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from plan_samples import context_of, planned, settings_of, state_of
from programs import run_program

from gpunode.errors import UsageError
from gpunode.provisioning.first_boot import (
    EXPECT,
    INVENTORY,
    KEYS,
    MACHINE_ID,
    PROGRAM,
    RECORD,
    ROLE,
    UNIT,
    VENV,
    FirstBootResult,
)
from gpunode.provisioning.manifest import (
    ManagedFile,
    Manifest,
    NodeCommand,
    RevertibleChange,
    UnitState,
)
from gpunode.provisioning.roles import IMAGE_ROLES, PLANS, of_image, offline
from gpunode.provisioning.state import NodeState

FACTS = {"host": "node", "collected_at": "2026-11-20T10:00:00Z", "packages": []}
FILE: dict[str, Any] = {"kind": "file", "mode": "0644", "owner": "root", "group": "root"}


def node(installed: tuple[str, ...] = ("openssh-server",), **more: Any) -> NodeState:
    return state_of(FACTS, {"installed": dict.fromkeys(installed, "1")}, **more)


def plan(state: NodeState, others: dict[str, Any] | None = None, **settings: Any) -> Manifest:
    return planned("first_boot", state, {**(others or {}), "first_boot": {"state": "present", **settings}})


def file_of(manifest: Manifest, path: str) -> ManagedFile:
    (file,) = [file for file in manifest.files if file.path == path]
    return file


def result(manifest: Manifest) -> FirstBootResult:
    assert isinstance(manifest.result, FirstBootResult)
    return manifest.result


def test_by_default_nothing_is_changed() -> None:
    assert not planned("first_boot", node()).manages


def test_the_inventory_has_the_variables_of_the_roles_that_differ_from_their_defaults() -> None:
    others = {
        "base": {"state": "present", "ldap_bind_password": "secret"},
        "preflight": {"gpunode_expect": {"gpus": 8}, "gpunode_image": True, "gpunode_roles": ["base"]},
    }
    manifest = plan(node(), others, seal=True)
    file = file_of(manifest, INVENTORY)
    assert (file.mode, file.private) == ("0600", True), "it may have passwords"
    host = json.loads(file.content or "")["gpu_nodes"]["hosts"]["localhost"]
    assert host == {
        "ansible_connection": "local",
        "ansible_python_interpreter": "/usr/bin/python3",
        "base_state": "present",
        "base_ldap_bind_password": "secret",
        "gpunode_expect": {"gpus": 8},
        "gpunode_roles": ["base"],
    }
    assert json.loads(file_of(manifest, EXPECT).content or "") == {"gpus": 8}
    assert file_of(plan(node()), EXPECT).content is None
    connection = {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}
    assert json.loads(file_of(plan(node()), INVENTORY).content or "") == {
        "gpu_nodes": {"hosts": {"localhost": connection}}
    }


def test_texts_that_look_like_templates_are_literal_at_the_first_boot() -> None:
    daemon = {"log-opts": {"tag": "{{.Name}}"}, "hosts": ["a{#b"], "debug": True}
    text = file_of(plan(node(), {"docker": {"daemon": daemon}}), INVENTORY).content or ""
    host = json.loads(text)["gpu_nodes"]["hosts"]["localhost"]
    marked = {"log-opts": {"tag": {"__ansible_unsafe": "{{.Name}}"}}, "hosts": [{"__ansible_unsafe": "a{#b"}]}
    assert host["docker_daemon"] == {**marked, "debug": True}


def test_keys_of_the_controller_are_copied_into_the_image(tmp_path: Path) -> None:
    key = tmp_path / "site.asc"
    others = {"docker": {"repository_key": str(key)}, "nvidia_repository": {"key": "https://mirror.example/key.asc"}}
    with pytest.raises(UsageError, match=r"docker_repository_key: .*site\.asc"):
        plan(node(), others)
    # A packet of a public key (tag 6), as in test_provisioning_rdma.
    key.write_bytes(b"\xc6\x06\x04" + bytes(4) + b"\x01")
    manifest = plan(node(), others)
    copied = "/etc/gpunode/first-boot/docker_repository_key.asc"
    assert (file_of(manifest, copied).content or "").startswith("-----BEGIN PGP PUBLIC KEY BLOCK-----")
    host = json.loads(file_of(manifest, INVENTORY).content or "")["gpu_nodes"]["hosts"]["localhost"]
    assert host["docker_repository_key"] == copied
    assert host["nvidia_repository_key"] == "https://mirror.example/key.asc"
    assert file_of(plan(node()), copied).content is None
    assert manifest.refusals == ()


@pytest.mark.parametrize(
    ("role", "variables"),
    [
        ("docker", {"tasks_before": "/srv/site/before.yml"}),
        ("storage", {"hooks": ["/srv/site/lustre.yml"]}),
        ("gpu_monitoring", {"program": "/srv/site/gpunode.pyz"}),
    ],
)
def test_other_files_of_the_controller_are_refused_while_the_image_is_built(
    role: str, variables: dict[str, Any]
) -> None:
    (refusal,) = plan(node(), {role: variables}).refusals
    assert refusal.startswith(f"first-boot: {role}_{next(iter(variables))} ")


def test_both_units_are_enabled_and_not_started() -> None:
    manifest = plan(node())
    assert [(unit.name, unit.enabled, unit.state) for unit in manifest.units] == [
        (UNIT, True, None),
        (KEYS, True, None),
    ]
    assert [unit.name for unit in plan(node(())).units] == [UNIT], "no host keys without sshd"


def test_other_wheels_are_pending(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no gpunode"):
        plan(node(), wheels=str(tmp_path))
    with pytest.raises(UsageError, match="first_boot_wheels"):
        plan(node(), wheels="wheels")
    wheel = tmp_path / "gpunode-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"one")
    record = result(plan(node(), wheels=str(tmp_path))).record
    settled = node(contents={RECORD: record})
    assert not result(plan(settled, wheels=str(tmp_path))).venv
    wheel.write_bytes(b"two")
    assert result(plan(settled, wheels=str(tmp_path))).venv
    assert any(VENV in reason for reason in plan(settled, wheels=str(tmp_path)).pending_reasons)
    assert result(plan(settled)).requirement.startswith("gpunode==")


def test_only_a_sealed_image_loses_its_identity() -> None:
    keys = {"/etc/ssh/ssh_host_ed25519_key": FILE, "/etc/ssh/sshd_config": FILE, "/var/log/journal/0a": FILE}
    assert result(plan(node(files=keys))).forget == ()
    manifest = plan(node(files=keys), seal=True)
    assert result(manifest).forget == ("/etc/ssh/ssh_host_ed25519_key", "/var/log/journal/0a")
    assert file_of(manifest, MACHINE_ID).content == ""
    assert MACHINE_ID not in {file.path for file in plan(node(files=keys)).files}


def test_the_removal_takes_the_environment_too() -> None:
    machine = node(files={VENV: {**FILE, "kind": "folder"}, PROGRAM: FILE})
    gone = planned("first_boot", machine, {"first_boot": {"state": "absent"}})
    assert result(gone).leaves
    assert file_of(gone, PROGRAM).content is None
    assert f"{VENV} must be removed" in gone.pending_reasons


def test_an_image_gets_packages_files_and_links() -> None:
    whole = Manifest(
        role="x",
        files=(ManagedFile(path="/etc/x", content="x"),),
        units=(
            UnitState(name="a.service", enabled=True, state="started"),
            UnitState(name="b.service", state="restarted", mark="/run/b"),
        ),
        modules=("br_netfilter",),
        kernel_values={"/proc/sys/vm/swappiness": "1"},
        commands=(NodeCommand(argv=("swapoff", "-a")), NodeCommand(argv=("locale-gen",))),
        guarded=RevertibleChange(activate=(("systemctl", "reload", "ssh"),), limit_s=60),
        reboot_reasons=("x",),
        restarts={"b.service": "x"},
        marks=(ManagedFile(path="/run/b", content=""),),
        problems=("x",),
    )
    image = offline(whole)
    assert image.units == (UnitState(name="a.service", enabled=True),)
    assert [command.argv for command in image.commands] == [("locale-gen",)]
    assert (image.modules, image.kernel_values, image.restarts, image.marks) == ((), None, {}, ())
    assert (image.reboot_reasons, image.problems, image.files) == ((), (), whole.files)
    assert image.guarded is not None
    assert (image.guarded.limit_s, image.guarded.activate) == (0, ())


def test_the_builders_kernel_and_devices_are_not_the_images() -> None:
    kernel = {"newest": True, "headers": False}
    facts = {
        **FACTS,
        "kernels": [
            {"release": "6.1.0-9", "package": "linux-image-6.1.0-9", "running": False, **kernel},
            {"release": "5.15.0", "package": None, "running": True, **kernel},
        ],
        "gpu_processes": [{"pid": 7, "name": "python3", "type": "C"}],
        "loaded_driver": {"version": "580.95.05", "flavour": "open"},
        "modules": ["nvidia"],
    }
    image = of_image(state_of(facts)).facts
    assert [(kernel.release, kernel.running) for kernel in image.kernels or ()] == [("6.1.0-9", False)]
    assert (image.gpu_processes, image.loaded_driver, image.modules, image.memory) == ((), None, (), None)


@pytest.mark.parametrize("role", [role for role in IMAGE_ROLES if role not in {"nvidia_repository", "docker"}])
def test_each_role_for_images_plans_without_a_machine(role: str) -> None:
    run = context_of({role: {"state": "present"}}, image=True)
    image = offline(PLANS[role](of_image(node()), settings_of(role, state="present"), run))
    assert image.kernel_values is None
    assert not any(unit.state for unit in image.units)


STEP = """#!/bin/sh
case $1 in
  provision) echo '{"nodes": [{"host": "localhost", "status": "%s", "failure": %s}]}'; exit %s ;;
  validate) echo "$@" > "$GPUNODE_FIRST_BOOT_ROOT/asked"
    echo '{"nodes": [{"findings": [{"check": "a.b", "component": "node", "status": "%s", "message": "m"}]}]}'
    exit %s ;;
esac
"""
FAILURE = '{"role": "docker", "task": "Set units", "message": "no"}'


@pytest.mark.parametrize(
    ("answers", "rc", "problems", "steps"),
    [
        (("changed", "null", 0, "pass", 0), 0, [], 2),
        (("changed", "null", 0, "fail", 1), 1, ["a.b (node): m"], 2),
        (("failed", FAILURE, 1, "pass", 0), 1, ["Set units: no"], 1),
    ],
)
def test_the_program_reports_and_is_done_only_if_all_is_good(
    tmp_path: Path, answers: tuple[Any, ...], rc: int, problems: list[str], steps: int
) -> None:
    gpunode = tmp_path / "opt/gpunode/first-boot/bin/gpunode"
    settings = tmp_path / "etc/gpunode/first-boot/settings.json"
    for file, text in ((gpunode, STEP % answers), (settings, '{"skip": ["host.time"], "limit_s": 60}')):
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
    gpunode.chmod(0o755)
    environment = {**os.environ, "GPUNODE_FIRST_BOOT_ROOT": str(tmp_path)}
    done = run_program(["/usr/bin/python3", "-I", ROLE_PROGRAM], env=environment, limit_s=60)
    report = json.loads((tmp_path / "var/lib/gpunode/first_boot/report.json").read_text(encoding="utf-8"))
    assert (done.returncode, report["problems"], len(report["steps"])) == (rc, problems, steps), done.stderr
    assert report["status"] == ("good" if rc == 0 else "failed")
    assert (tmp_path / "var/lib/gpunode/first_boot/done").exists() is (rc == 0)
    assert all(line.startswith("gpunode first boot: ") for line in done.stdout.splitlines())
    if steps == 2:
        assert "--skip host.time" in (tmp_path / "asked").read_text(encoding="utf-8")


def test_a_step_that_cannot_start_or_does_not_end_is_reported(tmp_path: Path) -> None:
    settings = tmp_path / "etc/gpunode/first-boot/settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"skip": [], "limit_s": 1}', encoding="utf-8")
    environment = {**os.environ, "GPUNODE_FIRST_BOOT_ROOT": str(tmp_path)}
    done = run_program(["/usr/bin/python3", "-I", ROLE_PROGRAM], env=environment, limit_s=60)
    assert (done.returncode, "provision ended with 127" in done.stdout) == (1, True), done.stdout
    gpunode = tmp_path / "opt/gpunode/first-boot/bin/gpunode"
    gpunode.parent.mkdir(parents=True)
    gpunode.write_text("#!/bin/sh\nsleep 300\n", encoding="utf-8")
    gpunode.chmod(0o755)
    done = run_program(["/usr/bin/python3", "-I", ROLE_PROGRAM], env=environment, limit_s=60)
    assert (done.returncode, "did not end within" in done.stdout) == (1, True), done.stdout


ROLE_PROGRAM = Path(__file__).parents[3] / "roles" / ROLE.name / "files" / "gpunode-first-boot"


def test_the_program_is_executable() -> None:
    assert ROLE_PROGRAM.stat().st_mode & stat.S_IXUSR
