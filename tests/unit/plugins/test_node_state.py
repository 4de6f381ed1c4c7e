"""Which program manages a node's packages, by what lies on it."""

from pathlib import Path

import pytest
from ansible_collections.gpunode.node.plugins.modules import node_state

ROCKY = 'NAME="Rocky Linux"\nID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.6"\n'
UBUNTU = "ID=ubuntu\nID_LIKE=debian\n"


@pytest.mark.parametrize(
    ("release", "files", "dnf"),
    [
        (ROCKY, ["usr/bin/rpm"], True),
        (ROCKY, ["usr/bin/rpm", "etc/debian_version"], True),  # the lab's look-alike
        (UBUNTU, ["usr/bin/rpm", "etc/debian_version"], False),
        ("ID=debian\n", ["usr/bin/rpm", "etc/debian_version"], False),
        ("ID=debian\n", ["etc/debian_version"], False),
        (None, ["usr/bin/rpm"], True),
        (None, ["usr/bin/rpm", "etc/debian_version"], False),
        (ROCKY, [], False),
    ],
)
def test_rpm_manages_packages_where_the_system_is_none_of_debians(
    tmp_path: Path, release: str | None, files: list[str], dnf: bool
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if release is not None:
        (tmp_path / "etc").mkdir(exist_ok=True)
        (tmp_path / "etc/os-release").write_text(release, encoding="utf-8")
    assert node_state.by_dnf(tmp_path) is dnf
