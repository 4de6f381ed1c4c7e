"""Each rule that decides a part: where the part is there, and where it is not, with the reason."""

from typing import Any

import pytest
from stack_samples import case, decided, group, on_node

from gpunode.stack.model import Frameworks, Library, Pin, Service
from gpunode.stack.rules import rules

BOOKWORM: dict[str, Any] = {"os": "debian-12", "source": "debian", "version": "535.261.03", "decided_by": "repository"}
EIGHT_H100 = group("H100 SXM", 8)
EIGHT_B200 = group("B200", 8)


def test_a_fabric_manager_of_exactly_the_driver_s_version() -> None:
    choices = decided("R11-fm-exact", case(EIGHT_H100))
    manager = choices["fabric_manager"].value
    assert isinstance(manager, Service)
    assert (manager.version, manager.same_as_driver) == ("580.95.05", True)
    assert [(p.name, p.version, p.with_driver) for p in choices["fabric_manager"].packages] == [
        ("nvidia-fabricmanager", "580.95.05-*", True)
    ]
    assert isinstance(choices["nscq"].value, Service)
    alone = decided("R11-fm-exact", case(group("H100 SXM", 1)))
    assert (alone["fabric_manager"].value, alone["nscq"].value) == (None, None)
    assert alone["fabric_manager"].text.startswith("not needed")


def test_switches_on_the_bus_decide_where_they_show() -> None:
    seen = decided("R11-fm-exact", case(group("H100 SXM", 7), nvswitch=True))
    assert isinstance(seen["fabric_manager"].value, Service)
    unknown = decided("R11-fm-exact", case(EIGHT_H100, nvswitch=False))
    assert unknown["fabric_manager"].value is None
    assert "without an NVSwitch on the PCI bus" in unknown["fabric_manager"].text
    hidden = decided("R11-fm-exact", case(EIGHT_B200, nvswitch=False))
    assert isinstance(hidden["fabric_manager"].value, Service), "switches of NVLink 5 do not show on the bus"


def test_nvlink_5_and_racks() -> None:
    board = decided("R12-nvlink5", case(EIGHT_B200))
    assert isinstance(board["nvlsm"].value, Service)
    assert board["nvlsm"].value.kernel_modules == ("mlx5_core", "ib_umad")
    assert not board["nvlsm"].value.same_as_driver
    assert isinstance(board["nvsdm"].value, Service)
    assert board["imex"].value is None
    tray = decided("R12-nvlink5", case(group("GB200", 4), arch="aarch64"))
    assert isinstance(tray["imex"].value, Service)
    assert (tray["nvlsm"].value, tray["nvsdm"].value) == (None, None)


@pytest.mark.parametrize(
    ("gpu", "version", "packages"),
    [
        ("A100", "580.95.05", ["datacenter-gpu-manager-4-cuda13"]),
        ("A100", "575.57.08", ["datacenter-gpu-manager-4-cuda12"]),
        ("K80", "470.256.02", ["datacenter-gpu-manager-4-cuda11"]),
        ("V100", "580.95.05", ["datacenter-gpu-manager-4-cuda13", "datacenter-gpu-manager-4-cuda12"]),
        ("V100", "575.57.08", ["datacenter-gpu-manager-4-cuda12"]),
    ],
)
def test_dcgm_by_the_driver_s_cuda(gpu: str, version: str, packages: list[str]) -> None:
    choice = decided("R17-dcgm", case(gpu, version=version))["dcgm"]
    assert [package.name for package in choice.packages] == packages
    assert {package.version for package in choice.packages} == {"1:4.6.1-*"}


def test_no_dcgm_where_none_is_known() -> None:
    for about in (case("A100", os="debian-13"), case("A100", **BOOKWORM)):
        choice = decided("R17-dcgm", about)["dcgm"]
        assert (choice.value, choice.packages) == (None, ())
        assert choice.text


def test_four_packages_of_the_container_toolkit() -> None:
    choice = decided("R18-ctk", case("A100"))["container_toolkit"]
    assert len(choice.packages) == 4
    assert {package.version for package in choice.packages} == {"1.20.1-*"}
    assert decided("R18-ctk", case("A100", os="rhel-9"))["container_toolkit"].packages[0].version == "1.20.1"
    assert len(decided("R18-ctk", case("A100", **BOOKWORM))["container_toolkit"].packages) == 4


@pytest.mark.parametrize(
    ("gpu", "settings", "answer", "words"),
    [
        ("A100", {"kernel": "6.8.0-60-generic"}, True, "open modules"),
        ("A100", {}, None, "kernel is unknown"),
        ("A100", {"kernel": "5.10.0-30-amd64"}, False, "older than 5.12"),
        ("A100", {"kernel": "6.8.0-60-generic", "flavour": "proprietary"}, False, "proprietary"),
        ("V100", {"kernel": "6.8.0-60-generic"}, False, "older than Turing"),
        ("RTX 4090", {"kernel": "6.8.0-60-generic"}, False, "not a data-center"),
        ("T4", {"kernel": "6.8.0-60-generic", "version": "510.108.03"}, False, "older than 11.7"),
    ],
)
def test_gpudirect_rdma(gpu: str, settings: dict[str, Any], answer: bool | None, words: str) -> None:
    choice = decided("R19-gdr", case(gpu, **settings))["gpudirect_rdma"]
    assert choice.value is answer
    assert words in choice.text


@pytest.mark.parametrize(
    ("gpu", "version", "pytorch"),
    [
        ("A100", "580.95.05", ("2.14", "13.0")),
        ("A100", "595.91.07", ("2.14", "13.2")),
        ("A100", "570.211.01", ("2.14", "12.6")),
        ("V100", "580.95.05", ("2.14", "12.6")),
        ("B200", "580.95.05", ("2.14", "13.0")),
        ("B200", "575.57.08", ("2.11", "12.8")),
        ("K80", "470.256.02", ("2.7", "11.8")),
        ("K80", "418.39", (None, None)),
    ],
)
def test_frameworks_that_run(gpu: str, version: str, pytorch: tuple[str | None, str | None]) -> None:
    frameworks = decided("R20-framework", case(gpu, version=version))["frameworks"].value
    if pytorch[0] is None:
        assert frameworks is None or (isinstance(frameworks, Frameworks) and frameworks.pytorch is None)
    else:
        assert isinstance(frameworks, Frameworks)
        assert (frameworks.pytorch, frameworks.pytorch_cuda) == pytorch


def test_tensorflow_s_cuda_must_know_the_gpu() -> None:
    young = decided("R20-framework", case("B200"))["frameworks"].value
    assert isinstance(young, Frameworks)
    assert young.tensorflow is None
    old = decided("R20-framework", case("A100"))["frameworks"].value
    assert isinstance(old, Frameworks)
    assert (old.tensorflow, old.tensorflow_cuda) == ("2.21", "12.5")


def test_a_toolkit_only_where_requested() -> None:
    assert decided("R24-toolkit-source", case("A100"))["toolkit"].value is None
    requested = decided("R24-toolkit-source", case("A100", toolkit="12.8.1"))["toolkit"]
    assert isinstance(requested.value, Library)
    assert [(package.name, package.version) for package in requested.packages] == [("cuda-toolkit-12-8", "12.8.1-*")]


def test_pins_are_those_of_source_system_and_branch() -> None:
    exact = decided("R15-distro-repo", case("A100"))["pin"].value
    assert isinstance(exact, Pin)
    assert [stanza.pin for stanza in exact.preferences] == ["version 580.95.05-*"]
    before = decided("R15-distro-repo", case("A100", version="575.57.08"))["pin"].value
    assert isinstance(before, Pin)
    assert before.mechanism == "preferences"
    assert "nvidia-fabricmanager*" in before.preferences[0].packages
    assert before.preferences[0].priority > 1000


def test_what_must_go_first() -> None:
    old = on_node(("nvidia-dkms-580-open", "580.95.05-1", "nvidia"))
    docker = old.model_copy(
        update={
            "packages": (*old.packages, old.packages[0].model_copy(update={"name": "nvidia-docker2", "closure": None}))
        }
    )
    assert decided("R16-repo-mix", case("A100", installed=old))["remove"].value == ()
    assert decided("R16-repo-mix", case("A100", installed=docker))["remove"].value == ("nvidia-docker2",)
    assert decided("R16-repo-mix", case("A100", os="debian-12", installed=old, source="debian"))["remove"].value == (
        "nvidia-dkms-580-open",
    )


def test_the_end_of_life_is_the_earlier_of_two() -> None:
    choice = decided("R13-branch-eol", case("A100"))["eol"]
    assert str(choice.value) == "2028-06-30"
    assert decided("R13-branch-eol", case("A100", version="620.70.06"))["eol"].value is None


def test_libraries_that_do_not_know_the_gpu_are_not_chosen() -> None:
    old = decided("R04-arch-cuda", case("V100", toolkit="12.9"))
    assert isinstance(old["cudnn"].value, Library)
    assert old["cudnn"].value.version == "9.10.2.21"
    none = decided("R04-arch-cuda", case("A100"))
    assert (none["cudnn"].value, none["nccl"].value) == (None, None)


@pytest.mark.parametrize(
    ("gpu", "arch", "tensorflow"),
    [("M60", "x86_64", "2.16"), ("V100", "x86_64", "2.21"), ("GH200", "aarch64", None)],
)
def test_tensorflow_only_where_its_wheels_have_code_for_the_gpu(gpu: str, arch: str, tensorflow: str | None) -> None:
    flavour = "open" if gpu == "GH200" else "proprietary"
    frameworks = decided("R20-framework", case(gpu, arch=arch, flavour=flavour))["frameworks"].value
    assert isinstance(frameworks, Frameworks)
    assert frameworks.tensorflow == tensorflow


def test_the_compat_package_is_on_the_host_for_the_host_s_toolkit_alone() -> None:
    settings: dict[str, Any] = {"version": "535.261.03", "compat": "13.0"}
    choice = decided("R14-compat-matrix", case("A100", toolkit="13.0", **settings))["cuda_compat"]
    assert [package.name for package in choice.packages] == ["cuda-compat-13-0"]
    in_image = decided("R14-compat-matrix", case("A100", cuda="13.0", **settings))["cuda_compat"]
    assert (in_image.value, in_image.packages) == (None, ())
    assert "the image must contain cuda-compat-13-0" in in_image.text
    assert decided("R14-compat-matrix", case("A100", cuda="13.0"))["cuda_compat"].value is None


def test_every_rule_does_something_and_every_part_has_one_rule() -> None:
    assert all(rule.ask or rule.judge or rule.decide for rule in rules)
    fields = [field for rule in rules for field in rule.fields]
    assert len(fields) == len(set(fields))
    assert all(bool(rule.decide) == bool(rule.fields) for rule in rules)
