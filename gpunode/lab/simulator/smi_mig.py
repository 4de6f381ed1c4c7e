"""``nvidia-smi mig``: profiles of a model, GPU instances and their compute instances.

Profiles are those in recordings of A100 80GB and H100 80GB; no others are recorded, so profiles of other models cannot
be displayed. Instances occupy the eight memory slices of a GPU as in these recordings: a large one may not fit after
small ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple  # dataclasses loads inspect, a fourth of this tool's run time

from . import state
from .node import SimulatedGpu

NOT_FOUND, IN_USE, UNKNOWN, INVALID, NO_ROOM = 6, 19, 255, 2, 255
OFF = "No MIG-enabled devices found.\n"


class Profile(NamedTuple):
    """One GPU instance profile: name without ``MIG``, id, maximum count, GiB, SMs, engines, slices of memory."""

    name: str
    id: int
    total: int
    gib: float
    sms: int
    ce: int
    dec: int
    jpeg: int
    ofa: int
    starts: tuple[int, ...]
    size: int

    @property
    def compute_id(self) -> int:
        """Return the id of the compute instance profile that uses all of it."""
        return {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}[int(self.name.partition("g")[0])]

    @property
    def first_id(self) -> int:
        """Return the first id of this profile's instances."""
        return {8: 0, 4: 1, 2: 3, 1: 7}[self.size]


_ONE = (6, 5, 4, 3, 2, 1, 0)
_A100 = (
    ("1g", 19, 7, 14, 1, 0, 0, 0, _ONE, 1),
    ("1g+me", 20, 1, 14, 1, 1, 1, 1, _ONE, 1),
    ("2g", 14, 3, 28, 2, 1, 0, 0, (0, 2, 4), 2),
    ("3g", 9, 2, 42, 3, 2, 0, 0, (4, 0), 4),
    ("4g", 5, 1, 56, 4, 2, 0, 0, (0,), 4),
    ("7g", 0, 1, 98, 7, 5, 1, 1, (0,), 8),
)
_H100 = (
    ("1g", 19, 7, 16, 1, 1, 1, 0, _ONE, 1),
    ("1g+me", 20, 1, 16, 1, 1, 1, 1, _ONE, 1),
    ("2g", 14, 3, 32, 2, 2, 2, 0, (0, 2, 4), 2),
    ("3g", 9, 2, 60, 3, 3, 3, 0, (4, 0), 4),
    ("4g", 5, 1, 64, 4, 4, 4, 0, (0,), 4),
    ("7g", 0, 1, 132, 8, 7, 7, 1, (0,), 8),
)


def _profiles(rows: tuple[tuple[Any, ...], ...], gigabytes: dict[str, int], gib: dict[str, float]) -> list[Profile]:
    mig_profiles = []
    for slices, number, total, sms, ce, dec, jpeg, ofa, starts, size in rows:
        plain, _, more = slices.partition("+")
        name = f"{plain}.{gigabytes[plain]}gb" + (f"+{more}" if more else "")
        mig_profiles.append(Profile(name, number, total, gib[plain], sms, ce, dec, jpeg, ofa, starts, size))
    return mig_profiles


_OF_80 = {"1g": 10, "2g": 20, "3g": 40, "4g": 40, "7g": 80}
MODELS = {
    "A100 80GB": _profiles(_A100, _OF_80, {"1g": 9.5, "2g": 19.5, "3g": 39.25, "4g": 39.25, "7g": 79.0}),
    "H100 80GB": _profiles(_H100, _OF_80, {"1g": 9.75, "2g": 19.62, "3g": 39.5, "4g": 39.5, "7g": 79.25}),
}


class MigError(Exception):
    """The tool ends with this exit code and text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def profiles(gpu: SimulatedGpu) -> list[Profile]:
    """Return the profiles of a GPU's model; none without a recording."""
    return MODELS.get(str(gpu.get("mig_profiles")), [])


def instances(gpu: SimulatedGpu) -> list[dict[str, Any]]:
    """Return GPU instances of the state: id, profile, start, compute; ordered by id."""
    return sorted(gpu.now.get("mig_instances") or [], key=lambda instance: int(instance["id"])) if gpu.mig else []


def devices(gpu: SimulatedGpu) -> list[tuple[dict[str, Any], Profile]]:
    """Return MIG devices: GPU instances that have a compute instance, with their profile."""
    named = {profile.name: profile for profile in profiles(gpu)}
    return [(instance, named[instance["profile"]]) for instance in instances(gpu) if instance["compute"]]


def uuid(gpu: SimulatedGpu, instance: dict[str, Any]) -> str:
    """Return a MIG device's UUID, which stays the same as long as the instance exists."""
    return f"MIG-{gpu.uuid[4:-4]}{int(instance['id']):02x}00"


def run(gpus: list[SimulatedGpu], argv: list[str], root: bool) -> tuple[int, str]:
    """Return exit code and text of ``nvidia-smi mig`` with these arguments, without ``-i``. Raises MigError."""
    if not argv or argv[0] not in _COMMANDS:
        raise MigError(
            INVALID, f"Invalid combination of input arguments. Please run 'nvidia-smi mig -h' for help.\n{argv[:1]}\n"
        )
    command, changes = _COMMANDS[argv[0]]
    if changes and not root:
        raise MigError(4, "Insufficient Permissions\n")
    if not any(gpu.mig for gpu in gpus):
        return NOT_FOUND, OFF
    return command([gpu for gpu in gpus if gpu.mig], argv[1:])


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    width = max(len(line) for line in head)
    rule = f"+{'-' * width}+"
    lines = [
        rule,
        f"| {title}".ljust(width + 1) + "|",
        *(f"|{line.ljust(width)}|" for line in head),
        f"|{'=' * width}|",
    ]
    for row in rows:
        lines += [*(f"|{line.ljust(width)}|" for line in row), rule]
    return "\n".join(lines) + "\n"


def _list_profiles(gpus: list[SimulatedGpu], _words: list[str]) -> tuple[int, str]:
    head = [
        " GPU   Name               ID    Instances   Memory     P2P    SM    DEC   ENC  ",
        "                                Free/Total   GiB              CE    JPEG  OFA  ",
    ]
    rows = []
    for gpu in gpus:
        if not profiles(gpu):
            return UNKNOWN, "Failed to display GPU instance profiles: Unknown Error\n"
        for profile in profiles(gpu):
            free = _room(gpu, profile)
            rows.append([
                f"{gpu.index:4}  MIG {profile.name.ljust(14)}{profile.id:4}{f'{free}/{profile.total}'.rjust(8)}"
                f"{profile.gib:13.2f}       No{profile.sms:7}{profile.dec:6}{0:6}   ",
                f"{profile.ce:63}{profile.jpeg:6}{profile.ofa:6}   ",
            ])  # fmt: skip
    return 0, _table("GPU instance profiles:", head, rows)


def _list_instances(gpus: list[SimulatedGpu], _words: list[str]) -> tuple[int, str]:
    head = [
        " GPU   Name             Profile  Instance   Placement  ",
        "                          ID       ID       Start:Size ",
    ]
    rows = []
    for gpu in gpus:
        named = {profile.name: profile for profile in profiles(gpu)}
        for instance in instances(gpu):
            profile = named[instance["profile"]]
            slots = f"{instance['start']}:{profile.size}"
            rows.append(
                [f"{gpu.index:4}  MIG {profile.name.ljust(14)}{profile.id:4}{instance['id']:9}{slots.rjust(13)}     "]
            )
    return (0, _table("GPU instances:", head, rows)) if rows else (NOT_FOUND, "No GPU instances found: Not Found\n")


def _taken(gpu: SimulatedGpu, listed: list[dict[str, Any]]) -> set[int]:
    named = {profile.name: profile for profile in profiles(gpu)}
    return {
        slot
        for instance in listed
        for slot in range(instance["start"], instance["start"] + named[instance["profile"]].size)
    }


def _free_start(gpu: SimulatedGpu, profile: Profile, listed: list[dict[str, Any]]) -> int | None:
    taken = _taken(gpu, listed)
    if sum(1 for instance in listed if instance["profile"] == profile.name) >= profile.total:
        return None
    free = (start for start in profile.starts if taken.isdisjoint(range(start, start + profile.size)))
    return next(free, None)


def _room(gpu: SimulatedGpu, profile: Profile) -> int:
    """Return how many more instances of a profile fit."""
    listed = list(instances(gpu))
    count = 0
    while (start := _free_start(gpu, profile, listed)) is not None:
        listed.append({"profile": profile.name, "start": start, "id": -1})
        count += 1
    return count


def _create(gpus: list[SimulatedGpu], words: list[str]) -> tuple[int, str]:
    requested, text = (words[0] if words else "").split(","), ""
    for gpu in gpus:
        for word in requested:
            if gpu.busy:
                return IN_USE, text + _not_created(gpu, word, "In use by another client")
            profile = next(
                (known for known in profiles(gpu) if word.removeprefix("MIG ") in (known.name, str(known.id))), None
            )
            if profile is None:
                return INVALID, text + _not_created(gpu, word, "Invalid Argument")
            with state.change() as (_, running):
                listed = running["gpus"][str(gpu.number)].setdefault("mig_instances", [])
                start = _free_start(gpu, profile, listed)
                if start is None:
                    return NO_ROOM, text + _not_created(gpu, word, "Insufficient Resources")
                number = profile.first_id
                while number in {instance["id"] for instance in listed}:
                    number += 1
                listed.append({"id": number, "profile": profile.name, "start": start, "compute": "-C" in words})
                gpu.now["mig_instances"] = listed
            made, instance = "Successfully created", f"GPU instance ID {number:2}"
            text += f"{made} {instance} on GPU {gpu.index:2} using profile MIG {profile.name} (ID {profile.id:2})\n"
            if "-C" in words:
                kind = f"MIG {profile.name.partition('+')[0]} (ID {profile.compute_id:2})"
                text += f"{made} compute instance ID  0 on GPU {gpu.index:2} {instance} using profile {kind}\n"
    return 0, text


def _not_created(gpu: SimulatedGpu, word: str, why: str) -> str:
    return (
        f"Unable to create a GPU instance on GPU {gpu.index:2} using profile {word}: {why}\n"
        f"Failed to create GPU instances: {why}\n"
    )


def _destroy_compute(gpus: list[SimulatedGpu], _words: list[str]) -> tuple[int, str]:
    text = ""
    for gpu in gpus:
        if gpu.busy:
            return IN_USE, "Failed to destroy compute instances: In use by another client\n"
        with state.change() as (_, running):
            for instance in running["gpus"][str(gpu.number)].get("mig_instances", []):
                if instance["compute"]:
                    text += (
                        f"Successfully destroyed compute instance ID  0 from GPU {gpu.index:2} GPU instance ID "
                        f"{instance['id']:2}\n"
                    )
                instance["compute"] = False
    return (0, text) if text else (NOT_FOUND, "No compute instances found: Not Found\n")


def _destroy(gpus: list[SimulatedGpu], _words: list[str]) -> tuple[int, str]:
    text = ""
    for gpu in gpus:
        with state.change() as (_, running):
            gpu_state = running["gpus"][str(gpu.number)]
            used = [instance for instance in gpu_state.get("mig_instances", []) if instance["compute"]]
            if used or gpu.busy:
                number = (used or gpu_state["mig_instances"])[0]["id"]
                return IN_USE, text + (
                    f"Unable to destroy GPU instance ID {number:2} from GPU {gpu.index:2}: In use by another client\n"
                    "Failed to destroy GPU instances: In use by another client\n"
                )
            for instance in gpu_state.pop("mig_instances", []):
                text += f"Successfully destroyed GPU instance ID {instance['id']:2} from GPU {gpu.index:2}\n"
    return (0, text) if text else (NOT_FOUND, "No GPU instances found: Not Found\n")


_COMMANDS = {
    "-lgip": (_list_profiles, False), "--list-gpu-instance-profiles": (_list_profiles, False),
    "-lgi": (_list_instances, False), "--list-gpu-instances": (_list_instances, False),
    "-cgi": (_create, True), "--create-gpu-instance": (_create, True),
    "-dci": (_destroy_compute, True), "--destroy-compute-instance": (_destroy_compute, True),
    "-dgi": (_destroy, True), "--destroy-gpu-instance": (_destroy, True),
}  # fmt: skip
