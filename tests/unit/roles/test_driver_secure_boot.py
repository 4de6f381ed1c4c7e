"""What the role nvidia_driver does with a module whose signing key the firmware does not know yet."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2.nativetypes import NativeEnvironment

ROLE = Path(__file__).parents[3] / "roles" / "nvidia_driver"
VARIABLES = yaml.safe_load((ROLE / "vars" / "main.yml").read_text(encoding="utf-8"))
KEY = {"path": "/var/lib/dkms/mok.pub", "waits": True}


@pytest.mark.parametrize(
    ("signs", "key", "waits"),
    [
        (False, None, False),
        (True, {**KEY, "enrolled": True}, False),
        (True, {**KEY, "enrolled": False}, True),
        (True, {**KEY, "enrolled": None}, True),
        (True, None, True),
    ],
)
def test_a_key_waits_until_the_firmware_is_known_to_have_it(signs: bool, key: Any, waits: bool) -> None:
    template = NativeEnvironment().from_string(VARIABLES["__nvidia_driver_key_waits"])
    found: Any = template.render(__nvidia_driver_signs=signs, gpunode_apt={"key": key})
    assert found is waits


@pytest.mark.parametrize(
    ("mok_hash", "key", "words"),
    [
        ("", {**KEY, "enrolled": False}, "waits for a person at the console"),
        ("", {**KEY, "enrolled": None, "waits": False}, "nvidia_driver_mok_hash stages it"),
        ("", None, "nvidia_driver_mok_hash stages it"),
        ("grub.pbkdf2", None, "waits for a person at the console"),
    ],
)
def test_a_person_is_called_only_for_a_key_that_is_staged(mok_hash: str, key: Any, words: str) -> None:
    environment = NativeEnvironment()
    apt = {"key": key}
    staged: Any = environment.from_string(VARIABLES["__nvidia_driver_key_staged"]).render(gpunode_apt=apt)
    reason = environment.from_string(VARIABLES["__nvidia_driver_key_reason"])
    assert words in reason.render(nvidia_driver_mok_hash=mok_hash, __nvidia_driver_key_staged=staged)


@pytest.mark.parametrize(
    ("staging", "fresh", "waits", "due"),
    [
        ({"changed": True}, False, True, True),
        ({"changed": False, "skipped": True}, True, True, True),
        ({"changed": False, "skipped": True}, False, True, False),
        ({"changed": False, "skipped": True}, True, False, False),
    ],
    ids=["staged in this run", "staged before", "restarted since", "enrolled"],
)
def test_a_reboot_is_due_until_the_node_was_restarted(staging: Any, fresh: bool, waits: bool, due: bool) -> None:
    environment = NativeEnvironment()
    found: Any = environment.from_string(VARIABLES["__nvidia_driver_key_fresh"]).render(
        __nvidia_driver_staging=staging, gpunode_apt={"key": {**KEY, "fresh": fresh}}
    )
    reasons: Any = environment.from_string(VARIABLES["__nvidia_driver_reboot_reasons"]).render(
        nvidia_driver_state="present",
        __nvidia_driver_plan={"reboot_reasons": []},
        __nvidia_driver_key_reason="the key waits",
        __nvidia_driver_key_waits=waits,
        __nvidia_driver_key_fresh=found,
    )
    assert reasons == (["the key waits"] if due else [])


def test_no_module_is_loaded_or_exchanged_while_the_key_waits() -> None:
    tasks = yaml.safe_load((ROLE / "tasks" / "service.yml").read_text(encoding="utf-8"))
    touching = [task for task in tasks if "modprobe" in str(task) or "reload.yml" in str(task)]
    assert len(touching) == 2
    for task in touching:
        assert "not __nvidia_driver_key_waits" in task["when"], task["name"]
