"""The role gpu_monitoring: what it installs, what it refuses, and what a removal deletes."""

import hashlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from node_samples import after, by_path, contents, context, file, node, planned

from gpunode.cli.on_node import validate_on_node
from gpunode.errors import UsageError
from gpunode.provisioning.gpu_monitoring import (
    CACHE,
    COUNTERS,
    DCGM_EXPORTER,
    DCGM_METRICS,
    EXPORTER,
    EXPORTER_UNIT,
    INSTALLED,
    PROGRAM,
    SERVICE_FILE,
    TIMER,
    GpuMonitoringResult,
)
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.state import NodeState

ROLE = "gpu_monitoring"


def made(state: NodeState, **settings: Any) -> Manifest:
    return planned(ROLE, state, context(), **{"state": "present", **settings})


def result(manifest: Manifest) -> GpuMonitoringResult:
    assert isinstance(manifest.result, GpuMonitoringResult)
    return manifest.result


def installed(manifest: Manifest) -> tuple[str, ...]:
    assert manifest.packages is not None
    return manifest.packages.install


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "gpunode.pyz"
    path.write_text("#!/usr/bin/env -S python3 -I\n", encoding="utf-8")
    return path


def test_by_default_the_node_is_not_changed() -> None:
    assert not planned(ROLE, node()).pending
    assert not planned(ROLE, node()).manages


def test_a_node_without_a_program_is_refused() -> None:
    (reason,) = made(node()).refusals
    assert "gpu_monitoring_program" in reason
    assert made(node(texts={INSTALLED: "#!"})).refusals == ()


def test_the_program_is_copied_where_it_differs(program: Path) -> None:
    settings = {"program": str(program)}
    bare = made(node(), **settings)
    assert result(bare).program == str(program)
    assert result(bare).leaving == ()
    same = file(program.read_text(encoding="utf-8"), mode="0755")
    assert same["sha256"] == hashlib.sha256(program.read_bytes()).hexdigest()
    assert result(made(node(files={PROGRAM: same}), **settings)).program == ""
    other = {PROGRAM: {**same, "sha256": "0" * 64}, CACHE: {"kind": "folder", "mode": "0755", "entries": 1}}
    again = made(node(files=other), **settings)
    assert (result(again).program, result(again).leaving) == (str(program), (CACHE,))
    assert f"{PROGRAM} is not {program}" in again.pending_reasons


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"program": "gpunode.pyz"}, "is not an absolute path"),
        ({"program": "/nowhere/gpunode.pyz"}, "No such file or directory (build it: gpunode zipapp"),
        ({"interval_s": 59}, "gpu_monitoring_interval_s: 59 is less than 60"),
        ({"budget_s": 1}, "gpu_monitoring_budget_s"),
        ({"budget_s": 300}, "gpu_monitoring_budget_s"),
        ({"textfile_directory": ""}, "gpu_monitoring_textfile_directory"),
        ({"textfile_directory": "/x y"}, "gpu_monitoring_textfile_directory"),
        ({"textfile_directory": "/x\nExecStart=/bin/true"}, "gpu_monitoring_textfile_directory"),
        ({"policy": "/etc/%n"}, "gpu_monitoring_policy"),
        ({"policy": "/etc/../x"}, "gpu_monitoring_policy"),
        ({"policy": "/x'; rm -rf /; '"}, "gpu_monitoring_policy"),
        ({"python": "python3"}, "gpu_monitoring_python"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        made(node(texts={INSTALLED: "#!"}), **settings)
    assert "\n" not in str(caught.value).replace(str(settings.get("textfile_directory")), "")


def test_the_unit_runs_a_command_that_gpunode_accepts(program: Path) -> None:
    settings = {"program": str(program), "budget_s": 20, "policy": "/etc/gpunode/site.yml", "textfile_directory": "/m"}
    text = by_path(made(node(), **settings), SERVICE_FILE).content or ""
    (line,) = re.findall(r"(?m)^ExecStart=(.*)$", text)
    words = shlex.split(line)
    assert words[:4] == ["/usr/bin/python3", "-I", PROGRAM, "validate"]
    values = validate_on_node.make_context("validate", words[4:]).params
    assert (values["budget"], values["form"], str(values["output"])) == (20.0, "prometheus", "/m/gpunode.prom")
    assert "TimeoutStartSec=80\n" in text
    assert "rm -f /m/gpunode.prom" in text


def test_a_settled_node_has_nothing_pending() -> None:
    unit = {"load": "loaded", "active": "active", "sub": "x", "enabled": "enabled"}
    state = node({EXPORTER: "1.5.0-1+b6"}, {INSTALLED: "#!"}, facts={"units": [{"name": TIMER, **unit}]})
    bare = made(state)
    assert installed(bare) == (EXPORTER,)
    assert [(unit.name, unit.state) for unit in bare.units] == [(TIMER, "restarted"), (EXPORTER_UNIT, "started")]
    units = [{"name": name, **unit} for name in (TIMER, EXPORTER_UNIT)]
    facts = {**state.model_dump()["facts"], "units": units}
    settled = made(after(bare, state, facts=facts))
    assert settled.pending_reasons == ()
    assert [unit.state for unit in settled.units] == ["started", "started"]


def test_other_systems_keep_their_own_node_exporter() -> None:
    manifest = made(node(texts={INSTALLED: "#!"}, dnf=True))
    assert installed(manifest) == ()
    assert any("--collector.textfile.directory" in note for note in manifest.notes)
    assert made(node(texts={INSTALLED: "#!"}, dnf=True), node_exporter=False).notes == ()


def test_the_exporter_of_dcgm_is_there_only_on_request() -> None:
    without = made(node(texts={INSTALLED: "#!"}))
    assert contents(without)[COUNTERS] is None
    assert DCGM_EXPORTER not in installed(without)
    manifest = made(node(texts={INSTALLED: "#!"}), dcgm_exporter=True)
    assert DCGM_EXPORTER in installed(manifest)
    lines = (contents(manifest)[COUNTERS] or "").splitlines()[1:]
    assert len(lines) == 2 * len(DCGM_METRICS) > 20
    for reason, line in zip(lines[::2], lines[1::2], strict=True):
        assert re.fullmatch(r"# \S.+", reason)
        assert re.fullmatch(r"DCGM_FI_[A-Z_]+, (gauge|counter), [^,]+", line)
    assert len({metric.field for metric in DCGM_METRICS}) == len(DCGM_METRICS)


def test_a_removal_stops_the_timer_and_takes_the_metrics() -> None:
    unit = {"name": TIMER, "load": "loaded", "active": "active", "sub": "x", "enabled": "enabled"}
    state = node(texts={SERVICE_FILE: "x"}, facts={"units": [unit]})
    run = context(others={ROLE: {"textfile_directory": "/m"}})
    gone = planned(ROLE, state, run, state="absent", textfile_directory="/m")
    assert [(unit.name, unit.state, unit.phase) for unit in gone.units] == [(TIMER, "stopped", "before")]
    assert result(gone).leaving == ("/m/gpunode.prom", CACHE)
    assert all(text is None for text in contents(gone).values())
    assert not planned(ROLE, node(), run, state="absent").pending
