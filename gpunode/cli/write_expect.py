"""``--write-expect``: GPUs, driver and figures of a run as the site's file of ``--expect``."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import yaml

from gpunode.checks.figures import DROP_FAILS
from gpunode.cli.writing import write_whole
from gpunode.errors import UsageError
from gpunode.judging.baseline import of_node
from gpunode.report import NodeReport
from gpunode.text import counted

DIGITS = 4


def must_be_writable(path: Path, *, measures: bool) -> None:
    """Raise UsageError before anything is measured: an existing file of a user is not replaced."""
    if not measures:
        raise UsageError("--write-expect needs measurements: --level standard or deep, and checks that judge them")
    if path.exists() or path.is_symlink():
        raise UsageError(f"--write-expect {path}: the file exists: choose another one, or remove it")
    if not path.parent.is_dir():
        raise UsageError(f"--write-expect {path}: {path.parent} is not a directory")


def write_expectation(path: Path, nodes: Iterable[NodeReport]) -> None:
    """Write what the measured nodes have in common, and the lowest figure of each metric, less the permitted deviation.

    Raises UsageError if there is no figure.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    hosts, measured = list[str](), list[NodeReport]()
    for node in nodes:
        figures = of_node(node, "").figures
        hosts += [node.host] if figures else []
        measured += [node] if figures else []
        for (metric, _, _), value in figures.items():
            found[metric].append(value)
    if not found:
        raise UsageError(f"--write-expect {path}: no passed figure of a real GPU: nothing was written")
    share = 1 - DROP_FAILS.value
    least = {metric: float(f"{min(values) * share:.{DIGITS}g}") for metric, values in sorted(found.items())}
    nodes_read = counted(len(hosts), "node")
    head = f"# Written by gpunode validate --write-expect: {share:g} of the lowest figure of {nodes_read}."
    write_whole(path, f"{head}\n{yaml.safe_dump({**in_common(measured), 'figures': least}, sort_keys=False)}")


def in_common(nodes: Iterable[NodeReport]) -> dict[str, int | str]:
    """Return number and model of the GPUs and the driver, for the site's file: each if all nodes agree."""
    rows = [
        {
            "gpus": node.hardware.gpus if node.hardware else None,
            "model": node.hardware.gpu_model if node.hardware else None,
            "driver": node.stack.driver,
        }
        for node in nodes
    ]
    return {key: value for key, value in rows[0].items() if value is not None and all(r[key] == value for r in rows)}
