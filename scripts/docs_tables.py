"""The tables of the documentation's site that follow from the program: a page names one by ``<!-- table: NAME -->``."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpunode.catalog import Catalog
from gpunode.checks.measurements import GROSS
from gpunode.cli.checks import CheckEntry, check_list
from gpunode.cli.lookup import parse_command as parse
from gpunode.expectations import Figure, Mark, MarkRules, PhysicalLimit, Shape, limit_of, marks_of, of_platform
from gpunode.expectations.limits import Where
from gpunode.lab.hardware import describe, names
from gpunode.lab.packages.plan import contents, recorded_in
from gpunode.lab.packages.recorded import assumptions, recorded
from gpunode.lab.packages.rows import packages, repositories
from gpunode.lab.repositories import FAULTS as VENDOR_FAULTS
from gpunode.lab.simulator import faults
from gpunode.report.prometheus import FAMILIES
from gpunode.stack.rules import rules
from gpunode.text import counted

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"<!-- table: ([a-z-]+) -->\n")
COLUMNS = {
    "host to GPU": ("host_to_device", Where()),
    "GPU to GPU": ("peer_to_peer", Where(0, 1)),
    "memory": ("memory_read", Where()),
    "bf16": ("gemm_bf16", Where()),
    "all-reduce": ("all_reduce_busbw", Where()),
}
LARGE = 16 * 2**30
ROW_OF_MARK = re.compile(r"expectations\.yml (\S+): ")


def with_tables(text: str) -> str:
    """Return a page with each of its marks replaced by the table.

    Raises:
        KeyError: There is no table of that name.
    """
    return MARK.sub(lambda match: TABLES[match[1]](), text)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown; cells are Markdown already, but for bars."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def checks() -> str:
    """Return the table of all checks."""
    head = ["check", "category", "about", "kind", "root", "where", "for", "proven", "s", "on a failure"]
    return table(head, [check_row(entry) for entry in check_list().checks if entry.origin is None])


def check_row(entry: CheckEntry) -> list[str]:
    """Return the cells of one check."""
    return [
        f"`{entry.id}`",
        entry.category,
        entry.scope,
        "active" if entry.active else "passive",
        "yes" if entry.needs_root else "",
        "bare metal" if entry.bare_metal else "",
        ", ".join(entry.architectures),
        entry.maturity,
        "" if entry.typical_seconds is None else f"{entry.typical_seconds:.2f}",
        f"{entry.state.value}: {', '.join(f'`{step}`' for step in entry.actions)}",
    ]


def facts() -> str:
    """Return the table of facts; what each is read from is observed on the tests' nodes."""
    sys.path.append(str(ROOT / "tests/contract"))
    import facts_table  # noqa: PLC0415  (of the tests, which the program does not need)

    return table(["fact", "type", "what it is", "read from", "root", "reader"], list(facts_table.rows()))


def fact_models() -> str:
    """Return the table of the models that facts consist of."""
    sys.path.append(str(ROOT / "tests/contract"))
    import facts_table  # noqa: PLC0415  (of the tests, which the program does not need)

    return table(["model", "fields"], list(facts_table.model_rows()))


def published_rules() -> str:
    """Return the tables of other projects' rules."""
    sys.path.append(str(ROOT / "tests/contract"))
    import published_rules as page  # noqa: PLC0415  (of the tests, which the program does not need)

    return page.tables()


def stack_rules() -> str:
    """Return the table of the resolver's rules."""
    return table(["rule", "means", "facts"], [[rule.id, rule.means, rule.facts] for rule in rules])


def expectations() -> str:
    """Return the table of limits and marks by platform."""
    catalog = Catalog()
    rows = []
    for name, platform in catalog.platforms.items():
        shape = of_platform(catalog, platform)
        rows.append([name, *(limits_cell(catalog, shape, metric, where) for metric, where in COLUMNS.values())])
    return table(["platform", *COLUMNS], rows)


def limits_cell(catalog: Catalog, shape: Shape, metric: str, where: Where) -> str:
    """Return limit and marks: ``57.6 pcie; fails 48 (host-h100-sxm); warns 46.1 (bands.copy-pcie)``."""
    if where.peer is not None and shape.count < 2:
        return ""
    rated = Where(where.gpu, where.peer, clock_mhz=rated_clock(shape)) if metric.startswith("gemm") else where
    limit = limit_of(metric, shape, rated)
    mark_rules = MarkRules(gross=GROSS.default, gross_origin=f"expectations.yml {GROSS.name}: ")
    marks = marks_of(Figure(metric, 0.0, rated, LARGE), shape, catalog, mark_rules)
    failing = max((mark for mark in marks if mark.fails), key=lambda mark: mark.value, default=None)
    warning = max((mark for mark in marks if not mark.fails), key=lambda mark: mark.value, default=None)
    if failing is not None and warning is not None and warning.value <= failing.value:
        warning = None
    parts = [limit_text(limit), f"fails {mark_text(failing)}", f"warns {mark_text(warning)}"]
    return "; ".join(part for part in parts if part and not part.endswith(" "))


def rated_clock(shape: Shape) -> float | None:
    """Return the clock at which the peak of the model's tensor cores is quoted."""
    gpu = shape.gpu
    return None if gpu is None or gpu.tflops is None else gpu.tflops.clock_mhz or gpu.sm_clock_mhz


def limit_text(limit: PhysicalLimit | None) -> str:
    """Return a limit; with a question mark where it is unsure."""
    return "" if limit is None else f"{limit.value:.4g}{'' if limit.sure else '?'} {limit.path}"


def mark_text(mark: Mark | None) -> str:
    """Return a mark with the catalog's row that it is from."""
    if mark is None:
        return ""
    match = ROW_OF_MARK.search(mark.origin)
    return f"{mark.value:.4g} ({match[1] if match else mark.origin})"


def lab_assumptions() -> str:
    """Return the assumptions of the lab's vendor repository, from its data."""
    used: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, repository in repositories().items():
        for offer in recorded_in(repository):
            for key in offer.assumed:
                used[key][name].add(offer.name)
    rows = []
    for key, text in assumptions()["assumptions"].items():
        says = text["assumption"] if "assumption" in text else text["note"]
        where = ", ".join(f"{name} {len(names)}" for name, names in sorted(used[key].items())) or "none by name"
        rows.append([f"`{key}`", says, where])
    lines = ["", "Packages that no index records and the lab has, as rows of its own:", ""]
    for name, repository in repositories().items():
        known = recorded(repository.recorded)["packages"] if repository.recorded else {}
        unrecorded = sorted({built.name for built in contents(repository)} - set(known))
        if unrecorded and name != "ubuntu":
            lines.append(f"- {name}: {', '.join(f'`{each}`' for each in unrecorded)}")
    count = sum(len(packages(each)) for each in repositories()["ubuntu"].rows)
    lines.append(
        f"- ubuntu: {count} rows; recorded are dkms, libxnvctrl0, the `-server` drivers, transitional packages"
    )
    lines += [
        "",
        "Recorded, and not in the lab: no version is recorded, or no driver's release of the lab has them:",
        "",
    ]
    for name, repository in repositories().items():
        if repository.recorded:
            held = {built.name for built in contents(repository)}
            left = sorted(set(recorded(repository.recorded)["packages"]) - held - {"cuda-keyring"})
            lines += [f"- {name}: {', '.join(f'`{each}`' for each in left)}"] if left else []
    lines += ["", "Unknown, and so neither right nor wrong here:", ""]
    lines += [f"- {row['what']} ({row['touches']})" for row in assumptions()["unknown"]]
    return table(["assumption", "content", "packages that rest on it"], rows) + "\n".join(lines) + "\n"


def lab_hardware() -> str:
    """Return the table of the machines that a lab simulates."""
    rows = []
    for name in names():
        machine = describe(name, "node")
        adapters = [nic["link_layer"] for nic in machine["nics"]]
        parts = [counted(len(adapters), f"{adapters[0]} adapter")] if adapters else []
        parts += [counted(len(machine["nvswitches"]), "NVSwitch", "NVSwitches")] if machine["nvswitches"] else []
        rows.append([f"`{name}`", f"{len(machine['gpus'])}x {machine['gpus'][0]['name']}", ", ".join(parts)])
    return table(["`--hardware`", "GPUs", "beside them"], rows)


def lab_faults() -> str:
    """Return the table of the faults of simulated hardware."""
    rows = []
    for name, kind in faults.KINDS.items():
        details = "".join(f" [{key}={value}]" for key, value in kind.details.items())
        rows.append([f"`{name}{details}`", "GPU or link" if kind.where == "link" else kind.where, kind.means])
    return table(["fault", "of", "what it is"], rows)


def vendor_faults() -> str:
    """Return the table of the faults of the lab's vendor repository."""
    return table(["fault", "effect on a node"], [[f"`{name}`", means] for name, means in VENDOR_FAULTS.items()])


def parse_kinds() -> str:
    """Return the table of what ``gpunode parse`` reads, from its help."""
    listed = (parse.help or "").partition("Kinds:")[2].partition("Examples:")[0]
    lines = re.findall(r"(?m)^ +([a-z0-9-]+) +(.+)$", listed)
    return table(["kind", "source"], [[f"`{kind}`", source.replace("*", r"\*")] for kind, source in lines])


def metrics() -> str:
    """Return the table of the metrics for Prometheus."""
    return table(["metric", "value"], [[f"`{name}`", means] for name, means in FAMILIES.items()])


def licences() -> str:
    """Return the table of the locked dependencies with the licences that they declare, from the bill of materials."""
    components = json.loads((ROOT / "sbom.cdx.json").read_text(encoding="utf-8"))["components"]
    rows = sorted([each["name"].lower(), each["version"], licence_of(each)] for each in components)
    return table(["package", "version", "licence"], rows)


def licence_of(component: Mapping[str, Any]) -> str:
    """Return the licence that a package declares, as SPDX expression or in its own words."""
    declared = [each.get("license", each) for each in component.get("licenses", ())]
    formal = [licence.get("expression") or licence.get("id") for licence in declared]
    names = [name for name in formal if name] or [licence["name"].rpartition(":: ")[2] for licence in declared]
    return ", ".join(dict.fromkeys(names)) or "not declared"


TABLES: dict[str, Callable[[], str]] = {
    "checks": checks,
    "facts": facts,
    "fact-models": fact_models,
    "rules": stack_rules,
    "published-rules": published_rules,
    "expectations": expectations,
    "lab-assumptions": lab_assumptions,
    "lab-hardware": lab_hardware,
    "lab-faults": lab_faults,
    "vendor-faults": vendor_faults,
    "parse-kinds": parse_kinds,
    "metrics": metrics,
    "licences": licences,
}
