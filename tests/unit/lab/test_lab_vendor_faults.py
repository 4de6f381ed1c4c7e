"""``gpunode lab fault vendor``: words that are none, a repository that does not run. Its container is a stand-in."""

from unittest.mock import Mock

import pytest

from gpunode.errors import UndeterminedError, UsageError
from gpunode.lab.repositories import Vendor


def test_words_that_a_fault_does_not_take_are_refused() -> None:
    container = Mock(status="running")
    with pytest.raises(UsageError, match="libcuda1_\\*: the vendor repository's fault unsigned takes no arguments"):
        Vendor(container).fault("unsigned", "libcuda1_*")
    assert not container.method_calls


def test_packages_that_are_gone_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Mock(return_value=(0, b"", b""))
    monkeypatch.setattr("gpunode.lab.repositories.vendor.run_in", run)
    Vendor(Mock(status="running")).fault("package-gone", "libcuda1_*", "nvidia-smi*")
    assert run.call_args.args[1][-2:] == ["package-gone", "libcuda1_* nvidia-smi*"]


def test_a_stopped_repository_reports_what_starts_it() -> None:
    with pytest.raises(UndeterminedError, match="the vendor repository does not run: gpunode lab up starts it"):
        Vendor(Mock(status="exited")).faults()
