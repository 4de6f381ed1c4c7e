"""The role updates: what no automatic upgrade moves, on both package managers, and the record of what waits."""

import json
import re
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from node_samples import after, by_path, context, node, planned

from gpunode.facts.updates import parse_apt_config
from gpunode.lab.packages.recorded import recorded
from gpunode.onnode import pending_updates
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.updates import (
    AUTOMATIC,
    NEEDRESTART,
    POLICY,
    PROGRAM,
    SETTINGS,
    automatic_text,
    restored_text,
)

TOOL = {"unattended-upgrades": "2.9"}
MOVE = (
    "openssl",
    "libssl3",
    "libcups2",
    "libcurl4",
    "libcue2",
    "hostname",
    "runcom",
    "containernetworking",
    "libnvme1",
)
STAY = (
    "nvidia-driver-cuda",
    "nvidia-kernel-open-dkms",
    "libnvidia-compute-580",
    "xserver-xorg-video-nvidia",
    "firmware-nvidia-gsp",
    "libcuda1",
    "libnvcuvid1",
    "linux-modules-nvidia-580-server-open-generic",
    "cuda",
    "cuda-toolkit-13-0",
    "libcudnn9-cuda-13",
    "cudnn9-cuda-13",
    "libnccl2",
    "libcublas-13-0",
    "datacenter-gpu-manager-4-core",
    "nvidia-container-toolkit",
    "libnvidia-container1",
    "docker.io",
    "docker-ce",
    "docker-ce-cli",
    "containerd",
    "containerd.io",
    "runc",
    "podman",
)
KERNELS = ("linux-image-amd64", "linux-image-6.1.0-42-cloud-amd64", "linux-headers-amd64", "linux-generic")


def requested(installed: dict[str, str] | None = None, *, others: Any = None, **settings: Any) -> Manifest:
    return planned(
        "updates", node({**TOOL, **(installed or {})}), context(others=others or {}), **{"state": "present", **settings}
    )


def kept_back(manifest: Manifest, name: str) -> bool:
    patterns = parse_apt_config(dump(by_path(manifest, POLICY).content or "")).kept_back
    return any(re.match(pattern, name) for pattern in patterns)


def dump(policy: str) -> str:
    """The lines of the policy as ``apt-config dump`` prints them."""
    lines = [f'{name} "{value}";' for name, value in re.findall(r'(?m)^(\S+) "(.*)";$', policy)]
    block = re.search(r"(?s)Package-Blacklist \{\n(.*?)\};", policy)
    assert block is not None
    lines += [f'Unattended-Upgrade::Package-Blacklist:: "{pattern}";' for pattern in re.findall(r'"(.*)";', block[1])]
    return "\n".join(lines)


@pytest.mark.parametrize("name", STAY)
def test_what_a_job_stands_on_stays(name: str) -> None:
    assert kept_back(requested(), name)


@pytest.mark.parametrize("name", [*MOVE, *KERNELS])
def test_everything_else_moves(name: str) -> None:
    assert not kept_back(requested(), name)


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_stays_where_its_modules_are_precompiled(name: str) -> None:
    precompiled = {"linux-modules-nvidia-580-server-open-generic": "6.8"}
    assert kept_back(requested(precompiled), name)
    assert not kept_back(requested(precompiled, exclude_kernel="false"), name)
    assert kept_back(requested(exclude_kernel="true"), name)


def test_an_engine_that_may_move_is_not_excluded() -> None:
    free = requested(others={"docker": {"unattended_upgrades": True}})
    assert not kept_back(free, "docker.io")
    assert kept_back(free, "nvidia-container-toolkit")


def test_upgrades_are_on_or_off_and_never_reboot() -> None:
    on, off = (
        parse_apt_config(dump(by_path(requested(automatic=flag), POLICY).content or "")) for flag in (True, False)
    )
    assert (on.enabled, off.enabled, on.reboots, off.reboots) == (True, False, False, False)


@pytest.mark.parametrize("pattern", ["slurm-(", "", 'a"; };', "a\nb"])
def test_an_invalid_pattern_is_refused(pattern: str) -> None:
    assert "is not a regular expression" in requested(exclude=[pattern]).refusals[0]
    assert requested(exclude=["slurm-"]).refusals == ()


def test_needrestart_keeps_what_jobs_run_on() -> None:
    text = by_path(requested(), NEEDRESTART).content or ""
    assert "$nrconf{override_rc}{qr(^nvidia-)} = 0;\n" in text
    assert "$nrconf{override_rc}{qr(^slurmd)} = 0;\n" in text


def test_masked_timers_stay_and_are_reported() -> None:
    unit = {"name": "apt-daily-upgrade.timer", "load": "masked", "active": "inactive", "sub": "dead"}
    manifest = planned("updates", node(TOOL, facts={"units": [unit]}), context(), state="present")
    assert manifest.units == ()
    assert "systemctl unmask apt-daily-upgrade.timer" in manifest.notes[0]
    loaded = planned("updates", node(TOOL, facts={"units": [{**unit, "load": "loaded"}]}), context(), state="present")
    assert [unit.name for unit in loaded.units] == ["apt-daily-upgrade.timer"]


def test_a_pending_reboot_is_reported() -> None:
    manifest = planned(
        "updates", node(TOOL, facts={"reboot_required": ["linux-image-amd64"]}), context(), state="present"
    )
    assert any("a reboot is pending: linux-image-amd64" in note for note in manifest.notes)


def test_a_settled_node_has_nothing_pending_and_absent_removes_all() -> None:
    state = node(TOOL)
    done = after(planned("updates", state, context(), state="present"), state)
    assert planned("updates", done, context(), state="present").pending_reasons == ()
    gone = planned("updates", done, context(), state="absent")
    assert {file.path for file in gone.files if file.content is None} >= {POLICY, PROGRAM, SETTINGS, NEEDRESTART}


CONF = """\
[commands]
#  What kind of upgrade to perform:
upgrade_type = default
random_sleep = 0

apply_updates = no

[emitters]
emit_via = stdio
"""


def test_dnfs_file_changes_in_single_settings_and_is_restored() -> None:
    text, memory, problem = automatic_text(CONF, None, automatic=True, kernel=True, engine=True)
    assert problem is None
    assert text is not None
    assert memory is not None
    lines = text.splitlines()
    assert lines.index("upgrade_type = security") < lines.index("[emitters]")
    assert lines.index("reboot = never") < lines.index("[emitters]") < lines.index("[base]")
    assert "apply_updates = yes" in lines
    assert "random_sleep = 0" in lines
    (excluded,) = [line for line in lines if line.startswith("excludepkgs")]
    assert {"kernel*", "nvidia-*", "docker-ce*"} <= set(excluded.split())
    assert automatic_text(text, memory, automatic=True, kernel=True, engine=True)[:2] == (text, memory)
    assert restored_text(text, memory).split("[base]")[0].split() == CONF.split()
    assert "excludepkgs" not in restored_text(text, memory)
    assert automatic_text(CONF, "{", automatic=True, kernel=True, engine=True)[2]


def test_with_dnf_the_file_follows_the_package() -> None:
    first = planned("updates", node({}, dnf=True), context(), state="present")
    assert AUTOMATIC not in {file.path for file in first.files}
    manifest = planned("updates", node({"dnf-automatic": "4"}, {AUTOMATIC: CONF}, dnf=True), context(), state="present")
    assert "upgrade_type = security" in (by_path(manifest, AUTOMATIC).content or "")


@pytest.mark.parametrize("system", ["rhel9", "rhel10", "libnvidia-container-rpm"])
def test_dnf_keeps_what_apt_keeps_of_the_recorded_packages(system: str) -> None:
    cuda = ("cudnn9-cuda-12", "libcudnn9-cuda-12", "libnccl", "libcufft-13-0", "libcusparse-devel-13-0", "moby-engine")
    text, _, _ = automatic_text(CONF, None, automatic=True, kernel=False, engine=True)
    globs = re.findall(r"(?m)^excludepkgs = (.*)", text or "")[0].split()
    kept = [name for name in (*recorded(system)["packages"], *cuda) if kept_back(requested(), name)]
    assert len(kept) > len(cuda)
    assert [name for name in kept if not any(fnmatchcase(name, glob) for glob in globs)] == []


def test_dnf_keeps_what_the_site_and_the_node_exclude() -> None:
    def excluded(conf: str, *patterns: str) -> list[str]:
        machine = node({"dnf-automatic": "4"}, {AUTOMATIC: conf}, dnf=True)
        content = by_path(
            planned("updates", machine, context(), state="present", exclude=list(patterns)), AUTOMATIC
        ).content
        return str(re.findall(r"(?m)^excludepkgs = (.*)", content or "")[0]).split()

    conf = CONF + "[base]\nexcludepkgs = postgresql*, lustre-client\n"
    assert {"slurm-*", "lustre-client", "a.b*", "munge"} <= set(excluded(conf, "slurm-", "a[.]b", "munge$"))
    assert {"postgresql*", "lustre-client"} <= set(excluded(conf))
    machine = node({"dnf-automatic": "4"}, {AUTOMATIC: CONF}, dnf=True)
    (refused,) = planned("updates", machine, context(), state="present", exclude=["slurm-(a|b)"]).refusals
    assert "updates_exclude: slurm-(a|b)" in refused
    text, memory, _ = automatic_text(conf, None, automatic=True, kernel=True, engine=True)
    assert restored_text(text or "", memory or "").split() == conf.split()


MADISON = """\
 docker.io | 20.10.24+dfsg1-1+deb12u2 | http://deb.debian.org/debian-security bookworm-security/main amd64 Packages
 docker.io | 20.10.24+dfsg1-1+deb12u1 | http://deb.debian.org/debian bookworm/main amd64 Packages
    runc | 1.1.5+ds1-1+deb12u1 | http://deb.debian.org/debian bookworm/main amd64 Packages
 docker.io | 20.10.24+dfsg1-1+deb12u2 | http://deb.debian.org/debian-security bookworm-security/main Sources
"""


def test_security_updates_are_read_from_their_suites() -> None:
    assert pending_updates.offered(MADISON) == {"docker.io": {"20.10.24+dfsg1-1+deb12u2"}}
    listing = "docker.io\t1\tinstalled\nrunc\t1\tconfig-files\nbash\t5\tinstalled\nbroken\n"
    assert pending_updates.installed(listing, ["docker[.]io$", "runc$"]) == {"docker.io": "1"}


def test_the_time_of_the_first_sight_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_updates, "newer", lambda version, other: int(version) > int(other))
    rows = pending_updates.pending({"a": "1", "b": "9"}, {"a": {"2", "3"}, "b": {"8"}}, {"a": "then"}, "now")
    assert rows == [{"package": "a", "installed": "1", "version": "3", "since": "then"}]
    assert pending_updates.pending({"a": "1"}, {"a": {"2"}}, {}, "now")[0]["since"] == "now"


@pytest.mark.skipif(not Path("/usr/bin/dpkg").exists(), reason="needs dpkg")
def test_the_record_is_written_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings, record = tmp_path / "updates.json", tmp_path / "there" / "pending.json"
    settings.write_text(json.dumps({"patterns": ["docker[.]io$"]}), encoding="utf-8")
    answers = {"dpkg-query": "docker.io\t20.10.24+dfsg1-1+deb12u1\tinstalled\n", "apt-cache": MADISON}
    monkeypatch.setattr(pending_updates, "SETTINGS", settings)
    monkeypatch.setattr(pending_updates, "RECORD", record)
    monkeypatch.setattr(pending_updates, "output", lambda *argv: answers[argv[0]])
    assert pending_updates.main() == 0
    first = json.loads(record.read_text(encoding="utf-8"))
    assert [row["package"] for row in first["pending"]] == ["docker.io"]
    assert pending_updates.main() == 0
    again = json.loads(record.read_text(encoding="utf-8"))
    assert again["pending"] == first["pending"]
    assert list(record.parent.iterdir()) == [record]
    assert sys.version_info >= (3, 9)


def test_a_full_disk_leaves_no_half_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    settings = tmp_path / "updates.json"
    settings.write_text(json.dumps({"patterns": []}))
    monkeypatch.setattr(pending_updates, "SETTINGS", settings)
    monkeypatch.setattr(pending_updates, "RECORD", tmp_path / "state" / "pending.json")
    monkeypatch.setattr(pending_updates, "output", lambda *_: "")
    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space left"):
        pending_updates.main()
    assert list((tmp_path / "state").iterdir()) == []


def test_a_node_is_left_as_it_is_unless_a_state_is_set() -> None:
    assert planned("updates", node(TOOL), context()) == Manifest(role="updates")
