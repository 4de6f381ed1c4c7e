"""The probe as a whole: on this machine, and on folders made to look like a node."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from probe_node import collect, printing, put, tool

from gpunode.facts import bundle_reader, facts_from_bundle
from gpunode.onnode import probe as script
from gpunode.onnode import program_text
from gpunode.probe import Bundle

SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/bin") or ""
NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue Jun  3 17:26:33 UTC 2025\n"


def run_through_stdin(**options: int) -> Bundle:
    answer = subprocess.run(
        [SYSTEM_PYTHON, "-"],
        input=program_text("probe").encode(),
        capture_output=True,
        check=True,
        timeout=90,
        cwd="/",
        start_new_session=True,
        **options,  # type: ignore[call-overload]
    )
    assert answer.stderr == b""
    return Bundle.from_json(answer.stdout, "this machine")


def test_it_answers_for_this_machine() -> None:
    bundle = run_through_stdin()
    assert bundle.host == os.uname().nodename
    assert bundle.commands["uname"].stdout.split()[1] == os.uname().release
    assert bundle.files["/proc/cmdline"]
    assert bundle.commands["df"].rc == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_without_root_it_reports_what_it_could_not_see() -> None:
    holders = run_through_stdin(user=65534, group=65534).commands["device-holders"]
    assert holders.rc == 1
    assert "could not be looked into" in holders.stderr


def test_a_bare_folder_gives_a_bundle_of_absent_things(tmp_path: Path) -> None:
    bundle = collect(tmp_path, tmp_path / "bin")
    assert {result.rc for key, result in bundle.commands.items() if result.argv[0] != "(probe)"} == {127}
    assert set(bundle.files.values()) == {None}
    assert not bundle.simulated
    assert bundle.commands["probe-read"].rc == 0


def test_the_probe_asks_for_all_that_the_facts_are_read_from(tmp_path: Path) -> None:
    """What it asked for and did not find has another reason; below /proc/sys it keeps only what is there."""
    gaps = facts_from_bundle(collect(tmp_path, tmp_path / "bin")).gaps
    not_asked = {field: reason for field, reason in gaps.items() if re.search(r" was not (read|run)$", reason)}
    assert set(not_asked) <= {"sysctl"}, f"gpunode/onnode/probe.py does not ask for this: {not_asked}"
    assert len(gaps) > 40


def test_nvidia_functions_are_kept_and_all_are_named(tmp_path: Path) -> None:
    put(tmp_path, "/sys/bus/pci/devices/0000:00:00.0/uevent", "PCI_CLASS=60000\nPCI_ID=8086:0D57\n")
    put(tmp_path, "/sys/bus/pci/devices/0000:1a:00.0/uevent", "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:26B9\n")
    bundle = collect(tmp_path, tmp_path / "bin")
    assert bundle.files["/sys/bus/pci/devices/"] == "0000:00:00.0\n0000:1a:00.0\n"
    assert "/sys/bus/pci/devices/0000:00:00.0/uevent" not in bundle.files
    assert "10DE:26B9" in (bundle.files["/sys/bus/pci/devices/0000:1a:00.0/uevent"] or "")


def test_only_modprobe_files_about_the_gpu_are_kept(tmp_path: Path) -> None:
    put(tmp_path, "/etc/modprobe.d/sound.conf", "options snd index=1\n")
    put(tmp_path, "/etc/modprobe.d/gpu.conf", "blacklist nouveau\n")
    bundle = collect(tmp_path, tmp_path / "bin")
    assert bundle.files["/etc/modprobe.d/"] == "gpu.conf\nsound.conf\n"
    assert bundle.files["/etc/modprobe.d/gpu.conf"] == "blacklist nouveau\n"
    assert "/etc/modprobe.d/sound.conf" not in bundle.files


def test_bytes_that_are_no_text_stay_json(tmp_path: Path) -> None:
    put(tmp_path, "/proc/cmdline", bytes(range(256)))
    (tmp_path / "etc/modprobe.d").mkdir(parents=True)
    (tmp_path / "etc/modprobe.d" / os.fsdecode(b"\xff\xfe.conf")).write_bytes(b"blacklist nouveau \xff")
    tool(tmp_path / "bin", "uname", "printf '\\377\\000\\n'")
    bundle = collect(tmp_path, tmp_path / "bin")
    assert "\\xff" in (bundle.files["/proc/cmdline"] or "")
    assert bundle.files["/etc/modprobe.d/"] == "\\xff\\xfe.conf\n"
    assert bundle.commands["uname"].stdout == "\\xff\x00\n"


def test_what_cannot_be_read_is_distinguished_from_what_is_not_there(tmp_path: Path) -> None:
    put(tmp_path, "/proc/modules", b"x" * (script.FILE_BYTES + 1))
    (tmp_path / "proc/cmdline").mkdir()
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/os-release")
    bundle = collect(tmp_path, tmp_path / "bin")
    log = bundle.commands["probe-read"]
    assert log.rc == 1
    assert "/proc/modules: larger than 1048576 bytes" in log.stderr.splitlines()
    assert "/proc/cmdline: Is a directory" in log.stderr.splitlines()
    assert "/etc/os-release: is a pipe" in log.stderr.splitlines()
    assert not any(line.startswith("/usr/lib/os-release") for line in log.stderr.splitlines())
    assert bundle.files["/proc/modules"] is None


def test_lab_nodes_are_distinguished(tmp_path: Path) -> None:
    put(tmp_path, "/etc/gpunode/lab-node", "")
    assert collect(tmp_path, tmp_path / "bin").simulated


def test_packages_of_the_gpu_stack_alone_are_kept(tmp_path: Path) -> None:
    put(tmp_path, "/var/lib/dpkg/status", "")
    rows = [
        "bash\t5.2\tamd64\tinstall ok installed\tbash\t5.2\tMatthias",
        "libcuda1\t535.1-1\tamd64\thold ok installed\tnvidia-graphics-drivers\t535.1-1\tDebian",
        "libgl1-glvnd\t1\tamd64\tinstall ok installed\tnvidia-graphics-drivers\t1\tDebian",
    ]
    tool(tmp_path / "bin", "dpkg-query", printing(rows))
    bundle = collect(tmp_path, tmp_path / "bin")
    names = [line.split("\t")[0] for line in bundle.commands["dpkg-packages"].stdout.splitlines()]
    assert names == ["libcuda1", "libgl1-glvnd"]
    assert "rpm-packages" not in bundle.commands


def test_rpm_is_asked_on_its_systems_although_a_dpkg_stands_beside_it(tmp_path: Path) -> None:
    put(tmp_path, "/var/lib/dpkg/status", "")
    put(tmp_path, "/etc/os-release", 'ID="rocky"\nID_LIKE="rhel centos fedora"\n')
    tool(tmp_path / "bin", "dpkg-query", printing([]))
    tool(tmp_path / "bin", "rpm", printing(["nvidia-driver-cuda\t580.95.05\t1\tx86_64\t-\tv\tp\t3"]))
    bundle = collect(tmp_path, tmp_path / "bin")
    assert bundle.commands["rpm-packages"].stdout.startswith("nvidia-driver-cuda")
    assert "dpkg-packages" not in bundle.commands


def test_rpm_is_asked_where_there_is_no_dpkg(tmp_path: Path) -> None:
    rows = [
        "bash\t5\t1\tx86_64\tbash-5-1.src.rpm\tv\tp\t0",
        "kernel-core\t5.14.0\t427.el9\tx86_64\t-\tv\tp\t0",
    ]
    tool(tmp_path / "bin", "rpm", printing(rows))
    bundle = collect(tmp_path, tmp_path / "bin")
    assert bundle.commands["rpm-packages"].stdout.startswith("kernel-core\t5.14.0")
    assert "bash" not in bundle.commands["rpm-packages"].stdout


def test_modinfo_is_asked_about_the_gpu_module_alone(tmp_path: Path) -> None:
    paths = [
        "/lib/modules/6.1.0-42-amd64/updates/dkms/nvidia-current.ko",
        "/lib/modules/6.1.0-42-amd64/updates/dkms/nvidia-current-uvm.ko",
        "/lib/modules/6.8.0-60-generic/kernel/nvidia-570srv-open/nvidia.ko.zst",
        "/lib/modules/6.8.0-60-generic/kernel/drivers/platform/x86/nvidia-wmi-ec-backlight.ko.zst",
        "/lib/modules/6.8.0-60-generic/kernel/drivers/video/fbdev/nvidia/nvidiafb.ko.zst",
    ]
    tool(tmp_path / "bin", "find", printing(paths))
    bundle = collect(tmp_path, tmp_path / "bin")
    assert bundle.commands["modinfo"].argv == ["modinfo", paths[0], paths[2]]


@pytest.mark.parametrize(
    "name",
    [
        "nvidia.ko",
        "nvidia.ko.xz",
        "nvidia-current.ko",
        "nvidia-current-open.ko",
        "nvidia-tesla-470.ko",
        "nvidia-legacy-390xx.ko.gz",
    ],
)
def test_names_of_the_gpu_module(name: str) -> None:
    assert script.GPU_MODULE.search(f"/lib/modules/6.1/updates/{name}")


@pytest.mark.parametrize("name", ["SYSCTLS", "MODPROBE_FOLDERS", "GPU_MODULE"])
def test_facts_know_what_the_probe_reads(name: str) -> None:
    assert getattr(bundle_reader, name) == getattr(script, name)


def test_validate_does_not_load_the_probe() -> None:
    code = "import sys, gpunode.cli.validate, gpunode.fleet; print('gpunode.onnode.probe' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "name",
    ["nvidia-uvm.ko", "nvidia-current-drm.ko", "nvidia-peermem.ko", "nvidiafb.ko", "nvidia-tesla-470-modeset.ko"],
)
def test_names_of_other_modules(name: str) -> None:
    assert not script.GPU_MODULE.search(f"/lib/modules/6.1/updates/{name}")


def test_nvidia_tools_do_not_run_without_the_module(tmp_path: Path) -> None:
    put(tmp_path, "/proc/modules", "nvidiafb 1 0 - Live 0x0\n")
    tool(tmp_path / "bin", "nvidia-smi", f"touch {tmp_path}/ran")
    assert "nvidia-smi-xml" not in collect(tmp_path, tmp_path / "bin").commands
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("path", "text"), [("/proc/driver/nvidia/version", NVRM), ("/proc/modules", "nvidia 1 0 - Live 0x0\n")]
)
def test_nvidia_tools_run_with_the_module(tmp_path: Path, path: str, text: str) -> None:
    put(tmp_path, path, text)
    put(tmp_path, "/proc/4242/comm", "python train\n")
    tool(tmp_path / "bin", "nvidia-smi", 'echo "$@ <pid>4242</pid><pid>4242</pid>"')
    bundle = collect(tmp_path, tmp_path / "bin")
    assert bundle.commands["nvidia-smi-xml"].stdout.startswith("-q -x")
    assert bundle.commands["process-owners"].stdout.split("\t")[::2] == ["4242", "python train\n"]


def test_holders_of_devices_are_named(tmp_path: Path) -> None:
    put(tmp_path, "/proc/77/comm", "train.py\n")
    put(tmp_path, "/proc/78/comm", "sshd\n")
    for number, target in enumerate(("/dev/nvidia0", "/dev/nvidia-uvm", "/dev/null", "/dev/nvidia0")):
        (tmp_path / "proc/77/fd").mkdir(exist_ok=True)
        (tmp_path / f"proc/77/fd/{number}").symlink_to(target)
    result = collect(tmp_path, tmp_path / "bin").commands["device-holders"]
    assert result.rc == 0
    pid, _user, name, devices = result.stdout.rstrip("\n").split("\t")
    assert (pid, name, devices) == ("77", "train.py", "/dev/nvidia-uvm /dev/nvidia0")
    assert len(result.stdout.splitlines()) == 1
