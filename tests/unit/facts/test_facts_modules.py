"""Modules in memory, on disk and in DKMS, and what keeps nouveau out."""

import pytest
from facts_samples import NVRM, answer, facts_with, gpu_facts_with

from gpunode.facts import modules
from gpunode.facts.errors import ParseError
from gpunode.facts.modules import DkmsModule, LoadedDriver, ModuleFile

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


@pytest.mark.parametrize(
    ("line", "module"),
    [
        (
            "nvidia, 535.261.03, 6.1.0-42-amd64, x86_64: installed",
            DkmsModule(
                name="nvidia", version="535.261.03", kernel="6.1.0-42-amd64", architecture="x86_64", state="installed"
            ),
        ),
        (
            "nvidia-current/535.261.03, 6.1.0-42-amd64, x86_64: installed "
            "(WARNING! Diff between built and installed module!)",
            DkmsModule(
                name="nvidia-current",
                version="535.261.03",
                kernel="6.1.0-42-amd64",
                architecture="x86_64",
                state="installed",
                note="WARNING! Diff between built and installed module!",
            ),
        ),
        (
            "nvidia/570.86.15, 6.8.0-60-generic, aarch64: installed (original_module exists) (WARNING! Diff!)",
            DkmsModule(
                name="nvidia",
                version="570.86.15",
                kernel="6.8.0-60-generic",
                architecture="aarch64",
                state="installed",
                note="original_module exists; WARNING! Diff!",
            ),
        ),
        (
            "nvidia/570.86.15, 5.14.0-503.el9.x86_64, x86_64: installed-weak from 5.14.0-427.el9.x86_64",
            DkmsModule(
                name="nvidia",
                version="570.86.15",
                kernel="5.14.0-503.el9.x86_64",
                architecture="x86_64",
                state="installed-weak",
                note="from 5.14.0-427.el9.x86_64",
            ),
        ),
        (
            "nvidia, 535.261.03: added",
            DkmsModule(name="nvidia", version="535.261.03", kernel=None, architecture=None, state="added"),
        ),
        (
            "nvidia/535.261.03: added",
            DkmsModule(name="nvidia", version="535.261.03", kernel=None, architecture=None, state="added"),
        ),
        (
            "nvidia-current/535.261.03, 6.1.0-42-amd64, x86_64: built",
            DkmsModule(
                name="nvidia-current",
                version="535.261.03",
                kernel="6.1.0-42-amd64",
                architecture="x86_64",
                state="built",
            ),
        ),
    ],
)
def test_lines(line: str, module: DkmsModule) -> None:
    assert modules.parse_dkms(line + "\n") == (module,)


def test_remarks_are_no_modules() -> None:
    text = (
        "Deprecated feature: REMAKE_INITRD (/var/lib/dkms/zfs/source/dkms.conf)\n"
        "Error! Could not locate dkms.conf file.\nFile: /var/lib/dkms/x/1/source/dkms.conf does not exist.\n"
        "zfs/2.1.11, 6.1.0-42-amd64, x86_64: installed\n"
    )
    assert [module.name for module in modules.parse_dkms(text)] == ["zfs"]


@pytest.mark.parametrize("text", ["something else\n", "nvidia: installed\n", "nvidia/1, 6.1, x86_64: unheard-of\n"])
def test_other_text_of_dkms_is_refused(text: str) -> None:
    with pytest.raises(ParseError, match="expected a line of dkms status"):
        modules.parse_dkms(text)


def test_no_dkms_is_no_module_and_a_failing_one_is_a_gap() -> None:
    assert facts_with({"dkms-status": answer("", 127)}).dkms == ()
    failed = facts_with({"dkms-status": answer("nvidia/535: broken\n", 4, "Error! nvidia/535: missing source", "dkms")})
    assert failed.gaps["dkms"] == "dkms failed with exit status 4: Error! nvidia/535: missing source"
