"""The driver's plan on a node with dnf: packages, module stream, locks, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import cached_property
from typing import Any

from gpunode.catalog import load
from gpunode.catalog.origins import closure_line, closure_patterns
from gpunode.facts.kernels import Kernel
from gpunode.provisioning.driver.messages import explained
from gpunode.provisioning.driver.model import MEMORY, DriverPlan, Preview
from gpunode.provisioning.manifest import DnfChange
from gpunode.provisioning.state import DnfState, NodeState
from gpunode.stack import TOGETHER, driver_names, installed_closure
from gpunode.text import listed, printable

MODULE = "nvidia-driver"
PLUGIN = "python3-dnf-plugin-versionlock"
HEADERS = "kernel-devel"
LOCKLIST = "/etc/dnf/plugins/versionlock.list"
MARK = "gpunode (role nvidia_driver)"
"""Suffix of the two lines around our section of the list, by which preflight distinguishes our locks from others'."""
DKMS_NAMES = {"open": "nvidia-open", "proprietary": "nvidia"}
"""Names of NVIDIA's two packages; if DKMS knows the modules already, its own name is used."""
# Packages that may be removed if another stream requires it: parts of a driver that are in no stack.
EXPENDABLE = ("*nvidia*", "cuda-drivers*", "libnvsdm*", "libcuda*")


def dnf_problems(dnf: DnfState | None) -> list[str]:
    """Return why dnf cannot be used on the node, one line each."""
    if dnf is None:
        return []
    lines = [f"no-dnf: dnf 4 cannot be used through python3: {dnf.error}"] if dnf.error else []
    if dnf.twice:
        lines.append(
            f"half-done: a transaction was interrupted, rpm has two versions of {listed(dnf.twice, 5)}: "
            "run dnf remove --duplicates"
        )
    if dnf.runfile:
        lines.append(
            "runfile: a driver of NVIDIA's .run installer is installed: remove it with /usr/bin/nvidia-uninstall"
        )
    return list(map(printable, lines))


class DnfPlan(DriverPlan):
    """The plan if dnf manages the packages."""

    @cached_property
    def dnf(self) -> DnfState:
        """Return dnf's state."""
        return self.state.dnf or DnfState(error="unknown")

    @property
    def _full(self) -> tuple[tuple[str, ...], ...]:
        return driver_names(self.stack, load(), "full") if self.settings.profile == "full" else ()

    @property
    def bound(self) -> list[str]:
        """Return packages requested at the driver's release."""
        rows = [row for row in self.stack.packages if row.component in TOGETHER and row.with_driver]
        full = [names[0] for names in self._full]
        names = [row.name for row in rows if not (full and row.component == "driver")]
        return sorted({*names, *full, *self.settings.extra_packages})

    @property
    def free(self) -> list[str]:
        """Return packages requested in any version."""
        # Of older kernels that dnf keeps, the headers of a past minor release are in no enabled repository any more.
        kernels = [one for one in self.kernels if one.running or one.newest]
        headers = [f"kernel-devel-{one.release}" for one in kernels if not one.headers]
        plugin = [] if self.dnf.versionlock else [PLUGIN]
        keys = [name for name in ("mokutil", "openssl") if self.node.secure_boot and name not in self.dnf.installed]
        return sorted({*headers, *plugin, *keys, *self.settings.header_packages})

    @property
    def stream(self) -> str | None:
        pin = self.stack.pin
        return pin.pattern if pin and pin.mechanism == "module-stream" else None

    @property
    def missing(self) -> list[str]:
        """Return packages of the closure that are not installed."""
        return [name for name in self.bound if name not in self.dnf.installed]

    @property
    def changes(self) -> bool:
        """Return whether the answer contains changes."""
        return bool(self.preview.install or self.preview.remove or self.preview.stream is not None)

    @property
    def names_in_dkms(self) -> Mapping[str, str]:
        """Return the name that DKMS will use for the modules of each flavour."""
        return DKMS_NAMES

    @property
    def settled(self) -> bool:
        """Return whether nothing has to change, so that dnf need not be queried."""
        enabled = self.stream is None or self.stream == f"{MODULE}:{self.dnf.streams.get(MODULE)}"
        here = all(name in self.dnf.installed for name in self.bound)
        return enabled and here and not self.free and not self.foreign and set(self.own.values()) == {self.target}

    @property
    def wanting(self) -> list[Kernel]:
        """Return kernels that need a module; of a removed kernel the headers may be left."""
        return [kernel for kernel in self.kernels if kernel.headers and kernel.image]

    @property
    def foreign_locks(self) -> dict[str, str]:
        """Return foreign lock lines that keep a package of the closure at another release: line to package."""
        found = {}
        for line in self.dnf.locks:
            for name in {*self.bound, *self.own}:
                speaks = fnmatch(name, line) or re.match(rf"(\d+:)?{re.escape(name)}-(\d+:)?\d", line)
                if speaks and not (self.target and self.target in line) and name != line:
                    found[line] = name
        return found

    @property
    def locks(self) -> tuple[str, ...]:
        """Return the lines for the plugin versionlock, as ``dnf versionlock add`` writes them, for any architecture."""
        coming = {
            row.name: row.version for row in self.preview.install if closure_line(row.name, row.name, self.stack.source)
        }
        versions = {package.name: package.version for package in self.node.packages or ()} | coming
        stays = {name for name, release in self.own.items() if release == self.target} - set(self.preview.remove)
        epochs = {name: "" if ":" in versions[name] else "0:" for name in stays | coming.keys()}
        return tuple(f"{name}-{epoch}{versions[name]}.*" for name, epoch in sorted(epochs.items()))

    @property
    def transaction(self) -> DnfChange:
        """Return the transaction that brings the driver."""
        patterns = closure_patterns(self.stack.source)
        return DnfChange(
            stream=self.stream,
            bound=tuple(self.bound),
            constraint=self.target or self.stack.driver.constraint,
            free=tuple(self.free),
            closure=tuple(sorted(self.own)),
            line={word: tuple(names) for word, names in patterns.items()},
            remove=tuple(self.foreign),
            expendable=EXPENDABLE,
            ignore_locks=tuple(sorted(self.foreign_locks)) if self.settings.switch else (),
        )

    @property
    def question(self) -> dict[str, Any]:
        """Return the question for ``dnf_transaction.py``, without the repository."""
        names = {"stream", "reset", "bound", "constraint", "free", "closure", "line", "remove", "expendable"}
        return {
            **self.transaction.model_dump(mode="json", include={*names, "ignore_locks"}),
            "locklist": LOCKLIST,
            "lock_mark": MARK,
            "lock_wait_s": self.settings.lock_wait_s,
            "limit_s": 900,
            "simulate": True,
        }

    def change(self, *, idle: bool) -> DnfChange:
        """Return the transaction with the locks; ``idle``: no process may compute on a GPU."""
        change = self.transaction.model_copy(update={"idle_gpus": idle}) if self.changes else DnfChange()
        more = {"lock": self.locks, "lock_mark": MARK, "memory": MEMORY, "lock_wait_s": self.settings.lock_wait_s}
        drop = tuple(sorted(self.foreign_locks)) if self.settings.switch else ()
        return change.model_copy(update={**more, "drop_locks": drop})

    @property
    def closure_problems(self) -> tuple[str, ...]:
        """Return why the closure is not at one version after the transaction."""
        wrong = [*self.wrong_versions, *(f"no {name}" for name in self.missing)]
        return (f"{self.target} is requested of the whole closure; there is {'; '.join(wrong)}",) if wrong else ()

    @property
    def pending_reasons(self) -> Iterator[str]:
        """Yield which packages change."""
        if self.changes:
            yield from (f"{name} is not installed" for name in self.missing)
            yield from (f"{row} is installed, {self.target} is requested" for row in self.wrong_versions)
            yield f"dnf has packages to change for driver {self.target}"

    # --- refusals

    @property
    def _refusals(self) -> Iterator[str]:
        preview, switch = self.preview, self.settings.switch
        if self.foreign and not switch:
            yield (
                f"other-source: {listed(self.foreign, 5)} came from another source, {self.stack.source} is requested: "
                "set nvidia_driver_switch: true to replace it in one transaction"
            )
        if self.foreign_locks and not self.settled and not switch:
            yield (
                f"held-packages: {listed(sorted(self.foreign_locks), 5)} in dnf's versionlock locks another release "
                f"than {self.target or self.stack.driver.constraint}, and is not gpunode's: dnf versionlock delete, or "
                "set nvidia_driver_switch: true"
            )
        if preview.error:
            yield explained("dnf", preview.error)
        elif preview.lacking is not None:
            yield _lacking(preview, preview.lacking)


def _lacking(answer: Preview, lacking: Mapping[str, tuple[str, ...]]) -> str:
    """Return the refusal if a part of the closure is not available at the release of the rest."""
    gone = sorted(name for name, there in lacking.items() if not there)
    if gone:
        return f"package-gone: {listed(gone, 5)} is in no repository of the node: check the mirror"
    parts = [f"{name} is available in {', '.join(there[:3])}" for name, there in sorted(lacking.items())[:3]]
    return f"closure-lags: {answer.constraint} is not available for the whole closure: {'; '.join(parts)}{answer.near}"


def removal(state: NodeState, *, keep_headers: bool) -> DnfChange:
    """Return the transaction that removes the driver; kernel headers if the role installed them."""
    dnf = state.dnf or DnfState(error="unknown")
    return DnfChange(
        state="absent",
        remove=tuple(sorted(installed_closure(state.facts, load()))),
        remove_new=() if keep_headers else (HEADERS,),
        expendable=EXPENDABLE,
        reset=MODULE if MODULE in dnf.streams else None,
        memory=MEMORY,
        lock=() if dnf.own_locks else None,
        lock_mark=MARK,
    )
