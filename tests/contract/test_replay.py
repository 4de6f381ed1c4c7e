"""The bundle of the demo's node, judged again from its file, and mutants of it: each fault has its own name.

``debian-12-provisioned.json`` is the complete probe's answer from the lab node that ``make demo`` provisioned on
2026-11-20. Replaced in it: the release and the command line of the host's kernel, and the mirror's name.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpunode.cli import run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "bundles"
KERNEL = "6.1.0-56-cloud-amd64"
FOREIGN = (
    "nvidia-fabricmanager\t580.95.05-1\tamd64\tinstall ok installed\tnvidia-fabricmanager\t580.95.05-1\t"
    "NVIDIA CORPORATION <cudatools@nvidia.com>\n"
)

Bundle = dict[str, Any]
Verdicts = dict[tuple[str, str], str]


def no_module(bundle: Bundle) -> None:
    """The kernel has headers, and nothing was built for it."""
    for command in ("find-modules", "modinfo", "dkms-status", "signs"):
        bundle["commands"][command]["stdout"] = ""


def no_hold(bundle: Bundle) -> None:
    packages = bundle["commands"]["dpkg-packages"]
    held = next(line for line in packages["stdout"].splitlines() if line.startswith("libcuda1\t"))
    packages["stdout"] = packages["stdout"].replace(held, held.replace("hold ok", "install ok"))


def second_origin(bundle: Bundle) -> None:
    bundle["commands"]["dpkg-packages"]["stdout"] += FOREIGN


@pytest.fixture
def bundle() -> Bundle:
    document: Bundle = json.loads((FIXTURES / "debian-12-provisioned.json").read_text(encoding="utf-8"))
    return document


def replayed(bundle: Bundle, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, Bundle]:
    """The exit code and the report, which fits its schema."""
    path = folder / "bundle.json"
    path.write_text(json.dumps(bundle), encoding="utf-8")
    rc = run(["validate", "--replay", str(path), "--format", "json"])
    report: Bundle = json.loads(capsys.readouterr().out)
    assert run(["schema", "report"]) == 0
    jsonschema.validate(report, json.loads(capsys.readouterr().out))
    return rc, report


def verdicts(report: Bundle) -> Verdicts:
    (node,) = report["nodes"]
    return {(finding["check"], finding["component"]): finding["status"] for finding in node["findings"]}


def test_the_node_is_as_the_demo_prints_it(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rc, report = replayed(bundle, tmp_path, capsys)
    statuses = verdicts(report)
    assert rc == 3
    assert report["nodes"][0]["simulated"] is True
    assert statuses["gpu.present", "node"] == "error"
    assert statuses["driver.module-built", f"kernel {KERNEL}"] == "pass"
    assert statuses["driver.module-built", "kernel 6.18.44-host"] == "skip"
    assert {statuses[check, "node"] for check in ("driver.closure", "driver.held", "driver.origin")} == {"pass"}
    assert "fail" not in statuses.values()


@pytest.mark.parametrize(
    ("mutate", "check"),
    [(no_module, "driver.module-built"), (no_hold, "driver.held"), (second_origin, "driver.origin")],
)
def test_a_fault_turns_its_own_check_alone(
    mutate: Callable[[Bundle], None],
    check: str,
    bundle: Bundle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, before = replayed(bundle, tmp_path, capsys)
    mutate(bundle)
    rc, after = replayed(bundle, tmp_path, capsys)
    changed = {key: status for key, status in verdicts(after).items() if verdicts(before).get(key) != status}
    assert rc == 1
    assert {key[0] for key, status in changed.items() if status != "skip"} == {check}
    assert "fail" in changed.values()


def test_what_an_older_probe_did_not_read_is_one_error(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundle is of an older probe: its other checks have results, and the node stays undetermined."""
    rc, report = replayed(bundle, tmp_path, capsys)
    (node,) = report["nodes"]
    errors = {finding["check"]: finding for finding in node["findings"] if finding["status"] == "error"}
    assert (rc, node["status"], set(errors)) == (3, "error", {"gpu.present", "node.reachable"})
    pointing = [
        finding["check"] for finding in node["findings"] if "(node.reachable reports the cause)" in finding["message"]
    ]
    assert f"{len(set(pointing))} checks need a newer one" in errors["node.reachable"]["message"]
    assert len(pointing) > 15
    assert "--save" in errors["node.reachable"]["remedy"]
