"""A bundle in which every text is a payload, through the verbs that read bundles."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpunode.cli import run

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import without_gpu

PAYLOADS = ("{{{{lookup('pipe','touch {m}')}}}}", "$(touch {m});`touch {m}`", "\x1b]0;x\x07\x1b[2J\x9b1m", "../../{m}",
            "<script>{m}</script>")  # fmt: skip
KEPT = {"gpunode.bundle/1"}
CONTROL = [chr(n) for n in (*range(9), 11, 12, *range(14, 32), *range(0x7F, 0xA0))]


def filled(value: Any, payload: str, *, append: bool) -> Any:
    """The document with the payload in place of every text, or at the end of each of its lines."""
    if isinstance(value, str):
        if value in KEPT:
            return value
        return "\n".join(line + payload for line in value.split("\n")) if append else payload
    if isinstance(value, dict):
        return {key: filled(item, payload, append=append) for key, item in value.items()}
    return [filled(item, payload, append=append) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_nothing_runs_and_nothing_steers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, payload: str, append: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "MARKER"
    bundle = tmp_path / "b.json"
    bundle.write_text(json.dumps(filled(without_gpu(), payload.format(m=marker), append=append)))
    for verb in ("validate", "plan", "env"):
        for words in ([], ["--format", "json"]):
            assert run([verb, "--replay", str(bundle), *words]) in (0, 1, 3)
    captured = capfd.readouterr()
    assert "Traceback" not in captured.err
    assert [char for char in CONTROL if char in captured.out + captured.err] == []
    assert not marker.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]
