"""Which kernel starts next, by the files of boot loaders; what keeps the driver's module from loading.

grub.cfg is what update-grub of Debian 12 writes, without the lines that the probe does not keep; entries of the boot
loader specification are typed after what kernel-core of RHEL 9 and kernel-install write.
"""

import random

import pytest
from effort import effort
from facts_host import answer

from gpunode.facts import boot
from gpunode.facts.bundle_reader import MODPROBE_FOLDERS, BundleReader, UnknownFactError
from gpunode.facts.errors import ParseError
from gpunode.probe.bundle import Bundle, CommandResult

OLD, NEW = "6.1.0-42-cloud-amd64", "6.1.0-56-cloud-amd64"
GRUB_CFG = """\
   set default="${next_entry}"
   set default="DEFAULT"
function gfxmode {
}
menuentry 'Debian GNU/Linux' --class debian --class gnu-linux --class os $menuentry_id_option 'gnulinux-simple-ab' {
	linux	/boot/vmlinuz-NEW root=LABEL=gpunode-root ro console=ttyS0
}
submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-ab' {
	menuentry 'Debian GNU/Linux, with Linux NEW' --class os $menuentry_id_option 'gnulinux-NEW-advanced-ab' {
		linux	/boot/vmlinuz-NEW root=LABEL=gpunode-root ro console=ttyS0
	}
	menuentry 'Debian GNU/Linux, with Linux OLD' --class os $menuentry_id_option 'gnulinux-OLD-advanced-ab' {
		linux	/boot/vmlinuz-OLD root=LABEL=gpunode-root ro console=ttyS0
	}
}
menuentry 'UEFI Firmware Settings' $menuentry_id_option 'uefi-firmware' {
}
""".replace("NEW", NEW).replace("OLD", OLD)
EL, EL_OLD = "5.14.0-570.23.1.el9_6.x86_64", "5.14.0-503.11.1.el9_5.x86_64"
MACHINE = "0c3e6c0e0c3e6c0e0c3e6c0e0c3e6c0e"
EL_CFG = 'set default="${next_entry}"\nset default="${saved_entry}"\nblscfg\n'
LOADER_INFO = "/sys/firmware/efi/efivars/LoaderInfo-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
ONE_SHOT = "/sys/firmware/efi/efivars/LoaderEntryOneShot-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"


def entry(release: str, path: str = "/vmlinuz-{}") -> str:
    return f"version {release}\nlinux {path.format(release)}\noptions root=UUID=ab ro\n"


def entries(folder: str, *releases: str, path: str = "/vmlinuz-{}") -> dict[str, str | None]:
    names = {f"{MACHINE}-{release}.conf": release for release in releases}
    listing = {f"{folder}entries/": "".join(f"{name}\n" for name in names)}
    return {**listing, **{f"{folder}entries/{name}": entry(release, path) for name, release in names.items()}}


def utf_16(text: str) -> str:
    """Return a variable of the firmware as the probe has it: four bytes of attributes, UTF-16."""
    return (b"\x06\0\0\0" + text.encode("utf-16-le") + b"\0\0").decode("utf-8", "backslashreplace")


def reader(files: dict[str, str | None], **commands: CommandResult) -> BundleReader:
    nothing = dict.fromkeys(
        ("/boot/grub/grub.cfg", "/boot/grub2/grub.cfg", "/boot/grub/grubenv", "/boot/grub2/grubenv")
    )
    for folder in ("/boot/loader/", "/efi/loader/", "/boot/efi/loader/"):
        nothing |= dict.fromkeys((f"{folder}entries/", f"{folder}loader.conf"))
    named = {name.replace("_", "-"): command for name, command in commands.items()}
    return BundleReader(
        Bundle(host="n", collected_at="2026-11-20T00:00:00Z", commands=named, files={**nothing, **files})
    )


def grub(default: str, **state: str) -> dict[str, str | None]:
    lines = "".join(f"{name}={value}\n" for name, value in state.items())
    return {"/boot/grub/grub.cfg": GRUB_CFG.replace("DEFAULT", default), "/boot/grub/grubenv": lines}


@pytest.mark.parametrize(
    ("files", "kernel", "setting"),
    [
        (grub("0"), NEW, "/boot/grub/grub.cfg"),
        (grub("1>1"), OLD, "/boot/grub/grub.cfg"),
        (grub(f"gnulinux-advanced-ab>gnulinux-{OLD}-advanced-ab"), OLD, "/boot/grub/grub.cfg"),
        (grub(f"Advanced options for Debian GNU/Linux>Debian GNU/Linux, with Linux {OLD}"), OLD, "/boot/grub/grub.cfg"),
        (grub("${saved_entry}"), NEW, "saved_entry in grubenv"),
        (grub("${saved_entry}", saved_entry="1>1"), OLD, "saved_entry in grubenv"),
        (grub("0", next_entry="1>1"), OLD, "next_entry in grubenv"),
        (grub("0", next_entry=""), NEW, "/boot/grub/grub.cfg"),
        # GRUB looks for the default on its first level alone, and starts the first entry where it is not.
        (grub(f"gnulinux-{OLD}-advanced-ab"), NEW, "/boot/grub/grub.cfg"),
        (grub("gone"), NEW, "/boot/grub/grub.cfg"),
        (
            {
                "/boot/grub2/grub.cfg": EL_CFG,
                "/boot/grub2/grubenv": f"saved_entry={MACHINE}-{EL_OLD}\n",
                **entries("/boot/loader/", EL_OLD, EL),
            },
            EL_OLD,
            "saved_entry in grubenv",
        ),
        # Without a saved entry the newest starts, never the rescue image.
        (
            {
                "/boot/grub2/grub.cfg": EL_CFG,
                "/boot/grub2/grubenv": None,
                **entries("/boot/loader/", f"0-rescue-{MACHINE}", EL, EL_OLD),
            },
            EL,
            "saved_entry in grubenv",
        ),
        (
            {
                LOADER_INFO: utf_16("systemd-boot 252"),
                **entries("/boot/efi/loader/", OLD, NEW, path=f"/{MACHINE}/{{}}/linux"),
            },
            NEW,
            "the newest entry",
        ),
        (
            {
                LOADER_INFO: utf_16("systemd-boot 252"),
                "/boot/efi/loader/loader.conf": f"default {MACHINE}-6.1.0-42*\n",
                **entries("/boot/efi/loader/", OLD, NEW),
            },
            OLD,
            "/boot/efi/loader/loader.conf",
        ),
        (
            {
                LOADER_INFO: utf_16("systemd-boot 252"),
                ONE_SHOT: utf_16(f"{MACHINE}-{OLD}.conf"),
                **entries("/boot/efi/loader/", OLD, NEW),
            },
            OLD,
            "LoaderEntryOneShot",
        ),
        # GRUB sets the variable too.
        ({LOADER_INFO: utf_16("GRUB 2.12"), **grub("1>1")}, OLD, "/boot/grub/grub.cfg"),
    ],
)
def test_the_kernel_that_starts_next(files: dict[str, str | None], kernel: str, setting: str) -> None:
    next_boot = boot.read_next_boot(reader(files))
    assert (next_boot.kernel, next_boot.setting) == (kernel, setting)
    assert "ro" in next_boot.arguments.split()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "neither GRUB's menu nor systemd-boot"),
        (grub("${chosen}"), "takes its default from"),
        (grub("1"), "names no kernel"),
        (grub("2"), "names no kernel"),
        ({"/boot/grub/grub.cfg": "set default=0\n"}, "has no entry"),
        ({LOADER_INFO: utf_16("systemd-boot 252"), **grub("0")}, "systemd-boot's entries were not found"),
        (
            {
                LOADER_INFO: utf_16("systemd-boot 252"),
                "/boot/loader/loader.conf": "default @saved\n",
                **entries("/boot/loader/", NEW),
            },
            "starts @saved",
        ),
    ],
)
def test_an_unknown_kernel_is_unknown_and_not_the_newest(files: dict[str, str | None], reason: str) -> None:
    with pytest.raises(UnknownFactError, match=reason):
        boot.read_next_boot(reader(files))


@pytest.mark.parametrize("seed", range(effort(40, 4000)))
def test_a_damaged_menu_is_a_kernel_of_it_or_a_reason(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    lines = GRUB_CFG.replace("DEFAULT", chance.choice(["0", "1>1", "9", "-1", "${saved_entry}"])).splitlines()
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(lines))
        lines[at] = chance.choice(["", "}", "submenu {", "menuentry '", lines[at][: chance.randrange(60)], "blscfg"])
    try:
        next_boot = boot.read_next_boot(reader({"/boot/grub/grub.cfg": "\n".join(lines)}))
    except UnknownFactError:
        return
    assert NEW.startswith(next_boot.kernel) or OLD.startswith(next_boot.kernel)


@pytest.mark.parametrize(
    ("line", "always"),
    [
        ("blacklist nvidia", False),
        ("blacklist nvidia-uvm", False),
        ("alias nvidia off", True),
        ("install nvidia /bin/false", True),
        ("install nvidia-current /usr/bin/true", True),
        ("install nvidia modprobe -i nvidia-current $CMDLINE_OPTS", None),
        ("# blacklist nvidia", None),
        ("blacklist nvidiafb", None),
        ("blacklist nvidia-drm", None),
        ("blacklist nouveau", None),
        ("options nvidia NVreg_EnableGpuFirmware=0", None),
    ],
)
def test_a_line_that_keeps_the_module_off_has_its_place(line: str, always: bool | None) -> None:
    folders = dict.fromkeys(MODPROBE_FOLDERS)
    files = {**folders, "/etc/modprobe.d/": "off.conf\n", "/etc/modprobe.d/off.conf": f"# nvidia\n\n{line}\n"}
    blocks = boot.read_module_blocks(reader(files))
    assert [(block.place, block.always) for block in blocks] == (
        [] if always is None else [("/etc/modprobe.d/off.conf:3", always)]
    )


def test_arguments_of_the_kernel_keep_the_module_off() -> None:
    text = "ro modprobe.blacklist=nouveau,nvidia module_blacklist=nvidia_uvm modprobe.blacklist=nouveau quiet"
    assert boot.blocked_by_arguments(text) == {
        "modprobe.blacklist=nouveau,nvidia": False,
        "module_blacklist=nvidia_uvm": True,
    }


def test_an_image_of_unknown_state_is_no_image() -> None:
    with pytest.raises(ParseError, match="expected a state"):
        boot.read_initramfs(reader({}, initramfs=answer("6.1\t/boot/initrd.img-6.1\t1\tolder\t\t\n")))
