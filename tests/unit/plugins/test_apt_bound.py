"""What a real apt makes of bound packages beside others that are installed already; nothing is installed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.module_utils.package_engine import OPTIONS
from apt_scripts import load
from recorded_world import World, stanza

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="this machine has no apt")

ARCHIVE = (
    stanza("driver", "2-1", ["library"])
    + stanza("library", "2-1", [])
    + stanza("dkms", "3.2-1", [])
    + stanza("tool", "1.5-1", [])
    + stanza("tool", "1.6-1", [])
)
INSTALLED = {"dkms": "3.0-1", "tool": "1.5-1", "vanished": "1-1", "libmagic-a": "1-1", "libmagic-b": "1-1"}


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ask for ``driver`` and what a test adds, where the administrator holds dkms."""
    script = load("apt_transaction")
    world = World(tmp_path, "debian12")
    world.publish("archive", ARCHIVE, "Origin: Debian\nLabel: Debian\n")
    world.installed = dict(INSTALLED)
    world.write_status()
    for status in (world.status, tmp_path / "admin" / "status"):
        text = status.read_text(encoding="utf-8")
        status.write_text(text.replace("dkms\nStatus: install", "dkms\nStatus: hold"), encoding="utf-8")
    for name, value in (("PAUSES_S", ()), ("APT", world.apt), ("STATUS", world.status), ("LISTS", tmp_path / "none")):
        monkeypatch.setattr(script, name, value)
    monkeypatch.setenv("DPKG_ADMINDIR", str(tmp_path / "admin"))
    defaults = {name: option.get("default") for name, option in OPTIONS.items()}
    files = {f"{world.apt}/apt.conf.d/52own": world.settings}

    def preview(**parts: Any) -> dict[str, Any]:
        question = {**defaults, "bound": ["driver"], "files": files, "simulate": True, **parts}
        answer: dict[str, Any] = script.answer(question)
        return answer

    return preview


DRIVER = {"driver": "2-1", "library": "2-1"}


def test_what_is_installed_and_matches_is_not_changed(ask: Any) -> None:
    answer = ask(install=["dkms", "tool=1.*", "vanished"])
    assert (answer["install"], answer["remove"]) == (DRIVER, [])
    assert ask(install=["tool=1.6-*"])["install"] == {**DRIVER, "tool": "1.6-1"}


def test_what_leaves_with_the_closure_and_is_requested_comes_again(ask: Any) -> None:
    answer = ask(install=["tool=1.6-*"], closure=["tool", "never-installed"])
    assert (answer["install"], answer["remove"]) == ({**DRIVER, "tool": "1.6-1"}, [])


def test_patterns_of_removals_stand_for_what_is_installed(ask: Any) -> None:
    answer = ask(remove=["libmagic*", "no-such-package*"])
    assert (answer["install"], answer["remove"]) == (DRIVER, ["libmagic-a", "libmagic-b"])
