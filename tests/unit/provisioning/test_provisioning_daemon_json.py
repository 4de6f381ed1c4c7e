"""daemon.json: merged key by key with keys of users and other roles, and restored."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from gpunode.provisioning.daemon_json import DaemonRequest, DockerSettings, Document, MergedDaemon, merge_daemon
from gpunode.provisioning.daemon_json import daemon_request as request_of

OURS: Document = {"live-restore": True, "log-opts": {"max-size": "100m"}}
FOREIGN = '{"dns": ["10.0.0.1"], "log-opts": {"tag": "x"}, "labels": ["rack=7"]}'
SETTINGS: dict[str, Any] = {
    "live_restore": True,
    "log_max_size": "100m",
    "log_max_files": 5,
    "shm_size": "1g",
    "storage_driver": "",
    "daemon": {},
}


NOTHING: dict[str, Any] = {"live_restore": False, "log_max_size": "", "log_max_files": 0, "shm_size": ""}


def daemon_request(settings: dict[str, Any], text: str | None, **more: Any) -> DaemonRequest:
    """What these settings alone request."""
    return request_of(DockerSettings.model_validate({**NOTHING, **settings}), text, **more)


def written(merged: MergedDaemon) -> str:
    assert merged.text is not None
    return merged.text


def document(merged: MergedDaemon) -> Any:
    return json.loads(written(merged))


def test_foreign_keys_survive_also_beside_ours_in_one_object() -> None:
    answer = merge_daemon(FOREIGN, OURS)
    assert document(answer) == {
        "dns": ["10.0.0.1"],
        "log-opts": {"tag": "x", "max-size": "100m"},
        "labels": ["rack=7"],
        "live-restore": True,
    }
    assert answer.keys == ("live-restore", "log-opts.max-size")
    assert answer.restart == ("log-opts.max-size",)


@pytest.mark.parametrize("text", [None, "", FOREIGN])
def test_a_second_merge_changes_nothing(text: str | None) -> None:
    first = merge_daemon(text, OURS)
    second = merge_daemon(first.text, OURS, first.memory)
    assert first.changed
    assert second == replace(first, changed=False, keys=(), restart=())


def test_a_file_with_the_requested_values_keeps_its_form() -> None:
    text = '{"live-restore":true,\n\n"log-opts":{"max-size":"100m"}}'
    answer = merge_daemon(text, OURS)
    assert (answer.text, answer.changed, answer.memory) == (text, False, None)


def test_what_is_no_longer_requested_is_replaced_by_the_previous_value() -> None:
    text = '{"live-restore": false, "dns": []}'
    first = merge_daemon(text, {"live-restore": True, "features": {"cdi": True}})
    again = merge_daemon(first.text, {"live-restore": True, "features": {"cdi": True}}, first.memory)
    last = merge_daemon(again.text, {}, again.memory)
    assert document(last) == json.loads(text)
    assert last.memory is None
    assert last.keys == ("features.cdi", "live-restore")


def test_a_file_that_was_made_for_ours_goes_with_it() -> None:
    first = merge_daemon(None, OURS)
    last = merge_daemon(first.text, {}, first.memory)
    assert (last.text, last.changed) == (None, True)


def test_an_empty_file_of_a_user_stays() -> None:
    first = merge_daemon("{}\n", OURS)
    last = merge_daemon(first.text, {}, first.memory)
    assert document(last) == {}


def test_a_later_foreign_change_remains_when_ours_is_removed() -> None:
    first = merge_daemon(None, OURS)
    edited = written(first).replace("100m", "1g")
    last = merge_daemon(edited, {}, first.memory)
    assert document(last) == {"log-opts": {"max-size": "1g"}}


def test_a_foreign_change_is_corrected_while_the_value_is_requested() -> None:
    first = merge_daemon(None, OURS)
    answer = merge_daemon(written(first).replace("100m", "1g"), OURS, first.memory)
    assert answer.text == first.text
    assert answer.keys == ("log-opts.max-size",)
    assert merge_daemon(answer.text, {}, answer.memory).text is None


def test_two_roles_share_the_file_and_do_not_fight() -> None:
    runtime: Document = {
        "runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}},
        "features": {"cdi": True},
    }
    docker = merge_daemon(None, {**OURS, "features": {"cdi": False}})
    toolkit = merge_daemon(docker.text, runtime, None, docker.memory)
    assert document(toolkit)["features"] == {"cdi": False}
    assert document(toolkit)["runtimes"] == runtime["runtimes"]
    assert not merge_daemon(toolkit.text, {**OURS, "features": {"cdi": False}}, docker.memory).changed
    assert not merge_daemon(toolkit.text, runtime, toolkit.memory, docker.memory).changed
    gone = merge_daemon(toolkit.text, {}, toolkit.memory, docker.memory)
    assert gone.text == docker.text


def test_the_last_of_two_owners_removes_the_file_that_the_first_one_made() -> None:
    docker = merge_daemon(None, OURS)
    toolkit = merge_daemon(docker.text, {"features": {"cdi": True}}, None, docker.memory)
    left = merge_daemon(toolkit.text, {}, docker.memory, toolkit.memory)
    assert document(left) == {"features": {"cdi": True}}
    last = merge_daemon(left.text, {}, toolkit.memory)
    assert (last.text, last.changed) == (None, True)
    # A key that a user added meanwhile stays, and the file with it.
    users = merge_daemon('{"dns": ["10.0.0.1"], "features": {"cdi": true}}', {}, toolkit.memory)
    assert document(users) == {"dns": ["10.0.0.1"]}


def test_execution_options_have_owners_of_their_own() -> None:
    text = '{"exec-opts": ["isolation=process"]}'
    answer = merge_daemon(text, {"exec-opts": ["native.cgroupdriver=cgroupfs"]})
    assert document(answer) == {"exec-opts": ["isolation=process", "native.cgroupdriver=cgroupfs"]}
    assert document(merge_daemon(answer.text, {}, answer.memory)) == json.loads(text)


def test_runtimes_and_live_restore_need_no_restart_and_cdi_does() -> None:
    answer = merge_daemon(
        None, {"live-restore": True, "runtimes": {"nvidia": {"path": "x"}}, "features": {"cdi": True}}
    )
    assert answer.restart == ("features.cdi",)
    gone = merge_daemon(answer.text, {"runtimes": {"nvidia": {"path": "y"}}}, answer.memory)
    assert gone.restart == ("features.cdi", "live-restore")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,}', "it is not JSON: .* in line 1"),
        ("[]", "it does not contain an object"),
        ('{"log-opts": "max-size=1m"}', "log-opts is not an object, so log-opts.max-size cannot be set in it"),
    ],
)
def test_a_file_that_cannot_be_merged_is_refused_and_not_touched(text: str, words: str) -> None:
    answer = merge_daemon(text, OURS)
    assert not answer.changed
    assert answer.problem is not None
    assert re.search(words, answer.problem)


def test_no_request_makes_no_file() -> None:
    assert merge_daemon(None, {}).text is None


def test_the_defaults_are_live_restore_limited_logs_and_shared_memory() -> None:
    answer = daemon_request(SETTINGS, None)
    limits: Document = {"max-size": "100m", "max-file": "5"}
    assert answer == DaemonRequest({"live-restore": True, "log-opts": limits, "default-shm-size": "1g"})


@pytest.mark.parametrize(
    ("present", "requested", "expected"),
    [
        ("64M", "1g", "1g"),
        (67108864, "1g", "1g"),
        ("much", "1g", "1g"),
        ("1GiB", "1024m", None),
        ("16g", "1g", None),
        ("16g", "", None),
        (None, "1.5 GB", "1.5 GB"),
    ],
)
def test_shared_memory_of_others_is_increased_and_never_decreased(
    present: object, requested: str, expected: str | None
) -> None:
    text = json.dumps({} if present is None else {"default-shm-size": present})
    answer = daemon_request({"shm_size": requested}, text)
    assert answer.problem is None
    assert answer.values.get("default-shm-size") == expected


def test_shared_memory_of_this_role_follows_the_request() -> None:
    first = merge_daemon('{"default-shm-size": "64m"}', daemon_request({"shm_size": "8g"}, None).values)
    assert first.restart == ()  # dockerd applies it on a reload
    less = daemon_request({"shm_size": "1g"}, first.text, memory=first.memory)
    second = merge_daemon(first.text, less.values, first.memory)
    assert document(second) == {"default-shm-size": "1g"}
    none = daemon_request({"shm_size": ""}, second.text, memory=second.memory)
    assert document(merge_daemon(second.text, none.values, second.memory)) == {"default-shm-size": "64m"}
    exact = daemon_request({"shm_size": "1g", "daemon": {"default-shm-size": "256m"}}, None)
    assert exact.values == {"default-shm-size": "256m"}
    assert "docker_shm_size" in (daemon_request({"shm_size": "big"}, None).problem or "")


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--default-shm-size=1G", "default-shm-size"),
        ("--default-shm-size 1G", "default-shm-size"),
        ("--live-restore", "live-restore"),
        ("--log-opt max-size=1m", "log-opts"),
    ],
)
def test_what_dockerd_s_command_line_sets_stays_out_of_the_file(option: str, key: str) -> None:
    """The service of DGX OS has ``--default-shm-size=1G``; dockerd does not start if daemon.json sets it too."""
    command = f"{{ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd -H fd:// {option} ; ignore_errors=no }}"
    answer = daemon_request(SETTINGS, None, command=command)
    assert answer.values.keys() == daemon_request(SETTINGS, None).values.keys() - {key}
    assert f"{key} is not set" in answer.notes[0]
    refused = daemon_request({"daemon": {key: "1"}}, None, command=command)
    assert f"docker_daemon must not set {key}" in (refused.problem or "")


def test_other_log_drivers_are_left_alone() -> None:
    answer = daemon_request(SETTINGS, '{"log-driver": "journald"}')
    assert answer.values == {"live-restore": True, "default-shm-size": "1g"}
    assert "journald" in answer.notes[0]
    by_request = {**SETTINGS, "daemon": {"log-driver": "local"}}
    assert "log-opts" in daemon_request(by_request, '{"log-driver": "journald"}').values


def test_a_swarm_goes_without_live_restore() -> None:
    answer = daemon_request(SETTINGS, None, swarm=True)
    assert "live-restore" not in answer.values
    assert "swarm" in answer.notes[0]


def test_further_keys_win_and_a_socket_is_refused() -> None:
    more = daemon_request({**SETTINGS, "daemon": {"log-opts": {"max-size": "1g"}, "mtu": 1450}}, None)
    assert more.values["log-opts"] == {"max-size": "1g", "max-file": "5"}
    assert more.values["mtu"] == 1450
    refused = daemon_request({**SETTINGS, "daemon": {"hosts": ["tcp://0.0.0.0:2375"]}}, None)
    assert "docker_daemon must not set hosts" in (refused.problem or "")


def test_containers_without_privileges_are_options() -> None:
    assert daemon_request({}, None).values == {}
    request = daemon_request({"no_new_privileges": True, "userns_remap": "default"}, None)
    assert request.values == {"no-new-privileges": True, "userns-remap": "default"}
    merged = merge_daemon('{"userns-remap": "ada"}', request.values)
    assert set(merged.restart) == {"no-new-privileges", "userns-remap"}
    assert merge_daemon(merged.text, {}, merged.memory).text == '{\n    "userns-remap": "ada"\n}\n'
    assert "neither default nor" in (daemon_request({"userns_remap": "a b"}, None).problem or "")
