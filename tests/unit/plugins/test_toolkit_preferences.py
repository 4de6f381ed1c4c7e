"""The toolkit's preferences before a real apt that has both repositories, with dependencies as they were recorded."""

import hashlib
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

from gpunode.provisioning.nvidia_container_toolkit import preferences
from gpunode.provisioning.templates import rendered

FOUR = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
# Release fields and versions: gpunode/lab/packages/data/recorded, ubuntu2404 and libnvidia-container.
ORIGINS = {
    "cuda": ("NVIDIA", "NVIDIA CUDA", ("1.19.1", "1.20.0", "1.20.2")),
    "libnvidia-container": (
        "https://nvidia.github.io/libnvidia-container/stable",
        "NVIDIA CORPORATION <cudatools@nvidia.com>",
        ("1.19.1", "1.20.0", "1.20.1"),
    ),
}
NVIDIAS_PIN = "Package: *\nPin: release l=NVIDIA CUDA\nPin-Priority: 600\n"

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt on this machine")


def repository(folder: Path, origin: str, label: str, versions: tuple[str, ...], made_by: str) -> None:
    """A flat repository without its packages: apt is only asked what it would do."""
    folder.mkdir()
    stanzas = []
    for version in versions:
        depends = {FOUR[0]: (FOUR[1], FOUR[2]), FOUR[2]: (FOUR[3],)}
        for name in FOUR:
            fields = [f"Package: {name}", f"Version: {version}-1", "Architecture: amd64", f"Maintainer: {made_by}"]
            if name in depends:
                fields.append("Depends: " + ", ".join(f"{other} (= {version}-1)" for other in depends[name]))
            digest = hashlib.sha256(f"{made_by} {name} {version}".encode()).hexdigest()
            stanzas.append("\n".join([*fields, f"Filename: ./{name}.deb", "Size: 100", f"SHA256: {digest}"]) + "\n")
    text = "\n".join(stanzas)
    (folder / "Packages").write_text(text, encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / "Release").write_text(
        f"Origin: {origin}\nLabel: {label}\nDate: Thu, 19 Nov 2026 00:00:00 UTC\n"
        f"SHA256:\n {digest} {len(text.encode())} Packages\n",
        encoding="utf-8",
    )


class Apt:
    """apt with both repositories and the role's preferences, in a folder of its own."""

    def __init__(self, folder: Path, chosen: str, version: str, *, same_packages: bool) -> None:
        etc = folder / "etc"
        for name in ("etc/preferences.d", "etc/apt.conf.d", "etc/sources.list.d", "lists/partial", "archives/partial"):
            (folder / name).mkdir(parents=True)
        for name, row in ORIGINS.items():
            repository(folder / name, *row, "one <a@b>" if same_packages else f"{name} <a@b>")
        (etc / "sources.list").write_text(
            "".join(f"deb [trusted=yes] file:{folder / name} ./\n" for name in ORIGINS), encoding="utf-8"
        )
        (etc / "preferences.d" / "cuda-repository-pin-600").write_text(NVIDIAS_PIN, encoding="utf-8")
        (etc / "preferences.d" / "own.pref").write_text(
            preferences(FOUR, version, chosen, partial(rendered, "nvidia_container_toolkit")),
            encoding="utf-8",
        )
        (folder / "status").write_text("", encoding="utf-8")
        self.conf = folder / "apt.conf"
        self.conf.write_text(
            f'Dir "{folder}";\nDir::Etc "{etc}";\nDir::State "{folder}";\nDir::State::status "{folder}/status";\n'
            f'Dir::Cache "{folder}";\nDir::State::lists "{folder}/lists";\nAPT::Architecture "amd64";\n'
            'APT::Architectures "amd64";\n',
            encoding="utf-8",
        )
        self.ask("apt-get", "update")

    def ask(self, *argv: str) -> str:
        environment = {"APT_CONFIG": str(self.conf), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    def priorities(self) -> dict[str, set[str]]:
        """Version to the priorities that it has, once for each repository that has a package of its own of it."""
        by_version: dict[str, set[str]] = {}
        for version, priority in re.findall(r"(?m)^ +(\S+)-1 (-?[0-9]+)$", self.ask("apt-cache", "policy", FOUR[0])):
            by_version.setdefault(version, set()).add(priority)
        return by_version

    def install(self, *names: str) -> dict[str, str]:
        lines = self.ask("apt-get", "--simulate", "--assume-yes", "install", *names)
        return dict(re.findall(r"(?m)^Inst (\S+) \((\S+) ", lines))


@pytest.mark.parametrize("same_packages", [True, False], ids=["same-files", "own-files"])
@pytest.mark.parametrize(
    ("chosen", "version", "pinned_away"),
    [("libnvidia-container", "1.20.1", "1.20.2"), ("cuda", "1.20.2", "1.20.1")],
)
def test_the_other_repository_is_not_used(
    tmp_path: Path, chosen: str, version: str, pinned_away: str, same_packages: bool
) -> None:
    apt = Apt(tmp_path, chosen, version, same_packages=same_packages)
    priorities = apt.priorities()
    assert priorities[version] == {"1001"}
    assert priorities[pinned_away] == {"-1"}
    assert apt.install(FOUR[0]) == dict.fromkeys(FOUR, f"{version}-1")


@pytest.mark.parametrize("same_packages", [True, False], ids=["same-files", "own-files"])
@pytest.mark.parametrize("chosen", list(ORIGINS))
def test_a_version_that_both_have_is_installed_whole(tmp_path: Path, chosen: str, same_packages: bool) -> None:
    apt = Apt(tmp_path, chosen, "1.20.0", same_packages=same_packages)
    assert apt.priorities()["1.20.0"] == {"1001"}
    assert apt.install(FOUR[0]) == dict.fromkeys(FOUR, "1.20.0-1")
