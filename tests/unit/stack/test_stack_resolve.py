"""What is decided, why, and what a conflict reports."""

import json
from datetime import date
from typing import Any

import pytest
from stack_samples import CATALOG, TODAY, conflict, group, on_node, parts, stack

from gpunode.errors import UsageError
from gpunode.stack import Conflict, Stack, resolve
from gpunode.stack.rules import rules

ON_580 = on_node(
    ("nvidia-dkms-580-open", "580.95.05-1", "nvidia"),
    ("libnvidia-compute-580", "580.95.05-1", "nvidia"),
    flavour="open",
)


def test_an_hgx_board_with_long_term_support() -> None:
    chosen = stack(platform="hgx-h100-8", driver="lts", cuda="13.0")
    assert (chosen.driver.branch, chosen.driver.version, chosen.driver.type) == (580, "580.178.04", "LTSB")
    assert (chosen.module.flavour, chosen.module.build) == ("open", "dkms")
    assert chosen.fabric_manager is not None
    assert chosen.fabric_manager.version == chosen.driver.version
    assert chosen.dcgm is not None
    assert chosen.dcgm.packages == ("datacenter-gpu-manager-4-cuda13",)
    assert chosen.warnings == ()
    assert chosen.eol == date(2028, 6, 30)


def test_a_board_that_is_not_reported_is_warned_of_and_nothing_invented() -> None:
    chosen = stack(group("H100 SXM", None), driver="lts", cuda="13.0")
    assert chosen.fabric_manager is None
    assert "depend on the board" in chosen.reasons["fabric_manager"].text
    assert [warning.rule for warning in chosen.warnings] == ["R11-fm-exact"]


def test_volta_cannot_have_cuda_13() -> None:
    refused = conflict("V100", os="ubuntu-22.04", cuda="13.0")
    assert [str(term) for term in refused.terms] == ["gpu V100", "cuda 13.0"]
    assert "Volta, compute capability 7.0" in refused.message
    assert "floor of CUDA 13" in refused.message
    assert refused.offers[0].summary.startswith("580 proprietary with CUDA 12.9")


@pytest.mark.parametrize(
    ("gpus", "settings", "terms"),
    [
        (["B200"], {"kernel_module": "proprietary"}, ["gpu B200", "kernel-module proprietary"]),
        (["V100", "B200"], {}, ["gpu V100", "gpu B200"]),
        ([], {"os": "ubuntu-26.04", "driver": "580"}, ["os ubuntu-26.04", "driver 580"]),
        (["GH200"], {"arch": "x86_64"}, ["gpu GH200", "arch x86_64"]),
        (["A100"], {"source": "debian", "os": "debian-12", "cuda": "13.0"}, ["source debian", "cuda 13.0"]),
        (["A100"], {"driver": "570", "cuda": "13.5", "kernel_module": "open"}, ["driver 570", "cuda 13.5"]),
        (["A100"], {"os": "rhel-9", "driver": "535", "past_eol": "refuse"}, ["driver 535", "past-eol refuse"]),
        (["A100"], {"driver": "keep"}, ["driver keep"]),
    ],
)
def test_a_conflict_names_the_smallest_set(gpus: list[str], settings: dict[str, Any], terms: list[str]) -> None:
    refused = conflict(*gpus, **settings)
    assert [str(term) for term in refused.terms] == terms
    assert refused.clashes
    assert refused.offers


def test_what_a_repository_starts_at_is_reported() -> None:
    refused = conflict(os="ubuntu-26.04", driver="580")
    assert "starts at branch 595" in refused.message
    assert [offer.change[0] for offer in refused.offers] == [
        "--driver 595 instead of 580",
        "--source ubuntu",
        "--os ubuntu-24.04",
    ]


def test_offers_change_no_machine() -> None:
    refused = conflict("V100", cuda="13.0", observed=True, os="ubuntu-26.04")
    assert all("--os" not in change and "--gpu" not in change for offer in refused.offers for change in offer.change)
    assert all(offer.stack.os == "ubuntu-26.04" for offer in refused.offers)


def test_several_changes_where_one_does_not_help() -> None:
    refused = conflict("V100", os="ubuntu-24.04", cuda="13.0", kernel_module="open", driver="610")
    assert all(len(offer.change) > 1 for offer in refused.offers)
    assert refused.offers


def test_debian_s_own_driver_with_its_gaps() -> None:
    chosen = stack("A100 80GB PCIe", os="debian-12", source="debian", cuda="12.2")
    assert chosen.driver.version == "535.309.01"
    assert chosen.driver.decided_by == "repository"
    assert (chosen.dcgm, chosen.fabric_manager) == (None, None)
    assert chosen.container_toolkit is not None
    assert "has no DCGM" in chosen.reasons["dcgm"].text
    assert [warning.rule for warning in chosen.warnings] == ["R13-branch-eol", "R21-no-service"]
    with_driver = {package.name: package.with_driver for package in chosen.packages}
    assert with_driver["nvidia-kernel-dkms"]
    assert not with_driver["nvidia-persistenced"]


def test_every_field_has_its_reason() -> None:
    for chosen in (stack(platform="hgx-b200-8"), stack("V100", toolkit="12.9"), stack("A100", source="ubuntu")):
        reported = set(chosen.reasons)
        assert reported == set(Stack.model_fields) - {
            *("schema_name", "os", "arch", "kernel", "platform", "gpus", "warnings", "reasons")
        }
        known = {rule.id for rule in rules} | {"wish", "preference", "installed", "catalog"}
        assert {reason.rule for reason in chosen.reasons.values()} <= known
        assert all(reason.text for reason in chosen.reasons.values())


@pytest.mark.parametrize(
    ("gpus", "settings", "branch"),
    [
        (["A100"], {}, 595),
        (["A100"], {"driver": "production"}, 595),
        (["A100"], {"driver": "lts"}, 580),
        (["A100"], {"driver": "newest"}, 620),
        (["V100"], {"driver": "newest"}, 580),
        (["V100"], {"driver": "production"}, 580),
        (["K80"], {"os": "rhel-8"}, 470),
        (["K80"], {"source": "ubuntu"}, 470),
        (["A100"], {"cuda": "13.4"}, 595),
        (["A100"], {"driver": "R575"[1:]}, 575),
        (["A100"], {"os": "ubuntu-26.04"}, 595),
    ],
)
def test_which_branch_a_request_means(gpus: list[str], settings: dict[str, Any], branch: int) -> None:
    assert stack(*gpus, **settings).driver.branch == branch


def test_lifetimes_are_those_of_the_day() -> None:
    assert stack("A100", driver="production", today=date(2025, 9, 1)).driver.branch == 595
    assert stack("A100", driver="570", today=date(2025, 9, 1)).warnings == ()
    assert [w.rule for w in stack("A100", driver="570").warnings] == ["R13-branch-eol"]


def test_what_is_installed_stays_where_it_satisfies() -> None:
    for request in (None, "keep", "580", "580.95.05", "lts", "production"):
        chosen = stack("A100", driver=request, installed=ON_580, observed=True)
        assert (chosen.kept, chosen.driver.version, chosen.driver.decided_by) == (True, "580.95.05", "installed"), (
            request
        )
    for request in ("580.126.09", "595", "newest"):
        assert not stack("A100", driver=request, installed=ON_580, observed=True).kept
    assert not stack("A100", kernel_module="proprietary", installed=ON_580, observed=True).kept


def test_a_branch_past_its_end_does_not_satisfy_lts() -> None:
    old = on_node(("nvidia-dkms-535-open", "535.309.01-1", "nvidia"), flavour="open")
    assert stack("A100", installed=old, observed=True).kept
    assert stack("A100", installed=old, observed=True, driver="lts").driver.branch == 580


@pytest.mark.parametrize(
    ("request_", "flavour", "have", "version"),
    [
        ("580", None, "580.95.05", "580.95.05"),
        ("580", "proprietary", "580.95.05", "580.95.05"),
        ("580-latest", None, "580.95.05", "580.178.04"),
        ("580-latest", None, "580.178.04", "580.178.04"),
        ("580-latest", None, "580.999.01", "580.999.01"),
        ("580", None, "570.211.01", "580.178.04"),
        ("595-latest", None, "580.95.05", "595.91.07"),
    ],
)
def test_a_branch_keeps_its_installed_release_and_latest_moves(
    request_: str, flavour: Any, have: str, version: str
) -> None:
    old = on_node((f"nvidia-dkms-{have[:3]}-open", f"{have}-1", "nvidia"), flavour="open")
    chosen = stack("A100", installed=old, observed=True, driver=request_, kernel_module=flavour)
    assert chosen.driver.version == version
    assert chosen.kept == (version == have and flavour is None)
    assert {version} == {row.version.partition("-")[0] for row in chosen.packages if row.with_driver and row.version}


def test_a_distribution_moves_within_its_branch_only_when_it_is_asked_to() -> None:
    old = on_node(("nvidia-driver-580-server-open", "580.95.05-0ubuntu1", "ubuntu"), flavour="open")
    kept = stack("A100", installed=old, observed=True, driver="580", source="ubuntu")
    moved = stack("A100", installed=old, observed=True, driver="580-latest", source="ubuntu")
    assert (kept.kept, moved.kept, moved.driver.decided_by) == (True, False, "repository")


@pytest.mark.parametrize("request_", ["580.95.05-latest", "newest-latest", "-latest"])
def test_latest_follows_a_branch(request_: str) -> None:
    with pytest.raises(UsageError, match="follows a branch"):
        stack("A100", driver=request_)


def test_a_switch_of_source_removes_the_other() -> None:
    debian = on_node(("nvidia-kernel-dkms", "535.261.03-1", "debian"), flavour="proprietary")
    kept = stack("A100", os="debian-12", installed=debian, observed=True)
    assert (kept.source, kept.kept, kept.remove) == ("debian", True, ())
    switched = stack("A100", os="debian-12", installed=debian, observed=True, source="nvidia")
    assert (switched.source, switched.remove) == ("nvidia", ("nvidia-kernel-dkms",))


def test_mixed_publishers_are_a_conflict_with_the_way_out() -> None:
    mixed = on_node(
        ("nvidia-dkms-580-open", "580.95.05-1", "nvidia"),
        ("libnvidia-compute-580", "580.95.05-0ubuntu1.24.04", "ubuntu"),
    )
    refused = conflict("A100", installed=mixed, observed=True)
    assert [term.name for term in refused.terms] == ["installed"]
    assert {offer.change[0] for offer in refused.offers} == {"--source nvidia"}


def test_one_answer_for_a_node_with_several_gpus() -> None:
    chosen = stack("V100", "A100")
    assert (chosen.driver.branch, chosen.module.flavour) == (580, "proprietary")
    assert chosen.cuda.newest == "12.9"
    assert chosen.cuda.oldest == "11.0"


def test_forward_compatibility_while_the_branch_lived() -> None:
    chosen = stack("A100", os="rhel-9", driver="535", toolkit="13.0", cuda="13.0", today=date(2026, 1, 15))
    assert chosen.cuda.support == "forward-compat"
    assert chosen.cuda.newest == "12.9", "what minor-version compatibility reaches"
    assert chosen.cuda_compat is not None
    assert "cuda-compat-13-0" in [package.name for package in chosen.packages]
    in_image = stack("A100", os="rhel-9", driver="535", cuda="13.0", today=date(2026, 1, 15))
    assert (in_image.cuda.support, in_image.cuda_compat) == ("forward-compat", None)
    assert stack("A100", driver="580", cuda="13.2", today=date(2026, 1, 15)).cuda_compat is None


def test_rack_trays_and_nvlink_5() -> None:
    tray = stack(platform="gb200-nvl72-tray-4")
    assert tray.arch == "aarch64"
    assert tray.imex is not None
    assert tray.imex.version == tray.driver.version
    assert (tray.fabric_manager, tray.nvlsm) == (None, None)
    board = stack(platform="hgx-b200-8")
    assert board.nvlsm is not None
    assert board.nvlsm.kernel_modules == ("mlx5_core", "ib_umad")
    assert board.nvlsm.packages == ("nvlsm", "infiniband-diags")
    assert {"nvlsm", "infiniband-diags"} <= {package.name for package in board.packages}
    assert board.nvsdm is not None
    assert board.nscq is None


def test_precompiled_modules_move_with_their_kernel() -> None:
    aws = stack("A100", source="ubuntu", driver="580", kernel="6.8.0-1009-aws")
    assert aws.module.build == "precompiled"
    assert aws.module.kernel_packages == (
        *("linux-image-aws", "linux-headers-aws", "linux-modules-nvidia-580-server-open-aws"),
    )
    closure = {package.name for package in aws.packages if package.with_driver}
    assert "linux-modules-nvidia-580-server-open-aws" not in closure
    hwe = stack("A100", source="ubuntu", kernel="6.14.0-29-generic")
    assert hwe.module.kernel_flavour == "generic-hwe-24.04"
    assert not any("may be the kernel of" in warning.text for warning in hwe.warnings)
    either = stack("A100", source="ubuntu", kernel="6.8.0-60-generic")
    assert any("hwe" in warning.text for warning in either.warnings)
    custom = stack("A100", source="ubuntu", kernel="6.8.0-rt-custom")
    assert (custom.module.build, custom.module.kernel_packages) == ("dkms", ())


@pytest.mark.parametrize(
    ("kernel", "images", "flavour"),
    [
        ("6.8.0-60-generic", ["linux-image-generic"], "generic"),
        ("6.14.0-29-generic", ["linux-image-generic-hwe-24.04"], "generic-hwe-24.04"),
        ("6.8.0-60-generic", ["linux-image-generic-hwe-24.04", "linux-image-generic"], "generic-hwe-24.04"),
        ("6.8.0-60-generic", ["linux-image-virtual-hwe-24.04"], "generic-hwe-24.04"),
        ("6.8.0-1009-gcp", ["linux-image-generic-hwe-24.04", "linux-image-gcp"], "gcp"),
        ("6.8.0-1009-oracle", ["linux-image-oracle-lts-24.04"], "oracle-lts-24.04"),
        ("6.17.0-1032-nvidia", ["linux-image-nvidia-hwe-24.04"], "nvidia-hwe-24.04"),
        ("6.8.0-60-generic-64k", ["linux-image-generic", "linux-image-generic-64k"], "generic-64k"),
        ("6.8.0-60-generic", ["linux-image-generic-64k", "linux-image-generic"], "generic"),
    ],
)
def test_precompiled_modules_follow_the_installed_kernel_meta_package(
    kernel: str, images: list[str], flavour: str
) -> None:
    answer = stack("A100", source="ubuntu", driver="580", kernel=kernel, kernel_images=images)
    modules = f"linux-modules-nvidia-580-server-open-{flavour}"
    assert answer.module.kernel_packages == (f"linux-image-{flavour}", f"linux-headers-{flavour}", modules)
    assert modules in {package.name for package in answer.packages}
    assert not any("may be the kernel of" in warning.text for warning in answer.warnings)


@pytest.mark.parametrize(
    ("system", "requested", "branch"),
    [
        ("ubuntu-22.04", "590", 595),
        ("ubuntu-24.04", "590", 595),
        ("ubuntu-26.04", "590", 595),
        ("ubuntu-26.04", "535", 580),
        ("ubuntu-26.04", "570", 580),
    ],
)
def test_a_transitional_branch_of_ubuntus_archive_is_the_branch_that_it_installs(
    system: str, requested: str, branch: int
) -> None:
    answer = stack("A100", source="ubuntu", driver=requested, os=system)
    assert answer.driver.branch == branch
    assert {name for package in answer.packages if requested in (name := package.name)} == set()
    assert any("transitional" in warning.text for warning in answer.warnings)
    kept = stack(
        "A100",
        source="ubuntu",
        driver=requested,
        os=system,
        installed=on_node((f"nvidia-headless-no-dkms-{branch}-server-open", f"{branch}.1.2-0ubuntu1", "ubuntu")),
    )
    assert (kept.kept, kept.driver.version) == (True, f"{branch}.1.2")


def test_a_transitional_branch_is_none_of_its_own() -> None:
    assert stack("A100", source="ubuntu", driver="570", os="ubuntu-24.04").driver.branch == 570
    assert stack("A100", source="nvidia", driver="590", os="ubuntu-24.04").driver.branch == 590
    refused = conflict("A100", source="ubuntu", driver="590.48.01", os="ubuntu-24.04")
    assert "transitional" in refused.message
    assert "595" in refused.message


@pytest.mark.parametrize(
    ("settings", "mechanism", "held"),
    [
        ({"driver": "580"}, "preferences", "version 580.178.04-*"),
        ({"driver": "595"}, "preferences", "version 595.91.07-*"),
        ({"driver": "575"}, "preferences", "version 575.64.05-*"),
        ({"driver": "580", "os": "rhel-9"}, "module-stream", "nvidia-driver:580-open"),
        ({"driver": "580", "os": "rhel-10"}, "versionlock", "*nvidia*580*"),
        ({"source": "debian", "os": "debian-12"}, "preferences", "version 535.*"),
    ],
)
def test_how_a_version_is_held(settings: dict[str, Any], mechanism: str, held: str) -> None:
    pin = stack("A100", **settings).pin
    assert pin is not None
    assert pin.mechanism == mechanism
    assert held in (pin.pattern, *(stanza.pin for stanza in pin.preferences))


def test_a_pin_covers_all_packages_that_must_have_the_drivers_version() -> None:
    """apt -s on Debian 12: with names alone, nvidia-open-kernel-dkms 535.261.03 misses its firmware-nvidia-gsp."""
    older = stack("T4", source="debian", os="debian-12", kernel_module="open", driver="535.261.03").pin
    assert older is not None
    (stanza,) = older.preferences
    assert stanza.pin == "version 535.261.03-*"
    assert {"src:nvidia-graphics-drivers", "src:nvidia-open-gpu-kernel-modules"} <= set(stanza.packages)
    tesla = stack("K80", source="debian", os="debian-12").pin
    assert tesla is not None
    assert "src:nvidia-graphics-drivers-tesla-*" in tesla.preferences[0].packages
    nvidia = stack("T4", source="nvidia", os="debian-12").pin
    assert nvidia is not None
    assert "firmware-nvidia-gsp" in nvidia.preferences[0].packages


@pytest.mark.parametrize(
    ("branch", "names"),
    [
        ("575", {"nvidia-headless-575-open", "nvidia-fabricmanager-575", "libnvidia-nscq-575"}),
        ("580", {"nvidia-headless-580-open", "nvidia-fabricmanager", "libnvidia-nscq"}),
        ("595", {"nvidia-headless-open", "nvidia-fabricmanager", "libnvidia-nscq"}),
    ],
)
def test_names_by_branch(branch: str, names: set[str]) -> None:
    chosen = stack(platform="hgx-h100-8", driver=branch)
    assert names <= {package.name for package in chosen.packages}
    tied = {package.version for package in chosen.packages if package.with_driver}
    assert tied == {f"{chosen.driver.version}-*"}


def test_a_toolkit_brings_libraries_that_know_the_gpu() -> None:
    old, young = stack("V100", toolkit="12.9"), stack("H100 PCIe", toolkit="13.0")
    assert old.cudnn is not None
    assert old.cudnn.version == "9.10.2.21"
    assert young.cudnn is not None
    assert young.cudnn.version == "9.28.1.4"
    versions = {package.name: package.version for package in (*old.packages, *young.packages)}
    assert versions["cuda-toolkit-12-9"] == "12.9.*"
    nccl = {package.version for package in (*old.packages, *young.packages) if package.name == "libnccl2"}
    assert nccl == {"2.30.7-*+cuda12.9", "2.30.7-*+cuda13.3"}
    assert old.dcgm is not None
    assert old.dcgm.packages == ("datacenter-gpu-manager-4-cuda13", "datacenter-gpu-manager-4-cuda12")


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "load-module"),
        ({"nouveau": True}, "reboot"),
        ({"installed": ON_580, "loaded_version": "580.95.05"}, "none"),
        ({"installed": ON_580}, "load-module"),
        ({"installed": ON_580, "loaded_version": "570.211.01"}, "reload-module"),
        ({"installed": ON_580, "loaded_version": "580.95.05", "driver": "595"}, "reload-module"),
    ],
)
def test_what_must_be_restarted(settings: dict[str, Any], kind: str) -> None:
    assert stack("A100", observed=True, **settings).restart.kind == kind


def test_secure_boot_needs_a_person_where_dkms_signs() -> None:
    assert any("secure boot" in warning.text for warning in stack("A100", secure_boot=True).warnings)
    assert not any("secure boot" in w.text for w in stack("A100", secure_boot=True, source="ubuntu").warnings)


def test_resolving_is_deterministic_and_asks_for_nothing() -> None:
    question = parts("A100", cuda="13.0")
    first, second = (resolve(*question, CATALOG, TODAY) for _ in range(2))
    assert first == second
    assert isinstance(first, Stack)
    assert Stack.model_validate(json.loads(first.to_json())) == first
    nothing = resolve(*parts(os=None), CATALOG, TODAY)
    assert isinstance(nothing, Stack)
    assert any("no operating system requested" in warning.text for warning in nothing.warnings)


def test_a_rule_that_is_left_out_reports_it() -> None:
    chosen = resolve(*parts("A100"), CATALOG, TODAY, off={"R17-dcgm"})
    assert isinstance(chosen, Stack)
    assert chosen.dcgm is None
    assert chosen.reasons["dcgm"].text == "rule R17-dcgm is skipped"
    assert isinstance(resolve(*parts("V100", driver="595"), CATALOG, TODAY), Conflict)
    assert isinstance(resolve(*parts("V100", driver="595"), CATALOG, TODAY, off={"R03-arch-last-branch"}), Stack)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"os": "ubuntu-23.13"}, "ubuntu"),
        ({"cuda": "13.9"}, "CUDA toolkit"),
        ({"driver": "581"}, "driver branch"),
        ({"platform": "hgx-h100"}, None),
        ({"platform": "hgx-h1000-8"}, "hgx-h100-8"),
    ],
)
def test_unknown_names_are_a_usage_error_with_the_nearest(settings: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert stack(**settings).fabric_manager is not None
        return
    with pytest.raises(UsageError, match=words):
        resolve(*parts(**settings), CATALOG, TODAY)
