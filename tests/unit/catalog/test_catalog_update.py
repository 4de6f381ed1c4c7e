"""``scripts/catalog_update.py``: real names and versions in, a sound overlay out, and nothing where a source is bad."""

import gzip
import lzma
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from datetime import date
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import index_files
import package_indexes as indexes
import pytest
import yaml
from catalog_update import main
from package_indexes import read_source

from gpunode.catalog import load
from gpunode.cli import run
from gpunode.errors import UndeterminedError, UsageError

LATER = [
    ("nvidia-open", "630.10.01-1ubuntu1"),
    ("nvidia-dkms-open", "630.10.01-1ubuntu1"),
    ("nvidia-open-580", "580.190.01-1ubuntu1"),
    ("cuda-drivers-580", "580.178.04-1ubuntu1"),
    ("cuda-compat-13-6", "630.10.01-1ubuntu1"),
    ("cuda-toolkit-13-6", "13.6.0-1"),
    ("cuda-toolkit-13-3", "13.3.2-1"),
    ("cuda-toolkit-14-0", "14.0.0-1"),
    ("nvidia-container-toolkit", "1.99.1-1"),
    ("nvidia-container-toolkit", "1.19.1-1"),
    ("nvidia-driver-assistant", "0.630.10-1"),
]
"""Names as the repository of Ubuntu 24.04 has them, at versions that the catalog does not have."""
TODAY = date.today().isoformat()
Out = pytest.CaptureFixture[str]


def update(*arguments: str | Path) -> int:
    return main([*(part for argument in arguments for part in ("--from", str(argument)))])


def written(target: Path, *sources: Path) -> dict[str, dict[str, dict[str, object]]]:
    arguments = [part for source in sources for part in ("--from", str(source))]
    assert main([*arguments, "-o", str(target)]) == 0
    content: dict[str, dict[str, dict[str, object]]] = yaml.safe_load(target.read_text(encoding="utf-8"))
    return content


def test_a_repository_of_a_later_day_becomes_rows_with_source_and_date(tmp_path: Path, capsys: Out) -> None:
    folder = index_files.deb_repository(tmp_path / "ubuntu2404" / "x86_64", LATER)
    target = tmp_path / "site.yml"
    rows = written(target, folder)
    assert set(rows) == {"sources", "branches", "toolkits", "container_toolkit"}
    assert rows["sources"]["index-ubuntu2404-x86-64"]["date"] == TODAY
    assert list(rows["branches"]["580"]["points"]) == ["580.190.01"]  # type: ignore[call-overload]
    assert set(rows["toolkits"]) == {"13.3.2", "13.6.0"}
    assert set(rows["container_toolkit"]) == {"1.99.1"}
    catalog = load([target])
    branch = catalog.branch(630)
    assert (branch.latest, branch.native_cuda, branch.modules, branch.date) == (
        "630.10.01",
        "13.6",
        ("open",),
        TODAY,
    )
    assert not branch.sure("oldest_architecture")
    assert catalog.branch(580).latest == "580.190.01"
    assert set(load().branch(580).source) < set(catalog.branch(580).source)
    assert (catalog.toolkit("13.6").branch, catalog.toolkit("13.3").branch) == (630, 610)
    assert catalog.read_on == date.today()
    reported = capsys.readouterr().err
    assert "CUDA toolkit 14.0.0" in reported
    assert "1 branches, 2 releases, 2 toolkits, 1 container toolkits" in reported
    assert run(["catalog", "lint", str(target)]) == 0


def test_what_was_written_before_is_kept_and_a_second_run_finds_nothing(tmp_path: Path, capsys: Out) -> None:
    folder = index_files.deb_repository(tmp_path / "a", LATER)
    target = tmp_path / "site.yml"
    first = written(target, folder)
    capsys.readouterr()
    once = load([target]).toolkits, load([target]).branches
    second = written(target, folder)
    assert "nothing new" in capsys.readouterr().err
    assert {name: set(rows) for name, rows in second.items()} == {name: set(rows) for name, rows in first.items()}
    assert (load([target]).toolkits, load([target]).branches) == once
    other = index_files.deb_repository(tmp_path / "b", [("nvidia-open", "630.20.02-1ubuntu1")])
    arguments = ["--from", str(other), "-o", str(target), "-v"]
    assert main([*arguments]) == 0
    assert "new: branches/630\n" in capsys.readouterr().err
    both = written(target, other)
    assert len(both["sources"]) == 2
    assert list(both["branches"]["630"]["points"]) == ["630.10.01", "630.20.02"]  # type: ignore[call-overload]
    assert load([target]).branch(630).native_cuda == "13.6"


def test_two_repositories_of_one_new_branch_become_one_row(tmp_path: Path) -> None:
    deb = index_files.deb_repository(tmp_path / "deb", LATER)
    rpm = index_files.rpm_repository(tmp_path / "rpm", [("kmod-nvidia-open-dkms", "3:630.10.02-1.el9")])
    rows = written(tmp_path / "site.yml", deb, rpm)
    assert list(rows["branches"]["630"]["points"]) == ["630.10.01", "630.10.02"]  # type: ignore[call-overload]
    assert len(rows["sources"]) == len(rows["branches"]["630"]["source"]) == 2  # type: ignore[arg-type]


class TestRecordedIndexes:
    """Indexes with the names and versions of NVIDIA's repositories as third parties recorded them."""

    @pytest.mark.parametrize(
        "system", ["ubuntu2204", "ubuntu2404", "ubuntu2604", "debian12", "debian13", "rhel9", "rhel10"]
    )
    def test_each_repository_is_read_and_its_overlay_is_sound(self, system: str, tmp_path: Path) -> None:
        make = index_files.rpm_repository if system.startswith("rhel") else index_files.deb_repository
        packages = index_files.recorded(system)
        (index,) = read_source(str(make(tmp_path / system / "x86_64", packages)))
        assert len(index.packages) == len([version for _, version in packages if version[0].isdigit()])
        rows = written(tmp_path / "site.yml", tmp_path / system / "x86_64")
        known = load()
        new = {version for name, row in rows.get("branches", {}).items() for version in row["points"]}  # type: ignore[attr-defined]
        assert all(version not in known.branches[name].points for name in known.branches for version in new)
        catalog = load([tmp_path / "site.yml"])
        for name, full in packages:
            version = full.split(":")[-1].rsplit("-", 1)[0]
            if name in ("nvidia-open", "cuda-drivers", "kmod-nvidia-open-dkms"):
                assert version in catalog.branch_of(version).points, (name, full)

    def test_the_container_toolkits_own_repository_holds_a_release_that_the_catalog_has_not(
        self, tmp_path: Path
    ) -> None:
        packages = index_files.recorded("libnvidia-container")
        rows = written(tmp_path / "site.yml", index_files.deb_repository(tmp_path / "deb", packages))
        newest = max(load().container_toolkit)
        assert set(rows.get("container_toolkit", {})) == ({"1.20.1"} if newest == "1.20.0" else set())

    def test_the_same_names_one_release_later_are_a_new_branch(self, tmp_path: Path) -> None:
        later = index_files.moved_on(index_files.recorded("ubuntu2404"), "615.71.09", "630.10.01")
        assert later
        written(tmp_path / "site.yml", index_files.deb_repository(tmp_path / "ubuntu2404", later))
        assert load([tmp_path / "site.yml"]).branch(630).latest == "630.10.01"


def test_gpus_of_a_newer_list_are_named_and_unknown_chips_are_left_out(tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "pci.ids").write_text(
        "10de  NVIDIA Corporation\n\t2b85  GB202 [GeForce RTX 5090]\n\tf001  GB202 [GeForce RTX 5095]\n"
        "\tf002  GX999 [not a chip]\n\tf003  GB999 [GeForce RTX 6090]\n",
        encoding="utf-8",
    )
    rows = written(tmp_path / "site.yml", tmp_path)
    assert set(rows["gpus"]) == {"geforce-rtx-5095"}
    assert "gb999" in capsys.readouterr().err
    gpu = load([tmp_path / "site.yml"]).find_gpu("10de:f001").gpu
    assert gpu is not None
    assert (gpu.architecture, gpu.known_from, gpu.date) == ("blackwell", "pci.ids", TODAY)


def test_every_form_of_an_index_is_read(tmp_path: Path) -> None:
    text = b"Package: nvidia-open\nVersion: 1:630.10.01-1\n"
    forms = {"Packages": text, "Packages.gz": gzip.compress(text), "Packages.xz": lzma.compress(text)}
    for name, content in forms.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(content)
        (index,) = read_source(str(tmp_path / name))
        assert [tuple(package) for package in index.packages] == [("nvidia-open", "630.10.01", "1:630.10.01-1")]


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("Packages.gz", b"\x1f\x8b not gzip", "cannot be unpacked"),
        ("Packages.gz", gzip.compress(b"Package: x\n" * 9, mtime=0)[:-9], "cannot be unpacked"),
        ("Packages.xz", b"\xfd7zXZ\x00 not xz", "cannot be unpacked"),
        ("Packages", b"x" * 2_000_000, "larger than"),
        ("repodata/repomd.xml", b"<!DOCTYPE x><repomd/>", "document type"),
        ("repodata/repomd.xml", b"<repomd", "is not XML"),
        ("repodata/repomd.xml", b"<repomd/>", "no primary index"),
    ],
)
def test_a_bad_index_is_one_line_and_nothing_is_written(
    name: str, content: bytes, word: str, tmp_path: Path, capsys: Out
) -> None:
    (tmp_path / "r" / name).parent.mkdir(parents=True)
    (tmp_path / "r" / name).write_bytes(content)
    target = tmp_path / "site.yml"
    assert main(["--from", str(tmp_path / "r"), "-o", str(target)]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert word in err
    assert not target.exists()


def test_a_primary_index_outside_or_exchanged_is_refused(tmp_path: Path) -> None:
    folder = index_files.rpm_repository(tmp_path / "r", [("nvidia-open", "630.10.01-1")])
    repomd = folder / "repodata" / "repomd.xml"
    good = repomd.read_text(encoding="utf-8")
    repomd.write_text(good.replace('href="repodata/', 'href="repodata/../../'), encoding="utf-8")
    with pytest.raises(UsageError, match="not below repodata"):
        read_source(str(folder))
    repomd.write_text(good, encoding="utf-8")
    (primary,) = (folder / "repodata").glob("*.gz")
    primary.write_bytes(primary.read_bytes() + b" ")
    with pytest.raises(UsageError, match="SHA-256 differs"):
        read_source(str(folder))


def test_a_document_type_over_the_seam_of_two_chunks_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "CHUNK", 8)
    with pytest.raises(UsageError, match="document type"):
        list(indexes._rpm_packages(BytesIO(b"     <!DOCTYPE m [<!ENTITY a 'b'>]><m/>"), "x"))


def test_hostile_names_and_versions_do_not_get_in(tmp_path: Path) -> None:
    hostile = [("nvidia-open", "630.1.1-1\x1b[31m"), ("nvidia open", "630.1.1-1"), ("nvidia-open", "630.1.1 {{x}}-1")]
    hostile += [
        ("nvidia-open", f"{'6' * 500}.1-1"),
        ("../nvidia-open", "630.1.1-1"),
        ("cuda-toolkit-13-9", "13.9.0.0.0-1"),
    ]
    rows = written(tmp_path / "site.yml", index_files.deb_repository(tmp_path / "r", hostile))
    assert set(rows) == {"sources"}


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = index_files.deb_repository(tmp_path / "r", [("nvidia-open", f"630.{n}.1-1") for n in range(200)])
    monkeypatch.setattr(indexes, "MOST_UNPACKED", 1000)
    with pytest.raises(UsageError, match="larger than a package index"):
        read_source(str(folder))
    monkeypatch.undo()
    monkeypatch.setattr(indexes, "MOST_PACKAGES", 100)
    with pytest.raises(UsageError, match="more than 100 packages"):
        read_source(str(folder))
    monkeypatch.undo()
    monkeypatch.setattr(indexes, "MOST_READ", 100)
    with pytest.raises(UsageError, match="not a package index"):
        read_source(str(folder))


def test_what_is_no_source_is_refused(tmp_path: Path, capsys: Out) -> None:
    for source in ("http://example.org/repo", "ftp://example.org", str(tmp_path / "none"), str(tmp_path)):
        assert update(source) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path, capsys: Out) -> None:
    folder = index_files.deb_repository(tmp_path / "r", LATER)
    target = tmp_path / "site.yml"
    target.write_text("gpus: {t4: {note: mine}}\n", encoding="utf-8")
    assert main(["--from", str(folder), "-o", str(target)]) == 2
    assert "not replaced" in capsys.readouterr().err
    assert target.read_text(encoding="utf-8") == "gpus: {t4: {note: mine}}\n"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A real https server on loopback, with a certificate that this process trusts."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    root = tmp_path / "www"
    index_files.deb_repository(root / "deb", LATER)
    index_files.rpm_repository(root / "rpm", [("nvidia-open", "630.10.01-1")])

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, directory=str(root), **kwargs)  # type: ignore[arg-type]

        def do_GET(self) -> None:
            if self.path.startswith("/away"):
                self.send_response(302)
                self.send_header("Location", "http://localhost/Packages.gz")
                self.end_headers()
            elif self.path.startswith("/broken"):
                self.send_error(500)
            else:
                super().do_GET()

        def log_message(self, *args: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    httpd.socket = context.wrap_socket(httpd.socket, server_side=True)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield f"https://localhost:{httpd.server_address[1]}"
    httpd.shutdown()


def test_an_https_address_is_read_and_never_left_for_http(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (deb,) = read_source(f"{server}/deb/")
    assert ("nvidia-open", "630.10.01") in {(package.name, package.version) for package in deb.packages}
    (rpm,) = read_source(f"{server}/rpm")
    assert [package.version for package in rpm.packages] == ["630.10.01"]
    with pytest.raises(UsageError, match="no index found"):
        read_source(f"{server}/nothing")
    with pytest.raises(UsageError, match="not https"):
        read_source(f"{server}/away")
    with pytest.raises(UndeterminedError, match="500"):
        read_source(f"{server}/broken")
    monkeypatch.setattr(indexes, "MOST_READ", 50)
    with pytest.raises(UsageError, match="not a package index"):
        read_source(f"{server}/deb")
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(UndeterminedError, match="certificate"):
        read_source(f"{server}/deb")
