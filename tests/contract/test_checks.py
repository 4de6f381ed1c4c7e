"""Every check has input that it passes, mutants that it alone fails, and data without which it is an error.

A mutant is an edit of raw text in a bundle. The whole map of verdicts is compared before and after: the named check
turns, others may turn to ``skip`` where the mutant says so, and nothing else moves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

import pytest
from bundles import (
    KERNEL,
    Document,
    Edit,
    apply,
    driver_node,
    findings,
    not_run,
    stdout,
    text,
    timed_out,
    verdicts,
    with_two_gpus,
)

from gpunode.checks import Expectation, Status, registry
from gpunode.report import unreachable

PASS, WARN, FAIL, SKIP, ERROR = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP, Status.ERROR
Base = Callable[[], Document]

NEWER = "6.1.0-57-cloud-amd64"
MODULES = f"/lib/modules/{KERNEL}/"
NVIDIA = "NVIDIA CORPORATION <cudatools@nvidia.com>"
FOREIGN = f"libnvidia-nscq-535\t535.247.01-1\tamd64\tinstall ok installed\tlibnvidia-nscq-535\t535.247.01-1\t{NVIDIA}\n"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.261\n"
NOTHING_LOADED = [
    text("/proc/driver/nvidia/version", None, None),
    text("/proc/modules", None, ""),
    not_run("nvidia-smi-xml"),
]
ONE_GPU_OFF_THE_BUS = [
    text("/sys/bus/pci/devices/", "0000:3d:00.0\n", ""),
    Edit(("commands", "nvidia-smi-xml", "stdout"), "<attached_gpus>2<", "<attached_gpus>1<"),
]


def newer_kernel(*, headers: bool, image: bool = True) -> list[Edit]:
    """Another kernel is installed, and nothing was built for it."""
    owner = f"linux-image-{NEWER}: /boot/vmlinuz-{NEWER}\n"
    return [
        text("/lib/modules/", KERNEL, f"{KERNEL}\n{NEWER}"),
        text(f"/lib/modules/{NEWER}/", None, "kernel\nmodules.dep\n" if image else "build\n"),
        text(f"/lib/modules/{NEWER}/build/", None, "Makefile\nscripts\n" if headers else None),
        stdout("dpkg-kernels", f"linux-image-{KERNEL}: /boot", f"{owner}linux-image-{KERNEL}: /boot"),
    ]


@dataclass(frozen=True)
class Mutant:
    """An edit that one check must find."""

    check: str
    name: str
    base: Base
    edits: list[Edit]
    becomes: Status = FAIL
    skips: tuple[str, ...] = ()
    """Checks that have nothing to look at any more."""
    expect: Expectation = field(default_factory=Expectation)


MUTANTS = [
    Mutant(
        "gpu.present",
        "one GPU gone from bus and driver",
        with_two_gpus,
        ONE_GPU_OFF_THE_BUS,
        expect=Expectation(gpus=2),
    ),
    Mutant(
        "driver.module-built",
        "newer kernel with headers, nothing built",
        driver_node,
        newer_kernel(headers=True),
    ),
    Mutant(
        "driver.module-built",
        "older kernel with headers, nothing built",
        driver_node,
        [
            text("/lib/modules/", KERNEL, f"6.1.0-44-amd64\n{KERNEL}"),
            text("/lib/modules/6.1.0-44-amd64/", None, "kernel\n"),
            text("/lib/modules/6.1.0-44-amd64/build/", None, "Makefile\n"),
            stdout("dpkg-kernels", "linux-image", "linux-image-x: /boot/vmlinuz-6.1.0-44-amd64\nlinux-image"),
        ],
    ),
    Mutant("driver.module-built", "newest kernel without headers", driver_node, newer_kernel(headers=False)),
    Mutant(
        "driver.module-built",
        "module file gone",
        driver_node,
        [
            stdout("find-modules", None, ""),
            not_run("modinfo"),
        ],
    ),
    Mutant(
        "driver.module-built",
        "module built for another kernel",
        driver_node,
        [stdout("modinfo", f"vermagic:       {KERNEL}", "vermagic:       6.1.0-1-cloud-amd64")],
    ),
    Mutant(
        "driver.module-loaded",
        "module not in memory",
        with_two_gpus,
        NOTHING_LOADED,
        skips=("driver.library-matches-module", "gpu.count", "gpu.persistence"),
    ),
    Mutant(
        "driver.library-matches-module",
        "older module in memory",
        with_two_gpus,
        [text("/proc/driver/nvidia/version", "535.261.03", "535.247.01")],
    ),
    Mutant(
        "driver.library-matches-module",
        "upgraded without a reboot, as nvidia-smi says",
        with_two_gpus,
        [
            text("/proc/driver/nvidia/version", "535.261.03", "535.247.01"),
            stdout("nvidia-smi-xml", None, MISMATCH),
            Edit(("commands", "nvidia-smi-xml", "rc"), None, 18),
        ],
        skips=("gpu.count", "gpu.persistence"),
    ),
    Mutant(
        "driver.closure",
        "one library of another version",
        driver_node,
        [stdout("dpkg-packages", "libcuda1\t535.261.03-1", "libcuda1\t535.247.01-1")],
    ),
    Mutant(
        "driver.closure",
        "one package half configured",
        driver_node,
        [
            stdout(
                "dpkg-packages",
                "nvidia-kernel-dkms\t535.261.03-1\tamd64\thold ok installed",
                "nvidia-kernel-dkms\t535.261.03-1\tamd64\thold ok half-configured",
            )
        ],
    ),
    Mutant(
        "driver.held",
        "one hold removed",
        driver_node,
        [
            stdout(
                "dpkg-packages",
                "libnvidia-ml1\t535.261.03-1\tamd64\thold",
                "libnvidia-ml1\t535.261.03-1\tamd64\tinstall",
            )
        ],
    ),
    Mutant(
        "driver.origin",
        "a package of NVIDIA's repository, of another version and not held",
        driver_node,
        [stdout("dpkg-packages", "libnvidia-pkcs11", f"{FOREIGN}libnvidia-pkcs11")],
    ),
    Mutant(
        "driver.origin",
        "a package of nobody known",
        driver_node,
        [
            stdout(
                "dpkg-packages",
                "libnvidia-pkcs11",
                f"{FOREIGN.replace(NVIDIA, 'Me <me@example.org>')}libnvidia-pkcs11",
            )
        ],
    ),
    Mutant(
        "driver.nouveau",
        "nouveau loaded",
        with_two_gpus,
        [text("/proc/modules", "nvidia_uvm", "nouveau 2457600 0 - Live 0x0000000000000000\nnvidia_uvm")],
    ),
    Mutant(
        "driver.nouveau",
        "nouveau not blacklisted",
        driver_node,
        [text("/etc/modprobe.d/nvidia-blacklists-nouveau.conf", "blacklist nouveau", "#blacklist nouveau")],
        becomes=WARN,
    ),
    Mutant(
        "gpu.count",
        "the driver has one GPU less than the bus",
        with_two_gpus,
        [stdout("nvidia-smi-xml", "<attached_gpus>2<", "<attached_gpus>1<")],
    ),
    Mutant(
        "gpu.persistence",
        "persistence mode off on one GPU",
        with_two_gpus,
        [stdout("nvidia-smi-xml", "<persistence_mode>Enabled", "<persistence_mode>Disabled")],
    ),
    Mutant(
        "gpu.persistence",
        "persistence daemon not active",
        with_two_gpus,
        [stdout("systemctl-units", "ActiveState=active\nSubState=running", "ActiveState=inactive\nSubState=dead")],
        becomes=WARN,
    ),
    Mutant(
        "node.units-failed",
        "a failed unit",
        driver_node,
        [stdout("systemctl-failed", None, "ssh.service loaded failed failed OpenBSD Secure Shell server\n")],
    ),
]

# Data without which a check cannot say anything: it must be an error, whatever was good before.
MISSING: dict[str, list[tuple[Base, list[Edit]]]] = {
    "gpu.present": [(with_two_gpus, [text("/sys/bus/pci/devices/", None, None)])],
    "driver.module-built": [
        (driver_node, [not_run("uname")]),
        (driver_node, timed_out("modinfo")),
        (driver_node, timed_out("find-modules")),
        (driver_node, [not_run("dpkg-kernels")]),
    ],
    "driver.module-loaded": [
        (with_two_gpus, [Edit(("files", "/proc/driver/nvidia/version"), None, "garbage\n")]),
        (with_two_gpus, [text("/sys/bus/pci/devices/", None, None)]),
    ],
    "driver.library-matches-module": [(with_two_gpus, timed_out("ldconfig"))],
    "driver.closure": [(driver_node, [not_run("dpkg-packages")]), (driver_node, timed_out("dpkg-packages"))],
    "driver.held": [(driver_node, [stdout("dpkg-packages", None, "cut in the mid")])],
    "driver.origin": [(driver_node, [Edit(("commands", "dpkg-packages", "truncated"), None, True)])],
    "driver.nouveau": [
        (driver_node, [Edit(("files", "/proc/modules"), None, "garbage\n")]),
        (driver_node, [not_run("dpkg-packages")]),
    ],
    "gpu.count": [
        (with_two_gpus, timed_out("nvidia-smi-xml")),
        (with_two_gpus, [stdout("nvidia-smi-xml", "</nvidia_smi_log>", "")]),
        (with_two_gpus, [Edit(("commands", "nvidia-smi-xml", "rc"), None, 127)]),
    ],
    "gpu.persistence": [
        (with_two_gpus, [stdout("nvidia-smi-xml", "<persistence_mode>Enabled</persistence_mode>", "")]),
        (with_two_gpus, timed_out("systemctl-units")),
    ],
    "node.units-failed": [
        (driver_node, timed_out("systemctl-failed")),
        (driver_node, [text("/run/systemd/system/", None, None)]),
    ],
}

# A host that could not be reached has no bundle, and so nothing to edit: the report says it for the check.
OF_THE_REPORT = {"node.reachable"}


def moved(before: Mapping[str, Status], after: Mapping[str, Status]) -> dict[str, Status]:
    return {check: status for check, status in after.items() if status is not before[check]}


def test_the_good_node_with_gpus_passes_every_check() -> None:
    assert verdicts(with_two_gpus()) == dict.fromkeys((check.id for check in registry), PASS)


def test_the_node_without_a_gpu_is_judged_as_far_as_it_can_be() -> None:
    assert verdicts(driver_node()) == {
        "node.reachable": PASS,
        "gpu.present": ERROR,
        "driver.module-built": PASS,
        "driver.module-loaded": SKIP,
        "driver.library-matches-module": SKIP,
        "driver.closure": PASS,
        "driver.held": PASS,
        "driver.origin": PASS,
        "driver.nouveau": PASS,
        "gpu.count": SKIP,
        "gpu.persistence": SKIP,
        "node.units-failed": PASS,
    }


def test_a_node_meant_to_have_no_gpu_is_skip_for_all_that_needs_one() -> None:
    found = verdicts(driver_node(), Expectation(gpus=0))
    assert {check for check, status in found.items() if status is SKIP} == {
        "gpu.present",
        "driver.module-loaded",
        "driver.library-matches-module",
        "gpu.count",
        "gpu.persistence",
    }
    assert ERROR not in found.values()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.check}: {mutant.name}")
def test_mutant_turns_its_check_and_nothing_else(mutant: Mutant) -> None:
    before = verdicts(mutant.base(), mutant.expect)
    after = verdicts(apply(mutant.base(), mutant.edits), mutant.expect)
    assert before[mutant.check] is PASS
    assert moved(before, after) == {mutant.check: mutant.becomes, **dict.fromkeys(mutant.skips, SKIP)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.check}: {mutant.name}")
def test_mutant_is_told_with_a_remedy(mutant: Mutant) -> None:
    found = findings(apply(mutant.base(), mutant.edits), mutant.expect)
    (told,) = [finding for finding in found if finding.check == mutant.check and finding.status is mutant.becomes]
    assert told.remedy
    assert told.message


@pytest.mark.parametrize(
    ("check", "base", "edits"), [(check, *case) for check, cases in MISSING.items() for case in cases]
)
def test_missing_data_is_an_error_with_its_reason(check: str, base: Base, edits: list[Edit]) -> None:
    assert verdicts(base())[check] is PASS
    told = [finding for finding in findings(apply(base(), edits)) if finding.check == check]
    assert ERROR in {finding.status for finding in told}
    assert FAIL not in {finding.status for finding in told}
    assert all(finding.message for finding in told)


@pytest.mark.parametrize("base", [driver_node, with_two_gpus])
@pytest.mark.parametrize("part", ["commands", "files"])
def test_nothing_gets_better_by_missing_data(base: Base, part: str) -> None:
    """Take each answer out of the bundle in turn: what did not pass before does not pass after."""
    before = verdicts(base())
    for key in base()[part]:
        after = verdicts(apply(base(), [Edit((part, key), None, None if part == "files" else GARBLED)]))
        assert not [check for check, status in moved(before, after).items() if status is PASS], key


GARBLED = {
    "argv": ["tool"],
    "rc": 124,
    "stdout": "",
    "stderr": "killed",
    "seconds": 30.0,
    "timed_out": True,
    "truncated": False,
}


def test_a_host_out_of_reach_has_no_verdict_but_that() -> None:
    (finding,) = unreachable("far", "no route to host", 1.0).findings
    assert (finding.check, finding.status) == ("node.reachable", ERROR)


def table() -> dict[str, tuple[int, int, int]]:
    """Check id to its number of passing fixtures, mutants and missing-data cases."""
    passing = [verdicts(driver_node()), verdicts(with_two_gpus())]
    return {
        check.id: (
            sum(found[check.id] is PASS for found in passing),
            sum(mutant.check == check.id for mutant in MUTANTS) + (check.id in OF_THE_REPORT),
            len(MISSING.get(check.id, ())) + (check.id in OF_THE_REPORT),
        )
        for check in registry
    }


def print_table(rows: Mapping[str, tuple[int, int, int]], stream: TextIO | None = None) -> None:
    print(f"\n{'check':32}{'passes':>8}{'mutants':>9}{'missing':>9}", file=stream)
    for check, numbers in rows.items():
        print(f"{check:32}{numbers[0]:8}{numbers[1]:9}{numbers[2]:9}", file=stream)


def test_every_check_has_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table()
    with capsys.disabled():
        print_table(rows)
    assert {check: numbers for check, numbers in rows.items() if 0 in numbers} == {}
