"""The key of NVIDIA's repository as a node fetches and verifies it, and old keys that it removes."""

import base64
import hashlib
import io
import random
import resource
import tarfile
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import old_keys, repository_key
from effort import effort

HTML = b"<!DOCTYPE html><html><body>Please log in</body></html>"


def key(number: int) -> bytes:
    """A public-key packet (old format, as gpg writes it) and a user id."""
    body = b"\x04" + bytes(4) + bytes([number]) * 20
    return b"\x99" + len(body).to_bytes(2, "big") + body + b"\xb4\x02me"


def fingerprint(one: bytes) -> str:
    body = one[3 : 3 + int.from_bytes(one[1:3], "big")]
    return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()  # noqa: S324


def armour(data: bytes, version: str = "Version: GnuPG v2\n") -> bytes:
    text = base64.b64encode(data).decode("ascii")
    return (
        f"-----BEGIN PGP PUBLIC KEY BLOCK-----\n{version}\n{text}\n=AAAA\n-----END PGP PUBLIC KEY BLOCK-----\n".encode()
    )


NVIDIAS, OTHER = key(1), key(2)


class Served(ThreadingHTTPServer):
    """What a repository answers, by path; ``faults`` are answered first, one each."""

    files: dict[str, bytes]
    faults: list[int]
    asked: list[str]
    waited: list[float]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(urllib.request, "_opener", None)  # a proxy of one test must not affect the next

    class Answer(BaseHTTPRequestHandler):
        server: Served

        def do_GET(self) -> None:
            self.server.asked.append(self.path)
            data = self.server.files.get(self.path)
            code = self.server.faults.pop(0) if self.server.faults else 200 if data is not None else 404
            self.send_response(code)
            self.end_headers()
            if code == 200 and data is not None:
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = Served(("127.0.0.1", 0), Answer)
    server.files, server.faults, server.asked, server.waited = {}, [], [], []
    monkeypatch.setattr(repository_key, "time", SimpleNamespace(sleep=server.waited.append))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def answer(served: Served, **changes: Any) -> dict[str, Any]:
    question = {
        "url": f"http://127.0.0.1:{served.server_port}/",
        "file": f"{fingerprint(NVIDIAS)[-8:].lower()}.pub",
        "fingerprint": fingerprint(NVIDIAS),
        "sha256_without_version": None,
        "keyring": None,
        "keyring_sha256": None,
        **changes,
    }
    output: dict[str, Any] = repository_key.answered(question)
    return output


def own_file() -> str:
    return f"/{fingerprint(NVIDIAS)[-8:].lower()}.pub"


@pytest.mark.parametrize("data", [NVIDIAS, armour(NVIDIAS), armour(NVIDIAS, ""), armour(OTHER + NVIDIAS)])
def test_a_key_with_the_fingerprint_is_accepted_and_no_other_beside_it(served: Served, data: bytes) -> None:
    served.files[own_file()] = data
    output = answer(served)
    assert output == {"key": base64.b64encode(NVIDIAS).decode(), "fingerprint": fingerprint(NVIDIAS)}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (armour(OTHER), f"contains {fingerprint(OTHER)}, NVIDIA's key is {fingerprint(NVIDIAS)}"),
        (HTML, "an HTML page"),
        (b"no key at all", "is not an OpenPGP key: not OpenPGP"),
        (armour(NVIDIAS)[:90], "is not an OpenPGP key"),
        (b"", "contains no key"),
    ],
    ids=["another key", "a proxy's page", "text", "cut off", "nothing"],
)
def test_what_is_not_the_key_is_named_as_what_it_is(served: Served, data: bytes, words: str) -> None:
    served.files[own_file()] = data
    output = answer(served)
    assert output["differs"] is True
    assert words in output["error"]
    assert "key" not in output


def test_without_a_fingerprint_the_sum_of_the_file_without_its_version_counts(served: Served) -> None:
    served.files[own_file()] = armour(NVIDIAS)
    known = hashlib.sha256(armour(NVIDIAS, "")).hexdigest()
    assert "key" in answer(served, fingerprint=None, sha256_without_version=known)
    assert answer(served, fingerprint=None, sha256_without_version="0" * 64)["differs"] is True
    assert answer(served, fingerprint=None)["differs"] is True, "the 32 bits in the file's name vouch for nothing"
    served.files[own_file()] = NVIDIAS + OTHER
    output = answer(served, fingerprint=None, sha256_without_version=hashlib.sha256(NVIDIAS + OTHER).hexdigest())
    assert output == {"key": base64.b64encode(NVIDIAS + OTHER).decode(), "fingerprint": fingerprint(NVIDIAS)}


@pytest.mark.parametrize(("size", "fits"), [(1 << 20, True), ((1 << 20) + 1, False)])
def test_at_most_a_mebibyte_is_read(served: Served, size: int, fits: bool) -> None:
    """A key, and behind it a user id that fills the file."""
    rest = size - len(NVIDIAS) - 5
    served.files[own_file()] = NVIDIAS + b"\xb6" + rest.to_bytes(4, "big") + bytes(rest)
    assert ("key" in answer(served)) is fits


def spliced(rng: random.Random) -> str:
    """A line for NVIDIA's armor, behind its first 16 characters: the key's body ends in it, then comes a foreign
    key, and the rest of NVIDIA's becomes a user id.
    """
    rest = len(NVIDIAS) - 12
    foreign = rng.randbytes(28 - 12 - 6) + OTHER
    size = -(len(foreign) + 4) % 3
    foreign += bytes([0xB4, size]) + bytes(size) + bytes([0xB4, rest])
    return f"Version{rng.choice('ABCD')}{base64.b64encode(foreign).decode()}"


def test_nothing_hides_behind_the_version_line_that_the_sum_leaves_out(served: Served) -> None:
    """A line of the key that begins with Version is outside a sum that leaves out such lines everywhere."""
    text = base64.b64encode(NVIDIAS).decode()
    body = "\n".join(text[at : at + 16] for at in range(0, len(text), 16))
    plain = armour(NVIDIAS).decode().replace(text, body)
    known = hashlib.sha256(plain.replace("Version: GnuPG v2\n", "").encode()).hexdigest()
    ours = base64.b64encode(NVIDIAS).decode()
    # The foreign key has one hexadecimal digit of the name here; eight take some minutes.
    name = f"{fingerprint(NVIDIAS)[-1]}.pub"
    rng = random.Random(3)  # noqa: S311
    accepted = 0
    for _ in range(effort(150, 5000)):
        lines = plain.splitlines()
        for _ in range(rng.randint(1, 2)):
            version = f"Version{rng.choice([ours, f'{ours}-----END PGP PUBLIC KEY BLOCK-----', ': 1', ''])}"
            where = rng.choice([4, rng.randrange(len(lines) + 1)])
            lines.insert(where, rng.choice([spliced(rng), spliced(rng), version]))
        served.files[f"/{name}"] = "".join(f"{line}\n" for line in lines).encode()
        found = answer(served, file=name, fingerprint=None, sha256_without_version=known)
        accepted += "key" in found
        assert found.get("key", ours) == ours, lines
    assert accepted, "a Version line among the headers is left out"


def test_a_fault_that_passes_is_tried_again_and_a_missing_file_is_not(served: Served) -> None:
    served.files[own_file()] = NVIDIAS
    served.faults = [503, 502]
    assert "key" in answer(served)
    assert served.waited == [2, 4]
    served.files.clear()
    for file, keyring in ((own_file()[1:], None), (None, "ring.deb")):
        served.asked.clear()
        assert (
            f":{served.server_port}/{file or keyring}: HTTP Error 404"
            in answer(served, file=file, keyring=keyring)["error"]
        )
        assert len(served.asked) == 1
    assert "No such file" in answer(served, url="file:///nowhere/")["error"]
    assert served.waited == [2, 4]


@pytest.mark.parametrize(("code", "tries"), [(400, 1), (499, 1), (500, 3), (503, 3)])
def test_a_fault_that_stays_is_reported_after_three_tries(served: Served, code: int, tries: int) -> None:
    served.faults = [code] * 5
    assert f"HTTP Error {code}" in answer(served)["error"]
    assert (len(served.asked), served.waited) == (tries, [2, 4][: tries - 1])


def test_where_the_file_is_not_there_the_keyring_package_is_asked(served: Served, tmp_path: Path) -> None:
    package = keyring_package(tmp_path, OTHER + NVIDIAS)
    served.files["/ring.deb"] = package
    assert answer(served, keyring="ring.deb")["fingerprint"] == fingerprint(NVIDIAS)
    sum_of = {"file": None, "fingerprint": None, "keyring": "ring.deb"}
    assert "key" in answer(served, **sum_of, keyring_sha256=hashlib.sha256(package).hexdigest())
    assert "has the checksum" in answer(served, **sum_of, keyring_sha256="0" * 64)["error"]
    served.files["/ring.deb"] = HTML
    assert "an HTML page" in answer(served, keyring="ring.deb")["error"]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_package_that_unpacks_to_gigabytes_is_refused(served: Served, tmp_path: Path, sparse: bool) -> None:
    """Unverified: a proxy or a mirror may have made it. The size of a sparse file is a number in the archive."""
    headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 36), "GNU.sparse.numblocks": "1"} if sparse else {}
    served.files["/ring.deb"] = keyring_package(tmp_path, b"" if sparse else bytes(64 << 20), headers)
    assert len(served.files["/ring.deb"]) < repository_key.LARGEST
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (60 << 20), hard))
    try:
        assert "is not an OpenPGP key" in answer(served, keyring="ring.deb")["error"]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(("size", "fits"), [(8_384_000, True), (8_384_001, False)])
def test_the_tree_of_a_package_may_have_8_mebibytes(served: Served, tmp_path: Path, size: int, fits: bool) -> None:
    """An archive of tar has a multiple of 10240 bytes, and 2560 beside this file's."""
    served.files["/ring.deb"] = keyring_package(tmp_path, NVIDIAS, others=size)
    assert ("key" in answer(served, keyring="ring.deb")) is fits


def keyring_package(folder: Path, keyring: bytes, headers: dict[str, str] | None = None, others: int = 0) -> bytes:
    """What dpkg-deb takes for a package: an archive of three members. ``others``: bytes of another file in it."""
    tree = io.BytesIO()
    with tarfile.open(fileobj=tree, mode="w:gz") as tar:
        if others:
            row = tarfile.TarInfo("./usr/share/other")
            row.size = others
            tar.addfile(row, io.BytesIO(bytes(others)))
        row = tarfile.TarInfo("./usr/share/keyrings/cuda-archive-keyring.gpg")
        row.size, row.pax_headers = len(keyring), headers or {}
        tar.addfile(row, io.BytesIO(keyring))
    control = io.BytesIO()
    with tarfile.open(fileobj=control, mode="w:gz") as tar:
        text = b"Package: cuda-keyring\nVersion: 1.1-1\nArchitecture: all\nMaintainer: x <x@y>\nDescription: x\n"
        row = tarfile.TarInfo("./control")
        row.size = len(text)
        tar.addfile(row, io.BytesIO(text))
    made = b"!<arch>\n"
    for name, data in (
        ("debian-binary", b"2.0\n"),
        ("control.tar.gz", control.getvalue()),
        ("data.tar.gz", tree.getvalue()),
    ):
        made += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
        )
    (folder / "made.deb").write_bytes(made)
    return made


def test_a_mirror_out_of_reach_is_named_with_its_address(served: Served) -> None:
    assert "http://127.0.0.1:1/" in answer(served, url="http://127.0.0.1:1/")["error"]


def test_old_keys_leave_the_common_keyring_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_keys, "APT", tmp_path)
    monkeypatch.setattr(old_keys, "KEYS", (fingerprint(NVIDIAS),))
    keyring = tmp_path / "trusted.gpg.d" / "all.gpg"
    keyring.parent.mkdir()
    keyring.write_bytes(OTHER)
    (tmp_path / "trusted.gpg").write_bytes(b"no keyring")
    assert old_keys.remainders() == {}
    keyring.write_bytes(NVIDIAS + OTHER)
    keyring.with_name("alone.gpg").write_bytes(NVIDIAS)
    found = {path: base64.b64decode(rest) for path, rest in old_keys.remainders().items()}
    assert found == {str(keyring): OTHER, str(keyring.with_name("alone.gpg")): b""}


def test_a_proxy_comes_by_stdin_with_its_password(served: Served) -> None:
    """The server plays the proxy: it is asked for the whole address."""
    address = f"http://repository.invalid{own_file()}"
    served.files[address] = NVIDIAS
    proxy = f"http://user:word@127.0.0.1:{served.server_port}"
    output = answer(served, url="http://repository.invalid/", proxy=proxy)
    assert (output.get("fingerprint"), served.asked) == (fingerprint(NVIDIAS), [address])
