"""The declared packages of the vendor repository against the catalog, and against themselves."""

import fnmatch
import re
import shlex
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from gpunode.catalog import Catalog
from gpunode.catalog.origins import closure_line, origin_of
from gpunode.catalog.software import PackageSet
from gpunode.errors import UsageError
from gpunode.lab.packages import rows as module
from gpunode.lab.packages.plan import MARK, Built, contents, filled, plan
from gpunode.lab.packages.rows import Package, Payload, repositories

CATALOG = Catalog()
BRANCHES = (570, 580, 595)
# Repository of the lab → whose packages it holds, for which system of the catalog.
WHOSE = {
    "debian12": ("nvidia", "debian-12"),
    "debian13": ("nvidia", "debian-13"),
    "ubuntu2404": ("nvidia", "ubuntu-24.04"),
    "ubuntu": ("ubuntu", "ubuntu-24.04"),
    "rhel9": ("nvidia", "rhel-9"),
    "container-toolkit": ("container-toolkit", "debian-12"),
    "container-toolkit-rpm": ("container-toolkit", "rhel-9"),
}
# What the systems bring themselves.
FROM_THE_SYSTEM = {"adduser", "dkms", "initramfs-tools", "kmod", "libibumad3", "linux-headers-cloud-amd64"}
FLAVOURS = {"generic", "generic-hwe-24.04"}
DEB = [name for name, row in repositories().items() if row.kind != "rpm"]


@cache
def held(repository: str) -> dict[str, set[str]]:
    """Package name → versions."""
    found = defaultdict(set)
    for built in contents(repositories()[repository]):
        found[built.name].add(built.version)
    return dict(found)


def wanted(repository: str) -> Iterator[tuple[str, str, int | None]]:
    """What the catalog names for that repository's system and origin: name, pattern of the version, branch."""
    origin, system = WHOSE[repository]
    family = CATALOG.systems[system].family
    for row in CATALOG.packages.values():
        if row.origin != origin or row.family != family or (row.systems and system not in row.systems):
            continue
        branches = [number for number in BRANCHES if _fits(row, number)] if row.with_driver else [None]
        for branch in branches:
            for name, kernel in ((name, kernel) for name in row.names for kernel in sorted(FLAVOURS)):
                yield from _filled(name, row, branch, kernel)


def _fits(row: PackageSet, branch: int) -> bool:
    return (row.first_branch or 0) <= branch <= (row.last_branch or 9999)


def _filled(name: str, row: PackageSet, branch: int | None, kernel: str) -> Iterator[tuple[str, str, int | None]]:
    for cuda in ("12-9", "13-0"):
        values = {"branch": str(branch), "kernel": kernel, "cuda": cuda, "cuda_major": cuda[:2]}
        yield filled(name, values), row.version or "*", branch


def points(branch: int) -> set[str]:
    return {str(point) for point in CATALOG.branches[str(branch)].points}


@pytest.mark.parametrize("repository", WHOSE)
def test_every_package_that_the_catalog_names_is_there(repository: str) -> None:
    names = {name for name, _, _ in wanted(repository)} - {"infiniband-diags"}  # each system's own
    assert len(names) >= 4
    assert names - set(held(repository)) == set()


@pytest.mark.parametrize("repository", WHOSE)
def test_the_catalogs_pattern_finds_two_points_of_each_branch(repository: str) -> None:
    looked = 0
    for name, pattern, branch in wanted(repository):
        if branch is None or name.startswith("linux-modules-nvidia-"):  # those carry their kernel's version
            continue
        fitting = {
            point
            for point in points(branch)
            for version in held(repository)[name]
            if fnmatch.fnmatch(version.partition(":")[2] or version, f"{pattern.replace('{version}', point)}*")
        }
        assert len(fitting) == 2, (name, branch, held(repository)[name])
        looked += 1
    assert looked or WHOSE[repository][0] == "container-toolkit"


@pytest.mark.parametrize("branch", BRANCHES)
def test_pinning_packages_are_named_as_the_catalog_has_them(branch: int) -> None:
    row = CATALOG.pinning["nvidia-deb"]
    for repository in ("debian12", "debian13", "ubuntu2404"):
        newest = max(points(branch) & _releases(repository, branch), key=_numbers)
        names = {filled(name, {"branch": str(branch), "version": newest}) for name in row.packages}
        assert (names <= set(held(repository))) is (branch >= (row.first_branch or 0))


def _releases(repository: str, branch: int) -> set[str]:
    packages = contents(repositories()[repository])
    return {built.release for built in packages if built.release.startswith(f"{branch}.")}


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


@pytest.mark.parametrize("repository", ["debian12", "ubuntu2404", "ubuntu", "rhel9"])
def test_each_branch_has_an_older_point_and_a_newer_one_of_the_catalog(repository: str) -> None:
    for branch in BRANCHES:
        found = {release for release in _releases(repository, branch) if release in points(branch)}
        assert len(found) == 2, (branch, found)


def test_580_ends_with_the_catalogs_newest_point() -> None:
    assert str(CATALOG.branches["580"].latest) in _releases("debian12", 580)


@pytest.mark.parametrize("repository", ["debian12", "ubuntu2404", "ubuntu", "rhel9"])
def test_the_origin_of_every_driver_package_is_recognised(repository: str) -> None:
    looked = 0
    for built in contents(repositories()[repository]):
        if built.name.startswith("nvidia-driver"):
            who = "NVIDIA CORPORATION" if repository == "rhel9" else built.fields["Maintainer"]
            origin = origin_of(built.name, built.version, who)
            assert origin == WHOSE[repository][0]
            if "pinning" not in built.name:
                assert closure_line(built.name, built.fields.get("Source", built.name), origin) == origin
            looked += 1
    assert looked > 6


def test_every_package_says_that_it_is_simulated() -> None:
    for repository in repositories().values():
        for built in contents(repository):
            assert MARK in built.version
            assert "simulated" in built.description


@pytest.mark.parametrize("repository", repositories())
def test_nothing_is_left_unfilled_and_no_package_is_there_twice(repository: str) -> None:
    packages = contents(repositories()[repository])
    for built in packages:
        text = " ".join([built.name, built.version, *built.fields.values(), *built.scripts.values()])
        paths = [entry["path"] for entry in [*built.files, *built.links, *built.libraries, *built.modules]]
        assert not re.search(r"(?<!\$)\{[a-z_]+\}", " ".join([text, *paths])), built.name
        assert len(paths) == len(set(paths)), built.name
        assert not [path for path in paths if path.startswith("/")]
    keys = [(built.name, built.version, built.architecture) for built in packages]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("repository", DEB)
def test_every_dependency_can_be_met(repository: str) -> None:
    packages = contents(repositories()[repository])
    provided = {built.name for built in packages} | FROM_THE_SYSTEM
    for built in packages:
        provided |= {entry.split()[0] for entry in _entries(built, "Provides")}
    looked = 0
    for built in packages:
        for entry in _entries(built, "Depends"):
            assert {alternative.split()[0] for alternative in entry.split("|")} & provided, (built.name, entry)
            looked += 1
    assert looked > 4


def _entries(built: Built, field: str) -> list[str]:
    return [entry.strip() for entry in built.fields.get(field, "").split(",") if entry.strip()]


def test_metas_are_loose_and_libraries_exact() -> None:
    meta = _one("debian12", "nvidia-open", "580.95.05")
    assert "nvidia-driver (>= 580.95.05-1+gpunodelab)" in _entries(meta, "Depends")
    cuda = _one("debian12", "nvidia-driver-cuda", "580.95.05")
    assert "libcuda1 (= 580.95.05-1+gpunodelab)" in _entries(cuda, "Depends")


def _one(repository: str, name: str, release: str) -> Built:
    packages = contents(repositories()[repository])
    return next(built for built in packages if built.name == name and built.release == release)


def test_a_pinning_package_pins_its_branch_before_everything_else() -> None:
    built = next(b for b in contents(repositories()["debian12"]) if b.name == "nvidia-driver-pinning-580")
    assert built.version == "580-1+gpunodelab"
    (pin,) = [entry for entry in built.files if entry["path"] == "etc/apt/preferences.d/nvidia-driver-pin"]
    assert "Pin: version 580.*\nPin-Priority: 1000\n" in pin["text"]
    patterns = re.findall(r"^Package: (.*)$", pin["text"], re.MULTILINE)[0].split()
    closure = {"nvidia-kernel-open-dkms", "libcuda1", "nvidia-fabricmanager", "libnvsdm", "libnvidia-nscq"}
    for name in closure:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_the_fabric_manager_has_its_names_by_branch() -> None:
    assert {version[:3] for version in held("debian12")["nvidia-fabricmanager"]} == {"580", "595"}
    assert "nvidia-fabricmanager-570" in held("debian12")
    assert "nvidia-fabricmanager-580" not in held("debian12")
    assert {version.split(":")[1][:3] for version in held("rhel9")["nvidia-fabric-manager"]} == {"570"}
    assert {version.split(":")[1][:3] for version in held("rhel9")["nvidia-fabricmanager"]} == {"580", "595"}


def test_nccl_ends_with_the_toolkit_it_was_built_with() -> None:
    assert "2.30.7-1+gpunodelab+cuda13.3" in held("ubuntu2404")["libnccl2"]


def test_the_cdi_units_come_with_toolkit_1_18() -> None:
    for release, there in (("1.17.8", False), ("1.18.1", True), ("1.20.0", True)):
        built = _one("container-toolkit", "nvidia-container-toolkit-base", release)
        paths = {entry["path"] for entry in built.files}
        assert ("usr/lib/systemd/system/nvidia-cdi-refresh.path" in paths) is there
        assert ("nvidia-cdi-refresh" in built.scripts.get("postinst", "")) is there


def test_a_tool_tells_the_simulator_its_release() -> None:
    built = _one("debian12", "nvidia-driver-cuda", "595.91.07")
    (tool,) = [entry for entry in built.files if entry["path"] == "usr/bin/nvidia-smi"]
    assert tool["mode"] == "0755"
    assert (
        tool["text"].splitlines()[1].startswith("GPUNODE_LAB_PACKAGE_VERSION=595.91.07 exec /usr/lib/gpunode-lab/bin/")
    )


def test_a_dkms_tree_is_whole_and_says_its_flavour() -> None:
    for name, folder, said in (
        ("nvidia-kernel-open-dkms", "usr/src/nvidia-open-580.95.05", 'MODULE_LICENSE("Dual MIT/GPL")'),
        ("nvidia-kernel-dkms", "usr/src/nvidia-580.95.05", 'MODULE_LICENSE("NVIDIA")'),
    ):
        files = {entry["path"]: entry["text"] for entry in _one("debian12", name, "580.95.05").files}
        assert said in files[f"{folder}/lab.h"]
        assert 'PACKAGE_VERSION="580.95.05"' in files[f"{folder}/dkms.conf"]
        assert "${kernelver}" in files[f"{folder}/dkms.conf"]
        for built_name in re.findall(r'BUILT_MODULE_NAME\[\d\]="(.+)"', files[f"{folder}/dkms.conf"]):
            assert f"{built_name}.o" in files[f"{folder}/Kbuild"]
            assert f"{folder}/{built_name}.c" in files


def test_canonicals_590_pulls_in_595() -> None:
    built = _one("ubuntu", "linux-modules-nvidia-590-server-open-generic", "595.91.07")
    assert _entries(built, "Depends") == ["linux-modules-nvidia-595-server-open-generic"]


@pytest.mark.parametrize("repository", DEB)
def test_maintainer_scripts_are_shell(repository: str) -> None:
    scripts = {text for built in contents(repositories()[repository]) for text in built.scripts.values()}
    assert scripts
    for text in scripts:
        done = subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True, timeout=20, check=False)
        assert done.returncode == 0, f"{shlex.quote(text)}: {done.stderr}"


def test_the_plan_is_the_same_every_time() -> None:
    assert plan() == plan()


def test_braces_of_the_shell_stay() -> None:
    assert filled("${branch} {branch} {other}", {"branch": "580"}) == "${branch} 580 {other}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("packages: [{name: a, over: driver}]", "a: description: Field required"),
        ("packages: [{name: a, over: driver, description: d, colour: red}]", "colour: Extra inputs"),
        ("packages: [{name: a, over: nothing, description: d}]", "releases.yml has no list nothing"),
        ("packages: [{name: a, over: driver, description: d, payload: [{tool: a, unit: b}]}]", "exactly one of"),
        ("packages: [{name: a, over: driver, description: d, payload: [{file: a}]}]", "one of text and from"),
        ("packages: [", "bad.yml: while parsing"),
    ],
)
def test_a_bad_row_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, says: str) -> None:
    module.releases()  # before the folder is another
    (tmp_path / "bad.yml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(module, "DATA", tmp_path)
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        module.packages.__wrapped__("bad")
    assert "bad.yml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_part_can_begin_with_a_release() -> None:
    row = Package(
        name="a", over="driver", description="d", payload=(Payload(tool="t"), Payload(unit="u", from_version="1.18.0"))
    )
    assert [part.tool for part in row.parts("1.17.8")] == ["t"]
    assert len(row.parts("1.18.0")) == 2
