"""Debian's Prometheus scrapes two nodes that validate themselves: a fault raises its alert, its repair resolves it.

No driver is there, which has alerts of its own; the fault is one of a PCIe link. The tests share the nodes and run in
their order. Times are printed.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from docker_plays import Roles
from playbook_runs import Site, gpunode
from programs import run_program

from gpunode.lab import Lab
from gpunode.report import monitoring

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("roles/gpu_monitoring/", "gpunode/report/prometheus", "gpunode/report/monitoring", "gpunode/cli/on_node")

DIRECTORY = "/var/lib/prometheus/node-exporter"
METRICS = f"{DIRECTORY}/gpunode.prom"
ALERT = monitoring.alert_name("link.pcie-width")
RUN = "systemctl start gpunode-verdict.service"
GET = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1], timeout=20).read().decode())"
MAX_AGE_S = 120
SETTINGS = {"gpu_monitoring_state": "present", "gpu_monitoring_interval_s": 60, "gpu_monitoring_budget_s": 40}


class Monitored(Site):
    """Two nodes; Prometheus runs on the first, faults are on the second."""

    def on(self, number: int, script: str, *, fails: bool = False) -> str:
        """Run a script as root on a node; it must succeed, or fail."""
        done = self.lab.nodes()[number].run(["bash", "-euc", script], timeout_s=300)
        assert (done.returncode != 0) is fails, f"{script}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout + done.stderr)

    def query(self, query: str) -> list[tuple[dict[str, str], float]]:
        """What Prometheus answers: labels and value of each series."""
        program = f"python3 -I -c '{GET}' 'http://127.0.0.1:9090/api/v1/query?query={query}'"
        rows = json.loads(self.on(0, program))["data"]["result"]
        return [(row["metric"], float(row["value"][1])) for row in rows]

    def alerts(self, name: str, state: str = "firing") -> set[str]:
        """The nodes with an alert."""
        samples = self.query(f"ALERTS%7Balertname%3D%22{name}%22%2Calertstate%3D%22{state}%22%7D")
        return {labels.get("host") or labels.get("node", "") for labels, _ in samples}

    def until(self, done: Callable[[], bool], limit_s: float) -> float:
        """Wait for something; the seconds that it took."""
        begun = time.monotonic()
        while not done():
            assert time.monotonic() - begun < limit_s, self.on(1, "journalctl -u gpunode-verdict --no-pager -n 20")
            time.sleep(1)
        return time.monotonic() - begun


def start_prometheus(site: Monitored, folder: Path) -> None:
    """Debian's package with the generated rules and scrape configuration, faster than their defaults."""
    addresses = {}
    for number, node in enumerate(site.lab.nodes()):
        addresses[node.name] = site.on(number, "hostname -I").split()[0]
    document = yaml.safe_load(monitoring.scrape(addresses))
    document["scrape_configs"][0]["scrape_interval"] = "2s"
    document |= {"global": {"evaluation_interval": "2s"}, "rule_files": ["/etc/prometheus/gpunode.yml"]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(document), encoding="utf-8")
    rules = gpunode("monitoring", "rules", "--max-age", f"{MAX_AGE_S}s")
    (folder / "gpunode.yml").write_text(rules, encoding="utf-8")
    site.on(0, "DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends prometheus")
    for name in ("prometheus.yml", "gpunode.yml"):
        text = (folder / name).read_text(encoding="utf-8")
        done = site.lab.nodes()[0].ssh(["sudo", "-n", "tee", f"/etc/prometheus/{name}"], input=text)
        assert done.returncode == 0
    site.on(0, "promtool check config /etc/prometheus/prometheus.yml; systemctl restart prometheus")
    site.on(
        0, f"for _ in {{1..60}}; do python3 -I -c '{GET}' http://127.0.0.1:9090/-/ready && exit; sleep 1; done; exit 1"
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    lab = Lab(f"test-monitoring-{os.getpid()}")
    folder = tmp_path_factory.mktemp("monitoring")
    program = folder / "gpunode.pyz"
    argv = [sys.executable, "-m", "gpunode", "zipapp", program, "--python", "3.11"]
    assert run_program(argv, limit_s=600).returncode == 0
    try:
        lab.up(2, "debian-12", "l40s-4")
        site = Monitored(lab)
        roles = Roles(site, folder, "gpu_monitoring")
        arguments = ["-e", json.dumps({**SETTINGS, "gpu_monitoring_program": str(program)})]
        roles.done(*arguments)
        again = roles.done(*arguments)
        assert again.changed == {}
        start_prometheus(site, folder)
        yield site
    finally:
        lab.down()


def names(site: Monitored) -> list[str]:
    return [node.name for node in site.lab.nodes()]


def test_both_nodes_are_scraped_with_their_verdicts(site: Monitored, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = site.until(lambda: len(site.query("gpunode_verdict_timestamp_seconds")) == 2, 240)
    assert {labels["host"] for labels, _ in site.query("gpunode_node_status")} == set(names(site))
    assert {value for _, value in site.query("node_textfile_scrape_error")} == {0.0}
    assert site.alerts(ALERT) == set()
    assert site.query("gpunode_node_simulated%20%3D%3D%201")
    with capsys.disabled():
        print(f"\nboth verdicts in Prometheus {seconds:.0f} s after its start")


def test_a_fault_raises_its_alert_and_its_repair_resolves_it(
    site: Monitored, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but the timer validates the node."""
    node = site.lab.nodes()[1]
    node.fault("pcie-narrow", "gpu2")
    raised = site.until(lambda: site.alerts(ALERT) == {node.name}, 300)
    (labels,) = [labels for labels, _ in site.query(f"ALERTS%7Balertname%3D%22{ALERT}%22%7D")]
    # gpu2 by its slot: without a driver it has no number.
    assert labels["component"] == "gpu at 0000:b8:00.0"
    node.heal("pcie-narrow")
    resolved = site.until(lambda: site.alerts(ALERT) == set(), 300)
    with capsys.disabled():
        print(f"\n{ALERT} {labels['component']}: fires {raised:.0f} s after the fault, ends {resolved:.0f} s after it")


def test_without_a_validation_no_verdict_stays_as_if_it_were_fresh(
    site: Monitored, capsys: pytest.CaptureFixture[str]
) -> None:
    name = names(site)[1]
    site.on(1, "systemctl stop gpunode-verdict.timer")
    # The program does not start: the file is removed at once.
    site.on(1, f"mv /usr/local/lib/gpunode/gpunode.pyz /root/; {RUN}", fails=True)
    assert "No such file" in site.on(1, f"cat {METRICS}", fails=True)
    site.until(lambda: site.alerts("GpunodeVerdictMissing", "pending") == {name}, 60)
    site.on(1, f"mv /root/gpunode.pyz /usr/local/lib/gpunode/; {RUN}")
    # A directory that is read-only: the file stays, and its age shows.
    site.on(1, f"mount --bind {DIRECTORY} {DIRECTORY}; mount -o remount,bind,ro {DIRECTORY}; {RUN}", fails=True)
    assert "Read-only file system" in site.on(1, "journalctl -u gpunode-verdict --no-pager -n 20")
    old = site.until(lambda: site.alerts("GpunodeVerdictOld") == {name}, MAX_AGE_S + 120)
    site.on(1, f"umount {DIRECTORY}; {RUN}")
    site.until(lambda: site.alerts("GpunodeVerdictOld") == set(), 60)
    # No directory: no file, and one line that names it.
    site.on(1, f"mv {DIRECTORY} /root/moved; {RUN}", fails=True)
    lines = site.on(1, "journalctl -u gpunode-verdict --no-pager -n 20")
    assert f"gpunode: {METRICS}: cannot be written: No such file or directory" in lines
    site.on(1, f"mv /root/moved {DIRECTORY}; systemctl start gpunode-verdict.timer; {RUN}")
    site.until(lambda: site.alerts("GpunodeVerdictMissing", "pending") == set(), 60)
    with capsys.disabled():
        print(f"\nGpunodeVerdictOld ({MAX_AGE_S} s) fires {old:.0f} s after the directory became read-only")


def test_a_validation_that_hangs_is_ended_and_leaves_no_verdict(site: Monitored) -> None:
    """The limit of the unit is for a program that does not keep its own."""
    drop_in = "/run/systemd/system/gpunode-verdict.service.d"
    site.on(1, f"mkdir -p {drop_in}; printf '[Service]\\nExecStart=\\nExecStart=/bin/sleep 600\\nTimeoutStartSec=2\\n' "
               f"> {drop_in}/hang.conf; systemctl daemon-reload; {RUN}", fails=True)  # fmt: skip
    assert "No such file" in site.on(1, f"cat {METRICS}", fails=True)
    site.on(1, f"rm -r {drop_in}; systemctl daemon-reload; systemctl reset-failed gpunode-verdict.service; {RUN}")
    assert "gpunode_node_status" in site.on(1, f"cat {METRICS}")
