# ruff: noqa: PLR0913, PLR0917, RUF005, SIM105, TRY301
# ruff: noqa: PTH110, PTH112, PTH115, PTH116, PTH118, PTH123, PTH208
# ruff: noqa: UP006, UP017, UP031, UP035, UP045
"""The probe: looks at one node, changes nothing, prints one bundle (``gpunode.bundle/1``) to stdout.

Runs as ``python3 -`` on any Linux with Python 3.6 or later, as root or not; the standard library is all it needs.
It leaves nothing behind: no copy of itself, no temporary file, no process, and it does not load the NVIDIA module.

Order: sources that only read (/proc, /sys, the package database) run first and side by side. NVIDIA's tools follow,
one after another, and only where the module is loaded already, for ``nvidia-smi`` run as root would load it.
After one that does not come back in time no other is started.
"""

import datetime
import json
import os
import pwd
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Pattern, Set, Tuple

Answer = Dict[str, Any]

SCHEMA = "gpunode.bundle/1"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMMAND_S = 15.0
NVIDIA_TOOL_S = 30.0
PASSIVE_S = 20.0
TOTAL_S = 75.0
OUTPUT_BYTES = 4 * 1024 * 1024
FILE_BYTES = 1024 * 1024
HOLDERS_S = 5.0
KILL_WAIT_S = 2.0
DRAIN_S = 0.5

# One row per source that is a plain file, a plain folder or a plain command. What depends on another source's answer
# is a function in PASSIVE below.
FILES = (
    "/etc/os-release",
    "/usr/lib/os-release",
    "/proc/cmdline",
    "/proc/modules",
    "/proc/sys/kernel/tainted",
    "/proc/sys/kernel/modules_disabled",
    "/proc/driver/nvidia/version",
    "/sys/module/nvidia/version",
    "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c",
    "/etc/dnf/plugins/versionlock.list",
    "/etc/dnf/versionlock.toml",
    "/etc/yum/pluginconf.d/versionlock.list",
    "/etc/gpunode/lab-node",
)
FOLDERS = (
    "/run/systemd/system/",
    "/sys/firmware/",
    "/sys/firmware/efi/efivars/",
)
COMMANDS = (
    ("uname", ["uname", "-srm"]),
    ("dkms-status", ["dkms", "status"]),
    ("systemd-detect-virt", ["systemd-detect-virt"]),
    ("systemctl-failed", ["systemctl", "list-units", "--failed", "--all", "--plain", "--no-legend", "--no-pager"]),
)
NVIDIA_TOOLS = (("nvidia-smi-xml", ["nvidia-smi", "-q", "-x"]),)

UNITS = (
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "nvidia-imex.service",
    "nvidia-dcgm.service",
    "dcgm.service",
    "nvidia-cdi-refresh.service",
    "nvidia-cdi-refresh.path",
    "docker.service",
    "containerd.service",
)
UNIT_PROPERTIES = "Id,LoadState,ActiveState,SubState,UnitFileState"
DPKG_FIELDS = ("Package", "Version", "Architecture", "Status", "source:Package", "source:Version", "Maintainer")
RPM_FIELDS = ("NAME", "VERSION", "RELEASE", "ARCH", "SOURCERPM", "VENDOR", "PACKAGER", "EPOCHNUM")
DISK_PATHS = ("/", "/boot", "/var", "/usr")
MODPROBE_FOLDERS = (
    "/etc/modprobe.d/",
    "/run/modprobe.d/",
    "/usr/local/lib/modprobe.d/",
    "/usr/lib/modprobe.d/",
    "/lib/modprobe.d/",
)

GPU_STACK = re.compile(
    r"nvidia|cuda|nccl|cudnn|cublas|dcgm|datacenter-gpu|libnv|nvlsm|nscq|nvsdm|tensorrt|gdrcopy|gdrdrv"
    r"|glx-alternative|glx-diversions|update-glx|^dkms\t"
)
GPU_STACK_AND_KERNELS = re.compile(GPU_STACK.pattern + r"|^kernel(-|\t)")
# The GPU's own module under its names: nvidia, nvidia-current (Debian), nvidia-tesla-470, nvidia-legacy-390xx,
# nvidia-current-open. Not nvidia-uvm, nvidia-drm, nvidia-wmi-ec-backlight.
GPU_MODULE = re.compile(r"/nvidia([-_](current|tesla|legacy|open|srv|server|\d+(xx)?))*\.ko(\.(gz|xz|zst))?$")
GPU_DEVICE = re.compile(r"/dev/nvidia(\d|ctl|-uvm|-caps/|-modeset)")
USERINFO = re.compile(r"://[^/\s@]{1,256}@")
SECRET = re.compile(
    r"(?i)((?:passw(?:or)?d|passwd|passphrase|secret|token|api[-_]?key|credential)[\w.-]{0,40}\s{0,3}[=:]\s{0,3})"
    r"([^\s&;,]+)"
)


def text_of(data: bytes) -> str:
    """Decode bytes; what is no UTF-8 is shown as ``\\xNN``, so that the bundle is JSON whatever comes."""
    return data.decode("utf-8", "backslashreplace")


def scrub(text: str) -> str:
    """Cover passwords: user information in URLs, and the values of settings that are named as secrets."""
    return SECRET.sub(r"\1***", USERINFO.sub("://***@", text))


def names_in(folder: str) -> List[str]:
    """The sorted names in a folder, as text."""
    return sorted(text_of(os.fsencode(name)) for name in os.listdir(folder))


class Probe:
    """One look at one node. ``root`` and ``path`` are other than the defaults only in tests."""

    def __init__(
        self,
        root: str = "/",
        path: str = PATH,
        command_s: float = COMMAND_S,
        nvidia_tool_s: float = NVIDIA_TOOL_S,
        passive_s: float = PASSIVE_S,
    ) -> None:
        self.root = root
        self.environment = {"PATH": path, "LC_ALL": "C", "LANG": "C", "HOME": "/"}
        self.command_s = command_s
        self.nvidia_tool_s = nvidia_tool_s
        self.passive_s = passive_s
        self.deadline = time.monotonic() + TOTAL_S
        self.lock = threading.Lock()
        self.closed = False
        self.commands: Dict[str, Answer] = {}
        self.files: Dict[str, Optional[str]] = {}
        self.unreadable: Dict[str, str] = {}
        self.groups: Set[int] = set()

    # Reading

    def real(self, path: str) -> str:
        """Where ``path`` of the node lies under this probe's root."""
        return os.path.join(self.root, path.lstrip("/"))

    def read(self, path: str, wanted: Optional[Pattern[str]] = None) -> Optional[str]:
        """Record a file's text and return it; None, with the reason kept, where it cannot be read.

        A file that does not exist has no reason. With ``wanted``, a text in which it is not found is not recorded.
        """
        try:
            descriptor = os.open(self.real(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as stream:
                if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                    raise OSError(0, "is a pipe")
                data = stream.read(FILE_BYTES + 1) or b""
            if len(data) > FILE_BYTES:
                raise OSError(0, "larger than %d bytes" % FILE_BYTES)
        except OSError as err:
            self.note_file(path, None, self.reason(err))
            return None
        text = text_of(data)
        if wanted is None or wanted.search(text):
            self.note_file(path, text, None)
        return text

    def folder(self, path: str) -> Optional[List[str]]:
        """Record the names in a folder (``path`` ends in ``/``) and return them; None as ``read`` does."""
        try:
            names = names_in(self.real(path))
        except OSError as err:
            self.note_file(path, None, self.reason(err))
            return None
        self.note_file(path, "".join(name + "\n" for name in names), None)
        return names

    @staticmethod
    def reason(err: OSError) -> Optional[str]:
        """Why a path could not be read; None where it just is not there."""
        if isinstance(err, (FileNotFoundError, NotADirectoryError)):
            return None
        return err.strerror or str(err)

    def note_file(self, path: str, text: Optional[str], reason: Optional[str]) -> None:
        """Put one file's text into the bundle, or the reason why there is none."""
        with self.lock:
            if not self.closed:
                self.files[path] = text
                if reason:
                    self.unreadable[path] = reason

    def note_command(
        self,
        key: str,
        argv: List[str],
        rc: int,
        stdout: str,
        stderr: str,
        seconds: float,
        timed_out: bool = False,
        truncated: bool = False,
    ) -> None:
        """Put one command's answer into the bundle."""
        with self.lock:
            if not self.closed:
                self.commands[key] = {
                    "argv": argv,
                    "rc": rc,
                    "stdout": stdout,
                    "stderr": stderr,
                    "seconds": round(seconds, 3),
                    "timed_out": timed_out,
                    "truncated": truncated,
                }

    # Running

    def run(
        self, key: str, argv: List[str], limit_s: Optional[float] = None, keep: Optional[Pattern[str]] = None
    ) -> Optional[Answer]:
        """Run a command, record it, and return what is recorded. With ``keep``, only matching lines are kept.

        It has a process group of its own, which is killed when the time or the output is more than allowed. A process
        that cannot be killed (state D) is left alone, so that it costs its limit and no more.
        """
        started = time.monotonic()
        limit_s = max(0.0, min(limit_s or self.command_s, self.deadline - started))
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env=self.environment,
                close_fds=True,
                start_new_session=True,
            )
        except OSError as err:
            rc = 127 if isinstance(err, FileNotFoundError) else 126
            message = "%s: %s" % (argv[0], err.strerror or err)
            self.note_command(key, argv, rc, "", message, time.monotonic() - started)
            return self.commands.get(key)
        with self.lock:
            self.groups.add(process.pid)
        output, why = self.drain(process, started + limit_s)
        left = self.kill(process)
        with self.lock:
            self.groups.discard(process.pid)
        stdout, stderr = [scrub(text_of(data)) for data in output]
        rc = process.returncode
        if rc is None or why == "timeout":
            rc = 124
        elif rc < 0:
            rc = 128 - rc
        if why == "timeout":
            stderr = stderr[:2000] + "\nkilled: no answer within %g s" % limit_s
        if left:
            stderr += "\nstill there after being killed: state %s" % left
        if keep is not None:
            stdout = "".join(line + "\n" for line in stdout.splitlines() if keep.search(line))
        seconds = time.monotonic() - started
        self.note_command(key, argv, rc, stdout, stderr.strip(), seconds, why == "timeout", why == "flood")
        return self.commands.get(key)

    @staticmethod
    def drain(process: "subprocess.Popen[bytes]", deadline: float) -> Tuple[List[bytes], str]:
        """Read both pipes to their end. Return ([stdout, stderr], why it ended early: "timeout", "flood" or "").

        A child left in the background may hold the pipes open: once the command itself is gone they are read for a
        moment longer and then closed.
        """
        pipes = [stream.fileno() for stream in (process.stdout, process.stderr) if stream]
        output = {number: bytearray() for number in pipes}
        open_pipes = list(pipes)
        why = ""
        gone_at = None
        while open_pipes:
            now = time.monotonic()
            if gone_at is None and process.poll() is not None:
                gone_at = now
            if gone_at is not None and now > gone_at + DRAIN_S:
                break
            if now >= deadline:
                why = "timeout" if gone_at is None else ""
                break
            ready = select.select(open_pipes, [], [], min(0.1, deadline - now))[0]
            for number in ready:
                data = os.read(number, 65536)
                if data:
                    output[number] += data
                else:
                    open_pipes.remove(number)
            if any(len(data) > OUTPUT_BYTES for data in output.values()):
                why = "flood"
                break
        if not why:
            why = await_end(process, deadline)
        return [bytes(output[number][:OUTPUT_BYTES]) for number in pipes], why

    @staticmethod
    def kill(process: "subprocess.Popen[bytes]") -> Optional[str]:
        """End the command's process group and close its pipes; return the state letter of one that stays, or None."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass  # The group is gone: nothing was left to kill.
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
        if await_end(process, time.monotonic() + KILL_WAIT_S) == "":
            return None
        try:
            with open("/proc/%d/stat" % process.pid, "rb") as stream:
                return text_of(stream.read().rpartition(b")")[2].split()[0])
        except (OSError, IndexError):
            return "unknown"

    def kill_all(self) -> None:
        """End every command that still runs; for the way out."""
        for group in list(self.groups):
            try:
                os.killpg(group, signal.SIGKILL)
            except OSError:
                continue  # It ended by itself.

    # The whole

    def collect(self) -> Answer:
        """Look at everything and return the bundle."""
        started = datetime.datetime.now(datetime.timezone.utc)
        threads = []
        for key, argv in COMMANDS:
            threads.append((key, threading.Thread(target=self.run, args=(key, argv))))
        for source in PASSIVE:
            threads.append((source.__name__, threading.Thread(target=source, args=(self,))))
        for _, thread in threads:
            thread.daemon = True
            thread.start()
        end = time.monotonic() + self.passive_s
        for _, thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        nvidia_tools(self)
        with self.lock:
            self.closed = True
        stuck = [name for name, thread in threads if thread.is_alive()]
        return self.bundle(started, stuck)

    def bundle(self, started: datetime.datetime, stuck: List[str]) -> Answer:
        """The document, with a record of what the probe itself could not read."""
        lab = "/etc/gpunode/lab-node"
        simulated = self.files.get(lab) is not None or lab in self.unreadable
        problems = ["%s: %s" % item for item in sorted(self.unreadable.items())]
        problems += ["%s: not finished within %g s" % (name, self.passive_s) for name in stuck]
        commands = dict(self.commands)
        commands["probe-read"] = {
            "argv": ["(probe)", "read files and folders"],
            "rc": 1 if problems else 0,
            "stdout": "",
            "stderr": "\n".join(problems),
            "seconds": 0.0,
            "timed_out": bool(stuck),
            "truncated": False,
        }
        return {
            "schema": SCHEMA,
            "host": text_of(os.fsencode(socket.gethostname())),
            "collected_at": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "simulated": simulated,
            "commands": commands,
            "files": {path: None if text is None else scrub(text) for path, text in self.files.items()},
            "results": [],
        }


def await_end(process: "subprocess.Popen[bytes]", deadline: float) -> str:
    """Wait for a process; "" once it ended, "timeout" when the deadline came first."""
    try:
        process.wait(max(0.01, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "timeout"
    return ""


# Passive sources: each takes the probe, and records what it sees.


def plain_files(probe: Probe) -> None:
    """Every row of FILES and FOLDERS."""
    for path in FILES:
        probe.read(path)
    for path in FOLDERS:
        probe.folder(path)


def pci_functions(probe: Probe) -> None:
    """The names of all PCI functions, and the sysfs ``uevent`` of NVIDIA's: ids, class and driver in one file."""
    for slot in probe.folder("/sys/bus/pci/devices/") or []:
        probe.read("/sys/bus/pci/devices/%s/uevent" % slot, re.compile(r"(?m)^PCI_ID=10DE:"))


def kernels(probe: Probe) -> None:
    """Kernels with a folder in /lib/modules, the tree that each one's ``build`` leads to, and the owning packages."""
    paths = []
    for release in probe.folder("/lib/modules/") or []:
        modules = "/lib/modules/%s" % release
        probe.folder(modules + "/")
        probe.folder(modules + "/build/")
        paths.append("/boot/vmlinuz-" + release)
        for path in (modules + "/kernel", modules + "/build"):
            paths += [path, "/usr" + path]
    if paths and has_dpkg(probe):
        probe.run("dpkg-kernels", ["dpkg-query", "-S"] + paths)


def module_files(probe: Probe) -> None:
    """NVIDIA's modules on disk, and what modinfo says of the GPU's own one in each kernel."""
    found = probe.run("find-modules", ["find", "/lib/modules/", "-name", "nvidia*.ko*"])
    paths = [line for line in (found["stdout"] if found else "").splitlines() if GPU_MODULE.search(line)]
    if paths:
        probe.run("modinfo", ["modinfo"] + paths)


def has_dpkg(probe: Probe) -> bool:
    """True where dpkg is the node's package manager."""
    return os.path.exists(probe.real("/var/lib/dpkg/status"))


def packages(probe: Probe) -> None:
    """The GPU stack's packages. dpkg's status says what is held; for rpm the lock lists among FILES do."""
    if has_dpkg(probe):
        form = "\\t".join("${%s}" % field for field in DPKG_FIELDS) + "\\n"
        probe.run("dpkg-packages", ["dpkg-query", "-W", "-f", form], keep=GPU_STACK)
        return
    form = "\\t".join("%%{%s}" % field for field in RPM_FIELDS) + "\\n"
    probe.run("rpm-packages", ["rpm", "-qa", "--qf", form], keep=GPU_STACK_AND_KERNELS)


def library(probe: Probe) -> None:
    """The libnvidia-ml.so.1 that the linker finds, and the file that it leads to."""
    cache = probe.run("ldconfig", ["ldconfig", "-p"], keep=re.compile(r"\blibnvidia-ml\.so|\blibcuda\.so"))
    found = [line for line in (cache["stdout"] if cache else "").splitlines() if "libnvidia-ml.so.1 (" in line]
    if found:
        native = [line for line in found if "x86-64" in line or "AArch64" in line]
        path = (native or found)[0].rpartition("=> ")[2].strip()
        probe.run("readlink-libnvidia-ml", ["readlink", "-e", path])


def units(probe: Probe) -> None:
    """States of the GPU stack's units."""
    probe.run("systemctl-units", ["systemctl", "show", "-p", UNIT_PROPERTIES] + list(UNITS))


def modprobe_settings(probe: Probe) -> None:
    """Names of all modprobe configuration files, and the text of those that speak of nouveau or NVIDIA."""
    wanted = re.compile("nouveau|nvidia")
    for folder in MODPROBE_FOLDERS:
        for name in probe.folder(folder) or []:
            if name.endswith(".conf"):
                probe.read(folder + name, wanted)


def disk_space(probe: Probe) -> None:
    """Free space where packages and kernels are put."""
    paths = [path for path in DISK_PATHS if os.path.isdir(probe.real(path))]
    probe.run("df", ["df", "-Pk"] + paths)


def device_holders(probe: Probe) -> None:
    """Processes that hold /dev/nvidia*: one line each, ``pid, user, name, devices``, separated by tabs."""
    started = time.monotonic()
    lines, unseen, late = [], 0, False
    try:
        pids = [name for name in os.listdir(probe.real("/proc")) if name.isdigit()]
    except OSError as err:
        probe.note_command("device-holders", HOLDERS_ARGV, 1, "", "/proc: %s" % err.strerror, 0.0)
        return
    for pid in pids:
        if time.monotonic() > started + HOLDERS_S:
            late = True
            break
        devices = held_devices(probe.real("/proc/%s/fd" % pid))
        if devices is None:
            unseen += 1
        elif devices:
            lines.append("\t".join([pid] + owner(probe, pid) + [" ".join(devices)]))
    problems = []
    if unseen:
        problems.append("%d of %d processes belong to others and could not be looked into" % (unseen, len(pids)))
    if late:
        problems.append("not all processes were looked at within %g s" % HOLDERS_S)
    text = "".join(line + "\n" for line in lines)
    seconds = time.monotonic() - started
    probe.note_command("device-holders", HOLDERS_ARGV, 1 if problems else 0, text, "; ".join(problems), seconds)


HOLDERS_ARGV = ["(probe)", "read /proc/*/fd"]


def held_devices(folder: str) -> Optional[List[str]]:
    """GPU devices among the open files of a process; None where they may not be seen, [] where it is gone."""
    devices = set()
    try:
        for number in os.listdir(folder):
            try:
                target = os.readlink(os.path.join(folder, number))
            except OSError:
                continue  # Closed in the meantime.
            if GPU_DEVICE.match(target):
                devices.add(target)
    except PermissionError:
        return None
    except OSError:
        return []
    return sorted(devices)


def owner(probe: Probe, pid: str) -> List[str]:
    """[user, name] of a process, "?" for what cannot be seen. Tabs and line ends in a name become blanks."""
    user = name = "?"
    try:
        uid = os.stat(probe.real("/proc/%s" % pid)).st_uid
        user = str(uid)
        user = pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        pass  # The process is gone, or its number has no name: what is known so far stands.
    try:
        with open(probe.real("/proc/%s/comm" % pid), "rb") as stream:
            name = " ".join(text_of(stream.read(64)).split()) or "?"
    except OSError:
        pass  # Gone in the meantime.
    return [user, name]


PASSIVE = (
    plain_files,
    pci_functions,
    kernels,
    module_files,
    packages,
    library,
    units,
    modprobe_settings,
    disk_space,
    device_holders,
)


def nvidia_tools(probe: Probe) -> None:
    """NVIDIA's own tools, where a module is loaded that they can talk to."""
    modules = probe.files.get("/proc/modules") or ""
    if probe.files.get("/proc/driver/nvidia/version") is None and not re.search(r"(?m)^nvidia ", modules):
        return
    hung = None
    for key, argv in NVIDIA_TOOLS:
        if hung:
            probe.note_command(key, argv, 124, "", "not run: %s did not come back before it" % hung, 0.0, True)
            continue
        answer = probe.run(key, argv, probe.nvidia_tool_s)
        if answer and answer["timed_out"]:
            hung = key
    owners = threading.Thread(target=process_owners, args=(probe,))
    owners.daemon = True
    owners.start()
    owners.join(HOLDERS_S)


def process_owners(probe: Probe) -> None:
    """User and name of the processes that nvidia-smi speaks of. A user database that hangs costs the names alone."""
    seen = probe.commands.get("nvidia-smi-xml")
    pids = sorted(set(re.findall(r"<pid>(\d{1,9})</pid>", seen["stdout"] if seen else "")), key=int)
    if pids:
        text = "".join("\t".join([pid] + owner(probe, pid)) + "\n" for pid in pids)
        probe.note_command("process-owners", ["(probe)", "read /proc/PID"], 0, text, "", 0.0)


def main() -> None:
    """Print the bundle. Ended from outside, take the commands along."""
    probe = Probe()

    def leave(number: int, _frame: Any) -> None:
        probe.kill_all()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, leave)
    signal.alarm(int(TOTAL_S) + 15)
    text = json.dumps(probe.collect(), sort_keys=True)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    probe.kill_all()
    # A thread that hangs in a read must not hold the probe back on its way out.
    os._exit(0)


if __name__ == "__main__":
    main()
