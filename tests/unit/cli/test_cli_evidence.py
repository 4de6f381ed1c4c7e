"""``gpunode evidence``: nothing that identifies a site leaves, and the verdicts stay."""

import ipaddress
import json
import subprocess
import tarfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gpunode.cli import run
from gpunode.judging.scrubbing import Scrubber

BUNDLES = Path(__file__).parents[2] / "fixtures" / "bundles"
SECRETS = {
    "serial": "1325021047923",
    "uuid": "GPU-5d7f1c2a-0b7e-4b0e-9c1d-2f6a5e3b4c8d",
    "mac": "0c:42:a1:7d:3e:9b",
    "address": "10.20.30.41",
    "ula": "fd12:3456:789a:1::41",
    "gid": "0000:0000:0000:0000:0000:ffff:0a14:1e29",
    "user": "jdoe",
    "mail": "j.doe@acme.example",
    "host": "gpu-07.rack3.acme.example",
    "key": "AAAAC3NzaC1lZDI1NTE5AAAAIGk3aGVyZWlzYWtleQ",
    "login": "builder:hunter2",
}
TEXT = f"""
<serial>{SECRETS["serial"]}</serial>
Serial Number : {SECRETS["serial"]}
<uuid>{SECRETS["uuid"]}</uuid>
link/ether {SECRETS["mac"]} brd ff:ff:ff:ff:ff:ff
inet {SECRETS["address"]}/24 inet6 {SECRETS["ula"]} {SECRETS["gid"]}
owner /home/{SECRETS["user"]}/train.py {SECRETS["mail"]} at {SECRETS["host"]} and gpu-07
ssh-ed25519 {SECRETS["key"]} root
deb http://{SECRETS["login"]}@mirror.acme.example/debian bookworm main
deb http://deb.debian.org/debian bookworm main
driver 580.95.05 VBIOS 96.00.89.00.01 pci 0000:1a:00.0 at 12:34:56 on 127.0.0.1
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two bundles; one has everything that must not leave."""
    folder = tmp_path / "bundles"
    folder.mkdir()
    for number, path in enumerate(sorted(BUNDLES.glob("*.json"))):
        document: dict[str, Any] = json.loads(path.read_text())
        document["host"] = f"gpu-0{number + 7}.rack3.acme.example"
        document["files"]["/proc/cmdline"] = TEXT if number == 0 else f"root=LABEL=acme {SECRETS['address']}\n"
        document["files"]["/etc/group"] = "docker:x:998:asmith,root\nasmith:x:1001:\nsudo:x:27:admin\n"
        (folder / f"{document['host']}.json").write_text(json.dumps(document))
    return folder


def members(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as opened:
        return {entry.name: opened.extractfile(entry).read().decode() for entry in opened}  # type: ignore[union-attr]


def test_nothing_of_a_site_leaves_and_the_hashes_fit(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "evidence.tar.gz"
    assert run(["evidence", str(saved), "--word", "acme", "--output", str(out)]) == 0
    answer = capsys.readouterr()
    assert answer.out == f"{sha256(out.read_bytes()).hexdigest()}  {out}\n"
    for kind in ("serial", "uuid", "mac", "address", "user", "mail", "host", "key", "login", "word"):
        assert f"{kind} " in answer.err
    contents = members(out)
    manifest = json.loads(contents.pop("MANIFEST.json"))
    assert manifest["files"] == {name: sha256(text.encode()).hexdigest() for name, text in contents.items()}
    assert set(contents) == {f"bundles/node-{number}.json" for number in (1, 2, 3)}
    for text in contents.values():
        assert "gpunode.bundle/1" in text
        for secret in (*SECRETS.values(), "gpu-07", "rack3", "acme", "asmith", "hunter2"):
            assert secret not in text
    for kept in (
        "580.95.05",
        "96.00.89.00.01",
        "0000:1a:00.0",
        "12:34:56",
        "127.0.0.1",
        "http://deb.debian.org/debian",
    ):
        assert kept in contents["bundles/node-1.json"]
    assert out.stat().st_mode & 0o777 == 0o600


def test_the_archive_is_judged_as_the_originals(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "evidence.tar.gz"
    assert run(["evidence", "-q", str(saved), "--output", str(out)]) == 0
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    # Not by tarfile: its filters came with Python 3.11.4, and Debian 12 has 3.11.2.
    subprocess.run(["tar", "-xzf", out, "-C", unpacked], check=True, timeout=60, start_new_session=True)
    seen = []
    for folder in (saved, unpacked / "bundles"):
        capsys.readouterr()
        assert run(["validate", "--replay", str(folder), "--format", "json"]) in (1, 3)
        nodes = json.loads(capsys.readouterr().out)["nodes"]
        seen.append([[(finding["check"], finding["status"]) for finding in node["findings"]] for node in nodes])
    assert seen[0] == seen[1]
    assert len(seen[0][0]) > 50


def test_without_an_output_nothing_is_written(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(saved.parent.rglob("*"))
    assert run(["evidence", str(saved)]) == 0
    assert "replaced: " in capsys.readouterr().out
    assert sorted(saved.parent.rglob("*")) == before


def test_equal_values_stay_equal_and_networks_stay_networks() -> None:
    scrubber = Scrubber(["gpu-01"])
    first, two, far = (scrubber.text(f"x {address} y").split()[1] for address in ("10.1.2.3", "10.1.2.4", "10.9.2.4"))
    assert scrubber.text("10.1.2.3") == first
    assert len({first, two, far, "10.1.2.3"}) == 4
    assert ipaddress.ip_address(two) in ipaddress.ip_network(f"{first}/24", strict=False)
    assert ipaddress.ip_address(far) not in ipaddress.ip_network(f"{first}/24", strict=False)
    assert first.startswith("10.")
    mapped = scrubber.text("0000:0000:0000:0000:0000:ffff:0a01:0203")
    assert ipaddress.IPv6Address(mapped).ipv4_mapped == ipaddress.ip_address(first)


def test_each_archive_has_names_of_its_own() -> None:
    assert Scrubber([]).text(SECRETS["uuid"]) != Scrubber([]).text(SECRETS["uuid"])


def test_a_file_that_is_not_a_bundle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"schema": "x"}')
    out = tmp_path / "evidence.tar.gz"
    assert run(["evidence", str(other), "--output", str(out)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not out.exists()
