"""The plans of the roles on a node with dnf: repository, streams, locks, refusals; from facts only."""

import importlib.util
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.module_utils.package_engine import OPTIONS
from driver_samples import BUNDLE, HGX, dnf_plan, facts_of
from driver_samples import stack_of as stack_of_variables
from plan_samples import context_of, state_of

from gpunode.facts import NodeFacts
from gpunode.provisioning.driver import dnf
from gpunode.provisioning.driver.messages import explained
from gpunode.provisioning.keys import armored
from gpunode.provisioning.manifest import ManagedFile, Manifest
from gpunode.provisioning.nvidia_repository import DNF_PATHS as PATHS
from gpunode.provisioning.nvidia_repository import NvidiaRepositorySettings, RepositoryConfig, offered
from gpunode.provisioning.state import DnfState, NodeState

MODULE_UTILS = Path(__file__).parents[3] / "plugins" / "module_utils"
DNF: dict[str, Any] = {
    "error": None,
    "lock_holder": None,
    "unfinished": [],
    "installed": {},
    "twice": [],
    "streams": {},
    "repositories": [],
    "locks": [],
    "own_locks": [],
    "versionlock": True,
    "runfile": False,
}
ARMOUR = armored(b"\xc6\x03\x04\x00\x01")


def rocky(version: str = "9.6", **changes: Any) -> dict[str, Any]:
    facts = facts_of(BUNDLE)
    system = {"id": "rocky", "version_id": version, "codename": None, "pretty_name": f"Rocky Linux {version}"}
    bare = {"pci": HGX, "packages": [], "module_files": [], "dkms": [], "loaded_driver": None, "kernels": []}
    machine: dict[str, Any] = {**facts, "os": {**facts["os"], **system, "id_like": ["rhel"]}, **bare, **changes}
    return machine


def stack_of(facts: dict[str, Any], version: str = "580.95.05", **requests: Any) -> dict[str, Any]:
    return stack_of_variables(facts, version=version, **requests)


def rpm(name: str, release: str = "580.95.05", vendor: str = "NVIDIA CORPORATION") -> dict[str, Any]:
    return {
        "name": name,
        "version": f"3:{release}-1.el9",
        "architecture": "x86_64",
        "source": name,
        "maintainer": vendor,
        "installed": True,
        "state": "installed",
        "held": False,
    }


def with_driver(names: list[str], release: str = "580.95.05", version: str = "9.6") -> tuple[dict[str, Any], Any]:
    facts = rocky(version, packages=[rpm(name, release) for name in names])
    state = {**DNF, "installed": dict.fromkeys(names, f"3:{release}-1.el9"), "streams": {}}
    return facts, state


def offer(
    state: dict[str, Any] | None = None, source: str = "nvidia", version: str = "9.6", **settings: Any
) -> RepositoryConfig:
    node = state_of(rocky(version), dnf={**DNF, **(state or {})})
    return offered(node, NvidiaRepositorySettings(**settings), context_of(), source)


# --- which systems


def test_what_keeps_dnf_from_working_is_named() -> None:
    assert dnf.dnf_problems(None) == []
    assert dnf.dnf_problems(DnfState.model_validate(DNF)) == []
    bad = {**DNF, "error": "No module named 'dnf'", "twice": ["nvidia-driver-cuda"], "runfile": True}
    output = dnf.dnf_problems(DnfState.model_validate(bad))
    assert [line.split(":")[0] for line in output] == ["no-dnf", "half-done", "runfile"]


# --- the repository


def test_nvidias_repository_checks_signatures() -> None:
    text = offer().files[PATHS["repository"]]
    url = "https://developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64/"
    assert {f"baseurl={url}", "gpgcheck=1", "enabled=1", f"gpgkey=file://{PATHS['key']}"} <= set(text.splitlines())
    assert "proxy" not in text
    archive = offer().archive
    assert archive is not None
    assert (archive.key, archive.keyring) == (f"{url}D42D0685.pub", "")
    assert archive.fingerprints == ("610C7B14E068A878070DA4E99CD0A493D42D0685",)


def test_rhel_10_has_a_key_of_its_own() -> None:
    repository = offer(version="10.0")
    assert repository.archive is not None
    assert repository.archive.key.endswith("/rhel10/x86_64/CDF6BA43.pub")
    assert repository.archive.sha256.startswith("afbea87d")
    assert repository.problems == ()


def test_a_mirror_comes_with_its_key(tmp_path: Path) -> None:
    key = tmp_path / "key.asc"
    key.write_text(ARMOUR, encoding="ascii")
    repository = offer(url="http://mirror/repos", key=str(key), proxy="http://proxy:3128")
    lines = repository.files[PATHS["repository"]].splitlines()
    assert {f"gpgkey=file://{PATHS['key']}", "proxy=http://proxy:3128"} <= set(lines)
    assert repository.archive is not None
    assert repository.archive.key == str(key)
    assert repository.problems == ()


def test_a_key_of_a_mirror_is_known_by_its_fingerprint() -> None:
    repository = offer(url="http://mirror/repos")
    assert repository.problems == ()
    assert repository.archive is not None
    assert repository.archive.fingerprints


def test_old_files_go_and_mixed_ones_are_refused() -> None:
    nvidias = "https://developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64"
    alone = {"id": "cuda", "file": "/etc/yum.repos.d/cuda-rhel9.repo", "urls": [nvidias]}
    mixed = [
        {"id": "cuda", "file": "/etc/yum.repos.d/all.repo", "urls": [nvidias]},
        {"id": "site", "file": "/etc/yum.repos.d/all.repo", "urls": ["http://site/"]},
    ]
    assert offer({"repositories": [alone]}).old_lists == (alone["file"],)
    repository = offer({"repositories": mixed})
    assert repository.old_lists == ()
    assert repository.problems[0].startswith("repository-twice: /etc/yum.repos.d/all.repo")


# --- the driver


@pytest.mark.parametrize(
    ("version", "stream", "fabric"),
    [
        ("570.211.01", "nvidia-driver:570-open", "nvidia-fabric-manager"),
        ("580.95.05", "nvidia-driver:580-open", "nvidia-fabricmanager"),
    ],
)
def test_the_question_has_the_stream_and_the_whole_closure(version: str, stream: str, fabric: str) -> None:
    facts = rocky()
    question = dnf_plan(facts, DNF, stack_of(facts, version)).question
    assert question.stream == stream
    assert {fabric, "nvidia-driver-cuda", "kmod-nvidia-open-dkms"} <= set(question.bound)
    assert question.constraint == version
    assert question.install == ()


def test_rhel_10_has_no_streams_and_locks_all_the_same() -> None:
    facts, state = with_driver(["nvidia-driver-cuda"], version="10.1")
    plan = dnf_plan(facts, state, stack_of(facts))
    assert plan.question.stream is None
    assert plan.change.hold == ("nvidia-driver-cuda",)


def test_without_the_plugin_it_comes_in_the_same_transaction() -> None:
    facts = rocky()
    plan = dnf_plan(facts, {**DNF, "versionlock": False}, stack_of(facts))
    assert plan.question.install == ("python3-dnf-plugin-versionlock",)


def test_a_node_that_has_all_is_settled() -> None:
    names = dnf_plan(rocky(), DNF, stack_of(rocky())).question.bound
    facts, state = with_driver([*names, "nvidia-kmod-common"])
    state["streams"] = {"nvidia-driver": "580-open"}
    plan = dnf_plan(facts, state, stack_of(facts))
    assert plan.settled
    assert len(plan.change.hold) == len(names) + 1
    others: list[dict[str, Any]] = [
        {"streams": {"nvidia-driver": "595-open"}},
        {"versionlock": False},
        {"installed": {}},
    ]
    for other in others:
        assert not dnf_plan(facts, {**state, **other}, stack_of(facts)).settled


def test_a_package_of_another_version_is_reported() -> None:
    facts, state = with_driver(["nvidia-driver-cuda"])
    facts["packages"].append(rpm("libnvidia-ml", "580.178.04"))
    plan = dnf_plan(facts, state, stack_of(facts))
    assert plan.wrong_versions == ["libnvidia-ml 580.178.04"]
    assert plan.change.hold == ("nvidia-driver-cuda",)


def test_locks_and_packages_of_others_are_refused_until_the_switch() -> None:
    facts, state = with_driver(["nvidia-driver-cuda"], "570.211.01")
    facts["packages"].append(rpm("nvidia-settings", "570.211.01", "RPM Fusion"))
    state["locks"] = ["nvidia-driver-cuda-3:570.211.01-1.el9.*", "bash-0:5.1-1.*"]
    matched = stack_of(facts, switch=True, source="nvidia")
    output = dnf_plan(facts, state, matched).refusals
    assert [line.split(":")[0] for line in output] == ["other-source", "held-packages"]
    assert "bash" not in "".join(output)
    assert dnf_plan(facts, state, matched, switch=True).refusals == ()
    question = dnf_plan(facts, state, matched, switch=True).question
    assert question.remove == ("nvidia-settings",)
    assert question.ignore_locks == ("nvidia-driver-cuda-3:570.211.01-1.el9.*",)


def test_whatever_carries_the_release_is_bound_to_it_whoever_requires_it() -> None:
    line = dnf_plan(rocky("10.0"), DNF, stack_of(rocky("10.0"))).question.line

    def bound(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in line["names"]) and not any(
            fnmatch(name, pattern) for pattern in line["except"]
        )

    for name in ("modprobe", "persistenced", "kmod-common", "driver-common", "driver-cuda", "fabricmanager"):
        assert bound(f"nvidia-{name}"), name
    for name in ("nvidia-driver-selinux", "libnvidia-container1", "nvidia-container-toolkit", "dkms", "kernel-devel"):
        assert not bound(name), name


def test_a_closure_that_lags_is_refused_with_what_there_is() -> None:
    facts = rocky()
    answer: dict[str, Any] = {
        "lacking": {"nvidia-driver-cuda": ["580.95.05", "580.65.06"], "nvidia-fabricmanager": ["580.65.06"]},
        "common": ["580.65.06"],
        "constraint": "580.95.05",
    }
    output = dnf_plan(facts, DNF, stack_of(facts), answer).refusals
    assert output[0].startswith("closure-lags: 580.95.05")
    assert "nvidia_driver_version: 580.65.06" in output[0]
    answer["lacking"]["nvidia-fabricmanager"] = []
    assert dnf_plan(facts, DNF, stack_of(facts), answer).refusals[0].startswith("package-gone: nvidia-fabric")


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("Failed to download metadata for repo 'x': Cannot download repomd.xml", "repository-unreachable"),
        ("not signed as required: Public key for x.rpm is not installed", "repository-unsigned"),
        ("would-remove: dnf would remove bash", "would-remove"),
        ("Problem: nothing provides dkms >= 3.1.8 needed by kmod", "dkms-missing"),
        ("Problem: nothing provides x", "dnf-refuses"),
        ("Certificate 9CD0A493D42D0685: Policy rejects: SHA1", "repository-key-sha1"),
    ],
)
def test_messages_of_dnf_become_named_refusals(output: str, name: str) -> None:
    assert explained("dnf", output).startswith(f"{name}:")


def test_all_of_the_closure_goes_and_the_stream_with_it() -> None:
    facts, state = with_driver(["nvidia-driver-cuda", "nvidia-kmod-common"])
    state["streams"] = {"nvidia-driver": "580-open"}
    machine = NodeState(facts=NodeFacts.model_validate(facts), apt=None, dnf=DnfState.model_validate(state))
    change = dnf.removal(machine, keep_headers=False)
    assert change.remove == ("nvidia-driver-cuda", "nvidia-kmod-common")
    assert change.reset == "nvidia-driver"


# --- the scripts


def script(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of the roles; dnf itself is on nodes alone."""
    base = ModuleType("dnf.module.module_base")
    monkeypatch.setitem(sys.modules, "dnf", ModuleType("dnf"))
    monkeypatch.setitem(sys.modules, "dnf.module", ModuleType("dnf.module"))
    monkeypatch.setitem(sys.modules, "dnf.module.module_base", base)
    spec = importlib.util.spec_from_file_location(Path(path).stem, MODULE_UTILS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_our_locks_are_distinguished_from_foreign_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = script("dnf_state.py", monkeypatch)
    transaction = script("dnf_transaction.py", monkeypatch)
    mark = state.LOCK_MARK
    path = tmp_path / "versionlock.list"
    path.write_text(f"bash-5.*\n# BEGIN {mark}\nnvidia-a-1.*\n# END {mark}\n\nzsh-5.*\n", encoding="utf-8")
    monkeypatch.setattr(state, "LOCKLIST", str(path))
    assert state.locks() == (["bash-5.*", "zsh-5.*"], ["nvidia-a-1.*"])
    assert transaction.foreign_locks(str(path), mark, ["zsh-5.*"]) == ["bash-5.*", ""]
    assert transaction.foreign_locks(str(tmp_path / "none"), mark, []) == []


def test_a_preview_counts_with_repositories_that_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node without them the roles behind them could not be announced."""
    text = "# Managed\n[ours]\nname=x\nbaseurl=https://mirror/stable/rpm/$basearch\nproxy=http://proxy:3128\n"
    files = [
        ManagedFile(path="/etc/yum.repos.d/ours.repo", content=text),
        ManagedFile(path="/etc/yum.repos.d/gone.repo", content=None),
        ManagedFile(path="/etc/profile.d/x.sh", content="[no]\n"),
    ]
    planned = Manifest(role="nvidia_repository", files=tuple(files)).source_files
    assert script("dnf_transaction.py", monkeypatch).repositories_of(planned) == [
        {"id": "ours", "url": "https://mirror/stable/rpm/$basearch", "proxy": "http://proxy:3128"}
    ]


def test_a_job_that_began_meanwhile_stops_the_transaction_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transaction = script("dnf_transaction.py", monkeypatch)
    done: list[str] = []

    class Base:
        transaction = SimpleNamespace(remove_set=[])
        sack = SimpleNamespace(query=lambda: SimpleNamespace(installed=list))

        def __enter__(self) -> "Base":
            return self

        def __exit__(self, *_: object) -> None: ...

        def do_transaction(self) -> None:
            done.append("changed")

    changes: dict[str, Any] = {"install": {"nvidia-driver-cuda": "1"}, "remove": [], "stream": None}
    monkeypatch.setattr(transaction, "configured", lambda _question, _folder: Base())
    monkeypatch.setattr(transaction, "resolved", lambda _base, _question: dict(changes))
    monkeypatch.setattr(transaction, "fetch", lambda _base: done.append("fetched"))
    monkeypatch.setattr(transaction, "note", lambda _path, _names: done.append("remembered"))
    monkeypatch.setattr(transaction, "LOCKLIST", str(tmp_path / "list"))
    question = {
        **{name: option.get("default") for name, option in OPTIONS.items()},
        "simulate": False,
        "lock_wait_s": 1,
    }
    with pytest.raises(transaction.TransactionRefusedError, match=r"^busy: GPUs are in use by python3 \(pid 9\)"):
        transaction.carried_out({**question, "gpu_users": lambda: ["python3 (pid 9)"]})
    assert done == ["fetched"]
    assert transaction.carried_out({**question, "gpu_users": list})["done"]
    assert done == ["fetched", "fetched", "remembered", "changed"]
