"""An independent judge of stacks: reads compat.yml itself and knows nothing of gpunode.

``violations(stack, case, facts)`` looks at a stack as JSON (``gpunode.stack/1``) and at what was asked, and names every
rule that does not hold, warnings that are missing included.
"""

import calendar
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import evidence
from evidence import LAST, boards, device, named

RELEASE_MD = """
2.9-2.10 x86_64
| 12.6.3 | Maxwell(5.0), Pascal(6.0), Volta(7.0), Turing(7.5), Ampere(8.0, 8.6), Hopper(9.0) |
| 12.8.1 | Volta(7.0), Turing(7.5), Ampere(8.0, 8.6), Hopper(9.0), Blackwell(10.0, 12.0) |
| 13.0.0 | Turing(7.5), Ampere(8.0, 8.6), Hopper(9.0), Blackwell(10.0, 12.0+PTX) |
2.11-2.11 x86_64
| 12.6.3 | Maxwell(5.0), Pascal(6.0), Volta(7.0), Turing(7.5), Ampere(8.0, 8.6), Hopper(9.0) |
| 12.8.1 | Turing(7.5), Ampere(8.0, 8.6), Hopper(9.0), Blackwell(10.0, 12.0) |
| 13.0.2 | Turing(7.5), Ampere(8.0, 8.6), Hopper(9.0), Blackwell(10.0, 12.0+PTX) |
2.11-2.11 aarch64
| 12.6.3 | Ampere(8.0), Hopper(9.0) |
| 12.8.1 | Ampere(8.0), Hopper(9.0), Blackwell(10.0, 12.0) |
| 13.0.2 | Ampere(8.0), Hopper(9.0), Blackwell(10.0, 11.0, 12.0+PTX) |
2.8-2.8 x86_64
| 12.6 | 5.0;6.0;7.0;7.5;8.0;8.6;9.0 |
| 12.8 | 7.0;7.5;8.0;8.6;9.0;10.0;12.0 |
2.7-2.7 x86_64
| 11.8 | 3.7;5.0;6.0;7.0;7.5;8.0;8.6;9.0 |
| 12.6 | 5.0;6.0;7.0;7.5;8.0;8.6;9.0 |
2.5-2.6 x86_64
| 11.8 | 3.7;5.0;6.0;7.0;7.5;8.0;8.6;9.0 |
| 12.1 | 5.0;6.0;7.0;7.5;8.0;8.6;9.0 |
| 12.4 | 5.0;6.0;7.0;7.5;8.0;8.6;9.0 |
"""
"""Wheels below 2.12: the tables of pytorch/pytorch pull requests 164471, 175253 and 182849; 2.8 as measured in
jhj0517/Whisper-WebUI issue 653; 2.5 to 2.7 by the binaries (moi90/pytorch_compute_capabilities)."""
DIRECTORY = {
    "ubuntu-22.04": "ubuntu2204",
    "ubuntu-24.04": "ubuntu2404",
    "ubuntu-26.04": "ubuntu2604",
    "rhel-9": "rhel9",
    "debian-12": "debian12",
    "debian-13": "debian13",
    "rhel-10": "rhel10",
}
INSTALLERS = {"ubuntu2204": (515, "11.7"), "ubuntu2404": (550, "12.5"), "debian12": (545, "12.3"), "rhel9": (515, None)}
"""Where the indexes are silent or not sure: the oldest branch and CUDA in file names of NVIDIA's local installers
(nvidia-driver-local-repo-ubuntu2404-550.127.08, cuda-repo-ubuntu2404-12-5-local …)."""
CODENAMES = {"ubuntu-22.04": "jammy", "ubuntu-24.04": "noble", "ubuntu-26.04": "resolute"}
OLD_CUDA = {418: "10.1", 390: "9.1"}
"""Release notes, table of toolkits and drivers: 10.1.105 came with 418.39, 9.1.85 with 390.46."""
FIRST_CUDA = {"8.6": "11.1", "10.3": "12.9", "12.1": "12.9"}
"""Capabilities with another first CUDA than their architecture: CMake's list of targets, CUDA Features Archive."""
TRANSITIONAL = {
    "ubuntu-22.04": {"590": "595"},
    "ubuntu-24.04": {"590": "595"},
    "ubuntu-26.04": {"535": "580", "570": "580", "590": "595"},
    "debian-12": {"525": "535"},
}
"""Branches of Ubuntu's archive that install another one; `branches_in_archive` of the recorded indexes."""
OLDEST = boards()["1e02"]
"""Of a GPU that all lists have: the first release of each branch with a list. Nothing is known of those before it."""
NEWEST = named(LAST)
"""The last release of each branch with a list that was read."""
Rule = Callable[["Look"], Iterator[str]]
RULES: dict[str, Rule] = {}


def rule(rule_id: str) -> Callable[[Rule], Rule]:
    """Register the check of one rule."""

    def register(function: Rule) -> Rule:
        RULES[rule_id] = function
        return function

    return register


@dataclass(frozen=True)
class Case:
    """What was asked. GPUs are PCI ids with their number; None where no number was given."""

    today: date
    gpus: tuple[tuple[str, int | None], ...] = ()
    os: str | None = None
    arch: str | None = None
    kernel: str | None = None
    source: str | None = None
    driver: str | None = None
    cuda: str | None = None
    toolkit: str | None = None
    kernel_module: str | None = None
    kernel_policy: str | None = None
    past_eol: str = "warn"
    installed: tuple[tuple[str, str], ...] = ()
    """Driver packages on the node with their origins."""


def v(text: str) -> tuple[int, ...]:
    """A version as numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def at_least(have: str, floor: str) -> bool:
    """``have`` >= ``floor``, numerically per component."""
    a, b = v(have), v(floor)
    width = max(len(a), len(b))
    return a + (0,) * (width - len(a)) >= b + (0,) * (width - len(b))


class Facts:
    """compat.yml with the look-ups that the checks need."""

    def __init__(self) -> None:
        self.raw = evidence.compat()
        self.gpus = {pci: row for row in self.raw["gpus"] for pci in row["pci_device_ids"]}
        self.branches = {int(row["branch"]): row for row in self.raw["driver_branches"]}
        self.architectures = {row["arch"]: row for row in self.raw["architectures"]}
        self.native = {int(branch): cuda for branch, cuda in self.raw["branch_native_cuda"].items()}
        self.native |= {branch: cuda for branch, cuda in OLD_CUDA.items() if branch not in self.native}
        self.majors = {v(row["cuda"])[0]: row for row in self.raw["cuda_majors"]}

    def toolkit(self, request: str) -> dict[str, Any]:
        """The row of a toolkit by version, or of the newest one of a series."""
        every = self.raw["cuda_toolkits"]
        rows = [row for row in every if row["version"] == request or row["version"].startswith(f"{request}.")]
        row: dict[str, Any] = max(rows, key=lambda row: v(row["version"]))
        return row

    def eol(self, branch: int) -> date | None:
        """The earlier of two ends of life; a month counts to its last day."""
        row = self.branches.get(branch, {})
        days = []
        for key in ("eol", "eol_nvidia"):
            if row.get(key):
                parts = [int(part) for part in str(row[key]).split("-")]
                last = calendar.monthrange(parts[0], parts[1])[1]
                days.append(date(parts[0], parts[1], parts[2] if len(parts) == 3 else last))
        return min(days) if days else None

    def first_cuda(self, architecture: str) -> str:
        """The lowest CUDA that may know any GPU of an architecture."""
        versions: list[str] = re.findall(r"\d+\.\d+", self.architectures[architecture]["first_cuda"])
        return versions[0]

    def oldest(self, system: str, field: str) -> tuple[int, ...] | None:
        """The oldest branch or toolkit that NVIDIA's repository for a system has; None where that is unknown."""
        directory = DIRECTORY.get(system)
        if directory is None:
            return None
        row = evidence.index(directory)["repository"].get(field, {})
        branch, cuda = INSTALLERS.get(directory, (None, None))
        known = {"first_branch": branch, "first_toolkit": cuda}[field] or row.get("value")
        return v(str(known)) or None if known != "13.x" else (13,)

    def last_cuda_major(self, architecture: str) -> int | None:
        """The last CUDA major that knows an architecture."""
        text = self.architectures[architecture]["last_cuda"]
        return None if text is None else int(re.findall(r"\d+", text)[0])


@dataclass
class Look:
    """A stack beside the question and the facts."""

    stack: dict[str, Any]
    case: Case
    facts: Facts
    gpus: list[tuple[dict[str, Any], int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gpus = [(self.facts.gpus[pci], count) for pci, count in self.case.gpus]
        self.branch: int = self.stack["driver"]["branch"]
        self.version: str = self.stack["driver"]["version"] or f"{self.branch}.999"
        """Where only the repository knows the release, the benefit of the doubt."""
        self.flavour: str = self.stack["module"]["flavour"]
        self.source: str = self.stack["source"]
        self.deb = self.stack["os"].startswith(("ubuntu", "debian"))
        self.requests = [request for request in (self.case.cuda, self.case.toolkit) if request]
        self.names = [package["name"] for package in self.stack["packages"]]

    @property
    def forward(self) -> bool:
        """A cuda-compat package carries the requested CUDA, on the host or in the image."""
        return self.stack["cuda"]["support"] == "forward-compat" or self.stack["cuda_compat"] is not None

    def warned(self, rule_id: str) -> bool:
        """The stack carries a warning of this rule."""
        return any(warning["rule"].startswith(rule_id) for warning in self.stack["warnings"])

    def doubted(self, rule_id: str) -> bool:
        """The rule would have refused, had its fact been sure."""
        reported = [warning["text"] for warning in self.stack["warnings"] if warning["rule"].startswith(rule_id)]
        return any(text.endswith("(not sure)") for text in reported)

    def capabilities(self) -> list[tuple[int, ...]]:
        """Compute capabilities of the node."""
        return [v(gpu["compute_capability"]) for gpu, _ in self.gpus]

    def needs(self, flavour: str) -> list[str]:
        """GPUs that run with one flavour alone."""
        words = ("required",) if flavour == "open" else ("no", "UNSUPPORTED")
        return [gpu["name"] for gpu, _ in self.gpus if gpu["open_modules"].split(" ")[0] in words]

    def on_switch(self) -> list[dict[str, Any]]:
        """GPUs of an 8- or 16-GPU board with NVSwitches, as far as the facts are sure of them."""
        return [
            gpu
            for gpu, count in self.gpus
            if count in (8, 16)
            and re.search(r"8-GPU.*yes", gpu["fabric_manager"])
            and not any(note.startswith("everything") for note in gpu.get("unsure") or ())
        ]

    def in_rack(self) -> list[dict[str, Any]]:
        """GPUs with their switches in the rack."""
        return [gpu for gpu, _ in self.gpus if "IMEX required" in gpu["fabric_manager"]]


@rule("wish")
def requests(look: Look) -> Iterator[str]:
    """What was asked for is what was decided."""
    case, stack = look.case, look.stack
    for name, have in (("source", look.source), ("os", stack["os"]), ("arch", stack["arch"])):
        requested = getattr(case, name)
        if requested is not None and requested != have:
            yield f"{name} {requested} was asked, {have} decided"
    if case.kernel_module not in (None, look.flavour):
        yield f"{case.kernel_module} modules were asked"
    if stack["cuda"]["wished"] != case.cuda:
        yield "the requested CUDA got lost"
    kind = look.facts.branches.get(look.branch, {}).get("type")
    if case.driver == "lts" and kind != "LTSB":
        yield f"lts was asked, {look.branch} is {kind}"
    if case.driver == "production" and kind not in ("LTSB", "PB"):
        yield f"production was asked, {look.branch} is {kind}"
    if case.driver and case.driver[0].isdigit():
        release_differs = "." in case.driver and look.version != case.driver
        installs = TRANSITIONAL.get(stack["os"], {}).get(case.driver) if look.source in ("ubuntu", "debian") else None
        if str(look.branch) != (installs or case.driver.split(".")[0]) or release_differs:
            yield f"driver {case.driver} was asked, {look.version} decided"


@rule("R01")
def minor_floor(look: Look) -> Iterator[str]:
    if look.forward:
        return
    for request in look.requests:
        row = look.facts.toolkit(request)
        if row["confidence"] != "low" and not at_least(look.version, row["minor_compat_min_driver_linux"]):
            yield f"CUDA {request} on {look.version}"
        if not at_least(look.version, look.facts.majors[v(request)[0]]["min_driver_linux"]):
            yield f"CUDA {request} on {look.version}, below the floor of its major"


@rule("R02")
def native(look: Look) -> Iterator[str]:
    if look.forward:
        return
    for request in look.requests:
        row = look.facts.toolkit(request)
        full = row.get("toolkit_driver_linux_x86_64")
        branch = row.get("toolkit_driver_branch")
        if branch is None:
            branch = next(number for number, cuda in look.facts.native.items() if v(cuda) == v(row["version"])[:2])
        is_native = look.branch >= branch or (full is not None and at_least(look.version, full))
        if not is_native and not look.warned("R02"):
            yield f"CUDA {request} on {look.version} by minor-version compatibility, without a warning"
    if look.case.cuda and look.stack["cuda"]["support"] is None:
        yield "how the requested CUDA is reached is not reported"


@rule("R03")
def last_branch(look: Look) -> Iterator[str]:
    for gpu, _ in look.gpus:
        if gpu["last_driver_branch"] is not None and look.branch > gpu["last_driver_branch"]:
            yield f"{gpu['name']} on {look.branch}"


@rule("R04")
def last_cuda(look: Look) -> Iterator[str]:
    for gpu, _ in look.gpus:
        last = look.facts.last_cuda_major(gpu["arch"])
        for request in look.requests:
            if last is not None and v(request)[0] > last:
                yield f"CUDA {request} on {gpu['name']}"
        if last is not None and look.stack["cuda"]["newest"] and v(look.stack["cuda"]["newest"])[0] > last:
            yield f"CUDA {look.stack['cuda']['newest']} is promised on {gpu['name']}"
    old = any(capability < (7, 5) for capability in look.capabilities())
    cudnn, nccl = look.stack["cudnn"], look.stack["nccl"]
    if old and cudnn is not None and at_least(cudnn["version"], "9.11"):
        yield f"cuDNN {cudnn['version']} below compute capability 7.5"
    for package in look.stack["packages"]:
        if old and package["component"] == "nccl" and "+cuda13" in (package["version"] or ""):
            yield "an NCCL build for CUDA 13 below compute capability 7.5"
    if (
        look.case.toolkit
        and look.source == "nvidia"
        and v(look.case.toolkit)[0] >= 12
        and (cudnn is None or nccl is None)
    ):
        yield "a toolkit on the host without cuDNN or NCCL"


@rule("R05")
def first_cuda(look: Look) -> Iterator[str]:
    for gpu, _ in look.gpus:
        first = FIRST_CUDA.get(gpu["compute_capability"]) or look.facts.first_cuda(gpu["arch"])
        for request in look.requests:
            if v(request)[:2] < v(first):
                yield f"CUDA {request} does not know {gpu['name']}"
        native = look.facts.native.get(look.branch)
        if native is not None and v(native) < v(first):
            yield f"branch {look.branch} does not know {gpu['name']}"


@rule("R06")
def open_required(look: Look) -> Iterator[str]:
    if look.flavour != "open":
        yield from (f"{name} with proprietary modules" for name in look.needs("open"))


@rule("R07")
def proprietary_required(look: Look) -> Iterator[str]:
    if look.flavour == "open":
        yield from (f"{name} with open modules" for name in look.needs("proprietary"))


@rule("R08")
def no_proprietary(look: Look) -> Iterator[str]:
    if look.flavour == "proprietary" and look.branch >= 620:
        yield f"proprietary modules of {look.branch}"
    if look.flavour == "proprietary" and look.branch == 615 and not look.warned("R08"):
        yield "proprietary modules of 615 without a warning"
    if look.flavour == "open" and look.branch < 515:
        yield f"open modules of {look.branch}"


@rule("R09")
def mixed(look: Look) -> Iterator[str]:
    if look.needs("open") and look.needs("proprietary"):
        yield f"{look.needs('open')} beside {look.needs('proprietary')}"


@rule("R10")
def min_driver(look: Look) -> Iterator[str]:
    for gpu, _ in look.gpus:
        for row in look.facts.raw["gpu_min_driver_documented"]:
            floor = re.fullmatch(r"[\d.]+", row["min_driver"])
            if floor and row["gpu"] in (gpu["name"], f"HGX {gpu['name']}") and not at_least(look.version, floor[0]):
                yield f"{gpu['name']} on {look.version}, documented minimum {floor[0]}"
        listed = device(gpu["pci_device_ids"][0], gpu.get("pci_subsystem"))
        if not listed or gpu.get("first_open_tag_reliable") is False or look.branch <= 515:
            continue
        first = listed.get(look.branch)
        late = first not in (None, OLDEST.get(look.branch)) and not at_least(look.version, str(first))
        # A release after the last one that was read may list it.
        never = first is None and look.branch < max(listed) and at_least(NEWEST[look.branch], look.version)
        if late or never:
            yield f"{gpu['name']} is not listed in {look.version}"


@rule("R11")
def fabric_manager(look: Look) -> Iterator[str]:
    driver, manager = look.stack["driver"], look.stack["fabric_manager"]
    ties = [look.stack[name] for name in ("fabric_manager", "nscq", "imex", "nvsdm") if look.stack[name]]
    for tie in ties:
        if not tie["same_as_driver"] or tie["version"] != driver["constraint"]:
            yield f"{tie['packages']} is {tie['version']}, the driver {driver['constraint']}"
    patterns = {p["version"].split("-")[0] for p in look.stack["packages"] if p["with_driver"] and p["version"]}
    if len(patterns) > 1:
        yield f"the driver closure has several versions: {sorted(patterns)}"
    if look.on_switch():
        if manager is None:
            yield f"{look.on_switch()[0]['name']} behind NVSwitches without a fabric manager"
        elif not set(manager["packages"]) <= set(look.names):
            yield "the fabric manager is not among the packages"
        elif look.source == "nvidia" and look.deb:
            name = "nvidia-fabricmanager" + ("" if look.branch >= 580 else f"-{look.branch}")
            if name not in manager["packages"]:
                yield f"the fabric manager of {look.branch} is {name}, not {manager['packages']}"
        if look.stack["nscq"] is None and look.stack["nvlsm"] is None and not look.warned("R21"):
            yield "NVSwitches without NSCQ"
    depends = [gpu for gpu, count in look.gpus if count is None and re.search(r"8-GPU.*yes", gpu["fabric_manager"])]
    if depends and not look.warned("R11"):
        yield f"{depends[0]['name']} without a number depends on the board, without a warning"
    if look.in_rack() and manager is not None:
        yield "a fabric manager on a tray of a rack"


@rule("R12")
def nvlink5(look: Look) -> Iterator[str]:
    nvlsm = look.stack["nvlsm"]
    if any("nvlsm" in gpu["fabric_manager"] for gpu in look.on_switch()):
        if nvlsm is None or not set(nvlsm["packages"]) <= set(look.names):
            yield "NVLink 5 switches without nvlsm"
        elif "ib_umad" not in nvlsm["kernel_modules"]:
            yield "nvlsm without ib_umad"
        elif "infiniband-diags" not in look.names:
            yield "nvlsm without infiniband-diags"
        if look.stack["arch"] != "x86_64" and look.stack["nvsdm"] is not None:
            yield "NVSDM is x86_64 only"
    elif nvlsm is not None and not any("nvlsm" in gpu["fabric_manager"] for gpu, _ in look.gpus):
        yield "nvlsm without NVLink 5 switches"
    if look.in_rack() and look.stack["imex"] is None:
        yield "a tray of a rack without IMEX"


@rule("R13")
def eol(look: Look) -> Iterator[str]:
    end = look.facts.eol(look.branch)
    if end is not None and end < look.case.today:
        if not look.warned("R13"):
            yield f"{look.branch} ended on {end}, without a warning"
        if look.case.past_eol == "refuse" and look.facts.branches.get(look.branch, {}).get("eol_nvidia"):
            yield f"{look.branch} ended on {end}, and that was to be refused"
    if look.stack["eol"] != (None if end is None else end.isoformat()):
        yield f"end of life {look.stack['eol']}, by the facts {end}"


@rule("R14")
def compat(look: Look) -> Iterator[str]:
    if not look.forward:
        return
    # Of the stack, not of the question: an offer answers with another CUDA.
    request = look.stack["cuda"]["wished"] or (look.stack["toolkit"] or {}).get("version") or look.case.toolkit
    assert request is not None
    name = "cuda-compat-" + "-".join(request.split(".")[:2])
    host = look.stack["cuda_compat"]
    toolkit = look.stack["toolkit"]
    needs_host = toolkit is not None and not at_least(
        look.version, look.facts.majors[v(toolkit["version"])[0]]["min_driver_linux"]
    )
    if needs_host != (host is not None and name in host["packages"] and name in look.names):
        yield f"{name} on the host, which {'needs it' if needs_host else 'takes it from the image'}"
    rows = {row["package"]: row["matrix"] for row in look.facts.raw["forward_compat"]["matrix"]}
    if rows.get(name, {}).get(look.branch) != "compatible":
        yield f"{name} on {look.branch}"
    if any(gpu["name"].startswith("GeForce") for gpu, _ in look.gpus):
        yield f"{name} on a GeForce"
    end = look.facts.eol(look.branch)
    if end is not None and end < look.case.today:
        if look.facts.branches[look.branch].get("eol_nvidia"):
            yield f"{name} on {look.branch}, which ended on {end}"
        elif not look.warned("R14"):
            yield f"{name} on {look.branch}, which ended on {end}, without a warning"


@rule("R15")
def repository(look: Look) -> Iterator[str]:
    os_name = look.stack["os"]
    if look.source in ("ubuntu", "debian") and not os_name.startswith(look.source):
        yield f"the archive of {look.source} on {os_name}"
    oldest = look.facts.oldest(os_name, "first_branch")
    if look.source == "nvidia" and oldest is not None and (look.branch,) < oldest and not look.stack["kept"]:
        yield f"{look.branch} in NVIDIA's repository for {os_name}, which starts at {oldest[0]}"
    if look.source == "ubuntu" and not look.stack["kept"]:
        archive = evidence.index(f"ubuntu-archive-{CODENAMES[os_name]}")["repository"]["branches_in_archive"]
        if str(look.branch) in archive["transitional"]:
            yield f"{look.branch} in {os_name}, where it is transitional"
        if look.branch in (545, 560, 610, 615, 620):
            yield f"{look.branch} with -server names in {os_name}"
    if look.source == "debian":
        release = {"debian-12": "bookworm", "debian-13": "trixie"}.get(os_name, "sid")
        drivers = {row["package"]: row for row in look.facts.raw["debian_archive"]["packages"]}
        modules = "nvidia-open-kernel-dkms" if look.flavour == "open" else "nvidia-driver"
        names = {modules, "nvidia-tesla-535-driver", "nvidia-tesla-470-driver"} - (
            {"nvidia-tesla-535-driver"} if release == "bookworm" else set()
        )
        rows = [drivers[name] for name in names]
        held = {row[key].split("-")[0] for row in rows for key in (release, f"{release}_older") if row.get(key)}
        kept = look.stack["kept"] and {origin for _, origin in look.case.installed} == {"debian"}
        if look.version not in held and not kept:
            yield f"{look.version} in {release}, which has {sorted(held)}"
        if look.flavour == "open" and look.version != look.case.driver and not kept:
            newest = drivers["nvidia-driver"][release].split("-")[0]
            if look.version != newest:
                yield f"open modules {look.version} in {release}, where the driver is at {newest}"
    yield from _names(look)
    yield from _pin(look)


def _names(look: Look) -> Iterator[str]:
    names = [package["name"] for package in look.stack["packages"] if package["component"] == "driver"]
    if not names:
        yield "no driver package"
    if look.source == "nvidia" and look.stack["os"].startswith("ubuntu"):
        for name in names:
            if (f"-{look.branch}" in name) != (look.branch <= 580):
                yield f"{name} for branch {look.branch}"


def _pin(look: Look) -> Iterator[str]:
    pin = look.stack["pin"]
    if pin is None:
        yield "nothing holds the version"
    elif look.source == "nvidia" and look.deb:
        bound = [stanza["pin"] for stanza in pin["preferences"]]
        if (pin["mechanism"], bound) != ("preferences", [f"version {look.version}-*"]):
            yield f"{pin['mechanism']} {bound} for {look.version}"
    elif look.stack["os"] in ("rhel-8", "rhel-9"):
        kind = "open" if look.flavour == "open" else "dkms"
        if (pin["mechanism"], pin["pattern"]) != ("module-stream", f"nvidia-driver:{look.branch}-{kind}"):
            yield f"{pin['mechanism']} {pin['pattern']} for {look.branch} {look.flavour}"


@rule("R16")
def repo_mix(look: Look) -> Iterator[str]:
    origins = {origin for _, origin in look.case.installed}
    if look.case.source is None and origins - {look.source}:
        yield f"{look.source} beside driver packages from {sorted(origins)}"
    foreign = {name for name, origin in look.case.installed if origin != look.source}
    if not foreign <= set(look.stack["remove"]):
        yield f"{sorted(foreign)} stay beside the new source"


@rule("R17")
def dcgm(look: Look) -> Iterator[str]:
    # "AL2023, Azure Linux 3, Debian 12, RHEL/Rocky 8/9/10, SLES 15, Ubuntu 22.04/24.04"
    served = {"amazon-linux-2023", "azure-linux-3", "debian-12", "rhel-8", "rhel-9", "rhel-10", "sles-15"}
    part = look.stack["dcgm"]
    if (
        look.source != "nvidia"
        or look.stack["os"] not in served | {"ubuntu-22.04", "ubuntu-24.04"}
        or look.branch < 450
    ):
        if part is not None:
            yield f"DCGM on {look.stack['os']} from {look.source}"
        return
    major = 11 if look.branch < 525 else 12 if look.branch < 580 else 13
    expected = {f"datacenter-gpu-manager-4-cuda{major}"}
    if look.branch >= 580 and any(capability < (7, 5) for capability in look.capabilities()):
        expected.add("datacenter-gpu-manager-4-cuda12")
    have = set() if part is None else set(part["packages"])
    if have != expected or not expected <= set(look.names):
        yield f"DCGM packages {sorted(have)}, by the facts {sorted(expected)}"


@rule("R18")
def container_toolkit(look: Look) -> Iterator[str]:
    part = look.stack["container_toolkit"]
    expected = set(look.facts.raw["container_toolkit"]["packages"])
    if part is None or set(part["packages"]) != expected:
        yield f"the container toolkit is {part and part['packages']}"
        return
    patterns = {package["version"] for package in look.stack["packages"] if package["name"] in expected}
    if len(patterns) != 1:
        yield f"its packages have versions {patterns}"


@rule("R19")
def gpudirect(look: Look) -> Iterator[str]:
    native = look.facts.native.get(look.branch, "0")
    met = (
        look.flavour == "open"
        and v(native) >= (11, 7)
        and all(capability >= (7, 5) for capability in look.capabilities())
    )
    met = met and not any(gpu["name"].startswith("GeForce") for gpu, _ in look.gpus)
    kernel_met = look.case.kernel is not None and v(look.case.kernel)[:2] >= (5, 12)
    reported = look.stack["gpudirect_rdma"]
    if reported is True and not (met and kernel_met):
        yield "GPUDirect RDMA is promised"
    if reported is not True and met and kernel_met:
        yield "GPUDirect RDMA is not seen"


@rule("R20")
def frameworks(look: Look) -> Iterator[str]:
    if not look.gpus:
        return
    part = look.stack["frameworks"] or {}
    runs = []
    for row in look.facts.raw["pytorch"]:
        for cuda in row["cuda"] or {}:
            if not at_least(look.version, look.facts.majors[v(cuda)[0]]["min_driver_linux"]):
                continue
            if all(_in_wheel(look, row["torch"], cuda, capability) for capability in look.capabilities()):
                runs.append(row["torch"])
    best = max(runs, key=v) if runs else None
    if part.get("tensorflow") and look.stack["arch"] == "aarch64":
        yield "TensorFlow's wheels for aarch64 have no CUDA (tensorflow/tensorflow issue 121157)"
    if runs and part.get("pytorch") is None:
        yield f"PyTorch {best} runs and is not named"
    if part.get("pytorch") and part["pytorch"] not in runs:
        yield f"PyTorch {part['pytorch']} does not run here"


def _in_wheel(look: Look, torch: str, cuda: str, capability: tuple[int, ...]) -> bool:
    machine = "x86_64" if look.stack["arch"] == "x86_64" else "aarch64"
    tag = "cu" + cuda.replace(".", "")
    for row in look.facts.raw["pytorch_wheel_arch"]:
        low, high = row["torch"].split("-")
        known = [part if part.startswith("cu") else f"cu{part}" for part in row["wheel"].split(" ")[0].split("/")]
        if v(low) <= v(torch) <= v(high) and tag in known and machine in row["wheel"]:
            return _listed(row["cc"].split("(")[0], capability)
    applies = False
    for line in RELEASE_MD.strip().splitlines():
        if not line.startswith("|"):
            releases, arch = line.split()
            low, high = releases.split("-")
            applies = v(low) <= v(torch) <= v(high) and arch == machine
        elif applies and v(line.split("|")[1])[:2] == v(cuda):
            return _listed(line.split("|")[2], capability)
    return False


def _listed(text: str, capability: tuple[int, ...]) -> bool:
    listed = [v(version) for version in re.findall(r"\d+\.\d+", text)]
    ptx = re.search(r"(\d+\.\d+)\+PTX", text)
    same = any(known[0] == capability[0] and known <= capability for known in listed)
    return same or (ptx is not None and capability >= v(ptx[1]))


@rule("R21")
def goes_without(look: Look) -> Iterator[str]:
    missing = [part for part in ("dcgm", "container_toolkit") if look.stack[part] is None]
    if missing and not look.warned("R21"):
        yield f"no warning that the stack goes without {' and '.join(missing)}"
    yield from debian(look)


def debian(look: Look) -> Iterator[str]:
    if look.source != "debian":
        return
    if look.on_switch():
        yield f"{look.on_switch()[0]['name']} behind NVSwitches with Debian's driver"
    if look.in_rack():
        yield "a tray of a rack with Debian's driver"
    if not look.forward:
        yield from (f"CUDA {request} with Debian's driver" for request in look.requests if v(request)[0] >= 13)
    for part in ("dcgm", "fabric_manager", "imex", "nscq"):
        if look.stack[part] is not None:
            yield f"{part} from Debian's archive, which has none"
    if not look.warned("R21"):
        yield "no warning that Debian's archive has no DCGM"


@rule("R22")
def host_arch(look: Look) -> Iterator[str]:
    for gpu, _ in look.gpus:
        if "arm64 (SBSA) host" in (gpu.get("note") or "") and look.stack["arch"] != "aarch64":
            yield f"{gpu['name']} in an {look.stack['arch']} machine"


@rule("R23")
def kernel_floor(look: Look) -> Iterator[str]:
    # READMEs of the open modules, the same kernels for both flavours: 3.10 up to 550.163.01, 4.15 from 555.42.02 on.
    floor = (4, 15) if look.branch >= 555 else (3, 10) if look.branch >= 510 else (2, 6)
    if look.case.kernel and v(look.case.kernel)[:2] < floor:
        yield f"modules of {look.branch} for kernel {look.case.kernel}"


@rule("R24")
def toolkit(look: Look) -> Iterator[str]:
    part, request = look.stack["toolkit"], look.case.toolkit
    if (part is None) != (request is None):
        yield f"toolkit {part}, requested {request}"
    if request and look.source == "debian":
        release = {"debian-12": "bookworm", "debian-13": "trixie"}[look.stack["os"]]
        rows = {row["package"]: row for row in look.facts.raw["debian_archive"]["packages"]}
        held = rows["nvidia-cuda-toolkit"][release]
        if v(held)[:2] != v(request)[:2]:
            yield f"toolkit {request} from Debian, which has {held}"
    first = look.facts.oldest(look.stack["os"], "first_toolkit")
    if request and look.source == "nvidia" and first is not None and v(request) < first and not look.doubted("R24"):
        yield f"toolkit {request} on {look.stack['os']}, which starts at {first}"
    if request and look.source == "nvidia" and part is not None:
        name = "cuda-toolkit-" + "-".join(request.split(".")[:2])
        if name not in look.names:
            yield f"{name} is not among the packages"


@rule("R25")
def driver_range(look: Look) -> Iterator[str]:
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", look.case.driver or ""):
        if at_least(look.version, bound) != (sign == ">="):
            yield f"driver {look.case.driver} was asked, {look.version} decided"


@rule("R26")
def kernel_policy(look: Look) -> Iterator[str]:
    reported = any(warning["rule"].startswith("R26") for warning in look.stack["warnings"])
    if reported != (look.case.kernel_policy is not None):
        yield f"kernel policy {look.case.kernel_policy}, and its meaning is {'' if reported else 'not '}reported"


def violations(stack: dict[str, Any], case: Case, facts: Facts) -> list[tuple[str, str]]:
    """Every rule that the stack does not keep, as id and words."""
    look = Look(stack, case, facts)
    return [(rule_id, text) for rule_id, check in RULES.items() for text in check(look)]
