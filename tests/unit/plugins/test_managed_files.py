"""Files and folders as the module managed_files brings them about, in a folder of the test."""

import hashlib
import json
import os
import pwd
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.gpunode.node.plugins.module_utils import files_state, managed
from ansible_collections.gpunode.node.plugins.modules import managed_files
from ansible_collections.gpunode.node.plugins.plugin_utils import answers

from gpunode.provisioning.manifest import USER_IN_URL

ME = pwd.getpwuid(os.geteuid()).pw_name
OUR_GROUP = managed._group(os.getegid())


def file(path: Path, content: str | None, **more: Any) -> dict[str, Any]:
    rest = {"encoding": "utf-8", "mode": "0644", "owner": ME, "group": OUR_GROUP, "validate_with": None}
    return {
        "path": str(path),
        "content": content,
        **rest,
        "backup": False,
        "expect_sha256": None,
        "private": False,
        **more,
    }


def folder(path: Path, state: str = "present", mode: str = "0755") -> dict[str, Any]:
    return {"path": str(path), "state": state, "mode": mode}


def bring(*files: dict[str, Any], folders: tuple[dict[str, Any], ...] = (), check: bool = False) -> list[str]:
    paths, diffs = managed.applied(list(files), list(folders), check)
    assert [diff["before_header"] for diff in diffs] == paths
    return [str(path) for path in paths]


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("strict_umask")
def test_a_file_is_made_with_its_folders_and_left_alone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x.conf"
    assert bring(file(path, "text\n"), check=True) == [str(path)]
    assert not path.parent.exists()
    assert bring(file(path, "text\n")) == [str(path)]
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("text\n", 0o644)
    assert path.parent.stat().st_mode & 0o777 == 0o755
    before = path.stat()
    assert bring(file(path, "text\n")) == []
    assert path.stat() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["x.conf"]


@pytest.mark.parametrize("damage", ["content", "mode", "deleted", "link"])
def test_each_damage_is_repaired(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x"
    bring(file(path, "text\n"))
    if damage == "content":
        path.write_text("damaged")
    elif damage == "mode":
        path.chmod(0o600)
    else:
        path.unlink()
    if damage == "link":
        path.symlink_to("/etc/passwd")
    assert bring(file(path, "text\n")) == [str(path)]
    assert (path.read_text(), path.is_symlink()) == ("text\n", False)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_that_has_to_go_goes_and_an_empty_folder_after_it(tmp_path: Path) -> None:
    path = tmp_path / "mine" / "x"
    bring(file(path, "text\n"))
    gone = folder(path.parent, "absent_if_empty")
    assert bring(file(path, None), folders=(gone,), check=True) == [str(path), str(path.parent)]
    assert path.exists()
    (path.parent / "other").touch()
    assert bring(file(path, None), folders=(gone,)) == [str(path)]
    (path.parent / "other").unlink()
    assert bring(file(path, None), folders=(gone,)) == [str(path.parent)]
    assert bring(file(path, None), folders=(gone,)) == []


def test_what_is_not_valid_changes_nothing(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    judge = {"validate_with": ["python3", "-I", "-m", "json.tool", "%s"]}
    with pytest.raises(managed.FileRefusedError, match=r"bad\.json is not valid: "):
        bring(file(good, "{}", **judge), file(bad, "{", **judge))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(managed.FileRefusedError, match="was not validated"):
        bring(file(good, "{}", validate_with=["/no/such/program", "%s"]))
    # The last lines of the errors, else of the output, with the path in the place of the draft's.
    for more, reported in (("", "line 3; line 4; line 5 of"), ("; echo wrong >&2", "wrong")):
        talks = ["sh", "-c", f'seq -f "line %g" 4; echo "line 5 of $1"{more}; exit 1', "sh", "%s"]
        where = f" {good}" if not more else ""
        with pytest.raises(managed.FileRefusedError, match=rf"^{good} is not valid: {reported}{where}$"):
            bring(file(good, "{}", validate_with=talks))
    with pytest.raises(managed.FileRefusedError, match="is not valid"):
        bring(file(good, "{}", validate_with=["sh", "-c", "kill -9 $$", "%s"]))
    assert list(tmp_path.iterdir()) == []
    good.touch()
    assert bring(file(good, None, validate_with=["false", "%s"])) == [str(good)]


def test_a_validation_that_does_not_end_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managed, "VALIDATION_LIMIT_S", 0.2)
    with pytest.raises(managed.FileRefusedError, match=r"x was not validated: .* timed out after"):
        bring(file(tmp_path / "x", "y", validate_with=["sleep", "60"]))
    assert list(tmp_path.iterdir()) == []


def test_a_document_that_others_wrote_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text("{}")
    known = hashlib.sha256(b"{}").hexdigest()
    assert bring(file(path, '{"a": 1}', expect_sha256=known)) == [str(path)]
    with pytest.raises(managed.FileRefusedError, match="changed by another process"):
        bring(file(path, '{"b": 1}', expect_sha256=known))
    with pytest.raises(managed.FileRefusedError, match="another process"):
        bring(file(path, '{"b": 1}', expect_sha256="absent"))
    # Check mode starts from what the roles before would have written.
    assert bring(file(path, '{"b": 1}', expect_sha256="absent"), check=True) == [str(path)]
    assert bring(file(tmp_path / "new", "x", expect_sha256="absent")) == [str(tmp_path / "new")]


def test_what_was_there_is_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("before\n")
    bring(file(path, "theirs\n"))
    assert list(tmp_path.iterdir()) == [path]
    bring(file(path, "ours\n", backup=True))
    (copy,) = [entry for entry in tmp_path.iterdir() if entry.name != "x"]
    assert copy.read_text() == "theirs\n"
    assert re.fullmatch(r"x\.\d{4}-\d\d-\d\d@\d\d:\d\d:\d\d~", copy.name)


def test_a_diff_shows_content_and_attributes_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old\n")
    path.chmod(0o600)
    _, (diff,) = managed.applied([file(path, "new\n")], [], True)
    assert ("old\n" in diff["before"], "new\n" in diff["after"]) == (True, True)
    assert "mode 0600" in diff["before"]
    assert "mode 0644" in diff["after"]
    _, (hidden,) = managed.applied([file(path, "new-secret\n", private=True)], [], True)
    assert "secret" not in str(hidden)
    assert hidden["before"] != hidden["after"]


def test_a_folder_instead_of_a_file_is_left_alone(tmp_path: Path) -> None:
    for content in ("x", None):
        with pytest.raises(managed.FileRefusedError, match="is a directory, expected a file: move it"):
            bring(file(tmp_path, content))
    (tmp_path / "f").touch()
    with pytest.raises(managed.FileRefusedError, match="is not a directory"):
        bring(folders=(folder(tmp_path / "f"),))


def test_bytes_that_are_not_text_are_written_unchanged(tmp_path: Path) -> None:
    ring = file(tmp_path / "ring.gpg", "mQE=", encoding="base64")
    assert bring(ring) == [ring["path"]]
    assert Path(ring["path"]).read_bytes() == b"\x99\x01"
    assert bring(ring) == []


def test_an_owner_that_does_not_exist_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(managed.FileRefusedError, match="user nobody-at-all does not exist"):
        bring(file(tmp_path / "x", "y", owner="nobody-at-all"))
    with pytest.raises(managed.FileRefusedError, match="group nobody-at-all does not exist"):
        bring(file(tmp_path / "x", "y", group="nobody-at-all"))
    assert list(tmp_path.iterdir()) == []
    assert managed.attributes(0o40, 4000000001, 4000000002) == "mode 0040, 4000000001:4000000002"


def test_what_lies_under_paths_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.conf"
    path.write_bytes(b"text\n")
    path.chmod(0o640)
    (tmp_path / "link").symlink_to("x.conf")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    state = files_state.collected(
        [str(tmp_path / name) for name in ("x.conf", "link", "none", "x.conf/below")],
        [f"{tmp_path}/*.conf"],
        [str(path), str(tmp_path / "binary"), str(tmp_path / "none")],
    )
    row = state["files"][str(path)]
    assert (row["kind"], row["mode"], row["owner"]) == ("file", "0640", ME)
    assert row["sha256"] == hashlib.sha256(b"text\n").hexdigest()
    kinds = {Path(name).name: fields["kind"] for name, fields in state["files"].items()}
    assert kinds == {"x.conf": "file", "link": "link", "none": "absent", "below": "absent", "binary": "file"}
    assert state["contents"] == {str(path): "text\n", str(tmp_path / "binary"): None, str(tmp_path / "none"): None}


HIDDEN, OTHER = "(content not shown)\n", "(other content, not shown)\n"


@pytest.mark.parametrize(
    ("before", "after", "private", "shown"),
    [
        ("a\n", "b\n", False, ["a\n", "b\n"]),
        ("a\n", None, False, ["a\n", ""]),
        (None, "b\n", False, ["", "b\n"]),
        ("a\n", "b\n", True, [HIDDEN, OTHER]),
        ("a\n", "a\n", True, [HIDDEN, HIDDEN]),
        ("a\n", None, True, [HIDDEN, ""]),
        (None, "b\n", True, ["", HIDDEN]),
        ("a\0", "b\n", False, [HIDDEN, "b\n"]),
        ("a" * (1 << 18), "b" * (1 + (1 << 18)), False, ["a" * (1 << 18), HIDDEN]),
        ("#!\n" * 61, None, False, ["(program of 61 lines, not shown)\n", ""]),
        ("p http://a:b@c\n", "p http://c\n", False, [HIDDEN, OTHER]),
        ("p http://c\n", "p http://a:b/d@c\n", False, [HIDDEN, OTHER]),
        ("p http://a@c\n", None, False, [HIDDEN, ""]),
        ("p http://c:80/d\n", "ada@c\n", False, ["p http://c:80/d\n", "ada@c\n"]),
    ],
    ids=[
        *("text", "goes", "comes", "private", "same", "private goes", "private comes", "binary", "large", "program"),
        *("password before", "password after", "password goes", "address"),
    ],
)
def test_what_a_diff_shows(
    tmp_path: Path, before: str | None, after: str | None, private: bool, shown: list[str]
) -> None:
    path = tmp_path / "x"
    if before is not None:
        bring(file(path, before))
    diff = managed.difference(file(path, after, private=private))
    assert [diff["before"], diff["after"]] == shown
    assert [diff["before_header"], diff["after_header"]] == [str(path), "(removed)" if after is None else str(path)]
    if before and after:
        diff = managed.difference(file(path, after, private=private, mode="0600"))
        heads = [f"# mode {mode}, {ME}:{OUR_GROUP}\n" for mode in ("0644", "0600")]
        assert [diff["before"], diff["after"]] == [head + text for head, text in zip(heads, shown, strict=True)]


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("a\nb\nc\n", "a\nb\nd\ne\n", (2, 1, "d\ne\n")),
        ("a\nb\n", "c\n", (0, 2, "c\n")),
        ("a\n", "a\nb\n", (1, 0, "b\n")),
        ("a\nb\n", None, (0, 2, "")),
    ],
)
def test_a_diff_shows_of_another_users_lines_only_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str | None, shown: tuple[int, int, str]
) -> None:
    path = tmp_path / "x"
    stay, go, added = shown
    bring(file(path, before))
    monkeypatch.setattr(managed, "ours", frozenset)
    diff = managed.difference(file(path, after))
    stays = f"({stay} lines of {ME} that stay, not shown)\n" if stay else ""
    goes = f"({go} lines of {ME} that are removed, not shown)\n" if go else ""
    assert (diff["before"], diff["after"]) == (stays + goes, stays + added)


def test_a_removed_file_that_others_cannot_read_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "login.json"
    for mode, shown in ((0o640, HIDDEN), (0o644, "secret\n")):
        path.write_text("secret\n")
        path.chmod(mode)
        assert managed.difference(file(path, None))["before"] == shown
    assert managed.difference(file(path, "new\n"))["before"] == "secret\n"


def test_a_private_file_of_another_user_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(file(tmp_path / "x", "old\n"))
    monkeypatch.setattr(managed, "ours", frozenset)
    diff = managed.difference(file(tmp_path / "x", "secret\n", private=True))
    assert [diff["before"], diff["after"]] == [HIDDEN, OTHER]


def test_passwords_in_urls_are_found_alike_on_both_sides() -> None:
    assert managed.USER_IN_URL.pattern.decode() == USER_IN_URL.pattern == answers.USER_IN_URL.pattern


def test_a_validation_prints_no_password(tmp_path: Path) -> None:
    program = ["sh", "-c", 'echo "invalid mirror: $(cat "$1")" >&2; exit 1', "sh", "%s"]
    with pytest.raises(managed.FileRefusedError, match=r"invalid mirror: http://\(not shown\)@mirror$"):
        bring(file(tmp_path / "x", "http://ada:secret@mirror", validate_with=program))


@pytest.mark.parametrize("fails", [False, True])
def test_a_module_answers_without_its_arguments(
    tmp_path: Path, fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ansible's own modules return them, and -vvv prints all that a module returns."""
    path = str(tmp_path if fails else tmp_path / "x")
    fields = {"path": path, "content": "secret\n", "owner": ME, "group": OUR_GROUP, "private": True}
    with patch_module_args({"files": [fields], "_ansible_diff": True}), pytest.raises(SystemExit) as ended:
        managed_files.main()
    printed = capsys.readouterr().out
    answer = json.loads(printed)
    assert (ended.value.code, answer.get("failed", False)) == (int(fails), fails)
    assert answer["invocation"] == {}
    assert "secret" not in printed
    assert path in printed


def test_a_file_is_compared_up_to_a_size(tmp_path: Path) -> None:
    for size, compared in ((8 << 20, True), ((8 << 20) + 1, False)):
        (tmp_path / "x").touch()
        os.truncate(tmp_path / "x", size)
        state = managed.current(file(tmp_path / "x", ""))
        assert state is not None
        assert (state.data is not None) is compared


def test_a_link_that_others_could_have_made_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("/etc/passwd")
    tmp_path.chmod(0o777)
    with pytest.raises(managed.FileRefusedError, match="x is a symbolic link, expected a file: move it"):
        bring(file(tmp_path / "x", "y"))


def test_a_folder_is_made_its_mode_is_set_and_it_goes_after_those_in_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for check in (True, False):
        _, (diff,) = managed.applied([], [folder(path, mode="0750")], check)
        assert (diff["before"], diff["after"], path.exists()) == ("(absent)\n", "folder, mode 0750\n", not check)
    for check in (True, False):
        assert path.stat().st_mode & 0o7777 == 0o750
        _, (diff,) = managed.applied([], [folder(path, mode="0700")], check)
        assert (diff["before"], diff["after"]) == ("folder, mode 0750\n", "folder, mode 0700\n")
    assert path.stat().st_mode & 0o7777 == 0o700
    assert bring(folders=(folder(path, mode="0700"), folder(tmp_path / "b", "absent_if_empty"))) == []
    inner = path / "inner"
    inner.mkdir()
    gone = tuple(folder(target, "absent_if_empty") for target in (path, inner))
    for check in (True, False):
        paths, diffs = managed.applied([], list(gone), check)
        assert paths == [str(inner), str(path)]
        assert [diffs[0][name] for name in ("before", "after", "after_header")] == ["folder\n", "", "(removed)"]
        assert path.exists() is check
    path.touch()
    assert bring(folders=gone) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it is about a folder of another user")
def test_a_folder_of_another_user_is_refused_also_in_check_mode(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    os.chown(tmp_path / "a", 1, 1)
    for check in (True, False):
        with pytest.raises(managed.FileRefusedError, match="a belongs to another user"):
            bring(folders=(folder(tmp_path / "a"),), check=check)


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (None, "#!/bin/sh\n" + "true\n" * 100, "(program of 101 lines, not shown)\n"),
        (None, "#!/bin/sh\n" + "true\n" * 60, "(program of 61 lines, not shown)\n"),
        (None, "#!/bin/sh\n" + "true\n" * 59, "#!/bin/sh\n" + "true\n" * 59),
        (None, "# a setting\n" * 100, "# a setting\n" * 100),
        ("#!/bin/sh\n", "#!/bin/sh\n" + "true\n" * 100, "#!/bin/sh\n" + "true\n" * 100),
    ],
    ids=["a long one", "one too long", "the longest", "settings", "one that changes"],
)
def test_a_long_program_that_comes_is_named_and_not_printed(
    tmp_path: Path, before: str | None, after: str, shown: str
) -> None:
    path = tmp_path / "program"
    if before is not None:
        path.write_text(before, encoding="utf-8")
        path.chmod(0o644)
    assert managed.difference(file(path, after))["after"] == shown


ACL = "system.posix_acl_access"


def access_list(mask: int) -> bytes:
    """An access list as in linux/posix_acl_xattr.h: a user with all rights, as far as the mask allows."""
    rows = ((1, 6, NOBODY), (2, 7, 1234), (4, 4, NOBODY), (0x10, mask, NOBODY), (0x20, 4, NOBODY))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows)


NOBODY = 0xFFFFFFFF


LABEL = "security.selinux"


def marked(path: Path) -> dict[str, bytes]:
    """Set an access list and attributes of a file; return these: as root also a label, which any system keeps."""
    attributes = {"user.site": b"kept", **({LABEL: b"system_u:object_r:etc_t:s0\0"} if os.geteuid() == 0 else {})}
    for name, value in (attributes | {ACL: access_list(7)}).items():
        os.setxattr(path, name, value)
    return attributes


@pytest.mark.parametrize("content", ["new\n", None])
def test_access_list_and_attributes_of_a_replaced_file_stay(tmp_path: Path, content: str | None) -> None:
    """Those of the old file: a rename alone would replace them by the folder's."""
    path = tmp_path / "x.conf"
    path.write_text("old\n")
    attributes = marked(path)
    assert bring(file(path, content, mode="0644", backup=True)) == [str(path)]
    copy = next(entry for entry in tmp_path.iterdir() if entry.name.endswith("~"))
    for target in [copy, *([path] if content else [])]:
        assert {name: os.getxattr(target, name) for name in attributes} == attributes
        assert struct.unpack_from("<HHI", os.getxattr(target, ACL), 12) == (2, 7, 1234)
    if content:
        assert path.stat().st_mode & 0o777 == 0o644
        assert os.getxattr(path, ACL) == access_list(4)
        assert bring(file(path, content, mode="0644")) == []


@pytest.mark.parametrize("check", [True, False])
def test_a_folder_stays_where_a_folder_in_it_stays(tmp_path: Path, check: bool) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "of another").touch()
    both = (folder(inner.parent, "absent_if_empty"), folder(inner, "absent_if_empty"))
    assert bring(folders=both, check=check) == []
    (inner / "of another").unlink()
    assert bring(folders=both, check=check) == [str(inner), str(inner.parent)]
