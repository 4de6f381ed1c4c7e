"""Origins and closures: packages as real archives publish them."""

import pytest

from gpunode.catalog import origins

DEBIAN = "Debian NVIDIA Maintainers <pkg-nvidia-devel@lists.alioth.debian.org>"
UBUNTU = "Ubuntu Core Developers <ubuntu-devel-discuss@lists.ubuntu.com>"
NVIDIA = "NVIDIA CORPORATION <cudatools@nvidia.com>"


@pytest.mark.parametrize(
    ("name", "version", "maintainer", "origin"),
    [
        ("nvidia-kernel-dkms", "535.261.03-1", DEBIAN, "debian"),
        ("nvidia-tesla-535-driver", "535.216.03-3~deb12u1", DEBIAN, "debian"),
        ("nvidia-dkms-530", "535.54.03-0ubuntu0.22.04.1", UBUNTU, "ubuntu"),
        ("nvidia-driver-550", "550.54.15-0ubuntu1", UBUNTU, "nvidia"),
        ("nvidia-driver-580", "580.173.02-1ubuntu1", UBUNTU, "nvidia"),
        ("nvidia-364", "364.19-0ubuntu0~gpu16.04.3", UBUNTU, "graphics-drivers-ppa"),
        ("nvidia-fabricmanager", "580.95.05-1", NVIDIA, "nvidia"),
        ("nvidia-open", "580.95.05-1", DEBIAN, "nvidia"),
        ("nvidia-kernel-dkms", "535.261.03-1", "Somebody <root@example.org>", None),
        ("libxnvctrl0", "510.47.03-0ubuntu1", UBUNTU, "ubuntu"),
        ("libxnvctrl0", "510.47.03-0ubuntu4", UBUNTU, "ubuntu"),
        ("libxnvctrl0", "510.47.03-0ubuntu4.24.04.1", UBUNTU, "ubuntu"),
        ("libxnvctrl0", "510.47.03-0ubuntu7", UBUNTU, "ubuntu"),
        ("nvidia-settings", "510.47.03-0ubuntu4", UBUNTU, "ubuntu"),
        ("nvidia-settings", "610.57.04-1ubuntu1", UBUNTU, "nvidia"),
    ],
)
def test_origin(name: str, version: str, maintainer: str, origin: str | None) -> None:
    assert origins.origin_of(name, version, maintainer) == origin


@pytest.mark.parametrize(
    ("name", "source", "origin", "line"),
    [
        ("libcuda1", "nvidia-graphics-drivers", "debian", "nvidia-graphics-drivers"),
        ("firmware-nvidia-gsp", "nvidia-graphics-drivers", "debian", "nvidia-graphics-drivers"),
        ("nvidia-open-kernel-dkms", "nvidia-open-gpu-kernel-modules", "debian", "nvidia-graphics-drivers"),
        (
            "nvidia-tesla-535-driver",
            "nvidia-graphics-drivers-tesla-535",
            "debian",
            "nvidia-graphics-drivers-tesla-535",
        ),
        ("nvidia-persistenced", "nvidia-persistenced", "debian", None),
        ("nvidia-modprobe", "nvidia-modprobe", "debian", None),
        ("nvidia-settings", "nvidia-settings", "debian", None),
        ("nvidia-kernel-common", "nvidia-support", "debian", None),
        ("glx-alternative-nvidia", "glx-alternatives", "debian", None),
        ("libnvidia-egl-wayland1", "egl-wayland", "debian", None),
        ("nvidia-cuda-toolkit", "nvidia-cuda-toolkit", "debian", None),
        ("nvidia-dkms-535-server", "nvidia-graphics-drivers-535-server", "ubuntu", "ubuntu"),
        ("nvidia-fabricmanager-580", "fabric-manager-580", "ubuntu", "ubuntu"),
        ("nvidia-persistenced", "nvidia-persistenced", "nvidia", "nvidia"),
        ("nvidia-fabricmanager", "nvidia-fabricmanager", "nvidia", "nvidia"),
        ("libnvidia-nscq-570", "libnvidia-nscq-570", "nvidia", "nvidia"),
        ("libnvsdm", "libnvsdm", "nvidia", "nvidia"),
        ("nvidia-imex", "nvidia-imex", "nvidia", "nvidia"),
        ("nvidia-container-toolkit", "nvidia-container-toolkit", "nvidia", None),
        ("libnvidia-container1", "libnvidia-container", "nvidia", None),
        ("nvidia-driver-pinning-580", "nvidia-driver-pinning", "nvidia", None),
        ("cuda-toolkit-12-9", "cuda-toolkit-12-9", "nvidia", None),
        ("cuda-compat-13-0", "nvidia-graphics-drivers-580", "nvidia", None),
        ("nvidia-driver-common", "nvidia-driver", "nvidia", "nvidia"),
        ("nvidia-driver-selinux", "nvidia-driver-selinux", "nvidia", None),
        ("libgles-nvidia2", "nvidia-driver", "nvidia", "nvidia"),
        ("libxnvctrl0", "nvidia-settings", "ubuntu", None),
        ("libcuda1", "strange", None, "unknown origin"),
        ("bash", "bash", None, None),
    ],
)
def test_closure(name: str, source: str, origin: str | None, line: str | None) -> None:
    assert origins.closure_line(name, source, origin) == line


@pytest.mark.parametrize(
    ("name", "brings"),
    [
        ("nvidia-kernel-dkms", True),
        ("nvidia-open-kernel-dkms", True),
        ("nvidia-tesla-535-kernel-dkms", True),
        ("nvidia-dkms-580-open", True),
        ("linux-modules-nvidia-580-server-6.8.0-60-generic", True),
        ("kmod-nvidia-latest-dkms", True),
        ("nvidia-smi", False),
        ("gdrdrv-dkms", False),
        ("bbswitch-dkms", False),
    ],
)
def test_kernel_module_packages(name: str, brings: bool) -> None:
    assert origins.brings_kernel_module(name) is brings


@pytest.mark.parametrize(
    ("version", "upstream"),
    [
        ("535.261.03-1", "535.261.03"),
        ("535.216.03-3~deb12u1", "535.216.03"),
        ("580.95.05-0ubuntu0.24.04.1", "580.95.05"),
        ("3:580.95.05-1.el9", "580.95.05"),
        ("535.261.03", "535.261.03"),
    ],
)
def test_upstream_version(version: str, upstream: str) -> None:
    assert origins.upstream_version(version) == upstream


def test_every_origin_that_can_be_recognized_has_a_closure() -> None:
    table = origins.table()
    assert {row.origin for row in table.origins} == {row.origin for row in table.closures}


@pytest.mark.parametrize(
    ("release", "label", "origin"),
    [
        ("NVIDIA", "NVIDIA CUDA", "nvidia"),
        ("Ubuntu", "Ubuntu", "ubuntu"),
        ("Debian", "Debian-Security", "debian"),
        ("LP-PPA-graphics-drivers", "Graphics Drivers", "graphics-drivers-ppa"),
        ("NVIDIA", "something else", None),
        ("https://nvidia.github.io/libnvidia-container/stable", "NVIDIA CORPORATION <cudatools@nvidia.com>", None),
        ("", "", None),
    ],
)
def test_a_repository_is_recognised_by_its_release_file(release: str, label: str, origin: str | None) -> None:
    assert origins.publisher(release, label) == origin


def test_every_signing_key_agrees_with_its_fingerprint() -> None:
    assert origins.table().signing_keys
    for folder, key in origins.table().signing_keys.items():
        assert origins.signing_key(folder) == key, "something vouches for it"
        if key.fingerprint:
            assert key.fingerprint.endswith(key.file.removesuffix(".pub").upper()), folder
