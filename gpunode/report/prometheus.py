"""The report as metrics in Prometheus' text format, for node_exporter's textfile collector.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (read 2026-11-23). The collector refuses a file
with a series twice, and one with timestamps of its own.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gpunode.checks import Finding, Status
from gpunode.checks.actions import STATES
from gpunode.judging.report import WORST_FIRST, NodeReport, Report, counting
from gpunode.text import moment, printable

CODES: Mapping[Status, int] = {
    Status.SKIP: -1,
    Status.PASS: 0,
    Status.NOTE: 1,
    Status.WARN: 2,
    Status.ERROR: 3,
    Status.FAIL: 4,
}
"""Value of a status: ``max()`` of several is the worst."""
MOST_COMPONENTS = 512
"""Series of one check and node: beyond, the worst are kept. An HGX board has 144 NVLinks."""
MOST_CHARACTERS = 128
"""Of a label's value, which may be a node's own text."""
MEANING = ", ".join(f"{code} {status.value}" for status, code in CODES.items())
FAMILIES: Mapping[str, str] = {
    "gpunode_verdict_timestamp_seconds": "Time of the verdict on the node, in seconds since 1970; none for a saved "
    "bundle: its data are older.",
    "gpunode_verdict_duration_seconds": "Time that the collection of the node's data took.",
    "gpunode_node_status": f"Worst status of the node's checks: {MEANING}.",
    "gpunode_node_recommended_state": "Recommended state of the node in a scheduler: "
    f"{', '.join(f'{code} {state.value}' for code, state in enumerate(STATES))}.",
    "gpunode_node_simulated": "1 if the node is a lab node: the verdict does not apply to a real GPU.",
    "gpunode_node_gpus": "NVIDIA GPUs on the node's PCI bus.",
    "gpunode_node_findings": "Findings that count, by their status.",
    "gpunode_node_info": "Machine and software of the node; the value is always 1.",
    "gpunode_gpu_info": "GPU with the driver's identifiers; the value is always 1.",
    "gpunode_check_status": f"Status of a check for a component: {MEANING}.",
    "gpunode_check_observed_status": "The same of findings that a policy only observes.",
    "gpunode_check_components_left_out": "Components of a check beyond the limit of series; the worst are reported.",
    "gpunode_figure_bytes_per_second": "Measured bandwidth.",
    "gpunode_figure_flops": "Measured floating-point operations per second.",
    "gpunode_figure_limit_ratio": "Measured figure by the physical limit of the machine.",
    "gpunode_figure_expected_ratio": "Measured figure by the expected one.",
}
"""Names of the metrics, all gauges, with their help."""
SCALES: Mapping[str, tuple[str, float]] = {
    "GB/s": ("figure_bytes_per_second", 1e9),
    "TFLOPS": ("figure_flops", 1e12),
}
"""Unit of a figure, to the metric without its prefix, and the factor."""
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Sample:
    """One series with its value."""

    family: str
    labels: Labels
    value: float


def as_text(document: Report) -> str:
    """Return the metrics of all nodes, family by family."""
    series: dict[str, dict[Labels, float]] = {name: {} for name in FAMILIES}
    for node in document.nodes:
        for sample in _of_node(node, document):
            known = series[sample.family]
            # Of two findings about one component the worse counts.
            known[sample.labels] = max(sample.value, known.get(sample.labels, sample.value))
    lines = []
    for name, known in series.items():
        if known:
            lines += [f"# HELP {name} {FAMILIES[name]}", f"# TYPE {name} gauge"]
            lines += [f"{name}{{{_labels(labels)}}} {_number(value)}" for labels, value in known.items()]
    return "".join(f"{line}\n" for line in lines or ["# no node was judged"])


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels)


def escaped(text: str) -> str:
    """Return the value of a label: of limited length, printable, escaped, and valid UTF-8."""
    plain = printable(text).encode("utf-8", "replace").decode()
    if len(plain) > MOST_CHARACTERS:
        plain = f"{plain[: MOST_CHARACTERS - 1]}…"
    return plain.replace("\\", "\\\\").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _sampler(host: str) -> Callable[..., Sample]:
    """Return a function that makes samples of a node; labels without a value are left out."""

    def sample(name: str, value: float, /, **labels: object) -> Sample:
        rest = tuple((label, escaped(str(text))) for label, text in labels.items() if text is not None)
        return Sample(f"gpunode_{name}", (("host", escaped(host)), *rest), value)

    return sample


def _of_node(node: NodeReport, document: Report) -> Iterator[Sample]:
    sample = _sampler(node.host)
    finished = moment(document.finished_at)
    if finished is not None and node.seconds is not None:
        yield sample("verdict_timestamp_seconds", finished.timestamp())
        yield sample("verdict_duration_seconds", round(node.seconds, 3))
    yield sample("node_status", CODES[node.status])
    yield sample("node_recommended_state", STATES.index(node.recommended_state))
    if node.simulated is not None:
        yield sample("node_simulated", node.simulated)
    about = dict(node.stack)
    if node.hardware is not None:
        about |= {"product": node.hardware.product, "gpu_model": node.hardware.gpu_model}
        if node.hardware.gpus is not None:
            yield sample("node_gpus", node.hardware.gpus)
    yield sample("node_info", 1, gpunode=document.gpunode_version, level=document.level, **about)
    for gpu in node.gpus:
        yield sample("gpu_info", 1, component=f"gpu{gpu.index}", name=gpu.name, uuid=gpu.uuid)
    counts = Counter(finding.status for finding in counting(node.findings))
    for status in WORST_FIRST:
        yield sample("node_findings", counts[status], status=status.value)
    yield from _of_findings(node)


def _of_findings(node: NodeReport) -> Iterator[Sample]:
    sample = _sampler(node.host)
    checks: dict[tuple[str, bool], list[Finding]] = {}
    for finding in node.findings:
        checks.setdefault((finding.check, finding.observed is not None), []).append(finding)
        if finding.figure is not None:
            figure = {"metric": finding.figure.metric, "message_bytes": finding.figure.message_bytes}
            for name, value in _figures(finding):
                yield sample(name, value, component=finding.component, **figure)
    for (check, observed), findings in checks.items():
        name = "check_observed_status" if observed else "check_status"
        worst_first = sorted(findings, key=lambda finding: WORST_FIRST.index(finding.status))
        for finding in worst_first[:MOST_COMPONENTS]:
            yield sample(name, CODES[finding.status], check=check, component=finding.component)
        if len(findings) > MOST_COMPONENTS:
            yield sample("check_components_left_out", len(findings) - MOST_COMPONENTS, check=check)


def _figures(finding: Finding) -> Iterator[tuple[str, float]]:
    """Yield metric and value of a measured figure, in base units."""
    measured, expected = finding.measured, finding.expected
    if finding.figure is None or finding.unit is None or not isinstance(measured, int | float):
        return
    if finding.unit in SCALES:
        name, factor = SCALES[finding.unit]
        yield name, measured * factor
    if finding.figure.ratio is not None:
        yield "figure_limit_ratio", finding.figure.ratio
    if isinstance(expected, int | float) and expected:
        yield "figure_expected_ratio", round(measured / expected, 4)
