"""What the role cuda refuses to touch, held against the packages that were recorded of NVIDIA's repositories."""

from fnmatch import fnmatchcase

import pytest
from evidence import index

from gpunode.provisioning.cuda import DRIVER_PACKAGES

# Recorded at the driver's version; toolkits and other publishers' packages need them without a driver.
HARMLESS = ("cuda-compat-", "libxnvctrl", "nvidia-settings", "nvidia-xconfig", "xserver-", "libnvidia-")


def refused(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in DRIVER_PACKAGES)


@pytest.mark.parametrize("system", ["ubuntu2204", "ubuntu2404", "ubuntu2604"])
def test_whatever_carries_the_drivers_version_is_refused(system: str) -> None:
    rows = index(system)["packages"]
    fabric = [name for name, row in rows.items() if row.get("follows") == "fabricmanager"]
    driver = [name for name, row in rows.items() if row.get("follows") == "driver"]
    assert len(fabric) > 5
    assert len(driver) > 25
    assert [name for name in fabric if not refused(name)] == []
    assert [name for name in driver if not refused(name) and not name.startswith(HARMLESS)] == []
    assert refused("libnvidia-compute")
    assert refused("libnvidia-gpucomp-580")


@pytest.mark.parametrize("system", ["ubuntu2404", "debian13"])
def test_no_part_of_a_toolkit_is_refused(system: str) -> None:
    rows = index(system)["packages"]
    parts = [
        name for name in rows if name.endswith(("-13-2", "-config-common")) or name.startswith(("libcudnn9", "libnccl"))
    ]
    meta = {"cuda-13-2", "cuda-runtime-13-2"}
    assert len(parts) > 30
    assert {name for name in parts if refused(name)} == meta & set(parts)


def test_debians_own_toolkit_is_not_refused() -> None:
    names = ["nvidia-cuda-toolkit", "nvidia-cuda-dev", "nvidia-opencl-dev", "nvidia-profiler", "libnvidia-ml-dev"]
    assert [name for name in names if refused(name)] == []
