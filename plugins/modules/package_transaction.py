# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Change the packages of a node in one transaction of apt or dnf."""

from __future__ import annotations

DOCUMENTATION = r"""
module: package_transaction
short_description: Change the packages of a node in one transaction of apt or dnf
description:
  - Installs packages at exact versions, and removes, holds and unholds packages, in one transaction. Nothing is
    changed if the package manager refuses the transaction or if it would touch other packages.
  - In check mode the transaction is computed in a private folder from freshly fetched package lists, which are deleted
    afterwards. It includes the changes that earlier roles would have made. C(--diff) shows it as one list.
  - Package scripts start no services, and needrestart is suspended. The module waits for package locks and retries
    after network errors. A failing repository is a warning if no package of the transaction needs it.
  - Leftovers of an interrupted run (C(policy-rc.d), half-configured packages) are cleaned up first.
  - If a kernel module does not build, the error message ends with the compiler's errors.
options:
  change:
    description: The following options as one mapping, as in a manifest (M(gpunode.node.role_plan)).
    type: dict
  manager:
    description: The package manager.
    type: str
    choices: [apt, dnf]
    default: apt
  state:
    description: V(absent) removes the packages of O(remove) and the dependencies that nothing needs any more.
    type: str
    choices: [present, absent]
    default: present
  install:
    description: >-
      Packages to install, C(NAME) or C(NAME=PATTERN) with a shell pattern of versions. An installed package that
      matches is left alone.
    type: list
    elements: str
    default: []
  remove:
    description: Shell patterns of packages to remove in the same transaction.
    type: list
    elements: str
    default: []
  remove_new:
    description: >-
      With O(state=absent), shell patterns of packages to remove too, if O(memory) shows that they were installed with
      it.
    type: list
    elements: str
    default: []
  restore:
    description: For apt, packages that stay and change from NVIDIA's version to the distribution's.
    type: list
    elements: str
    default: []
  never:
    description: Shell patterns of packages that must not be installed, change version or be removed.
    type: list
    elements: str
    default: []
  hold:
    description: >-
      Shell patterns of packages to hold after the transaction. For dnf, their versions are locked in the role's own
      section of the versionlock list. With O(state=absent) that section is removed, and of these packages those that
      are held and that O(memory) has.
    type: list
    elements: str
    default: []
  unhold:
    description: For apt, packages to unhold.
    type: list
    elements: str
    default: []
  memory:
    description: >-
      Record on the node of the packages that transactions with this record installed. A removal removes no others of
      O(remove_new), and leaves changed configuration files.
    type: str
  bound:
    description: >-
      Packages to install, C(NAME) or for apt C(NAME=PATTERN), all at the newest release that O(constraint) allows.
      C(@RELEASE@) in patterns and in O(files) is that release.
    type: list
    elements: str
    default: []
  constraint:
    description: Shell pattern for the release of O(bound).
    type: str
    default: "*"
  closure:
    description: Installed packages to change to the release of O(bound), or to remove if it lacks them.
    type: list
    elements: str
    default: []
  fresh:
    description: For apt, whether to keep of O(closure) only what other packages need.
    type: bool
    default: false
  optional:
    description: For apt, packages to install beside O(bound) if the sources have them, C(NAME) or C(NAME=PATTERN).
    type: list
    elements: str
    default: []
  alternatives:
    description: For apt, packages of O(bound) to lists of those that replace them if no source has them.
    type: dict
    default: {}
  lift:
    description: For apt, packages that may come from any source if the preferred one is too old.
    type: list
    elements: str
    default: []
  line:
    description: >-
      For dnf, shell patterns C(names) and C(except) of packages that may only be installed at the release of O(bound).
    type: dict
    default: { names: [], except: [] }
  expendable:
    description: >-
      Shell patterns of further packages that the transaction may remove. For apt, held ones may also change version.
    type: list
    elements: str
    default: []
  stream:
    description: For dnf, C(MODULE:STREAM) to enable in the same transaction.
    type: str
  reset:
    description: For dnf, module to reset.
    type: str
  files:
    description: >-
      Planned files of the package manager, path to text. apt's planned preferences already apply to this transaction,
      the others to its preview.
    type: dict
    default: {}
  repositories:
    description: For dnf, planned repositories, with C(id), C(url) and C(proxy).
    type: list
    elements: dict
    default: []
  lock_mark:
    description: For dnf, end of the two comment lines around the role's section of the versionlock list.
    type: str
    default: gpunode
  drop_locks:
    description: For dnf, lines outside the role's section to remove from the versionlock list.
    type: list
    elements: str
    default: []
  ignore_locks:
    description: For dnf, lines outside the role's section to ignore.
    type: list
    elements: str
    default: []
  idle_gpus:
    description: >-
      Whether to fail if a process computes on a GPU. This is tested after all packages were downloaded and before the
      first change.
    type: bool
    default: false
  download_only:
    description: >-
      Whether to only download the packages to install, into the cache of the package manager, and verify them. Nothing
      else changes.
    type: bool
    default: false
  planned:
    description: Changes that earlier transactions would have made, in check mode. Set by the action plugin.
    type: dict
    default: {}
  lock_wait_s:
    description: Seconds to wait for another package manager.
    type: int
    default: 300
  limit_s:
    description: Time limit for downloading and installing, in seconds.
    type: int
    default: 3600
attributes:
  check_mode:
    support: full
    description: Reports the changes that a run without check mode makes.
  diff_mode:
    support: full
    description: One list of packages to install, remove, hold and release.
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Install and hold one version of NCCL
  gpunode.node.package_transaction:
    install: ["libnccl2=2.30.7-*+cuda12.9"]
    hold: [libnccl2]
    never: ["nvidia-*"]
  become: true
"""

RETURN = r"""
install:
  description: Packages that were installed or changed version, name to version.
  returned: success
  type: dict
remove:
  description: Packages that were removed.
  returned: success
  type: list
  elements: str
hold:
  description: Packages that this transaction held or locked.
  returned: success
  type: list
  elements: str
unhold:
  description: Packages that this transaction unheld or unlocked.
  returned: success
  type: list
  elements: str
finished:
  description: Packages that an interrupted run had left half-configured.
  returned: success
  type: list
  elements: str
target:
  description: The release of O(bound).
  returned: success
  type: str
"""

from typing import Any

from ansible_collections.gpunode.node.plugins.module_utils.package_engine import OPTIONS, answered
from ansible_collections.gpunode.node.plugins.module_utils.quiet import QuietModule


def listed(answer: dict[str, Any]) -> str:
    """Return the changes of a transaction, one line each."""
    lines = [f"install {name}={version}" for name, version in sorted(answer["install"].items())]
    for word in ("remove", "hold", "unhold"):
        lines += [f"{word} {name}" for name in answer.get(word, ())]
    if answer.get("stream") is not None:
        lines.append(f"enable module stream {answer['stream']}" if answer["stream"] else "reset the module stream")
    lines += [f"finish {name}" for name in answer.get("finished", ())]
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Run the module."""
    module = QuietModule(argument_spec={"change": {"type": "dict"}, **OPTIONS}, supports_check_mode=True)
    options = {**module.params, **(module.params["change"] or {})}
    answer = answered(options, simulate=module.check_mode)
    for warning in answer.get("warnings", ()):
        module.warn(warning)
    if "lacking" in answer:
        gone = "; ".join(f"{name}: {', '.join(versions[:3]) or 'none'}" for name, versions in answer["lacking"].items())
        answer["error"] = f"no release that matches {answer['constraint']} has all packages: {gone}"
    if "error" in answer:
        module.fail_json(msg="\n".join([answer["error"], *answer.get("log", ())]))
    text = listed(answer)
    module.exit_json(
        changed=bool(text) and not options["download_only"],
        install=answer["install"],
        remove=answer["remove"],
        hold=answer.get("hold", []),
        unhold=answer.get("unhold", []),
        finished=answer.get("finished", []),
        target=answer.get("target"),
        diff={"prepared": text} if text else {},
    )


if __name__ == "__main__":
    main()
