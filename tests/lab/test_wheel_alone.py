"""A user with the wheel and the pages alone: getting-started.md as typed, and molecule.md, in lab nodes."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).parents[2]
LIMIT_S = 1800
pytestmark = pytest.mark.timeout(4000)  # both provision nodes, and wait for what apt installs
CONCERNS = (
    "docs/getting-started",
    "docs/molecule",
    "inventory/molecule/",
    "playbooks/molecule_",
    "gpunode/cli/init",
    "hatch_build",
)
BLOCK = re.compile(r"(?ms)^```(\w+)\n(.*?)^```")
Ran = subprocess.CompletedProcess[str]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [body for name, body in BLOCK.findall(text) if name == language]


class User:
    """Somebody with an empty home, a fresh environment and the wheel: no setting of the tester, no clone in sight."""

    def __init__(self, home: Path) -> None:
        self.home, self.folder = home, home
        done = run_program(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", home], limit_s=300, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert (home / "gpunode-0.1.0-py3-none-any.whl").is_file()

    def types(self, line: str, *, rc: int = 0) -> Ran:
        """Type a line in a shell that has activated the environment, in the folder that the lines before led to."""
        script = (
            f'set -eo pipefail\n[ ! -e ~/gpunode ] || . ~/gpunode/bin/activate\ncd "{self.folder}"\n{line}\npwd >~/pwd'
        )
        env = {"HOME": str(self.home), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        done: Ran = run_program(["bash", "-c", script], limit_s=LIMIT_S, env=env, cwd=self.home)
        print(f"$ {line}\n{done.stdout[-3000:]}{done.stderr[-1000:]}[rc {done.returncode}]")
        assert done.returncode == rc, f"{line}: {done.stdout[-3000:]}{done.stderr[-2000:]}"
        if done.returncode == 0:
            self.folder = Path((self.home / "pwd").read_text(encoding="utf-8").strip())
        return done


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    user = User(tmp_path_factory.mktemp("home"))
    try:
        for line in commands("getting-started.md")[:2]:
            user.types(line)
        yield user
    finally:
        if (user.home / "gpunode" / "bin" / "gpunode").exists():
            for lab in ("default", "molecule-scratch"):
                user.types(f"gpunode lab down --name {lab} || true")


def commands(page: str) -> list[str]:
    """The lines of a page's console blocks, but for the servers that do not exist; the lab's take their place."""
    examples = [block for block in blocks(page, "console") if "gpu-01.example.org" not in block]
    return [line for block in examples for line in block.splitlines() if line.strip()]


FAULTY = ("# the current state",)
"""Lines that find something, as the page states: a node without a driver has failed checks."""


def test_the_whole_page_as_typed(user: User) -> None:
    reported: dict[str, str] = {}
    for line in commands("getting-started.md")[2:]:
        done = user.types(line, rc=1 if line.endswith(FAULTY) else 0)
        reported[line] = done.stdout + done.stderr
    provisions = [
        text for line, text in reported.items() if line.startswith("gpunode provision") and "--check" not in line
    ]
    assert len(provisions) == 2
    changed = [int(number) for number in re.findall(r"changed=(\d+)", "".join(provisions))]
    assert changed[0] > 20
    assert re.search(r"(?m)^1 node", next(text for line, text in reported.items() if "--save bundles/" in line))
    assert list((user.home / "site" / "bundles").glob("*.json"))
    again = user.types("gpunode provision -i hosts.yml")
    assert re.findall(r"changed=(\d+)", again.stdout) == ["0"]
    user.types("gpunode lab fault l40s-4-1 gpu2 pcie-narrow width=4")
    assert "link.pcie-width" in user.types("gpunode validate -i hosts.yml --level quick", rc=1).stdout
    user.types("gpunode lab down")


def test_a_role_of_a_site_is_tested_by_molecule_with_the_files_of_the_wheel(user: User) -> None:
    """docs/molecule.md: its files in a new repository, its commands, the lab's node."""
    if shutil.which("git") is None:
        pytest.skip("Molecule finds its configuration in a git repository")
    user.folder = user.home
    user.types("gpunode init own gpu-01 --no-look --example research --molecule && git init -q own")
    user.types("~/gpunode/bin/pip install --quiet molecule")
    repository = user.home / "own"
    for block in blocks("molecule.md", "yaml"):
        path = repository / block.splitlines()[0].removeprefix("# ").strip()
        if "molecule/default" not in str(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"---\n{block}", encoding="utf-8")
    mirror = os.environ.get("GPUNODE_LAB_MIRROR")
    done = user.types(f"{f'export GPUNODE_LAB_MIRROR={mirror}; ' if mirror else ''}cd own && molecule test -s scratch")
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    assert re.search(r"deb12-1 +: ok=\d+ +changed=1 ", text), "converge creates the directory"
    assert re.search(r"deb12-1 +: ok=\d+ +changed=0 ", text), "idempotence changes nothing"
    assert "gpunode.node.molecule_create" not in text or "not found" not in text
