"""Apply a node's settings file to its GPUs. Runs on the node and needs only the standard library.

The role gpu_settings installs this file and starts it by a unit: at boot, after the persistence daemon, and when the
settings changed. The role's plan calls the same functions, so that it refuses the same settings.

====================================== =================================================================
/etc/gpunode/gpu-settings.json         the rules, written by the role
/run/gpunode/gpu-settings.json         the report: per GPU and setting what was applied or refused
/var/lib/gpunode/gpu_settings/before   the values before the first change, to be restored
====================================== =================================================================

A GPU is a dictionary with fields of ``gpunode parse nvidia-smi-xml``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

SETTINGS = "/etc/gpunode/gpu-settings.json"
REPORT = "/run/gpunode/gpu-settings.json"
MEMORY = "/var/lib/gpunode/gpu_settings/before.json"
ROOT = Path(os.environ.get("GPUNODE_GPU_SETTINGS_ROOT", "/"))
CALL_LIMIT_S = 60
TOTAL_LIMIT_S = 600
LOCK_LIMIT_S = 900
REPORT_BYTES = 1 << 16
"""Space that is reserved for each GPU's part of the report before anything changes."""
MAX_BYTES = 64 << 20
SCHEMA = "gpunode.gpu-settings-report/1"
TOOL = "nvidia-smi"
PROFILE = re.compile(r"[1-9][0-9]?g\.[0-9]{1,4}gb(?:[+-][a-z.]{1,12})?")
MODES = {"default": "Default", "exclusive_process": "Exclusive_Process", "prohibited": "Prohibited"}
LATER = "takes effect with the next reset of the GPU or restart of the node"

Gpu = Mapping[str, Any]
Values = dict[str, Any]

TITLES = {
    "ecc": "ECC",
    "mig": "MIG mode",
    "mig_layout": "MIG layout",
    "compute_mode": "compute mode",
    "power_limit_w": "power limit",
    "sm_clock_mhz": "locked SM clock",
    "memory_clock_mhz": "locked memory clock",
    "application_clocks_mhz": "application clocks",
    "accounting": "accounting",
}
"""Settings in the order in which they are applied: a change of a GPU's mode resets the settings before it."""


class SettingRefusedError(Exception):
    """nvidia-smi refused a setting; the text is its answer."""


def matches(selector: Any, gpu: Gpu) -> bool:
    """Return whether a rule applies to this GPU: ``all``, ``{"indexes": [...]}`` or ``{"pci_ids": [...]}``."""
    if selector == "all":
        return True
    if "indexes" in selector:
        return gpu.get("index") in selector["indexes"]
    return gpu.get("pci_device_id") in selector["pci_ids"]


def requested(rules: Sequence[Mapping[str, Any]], gpu: Gpu) -> Values:
    """Return the values that the rules request for a GPU; a later rule overrides an earlier one, setting by setting."""
    values: Values = {}
    for rule in rules:
        if matches(rule["gpus"], gpu):
            values.update({key: value for key, value in rule.items() if key != "gpus"})
    return values


def resolved(requests: Mapping[str, Any], gpu: Gpu) -> tuple[Values, dict[str, str]]:
    """Return the values for this GPU, and by the rule's key why one is not supported, with the GPU's range."""
    values: Values = {}
    problems: dict[str, str] = {}
    for key, value in requests.items():
        try:
            values.update(_RESOLVED.get(key, lambda value, _gpu, key=key: {key: value})(value, gpu))
        except ValueError as err:
            problems[key] = str(err)
    return values, problems


def _power(value: Any, gpu: Gpu) -> Values:
    least, most = gpu.get("power_min_limit_w"), gpu.get("power_max_limit_w")
    default = gpu.get("power_default_limit_w")
    if most is None or default is None:
        raise ValueError("the GPU has no adjustable power limit")
    if value == "default":
        watts = float(default)
    elif isinstance(value, str) and value.endswith("%"):
        watts = round(float(default) * float(value[:-1]) / 100)
    else:
        watts = float(most if value == "max" else value)
    if not float(least or 0) <= watts <= float(most):
        raise ValueError(f"{watts:g} W is outside the GPU's range, {float(least or 0):g} to {float(most):g} W")
    return {"power_limit_w": watts}


def _sm_clock(value: Any, gpu: Gpu) -> Values:
    most = (gpu.get("max_clocks_mhz") or {}).get("sm")
    least = (gpu.get("supported_clocks_mhz") or {}).get("graphics_min") or 0
    if value == "default":
        return {"sm_clock_mhz": "default"}
    if most is None:
        raise ValueError("the GPU does not report its clocks")
    pair = [most, most] if value == "max" else value if isinstance(value, list) else [value, value]
    if not least <= pair[0] <= pair[1] <= most:
        raise ValueError(f"{_range(pair)} MHz is outside the GPU's range, {least} to {most} MHz")
    return {"sm_clock_mhz": list(pair)}


def _memory_clock(value: Any, gpu: Gpu) -> Values:
    if value == "default":
        return {"memory_clock_mhz": "default"}
    supported = _memory_clocks(gpu)
    if not supported:
        raise ValueError("the GPU does not report its memory clocks")
    pair = [supported[-1]] * 2 if value == "max" else value if isinstance(value, list) else [value, value]
    if any(clock not in supported for clock in pair) or pair[0] > pair[1]:
        raise ValueError(f"{_range(pair)} MHz is not a memory clock of the GPU: {', '.join(map(str, supported))} MHz")
    return {"memory_clock_mhz": list(pair)}


def _application_clocks(value: Any, gpu: Gpu) -> Values:
    now = gpu.get("application_clocks_mhz") or {}
    if now.get("graphics") is None:
        raise ValueError("this driver or GPU has no application clocks: use sm_clock_mhz and memory_clock_mhz")
    if value == "default":
        return {"application_clocks_mhz": "default"}
    most = (gpu.get("max_clocks_mhz") or {}).get("sm")
    memory, graphics = value["memory"], value["graphics"]
    least = (gpu.get("supported_clocks_mhz") or {}).get("graphics_min") or 0
    if memory not in _memory_clocks(gpu) or most is None or not least <= graphics <= most:
        clocks = ", ".join(map(str, _memory_clocks(gpu)))
        raise ValueError(f"{memory},{graphics} MHz is not supported: memory {clocks}, graphics {least} to {most} MHz")
    return {"application_clocks_mhz": [memory, graphics]}


def _mig(value: Any, _gpu: Gpu) -> Values:
    if isinstance(value, list):
        return {"mig": bool(value), **({"mig_layout": largest_first(value)} if value else {})}
    return {"mig": value}


_RESOLVED: dict[str, Callable[[Any, Gpu], Values]] = {
    "power_limit": _power,
    "sm_clock_mhz": _sm_clock,
    "memory_clock_mhz": _memory_clock,
    "application_clocks_mhz": _application_clocks,
    "mig": _mig,
    "compute_mode": lambda value, _gpu: {"compute_mode": MODES[value]},
}


def _memory_clocks(gpu: Gpu) -> list[int]:
    """Return the memory clocks of a GPU, lowest first; its maximum if the list is not reported."""
    listed = (gpu.get("supported_clocks_mhz") or {}).get("memory") or [(gpu.get("max_clocks_mhz") or {}).get("memory")]
    return sorted(clock for clock in listed if clock)


def _range(pair: Sequence[int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} to {pair[1]}"


def largest_first(profiles: Sequence[str]) -> list[str]:
    """Return MIG profiles in an order in which they all fit: nvidia-smi places them one after the other."""
    return sorted(profiles, key=lambda name: [-int(part) for part in re.findall(r"[0-9]+", name)[:2]])


def in_force(setting: str, gpu: Gpu) -> Any:
    """Return a setting's value as nvidia-smi reports it; None if it reports none, as for locked clocks."""
    if setting == "ecc":
        return (gpu.get("ecc") or {}).get("enabled")
    if setting == "application_clocks_mhz":
        clocks = gpu.get("application_clocks_mhz") or {}
        return [clocks.get("memory"), clocks.get("graphics")]
    if setting == "mig_layout":
        return gpu.get("mig_layout")
    return gpu.get({"mig": "mig_mode", "accounting": "accounting_mode"}.get(setting, setting))


def pending(setting: str, gpu: Gpu) -> Any:
    """Return the value that ECC or MIG mode has after the next reset; None for other settings."""
    if setting == "ecc":
        return (gpu.get("ecc") or {}).get("pending")
    return gpu.get("mig_mode_pending") if setting == "mig" else None


def busy(gpu: Gpu) -> bool:
    """Return whether a process computes on the GPU."""
    return any("C" in (process.get("type") or "") for process in gpu.get("processes") or ())


def shown(setting: str, value: Any) -> str:
    """Return a value for messages."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "on" if value else "off"
    if setting == "mig_layout":
        return ", ".join(value) or "no instance"
    if isinstance(value, (list, tuple)):
        return f"{_range(value)} MHz" if setting != "application_clocks_mhz" else f"{value[0]},{value[1]} MHz"
    return f"{value:g} W" if setting == "power_limit_w" else str(value)


# The functions below run on the node only.


def call(*arguments: str, limit_s: float = CALL_LIMIT_S) -> str:
    """Return the output of nvidia-smi; raise SettingRefusedError for another status than 0, or no answer in time."""
    process = subprocess.Popen(
        [TOOL, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs in the kernel cannot be killed
            process.communicate(timeout=5)
        raise SettingRefusedError(f"no answer within {limit_s:g} s") from None
    text = output[:MAX_BYTES].decode("utf-8", "replace")
    if process.returncode != 0:
        raise SettingRefusedError(_first_line(text) or f"exit status {process.returncode}")
    return text


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Successfully")]
    return lines[0][:300] if lines else ""


def change(gpu: Gpu, done: str, *arguments: str) -> None:
    """Run nvidia-smi to change a setting; raise SettingRefusedError unless its answer contains ``done``.

    nvidia-smi ends with status 0 also if a GPU does not support a setting ("Treating as warning and moving on").
    """
    text = call("-i", gpu["uuid"], *arguments)
    if re.search(done, text, re.IGNORECASE) is None:
        raise SettingRefusedError(_first_line(text) or "no answer")


def parsed(text: str) -> list[dict[str, Any]]:
    """Parse ``nvidia-smi -q -x``, limited to the fields that are needed here."""
    root = ElementTree.fromstring(text)  # noqa: S314 the answer of this machine's own driver
    return [_gpu(node, index) for index, node in enumerate(root.iter("gpu"))]


def _gpu(node: ElementTree.Element, index: int) -> dict[str, Any]:
    def get(*paths: str) -> str | None:
        texts = [(node.findtext(path) or "").strip() for path in paths]
        return next((text for text in texts if text and text != "N/A"), None)

    def switch(*paths: str) -> bool | None:
        return {"Enabled": True, "Disabled": False}.get(get(*paths) or "")

    def watts(name: str) -> float | None:
        text = get(*(f"{block}/{name}" for block in ("gpu_power_readings", "power_readings")))
        return float(text[:-2]) if text and re.fullmatch(r"[0-9]+(\.[0-9]+)? W", text) else None

    def clock(path: str) -> int | None:
        return _megahertz(get(path))

    device = get("pci/pci_device_id") or ""
    number = device[-8:].lower().rjust(8, "0")
    graphics = [_megahertz(element.text) for element in node.iter("supported_graphics_clock")]
    memory = [_megahertz(element.findtext("value")) for element in node.iter("supported_mem_clock")]
    known = [each for each in graphics if each]
    return {
        "index": index,
        "uuid": get("uuid") or "",
        "name": get("product_name") or "GPU",
        "pci_device_id": f"{number[4:]}:{number[:4]}",
        "power_limit_w": watts("current_power_limit") or watts("enforced_power_limit") or watts("power_limit"),
        "power_default_limit_w": watts("default_power_limit"),
        "power_min_limit_w": watts("min_power_limit"),
        "power_max_limit_w": watts("max_power_limit"),
        "max_clocks_mhz": {"sm": clock("max_clocks/sm_clock"), "memory": clock("max_clocks/mem_clock")},
        "supported_clocks_mhz": {"memory": [each for each in memory if each], "graphics_min": min(known, default=None)},
        "application_clocks_mhz": {
            "graphics": clock("applications_clocks/graphics_clock"),
            "memory": clock("applications_clocks/mem_clock"),
        },
        "compute_mode": get("compute_mode"),
        "accounting_mode": switch("accounting_mode"),
        "ecc": {"enabled": switch("ecc_mode/current_ecc"), "pending": switch("ecc_mode/pending_ecc")},
        "mig_mode": switch("mig_mode/current_mig"),
        "mig_mode_pending": switch("mig_mode/pending_mig"),
        "processes": [{"type": element.findtext("type")} for element in node.iter("process_info")],
    }


def _megahertz(text: str | None) -> int | None:
    match = re.fullmatch(r"([0-9]{1,6}) MHz", (text or "").strip())
    return int(match[1]) if match else None


def instances(gpu: Gpu) -> list[str]:
    """Return the profiles of a GPU's MIG instances, largest first."""
    try:
        text = call("mig", "-lgi", "-i", gpu["uuid"])
    except SettingRefusedError as err:
        if re.search(r"no (gpu instances|mig-enabled devices) found", str(err), re.IGNORECASE):
            return []
        raise
    return largest_first(re.findall(rf"^\|\s+[0-9]+\s+MIG ({PROFILE.pattern})\s", text, re.MULTILINE))


def profiles(gpu: Gpu) -> list[str]:
    """Return the MIG profiles that the model has."""
    text = call("mig", "-lgip", "-i", gpu["uuid"])
    return re.findall(rf"^\|\s+[0-9]+\s+MIG ({PROFILE.pattern})\s", text, re.MULTILINE)


def set_layout(gpu: Gpu, layout: list[str]) -> None:
    """Create exactly these MIG instances, each with one compute instance; restore the previous ones after a failure."""
    known = profiles(gpu)
    lacking = [name for name in layout if name not in known]
    if lacking:
        raise SettingRefusedError(
            f"the model has no profile {', '.join(sorted(set(lacking)))}; it has {', '.join(known)}"
        )
    before = instances(gpu)
    try:
        _make(gpu, layout)
    except SettingRefusedError:
        if before:
            _make(gpu, before)
        raise


def _make(gpu: Gpu, layout: list[str]) -> None:
    if instances(gpu):
        call("mig", "-dci", "-i", gpu["uuid"])
        call("mig", "-dgi", "-i", gpu["uuid"])
    if layout:
        call("mig", "-cgi", ",".join(layout), "-C", "-i", gpu["uuid"])


def apply_one(gpu: Gpu, setting: str, value: Any) -> str:
    """Set one value on one GPU; return ``kept``, ``applied`` or ``pending``; raise SettingRefusedError."""
    if setting in ("ecc", "mig"):
        return _apply_mode(gpu, setting, bool(value))
    if setting not in ("sm_clock_mhz", "memory_clock_mhz") and in_force(setting, gpu) == value:
        return "kept"
    if setting == "mig_layout":
        if not gpu.get("mig_mode"):
            if gpu.get("mig_mode_pending"):
                return "pending"
            raise SettingRefusedError("MIG mode is off")
        set_layout(gpu, value)
    elif setting == "compute_mode":
        change(gpu, r"set compute mode to|compute mode is already", "-c", str(value).upper())
    elif setting == "power_limit_w":
        change(gpu, r"power limit for gpu \S+ was set to|is already set to", "-pl", f"{value:g}")
    elif setting == "accounting":
        change(gpu, r"abled accounting mode|accounting mode is already", "-am", "1" if value else "0")
    elif value == "default":
        option = {"sm_clock_mhz": "-rgc", "memory_clock_mhz": "-rmc", "application_clocks_mhz": "-rac"}[setting]
        change(gpu, r"clocks (?:have been )?reset", option)
    else:
        option = {"sm_clock_mhz": "-lgc", "memory_clock_mhz": "-lmc", "application_clocks_mhz": "-ac"}[setting]
        change(gpu, r"clocks set to", option, f"{value[0]},{value[1]}")
    return "applied"


def _apply_mode(gpu: Gpu, setting: str, value: bool) -> str:
    if in_force(setting, gpu) is None:
        raise SettingRefusedError(f"the card has no {TITLES[setting]}")
    if pending(setting, gpu) != value:
        if setting == "ecc":
            change(gpu, r"abled ecc support|ecc support is already", "-e", "1" if value else "0")
        elif not value and gpu.get("mig_mode"):
            _make(gpu, [])
            change(gpu, r"abled mig mode|pending disable", "-mig", "0")
        else:
            change(gpu, r"abled mig mode|pending (en|dis)able", "-mig", "1" if value else "0")
    elif in_force(setting, gpu) == value:
        return "kept"
    return "applied" if in_force(setting, seen(gpu)) == value else "pending"


def seen(gpu: Gpu) -> dict[str, Any]:
    """Return a GPU's current state."""
    states = [state for state in parsed(call("-q", "-x", "-i", gpu["uuid"])) if state["uuid"] == gpu["uuid"]]
    if not states:
        raise SettingRefusedError("the GPU no longer responds")
    # Queried alone it is the first.
    return {**states[0], "index": gpu["index"]}


def node_path(path: str) -> Path:
    """Return the path of a file of the node; a test has a root of its own."""
    return ROOT / path.lstrip("/")


def read(path: str) -> Any:
    """Return the content of a JSON file that this program wrote; None if it does not exist."""
    try:
        return json.loads(node_path(path).read_bytes()[:MAX_BYTES])
    except FileNotFoundError:
        return None


def reserve(path: str, size: int) -> Path:
    """Return the draft of a file, with disk space for its content. Raise OSError if there is not enough."""
    file = node_path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    with new.open("ab") as stream:
        os.posix_fallocate(stream.fileno(), 0, size)
    return new


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Hold the lock of the settings: a second start would record the first one's values as those before it.

    The lock is on the folder of these values, which only root can open: another user could hold it for ever. Raises
    TimeoutError if another process holds it for too long.
    """
    folder = node_path(MEMORY).parent
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_LIMIT_S
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fchmod(held, 0o700)
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{folder}: another process holds the lock for {LOCK_LIMIT_S} s") from None
                time.sleep(0.2)
        yield
    finally:
        os.close(held)


def write(path: str, document: Any) -> None:
    """Write a JSON document in one step."""
    file, text = node_path(path), (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
    new = reserve(path, len(text))
    with new.open("r+b") as stream:
        stream.write(text)
        stream.truncate()
        stream.flush()
        os.fsync(stream.fileno())
    new.chmod(0o644)
    new.replace(file)


class Card:
    """One GPU in one pass: its requested values, the values before the first change, the results."""

    def __init__(self, gpu: dict[str, Any], rules: Sequence[Mapping[str, Any]], memory: dict[str, Values]) -> None:
        self.gpu = gpu
        self.values, self.problems = resolved(requested(rules, gpu), gpu)
        self.memory = memory
        self.before = memory.setdefault(gpu["uuid"], {})
        self.entries: dict[str, Any] = {}

    def bring(self, last: Mapping[str, Any], deadline: float) -> None:
        """Apply the requested values, restore values that are no longer requested; a refusal does not stop the
        others."""
        if self.problems:
            # The GPU does not support a value: nothing is set on it.
            for key, why in self.problems.items():
                self.note({"power_limit": "power_limit_w"}.get(key, key), None, "refused", why)
            return
        for setting in TITLES:
            requested = setting in self.values
            if not requested and setting not in self.before:
                continue
            value = self.values[setting] if requested else self.before[setting]
            if time.monotonic() > deadline:
                self.note(
                    setting, value, "refused", f"skipped: the limit of {TOTAL_LIMIT_S} s for all GPUs was reached"
                )
                continue
            try:
                if requested:
                    self.set(setting, value, last)
                else:
                    self.restore(setting, value)
            except SettingRefusedError as err:
                self.note(setting, value, "refused", str(err))

    def set(self, setting: str, value: Any, last: Mapping[str, Any]) -> None:
        """Set one value; the value before the first change is recorded first."""
        if setting == "mig_layout" and self.gpu.get("mig_mode"):
            self.gpu["mig_layout"] = instances(self.gpu)
        idle = not busy(self.gpu)
        if not idle and not is_set(self.gpu, setting, value, last):
            self.note(setting, value, "busy", "a process computes on the GPU: not changed")
            return
        old = old_value(setting, self.gpu)
        if setting not in self.before:
            self.before[setting] = old
            write(MEMORY, self.memory)
        result = apply_one(self.gpu, setting, value) if idle else "kept"
        was = f"was {shown(setting, old)}" if result == "applied" and old not in (None, value) else ""
        self.note(setting, value, result, LATER if result == "pending" else was)
        if setting == "mig" and result == "applied":
            self.gpu = seen(self.gpu)

    def restore(self, setting: str, value: Any) -> None:
        """Restore the value before the first change, and remove its record."""
        if busy(self.gpu):
            self.note(setting, value, "busy", "a process computes on the GPU: not restored")
            return
        if setting == "mig_layout":
            self.gpu["mig_layout"] = instances(self.gpu) if self.gpu.get("mig_mode") else value
        if value is not None:
            result = apply_one(self.gpu, setting, value)
            say(self.gpu, setting, value, "restored", LATER if result == "pending" else "")
        del self.before[setting]
        write(MEMORY, {uuid: values for uuid, values in self.memory.items() if values})
        if setting == "mig":
            self.gpu = seen(self.gpu)

    def note(self, setting: str, value: Any, result: str, message: str) -> None:
        """Add a line to the report and to the journal."""
        self.entries[setting] = {"value": value, "result": result, "message": message}
        say(self.gpu, setting, value, result, message)


def is_set(gpu: Gpu, setting: str, value: Any, last: Mapping[str, Any]) -> bool:
    """Return whether a busy GPU has the value already; ``last`` is its part of the last report of this boot.

    nvidia-smi does not report locked clocks. They stay in force while the GPU is in use.
    """
    if setting in ("sm_clock_mhz", "memory_clock_mhz"):
        entry = last.get("settings", {}).get(setting, {})
        return entry.get("value") == value and entry.get("result") in ("applied", "kept")
    return bool(in_force(setting, gpu) == value and pending(setting, gpu) in (None, value))


def old_value(setting: str, gpu: Gpu) -> Any:
    """Return the value to restore: the current one, ``default`` for clocks, which are not reported."""
    if setting.endswith("_clock_mhz") or setting == "application_clocks_mhz":
        return "default"
    return pending(setting, gpu) if setting == "ecc" else in_force(setting, gpu)


def say(gpu: Gpu, setting: str, value: Any, result: str, message: str) -> None:
    """Print one line about one setting."""
    value_text = f" {shown(setting, value)}" if value is not None else ""
    tail = f" ({message})" if message else ""
    line = f"gpu{gpu['index']} {gpu['name']}: {TITLES[setting]}{value_text}: {result}{tail}"
    log(line, 4 if result in ("refused", "busy", "pending") else 6)


def log(line: str, level: int) -> None:
    """Print one line; systemd reads the level in front of it."""
    sys.stdout.write(line + "\n" if sys.stdout.isatty() else f"<{level}>{line}\n")
    sys.stdout.flush()


def daemon_runs() -> bool:
    """Return whether the persistence daemon runs."""
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if comm.read_bytes().strip() == b"nvidia-persiste":
                return True
    return False


def main(argv: list[str]) -> int:
    """Run ``apply`` (the values of the settings file) or ``restore`` (the values before the first change)."""
    if argv not in (["apply"], ["restore"]):
        sys.stderr.write("usage: gpu-settings apply|restore\n")
        return 2
    try:
        with locked():
            text = node_path(SETTINGS).read_bytes()[:MAX_BYTES] if argv == ["apply"] else b'{"rules": []}'
            cards = bring_all(json.loads(text)["rules"], report=argv == ["apply"])
            if argv == ["apply"]:
                write_report(cards, hashlib.sha256(text).hexdigest())
    except (OSError, ValueError, KeyError, TypeError, SettingRefusedError, ElementTree.ParseError) as err:
        log(f"no further setting could be applied: {type(err).__name__}: {err}", 3)
        return 1
    if argv == ["restore"]:
        return 1 if any(card.entries for card in cards) else 0
    if not daemon_runs():
        log("nvidia-persistenced does not run: the settings are lost when no process uses a GPU", 4)
    return 0


def write_report(cards: Sequence[Card], digest: str) -> None:
    """Write the report for a settings file with this digest."""
    gpus = {
        card.gpu["uuid"]: {"index": card.gpu["index"], "name": card.gpu["name"], "settings": card.entries}
        for card in cards
    }
    write(REPORT, {"schema": SCHEMA, "settings_sha256": digest, "finished_at": int(time.time()), "gpus": gpus})


def bring_all(rules: Sequence[Mapping[str, Any]], *, report: bool) -> list[Card]:
    """Apply the requested values on every GPU. Raise OSError before the first change if no report could be written."""
    memory: dict[str, Values] = read(MEMORY) or {}
    last = (read(REPORT) or {}).get("gpus", {})
    deadline = time.monotonic() + TOTAL_LIMIT_S
    cards = [Card(gpu, rules, memory) for gpu in parsed(call("-q", "-x", limit_s=2 * CALL_LIMIT_S))]
    if report:
        reserve(REPORT, REPORT_BYTES * len(cards))
    for card in cards:
        card.bring(last.get(card.gpu["uuid"], {}), deadline)
    return cards


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
