"""What a node fetches of a repository's key, and old keys that it removes."""

import base64
import io
import resource
import tarfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import old_keys, signing_key

from gpunode.provisioning import nvidia_repository

HTML = b"<!DOCTYPE html><html><body>Please log in</body></html>"


def key(number: int) -> bytes:
    """A public-key packet (old format, as gpg writes it) and a user id."""
    body = b"\x04" + bytes(4) + bytes([number]) * 20
    return b"\x99" + len(body).to_bytes(2, "big") + body + b"\xb4\x02me"


NVIDIAS, OTHER = key(1), key(2)


class Served(ThreadingHTTPServer):
    """What a repository answers, by path; ``faults`` are answered first, one each."""

    files: dict[str, bytes]
    faults: list[int]
    requests: list[str]
    waited: list[float]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    class Answer(BaseHTTPRequestHandler):
        server: Served

        def do_GET(self) -> None:
            self.server.requests.append(self.path)
            data = self.server.files.get(self.path)
            code = self.server.faults.pop(0) if self.server.faults else 200 if data is not None else 404
            self.send_response(code)
            self.end_headers()
            if code == 200 and data is not None:
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = Served(("127.0.0.1", 0), Answer)
    server.files, server.faults, server.requests, server.waited = {}, [], [], []
    monkeypatch.setattr(signing_key, "time", SimpleNamespace(sleep=server.waited.append))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


FILE, PACKAGE = "/3bf863cc.pub", "/ring.deb"


def address(served: Served, path: str) -> str:
    return f"http://127.0.0.1:{served.server_port}{path}"


def answer(served: Served, **changes: Any) -> dict[str, Any]:
    output: dict[str, Any] = signing_key.answered({"url": address(served, FILE), **changes})
    return output


def unpacked(served: Served) -> bytes:
    """What the node answers where the mirror has the package alone."""
    output = answer(served, keyring=address(served, PACKAGE))
    assert output["url"] == address(served, PACKAGE)
    return base64.b64decode(output["key"])


@pytest.mark.parametrize("data", [NVIDIAS, b"-----BEGIN", HTML, b""], ids=["key", "armor", "page", "nothing"])
def test_what_the_address_has_is_returned_for_the_controller_to_judge(served: Served, data: bytes) -> None:
    served.files[FILE] = data
    assert answer(served) == {"key": base64.b64encode(data).decode(), "url": address(served, FILE)}


def test_at_most_a_mebibyte_is_read(served: Served) -> None:
    served.files[FILE] = bytes(signing_key.LARGEST + 1)
    assert len(base64.b64decode(answer(served)["key"])) == 1 << 20


def test_a_fault_that_passes_is_tried_again_and_a_missing_file_is_not(served: Served) -> None:
    served.files[FILE] = NVIDIAS
    served.faults = [503, 502]
    assert "key" in answer(served)
    assert served.waited == [2, 4]
    served.files.clear()
    served.requests.clear()
    output = answer(served, keyring=address(served, PACKAGE))
    assert f"{address(served, FILE)}: HTTP Error 404" in output["error"]
    assert served.requests == [FILE, PACKAGE]
    assert "No such file" in answer(served, url="file:///nowhere/key.pub")["error"]
    assert served.waited == [2, 4]


@pytest.mark.parametrize(
    ("old", "new", "followed"),
    [
        ("https://a.example/key", "https://b.example/key", True),
        ("https://a.example/key", "http://b.example/key", False),
        ("https://a.example/key", "ftp://b.example/key", False),
        ("http://a.example/key", "http://b.example/key", True),
    ],
)
def test_a_redirect_never_leaves_encryption(old: str, new: str, followed: bool) -> None:
    handler, request = signing_key.StaysEncrypted(), Request(old)  # noqa: S310 - never opened
    if followed:
        assert handler.redirect_request(request, None, 302, "Found", {}, new).full_url == new
    else:
        with pytest.raises(HTTPError, match="without encryption"):
            handler.redirect_request(request, None, 302, "Found", {}, new)


@pytest.mark.parametrize(("code", "tries"), [(400, 1), (499, 1), (500, 3), (503, 3)])
def test_a_fault_that_stays_is_reported_after_three_tries(served: Served, code: int, tries: int) -> None:
    served.faults = [code] * 5
    assert f"HTTP Error {code}" in answer(served)["error"]
    assert (len(served.requests), served.waited) == (tries, [2, 4][: tries - 1])


def test_where_the_file_is_not_there_the_keyring_package_is_asked(served: Served, tmp_path: Path) -> None:
    served.files[PACKAGE] = keyring_package(tmp_path, OTHER + NVIDIAS)
    assert unpacked(served) == OTHER + NVIDIAS
    served.files[PACKAGE] = HTML
    assert unpacked(served) == HTML, "the controller reports what it is"
    served.files[FILE] = NVIDIAS
    assert answer(served, keyring=address(served, PACKAGE))["url"] == address(served, FILE)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_package_that_unpacks_to_gigabytes_is_refused(served: Served, tmp_path: Path, sparse: bool) -> None:
    """Unverified: a proxy or a mirror may have made it. The size of a sparse file is a number in the archive."""
    headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 36), "GNU.sparse.numblocks": "1"} if sparse else {}
    package = served.files[PACKAGE] = keyring_package(tmp_path, b"" if sparse else bytes(64 << 20), headers)
    assert len(package) < signing_key.LARGEST
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (60 << 20), hard))
    try:
        assert unpacked(served) == (bytes(signing_key.LARGEST) if sparse else package)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(("size", "fits"), [(8_384_000, True), (8_384_001, False)])
def test_the_tree_of_a_package_may_have_8_mebibytes(served: Served, tmp_path: Path, size: int, fits: bool) -> None:
    """An archive of tar has a multiple of 10240 bytes, and 2560 beside this file's."""
    served.files[PACKAGE] = keyring_package(tmp_path, NVIDIAS, others=size)
    assert (unpacked(served) == NVIDIAS) is fits


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
    assert "http://127.0.0.1:1/key" in answer(served, url="http://127.0.0.1:1/key")["error"]


def test_keyrings_in_which_an_old_key_may_be_go_to_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_keys, "APT", tmp_path)
    assert [name[-16:] for name in nvidia_repository.OLD_KEYS] == [*old_keys.KEYS]
    keyring = tmp_path / "trusted.gpg.d" / "all.gpg"
    keyring.parent.mkdir()
    keyring.write_bytes(OTHER)
    (tmp_path / "trusted.gpg").write_bytes(b"no keyring")
    assert old_keys.keyrings() == {}
    for name in old_keys.KEYS:
        data = OTHER + NVIDIAS + bytes.fromhex(name)
        keyring.write_bytes(data)
        assert old_keys.keyrings() == {str(keyring): base64.b64encode(data).decode()}


def test_a_proxy_comes_by_stdin_with_its_password(served: Served) -> None:
    """The server plays the proxy: it is asked for the whole address."""
    url = f"http://repository.invalid{FILE}"
    served.files[url] = NVIDIAS
    proxy = f"http://user:word@127.0.0.1:{served.server_port}"
    output = answer(served, url=url, proxy=proxy)
    assert (output["key"], served.requests) == (base64.b64encode(NVIDIAS).decode(), [url])
