"""What runs inside the vendor's container, without one: served files and faults, lagging indices, module streams."""

import importlib
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from http.client import RemoteDisconnected
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpunode.lab.packages.plan import plan
from gpunode.lab.packages.recorded import recorded
from gpunode.lab.packages.rows import repositories
from gpunode.lab.repositories import image
from gpunode.lab.repositories.vendor import FAULTS

_INSIDE = Path(image.__file__).parent / "inside"


@pytest.fixture(scope="module")
def inside() -> Iterator[dict[str, ModuleType]]:
    """The programs as they import each other in the container: as modules of one folder."""
    names = ("pack", "rpms", "build", "publish", "serve")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_INSIDE))
        yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


@pytest.fixture
def url(inside: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server over ``tmp_path/www``, the faults' files in ``tmp_path/faults``, switched on in ``tmp_path/on``."""
    serve = inside["serve"]
    for name in ("www/repo", "faults/expired-key/repo", "on"):
        (tmp_path / name).mkdir(parents=True)
    for path, text in (
        ("www/repo/InRelease", "good"),
        ("www/repo/a_1.deb", "a"),
        ("www/repo/b_1.deb", "b"),
        ("faults/expired-key/repo/InRelease", "expired"),
    ):
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(serve.publish, "ROOT", tmp_path / "www")
    monkeypatch.setattr(serve.publish, "FAULTS", tmp_path / "faults")
    monkeypatch.setattr(serve, "ON", tmp_path / "on")
    monkeypatch.setattr(serve.Handler, "log_message", lambda *_: None)
    handler = lambda *args: serve.Handler(*args, directory=str(tmp_path / "www"))  # noqa: E731
    with serve.Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/repo"
        server.shutdown()
        thread.join()


def got(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 (our own server)
        return str(answer.read().decode())


def status(url: str) -> int:
    try:
        got(url)
    except urllib.error.HTTPError as err:
        return err.code
    return HTTPStatus.OK


def test_a_fault_lays_its_files_over_the_real_ones(url: str, tmp_path: Path) -> None:
    assert got(f"{url}/InRelease") == "good"
    (tmp_path / "on/expired-key").touch()
    assert got(f"{url}/InRelease") == "expired"
    assert got(f"{url}/a_1.deb") == "a"
    (tmp_path / "on/expired-key").unlink()
    assert got(f"{url}/InRelease") == "good"


def test_what_a_node_has_already_is_served_all_the_same(url: str) -> None:
    later = {"If-Modified-Since": "Fri, 01 Jan 2100 00:00:00 GMT"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/InRelease", headers=later), timeout=10) as answer:  # noqa: S310
        assert answer.status == HTTPStatus.OK
        assert answer.read() == b"good"


def test_unsigned_hides_the_signatures_alone(url: str, tmp_path: Path) -> None:
    (tmp_path / "on/unsigned").touch()
    assert status(f"{url}/InRelease") == HTTPStatus.NOT_FOUND
    assert status(f"{url}/a_1.deb") == HTTPStatus.OK


def test_a_package_that_is_gone_is_the_one_named(url: str, tmp_path: Path) -> None:
    (tmp_path / "on/package-gone").write_text("x_* a_*")
    assert status(f"{url}/a_1.deb") == HTTPStatus.NOT_FOUND
    assert got(f"{url}/b_1.deb") == "b"


def test_a_connection_that_was_open_ends_when_the_server_goes(url: str, tmp_path: Path) -> None:
    (tmp_path / "on/unreachable").touch()
    with pytest.raises(RemoteDisconnected):
        got(f"{url}/InRelease")


def test_a_proxy_that_requires_a_login_answers_html_with_200(url: str, tmp_path: Path) -> None:
    (tmp_path / "on/html").touch()
    assert got(f"{url}/InRelease").startswith("<!DOCTYPE html>")
    (tmp_path / "on/html").unlink()
    assert got(f"{url}/InRelease") == "good"


def test_an_index_without_dkms_has_all_the_rest(inside: dict[str, ModuleType]) -> None:
    names = ("dh-dkms", "dkms", "nvidia-dkms-open")
    index = "".join(f"Package: {name}\nVersion: 1\n\n" for name in names)
    assert inside["publish"]._without_dkms(index) == "Package: nvidia-dkms-open\nVersion: 1\n\n"


def test_nothing_outside_the_root_is_served(url: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    assert status(f"{url}/../../secret") == HTTPStatus.NOT_FOUND
    assert status(f"{url}/%2e%2e/%2e%2e/secret") == HTTPStatus.NOT_FOUND


def test_every_fault_has_a_place_where_it_acts() -> None:
    text = "".join((_INSIDE / name).read_text(encoding="utf-8") for name in ("publish.py", "serve.py"))
    assert not [fault for fault in FAULTS if f'"{fault}"' not in text]


def test_an_index_lags_by_the_newest_fabric_manager_of_each_branch(inside: dict[str, ModuleType]) -> None:
    rows = [
        ("nvidia-fabricmanager", "580.95.05-1"),
        ("nvidia-fabricmanager", "580.178.04-1"),
        ("nvidia-fabricmanager-dev", "580.178.04-1"),
        ("nvidia-fabricmanager-570", "570.211.01-1"),
        ("nvidia-kernel-open-dkms", "580.178.04-1"),
        ("datacenter-gpu-manager-4-core", "1:4.6.0-1"),
    ]
    index = "".join(f"Package: {name}\nVersion: {version}\nSize: 1\n\n" for name, version in rows)
    kept = inside["publish"]._without_newest_fabric_manager(index)
    assert [line.split()[1] for line in kept.splitlines() if line.startswith(("Package", "Version"))] == [
        "nvidia-fabricmanager",
        "580.95.05-1",
        "nvidia-kernel-open-dkms",
        "580.178.04-1",
        "datacenter-gpu-manager-4-core",
        "1:4.6.0-1",
    ]
    assert kept.endswith("\n\n")


@pytest.mark.parametrize("name", ["container-toolkit", "debian12"])
def test_release_has_the_recorded_form(inside: dict[str, ModuleType], tmp_path: Path, name: str) -> None:
    repository: Any = repositories()[name]
    record = recorded(repository.recorded)["repository"]["release"]
    (tmp_path / "Packages").write_text("Package: a\n")

    class Unsigned:
        def sign(self, *_: object) -> None:
            return

    inside["publish"]._sign(tmp_path, tmp_path, repository.release, Unsigned(), repository.key)
    release = (tmp_path / "Release").read_text()
    fields = dict(line.split(": ", 1) for line in release.splitlines() if not line.startswith(" ") and ": " in line)
    assert {key: fields.get(key) for key in ("Origin", "Label", "Codename")} == {
        key: record.get(key) for key in ("Origin", "Label", "Codename")
    }
    assert not fields.keys() & set(record.get("absent", ()))
    sums = {line.rstrip(":") for line in release.splitlines() if line.endswith(":")}
    listed = {line.split()[-1] for line in release.splitlines() if line.startswith(" ")}
    if name == "container-toolkit":
        assert sums == set(record["hashes"])
        assert listed == {"Packages", "Packages.xz"} <= set(record["files"])
        assert record["Date"].removesuffix(" (frozen)") in fields["Date"]
    else:
        assert {"MD5Sum", "SHA256"} <= sums
        assert listed == {"Packages", "Packages.gz"}


def test_streams_hold_their_branch_and_flavour(inside: dict[str, ModuleType]) -> None:
    rhel: Any = plan()["rhel9"]
    text = inside["rpms"]._modules("nvidia-driver", rhel["packages"])
    documents = [json.loads(part.removesuffix("...\n")) for part in text.split("---\n") if part]
    streams = {
        document["data"]["stream"]: document["data"] for document in documents if document["document"] == "modulemd"
    }
    assert set(streams) == {
        *(f"{branch}-{kind}" for branch in (570, 580, 595, 610, 615) for kind in ("open", "dkms")),
        "open-dkms",
        "latest-dkms",
    }
    held = streams["580-open"]["artifacts"]["rpms"]
    assert "nvidia-open-0:580.178.04-1.el9.noarch" in held
    assert "nvidia-fabricmanager-0:580.95.05-1.el9.x86_64" in held
    assert not [
        name for name in held if ":580." not in name or "latest-dkms" in name or name.startswith("cuda-drivers")
    ]
    assert streams["570-open"]["profiles"]["fm"]["rpms"] == ["nvidia-open", "nvidia-fabric-manager"]
    newest = streams["open-dkms"]["artifacts"]["rpms"]
    assert {name.split(":")[1][:3] for name in newest} == {"570", "580", "595", "610", "615"}
    assert not [name for stream in streams.values() for name in stream["artifacts"]["rpms"] if "nvlsm" in name]


def test_a_files_name_is_what_rpm_makes_of_it(inside: dict[str, ModuleType]) -> None:
    package = {"name": "nvidia-open", "version": "3:580.95.05-1.el9", "architecture": "all"}
    assert inside["rpms"].file_name(package) == "nvidia-open-580.95.05-1.el9.noarch.rpm"
    package = {"name": "libnccl", "version": "2.30.7-1+cuda13.3", "architecture": "amd64"}
    assert inside["rpms"].file_name(package) == "libnccl-2.30.7-1+cuda13.3.x86_64.rpm"


def test_the_image_is_another_one_where_a_package_or_a_builder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(image._inputs())
    assert set(before) == {"build.py", "pack.py", "rpms.py", "plan.json"}
    monkeypatch.setattr(image, "_plan_text", lambda: "{}")
    assert dict(image._inputs()) != before
