"""An engine's refusal to start a container: its kind, cause and remedy are found however long the text before is."""

import re

import pytest

from gpunode.workload.causes import CAUSES, cause_of, explained, shortened

IMAGE = "site/image:1"
RUNC = (
    "failed to create task for container: failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: error during container init: error running prestart hook #0: exit status 1, "
    "stdout: , stderr: Auto-detected mode as 'legacy'\nnvidia-container-cli: "
)
"""What stands before the cause since containerd 1.7 and runc 1.1; longer than 300 characters with a path in it."""
OLD_RUNC = (
    "OCI runtime create failed: container_linux.go:380: starting container process caused: process_linux.go:545: "
)
"""Before."""
THREADS = {
    # The decisive words of public threads, with the address of each; the rest of the texts is left there.
    "https://github.com/MauriceNino/dashdot/issues/1226": (
        RUNC + "requirement error: unsatisfied condition: cuda>=12.8, please update your driver to a newer version",
        "image",
        ["CUDA 12.8", IMAGE, "--image", "role nvidia_driver"],
    ),
    "https://github.com/NVIDIA/nvidia-docker/issues/1629": (
        OLD_RUNC
        + "Running hook #0:: exit status 1: nvidia-container-cli: initialization error: nvml error: driver not "
        "loaded: unknown",
        "driver",
        ["not loaded", "modprobe nvidia"],
    ),
    "https://github.com/dstackai/dstack/issues/2306": (
        RUNC.replace("Auto-detected mode as 'legacy'", "Using requested mode 'cdi'").removesuffix(
            "nvidia-container-cli: "
        )
        + "invoking the NVIDIA Container Runtime Hook directly (e.g. the docker --gpus flag) is not supported.",
        "no-gpu-support",
        ["cdi or csv", "--runtime=nvidia", 'mode = "auto"'],
    ),
    "https://github.com/NVIDIA/nvidia-container-toolkit/issues/139": (
        RUNC + "mount error: failed to add device rules: unable to find any existing device filters attached to the "
        "cgroup: bpf_prog_query(BPF_CGROUP_DEVICE) failed: operation not permitted: unknown",
        "no-gpu-support",
        ["rootless", "no-cgroups = true"],
    ),
    "https://github.com/NVIDIA/nvidia-container-toolkit/issues/450": (
        "crun: cannot stat `/lib64/libEGL_nvidia.so.550.54.14`: No such file or directory: OCI runtime attempted to "
        "invoke a command that was not found",
        "no-gpu-support",
        ["another driver", "nvidia-ctk cdi generate"],
    ),
    "https://github.com/NVIDIA/nvidia-container-toolkit/issues/33": (
        RUNC + "initialization error: nvml error: insufficient permissions: unknown",
        "no-gpu-support",
        ["SELinux", "setsebool -P container_use_devices on"],
    ),
    "https://github.com/NVIDIA/nvidia-container-toolkit/issues/394": (
        RUNC + "initialization error: nvml error: driver/library version mismatch: unknown",
        "driver",
        ["different versions", "reboot"],
    ),
    "https://github.com/NVIDIA/nvidia-docker/issues/587": (
        RUNC + "ldcache error: process /sbin/ldconfig failed with error code: 127",
        "no-gpu-support",
        ["ldconfig", "config.toml"],
    ),
    "https://github.com/NVIDIA/nvidia-docker/issues/1034": (
        'could not select device driver "" with capabilities: [[gpu]]',
        "no-gpu-support",
        ["role nvidia_container_toolkit", "systemctl restart docker"],
    ),
    "https://github.com/nv-tlabs/3dgrut/issues/71": (
        "docker: Error response from daemon: unknown or invalid runtime name: nvidia.",
        "no-gpu-support",
        ["role nvidia_container_toolkit", "systemctl restart docker"],
    ),
    "https://github.com/docker/for-win/issues/13835": (
        RUNC + "initialization error: load library failed: libnvidia-ml.so.1: cannot open shared object file: no such "
        "file or directory: unknown.",
        "driver",
        ["not installed", "role nvidia_driver"],
    ),
}


@pytest.mark.parametrize("thread", THREADS)
def test_a_known_refusal_is_named_with_its_remedy(thread: str) -> None:
    reported, kind, words = THREADS[thread]
    pair = cause_of(reported)
    assert pair is not None
    assert pair[0].source == thread
    explanation = explained(reported, IMAGE)
    assert explanation is not None
    assert explanation[0] == kind
    assert [word for word in words if word not in explanation[1]] == []
    assert len(explanation[1].splitlines()) == 1


@pytest.mark.parametrize(
    ("reported", "kind"),
    [
        ("exec /usr/bin/python3: exec format error", "image"),
        (f'{OLD_RUNC}exec: "python3": executable file not found in $PATH: unknown', "no-python"),
        ("docker: Error response from daemon: Unknown runtime specified nvidia.", "no-gpu-support"),
        ("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=7", "no-gpu-support"),
        (RUNC + "something that nobody has seen", "no-gpu-support"),
    ],
)
def test_other_refusals(reported: str, kind: str) -> None:
    explanation = explained(reported, IMAGE)
    assert explanation is not None
    assert explanation[0] == kind


def test_a_text_that_nobody_knows_has_no_cause() -> None:
    assert explained("OCI runtime create failed: the moon is in the wrong phase", IMAGE) is None


def test_every_cause_has_a_text_that_it_alone_explains() -> None:
    seen = {known[0] for reported, _, _ in THREADS.values() if (known := cause_of(reported)) is not None}
    assert {cause for cause in CAUSES if cause.source.startswith("https")} - seen <= {
        cause for cause in CAUSES if "unsatisfied" in cause.pattern
    }
    for cause in CAUSES:
        names = set(re.compile(cause.pattern).groupindex)
        assert set(re.findall(r"\{(\w+)\}", cause.means)) <= names | {"image"}


def test_the_end_of_a_long_text_is_kept_and_so_is_its_beginning() -> None:
    reported = "OCI runtime create failed: " + "layer/" * 2000 + "\n\x1b[31mthe cause"
    line = shortened(reported)
    assert line.startswith("OCI runtime create failed")
    assert line.endswith("the cause")
    assert (len(line) < 400, "\x1b" in line) == (True, False)
    assert shortened("short") == "short"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "filler", ["no such file ", "lib", "libcuda", "python3 not ", "unsatisfied condition: cuda>=1."]
)
def test_an_endless_text_takes_no_time(filler: str) -> None:
    explained(filler * (4_000_000 // len(filler)), IMAGE)
