"""Which transaction the driver's plan becomes, by a real apt over the recorded indexes; nothing is installed."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from apt_scripts import load
from driver_samples import APT, BUNDLE, apt_plan, facts_of, stack_of
from effort import EVERYTHING
from recorded_world import DISTRIBUTIONS_DKMS, RELEASES, World, stanza

from gpunode.catalog.origins import closure_line, upstream_version
from gpunode.provisioning.driver.files import preferences_text
from gpunode.provisioning.templates import rendered
from gpunode.provisioning.transaction import RELEASE

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="this machine has no apt")

SYSTEMS = {
    "ubuntu2204": ("ubuntu", "22.04"),
    "ubuntu2404": ("ubuntu", "24.04"),
    "ubuntu2604": ("ubuntu", "26.04"),
    "debian12": ("debian", "12"),
    "debian13": ("debian", "13"),
}
GPUS = {"T4": ("1eb8", 1, ()), "L40S": ("26b9", 4, ()), "H100": ("2330", 8, ("22a3",) * 4)}
"""Device id and number of the GPUs, and NVSwitches beside them."""
TEXTS = partial(rendered, "nvidia_driver", site="")
OTHERS = {"libxnvctrl0": "ubuntu"}
"""Packages with a driver's names that the distribution publishes."""


@pytest.fixture
def preview(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load("apt_transaction")
    monkeypatch.setattr(module, "PAUSES_S", ())
    return module


class Node:
    """A node in a world of recorded indexes: what the role plans for it, and what apt makes of that."""

    def __init__(self, world: World, gpus: str, preview: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.preview = world, preview
        facts = facts_of(BUNDLE)
        distribution, version = SYSTEMS[world.system]
        device, count, switches = GPUS[gpus]
        bus = [(f"0000:{slot:02x}:00.0", device, "030200") for slot in range(16, 16 + count)]
        bus += [(f"0000:{slot:02x}:00.0", switch, "068000") for slot, switch in enumerate(switches)]
        pci = [
            {
                "slot": slot,
                "vendor_id": "10de",
                "device_id": device_id,
                "class_id": kind,
                "subsystem_id": None,
                "driver": None,
            }
            for slot, device_id, kind in bus
        ]
        bare = {"pci": pci, "packages": [], "module_files": [], "dkms": [], "loaded_driver": None, "kernels": []}
        self.facts = {**facts, **bare, "os": {**facts["os"], "id": distribution, "version_id": version}}
        monkeypatch.setattr(preview, "APT", world.apt)
        monkeypatch.setattr(preview, "STATUS", world.status)
        monkeypatch.setattr(preview, "LISTS", world.folder / "no-lists")
        monkeypatch.setenv("DPKG_ADMINDIR", str(world.folder / "admin"))

    def seen(self) -> dict[str, Any]:
        """The node's facts with what is installed by now."""
        rows = [
            {
                "name": name,
                "version": version,
                "architecture": "amd64",
                "source": name,
                "maintainer": "NVIDIA CORPORATION <cudatools@nvidia.com>",
                "installed": True,
                "state": "install ok installed",
                "held": False,
                "published": OTHERS.get(name, "nvidia"),
            }
            for name, version in self.world.installed.items()
            if name.startswith(("nvidia", "libnv", "libcuda", "libxnv", "cuda", "firmware", "xserver"))
        ]
        return {**self.facts, "packages": rows}

    def ask(self, **requests: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """(facts, stack, what apt printed)."""
        self.world.write_status()
        facts = self.seen()
        stack = stack_of(facts, **requests)
        plan = apt_plan(facts, self.apt_state(), stack)
        question = plan.question.model_dump(mode="json")
        etc, folder = self.world.apt, self.world.folder
        cuda = self.world.line("cuda") if stack["source"] == "nvidia" else ""
        low = "Package: *\nPin: release o=NVIDIA, l=NVIDIA CUDA\nPin-Priority: 100\n"
        files = {
            f"{etc}/sources.list.d/gpunode-nvidia-cuda.list": cuda,
            f"{etc}/preferences.d/gpunode-nvidia-cuda.pref": low,
            f"{etc}/preferences.d/gpunode-nvidia-driver.pref": preferences_text(plan, RELEASE, TEXTS),
            f"{etc}/apt.conf.d/52own": (f'{self.world.settings}Dir::Etc::preferences "{folder}/none";\n'),
        }
        return facts, stack, self.preview.answer({**question, "files": files, "simulate": True})

    def apt_state(self) -> dict[str, Any]:
        return {**APT, "installed": dict(self.world.installed), "lists": True}

    def closure(self) -> dict[str, str]:
        """Installed packages of the driver with their releases."""
        return {
            name: upstream_version(version)
            for name, version in self.world.installed.items()
            if name not in OTHERS and closure_line(name, name, "nvidia")
        }


@pytest.fixture
def node_of(tmp_path: Path, preview: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(system: str, gpus: str = "H100", dkms: str | None = "") -> Node:
        world = World(tmp_path, system)
        if dkms == "":
            world.installed["dkms"] = DISTRIBUTIONS_DKMS[system]
        return Node(world, gpus, preview, monkeypatch)

    return made


CELLS = [
    (system, branch)
    for system, releases in RELEASES.items()
    for branch in ("580", "595", "610")
    if any(release.startswith(branch) for release in releases)
]
MATRIX = [
    (*cell, gpus)
    for number, cell in enumerate(CELLS)
    for turn, gpus in enumerate(GPUS)
    if EVERYTHING or turn == number % len(GPUS)
]
"""The kinds of GPUs take turns; with GPUNODE_TEST_ALL=1 every one is tried everywhere."""


@pytest.mark.parametrize(("system", "branch", "gpus"), MATRIX)
def test_a_bare_node_gets_the_whole_closure_at_one_release(node_of: Any, system: str, branch: str, gpus: str) -> None:
    node = node_of(system, gpus)
    facts, stack, output = node.ask(version=branch)
    assert apt_plan(facts, node.apt_state(), stack, output).refusals == ()
    node.world.carry_out(output)
    releases = [release for release in RELEASES[system] if release.startswith(branch)]
    assert set(node.closure().values()) == {releases[-1]}
    smi = (
        "nvidia-driver-cuda"
        if "debian" in system
        else f"nvidia-utils-{branch}"
        if branch == "580"
        else "libnvidia-compute"
    )
    assert smi in node.closure()
    assert ("nvidia-fabricmanager" in node.closure()) == (gpus == "H100")
    old = system in ("ubuntu2204", "ubuntu2404", "debian12")
    assert node.world.installed["dkms"].startswith("1:") == old
    again = apt_plan(node.seen(), node.apt_state(), stack, output)
    assert (again.missing, again.question.remove, again.wrong_versions) == ((), (), [])


def test_where_nothing_was_installed_dkms_comes_in_a_version_that_is_new_enough(node_of: Any) -> None:
    node = node_of("ubuntu2404", dkms=None)
    _, _, output = node.ask(version="595")
    assert output["install"]["dkms"] == "1:3.4.1-1ubuntu1"


@pytest.mark.parametrize("way", [("570", "580", "595", "610"), ("610", "595", "580", "570")], ids=["up", "down"])
def test_every_branch_follows_every_other_in_one_transaction(node_of: Any, way: tuple[str, ...]) -> None:
    node = node_of("ubuntu2404")
    for branch in way:
        facts, stack, output = node.ask(version={"570": "570.172.08"}.get(branch, branch))
        assert apt_plan(facts, node.apt_state(), stack, output).refusals == ()
        node.world.carry_out(output)
        assert {release.split(".")[0] for release in node.closure().values()} == {branch}
        suffixed = [name for name in node.closure() if f"-{branch}" in name]
        assert bool(suffixed) == (int(branch) < 590)


def test_an_exact_release_of_an_old_branch_is_not_overtaken_by_a_metapackage(node_of: Any) -> None:
    node = node_of("debian12")
    _, _, output = node.ask(version="595.91.07")
    assert output["target"] == "595.91.07"
    drivers = {version for name, version in output["install"].items() if "nvidia" in name}
    assert set(map(upstream_version, drivers)) == {"595.91.07"}
    assert all("=" in word for word in output["exact"] if "nvidia" in word), "the whole closure by exact versions"


def test_without_nvidias_dkms_apts_own_reason_is_reported(node_of: Any) -> None:
    node = node_of("ubuntu2204")
    text = (node.world.folder / "cuda" / "Packages").read_text(encoding="utf-8")
    kept = [block for block in text.split("\n\n") if not block.startswith("Package: dkms\n")]
    node.world.publish("cuda", "\n\n".join(kept), "Origin: NVIDIA\nLabel: NVIDIA CUDA\n")
    with pytest.raises(node.preview.AptError, match=r"Depends: dkms \(>= 3\.1\.8\) but"):
        node.ask(version="595")


def test_a_metapackage_that_is_not_there_is_replaced_by_what_it_stands_for(node_of: Any) -> None:
    node = node_of("ubuntu2604", "L40S")
    text = (node.world.folder / "cuda" / "Packages").read_text(encoding="utf-8")
    kept = [block for block in text.split("\n\n") if not block.startswith("Package: nvidia-headless-open\n")]
    node.world.publish("cuda", "\n\n".join(kept), "Origin: NVIDIA\nLabel: NVIDIA CUDA\n")
    _, stack, output = node.ask(version="595", flavour="open")
    node.world.carry_out(output)
    assert {"nvidia-dkms-open", "libnvidia-compute"} <= node.closure().keys()
    again = apt_plan(node.seen(), node.apt_state(), stack, output)
    assert again.missing == ()


def test_a_source_that_nothing_needs_may_fail_and_one_that_is_needed_may_not(node_of: Any) -> None:
    node = node_of("ubuntu2404")
    (node.world.apt / "sources.list.d" / "ppa.list").write_text("deb [trusted=yes] file:/nowhere/ppa ./\n")
    _, _, output = node.ask(version="595")
    assert output["target"] == "595.91.07"
    shutil.rmtree(node.world.folder / "cuda")
    with pytest.raises(node.preview.AptError, match=r"Failed to fetch file:\S*/cuda/"):
        node.ask(version="595")


def test_dkms_goes_back_with_the_switch_to_the_distributions_driver(node_of: Any) -> None:
    node = node_of("ubuntu2404")
    node.world.installed["dkms"] = "1:3.4.1-1ubuntu1"
    node.world.write_status()
    with node.preview.private_apt({f"{node.world.apt}/apt.conf.d/52own": node.world.settings}) as (_, options):
        assert node.preview.refresh(["apt-get", *options], 60) == []
        assert node.preview.restored(options, ["dkms", "dh-dkms"], node.world.installed) == ["dkms=3.0.11-1ubuntu13"]
        assert node.preview.simulation(options, ["install", "dkms=3.0.11-1ubuntu13"])[0] == {"dkms": "3.0.11-1ubuntu13"}


# --- facts that no record settles: the installer works both ways


def rewritten(node: Node, change: Callable[[str], str]) -> None:
    """Publish NVIDIA's repository with each package's stanza changed; an empty one is left out."""
    stanzas = (node.world.folder / "cuda" / "Packages").read_text(encoding="utf-8").strip().split("\n\n")
    changed = [change(block) for block in stanzas]
    assert changed != stanzas
    text = "".join(f"{block}\n\n" for block in changed if block)
    node.world.publish("cuda", text, "Origin: NVIDIA\nLabel: NVIDIA CUDA\n")


def moved(node: Node, branch: str) -> None:
    """Have the node moved to a branch, and see that it has nothing of another."""
    facts, stack, output = node.ask(version={"570": "570.172.08"}.get(branch, branch))
    assert apt_plan(facts, node.apt_state(), stack, output).refusals == ()
    node.world.carry_out(output)
    assert {release.split(".")[0] for release in node.closure().values()} == {branch}, node.closure()
    again = apt_plan(node.seen(), node.apt_state(), stack, output)
    assert (again.missing, again.question.remove, again.wrong_versions) == ((), (), [])


UP_AND_DOWN = ("570", "580", "595", "610", "595", "580", "570")


def test_names_with_a_branch_are_removed_though_nothing_conflicts(node_of: Any) -> None:
    node = node_of("ubuntu2404")
    rewritten(node, lambda text: re.sub(r"(?m)^(Conflicts|Replaces): .*\n", "", text))
    for branch in UP_AND_DOWN:
        moved(node, branch)
        old = {name for name in node.closure() if re.search(r"-5[78]0(-|$)", name)}
        assert {re.findall(r"5[78]0", name)[0] for name in old} <= {branch}


def test_transitional_packages_under_the_old_names_change_nothing(node_of: Any) -> None:
    node = node_of("ubuntu2404")
    text = (node.world.folder / "cuda" / "Packages").read_text(encoding="utf-8")
    for old, new in (("nvidia-utils-580", "libnvidia-compute"), ("libnvidia-cfg1-580", "libnvidia-cfg1")):
        text += stanza(old, "595.91.07-1ubuntu1", [f"{new} (>= 595.91.07)"])
    node.world.publish("cuda", text, "Origin: NVIDIA\nLabel: NVIDIA CUDA\n")
    for branch in ("580", "595", "580"):
        moved(node, branch)


@pytest.mark.parametrize("system", ["debian12", "debian13"])
def test_nvidias_dkms_may_have_no_epoch_on_debian(node_of: Any, system: str) -> None:
    node = node_of(system)
    rewritten(node, lambda text: text.replace("Version: 1:3.4.1-1", "Version: 3.4.1-1"))
    moved(node, "595")
    # Debian 13's own is new enough, and stays.
    assert node.world.installed["dkms"] == {"debian12": "3.4.1-1", "debian13": DISTRIBUTIONS_DKMS["debian13"]}[system]


def test_where_debians_dkms_is_new_enough_nvidias_need_not_be_there(node_of: Any) -> None:
    node = node_of("debian13")
    rewritten(node, lambda text: "" if text.startswith("Package: dkms\n") else text)
    moved(node, "595")


def second_revision(node: Node, *without: str) -> None:
    """Publish 610.57.04 a second time, but for these packages."""
    text = (node.world.folder / "cuda" / "Packages").read_text(encoding="utf-8")
    older = [block for block in text.split("\n\n") if "Version: 610.57.04-1ubuntu1" in block]
    newer = [block.replace("610.57.04-1ubuntu1", "610.57.04-2ubuntu1") for block in older]
    kept = [block for block in newer if block.split()[1] not in without]
    node.world.publish("cuda", text + "\n\n".join([*kept, ""]), "Origin: NVIDIA\nLabel: NVIDIA CUDA\n")


def test_of_two_revisions_of_a_release_the_whole_closure_has_one(node_of: Any) -> None:
    node = node_of("ubuntu2404")
    second_revision(node)
    moved(node, "610")
    revisions = {version for name, version in node.world.installed.items() if closure_line(name, name, "nvidia")}
    assert revisions == {"610.57.04-2ubuntu1"}


def test_a_revision_that_is_there_in_part_is_refused_with_apts_reason(node_of: Any) -> None:
    node = node_of("ubuntu2404")
    second_revision(node, "nvidia-persistenced")
    with pytest.raises(node.preview.AptError, match=r"nvidia-persistenced \(= 610\.57\.04-2ubuntu1\) but"):
        node.ask(version="610")


def test_a_metapackage_may_be_tied_to_its_own_release(node_of: Any) -> None:
    node = node_of("ubuntu2404")
    rewritten(
        node, lambda text: text.replace("(>= ", "(= ") if re.match("Package: (nvidia-open|cuda-d)", text) else text
    )
    for branch in ("580", "595"):
        moved(node, branch)


@pytest.mark.parametrize("strength", ["Depends", "Recommends"])
def test_a_library_that_hwloc_brings_is_not_a_driver(node_of: Any, strength: str) -> None:
    node = node_of("ubuntu2404")
    text = (node.world.folder / "archive" / "Packages").read_text(encoding="utf-8")
    hwloc = stanza("libhwloc-plugins", "2.10.0-1", [], f"{strength}: libxnvctrl0\n")
    node.world.publish("archive", text + hwloc, "Origin: Ubuntu\nLabel: Ubuntu\n")
    node.world.installed |= {"libhwloc-plugins": "2.10.0-1", "libxnvctrl0": "510.47.03-0ubuntu4"}
    moved(node, "595")
    assert node.world.installed.get("libxnvctrl0") in (None, "510.47.03-0ubuntu4")
    if strength == "Depends":
        assert "libhwloc-plugins" in node.world.installed
