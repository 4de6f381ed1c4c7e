"""How GPUs are asked for: by CDI where the engine and the node have it, else by the runtime."""

from types import SimpleNamespace
from typing import Any

import pytest

from gpunode.workload.engine import Engine
from gpunode.workload.gpus import Use
from gpunode.workload.launch import devices_for

SPEC = (SimpleNamespace(kind="nvidia.com/gpu"),)
OTHER = (SimpleNamespace(kind="intel.com/gpu"),)
USE = Use((0, 1))


@pytest.mark.parametrize(
    ("info", "specs", "how"),
    [
        ({"CDISpecDirs": ["/etc/cdi"]}, SPEC, "cdi"),
        ({"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"nvidia": {}}}, SPEC, "cdi"),
        ({"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"nvidia": {}}}, (), "runtime"),
        ({"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"nvidia": {}}}, OTHER, "runtime"),
        ({"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"runc": {}}}, (), "cdi"),
        ({"CDISpecDirs": []}, SPEC, "runtime"),
        ({"Runtimes": None}, None, "runtime"),
    ],
)
def test_the_way_that_both_sides_have(info: dict[str, Any], specs: Any, how: str) -> None:
    engine = Engine(None, "28.5.1", "1.51", info, 0.0)
    node: Any = SimpleNamespace(cdi_specs=specs)
    assert devices_for(engine, USE, node).how == how
    assert devices_for(engine, Use(), node).how == "none"


def test_a_part_of_the_gpus_is_named_one_by_one() -> None:
    engine = Engine(None, "20.10.24", "1.41", {}, 0.0)
    node: Any = SimpleNamespace(cdi_specs=())
    assert devices_for(engine, USE, node).indices is None
    assert devices_for(engine, Use((1,), all=False), node).indices == (1,)
