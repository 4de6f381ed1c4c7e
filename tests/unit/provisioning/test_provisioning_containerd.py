"""containerd's configuration beside the toolkit's runtime."""

import hashlib
import subprocess
import tomllib
from pathlib import Path

import pytest

from gpunode.provisioning.containerd import RECORDED, _recorded, containerd_config

CNI = 'version = 2  # ours\n[plugins."io.containerd.grpc.v1.cri".cni]\nbin_dir = "/opt/cni"\n'
CRI = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd'


@pytest.mark.parametrize("text", [None, "", CNI, f'{CRI}.runtimes.crun]\nruntime_type = "io.containerd.runc.v2"\n'])
def test_containerd_keeps_runc_beside_the_toolkit(text: str | None) -> None:
    written = containerd_config(text)
    assert written.startswith(text or "version = 2\n")
    runtimes = tomllib.loads(written)["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]
    assert runtimes["runc"] == {"runtime_type": "io.containerd.runc.v2"}
    assert containerd_config(written) == written


@pytest.mark.parametrize(
    "text",
    [
        f"{CRI}.runtimes.runc.options]\nSystemdCgroup = true\n",
        f'{CRI}]\ndefault_runtime_name = "crun"\n',
        f"{CRI}]\nruntimes = {{}}\n",
        "version = 3\n",
        'root = "/data"\n',
        "plugins = 1\n",
        "[",
    ],
    ids=["runc", "another", "inline", "version-3", "version-1", "no-table", "no-toml"],
)
def test_a_file_of_containerd_that_has_it_or_cannot_take_it_stays(text: str) -> None:
    assert containerd_config(text) == text


def test_the_record_has_the_command_and_the_digests_of_the_files_that_exist(tmp_path: Path) -> None:
    config, drop_in, record = tmp_path / "config.toml", tmp_path / "99-nvidia.toml", tmp_path / "sums"
    config.write_text("version = 2\n")
    for exists in (False, True):
        head = f"# nvidia-ctk 'a b' %s {exists}"
        drop_in.write_text("x") if exists else None
        done = subprocess.run([*RECORDED, head, config, drop_in, record], check=True, capture_output=True, timeout=30)
        text = record.read_text()
        assert (text.splitlines()[0], done.stdout) == (head, b"")
        assert (_recorded(text, str(drop_in)) is not None) is exists
        assert _recorded(text, str(config)) == hashlib.sha256(config.read_bytes()).hexdigest()
