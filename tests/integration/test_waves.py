"""Waves of playbooks/site.yml: its plays as they are, with one task in place of the roles."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import beside_python, run_program

ROOT = Path(__file__).parents[2]
WAVES = re.compile("Group the nodes|(Begin|End) the wave")
NODES = [f"n{number:02}" for number in range(1, 21)]


def without_roles(folder: Path) -> Path:
    """The site playbook with the tasks of its waves only: the answer of preflight is a variable of the inventory."""
    plays: list[dict[str, Any]] = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text(encoding="utf-8"))
    for play in plays:
        play.pop("roles", None)
        play.get("vars", {}).clear()
        for part in ("pre_tasks", "tasks"):
            play[part] = [task for task in play.get(part, []) if WAVES.match(task["name"])]
    plays[0]["pre_tasks"] = [{"ansible.builtin.fail": {"msg": "refused"}, "when": "refused | default(false)"}]
    plays[1]["pre_tasks"].append({"ansible.builtin.debug": {"msg": "wave {{ ansible_play_batch | join(' ') }}"}})
    plays[1]["pre_tasks"].append({"ansible.builtin.fail": {"msg": "broken"}, "when": "broken | default(false)"})
    (folder / "tasks").symlink_to(ROOT / "playbooks" / "tasks")
    file = folder / "site.yml"
    file.write_text(yaml.safe_dump(plays, sort_keys=False), encoding="utf-8")
    return file


def played(folder: Path, cwd: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A run of ``ansible-playbook`` with the inventory of the folder, and with the configuration in ``cwd``, if any."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "ANSIBLE_PYTHON_INTERPRETER": sys.executable}
    argv = [beside_python("ansible-playbook"), "-i", folder / "hosts.yml", *words]
    return run_program(argv, cwd=cwd, env=environment, limit_s=120)


def waves(folder: Path, hosts: dict[str, dict[str, bool]], *words: str) -> tuple[list[list[str]], int, str]:
    """The nodes of each wave that began, in their order; the exit code and the output."""
    inventory = {
        name: {"__preflight_plan": {"manifest": {"result": {"driver_in_use": False}}}, **hosts.get(name, {})}
        for name in NODES
    }
    for name, variables in hosts.items():
        in_use = variables.get("in_use", False)
        inventory[name]["__preflight_plan"] = {"manifest": {"result": {"driver_in_use": in_use}}}
    (folder / "hosts.yml").write_text(
        yaml.safe_dump({"gpu_nodes": {"hosts": inventory, "vars": {"ansible_connection": "local"}}}), encoding="utf-8"
    )
    run = played(folder, folder, "-f", "20", without_roles(folder), *words)
    texts = list(dict.fromkeys(re.findall(r'"msg": "wave ([^"]*)"', run.stdout)))
    return [wave.split() for wave in texts], run.returncode, run.stdout + run.stderr


IN_USE = {name: {"in_use": True} for name in NODES}


@pytest.mark.parametrize(
    ("hosts", "words", "expected", "code"),
    [
        pytest.param({}, (), [NODES], 0, id="bare nodes: all at once"),
        pytest.param(
            IN_USE, (), [NODES[:1], NODES[1:3], NODES[3:8], NODES[8:13], NODES[13:18], NODES[18:]], 0, id="all"
        ),
        pytest.param(
            {"n07": {"in_use": True}},
            (),
            [
                ["n07"],
                ["n01", "n02"],
                *[[n for n in NODES if n != "n07"][start : start + 5] for start in (2, 7, 12, 17)],
            ],
            0,
            id="the canary is a node with a driver that changes",
        ),
        pytest.param({**IN_USE, "n01": {"in_use": True, "broken": True}}, (), [["n01"]], 2, id="canary fails"),
        pytest.param(
            {**IN_USE, "n05": {"in_use": True, "broken": True}},
            (),
            [NODES[:1], NODES[1:3], NODES[3:8]],
            2,
            id="third wave",
        ),
        pytest.param(
            {**IN_USE, **{name: {"in_use": True, "broken": True} for name in ("n02", "n05", "n06")}},
            ("-e", "gpunode_max_failed_nodes=1"),
            [NODES[:1], NODES[1:3], NODES[3:8]],
            2,
            id="one may fail, two more do",
        ),
        pytest.param({"n05": {"broken": True}}, ("-e", "gpunode_serial=10"), [NODES[:10]], 2, id="an own number"),
        pytest.param(
            {**IN_USE, "n01": {"in_use": True, "refused": True}},
            (),
            [NODES[1:2], NODES[2:4], NODES[4:9], NODES[9:14], NODES[14:19], NODES[19:]],
            2,
            id="a refused node is not a canary",
        ),
        pytest.param(IN_USE, ("-e", '{"gpunode_hosts": "gpu_nodes:!n01:!n02"}'), None, 0, id="a pattern of hosts"),
    ],
)
def test_nodes_with_a_driver_in_use_change_in_waves(
    tmp_path: Path,
    hosts: dict[str, dict[str, bool]],
    words: tuple[str, ...],
    expected: list[list[str]] | None,
    code: int,
) -> None:
    order, returned, output = waves(tmp_path, hosts, *words)
    if expected is None:
        assert sorted(node for wave in order for node in wave) == NODES[2:], output[-2000:]
        assert order[0] == ["n03"]
    else:
        assert order == expected, output[-3000:]
    assert returned == code, output[-3000:]


def test_the_stop_names_the_failed_nodes_and_those_left_as_they_are(tmp_path: Path) -> None:
    _, _, output = waves(tmp_path, {**IN_USE, "n02": {"in_use": True, "broken": True}})
    assert "1 of 3 nodes of earlier waves failed: n02; nothing was changed on n04, n05" in output.replace("\n", " ")


def test_a_run_that_begins_at_a_role_drains_and_reboots_in_no_wave(tmp_path: Path) -> None:
    """Ansible skips what is before the task in the first wave alone."""
    plays: list[dict[str, Any]] = yaml.safe_load((ROOT / "playbooks" / "site.yml").read_text(encoding="utf-8"))
    del plays[0]["roles"]
    for task in plays[1]["tasks"]:
        if "ansible.builtin.import_role" in task:
            task["ansible.builtin.debug"] = {"msg": task.pop("ansible.builtin.import_role")["name"]}
    site = tmp_path / "site.yml"
    site.write_text(yaml.safe_dump(plays, sort_keys=False), encoding="utf-8")
    (tmp_path / "tasks").symlink_to(ROOT / "playbooks" / "tasks")
    drain = {"ansible_connection": "local", "gpunode_serial": 1, "gpunode_drain_tasks": "/drain.yml"}
    (tmp_path / "hosts.yml").write_text(
        yaml.safe_dump({"gpu_nodes": {"hosts": {"a": {}, "b": {}}, "vars": drain}}), encoding="utf-8"
    )
    done = played(tmp_path, ROOT, site, "--start-at-task", "Role docker")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpunode.node.docker" in done.stdout
    assert done.stdout.count("so it neither drained nor rebooted") == 2
