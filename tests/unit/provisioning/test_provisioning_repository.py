"""NVIDIA's repository as it is put on a node: address, key, order of preference, and what it replaces."""

from pathlib import Path
from typing import Any

import pytest
from driver_samples import BUNDLE, facts_of
from node_samples import node, planned
from plan_samples import context_of, state_of

from gpunode.catalog import origins
from gpunode.provisioning import nvidia_repository
from gpunode.provisioning.keys import armored
from gpunode.provisioning.repository import repository_key

ROOT = Path(__file__).parents[3]
PATHS = nvidia_repository.APT_PATHS
# A public-key packet with an empty body: enough of a key for what only looks at packets.
PACKET = b"\xc6\x03\x04\x00\x01"


def offer(
    apt: dict[str, Any] | None = None,
    source: str = "nvidia",
    system: str = "12",
    distribution: str = "debian",
    machine: str = "x86_64",
    **settings: Any,
) -> nvidia_repository.RepositoryConfig:
    facts = facts_of(BUNDLE)
    facts |= {"os": {**facts["os"], "id": distribution, "version_id": system}, "architecture": machine}
    state = state_of(facts, {"sources": [], **(apt or {})})
    model = nvidia_repository.NvidiaRepositorySettings(**settings)
    return nvidia_repository.offered(state, model, context_of(), source)


def entry(file: str, *uris: str) -> dict[str, Any]:
    return {"file": file, "uris": list(uris), "suites": ["/"], "components": [], "types": ["deb"], "options": {}}


def test_nvidias_own_comes_with_its_key_by_fingerprint() -> None:
    repository = offer()
    url = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/"
    assert repository.archive is not None
    assert (repository.archive.uri, repository.archive.key) == (url, f"{url}3bf863cc.pub")
    assert repository.archive.fingerprints == ("EB693B3035CD5710E231E123A4B469963BF863CC",)
    assert repository.archive.keyring == f"{url}cuda-keyring_1.1-1_all.deb"
    newer = offer(system="13").archive
    assert newer is not None
    assert newer.fingerprints == ("02182E60104FCDC26EAE1B8597A5D4CB8793F200",)
    assert "Signed-By: /etc/apt/keyrings/gpunode-nvidia-cuda.asc" in repository.files[PATHS["sources"]]
    assert repository.problems == ()


def test_the_distributions_packages_come_first() -> None:
    text = offer().files[PATHS["preferences"]]
    assert "Pin: release o=NVIDIA, l=NVIDIA CUDA\nPin-Priority: 100\n" in text
    assert "mft" not in text
    doca = entry(
        "/etc/apt/sources.list.d/doca.list", "https://linux.mellanox.com/public/repo/doca/3.2.1/debian12/x86_64/"
    )
    assert "Package: mft mft-* kernel-mft*" in offer({"sources": [doca]}).files[PATHS["preferences"]]


def test_a_mirror_with_its_own_key(tmp_path: Path) -> None:
    file = tmp_path / "site.gpg"
    file.write_bytes(PACKET)
    repository = offer(url="http://mirror.test/cuda/", key=str(file), proxy="http://proxy.test:3128")
    assert repository.archive is not None
    assert repository.archive.uri == "http://mirror.test/cuda/debian12/x86_64/"
    assert (repository.archive.key, repository.archive.keyring) == (str(file), ""), "no other key is fetched for it"
    text, _ = repository_key(repository.archive, repository.key_path, state_of(facts_of(BUNDLE)), context_of())
    assert text == armored(PACKET)
    assert 'Acquire::http::Proxy::mirror.test "http://proxy.test:3128";' in repository.files[PATHS["proxy"]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"key": "/nowhere/key.asc"}, "nvidia_repository_key: /nowhere/key.asc: No such file"),
        ({"key": __file__}, "contains no OpenPGP key"),
        ({"key": "http://mirror.test/key.asc"}, "https only"),
        ({"url": "mirror.test/cuda"}, "nvidia_repository_url: mirror.test/cuda is not a valid URL"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_variable(settings: dict[str, Any], words: str) -> None:
    (line,) = planned("nvidia_repository", node(), state="present", **settings).refusals
    assert line.startswith("nvidia_repository_")
    assert words in line


@pytest.mark.parametrize("mirror", ["", "https://mirror.test/cuda", "http://mirror.test/cuda", "file:/srv/cuda"])
def test_a_key_that_nothing_vouches_for_is_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: str
) -> None:
    """Neither https nor the 32 bits in the file's name show who owns the key."""
    table = origins.table()
    unknown = table.signing_keys["debian12"].model_copy(update={"fingerprint": None})
    keys = {**table.signing_keys, "debian12": unknown}
    monkeypatch.setattr(origins, "table", lambda: table.model_copy(update={"signing_keys": keys}))
    (line,) = offer(url=mirror).problems
    assert line.startswith("repository-key-unknown: ")
    assert "nvidia_repository_key" in line
    file = tmp_path / "site.gpg"
    file.write_bytes(PACKET)
    assert offer(url=mirror, key=str(file)).problems == ()


def test_another_source_removes_it_unless_it_is_requested() -> None:
    repository = offer(source="debian")
    assert not repository.wanted
    assert repository.files == {}
    assert offer(source="debian", state="present").wanted
    assert not offer(state="absent").wanted


def test_old_lists_go_and_shared_ones_are_named() -> None:
    cuda = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64"
    old = entry("/etc/apt/sources.list.d/cuda-debian12-x86_64.list", cuda)
    shared = entry("/etc/apt/sources.list", "http://deb.example/debian", cuda)
    repository = offer({"sources": [old, shared], "installed": {"cuda-keyring": "1.1-1"}})
    assert repository.old_lists == ("/etc/apt/sources.list.d/cuda-debian12-x86_64.list",)
    assert repository.old_packages == ("cuda-keyring",)
    assert [line.partition(":")[0] for line in repository.problems] == ["repository-twice"]
