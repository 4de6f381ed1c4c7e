"""The role gpu_settings on simulated H100, A100 and V100 servers: set, kept over restarts, refused, restored.

The tests of one node run in their order and share it. GPUNODE_TEST_SETTINGS_BOARDS chooses nodes: h100, a100, v100.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_plays import Roles
from playbook_runs import Run, Site

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("gpunode/lab/simulator/", "gpunode/onnode/gpu_settings")

UNIT = "gpunode-gpu-settings.service"
OWN_FILES = {
    "/etc/gpunode/gpu-settings.json",
    "/etc/systemd/system/gpunode-gpu-settings.service",
    "/usr/local/lib/gpunode/gpu-settings.py",
}
LAYOUT = ["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"]
H100_RULES = [
    {"gpus": "H100", "power_limit": 500, "sm_clock_mhz": [345, 1755], "compute_mode": "exclusive_process"},
    {"gpus": [6, 7], "mig": LAYOUT, "compute_mode": "default"},
]
BOARDS = os.environ.get("GPUNODE_TEST_SETTINGS_BOARDS", "h100,a100,v100").split(",")
INSTALL = "DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends"


class Board:
    """A node with a driver, Docker and the role."""

    def __init__(self, lab: Lab, folder: Path, hardware: str, version: str, *packages: str) -> None:
        lab.up(1, "debian-12", [hardware])
        self.site = Site(lab)
        self.roles = Roles(self.site, folder, "gpu_settings")
        key = lab.state.vendor_key("nvidia").read_text(encoding="ascii")
        self.site.node.ssh(["sudo", "tee", "/etc/apt/keyrings/vendor.asc"], input=key)
        self.site.sh(
            "printf '%s\\n' 'Types: deb' 'URIs: http://vendor/compute/cuda/repos/debian12/x86_64/' 'Suites: /'"
            " 'Signed-By: /etc/apt/keyrings/vendor.asc' > /etc/apt/sources.list.d/vendor.sources;"
            f"printf 'Package: *nvidia* libcuda*\\nPin: version {version}-*\\nPin-Priority: 1000\\n'"
            " > /etc/apt/preferences.d/vendor; apt-get update -qq"
        )
        for names in (
            "linux-headers-cloud-amd64 nvidia-driver-cuda nvidia-persistenced",
            " ".join(packages),
            "docker.io",
        ):
            # The module is built: minutes on a busy machine.
            done = self.site.node.run(["bash", "-euc", f"{INSTALL} {names}"], timeout_s=900)
            assert done.returncode == 0, done.stderr[-2000:]
        self.site.sh("systemctl enable --quiet nvidia-persistenced docker")
        self.site.node.restart()

    def run(self, rules: list[dict[str, object]], *arguments: str) -> Run:
        """One run of the role with these rules."""
        # The node's driver came without the roles: preflight must not count their changes to it as due.
        chosen = {"gpu_settings_rules": rules, "gpunode_roles": ["gpu_settings"]}
        return self.roles.play("-e", json.dumps(chosen), *arguments)

    def done(self, rules: list[dict[str, object]], *arguments: str) -> Run:
        """One run that must succeed."""
        run = self.run(rules, *arguments)
        assert run.rc == 0, run.output
        return run

    def cells(self, fields: str, gpu: int) -> list[str]:
        """One GPU's answers, without units."""
        text = self.site.sh(f"nvidia-smi --query-gpu={fields} --format=csv,noheader,nounits -i {gpu}")
        return [cell.strip() for cell in text.split(",")]

    def layout(self, gpu: int) -> list[str]:
        """The profiles of a GPU's instances."""
        return re.findall(r"MIG (\S+)", self.site.sh(f"nvidia-smi mig -lgi -i {gpu} || true"))

    def locked(self, gpu: int) -> object:
        """The range to which a GPU's SM clock is locked, as the simulated driver has it."""
        state = json.loads(self.site.sh("cat /run/gpunode-lab/state.json"))
        return state["gpus"][str(gpu)].get("locked_sm_clock_mhz")

    def journal(self) -> str:
        """What the unit printed since the boot."""
        return self.site.sh(f"journalctl --no-pager -o cat -b -u {UNIT} || true")

    def at(self, unit: str, timestamp: str) -> int:
        """Microseconds since the boot of the machine."""
        return int(self.site.sh(f"systemctl show -p {timestamp} --value {unit}"))


def board(tmp_path_factory: pytest.TempPathFactory, name: str, *arguments: str) -> Iterator[Board]:
    if name not in BOARDS:
        pytest.skip(f"GPUNODE_TEST_SETTINGS_BOARDS does not name {name}")
    lab = Lab(f"gpuset-{name}-{os.getpid()}")
    try:
        yield Board(lab, tmp_path_factory.mktemp(name), *arguments)
    finally:
        lab.down()


@pytest.fixture(scope="module")
def h100(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    kinds = ("nvidia-kernel-open-dkms", "nvidia-fabricmanager")
    yield from board(tmp_path_factory, "h100", "hgx-h100-8", "580.95.05", *kinds)


@pytest.fixture(scope="module")
def a100(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    yield from board(tmp_path_factory, "a100", "a100-pcie-4", "580.95.05", "nvidia-kernel-open-dkms")


@pytest.fixture(scope="module")
def v100(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    yield from board(tmp_path_factory, "v100", "v100-2", "580.95.05", "nvidia-kernel-dkms")


def is_set(node: Board) -> None:
    """What H100_RULES ask for is in force."""
    for gpu in range(8):
        assert node.cells("power.limit", gpu) == ["500.00"]
        assert node.locked(gpu) == [345, 1755]
    assert node.cells("compute_mode", 0) == ["Exclusive_Process"]
    assert node.cells("compute_mode,mig.mode.current", 7) == ["Default", "Enabled"]
    assert node.cells("mig.mode.current", 5) == ["Disabled"]
    for gpu in (6, 7):
        assert sorted(node.layout(gpu), reverse=True) == LAYOUT


def is_default(node: Board, gpus: range = range(8)) -> None:
    """Nothing of it is."""
    for gpu in gpus:
        assert node.cells("power.limit,compute_mode,mig.mode.current", gpu) == ["700.00", "Default", "Disabled"]
        assert node.locked(gpu) is None


def test_everything_is_announced_and_then_set(h100: Board) -> None:
    before = h100.site.snapshot()
    announced = h100.done(H100_RULES, "--check")
    assert h100.site.snapshot() == before
    is_default(h100)
    run = h100.done(H100_RULES)
    assert announced.paths >= OWN_FILES
    assert run.paths >= announced.paths
    is_set(h100)
    assert "gpu0 NVIDIA H100 80GB HBM3: power limit 500 W: applied (was 700 W)" in h100.journal()


def test_a_second_run_changes_nothing(h100: Board) -> None:
    before = h100.site.snapshot()
    run = h100.done(H100_RULES)
    assert run.recap["changed"] == 0, run.changed
    assert h100.site.snapshot() == before


def test_after_a_restart_it_is_set_before_docker_starts(h100: Board) -> None:
    h100.site.node.restart()
    # The simulated firmware noted how the GPUs came up: as they were built.
    log = h100.site.sh("tail -n 8 /var/log/gpunode-lab-gpus.log").splitlines()
    expected = "power limit 700 of 700 W, clocks not locked, compute mode Default, ECC True, MIG False with 0 instances"
    assert [line.partition(" ")[2] for line in log] == [f"gpu{gpu} {expected}" for gpu in range(8)]
    is_set(h100)
    applied = h100.at(UNIT, "ActiveEnterTimestampMonotonic")
    assert 0 < h100.at("nvidia-persistenced", "ActiveEnterTimestampMonotonic") < applied
    assert applied < h100.at("docker", "ExecMainStartTimestampMonotonic")
    assert h100.journal().count(": applied") >= 8 * 3
    assert h100.site.sh("systemctl list-units --failed --plain --no-legend") == ""
    assert h100.done(H100_RULES).recap["changed"] == 0


def test_a_restart_of_the_daemon_sets_it_again(h100: Board) -> None:
    started = h100.at(UNIT, "ActiveEnterTimestampMonotonic")
    h100.site.sh("systemctl stop nvidia-persistenced")
    # Nobody keeps the GPUs initialised any more: they forget.
    assert h100.cells("power.limit", 0) == ["700.00"]
    # systemctl waits only for the daemon, not for units that it pulls in.
    h100.site.sh(
        "systemctl start nvidia-persistenced;"
        f"for second in $(seq 60); do systemctl is-active {UNIT} && break; sleep 1; done"
    )
    assert h100.at(UNIT, "ActiveEnterTimestampMonotonic") > started
    is_set(h100)


def test_a_busy_gpu_is_left_alone_and_set_when_it_is_idle(h100: Board) -> None:
    lower = [{**H100_RULES[0], "power_limit": "60%"}, *H100_RULES[1:]]
    h100.site.node.fault("gpu-busy", "gpu0", user="root", memory_mib=1024)
    try:
        run = h100.done(lower)
        assert h100.cells("power.limit", 0) == ["500.00"]
        assert h100.cells("power.limit", 1) == ["420.00"]
        assert "gpu0: power limit is not changed: a process computes on the GPU" in " ".join(run.output.split())
        assert "gpu0 NVIDIA H100 80GB HBM3: power limit 420 W: busy" in h100.journal()
        assert h100.done(lower).recap["changed"] == 0
    finally:
        h100.site.node.heal()
    h100.done(lower)
    assert h100.cells("power.limit", 0) == ["420.00"]
    h100.done(H100_RULES)
    is_set(h100)


def test_what_is_damaged_is_repaired(h100: Board) -> None:
    before = h100.site.snapshot()
    for path in OWN_FILES:
        h100.site.sh(f"echo '# damaged' > {path}")
    h100.site.sh(f"systemctl disable --quiet {UNIT}; nvidia-smi -i 3 -pl 650; nvidia-smi -i 4 -c 0")
    announced = h100.done(H100_RULES, "--check")
    run = h100.done(H100_RULES)
    assert run.paths == announced.paths == OWN_FILES
    assert h100.site.snapshot() == before
    is_set(h100)


def test_what_a_card_does_not_support_is_refused_before_anything_is_set(h100: Board) -> None:
    before = h100.site.snapshot()
    run = h100.run([*H100_RULES, {"gpus": [2], "power_limit": 900, "accounting": True}])
    assert run.rc != 0
    words = " ".join(run.output.split())
    assert "refused, nothing was changed" in words
    assert "gpu2 NVIDIA H100 80GB HBM3: 900 W is outside the GPU's range, 200 to 700 W" in words
    assert h100.site.snapshot() == before
    assert h100.cells("accounting.mode", 2) == ["Disabled"]


def test_a_profile_that_the_model_lacks_is_named_and_the_rest_is_set(h100: Board) -> None:
    run = h100.done([*H100_RULES, {"gpus": [7], "mig": ["3g.20gb"]}, {"gpus": [2], "accounting": True}])
    words = " ".join(run.output.split())
    assert "gpu7: MIG layout 3g.20gb was refused: the model has no profile 3g.20gb; it has 1g.10gb, 1g.10gb+me" in words
    assert h100.cells("accounting.mode", 2) == ["Enabled"]
    assert sorted(h100.layout(7), reverse=True) == LAYOUT
    again = h100.done([*H100_RULES, {"gpus": [7], "mig": ["3g.20gb"]}, {"gpus": [2], "accounting": True}])
    assert again.recap["changed"] == 0
    h100.done(H100_RULES)
    assert h100.cells("accounting.mode", 2) == ["Disabled"]
    is_set(h100)


def test_without_gpus_the_unit_is_skipped_and_nothing_failed(h100: Board) -> None:
    drop_in = f"/run/systemd/system/{UNIT}.d/none.conf"
    h100.site.sh(
        f"mkdir -p /tmp/empty {drop_in.rpartition('/')[0]};"
        f"printf '[Service]\\nBindReadOnlyPaths=/tmp/empty:/sys/bus/pci/devices\\n' > {drop_in};"
        f"systemctl daemon-reload; systemctl restart {UNIT}"
    )
    try:
        shown = set(h100.site.sh(f"systemctl show -p ActiveState,Result {UNIT}").split())
        assert shown == {"ActiveState=inactive", "Result=exec-condition"}
        assert h100.site.sh("systemctl list-units --failed --plain --no-legend") == ""
    finally:
        h100.site.sh(f"rm {drop_in}; systemctl daemon-reload; systemctl restart {UNIT}")
    is_set(h100)


def test_removal_restores_what_was_there(h100: Board) -> None:
    announced = h100.done(H100_RULES, "--check", "-e", "gpu_settings_state=absent")
    is_set(h100)
    run = h100.done(H100_RULES, "-e", "gpu_settings_state=absent")
    assert run.paths >= announced.paths >= OWN_FILES
    is_default(h100)
    left = h100.site.sh(
        "find /etc /usr/local /var/lib/gpunode /run/gpunode -name '*gpu-settings*' -o -name gpu_settings"
    )
    assert left == ""
    assert h100.done(H100_RULES, "-e", "gpu_settings_state=absent").recap["changed"] == 0
    h100.site.node.restart()
    is_default(h100)


def test_ampere_keeps_mig_mode_and_gets_its_layout_back(a100: Board) -> None:
    rules: list[dict[str, object]] = [
        {"gpus": [0], "mig": ["3g.40gb", "3g.40gb"]},
        {"gpus": [1], "ecc": False},
        {"gpus": "A100", "sm_clock_mhz": "max"},
    ]
    run = a100.done(rules)
    assert a100.layout(0) == ["3g.40gb", "3g.40gb"]
    assert a100.cells("ecc.mode.current,ecc.mode.pending", 1) == ["Enabled", "Disabled"]
    assert "ECC off: pending" in a100.journal()
    assert a100.done(rules).recap["changed"] == 0, run.changed
    a100.site.node.restart()
    log = a100.site.sh("tail -n 4 /var/log/gpunode-lab-gpus.log").splitlines()
    assert "MIG True with 0 instances" in log[0]
    assert "ECC False" in log[1]
    assert a100.layout(0) == ["3g.40gb", "3g.40gb"]
    assert a100.cells("ecc.mode.current", 1) == ["Disabled"]
    assert a100.locked(3) == [int(a100.cells("clocks.max.sm", 3)[0])] * 2
    assert a100.done(rules).recap["changed"] == 0
    a100.done(rules, "-e", "gpu_settings_state=absent")
    assert a100.cells("mig.mode.current,ecc.mode.pending", 0) == ["Disabled", "Enabled"]
    assert a100.cells("ecc.mode.pending", 1) == ["Enabled"]
    assert a100.locked(3) is None


def test_volta_has_application_clocks_and_no_locked_memory_clock(v100: Board) -> None:
    rules: list[dict[str, object]] = [
        {"gpus": "all", "application_clocks_mhz": {"memory": 877, "graphics": 1380}, "power_limit": "80%"},
        {"gpus": [1], "memory_clock_mhz": "max", "mig": True},
    ]
    run = v100.done(rules)
    words = " ".join(run.output.split())
    assert "gpu1: locked memory clock 877 MHz was refused: Setting locked Memory clocks is not supported" in words
    assert "gpu1: MIG mode on was refused: the card has no MIG mode" in words
    assert v100.done(rules).recap["changed"] == 0
    v100.site.node.restart()
    for gpu in (0, 1):
        assert v100.cells("clocks.applications.memory,clocks.applications.graphics", gpu) == ["877", "1380"]
        limit, default = v100.cells("power.limit,power.default_limit", gpu)
        assert float(limit) == round(float(default) * 0.8)
    assert v100.done(rules).recap["changed"] == 0
    v100.done(rules, "-e", "gpu_settings_state=absent")
    assert v100.cells("clocks.applications.graphics", 0) == ["1230"]
