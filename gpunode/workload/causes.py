"""Known causes of an engine's refusal to start a container: kind of the failure, cause, and remedy.

The engine puts the cause last, behind the prefixes of containerd's shim, of runc and of its hook, so the whole text is
searched. If several causes match, the first row is used.
"""

import re
from dataclasses import dataclass

from gpunode.text import one_line

MAX_SEARCHED = 16 * 1024
"""Only the end of an engine's text is searched, at most this much."""
_HEAD, _TAIL = 80, 300
TOOLKIT = "role nvidia_container_toolkit"
REGENERATE = "nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml regenerates it"


@dataclass(frozen=True)
class Cause:
    """One reason why a container does not start."""

    pattern: str
    """A regular expression, matched case-insensitively."""
    kind: str
    means: str
    """The cause; ``{image}`` and the pattern's named groups are filled in."""
    remedy: str
    source: str
    """Where the text was recorded."""


CAUSES = (
    Cause(
        r"unsatisfied condition: cuda ?>= ?(?P<cuda>[0-9.]{1,8}[0-9])",
        "image",
        "image {image} requires a driver with CUDA {cuda} or later",
        "use an image for an older CUDA with --image, or install a newer driver (role nvidia_driver)",
        "https://github.com/MauriceNino/dashdot/issues/1226",
    ),
    Cause(
        r"requirement error: unsatisfied condition",
        "image",
        "image {image} requires another driver or GPU",
        "use another image with --image",
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/152",
    ),
    Cause(
        r"invoking the nvidia container runtime hook directly",
        "no-gpu-support",
        "the mode of the NVIDIA container toolkit is cdi or csv, which does not support --gpus",
        'docker run --runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=all; or mode = "auto" in '
        "/etc/nvidia-container-runtime/config.toml",
        "https://github.com/dstackai/dstack/issues/2306",
    ),
    Cause(
        r"driver not loaded",
        "driver",
        "the NVIDIA driver is not loaded",
        "modprobe nvidia; nvidia-smi shows whether it answers",
        "https://github.com/NVIDIA/nvidia-docker/issues/1629",
    ),
    Cause(
        r"driver/library version mismatch",
        "driver",
        "the driver's libraries and its kernel module have different versions",
        "reboot the node: the driver was upgraded beneath the loaded module",
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/394",
    ),
    Cause(
        r"load library failed: libnvidia-ml\.so",
        "driver",
        "the driver's library libnvidia-ml.so.1 was not found: the driver is not installed on the node",
        "role nvidia_driver; ldconfig -p lists the libraries that are found",
        "https://github.com/docker/for-win/issues/13835",
    ),
    Cause(
        r"nvml error: insufficient permissions",
        "no-gpu-support",
        "the toolkit may not use the GPUs' device files: SELinux, or their mode",
        "setsebool -P container_use_devices on where SELinux enforces; ls -lZ /dev/nvidia*",
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/33",
    ),
    Cause(
        r"failed to add device rules|bpf_prog_query\(bpf_cgroup_device\)",
        "no-gpu-support",
        "the toolkit may not change the container's cgroup: the engine is rootless, or runs in a container",
        "no-cgroups = true in /etc/nvidia-container-runtime/config.toml, or GPUs by CDI (" + TOOLKIT + ")",
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/139",
    ),
    Cause(
        r"ldcache error: (?:open failed|process).{0,200}",
        "no-gpu-support",
        "the toolkit cannot run ldconfig for the container",
        "set ldconfig in /etc/nvidia-container-runtime/config.toml to the program that the node has: "
        '"@/sbin/ldconfig.real" (Ubuntu), "@/sbin/ldconfig"',
        "https://github.com/NVIDIA/nvidia-docker/issues/587",
    ),
    Cause(
        r"(?:cannot stat|no such file|failed to fulfil mount request).{0,300}lib(?:cuda|nvidia|EGL_nvidia|GLX_nvidia)"
        r"|lib(?:cuda|nvidia|EGL_nvidia|GLX_nvidia)\S{0,80}:? ?.{0,40}no such file",
        "no-gpu-support",
        "the CDI specification lists files of another driver",
        REGENERATE,
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/450",
    ),
    Cause(
        r"unresolvable cdi devices? (?P<device>[\w./=:-]{1,80})",
        "no-gpu-support",
        "no CDI specification has the device {device}",
        f"{REGENERATE} ({TOOLKIT})",
        "the lab's Docker Engine 26.1.5",
    ),
    Cause(
        r"could not select device driver",
        "no-gpu-support",
        "the engine has no GPU support: the NVIDIA container toolkit is not installed, or was installed after the "
        "engine started",
        f"{TOOLKIT}; systemctl restart docker on an idle node",
        "https://github.com/NVIDIA/nvidia-docker/issues/1034",
    ),
    Cause(
        r"unknown (?:runtime specified|or invalid runtime name:) nvidia",
        "no-gpu-support",
        "the engine has no runtime of the name nvidia: the NVIDIA container toolkit is not installed, or the engine "
        "was not restarted after it was configured",
        f"{TOOLKIT}; systemctl restart docker on an idle node",
        "https://github.com/nv-tlabs/3dgrut/issues/71",
    ),
    Cause(
        r"exec format error",
        "image",
        "image {image} is for another architecture",
        "use an image for the node's architecture with --image",
        "the kernel's ENOEXEC, as runc words it",
    ),
    Cause(
        r"python3\W{1,9}.{0,80}(?:not found|no such file)|(?:not found|no such file).{0,80}python3",
        "no-python",
        "image {image} has no python3",
        "use another with --image",
        "the lab's Docker Engine 20.10.24",
    ),
    Cause(
        r"nvidia-container|nvidia-ctk|nvidia-cdi-hook|libnvidia|libcuda",
        "no-gpu-support",
        "the NVIDIA container toolkit could not set the container up",
        "nvidia-container-cli -k -d /dev/tty info shows more",
        "the names of the toolkit's programs",
    ),
)


def cause_of(message: str) -> tuple[Cause, re.Match[str]] | None:
    """Return the first cause that matches an engine's text, with its match; None if none does."""
    for cause in CAUSES:
        match = re.search(cause.pattern, message[-MAX_SEARCHED:], re.IGNORECASE)
        if match:
            return cause, match
    return None


def explained(message: str, image: str) -> tuple[str, str] | None:
    """Return the kind, and one line with cause, remedy and the engine's message; None for an unknown text."""
    explanation = cause_of(message)
    if explanation is None:
        return None
    cause, match = explanation
    means = cause.means.format(image=image, **match.groupdict())
    return cause.kind, f"{means} ({shortened(message)}): {cause.remedy}"


def shortened(message: str) -> str:
    """Return an engine's text as one line: the beginning with the component's name, and the end with the reason."""
    line = one_line(message, len(message))
    return line if len(line) <= _HEAD + _TAIL + 5 else f"{line[:_HEAD]} ... {line[-_TAIL:]}"
