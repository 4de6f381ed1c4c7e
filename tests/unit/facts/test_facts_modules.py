"""Modules in memory and on disk, and what keeps nouveau out."""

import pytest
from facts_samples import NVRM, answer, facts_with, gpu_facts_with

from gpunode.facts import modules
from gpunode.facts.errors import ParseError
from gpunode.facts.modules import LoadedDriver, ModuleFile

PATH = "/lib/modules/6.8.0-60-generic/updates/dkms/nvidia.ko.zst"
OPEN = (
    f"filename:       {PATH}\nversion:        570.86.15\nlicense:        Dual MIT/GPL\n"
    "vermagic:       6.8.0-60-generic SMP preempt mod_unload modversions \nparm:           a:b\n"
)


def test_modinfo_of_two_files() -> None:
    other = PATH.replace("6.8.0-60", "6.8.0-71")
    text = OPEN + OPEN.replace("6.8.0-60", "6.8.0-71").replace("Dual MIT/GPL", "NVIDIA") + "signer:         Me\n"
    assert modules.parse_modinfo(text) == (
        ModuleFile(
            kernel="6.8.0-60-generic",
            path=PATH,
            version="570.86.15",
            vermagic="6.8.0-60-generic SMP preempt mod_unload modversions",
            flavour="open",
            signed=False,
        ),
        ModuleFile(
            kernel="6.8.0-71-generic",
            path=other,
            version="570.86.15",
            vermagic="6.8.0-71-generic SMP preempt mod_unload modversions",
            flavour="proprietary",
            signed=True,
        ),
    )


@pytest.mark.parametrize("text", ["version: 1\n", "filename:\n", "filename: /tmp/nvidia.ko\n"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        modules.parse_modinfo(text)


def test_a_module_that_modinfo_cannot_read_is_a_gap() -> None:
    modinfo = answer(
        OPEN, 1, "modinfo: ERROR: could not get modinfo from 'nvidia.ko': Invalid argument", "modinfo", PATH
    )
    assert "could not get modinfo" in facts_with({"modinfo": modinfo}).gaps["module_files"]


def test_a_module_that_modinfo_leaves_out_is_a_gap() -> None:
    modinfo = answer(OPEN, 0, "", "modinfo", PATH, PATH.replace("60", "71"))
    assert "6.8.0-71" in facts_with({"modinfo": modinfo}).gaps["module_files"]


def test_no_module_on_disk_is_seen_as_none() -> None:
    find = answer("/lib/modules/6.1.0/kernel/drivers/video/fbdev/nvidia/nvidiafb.ko\n", 0, "", "find")
    assert facts_with({"find-modules": find, "modinfo": None}).module_files == ()


def test_a_search_that_failed_is_a_gap() -> None:
    find = answer("", 1, "find: '/lib/modules/x': Input/output error", "find")
    assert "Input/output error" in facts_with({"find-modules": find, "modinfo": None}).gaps["module_files"]


def test_loaded_modules() -> None:
    facts = facts_with(files={"/proc/modules": "nouveau 3170304 0 - Live 0x0\nvideo 65536 1 nouveau, Live 0x0\n"})
    assert facts.modules == ("nouveau", "video")
    assert facts.loaded_driver is None
    assert "loaded_driver" not in facts.gaps


@pytest.mark.parametrize(
    ("files", "modules_seen"),
    [
        ({}, True),
        ({"/proc/sys/kernel/modules_disabled": "0\n"}, False),
        ({"/proc/sys/kernel/tainted": None}, False),
    ],
    ids=["kernel without modules", "modules hidden", "sandbox"],
)
def test_without_proc_modules(files: dict[str, str | None], modules_seen: bool) -> None:
    facts = facts_with(files={"/proc/modules": None, **files})
    assert (facts.modules == ()) is modules_seen
    assert ("modules" in facts.gaps) is not modules_seen
    assert ("loaded_driver" in facts.gaps) is not modules_seen


def test_the_loaded_driver() -> None:
    proprietary = gpu_facts_with(files={"/proc/driver/nvidia/version": NVRM})
    assert proprietary.loaded_driver == LoadedDriver(version="535.309.01", flavour="proprietary")
    from_sysfs = gpu_facts_with(
        files={"/proc/driver/nvidia/version": None, "/sys/module/nvidia/version": "570.86.15\n"}
    )
    assert from_sysfs.loaded_driver == LoadedDriver(version="570.86.15", flavour=None)


def test_a_driver_that_hides_its_version_is_a_gap() -> None:
    facts = gpu_facts_with(files={"/proc/driver/nvidia/version": None})
    assert "the module nvidia is loaded" in facts.gaps["loaded_driver"]
    assert "loaded_driver" in gpu_facts_with(files={"/proc/driver/nvidia/version": "rubbish\n"}).gaps


BARE: dict[str, str | None] = {
    "/etc/modprobe.d/": "",
    "/lib/modprobe.d/": "",
    "/usr/lib/modprobe.d/": "",
    "/proc/cmdline": "quiet\n",
}


@pytest.mark.parametrize(
    ("files", "blacklisted"),
    [
        ({}, False),
        ({"/etc/modprobe.d/": "a.conf\n", "/etc/modprobe.d/a.conf": "# no\n  blacklist   nouveau\n"}, True),
        ({"/etc/modprobe.d/": "a.conf\n", "/etc/modprobe.d/a.conf": "# blacklist nouveau\n"}, False),
        ({"/etc/modprobe.d/": "a.conf\n", "/etc/modprobe.d/a.conf": "blacklist nouveaux\n"}, False),
        ({"/etc/modprobe.d/": "a.conf\n", "/etc/modprobe.d/a.conf": "options nouveau modeset=0\n"}, False),
        ({"/usr/lib/modprobe.d/": "a.conf\n", "/usr/lib/modprobe.d/a.conf": "install nouveau /bin/false\n"}, True),
        ({"/usr/lib/modprobe.d/": "a.conf\n", "/usr/lib/modprobe.d/a.conf": "install nouveau /opt/x\n"}, False),
        ({"/usr/lib/modprobe.d/": "a.conf\n", "/usr/lib/modprobe.d/a.conf": "alias nouveau off\n"}, True),
        (
            {
                "/etc/modprobe.d/": "a.conf\n",
                "/usr/lib/modprobe.d/": "a.conf\n",
                "/usr/lib/modprobe.d/a.conf": "blacklist nouveau\n",
            },
            False,
        ),
        ({"/proc/cmdline": "quiet modprobe.blacklist=snd,nouveau\n"}, True),
        ({"/proc/cmdline": "module_blacklist=nouveau\n"}, True),
        ({"/proc/cmdline": "modprobe.blacklist=nouveau_x nouveau.modeset=0\n"}, False),
    ],
)
def test_nouveau_is_kept_out(files: dict[str, str | None], blacklisted: bool) -> None:
    without = ("/etc/modprobe.d/nvidia-blacklists-nouveau.conf", "/etc/modprobe.d/nvidia.conf")
    facts = facts_with(None, {**BARE, **files}, without)
    assert facts.nouveau_blacklisted is blacklisted


def test_a_setting_that_was_seen_outweighs_what_was_not() -> None:
    facts = facts_with(without=("/proc/cmdline", "/usr/lib/modprobe.d/"))
    assert facts.nouveau_blacklisted is True


@pytest.mark.parametrize("path", ["/proc/cmdline", "/etc/modprobe.d/"])
def test_no_setting_is_only_known_where_all_was_seen(path: str) -> None:
    facts = facts_with(None, {key: text for key, text in BARE.items() if key != path}, (path,))
    assert facts.nouveau_blacklisted is None
    assert "did not read it" in facts.gaps["nouveau_blacklisted"]
