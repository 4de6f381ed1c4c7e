"""A bundle in which every text is a payload, through the verbs that read bundles."""

import json
import os
import re
import select
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import effort
import forked
import pytest

from gpunode.cli import run

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import hgx, without_gpu

PAYLOADS = ("{{{{lookup('pipe','touch {m}')}}}}", "$(touch {m});`touch {m}`", "\x1b]0;x\x07\x1b[2J\x9b1m", "../../{m}",
            "<script>{m}</script>", " --privileged -v /:/host\n--env X='{m}' #")  # fmt: skip
KEPT = {"gpunode.bundle/1"}
CONTROL = [chr(n) for n in (*range(9), 11, 12, *range(14, 32), *range(0x7F, 0xA0))]
HOW = ("appended", "in place", "in keys")
ONE_NODE = ("shell", "env-file", "docker-args")


def filled(value: Any, payload: str, *, append: bool) -> Any:
    """The document with the payload in place of every text, or at the end of each of its lines."""
    if isinstance(value, str):
        if value in KEPT:
            return value
        return "\n".join(line + payload for line in value.split("\n")) if append else payload
    if isinstance(value, dict):
        return {key: filled(item, payload, append=append) for key, item in value.items()}
    return [filled(item, payload, append=append) for item in value] if isinstance(value, list) else value


def with_keys(document: dict[str, Any], payload: str) -> dict[str, Any]:
    """The document with a copy of every key that a node chooses, the payload behind each part of its path in turn.

    Names of interfaces, devices and files come as such parts, and in listings as lines.
    """
    files: dict[str, Any] = {}
    name = payload.replace("/", "_").replace("\n", "_")
    for path, text in document["files"].items():
        listing = f"{text}\n{name}\n" if path.endswith("/") and isinstance(text, str) else text
        files[path] = listing
        parts = path.split("/")
        for number in range(1, len(parts)):
            if parts[number]:
                files["/".join([*parts[:number], parts[number] + name, *parts[number + 1 :]])] = text
    commands = document["commands"] | {key + payload: command for key, command in document["commands"].items()}
    results = [{key + payload: value for key, value in result.items()} for result in document.get("results", [])]
    return {**document, "files": files, "commands": commands, "results": [*document.get("results", []), *results]}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_nothing_runs_and_nothing_steers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, payload: str, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "MARKER"
    bundle = tmp_path / "b.json"
    text = payload.format(m=marker)
    bundle.write_text(
        json.dumps(
            with_keys(hgx(), text) if how == "in keys" else filled(without_gpu(), text, append=how == "appended")
        )
    )
    both = [(verb, words) for verb in ("validate", "plan", "env") for words in ([], ["--format", "json"])]
    one_form = both[(PAYLOADS.index(payload) + HOW.index(how)) % 2 :: 2]
    for verb, words in both if effort.EVERYTHING else one_form:
        assert run([verb, "--replay", str(bundle), *words]) in (0, 1, 3)
    printed = {}
    captured = [capfd.readouterr()]
    for form in ONE_NODE:
        assert run(["env", "--replay", str(bundle), "--multi-node", "--format", form]) == 0
        captured.append(capfd.readouterr())
        printed[form] = captured[-1].out
    output = "".join(capture.out + capture.err for capture in captured)
    assert "Traceback" not in output
    assert [char for char in CONTROL if char in output] == []
    inert(printed, marker)
    assert not marker.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]


def inert(printed: dict[str, str], marker: Path) -> None:
    """The formats that programs read hold plain words, variables and comments, and a shell runs nothing of them."""
    words = shlex.split(printed["docker-args"])
    assert printed["docker-args"].split() == words
    assert "--privileged" not in words
    assert "-v" not in words
    assert all(re.fullmatch(r"[\w.,:=/@+-]+", word, re.ASCII) for word in words)
    for line in printed["env-file"].splitlines():
        assert re.fullmatch(r"#.*|[A-Z0-9_]+=[\w.,:=+-]*", line, re.ASCII), line
    done = subprocess.run(["sh", "-eu"], input=printed["shell"], capture_output=True, text=True, timeout=10, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    done = subprocess.run(
        ["sh", "-c", f"set -- {printed['docker-args'].strip()}; echo $#"],
        capture_output=True, text=True, timeout=10, check=True,
    )  # fmt: skip
    assert int(done.stdout) == len(words)
    assert not marker.exists()


def renamed(document: dict[str, Any], folder: str, name: str) -> dict[str, Any]:
    """The node with another name for the first entry of a folder of sysfs."""
    path = next(path for path in sorted(document["files"]) if path.startswith(folder) and path != folder)
    old = path.removeprefix(folder).split("/")[0]
    files = {
        path.replace(f"{folder}{old}/", f"{folder}{name}/"): text.replace(old, name) if path == folder else text
        for path, text in document["files"].items()
    }
    return {**document, "files": files}


NAMES = ("eth0 --privileged", "eth0\t-v", "$(id)", "a'b", 'a"b', "a;b", "a,b", "^a", "{{1}}", "\x1b[2J", "x" * 5000,
         "a" + "7" * 5000)  # fmt: skip
FOLDERS = ("/sys/class/net/", "/sys/class/infiniband/")


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        (name, folder)
        for number, name in enumerate(NAMES)
        for folder in (FOLDERS if effort.EVERYTHING else FOLDERS[number % 2 :][:1])
    ],
)
def test_a_name_of_the_network_adds_no_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], folder: str, name: str
) -> None:
    bundle = tmp_path / "b.json"
    bundle.write_text(json.dumps(renamed(hgx(), folder, name)))
    printed = {}
    for form in ONE_NODE:
        assert run(["env", "--replay", str(bundle), "--multi-node", "--format", form]) == 0
        printed[form] = capfd.readouterr().out
        assert name not in printed[form]
    inert(printed, tmp_path / "MARKER")


# What a terminal gets

OURS = re.compile(r"\x1b\[(?:[0-9;]{0,8}m|\?25[lh]|2K|1A|[0-9]{1,2}[ABCDK])")
"""Colours, and what the progress line is moved with."""
STEERING = "\x1b]0;owned\x07\x1b[2J\x1b[38;5;77m\x1b[9;9H\x9b2J\x1bc"


def on_a_terminal(words: list[str], folder: Path) -> str:
    """What gpunode writes on a terminal."""
    terminal, remote_end = os.openpty()

    def connect() -> None:
        os.login_tty(remote_end)
        os.chdir(folder)
        os.environ.update({"TERM": "xterm-256color", "COLUMNS": "200"})
        os.environ.pop("NO_COLOR", None)

    pid = forked.fork(words, connect)
    os.close(remote_end)
    parts, end = [], time.monotonic() + 90
    with suppress(OSError):  # EIO: the other side has ended
        while time.monotonic() < end and (part := _read(terminal)) != b"":
            parts.append(part or b"")
    os.close(terminal)
    forked.ended(pid)
    return b"".join(parts).decode(errors="replace")


def _read(terminal: int) -> bytes | None:
    ready, _, _ = select.select([terminal], [], [], 1)
    return os.read(terminal, 1 << 16) if ready else None


@pytest.mark.parametrize(
    "words",
    [
        ["validate", "--replay", "b.json", "-v"],
        ["validate", "--replay", "b.json", "--format", "json"],
        ["plan", "--replay", "b.json", "-v"],
        ["plan", "--replay", "b.json", "--format", "json"],
        ["plan", "--replay", "b.json", "--format", "yaml"],
        ["env", "--replay", "b.json", "-v"],
        ["env", "--replay", "b.json", "--format", "shell"],
        ["env", "--replay", "b.json", "--format", "json"],
        ["validate", "--replay", "broken.json"],
        ["env", "--replay", "broken.json"],
        ["collect", STEERING, "--timeout", "5"],
        ["validate", "--level", "quick", STEERING, "--timeout", "5"],
        ["plan", "-i", STEERING],
        ["provision", "-i", STEERING],
        ["parse", "lscpu", "text"],
        ["checks", STEERING],
        ["catalog", STEERING],
        ["lab", STEERING],
        ["schema", STEERING],
        [STEERING],
    ],
)
def test_no_verb_steers_a_terminal(tmp_path: Path, words: list[str]) -> None:
    document = filled(with_keys(without_gpu(), STEERING), STEERING, append=True)
    (tmp_path / "b.json").write_text(json.dumps(document))
    (tmp_path / "broken.json").write_text(json.dumps({**document, "files": {STEERING: 1}}))
    (tmp_path / "text").write_text(f"Architecture: {STEERING}\n{STEERING}\n")
    shown = on_a_terminal(words, tmp_path)
    assert shown.strip()
    assert "Traceback" not in shown
    assert "\x1b[38;5;77m" not in shown
    assert [char for char in CONTROL if char in OURS.sub("", shown)] == []
