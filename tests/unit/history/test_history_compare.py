"""Comparison: what changed is named, and nothing else."""

import json
import random
import re
from collections.abc import Iterator
from typing import get_args

import pytest
from effort import effort
from snapshots import NODE, edited, good, in_command, in_file, raw, snapshot, swapped

from gpunode.checks import Finding, Status
from gpunode.checks.registry import FigureReport
from gpunode.facts.models import Fact
from gpunode.facts.node import NodeFacts
from gpunode.history.compare import Change, Comparison, RunOrigin, compare, compare_runs
from gpunode.history.snapshot import Scalar, Snapshot, figures_of, verdicts_of
from gpunode.report.comparison import as_markdown, as_text

SMI = "nvidia-smi-xml"
MIRROR = {"worse": "better", "better": "worse", "other": "other"}
VOLATILE = (
    in_command(SMI, r"<gpu_temp>\d+ C", "<gpu_temp>77 C"),
    in_command(SMI, r"<performance_state>P8", "<performance_state>P0"),
    in_command(SMI, r"<current_link_gen>4", "<current_link_gen>1"),
    in_command(SMI, r"<graphics_clock>\d+ MHz", "<graphics_clock>345 MHz", times=1),
    in_command(SMI, r"<replay_counter>0", "<replay_counter>3"),
    in_command(SMI, r"<gpu_util>0 %", "<gpu_util>97 %"),
    in_command("df-local", "180837624", "1024"),
    in_file("/sys/bus/pci/devices/0000:16:00.0/current_link_speed", "2.5 GT/s PCIe"),
    in_file("/sys/bus/pci/devices/0000:16:00.0/power_state", "D3hot"),
    in_file("/proc/uptime", "7.00 1.00"),
    in_file("/proc/loadavg", "9.00 9.00 9.00 1/1 1"),
)


def with_facts(node: Snapshot, facts: dict[str, Scalar]) -> Snapshot:
    return node.model_copy(update={"facts": {**(node.facts or {}), **facts}})


def changes(before: Snapshot, after: Snapshot) -> list[Change]:
    return list(compare(before, after).changes)


def words(differences: list[Change]) -> list[tuple[str, str, str]]:
    return [(change.effect, change.component, change.what) for change in differences]


def test_values_that_vary_on_an_unchanged_node_are_no_change() -> None:
    busy = edited(*VOLATILE)
    assert changes(good(), busy) == []
    assert busy != good(), "the counters and temperatures are kept for trends"


def test_names_of_volatile_facts_are_fields() -> None:
    def below(kind: type[Fact]) -> Iterator[type[Fact]]:
        yield kind
        for each in kind.__subclasses__():
            yield from below(each)

    kinds = list(below(Fact))
    assert [kind for kind in kinds if (kind.VOLATILE | kind.COUNTERS) - set(kind.model_fields)] == []
    assert sum(bool(kind.VOLATILE or kind.COUNTERS) for kind in kinds) > 15
    assert "packages" not in NodeFacts.VOLATILE


STABLE = {
    ("SmiGpu", "slowdown_temperature_c"),
    ("SmiGpu", "slowdown_tlimit_c"),
    ("SmiGpu", "memory_max_temperature_c"),
    ("KeyFile", "modified_s"),
    ("PendingUpdate", "since"),
    ("LibraryFile", "used"),
    ("Unit", "load"),
    ("NodeFacts", "time_sync"),
}
"""Facts with names that look like those of a reading, and that no unchanged node changes."""


def test_a_fact_with_the_name_of_a_reading_is_volatile() -> None:
    reading = re.compile(r"(?<!per)(^|_)(s|us|c|pid|since|time|offset|free|used|load|sub|events|uptime)(_|$)|_percent$")
    seen: set[type] = set()

    def models(kind: object, volatile: bool) -> Iterator[tuple[str, str]]:
        if isinstance(kind, type) and issubclass(kind, Fact) and kind not in seen and not volatile:
            seen.add(kind)
            for name, info in kind.model_fields.items():
                excepted = name in kind.VOLATILE | kind.COUNTERS
                if reading.search(name) and not excepted and (kind.__name__, name) not in STABLE:
                    yield kind.__name__, name
                yield from models(info.annotation, excepted)
        for each in get_args(kind):
            yield from models(each, volatile)

    assert list(models(NodeFacts, volatile=False)) == []
    assert len(seen) > 60


def test_any_change_of_one_fact_is_one_change_and_its_way_back_is_the_opposite() -> None:
    facts = good().facts
    assert facts is not None
    chance = random.Random(35)  # noqa: S311
    paths = [path for path in facts if not path.endswith("].present")]
    for path in chance.sample(paths, effort(150, len(paths))):
        value = facts[path]
        other = not value if isinstance(value, bool) else value * 2 + 7 if not isinstance(value, str) else f"{value}x"
        after = with_facts(good(), {path: other})
        forward, back = changes(good(), after), changes(after, good())
        follows = path.endswith(".version") and f"{path.removesuffix('.version')}.file" in facts
        assert len(forward) == len(back) == 1, (path, follows)
        assert forward[0].effect == MIRROR[back[0].effect], path
        assert (forward[0].before, forward[0].after) == (back[0].after, back[0].before) == (value, other)


def test_a_new_driver_is_named_and_nothing_else() -> None:
    old = good().stack.driver or ""
    differences = changes(good(), edited(swapped(old, "999.10.01")))
    assert {change.effect for change in differences} == {"other"}
    assert {change.section for change in differences} == {"driver", "firmware", "package", "library"}
    assert all(old in str(change.before) and "999.10.01" in str(change.after) for change in differences)


def without_gpu(text: str, slot: str) -> str:
    """The node without one of its GPUs, which neither the bus nor the driver lists."""
    document = json.loads(text)
    smi = document["commands"][SMI]
    smi["stdout"], number = re.subn(
        rf'<gpu id="0000{slot}">.*?</gpu>\s*', "", smi["stdout"], flags=re.DOTALL | re.IGNORECASE
    )
    assert number == 1
    smi["stdout"] = smi["stdout"].replace("<attached_gpus>4", "<attached_gpus>3")
    document["files"] = {path: value for path, value in document["files"].items() if slot not in path}
    return json.dumps(document)


def test_a_lost_gpu_is_named_by_its_serial_number_and_the_others_keep_theirs() -> None:
    gone = good().gpus[2]
    after = snapshot(without_gpu(raw(), gone.slot or ""))
    differences = changes(good(), after)
    removed = [change for change in differences if change.what == "GPU"]
    assert [(change.effect, change.component, change.after) for change in removed] == [("worse", "gpu2", None)]
    assert f"serial {gone.serial}" in str(removed[0].before)
    assert str(gone.uuid) in str(removed[0].before)
    assert [change.component for change in differences if change.component.startswith("gpu")] == ["gpu2"], words(
        differences
    )
    assert ("worse", "node", "attached gpus") in words(differences)
    back = changes(after, good())
    assert ("better", "gpu2", "GPU") in words(back)


def test_a_gpu_that_only_nvidia_smi_still_lists_is_lost() -> None:
    gone = good().gpus[2]
    document = json.loads(raw())
    document["files"] = {path: text for path, text in document["files"].items() if (gone.slot or "") not in path}
    differences = changes(good(), snapshot(json.dumps(document)))
    assert ("worse", "gpu2", "GPU") in words(differences)
    assert [change for change in differences if change.component == "gpu2" and change.what != "GPU"] == []


def test_a_replaced_card_is_a_change_and_no_fault() -> None:
    old = good().gpus[0]
    after = edited(swapped(str(old.uuid), "GPU-ffffffff-0000-4000-8000-000000000000"), swapped(str(old.serial), "42"))
    assert words(changes(good(), after)) == [("other", "gpu0", "GPU replaced")]


def test_another_machine_under_the_same_name() -> None:
    comparison = compare(good(), good(NODE + 6, "gpu-01"))
    assert comparison.other_hardware
    assert words(list(comparison.changes))[0] == ("other", "node", "another machine under this name")


def test_a_link_that_is_narrower_and_nvlinks_that_are_down_are_worse() -> None:
    links = f"nvlink.document.gpus[{good().gpus[0].uuid}].links"
    before = with_facts(good(), {links: "18 active at 26.562 GB/s"})
    narrow = edited(in_command(SMI, "<current_link_width>16x", "<current_link_width>8x", times=1))
    after = with_facts(narrow, {links: "17 active at 26.562 GB/s, 1 inactive"})
    assert words(changes(before, after)) == [("worse", "gpu0", "links"), ("worse", "gpu0", "pcie width current")]


def test_a_fact_that_is_unknown_now_is_not_compared_and_named() -> None:
    broken = edited(in_command(SMI, ".*", "Failed to initialize NVML: Driver/library version mismatch\n", times=1))
    comparison = compare(good(), broken)
    assert "smi" in comparison.not_compared
    assert ("worse", "node", "nvidia-smi") in words(list(comparison.changes))
    assert not [change for change in comparison.changes if change.what == "GPU"], (
        "the cards are still listed by the driver"
    )


def finding(check: str, status: str, component: str = "node", *, figure: float | None = None) -> Finding:
    report = None if figure is None else FigureReport(metric="host_to_device")
    return Finding(check=check, status=Status(status), component=component, message="m", measured=figure, figure=report)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([("c.d", "pass")], [("c.d", "fail", "gpu1")], [("worse", "gpu1", "c.d")]),
        ([("c.d", "fail", "gpu1")], [("c.d", "pass")], [("better", "gpu1", "c.d")]),
        ([("c.d", "pass")], [("c.d", "error")], [("worse", "node", "c.d")]),
        ([("c.d", "warn", "gpu1")], [("c.d", "fail", "gpu1")], [("worse", "gpu1", "c.d")]),
        ([("c.d", "pass")], [("c.d", "skip")], [("other", "node", "c.d")]),
        ([("c.d", "fail", "gpu1")], [("c.d", "fail", "gpu1")], []),
        ([("c.d", "pass")], [("c.e", "fail")], []),
        (
            [("c.d", "fail", f"gpu{number}") for number in range(10_000)],
            [("c.d", "pass")],
            [("better", f"gpu{number}", "c.d") for number in sorted(map(str, range(10_000)))[:100]],
        ),
    ],
)
def test_verdicts(before: list[tuple[str, ...]], after: list[tuple[str, ...]], expected: list[tuple[str, ...]]) -> None:
    old, new = (
        Snapshot(
            host="n", level="quick", simulated=False, facts={}, verdicts=verdicts_of(finding(*each) for each in rows)
        )
        for rows in (before, after)
    )
    assert sorted(words(changes(old, new))) == sorted(expected)


@pytest.mark.parametrize(
    ("before", "after", "effects"),
    [
        ([50.0] * 8, [50.0] * 7 + [44.0], ["worse"]),
        ([50.0] * 8, [50.0] * 7 + [48.0], []),
        ([50.0] * 8, [60.0] + [50.0] * 7, ["better"]),
        ([50, 45, 55, 44, 56, 50, 47, 53], [50, 45, 55, 44, 56, 50, 47, 45], []),
    ],
    ids=["slower", "within 5 %", "faster", "within the noise of its siblings"],
)
def test_figures_beyond_the_noise_of_both_runs(before: list[float], after: list[float], effects: list[str]) -> None:
    old, new = (
        Snapshot(
            host="n",
            level="standard",
            simulated=False,
            facts={},
            figures=figures_of(
                finding("p.c", "pass", f"gpu{number}", figure=figure) for number, figure in enumerate(figures)
            ),
        )
        for figures in (before, after)
    )
    assert [change.effect for change in changes(old, new)] == effects


def test_counters_that_no_healthy_node_increases_are_worse() -> None:
    after = edited(in_command(SMI, r"<remapped_row_unc>0", "<remapped_row_unc>12", times=1))
    differences = changes(good(), after)
    assert words(differences) == [("worse", "gpu0", "remapped rows uncorrectable")]
    assert (differences[0].before, differences[0].after) == (0, 12)


def runs(before: list[Snapshot], after: list[Snapshot]) -> Comparison:
    return compare_runs(before, after, (RunOrigin(name="a"), RunOrigin(name="b")))


def test_a_fleet_in_text_and_markdown() -> None:
    before = [good().model_copy(update={"host": f"gpu-{number:02d}"}) for number in range(40)]
    changed = with_facts(good(), {"loaded_driver.version": "999.10.01"})
    after = [changed.model_copy(update={"host": node.host}) for node in before[:39]]
    unreached = Snapshot(host="gpu-39", level="quick")
    comparison = runs([*before, good(host="gone")], [*after, unreached, good(host="new")])
    text = as_text(comparison)
    assert text.count("gpu-[00-38]: loaded driver version: ") == 1
    assert "only in the first run: gone\n" in text
    assert "only in the second run: new\n" in text
    assert "not reached in the second run: gpu-39\n" in text
    assert text.endswith("a -> b: 39 nodes, 39 changed: 0 worse, 0 better, 39 other\n")
    table = as_markdown(comparison)
    assert table.count("\n|") == 3
    assert all(line.count("|") == 5 for line in table.splitlines() if line.startswith("|"))


def test_no_change_in_text() -> None:
    assert as_text(runs([good()], [good()])) == "a -> b: 1 node, no change\n"


@pytest.mark.parametrize(
    ("before", "after", "effect"),
    [(False, None, "other"), (None, False, "other"), (False, True, "worse"), (True, None, "better")],
)
def test_a_fault_that_was_not_there_is_no_improvement(before: bool | None, after: bool | None, effect: str) -> None:
    path = f"smi.document.gpus[{good().gpus[0].uuid}].reset_required"

    def side(value: bool | None) -> Snapshot:
        facts = {key: fact for key, fact in (good().facts or {}).items() if key != path}
        return good().model_copy(update={"facts": facts if value is None else {**facts, path: value}})

    assert [change.effect for change in compare(side(before), side(after)).changes] == [effect]
