"""Patterns of versions before a real apt: in requests, which a transaction makes exact, and in pins."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from apt_scripts import load

sys.path.append(str(Path(__file__).parents[1] / "provisioning"))

from node_samples import context, node, planned
from test_provisioning_docker import CE

from gpunode.provisioning.docker import KEY
from gpunode.provisioning.repository import QUESTION
from gpunode.stack.naming import any_revision

# Forms of versions as the archives have them: an epoch, a build after a plus, a revision, a longer number.
OFFERED = {
    "docker-ce": ("5:28.3.3-1~debian.12~bookworm", "5:28.3.30-1~debian.12~bookworm", "5:29.0.0-1~debian.12~bookworm"),
    "docker.io": ("20.10.2+dfsg1-1", "20.10.24+dfsg1-1+deb12u1+b2"),
    "libnccl2": ("2.27.3-1+cuda12.9", "2.27.3-1+cuda13.0"),
    "nvidia-driver": ("535.261.03-1", "535.309.01-0+deb12u1", "590.44.01-1"),
}

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt on this machine")


class Apt:
    """apt in a folder of its own, with a flat repository that has no packages behind its list."""

    def __init__(self, folder: Path) -> None:
        for name in ("etc/preferences.d", "etc/apt.conf.d", "lists/partial", "archives/partial", "repository"):
            (folder / name).mkdir(parents=True)
        rows = [(name, version) for name, versions in OFFERED.items() for version in versions]
        text = "\n".join(
            f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nFilename: ./{name}.deb\nSize: 100\n"
            f"SHA256: {hashlib.sha256(f'{name} {version}'.encode()).hexdigest()}\n"
            for name, version in rows
        )
        digest = hashlib.sha256(text.encode()).hexdigest()
        (folder / "repository" / "Packages").write_text(text, encoding="utf-8")
        (folder / "repository" / "Release").write_text(
            "Origin: x\nLabel: x\nDate: Thu, 19 Nov 2026 00:00:00 UTC\n"
            f"SHA256:\n {digest} {len(text.encode())} Packages\n",
            encoding="utf-8",
        )
        (folder / "etc" / "sources.list").write_text(f"deb [trusted=yes] file:{folder}/repository ./\n", "utf-8")
        (folder / "status").write_text("", encoding="utf-8")
        self.pin, self.conf = folder / "etc" / "preferences.d" / "own.pref", folder / "apt.conf"
        places = {"Dir": "", "Dir::Etc": "/etc", "Dir::State": "", "Dir::State::status": "/status", "Dir::Cache": ""}
        places["Dir::State::lists"] = "/lists"
        rows_of_apt = "".join(f'{key} "{folder}{path}";\n' for key, path in places.items())
        self.conf.write_text(f'{rows_of_apt}APT::Architecture "amd64";\nAPT::Architectures "amd64";\n', "utf-8")
        self.run("apt-get", "update")

    def run(self, program: str, *words: str) -> str:
        argv = [program, "-c", str(self.conf), *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout

    def candidate(self, name: str, pin: str) -> str:
        self.pin.write_text(f"Package: {name}\nPin: version {pin}\nPin-Priority: 1001\n", encoding="utf-8")
        match = re.search(r"Candidate: (\S+)", self.run("apt-cache", "policy", name))
        assert match is not None
        return match[1]


@pytest.fixture(scope="module")
def apt(tmp_path_factory: pytest.TempPathFactory) -> Apt:
    return Apt(tmp_path_factory.mktemp("apt"))


@pytest.fixture
def script() -> ModuleType:
    return load("apt_transaction")


def of_docker(**settings: Any) -> tuple[str, ...]:
    run = context(answers={QUESTION: {"text": "x"}})
    change = planned("docker", node({} if "source" in settings else CE, {KEY: "x"}), run, **settings).packages
    assert change is not None
    assert change.manager == "apt"
    return tuple(entry for entry in change.install if "=" in entry and not entry.startswith("docker-ce-cli"))


@pytest.mark.parametrize(
    ("requested", "version"),
    [
        (of_docker(version="28.3.3"), "5:28.3.3-1~debian.12~bookworm"),
        (of_docker(version="20.10.2", source="distribution"), "20.10.2+dfsg1-1"),
        (("libnccl2=2.27.3-*+cuda12.9",), "2.27.3-1+cuda12.9"),
        (("nvidia-driver=535.*-*",), "535.309.01-0+deb12u1"),
        (("nvidia-driver=5*.*.01-*",), "590.44.01-1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_transaction_asks_apt_for_the_version_that_the_pattern_means(
    apt: Apt, script: ModuleType, requested: tuple[str, ...], version: str
) -> None:
    question = {
        "install": list(requested),
        "remove": [],
        "never": [],
        "expendable": [],
        "hold": [],
        "simulate": False,
        "state": "present",
        "files": {},
        "planned": {},
        "lock_wait_s": 5,
        "options": ["-c", str(apt.conf)],
        "warnings": [],
    }
    name = requested[0].partition("=")[0]
    assert script.coming(question, {})[0] == {name: version}


@pytest.mark.parametrize("release", ["535.*", "535.309.01", "535.261.03"])
def test_a_pin_prefers_the_release_and_not_the_newest(apt: Apt, release: str) -> None:
    assert apt.candidate("nvidia-driver", any_revision(release)).startswith(release.rstrip("*"))
