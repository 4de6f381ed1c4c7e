"""Each rule that refuses or warns: a case that it lets pass, and one that it does not."""

from datetime import date
from typing import Any

import pytest
from stack_samples import case, group, on_node, reported

from gpunode.stack.rules import rules

Settings = dict[str, Any]
BLACKWELL_PRO = "RTX PRO 6000 Blackwell Server Edition"
MIXED = on_node(
    ("nvidia-dkms-580-open", "580.95.05-1", "nvidia"),
    ("libnvidia-compute-580", "580.95.05-0ubuntu0.24.04.1", "ubuntu"),
)
DEBIAN = on_node(("nvidia-kernel-dkms", "535.261.03-1", "debian"))

BOOKWORM: Settings = {"os": "debian-12", "source": "debian", "version": "535.309.01", "flavour": "proprietary"}
TRIXIE: Settings = {"os": "debian-13", "source": "debian", "version": "550.163.01"}
A100_SXM = "A100 SXM4 80GB"

Row = tuple[str, tuple[list[Any], Settings], tuple[list[Any], Settings], str]
REFUSED: list[Row] = [
    # rule, what passes, what is refused, words of the refusal
    (
        "R01-minor-floor",
        (["A100"], {"cuda": "13.0"}),
        (["A100"], {"cuda": "13.0", "version": "570.211.01"}),
        "580.65.06",
    ),
    (
        "R01-minor-floor",
        (["A100"], {"toolkit": "12.9"}),
        (["T4"], {"toolkit": "12.9", "version": "470.256.02"}),
        "525.60",
    ),
    ("R03-arch-last-branch", (["V100"], {}), (["V100"], {"version": "595.91.07"}), "up to branch 580"),
    ("R03-arch-last-branch", (["K80"], {"version": "470.256.02"}), (["K80"], {"version": "510.108.03"}), "branch 470"),
    ("R04-arch-cuda", (["V100"], {"cuda": "12.9"}), (["V100"], {"cuda": "13.0"}), "compute capability 7.5"),
    ("R04-arch-cuda", (["K80"], {"cuda": "11.8"}), (["K80"], {"cuda": "12.0"}), "below the floor of CUDA 12"),
    ("R04-arch-cuda", (["T4"], {"toolkit": "13.0"}), (["P100"], {"toolkit": "13.0"}), "the host's toolkit"),
    ("R05-arch-first-cuda", (["B200"], {"cuda": "12.8"}), (["B200"], {"cuda": "12.6"}), "CUDA 12.8 and later do"),
    (
        "R05-arch-first-cuda",
        (["L40S"], {"version": "520.61.05"}),
        (["L40S"], {"version": "515.105.01"}),
        "CUDA 11.8 and later do",
    ),
    ("R06-open-required", (["B200"], {}), (["B200"], {"flavour": "proprietary"}), "requires the open kernel modules"),
    ("R06-open-required", (["GH200"], {}), (["GH200"], {"flavour": "proprietary"}), "requires the open kernel modules"),
    ("R07-proprietary-required", (["V100"], {"flavour": "proprietary"}), (["V100"], {}), "proprietary kernel modules"),
    (
        "R08-no-proprietary",
        (["A100"], {"version": "610.57.04", "flavour": "proprietary"}),
        (["A100"], {"version": "620.70.06", "flavour": "proprietary"}),
        "only open",
    ),
    ("R08-no-proprietary", (["T4"], {"version": "515.105.01"}), (["T4"], {"version": "510.108.03"}), "no open"),
    ("R09-mixed-flavour", (["V100", "A100"], {}), (["V100", "B200"], {}), "a node loads one of them"),
    (
        "R10-gpu-min-driver",
        ([BLACKWELL_PRO], {"version": "575.57.08"}),
        ([BLACKWELL_PRO], {"version": "575.51.02"}),
        "575.57.08 or newer",
    ),
    (
        "R10-gpu-min-driver",
        ([], {"platform": "hgx-b200-8", "version": "570.133.20"}),
        ([], {"platform": "hgx-b200-8", "version": "570.124.06"}),
        "570.133.20 or newer",
    ),
    ("R10-gpu-min-driver", (["B200"], {"version": "570.133.20"}), (["B200"], {"version": "570.86.15"}), "570.133.20"),
    ("R10-gpu-min-driver", (["B300"], {"version": "580.82.07"}), (["B300"], {"version": "580.65.06"}), "before 580.82"),
    (
        "R10-gpu-min-driver",
        (["B300"], {"version": "580.82.07"}),
        (["B300"], {"version": "570.211.01"}),
        "no release of",
    ),
    (
        "R10-gpu-min-driver",
        (["L40S"], {"version": "535.104.05", "flavour": "proprietary"}),
        (["L40S"], {"version": "535.54.03", "flavour": "proprietary"}),
        "before 535.104.05",
    ),
    ("R05-arch-first-cuda", (["B300"], {"cuda": "12.9"}), (["B300"], {"cuda": "12.8"}), "CUDA 12.9 and later do"),
    (
        "R05-arch-first-cuda",
        (["A40"], {"version": "455.32.00"}),
        (["A40"], {"version": "450.248.02"}),
        "CUDA 11.1 and later do",
    ),
    (
        "R23-kernel-floor",
        (["A100"], {"kernel": "3.10.0-1160.el7", "version": "550.163.01", "flavour": "proprietary"}),
        (["A100"], {"kernel": "4.14.0-1", "flavour": "proprietary"}),
        "4.15",
    ),
    (
        "R13-branch-eol",
        (["A100"], {"past_eol": "refuse"}),
        (["A100"], {"past_eol": "refuse", "version": "535.309.01"}),
        "2026-06-01",
    ),
    ("R15-distro-repo", (["A100"], {}), (["A100"], {"os": "ubuntu-26.04"}), "starts at branch 595"),
    ("R15-distro-repo", (["A100"], {}), (["A100"], {"source": "debian"}), "has no source 'debian'"),
    (
        "R15-distro-repo",
        (["A100"], BOOKWORM | {"version": "535.261.03", "flavour": "open", "decided_by": "wish"}),
        (["A100"], BOOKWORM | {"version": "535.261.03", "flavour": "open", "decided_by": "repository"}),
        "apt does not install them together",
    ),
    ("R15-distro-repo", (["A100"], BOOKWORM), (["A100"], BOOKWORM | {"version": "550.163.01"}), "ends at branch 535"),
    (
        "R15-distro-repo",
        (["A100"], BOOKWORM | {"decided_by": "wish", "version": "535.261.03"}),
        (["A100"], BOOKWORM | {"decided_by": "wish", "version": "535.54.03"}),
        "has only",
    ),
    (
        "R15-distro-repo",
        (["A100"], TRIXIE | {"version": "535.274.02", "flavour": "proprietary"}),
        (["A100"], TRIXIE | {"version": "535.274.02"}),
        "no packages of branch 535 with open modules",
    ),
    ("R16-repo-mix", (["T4"], {"installed": DEBIAN, "os": "debian-12"}), (["T4"], {"installed": MIXED}), "nvidia and"),
    ("R21-no-service", ([group(A100_SXM, 1)], BOOKWORM), ([group(A100_SXM, 8)], BOOKWORM), "fabric-manager"),
    ("R21-no-service", ([group("B200", 8)], {}), ([group("B200", 8)], {"source": "ubuntu"}), "nvlsm"),
    ("R22-host-arch", (["GH200"], {"arch": "aarch64"}), (["GH200"], {"arch": "x86_64"}), "aarch64, not x86_64"),
    (
        "R22-host-arch",
        ([], {"platform": "gb200-nvl72-tray-4", "arch": "aarch64"}),
        ([], {"platform": "hgx-2-16", "arch": "aarch64"}),
        "x86_64",
    ),
    ("R23-kernel-floor", (["A100"], {"kernel": "4.15.0-20-generic"}), (["A100"], {"kernel": "4.4.0-210-x"}), "4.15"),
    (
        "R24-toolkit-source",
        (["A100"], TRIXIE | {"toolkit": "12.4"}),
        (["A100"], TRIXIE | {"toolkit": "12.9"}),
        "no CUDA toolkit 12.9",
    ),
    (
        "R20-framework",
        (["L40S"], {"framework": "pytorch==2.13"}),
        (["L40S"], {"framework": "pytorch==2.16"}),
        "planned",
    ),
    ("R25-driver-range", (["T4"], {"driver": ">=580,<581"}), (["T4"], {"driver": ">=590"}), "outside"),
]


@pytest.mark.parametrize(("rule", "good", "bad", "words"), REFUSED)
def test_a_rule_refuses_only_what_it_is_about(
    rule: str, good: tuple[list[Any], Settings], bad: tuple[list[Any], Settings], words: str
) -> None:
    assert [verdict.text for verdict in reported(rule, case(*good[0], **good[1])) if verdict.refuses] == []
    refusals = [verdict.text for verdict in reported(rule, case(*bad[0], **bad[1])) if verdict.refuses]
    assert len(refusals) == 1
    assert words in refusals[0]


COMPAT: Settings = {"version": "535.261.03", "cuda": "13.0", "compat": "13.0", "today": date(2026, 1, 15)}


@pytest.mark.parametrize(
    ("change", "gpu", "words"),
    [
        ({"version": "580.95.05"}, "A100", "does not exist for branch 580"),
        ({"today": date(2026, 11, 20)}, "A100", "which ended on 2026-06-01"),
        ({"os": "debian-12", "source": "debian", "toolkit": "13.0"}, "A100", "has no cuda-compat-13-0"),
        ({}, "RTX 4090", "error 804"),
    ],
)
def test_forward_compatibility_holds_only_where_nvidia_documents_it(change: Settings, gpu: str, words: str) -> None:
    assert [v.text for v in reported("R14-compat-matrix", case("A100", **COMPAT)) if v.refuses] == []
    refusals = [v.text for v in reported("R14-compat-matrix", case(gpu, **(COMPAT | change))) if v.refuses]
    assert any(words in text for text in refusals), refusals


def test_an_image_brings_its_own_compat_library() -> None:
    """Containers take the library inside their image, so that the host's source need not have it."""
    in_image = case("A100", **(COMPAT | {"os": "debian-12", "source": "debian"}))
    verdicts = reported("R14-compat-matrix", in_image)
    assert not any(verdict.refuses for verdict in verdicts)
    assert any("in an image with cuda-compat-13-0" in verdict.text for verdict in verdicts)


def test_an_end_that_nobody_promised_does_not_refuse_forward_compatibility() -> None:
    after: Settings = {"version": "590.48.01", "cuda": "13.4", "compat": "13.4", "today": date(2027, 1, 15)}
    verdicts = reported("R14-compat-matrix", case("A100", **after))
    assert not any(verdict.refuses for verdict in verdicts)
    assert any("2026-12-22 (not sure)" in verdict.text for verdict in verdicts)


WARNED: list[Row] = [
    ("R02-native", (["A100"], {"cuda": "13.0"}), (["A100"], {"cuda": "13.2"}), "minor-version compatibility"),
    ("R11-fm-exact", ([group("H100 SXM", 8)], {}), ([group("H100 SXM", None)], {}), "depend on the board"),
    ("R11-fm-exact", ([group("H100 SXM", 1)], {}), ([group("H100 SXM", 7)], {}), "no board with that number"),
    ("R13-branch-eol", (["A100"], {}), (["A100"], {"version": "570.211.01"}), "past its end of life"),
    ("R13-branch-eol", (["A100"], {}), (["A100"], {"version": "590.48.01"}), "superseded by 595"),
    ("R13-branch-eol", (["A100"], {}), (["A100"], {"version": "620.70.06"}), "is unknown"),
    (
        "R15-distro-repo",
        (["A100"], {"decided_by": "wish"}),
        (["A100"], {"decided_by": "wish", "version": "580.999"}),
        "is not a release of",
    ),
    ("R21-no-service", (["A100"], {}), (["A100"], BOOKWORM), "has no dcgm"),
    ("R26-kernel-policy", (["A100"], {}), (["A100"], {"kernel_policy": "hold"}), "changes nothing"),
]


@pytest.mark.parametrize(("rule", "good", "bad", "words"), WARNED)
def test_a_rule_warns_only_of_what_it_is_about(
    rule: str, good: tuple[list[Any], Settings], bad: tuple[list[Any], Settings], words: str
) -> None:
    assert reported(rule, case(*good[0], **good[1])) == []
    verdicts = reported(rule, case(*bad[0], **bad[1]))
    assert verdicts
    assert not any(verdict.refuses for verdict in verdicts)
    assert words in verdicts[0].text


def test_t4_is_not_warned_of_by_its_unreliable_list() -> None:
    assert reported("R10-gpu-min-driver", case("T4", version="535.309.01")) == []


def test_a_name_for_several_models_is_refused_only_where_all_are() -> None:
    """Of the RTX PRO 6000 family only the Server Edition has a documented minimum above 570.133.07."""
    family = group("RTX PRO 6000")
    assert len(family.models) > 1
    verdicts = reported("R10-gpu-min-driver", case(family, version="570.211.01"))
    assert [verdict.refuses for verdict in verdicts] == [False]
    assert "Server Edition" in verdicts[0].text


def test_a_switch_of_source_is_a_request() -> None:
    assert reported("R16-repo-mix", case("A100", installed=MIXED, source="nvidia")) == []


def test_a_driver_from_a_run_file_is_another_publisher() -> None:
    by_hand = on_node().model_copy(update={"runfile": "/usr/bin/nvidia-uninstall"})
    refusal = reported("R16-repo-mix", case("A100", installed=by_hand))
    assert [verdict.refuses for verdict in refusal] == [True]
    assert "a .run file" in refusal[0].text
    switch = reported("R16-repo-mix", case("A100", installed=by_hand, source="nvidia"))
    assert [verdict.refuses for verdict in switch] == [False]
    assert "/usr/bin/nvidia-uninstall" in switch[0].text


def test_a_publisher_that_is_no_source_is_refused() -> None:
    foreign = on_node(("nvidia-dkms-580", "580.95.05-0ubuntu0~gpu24.04.1", "graphics-drivers-ppa"))
    verdicts = reported("R16-repo-mix", case("A100", installed=foreign))
    assert [verdict.refuses for verdict in verdicts] == [True]
    assert "graphics-drivers-ppa" in verdicts[0].text


def test_every_rule_that_judges_is_tested_here() -> None:
    judging = {rule.id for rule in rules if rule.ask or rule.judge}
    assert judging == {row[0] for row in REFUSED} | {row[0] for row in WARNED} | {"R14-compat-matrix"}
