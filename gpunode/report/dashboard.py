"""A Grafana dashboard of the metrics, generated from the checks' declarations."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpunode.checks import Check, Status
from gpunode.report.prometheus import CODES

SCHEMA_VERSION = 39
"""Of Grafana 11; later versions migrate it."""
COLUMNS = 24
COLORS: Mapping[Status, str] = {
    Status.SKIP: "#8e8e8e",
    Status.PASS: "green",
    Status.NOTE: "blue",
    Status.WARN: "yellow",
    Status.ERROR: "purple",
    Status.FAIL: "red",
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HOSTS = 'host=~"$host"'
Panel = dict[str, Any]


def dashboard(checks: Iterable[Check]) -> str:
    """Return the dashboard as JSON, as Grafana imports it: an overview, and a row for each category of checks."""
    categories: dict[str, list[Check]] = {}
    for check in checks:
        categories.setdefault(check.category, []).append(check)
    layout = _Layout()
    for panel, width, height in _overview():
        layout.add(panel, width, height)
    for category, members in categories.items():
        layout.add_row(category, _of_category(category, members))
    document = {
        "uid": "gpunode",
        "title": "gpunode: verdicts on GPU nodes",
        "tags": ["gpunode", "gpu"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "1m",
        "time": {"from": "now-24h", "to": "now"},
        "templating": {"list": [_variable_of_sources(), _variable_of_hosts()]},
        "annotations": {"list": []},
        "panels": layout.panels,
    }
    return json.dumps(document, indent=1) + "\n"


class _Layout:
    """Panels from left to right, then in lines."""

    def __init__(self) -> None:
        self.panels: list[Panel] = []
        self._x = self._y = self._line = self._number = 0

    def add(self, panel: Panel, width: int, height: int) -> None:
        """Add a panel beside the previous one, or below if there is no room."""
        if self._x + width > COLUMNS:
            self._x, self._y, self._line = 0, self._y + self._line, 0
        self._number += 1
        self.panels.append({"id": self._number, "gridPos": _at(self._x, self._y, width, height), **panel})
        self._x, self._line = self._x + width, max(self._line, height)

    def add_row(self, title: str, panel: Panel) -> None:
        """Add a row that is closed at first, with one panel."""
        self._y, self._x, self._line = self._y + self._line, 0, 1
        self._number += 2
        inside = {"id": self._number, "gridPos": _at(0, self._y + 1, COLUMNS, 10), **panel}
        row = {"type": "row", "title": title, "collapsed": True, "panels": [inside]}
        self.panels.append({"id": self._number - 1, "gridPos": _at(0, self._y, COLUMNS, 1), **row})


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(kind: str, title: str, expr: str, query: Mapping[str, Any], **more: Any) -> Panel:
    targets = [{"refId": "A", "datasource": SOURCE, "expr": expr, **query}]
    return {"type": kind, "title": title, "datasource": SOURCE, "targets": targets, **more}


def _statuses() -> list[dict[str, Any]]:
    """Return the mapping of values to statuses."""
    options = {
        str(code): {"text": status.value, "color": COLORS[status], "index": number}
        for number, (status, code) in enumerate(CODES.items())
    }
    return [{"type": "value", "options": options}]


def _timeline(title: str, query: str, legend: str, description: str) -> Panel:
    return _panel(
        "state-timeline",
        title,
        query,
        query={"legendFormat": legend},
        description=description,
        fieldConfig={
            "defaults": {"mappings": _statuses(), "custom": {"fillOpacity": 80, "lineWidth": 0}},
            "overrides": [],
        },
        options={"mergeValues": True, "showValue": "never", "legend": {"showLegend": False}},
    )


def _number(title: str, query: str, color: str, unit: str = "none") -> Panel:
    steps = [{"color": "green", "value": None}, {"color": color, "value": 1}]
    defaults = {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}}
    return _panel(
        "stat",
        title,
        query,
        query={"instant": True},
        fieldConfig={"defaults": defaults, "overrides": []},
        options={"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background"},
    )


def _table(title: str, query: str, hidden: Sequence[str], description: str = "") -> Panel:
    exclude = dict.fromkeys(("Time", "__name__", "job", "instance", *hidden), True)
    return _panel(
        "table",
        title,
        query,
        query={"instant": True, "format": "table"},
        description=description,
        fieldConfig={"defaults": {"mappings": _statuses()}, "overrides": []},
        transformations=[
            {"id": "organize", "options": {"excludeByName": exclude, "renameByName": {"Value": "status"}}}
        ],
    )


def _curves(title: str, query: str, unit: str) -> Panel:
    return _panel(
        "timeseries",
        title,
        query,
        query={"legendFormat": "{{host}} {{component}} {{metric}}"},
        fieldConfig={"defaults": {"unit": unit, "min": 0}, "overrides": []},
    )


def _overview() -> list[tuple[Panel, int, int]]:
    fail, error, warn = CODES[Status.FAIL], CODES[Status.ERROR], CODES[Status.WARN]
    return [
        (_number("Nodes", f"count(gpunode_node_status{{{HOSTS}}})", "green"), 4, 4),
        (_number("Failed", f"count(gpunode_node_status{{{HOSTS}}} == {fail}) or vector(0)", "red"), 4, 4),
        (_number("Undetermined", f"count(gpunode_node_status{{{HOSTS}}} == {error}) or vector(0)", "purple"), 4, 4),
        (_number("To drain", f"count(gpunode_node_recommended_state{{{HOSTS}}} == 2) or vector(0)", "red"), 4, 4),
        (
            _number("Alerts firing", 'count(ALERTS{alertname=~"Gpunode.+",alertstate="firing"}) or vector(0)', "red"),
            4,
            4,
        ),
        (_number("Oldest verdict", f"max(time() - gpunode_verdict_timestamp_seconds{{{HOSTS}}})", "green", "s"), 4, 4),
        (
            _timeline(
                "Nodes", f"max by (host) (gpunode_node_status{{{HOSTS}}})", "{{host}}", "Worst status of each node."
            ),
            COLUMNS,
            8,
        ),
        (
            _table(
                "Findings",
                f"sort_desc(gpunode_check_status{{{HOSTS}}} >= {warn})",
                (),
                "What does not pass now, the worst first. gpunode validate -i INVENTORY -l HOST explains it.",
            ),
            COLUMNS,
            8,
        ),
        (_curves("Bandwidth", f"gpunode_figure_bytes_per_second{{{HOSTS}}}", "Bps"), 8, 8),
        (_curves("Computing", f"gpunode_figure_flops{{{HOSTS}}}", "flops"), 8, 8),
        (_curves("Measured by expected", f"gpunode_figure_expected_ratio{{{HOSTS}}}", "percentunit"), 8, 8),
        (_table("Machines and software", f"gpunode_node_info{{{HOSTS}}}", ("Value",)), COLUMNS, 8),
    ]


def _of_category(category: str, checks: Sequence[Check]) -> Panel:
    names = "|".join(check.id.replace(".", "[.]") for check in checks)
    query = f'max by (host, check) (gpunode_check_status{{{HOSTS},check=~"{names}"}}) >= 0'
    about = "\n".join(f"- **{check.id}**: {check.means}" for check in checks)
    return _timeline(f"Checks of {category}", query, "{{host}} {{check}}", about)


def _variable_of_sources() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable_of_hosts() -> dict[str, Any]:
    return {
        "name": "host",
        "label": "Node",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(gpunode_node_status, host)", "refId": "host"},
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "refresh": 2,
        "sort": 1,
    }
