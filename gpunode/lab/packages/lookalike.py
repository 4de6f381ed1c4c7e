"""What makes a Debian tree look like another system: its name, its package manager, its kernel packages.

A look-alike serves to test logic that depends on these: facts, package names, repositories, holds. Its libraries and
tools are Debian's, so it proves nothing that depends on those. Where the imitated system and Debian offer the same
package, the imitated system's is preferred, for example dkms: its version decides what NVIDIA's repository can be
combined with.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files as resource_files

from gpunode.lab.packages.plan import Built, contents
from gpunode.lab.packages.rows import repositories, text_of

_FOLDER = "usr/lib/gpunode-lab"
_KERNEL = "var/tmp/gpunode-lab-kernel"


@dataclass(frozen=True)
class Lookalike:
    """A system that is imitated: its name as in os-release."""

    version: str
    """VERSION_ID."""
    point: str
    name: str
    codename: str = ""
    """Ubuntu's code name, which is part of its suites' names."""

    @property
    def ubuntu(self) -> bool:
        """Return whether it is an Ubuntu; the others are Rocky Linux."""
        return bool(self.codename)


SYSTEMS: Mapping[str, Lookalike] = {
    "ubuntu-22.04": Lookalike("22.04", "22.04.5 LTS", "Jammy Jellyfish", "jammy"),
    "ubuntu-24.04": Lookalike("24.04", "24.04.3 LTS", "Noble Numbat", "noble"),
    "ubuntu-26.04": Lookalike("26.04", "26.04 LTS", "Resolute Raccoon", "resolute"),
    "rocky-9": Lookalike("9.6", "9.6", "Blue Onyx"),
    "rocky-10": Lookalike("10.0", "10.0", "Red Quartz"),
}
LOOKALIKES = tuple(SYSTEMS)
_PACKAGES = {
    True: ("lsb-release",),
    False: (
        *("dnf", "dnf-plugins-core", "python3-dnf", "rpm"),
        *("gcc", "linux-headers-cloud-amd64", "lsb-release", "make", "patch"),  # DKMS builds modules with these
    ),
}
_BASE_RPMS = ("bash", "kernel-core")
_MARK = "look-alike: Debian's packages under this system's name\n"
_PREFERENCES = """\
# gpunode lab: a package that both have is Ubuntu's; the base system is Debian's.
Package: *
Pin: release o=Debian
Pin-Priority: 400
"""
# The simulated kernels use Debian's headers; these must not count as a kernel of their own, for which DKMS would build.
_NO_KERNEL_OF_DEBIAN = "path-exclude=/lib/modules/*-cloud-amd64/*\n"
_OS_RELEASE = f"""
dpkg-divert --quiet --local --rename --add /usr/lib/os-release
install -m 0644 /{_FOLDER}/os-release /usr/lib/os-release
"""
_INSTALL_KERNEL = f"""
for tree in /{_KERNEL}/*; do
    for script in postinst prerm postrm; do
        [ ! -e "$tree/DEBIAN/$script" ] || chmod 0755 "$tree/DEBIAN/$script"
    done
    dpkg-deb --build --root-owner-group "$tree" "$tree.deb"
done
dpkg --install /{_KERNEL}/*.deb
rm -rf /{_KERNEL}
"""
# Debian's rpm keeps the database in the user's home. Its newer releases run scriptlets in namespaces of their own,
# which not every container may create.
_MACROS = """\
%_dbpath /var/lib/rpm
%__transaction_unshare %{nil}
"""
# Rocky's kernel is a package of the rpm database, made by the program that makes the vendors' packages; so is bash,
# because scriptlets require a shell. Debian's headers serve that kernel and must not count as a kernel of their own.
# The kernel that they depend on since Debian 13 is removed: a node would boot it if it is newer.
_BUILD_RPMS = """\
import json, pathlib, sys
here = pathlib.Path(__file__).parent
sys.path.insert(0, str(here))
import pack, rpms
for package in json.loads((here / "packages.json").read_text()):
    rpms.build(pack.Tools(here), package, here)
"""
_INSTALL_RPMS = f"""
mkdir -p /etc/yum.repos.d
python3 /{_KERNEL}/build_rpms.py
rpm --install /{_KERNEL}/*.rpm
rm -rf /{_KERNEL} /lib/modules/*-cloud-amd64 /boot/*-cloud-amd64
ldconfig
"""


def packages_of(system: str) -> tuple[str, ...]:
    """Return Debian's packages that the look-alike has in addition to those of every node."""
    return _PACKAGES[SYSTEMS[system].ubuntu]


def files_of(system: str) -> dict[str, str]:
    """Return the files added to the tree, by path."""
    like = SYSTEMS[system]
    values = {"version": like.version, "point": like.point, "name": like.name, "codename": like.codename}
    values["major"] = like.version.partition(".")[0]
    kind = "ubuntu" if like.ubuntu else "rocky"
    files = {
        "etc/gpunode/lab-node": f"{system}\n{_MARK}",
        f"{_FOLDER}/os-release": text_of(f"files/{kind}.os-release").format(**values),
    }
    if not like.ubuntu:
        inside = resource_files("gpunode.lab.repositories").joinpath("inside")
        programs = {f"{_KERNEL}/{name}": inside.joinpath(name).read_text("utf-8") for name in ("pack.py", "rpms.py")}
        rpms = [asdict(built) for built in contents(repositories()[kind + values["major"]]) if built.name in _BASE_RPMS]
        return (
            files
            | programs
            | {
                f"{_KERNEL}/build_rpms.py": _BUILD_RPMS,
                f"{_KERNEL}/packages.json": json.dumps(rpms),
                "etc/redhat-release": f"Rocky Linux release {like.version} ({like.name})\n",
                "etc/rocky-release": f"Rocky Linux release {like.version} ({like.name})\n",
                "etc/rpm/macros": _MACROS,
                "etc/ld.so.conf.d/rocky.conf": "/usr/lib64\n",  # Debian's linker does not search there
                "etc/dnf/dnf.conf": text_of("files/dnf.conf"),
                "etc/dnf/plugins/local.conf": "[main]\nenabled = false\n",
                "etc/dnf/vars/releasever": f"{values['major']}\n",
            }
        )
    files["etc/lsb-release"] = text_of("files/ubuntu.lsb-release").format(**values)
    files["etc/apt/preferences.d/gpunode-lab-base"] = _PREFERENCES
    files["etc/dpkg/dpkg.cfg.d/gpunode-lab"] = _NO_KERNEL_OF_DEBIAN
    for built in kernel(like.codename):
        tree = f"{_KERNEL}/{built.name}"
        control = {"Package": built.name, "Version": built.version, "Architecture": built.architecture, **built.fields}
        control["Description"] = built.description
        files[f"{tree}/DEBIAN/control"] = "".join(f"{key}: {value}\n" for key, value in control.items())
        files |= {f"{tree}/DEBIAN/{name}": text for name, text in built.scripts.items()}
        files |= {f"{tree}/{entry['path']}": entry["text"] for entry in built.files}
    return files


def setup_of(system: str) -> str:
    """Return a shell script, run inside the tree when all packages and files are in it."""
    return _OS_RELEASE + (_INSTALL_KERNEL if SYSTEMS[system].ubuntu else _INSTALL_RPMS)


def kernel(codename: str) -> list[Built]:
    """Return the packages of a fresh Ubuntu's kernel: those of the release itself."""
    prefixes = ("linux-image-", "linux-modules-extra-")
    return [
        built
        for built in contents(repositories()["ubuntu"])
        if built.suite == codename
        and (
            built.name.startswith(prefixes) or (built.name.startswith("linux-modules-") and "nvidia" not in built.name)
        )
    ]
