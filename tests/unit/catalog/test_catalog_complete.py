"""Nothing of the reference that the catalog was made from is missing, and nothing differs from it."""

import re
from typing import Any

import pytest
from evidence import compat

from gpunode.catalog import load

CATALOG = load()


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return compat()


def test_every_gpu_is_there_with_its_figures(reference: dict[str, Any]) -> None:
    assert len(reference["gpus"]) > 40
    for row in reference["gpus"]:
        for pci in row["pci_device_ids"]:
            match = CATALOG.gpu_by_pci(pci, row.get("pci_subsystem"))
            assert match is not None, pci
            gpu = match.gpu
            assert gpu is not None, pci
            where = f"{row['name']} ({pci})"
            assert gpu.architecture == row["arch"].lower(), where
            assert gpu.compute_capability == row["compute_capability"], where
            assert gpu.memory_gb == row["memory_gb"], where
            assert gpu.memory_bandwidth_gb_per_s == row["mem_bw_gbs"], where
            assert gpu.power_w == row["tdp_w"], where
            assert gpu.sm_clock_mhz == row["max_sm_clock_mhz"], where
            assert gpu.memory_clock_mhz == row["mem_clock_nvsmi_mhz"], where
            assert gpu.last_branch == row["last_driver_branch"], where
            assert (gpu.nvlink.gb_per_s if gpu.nvlink else 0) == row["nvlink"]["gbs"], where
            assert gpu.pcie is not None, where
            assert (gpu.pcie.gen, gpu.pcie.width) == (row["pcie"]["gen"], row["pcie"]["width"]), where
            assert gpu.mig_instances == row.get("mig_max", 0), where
            assert gpu.memory_mib == row.get("nvsmi_mem_mib"), where
            assert set(gpu.product_names) >= set(row.get("nvsmi_names", [])), where
            assert set(gpu.source) >= set(row["src"]), where
            assert (gpu.modules == "open") == (row["open_modules"] == "required"), where
            assert (gpu.modules == "either") == (row["open_modules"] == "capable"), where
            rates = gpu.tflops
            assert (rates.fp32 if rates else None) == row["fp32_tflops"], where
            assert (rates.bf16 if rates else None) == row["bf16_dense_tflops"], where
            if row.get("unsure"):
                assert gpu.unsure or gpu.confidence == "unsure", where


def test_every_other_pci_id_is_there(reference: dict[str, Any]) -> None:
    for row in reference["other_pci_ids"]:
        assert CATALOG.gpu_by_pci(row["id"]) is not None or row["id"] in CATALOG.pci_parts, row


def test_every_branch_and_point_is_there(reference: dict[str, Any]) -> None:
    for row in reference["driver_branches"]:
        branch = CATALOG.branch(row["branch"])
        assert row["type"].startswith(branch.type or "unsure"), row
        assert branch.released is not None
        assert row["released"].startswith(branch.released), row
        assert branch.eol_computed == row["eol"], row
        assert branch.eol_vendor == row.get("eol_nvidia"), row
        assert row["latest_known"] in branch.points, row
        if row.get("max_cuda_native"):
            assert branch.native_cuda == row["max_cuda_native"], row
        assert branch.oldest_architecture == row["gpu_archs"].removesuffix("+").lower(), row
    for number, points in reference["driver_points"].items():
        known = CATALOG.branch(number).points
        for point in points:
            version, _, when = point.partition(" ")
            assert version in known, point
            assert known[version] == (when.strip("()") or None), point
    for number, cuda in reference["branch_native_cuda"].items():
        assert CATALOG.branch(number).native_cuda == cuda


def test_every_toolkit_is_there(reference: dict[str, Any]) -> None:
    older = {"10.2.89", "10.1.105", "10.0.130", "9.2.88", "9.1.85"}
    assert {row["version"] for row in reference["cuda_toolkits"]} | older == set(CATALOG.toolkits)
    for row in reference["cuda_toolkits"]:
        toolkit = CATALOG.toolkits[row["version"]]
        assert toolkit.label == row["label"]
        assert toolkit.branch == row["toolkit_driver_branch"]
        assert toolkit.driver == row["toolkit_driver_linux_x86_64"]
        assert (toolkit.runfile_driver or toolkit.driver) == (row["runfile_driver_linux_x86_64"] or toolkit.driver)
        assert CATALOG.cuda_majors[str(toolkit.major)].floor == row["minor_compat_min_driver_linux"]
        assert row["runfile_driver_linux_sbsa"] in (None, row["runfile_driver_linux_x86_64"])
    for row in reference["cuda_majors"]:
        major = CATALOG.cuda_majors[row["cuda"].removesuffix(".x")]
        assert (major.floor, major.branch) == (row["min_driver_linux"], row["min_branch"])


def test_forward_compatibility_is_the_same_matrix(reference: dict[str, Any]) -> None:
    for row in reference["forward_compat"]["matrix"]:
        known = CATALOG.forward_compat[row["package"].removeprefix("cuda-compat-").replace("-", ".")]
        reported = {
            **dict.fromkeys(known.works_on, "compatible"),
            **dict.fromkeys(known.needless_on, "not-needed (same CUDA)"),
            **dict.fromkeys(known.refused_on, "not-compatible"),
        }
        assert reported == row["matrix"], row["package"]
    assert len(CATALOG.forward_compat) == len(reference["forward_compat"]["matrix"])


def test_architectures_are_the_same(reference: dict[str, Any]) -> None:
    modules = {"no": "proprietary", "yes": "either", "yes (GH200: required)": "either", "required": "open"}
    for row in reference["architectures"]:
        known = CATALOG.architectures[row["arch"].lower()]
        assert list(known.compute_capabilities) == row["cc"]
        assert known.last_branch == row["last_driver_branch"]
        assert known.modules == modules[row["open_modules"]]
        last = row["last_cuda"]
        assert known.last_cuda == (int(last.split(".")[0]) if last else None)


def test_every_xid_is_there_with_its_weight(reference: dict[str, Any]) -> None:
    weight = {"app": "application", "follow": "high"}
    for row in reference["xid"]:
        xid = CATALOG.xid(row["code"])
        assert xid is not None
        assert row["mnemonic"].startswith(xid.name)
        assert xid.severity == weight.get(row["severity_derived"], row["severity_derived"])
        since = re.search(r"R(\d+)", row.get("xid154_since") or "")
        assert xid.recovery_reported_since == (int(since[1]) if since else None)
    assert len(CATALOG.xids) == len(reference["xid"])


def test_every_system_and_package_name_is_there(reference: dict[str, Any]) -> None:
    known = {offer.repository for row in CATALOG.systems.values() for offer in row.origins.values()}
    assert set(reference["repo_layout"]["distro"].values()) <= known
    components = {row["component"].replace(" 9", "") for row in reference["packages_aux"]}
    other = {"fabricmanager": "fabric-manager", "toolkit": "cuda-toolkit", "compat": "cuda-compat"}
    packaged = {row.component for row in CATALOG.packages.values()}
    assert {other.get(name, name.replace(" ", "-")) for name in components} <= packaged
    archive = {row["package"]: row for row in reference["debian_archive"]["packages"]}
    twelve, thirteen = (CATALOG.os(name).origins["debian"] for name in ("debian-12", "debian-13"))
    driver = archive["nvidia-driver"]
    assert twelve.versions[535]["proprietary"] == (driver["bookworm"], driver["bookworm_older"])
    assert twelve.versions[535]["open"] == (archive["nvidia-open-kernel-dkms"]["bookworm"],)
    assert twelve.versions[470] == {"proprietary": (archive["nvidia-tesla-470-driver"]["bookworm"],)}
    transitional = archive["nvidia-tesla-driver"]["bookworm"].split(".")[0]
    assert twelve.transitional == {int(transitional): int(driver["bookworm"].split(".")[0])}
    assert thirteen.versions[550] == {
        "proprietary": (driver["trixie"],),
        "open": (archive["nvidia-open-kernel-dkms"]["trixie"],),
    }
    assert thirteen.versions[535] == {"proprietary": (archive["nvidia-tesla-535-driver"]["trixie"],)}


def test_every_framework_and_library_is_there(reference: dict[str, Any]) -> None:
    for row in reference["pytorch"]:
        known = CATALOG.frameworks[f"pytorch-{row['torch']}"]
        assert set(known.builds) == set(row["cuda"] or {})
        assert (known.default_wheel or {}).get("cuda") == (row["pypi_default"] or {}).get("cuda")
    for row in reference["tensorflow"]:
        assert CATALOG.frameworks[f"tensorflow-{row['tf']}"].floor == row["driver_min"]
    for row in reference["nccl"]:
        assert row["nccl"].removeprefix(">=") in CATALOG.nccl


def test_every_source_is_there(reference: dict[str, Any]) -> None:
    assert set(reference["sources"]) <= set(CATALOG.sources)


def test_every_expected_figure_is_there(reference: dict[str, Any]) -> None:
    perf = reference["perf"]
    figures = list(CATALOG.expectations.values())

    def values(metric: str) -> list[float]:
        return sorted(row.value for row in figures if row.metric == metric)

    assert values("all_reduce_busbw") == sorted(float(row["busbw"]) for row in perf["all_reduce_busbw_gbs"])
    assert values("gemm_bf16") == sorted(float(row["bf16"]) for row in perf["gemm_mamf_tflops"] if row["bf16"])
    assert values("gemm_fp8") == sorted(float(row["fp8"]) for row in perf["gemm_mamf_tflops"] if row["fp8"])
    assert {row["p2p"] for row in perf["host_p2p_bw_gbs"] if row["p2p"]} == set(values("peer_to_peer"))
    assert {row["h2d_d2h"] for row in perf["host_p2p_bw_gbs"]} == set(values("host_to_device"))
