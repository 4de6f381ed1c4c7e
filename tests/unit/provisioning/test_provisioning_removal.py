"""What the roles for containers, CUDA and DCGM remove is what their pages name as theirs."""

import json
from pathlib import Path
from typing import Any

import pytest
from node_samples import after, collection_root, context, node, planned, settings_of
from test_provisioning_accounts import KEY
from test_provisioning_toolkit_plan import AT, DOCKER, FACTS, LOADED, NVIDIAS, RUNS

from gpunode.provisioning.state import SshState

FIXTURES = Path(__file__).parents[2] / "fixtures" / "ssh"


@pytest.mark.parametrize("role", ["docker", "nvidia_container_toolkit", "cuda", "dcgm"])
@pytest.mark.parametrize("dnf", [False, True], ids=["apt", "dnf"])
def test_every_file_that_a_role_removes_is_named_in_its_readme(role: str, dnf: bool) -> None:
    readme = (collection_root() / "roles" / role / "README.md").read_text(encoding="utf-8")
    texts = {f"/var/lib/gpunode/{role}/packages-before": "bash\n"}
    manifest = planned(role, node(dnf=dnf, texts=texts), state="absent")
    paths = [each.path for each in manifest.files if each.content is None]
    assert len(paths) > 2
    assert [path for path in paths if path not in readme and path.rpartition("/")[0] + "/" not in readme] == []
    assert manifest.pending


# Documents with keys or lines of others: the role removes its own, and other tests judge that.
SHARED = {"/etc/docker/daemon.json", "/etc/containerd/config.toml", "/etc/ssh/moduli", "/etc/ssh/sshd_config"}
PRESENT: dict[str, dict[str, Any]] = {
    "accounts": {"admins": [{"name": "ada", "keys": [KEY], "state": "present"}]},
    "cuda": {"toolkit": ["12.9"], "nccl": True, "cudnn": True},
    "dcgm": {},
    "docker": {"source": "distribution", "users": ["operator"], "daemon": {"data-root": "/scratch/docker"}},
    "firewall": {"ssh_networks": ["any"], "require_controller": False},
    "kernel_tuning": {"sysctl": {"vm.swappiness": "1"}, "transparent_hugepages": "always"},
    "ml_environment": {},
    "nvidia_container_toolkit": {"repository": "cuda", "version": "1.20.0", "env": "pytorch"},
    "ssh_hardening": {"ports": [22, 2222], "banner": "x", "client": True},
    "updates": {"automatic": True},
}


DATA: dict[str, Any] = {
    "paths": {"/scratch/docker": {"kind": "folder", "mode": None, "entries": None, "mounts": [], "users": []}}
}


@pytest.mark.parametrize("role", PRESENT)
def test_absent_removes_every_file_that_present_writes(role: str) -> None:
    settings = settings_of(role)
    requested = {**PRESENT[role], **({"state": "present"} if "state" in settings else {})}
    state = node({**AT, **DOCKER}, engine=RUNS, facts={**FACTS, **LOADED})
    ssh = json.loads((FIXTURES / "debian-12.json").read_text(encoding="utf-8"))
    ssh["units"]["ssh.socket"] |= {"load": "loaded", "active": "active", "enabled": "enabled"}
    state = state.model_copy(update={"ssh": SshState.model_validate(ssh)})
    run = context(others=NVIDIAS, answers={"rules": {"error": None}, "sysctl": {}, "data_root": DATA})
    first = planned(role, state, run, **requested)
    written = {file.path for file in first.files if file.content is not None}
    assert written, (first.refusals, first.questions)
    second = planned(role, after(first, state), run, **{**requested, "state": "absent"})
    removed = {file.path for file in second.files if file.content is None}
    assert written - removed - SHARED == set()
