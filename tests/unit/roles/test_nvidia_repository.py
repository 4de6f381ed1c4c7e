"""What the role nvidia_repository writes, by Ansible itself, into files of this test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROLE = Path(__file__).parents[3] / "roles" / "nvidia_repository"
SECRET = "proxypw"  # noqa: S105


def played(tmp_path: Path, tasks: list[dict[str, object]], proxy: str, *options: str) -> str:
    """All that ansible-playbook prints; the files are ``proxy``, ``pref`` and, by dnf, ``repo``."""
    paths = {"sources": f"{tmp_path}/list", "preferences": f"{tmp_path}/pref", "proxy": f"{tmp_path}/proxy", "key": "k"}
    dnf_paths = {"repository": f"{tmp_path}/repo", "key": f"{tmp_path}/repo-key"}
    lines = {"proxy": f"Proxy {proxy}\n", "pref": "Pin\n", "repo": f"proxy={proxy}\n", "repo-key": "me@site\n"}
    files = {f"{tmp_path}/{name}": text for name, text in lines.items()}
    given = {
        "ansible_python_interpreter": sys.executable,
        "nvidia_repository_proxy": proxy,
        "__nvidia_repository_paths": paths,
        "__nvidia_repository_dnf_paths": dnf_paths,
        "__nvidia_repository_offer": {"files": files, "key_files": {}},
    }
    book = [{"hosts": "localhost", "gather_facts": False, "vars_files": [f"{ROLE}/vars/main.yml"], "tasks": tasks}]
    (tmp_path / "book.yml").write_text(json.dumps(book))
    argv = ["ansible-playbook", "-i", "localhost,", "-c", "local", "book.yml", "-e", json.dumps(given), *options]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def tasks_of(file: str, *modules: str) -> list[dict[str, object]]:
    """The tasks of a file that put a proxy into files, or keep it in mind."""
    tasks = yaml.safe_load((ROLE / "tasks" / file).read_text(encoding="utf-8"))
    chosen = [task for task in tasks if not {f"ansible.builtin.{name}" for name in modules}.isdisjoint(task)]
    return [task for task in chosen if "files" in json.dumps(task) and "key_files" not in json.dumps(task)]


def modes(tmp_path: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir() if path.name != "book.yml"}


@pytest.mark.timeout(180)
def test_a_password_for_a_proxy_is_for_root_alone_and_in_no_diff(tmp_path: Path) -> None:
    tasks = tasks_of("present.yml", "copy", "set_fact") + tasks_of("dnf.yml", "copy")
    assert len(tasks) == 3
    printed = played(tmp_path, tasks, f"http://u:{SECRET}@p:1", "--diff", "-v")
    assert "+Pin" in printed, "what is no secret is still shown"
    assert SECRET not in printed
    assert modes(tmp_path) == {"proxy": 0o600, "pref": 0o644, "repo": 0o600, "repo-key": 0o644}
    assert SECRET not in played(tmp_path, tasks, f"http://u:{SECRET}@p:2", "--diff", "-v", "--check")


@pytest.mark.timeout(180)
def test_a_proxy_without_a_password_is_nobodys_secret(tmp_path: Path) -> None:
    tasks = tasks_of("present.yml", "copy") + tasks_of("dnf.yml", "copy")
    assert "+Proxy http://p:1" in played(tmp_path, tasks, "http://p:1", "--diff")
    assert modes(tmp_path) == {"proxy": 0o644, "pref": 0o644, "repo": 0o644, "repo-key": 0o644}


@pytest.mark.parametrize("file", ["look.yml", "look_dnf.yml"])
def test_what_the_role_keeps_of_it_is_not_printed(file: str) -> None:
    tasks = yaml.safe_load((ROLE / "tasks" / file).read_text(encoding="utf-8"))
    kept = [task for task in tasks if "ansible.builtin.set_fact" in task]
    assert kept
    assert {task.get("no_log") for task in kept} == {"{{ __nvidia_repository_private | length > 0 }}"}
