"""Outliers of a fleet, and trends: what was planted is found, and nothing else."""

import random
from collections.abc import Callable, Mapping

import pytest
from effort import effort
from snapshots import good

from gpunode.history.outliers import Outlier, outliers
from gpunode.history.snapshot import FigureValue, Scalar, Snapshot
from gpunode.history.trends import growth, trends

Edit = Callable[[Snapshot], Snapshot]
NODES = effort(60, 200)


def fleet(seed: int, nodes: int = NODES, planted: Mapping[int, Edit] | None = None) -> list[Snapshot]:
    """Healthy nodes of one model, no two alike: names, identities, temperatures, figures; with planted deviations."""
    chance = random.Random(seed)  # noqa: S311
    snapshots = []
    for number in range(nodes):
        facts = {
            path: value.replace("00000002", f"{number:08x}") if isinstance(value, str) else value
            for path, value in (good().facts or {}).items()
        }
        node = good().model_copy(
            update={
                "host": f"gpu-{number:03d}",
                "facts": facts,
                "idle_temperatures_c": {gpu.key: chance.uniform(25, 50) for gpu in good().gpus},
                "figures": tuple(
                    FigureValue(metric=metric, component=f"gpu{gpu}", value=usual * chance.gauss(1, 0.015), unit="GB/s")
                    for metric, usual in (("host_to_device", 25.0), ("gemm_bf16", 300.0))
                    for gpu in range(4)
                ),
            }
        )
        snapshots.append(planted[number](node) if planted and number in planted else node)
    return snapshots


def facts_with(**paths: Scalar) -> Edit:
    return lambda node: node.model_copy(update={"facts": {**(node.facts or {}), **paths}})


def without(*parts: str) -> Edit:
    return lambda node: node.model_copy(
        update={"facts": {path: value for path, value in (node.facts or {}).items() if not path.startswith(parts)}}
    )


def newer_driver(node: Snapshot) -> Snapshot:
    old = str((node.facts or {})["loaded_driver.version"])
    facts = {
        path: value.replace(old, "999.10.01") if isinstance(value, str) else value
        for path, value in (node.facts or {}).items()
    }
    return node.model_copy(update={"facts": facts})


def slow_gpu(node: Snapshot) -> Snapshot:
    slow = [
        figure.model_copy(update={"value": 0.7 * figure.value})
        if (figure.metric, figure.component) == ("gemm_bf16", "gpu2")
        else figure
        for figure in node.figures
    ]
    return node.model_copy(update={"figures": tuple(slow)})


FIRST = f"smi.document.gpus[{good().gpus[0].uuid}]".replace("00000002", "{:08x}")


def planted() -> dict[int, Edit]:
    adapter = next(path.removesuffix("present") for path in good().facts or {} if path.startswith("pci_io["))
    return {
        3: newer_driver,
        11: newer_driver,
        17: slow_gpu,
        23: facts_with(**{f"{FIRST.format(23)}.pcie.width_current": 8}),
        31: without(adapter),
        37: facts_with(**{"sysctl[vm.swappiness]": "99"}),
        41: facts_with(**{f"{FIRST.format(41)}.vbios_version": "90.00.00.00.01"}),
        47: facts_with(transparent_hugepages="never-seen"),
    }


def by_hosts(deviations: list[Outlier]) -> dict[tuple[str, ...], list[str]]:
    names: dict[tuple[str, ...], list[str]] = {}
    for outlier in deviations:
        names.setdefault(outlier.hosts, []).append(outlier.what)
    return names


def test_seven_planted_deviations_and_nothing_else() -> None:
    nodes = fleet(1, planted=planted())
    names = by_hosts(outliers(nodes))
    assert names == {
        ("gpu-003", "gpu-011"): ["loaded driver version"],
        ("gpu-017",): ["bf16 products in GB/s"],
        ("gpu-023",): ["pcie width current"],
        ("gpu-031",): ["number of pci io"],
        ("gpu-037",): ["sysctl vm.swappiness"],
        ("gpu-041",): ["vbios version"],
        ("gpu-047",): ["transparent hugepages"],
    }, names


@pytest.mark.parametrize("seed", range(effort(3, 20)))
def test_a_healthy_fleet_has_no_outlier(seed: int) -> None:
    nodes = fleet(seed + 100, nodes=effort(20, 40))
    assert outliers(nodes) == []


@pytest.mark.parametrize(
    ("drop", "add", "expected"),
    [
        ("topology.document.links[", {"topology.document.links[GPU0]": "PIX"}, "topology links: PIX, usual NODE, SYS"),
        ("cpu.nodes", {"cpu.nodes[0].present": True, "cpu.nodes[1].present": True}, "cpu nodes: 2, usual empty"),
        ("smi.document.messages", {}, None),
        (
            "nvlink.document.gpus[",
            {"nvlink.document.gpus[a].present": True},
            "number of GPUs by nvidia-smi nvlink: 1, ",
        ),
    ],
)
def test_an_outlier_in_words(drop: str, add: dict[str, Scalar], expected: str | None) -> None:
    """Cases from recorded machines: a set has no size in the text, and a list with elements is not absent."""

    def edit(node: Snapshot) -> Snapshot:
        return facts_with(**add)(without(drop)(node))

    texts = [outlier.text for outlier in outliers(fleet(5, 8, {3: edit}))]
    assert len(texts) == (expected is not None), texts
    assert all(text.startswith(str(expected)) for text in texts), texts


def test_small_groups_have_no_verdict() -> None:
    two = fleet(1, nodes=2, planted={0: newer_driver})
    assert outliers(two) == []
    slow = fleet(1, nodes=1, planted={0: slow_gpu})
    assert outliers(slow) == [], "four figures of a kind are too few"


def test_a_fleet_between_two_drivers_is_mixed() -> None:
    nodes = fleet(1, nodes=10, planted=dict.fromkeys(range(4), newer_driver))
    deviations = outliers(nodes)
    assert [(outlier.kind, outlier.what) for outlier in deviations if "driver version" in outlier.what] == [
        ("mixed", "loaded driver version")
    ]
    assert "999.10.01 on 4 nodes" in str(deviations[0].found)


def test_a_node_against_its_rack() -> None:
    nodes = fleet(1, nodes=10, planted=dict.fromkeys(range(5), newer_driver))
    racks = {node.host: "rack-a" if number in (0, 1, 2, 3, 5) else "rack-b" for number, node in enumerate(nodes)}
    deviations = [outlier for outlier in outliers(nodes, racks) if outlier.kind == "value"]
    assert sorted((outlier.hosts, outlier.group.rpartition(" ")[2]) for outlier in deviations) == [
        (("gpu-004",), "rack-b"),
        (("gpu-005",), "rack-a"),
    ]


@pytest.mark.parametrize(
    ("values", "expected"), [([1, 1, 1], 0), ([0, 3, 12], 12), ([10, 12, 1, 4], 6), ([7], 0), ([], 0)]
)
def test_growth_of_a_counter_that_a_reboot_resets(values: list[float], expected: float) -> None:
    assert growth(values) == expected


@pytest.mark.parametrize(
    ("temperatures", "rising"),
    [
        ([30 + day for day in range(10)], True),
        ([30, 31, 30, 29, 31, 30, 30, 31, 30, 29], False),
        ([30, 40, 50], False),
        ([30] * 9 + [60], False),
    ],
    ids=["warmer every day", "noise", "too few points", "one warm day"],
)
def test_temperature_at_idle(temperatures: list[float], rising: bool) -> None:
    runs = [
        (f"2026-11-{day:02d}T09:00:00Z", Snapshot(host="n", level="quick", idle_temperatures_c={"GPU-1": float(value)}))
        for day, value in enumerate(temperatures, start=1)
    ]
    assert [trend.kind for trend in trends("n", runs)] == ["temperature"] * rising


def test_a_bandwidth_that_falls() -> None:
    runs = [
        (
            f"2026-11-{day:02d}T09:00:00Z",
            Snapshot(
                host="n",
                level="quick",
                figures=(FigureValue(metric="host_to_device", component="gpu1", value=50.0 - 0.5 * day),),
            ),
        )
        for day in range(1, 21)
    ]
    (trend,) = trends("n", runs)
    assert trend.text == "gpu1: host to device -21% in 19 days (20 points)"


def test_a_clock_that_went_back_changes_no_trend() -> None:
    days = (1, 2, 20, 3, 4, 5, 6)
    path = "smi.document.gpus[GPU-1].pcie.replays"
    runs = [
        (f"2026-11-{day:02d}T09:00:00Z", Snapshot(host="n", level="quick", counters={path: float(number)}))
        for number, day in enumerate(days)
    ]
    (trend,) = trends("n", runs)
    assert (trend.change, trend.days, trend.points) == (6, 19, 7)
