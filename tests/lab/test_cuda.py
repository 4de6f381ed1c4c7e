"""The role cuda on a simulated L40S server: two toolkits side by side, held together, repaired, removed.

The tests of this file share one node and run in their order. No driver is installed there: the toolkits need none, and
the role must bring none.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_plays import Roles
from playbook_runs import Run, Site, yaml_list

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("plugins/",)

OWN_FILES = {"/etc/apt/preferences.d/gpunode-cuda.pref", "/etc/profile.d/gpunode-cuda.sh"}
SETTINGS = '{"cuda_toolkit": ["12.9", "13.0"], "cuda_default": "12.9", "cuda_nccl": true, "cuda_cudnn": true}'
# A toolkit, newer than the repository's, that depends on $package.
TREACHEROUS = r"""
mkdir -p /srv/made/tree/DEBIAN
cd /srv/made
printf '%s\n' 'Package: cuda-toolkit-12-8' 'Version: 12.8.9-1' 'Architecture: all' 'Maintainer: a test' \
    "Depends: $package" 'Description: made by a test' > tree/DEBIAN/control
dpkg-deb --build tree made.deb > /dev/null
{ cat tree/DEBIAN/control; echo 'Filename: ./made.deb'; echo "Size: $(stat -c %s made.deb)"
  echo "SHA256: $(sha256sum made.deb | cut -d ' ' -f 1)"; } > Packages
printf 'Date: %s\nSHA256:\n %s %s Packages\n' "$(date -Ru)" "$(sha256sum Packages | cut -d ' ' -f 1)" \
    "$(stat -c %s Packages)" > Release
echo 'deb [trusted=yes] file:/srv/made ./' > /etc/apt/sources.list.d/made.list
"""
MEMORY = "/var/lib/gpunode/cuda"
TOOLKIT = "/usr/local/cuda-12.9"
"""The default, which the system's alternatives name."""


class Cuda(Roles):
    """The play, with the requests of this file."""

    def play(self, *arguments: str) -> Run:
        return super().play("-e", SETTINGS, *arguments)


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cuda]:
    lab = Lab(f"test-cuda-{os.getpid()}")
    folder: Path = tmp_path_factory.mktemp("plays")
    try:
        lab.up(1, "debian-12", ["l40s-4"])
        Roles(Site(lab), folder, "nvidia_repository").done()
        yield Cuda(Site(lab), folder, "cuda")
    finally:
        lab.down()


@pytest.fixture(scope="module")
def bare(cuda: Cuda) -> tuple[set[str], list[str]]:
    return cuda.site.packages(), cuda.site.snapshot()


@pytest.fixture(scope="module")
def announced(cuda: Cuda, bare: tuple[set[str], list[str]]) -> Run:
    run = cuda.done("--check")
    assert cuda.site.snapshot() == bare[1]
    return run


@pytest.fixture(scope="module")
def installed(cuda: Cuda, announced: Run) -> Run:
    return cuda.done()


def versions(site: Site) -> dict[str, str]:
    return dict(line.split()[:2] for line in site.packages() if line.endswith(" installed"))


def test_without_a_request_nothing_happens(cuda: Cuda, bare: tuple[set[str], list[str]]) -> None:
    run = cuda.done("-e", '{"cuda_toolkit": []}')
    assert run.recap["changed"] == 0
    assert cuda.site.snapshot() == bare[1]


def test_the_real_run_changes_what_was_announced(
    cuda: Cuda, bare: tuple[set[str], list[str]], announced: Run, installed: Run
) -> None:
    assert announced.paths == installed.paths == OWN_FILES | {MEMORY, TOOLKIT}
    before = dict(line.split()[:2] for line in bare[0] if line.endswith(" installed"))
    new = {f"{name}={version}" for name, version in versions(cuda.site).items() if before.get(name) != version}
    assert new == yaml_list(announced.output, "install")
    assert cuda.site.held() == yaml_list(announced.output, "hold")


def test_both_toolkits_stand_with_one_default_and_no_driver(cuda: Cuda, installed: Run) -> None:
    packages = versions(cuda.site)
    assert {"cuda-toolkit-12-9", "cuda-toolkit-13-0"} <= packages.keys()
    assert packages["cuda-toolkit-config-common"].startswith("13.0.")
    assert packages["cuda-toolkit-12-config-common"].startswith("12.9.")
    assert "+cuda12.9" in packages["libnccl2"]
    assert "libcudnn9-cuda-12" in packages
    assert not [
        name for name in packages if name.startswith(("nvidia-driver", "nvidia-kernel", "libcuda1", "cuda-drivers"))
    ]
    assert "release 12.9" in cuda.site.sh("bash -lc 'nvcc --version'")
    assert "release 13.0" in cuda.site.sh("/usr/local/cuda-13.0/bin/nvcc --version")
    environment = cuda.site.sh("bash -lc '. /etc/profile; echo $PATH $LD_LIBRARY_PATH'")
    assert environment.count("/usr/local/cuda/bin") == 1
    assert environment.count("/usr/local/cuda/lib64") == 1


def test_nothing_of_it_moves_by_itself(cuda: Cuda, installed: Run) -> None:
    assert "Inst" not in cuda.site.sh("apt-get --simulate dist-upgrade | grep -e cuda -e cudnn -e nccl || true")
    policy = cuda.site.sh("apt-cache policy cuda-toolkit-config-common libnccl2")
    assert "Candidate: 13.0." in policy
    assert "13.2." in policy


def test_a_second_run_changes_nothing(cuda: Cuda, installed: Run) -> None:
    before = cuda.site.snapshot()
    run = cuda.done()
    assert run.recap["changed"] == 0, run.changed
    assert cuda.site.snapshot() == before


def test_what_is_damaged_is_repaired_and_nothing_else(cuda: Cuda, installed: Run) -> None:
    before = cuda.site.snapshot()
    cuda.site.sh(
        "apt-get purge -y -q --allow-change-held-packages cuda-toolkit-12-9; apt-mark unhold libnccl2;"
        "rm /etc/apt/preferences.d/gpunode-cuda.pref;"
        "apt-get install -y -q --allow-change-held-packages cuda-toolkit-config-common;"
        "update-alternatives --set cuda /usr/local/cuda-13.0"
    )
    assert versions(cuda.site)["cuda-toolkit-config-common"].startswith("13.3.")
    for path in OWN_FILES:
        cuda.site.sh(f"echo '# damaged' > {path}")
    announced = cuda.done("--check")
    run = cuda.done()
    assert run.paths == announced.paths == OWN_FILES | {TOOLKIT}
    assert set(run.changed) == set(announced.changed) >= {"Run commands that apply the files"}
    assert cuda.site.snapshot() == before


def test_a_toolkit_that_the_repository_has_not_is_refused_with_what_it_has(cuda: Cuda, installed: Run) -> None:
    before = cuda.site.snapshot()
    run = cuda.play("-e", '{"cuda_toolkit": ["12.9", "12.8.0"], "cuda_default": "12.9"}')
    assert run.rc != 0
    assert "cuda-toolkit-12-8 12.8.0-*; they have 12.8.1" in " ".join(run.output.split())
    assert cuda.site.snapshot() == before


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("nvidia-persistenced", "would also touch [^:]*nvidia-persistenced"),
        ("nvidia-fabricmanager", "would also touch [^:]*nvidia-fabricmanager"),
        # The newest driver's modules require a dkms that this system does not have: apt itself refuses.
        ("cuda-drivers", r"dkms \(>="),
    ],
)
def test_a_transaction_that_would_bring_a_part_of_a_driver_is_refused(
    cuda: Cuda, installed: Run, package: str, words: str
) -> None:
    before = cuda.site.packages()
    cuda.site.sh(f"package={package}\n{TREACHEROUS}")
    try:
        run = cuda.play("-e", '{"cuda_toolkit": ["12.8", "12.9"], "cuda_default": "12.9"}')
    finally:
        cuda.site.sh("rm -r /etc/apt/sources.list.d/made.list /srv/made")
    assert run.rc != 0
    assert re.search(words, " ".join(run.output.split())), run.output[-2000:]
    assert cuda.site.packages() == before


def test_absent_restores_the_node(cuda: Cuda, bare: tuple[set[str], list[str]], installed: Run) -> None:
    announced = cuda.done("--check", "-e", "cuda_state=absent")
    run = cuda.done("-e", "cuda_state=absent")
    assert announced.paths == run.paths
    assert cuda.site.packages() == bare[0]
    assert cuda.site.snapshot() == bare[1]
    assert cuda.done("-e", "cuda_state=absent").recap["changed"] == 0
