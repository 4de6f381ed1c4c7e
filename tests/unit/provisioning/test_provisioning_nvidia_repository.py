"""What the role nvidia_repository changes: the key's life, what older instructions left, secrets, removal."""

import base64
import hashlib
from typing import Any

import pytest
from node_samples import after, by_path, contents, context, node, planned

from gpunode.catalog import origins
from gpunode.provisioning import nvidia_repository
from gpunode.provisioning.keys import armored, public_keys
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.nvidia_repository import APT_PATHS, DNF_PATHS, KEYS, OLD_PIN, ROLE
from gpunode.provisioning.repository import QUESTION
from gpunode.provisioning.state import NodeState
from gpunode.provisioning.transaction import Transaction

PACKET = b"\xc6\x03\x04\x00\x01"
"""A public-key packet with an empty body: enough of a key for what only looks at packets."""
KEY = armored(PACKET)
FETCHED = {"key": base64.b64encode(PACKET).decode()}
SECRET = "planted"  # noqa: S105


@pytest.fixture(autouse=True)
def _pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue pins that packet."""
    (key,) = public_keys(PACKET)
    real = origins.table()
    rows = {name: row.model_copy(update={"fingerprint": key.fingerprint}) for name, row in real.signing_keys.items()}
    pinning = real.model_copy(update={"signing_keys": rows})
    monkeypatch.setattr(origins, "table", lambda: pinning)


def requested(state: NodeState, answer: dict[str, Any] | None = None, **settings: Any) -> Manifest:
    run = context(answers={QUESTION: answer} if answer is not None else {})
    return planned(ROLE.name, state, run, **{"state": "present", **settings})


def with_apt(state: NodeState, **apt: Any) -> NodeState:
    assert state.apt is not None
    return state.model_copy(update={"apt": state.apt.model_validate({**state.apt.model_dump(), **apt})})


def settled(**settings: Any) -> NodeState:
    state = node()
    return after(requested(state, FETCHED, **settings), state)


def test_the_node_is_asked_for_the_key_and_all_files_follow() -> None:
    state = node()
    first = requested(state)
    url = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/"
    assert first.questions[QUESTION].body == {
        "url": f"{url}3bf863cc.pub",
        "keyring": f"{url}cuda-keyring_1.1-1_all.deb",
    }
    texts = contents(requested(state, FETCHED))
    assert texts[APT_PATHS["key"]] == KEY
    assert "Signed-By: " + APT_PATHS["key"] in str(texts[APT_PATHS["sources"]])
    assert texts[APT_PATHS["proxy"]] is None


def test_a_settled_node_is_asked_nothing_and_nothing_is_pending() -> None:
    again = requested(settled())
    assert (again.questions, again.pending_reasons) == ({}, ())


@pytest.mark.parametrize(
    "text",
    [
        "damaged\n",
        KEY.replace("xgME", "xgMF"),
        f"{KEY}\n",
        KEY.replace("\n\n", "\nVersion: 1\n\n"),
        armored(PACKET + b"\xc6\x03\x04\x00\x02"),
    ],
    ids=["other text", "another bit", "a line more", "a header", "a second key"],
)
def test_a_key_that_is_not_as_it_was_written_is_fetched_again(text: str) -> None:
    state = settled()
    damaged = state.model_copy(update={"contents": {**state.contents, APT_PATHS["key"]: text}})
    assert set(requested(damaged).questions) == {QUESTION}
    assert contents(requested(damaged, FETCHED))[APT_PATHS["key"]] == KEY


def test_a_sites_key_by_address_replaces_the_key_of_before() -> None:
    """Nothing pins a site's key: what is on the node may be NVIDIA's, or that of another address."""
    address, other = "https://mirror.test/own.asc", armored(b"\xc6\x03\x04\x00\x02")
    state = settled()
    first = requested(state, key=address)
    assert first.questions[QUESTION].body == {"url": address}
    answer = {"key": base64.b64encode(other.encode()).decode(), "url": address}
    manifest = requested(state, answer, key=address)
    assert contents(manifest)[APT_PATHS["key"]] == other
    assert not requested(after(manifest, state), answer, key=address).pending_reasons


def test_a_key_without_a_fingerprint_is_known_by_the_checksum_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node gets the file that was recorded, without its Version line; it stays without a question."""
    known = armored(PACKET)
    row = (
        origins.table()
        .signing_keys["rhel10"]
        .model_copy(update={"fingerprint": None, "sha256_without_version": hashlib.sha256(known.encode()).hexdigest()})
    )
    monkeypatch.setattr(nvidia_repository, "signing_key", lambda _: row)
    state, with_version = node(dnf=True), known.replace("\n\n", "\nVersion: 1\n\n")
    manifest = requested(state, {"key": base64.b64encode(with_version.encode()).decode()})
    assert contents(manifest)[DNF_PATHS["key"]] == known
    assert not requested(after(manifest, state)).questions
    (line,) = requested(state, {"key": base64.b64encode(PACKET).decode()}).refusals
    assert line.startswith("repository-key-differs: ")


def test_a_fetch_that_fails_is_a_refusal_with_its_name() -> None:
    (line,) = requested(node(), {"error": "http://m/k: no route"}).refusals
    assert line.startswith("repository-unreachable: http://m/k: no route")
    other = base64.b64encode(PACKET + b"\xc6\x03\x04\x00\x02").decode()
    assert contents(requested(node(), {"key": other}))[APT_PATHS["key"]] == KEY, "only the pinned key is written"
    for data in (b"\xc6\x03\x04\x00\x02", b"", b"<!DOCTYPE html>"):
        (line,) = requested(node(), {"key": base64.b64encode(data).decode(), "url": "http://m/k"}).refusals
        assert line.startswith("repository-key-differs: http://m/k contains ")
        assert "nvidia_repository_key" in line
    assert "an HTML page" in line


def test_what_older_instructions_left_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64"
    old, ring = "/etc/apt/sources.list.d/cuda.list", "/etc/apt/trusted.gpg.d/all.gpg"
    source = {"file": old, "types": ["deb"], "uris": [cuda], "suites": ["/"], "components": []}
    monkeypatch.setattr(nvidia_repository, "OLD_KEYS", (public_keys(PACKET)[0].fingerprint,))
    other = b"\xc6\x03\x04\x00\x02\xcc\x01\x00\xcd\x01x"
    rings = {ring: other + PACKET + b"\xcd\x01y" + other, "/etc/apt/trusted.gpg": PACKET, f"{ring}2": other}
    rings[f"{ring}3"] = PACKET + b"no keyring"
    old_keys = {path: base64.b64encode(data).decode() for path, data in rings.items()}
    state = with_apt(node({"cuda-keyring": "1.1-1"}), sources=[source], old_keys=old_keys)
    manifest = requested(state, FETCHED)
    assert [each.path for each in manifest.files][:2] == [old, OLD_PIN], "two files with different keys stop apt"
    assert contents(manifest)[old] is None
    assert by_path(manifest, ring).data == other + other
    assert not {f"{ring}2", f"{ring}3"} & contents(manifest).keys()
    assert by_path(manifest, "/etc/apt/trusted.gpg").data is None
    assert manifest.packages == Transaction(manager="apt", state="absent", remove=("cuda-keyring",))


def test_a_proxys_password_is_for_root_alone_and_in_no_diff() -> None:
    with_password: dict[str, Any] = {"proxy": f"http://u:{SECRET}@p:1"}
    for state, path in ((node(), APT_PATHS["proxy"]), (node(dnf=True), DNF_PATHS["repository"])):
        manifest = requested(state, FETCHED, **with_password)
        assert {each.path for each in manifest.files if SECRET in (each.content or "")} == {path}
        assert (by_path(manifest, path).mode, by_path(manifest, path).private) == ("0600", True)
        assert not any(each.private for each in manifest.files if each.path not in (path, *KEYS))
    open_ = by_path(requested(node(), FETCHED, proxy="http://p:1"), APT_PATHS["proxy"])
    assert (open_.mode, open_.private) == ("0644", False)


def test_absent_and_another_source_remove_it() -> None:
    for manifest in (planned(ROLE.name, settled(), context(), state="absent"), _of_source("debian", settled())):
        assert {each.path: each.content for each in manifest.files} == dict.fromkeys(ROLE.files)
        assert manifest.pending
    assert not planned(ROLE.name, node(), context(), state="absent").pending


def _of_source(source: str, state: NodeState) -> Manifest:
    run = context(others={"nvidia_driver": {"source": source}})
    return planned(ROLE.name, state, run, state="auto")


def test_it_stays_as_it_is_where_the_driver_goes() -> None:
    run = context(others={"nvidia_driver": {"state": "absent"}})
    assert planned(ROLE.name, settled(), run, state="auto") == Manifest(role=ROLE.name)


def test_another_role_that_takes_packages_from_there_keeps_it() -> None:
    run = context(others={"nvidia_driver": {"source": "debian"}, "dcgm": {"source": "nvidia"}})
    assert set(planned(ROLE.name, node(), run, state="auto").questions) == {QUESTION}


def test_every_file_is_one_that_the_node_is_asked_about() -> None:
    looked = {*nvidia_repository.ROLE.look.paths, *nvidia_repository.ROLE.look.contents}
    for state in (node(), node(dnf=True)):
        assert {each.path for each in requested(state, FETCHED).files} <= looked
