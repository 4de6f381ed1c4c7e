"""Checks on unattended changes of a node: upgrades, other installers, pending reboots, second copies, missing tools."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from gpunode.checks.compare import at_most, failed, passed, skipped, undetermined, warned
from gpunode.checks.driver import loaded_driver, same_version
from gpunode.checks.driver_modes import fits
from gpunode.checks.gpu import SITE
from gpunode.checks.gpus import model_of
from gpunode.checks.links import gpus_of
from gpunode.checks.machine import is_container, platforms
from gpunode.checks.packages import ROLE, driver_packages, present
from gpunode.checks.registry import CheckResult, Expectation, Skip, Status, Undetermined, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.driver import LibraryFile
from gpunode.facts.modules import LoadedDriver
from gpunode.facts.node import NodeFacts
from gpunode.facts.pci import PciDevice
from gpunode.facts.updates import AutomaticUpdates
from gpunode.text import counted, listed, moment

DRIVER_LIBRARIES = ("libcuda", "libnvidia-ml")
STACK_LIBRARIES = ("libnccl", "libcudnn")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
REINSTALL = "apt-get install --reinstall $(dpkg -S {file} | cut -d: -f1), or dnf reinstall $(rpm -qf {file})"
UPDATE_AGE = Threshold(
    "node.security-updates.age", 14, "days", "A security update that waits longer warns.", source="our choice"
)
FOREIGN_WORDS = {
    "driver-runfile": "NVIDIA's .run installer put a driver here",
    "driver-runfile-log": "NVIDIA's .run installer ran here",
    "cuda-runfile": "NVIDIA's .run installer put CUDA here",
    "nvidia-docker": "nvidia-docker, which the container toolkit replaced, is here",
}


@registry.check(
    "driver.expected",
    needs=("loaded_driver", "pci"),
    needs_gpu=True,
    means="The loaded driver is the one that the site file expects, and valid for this GPU model and platform: "
    "branch, flavour of the module, documented minimum versions, and a CUDA that supports the architecture.",
    remedy=f"Install the driver that fits ({ROLE}), and reboot.",
    state="drain",
    actions=("run_role:nvidia_driver:nvidia_driver_install", "restart_os"),
)
def driver_expected(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
    loaded = loaded_driver(node)
    if expect.driver is not None and not f"{loaded.version}.".startswith(f"{expect.driver}."):
        message = f"driver {loaded.version} is loaded, {expect.driver} expected"
        yield failed(message, expected=expect.driver, measured=loaded.version, source=SITE)
        return
    verdicts = {_fits(loaded, device, node): component for component, device in gpus_of(node)}
    for verdict, component in verdicts.items():
        yield verdict if verdict.status in (Status.PASS, Status.SKIP) else verdict.at(component)


def _fits(loaded: LoadedDriver, device: PciDevice, node: NodeFacts) -> CheckResult:
    match = model_of(device)
    if match is None:
        return skipped(f"the catalog does not have {device.pci_id} (gpu.model reports it)")
    return fits(loaded, match.gpus, platforms(node))


@registry.check(
    "node.versions",
    needs=("kernels", "packages"),
    means="The running kernel and the packages have the versions in the site file (kernel and packages in the "
    "file of --expect).",
    remedy="Install the expected versions (gpunode provision -i INVENTORY -l HOST), or write the new ones into "
    "the file; a kernel is in use after a reboot.",
    state="observe",
    actions=("fix_configuration", "restart_os"),
)
def versions(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
    kernel = node.running_kernel
    if kernel is None:
        raise Undetermined("the running kernel is unknown")
    wrong = list[CheckResult]()
    if expect.kernel is not None and not re.match(rf"{re.escape(expect.kernel)}(?![0-9A-Za-z])", kernel):
        message = f"kernel {kernel} runs, {expect.kernel} expected"
        wrong.append(failed(message, expected=expect.kernel, measured=kernel, source=SITE))
    for name, version in sorted((expect.packages or {}).items()):
        vers = sorted({package.version for package in node.packages or () if package.name == name and present(package)})
        if vers != [version]:
            state = f"{name} {listed(vers)} is installed" if vers else f"{name} is not installed"
            wrong.append(
                failed(f"{state}, {version} expected", expected=version, measured=listed(vers) or None, source=SITE)
            )
    number = len(expect.packages or ())
    packages = f"; {counted(number, 'package')} as expected" if number else ""
    yield from wrong or [passed(f"kernel {kernel}{packages}", measured=kernel)]


@registry.check(
    "driver.signed",
    needs=("kernels", "module_files"),
    means="With secure boot or kernel lockdown, the module on disk is signed: the kernel loads no other.",
    remedy="Sign the module with a key enrolled in the firmware (mokutil --import), install signed modules, or "
    "disable secure boot.",
    state="drain",
    actions=("fix_configuration",),
)
def signed(node: NodeFacts) -> Iterator[CheckResult]:
    strict = node.lockdown not in (None, "none")
    if not node.module_files:
        raise Skip("no NVIDIA module is on disk (driver.module-built reports the cause)")
    reason = node.gap("secure_boot")
    if reason is not None and is_container(node):
        raise Skip("in a container the firmware is the host's")
    if reason is not None:
        raise Undetermined(reason)
    matter = {kernel.release for kernel in node.kernels or () if kernel.running or kernel.newest}
    matter |= {node.next_boot.kernel} if node.next_boot is not None else set()
    unsigned = [module.path for module in node.module_files if module.kernel in matter and not module.signed]
    if not node.secure_boot and not strict:
        yield passed("secure boot is off: the module need not be signed", measured=not unsigned)
    elif unsigned:
        why = "secure boot is on" if node.secure_boot else f"the kernel is locked down ({node.lockdown})"
        yield failed(f"{why}, and not signed: {listed(unsigned)}", expected=True, measured=False)
    else:
        yield passed("the module is signed", expected=True, measured=True)


@registry.check(
    "driver.libraries",
    needs=("libraries", "loaded_driver"),
    means="All copies of libcuda and libnvidia-ml in the library paths have the driver's version, and no library of "
    "the driver is empty. Another one (of a .run installer, or in /usr/local/lib) makes some programs fail.",
    remedy="Find the package of the other copy (dpkg -S FILE, rpm -qf FILE), remove it, and run ldconfig.",
    state="drain",
    actions=("fix_configuration",),
)
def driver_libraries(node: NodeFacts) -> Iterator[CheckResult]:
    if not any(library.name in DRIVER_LIBRARIES for library in node.libraries or ()):
        raise Skip("no NVIDIA driver library is installed")
    empty = sorted({library.file for library in node.libraries or () if library.size == 0 and _of_driver(library)})
    if empty:
        yield failed(
            f"{counted(len(empty), 'library', 'libraries')} of the driver with a size of 0 bytes: {listed(empty)}",
            expected=0,
            measured=len(empty),
            unit="empty files",
            remedy=f"Free disk space and reinstall the packages: {REINSTALL.format(file=empty[0])}. A file of no "
            "package was left by a container runtime: remove it.",
        )
        return
    for name in DRIVER_LIBRARIES:
        copies = _copies([library for library in node.libraries or () if library.name == name])
        if copies:
            yield _one_driver_library(node, copies).at(name)


def _of_driver(library: LibraryFile) -> bool:
    return library.name not in STACK_LIBRARIES


def _copies(paths: list[LibraryFile]) -> list[LibraryFile]:
    """Return one entry for each file: several paths may lead to one (links, /lib and /usr/lib)."""
    files: dict[str, LibraryFile] = {}
    for path in paths:
        other = files.get(path.file, path)
        together = {"used": other.used or path.used, "in_cache": other.in_cache or path.in_cache}
        files[path.file] = other.model_copy(update=together)
    return list(files.values())


def _one_driver_library(node: NodeFacts, copies: list[LibraryFile]) -> CheckResult:
    used = next((copy for copy in copies if copy.used), None)
    loaded = node.loaded_driver.version if node.loaded_driver else None
    expected = used.version if used else loaded or copies[0].version
    others = [
        copy
        for copy in copies
        if copy is not used and (copy.version is None or expected is None or not same_version(copy.version, expected))
    ]
    if others:
        words = listed([f"{copy.file} ({copy.version or 'version unknown'})" for copy in others], most=3)
        return CheckResult(
            Status.FAIL if any(copy.in_cache for copy in others) else Status.WARN,
            f"{counted(len(others), 'copy', 'copies')} in addition to the driver's: {words}",
            expected=expected,
            measured=listed(sorted({copy.version or "unknown" for copy in copies})),
        )
    return passed(f"one version: {expected}", expected=expected, measured=expected)


@registry.check(
    "library.copies",
    needs=("libraries",),
    means="If the host has NCCL or cuDNN, each has only one version. Containers have their own.",
    remedy="Remove unused copies, and run ldconfig; ldd PROGRAM shows the one that a program uses.",
    state="observe",
    actions=("fix_configuration",),
)
def stack_libraries(node: NodeFacts) -> Iterator[CheckResult]:
    present = [name for name in STACK_LIBRARIES if any(library.name == name for library in node.libraries or ())]
    if not present:
        yield passed("the host has no NCCL and no cuDNN")
    for name in present:
        versions: dict[str, str] = {}
        for library in node.libraries or ():
            if library.name == name:
                versions.setdefault(library.version or "unknown version", library.file)
        words = listed([f"{version} ({file})" for version, file in sorted(versions.items())], most=4)
        yield at_most(len(versions), 1, words, fault=Status.WARN, component=name, unit="versions")


@registry.check(
    "driver.foreign-installs",
    needs=("foreign_installs",),
    means="Driver and CUDA were installed only by the package manager: files of a .run installer are partly "
    "overwritten by packages, and partly found by programs.",
    remedy="Run nvidia-uninstall and cuda-uninstaller to remove .run installations, apt purge nvidia-docker2 to "
    f"remove nvidia-docker2. Then: {ROLE}.",
    state="observe",
    actions=("fix_configuration", "run_role:nvidia_driver:nvidia_driver_install"),
)
def foreign_installs(node: NodeFacts) -> Iterator[CheckResult]:
    if not node.foreign_installs:
        yield passed("no trace of another installer", expected=0, measured=0)
        return
    traces = [trace for trace in node.foreign_installs if not trace.kind.endswith("-log")]
    texts = [
        f"{FOREIGN_WORDS.get(trace.kind, trace.kind)} ({trace.path}{', ' + trace.note if trace.note else ''})"
        for trace in traces or node.foreign_installs
    ]
    # A log may be years old and the driver removed: not even a warning if packages are installed.
    yield at_most(len(traces), 0, listed(texts, most=3), fault=Status.WARN, unit="traces")


@registry.check(
    "driver.automatic-updates",
    needs=("automatic_updates", "packages"),
    means="No automatic upgrade can change the driver under a running job, or reboot the node.",
    remedy="Hold the driver's packages and exclude them from unattended upgrades: role nvidia_driver, tag "
    'nvidia_driver_configure. Unattended-Upgrade::Automatic-Reboot "false" prevents reboots.',
    state="observe",
    actions=("run_role:nvidia_driver:nvidia_driver_configure",),
)
def automatic_updates(node: NodeFacts) -> Iterator[CheckResult]:
    updates = node.automatic_updates
    if updates is None:
        yield passed("no automatic upgrades")
        return
    if not updates.enabled:
        yield passed(f"{updates.tool} is installed and switched off", measured=False)
        return
    packages = {package.name: package for package in driver_packages(node).of_main}
    loose = sorted(name for name, package in packages.items() if not package.held and not _kept_back(name, updates))
    if loose:
        message = (
            f"{updates.tool} is on and may upgrade {counted(len(loose), 'package')} of the driver: {listed(loose)}"
        )
        yield warned(message, expected=0, measured=len(loose), unit="packages")
    elif updates.reboots:
        yield warned(f"{updates.tool} reboots the node automatically", expected=False, measured=True)
    else:
        yield passed(f"{updates.tool} is enabled and excludes the driver")


def _kept_back(name: str, updates: AutomaticUpdates) -> bool:
    """Return True if a pattern excludes the package; apt's are regular expressions from the beginning, dnf's shell
    patterns."""
    for pattern in updates.kept_back:
        if updates.tool != "unattended-upgrades":
            if fnmatchcase(name, pattern):
                return True
            continue
        if _REPEATED_GROUP.search(pattern):
            continue  # Such a pattern is not plausible, and matching it might not end.
        try:
            if re.match(pattern, name):
                return True
        except re.error:
            continue  # apt rejects it as well.
    return False


@registry.check(
    "node.failed-reverts",
    needs=("failed_reverts",),
    means="No change of SSH, accounts or the firewall is half reverted: the node reverts a change that no new login "
    "confirms, and tries a revert that fails (a full disk) again every minute and at boot.",
    remedy="Remove the cause that the message names; the node then reverts the change within a minute. "
    "journalctl -u 'gpunode-guard-*' lists the attempts.",
    state="drain",
    actions=("fix_configuration",),
)
def failed_reverts(node: NodeFacts) -> Iterator[CheckResult]:
    reverts = node.failed_reverts or ()
    for revert in reverts:
        message = f"the change {revert.change} could not be reverted: {listed(revert.reasons)}"
        yield failed(message, expected=0, measured=len(revert.reasons))
    if not reverts:
        yield passed("no change waits for its revert", expected=0, measured=0)


@registry.check(
    "node.security-updates",
    needs=("pending_updates",),
    means="No security update is pending for long for packages excluded from automatic upgrades (driver, "
    "container toolkit, engine, kernel), as far as the archive marks them (suites with a name ending in -security).",
    remedy="Install it when the node is idle: roles nvidia_driver, docker and nvidia_container_toolkit move their "
    "packages, apt-get install --only-upgrade PACKAGE others.",
    state="observe",
    actions=("fix_configuration",),
    thresholds=(UPDATE_AGE,),
)
def security_updates(node: NodeFacts) -> Iterator[CheckResult]:
    if node.pending_updates is None:
        raise Skip("the node records no pending updates (role updates)")
    now, old, unknown = moment(node.collected_at), [], []
    for update in node.pending_updates:
        since = moment(update.since)
        if since is None or now is None:
            unknown.append(update.package)
        elif (days := (now - since).days) > UPDATE_AGE.value:
            old.append(f"{update.package} {update.version} ({days} days)")
    if unknown:
        yield undetermined(f"the age of pending updates is unknown: {listed(unknown)}")
    elif old:
        message = f"{counted(len(old), 'security update')} pending for held packages: {listed(old)}"
        yield warned(message, expected=UPDATE_AGE.value, measured=len(old), unit="updates")
    else:
        waiting = len(node.pending_updates)
        yield passed(f"{counted(waiting, 'security update')} waiting, none for long", measured=waiting)


@registry.check(
    "host.tools",
    needs=("tools",),
    means="The programs that the role gpu_tools installed exist: profilers and monitors that are needed when a "
    "problem occurs.",
    remedy="Install them again: role gpu_tools, tag gpu_tools_install.",
    state="observe",
    actions=("run_role:gpu_tools:gpu_tools_install",),
    category="host",
)
def tools(node: NodeFacts) -> Iterator[CheckResult]:
    if node.tools is None:
        raise Skip("the role gpu_tools installed no programs")
    missing = sorted(name for name, path in node.tools.items() if path is None)
    if missing:
        yield warned(f"missing: {listed(missing, 8)}", expected=len(node.tools), measured=len(missing))
    elif not node.tools:
        yield skipped("the role gpu_tools recorded no program")
    else:
        yield passed(f"{counted(len(node.tools), 'program')} of the role gpu_tools found", measured=len(node.tools))
