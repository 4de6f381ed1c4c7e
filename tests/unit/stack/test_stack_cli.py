"""gpunode plan as a user meets it: output, exit codes, locks."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gpunode.cli import VERBS, provision, run
from gpunode.cli.reference import schema_of
from gpunode.errors import UsageError
from gpunode.fleet import Collected
from gpunode.fleet.inventory import Inventory
from gpunode.fleet.locks import LOCK_FILE, LockLoader, write_locks
from gpunode.probe import Answer as Reply
from gpunode.probe.bundle import Bundle
from gpunode.stack import Plan

ROOT = Path(__file__).parents[3]
BUNDLE = ROOT / "tests" / "fixtures" / "bundles" / "debian-12-driver.json"
TODAY = ("--today", "2026-11-20")

Answer = tuple[int, str, str]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    monkeypatch.setitem(VERBS, "plan", "Resolve a matched stack")

    def call(*arguments: str) -> Answer:
        code = run(["plan", *arguments, *TODAY])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_an_hgx_board(plan: Callable[..., Answer]) -> None:
    code, out, err = plan("--platform", "hgx-h100-8", "--os", "ubuntu-24.04", "--driver", "lts", "--cuda", "13.0")
    assert (code, err) == (0, "")
    for words in (
        "branch 580 (LTSB)",
        "open, dkms",
        "580.178.04 (nvidia-fabricmanager)",
        "datacenter-gpu-manager-4-cuda13",
    ):
        assert words in out
    assert "warning" not in out


def test_the_same_without_a_number(plan: Callable[..., Answer]) -> None:
    code, out, _ = plan("--gpu", "H100 SXM", "--os", "ubuntu-24.04", "--driver", "lts", "--cuda", "13.0")
    assert code == 0
    assert "warning: H100 SXM: NVSwitches and the fabric manager depend on the board" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--gpu", "V100", "--os", "ubuntu-22.04", "--cuda", "13.0"],
            ["Volta, compute capability 7.0", "floor of CUDA 13", "580 proprietary with CUDA 12.9"],
        ),
        (
            ["--gpu", "B200", "--kernel-module", "proprietary", "--os", "ubuntu-24.04"],
            ["requires the open kernel modules"],
        ),
        (["--gpu", "V100", "--gpu", "B200", "--os", "ubuntu-24.04"], ["a node loads one of them", "without B200"]),
        (["--os", "ubuntu-26.04", "--driver", "580"], ["starts at branch 595"]),
        (
            ["--gpu", "A100", "--count", "1", "--os", "debian-12", "--source", "debian", "--cuda", "13.0"],
            ["580.65.06", "--source nvidia", "--cuda 12.9"],
        ),
    ],
)
def test_conflicts_end_with_1(plan: Callable[..., Answer], arguments: list[str], words: list[str]) -> None:
    code, out, _ = plan(*arguments)
    assert code == 1
    for word in words:
        assert word in out


def test_debian_s_own_driver(plan: Callable[..., Answer]) -> None:
    code, out, _ = plan(*["--gpu", "A100", "--count", "1", "--os", "debian-12", "--source", "debian", "--cuda", "12.2"])
    assert code == 0
    assert "warning: branch 535 is past its end of life: 2026-06-01" in out
    assert "warning: the archive of Debian 12 has no dcgm" in out
    assert "nvidia-container-toolkit" in out, "its repository is NVIDIA's own, whatever the driver's source"


def test_an_end_that_is_only_computed_warns_and_the_help_reports_it(plan: Callable[..., Answer]) -> None:
    requested = ("--gpu", "L40S", "--os", "rhel-9", "--past-eol", "refuse")
    code, out, _ = plan(*requested, "--driver", "550")
    assert code == 0
    assert "warning: branch 550 is past its end of life: 2025-" in out
    assert "by the rule of thumb (release plus one year, LTSB three) (not sure) [R13-branch-eol]" in out
    code, out, _ = plan(*requested, "--driver", "535")
    assert code == 1, "NVIDIA published that end"
    _, out, _ = plan("--help")
    assert "computed end of life always warns" in " ".join(out.split())


def test_a_stack_without_dcgm_reports_it_for_every_source(plan: Callable[..., Answer]) -> None:
    code, out, _ = plan("--gpu", "P100", "--os", "debian-13")
    assert code == 0
    words = "warning: no known DCGM for Debian 13 and branch 580: the stack omits it [R21-no-service]"
    assert words in out
    _, out, _ = plan("--gpu", "P100", "--os", "debian-12")
    assert "R21" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "V101", "--os", "ubuntu-24.04"], ["'V101'", "V100"]),
        (["--gpu", "10de:ffff", "--os", "ubuntu-24.04"], ["10de:ffff"]),
        (["--platform", "hgx-h1000-8"], ["hgx-h100-8"]),
        (["--gpu", "A100", "--os", "ubuntu-24.40"], ["ubuntu-24.04"]),
        (["--gpu", "A100", "--driver", "prodcution"], ["production"]),
        (["--gpu", "A100", "--driver", "581"], ["580"]),
        (["--gpu", "A100", "--driver", "580.x"], ["580"]),
        (["--gpu", "A100", "--cuda", "13.01"], ["--cuda", "13.0"]),
        (["--gpu", "A100", "--toolkit", "12.10"], ["--toolkit", "12"]),
        (["--gpu", "A100", "--source", "nvida"], ["nvidia"]),
        (["--gpu", "A100", "--kernel", "foo"], ["--kernel 'foo'", "6.8.0-60-generic"]),
        (["--gpu", "A100", "--kernel", ""], ["--kernel ''", "6.8.0-60-generic"]),
        (["--gpu", "A100", "--os", ""], ["no operating system ''"]),
        (["--platform", ""], ["''"]),
        (["--gpu", "A100", "--driver", "abc"], ["unknown driver 'abc'; known: lts, production", "580", " …"]),
        (["--gpu", "A100", "--driver", "580.²"], ["unknown driver", "580.²"]),
        (["--gpu", "A100", "--cuda", "13"], ["--cuda 13: expected X.Y (example: 13."]),
        (["--gpu", "A100", "--toolkit", "12"], ["--toolkit 12: expected X.Y (example: 12."]),
        (["--gpu", "A100", "--platform", "hgx-h100-8"], ["remove --gpu"]),
        (["--count", "4"], ["--count needs a --gpu"]),
        ([], ["nothing to plan for"]),
        (["--gpu", "A100", "--replay", str(BUNDLE)], ["--gpu describes a hypothetical node"]),
        (["--replay", "nowhere.json"], ["nowhere.json"]),
        (["--gpu", "A100", "--write"], ["--write needs an inventory"]),
        (["--gpu", "A100", "--limit", "gpu"], ["--limit needs an inventory"]),
        (["some.json"], ["put --replay before"]),
    ],
)
def test_bad_input_ends_with_2_and_reports_what_is_near(
    plan: Callable[..., Answer], arguments: list[str], words: list[str]
) -> None:
    code, out, err = plan(*arguments)
    assert (code, out) == (2, "")
    for word in words:
        assert word in err
    assert err.count("\n") == 1
    assert len(err) < 400, "a line that a person reads"


def test_a_bad_day(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(VERBS, "plan", "Resolve a matched stack")
    assert run(["plan", "--gpu", "A100", "--today", "2026-13-01"]) == 2
    assert "expected a date" in capsys.readouterr().err


def test_json_and_yaml_are_one_document_that_obeys_the_schema(plan: Callable[..., Answer]) -> None:
    arguments = ["--platform", "hgx-b200-8", "--os", "ubuntu-24.04"]
    code, out, _ = plan(*arguments, "--format", "json")
    document = json.loads(out)
    schema = json.loads(schema_of("plan"))
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)
    assert (code, document["schema"], document["today"]) == (0, "gpunode.plan/1", "2026-11-20")
    stack_schema = json.loads(schema_of("stack"))
    jsonschema.validate(document["groups"][0]["stack"], stack_schema, cls=jsonschema.Draft202012Validator)
    assert yaml.safe_load(plan(*arguments, "--format", "yaml")[1]) == document
    conflict = json.loads(plan("--gpu", "V100", "--cuda", "13.0", "--format", "json")[1])
    jsonschema.validate(conflict, schema, cls=jsonschema.Draft202012Validator)
    assert conflict["groups"][0]["conflict"]["terms"][0]["name"] == "gpu"


def test_saved_bundles(plan: Callable[..., Answer], tmp_path: Path) -> None:
    document = json.loads(BUNDLE.read_text(encoding="utf-8"))
    for name in ("n1", "n2"):
        (tmp_path / f"{name}.json").write_text(json.dumps(document | {"host": name}))
    blind = document | {"host": "n3", "files": {}, "commands": {}}
    code, out, _ = plan("--replay", str(tmp_path))
    assert code == 0
    assert "2 nodes: n1, n2" in out
    assert "535.261.03" in out
    (tmp_path / "n3.json").write_text(json.dumps(blind))
    code, out, _ = plan("--replay", str(tmp_path), str(BUNDLE))
    assert code == 3
    assert "could not be determined" in out
    code, out, _ = plan("--replay", str(tmp_path / "n1.json"), "--cuda", "13.0")
    assert code == 1, "Debian has no newer driver, and the source changes only on request"
    assert "--source nvidia" in out


HOSTS = "all: {children: {gpu: {hosts: {n1: {}, n2: {}}}}}\n"


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.yml"
    path.write_text(HOSTS)
    return path


def locked(document: Plan, path: Path, limit: str | None, *groups: str) -> list[str]:
    listing = Inventory((str(path),), {}, groups)
    return [str(lock.relative_to(path.parent)) for lock in write_locks(document, listing, limit)]


def decided(*hosts: tuple[str, ...], driver: tuple[str, ...] = ("580", "595")) -> Plan:
    from stack_samples import TODAY as DAY  # noqa: PLC0415
    from stack_samples import stack  # noqa: PLC0415

    groups = [
        {"hosts": names, "stack": stack(platform="hgx-h100-8", driver=branch)}
        for names, branch in zip(hosts, driver, strict=False)
    ]
    return Plan.model_validate({"today": DAY, "request": {}, "groups": groups})


def test_one_stack_for_a_group_is_locked_in_the_group(inventory: Path) -> None:
    old = inventory.parent / "host_vars" / "n1" / LOCK_FILE
    old.parent.mkdir(parents=True)
    old.write_text("gpunode_stack: {}\n")
    sibling = old.parent / "mine.yml"
    sibling.write_text("a: 1\n")
    assert locked(decided(("n1", "n2")), inventory, "gpu", "all", "gpu") == [f"group_vars/gpu/{LOCK_FILE}"]
    assert not old.exists(), "an older lock of a host would win over the group's"
    assert sibling.read_text() == "a: 1\n"
    text = (inventory.parent / "group_vars" / "gpu" / LOCK_FILE).read_text()
    assert text.startswith("# Written by gpunode plan --write")
    assert yaml.load(text, LockLoader)["gpunode_stack"]["driver"]["version"] == "580.178.04"  # noqa: S506 - a SafeLoader


def effective(inventory: Path, host: str = "n1") -> Any:
    program = Path(sys.executable).with_name("ansible-inventory")
    argv = [str(program), "-i", str(inventory), "--host", host]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)["gpunode_stack"]["driver"]["branch"]


def test_a_wider_lock_replaces_a_narrower_group_s(inventory: Path) -> None:
    locked(decided(("n1", "n2"), driver=("580",)), inventory, "gpu", "all", "gpu")
    assert effective(inventory) == 580
    files = locked(decided(("n1", "n2"), driver=("595",)), inventory, None, "all", "gpu")
    assert files == [f"group_vars/all/{LOCK_FILE}"]
    assert not (inventory.parent / "group_vars" / "gpu").exists()
    assert effective(inventory) == 595


def test_a_lock_that_an_older_one_would_beat_is_refused(inventory: Path) -> None:
    inventory.write_text("all: {children: {gpu: {hosts: {n1: {}, n2: {}}}, west: {hosts: {n1: {}, n3: {}}}}}\n")
    locked(decided(("n1", "n3"), driver=("580",)), inventory, "west", "all", "gpu", "west")
    with pytest.raises(UsageError, match=r"n1 would still use gpunode_stack from .*group_vars/west/gpunode_stack"):
        locked(decided(("n1", "n2"), driver=("595",)), inventory, "gpu", "all", "gpu", "west")
    assert effective(inventory) == 580
    assert not (inventory.parent / "group_vars" / "gpu").exists(), "nothing is left of a lock that was refused"
    host_lock = inventory.parent / "host_vars" / "n1" / LOCK_FILE
    host_lock.parent.mkdir(parents=True)
    host_lock.write_text("gpunode_stack: {}\n")
    with pytest.raises(UsageError, match="nothing was locked"):
        locked(decided(("n1", "n2"), driver=("595",)), inventory, "gpu", "all", "gpu", "west")
    assert host_lock.read_text() == "gpunode_stack: {}\n", "what was removed is put back"


def test_a_variable_of_the_user_that_would_win_is_named(inventory: Path) -> None:
    inventory.write_text("all: {hosts: {n1: {gpunode_stack: {driver: {}}}}}\n")
    with pytest.raises(UsageError, match=r"n1 would still use gpunode_stack from another location of the inventory"):
        locked(decided(("n1",)), inventory, None, "all")


def test_no_empty_folder_masks_a_later_file_of_the_user(inventory: Path) -> None:
    locked(decided(("n1",), ("n2",)), inventory, None, "all", "gpu")
    locked(decided(("n1", "n2")), inventory, None, "all", "gpu")
    assert list((inventory.parent / "host_vars").iterdir()) == []


def test_different_stacks_are_locked_by_host(inventory: Path) -> None:
    files = locked(decided(("n1",), ("n2",)), inventory, None, "all", "gpu")
    assert files == [f"host_vars/n1/{LOCK_FILE}", f"host_vars/n2/{LOCK_FILE}"]
    assert locked(decided(("n1", "n2")), inventory, "n*", "all", "gpu") == files
    assert locked(decided(("n1", "n2")), inventory, None, "all", "gpu") == [f"group_vars/all/{LOCK_FILE}"]


def test_a_file_of_the_user_is_never_masked(inventory: Path) -> None:
    user = inventory.parent / "host_vars" / "n1.yml"
    user.parent.mkdir()
    user.write_text("a: 1\n")
    with pytest.raises(UsageError, match=r"host_vars/n1\.yml or the folder .*n1/, not both"):
        locked(decided(("n1",), ("n2",)), inventory, None, "all")
    assert sorted(path.name for path in inventory.parent.rglob("*")) == ["host_vars", "hosts.yml", "n1.yml"]


def test_nothing_is_locked_where_a_host_has_no_stack(inventory: Path) -> None:
    document = decided(("n1",)).model_copy()
    groups = (
        *document.groups,
        document.groups[0].model_copy(update={"hosts": ("n2",), "stack": None, "undetermined": "x"}),
    )
    with pytest.raises(UsageError, match="no stack for n2"):
        locked(document.model_copy(update={"groups": groups}), inventory, None, "all")
    with pytest.raises(UsageError, match="not a file or directory"):
        locked(decided(("n1",)), inventory.parent / "n1,", None, "all")
    assert not (inventory.parent / "host_vars").exists()


def test_an_inventory_is_planned_locked_and_drifts(
    plan: Callable[..., Answer], inventory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.from_json(BUNDLE.read_bytes(), str(BUNDLE))

    answers = {name: Collected(name, Reply(BUNDLE.read_bytes(), host=name), None, 0.1) for name in ("n1", "n2")}
    monkeypatch.setattr(provision, "collect", lambda targets, **_: [answers[target.name] for target in targets])
    code, out, err = plan("-i", str(inventory), "--limit", "gpu", "--write")
    assert code == 0
    assert f"locked in {inventory.parent / 'group_vars' / 'gpu' / LOCK_FILE}" in err
    assert "2 nodes: n1, n2" in out
    code, out, _ = plan("-i", str(inventory))
    assert code == 0
    assert "drift: newer-available: 535.261.03" in out
    assert "past its end of life" in out
    listed = bundle.commands["dpkg-packages"]
    older = listed.model_copy(update={"stdout": listed.stdout.replace("535.261.03", "535.247.01")})
    changed = bundle.model_copy(update={"commands": bundle.commands | {"dpkg-packages": older}})
    answers["n1"] = Collected("n1", Reply(changed.to_json().encode(), host="n1"), None, 0.1)
    _, out, _ = plan("-i", str(inventory), "--limit", "n1")
    assert "drift: differs-from-lock: 535.247.01" in out
    answers["n2"] = Collected("n2", None, "connection refused", 0.1)
    code, out, _ = plan("-i", str(inventory))
    assert code == 3
    assert "could not be determined: connection refused" in out


def test_an_inventory_s_variables_request_the_stack(
    plan: Callable[..., Answer], inventory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {name: Collected(name, Reply(BUNDLE.read_bytes(), host=name), None, 0.1) for name in ("n1", "n2")}
    monkeypatch.setattr(provision, "collect", lambda targets, **_: [answers[target.name] for target in targets])
    folder = inventory.parent / "host_vars" / "n2"
    folder.mkdir(parents=True)
    (folder / "vars.yml").write_text("nvidia_driver_source: nvidia\nnvidia_driver_version: 580\n")
    code, out, _ = plan("-i", str(inventory), "--format", "json")
    by_host = {host: group["stack"] for group in json.loads(out)["groups"] for host in group["hosts"]}
    assert code == 0
    assert (by_host["n1"]["source"], by_host["n1"]["driver"]["branch"]) == ("debian", 535)
    assert (by_host["n2"]["source"], by_host["n2"]["driver"]["branch"]) == ("nvidia", 580)
    assert [note.rpartition(" ")[2] for note in json.loads(out)["notes"]] == ["written", "written"]
    _, out, _ = plan("-i", str(inventory), "--cuda", "12.2", "--format", "json")
    (note,) = [note for note in json.loads(out)["notes"] if "--cuda" in note]
    assert "cuda_version" in note
