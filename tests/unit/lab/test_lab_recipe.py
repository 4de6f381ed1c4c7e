"""What goes into an image, and that a change of it is a new image."""

import io
import platform
import tarfile
from dataclasses import replace

import pytest

from gpunode.errors import UsageError
from gpunode.lab import recipe as module
from gpunode.lab.packages.lookalike import setup_of
from gpunode.lab.recipe import KEYRING, SYSTEMS, Mirror, Recipe, architecture, system_named

RECIPE = Recipe(SYSTEMS["debian-13"], "amd64", Mirror("http://m.example/debian", "http://s.example/debian-security"))


def test_the_same_recipe_is_the_same_image() -> None:
    assert RECIPE.digest == Recipe(SYSTEMS["debian-13"], "amd64", RECIPE.mirror).digest


@pytest.mark.parametrize(
    "other",
    [
        replace(RECIPE, system=SYSTEMS["debian-12"]),
        replace(RECIPE, architecture="arm64"),
        replace(RECIPE, mirror=replace(RECIPE.mirror, archive="http://n.example/debian")),
        replace(RECIPE, mirror=replace(RECIPE.mirror, proxies=(("http", "http://p.example:1"),))),
    ],
)
def test_another_system_architecture_mirror_or_proxy_is_another_image(other: Recipe) -> None:
    assert other.digest != RECIPE.digest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PACKAGES", ("systemd",)),
        ("DPKG_OPTIONS", ()),
        ("EARLY_FILES", {}),
        ("_SETUP", "true\n"),
        ("_SSHD", "\n"),
        ("_INIT", "exec /sbin/init"),
    ],
)
def test_a_changed_part_is_another_image(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    before = RECIPE.digest
    monkeypatch.setattr(module, name, value)
    assert RECIPE.digest != before


def test_every_source_is_signed_and_main_only() -> None:
    assert RECIPE.sources == [
        f"deb [signed-by={KEYRING}] http://m.example/debian trixie main",
        f"deb [signed-by={KEYRING}] http://m.example/debian trixie-updates main",
        f"deb [signed-by={KEYRING}] http://s.example/debian-security trixie-security main",
    ]
    stanzas = RECIPE.files["etc/apt/sources.list.d/debian.sources"].split("\n\n")
    assert [line for line in stanzas[0].splitlines() if line.startswith("Suites")] == ["Suites: trixie trixie-updates"]
    for stanza in stanzas:
        assert f"Signed-By: {KEYRING}" in stanza
        assert "Components: main\n" in stanza


def test_the_kernel_fits_the_architecture() -> None:
    assert RECIPE.packages[-1] == "linux-image-cloud-amd64"
    assert replace(RECIPE, architecture="arm64").packages[-1] == "linux-image-cloud-arm64"


def test_the_tree_belongs_to_root_and_sudoers_are_not_writable() -> None:
    with tarfile.open(fileobj=io.BytesIO(RECIPE.tree)) as archive:
        entries = {entry.name: entry for entry in archive}
    assert set(entries) == set(RECIPE.files)
    assert {(entry.uid, entry.gid) for entry in entries.values()} == {(0, 0)}
    assert entries["etc/sudoers.d/gpunode-lab"].mode == 0o440
    assert entries["etc/gpunode/lab-node"].mode == 0o644


def test_a_proxy_is_written_for_nodes_that_can_reach_it() -> None:
    path = "etc/apt/apt.conf.d/90gpunode-lab-proxy"
    assert path not in RECIPE.files
    proxied = replace(RECIPE, mirror=replace(RECIPE.mirror, proxies=(("http", "http://p.example:1"),)))
    assert proxied.files[path].splitlines() == [
        'Acquire::http::Proxy "http://p.example:1";',
        'Acquire::http::Proxy::vendor "DIRECT";',
    ]


def test_one_user_is_asked_for_a_password_and_one_is_not() -> None:
    lines = RECIPE.files["etc/sudoers.d/gpunode-lab"].splitlines()
    assert lines == ["admin ALL=(ALL) NOPASSWD: ALL", "operator ALL=(ALL) ALL"]


def test_an_unknown_system_names_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"--os debian-11: .*debian-12, debian-13"):
        system_named("debian-11")


def test_an_architecture_without_a_kernel_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert architecture() == "arm64"
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(UsageError, match="this machine is riscv64"):
        architecture()


@pytest.mark.parametrize("system", ["rocky-9", "rocky-10"])
def test_a_rocky_has_nothing_of_the_kernel_that_debians_headers_bring(system: str) -> None:
    """A node boots the newest image in /boot; with Debian's, no rpm would know the kernel that runs."""
    removed = next(line for line in setup_of(system).splitlines() if line.startswith("rm -rf "))
    assert {"/boot/*-cloud-amd64", "/lib/modules/*-cloud-amd64"} <= set(removed.split())
