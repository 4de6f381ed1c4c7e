# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Change the packages of a node in one transaction of apt or dnf."""

from __future__ import annotations

DOCUMENTATION = r"""
module: package_transaction
short_description: Change the packages of a node in one transaction of apt or dnf
description:
  - Installs at exact versions, removes, holds and releases packages in one transaction. Nothing is changed where the
    package manager refuses, or where it would touch what was not asked for.
  - In check mode the transaction is computed in a private folder, from lists that are fetched for it and thrown away,
    and from what the roles before would have done. With C(--diff) it is one list.
  - Scripts of the packages start no service, and needrestart is suspended. The module waits for locks. Faults of the
    network are tried again. A repository that fails and that no package needs is a warning.
  - What an earlier run left that was cut short (C(policy-rc.d), half-configured packages) is cleared first.
  - Where a kernel module does not build, the message ends with the compiler's errors.
options:
  change:
    description: The options below as one mapping, as a manifest has them (M(gpunode.node.role_plan)).
    type: dict
  manager:
    description: The package manager.
    type: str
    choices: [apt, dnf]
    default: apt
  state:
    description: With V(absent) what O(purge) names goes, and what came with it and nothing needs any more.
    type: str
    choices: [present, absent]
    default: present
  install:
    description: Packages to have, C(NAME) or C(NAME=PATTERN) with a shell pattern of versions. What fits is left alone.
    type: list
    elements: str
    default: []
  purge:
    description: For apt, shell patterns of packages that go in the same transaction.
    type: list
    elements: str
    default: []
  purge_new:
    description: For apt with O(state=absent), shell patterns of what goes too, unless O(memory) lists it.
    type: list
    elements: str
    default: []
  restore:
    description: For apt with O(state=absent), packages that return from NVIDIA's version to the distribution's.
    type: list
    elements: str
    default: []
  never:
    description: Shell patterns of packages that must neither come, move nor go.
    type: list
    elements: str
    default: []
  hold:
    description: >-
      Shell patterns of packages that are held afterwards; for dnf, locked at their versions in the role's own part of
      versionlock's list.
    type: list
    elements: str
    default: []
  unhold:
    description: For apt, packages whose hold is released.
    type: list
    elements: str
    default: []
  memory:
    description: File on the node that lists the packages that were there before the first change; written once.
    type: str
  files:
    description: Files of apt's folders as they will be, path to text. Preferences are obeyed before they are written.
    type: dict
    default: {}
  bound:
    description: For dnf, packages to have, all at one release, the newest that O(constraint) allows.
    type: list
    elements: str
    default: []
  constraint:
    description: For dnf, shell pattern of releases for O(bound).
    type: str
    default: "*"
  free:
    description: For dnf, packages to have in any version.
    type: list
    elements: str
    default: []
  closure:
    description: For dnf, installed packages that move to the release of O(bound), or go where it has none of them.
    type: list
    elements: str
    default: []
  line:
    description: >-
      For dnf, shell patterns C(names) and C(except) of packages that come at the release of O(bound) or not at all.
    type: dict
    default: { names: [], except: [] }
  remove:
    description: For dnf, packages that go.
    type: list
    elements: str
    default: []
  expendable:
    description: For dnf, shell patterns of packages that may go besides.
    type: list
    elements: str
    default: []
  stream:
    description: For dnf, C(MODULE:STREAM) that is enabled in the same transaction.
    type: str
  reset:
    description: For dnf, module whose stream is reset.
    type: str
  repositories:
    description: For dnf, repositories as they will be, with C(id), C(url) and C(proxy).
    type: list
    elements: dict
    default: []
  lock:
    description: >-
      For dnf, lines of the plugin versionlock that this role owns. Empty, its part of the list goes; without the option
      the list is left alone.
    type: list
    elements: str
  drop_locks:
    description: For dnf, lines of others in that list that go.
    type: list
    elements: str
    default: []
  lock_mark:
    description: For dnf, what the two lines around the role's part of the list end in.
    type: str
    default: gpunode
  ignore_locks:
    description: For dnf, lines of others in that list that do not count.
    type: list
    elements: str
    default: []
  idle_gpus:
    description: Whether to fail where a process computes on a GPU, asked when all is fetched and nothing changed yet.
    type: bool
    default: false
  planned:
    description: What other transactions would have done by now. The action plugin hands it in, in check mode.
    type: dict
    default: {}
  lock_wait_s:
    description: How long to wait, in seconds, for another package manager.
    type: int
    default: 300
  limit_s:
    description: How long, in seconds, downloading and installing may take.
    type: int
    default: 3600
attributes:
  check_mode:
    support: full
    description: Reports what the real run then does.
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
  description: Packages that came or moved, name to version.
  returned: success
  type: dict
remove:
  description: Packages that went.
  returned: success
  type: list
  elements: str
hold:
  description: Packages that are held or locked by this transaction.
  returned: success
  type: list
  elements: str
unhold:
  description: Packages whose hold or lock is released.
  returned: success
  type: list
  elements: str
finished:
  description: Packages that an interrupted run had left half-done.
  returned: success
  type: list
  elements: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.respawn import has_respawned, probe_interpreters_for_module, respawn_module
from ansible_collections.gpunode.node.plugins.module_utils import apt_transaction, dnf_transaction, gpu_use

LIST = {"type": "list", "elements": "str", "default": []}
LISTS = ("install", "purge", "purge_new", "restore", "never", "hold", "unhold", "bound", "free", "closure", "remove")
PYTHONS = ("/usr/libexec/platform-python", "/usr/bin/python3")


def with_dnf(module: AnsibleModule) -> None:
    """Go on under the Python that dnf belongs to."""
    if dnf_transaction.dnf is not None:
        return
    interpreter = None if has_respawned() else probe_interpreters_for_module(PYTHONS, "dnf")
    if interpreter is None:
        module.fail_json(msg=f"no-dnf: dnf 4 cannot be used: none of {', '.join(PYTHONS)} has its bindings")
    respawn_module(interpreter)


def listed(answer: dict[str, Any]) -> str:
    """Return what a transaction does as a list for a person."""
    lines = [f"install {name}={version}" for name, version in sorted(answer["install"].items())]
    for word in ("remove", "hold", "unhold"):
        lines += [f"{word} {name}" for name in answer.get(word, ())]
    if answer.get("stream") is not None:
        lines.append(f"enable module stream {answer['stream']}" if answer["stream"] else "reset the module stream")
    lines += [f"finish {name}" for name in answer.get("finished", ())]
    return "".join(f"{line}\n" for line in lines)


def gpu_users() -> list[str]:
    """Return the processes that compute on a GPU now."""
    return [gpu_use.title(one) for one in gpu_use.computing(gpu_use.holders())]


def message(answer: dict[str, Any]) -> str:
    """Return why a transaction failed, with the compiler's errors where there are some."""
    return "\n".join([answer["error"], *answer.get("log", ())])


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "change": {"type": "dict"},
            "manager": {"type": "str", "choices": ["apt", "dnf"], "default": "apt"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            **dict.fromkeys((*LISTS, "expendable", "drop_locks", "ignore_locks"), LIST),
            "line": {"type": "dict", "default": {"names": [], "except": []}},
            "memory": {"type": "str"},
            "files": {"type": "dict", "default": {}},
            "constraint": {"type": "str", "default": "*"},
            "stream": {"type": "str"},
            "reset": {"type": "str"},
            "repositories": {"type": "list", "elements": "dict", "default": []},
            "lock": {"type": "list", "elements": "str"},
            "lock_mark": {"type": "str", "default": "gpunode"},
            "idle_gpus": {"type": "bool", "default": False},
            "planned": {"type": "dict", "default": {}},
            "lock_wait_s": {"type": "int", "default": 300},
            "limit_s": {"type": "int", "default": 3600},
        },
        supports_check_mode=True,
    )
    by_dnf = module.params["manager"] == "dnf"
    if by_dnf:
        with_dnf(module)
    manager: Any = dnf_transaction if by_dnf else apt_transaction
    question = {**module.params, **(module.params["change"] or {}), "simulate": module.check_mode}
    if question["idle_gpus"]:
        question["gpu_users"] = gpu_users
    answer = manager.answered(question)
    for warning in answer.get("warnings", ()):
        module.warn(warning)
    if isinstance(answer.get("install"), list):
        answer["install"] = {row["name"]: row["version"] for row in answer["install"]}
    if "lacking" in answer:
        gone = "; ".join(f"{name}: {', '.join(there[:3]) or 'none'}" for name, there in answer["lacking"].items())
        answer["error"] = f"no release that matches {answer['constraint']} has all packages: {gone}"
    if "error" in answer:
        module.fail_json(msg=message(answer))
    text = listed(answer)
    module.exit_json(
        changed=bool(text),
        install=answer["install"],
        remove=answer["remove"],
        hold=answer.get("hold", []),
        unhold=answer.get("unhold", []),
        finished=answer.get("finished", []),
        diff={"prepared": text} if text else {},
    )


if __name__ == "__main__":
    main()
