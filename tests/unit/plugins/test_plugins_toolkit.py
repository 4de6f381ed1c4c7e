"""Which container toolkit a node gets, and what Docker and the CDI specification are made to be."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from plugin_loader import load

toolkit = load("toolkit")
containers = load("containers")
node = load("node")

BUNDLE = Path(__file__).parents[3] / "tests" / "fixtures" / "bundles" / "debian-12-driver.json"
FOUR = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
STACK = {"version": "1.20.0", "packages": list(FOUR)}
RUNTIME = {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}


def installed(*versions: str) -> dict[str, str]:
    return {name: f"{version}-1" for name, version in zip(FOUR, versions, strict=False)}


@pytest.mark.parametrize(
    ("version", "present", "planned", "wanted"),
    [
        ("keep", {}, STACK, "1.20.0"),
        ("keep", installed(*["1.17.8"] * 4), STACK, "1.17.8"),
        ("keep", installed("1.17.8", "1.18.0", "1.18.0", "1.18.0"), STACK, "1.20.0"),
        ("keep", installed("1.17.8", "1.18.0", "1.9.0"), None, "1.18.0"),
        ("keep", installed("1.17.8", "1.17.8"), STACK, "1.20.0"),
        ("keep", {}, None, None),
        ("stack", installed(*["1.17.8"] * 4), STACK, "1.20.0"),
        ("stack", {}, None, None),
        ("1.18.2", {}, None, "1.18.2"),
        ("none", {}, STACK, None),
        ("none", installed(*["1.17.8"] * 4), STACK, None),
    ],
)
def test_the_installed_toolkit_is_kept_and_a_mixed_one_is_not(
    version: str, present: dict[str, str], planned: dict[str, Any] | None, wanted: str | None
) -> None:
    found = toolkit.toolkit_wish(version, present, planned)
    assert found["version"] == wanted
    assert sorted(found["packages"]) == sorted(FOUR)
    assert "nvidia-docker2" in found["replaces"]


@pytest.mark.parametrize(
    ("version", "wished"),
    [
        ("20.10.24", {"runtimes": RUNTIME}),
        ("26.1.5", {"runtimes": RUNTIME, "features": {"cdi": True}}),
        ("28.2.0", {"runtimes": RUNTIME}),
        (None, {"runtimes": RUNTIME}),
    ],
)
def test_cdi_is_switched_on_where_the_engine_wants_to_be_told(version: str | None, wished: dict[str, Any]) -> None:
    assert toolkit.toolkit_daemon(containers.container_engine(version), True, False, "cgroupfs", {}) == wished


def test_cdi_that_was_switched_off_is_switched_on_and_left_off_where_that_is_wished() -> None:
    engine = containers.container_engine("29.0.0")
    off = {"features": {"cdi": False}}
    assert toolkit.toolkit_daemon(engine, True, False, None, off)["features"] == {"cdi": True}
    assert "features" not in toolkit.toolkit_daemon(engine, False, True, None, off)
    assert toolkit.toolkit_daemon(engine, True, True, None, {})["default-runtime"] == "nvidia"


def test_an_engine_without_cdi_leaves_systemds_cgroups() -> None:
    old, new = containers.container_engine("24.0.9"), containers.container_engine("26.1.5")
    moved = {"exec-opts": ["native.cgroupdriver=cgroupfs"]}
    assert toolkit.toolkit_daemon(old, True, False, "systemd", {}).items() >= moved.items()
    assert toolkit.toolkit_daemon(old, True, False, "cgroupfs", moved).items() >= moved.items()
    assert "exec-opts" not in toolkit.toolkit_daemon(old, True, False, "cgroupfs", {})
    assert "exec-opts" not in toolkit.toolkit_daemon(new, True, False, "systemd", {})
    chosen = {"exec-opts": ["native.cgroupdriver=systemd"]}
    assert "exec-opts" not in toolkit.toolkit_daemon(old, True, False, "systemd", chosen)


def test_engines_that_cannot_read_the_newest_cdi_are_named() -> None:
    engines = {
        "docker": containers.container_engine("26.1.5"),
        "podman": containers.container_engine("4.9.3", "podman"),
        "containerd": containers.container_engine(None, "containerd"),
    }
    assert toolkit.needs_old_cdi(engines) == ["podman 4.9.3"]


SHIPPED = "# This file can be used\n# NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=/var/run/cdi/nvidia.yaml\n"


def test_the_flag_is_set_beside_those_of_a_user_and_taken_back() -> None:
    users = f"{SHIPPED}NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS=disable-nvsandbox-utils\n"
    for text, line in (
        (SHIPPED, "FLAGS=no-additional-gids-for-device-nodes\n"),
        (users, "FLAGS=disable-nvsandbox-utils,no-additional-gids-for-device-nodes\n"),
    ):
        written = toolkit.cdi_refresh_env(text, True)["text"]
        assert written.startswith(text)
        assert line in written[len(text) :]
        assert toolkit.cdi_refresh_env(written, True)["text"] == written
        assert toolkit.cdi_refresh_env(written, False)["text"] == text


def test_a_user_who_has_set_the_flag_needs_no_second_line() -> None:
    text = 'NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS="no-additional-gids-for-device-nodes"\n'
    assert toolkit.cdi_refresh_env(text, True)["text"] == text


def test_the_unit_writes_where_a_user_sent_it() -> None:
    assert toolkit.cdi_refresh_env(SHIPPED, False)["output"] == "/var/run/cdi/nvidia.yaml"
    assert (
        toolkit.cdi_refresh_env("NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=/etc/cdi/x.yaml\n", False)["output"]
        == "/etc/cdi/x.yaml"
    )
    assert toolkit.cdi_refresh_env(None, False) == {"text": "", "output": "/var/run/cdi/nvidia.yaml"}


@pytest.fixture
def facts() -> dict[str, Any]:
    document: dict[str, Any] = node.node_facts(BUNDLE.read_text(encoding="utf-8"), "a node")
    loaded = {"version": "580.95.05", "flavour": "open"}
    return {**document, "loaded_driver": loaded, "driver_library_version": "580.95.05"}


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "path": "/var/run/cdi/nvidia.yaml",
        "size_bytes": 9,
        "cdi_version": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": ["0", "all"],
        "driver_versions": ["580.95.05"],
        "missing": [],
        **changes,
    }


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([], "is not there"),
        ([spec(path="/etc/cdi/nvidia.yaml")], "is not there"),
        ([spec(driver_versions=["570.10"])], "made for driver 570.10, 580.95.05 is installed"),
        ([spec(missing=["/usr/lib/libcuda.so.570"])], "names what is not there: /usr/lib/libcuda.so.570"),
        ([spec(devices=[])], "names no device"),
    ],
)
def test_a_specification_that_does_not_fit_is_written_anew(
    facts: dict[str, Any], specs: list[dict[str, Any]], words: str
) -> None:
    assert words in toolkit.cdi_refresh_reason({**facts, "cdi_specs": specs})


def test_one_that_fits_is_left_and_so_is_a_node_without_the_driver(facts: dict[str, Any]) -> None:
    assert toolkit.cdi_refresh_reason({**facts, "cdi_specs": [spec()]}) is None
    assert toolkit.cdi_refresh_reason({**facts, "cdi_specs": [spec(path="/run/cdi/nvidia.yaml")]}) is None
    assert toolkit.cdi_refresh_reason({**facts, "cdi_specs": [], "loaded_driver": None}) is None
    loaded = {"version": "570.10", "flavour": "open"}
    assert toolkit.cdi_refresh_reason({**facts, "cdi_specs": [], "loaded_driver": loaded}) is None


CNI = 'version = 2  # ours\n[plugins."io.containerd.grpc.v1.cri".cni]\nbin_dir = "/opt/cni"\n'
CRI = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd'


@pytest.mark.parametrize("text", [None, "", CNI, f'{CRI}.runtimes.crun]\nruntime_type = "io.containerd.runc.v2"\n'])
def test_containerd_keeps_runc_beside_the_toolkit(text: str | None) -> None:
    written = toolkit.containerd_config(text)
    assert written.startswith(text or "version = 2\n")
    runtimes = tomllib.loads(written)["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]
    assert runtimes["runc"] == {"runtime_type": "io.containerd.runc.v2"}
    assert toolkit.containerd_config(written) == written


@pytest.mark.parametrize(
    "text",
    [
        f"{CRI}.runtimes.runc.options]\nSystemdCgroup = true\n",
        f'{CRI}]\ndefault_runtime_name = "crun"\n',
        f"{CRI}]\nruntimes = {{}}\n",
        "version = 3\n",
        'root = "/data"\n',
        "plugins = 1\n",
        "[",
    ],
    ids=["runc", "another", "inline", "version-3", "version-1", "no-table", "no-toml"],
)
def test_a_file_of_containerd_that_has_it_or_cannot_take_it_stays(text: str) -> None:
    assert toolkit.containerd_config(text) == text
