"""Write, as a tar archive to stdout, the files that a ``.run`` installer leaves on a node; runs in the vendor's
container.

Arguments: the driver's release, the flavour (``open`` or ``proprietary``), the kernel's release.
"""

import io
import sys
import tarfile
import tempfile
from pathlib import Path

from pack import Tools  # type: ignore[import-not-found]

_SIMULATOR = "/usr/lib/gpunode-lab/bin"
_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvidia-cfg.so.1")
_MODULES = ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm", "nvidia-peermem")
_TOOLS = ("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced", "nvidia-modprobe")
_LICENSES = {"open": "Dual MIT/GPL", "proprietary": "NVIDIA"}
_LIST = "var/lib/nvidia/log"
_UNINSTALL = """\
#!/bin/sh
# Simulated uninstaller of gpunode lab: removes the files in the list of the simulated installer.
set -eu
case " $* " in
    *" --silent "* | *" -s "*) ;;
    *) echo "nvidia-uninstall (simulated): needs --silent, it has no prompts" >&2; exit 1 ;;
esac
[ "$(id -u)" = 0 ] || { echo "ERROR: nvidia-installer must be run as root" >&2; exit 1; }
while read -r path; do
    rm -f "$path"
done < /var/lib/nvidia/log
for kernel in /lib/modules/*; do
    [ ! -e "$kernel/modules.order" ] || depmod "${kernel##*/}"
done
ldconfig
rm -rf /var/lib/nvidia /usr/bin/nvidia-installer /usr/bin/nvidia-uninstall
"""
_LOG = """\
nvidia-installer log file '/var/log/nvidia-installer.log'
creation time: {time}
installer version: {release}
-> Installing NVIDIA driver version {release}.
-> Installation of the NVIDIA Accelerated Graphics Driver for Linux-x86_64 (version: {release}) is now complete.
"""


def main(release: str, flavour: str, kernel: str) -> None:
    """Write the archive to stdout."""
    files: dict[str, tuple[bytes, int]] = {}
    links = {}
    with tempfile.TemporaryDirectory() as folder:
        tools = Tools(Path(folder))
        for soname in _LIBRARIES:
            real = f"{soname.partition('.so')[0]}.so.{release}"
            files[f"usr/lib/x86_64-linux-gnu/{real}"] = (tools.library(soname, release).read_bytes(), 0o755)
            links[f"usr/lib/x86_64-linux-gnu/{soname}"] = real
        for name in _MODULES:
            entry = {"name": name, "license": _LICENSES[flavour], "kernel": kernel}
            module = tools.module(entry, release, signed=False)
            files[f"usr/lib/modules/{kernel}/kernel/drivers/video/{name}.ko"] = (module, 0o644)
    for tool in _TOOLS:
        text = f'#!/bin/sh\nGPUNODE_LAB_PACKAGE_VERSION={release} exec {_SIMULATOR}/{tool} "$@"\n'
        files[f"usr/bin/{tool}"] = (text.encode(), 0o755)
    listed = "".join(f"/{path}\n" for path in sorted([*files, *links]))
    files[_LIST] = (listed.encode(), 0o644)
    files["usr/bin/nvidia-uninstall"] = (_UNINSTALL.encode(), 0o755)
    files["usr/bin/nvidia-installer"] = (_UNINSTALL.encode(), 0o755)
    files["var/log/nvidia-installer.log"] = (
        _LOG.format(release=release, time="Fri Nov 20 12:00:00 2026").encode(),
        0o644,
    )
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for path, (data, mode) in files.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(data), mode
            archive.addfile(info, io.BytesIO(data))
        for path, to in links.items():
            info = tarfile.TarInfo(path)
            info.type, info.linkname = tarfile.SYMTYPE, to
            archive.addfile(info)


if __name__ == "__main__":
    main(*sys.argv[1:4])
