"""Tests of a node that validates itself, run on the node itself."""

import re
import time

from testinfra.host import Host

SCRAPE = (
    "import http.client as h; c = h.HTTPConnection('127.0.0.1', 9100, timeout=20); c.request('GET', '/metrics'); "
    "print(c.getresponse().read().decode())"
)


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def scraped(host: Host) -> dict[str, float]:
    """Return the series of gpunode that Prometheus would get."""
    text = output(host, f'python3 -I -c "{SCRAPE}"')
    series = re.findall(r"(?m)^((?:gpunode|node_textfile)_\w+(?:\{.*\})?) (\S+)$", text)
    return {name: float(value) for name, value in series}


def test_the_timer_validates_the_node_and_node_exporter_shows_the_verdict(host: Host) -> None:
    assert output(host, "systemctl is-enabled gpunode-verdict.timer").strip() == "enabled"
    end = time.monotonic() + 120
    series = scraped(host)
    while not any(name.startswith("gpunode_node_status") for name in series):
        assert time.monotonic() < end, output(host, "journalctl -u gpunode-verdict --no-pager -n 20")
        time.sleep(2)
        series = scraped(host)
    assert series["node_textfile_scrape_error"] == 0
    (at,) = [value for name, value in series.items() if name.startswith("gpunode_verdict_timestamp_seconds")]
    assert abs(float(output(host, "date +%s")) - at) < 400
    assert sum(name.startswith("gpunode_check_status") for name in series) > 100


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
