"""What is added to a node's apt sources, for the ways in which nodes have them."""

from typing import Any

import pytest

from gpunode.provisioning.driver.files import missing_components

COMPONENTS = ["contrib", "non-free", "non-free-firmware"]
OWN = "/etc/apt/sources.list.d/own.sources"
KEY = {"Signed-By": "/usr/share/keyrings/debian-archive-keyring.gpg"}


def entry(
    uri: str = "http://mirror.test/debian",
    suites: str = "bookworm bookworm-updates",
    components: str = "main",
    **changes: Any,
) -> dict[str, Any]:
    return {
        "file": "/etc/apt/sources.list.d/debian.sources",
        "types": ["deb"],
        "uris": [uri],
        "suites": suites.split(),
        "components": components.split(),
        "options": dict(KEY),
        "origins": {},
        **changes,
    }


def origin(suite: str, name: str = "Debian", codename: str | None = None) -> dict[str, Any]:
    return {suite: {"origin": name, "codename": codename or suite}}


def added(*sources: dict[str, Any]) -> list[tuple[str, str, str]]:
    stanzas = missing_components(sources, "bookworm", COMPONENTS, OWN)
    return [(" ".join(s["uris"]), " ".join(s["suites"]), " ".join(s["components"])) for s in stanzas]


def test_each_archive_gets_a_stanza_with_its_own_uri_and_key() -> None:
    sources = [entry(), entry("http://mirror.test/debian-security", "bookworm-security", options={"signed-by": "x"})]
    sources[1]["origins"] = origin("bookworm-security")
    stanzas = missing_components(sources, "bookworm", COMPONENTS, OWN)
    assert [stanza["uris"] for stanza in stanzas] == [
        ["http://mirror.test/debian"],
        ["http://mirror.test/debian-security"],
    ]
    assert stanzas[0]["suites"] == ["bookworm", "bookworm-updates"]
    assert [stanza["options"] for stanza in stanzas] == [KEY, {"signed-by": "x"}]


def test_what_another_file_has_is_not_added_again() -> None:
    contrib = entry(components="contrib", suites="bookworm", file="/etc/apt/sources.list")
    assert added(entry(suites="bookworm"), contrib) == [
        ("http://mirror.test/debian", "bookworm", "non-free non-free-firmware")
    ]
    assert added(entry(components="main contrib non-free non-free-firmware")) == []


def test_the_roles_own_file_does_not_count() -> None:
    role_entry = entry(components="contrib non-free non-free-firmware", file=OWN)
    assert len(added(entry(), role_entry)) == 1


def test_an_entry_that_stands_twice_is_added_once() -> None:
    assert len(added(entry(), entry(file="/etc/apt/sources.list"))) == 1


@pytest.mark.parametrize(
    "other",
    [
        entry("http://third.test/", "bookworm", options={"Signed-By": "/etc/apt/keyrings/third.gpg"}),
        entry("http://third.test/", "bookworm", origins=origin("bookworm", "Third")),
        entry(suites="bookworm-backports"),
        entry(suites="trixie"),
        entry(suites="stable", origins=origin("stable", codename="trixie")),
        entry(components="contrib"),
        entry(types=["deb-src"]),
    ],
    ids=["other key", "other origin", "backports", "other release", "stable moved on", "no main", "sources only"],
)
def test_what_is_not_the_running_releases_archive_is_left_alone(other: dict[str, Any]) -> None:
    assert added(other) == []


@pytest.mark.parametrize(
    "archive",
    [
        entry(suites="oldstable", origins=origin("oldstable", codename="bookworm")),
        entry(suites="bookworm", options={}),
        entry("mirror+file:///etc/apt/mirrors/debian.list", "bookworm"),
        entry(suites="bookworm", options={"Signed-By": "\n-----BEGIN PGP PUBLIC KEY BLOCK-----"}),
        entry(suites="bookworm", options={"Signed-By": "/srv/site.gpg"}, origins=origin("bookworm")),
    ],
    ids=["by suite name", "no key named", "list of mirrors", "key inside", "re-signed mirror"],
)
def test_the_running_releases_archive_is_known_in_all_its_forms(archive: dict[str, Any]) -> None:
    assert [stanza[2] for stanza in added(archive)] == ["contrib non-free non-free-firmware"]
