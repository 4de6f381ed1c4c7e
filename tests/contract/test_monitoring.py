"""What Prometheus makes of our metrics and rules, by its own promtool; and the dashboard's queries."""

import json
import random
import re
import shutil
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from bundles import apply, findings, hgx, hgx_measured
from effort import effort
from machines import Document
from mutants_gpu import MUTANTS as OF_GPUS
from mutants_host import MUTANTS as OF_HOSTS
from mutants_links import MUTANTS as OF_LINKS
from programs import run_program

from gpunode.checks import Finding, GpuIdentity, Hardware, Identity, RunningStack, State, Status, registry
from gpunode.judging.report import NodeReport, Report, judged, report, unreachable
from gpunode.report import monitoring
from gpunode.report.monitoring import COLUMNS, dashboard
from gpunode.report.prometheus import CODES, FAMILIES, MOST_COMPONENTS, as_text

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: package prometheus")
SERIES = re.compile(
    r'(?P<name>\w+)(?P<labels>\{\w+="(?:[^"\\\n]|\\["\\n])*"(?:,\w+="(?:[^"\\\n]|\\["\\n])*")*\}) (?P<value>\S+)'
)
"""One line by the format's specification."""
PLANTED = [
    next(mutant for mutant in table if mutant.becomes is Status.FAIL and mutant.base is hgx)
    for table in (OF_GPUS, OF_HOSTS, OF_LINKS)
]
NOW = "2026-11-23T12:00:00Z"
RULES = monitoring.rules(registry, max_age_s=1200)


def promtool(*words: object, stdin: str | None = None) -> str:
    """Run it; it must accept what it is given."""
    assert PROMTOOL is not None
    done = run_program([PROMTOOL, *words], limit_s=120, stdin=stdin)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def of(*nodes: NodeReport) -> str:
    return as_text(report(nodes, level="quick", version="0.1", started_at=NOW, finished_at=NOW))


def node(host: str, reported: Sequence[Finding], **more: Any) -> NodeReport:
    return judged(host, Identity(simulated=True, stack=RunningStack(**more), gpus=()), reported, 1.5)


def series(text: str) -> dict[str, float]:
    """The lines of the metrics: each is well-formed, and each series is there once."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# "):
            known = r"# (HELP gpunode_\w+ [^\n]+|TYPE gpunode_\w+ gauge|no node was judged)"
            assert re.fullmatch(known, line), line
            continue
        match = SERIES.fullmatch(line)
        assert match is not None, line
        assert match["name"] in FAMILIES
        key = match["name"] + match["labels"]
        assert key not in values, f"twice: {key}"
        values[key] = float(match["value"])
    return values


@needs_promtool
def test_promtool_accepts_the_metrics_of_real_reports() -> None:
    text = of(node("gpu-01", findings(hgx())), node("gpu-02", findings(hgx_measured())), unreachable("gpu-03", "no", 1))
    assert len(series(text)) > 300
    assert {name for name in FAMILIES if f"# TYPE {name} " not in text} == {
        "gpunode_check_observed_status", "gpunode_check_components_left_out", "gpunode_node_gpus", "gpunode_gpu_info",
    }  # fmt: skip
    assert promtool("check", "metrics", stdin=text) == ""


def test_figures_are_in_base_units() -> None:
    figures = [finding for finding in findings(hgx_measured()) if finding.figure is not None]
    factors = {"GB/s": ("bytes_per_second", 1e9), "TFLOPS": ("flops", 1e12)}
    expected: set[tuple[str, float]] = set()
    for finding in figures:
        if isinstance(finding.measured, float):
            name, factor = factors[str(finding.unit)]
            expected.add((f"gpunode_figure_{name}", round(finding.measured * factor)))
    values = series(of(node("n", figures))).items()
    names = {f"gpunode_figure_{name}" for name, _ in factors.values()}
    shown = {(name, round(value)) for key, value in values if (name := key.partition("{")[0]) in names}
    assert {name for name, _ in expected} == names
    assert shown == expected
    limits = [value for key, value in values if key.startswith("gpunode_figure_limit_ratio")]
    assert limits
    assert all(0 < value < 1.2 for value in limits)


def test_a_saved_bundle_has_no_time_of_its_own() -> None:
    """The time of the replay would make old data look fresh."""
    saved = judged("n", Identity(simulated=False, stack=RunningStack(), gpus=()), findings(hgx()), None)
    assert "gpunode_verdict_timestamp_seconds" not in of(saved)
    live = of(saved.model_copy(update={"seconds": 0.5}))
    assert series(live)['gpunode_verdict_timestamp_seconds{host="n"}'] == 1795435200


NASTY = [
    '"',
    "\\",
    "\n",
    "\r",
    "\t",
    "{",
    "}",
    ",",
    "=",
    " ",
    "\x00",
    "\x1b[31m",
    "\u202e",
    "\u2028",
    "\ud800",
    "é",
    "漢",
    "{{",
    "#",
]


def nasty_text(random_: random.Random) -> str:
    return "".join(random_.choice([*NASTY, "gpu", "0"]) for _ in range(random_.randrange(1, 400)))


def nasty_report(seed: int) -> Report:
    random_ = random.Random(seed)  # noqa: S311

    def finding() -> Finding:
        status = random_.choice(list(Status))
        measured = random_.choice([None, True, "x", 3, -1.5, 1e300])
        component = random_.choice(["node", "gpu0", nasty_text(random_)])
        observed = random_.choice([None, None, "the policy"])
        return Finding(
            check=random_.choice(["gpu.present", "host.time", nasty_text(random_)]), status=status, component=component,
            message=nasty_text(random_), measured=measured, unit=random_.choice([None, "GB/s", nasty_text(random_)]),
            observed=observed,
        )  # fmt: skip

    def nasty() -> NodeReport:
        text = nasty_text(random_)
        hardware = Hardware(product=nasty_text(random_), gpus=random_.choice([None, 8]))
        gpus = tuple(GpuIdentity(index=at, name=nasty_text(random_), uuid=text) for at in range(2))
        identity = Identity(simulated=False, stack=RunningStack(os=text, kernel=text), gpus=gpus, hardware=hardware)
        return judged(random_.choice([text, "same"]), identity, [finding() for _ in range(30)], 1.0)

    return report(
        [nasty() for _ in range(3)], level="quick", version=nasty_text(random_), started_at="", finished_at=NOW
    )


@needs_promtool
def test_any_text_of_a_node_is_escaped_and_bounded() -> None:
    texts = [as_text(nasty_report(seed)) for seed in range(effort(40, 400))]
    for text in texts:
        values = series(text)
        assert values
        assert text.isprintable() or set(text) - set("\n") == {char for char in text if char.isprintable()}
        text.encode("utf-8")
        assert max(map(len, values)) < 3000
    for text in texts[:: max(1, len(texts) // 4)]:
        promtool("check", "metrics", stdin=text)


def test_ten_thousand_findings_are_bounded_and_the_worst_is_among_them() -> None:
    many = [Finding(check="a.b", status=Status.PASS, component=f"link {n}", message="") for n in range(10_000)]
    many.append(Finding(check="a.b", status=Status.FAIL, component="last", message=""))
    values = series(of(node("n", many)))
    assert sum(key.startswith("gpunode_check_status") for key in values) == MOST_COMPONENTS
    assert values['gpunode_check_status{host="n",check="a.b",component="last"}'] == CODES[Status.FAIL]
    assert values['gpunode_check_components_left_out{host="n",check="a.b"}'] == 10_001 - MOST_COMPONENTS
    assert series(of()) == {}


def test_of_two_findings_about_one_component_the_worse_counts() -> None:
    two = [Finding(check="a.b", status=status, component="gpu0", message="") for status in (Status.FAIL, Status.PASS)]
    for order in (two, two[::-1]):
        assert series(of(node("n", order)))['gpunode_check_status{host="n",check="a.b",component="gpu0"}'] == 4


def test_the_order_of_the_values_is_the_order_of_the_statuses() -> None:
    worst_first = sorted(CODES, key=lambda status: CODES[status], reverse=True)
    assert worst_first == [Status.FAIL, Status.ERROR, Status.WARN, Status.NOTE, Status.PASS, Status.SKIP]


# Rules


@cache
def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.load(RULES, yaml.CSafeLoader)["groups"] for rule in group["rules"]]


def test_every_check_has_an_alert_with_what_it_declares() -> None:
    by_name = {rule["alert"]: rule for rule in rules()}
    assert len(by_name) == len(rules())
    for check in registry:
        rule = by_name[monitoring.alert_name(check.id)]
        assert rule["labels"] == {"severity": monitoring.SEVERITIES[check.state], "category": check.category}
        assert f'check="{check.id}"' in rule["expr"]
        assert monitoring.literal(check.remedy) in rule["annotations"]["description"]
    assert {monitoring.SEVERITIES[state] for state in State} == {"critical", "warning", "info"}


def simulated(folder: Path, tests: Sequence[dict[str, Any]]) -> str:
    """Let promtool run the rules on given series."""
    (folder / "rules.yml").write_text(RULES, encoding="utf-8")
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return promtool("test", "rules", folder / "tests.yml")


def firing(at: str, names: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """What fires at a time: alert, host, component."""
    rows = [
        {"labels": "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}", "value": 1}
        for alert, host, component in names
        for labels in [
            {"alertname": alert} | ({"host": host} if host else {}) | ({"component": component} if component else {})
        ]
    ]
    expr = 'max by (alertname, host, component) (ALERTS{alertstate="firing"})'
    return {"expr": expr, "eval_time": at, "exp_samples": rows}


@cache
def planted() -> list[tuple[str, Document]]:
    return [(mutant.check, apply(mutant.base(), mutant.edits)) for mutant in PLANTED]


@needs_promtool
@pytest.mark.parametrize("check", [mutant.check for mutant in PLANTED])
def test_a_planted_fault_raises_its_alert_and_its_repair_resolves_it(check: str, tmp_path: Path) -> None:
    """The metrics are those of the whole way: raw text of a node, checks, report, format."""
    reported = findings(dict(planted())[check])
    faulty, healthy = series(of(node("gpu-01", reported))), series(of(node("gpu-01", findings(hgx()))))
    lines = [
        {
            "series": key,
            "values": (f"{faulty[key]:g}x9 " if key in faulty else "_x10 ")
            + (f"{healthy[key]:g}x9" if key in healthy else "stale"),
        }
        for key in {**healthy, **faulty}
        if not key.startswith("gpunode_verdict")
    ]
    failed = {finding.component for finding in reported if finding.check == check and finding.status is Status.FAIL}
    drained = any(finding.recommended_state is State.DRAIN for finding in reported)
    expected = [(monitoring.alert_name(check), "gpu-01", component) for component in failed]
    now = firing("5m", [*expected, *([("GpunodeDrain", "gpu-01", "")] if drained else [])])
    assert failed
    simulated(tmp_path, [{"interval": "1m", "input_series": lines, "promql_expr_test": [now, firing("15m", [])]}])


@needs_promtool
def test_each_check_raises_its_own_alert_and_no_other(tmp_path: Path) -> None:
    lines = [
        {
            "series": f'gpunode_check_status{{host="n",check="{check.id}",component="gpu{status}"}}',
            "values": f"{status}x9",
        }
        for check in registry
        for status in (CODES[Status.FAIL], CODES[Status.PASS], CODES[Status.NOTE], CODES[Status.SKIP])
    ]
    names = [(monitoring.alert_name(check.id), "n", f"gpu{CODES[Status.FAIL]}") for check in registry]
    assert "SUCCESS" in simulated(
        tmp_path, [{"interval": "1m", "input_series": lines, "promql_expr_test": [firing("5m", names)]}]
    )


OF_VERDICTS: tuple[tuple[dict[str, str], str, str | None], ...] = (
    # The tests of promtool begin at 0 seconds since 1970: a verdict of the first minute.
    ({"gpunode_verdict_timestamp_seconds": "0x60"}, "20m", None),
    ({"gpunode_verdict_timestamp_seconds": "0x60"}, "21m", "VerdictOld"),
    ({"gpunode_verdict_timestamp_seconds": "0+60x60"}, "50m", None),
    ({"up": "1x60"}, "9m", None),
    ({"up": "1x60"}, "11m", "VerdictMissing"),
    ({"up": "1x60", "gpunode_verdict_timestamp_seconds": "0+60x20 stale"}, "25m", None),
    ({"up": "1x60", "gpunode_verdict_timestamp_seconds": "0+60x20 stale"}, "32m", "VerdictMissing"),
    ({"up": "0x60"}, "6m", "NodeUnreachable"),
    ({"node_textfile_scrape_error": "1x60"}, "6m", "TextfileUnreadable"),
    ({"gpunode_node_recommended_state": "2x60"}, "1m", "Drain"),
    ({"gpunode_node_recommended_state": "1x60"}, "1m", None),
    ({"gpunode_check_status": "3x60"}, "14m", None),
    ({"gpunode_check_status": "3x60"}, "16m", "Undetermined"),
    ({"gpunode_check_status": "2x80"}, "61m", "Warned"),
)
"""Series, a time, and what fires then."""


@needs_promtool
def test_alerts_on_the_verdict(tmp_path: Path) -> None:
    """An old or missing verdict is reported, however the last one was."""
    labels = 'job="gpunode",instance="n:9100"'
    tests = []
    for lines, at, expected in OF_VERDICTS:
        inputs = [{"series": f"{name}{{{labels}}}", "values": text} for name, text in lines.items()]
        fires = firing(at, [(f"Gpunode{expected}", "", "")] if expected else [])
        tests.append({"interval": "1m", "input_series": inputs, "promql_expr_test": [fires]})
    names = {rule["alert"].removeprefix("Gpunode") for rule in rules() if rule["labels"]["category"] == "verdict"}
    assert names == {expected for _, _, expected in OF_VERDICTS if expected}
    simulated(tmp_path, tests)


@needs_promtool
def test_braces_of_a_remedy_are_no_template(tmp_path: Path) -> None:
    check = registry["gpu.present"].model_copy(
        update={"means": "docker --format '{{.ID}}' {{ $x }} {{{{", "id": "own.it"}
    )
    (tmp_path / "rules.yml").write_text(monitoring.rules([check], max_age_s=60), encoding="utf-8")
    promtool("check", "rules", tmp_path / "rules.yml")


@needs_promtool
def test_the_scrape_configuration_is_one(tmp_path: Path) -> None:
    text = monitoring.scrape({"gpu-01": "10.0.0.1", 'g"\n{{x}}': "fd00::1"})
    (tmp_path / "prometheus.yml").write_text(text, encoding="utf-8")
    promtool("check", "config", tmp_path / "prometheus.yml")
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert [group["targets"] for group in job["static_configs"]] == [["10.0.0.1:9100"], ["[fd00::1]:9100"]]


# Dashboard


def panels() -> list[dict[str, Any]]:
    document = json.loads(dashboard(registry))
    return [inner for panel in document["panels"] for inner in (panel, *panel.get("panels", ()))]


@needs_promtool
def test_the_queries_of_the_dashboard_are_of_our_metrics(tmp_path: Path) -> None:
    queries = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    assert len(queries) > 15
    recorded = [{"record": f"q{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "q", "rules": recorded}]}), encoding="utf-8"
    )
    promtool("check", "rules", tmp_path / "rules.yml")
    named = set(re.findall(r"\b(?:gpunode|node)_\w+", " ".join(queries)))
    assert named <= FAMILIES.keys()
    for check in registry:
        shown = [query for query in queries if check.id.replace(".", "[.]") in query]
        assert len(shown) == 1, check.id


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    shown = panels()
    assert len({panel["id"] for panel in shown}) == len(shown)
    # Required by Grafana's schema where there is a configuration of fields.
    assert all({"defaults", "overrides"} == panel["fieldConfig"].keys() for panel in shown if panel["type"] != "row")
    occupied: set[tuple[int, int]] = set()
    for panel in json.loads(dashboard(registry))["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= COLUMNS
        assert not cells & occupied
        occupied |= cells


def test_metrics_and_rules_agree() -> None:
    named = set(re.findall(r"\bgpunode_\w+", " ".join(rule["expr"] for rule in rules())))
    assert named <= FAMILIES.keys()
