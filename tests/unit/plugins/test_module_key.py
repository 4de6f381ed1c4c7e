"""Which key signs modules, and what the firmware knows of it."""

from pathlib import Path

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import module_key


# The output of mokutil 0.6.0 of Debian 12 for a key in each of these states.
@pytest.mark.parametrize(
    ("output", "enrolled", "waits"),
    [
        ("KEY is not enrolled", False, False),
        ("KEY is already in the enrollment request", None, True),
        ("KEY is already enrolled", True, False),
        ("KEY is already in db", True, False),
        ("KEY is already in the built-in trusted keyring", True, False),
        ("KEY is blocked in MokListXRT", None, False),
        ("EFI variables are not supported on this system", None, False),
    ],
)
def test_what_the_firmware_knows_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, enrolled: bool | None, waits: bool
) -> None:
    key = tmp_path / "mok.pub"
    monkeypatch.setattr(module_key, "DKMS_SETTINGS", tmp_path / "absent")
    monkeypatch.setattr(module_key, "MACHINE_OWNER_KEYS", (str(tmp_path / "absent"), str(key)))
    assert module_key.key() is None
    key.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module_key.key() == {"path": str(key), "enrolled": None, "waits": False, "fresh": False}
    tool = tmp_path / "mokutil"
    tool.write_text(f"#!/bin/sh\necho '{output}' >&{2 if 'built-in' in output or 'EFI' in output else 1}\nexit 1\n")
    tool.chmod(0o755)
    assert module_key.key() == {"path": str(key), "enrolled": enrolled, "waits": waits, "fresh": False}
    for name, boot in (("STAGED_IN", "first"), ("BOOT", "second")):
        (tmp_path / name).write_text(boot)
        monkeypatch.setattr(module_key, name, tmp_path / name)
    assert module_key.key()["fresh"] is False
    (tmp_path / "BOOT").write_text("first")
    assert module_key.key()["fresh"] is True


def test_a_key_of_the_dkms_configuration_precedes_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "framework.conf"
    monkeypatch.setattr(module_key, "DKMS_SETTINGS", settings)
    monkeypatch.setattr(module_key, "MACHINE_OWNER_KEYS", ("/own",))
    assert module_key.certificates() == ["/own"]
    settings.write_text("# mok_certificate=/example\nmok_certificate=/etc/keys/first.der\n")
    (tmp_path / "framework.conf.d").mkdir()
    (tmp_path / "framework.conf.d" / "site.conf").write_text('mok_signing_key="/s.key"\nmok_certificate="/s.der"\n')
    assert module_key.certificates() == ["/s.der", "/etc/keys/first.der", "/own"]
