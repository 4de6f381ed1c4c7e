"""How one release is found for a closure, and the folder in which apt is asked."""

import os
from pathlib import Path

import pytest
from apt_scripts import load

script = load("apt_release")


def bound(*names: str, **patterns: str) -> dict[str, str]:
    return {**dict.fromkeys(names, "@RELEASE@-*"), **patterns}


@pytest.mark.parametrize(
    ("version", "release"),
    [("580.95.05-1", "580.95.05"), ("1:4.6.0-1", "4.6.0"), ("595.91.07-0ubuntu0.24.04.1", "595.91.07"), ("12", "12")],
)
def test_a_release_is_a_version_without_epoch_and_revision(version: str, release: str) -> None:
    assert script.upstream(version) == release


def test_the_newest_release_that_all_have_is_chosen() -> None:
    by_name = {"driver": ["595.1-1", "580.2-1", "580.1-1"], "manager": ["595.1-1", "580.1-1"]}
    assert script.settle(bound("driver", "manager"), "580.*", by_name) == ("580.1", None)
    assert script.settle(bound("driver", "manager"), "595.1", by_name) == ("595.1", None)


def test_what_lacks_the_release_is_named_with_what_it_has() -> None:
    by_name = {"driver": ["595.1-1", "580.2-1", "580.1-1"], "manager": ["595.1-1", "580.1-1"]}
    release, output = script.settle(bound("driver", "manager"), "580.2", by_name)
    assert release is None
    assert output == {
        "lacking": {"manager": ["595.1", "580.1"]},
        "common": ["595.1", "580.1"],
        "constraint": "580.2",
    }


def test_a_package_of_another_publisher_with_the_same_release_does_not_count() -> None:
    by_name = {"driver": ["580.2-1"]}
    release, _ = script.settle(bound(driver="@RELEASE@-0ubuntu*"), "580.2", by_name)
    assert release is None
    assert script.fitting(["580.2-1", "580.2-0ubuntu0.24.04.1"], "@RELEASE@-0ubuntu*", "580.2").endswith(".1")


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        ({"nvidia-headless-open", "nvidia-dkms-open", "m"}, ["m", "nvidia-headless-open"]),
        ({"nvidia-dkms-open", "m"}, ["m", "nvidia-dkms-open"]),
        ({"m"}, ["m", "nvidia-headless-open"]),
    ],
    ids=["the first is there", "it is not", "none is: the first is named in the refusal"],
)
def test_of_alternatives_the_first_that_a_list_has_is_asked_for(known: set[str], chosen: list[str]) -> None:
    alternatives = {"nvidia-headless-open": ["nvidia-dkms-open"]}
    question = {"bound": ["m=@RELEASE@-*", "nvidia-headless-open=@RELEASE@-*"], "alternatives": alternatives}
    assert script.with_names_that_exist(question, known) == bound(*chosen)


def test_a_status_without_the_driver_has_everything_else() -> None:
    status = "Package: a\nStatus: install ok installed\n\nPackage: libcuda1\nArchitecture: i386\n\nPackage: b\n"
    assert script.without(["libcuda1"], status) == "Package: a\nStatus: install ok installed\n\nPackage: b\n"


def test_files_and_keys_of_the_question_replace_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apt, folder = tmp_path / "apt", tmp_path / "private"
    for name in ("sources.list.d", "preferences.d"):
        (apt / name).mkdir(parents=True)
    (apt / "sources.list.d" / "debian.sources").write_text("theirs")
    (apt / "sources.list.d" / "cuda.list").write_text("old")
    folder.mkdir()
    monkeypatch.setattr(script, "APT", apt)
    files = {
        str(apt / "sources.list.d" / "cuda.list"): "",
        str(apt / "sources.list.d" / "new.sources"): "Signed-By: /etc/apt/keyrings/k.asc\n",
        str(apt / "apt.conf.d" / "52own"): 'Acquire::http::Proxy::m "http://p";',
    }
    script.lay_over(folder, {**files, "/etc/apt/keyrings/k.asc": "armour"})
    assert sorted(path.name for path in (folder / "sources.list.d").iterdir()) == ["debian.sources", "new.sources"]
    (line,) = (folder / "sources.list.d" / "new.sources").read_text().splitlines()
    assert Path(line.removeprefix("Signed-By: ")).read_text() == "armour"
    assert (folder / "apt.conf").read_text().endswith('Acquire::http::Proxy::m "http://p";')


def test_a_file_that_apt_cannot_read_is_reported_with_its_real_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "apt-get"
    tool.write_text('#!/bin/sh\necho "E: Unable to parse ${2%/apt.conf}/preferences.d/x.pref (1)" >&2\nexit 100\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    transaction = load("apt_transaction")
    with pytest.raises(transaction.AptError) as raised:
        transaction.answer({"bound": ["a"], "files": {}, "lock_wait_s": 1})
    assert str(raised.value) == "E: Unable to parse /etc/apt/preferences.d/x.pref (1)"
