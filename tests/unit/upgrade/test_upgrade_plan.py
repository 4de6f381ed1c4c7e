"""The plan of a run: sizes of waves, the image that nodes are measured in, the variables of the playbooks."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from upgrade_world import NEW, OLD

from gpunode.catalog import load
from gpunode.change.journal import NodeRecord, new_token
from gpunode.errors import UsageError
from gpunode.upgrade.command import ChangeCommand, ChangeGoal, ChangeOptions, wave_sizes
from gpunode.upgrade.nodes import variables_of
from gpunode.upgrade.plan import image_for_releases, wave_numbers


@pytest.mark.parametrize(
    ("nodes", "canary", "waves", "expected"),
    [
        (20, 1, "10%,25%", [1, 2, 5, 5, 5, 2]),
        (3, 1, "10%,25%", [1, 1, 1]),
        (4, 9, "10%", [4]),
        (5, 2, "3", [2, 3]),
        (0, 1, "10%", []),
    ],
)
def test_sizes_of_waves(nodes: int, canary: int, waves: str, expected: list[int]) -> None:
    numbers = wave_numbers(nodes, canary, wave_sizes(waves))
    assert [numbers.count(wave) for wave in sorted(set(numbers))] == expected


@pytest.mark.parametrize(
    ("releases", "image"),
    [
        ({"580.95.05", "595.91.07"}, "pytorch-25.10"),
        ({"595.91.07"}, "pytorch-26.05"),
        ({"570.195.03", "595.91.07"}, "pytorch-2.7-cu128"),
    ],
)
def test_an_image_that_every_release_supports(releases: set[str], image: str) -> None:
    reference = image_for_releases(releases, {"x86_64"}, {"h100-sxm5-80gb"})
    assert reference == load().workload_images[image].reference


def test_no_image_for_every_release_is_one_line() -> None:
    with pytest.raises(UsageError) as caught:
        image_for_releases({"470.256.02", "580.95.05"}, {"x86_64"}, {"t4"})
    assert "CUDA 11.4" in str(caught.value)
    assert "470.256.02, 580.95.05" in str(caught.value)
    assert "--image" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_variables_override_those_of_the_site() -> None:
    record = NodeRecord(token=new_token(), before=OLD, target=NEW, back=True)
    values = variables_of({"gpu-1": record}, {})
    assert values["__gpunode_targets"] == {"gpu-1": OLD}
    assert values["gpunode_drain_tasks"] is None
    # Only a node that goes back gets what it kept.
    assert values["__gpunode_backward"] == ["gpu-1"]
    forward = record.model_copy(update={"back": False})
    assert variables_of({"gpu-1": forward}, {})["__gpunode_backward"] == []
    assert variables_of({"gpu-1": forward}, {}, kept=True)["__gpunode_backward"] == ["gpu-1"]


def test_hosts_in_place_of_a_file_may_be_long(tmp_path: Path) -> None:
    hosts, file = ",".join(f"gpu-{number:04}" for number in range(60)), tmp_path / "hosts.yml"
    file.touch()
    unset: dict[str, Any] = dict.fromkeys((field.name for field in fields(ChangeOptions)), None)
    options = {"inventories": (hosts, str(file), "a\0b"), "scheduler": "none", "extra_vars": ()}
    command = ChangeCommand(ChangeOptions(**(unset | options)), ChangeGoal("--to 595"))
    assert command.identity[:3] == (hosts, str(file), "a\0b")
