"""Which container toolkit a node gets, and what of it stands in daemon.json."""

from typing import Any

import pytest

from gpunode.provisioning.daemon_json import Document
from gpunode.provisioning.engines import engine_support
from gpunode.provisioning.toolkit import toolkit_daemon, toolkit_request
from gpunode.stack.model import Library

FOUR = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
STACK = Library(version="1.20.0", packages=FOUR)
RUNTIME = {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}


def installed(*versions: str) -> dict[str, str]:
    return {name: f"{version}-1" for name, version in zip(FOUR, versions, strict=False)}


@pytest.mark.parametrize(
    ("version", "present", "planned", "expected"),
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
    version: str, present: dict[str, str], planned: Library | None, expected: str | None
) -> None:
    request = toolkit_request(version, present, planned)
    assert request.version == expected
    assert sorted(request.packages) == sorted(FOUR)
    assert "nvidia-docker2" in request.replaces


@pytest.mark.parametrize(
    ("version", "keys"),
    [
        ("20.10.24", {"runtimes": RUNTIME}),
        ("26.1.5", {"runtimes": RUNTIME, "features": {"cdi": True}}),
        ("28.2.0", {"runtimes": RUNTIME}),
        (None, {"runtimes": RUNTIME}),
    ],
)
def test_cdi_is_switched_on_where_the_engine_needs_it(version: str | None, keys: dict[str, Any]) -> None:
    assert toolkit_daemon(engine_support(version), True, False, "cgroupfs", {}) == keys


def test_cdi_that_was_switched_off_is_switched_on_and_left_off_where_that_is_requested() -> None:
    engine = engine_support("29.0.0")
    off: Document = {"features": {"cdi": False}}
    assert toolkit_daemon(engine, True, False, None, off)["features"] == {"cdi": True}
    assert "features" not in toolkit_daemon(engine, False, True, None, off)
    assert toolkit_daemon(engine, True, True, None, {})["default-runtime"] == "nvidia"


def test_an_engine_without_cdi_leaves_systemds_cgroups() -> None:
    old, new = engine_support("24.0.9"), engine_support("26.1.5")
    moved: Document = {"exec-opts": ["native.cgroupdriver=cgroupfs"]}
    assert toolkit_daemon(old, True, False, "systemd", {}).items() >= moved.items()
    assert toolkit_daemon(old, True, False, "cgroupfs", moved).items() >= moved.items()
    assert "exec-opts" not in toolkit_daemon(old, True, False, "cgroupfs", {})
    assert "exec-opts" not in toolkit_daemon(new, True, False, "systemd", {})
    chosen: Document = {"exec-opts": ["native.cgroupdriver=systemd"]}
    assert "exec-opts" not in toolkit_daemon(old, True, False, "systemd", chosen)
