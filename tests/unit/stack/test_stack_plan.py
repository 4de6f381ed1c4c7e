"""Pictures from facts, groups of equal nodes, locks and drift."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from stack_samples import CATALOG, TODAY, on_node, stack

from gpunode.errors import UsageError
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.facts.modules import LoadedDriver, ModuleFile
from gpunode.facts.packages import Kernel, Package
from gpunode.facts.pci import PciDevice
from gpunode.facts.system import OperatingSystem
from gpunode.probe.bundle import Bundle
from gpunode.stack import (
    LOCK_NAME,
    NodePicture,
    PlanHost,
    Request,
    lock_document,
    picture_from_facts,
    plan,
    read_lock,
    undetermined,
)

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"


def device(pci: str, *, class_id: str = "030200", subsystem: str | None = None) -> PciDevice:
    vendor, device_id = pci.split(":")
    return PciDevice(
        slot="0000:1a:00.0",
        vendor_id=vendor,
        device_id=device_id,
        subsystem_id=subsystem,
        class_id=class_id,
        driver=None,
    )


def package(name: str, version: str, maintainer: str, source: str = "nvidia-graphics-drivers") -> Package:
    return Package(
        name=name,
        version=version,
        architecture="amd64",
        source=source,
        maintainer=maintainer,
        installed=True,
        state="install ok installed",
        held=False,
    )


def facts(**known: Any) -> NodeFacts:
    base: dict[str, Any] = {
        "host": "n1",
        "collected_at": "2026-11-20T00:00:00Z",
        "os": OperatingSystem(id="ubuntu", version_id="24.04", codename="noble", pretty_name="Ubuntu 24.04.3 LTS"),
        "architecture": "x86_64",
        "packages": (),
        "pci": (device("10de:2330"),) * 8 + (device("10de:22a3", class_id="068000"),) * 4,
        "modules": (),
    }
    return NodeFacts(**(base | known))


def test_a_picture_of_an_hgx_node() -> None:
    seen = picture_from_facts(facts(), CATALOG)
    assert (seen.os, seen.arch, seen.nvswitch, seen.observed) == ("ubuntu-24.04", "x86_64", True, True)
    assert [(group.label, group.count) for group in seen.gpus] == [("H100 SXM5 80GB", 8)]
    assert undetermined(facts(), seen) is None
    assert seen.notes == ()


def test_a_shared_id_is_recognized_by_the_subsystem() -> None:
    pair = (device("10de:25b6", subsystem="10de:157e"), device("10de:25b6", subsystem="10de:14a9"))
    assert [group.label for group in picture_from_facts(facts(pci=pair), CATALOG).gpus] == ["A16", "A2"]


def test_what_is_not_in_the_catalog_is_reported() -> None:
    strange = picture_from_facts(facts(pci=(device("10de:ffff"),)), CATALOG)
    assert strange.gpus == ()
    assert strange.unknown_gpus == ("10de:ffff",)
    reason = undetermined(facts(pci=(device("10de:ffff"),)), strange)
    assert reason is not None
    assert "10de:ffff" in reason
    nothing = picture_from_facts(facts(pci=()), CATALOG)
    assert nothing.notes == ("no NVIDIA GPU is on the PCI bus",)
    nixos = OperatingSystem(id="nixos", version_id="25.05", codename=None, pretty_name="NixOS 25.05")
    odd = facts(os=nixos)
    assert undetermined(odd, picture_from_facts(odd, CATALOG)) == "unknown operating system NixOS 25.05"


@pytest.mark.parametrize("field", ["os", "packages", "pci"])
def test_a_gap_that_matters_decides_nothing(field: str) -> None:
    blind = facts(**{field: None}, gaps={field: "the command timed out"})
    assert (
        undetermined(blind, picture_from_facts(blind, CATALOG))
        == f"{field} could not be determined: the command timed out"
    )


def test_what_is_installed() -> None:
    nvidia = "NVIDIA CORPORATION <cudatools@nvidia.com>"
    picture = picture_from_facts(
        facts(
            packages=(
                package("nvidia-dkms-580-open", "580.95.05-1ubuntu1", nvidia),
                package("libnvidia-compute-580", "580.95.05-1ubuntu1", nvidia),
                package("nvidia-container-toolkit", "1.20.0-1", nvidia, "nvidia-container-toolkit"),
            ),
            loaded_driver=LoadedDriver(version="580.95.05", flavour="open"),
            kernels=(
                Kernel(release="6.8.0-60-generic", package="linux-image", running=True, newest=True, headers=True),
            ),
        ),
        CATALOG,
    )
    assert picture.installed is not None
    assert (picture.installed.version, picture.installed.flavour) == ("580.95.05", "open")
    assert picture.installed.origins == ("nvidia",)
    assert {row.name for row in picture.installed.closure} == {"nvidia-dkms-580-open", "libnvidia-compute-580"}
    assert (picture.kernel, picture.loaded_version) == ("6.8.0-60-generic", "580.95.05")


def test_meta_packages_of_kernels_the_newest_first() -> None:
    ubuntu = "Ubuntu Kernel Team <kernel-team@lists.ubuntu.com>"
    images = {
        "linux-image-generic": "6.8.0-110.110",
        "linux-image-generic-hwe-24.04": "6.14.0-29.29~24.04.1",
        "linux-image-unsigned-6.8.0-60-generic": "6.8.0-60.63",
        "linux-image-6.14.0-29-generic": "6.14.0-29.29~24.04.1",
    }
    seen = picture_from_facts(
        facts(packages=tuple(package(name, version, ubuntu, "linux-meta") for name, version in images.items())), CATALOG
    )
    assert seen.kernel_images == ("linux-image-generic-hwe-24.04", "linux-image-generic")
    assert seen.installed is not None
    assert not seen.installed.present


def test_the_module_on_disk_shows_the_flavour() -> None:
    module = ModuleFile(kernel="6.8", path="/x", version="580.95.05", vermagic=None, flavour="proprietary", signed=True)
    odd = package("nvidia-dkms-580-open", "580.95.05-1", "NVIDIA CORPORATION <cudatools@nvidia.com>")
    picture = picture_from_facts(facts(packages=(odd,), module_files=(module,)), CATALOG)
    assert picture.installed is not None
    assert picture.installed.flavour == "proprietary"


def test_the_recorded_lab_node() -> None:
    """A Debian 12 node with Debian's own driver and no GPU keeps what it has."""
    bundle = Bundle.from_json(BUNDLE.read_bytes(), str(BUNDLE))
    picture = picture_from_facts(facts_from_bundle(bundle), CATALOG)
    assert picture.installed is not None
    assert (picture.installed.version, picture.installed.origins) == ("535.261.03", ("debian",))
    document = plan([PlanHost("deb12-1", picture)], Request(), CATALOG, TODAY)
    (group,) = document.groups
    assert group.stack is not None
    assert (group.stack.kept, group.stack.source) == (True, "debian")
    assert group.drift[0].past_eol
    assert any("no NVIDIA GPU" in warning.text for warning in group.stack.warnings)


def observed(**changed: Any) -> NodePicture:
    return picture_from_facts(facts(), CATALOG).model_copy(update=changed)


def test_equal_nodes_are_one_group_and_failures_another() -> None:
    hosts = [PlanHost(f"n{n}", observed(kernel=f"6.8.0-{60 + n % 2}-generic")) for n in range(6)]
    hosts += [PlanHost("dead", None, "port 22 refused"), PlanHost("hung", None, "port 22 refused")]
    hosts.append(PlanHost("odd", observed(os="debian-12")))
    document = plan(hosts, Request(driver="lts"), CATALOG, TODAY)
    assert [group.hosts for group in document.groups] == [
        ("dead", "hung"),
        ("n0", "n2", "n4"),
        ("n1", "n3", "n5"),
        ("odd",),
    ]
    assert document.groups[0].undetermined == "port 22 refused"
    assert sum(group.stack is not None for group in document.groups) == 3


def driver(version: str, flavour: str = "open") -> Any:
    return on_node((f"nvidia-dkms-{version.split('.', maxsplit=1)[0]}-open", f"{version}-1", "nvidia"), flavour=flavour)


@pytest.mark.parametrize(
    ("have", "locked", "state", "past_eol"),
    [
        ("580.178.04", "580", "in-step", False),
        ("580.95.05", "580.95.05", "newer-available", False),
        ("580.95.05", "580", "differs-from-lock", False),
        (None, "580", "not-installed", False),
        ("535.309.01", None, "newer-available", True),
        ("595.91.07", None, "in-step", False),
    ],
)
def test_drift(have: str | None, locked: str | None, state: str, past_eol: bool) -> None:
    lock = lock_document(stack(platform="hgx-h100-8", driver=locked))[LOCK_NAME] if locked else None
    host = PlanHost("n1", observed(installed=driver(have) if have else None), lock=lock)
    (group,) = plan([host], Request(), CATALOG, TODAY).groups
    (drift,) = group.drift
    assert (drift.state, drift.past_eol) == (state, past_eol)
    assert drift.hosts == ("n1",)


def test_a_lock_decides_where_no_driver_is_requested() -> None:
    lock = lock_document(stack(platform="hgx-h100-8", driver="580.95.05"))[LOCK_NAME]
    hosts = [PlanHost("locked", observed(), lock=lock), PlanHost("free", observed())]
    decided = {group.hosts: group.stack for group in plan(hosts, Request(), CATALOG, TODAY).groups}
    assert {hosts: chosen and chosen.driver.version for hosts, chosen in decided.items()} == {
        ("free",): "595.91.07",
        ("locked",): "580.95.05",
    }
    (moved,) = plan(hosts, Request(driver="580-latest"), CATALOG, TODAY).groups
    assert moved.stack is not None
    assert moved.stack.driver.version == "580.178.04"


def test_a_lock_reports_when_its_branch_ended() -> None:
    lock = lock_document(stack(platform="hgx-h100-8", driver="580"))[LOCK_NAME]
    host = PlanHost("n1", observed(installed=driver("580.178.04")), lock=lock)
    (group,) = plan([host], Request(), CATALOG, date(2029, 1, 1)).groups
    assert group.drift[0].past_eol
    assert "past its end of life: 2028-06-30" in group.drift[0].text


def test_nothing_to_report_of_a_bare_node_without_a_lock() -> None:
    (group,) = plan([PlanHost("n1", observed())], Request(), CATALOG, TODAY).groups
    assert group.drift == ()


def test_a_lock_reads_back_and_a_broken_one_is_named() -> None:
    decided = stack(platform="hgx-h100-8")
    document = lock_document(decided)[LOCK_NAME]
    assert read_lock(document, "n1") == decided
    assert read_lock(None, "n1") is None
    with pytest.raises(UsageError, match=r"n1: gpunode_stack is not a valid stack: driver\.branch"):
        read_lock(document | {"driver": document["driver"] | {"branch": "new"}}, "n1")
