"""Package indexes for a real apt, written from the recorded ones.

Names, versions, revisions and the key facts (epoch of dkms, what it takes, ``>=`` of the metapackages) are recorded; of
the dependencies between NVIDIA's packages the recorded page has a least graph, marked as an assumption there.
"""

import re
from pathlib import Path
from typing import Any

import yaml
from evidence import index

DISTRIBUTIONS_DKMS = {
    "ubuntu2204": "2.8.7-2ubuntu2",
    "ubuntu2404": "3.0.11-1ubuntu13",
    "ubuntu2604": "3.2.2-1ubuntu1",
    "debian12": "3.0.10",
    "debian13": "3.2.0-1",
}
NVIDIAS_DKMS = {"debian12": "1:3.4.1-1", "debian13": "1:3.4.1-1"}
RELEASES = {
    "ubuntu2204": ("570.172.08", "580.95.05", "580.178.04", "595.71.05", "595.91.07", "610.57.04"),
    "ubuntu2404": ("570.172.08", "580.95.05", "580.178.04", "595.71.05", "595.91.07", "610.57.04"),
    "ubuntu2604": ("595.71.05", "595.91.07", "610.57.04"),
    "debian12": ("580.95.05", "580.178.04", "595.91.07", "610.57.04"),
    "debian13": ("580.95.05", "580.178.04", "595.91.07", "610.57.04"),
}
MAINTAINER = "NVIDIA CORPORATION <cudatools@nvidia.com>"
UNSUFFIXED = ("nvidia-fabricmanager", "libnvidia-nscq", "nvidia-imex", "libnvsdm")
BESIDE = ("nvidia-modprobe", "nvidia-persistenced", "nvidia-settings", "nvidia-xconfig")


def revision(system: str, release: str) -> str:
    """The recorded revision of a driver release."""
    if system.startswith("debian"):
        return "1"
    rows: dict[str, str] = index("ubuntu2404")["repository"]["driver_revisions"]
    for patterns, value in rows.items():
        for pattern in patterns.split():
            if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), release):
                return value
    raise AssertionError(release)


def stanza(name: str, version: str, depends: list[str], more: str = "") -> str:
    line = f"Depends: {', '.join(depends)}\n" if depends else ""
    return (
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: {MAINTAINER}\n"
        f"{line}{more}Filename: ./{name}_{version.replace(':', '%3a')}_amd64.deb\nSize: 1000\n"
        f"SHA256: {'0' * 64}\nDescription: x\n\n"
    )


def graph(system: str, branch: str) -> dict[str, list[str]]:
    """The recorded page's least graph for a branch."""
    rows = index("assumptions")["assumptions"]["dependency_graph"]
    if system.startswith("debian"):
        return dict(rows["debian"])
    if int(branch) >= 590:
        return dict(rows["ubuntu_unsuffixed"])
    text = yaml.safe_dump(rows["ubuntu_suffixed_580"]).replace("-580", f"-{branch}")
    return dict(yaml.load(text, yaml.CSafeLoader))


def nvidias(system: str) -> str:
    """Packages of NVIDIA's repository for a system."""
    text = ""
    for release in RELEASES[system]:
        branch, version = release.split(".")[0], f"{release}-{revision(system, release)}"
        rows = graph(system, branch)
        suffix = f"-{branch}" if int(branch) < 580 else ""
        rows |= {f"{name}{suffix}": ["libc6"] for name in UNSUFFIXED} | {name: rows.get(name, []) for name in BESIDE}
        named = {entry.split()[0] for depends in rows.values() for entry in depends if "(= {v})" in entry}
        rows |= {name: [] for name in named if name not in rows}
        for name, depends in rows.items():
            real = [entry.format(v=version, u=release) for entry in depends if not entry.startswith("libnvidia-egl-")]
            more = ""
            if not system.startswith("debian") and re.match(r"(lib|xserver|nvidia-(utils|compute|dkms|kernel))", name):
                bare = re.sub(r"-\d{3}(?=$|-)", "", name)
                if name not in UNSUFFIXED:
                    others = [
                        other for other in (bare, *(bare_with(bare, old) for old in ("570", "580"))) if other != name
                    ]
                    more = f"Conflicts: {', '.join(others)}\nReplaces: {', '.join(others)}\n"
            if name == "nvidia-open" and system.startswith("debian"):
                more = "Conflicts: nvidia-kernel-dkms\n"
            text += stanza(name, version, real, more)
        text += stanza(f"nvidia-driver-pinning-{release}", version, [])
    return text + stanza("dkms", NVIDIAS_DKMS.get(system, "1:3.4.1-1ubuntu1"), ["libc6"])


def bare_with(bare: str, branch: str) -> str:
    """``nvidia-dkms-open`` with a branch in it."""
    return f"{bare.removesuffix('-open')}-{branch}-open" if bare.endswith("-open") else f"{bare}-{branch}"


class World:
    """A node's apt: the distribution's archive and NVIDIA's repository as they lie in files, and what is installed."""

    def __init__(self, folder: Path, system: str) -> None:
        self.system, self.folder = system, folder
        self.apt, self.status = folder / "etc", folder / "status"
        for part in ("sources.list.d", "preferences.d", "apt.conf.d"):
            (self.apt / part).mkdir(parents=True)
        (folder / "admin").mkdir()
        self.installed: dict[str, str] = {"libc6": "2.39"}
        vendor = "Ubuntu" if system.startswith("ubuntu") else "Debian"
        stanzas = stanza("libc6", "2.39", []) + stanza("dkms", DISTRIBUTIONS_DKMS[system], ["libc6"])
        stanzas += stanza("dh-dkms", DISTRIBUTIONS_DKMS[system], [])
        stanzas += stanza("infiniband-diags", "1", []) + stanza("libxnvctrl0", "510.47.03-0ubuntu4", [])
        self.publish("archive", stanzas, f"Origin: {vendor}\nLabel: {vendor}\n")
        self.publish("cuda", nvidias(system), "Origin: NVIDIA\nLabel: NVIDIA CUDA\n")
        self.source("archive")

    @property
    def settings(self) -> str:
        """What has apt ask about this world and not about the machine that it runs on."""
        return (
            f'Dir::State::status "{self.status}";\nDir::Etc::sourcelist "/dev/null";\nAPT::Architecture "amd64";\n'
            'APT::Sandbox::User "root";\n'
        )

    def publish(self, name: str, packages: str, release: str) -> None:
        where = self.folder / name
        where.mkdir(exist_ok=True)
        (where / "Packages").write_text(packages, encoding="utf-8")
        (where / "Release").write_text(release, encoding="utf-8")

    def source(self, name: str) -> None:
        (self.apt / "sources.list.d" / f"{name}.list").write_text(self.line(name), encoding="utf-8")

    def line(self, name: str) -> str:
        return f"deb [trusted=yes] file:{self.folder}/{name} ./\n"

    def write_status(self) -> None:
        text = "".join(
            f"Package: {name}\nStatus: install ok installed\nVersion: {version}\nArchitecture: amd64\n"
            "Maintainer: x <x@y>\nDescription: x\n\n"
            for name, version in self.installed.items()
        )
        self.status.write_text(text, encoding="utf-8")
        (self.folder / "admin" / "status").write_text(text, encoding="utf-8")
        for name in ("info", "updates"):
            (self.folder / "admin" / name).mkdir(exist_ok=True)

    def carry_out(self, answer: dict[str, Any]) -> None:
        """Apply the changes that apt simulated."""
        for name in answer["remove"]:
            self.installed.pop(name.partition(":")[0])
        self.installed |= answer["install"]
