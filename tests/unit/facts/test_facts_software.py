"""Libraries, package sources, other installers, automatic updates, container engines."""

import pytest
from facts_samples import VERSION, answer, gpu_facts_with

from gpunode.facts import updates
from gpunode.facts.containers import CdiNode, CdiSpec, DockerDaemon
from gpunode.facts.errors import ParseError
from gpunode.facts.packages import ForeignInstall, Repository
from gpunode.facts.updates import AutomaticUpdates


def test_every_copy_of_a_library_is_known() -> None:
    libraries = {library.path: library for library in gpu_facts_with().libraries or ()}
    assert {(path, item.version, item.in_cache, item.used, item.bits) for path, item in libraries.items()} == {
        ("/lib/x86_64-linux-gnu/libcuda.so.1", VERSION, True, True, 64),
        ("/lib/i386-linux-gnu/libcuda.so.1", VERSION, True, False, 32),
        ("/usr/local/lib/libcuda.so.1", None, True, False, 64),
        ("/lib/x86_64-linux-gnu/libnvidia-ml.so.1", VERSION, True, True, 64),
        ("/usr/lib/x86_64-linux-gnu/libnccl.so", "2.27.3", False, False, None),
    }
    assert libraries["/lib/x86_64-linux-gnu/libcuda.so.1"].name == "libcuda"


@pytest.mark.parametrize("key", ["ldconfig", "library-files"])
def test_a_strange_line_about_libraries_is_a_gap(key: str) -> None:
    assert "libraries" in gpu_facts_with({key: answer("libcuda.so.1\n")}).gaps


def test_package_sources() -> None:
    cuda = "/etc/apt/sources.list.d/cuda.sources"
    assert gpu_facts_with().repositories == (
        Repository(
            path="/etc/apt/sources.list", uri="https://download.example.org/docker", suite="bookworm", enabled=True
        ),
        Repository(path="/etc/apt/sources.list", uri="http://y/cuda", suite="/", enabled=False),
        Repository(path=cuda, uri="https://packages.example.org/cuda", suite="/", enabled=False),
        Repository(path=cuda, uri="https://mirror.example.org/cuda", suite="/", enabled=False),
    )


def test_package_sources_of_dnf() -> None:
    path = "/etc/yum.repos.d/cuda.repo"
    text = "[cuda]\nname=cuda rhel9\nbaseurl = https://packages.example.org/rhel9\nenabled=1\n[other]\nenabled=0\nmirrorlist=http://m\n"
    facts = gpu_facts_with({"repository-files": answer(f"{path}\n/etc/yum.repos.d/not-kept.repo\n")}, {path: text})
    assert facts.repositories == (
        Repository(path=path, uri="https://packages.example.org/rhel9", suite="cuda rhel9", enabled=True),
        Repository(path=path, uri="http://m", suite=None, enabled=False),
    )


def test_what_other_installers_left() -> None:
    assert gpu_facts_with().foreign_installs == (
        ForeignInstall(kind="driver-runfile", path="/usr/bin/nvidia-uninstall"),
        ForeignInstall(kind="cuda-runfile", path="/usr/local/cuda-12.4/bin/cuda-uninstaller", note="12.4"),
        ForeignInstall(kind="driver-runfile-log", path="/var/log/nvidia-installer.log", note="550.54.14"),
    )


def test_unattended_upgrades() -> None:
    assert gpu_facts_with().automatic_updates == AutomaticUpdates(
        tool="unattended-upgrades",
        enabled=True,
        origins=("origin=Debian,codename=${distro_codename},label=Debian",),
        kept_back=("^nvidia-",),
        reboots=False,
    )


def test_unattended_upgrades_that_never_run() -> None:
    text = 'APT::Periodic::Unattended-Upgrade "0";\nUnattended-Upgrade::Automatic-Reboot "true";\n'
    automatic_updates = updates.parse_apt_config(text)
    assert (automatic_updates.enabled, automatic_updates.reboots) == (False, True)
    assert not updates.parse_apt_config("").enabled
    with pytest.raises(ParseError):
        updates.parse_apt_config("E: Unable to read\n")


def test_no_tool_for_updates() -> None:
    facts = gpu_facts_with({"signs": answer("/usr/bin/nvidia-smi\n")})
    assert facts.automatic_updates is None
    assert "automatic_updates" not in facts.gaps


@pytest.mark.parametrize(
    ("timer", "applies", "enabled"),
    [
        ("dnf-automatic-install.timer", "no", True),
        ("dnf-automatic.timer", "yes", True),
        ("dnf-automatic.timer", "no", False),
        ("x.timer", "yes", False),
    ],
)
def test_dnf_automatic(timer: str, applies: str, enabled: bool) -> None:
    show = f"Id={timer}\nLoadState=loaded\nActiveState=active\nSubState=waiting\nUnitFileState=enabled\n"
    facts = gpu_facts_with(
        {"signs": answer("/usr/bin/dnf-automatic\n"), "systemctl-units": answer(show)},
        {
            "/etc/dnf/automatic.conf": f"[commands]\napply_updates = {applies}\nreboot = when-needed\n",
            "/etc/dnf/dnf.conf": "exclude=nvidia-driver* kernel,cuda*\n",
        },
    )
    automatic_updates = facts.automatic_updates
    assert automatic_updates is not None
    assert (automatic_updates.tool, automatic_updates.enabled, automatic_updates.reboots) == (
        "dnf-automatic",
        enabled,
        True,
    )
    assert automatic_updates.kept_back == ("nvidia-driver*", "kernel", "cuda*")


def test_changes_that_could_not_be_reverted() -> None:
    (revert,) = gpu_facts_with().failed_reverts or ()
    assert (revert.change, revert.reasons) == ("firewall", ("/etc/a: No space left",))
    assert gpu_facts_with(files={"/run/gpunode/revert-firewall.json": None}).failed_reverts == ()
    for damaged in ("", "[]", "{}", '{"change": 5, "failed": []}', '{"change": "x", "failed": 5}'):
        facts = gpu_facts_with(files={"/run/gpunode/revert-firewall.json": damaged})
        assert facts.failed_reverts is None


def test_a_reboot_that_is_waited_for() -> None:
    assert gpu_facts_with().reboot_required == ("linux-image-amd64",)
    none = {"/run/reboot-required.pkgs": None}
    assert gpu_facts_with(files=none).reboot_required == ()
    mark = {"signs": answer("/run/reboot-required\n")}
    assert gpu_facts_with(mark, none).reboot_required == ("(unnamed)",)


def test_versions_of_programs() -> None:
    assert gpu_facts_with().tool_versions == {
        "docker": "28.5.1",
        "containerd": "1.7.28",
        "runc": "1.2.5",
        "nvidia-ctk": "1.18.0",
    }


def test_docker() -> None:
    assert gpu_facts_with().docker == DockerDaemon(
        version="28.5.1",
        runtimes=("io.containerd.runc.v2", "nvidia", "runc"),
        default_runtime="runc",
        cgroup_driver="systemd",
        cgroup_version="2",
        storage_driver="overlay2",
        live_restore=True,
    )


def test_docker_that_does_not_run_is_none() -> None:
    facts = gpu_facts_with({"docker-info": None})
    assert facts.docker is None
    assert "docker" not in facts.gaps


@pytest.mark.parametrize(
    "bad",
    [
        answer('version=""\n'),
        answer("version=28\nrubbish\n"),
        answer("", 1, "permission denied while trying to connect to the Docker daemon socket"),
        answer("", 124, "killed: no answer within 15 s", timed_out=True),
    ],
)
def test_docker_that_does_not_answer_is_a_gap(bad: object) -> None:
    assert "docker" in gpu_facts_with({"docker-info": bad}).gaps  # type: ignore[dict-item]


def test_settings_of_container_engines() -> None:
    engines = gpu_facts_with().containers
    assert engines is not None
    assert engines.docker_runtimes == ("nvidia",)
    assert (engines.docker_default_runtime, engines.toolkit_mode, engines.toolkit_no_cgroups) == (
        "nvidia",
        "auto",
        False,
    )
    assert engines.containerd_has_nvidia is False


def test_a_drop_in_gives_containerd_the_runtime() -> None:
    text = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]\n'
    engines = gpu_facts_with(files={"/etc/containerd/conf.d/99-nvidia.toml": text}).containers
    assert engines is not None
    assert engines.containerd_has_nvidia is True


@pytest.mark.parametrize("path", ["/etc/docker/daemon.json", "/etc/nvidia-container-runtime/config.toml"])
def test_broken_settings_are_a_gap_that_names_the_file(path: str) -> None:
    assert path in gpu_facts_with(files={path: '{"runtimes": '}).gaps["containers"]


def test_cdi() -> None:
    assert gpu_facts_with().cdi_specs == (
        CdiSpec(
            path="/etc/cdi/nvidia.yaml",
            size_bytes=12345,
            cdi_version="0.5.0",
            kind="nvidia.com/gpu",
            devices=("0", "all"),
            driver_versions=(VERSION,),
            missing=("/usr/lib/x86_64-linux-gnu/libcuda.so.535.247.01",),
            nodes=(CdiNode(path="/dev/nvidia-uvm", major=510, minor=0),),
        ),
        CdiSpec(
            path="/var/run/cdi/other.json",
            size_bytes=99,
            cdi_version="0.6.0",
            kind="example.org/fpga",
            devices=("one",),
            driver_versions=(),
            missing=(),
        ),
    )
