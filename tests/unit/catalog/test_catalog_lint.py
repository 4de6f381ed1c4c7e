"""Each rule of the linter is broken by one overlay, and by nothing else."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from catalog_lint import RULES, main
from catalog_lint import problems as lint

from gpunode.catalog import lint as shipped
from gpunode.catalog import load
from gpunode.catalog.catalog import MODELS, Catalog
from gpunode.catalog.read import read
from gpunode.catalog.rows import typed_row
from gpunode.errors import Exit, UsageError

NEW_GPU = """
gpus:
  new:
    name: New GPU
    date: 2026-11-01
    pci: [10de:0001]
    architecture: hopper
    compute_capability: 9.0
    first_branch: 555
"""
NEW_FIGURE = """
expectations:
  new:
    metric: host_to_device
    unit: GB/s
    date: 2026-11-01
    value: 50
    gpu: h100-sxm5-80gb
"""
NEW_SET = """
packages:
  new:
    {component: nvlsm, origin: ubuntu, family: deb, names: [nvlsm], version: null, with_driver: false, date: 2026-11-01}
"""

MUTANTS: list[tuple[str, str, str, str]] = [
    # rule, overlay, key, words of the message
    ("section", "gpu: {}", "gpu", "did you mean gpus"),
    ("section", "defaults: {branchs: {date: 2026-01-01}}", "defaults.branchs", "did you mean branches"),
    ("shape", "gpus: [t4]", "gpus", "mapping from id to row"),
    ("shape", "gpus: {t4: fast}", "gpus.t4", "mapping of fields"),
    ("shape", "defaults: none", "defaults", "mapping from section"),
    ("key", "gpus: {t4: {powr_w: 70}}", "gpus.t4.powr_w", "did you mean power_w"),
    ("key", "gpus: {t4: {pcie: {gen: 3, with: 16}}}", "gpus.t4.pcie.with", "did you mean width"),
    ("key", "gpus: {t4: {colour: red}}", "gpus.t4.colour", "unknown key"),
    ("missing-key", NEW_GPU.replace("architecture", "note"), "gpus.new.architecture", "is missing"),
    ("unit", "gpus: {t4: {memory_gib: 16}}", "gpus.t4.memory_gib", "stored in GB (10^9 bytes), as memory_gb"),
    ("unit", "gpus: {t4: {power_mw: 70000}}", "gpus.t4.power_mw", "stored in W, as power_w"),
    ("unit", "gpus: {t4: {memory_gb: 16 GiB}}", "gpus.t4.memory_gb", "a number in GB"),
    ("value", "gpus: {t4: {form: card}}", "gpus.t4.form", "'card' is not one of pcie, sxm"),
    ("value", "gpus: {t4: {mig_instances: many}}", "gpus.t4.mig_instances", "expected a whole number"),
    ("value", "gpus: {t4: {pci: [2330]}}", "gpus.t4.pci.0", "expected a PCI id"),
    ("value", "gpus: {t4: {pcie_judged: maybe}}", "gpus.t4.pcie_judged", "true or false"),
    ("value", "branches: {580: {native_cuda: thirteen}}", "branches.580.native_cuda", "expected a version"),
    ("date", "branches: {580: {points: {580.200.01: 2026-02-31}}}", "branches.580.points.580.200.01", "no such day"),
    ("date", "branches: {580: {released: August}}", "branches.580.released", "expected a date"),
    ("unique-id", "gpus:\n  t4: {note: a}\n  t4: {note: b}", "gpus.t4", "and in line 2"),
    ("source-known", "gpus: {t4: {source: hearsay}}", "gpus.t4.source", "unknown source 'hearsay'"),
    ("unsure-field", "gpus: {t4: {unsure: {memory: x}}}", "gpus.t4.unsure.memory", "not a field of the row"),
    (
        "reference",
        NEW_GPU.replace("hopper", "hoper") + "    modules: open\n",
        "gpus.new.architecture",
        "did you mean hopper",
    ),
    (
        "reference",
        "toolkits: {13.0.0: {branch: 581, driver: null}}",
        "toolkits.13.0.0.branch",
        "unknown driver branch 581",
    ),
    ("reference", "platforms: {t4-1: {gpus: {t5: 1}}}", "platforms.t4-1.gpus.t5", "unknown GPU model 't5'"),
    ("reference", "platforms: {dgx-h100-8: {nvswitch: 10de:22a4}}", "platforms.dgx-h100-8.nvswitch", "10de:22a3"),
    ("reference", "pinning: {ubuntu: {systems: [ubuntu-25.04]}}", "pinning.ubuntu.systems", "unknown operating system"),
    ("reference", "xids: {79: {follow: [990]}}", "xids.79.follow", "unknown Xid '990'"),
    ("reference", "nccl: {2.32.3: {cuda_majors: [14]}}", "nccl.2.32.3.cuda_majors", "unknown CUDA major 14"),
    ("name-once", NEW_GPU + "    aliases: H100 SXM\n", "gpus.new.aliases", "is what h100-sxm5-80gb is called"),
    ("name-once", NEW_GPU + "    families: H100 SXM\n", "gpus.new.families", "the name of h100-sxm5-80gb alone"),
    ("name-once", NEW_GPU + "    product_names: nvidia h200\n", "gpus.new.product_names", "h200-sxm-141gb prints"),
    ("name-once", "platforms: {t4-1: {aliases: [l4-1]}}", "platforms.l4-1.name", "is what t4-1 is called"),
    ("shared-id", NEW_GPU.replace("10de:0001", "10de:2330"), "gpus.new.pci", "10de:2330 is h100-sxm5-80gb's too"),
    (
        "shared-id",
        NEW_GPU.replace("10de:0001", "10de:25b6") + "    subsystems: [10de:14a9]\n",
        "gpus.new.subsystems",
        "is a16's already",
    ),
    (
        "template",
        NEW_SET.replace("[nvlsm]", "['nvlsm-{brnch}']"),
        "packages.new.names",
        "{brnch}; did you mean branch?",
    ),
    ("template", "pinning: {nvidia-suse: {pattern: '*{branch'}}", "pinning.nvidia-suse.pattern", "a brace is open"),
    ("found-once", NEW_SET.replace("ubuntu", "nvidia"), "packages.new", "same question as nvidia-deb-nvlsm"),
    ("found-once", "pinning: {debian: {origin: ubuntu}}", "pinning.debian", "same question as ubuntu"),
    (
        "branch-order",
        NEW_SET[:-2] + ", first_branch: 590, last_branch: 580}\n",
        "packages.new.last_branch",
        "before first",
    ),
    (
        "branch-order",
        "systems: {debian-12: {origins: {debian: {first_branch: 540}}}}",
        "systems.debian-12.origins.debian.last_branch",
        "535 is before first_branch",
    ),
    (
        "range",
        "gpus: {t4: {memory_bandwidth_gb_per_s: 320000}}",
        "gpus.t4.memory_bandwidth_gb_per_s",
        "check the unit",
    ),
    ("range", "gpus: {a40: {nvlink: {gb_per_s: 0.1}}}", "gpus.a40.nvlink.gb_per_s", "outside 50 to 10000"),
    ("memory", "gpus: {t4: {memory_mib: 32000}}", "gpus.t4.memory_mib", "does not fit 16 GB"),
    ("power", "gpus: {t4: {power_range_w: [80, 90]}}", "gpus.t4.power_range_w", "does not hold power_w, 70"),
    ("power", "gpus: {t4: {power_range_w: [90, 60]}}", "gpus.t4.power_range_w", "90 to 60 W"),
    ("capability", NEW_GPU.replace("9.0", "9.1"), "gpus.new.compute_capability", "9.1 is not one of Hopper: 9.0"),
    (
        "capability",
        "architectures: {hopper: {first_cuda: {9.9: 12.0}}}",
        "architectures.hopper.first_cuda",
        "capabilities that differ",
    ),
    ("cuda-floor", "architectures: {volta: {last_cuda: 13}}", "architectures.volta.last_cuda", "13 supports Volta"),
    (
        "value",
        "branches: {580: {points: {590.01: null}}}",
        "branches.580.points",
        "590.01 is not a release of branch 580",
    ),
    (
        "version-branch",
        "toolkits: {13.0.2: {driver: 575.95.05}}",
        "toolkits.13.0.2.driver",
        "not a release of branch 580",
    ),
    ("value", "branches: {next: {date: 2026-01-01, points: {620.1: null}}}", "branches.next", "is a number"),
    ("value", "xids: {lost: {name: X, date: 2025-01-01}}", "xids.lost", "is a number"),
    ("value", "toolkits: {new: {label: x, branch: 620, date: 2026-01-01}}", "toolkits.new", "expected a version"),
    ("value", "gpus: {t4: {id: t5}}", "gpus.t4.id", "the id is the row's key"),
    (
        "date-order",
        "branches: {580: {eol_vendor: 2024-06}}",
        "branches.580.eol_vendor",
        "before the release, 2025-08-04",
    ),
    (
        "date-order",
        "branches: {580: {released: 2027-01-01}}",
        "branches.580.released",
        "after the day the row was checked",
    ),
    (
        "date-order",
        "branches: {580: {points: {580.200.01: 2026-12}}}",
        "branches.580.points.580.200.01",
        "after the day",
    ),
    ("date-order", "branches: {570: {points: {570.999: 2026-06}}}", "branches.570.points.570.999", "end of the branch"),
    ("value", NEW_FIGURE.replace("GB/s", "TFLOPS"), "expectations.new.unit", "host_to_device is stored in GB/s"),
    ("value", NEW_FIGURE + "    kind: measured\n", "expectations.new.band", "measured: is missing"),
    ("value", NEW_FIGURE + "    band: [-0.1, null]\n", "expectations.new.band", "floor: has none"),
    ("value", NEW_FIGURE + "    kind: measured\n    band: [0.1, null]\n", "expectations.new.band", "is relative"),
    (
        "vendor-figure",
        NEW_FIGURE.replace("50", "400"),
        "expectations.new.value",
        "exceeds the maximum of H100 SXM5 80GB, 63.01",
    ),
    (
        "vendor-figure",
        NEW_FIGURE.replace("host_to_device", "memory_bandwidth").replace("50", "3500"),
        "expectations.new.value",
        "exceeds the maximum of H100 SXM5 80GB, 3350",
    ),
    ("range", "bands: {copy-pcie: {share: 80}}", "bands.copy-pcie.share", "outside 0.05 to 1"),
    (
        "services",
        "platforms: {hgx-h100-8: {services: [imex]}}",
        "platforms.hgx-h100-8.services",
        "needs: fabric-manager",
    ),
    ("services", "platforms: {t4-1: {services: [fabric-manager]}}", "platforms.t4-1.services", "needs: none"),
    ("required-bound", "branches: {418: {native_cuda: null}}", "branches.418", "native_cuda is missing"),
    ("required-bound", "branches: {418: {eol_computed: null}}", "branches.418", "eol_vendor, eol_computed"),
    ("required-bound", NEW_GPU.replace("    first_branch: 555\n", ""), "gpus.new", "first_listed, first_branch"),
    (
        "required-bound",
        "systems: {rhel-10: {origins: {nvidia: {first_branch: null}}}}",
        "systems.rhel-10.origins.nvidia",
        "first_branch or branches is missing",
    ),
    (
        "required-bound",
        "systems: {rhel-10: {origins: {nvidia: {first_toolkit: null}}}}",
        "systems.rhel-10.origins.nvidia",
        "first_toolkit is missing",
    ),
    (
        "nvlink-rate",
        "gpus: {h100-nvl: {nvlink: {links: 18}}}",
        "gpus.h100-nvl.nvlink.links",
        "18 links of generation 4",
    ),
    ("toolkit-driver", "toolkits: {12.6.3: {driver: 560.35.06}}", "toolkits.12.6.3.driver", "is not a release of"),
    ("forward-compat", "forward_compat: {13.0: {refused_on: [570]}}", "forward_compat.13.0.works_on", "two lists"),
    ("future", "gpus: {t4: {date: 2199-01-01}}", "gpus.t4.date", "is in the future"),
]


def bombs() -> str:
    """Eight anchors, each holding the one before eight times."""
    names = "abcdefghi"
    return "\n".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]" for a, b in pairwise(names))


def overlay(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "site.yml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_catalog_is_sound() -> None:
    assert [str(problem) for problem in lint(load())] == []


@pytest.mark.parametrize(("rule", "text", "key", "words"), MUTANTS, ids=[f"{m[0]}-{m[2]}" for m in MUTANTS])
def test_a_bad_overlay_breaks_exactly_its_rule(tmp_path: Path, rule: str, text: str, key: str, words: str) -> None:
    path = overlay(tmp_path, text)
    problems = lint(Catalog([read(path)]))
    assert {problem.rule for problem in problems} == {rule}, [str(problem) for problem in problems]
    matching = [problem for problem in problems if problem.key == key]
    assert matching, [str(problem) for problem in problems]
    assert words in matching[0].message
    assert str(matching[0]).startswith(f"{matching[0].file}:{matching[0].line}: {key}: ")
    assert "\n" not in str(matching[0])


STRUCTURAL = {"section", "shape", "key", "missing-key", "unit", "value", "date", "unique-id"}


def test_every_rule_has_a_mutant() -> None:
    assert {mutant[0] for mutant in MUTANTS} == set(RULES) | STRUCTURAL
    assert set(shipped.RULES) < set(RULES)


@pytest.mark.parametrize(("rule", "text"), {mutant[0]: mutant[:2] for mutant in MUTANTS}.values())
def test_a_run_refuses_what_would_end_or_mislead_it_and_the_script_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, text: str
) -> None:
    path = overlay(tmp_path, text)
    refused = shipped.lint(Catalog([read(path)]))
    assert {problem.rule for problem in refused} == {rule} & {*shipped.RULES, *STRUCTURAL}
    assert main([str(path)]) == Exit.USAGE
    printed = capsys.readouterr().out.splitlines()
    assert printed
    assert all(line.endswith(f"[{rule}]") for line in printed)


def test_the_script_accepts_the_catalog_and_names_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == Exit.GOOD
    assert capsys.readouterr().out == ""
    assert main(["/nowhere.yml"]) == Exit.USAGE
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        NEW_GPU,
        NEW_FIGURE,
        NEW_SET,
        "gpus: {t4: {note: ours}}",
        "{}",
        "branches: {580: {points: {580.200.01: 2026-10}}}",
    ],
)
def test_a_good_overlay_breaks_nothing(tmp_path: Path, text: str) -> None:
    assert [str(problem) for problem in lint(Catalog([read(overlay(tmp_path, text))]))] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpus: {t4: [", "site.yml:2: is not YAML: "),
        ("gpus:\n\t t4: {}", "site.yml:2: is not YAML: "),
        ("- t4", "site.yml:1: expected a mapping of sections"),
        ("", "site.yml:1: expected a mapping of sections"),
        ("gpus: &all {t4: *all}", "refers to itself"),
        ("[" * 5000 + "]" * 5000, "nested too deep"),
        ("a: &a [x, x, x, x, x, x, x, x]\n" + bombs(), "too large"),
        ("just words", "site.yml:1: expected a mapping of sections"),
        ("gpus: {t4: {note: !!python/object:os.system x}}\n---\ngpus: {}", "is not YAML"),
    ],
)
def test_what_is_no_catalog_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as err:
        load([overlay(tmp_path, text)])
    assert words in str(err.value)
    assert "\n" not in str(err.value)
    assert err.value.exit_code == Exit.USAGE


def test_a_file_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "site.yml"
    path.write_bytes(b"gpus: {t4: {note: \xff}}")
    with pytest.raises(UsageError, match=r"site\.yml: is not UTF-8 text"):
        load([path])


def test_an_object_tag_is_text_and_runs_nothing(tmp_path: Path) -> None:
    path = overlay(tmp_path, "gpus: {t4: {note: !!python/object/apply:os.getcwd []}}")
    with pytest.raises(UsageError, match=r"gpus\.t4\.note"):
        load([path])


def test_two_faults_are_both_reported_and_the_first_line_comes_first(tmp_path: Path) -> None:
    path = overlay(tmp_path, "gpus:\n  t4:\n    colour: red\n    form: card\n")
    problems = lint(Catalog([read(path)]))
    assert [(problem.line, problem.rule) for problem in problems] == [(3, "key"), (4, "value")]
    with pytest.raises(UsageError, match="and 1 more"):
        load([path])


def test_a_fault_in_an_overlay_of_ours_names_the_overlays_line(tmp_path: Path) -> None:
    path = overlay(tmp_path, "\n\ngpus:\n  t4:\n    power_range_w: [80, 90]\n")
    (problem,) = lint(Catalog([read(path)]))
    assert (problem.file, problem.line) == (str(path), 5)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("branches:\n  580:\n    eol_vendor: 2020-01\n", 3, "eol_vendor: 2020-01 is before the release"),
        (
            "branches:\n  580:\n    eol_vendor: 2026-07\n",
            3,
            "eol_vendor: conflicts with branches.580.points.580.178.04",
        ),
        (
            "gpus:\n  h100-sxm5-80gb:\n    power_w: 70\n",
            3,
            "power_w: conflicts with gpus.h100-sxm5-80gb.power_range_w",
        ),
        ("gpus:\n  t4:\n    memory_gb: 80\n", 3, "memory_gb: conflicts with gpus.t4.memory_mib"),
        ("gpus:\n  t4:\n    note: ours\n    date: 2001\nbranches: {580: {date: 2025-08-05}}\n", 5, "branches.580.date"),
    ],
)
def test_a_field_that_does_not_go_with_ours_is_blamed_on_the_overlay(
    tmp_path: Path, text: str, line: int, words: str
) -> None:
    path = overlay(tmp_path, text)
    problems = lint(Catalog([read(path)]))
    assert {problem.file for problem in problems} == {str(path)}
    assert {problem.line for problem in problems} == {line}
    assert any(words in str(problem) for problem in problems)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (
            "gpus:\n  h100-sxm5-80gb:\n    architecture: hoper\n",
            "site.yml:3: gpus.h100-sxm5-80gb.architecture: unknown architecture 'hoper'; did you mean hopper?",
        ),
        (
            "platforms:\n  ours:\n    {name: Ours, kind: server, board: hgx-h100-9, date: 2026-11-01}\n",
            "site.yml:3: platforms.ours.board: unknown platform 'hgx-h100-9'; did you mean hgx-h100-8?",
        ),
    ],
)
def test_a_row_that_names_no_parent_is_reported_and_nothing_else(tmp_path: Path, text: str, reported: str) -> None:
    (problem,) = lint(Catalog([read(overlay(tmp_path, text))]))
    assert str(problem).endswith(reported)


def test_a_release_long_before_its_branch_is_a_wrong_date(tmp_path: Path) -> None:
    early = "branches:\n  580:\n    points:\n      580.200.01: {}\n"
    (problem,) = lint(Catalog([read(overlay(tmp_path, early.format("2024-01-01")))]))
    assert str(problem).endswith(
        "site.yml:4: branches.580.points.580.200.01: 2024-01-01 is long before the branch was released, 2025-08-04"
    )
    assert lint(Catalog([read(overlay(tmp_path, early.format("2025-06-10")))])) == [], "a beta"
    (problem,) = lint(Catalog([read(overlay(tmp_path, "branches:\n  580:\n    released: 2026-09\n"))]))[:1]
    assert problem.file.endswith("site.yml")


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ("pci: 10de:ffff", "gpus.t4.pci: expected a list: [10de:ffff]"),
        ("pci: {a: b}", "gpus.t4.pci: expected a list"),
        ("pcie: 4", "gpus.t4.pcie: expected a mapping of keys, found '4'"),
        ("note: [ours]", "gpus.t4.note: expected text, found ['ours']"),
        ("power_range_w: [80]", "gpus.t4.power_range_w.1: is missing"),
        ("source: []", "gpus.t4.source: expected at least one"),
    ],
)
def test_a_wrong_shape_is_reported_in_the_file_s_words(tmp_path: Path, fields: str, reported: str) -> None:
    (problem,) = lint(Catalog([read(overlay(tmp_path, f"gpus: {{t4: {{{fields}}}}}"))]))
    assert str(problem).endswith(f"site.yml:1: {reported}")


def test_no_shape_is_reported_in_python_s_words(tmp_path: Path) -> None:
    catalog = Catalog()
    for section in MODELS:
        for key, row in list(catalog.raw(section).items())[:1]:
            for wrong in ("x", [], ["x"], {"x": "y"}, [["x"]], None):
                fields = dict.fromkeys([*row, *MODELS[section].model_fields], wrong)
                fields.pop("id", None)
                _, problems = typed_row(MODELS[section], key, fields, section, catalog.documents(section))
                for problem in problems:
                    assert not re.search(r"tuple|dictionary|instance|valid (string|list)", problem.message), problem
