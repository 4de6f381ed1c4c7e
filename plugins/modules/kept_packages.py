# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Keep the packages of a node's release with their checksums, and offer them to apt again."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kept_packages
short_description: Keep the packages of a node's release with their checksums, and offer them to apt again
description:
  - V(kept) downloads the installed versions of packages to a folder of root, which apt verifies, and records their
    checksums. The newest three folders are kept.
  - V(offered) adds the folder to the sources of apt if no other source has one of these versions any more. It fails if
    one of the packages is missing, or has another checksum than the recorded one. A release that was not kept is not
    an error.
  - V(withdrawn) removes that source again; the packages stay.
  - Nodes with dnf keep nothing.
options:
  state:
    description: What to do.
    type: str
    choices: [kept, offered, withdrawn]
    required: true
  release:
    description: Names the folder below C(/var/lib/gpunode/kept).
    type: str
    required: true
  packages:
    description: For V(kept), names of the packages.
    type: list
    elements: str
    default: []
  limit_s:
    description: Time limit of the download, in seconds.
    type: int
    default: 3600
attributes:
  check_mode:
    support: full
    description: Reports whether something would change; downloads nothing.
  diff_mode:
    support: none
    description: The packages are not text.
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Keep the packages of the installed release
  gpunode.node.kept_packages:
    state: kept
    release: 580.95.05
    packages: [libcuda1, nvidia-kernel-open-dkms]
  become: true
"""

RETURN = r"""
files:
  description: Names of the kept files.
  returned: success
  type: list
  elements: str
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import NamedTuple

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpunode.node.plugins.module_utils.apt_private import (
    ANSWER_LIMIT_S,
    AptError,
    installed_versions,
    offers,
    output_of,
)

KEPT = Path("/var/lib/gpunode/kept")
SOURCE = Path("/etc/apt/sources.list.d/gpunode-kept.sources")
RECORD = "kept.json"
INDEX = "Packages.gz"
MOST = 3
NAME = re.compile(r"[0-9][0-9A-Za-z.]{0,40}")


def digest(path: Path) -> str:
    """Return the checksum of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            total.update(part)
    return total.hexdigest()


class KeptRecord(NamedTuple):
    """What a folder keeps."""

    versions: dict[str, str]
    """Version of each package."""
    files: dict[str, str]
    """Checksum of each file."""


def recorded(folder: Path) -> KeptRecord | None:
    """Return the record of a folder; None if it has none, because keeping was interrupted or it is damaged."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
        return KeptRecord(versions=dict(record["versions"]), files=dict(record["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damaged(folder: Path, record: KeptRecord) -> list[str]:
    """Return the kept files that are missing or have another checksum."""
    return [
        name
        for name, checksum in sorted(record.files.items())
        if not (folder / name).is_file() or digest(folder / name) != checksum
    ]


def keep(folder: Path, names: list[str], limit_s: int, *, check_mode: bool) -> bool:
    """Download the installed versions of packages; return whether something changed. Raise AptError."""
    versions = installed_versions(names)
    if not versions:
        raise AptError("none of the packages is installed")
    record = recorded(folder)
    if record is not None and record.versions == versions and not damaged(folder, record):
        return False
    if check_mode:
        return True
    draft = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    # apt reads a source of files as its own user.
    draft.mkdir(mode=0o755, parents=True)
    exact = [f"{name}={version}" for name, version in sorted(versions.items())]
    # It downloads to its working directory.
    output_of(["env", "-C", str(draft), "apt-get", "-o", "APT::Sandbox::User=root", "download", *exact], limit_s)
    files = {path.name: digest(path) for path in sorted(draft.glob("*.deb"))}
    if len(files) != len(versions):
        raise AptError(f"{len(files)} of {len(versions)} packages were downloaded")
    text = json.dumps({"versions": versions, "files": files})
    with (draft / RECORD).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    others = sorted(KEPT.glob("[0-9]*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in [path for path in others if path != folder][MOST - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
    return True


def lacking(versions: dict[str, str]) -> list[str]:
    """Return the packages of which no source has the kept version."""
    by_name = offers([], sorted(versions))
    others = {name: {version for version, source in rows if str(KEPT) not in source} for name, rows in by_name.items()}
    return [name for name, version in sorted(versions.items()) if version not in others[name]]


def offer(folder: Path, *, check_mode: bool) -> bool:
    """Add a folder to apt's sources if another source lacks its versions; return whether something changed."""
    record = recorded(folder)
    if record is None or not lacking(record.versions):
        return withdraw(check_mode=check_mode)
    wrong = damaged(folder, record)
    if wrong:
        raise AptError(
            f"no source has this release any more, and {folder / wrong[0]} is damaged or missing: its checksum is not "
            "the recorded one"
        )
    stanzas = []
    for name, checksum in sorted(record.files.items()):
        fields = output_of(["dpkg-deb", "--field", str(folder / name)], ANSWER_LIMIT_S).rstrip("\n")
        size = (folder / name).stat().st_size
        stanzas.append(f"{fields}\nFilename: ./{name}\nSize: {size}\nSHA256: {checksum}\n")
    # Trusted: the folder is root's, and each file was compared with the checksum of what apt had verified.
    source = f"Types: deb\nURIs: file:{folder}\nSuites: ./\nTrusted: yes\n"
    index = "\n".join(stanzas).encode()
    changed = listed(folder) != index or not SOURCE.exists() or SOURCE.read_text(encoding="utf-8") != source
    if changed and not check_mode:
        # apt refuses an index of a source of files that is not compressed.
        (folder / INDEX).write_bytes(gzip.compress(index))
        SOURCE.write_text(source, encoding="utf-8")
    return changed


def listed(folder: Path) -> bytes | None:
    """Return the index of a folder; None if it has none, or a damaged one."""
    try:
        return gzip.decompress((folder / INDEX).read_bytes())
    except (OSError, EOFError, zlib.error):
        return None


def withdraw(*, check_mode: bool) -> bool:
    """Remove the source; return whether there was one."""
    present = SOURCE.exists()
    if present and not check_mode:
        SOURCE.unlink()
    return present


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["kept", "offered", "withdrawn"], "required": True},
            "release": {"type": "str", "required": True},
            "packages": {"type": "list", "elements": "str", "default": []},
            "limit_s": {"type": "int", "default": 3600},
        },
        supports_check_mode=True,
    )
    state, release, check_mode = module.params["state"], module.params["release"], module.check_mode
    if not NAME.fullmatch(release):
        module.fail_json(msg=f"kept-packages: release: {release!r} is not the release of a driver (example: 580.95.05)")
    if shutil.which("apt-get") is None:
        module.exit_json(changed=False, files=[])
    folder = KEPT / release
    try:
        if state == "kept":
            changed = keep(folder, module.params["packages"], module.params["limit_s"], check_mode=check_mode)
        else:
            changed = offer(folder, check_mode=check_mode) if state == "offered" else withdraw(check_mode=check_mode)
    except (AptError, OSError) as error:
        module.fail_json(msg=f"kept-packages: {' '.join(str(error).split())}")
    record = recorded(folder)
    module.exit_json(changed=changed, files=sorted(record.files) if record else [])


if __name__ == "__main__":
    main()
