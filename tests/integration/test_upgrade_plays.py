"""The playbooks as ``gpunode upgrade`` runs them: limit, variables of each node, log, and why a node failed."""

import json
import sys
from pathlib import Path

import pytest

from gpunode.change.journal import NodeRecord, new_token
from gpunode.judging.evaluator import Evaluator
from gpunode.upgrade.looks import Connections
from gpunode.upgrade.nodes import AnsibleNodes

SITE = """
- name: Site
  hosts: "{{ gpunode_hosts | default('gpu_nodes') }}"
  gather_facts: false
  tasks:
    - name: Write the variables
      ansible.builtin.copy:
        content: "{{ [nvidia_driver_version, gpunode_change, gpunode_reboot, gpunode_drain_tasks] | to_json }}"
        dest: "{{ playbook_dir }}/{{ inventory_hostname }}.json"
        mode: "0644"
    - name: Fail where asked
      ansible.builtin.fail:
        msg: asked to
      when: inventory_hostname in ['gpu2', 'gpu3']
"""


def test_a_play_of_a_wave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANSIBLE_CONFIG", "ANSIBLE_INVENTORY"):
        monkeypatch.delenv(name, raising=False)
    root, folder = tmp_path / "root", tmp_path / "run"
    (root / "playbooks").mkdir(parents=True)
    folder.mkdir()
    (root / "playbooks" / "site.yml").write_text(SITE)
    monkeypatch.setattr("gpunode.upgrade.nodes.collection_root", lambda: root)
    hosts = "".join(f"    gpu{number}: {{gpunode_drain_tasks: drain.yml}}\n" for number in range(1, 6))
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        f"all:\n  vars: {{ansible_connection: local, ansible_python_interpreter: {sys.executable}}}\n  hosts:\n{hosts}"
    )
    connections = Connections({}, (str(inventory),), 1, 30)
    records = {
        f"gpu{number}": NodeRecord(token=new_token(), before="580.95.05", target="595.71.05", back=number == 4)
        for number in range(1, 5)
    }
    with Evaluator() as evaluator:
        nodes = AnsibleNodes(connections, evaluator, folder, "me", way_back=True)
        results = nodes.change(records)
        assert nodes.change({"gpu1": records["gpu1"]}) == {"gpu1": ""}
    assert {name: reason.partition(" (")[0] for name, reason in results.items()} == {
        "gpu1": "",
        "gpu2": "Fail where asked: asked to",
        "gpu3": "Fail where asked: asked to",
        "gpu4": "",
    }
    written = {path.stem: json.loads(path.read_text()) for path in (root / "playbooks").glob("*.json")}
    assert written == {name: [record.aim, record.token, "never", None] for name, record in records.items()}
    assert written["gpu4"][0] == "580.95.05"
    assert [path.name for path in sorted(folder.glob("*.log"))] == ["001-site.log", "002-site.log"]
    assert (folder / "001-site.log").stat().st_mode & 0o777 == 0o600
