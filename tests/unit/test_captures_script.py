"""`make captures` against a server on loopback: what is altered, gone, late, endless or not to be trusted."""

import errno
import hashlib
import importlib.util
import random
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from types import ModuleType

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from effort import effort

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef" * 2 + "01234567"
TEXT = b"one\ntwo  \r\n\nfour\xff\nfive"
PUBLIC = f"/owner/name/{COMMIT}/docs/a%20log.md"
HEAD = "file\tkind\trepository\tcommit\tpath\tlines\tsha256\torigin\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("captures_script", ROOT / "scripts" / "captures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def row(file: str, lines: str, data: bytes, **more: str) -> str:
    columns = {
        "file": file,
        "kind": "dmesg",
        "repository": "owner/name",
        "commit": COMMIT,
        "path": "docs/a log.md",
        "lines": lines,
        "sha256": hashlib.sha256(data).hexdigest(),
        "origin": "genuine",
        **more,
    }
    return "\t".join(columns.values()) + "\n"


def authority(folder: Path, host: str) -> Path:
    """Write a self-signed authority with its key, which is the server's certificate as well."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    path = folder / f"{host}.pem"
    path.write_bytes(pem)
    return path


class Server:
    """An HTTPS server on loopback. ``answers`` is what it does for each path; ``asked`` are the paths."""

    def __init__(self, certificate: Path) -> None:
        self.answers: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                outer.answers.get(self.path, status(404))(self)

            def log_message(self, *_arguments: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_arguments: object) -> None:
                pass

        self.http = Quiet(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"https://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def end(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def status(code: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


def body(data: bytes, length: int | None = None) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(data) if length is None else length))
        request.end_headers()
        request.wfile.write(data)

    return answer


def endless(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    try:
        while True:
            request.wfile.write(b"x" * 65536)
    except OSError:
        request.close_connection = True


def silent(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "10")
    request.end_headers()
    request.wfile.write(b"x")
    request.wfile.flush()
    request.connection.settimeout(5)
    try:
        request.connection.recv(1)
    except OSError:
        request.close_connection = True


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority(tmp_path_factory.mktemp("authority"), "127.0.0.1")


@pytest.fixture
def server(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.delenv("GPUNODE_CAPTURES", raising=False)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    started = Server(certificate)
    yield started
    started.end()


Run = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def run(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the script: exit code, stdout, lines of stderr."""
    monkeypatch.setattr(script.time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(script, "LARGEST", 100_000)
    monkeypatch.setattr(script, "ANSWER_S", 0.3)

    def call(rows: str, url: str = "https://127.0.0.1:1") -> tuple[int, str, list[str]]:
        manifest = tmp_path / "manifest.tsv"
        manifest.write_text(HEAD + rows, encoding="utf-8")
        try:
            code = script.main(["--manifest", str(manifest), "--to", str(tmp_path / "kept"), "--server", url])
        except SystemExit as err:
            code = err.code
        out, err_text = capsys.readouterr()
        return code, out, err_text.splitlines()

    return call


WHOLE = row("a/whole.txt", "whole", TEXT)
PART = row("a/part.txt", "2-4", b"two  \r\n\nfour\xff\n")


def test_each_file_is_downloaded_once_and_an_interrupted_run_is_continued(
    run: Run, server: Server, tmp_path: Path
) -> None:
    server.answers[PUBLIC] = body(TEXT)
    assert run(WHOLE + PART, server.url) == (0, f"captures: 2 of 2 in {tmp_path}/kept\n", [])
    assert (tmp_path / "kept/a/part.txt").read_bytes() == b"two  \r\n\nfour\xff\n"
    assert server.asked == [PUBLIC]
    (tmp_path / "kept/a/part.txt").write_bytes(b"two")
    assert run(WHOLE + PART, server.url)[0] == 0
    assert server.asked == [PUBLIC, PUBLIC]
    assert run(WHOLE + PART, server.url)[0] == 0
    assert server.asked == [PUBLIC, PUBLIC]
    assert sorted(path.name for path in (tmp_path / "kept/a").iterdir()) == ["part.txt", "whole.txt"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (body(TEXT[:-1] + b"E"), ("altered: SHA-256", 1)),
        (status(404), ("gone: owner/name/docs/a log.md at 0123456789ab (HTTP 404)", 1)),
        (status(410), ("(HTTP 410)", 1)),
        (status(503), ("HTTP 503 (3 attempts)", 3)),
        (status(302, Location="http://127.0.0.1:1/"), ("redirected to 'http://127.0.0.1:1/', not followed", 1)),
        (body(TEXT, len(TEXT) + 5), ("(3 attempts)", 3)),
        (silent, ("(3 attempts)", 3)),
        (endless, ("more than 100000 bytes", 1)),
        (body(b"\x00" * 90_000), ("altered: SHA-256", 1)),
        (lambda request: request.wfile.write(b"\xff\x1b[31m nonsense\r\n\r\n"), ("?[31m nonsense (3 attempts)", 3)),
    ],
)
def test_what_cannot_be_had_is_one_line_and_leaves_nothing(
    run: Run,
    server: Server,
    tmp_path: Path,
    answer: Callable[[BaseHTTPRequestHandler], None],
    expected: tuple[str, int],
) -> None:
    server.answers[PUBLIC] = answer
    server.answers[f"/owner/other/{COMMIT}/docs/a%20log.md"] = body(TEXT)
    code, out, (line,) = run(WHOLE + row("b/fine.txt", "whole", TEXT, repository="owner/other"), server.url)
    print(line)
    assert (code, out) == (1, f"captures: 1 of 2 in {tmp_path}/kept\n")
    assert line.startswith("captures: a/whole.txt: ")
    words, requests = expected
    assert words in line
    assert server.asked.count(PUBLIC) == requests
    assert [path.name for path in (tmp_path / "kept").glob("*/*")] == ["fine.txt"]


def test_a_server_that_fails_once_is_asked_again(run: Run, server: Server) -> None:
    def second(request: BaseHTTPRequestHandler) -> None:
        (status(500) if len(server.asked) == 1 else body(TEXT))(request)

    server.answers[PUBLIC] = second
    assert run(WHOLE, server.url)[0] == 0


def test_a_file_that_drips_ends_at_its_limit(
    run: Run, script: ModuleType, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "FILE_S", -1.0)
    server.answers[PUBLIC] = body(TEXT)
    code, _, (line,) = run(WHOLE, server.url)
    assert code == 1
    assert "not complete after" in line


@pytest.mark.parametrize("wrong", ["unknown authority", "other host"])
def test_a_wrong_certificate_ends_it_with_one_line(
    run: Run, certificate: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str
) -> None:
    other = authority(tmp_path, "127.0.0.2")
    server = Server(other)
    monkeypatch.setenv("SSL_CERT_FILE", str(other if wrong == "other host" else certificate))
    server.answers[PUBLIC] = body(TEXT)
    code, out, (line,) = run(WHOLE + row("b/fine.txt", "whole", TEXT, repository="owner/other"), server.url)
    server.end()
    print(line)
    assert (code, out) == (1, f"captures: 0 of 2 in {tmp_path}/kept\n")
    assert line.startswith(f"captures: {server.url}: wrong certificate: ")
    assert server.asked == []


def test_no_server_ends_it_with_one_line(run: Run) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"https://127.0.0.1:{free.getsockname()[1]}"
    code, _, (line,) = run(WHOLE + PART, url)
    assert code == 1
    assert line.startswith(f"captures: {url} cannot be reached: ")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), (1, "No space left on device")),
        (KeyboardInterrupt(), (130, "interrupted; the next run continues")),
    ],
)
def test_an_end_in_the_middle_leaves_whole_files_alone(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch, error: BaseException, expected: tuple[int, str]
) -> None:
    server.answers[PUBLIC] = body(TEXT)
    code, words = expected
    replace = Path.replace
    kept: list[Path] = []

    def second(path: Path, target: Path) -> Path:
        if target.name == "part.txt":
            raise error
        kept.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", second)
    status, _, (line,) = run(WHOLE + PART, server.url)
    assert (status, words in line) == (code, True)
    assert [*kept[0].parent.iterdir()] == kept
    monkeypatch.setattr(Path, "replace", replace)
    assert run(WHOLE + PART, server.url)[0] == 0


def test_a_folder_that_has_them_is_an_alternative(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder" / "a"
    folder.mkdir(parents=True)
    (folder / "whole.txt").write_bytes(TEXT)
    (folder / "part.txt").write_bytes(TEXT)
    monkeypatch.setenv("GPUNODE_CAPTURES", str(folder.parent))
    code, out, lines = run(WHOLE + PART + row("b/other.txt", "whole", TEXT))
    assert (code, out) == (1, f"captures: 1 of 3 in {tmp_path}/kept\n")
    assert [line.split(": ")[1:3] for line in lines] == [
        ["a/part.txt", "altered"],
        ["b/other.txt", f"not in {folder.parent}"],
    ]
    monkeypatch.setenv("GPUNODE_CAPTURES", str(tmp_path / "absent"))
    code, _, lines = run(WHOLE)
    assert code == 2
    assert "GPUNODE_CAPTURES" in lines[-1]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (row("../up.txt", "whole", TEXT), "file"),
        (row("/etc/passwd", "whole", TEXT), "file"),
        (row("a/..", "whole", TEXT), "file"),
        (row("a/b", "2", TEXT), "lines"),
        (row("a/b", "whole", TEXT, commit="main"), "commit"),
        (row("a/b", "whole", TEXT, repository="x@y/z"), "repository"),
        (row("a/b", "whole", TEXT, sha256="0"), "sha256"),
        ("a/b\tdmesg\n", "expected 8 columns"),
    ],
)
def test_a_malformed_manifest_is_refused_by_its_line(run: Run, tmp_path: Path, rows: str, expected: str) -> None:
    code, _, lines = run(WHOLE + rows)
    assert code == 2
    assert f"manifest.tsv:3: {expected}" in lines[-1]
    assert not (tmp_path / "kept").exists()


def test_spans_are_bytes_of_lines(script: ModuleType) -> None:
    chance = random.Random(0)  # noqa: S311
    for _ in range(effort(300, 20_000)):
        data = bytes(chance.choice(b"ab\r\n\xff") for _ in range(chance.randrange(60)))
        lines = data.split(b"\n")
        first = chance.randrange(len(lines))
        last = chance.randrange(first, len(lines))
        begin = chance.randrange(len(lines[first]) + 1)
        end = chance.randrange(begin if first == last else 0, len(lines[last]) + 1)
        start = sum(len(line) + 1 for line in lines[:first]) + begin
        stop = sum(len(line) + 1 for line in lines[:last]) + end
        fields = row("a/b", f"{first + 1}:{begin}-{last + 1}:{end}", b"").rstrip("\n").split("\t")
        assert script.Capture(*fields).of(data) == data[start:stop]


def test_the_manifest_of_the_project_is_sound(script: ModuleType) -> None:
    captures = script.listed()
    assert len({capture.file for capture in captures}) == len(captures) == 200
    assert {capture.origin for capture in captures} == {"genuine", "edited", "synthetic"}
