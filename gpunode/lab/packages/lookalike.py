"""What makes a Debian tree look like another system: its name, its package manager, its kernel packages.

A look-alike serves the logic that goes by these: facts, package names, repositories, holds. Its libraries and tools are
Debian's; nothing that depends on those is proven by it.
"""

from collections.abc import Mapping

from gpunode.lab.packages.plan import Built, contents
from gpunode.lab.packages.rows import repositories, text_of

_FOLDER = "usr/lib/gpunode-lab"
_KERNEL = "var/tmp/gpunode-lab-kernel"
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "ubuntu-24.04": ("lsb-release",),
    "rocky-9": ("dnf", "dnf-plugins-core", "python3-dnf", "rpm"),
}
LOOKALIKES = tuple(_PACKAGES)
_MARK = "look-alike: Debian 12's packages under this system's name\n"
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


def packages_of(system: str) -> tuple[str, ...]:
    """Debian's packages that the look-alike has beside those of every node."""
    return _PACKAGES[system]


def files_of(system: str) -> dict[str, str]:
    """Files put into the tree, by path."""
    files = {
        "etc/gpunode/lab-node": f"{system}\n{_MARK}",
        f"{_FOLDER}/os-release": text_of(f"files/{system}.os-release"),
    }
    if system == "rocky-9":
        return files | {
            "etc/redhat-release": "Rocky Linux release 9.6 (Blue Onyx)\n",
            "etc/rocky-release": "Rocky Linux release 9.6 (Blue Onyx)\n",
            "etc/rpm/macros": "%_dbpath /var/lib/rpm\n",  # Debian's rpm keeps it in the user's home
            "etc/dnf/dnf.conf": text_of("files/dnf.conf"),
            "etc/dnf/plugins/local.conf": "[main]\nenabled = false\n",
            "etc/dnf/vars/releasever": "9\n",
        }
    files["etc/lsb-release"] = text_of("files/ubuntu-24.04.lsb-release")
    for built in kernel():
        tree = f"{_KERNEL}/{built.name}"
        control = {"Package": built.name, "Version": built.version, "Architecture": built.architecture, **built.fields}
        control["Description"] = built.description
        files[f"{tree}/DEBIAN/control"] = "".join(f"{key}: {value}\n" for key, value in control.items())
        files |= {f"{tree}/DEBIAN/{name}": text for name, text in built.scripts.items()}
        files |= {f"{tree}/{entry['path']}": entry["text"] for entry in built.files}
    return files


def setup_of(system: str) -> str:
    """Shell script, run inside the tree when all packages and files are in it."""
    return _OS_RELEASE + (_INSTALL_KERNEL if system == "ubuntu-24.04" else "mkdir -p /etc/yum.repos.d\n")


def kernel() -> list[Built]:
    """The packages of the kernel that a fresh Ubuntu has: those of the release itself."""
    prefixes = ("linux-image-", "linux-modules-6", "linux-modules-extra-")
    return [
        built
        for built in contents(repositories()["ubuntu"])
        if built.suite == "noble" and built.name.startswith(prefixes)
    ]
