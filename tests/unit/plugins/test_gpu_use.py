"""Who uses the driver's modules, and what keeps them from being unloaded; the module driver_exchange around it."""

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.gpunode.node.plugins.module_utils import gpu_use
from ansible_collections.gpunode.node.plugins.modules import driver_exchange

# As lsmod prints it on a Debian 12 node of the lab with an H100, with another driver's module on top added.
LOADED = """\
Module                  Size  Used by
nvidia_uvm           2076672  0
nvidia_drm            135168  0
nvidia_modeset       1826816  1 nvidia_drm
nvidia              14381056  {count} nvidia_uvm,nvidia_modeset,{more}
mlx5_core              20480  0
"""
DAEMON = "nvidia-persistenced.service"


def loaded(count: int = 2, more: str = "") -> dict[str, tuple[int, list[str]]]:
    return gpu_use.modules(LOADED.format(count=count, more=more))  # type: ignore[no-any-return]


def holder(name: str, unit: str, *devices: str, pid: int = 7) -> dict[str, Any]:
    return {"pid": pid, "name": name, "unit": unit, "devices": list(devices)}


PERSISTENCED = holder("nvidia-persiste", DAEMON, "/dev/nvidia0", "/dev/nvidiactl")


def test_modules_that_nothing_uses_can_be_unloaded() -> None:
    assert gpu_use.obstacles(loaded(), [], []) == []
    assert gpu_use.obstacles(loaded(3), [PERSISTENCED], [DAEMON]) == []


@pytest.mark.parametrize("module", ["gdrdrv", "nvidia_fs", "nvidia_cspmu"])
def test_a_module_on_top_of_the_driver_is_in_the_way(module: str) -> None:
    assert gpu_use.obstacles(loaded(3, module), [], []) == [f"module {module} uses the driver"]


@pytest.mark.parametrize(
    ("name", "unit"), [("dcgm-exporter", "dcgm-exporter.service"), ("python3", ""), ("ollama", "ollama.service")]
)
def test_a_process_of_nobody_who_is_stopped_is_in_the_way(name: str, unit: str) -> None:
    holders = [PERSISTENCED, holder(name, unit, "/dev/nvidia0", pid=812)]
    (line,) = gpu_use.obstacles(loaded(4), holders, [DAEMON])
    assert line.startswith(f"{name} (pid 812")
    assert line.endswith("holds /dev/nvidia0")


def test_invisible_users_are_in_the_way() -> None:
    assert gpu_use.obstacles(loaded(10), [], []) == ["module nvidia has 8 users without a visible process"]
    assert gpu_use.obstacles(loaded(10), [], [DAEMON]) == [], "persistence mode ends with its daemon"


@pytest.mark.parametrize(
    "text", ["", "nvidia", "nvidia x y\n", "nvidia 1 many nvidia_uvm\n", "Module Size Used by\n", "\0\0\0\n"]
)
def test_a_text_that_is_not_a_list_of_modules_contains_none(text: str) -> None:
    assert gpu_use.modules(text) == {}


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/nvidia-persistenced.service\n", DAEMON),
        ("0::/system.slice/docker.service/docker/0a1b\n", "docker.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ""),
        ("12:pids:/system.slice/ssh.service\n0::/init.scope\n", "ssh.service"),
        ("", ""),
    ],
)
def test_the_unit_of_a_process_is_in_its_control_group(cgroup: str, unit: str) -> None:
    assert gpu_use.unit_of(cgroup) == unit


def test_holders_are_the_processes_with_a_device_open(tmp_path: Path) -> None:
    for pid, target in (("41", "/dev/nvidia0"), ("42", "/dev/null"), ("9", "/dev/nvidia-uvm")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "fd" / "3").symlink_to(target)
        (tmp_path / pid / "comm").write_text("python3\n")
        (tmp_path / pid / "cgroup").write_text("0::/system.slice/job.service\n")
    holders = gpu_use.holders(str(tmp_path))
    assert [(row["pid"], row["unit"]) for row in holders] == [(9, "job.service"), (41, "job.service")]
    assert [row["pid"] for row in gpu_use.computing(holders)] == [9]
    assert gpu_use.computing([holder("nv-hostengine", "", "/dev/nvidia-uvm")]) == []


class Node:
    """A node on which commands do nothing but are recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before, self.after, self.on_disk = "580.95.05", "580.178.04", "580.178.04"
        self.obstacles: list[list[str]] = [[]]
        self.commands: list[list[str]] = []
        self.fails: dict[str, str] = {}
        self.modules = loaded()
        monkeypatch.setattr(driver_exchange, "done", self.done)
        monkeypatch.setattr(driver_exchange, "on_disk", lambda _kernel: self.on_disk)
        monkeypatch.setattr(driver_exchange, "loaded_version", self.loaded_version)
        monkeypatch.setattr(driver_exchange, "in_the_way", lambda _units: self.in_the_way())
        monkeypatch.setattr(driver_exchange, "known_modules", lambda: self.modules)
        monkeypatch.setattr(driver_exchange, "SETTLE_S", 0)
        self.warned: list[str] = []
        monkeypatch.setattr(driver_exchange.AnsibleModule, "warn", lambda _module, text: self.warned.append(text))

    def in_the_way(self) -> list[str]:
        return self.obstacles.pop(0) if len(self.obstacles) > 1 else self.obstacles[0]

    def loaded_version(self) -> str:
        return self.before

    def done(self, argv: list[str]) -> str:
        self.commands.append(argv)
        error = self.fails.get(" ".join(argv), "")
        if argv[0] == "rmmod" and not error:
            self.modules = {name: row for name, row in self.modules.items() if name != argv[1]}
            self.before = "" if argv[1] == "nvidia" else self.before
        if argv[0] == "modprobe" and not error:
            self.before = self.after
        return error


def ran(capsys: pytest.CaptureFixture[str], check: bool = False, **arguments: Any) -> dict[str, Any]:
    options = {"version": "580.178.04", "units": ["nvidia-fabricmanager.service", DAEMON], **arguments}
    with patch_module_args({**options, "_ansible_check_mode": check}), pytest.raises(SystemExit):
        driver_exchange.main()
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def words(node: Node) -> list[str]:
    return [" ".join(argv) for argv in node.commands]


def test_all_goes_well_in_this_order(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ran(capsys, unit_versions={"nvidia-fabricmanager.service": "580.178.04"})
    assert (answer["changed"], answer["reason"], answer["loaded"]) == (True, "", "580.178.04")
    assert words(node) == [
        f"systemctl stop nvidia-fabricmanager.service {DAEMON}",
        *("rmmod nvidia_drm", "rmmod nvidia_modeset", "rmmod nvidia_uvm", "rmmod nvidia"),
        *("modprobe nvidia", "modprobe nvidia_uvm", "modprobe nvidia_modeset", "modprobe nvidia_drm"),
        f"systemctl start {DAEMON}",
        "systemctl start nvidia-fabricmanager.service",
    ]


@pytest.mark.parametrize("reason", ["obstacle", "no module"])
def test_nothing_is_stopped_where_it_would_not_succeed(
    node: Node, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    node.obstacles, node.on_disk = ([["gdrdrv"]], "580.178.04") if reason == "obstacle" else ([[]], "")
    answer = ran(capsys)
    assert (answer["changed"], answer["loaded"], node.commands) == (False, "580.95.05", [])
    assert answer["reason"]
    assert "until a reboot" in node.warned[0]


def test_a_user_that_comes_in_between_keeps_the_old_module_and_no_new_program_starts(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.obstacles = [[], ["python3 (pid 9) holds /dev/nvidia0"]]
    answer = ran(capsys)
    assert words(node) == [f"systemctl stop nvidia-fabricmanager.service {DAEMON}"]
    assert answer["loaded"] == "580.95.05"
    assert "a reboot is pending" in node.warned[0]


def test_a_module_that_stays_does_not_load_another(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.fails = {"rmmod nvidia": "rmmod: ERROR: Module nvidia is in use"}
    answer = ran(capsys)
    assert not [command for command in words(node) if command.startswith(("modprobe", "systemctl start"))]
    assert "nvidia stays" in answer["reason"]


def test_a_fabric_manager_of_another_release_is_never_started(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    answer = ran(capsys, unit_versions={"nvidia-fabricmanager.service": "580.95.05"})
    assert "systemctl start nvidia-fabricmanager.service" not in words(node)
    assert f"systemctl start {DAEMON}" in words(node)
    assert "nvidia-fabricmanager.service is 580.95.05 and was not started" in answer["reason"]


def test_check_mode_only_reports(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, check=True)["changed"]
    node.obstacles = [["gdrdrv"]]
    assert not ran(capsys, check=True)["changed"]
    assert node.commands == []


def test_what_is_loaded_already_is_left_alone(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.before = "580.178.04"
    assert not ran(capsys)["changed"]
    assert node.commands == []
