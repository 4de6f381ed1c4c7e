"""What preflight and the role nvidia_driver do on a system whose packages dnf manages."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from gpunode.catalog import load
from gpunode.catalog.origins import closure_line, closure_patterns
from gpunode.facts import NodeFacts
from gpunode.facts.node import Kernel
from gpunode.provisioning.documents import node_of, stack_of
from gpunode.provisioning.driver_input import DriverInput
from gpunode.provisioning.driver_modules import module_state
from gpunode.stack import TOGETHER, Stack, driver_names, installed_closure
from gpunode.text import listed, printable
from gpunode.variables import plain

MODULE = "nvidia-driver"
PLUGIN = "python3-dnf-plugin-versionlock"
DAEMON = "nvidia-persistenced"
DKMS_NAMES = {"open": "nvidia-open", "proprietary": "nvidia"}
"""Of NVIDIA's two packages; where DKMS knows the modules already, its own word counts."""
# What may go where another stream needs it: parts of a driver that no stack names.
EXPENDABLE = ["*nvidia*", "cuda-drivers*", "libnvsdm*", "libcuda*"]


def dnf_problems(dnf: Mapping[str, Any] | None) -> list[str]:
    """Why dnf cannot be used on the node as it is, one line each; ``dnf`` is what ``dnf_state.py`` printed."""
    if dnf is None:
        return []
    lines = [f"no-dnf: dnf 4 cannot be used through python3: {dnf['error']}"] if dnf["error"] else []
    if dnf["twice"]:
        lines.append(
            f"half-done: a transaction was interrupted, rpm has two versions of {listed(dnf['twice'], 5)}: "
            "run dnf remove --duplicates"
        )
    if dnf["runfile"]:
        lines.append(
            "runfile: a driver of NVIDIA's .run installer is installed: remove it with /usr/bin/nvidia-uninstall"
        )
    return list(map(printable, lines))


@dataclass(frozen=True)
class DnfDriverInput(DriverInput):
    """The input where dnf manages the packages; ``dnf`` is what is known of them."""

    dnf: Mapping[str, Any]

    @property
    def _full(self) -> tuple[tuple[str, ...], ...]:
        return driver_names(self.stack, load(), "full") if self.settings["profile"] == "full" else ()

    @property
    def bound(self) -> list[str]:
        """Packages to have at the driver's release."""
        rows = [row for row in self.stack.packages if row.component in TOGETHER and row.with_driver]
        full = [names[0] for names in self._full]
        names = [row.name for row in rows if not (full and row.component == "driver")]
        return sorted({*names, *full, *self.settings["extra_packages"]})

    @property
    def free(self) -> list[str]:
        """Packages to have in whichever version goes with them."""
        headers = [f"kernel-devel-{one.release}" for one in self.kernels if not one.headers]
        plugin = [] if self.dnf["versionlock"] else [PLUGIN]
        keys = [name for name in ("mokutil", "openssl") if self.node.secure_boot and name not in self.dnf["installed"]]
        return sorted({*headers, *plugin, *keys, *self.settings["header_packages"]})

    @property
    def stream(self) -> str | None:
        pin = self.stack.pin
        return pin.pattern if pin and pin.mechanism == "module-stream" else None

    @property
    def coming(self) -> list[str]:
        """Packages of the closure that are there after the transaction."""
        rows = [row["name"] for row in self.answer.get("install", ())]
        more = {name for name in rows if closure_line(name, name, self.stack.source)}
        return sorted({*self.own, *more} - set(self.answer.get("remove", ())))

    @property
    def settled(self) -> bool:
        """All is there as it should be, and dnf need not be asked."""
        enabled = self.stream is None or self.stream == f"{MODULE}:{self.dnf['streams'].get(MODULE)}"
        here = all(name in self.dnf["installed"] for name in self.bound)
        return enabled and here and not self.free and not self.strangers and set(self.own.values()) == {self.target}

    @property
    def wanting(self) -> list[Kernel]:
        """Kernels that are to have a module; of a kernel that was removed the headers may be left."""
        return [kernel for kernel in self.kernels if kernel.headers and kernel.image]

    @property
    def foreign_locks(self) -> dict[str, str]:
        """Lines of others that keep a package of the closure at another release: line to package."""
        found = {}
        for line in self.dnf["locks"]:
            for name in {*self.bound, *self.own}:
                speaks = fnmatch(name, line) or re.match(rf"(\d+:)?{re.escape(name)}-(\d+:)?\d", line)
                if speaks and not (self.target and self.target in line) and name != line:
                    found[line] = name
        return found


def _case(
    facts: NodeFacts | Mapping[str, Any],
    dnf: Mapping[str, Any],
    stack: Stack | Mapping[str, Any],
    settings: Mapping[str, Any],
    answer: Mapping[str, Any] | None,
) -> DnfDriverInput:
    return DnfDriverInput(node_of(facts), stack_of(stack), plain(settings), plain(answer or {}), plain(dnf))


def dnf_plan(
    facts: NodeFacts | Mapping[str, Any],
    dnf: Mapping[str, Any],
    stack: Stack | Mapping[str, Any],
    settings: Mapping[str, Any],
    answer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What there is to do for the driver on a node with dnf.

    ``stack`` is the stack of ``gpunode_plan``; ``settings``: ``profile``, ``extra_packages``, ``header_packages``,
    ``switch``. Returned: ``question`` (what ``dnf_transaction.py`` is asked; the role adds ``repository`` and when),
    ``settled`` (nothing is to be asked), ``changes`` (the answer says that something changes), ``target``, ``coming``
    (names to be locked then), ``locks`` (lines for the plugin versionlock), ``wrong_versions``, ``missing``,
    ``daemon``, and what ``module_state`` says of kernels and modules.
    """
    case = _case(facts, dnf, stack, settings, answer)
    said, switch = case.answer, bool(case.settings["switch"])
    versions = {package.name: package.version for package in case.node.packages or ()}
    coming = {
        str(row["name"]): str(row["version"])
        for row in said.get("install", ())
        if closure_line(row["name"], row["name"], case.stack.source)
    }
    versions |= coming
    stays = {name for name, release in case.own.items() if release == case.target} - set(said.get("remove", ()))
    locked = sorted(stays | coming.keys())
    return {
        "question": {
            "stream": case.stream,
            "reset": None,
            "bound": case.bound,
            "constraint": case.target or case.stack.driver.constraint,
            "free": case.free,
            "closure": sorted(case.own),
            "line": closure_patterns(case.stack.source),
            "remove": case.strangers,
            "expendable": EXPENDABLE,
            "ignore_locks": sorted(case.foreign_locks) if switch else [],
        },
        "settled": case.settled,
        "changes": bool(said.get("install") or said.get("remove") or said.get("stream") is not None),
        "target": case.target,
        "coming": case.coming,
        "locks": [_lock(name, versions[name]) for name in locked],
        "foreign_locks": sorted(case.foreign_locks),
        "wrong_versions": [f"{name} {release}" for name, release in sorted(case.own.items()) if release != case.target],
        "missing": [name for name in case.bound if name not in case.dnf["installed"]],
        "daemon": DAEMON in case.dnf["installed"],
        **module_state(case, case.wanting, DKMS_NAMES),
    }


def _lock(name: str, version: str) -> str:
    """As ``dnf versionlock add`` writes it, of any architecture."""
    return f"{name}-{version if ':' in version else '0:' + version}.*"


def dnf_refusals(
    facts: NodeFacts | Mapping[str, Any],
    dnf: Mapping[str, Any],
    stack: Stack | Mapping[str, Any],
    settings: Mapping[str, Any],
    answer: Mapping[str, Any],
) -> list[str]:
    """Why the driver must not be changed, one line each: its name, the reason, and what to do."""
    case = _case(facts, dnf, stack, settings, answer)
    switch, lines = bool(case.settings["switch"]), []
    if case.strangers and not switch:
        lines.append(
            f"other-source: {listed(case.strangers, 5)} came from another source, {case.stack.source} is "
            "requested: set "
            "nvidia_driver_switch: true to replace it in one transaction"
        )
    if case.foreign_locks and not case.settled and not switch:
        lines.append(
            f"held-packages: {listed(sorted(case.foreign_locks), 5)} in dnf's versionlock locks another release than "
            f"{case.target or case.stack.driver.constraint}, and is not gpunode's: dnf versionlock delete, or set "
            "nvidia_driver_switch: true"
        )
    if answer.get("error"):
        lines.append(dnf_error(str(answer["error"])))
    elif "lacking" in answer:
        lines.append(_lacking(case))
    return list(map(printable, lines))


def _lacking(case: DnfDriverInput) -> str:
    """A part of the closure is not to be had at the release of the rest."""
    answer = case.answer
    gone = sorted(name for name, there in answer["lacking"].items() if not there)
    if gone:
        return f"package-gone: {listed(gone, 5)} is in no repository of the node: check the mirror"
    parts = [f"{name} is available in {', '.join(there[:3])}" for name, there in sorted(answer["lacking"].items())[:3]]
    common = answer["common"]
    near = (
        f"; all packages are available in {', '.join(common[:3])}: nvidia_driver_version: {common[0]}" if common else ""
    )
    return f"closure-lags: {answer['constraint']} is not available for the whole closure: {'; '.join(parts)}{near}"


# What dnf says, and what is to be done. The first that fits is told.
OF_DNF = (
    (
        r"^(would-remove|module-stream|package-lock):",
        "",
        "",
    ),
    (
        r"SHA1 is not considered secure|[Pp]olicy rejects|not bound",
        "repository-key-sha1: ",
        "the node's crypto policy rejects keys and signatures based on SHA1: set a newer key with "
        "nvidia_repository_key; dnf reported: ",
    ),
    (
        r"nothing provides dkms",
        "dkms-missing: ",
        "the modules are built by dkms, which is in EPEL: enable that repository on the node; dnf reported: ",
    ),
    (
        r"not signed as required|GPG|PGP|[Ss]ignature",
        "repository-unsigned: ",
        "signatures are always verified: sign the packages, or set their key with nvidia_repository_key; dnf "
        "reported: ",
    ),
    (
        r"Failed to download metadata|Cannot download|Curl error|[Cc]onnect|No more mirrors|did not end within",
        "repository-unreachable: ",
        "check the network, the proxy (nvidia_repository_proxy) or the mirror (nvidia_repository_url); dnf reported: ",
    ),
    (r"[Nn]o space left|[Dd]isk space|needs .* on the .* filesystem", "disk-full: ", "free disk space; dnf reported: "),
)


def dnf_error(said: str) -> str:
    """What ``dnf_transaction.py`` said as an error, with its name and with what to do about it."""
    for pattern, name, remedy in OF_DNF:
        if re.search(pattern, said):
            return printable(f"{name}{remedy}{said}")
    return printable(f"dnf-refuses: {said}")


def dnf_removal(facts: NodeFacts | Mapping[str, Any], dnf: Mapping[str, Any]) -> dict[str, Any]:
    """What goes with the driver: a question for ``dnf_transaction.py``, as ``dnf_plan`` gives it."""
    node = node_of(facts)
    return {
        "stream": None,
        "reset": MODULE if MODULE in dnf["streams"] else None,
        "bound": [],
        "constraint": "*",
        "free": [],
        "closure": [],
        "line": {"names": [], "except": []},
        "remove": sorted(installed_closure(node, load())),
        "expendable": EXPENDABLE,
        "ignore_locks": [],
    }
