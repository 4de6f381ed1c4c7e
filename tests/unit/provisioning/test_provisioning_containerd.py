"""containerd's configuration beside the toolkit's runtime."""

import tomllib

import pytest

from gpunode.provisioning.containerd import containerd_config

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
