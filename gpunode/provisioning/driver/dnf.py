"""The driver's plan on a node with dnf: packages, module stream, locks, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch

from gpunode.catalog import load
from gpunode.catalog.origins import closure_line, closure_patterns
from gpunode.provisioning.driver.messages import explained, lagging
from gpunode.provisioning.driver.model import DAEMON, MEMORY, PREVIEW_LIMIT_S, DriverPlan, DriverRequest
from gpunode.provisioning.state import DnfState, NodeState
from gpunode.provisioning.transaction import Transaction, lock_plugin
from gpunode.stack import installed_closure
from gpunode.text import listed, printable

MODULE = "nvidia-driver"
HEADERS = "kernel-devel"
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


def planned(request: DriverRequest, dnf: DnfState) -> DriverPlan:
    """Return the plan if dnf manages the packages."""
    settings, preview = request.settings, request.preview
    bound = sorted({*(names[0] for names, _ in request.names), *settings.extra_packages})
    free = _free(request, dnf)
    pin = request.stack.pin
    stream = pin.pattern if pin and pin.mechanism == "module-stream" else None
    missing = request.unmet(bound)
    enabled = stream is None or stream == f"{MODULE}:{dnf.streams.get(MODULE)}"
    settled = enabled and not missing and not free and not request.foreign and bool(request.of_stack)
    changes = bool(preview.install or preview.remove or preview.stream is not None)
    foreign = _foreign_locks(request, bound, dnf)
    stays = {name for name, release in request.of_stack.items() if release == request.target} - set(preview.remove)
    coming = {name for name in preview.install if closure_line(name, name, request.stack.source)}
    question = Transaction(
        manager="dnf",
        stream=stream,
        bound=tuple(bound),
        constraint=request.constraint,
        install=tuple(free),
        closure=tuple(sorted(request.of_stack)),
        line={word: tuple(names) for word, names in closure_patterns(request.stack.source).items()},
        remove=tuple(request.foreign),
        expendable=EXPENDABLE,
        ignore_locks=tuple(sorted(foreign)) if settings.switch else (),
        lock_mark=MARK,
        lock_wait_s=settings.lock_wait_s,
    )
    held = {
        "hold": tuple(sorted(stays | coming)),
        "drop_locks": question.ignore_locks,
        "lock_mark": MARK,
        "memory": MEMORY,
        "lock_wait_s": settings.lock_wait_s,
    }
    return DriverPlan(
        request.state,
        request.stack,
        settings,
        request.answer,
        question=question.model_copy(update={"limit_s": PREVIEW_LIMIT_S}),
        change=(question if changes else Transaction(manager="dnf")).model_copy(update=held),
        settled=settled,
        changes=changes,
        missing=tuple(sorted(missing)),
        refusals=tuple(map(printable, _refusals(request, sorted(foreign), settled=settled))),
        # Of a removed kernel the headers may be left.
        wanting=tuple(kernel for kernel in request.kernels if kernel.headers and kernel.image),
        names_in_dkms=DKMS_NAMES,
        has_daemon=DAEMON in dnf.installed,
    )


def _free(request: DriverRequest, dnf: DnfState) -> list[str]:
    """Return packages requested in any version."""
    # Of older kernels that dnf keeps, the headers of a past minor release are in no enabled repository any more.
    kernels = [kernel for kernel in request.kernels if kernel.running or kernel.newest]
    headers = [f"kernel-devel-{kernel.release}" for kernel in kernels if not kernel.headers]
    keys = [name for name in ("mokutil", "openssl") if request.node.secure_boot and name not in dnf.installed]
    return sorted({*headers, *lock_plugin(dnf), *keys, *request.settings.header_packages})


def _foreign_locks(request: DriverRequest, bound: Iterable[str], dnf: DnfState) -> set[str]:
    """Return foreign lock lines that keep a package of the closure at another release."""
    return {
        line
        for line in dnf.locks
        for name in {*bound, *request.of_stack}
        if (fnmatch(name, line) or re.match(rf"(\d+:)?{re.escape(name)}-(\d+:)?\d", line))
        and not (request.target and request.target in line)
        and name != line
    }


def _refusals(request: DriverRequest, locks: list[str], *, settled: bool) -> Iterator[str]:
    preview, switch = request.preview, request.settings.switch
    if request.foreign and not switch:
        yield (
            f"other-source: {listed(request.foreign, 5)} came from another source, {request.stack.source} is "
            "requested: set nvidia_driver_switch: true to replace it in one transaction"
        )
    if locks and not settled and not switch:
        yield (
            f"held-packages: {listed(locks, 5)} in dnf's versionlock locks another release than {request.constraint}, "
            "and is not gpunode's: dnf versionlock delete, or set nvidia_driver_switch: true"
        )
    if preview.error:
        yield explained("dnf", preview.error)
    elif preview.lacking is not None:
        yield lagging(preview, request.stack)


def removal(state: NodeState, *, keep_headers: bool) -> Transaction:
    """Return the transaction that removes the driver; kernel headers if the role installed them."""
    dnf = state.dnf or DnfState(error="unknown")
    return Transaction(
        manager="dnf",
        state="absent",
        remove=tuple(sorted(installed_closure(state.facts, load()))),
        remove_new=() if keep_headers else (HEADERS,),
        expendable=EXPENDABLE,
        reset=MODULE if MODULE in dnf.streams else None,
        memory=MEMORY,
        lock_mark=MARK,
    )
