"""Which GPU, platform, system, branch is meant."""

from pathlib import Path

import pytest

from gpunode.catalog import Gpu, load
from gpunode.catalog.catalog import MODELS
from gpunode.catalog.gpus import GpuIndex
from gpunode.errors import UsageError

CATALOG = load()


def ids(text: str) -> set[str]:
    return {gpu.id for gpu in CATALOG.find_gpu(text).gpus}


def the(text: str) -> Gpu:
    gpu = CATALOG.find_gpu(text).gpu
    assert gpu is not None, f"{text} is not one model: {ids(text)}"
    return gpu


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("H100 SXM", "h100-sxm5-80gb"),
        ("h100-sxm", "h100-sxm5-80gb"),
        ("H100  SXM5 80GB", "h100-sxm5-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("h100-sxm5-80gb", "h100-sxm5-80gb"),
        ("10DE:2330", "h100-sxm5-80gb"),
        ("H100 SXM5 94GB", "h100-sxm5-94gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("T4", "t4"),
        ("Tesla T4", "t4"),
        ("A100 80GB PCIe", "a100-pcie-80gb"),
        ("A100 SXM 80GB", "a100-sxm4-80gb"),
        ("V100S", "v100s-pcie-32gb"),
        ("RTX 4090", "rtx-4090"),
        ("B300", "b300-sxm6"),
        ("L40", "l40"),
        ("L40S", "l40s"),
    ],
)
def test_a_name_of_one_model_finds_it(text: str, expected: str) -> None:
    assert the(text).id == expected


def test_gh200_is_no_h200_and_no_substring_finds_anything() -> None:
    assert ids("H200") == {"h200-sxm-141gb", "h200-nvl"}
    assert ids("GH200") == {"gh200-96gb", "gh200-144gb"}
    assert ids("NVIDIA GH200 480GB") == {"gh200-96gb"}
    assert ids("B200") == {"b200"}
    assert ids("GB200") == {"gb200"}
    assert not {"h800-sxm", "gh200-96gb"} & ids("H100")
    for text in ("H20 ", "H2", "100", "GH20", "A100 SXM4-80", ""):
        try:
            models = ids(text)
        except UsageError:
            continue
        assert models == {"h20"}, text


def test_a_family_resolves_as_far_as_its_models_agree() -> None:
    match = CATALOG.find_gpu("V100")
    assert match.gpu is None
    assert len(match.gpus) == 6
    assert match.common["compute_capability"] == "7.0"
    assert match.common["modules"] == "proprietary"
    assert match.common["last_branch"] == 580
    assert match.differs["fabric"]["v100-sxm3-32gb"] == "board"
    assert match.differs["fabric"]["v100-sxm2-32gb"] == "none"
    assert "fabric" not in match.common
    assert not set(match.common) & set(match.differs)
    assert "name" not in match.common
    assert "name" not in match.differs


def test_gh200_differs_from_hopper_in_its_modules() -> None:
    assert the("gh200-96gb").modules == "open"
    assert the("H100 PCIe").modules == "either"
    assert the("B200").modules == "open"
    assert the("K80").last_branch == 470


@pytest.mark.parametrize("text", ["H10", "H100 SXN", "v1000", "Radeon", "10de:ffff"])
def test_an_unknown_gpu_is_a_usage_error_with_the_nearest_names(text: str) -> None:
    with pytest.raises(UsageError) as err:
        CATALOG.find_gpu(text)
    assert "\n" not in str(err.value)
    assert text in str(err.value)


def test_the_nearest_name_is_named() -> None:
    with pytest.raises(UsageError, match=r"did you mean .*H100 SXM"):
        CATALOG.find_gpu("H100 SXN")


def test_shared_ids_are_distinguished_by_subsystem() -> None:
    a16 = CATALOG.gpu_by_pci("10de:25b6", "10de:14a9")
    a2 = CATALOG.gpu_by_pci("25B6", "10DE:157E")
    assert a16 is not None
    assert a16.gpu is not None
    assert a16.gpu.id == "a16"
    assert a2 is not None
    assert a2.gpu is not None
    assert a2.gpu.id == "a2"
    for subsystem in (None, "1028:0001"):
        both = CATALOG.gpu_by_pci("10de:25b6", subsystem)
        assert both is not None
        assert both.gpu is None
        assert {gpu.id for gpu in both.gpus} == {"a2", "a16"}


def test_a_model_without_subsystem_takes_what_a_more_special_one_leaves() -> None:
    general = the("H100 SXM")
    special = general.model_copy(update={"id": "special", "subsystems": ("1028:1234",)})
    index = GpuIndex([general, special])
    for subsystem, expected in (("1028:1234", "special"), ("10de:16c1", general.id), (None, general.id)):
        match = index.by_pci("10de:2330", subsystem)
        assert match is not None
        assert match.gpu is not None
        assert match.gpu.id == expected


def test_a_foreign_subsystem_does_not_hide_a_gpu() -> None:
    match = CATALOG.gpu_by_pci("10de:2330", "1028:ffff")
    assert match is not None
    assert match.gpu is not None
    assert CATALOG.gpu_by_pci("10de:1af1") is None
    assert CATALOG.gpu_by_pci("0x10de:0x2330") is None


def test_every_pci_id_of_a_gpu_finds_it() -> None:
    for gpu in CATALOG.gpus.values():
        for pci in gpu.pci:
            match = CATALOG.gpu_by_pci(pci, gpu.subsystems[0] if gpu.subsystems else None)
            assert match is not None
            assert match.gpu == gpu


def test_every_product_name_finds_its_model_alone() -> None:
    named = [(gpu, name) for gpu in CATALOG.gpus.values() for name in gpu.product_names]
    assert len(named) > 25
    for gpu, name in named:
        match = CATALOG.gpu_by_product_name(name)
        assert match is not None
        assert match.gpu == gpu
        assert the(name) == gpu
    assert CATALOG.gpu_by_product_name("NVIDIA H200 N") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hgx-h100-8", "hgx-h100-8"),
        ("HGX H100 8-GPU", "hgx-h100-8"),
        ("dgx_a100", "dgx-a100-8"),
        ("azure-nd96isr-h100-v5", "azure-nd96isr-h100-v5"),
    ],
)
def test_platforms_have_names(text: str, expected: str) -> None:
    assert CATALOG.platform(text).id == expected


@pytest.mark.parametrize(
    "name", ["hgx-h100-8", "hgx-h200-8", "hgx-b200-8", "dgx-a100-8", "a100-pcie-4", "l40s-4", "t4-1", "v100-2"]
)
def test_the_labs_platforms_are_there(name: str) -> None:
    assert CATALOG.platform(name).id == name


def test_a_platform_takes_from_its_board() -> None:
    dgx = CATALOG.platform("dgx-b200-8")
    assert dgx.gpus == {"b200": 8}
    assert dgx.services == ("fabric-manager", "nvlsm")
    assert dgx.kernel_modules == ("mlx5_core", "ib_umad")
    assert dgx.nvswitch is None
    assert dgx.min_driver == "570.133.20"
    assert dgx.gpu_count == 8


def test_platforms_are_found_by_their_gpus() -> None:
    platforms = [row.id for row in CATALOG.platforms_with({"h100-sxm5-80gb": 8})]
    assert platforms[0] == "hgx-h100-8"
    assert "aws-p5-48xlarge" in platforms[2:]
    assert CATALOG.platforms_with({"h100-sxm5-80gb": 3}) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ubuntu-24.04", "ubuntu-24.04"),
        ("noble", "ubuntu-24.04"),
        ("ubuntu2404", "ubuntu-24.04"),
        ("Debian 12", "debian-12"),
        ("rocky-9", "rhel-9"),
        ("amzn2023", "amazon-linux-2023"),
    ],
)
def test_systems_have_names(text: str, expected: str) -> None:
    assert CATALOG.os(text).id == expected


@pytest.mark.parametrize(
    ("os_id", "version", "expected"),
    [
        ("ubuntu", "24.04", "ubuntu-24.04"),
        ("debian", "13", "debian-13"),
        ("rocky", "9.4", "rhel-9"),
        ("almalinux", "10.0", "rhel-10"),
        ("rhel", "8.10", "rhel-8"),
        ("sles", "15.6", "sles-15"),
        ("azurelinux", "3.0", "azure-linux-3"),
        ("kylin", "V11", "kylin-11"),
        ("ubuntu", "20.04", None),
        ("ubuntu", "2", None),
        ("debian", None, None),
        ("arch", "9", None),
    ],
)
def test_os_release_finds_the_system(os_id: str, version: str | None, expected: str | None) -> None:
    system = CATALOG.os_of(os_id, version)
    assert (system.id if system else None) == expected


def test_unknown_names_bring_the_nearest_known() -> None:
    for look, text, near in (
        (CATALOG.os, "ubuntu-24.05", "ubuntu-24.04"),
        (CATALOG.platform, "hgx-h100-9", "hgx-h100-8"),
        (CATALOG.toolkit, "13.1.9", "13.1.1"),
    ):
        with pytest.raises(UsageError, match=near):
            look(text)
    with pytest.raises(UsageError, match=r"no driver branch '585'.*580"):
        CATALOG.branch(585)


def test_branches_end_at_the_earlier_date() -> None:
    eols = {name: str(CATALOG.branch(name).eol) for name in (580, "R535", "610", "595")}
    assert eols == {580: "2028-06-30", "R535": "2026-06-01", "610": "2026-08-31", "595": "2027-03-24"}
    assert CATALOG.branch(620).eol is None
    assert CATALOG.branch(580).eol_promised
    assert not CATALOG.branch(590).eol_promised
    assert CATALOG.branch_of("580.95.05").latest == "580.178.04"


def test_newest_point_is_by_version_not_by_text() -> None:
    assert CATALOG.branch(570).latest == "570.211.01"
    assert CATALOG.branch(550).latest == "550.163.01"
    assert CATALOG.branch(390).latest == "390.157"


def test_toolkits_by_version_and_series() -> None:
    assert CATALOG.toolkit("13.0").id == "13.0.3"
    assert CATALOG.toolkit("13.0.2").driver == "580.95.05"
    assert CATALOG.toolkit("12.8.0").driver == "570.26"
    assert CATALOG.toolkit("12.8.0").runfile_driver == "570.86.10"
    assert CATALOG.toolkit("11.0.3").floor == "450.51.06"
    assert not CATALOG.toolkit("11.0.3").sure("floor")
    assert CATALOG.toolkit("13.4.2").driver is None


def test_what_is_unsure_is_marked() -> None:
    assert not CATALOG.branch(615).sure("modules")
    assert CATALOG.branch(615).sure("native_cuda")
    assert CATALOG.branch(620).modules == ("open",)
    assert CATALOG.branch(620).sure("modules")
    assert not CATALOG.platform("hgx-h100-4").sure("services")
    assert not the("B100").sure("memory_gb")


def test_xids() -> None:
    lost = CATALOG.xid(79)
    assert lost is not None
    assert (lost.number, lost.severity, lost.kind) == (79, "critical", "bus")
    assert CATALOG.xid(999) is None
    unused = [xid for xid in CATALOG.xids.values() if xid.severity == "unused"]
    assert {xid.meaning for xid in unused} == {"Not in use"}
    assert len(CATALOG.xids) - len(unused) > 90


def test_every_row_has_source_and_date() -> None:
    for section in MODELS:
        if section != "sources":
            for row in CATALOG.rows(section).values():
                assert row.source, row.id
                assert row.date, row.id


def test_the_catalog_is_loaded_once() -> None:
    assert load() is load()
    with pytest.raises(UsageError, match=r"nowhere\.yml: cannot be read"):
        load([Path("/nowhere.yml")])


def test_a_library_has_a_newest_release_per_build() -> None:
    """PyPI on 2026-11-23: nvidia-cudnn-cu12 9.28.0.42, nvidia-cudnn-cu13 9.28.1.4."""
    builds = CATALOG.cudnn["9.11"].builds
    assert {major: build.latest for major, build in builds.items()} == {12: "9.28.0.42", 13: "9.28.1.4"}


@pytest.mark.parametrize(
    ("name", "multiprocessors", "clock_mhz"),
    [
        *((name, 132, 1830) for name in ("NVIDIA H200", "GH200 96GB", "GH200 144GB", "H100 SXM")),
        ("H100 PCIe", 114, 1620),
        ("A100 SXM 80GB", 108, 1410),
    ],
)
def test_a_peak_is_that_of_the_clock_it_refers_to(name: str, multiprocessors: int, clock_mhz: int) -> None:
    """Operations per clock of one multiprocessor: 2048 of A100, 4096 of Hopper (NVIDIA's forum, topic 244727)."""
    gpu = the(name)
    assert gpu.tflops is not None
    assert (gpu.tflops.clock_mhz or gpu.sm_clock_mhz) == clock_mhz
    per_clock = 4096 if gpu.architecture == "hopper" else 2048
    assert gpu.tflops.bf16 == pytest.approx(multiprocessors * per_clock * clock_mhz / 1e6, rel=0.005)


def test_a_measurement_belongs_to_the_model_that_was_measured() -> None:
    """stas00/ml-engineering: 828.6 TFLOPS of the GH200 with 141 GB."""
    assert [row.gpu for row in CATALOG.expectations.values() if row.value == 828.6] == ["gh200-144gb"]


def test_a_gpu_of_four_on_a_board_has_a_quarter_of_its_lanes() -> None:
    link = the("A16").pcie
    assert link is not None
    assert (link.gen, link.width) == (4, 4)
