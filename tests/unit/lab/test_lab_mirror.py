"""The mirror and the proxy, from apt's configuration."""

import subprocess
from typing import Any

import pytest

from gpunode.errors import UndeterminedError, UsageError
from gpunode.lab.recipe import MIRROR_VARIABLE, Mirror, find_mirror, parse_proxies, parse_targets, redacted

TARGETS = """\
Debian|bookworm-updates|main|http://mirror.example/debian/
Debian|bookworm-security|main|http://security.example/debian-security/
Debian|bookworm|contrib|http://wrong.example/debian/
Debian|bookworm|main|http://mirror.example/debian/
nodesource|nodistro|main|https://node.example/node/
"""


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What apt's tools answer, by their name."""
    answers = {"apt-config": "", "apt-get": TARGETS}

    def run(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if argv[0] not in answers:
            raise FileNotFoundError(argv[0])
        return subprocess.CompletedProcess(argv, 0, answers[argv[0]], "")

    monkeypatch.setattr(subprocess, "run", run)
    for name in (MIRROR_VARIABLE, "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    return answers


def test_the_mirror_is_the_one_apt_uses(apt: dict[str, str]) -> None:
    assert find_mirror() == Mirror("http://mirror.example/debian", "http://security.example/debian-security")


def test_other_origins_components_and_suites_are_not_a_mirror() -> None:
    text = "Ubuntu|noble|main|http://u.example/ubuntu/\nDebian|trixie|contrib|http://a.example/d\n"
    assert parse_targets(text + "Debian|bookworm-backports|main|http://b.example/d\n") == (None, None)
    assert parse_targets("Debian|trixie|main|cdrom://[disc]/\nDebian|trixie\n\n") == (None, None)


def test_without_lists_the_remedy_is_reported(apt: dict[str, str]) -> None:
    apt["apt-get"] = ""
    with pytest.raises(UndeterminedError, match=r"apt-get update, or set a Debian mirror with --mirror"):
        find_mirror()


def test_an_apt_that_does_not_answer_is_no_missing_archive(
    apt: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(argv: list[str], timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(argv, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(UndeterminedError, match="apt-config did not answer within 60 s"):
        find_mirror()


def test_a_machine_without_apt_needs_a_named_mirror(apt: dict[str, str]) -> None:
    apt.clear()
    with pytest.raises(UndeterminedError, match="--mirror"):
        find_mirror()
    assert find_mirror("http://m.example/debian/").archive == "http://m.example/debian"


def test_a_named_mirror_wins_over_the_variable_and_apt(apt: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MIRROR_VARIABLE, "https://env.example/debian")
    assert find_mirror().archive == "https://env.example/debian"
    named = find_mirror("https://named.example/pub/debian/")
    assert (named.archive, named.security) == (
        "https://named.example/pub/debian",
        "https://named.example/pub/debian-security",
    )


@pytest.mark.parametrize(
    "url", ["ftp://m.example/debian", "m.example/debian", "http://", "http://m example/d", 'http://m/"']
)
def test_an_invalid_url_of_a_mirror_is_refused(apt: dict[str, str], url: str) -> None:
    with pytest.raises(UsageError, match="not the URL of a Debian mirror"):
        find_mirror(url)


def test_proxies_come_from_apt_first() -> None:
    text = 'Acquire::http::Proxy "http://proxy.example:3128/";\nAcquire::https::Proxy "DIRECT";\nAcquire::http "";\n'
    assert parse_proxies(text) == (("http", "http://proxy.example:3128/"),)


def test_the_environment_names_a_proxy_where_apt_has_none(apt: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://env.example:1")
    monkeypatch.setenv("https_proxy", "http://env.example:2")
    apt["apt-config"] = 'Acquire::http::Proxy "http://apt.example:3";\n'
    assert dict(find_mirror().proxies) == {"http": "http://apt.example:3", "https": "http://env.example:2"}


def test_nodes_cannot_use_a_proxy_on_the_hosts_loopback() -> None:
    proxies = (("http", "http://127.0.0.1:3142"), ("https", "http://proxy.example:3128"))
    assert Mirror("a", "b", proxies).proxies_for_nodes == (("https", "http://proxy.example:3128"),)
    assert Mirror("a", "b", (("http", "http://localhost:1"), ("https", "http://[::1]:2"))).proxies_for_nodes == ()


def test_passwords_in_urls_are_not_shown() -> None:
    assert redacted("E: http://me:secret@m.example/debian failed") == "E: http://m.example/debian failed"
    assert redacted("http://m.example/a@b") == "http://m.example/a@b"
