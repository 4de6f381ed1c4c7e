"""Templates of the roles for fabric, CUDA and DCGM, run by the shell that will run them."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpunode.errors import UsageError
from gpunode.provisioning.cuda import VersionPin
from gpunode.provisioning.driver.plan import ROLE as DRIVER
from gpunode.provisioning.nvidia_fabric import ROLE as FABRIC
from gpunode.provisioning.templates import rendered

ROLES = Path(__file__).parents[3] / "roles"


def condition(text: str, bus: Path) -> int:
    """Exit code of the ExecCondition in a drop-in, with ``bus`` in place of the PCI bus."""
    line = next(line for line in text.splitlines() if line.startswith("ExecCondition="))
    script = line.removeprefix("ExecCondition=/bin/sh -c ").strip("'").replace("$$", "$")
    assert "'" not in script
    script = script.replace("/sys/bus/pci/devices", str(bus))
    return subprocess.run(["/bin/sh", "-c", script], capture_output=True, timeout=10, check=False).returncode


def put(bus: Path, slot: str, vendor: str, device: str, kind: str) -> None:
    folder = bus / slot
    folder.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("device", device), ("class", kind)):
        (folder / name).write_text(f"{text}\n", encoding="ascii")


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    put(tmp_path, "0000:00:1f.0", "0x8086", "0x22a3", "0x060100")
    return tmp_path


def test_the_fabric_manager_needs_its_own_switches(bus: Path) -> None:
    text = rendered("nvidia_fabric", "condition.conf.j2", ids=["0x10de:0x1af1", "0x10de:0x22a3"])
    put(bus, "0000:1b:00.0", "0x10de", "0x2330", "0x030200")
    assert condition(text, bus) == 1
    put(bus, "0000:05:00.0", "0x10de", "0x22a3", "0x068000")
    assert condition(text, bus) == 0


def test_dcgm_needs_a_gpu(bus: Path) -> None:
    text = rendered("dcgm", "nvidia-dcgm.conf.j2")
    put(bus, "0000:1b:00.1", "0x10de", "0x22bc", "0x040300")
    assert condition(text, bus) == 1
    put(bus, "0000:1b:00.0", "0x10de", "0x26b9", "0x030200")
    assert condition(text, bus) == 0


def test_an_empty_bus_passes_over(tmp_path: Path) -> None:
    assert condition(rendered("dcgm", "nvidia-dcgm.conf.j2"), tmp_path) == 1


@pytest.mark.parametrize("shell", [["sh", "-eu"], ["bash", "-eu"]], ids=["sh", "bash"])
def test_the_profile_adds_once_and_leaves_no_empty_element(shell: list[str]) -> None:
    profile = rendered("cuda", "profile.sh.j2")
    show = '\nprintf "%s %s" "$PATH" "${LD_LIBRARY_PATH-none}"\n'

    def after(script: str, **environment: str) -> list[str]:
        argv = [*shell, "-c", script + show]
        done = subprocess.run(
            argv, env={"PATH": "/usr/bin", **environment}, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.split()

    once = after(profile)
    assert once == ["/usr/local/cuda/bin:/usr/bin", "/usr/local/cuda/lib64"]
    assert after(profile + profile) == once
    assert after(profile, LD_LIBRARY_PATH="/opt/own") == [once[0], "/usr/local/cuda/lib64:/opt/own"]
    kept = after(profile, PATH="/opt/own:/usr/local/cuda/bin:/usr/bin", LD_LIBRARY_PATH="/usr/local/cuda/lib64")
    assert kept == ["/opt/own:/usr/local/cuda/bin:/usr/bin", "/usr/local/cuda/lib64"]


def test_preferences_are_stanzas_of_their_own() -> None:
    pins = [VersionPin(("a", "b*"), "12.9.*"), VersionPin(("c",), "2-*+cuda12.9")]
    stanzas = rendered("cuda", "apt.pref.j2", pins=pins).strip().split("\n\n")[1:]
    assert [stanza.splitlines()[0] for stanza in stanzas] == ["Package: a b*", "Package: c"]
    assert [stanza.splitlines()[1] for stanza in stanzas] == ["Pin: version 12.9.*", "Pin: version 2-*+cuda12.9"]


def test_every_file_of_the_driver_and_the_fabric_is_named_in_their_readmes() -> None:
    for role, paths in (("nvidia_driver", DRIVER.files), ("nvidia_fabric", FABRIC.files)):
        readme = (ROLES / role / "README.md").read_text(encoding="utf-8")
        unnamed = [
            path for path in paths if path not in readme and path.split("/")[-2].removesuffix(".d") not in readme
        ]
        assert not unnamed


def test_a_site_replaces_one_template_and_keeps_the_others(tmp_path: Path) -> None:
    (tmp_path / "accounts").mkdir()
    (tmp_path / "accounts" / "journald.conf.j2").write_text(
        "# {{ mark }}, of the site\n[Journal]\nSystemMaxUse={{ max }}\n"
    )
    journal = rendered("accounts", "journald.conf.j2", site=str(tmp_path), max="1G")
    assert journal == "# Managed by gpunode (role accounts), of the site\n[Journal]\nSystemMaxUse=1G\n"
    default = rendered("ml_environment", "logind.conf.j2")
    assert rendered("ml_environment", "logind.conf.j2", site=str(tmp_path)) == default
    # One of several roles is replaced for one of them.
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "unattended.conf.j2").write_text("{{ names | length }}\n")
    variables: dict[str, Any] = {"why": "x.", "names": ["a.b+"], "site": str(tmp_path)}
    assert rendered("docker", "unattended.conf.j2", **variables) == "1\n"
    assert '"^a[.]b[+]$";' in rendered("nvidia_driver", "unattended.conf.j2", **variables)


@pytest.mark.parametrize(
    ("text", "why"),
    [("{{ maximum }}", "'maximum' is undefined"), ("{% if %}", "line 1: Expected an expression"), (None, "were found")],
)
def test_a_template_that_cannot_be_rendered_is_one_line(tmp_path: Path, text: str | None, why: str) -> None:
    (tmp_path / "accounts").mkdir()
    name = "journald.conf.j2" if text else "nothing.j2"
    if text:
        (tmp_path / "accounts" / name).write_text(text)
    with pytest.raises(UsageError, match=why) as raised:
        rendered("accounts", name, site=str(tmp_path), max="1G")
    assert f"{tmp_path}/accounts/{name}" in str(raised.value)
    assert "\n" not in str(raised.value)


PROGRAMS = sorted(path for path in ROLES.glob("*/files/*") if path.read_bytes().startswith(b"#!/bin/sh"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_the_programs_of_roles_are_shell(program: Path) -> None:
    done = subprocess.run(["/bin/sh", "-n", str(program)], capture_output=True, text=True, timeout=10, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_roles_have_programs() -> None:
    assert {path.name for path in PROGRAMS} >= {"acs", "cpu-tuning"}
