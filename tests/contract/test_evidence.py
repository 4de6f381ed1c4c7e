"""Package names of NVIDIA's in the catalogue and in the roles against the recorded indexes; prints what is unsure.

A name passes where the index of that system and branch has it; where it is there by derivation or assumption alone
(``sure: false`` in the record, or a row of ``assumed.yml``), it is printed as unsure. A name that is in no index fails,
unless the row marks it ``unsure`` or it is one of the exceptions below, each with its reason.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpunode.catalog import Catalog
from gpunode.catalog.software import PackageSet
from gpunode.lab.packages.plan import contents, recorded_in
from gpunode.lab.packages.recorded import recorded
from gpunode.lab.packages.rows import repositories

ROOT = Path(__file__).resolve().parents[2]
CATALOG = Catalog()
# Repository of the lab → system of the catalogue.
SYSTEMS = {
    "ubuntu2204": "ubuntu-22.04",
    "ubuntu2404": "ubuntu-24.04",
    "ubuntu2604": "ubuntu-26.04",
    "debian12": "debian-12",
    "debian13": "debian-13",
    "rhel9": "rhel-9",
    "rhel10": "rhel-10",
}
BRANCHES = (570, 580, 590, 595, 610)
# Components with packages that carry the driver's version: the rest is independent of the branch and hardly recorded.
WITH_DRIVER = {"driver", "fabric-manager", "nscq", "imex", "nvsdm"}
PACKAGE = re.compile(
    r"(nvidia-(open|headless|driver|dkms|utils|compute-utils|kernel|firmware|fabric|imex|modprobe|persistenced|settings|"
    r"kmod|xconfig|libXNVCtrl|container)|libnvidia-|libnvsdm|libnvcuvid|libcuda[0-9]|libcudadebugger|libxnvctrl|nvlsm$|nvlink5|"
    r"cuda-drivers|cuda-compat|cuda-keyring|kmod-nvidia|datacenter-gpu-manager|xserver-xorg-video-nvidia|"
    r"firmware-nvidia|xorg-x11-nvidia)[a-z0-9+.-]*"
)
# Words of the roles that look like packages and are none: units, programs, files, variables of the roles.
NO_PACKAGE = re.compile(
    r"\.(service|conf|socket|path|timer|list|repo|pref|sources|asc|so|sh|py|yml|cfg|rules|d)\b|"
    r"^nvidia-container-(runtime|cli|runtime-hook)$|\.so\b"
)


@cache
def known(repository: str) -> dict[tuple[str, int], bool]:
    """(name, branch) → whether the name is recorded there; False: derived, or assumed."""
    by_name: dict[tuple[str, int], bool] = {}
    for offer in recorded_in(repositories()[repository]):
        head = offer.release.partition(".")[0]
        if head.isdigit():
            sure = offer.sure and "names_before_580" not in offer.assumed
            by_name[offer.name, int(head)] = by_name.get((offer.name, int(head)), False) or sure
    return by_name


def named(repository: str) -> Iterator[tuple[str, PackageSet, int, list[str]]]:
    """What the catalogue names there: id of the row, row, branch, the alternatives of one entry."""
    system = CATALOG.systems[SYSTEMS[repository]]
    first = getattr(system.origins.get("nvidia"), "first_branch", None) or 0
    for key, row in CATALOG.packages.items():
        if row.origin != "nvidia" or row.family != system.family or row.component not in WITH_DRIVER:
            continue
        if row.systems and SYSTEMS[repository] not in row.systems:
            continue
        for branch in BRANCHES:
            branches = {int(release.partition(".")[0]) for release in repositories()[repository].releases}
            if branch not in branches or not max(row.first_branch or 0, first) <= branch <= (row.last_branch or 9999):
                continue
            for entry in row.names:
                yield key, row, branch, [name.strip().format(branch=branch) for name in entry.split("|")]


@pytest.mark.parametrize("repository", SYSTEMS)
def test_every_name_of_the_catalogue_is_recorded_or_marked_unsure(
    repository: str, capsys: pytest.CaptureFixture[str]
) -> None:
    absent: list[str] = []
    unsure: list[str] = []
    looked = 0
    for key, row, branch, alternatives in named(repository):
        looked += 1
        sure = [known(repository)[name, branch] for name in alternatives if (name, branch) in known(repository)]
        where = f"{repository} {branch} {' | '.join(alternatives)} ({key})"
        if not any(sure):
            (unsure if sure or "names" in row.unsure else absent).append(where)
    with capsys.disabled():
        sys.stdout.write("".join(f"\nunsure: {line}" for line in unsure))
    assert looked > 4
    assert absent == []


@cache
def all_names() -> set[str]:
    """Every name that the lab offers or a recorded index has, without the branch."""
    names = {built.name for row in repositories().values() for built in contents(row)}
    for system in (ROOT / "gpunode/lab/packages/data/recorded").glob("*.yml"):
        if system.stem != "assumptions":
            names |= set(recorded(system.stem)["packages"])
    return names


def test_a_name_that_is_gone_is_no_recorded_name() -> None:
    assert ("nvidia-utils-580", 580) in known("ubuntu2404")
    names = {name for name, _ in known("ubuntu2404")}
    assert not names & {"nvidia-utils", "nvidia-utils-595", "nvidia-utils-610"}
    assert not is_known("nvidia-utils")


def words(file: Path) -> Iterator[str]:
    """Yield the strings of YAML and Python, alternatives (``a | b``) one by one, and the words of other text."""
    text = file.read_text(encoding="utf-8")
    if file.suffix not in (".py", ".yml"):
        without_addresses = re.sub(r"\S+/\S+", " ", text)
        yield from (word.rstrip(".-") for word in re.findall(r"[A-Za-z0-9.+*{}_-]+", without_addresses))
        return
    strings: list[Any] = []
    if file.suffix == ".py":
        strings = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    else:
        left = [*yaml.load_all(text, yaml.CSafeLoader)]
        while left:
            item = left.pop()
            if isinstance(item, dict):
                left += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                left += item
            else:
                strings.append(item)
    for item in strings:
        if isinstance(item, str):
            yield from (word.strip().replace(".*", "*") for word in item.split("|"))


def _filled(word: str) -> str:
    return re.sub(r"\{[a-z_]*\}", "580", word.replace("{cuda}", "13-0").replace("{cuda_major}", "13"))


def is_known(word: str) -> bool:
    """Whether a recorded name fits: the word itself, with any branch for its braces, or what it is the beginning of."""
    bare = _filled(word)
    same = {re.sub(r"-5\d\d(?=-|$)", "-580", name) for name in all_names()} | all_names()
    if bare.endswith(("*", "-")):
        return any(name.startswith(bare.rstrip("*")) for name in same)
    return bare in same or any(re.match(re.escape(bare) + r"[0-9]", name) for name in same)


SEARCHED = (
    "roles",
    "plugins",
    "playbooks",
    "molecule",
    "docs",
    "README.md",
    "gpunode",
    ":!gpunode/lab",
    ":!docs/lab-vendor.md",
)


def test_every_name_in_the_repository_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """A name may end in a wildcard or hold the branch in braces; then a recorded name has to fit.

    The lab and the page that is generated from it are left out: they are made from the record.
    """
    done = subprocess.run(
        ["git", "ls-files", *SEARCHED],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    unknown: dict[str, set[str]] = {}
    looked = set()
    for file in done.stdout.split():
        if not file.endswith((".py", ".yml", ".j2", ".md")):
            continue
        for word in words(ROOT / file):
            bare = _filled(word).rstrip("*-")
            if PACKAGE.fullmatch(bare) and not NO_PACKAGE.search(word):
                looked.add(word)
                if not is_known(word):
                    unknown.setdefault(word, set()).add(file)
    with capsys.disabled():
        lines = (f"\nin no index: {word}: {DEVIATIONS.get(word, '?')}" for word in sorted(unknown))
        sys.stdout.write(f"\n{len(looked)} names looked at" + "".join(lines))
    assert len(looked) > 120
    assert {word: sorted(files) for word, files in unknown.items() if word not in DEVIATIONS} == {}
    assert set(DEVIATIONS) - set(unknown) == set(), "no longer there, or recorded by now"


_DEBIAN = "Debian's own archive has it, which is real in the lab"
_COMPAT = "forward compatibility by CUDA series; the names of 12-9, 13-0 and 13-2 are recorded"
# Names that no index records and that are there on purpose; each with the reason.
DEVIATIONS: dict[str, str] = {
    "nvidia-driver-full": _DEBIAN,
    "libnvcuvid1": _DEBIAN,
    "libnvidia-tesla-470-cuda1": _DEBIAN,
    "libnvidia-tesla-535-cuda1": _DEBIAN,
    "nvidia-open-kernel-dkms": _DEBIAN,
    "nvidia-open-kernel-support": _DEBIAN,
    "nvidia-open-gpu-kernel-modules": "the name of a source package of Debian's",
    "nvidia-compute-utils": "the beginning of names with a branch",
    "datacenter-gpu-manager-4": "the beginning of the names of DCGM 4",
    "cuda-compat": "the catalogue's word for a component",
    "nvidia-container": "what errors of the container toolkit begin with",
    "nvidia-kernel": "the beginning of names, in a scenario's test",
    **{f"cuda-compat-{series}": _COMPAT for series in ("12-2", "12-3", "12-4", "12-5", "12-6", "12-8")},
    **{f"cuda-compat-{series}": _COMPAT for series in ("13-1", "13-3", "13-4")},
}
