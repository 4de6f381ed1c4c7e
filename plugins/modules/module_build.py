# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Build the kernel modules of downloaded packages without installing them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: module_build
short_description: Build the kernel modules of downloaded packages without installing them
description:
  - Builds the sources of DKMS packages in apt's cache in a private folder, for the running kernel and for the newest
    installed one, and removes the folder. The installed driver is not touched.
  - Fails with the compiler's errors if a module does not build. Nothing is built on a node without C(dkms), without
    kernel headers, or if no package is in the cache.
options:
  packages:
    description: Packages that will be installed, name to version. Those with a name that ends in C(-dkms) are built.
    type: dict
    required: true
  limit_s:
    description: Time limit of one build, in seconds.
    type: int
    default: 1800
attributes:
  check_mode:
    support: full
    description: Builds nothing.
  diff_mode:
    support: none
    description: The module changes no file.
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Build the modules that the upgrade will install
  gpunode.node.module_build:
    packages: { nvidia-kernel-open-dkms: 595.91.07-1 }
  become: true
"""

RETURN = r"""
built:
  description: What was built, C(NAME/VERSION for KERNEL).
  returned: success
  type: list
  elements: str
reason:
  description: Why nothing was built; empty if something was.
  returned: success
  type: str
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpunode.node.plugins.module_utils.apt_transaction import errors_of_compiler
from ansible_collections.gpunode.node.plugins.module_utils.commands import run

ARCHIVES = Path("/var/cache/apt/archives")
MODULES = Path("/lib/modules")
BOOT = Path("/boot")
ROOM = Path("/var/lib/gpunode")
UNPACK_S = 300


class BuildError(Exception):
    """Why a module was not built."""


def archive_of(name: str, version: str) -> Path | None:
    """Return the package's file in apt's cache, which has the epoch's colon encoded."""
    escaped = version.replace(":", "%3a")
    return next((path for path in sorted(ARCHIVES.glob(f"{name}_*.deb")) if path.name.split("_")[1] == escaped), None)


def numbers(release: str) -> list[int]:
    """Return the numbers of a kernel's release, for its order."""
    return [int(word) for word in re.findall(r"\d+", release)]


def kernels() -> list[str]:
    """Return the newest kernel with image and headers, and the running one if it has headers."""
    built = [path.parent.name for path in MODULES.glob("*/build") if path.is_dir()]
    bootable = [release for release in built if (BOOT / f"vmlinuz-{release}").exists()]
    newest = sorted(bootable, key=numbers)[-1:]
    running = os.uname().release
    return [*newest, *([running] if running in built and running not in newest else [])]


def sources(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and version of each source of DKMS below an unpacked package."""
    for path in sorted(folder.glob("usr/src/*/dkms.conf")):
        text = path.read_text(encoding="utf-8", errors="replace")
        words = dict(re.findall(r'(?m)^PACKAGE_(NAME|VERSION)="?([\w.+~-]+)"?\s*$', text))
        if len(words) == 2:
            yield words["NAME"], words["VERSION"]


def build(archive: Path, limit_s: int) -> list[str]:
    """Build the modules of one package for each kernel; return what was built. Raise BuildError."""
    built = []
    ROOM.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpunode-build-", dir=ROOM) as name:
        folder = Path(name)
        code, _, errors = run(["dpkg-deb", "--extract", str(archive), str(folder / "root")], UNPACK_S)
        if code != 0:
            raise BuildError(f"{archive}: {errors.strip() or code}")
        trees = ["--sourcetree", str(folder / "root/usr/src"), "--dkmstree", str(folder / "dkms")]
        (folder / "dkms").mkdir()
        for module, version in sources(folder / "root"):
            named = ["-m", module, "-v", version]
            code, output, errors = run(["dkms", "add", *named, *trees], UNPACK_S)
            if code != 0:
                raise BuildError(f"dkms add {module}/{version}: {(errors or output).strip()[-300:] or code}")
            for kernel in kernels():
                code, output, errors = run(["dkms", "build", *named, "-k", kernel, *trees], limit_s)
                if code != 0:
                    logs = sorted((folder / "dkms").glob("*/*/build/make.log"))
                    lines = errors_of_compiler(logs[-1]) if logs else []
                    text = (errors or output).strip().splitlines()[-1:]
                    why = "\n".join([*text, *lines]) or f"exit status {code}"
                    raise BuildError(f"{module}/{version} does not build for kernel {kernel}: {why}")
                built.append(f"{module}/{version} for {kernel}")
    return built


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "dict", "required": True},
            "limit_s": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )
    wanted = {name: str(version) for name, version in module.params["packages"].items() if name.endswith("-dkms")}
    archives = [path for path in (archive_of(name, version) for name, version in sorted(wanted.items())) if path]
    reason = ""
    if module.check_mode:
        reason = "check mode"
    elif not archives:
        reason = "no package with sources of a kernel module is in apt's cache"
    elif shutil.which("dkms") is None:
        reason = "dkms is not installed"
    elif not kernels():
        reason = "no kernel has its headers installed"
    if reason:
        module.exit_json(changed=False, built=[], reason=reason)
    try:
        built = [line for archive in archives for line in build(archive, module.params["limit_s"])]
    except BuildError as error:
        module.fail_json(msg=f"module-build: {error}")
    module.exit_json(changed=False, built=built, reason="")


if __name__ == "__main__":
    main()
