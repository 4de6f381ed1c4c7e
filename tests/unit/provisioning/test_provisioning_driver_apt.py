"""The plan of the driver role with apt: packages, pins, switches, refusals; from facts and a stack only."""

from typing import Any

import pytest
from driver_samples import APT, BUNDLE, HGX, REST_OF_APT, UBUNTU, apt_plan, facts_of, resolved_of, stack_of

from gpunode.facts import NodeFacts
from gpunode.provisioning.answers import with_publishers
from gpunode.provisioning.driver.apt import removal
from gpunode.provisioning.driver.files import SOURCES
from gpunode.provisioning.driver.model import DriverPlan
from gpunode.provisioning.state import AptState, NodeState
from gpunode.provisioning.transaction import Transaction


@pytest.fixture
def debian() -> dict[str, Any]:
    """A Debian 12 node without a GPU, with Debian's driver 535.261.03, proprietary."""
    return facts_of(BUNDLE)


@pytest.fixture
def bare(debian: dict[str, Any]) -> dict[str, Any]:
    """A Debian 12 node with HGX H100 and no driver."""
    return {**debian, "pci": HGX, "packages": [], "module_files": [], "dkms": [], "loaded_driver": None}


def apt_of(facts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    installed = {package["name"]: package["version"] for package in facts["packages"] if package["installed"]}
    return {**APT, "installed": installed, **changes}


def package(name: str, release: str, **changes: Any) -> dict[str, Any]:
    """A package of NVIDIA's repository."""
    return {
        "name": name,
        "version": f"{release}-1",
        "architecture": "amd64",
        "source": name,
        "maintainer": "NVIDIA CORPORATION <cudatools@nvidia.com>",
        "installed": True,
        "state": "install ok installed",
        "held": False,
        **changes,
    }


def with_driver(facts: dict[str, Any], release: str, **changes: Any) -> dict[str, Any]:
    names = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-fabricmanager", "libnvidia-nscq", "libcuda1")
    return {**facts, "packages": [package(name, release, **changes) for name in names]}


def asked(
    facts: dict[str, Any], stack: dict[str, Any], apt: dict[str, Any] | None = None, **changes: Any
) -> Transaction:
    return apt_plan(facts, apt or apt_of(facts), stack, **changes).question


def bound_of(question: Transaction) -> dict[str, str]:
    """Bound packages to their patterns of versions."""
    return dict(entry.partition("=")[::2] for entry in question.bound)


def planned(facts: dict[str, Any], stack: dict[str, Any], apt: dict[str, Any] | None = None) -> DriverPlan:
    return apt_plan(facts, {**apt_of(facts), **(apt or {})}, stack)


def refused(
    facts: dict[str, Any],
    stack: dict[str, Any],
    answer: dict[str, Any],
    apt: dict[str, Any] | None = None,
    **changes: Any,
) -> list[str]:
    return list(apt_plan(facts, {**apt_of(facts), **(apt or {})}, stack, answer, **changes).refusals)


def removed(facts: dict[str, Any], apt: dict[str, Any]) -> Transaction:
    known = AptState.model_validate({**REST_OF_APT, **apt})
    state = NodeState(facts=NodeFacts.model_validate(facts), apt=known, dnf=None)
    return removal(state, known, (), keep_headers=False)


def names_of(lines: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in lines]


def test_the_whole_closure_is_asked_for_at_one_release(bare: dict[str, Any]) -> None:
    stack = stack_of(bare, version="580.95.05")
    question = asked(bare, stack)
    assert set(bound_of(question)) == {
        "nvidia-driver-cuda",
        "nvidia-kernel-open-dkms",
        "nvidia-fabricmanager",
        "libnvidia-nscq",
    }
    assert question.constraint == "580.95.05"
    assert question.install == (), "our own preferences bind the closure, before NVIDIA's pinning packages could"
    assert bound_of(question)["nvidia-fabricmanager"] == "@RELEASE@-*"
    assert question.remove == question.closure == ()


def test_headers_come_for_each_kernel_and_with_its_metapackage(bare: dict[str, Any]) -> None:
    stack = stack_of(bare)
    apt = {
        "linux-image-cloud-amd64": "6.1",
        "linux-image-unsigned-6.8.0-60-generic": "6.8",
        "linux-image-amd64-dbg": "6",
    }
    question = asked(bare, stack, {**APT, "installed": apt})
    headers = {name for name in question.optional if name.startswith("linux-headers-")}
    assert headers == {"linux-headers-6.1.0-56-cloud-amd64", "linux-headers-cloud-amd64"}


def test_full_takes_the_names_with_graphics_and_keeps_the_closure(bare: dict[str, Any]) -> None:
    question = asked(bare, stack_of(bare, version="595"), profile="full")
    assert {"nvidia-open", "nvidia-fabricmanager"} <= set(bound_of(question))
    assert "nvidia-driver-cuda" not in bound_of(question)


def test_a_node_that_is_as_it_should_be_has_nothing_to_do(debian: dict[str, Any]) -> None:
    stack = stack_of(debian)
    apt = {
        "installed": {
            **apt_of(debian)["installed"],
            **dict.fromkeys(SOURCES["debian"].profiles["headless"], "1"),
        }
    }
    apt["installed"]["linux-headers-6.1.0-56-cloud-amd64"] = apt["installed"]["nvidia-persistenced"] = "1"
    plan = planned(debian, stack, apt)
    assert (plan.missing, plan.question.remove, plan.wrong_versions) == ((), (), [])
    assert plan.target == "535.261.03"
    assert plan.without_module == []
    assert plan.dkms == "nvidia-current"


@pytest.mark.parametrize("half", ["nvidia-kernel-dkms", "libcuda1"])
def test_what_dpkg_left_half_done_of_the_driver_is_to_be_done(debian: dict[str, Any], half: str) -> None:
    assert half in planned(debian, stack_of(debian), {"unfinished": [half, "apache2"]}).missing
    assert "apache2" not in planned(debian, stack_of(debian), {"unfinished": [half, "apache2"]}).missing
    # Left in the private folder's database it would ask for packages that were dropped from there.
    stack = stack_of(debian)
    question = asked(debian, stack, {**APT, "unfinished": [half, "apache2"]})
    assert (half in question.closure, "apache2" in question.closure) == (True, False)


def test_another_branch_leaves_what_a_bare_node_would_get(bare: dict[str, Any]) -> None:
    facts = with_driver(bare, "580.95.05")
    question = asked(facts, stack_of(facts, version="595"))
    assert question.fresh
    assert "libcuda1" in question.closure
    same = asked(facts, stack_of(facts, version="580.178.04"))
    assert ("libcuda1" in same.closure, same.fresh) == (True, False)


def test_the_other_flavour_removes_the_module(bare: dict[str, Any]) -> None:
    facts = with_driver(bare, "580.95.05")
    stack = stack_of(facts, flavour="proprietary")
    assert stack["driver"]["version"] == "580.95.05"
    assert asked(facts, stack).remove == ("nvidia-kernel-open-dkms",)


def test_another_source_takes_every_package_of_the_first(debian: dict[str, Any]) -> None:
    stack = stack_of(debian, source="nvidia")
    question = asked(debian, stack)
    assert {"libcuda1", "nvidia-kernel-dkms", "nvidia-smi"} <= set(question.remove)
    assert names_of(refused(debian, stack, {})) == ["other-source"]
    assert refused(debian, stack, {}, switch=True) == []


def test_another_pin_of_nvidias_goes(bare: dict[str, Any]) -> None:
    facts = with_driver(bare, "580.95.05")
    stack = stack_of(facts, version="580.178.04")
    apt = {**apt_of(facts), "installed": {**apt_of(facts)["installed"], "nvidia-driver-pinning-580.95.05": "1"}}
    question = asked(facts, stack, apt)
    assert question.remove == ("nvidia-driver-pinning-580.95.05",)
    apt["installed"] = {**apt_of(facts)["installed"], "nvidia-driver-pinning-580": "580-1"}
    assert asked(facts, stack, apt).remove == ()


@pytest.mark.parametrize(
    ("installed", "installs", "chosen"),
    [
        ({}, (), "nvidia-headless-open"),
        ({"nvidia-dkms-open": "595.91.07-1ubuntu1"}, (), "nvidia-dkms-open"),
        ({}, ("nvidia-dkms-open",), "nvidia-dkms-open"),
        ({"nvidia-dkms-open": "1", "nvidia-headless-open": "1"}, (), "nvidia-headless-open"),
    ],
    ids=["a bare node", "one that has the other", "apt answered so", "one that has both"],
)
def test_of_alternatives_that_one_counts_that_is_there(
    bare: dict[str, Any], installed: dict[str, str], installs: tuple[str, ...], chosen: str
) -> None:
    noble = {**bare, "os": {**bare["os"], "id": "ubuntu", "version_id": "24.04", "codename": "noble"}}
    stack = stack_of(noble, version="595")
    answer = {"install": dict.fromkeys(installs, "595.91.07-1ubuntu1")}
    case = apt_plan(noble, {**APT, "installed": installed}, stack, answer)
    assert {name for name in bound_of(case.question) if "open" in name} == {chosen}
    question = asked(noble, stack, {**APT, "installed": installed})
    if not installed:
        assert question.alternatives == {"nvidia-headless-open": ("nvidia-dkms-open",)}


@pytest.mark.parametrize(
    ("system", "branch", "names"),
    [
        ("22.04", "580", {"nvidia-headless-580-open", "nvidia-utils-580"}),
        ("24.04", "595", {"nvidia-headless-open", "libnvidia-compute"}),
        ("26.04", "610", {"nvidia-headless-open", "libnvidia-compute"}),
    ],
)
def test_ubuntus_names_for_nvidia_smi(bare: dict[str, Any], system: str, branch: str, names: set[str]) -> None:
    facts = {**bare, "os": {**bare["os"], "id": "ubuntu", "version_id": system}, "pci": HGX[:1]}
    stack = stack_of(facts, version=branch, flavour="open")
    assert set(bound_of(asked(facts, stack))) - {"nvidia-fabricmanager", "libnvidia-nscq"} == names


@pytest.mark.parametrize("version", ["510.47.03-0ubuntu1", "510.47.03-0ubuntu4", "510.47.03-0ubuntu7"])
def test_a_library_that_hwloc_brings_is_not_a_driver(bare: dict[str, Any], version: str) -> None:
    library = package("libxnvctrl0", "510.47.03", **{**UBUNTU, "source": "nvidia-settings", "version": version})
    for more in ({}, {"published": "ubuntu"}):
        facts = {**bare, "packages": [{**library, **more}]}
        assert stack_of(facts)["driver"]["branch"] == stack_of(bare)["driver"]["branch"]
        assert planned(facts, stack_of(facts)).question.remove == ()


def test_companions_that_a_driver_left_are_not_a_driver(bare: dict[str, Any]) -> None:
    left = [package(name, "610.57.04") for name in ("libxnvctrl0", "nvidia-settings")]
    facts = {**bare, "packages": left}
    assert stack_of(facts)["driver"]["branch"] == stack_of(bare)["driver"]["branch"]


def test_apts_lists_contain_the_publisher_of_a_package(bare: dict[str, Any]) -> None:
    # Its revision looks like NVIDIA's, its maintainer is Ubuntu's.
    facts = {
        **bare,
        "packages": [package("libnvidia-compute-580", "580.95.05", **UBUNTU, version="580.95.05-0ubuntu1")],
    }

    def published(*by: tuple[str, str]) -> dict[str, Any]:
        more = {"publishers": {"libnvidia-compute-580": by}, "policy_left": False, "key": None}
        apt = AptState.model_validate({**APT, **more, "lock_holder": None, "runfile": False})
        return with_publishers(NodeFacts.model_validate(facts), apt).model_dump(mode="json")

    ubuntus, nvidias = published(("Ubuntu", "Ubuntu")), published(("NVIDIA", "NVIDIA CUDA"))
    assert ubuntus["packages"][0]["published"] == "ubuntu"
    stack = stack_of(nvidias, version="580.95.05", source="nvidia")
    assert asked(ubuntus, stack, APT).remove == ("libnvidia-compute-580",)
    assert asked(nvidias, stack, APT).remove == ()
    both = published(("Ubuntu", "Ubuntu"), ("NVIDIA", "NVIDIA CUDA"))
    assert both["packages"][0]["published"] is None
    assert published()["packages"] == NodeFacts.model_validate(facts).model_dump(mode="json")["packages"]


def test_a_fabric_manager_that_lags_is_refused_with_the_release_that_all_have(bare: dict[str, Any]) -> None:
    stack = stack_of(bare, version="580.178.04")
    answer = {
        "lacking": {"nvidia-fabricmanager": ["595.71.05", "580.95.05"]},
        "common": ["595.71.05", "580.95.05"],
        "constraint": "580.178.04",
    }
    (line,) = refused(bare, stack, answer)
    assert line.startswith("closure-lags: 580.178.04 is not available")
    assert "nvidia-fabricmanager is available in 595.71.05, 580.95.05" in line
    assert "nvidia_driver_version: 595.71.05" in line


def test_a_package_that_is_nowhere_is_refused_by_its_name(bare: dict[str, Any]) -> None:
    answer = {"lacking": {"nvidia-fabricmanager": []}, "common": [], "constraint": "580.178.04"}
    (line,) = refused(bare, stack_of(bare), answer)
    assert line.startswith("package-gone: nvidia-fabricmanager is in none of")


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("E: Failed to fetch http://m/InRelease  Could not connect to m:80", "repository-unreachable"),
        ("E: The repository 'http://m Release' is not signed.", "repository-unsigned"),
        ("W: GPG error: http://m InRelease: signatures couldn't be verified NO_PUBKEY 12", "repository-unsigned"),
        ("E: GPG error: http://m InRelease: signatures were invalid: EXPKEYSIG 12 lab", "repository-key-expired"),
        ("Sub-process /usr/bin/sqv returned an error code (1), error message is: Signing key on AB is not bound: "
         "because: SHA1 is not considered secure since 2026-02-01", "repository-key-sha1"),
        ("E: You don't have enough free space in /var/cache/apt/archives/.", "disk-full"),
        ("E: Unable to correct problems, you have held broken packages.", "apt-refuses"),
        ("E: Unable to parse package file /etc/apt/preferences.d/x.pref (1)", "apt-refuses: apt cannot read a file"),
    ],
)  # fmt: skip
def test_messages_of_apt_become_named_refusals(bare: dict[str, Any], output: str, name: str) -> None:
    (line,) = refused(bare, stack_of(bare), {"error": output})
    assert line.startswith(name)
    assert output in line


def test_holds_of_others_at_another_version_are_refused_and_our_own_are_not(bare: dict[str, Any]) -> None:
    facts = with_driver(bare, "580.95.05", held=True)
    stack = stack_of(facts, version="580.178.04")
    names = [package["name"] for package in facts["packages"]]
    assert names_of(refused(facts, stack, {})) == ["held-packages"]
    assert refused(facts, stack, {}, switch=True) == []
    assert refused(facts, stack, {}, {"own_holds": names}) == []
    assert refused(facts, stack_of(facts), {}) == []


def test_a_transaction_that_would_remove_other_packages_is_refused(bare: dict[str, Any]) -> None:
    facts = with_driver(bare, "580.95.05")
    stack = stack_of(facts, version="595")
    going = ["libcuda1", "nvidia-kernel-open-dkms", "nvidia-container-toolkit", "a-users-tool"]
    (line,) = refused(facts, stack, {"remove": going})
    assert line.startswith("would-remove: apt would remove a-users-tool, nvidia-container-toolkit, ")


def test_two_versions_are_named_one_by_one(bare: dict[str, Any]) -> None:
    facts = with_driver(bare, "580.95.05")
    facts["packages"][2] = package("nvidia-fabricmanager", "580.178.04")
    plan = planned(facts, stack_of(facts))
    assert plan.wrong_versions == ["nvidia-fabricmanager 580.178.04"]
    assert "nvidia-fabricmanager" in plan.missing


def test_a_mixture_of_versions_without_a_request_is_not_decided(bare: dict[str, Any]) -> None:
    facts = with_driver(bare, "580.95.05")
    facts["packages"][1] = package("nvidia-kernel-open-dkms", "580.178.04")
    facts["packages"].append(package("nvidia-kernel-dkms", "580.95.05"))
    (line,) = resolved_of(facts).problems
    assert line.startswith("mixed-versions: ")
    assert resolved_of(facts, version="580.178.04").problems == ()


def test_a_conflict_is_reported_in_the_roles_terms(bare: dict[str, Any]) -> None:
    (line,) = resolved_of(bare, source="debian").problems
    assert line.startswith("no-stack: gpu H100 SXM5 80GB + source debian are in conflict: ")
    assert "nearest valid stacks: nvidia_driver_source: nvidia" in line
    assert "--" not in line


def test_the_loaded_module_determines_the_reason_to_reboot(bare: dict[str, Any]) -> None:
    facts = with_driver(bare, "580.178.04")
    facts["loaded_driver"] = {"version": "580.95.05", "flavour": "open"}
    plan = planned(facts, stack_of(facts))
    (reason,) = plan.reboot_reasons
    assert reason.startswith("module 580.95.05 is loaded, 580.178.04 is installed (no process uses a GPU, ")
    facts["gpu_processes"] = [{"pid": 41, "name": "train", "type": "C", "user": "ada", "gpu": "gpu0"}]
    (reason,) = planned(facts, stack_of(facts)).reboot_reasons
    assert reason == "module 580.95.05 is loaded, 580.178.04 is installed"
    facts["gpu_processes"] = None
    assert list(planned(facts, stack_of(facts)).reboot_reasons) == [reason]
    assert not plan.loadable


def test_removal_takes_the_closure_of_whichever_source(bare: dict[str, Any], debian: dict[str, Any]) -> None:
    facts = with_driver(bare, "580.95.05")
    gone = removed(facts, {**apt_of(facts), "installed": {"nvidia-driver-pinning-580": "1", "bash": "5"}})
    assert list(gone.remove) == sorted([*(row["name"] for row in facts["packages"]), "nvidia-driver-pinning-580"])
    assert "nvidia-kernel-dkms" in removed(debian, apt_of(debian)).remove


def test_ubuntus_modules_go_and_the_kernel_stays_without_a_hold(bare: dict[str, Any]) -> None:
    modules = ["linux-modules-nvidia-580-server-open-6.8.0-60-generic", "linux-modules-nvidia-580-server-open-generic"]
    kernel = ["linux-headers-generic", "linux-image-generic"]
    held = [*kernel, modules[1], "libnvidia-compute-580-server"]
    apt = {**APT, "installed": dict.fromkeys([*held, *modules], "1"), "held": held, "own_holds": held}
    version = "580.178.04-0ubuntu0.24.04.1"
    facts = {**bare, "packages": [package("libnvidia-compute-580-server", "1") | UBUNTU | {"version": version}]}
    gone = removed(facts, apt)
    assert list(gone.remove) == sorted(["libnvidia-compute-580-server", *modules])
    assert list(gone.unhold) == kernel


def test_ubuntus_modules_go_in_the_transaction_that_brings_another_source(bare: dict[str, Any]) -> None:
    modules = ["linux-modules-nvidia-580-server-open-6.8.0-60-generic", "linux-modules-nvidia-580-server-open-generic"]
    version = "580.178.04-0ubuntu0.24.04.1"
    facts = {**bare, "packages": [package("libnvidia-compute-580-server", "1") | UBUNTU | {"version": version}]}
    apt = {**APT, "installed": dict.fromkeys([*modules, "libnvidia-compute-580-server", "bash"], "1")}
    assert planned(facts, stack_of(bare), apt).question.remove == (*sorted(["libnvidia-compute-580-server", *modules]),)


def test_what_was_held_for_a_removed_driver_is_unheld(bare: dict[str, Any]) -> None:
    kernel, driver_package = "linux-image-generic", "libcuda1"
    facts = with_driver(bare, "580.95.05", held=True)
    installed = {**apt_of(facts)["installed"], kernel: "6.8.0-60.63", "bash": "5"}
    apt = {"installed": installed, "held": [kernel, driver_package, "bash"], "own_holds": [kernel, driver_package]}
    assert planned(facts, stack_of(facts), apt).change.unhold == (kernel,)
    assert removed(facts, {**apt_of(facts), **apt}).unhold == (kernel,)
    assert planned(facts, stack_of(facts), {**apt, "held": ["bash"]}).change.unhold == ()


def test_a_kernel_without_signed_modules_is_named(hwe: dict[str, Any]) -> None:
    stack = stack_of(hwe, source="ubuntu", version="580")
    answer = {"lacking": {MODULES: [], "linux-image-generic-hwe-24.04": []}, "common": [], "constraint": "580.*"}
    (line,) = refused(hwe, stack, answer)
    assert line.startswith("package-gone: ")
    assert {MODULES, "nvidia_driver_source:"} <= set(line.replace(",", "").split())


def test_a_branch_that_apt_knows_to_be_transitional_is_named_with_what_it_installs(hwe: dict[str, Any]) -> None:
    stack = stack_of(hwe, source="ubuntu", version="570")
    versions = ["580.173.02", "580.159.03"]
    answer = {"lacking": {"nvidia-utils-570-server": versions}, "common": versions, "constraint": "570.*"}
    (line,) = refused(hwe, stack, answer)
    assert line.startswith("closure-lags: branch 570 is transitional")
    assert line.endswith("nvidia_driver_version: 580")


@pytest.fixture
def hwe(bare: dict[str, Any]) -> dict[str, Any]:
    """An Ubuntu 24.04 node with HGX H100, the HWE kernel and no driver."""
    image = "linux-image-generic-hwe-24.04"
    system = {"id": "ubuntu", "version_id": "24.04", "codename": "noble", "pretty_name": "Ubuntu 24.04.3 LTS"}
    kernel = {
        "release": "6.14.0-29-generic",
        "package": "linux-image-6.14.0-29-generic",
        "running": True,
        "newest": True,
        "headers": False,
        "image": True,
    }
    version = {"version": "6.14.0-29.29~24.04.1", "source": "linux-meta-hwe-6.14"}
    return {**bare, "os": system, "kernels": [kernel], "packages": [package(image, "1") | UBUNTU | version]}


KERNEL = ["linux-headers-generic-hwe-24.04", "linux-image-generic-hwe-24.04"]
MODULES = "linux-modules-nvidia-580-server-open-generic-hwe-24.04"


def test_the_modules_are_those_of_the_installed_kernel_meta_package(hwe: dict[str, Any]) -> None:
    stack = stack_of(hwe, source="ubuntu", version="580")
    question = asked(hwe, stack)
    assert {name for name in question.install if name.startswith("linux-")} == {
        MODULES,
        "linux-image-generic-hwe-24.04",
    }
    assert "linux-headers-generic-hwe-24.04" in question.optional
    assert {*KERNEL, MODULES} <= set(planned(hwe, stack).change.hold)


def test_the_kernel_follows_the_archive_where_that_is_the_policy(hwe: dict[str, Any]) -> None:
    stack = stack_of(hwe, source="ubuntu", version="580")
    held = [*KERNEL, MODULES]
    apt = {**APT, "installed": dict.fromkeys(held, "6.14"), "held": held, "own_holds": held}

    def plan_of(**changes: Any) -> DriverPlan:
        return apt_plan(hwe, apt, stack, **changes)

    assert plan_of().change.unhold == ()
    follow = plan_of(kernel_policy="follow")
    assert follow.change.unhold == tuple(sorted(held))
    assert follow.change.hold == ()
    assert follow.pinned == "580.*"


def test_the_policy_is_for_modules_that_the_distribution_signs(bare: dict[str, Any]) -> None:
    stack = stack_of(bare, version="580.95.05")
    plan = apt_plan(bare, apt_of(bare), stack, kernel_policy="follow")
    assert "nvidia-fabricmanager" in plan.change.hold
    assert plan.pinned == "580.95.05"
