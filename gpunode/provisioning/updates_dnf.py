"""/etc/dnf/automatic.conf, which its package and administrators write: single settings are changed and restored."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from gpunode.provisioning.sections import completed

AUTOMATIC = "/etc/dnf/automatic.conf"
DRIVER = ("nvidia-*", "kmod-nvidia*", "libnvidia*", "libnvsdm*", "nvlsm*", "datacenter-gpu-manager*")
CUDA = ("cuda*", "cudnn*", "libcudnn*", "libnccl*")
LIBRARIES = ("libcublas*", "libcufft*", "libcusolver*", "libcusparse*", "libcurand*", "libcufile*")
ENGINE = (
    "docker-ce*",
    "docker-buildx-plugin",
    "docker-compose-plugin",
    "moby-*",
    "containerd*",
    "podman",
    "crun",
    "runc",
)
KERNEL = ("kernel*",)
EXCLUDED = "base.excludepkgs"
_SECTION = re.compile(r"\s*\[([^\]]+)\]\s*")
_SETTING = re.compile(r"\s*([A-Za-z_]+)\s*=(.*)")


def automatic_text(  # noqa: PLR0913
    text: str | None, memory: str | None, *, automatic: bool, kernel: bool, engine: bool, more: Sequence[str] = ()
) -> tuple[str | None, str | None, str | None]:
    """Return (the file in its target state, the previous values as JSON, the error); None if there is no file.

    Packages that the file excluded before stay excluded; ``more`` are further names and shell patterns.
    """
    if text is None:
        return None, None, None
    names = [*DRIVER, *CUDA, *LIBRARIES, *(ENGINE if engine else ()), *(KERNEL if kernel else ()), *more]
    settings = {
        "commands.upgrade_type": "security",
        "commands.apply_updates": "yes" if automatic else "no",
        "commands.reboot": "never",
        EXCLUDED: "",
    }
    try:
        before: dict[str, str | None] = (
            json.loads(memory) if memory else dict.fromkeys(settings) | _read(text, settings)
        )
    except ValueError:
        return None, None, f"{AUTOMATIC}: what was there before is not JSON: remove it, and run this again"
    others = (before.get(EXCLUDED) or "").replace(",", " ").split()
    settings[EXCLUDED] = " ".join(dict.fromkeys([*others, *names]))
    return _written(text, settings), json.dumps(before, indent=1) + "\n", None


def shell_pattern(expression: str) -> str | None:
    """Return the shell pattern of a regular expression for the beginning of a name; None if it is not plain text."""
    plain = expression.replace("[.]", ".").replace("\\.", ".").replace("[+]", "+").replace("\\+", "+")
    name = plain.removesuffix("$")
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name) is None:
        return None
    return name if plain.endswith("$") else f"{name}*"


def restored_text(text: str, memory: str) -> str:
    """Return the file with the previous settings."""
    try:
        before: dict[str, str | None] = json.loads(memory)
    except ValueError:
        return text
    return _written(text, before)


def _read(text: str, settings: Mapping[str, str]) -> dict[str, str | None]:
    values: dict[str, str | None] = {}
    section = ""
    for line in text.split("\n"):
        if match := _SECTION.fullmatch(line):
            section = match[1].strip()
        elif (match := _SETTING.fullmatch(line)) and f"{section}.{match[1]}" in settings:
            values[f"{section}.{match[1]}"] = match[2].strip()
    return values


def _written(text: str, values: Mapping[str, str | None]) -> str:
    """Return the text with these settings; None removes one. Missing sections are added at the end."""
    left = dict(values)
    lines: list[str] = []
    section = ""

    def complete(name: str) -> None:
        for key in [key for key in left if key.partition(".")[0] == name]:
            value = left.pop(key)
            if value is not None:
                at = len(lines)
                while at and not lines[at - 1].strip():
                    at -= 1
                lines.insert(at, f"{key.partition('.')[2]} = {value}")

    for line in completed(text).split("\n")[:-1]:
        if match := _SECTION.fullmatch(line):
            complete(section)
            section = match[1].strip()
        elif match := _SETTING.fullmatch(line):
            key = f"{section}.{match[1]}"
            if key in values:
                value = left.pop(key, None)
                if value is not None:
                    lines.append(f"{match[1]} = {value}")
                continue
        lines.append(line)
    complete(section)
    for name in dict.fromkeys(key.partition(".")[0] for key in left):
        if any(value is not None for key, value in left.items() if key.partition(".")[0] == name):
            lines += ["", f"[{name}]"]
        complete(name)
    return "\n".join(lines) + "\n"
