"""The plugin of node-problem-detector in contrib/kubernetes: exit codes, length, age, and that its files agree."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[3] / "contrib" / "kubernetes"


def ran(verdict: Path) -> tuple[int, str]:
    done = subprocess.run(
        [FOLDER / "gpunode-npd"],
        env={"PATH": os.environ["PATH"], "GPUNODE_VERDICT": str(verdict)},
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.rstrip("\n")


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("drain: gpu.ecc-uncorrected gpu3: 2 errors\n", 1, "gpu.ecc-uncorrected gpu3: 2 errors"),
        ("none: no fault\n", 0, "none: no fault"),
        ("observe: link.pcie-width gpu3\n", 0, "observe: link.pcie-width gpu3"),
        ("unknown: nvidia-smi did not answer\n", 2, "unknown: nvidia-smi did not answer"),
        ("", 2, "the verdict is empty"),
        ("drain: \x1b[31m" + "x" * 300 + "\n", 1, "[31m" + "x" * 76),
    ],
)
def test_a_verdict_is_a_condition(tmp_path: Path, text: str, code: int, line: str) -> None:
    verdict = tmp_path / "verdict"
    verdict.write_text(text)
    assert ran(verdict) == (code, line)


def test_a_verdict_that_is_missing_or_old_is_unknown(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict"
    assert ran(verdict)[0] == 2
    verdict.write_text("none: no fault\n")
    hour_ago = time.time() - 3600
    os.utime(verdict, (hour_ago, hour_ago))
    assert ran(verdict) == (2, "the verdict is 60 minutes old")


def test_the_files_agree() -> None:
    monitor = json.loads((FOLDER / "gpunode-npd.json").read_text())
    condition = monitor["conditions"][0]["type"]
    assert {rule["condition"] for rule in monitor["rules"]} == {condition}
    documents = {
        document["kind"]: document for document in yaml.safe_load_all((FOLDER / "gpunode-npd.yml").read_text())
    }
    rule = documents["NodeReadinessRule"]["spec"]
    assert [row["type"] for row in rule["conditions"]] == [condition]
    assert rule["taint"]["key"].startswith("readiness.k8s.io/")
    (container,) = documents["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert "privileged" not in container["securityContext"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert all(Path(rule["path"]).parent.as_posix() in mounts for rule in monitor["rules"])
