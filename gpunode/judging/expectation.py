"""What nodes are expected to be: the site's file of --expect, which --write-expect writes, and that of --baseline."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gpunode.catalog import load
from gpunode.checks import Baseline, Expectation
from gpunode.checks.measurements import DROP_FAILS
from gpunode.checks.packages import driver_packages, present
from gpunode.checks.rdma import ports
from gpunode.checks.registry import Status
from gpunode.errors import UsageError
from gpunode.expectations import is_metric
from gpunode.judging.report import NodeReport, Report
from gpunode.judging.request import EvaluatedNode
from gpunode.text import counted, listed, unknown
from gpunode.whole import exists, write_whole
from gpunode.yaml_file import first_error, read_mapping

COMPLETE_SINCE = 450
"""Driver branches from this one to the newest are all in the catalog; an older or a newer one may lack in it."""


def read_expectation(path: Path) -> Expectation:
    """Read the YAML file; raise UsageError with one line that names file, key and the expected value."""
    content, pairs = read_mapping("--expect", path, ", ".join(Expectation.model_fields))
    for key in content:
        if key not in Expectation.model_fields:
            raise UsageError(f"--expect {path}: {unknown('key', str(key), Expectation.model_fields)}")
    for name in ("driver", "kernel"):
        if type(content.get(name)) in (int, float):
            # 570.10 is not 570.1: values that YAML parses as numbers are read as they are written.
            content[name] = next((value.value for key, value in pairs if key.value == name), content[name])
    try:
        expectation = Expectation.model_validate(content, strict=True)
    except ValidationError as err:
        raise UsageError(f"--expect {path}: {first_error(err)}") from None
    _names_must_be_known(expectation, path)
    return expectation


def _names_must_be_known(expectation: Expectation, path: Path) -> None:
    """Raise UsageError for a model or a driver branch that the catalog does not have."""
    names = [("model", "model", expectation.model), ("driver", "driver", expectation.driver)]
    names += [(f"allowed: {allowed.key}", allowed.key, str(allowed.value)) for allowed in expectation.allowed or ()]
    for key, field, name in names:
        try:
            if field == "model" and name is not None:
                load().find_gpu(name)
            elif field == "driver" and name is not None and COMPLETE_SINCE <= _branch(name) <= _newest():
                load().branch_of(name)
        except UsageError as err:
            raise UsageError(f"--expect {path}: {key}: {err}") from None


def _branch(driver: str) -> int:
    return int(driver.split(".", maxsplit=1)[0])


def _newest() -> int:
    return max(int(branch) for branch in load().branches)


GOOD = (Status.PASS, Status.NOTE, Status.WARN, Status.SKIP)
"""A figure that failed is not used as an expectation."""


def read_baselines(path: Path) -> dict[str, Baseline]:
    """Read a report and return the figures of its nodes by host. Raises UsageError with one line."""
    try:
        content = path.read_bytes()
    except OSError as err:
        raise UsageError(f"--baseline {path}: cannot be read: {err.strerror}") from None
    report = report_of(content, f"--baseline {path}")
    all_nodes = {node.host: of_node(node, f"{path.name} of {report.finished_at}") for node in report.nodes}
    baselines = {host: baseline for host, baseline in all_nodes.items() if baseline.figures}
    if not baselines:
        raise UsageError(
            f"--baseline {path}: it contains no figure of a real GPU: run gpunode validate --level standard first"
        )
    return baselines


def report_of(content: bytes, where: str) -> Report:
    """Parse a report. Raises UsageError with one line that names ``where``."""
    try:
        return Report.model_validate(json.loads(content))
    except (ValueError, RecursionError) as err:
        detail = first_error(err) if isinstance(err, ValidationError) else str(err)
        raise UsageError(f"{where}: not a report of gpunode validate --format json: {detail}") from None


def without_figures(path: Path, nodes: Iterable[NodeReport], baselines: Mapping[str, Baseline]) -> str | None:
    """Return a line that names the nodes without a figure in the report; None: there are none."""
    # Of two bundles of one host, the second has its file after the name; of an unreachable node it is unknown whether
    # it is simulated.
    reached = [node.host for node in nodes if node.simulated is not None]
    absent = [host for host in reached if host.partition(" (")[0] not in baselines]
    return f"--baseline {path}: it has no figure of {listed(absent, most=5)}: not compared" if absent else None


def of_node(node: NodeReport, origin: str) -> Baseline:
    """Return a node's figures that can be expected again; none of a simulated node."""
    figures: dict[tuple[str, str, int | None], float] = {}
    for finding in node.findings:
        figure, measured = finding.figure, finding.measured
        if figure is None or finding.status not in GOOD or not is_metric(figure.metric):
            continue
        if isinstance(measured, int | float) and measured > 0:
            key = (figure.metric, finding.component, figure.message_bytes)
            # If two programs measured the same, the slower one is used: the other's figure does not describe this one.
            figures[key] = min(float(measured), figures.get(key, inf))
    return Baseline(origin, {} if node.simulated else figures)


DIGITS = 4
SETTINGS = "settings"
"""Name of the extract ``settings_of``."""


def must_be_writable(path: Path, *, measures: bool) -> None:
    """Raise UsageError before anything is measured: an existing file of a user is not replaced."""
    if not measures:
        raise UsageError("--write-expect needs measurements: --level standard or deep, and checks that judge them")
    if exists(path) or path.is_symlink():
        raise UsageError(f"--write-expect {path}: the file exists: choose another one, or remove it")
    if not path.parent.is_dir():
        raise UsageError(f"--write-expect {path}: {path.parent} is not a directory")


def settings_of(node: EvaluatedNode) -> dict[str, Any]:
    """Return the versions, settings and links of a node that the site's file can name; called in the node's child."""
    facts = node.facts
    # The driver's own packages follow from its version.
    of_driver = {package.name for packages in driver_packages(facts).by_origin.values() for package in packages}
    versions = defaultdict[str, set[str]](set)
    for package in facts.packages or ():
        if present(package) and package.name not in of_driver:
            versions[package.name].add(package.version)
    modes = {gpu.mig_mode for gpu in facts.smi_gpus}
    rates = [port.rate_gbit_per_s for _, _, port in ports(facts) if port.state == "ACTIVE"]
    firmware = {device.firmware for device in facts.infiniband or ()}
    settings = {
        "kernel": facts.running_kernel,
        "packages": {name: min(installed) for name, installed in sorted(versions.items()) if len(installed) == 1},
        "mig": modes.pop() if len(modes) == 1 else None,
        "nics": len(rates) or None,
        "nic_rate_gbit_per_s": min((rate for rate in rates if rate is not None), default=None),
        "nic_firmware": sorted(str(version) for version in firmware) if None not in firmware else None,
    }
    return {key: value for key, value in settings.items() if value is not None and value not in ([], {})}


def write_expectation(path: Path, nodes: Iterable[NodeReport], settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Write what the measured nodes have in common, and the lowest figure of each metric, less the permitted deviation.

    ``settings`` are those of each host. Raises UsageError if there is no figure.
    """
    by_metric: defaultdict[str, list[float]] = defaultdict(list)
    hosts, measured = list[str](), list[NodeReport]()
    for node in nodes:
        figures = of_node(node, "").figures
        hosts += [node.host] if figures else []
        measured += [node] if figures else []
        for (metric, _, _), value in figures.items():
            by_metric[metric].append(value)
    if not by_metric:
        raise UsageError(f"--write-expect {path}: no passed figure of a real GPU: nothing was written")
    share = 1 - DROP_FAILS.value
    least = {metric: float(f"{min(values) * share:.{DIGITS}g}") for metric, values in sorted(by_metric.items())}
    nodes_read = counted(len(hosts), "node")
    head = f"# Written by gpunode validate --write-expect: {share:g} of the lowest figure of {nodes_read}."
    write_whole(path, f"{head}\n{yaml.safe_dump({**in_common(measured, settings), 'figures': least}, sort_keys=False)}")


def in_common(nodes: Iterable[NodeReport], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return GPUs, versions, settings and links for the site's file: each, and each package, if all nodes agree."""
    rows = [
        {
            "gpus": node.hardware.gpus if node.hardware else None,
            "model": node.hardware.gpu_model if node.hardware else None,
            "driver": node.stack.driver,
            **dict.fromkeys(("kernel", "packages", "mig", "nics", "nic_rate_gbit_per_s", "nic_firmware")),
            **settings.get(node.host, {}),
        }
        for node in nodes
    ]
    shared = set.intersection(*({*(row["packages"] or {}).items()} for row in rows))
    for row in rows:
        row["packages"] = dict(sorted(shared)) or None
    return {key: value for key, value in rows[0].items() if value is not None and all(r[key] == value for r in rows)}
