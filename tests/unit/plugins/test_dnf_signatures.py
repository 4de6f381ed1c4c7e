"""What dnf_transaction does around the transaction: signatures before it, links of units behind it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import dnf_transaction as module


class Exceptions:
    class Error(Exception):
        """As dnf.exceptions has it."""


class OtherKey:
    """dnf where the repository's key is not the one that signed; its words are those of dnf 4 on such a node."""

    def __init__(self) -> None:
        self.transaction = SimpleNamespace(install_set=["nvidia-persistenced-3:580.95.05-1.el9.x86_64"])

    def download_packages(self, packages: list[str]) -> None:
        assert packages

    def package_signature_check(self, package: str) -> tuple[int, str]:
        return 1, f"Public key for {package}.rpm is not installed"

    def package_import_key(self, package: str) -> None:
        raise Exceptions.Error(
            f"Public key for {package}.rpm is not installed. Failing package is: {package}\n GPG Keys"
        )


def test_a_package_of_another_key_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "dnf", SimpleNamespace(exceptions=Exceptions))
    with pytest.raises(
        module.TransactionRefusedError, match=r"^repository-unsigned: .*Public key for nvidia-persistenced"
    ) as caught:
        module.fetch(OtherKey())
    assert "\n" not in str(caught.value)


def test_a_unit_of_a_removed_package_is_stopped_and_not_left_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "usr/lib/systemd/system"
    enabled = tmp_path / "multi-user.target.wants"
    for folder in (shipped, enabled):
        folder.mkdir(parents=True)
    (shipped / "kept.service").write_text("", encoding="utf-8")
    for name in ("gone.service", "kept.service", "foreign.service"):
        (enabled / name).symlink_to(shipped / name)
    ran: list[list[str]] = []
    monkeypatch.setattr(module, "run", lambda argv, _limit_s: ran.append(argv))
    package = SimpleNamespace(files=[str(shipped / "gone.service"), str(shipped / "kept.service"), "/usr/bin/tool"])
    module.end_units(module.units_of([package]), str(tmp_path))
    assert sorted(link.name for link in enabled.iterdir()) == ["foreign.service", "kept.service"]
    assert ran == [["systemctl", "stop", "gone.service"], ["systemctl", "daemon-reload"]]
