"""The filters on the node's facts: what is read, what is refused, and in which words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from plugin_loader import load

from gpunode.isolation import Limits

node = load("node")
spelling = load("variables")

ROOT = Path(__file__).parents[3]
BUNDLE = ROOT / "tests" / "fixtures" / "bundles" / "debian-12-driver.json"
SWITCHES = ("allow_secure_boot", "allow_busy", "removing", "settled", "switch", "precompiled", "mok_hash")
SETTINGS: dict[str, Any] = {"min_free_mib": {"/": 1}, **dict.fromkeys(SWITCHES, False)}
APT: dict[str, Any] = {"lock_holder": None, "unfinished": [], "runfile": False, "lists": True, "headers": []}


@pytest.fixture
def facts() -> dict[str, Any]:
    document: dict[str, Any] = node.node_facts(BUNDLE.read_text(encoding="utf-8"), "a node")
    return document


def problems(facts: dict[str, Any], apt: dict[str, Any] | None = None, **settings: Any) -> list[str]:
    lines: list[str] = node.preflight_problems(facts, {**APT, **(apt or {})}, {**SETTINGS, **settings})
    return lines


def test_a_good_node_is_not_refused(facts: dict[str, Any]) -> None:
    assert problems(facts) == []


def test_an_answer_that_is_no_bundle_names_the_node() -> None:
    with pytest.raises(AnsibleFilterError, match="the probe's answer from gpu-01"):
        node.node_facts("bash: python3: command not found", "gpu-01")


def test_an_answer_that_costs_too_much_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "facts_from_bundle", lambda _: re.fullmatch(r"(a+)+b", "a" * 60))
    monkeypatch.setattr(node.Workers.__init__, "__defaults__", (Limits(cpu_s=1),))
    with pytest.raises(AnsibleFilterError, match="gpu-01: judging its answer took more than 1 s"):
        node.node_facts(BUNDLE.read_text(encoding="utf-8"), "gpu-01")


def test_findings_are_those_of_the_checks(facts: dict[str, Any]) -> None:
    found = node.findings(facts, ["driver.held", "driver.closure"])
    assert {finding["check"]: finding["status"] for finding in found} == {
        "driver.held": "pass",
        "driver.closure": "pass",
    }
    assert node.finding_line(found[0]).startswith(f"pass {found[0]['check']}: ")


def test_a_check_that_does_not_exist_is_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(AnsibleFilterError, match=r"no such check: driver\.helt"):
        node.findings(facts, ["driver.helt"])


def test_facts_that_are_none_are_refused() -> None:
    with pytest.raises(AnsibleFilterError, match="not a NodeFacts document"):
        node.findings({"host": 1})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"os": {"id": "rocky", "version_id": "8.10", "codename": None, "pretty_name": "Rocky Linux 8.10"}},
            "unsupported: Rocky Linux 8.10 is not supported",
        ),
        (
            {"os": {"id": "ubuntu", "version_id": "20.04", "codename": "focal", "pretty_name": "Ubuntu 20.04"}},
            "unsupported: Ubuntu 20.04 is not supported",
        ),
        ({"os": {"id": "debian", "version_id": None, "codename": "sid", "pretty_name": None}}, "debian None"),
        ({"architecture": "riscv64"}, "architecture riscv64 is not supported"),
        ({"disk_free_mib": {"/": 0}}, "/ has 0 MiB free, 1 MiB are needed"),
        ({"secure_boot": True}, "secure boot is on"),
        (
            {"packages": None, "gaps": {"packages": "dpkg-query: killed"}},
            "packages could not be seen: dpkg-query: killed",
        ),
    ],
    ids=["old rpm system", "system", "release without number", "architecture", "space", "secure boot", "gap"],
)
def test_each_reason_is_one_line(facts: dict[str, Any], change: dict[str, Any], words: str) -> None:
    facts.update(change)
    assert [words in line for line in problems(facts)] == [True]


@pytest.mark.parametrize(
    ("apt", "words"),
    [
        ({"lock_holder": "apt-get (pid 7)"}, "apt-get (pid 7) still holds the package lock"),
        ({"unfinished": ["libc6", "nvidia-smi"]}, "dpkg has not finished libc6:"),
        ({"runfile": True}, "runfile: a driver from NVIDIA's .run installer is there"),
        ({"installed": {"nvidia-docker2": "2.14.0-1"}}, "nvidia-docker2: nvidia-docker2 is installed"),
    ],
)
def test_the_package_manager_has_to_be_ready(facts: dict[str, Any], apt: dict[str, Any], words: str) -> None:
    assert [words in line for line in problems(facts, apt)] == [True]


def test_a_process_that_computes_refuses_the_node_unless_allowed(facts: dict[str, Any]) -> None:
    facts["gpu_processes"] = [
        {"pid": 41, "name": "train", "type": "C", "user": "ada", "gpu": "gpu0"},
        {"pid": 42, "name": "Xorg", "type": "G", "user": "root", "gpu": "gpu0"},
    ]
    assert problems(facts) == [
        "busy: GPUs are in use by train (pid 41, ada): end them, or set gpunode_allow_busy: true"
    ]
    assert problems(facts, allow_busy=True) == []


def test_a_node_whose_driver_is_as_it_should_be_may_be_busy(facts: dict[str, Any]) -> None:
    facts["gpu_processes"] = [{"pid": 41, "name": "train", "type": "C", "user": "ada", "gpu": "gpu0"}]
    assert [line.split(":")[0] for line in problems(facts)] == ["busy"]
    assert problems(facts, settled=True) == []
    # Other roles may have something to install there.
    room = {"min_free_mib": dict.fromkeys(facts["disk_free_mib"], 10**9)}
    assert {line.split(":")[0] for line in problems(facts, settled=True, **room)} == {"disk-full"}


def test_headers_must_be_had_for_the_newest_kernel(facts: dict[str, Any]) -> None:
    kernel = next(kernel for kernel in facts["kernels"] if kernel["newest"])
    kernel["headers"] = False
    wanted = f"linux-headers-{kernel['release']}"
    assert [wanted in line for line in problems(facts)] == [True]
    assert problems(facts, {"headers": [wanted]}) == []
    assert problems(facts, {"lists": False}) == []


def test_what_only_matters_for_an_installation_does_not_stop_a_removal(facts: dict[str, Any]) -> None:
    facts.update({"disk_free_mib": {"/": 0}, "secure_boot": True})
    assert problems(facts, removing=True) == []


def test_mixed_origins_are_told_by_the_check(facts: dict[str, Any]) -> None:
    foreign = {**facts["packages"][0], "name": "nvidia-fabricmanager", "source": "fabricmanager"}
    foreign.update(maintainer="NVIDIA CORPORATION <cudatools@nvidia.com>", version="580.95.05-1", installed=True)
    facts["packages"].append(foreign)
    lines = problems(facts)
    assert len(lines) == 1
    assert lines[0].startswith("mixed-sources: the driver's packages are mixed: ")
    assert problems(facts, switch=True) == []


def test_several_reasons_are_told_at_once(facts: dict[str, Any]) -> None:
    facts.update({"disk_free_mib": {"/": 0}, "secure_boot": True})
    assert len(problems(facts, {"runfile": True})) == 3


def test_the_probe_is_handed_over_whole() -> None:
    command = node.probe_script("/usr/bin/python3")
    assert command["argv"] == ["/usr/bin/python3", "-I", "-"]
    compile(command["stdin"], "probe", "exec")


def test_a_typing_error_is_told_with_its_place(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("all:\n  vars:\n    nvidia_driver_flavor: open\n", encoding="utf-8")
    names = ["nvidia_driver_flavor", "nvidia_driver_state", "gpunode_node", "ansible_user", "docker_users"]
    lines = spelling.unknown_variables(names, str(ROOT), [str(inventory)])
    assert lines == [
        f"{inventory}:3: nvidia_driver_flavor is no variable of any role, did you mean nvidia_driver_flavour?"
    ]


@pytest.mark.parametrize(("name", "argument"), [("probe_script", "python3"), ("node_facts", "{}"), ("findings", {})])
def test_without_the_package_the_filters_say_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, name: str, argument: Any
) -> None:
    monkeypatch.setattr(node, "MISSING", "No module named 'gpunode'")
    with pytest.raises(AnsibleFilterError, match="pip install gpunode"):
        getattr(node, name)(argument)


def test_every_filter_is_documented() -> None:
    for name in ("node", "variables", "stack", "driver", "dnf", "nvidia_fabric", "repository"):
        for filter_name in load(name).FilterModule().filters():
            assert (ROOT / "plugins" / "filter" / f"{filter_name}.yml").exists()


def test_the_fixture_is_a_bundle_of_this_project() -> None:
    assert json.loads(BUNDLE.read_text(encoding="utf-8"))["schema"] == "gpunode.bundle/1"


def test_a_driver_of_another_line_is_left_alone(facts: dict[str, Any]) -> None:
    package = {**facts["packages"][0], "name": "nvidia-tesla-470-kernel-dkms", "installed": True}
    old = {**facts, "packages": [{**package, "source": "nvidia-graphics-drivers-tesla-470"}]}
    assert any("nvidia-tesla-470-kernel-dkms" in line for line in problems(old))


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_is_text_is_not_taken_for_true(facts: dict[str, Any], name: str) -> None:
    with pytest.raises(AnsibleFilterError, match=name):
        node.preflight_problems(facts, APT, {**SETTINGS, name: "false"})


@pytest.mark.parametrize(
    ("settings", "apt"),
    [
        ({"precompiled": True}, {}),
        ({"allow_secure_boot": True}, {}),
        ({"mok_hash": True}, {}),
        ({}, {"key": {"path": "/var/lib/dkms/mok.pub", "enrolled": False, "waits": True}}),
        ({}, {"key": {"path": "/var/lib/dkms/mok.pub", "enrolled": True}}),
    ],
    ids=["signed by Ubuntu", "allowed", "to be staged", "staged", "enrolled"],
)
def test_secure_boot_is_no_obstacle_where_the_module_will_load(
    facts: dict[str, Any], settings: dict[str, bool], apt: dict[str, Any]
) -> None:
    facts["secure_boot"] = True
    refused = problems(facts, {"key": {"path": "/var/lib/dkms/mok.pub", "enrolled": False}})
    assert [line.partition(":")[0] for line in refused] == ["secure-boot"]
    assert problems(facts, apt, **settings) == []


def test_what_others_left_goes_with_the_switch(facts: dict[str, Any]) -> None:
    left = {"runfile": True, "installed": {"nvidia-docker2": "2.14.0-1"}}
    assert {line.partition(":")[0] for line in problems(facts, left)} == {"runfile", "nvidia-docker2"}
    assert problems(facts, left, switch=True) == []


def test_a_firmware_that_could_not_be_seen_is_told_and_not_refused(facts: dict[str, Any]) -> None:
    stack = {"warnings": [{"rule": "R13", "text": "branch 535 is past its end"}], "module": {"build": "dkms"}}
    notes = node.preflight_notes(facts, stack)
    assert notes[0] == "branch 535 is past its end"
    assert notes[1].startswith("secure boot could not be seen")
    assert len(node.preflight_notes(facts, {**stack, "module": {"build": "precompiled"}})) == 1
