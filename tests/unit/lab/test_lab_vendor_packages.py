"""The packages of the vendor repository against the recorded indexes, and against themselves."""

import fnmatch
import re
import shlex
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from gpunode.catalog.origins import closure_line, origin_of
from gpunode.errors import UsageError
from gpunode.lab.packages import rows as module
from gpunode.lab.packages.plan import Built, contents, filled, plan, recorded_in
from gpunode.lab.packages.recorded import Offer, assumptions, recorded, stem
from gpunode.lab.packages.rows import PackageRow, Payload, repositories

# What the systems bring themselves.
FROM_THE_SYSTEM = {
    "adduser", "dkms", "initramfs-tools", "kmod", "libc6", "libcap2", "libibumad3", "libseccomp2",
    "linux-headers-cloud-amd64", "ocl-icd-libopencl1",
}  # fmt: skip
DEB = [name for name, row in repositories().items() if row.kind != "rpm"]
NVIDIA_DEB = [name for name in DEB if repositories()[name].keyring]
UBUNTU = [name for name in NVIDIA_DEB if name.startswith("ubuntu")]
RECORDED = [name for name, row in repositories().items() if row.recorded]


@cache
def held(repository: str) -> dict[str, set[str]]:
    """Package name → versions."""
    versions = defaultdict(set)
    for built in contents(repositories()[repository]):
        versions[built.name].add(built.version)
    return dict(versions)


@cache
def offered(repository: str) -> dict[tuple[str, str], Offer]:
    """What the recorded index offers: (name, release) → offer."""
    return {(offer.name, offer.release): offer for offer in recorded_in(repositories()[repository])}


@pytest.mark.parametrize("repository", RECORDED)
def test_every_recorded_name_with_a_version_is_there(repository: str) -> None:
    """A name that is left out has no whole version, no driver's release that the lab has, or is not of a package."""
    rows = recorded(repositories()[repository].recorded)["packages"]
    releases = repositories()[repository].releases
    missing = {}
    for name, row in rows.items():
        whole = [version for version in row.get("versions", ()) if re.fullmatch(r"[0-9][0-9A-Za-z.+~:-]*", version)]
        other = whole and row.get("follows") and not any(version.startswith(releases) for version in whole)
        if name not in held(repository) and whole and not other and not row.get("from_repository"):
            missing[name] = whole
    unlisted = {name for name in missing if not re.search(r"-57[05]$|-pinning-|cuda-keyring", name)}
    assert unlisted == set(), missing
    assert len(held(repository)) > 3


@pytest.mark.parametrize("repository", [name for name in RECORDED if name != "container-toolkit"])
def test_every_recorded_version_of_a_release_that_the_lab_has_is_there(repository: str) -> None:
    rows = recorded(repositories()[repository].recorded)["packages"]
    releases = repositories()[repository].releases
    looked = 0
    for name, row in rows.items():
        for version in row.get("versions", ()):
            if row.get("follows") and version.startswith(releases) and re.fullmatch(r"[0-9.]+-\S+", version):
                bare = {held_version.rpartition(":")[2] for held_version in held(repository)[name]}
                assert version in bare, name
                looked += 1
    assert looked or repository == "rhel10"


@pytest.mark.parametrize("repository", RECORDED)
def test_every_assumption_is_one_that_is_written_down(repository: str) -> None:
    known = assumptions()["assumptions"]
    for offer in offered(repository).values():
        assert set(offer.assumed) <= set(known), offer.name


@pytest.mark.parametrize("repository", UBUNTU)
def test_from_590_on_no_utils_and_nvidia_smi_is_in_the_compute_library(repository: str) -> None:
    names = set(held(repository))
    assert not names & {"nvidia-utils", "nvidia-compute-utils"}
    assert ("nvidia-utils-580" in names) is (repository != "ubuntu2604")
    holders = {built.name for built in contents(repositories()[repository])
               if any(entry["path"] == "usr/bin/nvidia-smi" for entry in built.files)}  # fmt: skip
    assert {stem(name) for name in holders} == {"libnvidia-compute"} | ({"nvidia-utils"} & {stem(n) for n in names})


@pytest.mark.parametrize(
    ("repository", "name"), [("ubuntu2404", "nvidia-dkms{}-open"), ("debian12", "nvidia-kernel-open-dkms")]
)
def test_a_recent_dkms_is_required_from_570_148_on(repository: str, name: str) -> None:
    for release, suffix, required in (
        ("570.133.20", "-570", "dkms"),
        ("570.172.08", "-570", "dkms (>= 3.1.8)"),
        ("610.57.04", "", "dkms (>= 3.1.8)"),
    ):
        assert required in offered(repository)[name.format(suffix), release].relations["depends"]


@pytest.mark.parametrize("repository", NVIDIA_DEB)
def test_nvidias_dkms_has_epoch_1_and_is_made_of_debians(repository: str) -> None:
    dkms = [built for built in contents(repositories()[repository]) if built.name == "dkms"]
    assert dkms
    assert {built.version[:2] for built in dkms} == {"1:"}
    assert {built.repack for built in dkms} == {"dkms"}


def test_the_archives_dkms_is_the_systems() -> None:
    versions = {built.suite: built.version for built in contents(repositories()["ubuntu"]) if built.name == "dkms"}
    assert versions == {
        "jammy": "2.8.7-2ubuntu2",
        "jammy-updates": "2.8.7-2ubuntu2.2",
        "noble": "3.0.11-1ubuntu13",
        "resolute": "3.2.2-1ubuntu1",
    }
    for codename in ("jammy", "noble", "resolute"):
        rows = recorded(f"ubuntu-archive-{codename}")["packages"]
        recorded_there = set(rows["dkms"]["versions"])
        assert {version for suite, version in versions.items() if suite.startswith(codename)} == recorded_there


@pytest.mark.parametrize("codename", ["jammy", "noble", "resolute"])
def test_every_recorded_driver_of_the_archive_is_there(codename: str) -> None:
    names = {built.name for built in contents(repositories()["ubuntu"]) if built.suite.startswith(codename)}
    rows = recorded(f"ubuntu-archive-{codename}")["packages"]
    drivers = re.compile(r"-server(-open)?(-generic.*)?$")
    server = {name for name, row in rows.items() if drivers.search(name) and not row.get("virtual") and row["sure"]}
    assert server
    assert server - names == set()
    for name in server:
        if rows[name].get("transitional_to"):
            packages = [
                b for b in contents(repositories()["ubuntu"]) if b.name == name and b.suite.startswith(codename)
            ]
            assert {built.fields["Depends"] for built in packages} == {rows[name]["transitional_to"]}


@pytest.mark.parametrize("repository", UBUNTU)
def test_renamed_packages_exclude_each_other_on_the_way_there_and_back(repository: str) -> None:
    plain = offered(repository)["libnvidia-cfg1", "595.91.07"].relations
    if repository == "ubuntu2604":
        assert plain["conflicts"] == []
        return
    old = offered(repository)["libnvidia-cfg1-580", "580.178.04"].relations
    assert "libnvidia-cfg1-580" in plain["conflicts"]
    assert "libnvidia-cfg1" in old["conflicts"]
    assert plain["replaces"] == plain["conflicts"]


def test_pinning_packages_exclude_each_other_and_share_one_file() -> None:
    for repository in NVIDIA_DEB:
        pinning = [b for b in contents(repositories()[repository]) if b.name.startswith("nvidia-driver-pinning-")]
        assert len(pinning) > 4
        for built in pinning:
            assert built.fields["Conflicts"] == built.fields["Provides"] == "nvidia-driver-pinning"
            assert [entry["path"] for entry in built.files] == ["etc/apt/preferences.d/nvidia-driver-pin"]


@pytest.mark.parametrize("repository", ["debian12", "ubuntu2404", "ubuntu", "rhel9"])
def test_the_origin_of_every_driver_package_is_recognised(repository: str) -> None:
    looked = 0
    for built in contents(repositories()[repository]):
        if built.name.startswith("nvidia-driver-cuda"):
            who = "NVIDIA CORPORATION" if repository == "rhel9" else built.fields["Maintainer"]
            origin = origin_of(built.name, built.version, who)
            assert origin == "nvidia"
            assert closure_line(built.name, built.fields.get("Source", built.name), origin) == origin
            looked += 1
    assert looked or repository.startswith("ubuntu")


def test_every_package_states_that_it_is_simulated() -> None:
    for repository in repositories().values():
        for built in contents(repository):
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
    keys = [(built.name, built.version, built.suite) for built in packages]
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


@pytest.mark.parametrize("repository", ["rhel9", "rhel10"])
def test_every_requirement_of_one_version_can_be_met(repository: str) -> None:
    """``name = version`` of a package or of what one provides; the epoch is part of it, the release is not."""
    packages = contents(repositories()[repository])
    offers = {f"{built.name} = {built.version.rpartition('-')[0]}" for built in packages}
    offers |= {entry for built in packages for entry in _entries(built, "Provides")}
    driver = [built for built in packages if built.release in repositories()[repository].releases]
    required = [(built.name, entry) for built in driver for entry in _entries(built, "Depends")]
    exact = [(name, entry) for name, entry in required if " = " in entry]
    assert len(exact) > 20
    assert [(name, entry) for name, entry in exact if entry not in offers] == []


def _entries(built: Built, field: str) -> list[str]:
    return [entry.strip() for entry in built.fields.get(field, "").split(",") if entry.strip()]


def test_metas_are_loose_and_libraries_exact() -> None:
    meta = _one("debian12", "nvidia-open", "580.95.05")
    assert "nvidia-driver (>= 580.95.05)" in _entries(meta, "Depends")
    cuda = _one("debian12", "nvidia-driver-cuda", "580.95.05")
    assert "libcuda1 (= 580.95.05-1)" in _entries(cuda, "Depends")


def _one(repository: str, name: str, release: str) -> Built:
    packages = contents(repositories()[repository])
    return next(built for built in packages if built.name == name and built.release == release)


def test_a_pinning_package_pins_its_branch_before_everything_else() -> None:
    built = next(b for b in contents(repositories()["debian12"]) if b.name == "nvidia-driver-pinning-580")
    assert built.version == "580-2"
    (pin,) = [entry for entry in built.files if entry["path"] == "etc/apt/preferences.d/nvidia-driver-pin"]
    assert "Pin: version 580.*\nPin-Priority: 1000\n" in pin["text"]
    patterns = re.findall(r"^Package: (.*)$", pin["text"], re.MULTILINE)[0].split()
    closure = {"nvidia-kernel-open-dkms", "libcuda1", "nvidia-fabricmanager", "libnvsdm", "libnvidia-nscq"}
    for name in closure:
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_the_fabric_manager_has_its_names_by_branch() -> None:
    assert {version[:3] for version in held("debian12")["nvidia-fabricmanager"]} == {"580", "590", "595", "610", "615"}
    assert "nvidia-fabricmanager-570" in held("debian12")
    assert "nvidia-fabricmanager-580" not in held("debian12")
    assert {version[:3] for version in held("rhel9")["nvidia-fabric-manager"]} == {"570"}
    assert {version[:3] for version in held("rhel9")["nvidia-fabricmanager"]} == {"580", "595", "610", "615"}


def test_nccl_ends_with_the_toolkit_it_was_built_with() -> None:
    assert "2.30.7-1+cuda13.3" in held("ubuntu2404")["libnccl2"]


def test_the_cdi_units_come_with_toolkit_1_18() -> None:
    for release, present in (("1.17.8", False), ("1.18.1", True), ("1.20.0", True)):
        built = _one("container-toolkit", "nvidia-container-toolkit-base", release)
        paths = {entry["path"] for entry in built.files}
        assert ("usr/lib/systemd/system/nvidia-cdi-refresh.path" in paths) is present
        assert ("nvidia-cdi-refresh" in built.scripts.get("postinst", "")) is present


def test_a_tool_passes_its_release_to_the_simulator() -> None:
    built = _one("debian12", "nvidia-driver-cuda", "595.91.07")
    (tool,) = [entry for entry in built.files if entry["path"] == "usr/bin/nvidia-smi"]
    assert tool["mode"] == "0755"
    assert (
        tool["text"].splitlines()[1].startswith("GPUNODE_LAB_PACKAGE_VERSION=595.91.07 exec /usr/lib/gpunode-lab/bin/")
    )


def test_a_dkms_tree_is_whole_and_states_its_flavour() -> None:
    for name, folder, output in (
        ("nvidia-kernel-open-dkms", "usr/src/nvidia-open-580.95.05", 'MODULE_LICENSE("Dual MIT/GPL")'),
        ("nvidia-kernel-dkms", "usr/src/nvidia-580.95.05", 'MODULE_LICENSE("NVIDIA")'),
    ):
        files = {entry["path"]: entry["text"] for entry in _one("debian12", name, "580.95.05").files}
        assert output in files[f"{folder}/lab.h"]
        assert 'PACKAGE_VERSION="580.95.05"' in files[f"{folder}/dkms.conf"]
        assert "${kernelver}" in files[f"{folder}/dkms.conf"]
        for built_name in re.findall(r'BUILT_MODULE_NAME\[\d\]="(.+)"', files[f"{folder}/dkms.conf"]):
            assert f"{built_name}.o" in files[f"{folder}/Kbuild"]
            assert f"{folder}/{built_name}.c" in files


def test_canonicals_590_pulls_in_595() -> None:
    built = _one("ubuntu", "linux-modules-nvidia-590-server-open-generic", "595.71.05")
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
    ("text", "message"),
    [
        ("packages: [{name: a, over: driver}]", "a: description: Field required"),
        ("packages: [{name: a, over: driver, description: d, colour: red}]", "colour: Extra inputs"),
        ("packages: [{name: a, over: nothing, description: d}]", "releases.yml has no list nothing"),
        ("packages: [{name: a, over: driver, description: d, payload: [{tool: a, unit: b}]}]", "exactly one of"),
        ("packages: [{name: a, over: driver, description: d, payload: [{file: a}]}]", "one of text and from"),
        ("packages: [", "bad.yml: while parsing"),
    ],
)
def test_a_bad_row_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, message: str) -> None:
    module.releases()  # before the folder is another
    (tmp_path / "bad.yml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(module, "DATA", tmp_path)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        module.packages.__wrapped__("bad")
    assert "bad.yml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_part_can_begin_with_a_release() -> None:
    row = PackageRow(
        name="a", over="driver", description="d", payload=(Payload(tool="t"), Payload(unit="u", from_version="1.18.0"))
    )
    assert [part.tool for part in row.parts("1.17.8")] == ["t"]
    assert len(row.parts("1.18.0")) == 2


def test_rpm_packages_have_the_scriptlets_that_decide_what_is_on_a_node() -> None:
    """The account that the daemon's unit names, modules for the running kernel whatever DKMS answers, and headers."""
    scripts = {built.name: built.scripts for built in contents(repositories()["rhel9"]) if built.scripts}
    assert "useradd --system --gid nvidia-persistenced" in scripts["nvidia-persistenced"]["pre"]
    assert scripts["nvidia-driver-cuda-libs"] == {"post": "ldconfig\n", "postun": "ldconfig\n"}
    for name, tree in (("kmod-nvidia-open-dkms", "nvidia-open"), ("kmod-nvidia-latest-dkms", "nvidia")):
        assert f"dkms $step -m {tree} -v " in scripts[name]["post"]
        assert scripts[name]["post"].count("|| :") == scripts[name]["preun"].count("|| :") == 1
    for system in ("rocky9", "rocky10"):
        (devel,) = (built for built in contents(repositories()[system]) if built.name == "kernel-devel")
        assert f"seen=/usr/src/kernels/{devel.version}.x86_64\n" in devel.scripts["post"]
        assert "{" not in devel.scripts["post"].replace("${seen%/*}", "")


@pytest.mark.parametrize("repository", ["rhel9", "rhel10"])
def test_the_rpm_with_nvidia_smi_brings_the_library_that_it_needs(repository: str) -> None:
    """As in the spec: a library of its own up to 595, in nvidia-driver-common from 610 on, which obsoletes it."""
    of = {(built.name, built.release): built for built in contents(repositories()[repository])}
    for release in ("580.178.04", "595.91.07"):
        assert f"libnvidia-ml = 3:{release}" in of["nvidia-driver-cuda-libs", release].fields["Depends"]
        assert of["libnvidia-ml", release].version.startswith(f"3:{release}-")
    common = of["nvidia-driver-common", "610.57.04"]
    assert of["nvidia-driver-cuda-libs", "610.57.04"].fields["Depends"] == "nvidia-driver-common = 3:610.57.04"
    assert "libnvidia-ml.so.1" in {library["soname"] for library in common.libraries}
    assert "libnvidia-ml < 3:610.57.04" in common.fields["Replaces"]
    assert ("libnvidia-ml", "610.57.04") not in of
