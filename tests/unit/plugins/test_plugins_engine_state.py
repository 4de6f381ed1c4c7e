"""What a node reports of dockerd: real programs, nothing started."""

import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType

import pytest

from gpunode.errors import UndeterminedError
from gpunode.provisioning.answers import DockerState, docker_of
from gpunode.provisioning.state import NodeState

FOLDER = Path(__file__).parents[3] / "plugins" / "module_utils"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"utils_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module on a node with scripts as programs, and with a running daemon."""
    module = load("engine_state")
    info = {"version": "20.10.24", "running": 2, "live_restore": True, "swarm": "inactive", "cgroup_driver": "systemd"}
    program(tmp_path, "docker", f"echo '{json.dumps(info)}'")
    program(tmp_path, "dockerd", "echo '  --live-restore  x'; echo '  --log-opt map'")
    program(tmp_path, "systemctl", "echo 'ExecStart=dockerd -H fd://'")
    (tmp_path / "pid").write_text("7")
    settings = tmp_path / "default"
    settings.write_text("# tcp://10.0.0.1\nDOCKER_OPTS='-H tcp://10.0.0.2 --log-opt splunk-token=s3cret'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(module, "PID_FILE", str(tmp_path / "pid"))
    monkeypatch.setattr(module, "HOOK", str(tmp_path / "hook"))
    monkeypatch.setattr(module, "SETTINGS", settings)
    return module


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_running_daemon_is_reported_as_the_plans_read_it(engine: ModuleType) -> None:
    docker = DockerState.model_validate(engine.collected())
    assert docker.info is not None
    assert (docker.info.running, docker.info.live_restore, docker.info.in_swarm) == (2, True, False)
    assert docker.options == ("live-restore", "log-opt")
    assert "fd://" in docker.command
    assert "tcp://10.0.0.2" in docker.command
    assert "tcp://10.0.0.1" not in docker.command
    assert "--log-opt" in docker.command
    assert "s3cret" not in docker.command
    assert docker.in_use == "2 containers run: stop them"


@pytest.mark.parametrize("script", ["exit 1", "echo no JSON", "echo '[]'", "sleep 60"])
def test_a_daemon_that_does_not_answer_is_silent(
    engine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(engine, "LIMIT_S", 1)
    program(tmp_path, "docker", script)
    began = time.monotonic()
    docker = DockerState.model_validate(engine.collected())
    assert docker.silent
    assert "does not answer" in (docker.in_use or "")
    assert time.monotonic() - began < 20


def test_nothing_is_asked_where_no_daemon_runs(engine: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pid").unlink()
    program(tmp_path, "docker", f"touch {tmp_path}/asked")
    docker = DockerState.model_validate(engine.collected())
    assert (docker.started, docker.info, docker.silent) == (None, None, False)
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("answer", [{"info": {"running": "many"}}, {"options": "x"}, {"command": "x" * (1 << 18)}])
def test_an_answer_that_cannot_be_read_is_refused(answer: dict[str, object]) -> None:
    state = NodeState.model_construct(facts=None, apt=None, dnf=None, engine=answer)  # type: ignore[arg-type]
    with pytest.raises(UndeterminedError, match="the container engine's answer cannot be read"):
        docker_of(state)
