"""Planted secrets: none of them is in the bundle."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from probe_node import collect, printing, put, tool

from gpunode.facts import facts_from_bundle
from gpunode.onnode import probe as script

SECRET = "hunter2"  # noqa: S105


@pytest.mark.parametrize(
    "text",
    [
        f"password={SECRET}",
        f"password: {SECRET}",
        f"luks.passphrase={SECRET},x",
        f"PGPASSWORD='{SECRET} and more'",
        f'"splunk-token": "{SECRET}"',
        f'{{"auths":{{"r":{{"auth":"{SECRET}"}}}}}}',
        f'token="{SECRET}',
        f"api_key = {SECRET}",
        f"aws_secret_access_key={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"authorization: basic {SECRET}",
        f"https://host/?token={SECRET}&x=1",
        f"http://alice:{SECRET}@proxy:3128/",
        f"http://alice:p@{SECRET}@proxy:3128/",
        f"http://alice:p/{SECRET}@proxy:3128/",
        f"http://{SECRET}@proxy/",
        f"mysqld --password {SECRET} --port 1",
        f"mysqld --password={SECRET}",
        f"agent --registration-token {SECRET}",
        f'["--password", "{SECRET}"]',
        f'APT::Site::Password "{SECRET}";',
        f'{{"proxies":{{"http-proxy":"user:{SECRET}@proxy:8080"}}}}',
        f"https_proxy=user:p@{SECRET}@proxy",
        f"proxy = {SECRET}@proxy",
        f"proxy=user:p/{SECRET}@proxy",
        f"netroot=iscsi:user:{SECRET}@192.168.0.1::3260:1:iqn.2026-11.org.example:disk",
        f"netroot=iscsi:user:p/{SECRET}@[fd00::1]::3260:1:iqn.2026-11.org.example:disk",
        f"store user:{SECRET}@10.0.0.1",
        f"rootpw={SECRET}",
        f"PGPASS={SECRET}",
        f"DB_PASS_1={SECRET}",
        f"DB_PW={SECRET}",
        f"DB_PWD={SECRET}",
        f"tool --db-pw {SECRET}",
        f"rd.luks.key={SECRET}",
        f"wifi.psk={SECRET}",
        f"REGISTRY_AUTH={SECRET}",
        f"email_password        = {SECRET}",
        f'Authorization = ["Basic {SECRET}"]',
        f'Authorization = ["Basic {SECRET}]", "and {SECRET}"]',
        f'Authorization = [\n  "Basic {SECRET}",\n]',
        f'Authorization = ["Basic {SECRET}',
        f'{{"tokens": {{"a": {{"b": "{SECRET}"}}, "c": ["{SECRET}"]}}}}',
        f"Authorization: Negotiate {SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}",
    ],
)
def test_a_secret_is_covered(text: str) -> None:
    assert SECRET not in script.scrub(text)
    assert "***" in script.scrub(text)


CANARIES: dict[str, list[dict[str, str]]] = yaml.safe_load(
    Path(__file__).with_name("canaries.yml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(
    ("text", "secret"),
    [(each["text"], each.get("secret", "CANARY")) for canaries in CANARIES.values() for each in canaries],
)
def test_no_canary_survives(text: str, secret: str) -> None:
    assert secret in text
    covered = script.scrub(text)
    assert secret not in covered
    assert "***" in covered
    assert script.scrub(covered) == covered


def test_security_md_lists_the_kinds_of_the_corpus() -> None:
    promised = (Path(__file__).parents[3] / "SECURITY.md").read_text(encoding="utf-8")
    assert [kind for kind in CANARIES if kind not in promised] == []


@pytest.mark.parametrize(
    "text",
    [
        "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64/cuda-keyring_1.1-1_all.deb",
        "https://nvidia.github.io/libnvidia-container/stable/deb/amd64 /",
        "deb [signed-by=/usr/share/keyrings/cuda.gpg] https://developer.download.nvidia.com/compute/cuda/x /",
        "deb https://snapshot.debian.org/archive/debian/20260101T000000Z bookworm main",
        "https://github.com/NVIDIA/NvidiaContainerToolkitSources",
        "mirrorlist=https://mirrors.rockylinux.org/mirrorlist?arch=x86_64&repo=AppStream-9",
        "https://git.kernel.org/pub/scm/linux/kernel/git/torvalds/linux.git/commit/?id=1",
        "https://cdn.redhat.com/content/dist/rhel9/9/x86_64/appstream/os",
        "http://archive.ubuntu.com/ubuntu/dists/noble-updates/restricted/binary-amd64/Packages.xz",
        "root=/dev/sda1 quiet iommu=pt default_hugepagesz=1G",
        "https://developer.download.example.org/compute/cuda/repos/debian12/x86_64/",
        "NVRM: Xid (PCI:0000:1a:00): 31, pid=1234, name=python, Ch 00000008",
        '{"default-runtime": "nvidia", "exec-opts": ["native.cgroupdriver=systemd"]}',
        "libcuda1\t535.261.03-1\tamd64\thold ok installed\tnvidia-graphics-drivers",
        "<product_name>NVIDIA H100 80GB HBM3</product_name>",
        "iommu.passthrough=1 crashkernel=1G-4G:192M@16M,4G-:256M video=HDMI-A-1:1920x1080@60 pci=bypass=1",
        "earlycon=mem:64K@0x1000 root=ZFS=tank/root@first netroot=iscsi:10.0.0.1::3260:1:iqn.2026-11.org.example:disk",
        "nvidia/cuda:12.9.1-base@sha256:0123456789abcdef",
        "0::/user.slice/user-0.slice/user@0.service/app.slice",
        "author: NVIDIA Corporation",
        "Linux version 6.1.0-37-amd64 (debian-kernel@lists.debian.org) (gcc-12 12.2.0)",
        "TCEBypassMode: 0",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert script.scrub(text) == text


def test_settings_stay_readable() -> None:
    text = '{"log-opts": {"splunk-token": "x\\"y"}, "default-runtime": "nvidia"}'
    assert script.scrub(text) == '{"log-opts": {"splunk-token": "***"}, "default-runtime": "nvidia"}'


def test_what_stands_behind_a_covered_list_stays() -> None:
    text = '{"proxies": {"http-proxy": "u:pw@p:1"}, "authorization-plugins": ["a b", "c"], "default-runtime": "nvidia"}'
    covered = '{"proxies": {"http-proxy": "***@p:1"}, "authorization-plugins": ["***"], "default-runtime": "nvidia"}'
    assert script.scrub(text) == covered
    assert script.scrub(covered) == covered
    assert script.scrub("token: [abc def\nnext") == 'token: ["***"]\nnext'


@pytest.mark.timeout(120)
def test_covering_takes_linear_time_on_rubbish() -> None:
    for unit in (
        "a.b-",
        "://",
        "password",
        "password=",
        '--token "',
        "://a:",
        "auth=basic ",
        "a:",
        "a:@",
        "u:p@h",
        "proxy=",
        "proxy=a@",
        "iscsi:",
        "password    ",
        "password=[",
        "password=[\n",
        'password=["',
        'password=["a"\n',
        "password={]",
        "-----BEGIN PRIVATE KEY-----",
        "https://a",
        "https://a/?sig",
        "://abcd/aB3",
        "://h/a1",
        "eyJ",
        "xoxb-",
        "hf_a",
        "a.://" + "aB" * 2000 + "-",
    ):
        text = unit * (50_000 // len(unit))
        started = time.process_time()
        script.scrub(text)
        assert time.process_time() - started < 1, unit


def test_planted_secrets_do_not_leave_the_node(tmp_path: Path) -> None:
    plant = iter(f"planted{number:02}secret" for number in range(99))
    put(
        tmp_path,
        "/proc/cmdline",
        f"root=/dev/sda ds=http://bob:{next(plant)}@10.0.0.1/x luks.password={next(plant)} quiet"
        f" netroot=iscsi:u:{next(plant)}@10.0.0.1::::iqn rootpw={next(plant)} rd.luks.key={next(plant)}\n",
    )
    put(tmp_path, "/etc/apt/sources.list", f"deb https://u:{next(plant)}@packages.example.org/cuda / \n")
    put(tmp_path, "/etc/apt/sources.list.d/other.list", f"deb https://u:{next(plant)}@example.org/else /\n")
    put(tmp_path, "/etc/apt/auth.conf", f"machine example.org login u password {next(plant)}\n")
    put(tmp_path, "/etc/yum.repos.d/cuda.repo", f"[cuda]\nbaseurl=https://x/cuda\nusername=u\npassword={next(plant)}\n")
    put(tmp_path, "/etc/dnf/dnf.conf", f"proxy_password={next(plant)}\nexclude=nvidia*\n")
    put(tmp_path, "/etc/dnf/automatic.conf", f"[email]\nemail_password = {next(plant)}\napply_updates = yes\n")
    put(
        tmp_path,
        "/etc/docker/daemon.json",
        f'{{"proxies": {{"http-proxy": "http://u:{next(plant)}@p:1", "https-proxy": "u:{next(plant)}@p:1"}},'
        f' "log-opts": {{"splunk-token": "{next(plant)}"}},'
        f' "default-runtime": "nvidia"}}',
    )
    put(
        tmp_path,
        "/etc/containerd/config.toml",
        f'version = 2\n[x.auth]\npassword = "{next(plant)}"\nauth = "{next(plant)}"\n',
    )
    put(
        tmp_path,
        "/etc/environment",
        f"HF_TOKEN={next(plant)}\nNCCL_DEBUG=INFO\nHTTPS_PROXY=http://u:{next(plant)}@p:1\n",
    )
    put(
        tmp_path,
        "/etc/profile.d/site.sh",
        f"export AWS_SECRET_ACCESS_KEY={next(plant)}\nexport CUDA_LAUNCH_BLOCKING=1\n",
    )
    put(tmp_path, "/root/.docker/config.json", f'{{"auths": {{"r": {{"auth": "{next(plant)}"}}}}}}')
    put(tmp_path, "/run/systemd/system/x", "")
    put(tmp_path, "/proc/4242/comm", "server\n")
    put(tmp_path, "/proc/4242/stat", "4242 (server) D " + "1 " * 40)
    put(tmp_path, "/proc/4242/cmdline", f"server\0--password\0{next(plant)}\0")
    put(tmp_path, "/proc/4242/environ", f"HF_TOKEN={next(plant)}\0")
    put(tmp_path, "/dev/nvidia0", "")
    (tmp_path / "proc/4242/fd").mkdir()
    (tmp_path / "proc/4242/fd/3").symlink_to("/dev/nvidia0")
    tools = tmp_path / "bin"
    tool(
        tools,
        "systemctl",
        f"""case "$*" in
        *Environment*) echo 'Environment=HF_TOKEN={next(plant)} NCCL_DEBUG=WARN "OTHER=two {next(plant)}"' ;;
        *) echo "url=http://u:{next(plant)}@h/ token={next(plant)}" ;;
        esac""",
    )
    tool(tools, "dkms", f"echo proxy https://alice:{next(plant)}@proxy:3128; echo API_KEY={next(plant)} >&2")
    senders = [f'Unattended-Upgrade::Sender "u:{next(plant)}";', f'Unattended-Upgrade::Mail "{next(plant)}";']
    tool(tools, "apt-config", printing([*senders, f'APT::Periodic::Enable-Token "{next(plant)}";']))
    tool(tools, "journalctl", printing([f"2026-11-20T09:00:00+0000 h kernel: NVRM: with password={next(plant)}"]))
    number = int(next(plant)[7:9])
    bundle = collect(tmp_path, tools)
    text = bundle.to_json()
    assert number > 20
    assert [known for known in range(number) if f"planted{known:02}secret" in text] == []
    facts = facts_from_bundle(bundle)
    assert facts.containers is not None
    assert facts.containers.docker_default_runtime == "nvidia"
    assert [(setting.path, setting.name, setting.value) for setting in facts.environment or ()] == [
        ("/etc/environment", "NCCL_DEBUG", "INFO"),
        ("/etc/profile.d/site.sh", "CUDA_LAUNCH_BLOCKING", "1"),
        ("systemd", "NCCL_DEBUG", "WARN"),
    ]


def test_a_running_process_is_seen_without_its_arguments() -> None:
    """On this machine: a process with a secret in its arguments and environment, while the probe looks."""
    planted = "planted-in-a-process"
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "--password", planted],
        env={"HF_TOKEN": planted},
        start_new_session=True,
    )
    try:
        answer = subprocess.run(
            [sys.executable, "-"],
            input=Path(script.__file__).read_bytes(),
            capture_output=True,
            check=True,
            timeout=90,
            env={"NCCL_DEBUG": planted},
            start_new_session=True,
        )
    finally:
        process.kill()
        process.wait(10)
    assert planted.encode() not in answer.stdout
