"""Packages that a node keeps for its way back: verified, offered only where no source has them any more."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.modules import kept_packages

DPKG_QUERY = """#!/bin/sh
printf '%s\\t%s\\tinstalled\\tinstall\\n' libcuda1 580.95.05-1 nvidia-smi 1:580.95.05-1
"""
APT_GET = """#!/bin/sh
[ -e {folder}/full ] && {{ echo 'E: You do not have enough free space' >&2; exit 100; }}
for one; do case $one in *=*[0-9]-1) echo "$one" > "${{one%%=*}}_1.deb" ;; esac; done
"""
APT_CACHE = "#!/bin/sh\ncat {folder}/offered 2>/dev/null\n"
DPKG_DEB = "#!/bin/sh\necho Package: $(basename $2 _1.deb)\n"
NAMES = ["libcuda1", "nvidia-smi", "nvidia-settings"]
OFFERED = """\
 libcuda1 | 580.95.05-1 | http://vendor  Packages
nvidia-smi | 1:580.95.05-1 | http://vendor  Packages
"""


class EndedError(Exception):
    """How the module ended."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    programs = {"dpkg-query": DPKG_QUERY, "apt-get": APT_GET, "apt-cache": APT_CACHE, "dpkg-deb": DPKG_DEB}
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(
            text.replace("{folder}", str(tmp_path)).replace("{{", "{").replace("}}", "}")
        )
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setattr(kept_packages, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(kept_packages, "SOURCE", tmp_path / "gpunode-kept.sources")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "offered").write_text(OFFERED)
    return tmp_path


def ran(monkeypatch: pytest.MonkeyPatch, state: str, release: str = "580.95.05", check: bool = False) -> dict[str, Any]:
    class Module:
        def __init__(self, **_: Any) -> None:
            self.params = {"state": state, "release": release, "packages": NAMES, "limit_s": 60}
            self.check_mode = check

        def exit_json(self, **answer: Any) -> None:
            raise EndedError(json.dumps(answer))

        def fail_json(self, **answer: Any) -> None:
            raise EndedError(json.dumps(answer))

    monkeypatch.setattr(kept_packages, "AnsibleModule", Module)
    with pytest.raises(EndedError) as ended:
        kept_packages.main()
    return dict(json.loads(str(ended.value)))


FILES = ["libcuda1_1.deb", "nvidia-smi_1.deb"]


def test_installed_versions_are_kept_once_and_again_where_they_are_damaged(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ran(monkeypatch, "kept", check=True) == {"changed": True, "files": []}
    assert ran(monkeypatch, "kept") == {"changed": True, "files": FILES}
    assert ran(monkeypatch, "kept") == {"changed": False, "files": FILES}
    kept = machine / "kept" / "580.95.05"
    assert (kept / "libcuda1_1.deb").read_text() == "libcuda1=580.95.05-1\n"
    (kept / "libcuda1_1.deb").write_text("damaged")
    assert ran(monkeypatch, "kept")["changed"]
    assert (kept / "libcuda1_1.deb").read_text() == "libcuda1=580.95.05-1\n"


def test_a_full_disk_leaves_what_was_kept(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(monkeypatch, "kept")
    (machine / "kept" / "580.95.05" / "libcuda1_1.deb").write_text("damaged")
    (machine / "full").touch()
    assert "enough free space" in ran(monkeypatch, "kept")["msg"]
    assert (machine / "kept" / "580.95.05" / "nvidia-smi_1.deb").exists()


def test_the_newest_three_releases_are_kept(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for at, release in enumerate(("570.1", "575.1", "580.1", "595.1")):
        ran(monkeypatch, "kept", release)
        os.utime(machine / "kept" / release, (at, at))
    assert sorted(path.name for path in (machine / "kept").iterdir()) == ["575.1", "580.1", "595.1"]


def test_they_are_offered_only_where_no_source_has_them(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(monkeypatch, "kept")
    source = machine / "gpunode-kept.sources"
    assert ran(monkeypatch, "offered")["changed"] is False
    assert not source.exists()
    (machine / "offered").write_text(OFFERED.splitlines()[0] + "\n")
    assert ran(monkeypatch, "offered", check=True)["changed"]
    assert not source.exists()
    assert ran(monkeypatch, "offered")["changed"]
    assert f"URIs: file:{machine / 'kept' / '580.95.05'}" in source.read_text()
    index = gzip.decompress((machine / "kept" / "580.95.05" / "Packages.gz").read_bytes()).decode()
    assert index.count("SHA256: ") == 2
    assert "Package: nvidia-smi\nFilename: ./nvidia-smi_1.deb\nSize: " in index
    assert ran(monkeypatch, "offered")["changed"] is False
    # The repositories have them again: nothing is offered any more.
    (machine / "offered").write_text(OFFERED)
    assert ran(monkeypatch, "offered")["changed"]
    assert not source.exists()
    assert ran(monkeypatch, "withdrawn")["changed"] is False


@pytest.mark.parametrize("index", [None, b"no gzip", gzip.compress(b"Package: other\n", mtime=0)])
def test_an_index_that_an_earlier_run_left_is_written_again(
    machine: Path, monkeypatch: pytest.MonkeyPatch, index: bytes | None
) -> None:
    ran(monkeypatch, "kept")
    (machine / "offered").write_text("")
    assert ran(monkeypatch, "offered")["changed"]
    file = machine / "kept" / "580.95.05" / "Packages.gz"
    written = file.read_bytes()
    file.unlink() if index is None else file.write_bytes(index)
    assert ran(monkeypatch, "offered")["changed"]
    assert gzip.decompress(file.read_bytes()) == gzip.decompress(written)


@pytest.mark.parametrize("harm", ["changed", "missing"])
def test_a_damaged_package_is_not_offered(machine: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    ran(monkeypatch, "kept")
    file = machine / "kept" / "580.95.05" / "nvidia-smi_1.deb"
    file.unlink() if harm == "missing" else file.write_text("other")
    (machine / "offered").write_text("")
    assert "nvidia-smi_1.deb is damaged or missing" in ran(monkeypatch, "offered")["msg"]
    assert not (machine / "gpunode-kept.sources").exists()


def test_a_release_that_was_not_kept_is_no_error(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "offered").write_text("")
    assert ran(monkeypatch, "offered", "570.1") == {"changed": False, "files": []}
    (machine / "kept" / "570.1").mkdir(parents=True)
    (machine / "kept" / "570.1" / "kept.json").write_text("{")
    assert ran(monkeypatch, "offered", "570.1")["changed"] is False
    assert "is not the release of a driver" in ran(monkeypatch, "offered", "../../etc")["msg"]
