"""Typos in role variables: the name, the file, the nearest right one."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from effort import effort
from hypothesis import assume, given, settings

from gpunode.content import collection_root
from gpunode.errors import UsageError
from gpunode.variables import (
    known_variables,
    locate,
    refuse_missing_tasks,
    refuse_unknown,
    role_prefixes,
    unknown_variables,
)

KNOWN = ("nvidia_driver_source", "nvidia_driver_version", "docker_data_root", "gpunode_reboot")
PREFIXES = ("nvidia_driver_", "docker_", "gpunode_")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("nvidia_driver_sorce", "nvidia_driver_source"),
        ("nvidia_driver_versions", "nvidia_driver_version"),
        ("nvida_driver_version", "nvidia_driver_version"),
        ("gpunode_rebot", "gpunode_reboot"),
        ("gpunode_zzz", None),
        ("nvidia_driver_verison", "nvidia_driver_version"),
        ("docker_dataroot", "docker_data_root"),
    ],
)
def test_a_typo_has_its_nearest(name: str, nearest: str | None) -> None:
    assert unknown_variables([name], KNOWN, PREFIXES) == [(name, nearest)]


@pytest.mark.parametrize(
    "name",
    [
        "nvidia_driver_source",
        "docker_users",
        "ansible_host",
        "site",
        "__nvidia_driver_x",
        "driver",
        "docker_edition",
        "nvidia_exporter_port",
        "nvidia_driver_branch",
    ],
)
def test_what_is_right_or_somebody_elses_is_left_alone(name: str) -> None:
    assert unknown_variables([name], KNOWN, PREFIXES) == []


# Variables of other roles with our prefixes, from the repositories' defaults/main.yml and README, 2026-11-23.
FOREIGN = {
    "geerlingguy/ansible-role-docker": """
        docker_edition docker_package docker_packages docker_package_state docker_packages_state
        docker_service_manage docker_service_state docker_service_enabled docker_restart_handler_state
        docker_install_compose_plugin docker_compose_package docker_compose_package_state
        docker_install_compose docker_compose_version docker_compose_arch docker_compose_url
        docker_compose_path docker_repo_url docker_apt_release_channel docker_apt_arch docker_apt_repository
        docker_apt_ignore_key_error docker_apt_gpg_key docker_yum_repo_url docker_yum_repo_enable_nightly
        docker_yum_repo_enable_test docker_yum_gpg_key docker_daemon_options
    """,
    "NVIDIA/ansible-role-nvidia-driver": """
        nvidia_driver_package_state nvidia_driver_package_version nvidia_driver_persistence_mode_on
        nvidia_driver_skip_reboot nvidia_driver_module_file nvidia_driver_module_params
        nvidia_driver_add_repos nvidia_driver_branch nvidia_driver_rhel_cuda_repo_baseurl
        nvidia_driver_rhel_cuda_repo_gpgkey nvidia_driver_rhel_branch nvidia_driver_debian_branch
        nvidia_driver_debian_install_from_cuda_repo nvidia_driver_debian_packages
        nvidia_driver_debian_install_tesla_driver nvidia_driver_debian_tesla_package
        nvidia_driver_ubuntu_branch nvidia_driver_ubuntu_install_from_cuda_repo
        nvidia_driver_ubuntu_packages_suffix nvidia_driver_ubuntu_packages nvidia_driver_ubuntu_cuda_package
    """,
    "NVIDIA/deepops": """
        cuda_dgx_1_version cuda_dgx_2_version cuda_dgx_a100_version cuda_dgx_override_version
        cuda_toolkit_add_profile_script docker_install docker_dns_servers_strict docker_storage_options
        docker_options docker_iptables_enabled docker_insecure_registries docker_registry_mirrors
        dcgm_rpm_package dcgm_deb_package
    """,
    "linux-system-roles/storage and firewall": """
        storage_pools storage_volumes storage_safe_mode storage_udevadm_trigger storage_provider
        storage_use_partitions storage_disklabel_type storage_skip_checks firewall
    """,
}


@pytest.mark.parametrize("publisher", FOREIGN)
def test_variables_of_other_roles_are_never_refused(publisher: str) -> None:
    root = collection_root()
    names = FOREIGN[publisher].split()
    assert len(names) > 8
    assert unknown_variables(names, known_variables(root), role_prefixes(root)) == []


ALL_KNOWN = known_variables(collection_root())
LETTERS = st.sampled_from("abcdefghijklmnopqrstuvwxyz_")


@settings(max_examples=effort(100, 3000), deadline=None)
@given(right=st.sampled_from(ALL_KNOWN), at=st.integers(9, 60), kind=st.integers(0, 3), letter=LETTERS)
def test_each_single_typing_error_is_found(right: str, at: int, kind: int, letter: str) -> None:
    """A letter too much, one too few, another one, or two exchanged."""
    at %= len(right)
    swapped = right[:at] + right[at + 1 : at + 2] + right[at] + right[at + 2 :]
    wrong = [right[:at] + letter + right[at:], right[:at] + right[at + 1 :], right[:at] + letter + right[at + 1 :]]
    name = [*wrong, swapped][kind]
    assume(name not in ALL_KNOWN and not name.startswith(("_", "ansible_")))
    ((unknown, near),) = unknown_variables([name], ALL_KNOWN, role_prefixes(collection_root()))
    assert unknown == name
    assert near in ALL_KNOWN


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A collection with one role."""
    meta = tmp_path / "root" / "roles" / "nvidia_driver" / "meta"
    meta.mkdir(parents=True)
    (meta / "argument_specs.yml").write_text(
        "argument_specs:\n  main:\n    options:\n      nvidia_driver_source: {type: str}\n"
        "  other:\n    options:\n      nvidia_driver_state: {type: str}\n"
    )
    (tmp_path / "root" / "playbooks").mkdir()
    (tmp_path / "root" / "playbooks" / "site.yml").write_text("when: gpunode_reboot | default('never') == 'x'\n")
    return tmp_path / "root"


def test_the_roles_report_what_is_known(root: Path) -> None:
    assert known_variables(root) == (
        "gpunode_failure_domain",
        "gpunode_policy",
        "gpunode_reboot",
        "nvidia_driver_source",
        "nvidia_driver_state",
    )
    assert role_prefixes(root) == ("nvidia_driver_", "gpunode_")


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("group_vars/all.yml", "---\n# nvidia_driver_sorce: x\nnvidia_driver_sorce: debian\n", 3),
        ("host_vars/gpu1/driver.yml", "a: 1\n'nvidia_driver_sorce': debian\n", 2),
        ("hosts.ini", "[gpus]\ngpu1 ansible_port=1 nvidia_driver_sorce=debian\n", 2),
        ("hosts.ini", "[gpus]\ngpu1\n[gpus:vars]\nnvidia_driver_sorce = debian\n", 4),
        ("hosts.ini", 'all: {hosts: {gpu1: {"nvidia_driver_sorce": 1}}}\n', 1),
    ],
)
def test_the_line_names_file_line_and_nearest(tmp_path: Path, root: Path, file: str, text: str, line: int) -> None:
    (tmp_path / "hosts.ini").write_text("")
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with pytest.raises(UsageError) as info:
        refuse_unknown(["nvidia_driver_sorce", "site"], root, [str(tmp_path / "hosts.ini")])
    assert str(info.value) == (
        f"{path}:{line}: unknown variable nvidia_driver_sorce; did you mean nvidia_driver_source?"
    )


def test_a_name_that_no_file_has_is_reported_without_place(root: Path) -> None:
    with pytest.raises(UsageError, match=r"^the inventory: unknown variable nvidia_driver_stat;"):
        refuse_unknown(["nvidia_driver_stat"], root, ["host,"])


def test_good_names_pass(root: Path) -> None:
    refuse_unknown(["nvidia_driver_source", "gpunode_reboot", "site"], root, [])


def test_parts_of_longer_names_are_not_found(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text("my_gpunode_x: 1\nuse: '{{ gpunode_x }}'\n")
    assert locate("gpunode_x", [str(file)]) is None


def test_our_own_roles_and_playbooks_are_read() -> None:
    known = known_variables(collection_root())
    assert "nvidia_driver_source" in known
    assert "gpunode_reboot" in known
    assert unknown_variables(known, known, role_prefixes(collection_root())) == []


MISSING_TASKS = [
    ("{{ inventory_dir }}/there.yml", {}, ""),
    ("{{ inventory_dir }}/none.yml", {}, "{inventory}/none.yml is not a file"),
    ("{{ inventory_dir }}/none.yml", {"docker_state": "keep"}, ""),
    ("/none.yml", {}, "/none.yml is not a file"),
    ("none.yml", {}, "{root}/playbooks/none.yml is not a file; write"),
    ("{{ folder }}/none.yml", {}, ""),
    ("", {}, ""),
]


@pytest.mark.parametrize(
    ("variable", "text"),
    [("slurm_node_tasks_after", "/none.yml"), ("docker_tasks_after", "{% if a %}/none.yml{% endif %}")],
)
def test_task_files_that_are_not_read_or_not_known_yet_are_no_error(variable: str, text: str) -> None:
    refuse_missing_tasks({"gpu-01": {variable: text}}, collection_root(), ["hosts.yml"])


@pytest.mark.parametrize("variable", ["docker_tasks_before", "docker_tasks_after", "gpunode_drain_tasks"])
@pytest.mark.parametrize(("text", "more", "problem"), MISSING_TASKS)
def test_a_missing_task_file_is_named_with_its_line(
    tmp_path: Path, variable: str, text: str, more: dict[str, str], problem: str
) -> None:
    (tmp_path / "there.yml").write_text("[]\n")
    file = tmp_path / "hosts.yml"
    file.write_text(f"all:\n  vars:\n    {variable}: '{text}'\n")
    if variable.startswith("gpunode_"):
        more = {}
        problem = problem or ("{inventory}/none.yml is not a file" if text.endswith("dir }}/none.yml") else "")
    hosts = {"gpu-01": {variable: text, **more}}
    if not problem:
        refuse_missing_tasks(hosts, collection_root(), [str(file)])
        return
    with pytest.raises(UsageError) as refused:
        refuse_missing_tasks(hosts, collection_root(), [str(file)])
    assert str(refused.value).startswith(
        f"{file}:3: {variable}: {problem.format(inventory=tmp_path, root=collection_root())}"
    )


def test_a_task_file_of_another_role_is_not_looked_for() -> None:
    refuse_missing_tasks({"gpu-01": {"nginx_tasks_before": "/none.yml"}}, collection_root(), ["hosts.yml"])
