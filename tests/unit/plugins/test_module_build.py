"""Modules that are built before an upgrade: in a private folder, for the kernels that a node may boot next."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.modules import module_build

CONF = 'PACKAGE_NAME="nvidia-open"\nPACKAGE_VERSION="595.91.07"\n'
DPKG_DEB = (
    '#!/bin/sh\nmkdir -p "$3/usr/src/nvidia-open-595.91.07"\ncp "$2" "$3/usr/src/nvidia-open-595.91.07/dkms.conf"\n'
)
DKMS = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *"build"*"-k {broken}"*)
  while [ "$1" != --dkmstree ]; do shift; done
  mkdir -p "$2/nvidia-open/595.91.07/build"
  echo "nvidia.c:7: error: no member named vm_flags" > "$2/nvidia-open/595.91.07/build/make.log"
  echo "Error! Bad return status for module build" >&2
  exit 10 ;;
esac
"""


class EndedError(Exception):
    """How the module ended."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with two kernels with headers and image, one without an image, and the package in apt's cache."""
    for folder in ("archives", "boot", "modules", "room", "bin"):
        (tmp_path / folder).mkdir()
    for release in ("6.1.0-9", "6.1.0-10", "6.1.0-11"):
        (tmp_path / "modules" / release / "build").mkdir(parents=True)
    for release in ("6.1.0-9", "6.1.0-10"):
        (tmp_path / "boot" / f"vmlinuz-{release}").touch()
    (tmp_path / "archives" / "nvidia-kernel-open-dkms_1%3a595.91.07-1_amd64.deb").write_text(CONF)
    programs(tmp_path)
    for name, folder in (("ARCHIVES", "archives"), ("BOOT", "boot"), ("MODULES", "modules"), ("ROOM", "room")):
        monkeypatch.setattr(module_build, name, tmp_path / folder)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(module_build.os, "uname", type("Uname", (), {"release": "6.1.0-9"}))
    return tmp_path


def programs(machine: Path, broken: str = "none") -> None:
    for name, text in (("dkms", DKMS.format(log=machine / "calls", broken=broken)), ("dpkg-deb", DPKG_DEB)):
        (machine / "bin" / name).write_text(text)
        (machine / "bin" / name).chmod(0o755)


def built(packages: dict[str, str], monkeypatch: pytest.MonkeyPatch, check: bool = False) -> dict[str, Any]:
    class Module:
        def __init__(self, **_: Any) -> None:
            self.params = {"packages": packages, "limit_s": 60}
            self.check_mode = check

        def exit_json(self, **answer: Any) -> None:
            raise EndedError(json.dumps(answer))

        def fail_json(self, **answer: Any) -> None:
            raise EndedError(json.dumps(answer))

    monkeypatch.setattr(module_build, "AnsibleModule", Module)
    with pytest.raises(EndedError) as ended:
        module_build.main()
    return dict(json.loads(str(ended.value)))


PACKAGES = {"nvidia-kernel-open-dkms": "1:595.91.07-1", "libcuda1": "595.91.07-1"}


def test_the_newest_kernel_and_the_running_one_are_built_for(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = built(PACKAGES, monkeypatch)
    assert answer["built"] == ["nvidia-open/595.91.07 for 6.1.0-10", "nvidia-open/595.91.07 for 6.1.0-9"]
    calls = (machine / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["add", "build", "build"]
    # Nothing but the private folder is named, and it is gone.
    assert all(f"--dkmstree {machine / 'room'}/gpunode-build-" in call for call in calls)
    assert list((machine / "room").iterdir()) == []


def test_a_module_that_does_not_build_for_the_next_kernel_is_an_error(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(machine, broken="6.1.0-10")
    answer = built(PACKAGES, monkeypatch)
    assert answer["msg"].startswith(
        "module-build: nvidia-open/595.91.07 does not build for kernel 6.1.0-10: Error! Bad"
    )
    assert "nvidia.c:7: error: no member named vm_flags" in answer["msg"]
    assert list((machine / "room").iterdir()) == []


@pytest.mark.parametrize(
    ("packages", "check", "why"),
    [
        (PACKAGES, True, "check mode"),
        ({"libcuda1": "595.91.07-1"}, False, "no package"),
        ({"nvidia-kernel-open-dkms": "1:595.71.05-1"}, False, "no package"),
    ],
)
@pytest.mark.usefixtures("machine")
def test_why_nothing_is_built(packages: dict[str, str], check: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert built(packages, monkeypatch, check)["reason"].startswith(why)


def test_a_node_without_headers_builds_nothing(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_build, "MODULES", machine / "room")
    assert built(PACKAGES, monkeypatch)["reason"] == "no kernel has its headers installed"
