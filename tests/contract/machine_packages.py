# ruff: noqa: E501 - lines are as long as the tools print them
"""What NVIDIA's repository puts on a simulated node with Ubuntu."""

from machine_shapes import Document, Machine, answer

NVIDIA = "NVIDIA CORPORATION <cudatools@nvidia.com>"
OF_DRIVER = (
    "libnvidia-cfg1-580",
    "libnvidia-compute-580",
    "nvidia-compute-utils-580",
    "nvidia-dkms-580-open",
    "nvidia-driver-580-open",
    "nvidia-kernel-common-580",
    "nvidia-kernel-source-580-open",
    "nvidia-utils-580",
)
OF_TOOLKIT = (
    "libnvidia-container-tools",
    "libnvidia-container1",
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
)


def package(name: str, version: str, architecture: str, source: str, held: bool) -> str:
    """One line of the probe's dpkg-query."""
    request = "hold" if held else "install"
    return f"{name}\t{version}\t{architecture}\t{request} ok installed\t{source}\t{version}\t{NVIDIA}\n"


def toolkit(architecture: str) -> str:
    return "".join(package(name, "1.18.0-1", architecture, name, held=False) for name in OF_TOOLKIT)


def module_looks(path: str, dkms: str) -> dict[str, Document]:
    """What the probe finds out of the GPU's module on disk, and of the initramfs that was written after it."""
    kernel = path.split("/")[3]
    return {
        "dkms-status": answer(f"{dkms}: installed\n", argv=("dkms", "status")),
        "modules-dep": answer(
            f"/lib/modules/{kernel}/modules.dep:{path.partition(kernel + '/')[2]}\n", argv=("grep", "-H")
        ),
        "module-files": answer(f"{path}\t56823808\t1760000000\n", argv=("(probe)", "look at modules")),
        "initramfs": answer(
            f"{kernel}\t/boot/initrd.img-{kernel}\t1760000100\tnewer\t\t\n", argv=("(probe)", "list images")
        ),
    }


def as_from_nvidia(machine: Machine, commands: Document, files: Document) -> None:
    """Put NVIDIA's packages, and what they install, in the place of Debian's."""
    version, kernel = machine.driver, machine.kernel
    dpkg = "arm64" if machine.architecture == "aarch64" else "amd64"
    lib = f"{machine.architecture}-linux-gnu"
    names = [*OF_DRIVER, *(["nvidia-fabricmanager", "libnvidia-nscq"] if machine.hardware["nvswitches"] else [])]
    module = f"/lib/modules/{kernel}/updates/dkms/nvidia.ko"
    native = "AArch64" if dpkg == "arm64" else "x86-64"
    commands |= {
        "dpkg-packages": answer(
            "".join(
                package(name, f"{version}-0ubuntu1", dpkg, "nvidia-graphics-drivers-580", held=True) for name in names
            )
            + (
                package("datacenter-gpu-manager-4-cuda13", "1:4.4.1-1", dpkg, "dcgm", held=False)
                if machine.slurm
                else ""
            )
            + toolkit(dpkg),
            argv=("dpkg-query", "-W"),
        ),
        "dpkg-kernels": answer(
            f"linux-image-{kernel}: /boot/vmlinuz-{kernel}\nlinux-headers-{kernel}: /lib/modules/{kernel}/build\n",
            argv=("dpkg-query", "-S"),
        ),
        **module_looks(module, f"nvidia/{version}, {kernel}, {machine.architecture}"),
        "find-modules": answer(f"{module}\n", argv=("find", "/lib/modules/")),
        "modinfo": answer(
            f"filename:       {module}\nversion:        {version}\nlicense:        Dual MIT/GPL\n"
            f"vermagic:       {kernel} SMP preempt mod_unload modversions\nsig_id:         PKCS#7\n",
            argv=("modinfo", module),
        ),
        "ldconfig": answer(
            f"\tlibnvidia-ml.so.1 (libc6,{native}) => /lib/{lib}/libnvidia-ml.so.1\n"
            f"\tlibcuda.so.1 (libc6,{native}) => /lib/{lib}/libcuda.so.1\n",
            argv=("ldconfig", "-p"),
        ),
        "readlink-libnvidia-ml": answer(f"/usr/lib/{lib}/libnvidia-ml.so.{version}\n", argv=("readlink", "-e")),
        "library-files": answer(
            f"/lib/{lib}/libcuda.so.1\t/usr/lib/{lib}/libcuda.so.{version}\t29000000\n"
            f"/lib/{lib}/libnvidia-ml.so.1\t/usr/lib/{lib}/libnvidia-ml.so.{version}\t1800000\n",
            argv=("(probe)", "look for libraries"),
        ),
    }
    for path in [path for path in files if path.startswith("/lib/modules/")]:
        del files[path]
    files |= {
        "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n',
        "/lib/modules/": f"{kernel}\n",
        f"/lib/modules/{kernel}/": "build\nkernel\nmodules.dep\n",
        f"/lib/modules/{kernel}/build/": "Makefile\nscripts\n",
    }
