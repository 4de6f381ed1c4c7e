"""driver.expected holds the loaded driver against the rules by which a stack is resolved."""

import pytest

from gpunode.catalog import load
from gpunode.checks.driver_modes import fits
from gpunode.facts.modules import LoadedDriver


@pytest.mark.parametrize(
    ("gpu", "version", "flavour", "status"),
    [
        ("b200", "560.35.03", "open", "fail"),
        ("b200", "570.133.20", "open", "pass"),
        ("gb300", "570.124.06", "open", "fail"),
        ("h100-sxm5-80gb", "580.95.05", "open", "pass"),
        ("h100-sxm5-80gb", "470.57.02", "proprietary", "fail"),
        ("t4", "535.261.03", "proprietary", "pass"),
        ("v100-sxm2-32gb", "590.48.01", "proprietary", "fail"),
        ("b100", "580.95.05", "proprietary", "fail"),
    ],
)
def test_drivers_and_models(gpu: str, version: str, flavour: str, status: str) -> None:
    verdict = fits(LoadedDriver(version=version, flavour=flavour), [load().gpu(gpu)], ())
    assert verdict.status.value == status, verdict.message
    assert verdict.message
