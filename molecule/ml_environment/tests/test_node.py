"""Tests of a node with its environment, run on the node itself."""

from testinfra.host import Host

MANAGER = "org.freedesktop.login1.Manager"


def test_nccl_reads_bare_assignments(host: Host) -> None:
    lines = host.file("/etc/nccl.conf").content_string.splitlines()
    settings = [line for line in lines if not line.startswith("#")]
    assert settings
    assert all(line.startswith("NCCL_") and "'" not in line and '"' not in line for line in settings)
    assert not any("=" in line for line in lines if line.startswith("#"))


def test_a_login_has_the_variables_and_keeps_its_own(host: Host) -> None:
    assert host.check_output("bash -lc 'echo $CUDA_DEVICE_ORDER'") == "PCI_BUS_ID"
    assert host.check_output("CUDA_DEVICE_ORDER=FASTEST_FIRST bash -lc 'echo $CUDA_DEVICE_ORDER'") == "FASTEST_FIRST"


def test_the_launcher_gives_a_job_its_threads(host: Host) -> None:
    threads = host.check_output("gpunode-run --ranks 1000 sh -c 'echo $OMP_NUM_THREADS'")
    assert threads == "1"
    assert "--shm-size" in host.check_output("gpunode-run --print docker")


def test_logind_keeps_shared_memory(host: Host) -> None:
    path = "/org/freedesktop/login1"
    with host.sudo():
        shown = host.check_output(f"busctl get-property org.freedesktop.login1 {path} {MANAGER} RemoveIPC")
    assert shown == "b false"
