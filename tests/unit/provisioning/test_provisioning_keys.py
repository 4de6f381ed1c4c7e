"""A repository's key against the publisher's fingerprints; gpg computes a key's fingerprint."""

import shutil
import subprocess

import pytest

from gpunode.catalog import load as catalog
from gpunode.provisioning.keys import fingerprints_of, key_problem

URL = "https://download.docker.com/linux/debian/gpg"
needs_gpg = pytest.mark.skipif(shutil.which("gpg") is None, reason="no gpg on this machine: apt-get install gnupg")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Name to (fingerprint, armored key), made by gpg; ``both`` is one file with two keys."""
    home = tmp_path_factory.mktemp("gnupg")
    home.chmod(0o700)

    def gpg(*words: str) -> str:
        argv = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
        return subprocess.run([*argv, *words], check=True, capture_output=True, text=True, timeout=60).stdout

    made = {}
    for name, kind in (("rsa", "rsa2048"), ("ed", "ed25519")):
        gpg("--quick-generate-key", f"{name} <{name}@example.com>", kind, "sign", "never")
        listing = gpg("--with-colons", "--list-keys", f"{name}@example.com").splitlines()
        fingerprint = next(line.split(":")[9] for line in listing if line.startswith("fpr:"))
        made[name] = (fingerprint, gpg("--armor", "--export", fingerprint))
    made["both"] = ("", gpg("--armor", "--export"))
    subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False, timeout=30)
    return made


@needs_gpg
@pytest.mark.parametrize("name", ["rsa", "ed"])
def test_the_fingerprint_is_that_of_gpg(keys: dict[str, tuple[str, str]], name: str) -> None:
    fingerprint, text = keys[name]
    assert fingerprints_of(text) == [fingerprint]
    spaced = " ".join(fingerprint[start : start + 4] for start in range(0, 40, 4)).lower()
    assert key_problem(text.replace("\n", "\r\n"), URL, [spaced]) == ""


@needs_gpg
def test_another_key_is_refused_also_beside_the_publishers(keys: dict[str, tuple[str, str]]) -> None:
    pinned = [keys["rsa"][0]]
    for name in ("ed", "both"):
        problem = key_problem(keys[name][1], URL, pinned)
        assert keys["ed"][0] in problem
        assert keys["rsa"][0] in problem
    assert key_problem(keys["rsa"][1] + keys["ed"][1], URL, pinned)
    assert key_problem(keys["ed"][1], "/etc/site.asc", []) == ""


@pytest.mark.parametrize("text", ["", "<html>proxy</html>", "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n!!\n"])
def test_what_is_not_a_key_is_refused(text: str) -> None:
    assert "no armored OpenPGP key" in key_problem(text, URL, ["0" * 40])
    assert "no armored OpenPGP key" in key_problem(text, "/etc/site.asc")


@needs_gpg
def test_a_key_that_is_cut_short_is_refused(keys: dict[str, tuple[str, str]]) -> None:
    lines = keys["rsa"][1].splitlines()
    cut = "\n".join([*lines[:4], lines[-1]]) + "\n"
    assert key_problem(cut, URL, [keys["rsa"][0]])


@pytest.mark.parametrize("source", ["http://download.docker.com/linux/debian/gpg", "ftp://mirror/gpg"])
def test_an_address_that_is_not_https_is_refused(source: str) -> None:
    assert "https only" in key_problem(None, source)
    assert key_problem(None, source.replace("http://", "https://").replace("ftp://", "https://")) == ""
    assert key_problem(None, "/etc/site.asc") == ""


def test_the_catalog_names_the_keys_of_both_repositories() -> None:
    toolkit = next(iter(catalog().container_toolkit.values()))
    docker = catalog().container_engines["docker"]
    found = [*docker.fingerprints, *docker.rpm_fingerprints, *toolkit.fingerprints]
    assert len(found) == 3
    assert all(len(name) == 40 for name in found)
