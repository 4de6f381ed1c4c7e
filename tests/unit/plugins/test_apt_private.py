"""What the modules that ask apt have in common."""

import ast
import base64
import os
import shutil
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest
from apt_scripts import MODULE_UTILS, SCRIPTS, load
from programs import runs

GOOD = "# Managed\nPackage: cuda-* src:a\nPin: version 12.9.*\nPin-Priority: 1001\n"
SOURCE = "Types: deb\nURIs: http://a/b\nSuites: bookworm\nComponents: c\nSigned-By: /etc/apt/keyrings/gone.asc\n"
needs_apt = pytest.mark.skipif(shutil.which("apt-cache") is None, reason="this machine has no apt")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The scripts' common part; the node's files of apt lie in ``tmp_path/apt``."""
    module = load("apt_release")
    for part in module.PARTS:
        (tmp_path / "apt" / part).mkdir(parents=True)
    (tmp_path / "private").mkdir()
    monkeypatch.setattr(module, "APT", tmp_path / "apt")
    monkeypatch.setattr(module, "LISTS", tmp_path / "lists")
    return module


@pytest.mark.parametrize("name", [*SCRIPTS, "apt_private"])
def test_the_text_is_for_old_interpreters_too(name: str) -> None:
    ast.parse((MODULE_UTILS / f"{name}.py").read_text(encoding="utf-8"), feature_version=(3, 8))


@pytest.mark.parametrize(
    ("output", "errors", "words"),
    [
        (
            "Reading package lists...",
            "W: GPG error: http://m: EXPKEYSIG 12\nW: other\nE: The repository is not signed.",
            "W: GPG error: http://m: EXPKEYSIG 12; E: The repository is not signed.",
        ),
        (
            "The following packages have unmet dependencies:\n a : Depends: b but it is not installable",
            "E: Unable to correct problems, you have held broken packages.",
            "E: Unable to correct problems, you have held broken packages.; a : Depends: b but it is not installable",
        ),
        (
            "",
            "dpkg: error processing package a (--configure):\nE: Sub-process /usr/bin/dpkg returned an error code (1)",
            "E: Sub-process /usr/bin/dpkg returned an error code (1); dpkg: error processing package a (--configure):",
        ),
        ("", "Signing key on AB is not bound: SHA1", "Signing key on AB is not bound: SHA1"),
        ("progress", "first\nsecond\nthird", "first; second; third"),
        ("", "", "rc 100"),
    ],
    ids=["a signature", "dependencies", "dpkg", "sqv", "words of no kind", "no words"],
)
def test_the_reason_in_apts_output_is_reported(script: ModuleType, output: str, errors: str, words: str) -> None:
    tool = ["sh", "-c", 'printf %s "$1"; printf %s "$2" >&2; exit 100', "sh", output, errors]
    with pytest.raises(script.AptError) as raised:
        script.output_of(tool, 10)
    assert str(raised.value) == words


def test_a_tool_that_hangs_is_killed_with_all_that_it_began(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(script.AptError, match="did not end within 1 s"):
        script.output_of(["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/pid; wait"], 1)
    pid = int((tmp_path / "pid").read_text())
    # A signal is sent at once and heeded when the kernel gets to it.
    end = time.monotonic() + 10
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not runs(pid)


@needs_apt
@pytest.mark.parametrize(
    ("path", "text", "linked"),
    [
        ("preferences.d/gpunode-cuda.pref", GOOD, True),
        ("preferences.d/gpunode-cuda.pref", "# Managed\n", True),
        ("preferences.d/gpunode-cuda.pref", "", True),
        ("preferences.d/gpunode-cuda.pref", "damaged\n", False),
        ("preferences.d/gpunode-cuda.pref", GOOD.replace("Package: ", ""), False),
        ("preferences.d/gpunode-cuda.pref", GOOD[: GOOD.index("Pin-Priority")], False),
        ("preferences.d/theirs.pref", "damaged\n", True),
        ("apt.conf.d/52gpunode-docker", 'Unattended-Upgrade::Package-Blacklist {\n  "^a$";\n};\n', True),
        ("apt.conf.d/52gpunode-docker", "damaged\n", False),
        ("apt.conf.d/99theirs", "damaged\n", True),
        ("sources.list.d/gpunode-docker.sources", "damaged\n", False),
        ("sources.list.d/gpunode-docker.sources", SOURCE, True),
        ("sources.list.d/gpunode-docker.sources", SOURCE.replace("URIs", "URI"), False),
        ("sources.list.d/theirs.sources", "damaged\n", True),
    ],
)
def test_a_damaged_file_of_ours_is_left_out_and_a_good_one_obeyed(
    script: ModuleType, tmp_path: Path, path: str, text: str, linked: bool
) -> None:
    (tmp_path / "apt" / path).write_text(text)
    part = path.partition("/")[0]
    left_out = script.link_own(tmp_path / "private", part, {})
    assert (tmp_path / "private" / path).exists() == linked
    assert left_out == ([] if linked else [tmp_path / "apt" / path])


@needs_apt
def test_the_other_files_of_the_node_do_not_affect_the_judgement_of_ours(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "apt" / "apt.conf.d" / "52gpunode-docker").write_text("damaged\n")
    (tmp_path / "apt" / "preferences.d" / "a.pref").write_text("damaged\n")
    (tmp_path / "apt" / "preferences.d" / "gpunode-cuda.pref").write_text(GOOD)
    script.lay_over(tmp_path / "private", {})
    linked = {str(path.relative_to(tmp_path / "private")) for path in (tmp_path / "private").glob("*.d/*")}
    assert linked == {"preferences.d/a.pref", "preferences.d/gpunode-cuda.pref"}


@pytest.fixture
def proxy() -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """A proxy's port, and what it was asked for, with the name and password that it was given."""
    seen: list[tuple[str, str]] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            word = self.headers.get("Proxy-Authorization", "").rpartition(" ")[2]
            seen.append((self.path, base64.b64decode(word).decode()))
            is_index = self.path.endswith("/Packages")
            self.send_response(200 if is_index else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port, seen
        finally:
            server.shutdown()


@needs_apt
def test_a_password_for_a_proxy_is_for_root_alone_and_reaches_those_that_fetch(
    script: ModuleType, proxy: tuple[int, list[tuple[str, str]]]
) -> None:
    port, seen = proxy
    apt = script.APT
    files = {
        f"{apt}/apt.conf.d/52gpunode-a": f'Acquire::http::Proxy::repo.invalid "http://u:proxypw@127.0.0.1:{port}";\n',
        f"{apt}/sources.list.d/a.list": "deb [trusted=yes] http://repo.invalid/x ./\n",
    }
    with script.private_folder() as folder:
        script.lay_over(folder, files)
        holding = [path for path in folder.rglob("*") if path.is_file() and "proxypw" in path.read_text()]
        assert [(path.name, path.stat().st_mode & 0o777) for path in holding] == [("apt.conf", 0o600)]
        words = ["-c", f"{folder}/apt.conf", "-o", "Dir::Etc::sourcelist=/dev/null", "-o", "Acquire::Retries=0"]
        script.output_of(["apt-get", *words, "update"], 60)
    assert ("http://repo.invalid/x/./Packages", "u:proxypw") in seen


def test_an_apt_that_does_not_answer_proves_nothing_about_the_file(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "apt-cache"
    tool.write_text("#!/bin/sh\nsleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(script, "JUDGE_LIMIT_S", 1)
    (tmp_path / "apt" / "preferences.d" / "gpunode-cuda.pref").write_text(GOOD)
    with pytest.raises(script.AptError, match="did not end within 1 s"):
        script.link_own(tmp_path / "private", "preferences.d", {})


@needs_apt
@pytest.mark.parametrize("parts", [{}, {"simulate": True, "state": "absent"}], ids=["done", "simulated"])
@pytest.mark.parametrize("damaged", [True, False])
def test_a_transaction_too_passes_over_what_another_role_will_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool, parts: dict[str, object]
) -> None:
    script = load("apt_transaction")
    monkeypatch.setattr(script, "APT", tmp_path)
    for part in script.PARTS:
        (tmp_path / part).mkdir()
    (tmp_path / "preferences.d" / "gpunode-dcgm.pref").write_text("damaged" if damaged else GOOD)
    (tmp_path / "preferences.d" / "gpunode-cuda.pref").write_text(GOOD)
    (tmp_path / "apt.conf.d" / "52gpunode-docker").write_text("damaged" if damaged else "")
    with script.apt_as_it_will_be({"simulate": False, "state": "present", "files": {}, **parts}):
        assert ("APT_CONFIG" in script.ENVIRONMENT) == damaged, "a sound node's apt is left as it is"
        if damaged:
            words = ["-o", "Dir::State::status=/dev/null", "-o", "Dir::Cache::pkgcache=", "-o"]
            reply = script.output_of(["apt-cache", *words, "Dir::Cache::srcpkgcache=", "policy"], 60)
            assert "Pinned packages:" in reply
            folder = Path(script.ENVIRONMENT["APT_CONFIG"]).parent
            assert [path.name for path in (folder / "preferences.d").iterdir()] == ["gpunode-cuda.pref"]
    assert "APT_CONFIG" not in script.ENVIRONMENT
