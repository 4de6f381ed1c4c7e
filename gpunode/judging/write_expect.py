"""``--write-expect``: GPUs, versions, settings, links and figures of a run as the site's file of ``--expect``."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from gpunode.checks.measurements import DROP_FAILS
from gpunode.checks.packages import driver_packages, present
from gpunode.checks.rdma import ports
from gpunode.errors import UsageError
from gpunode.judging.baseline import of_node
from gpunode.judging.report import NodeReport
from gpunode.judging.request import EvaluatedNode
from gpunode.text import counted
from gpunode.whole import exists, write_whole

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
