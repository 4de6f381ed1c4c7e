"""Preflight and the role nvidia_driver on a system with dnf."""

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
"""Names of NVIDIA's two packages; if DKMS knows the modules already, its own name is used."""
# Packages that may be removed if another stream requires it: parts of a driver that are in no stack.
EXPENDABLE = ["*nvidia*", "cuda-drivers*", "libnvsdm*", "libcuda*"]


def dnf_problems(dnf: Mapping[str, Any] | None) -> list[str]:
    """Return why dnf cannot be used on the node, one line each; ``dnf`` is the output of ``dnf_state.py``."""
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
    """The input if dnf manages the packages; ``dnf`` is dnf's state."""

    dnf: Mapping[str, Any]

    @property
    def _full(self) -> tuple[tuple[str, ...], ...]:
        return driver_names(self.stack, load(), "full") if self.settings["profile"] == "full" else ()

    @property
    def bound(self) -> list[str]:
        """Return packages requested at the driver's release."""
        rows = [row for row in self.stack.packages if row.component in TOGETHER and row.with_driver]
        full = [names[0] for names in self._full]
        names = [row.name for row in rows if not (full and row.component == "driver")]
        return sorted({*names, *full, *self.settings["extra_packages"]})

    @property
    def free(self) -> list[str]:
        """Return packages requested in any version."""
        # Of older kernels that dnf keeps, the headers of a past minor release are in no enabled repository any more.
        kernels = [one for one in self.kernels if one.running or one.newest]
        headers = [f"kernel-devel-{one.release}" for one in kernels if not one.headers]
        plugin = [] if self.dnf["versionlock"] else [PLUGIN]
        keys = [name for name in ("mokutil", "openssl") if self.node.secure_boot and name not in self.dnf["installed"]]
        return sorted({*headers, *plugin, *keys, *self.settings["header_packages"]})

    @property
    def stream(self) -> str | None:
        pin = self.stack.pin
        return pin.pattern if pin and pin.mechanism == "module-stream" else None

    @property
    def coming(self) -> list[str]:
        """Return packages of the closure after the transaction."""
        rows = [row["name"] for row in self.answer.get("install", ())]
        more = {name for name in rows if closure_line(name, name, self.stack.source)}
        return sorted({*self.own, *more} - set(self.answer.get("remove", ())))

    @property
    def settled(self) -> bool:
        """Return whether nothing has to change, so that dnf need not be queried."""
        enabled = self.stream is None or self.stream == f"{MODULE}:{self.dnf['streams'].get(MODULE)}"
        here = all(name in self.dnf["installed"] for name in self.bound)
        return enabled and here and not self.free and not self.foreign and set(self.own.values()) == {self.target}

    @property
    def wanting(self) -> list[Kernel]:
        """Return kernels that need a module; of a removed kernel the headers may be left."""
        return [kernel for kernel in self.kernels if kernel.headers and kernel.image]

    @property
    def foreign_locks(self) -> dict[str, str]:
        """Return foreign lock lines that keep a package of the closure at another release: line to package."""
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
    """Return the changes for the driver on a node with dnf.

    ``stack`` is the stack of ``gpunode_plan``; ``settings``: ``profile``, ``extra_packages``, ``header_packages``,
    ``switch``. Returned: ``question`` (for ``dnf_transaction.py``; the role adds ``repository`` and the time),
    ``settled`` (no question is needed), ``changes`` (whether the answer contains changes), ``target``, ``coming``
    (names to lock then), ``locks`` (lines for the plugin versionlock), ``wrong_versions``, ``missing``,
    ``daemon``, and the result of ``module_state`` on kernels and modules.
    """
    case = _case(facts, dnf, stack, settings, answer)
    preview, switch = case.answer, bool(case.settings["switch"])
    versions = {package.name: package.version for package in case.node.packages or ()}
    coming = {
        str(row["name"]): str(row["version"])
        for row in preview.get("install", ())
        if closure_line(row["name"], row["name"], case.stack.source)
    }
    versions |= coming
    stays = {name for name, release in case.own.items() if release == case.target} - set(preview.get("remove", ()))
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
            "remove": case.foreign,
            "expendable": EXPENDABLE,
            "ignore_locks": sorted(case.foreign_locks) if switch else [],
        },
        "settled": case.settled,
        "changes": bool(preview.get("install") or preview.get("remove") or preview.get("stream") is not None),
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
    """Return a line as ``dnf versionlock add`` writes it, for any architecture."""
    return f"{name}-{version if ':' in version else '0:' + version}.*"


def dnf_refusals(
    facts: NodeFacts | Mapping[str, Any],
    dnf: Mapping[str, Any],
    stack: Stack | Mapping[str, Any],
    settings: Mapping[str, Any],
    answer: Mapping[str, Any],
) -> list[str]:
    """Return why the driver must not be changed, one line each: name, reason, and remedy."""
    case = _case(facts, dnf, stack, settings, answer)
    switch, lines = bool(case.settings["switch"]), []
    if case.foreign and not switch:
        lines.append(
            f"other-source: {listed(case.foreign, 5)} came from another source, {case.stack.source} is "
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
    """Return the refusal if a part of the closure is not available at the release of the rest."""
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


# Messages of dnf, and their remedies. The first that matches is used.
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


def dnf_error(message: str) -> str:
    """Return an error of ``dnf_transaction.py`` with its name and its remedy."""
    for pattern, name, remedy in OF_DNF:
        if re.search(pattern, message):
            return printable(f"{name}{remedy}{message}")
    return printable(f"dnf-refuses: {message}")


def dnf_removal(facts: NodeFacts | Mapping[str, Any], dnf: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is removed with the driver: a question for ``dnf_transaction.py``, as in ``dnf_plan``."""
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
