"""Create this lab's keys, the packages that contain them and signed indices; runs in the vendor's container at its
first start.

A fault is a folder of files that the server returns in place of the real ones. The folders are created here, so that
switching a fault on takes no time.
"""

import hashlib
import json
import lzma
import re
import shutil
import tempfile
from collections.abc import Iterable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import rpms  # type: ignore[import-not-found]
from build import ROOT  # type: ignore[import-not-found]
from pack import Tools, compressed, run  # type: ignore[import-not-found]

KEYS = Path("/srv/keys")
FAULTS = Path("/srv/faults")
_EXPIRED = "expired"
_FABRIC_MANAGER = re.compile(r"^nvidia-fabric-?manager(-|$)")
# One date for all variants of an index: apt keeps its copy if the new Release is older.
_DATE = formatdate(usegmt=True)
# Differences between the recorded Release and that of other users of apt-ftparchive: sums, compression, a fixed date.
_SUMS = {"container-toolkit": (("SHA512", "sha512"),)}
_PLAIN_SUMS = (("MD5Sum", "md5"), ("SHA1", "sha1"), ("SHA256", "sha256"))
_XZ = {"container-toolkit"}
_FROZEN = {"container-toolkit": "Fri, 27 Apr 2018 00:00:00 GMT"}


def main(plan_file: str, kinds: set[str]) -> None:
    """Sign and complete every repository of the plan that is of one of these kinds."""
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    keys = Keys(KEYS)
    for repository in plan.values():
        keys.make(repository["key"])
    for repository in plan.values():
        if repository["kind"] in kinds:
            {"flat": _flat, "suites": _suites, "rpm": _rpm}[repository["kind"]](repository, keys)
    shutil.copyfile(keys.public("container-toolkit"), ROOT / "libnvidia-container/gpgkey")


class Keys:
    """This lab's signing keys. Each is two keys in one public file: the one that signs, and one expired long ago."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.home = folder / "gnupg"
        self.home.mkdir(parents=True, mode=0o700, exist_ok=True)

    def make(self, name: str) -> None:
        """Create the key pair of that name if there is none."""
        if self.public(name).exists():
            return
        kind = "rsa2048" if name == "rpm" else "ed25519"  # rpm on older systems supports only RSA
        self._gpg(["--quick-generate-key", f"gpunode lab: {name} (simulated) <{name}@vendor>", kind, "sign", "never"])
        past = ["--faked-system-time", "20240101T000000!", "--quick-generate-key"]
        self._gpg([*past, f"gpunode lab: {name} {_EXPIRED} <{name}-{_EXPIRED}@vendor>", kind, "sign", "30d"])
        both = [self.user(name), self.user(name, expired=True)]
        self.binary(name).write_bytes(self._gpg(["--export", *both]))
        self.public(name).write_bytes(self._gpg(["--armor", "--export", *both]))

    def public(self, name: str) -> Path:
        """Return the public keys, armoured."""
        return self._folder / f"{name}.asc"

    def binary(self, name: str) -> Path:
        """Return the public keys in the format of apt's Signed-By."""
        return self._folder / f"{name}.gpg"

    def id(self, name: str) -> str:
        """Return the last eight hex digits of the signing key's fingerprint."""
        listed = self._gpg(["--with-colons", "--list-keys", self.user(name)]).decode()
        return str(re.findall(r"^fpr:+([0-9A-F]+):", listed, re.MULTILINE)[0])[-8:]

    def sign(self, name: str, release: Path, to: Path, *, expired: bool = False) -> None:
        """Write InRelease and Release.gpg into ``to``."""
        self._sign(name, "--clearsign", release, to / "InRelease", expired)
        self._sign(name, "--detach-sign", release, to / "Release.gpg", expired)

    def detach(self, name: str, file: Path, to: Path, *, expired: bool = False) -> None:
        """Write a file's detached signature to ``to``."""
        self._sign(name, "--detach-sign", file, to, expired)

    def user(self, name: str, *, expired: bool = False) -> str:
        """Return the user id of the key in gpg."""
        return f"<{name}-{_EXPIRED}@vendor>" if expired else f"<{name}@vendor>"

    def _sign(self, name: str, kind: str, file: Path, to: Path, expired: bool) -> None:
        past = ["--faked-system-time", "20240115T000000!"] if expired else []
        user = ["--local-user", self.user(name, expired=expired)]
        to.write_bytes(self._gpg([*past, *user, "--armor", kind, "--output", "-", str(file)]))

    def _gpg(self, argv: list[str]) -> bytes:
        return bytes(
            run(["gpg", "--homedir", str(self.home), "--batch", "--passphrase", "", "--yes", "--quiet", *argv])
        )


def _flat(repository: dict[str, Any], keys: Keys) -> None:
    where = ROOT / repository["path"]
    key = repository["key"]
    if repository["keyring"]:
        shutil.copyfile(keys.binary(key), where / "cuda-archive-keyring.gpg")
        shutil.copyfile(keys.public(key), where / (repository["key_file"] or f"{keys.id(key)}.pub"))
        deb = _cuda_keyring(repository, keys, where)
        with (where / "Packages").open("ab") as index:
            index.write(run(["apt-ftparchive", "packages", f"./{deb}"], cwd=where))
    _signed_with_faults(repository, where, repository["release"], keys)


def _suites(repository: dict[str, Any], keys: Keys) -> None:
    dists = ROOT / repository["path"] / "dists"
    for suite, version in repository["suites"].items():
        names = {"Suite": suite, "Version": version, "Codename": suite.partition("-")[0], "Architectures": "amd64"}
        fields = {**repository["release"], **names, "Components": " ".join(repository["components"])}
        _signed_with_faults(repository, dists / suite, fields, keys)
    shutil.copyfile(keys.binary(repository["key"]), ROOT / repository["path"] / "ubuntu-archive-keyring.gpg")


def _rpm(repository: dict[str, Any], keys: Keys) -> None:
    where = ROOT / repository["path"]
    key = repository["key"]
    path = repository["path"]
    rpms.sign(where, keys.home, keys.user(key))
    rpms.index(repository, where, where, set())
    keys.detach(key, where / "repodata/repomd.xml", where / "repodata/repomd.xml.asc")
    expired = _made(FAULTS / "expired-key" / path / "repodata")
    keys.detach(key, where / "repodata/repomd.xml", expired / "repomd.xml.asc", expired=True)
    packages = {rpms.file_name(package): (package["name"], package["release"]) for package in repository["packages"]}
    lagging = _made(FAULTS / "fabric-manager-lags" / path)
    newest = _newest_fabric_managers(packages.values())
    rpms.index(repository, where, lagging, {name for name, package in packages.items() if package in newest})
    keys.detach(key, lagging / "repodata/repomd.xml", lagging / "repodata/repomd.xml.asc")
    public = repository["key_file"] or f"{keys.id(key)}.pub"
    shutil.copyfile(keys.public(key), where / public)
    url = f"http://vendor/{path}"
    name = repository["repo"]
    settings = {"name": name, "baseurl": url, "enabled": "1", "gpgcheck": "1", "gpgkey": f"{url}/{public}"}
    text = f"[{name}]\n" + "".join(f"{option}={value}\n" for option, value in settings.items())
    (where / f"{name.removesuffix('-x86_64')}.repo").write_text(text, encoding="utf-8")


def _signed_with_faults(repository: dict[str, Any], folder: Path, fields: dict[str, str], keys: Keys) -> None:
    """Sign the indices in ``folder``, and write their variants under the faults that change them."""
    _sign(folder, folder, fields, keys, repository["key"])
    path = folder.relative_to(ROOT)
    keys.sign(repository["key"], folder / "Release", _made(FAULTS / "expired-key" / path), expired=True)
    lagging = _made(FAULTS / "fabric-manager-lags" / path)
    for index in folder.rglob("Packages"):
        text = _without_newest_fabric_manager(index.read_text(encoding="utf-8"))
        copy = lagging / index.relative_to(folder)
        _made(copy.parent)
        copy.write_text(text, encoding="utf-8")
    _sign(lagging, lagging, fields, keys, repository["key"])
    for index in folder.rglob("Packages"):
        newer = _made(FAULTS / "mid-sync" / path / index.parent.relative_to(folder)) / "Packages"
        newer.write_text(index.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        packed = newer.with_name("Packages.xz")
        packed.write_bytes(lzma.compress(newer.read_bytes()))
        compressed(newer)
    if repository["keyring"]:
        without = _made(FAULTS / "no-dkms" / path)
        (without / "Packages").write_text(_without_dkms((folder / "Packages").read_text(encoding="utf-8")))
        _sign(without, without, fields, keys, repository["key"])


def _sign(folder: Path, to: Path, fields: dict[str, str], keys: Keys, key: str) -> None:
    """Compress the folder's indices, list them in Release, sign Release."""
    listed = []
    for index in sorted(folder.rglob("Packages")):
        if key in _XZ:
            packed = index.with_name("Packages.xz")
            packed.write_bytes(lzma.compress(index.read_bytes()))
            index.with_name("Packages.gz").unlink(missing_ok=True)
        else:
            packed = index.with_name("Packages.gz")
            compressed(index)
        listed += [index, packed]
    lines = [f"{name}: {text}" for name, text in fields.items()]
    if "Suite" not in fields and "Codename" not in fields:  # as in the output of NVIDIA's own script
        lines += ["Architecture: x86_64", "Acquire-By-Hash: no"]
    lines.append(f"Date: {_FROZEN.get(key, _DATE)}")
    for title, kind in _SUMS.get(key, _PLAIN_SUMS):
        lines.append(f"{title}:")
        for path in listed:
            data = path.read_bytes()
            lines.append(f" {hashlib.new(kind, data).hexdigest()} {len(data)} {path.relative_to(folder)}")
    (to / "Release").write_text("\n".join(lines) + "\n", encoding="utf-8")
    keys.sign(key, to / "Release", to)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _newest_fabric_managers(packages: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return (name, release) of each branch's newest fabric manager, under all its names."""
    managers = {(name, release) for name, release in packages if _FABRIC_MANAGER.match(name)}
    newest: dict[str, tuple[int, ...]] = {}
    for _, release in managers:
        branch = release.partition(".")[0]
        newest[branch] = max(_point(release), newest.get(branch, ()))
    return {(name, release) for name, release in managers if _point(release) == newest[release.partition(".")[0]]}


def _point(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def _without_newest_fabric_manager(index: str) -> str:
    """Return the index of an apt repository without each branch's newest fabric manager."""
    stanzas = {}
    for stanza in index.split("\n\n"):
        name = re.search(r"^Package: (.+)$", stanza, re.MULTILINE)
        version = re.search(r"^Version: (?:\d+:)?([\d.]+)", stanza, re.MULTILINE)
        if name and version:
            stanzas[stanza] = (name[1], version[1])
    gone = _newest_fabric_managers(stanzas.values())
    return "".join(f"{stanza}\n\n" for stanza, package in stanzas.items() if package not in gone)


def _without_dkms(index: str) -> str:
    """Return the index of an apt repository without dkms and dh-dkms."""
    stanzas = (stanza for stanza in index.split("\n\n") if stanza.strip())
    return "".join(f"{stanza}\n\n" for stanza in stanzas if not re.match(r"Package: (dh-)?dkms\n", stanza.lstrip()))


def _cuda_keyring(repository: dict[str, Any], keys: Keys, where: Path) -> str:
    """Build cuda-keyring: the key, the source list that names it, and the preferences of the repository."""
    name = f"cuda-{repository['keyring']}-x86_64"
    keyring = "/usr/share/keyrings/cuda-archive-keyring.gpg"
    line = f"deb [signed-by={keyring}] http://vendor/{repository['path']}/ /\n"
    files = [{"path": f"etc/apt/sources.list.d/{name}.list", "text": line, "mode": "0644"}]
    if repository["pin"]:
        path = "etc/apt/preferences.d/cuda-repository-pin-600"
        files.append({"path": path, "text": repository["pin"], "mode": "0644"})
    package = {
        "name": "cuda-keyring",
        "version": "1.1-1",
        "release": "1.1",
        "architecture": "all",
        "fields": {"Section": "admin", "Priority": "optional", "Maintainer": repository["maintainer"]},
        "description": "key and source of NVIDIA's repository (simulated by gpunode lab)",
        "files": files,
        "links": [],
        "libraries": [],
        "conffiles": [entry["path"] for entry in files],
        "scripts": {},
        "modules": [],
        "repack": "",
        "copies": {keyring[1:]: str(keys.binary(repository["key"]))},
    }
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        Tools(Path(folder)).deb(package, where)
    return "cuda-keyring_1.1-1_all.deb"
