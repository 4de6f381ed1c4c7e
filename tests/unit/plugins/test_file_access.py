"""Root and a hostile user: obstacles at every component of a path, and swaps at any time, through the modules' code."""

import os
import pwd
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import file_access, files_state, managed, ssh_state
from effort import effort
from hostile_files import SECRET, USER, World, swapped, within, world

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it is about what root does in another's folder")
TEXT = "ssh-ed25519 AAAA new\n"
LIMIT_S = 15


@pytest.fixture(name="tree")
def _tree() -> Iterator[World]:
    with world() as made:
        yield made


def file(path: Path, content: str | None = TEXT, owner: str = USER.pw_name, mode: str = "0600") -> dict[str, Any]:
    group = managed._group(pwd.getpwnam(owner).pw_gid)
    rest = {"encoding": "utf-8", "validate_with": None, "backup": False, "expect_sha256": None, "private": False}
    return {"path": str(path), "content": content, "mode": mode, "owner": owner, "group": group, **rest}


def account(home: Path) -> dict[str, Any]:
    entry = pwd.struct_passwd((*USER[:5], str(home), "/bin/sh"))
    row: dict[str, Any] = ssh_state.account(entry, "!", [".ssh/authorized_keys"])
    return row


def acts(home: Path, path: Path) -> dict[str, Any]:
    """What the modules do with a path in a home."""
    return {
        "node_state": lambda: files_state.collected([str(path)], [], [str(path)]),
        "account": lambda: account(home),
        "check": lambda: managed.applied([file(path)], [], True),
        "write": lambda: managed.applied([file(path)], [], False),
        "remove": lambda: managed.applied([file(path, None)], [], False),
    }


@pytest.mark.parametrize("act", ["node_state", "account", "check", "write", "remove"])
def test_no_obstacle_in_a_home_misleads_or_stops_root(tree: World, act: str) -> None:
    before = tree.snapshot()
    for way, path in tree.ways(tree.home, ".ssh", "authorized_keys"):
        outcome = within(LIMIT_S, acts(tree.home, path)[act])
        assert outcome != "hangs", way
        assert SECRET not in outcome, way
        assert tree.snapshot() == before, way
        if act == "write" and outcome.startswith("([") and way.rpartition(" at ")[0] != "hard link":
            status = path.lstat()
            assert (status.st_uid, stat.S_IMODE(status.st_mode), path.read_text()) == (USER.pw_uid, 0o600, TEXT), way
            assert path.resolve() == path, way
        elif act == "write":
            assert str(path) in outcome, way
            assert "\n" not in outcome, way


def test_what_a_refusal_names(tree: World) -> None:
    path = tree.home / ".ssh" / "authorized_keys"
    refused = {}
    for way, _ in tree.ways(tree.home, ".ssh", "authorized_keys"):
        try:
            managed.applied([file(path)], [], True)
        except OSError as err:
            refused[way] = str(err)
    assert refused["pipe at authorized_keys"] == f"{path} is a named pipe, expected a file: move it"
    assert refused["link at authorized_keys"] == f"{path} is a symbolic link, expected a file: move it"
    assert ".ssh is a symbolic link that user daemon or others can change" in refused["link at .ssh"]
    assert "nothing at .ssh" not in refused


def test_users_cannot_redirect_root_while_it_works(tree: World) -> None:
    before = tree.snapshot()
    path, folder = tree.home / ".ssh" / "authorized_keys", tree.home / ".ssh"
    folder.mkdir()
    os.chown(folder, USER.pw_uid, USER.pw_gid)
    managed.applied([file(path)], [], False)
    outcomes = set()
    with swapped(folder, tree.precious, 1):
        for number in range(effort(60, 600)):
            requested = [file(path, f"{TEXT}{number}\n")]
            outcome = within(LIMIT_S, partial(managed.applied, requested, [], False))
            outcomes.add(outcome.startswith("(["))
            assert SECRET not in outcome
    assert tree.snapshot() == before
    assert outcomes == {True, False}, "some rounds meet the link, some the folder"


def test_users_cannot_redirect_the_look(tree: World) -> None:
    path = tree.home / "authorized_keys"
    path.write_text(TEXT)
    os.chown(path, USER.pw_uid, USER.pw_gid)
    with swapped(path, tree.precious / "secret", 2):
        for _ in range(effort(300, 3000)):
            assert SECRET not in repr(files_state.collected([], [], [str(path)]))
        for _ in range(effort(30, 200)):
            assert SECRET not in within(LIMIT_S, lambda: managed.applied([file(path)], [], True))


def test_a_users_text_is_in_no_diff(tree: World) -> None:
    path = tree.home / "authorized_keys"
    path.write_text("ssh-ed25519 BBBB laptop\nprivate words\n")
    os.chown(path, USER.pw_uid, USER.pw_gid)
    _, (diff,) = managed.applied([file(path, f"ssh-ed25519 BBBB laptop\n{TEXT}")], [], True)
    assert TEXT in diff["after"]
    assert "laptop" not in str(diff)
    assert "private words" not in str(diff)
    assert "1 lines of daemon that are removed" in diff["before"]


@pytest.mark.parametrize("owner", ["root", USER.pw_name])
def test_a_folder_that_all_can_write_to(tree: World, owner: str) -> None:
    """Only what nobody else made is replaced there, and root's folders in it are root's."""
    before = tree.snapshot()
    for way, path in tree.ways(tree.shared, "cache", "x"):
        for act in (
            lambda path=path: files_state.collected([str(path)], [], [str(path)]),
            lambda path=path: managed.applied([file(path, owner=owner)], [], False),
            lambda path=path: managed.applied(
                [], [{"path": str(path.parent), "state": "present", "mode": "0700"}], False
            ),
        ):
            outcome = within(LIMIT_S, act)
            assert outcome != "hangs", way
            assert SECRET not in outcome, way
            assert tree.snapshot() == before, way


def test_a_cache_folder_of_somebody_else_is_refused_by_name(tree: World) -> None:
    path = tree.shared / "cache"
    requested = [{"path": str(path), "state": "present", "mode": "0700"}]
    assert managed.applied([], requested, False)[0] == [str(path)]
    assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (0, 0o700)
    os.chown(path, USER.pw_uid, USER.pw_gid)
    path.chmod(0o755)
    with pytest.raises(managed.FileRefusedError, match=rf"^{path} belongs to another user \(daemon, uid 1\)"):
        managed.applied([], requested, False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_links_of_root_in_folders_of_root_are_followed(tree: World) -> None:
    """As /etc/resolv.conf and /var/run are."""
    (tree.root / "run").symlink_to("precious")
    (tree.precious / "link").symlink_to("/etc/hostname")
    assert file_access.text(str(tree.root / "run" / "secret")) == f"{SECRET}\n"
    assert file_access.text(str(tree.precious / "link")) == Path("/etc/hostname").read_text()
    tree.root.chmod(0o777)
    with pytest.raises(
        file_access.FileRefusedError, match="run is a symbolic link that user root or others can change"
    ):
        file_access.text(str(tree.root / "run" / "secret"))


def test_a_process_with_a_users_rights_is_limited(tree: World) -> None:
    began = time.monotonic()
    with pytest.raises(file_access.FileRefusedError, match="did not answer in time"):
        file_access.limited(USER.pw_uid, lambda: time.sleep(60), 0.3)
    assert time.monotonic() - began < 5
    with pytest.raises(PermissionError):
        file_access.limited(USER.pw_uid, (tree.precious / "secret").read_bytes)
    with pytest.raises(file_access.FileRefusedError, match="larger than 8 MiB"):
        file_access.limited(USER.pw_uid, lambda: "x" * (9 << 20))
    with pytest.raises(file_access.FileRefusedError, match="ended early"):
        file_access.limited(USER.pw_uid, lambda: os.kill(os.getpid(), 9))
    with pytest.raises(file_access.FileRefusedError, match="ValueError: a bug"):
        file_access.limited(None, lambda: (_ for _ in ()).throw(ValueError("a bug")))
    assert file_access.limited(USER.pw_uid, lambda: [os.getuid(), os.getgid(), os.getgroups()])[:2] == [1, 1]


def test_what_a_process_with_a_users_rights_returns_and_raises(tree: World) -> None:
    """As if it were done here: bytes, values and errors; only the rights are those of the user."""
    secret = tree.precious / "secret"
    with pytest.raises(PermissionError, match="Permission denied") as denied:
        file_access.limited(USER.pw_uid, secret.read_bytes)
    assert denied.value.filename == str(secret)
    assert file_access.limited(None, secret.read_bytes) == f"{SECRET}\n".encode()
    assert file_access.limited(None, lambda: {"a": [None, 1]}) == {"a": [None, 1]}

    def rights() -> list[Any]:
        return [os.getresuid(), os.getresgid(), sorted(os.getgroups())]

    groups = sorted(os.getgrouplist(USER.pw_name, USER.pw_gid))
    assert file_access.limited(USER.pw_uid, rights) == [[USER.pw_uid] * 3, [USER.pw_gid] * 3, groups]
    assert file_access.limited(54321, rights) == [[54321] * 3, [65534] * 3, []], "without an entry: no group of root"
    assert file_access.limited(None, rights)[0] == [0, 0, 0]
    with pytest.raises(OSError, match="no number and no file"):
        file_access.limited(None, lambda: (_ for _ in ()).throw(OSError("no number and no file")))
    # Neither a child nor a descriptor is left.
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    child = file_access.limited(None, os.getpid)
    file_access.text(str(secret))
    assert child != os.getpid()
    assert not Path(f"/proc/{child}").exists()
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


@pytest.mark.parametrize("mode", [0o775, 0o757], ids=oct)
def test_what_root_reads_where_others_can_write(tree: World, mode: int) -> None:
    """Files of the folder's owner with one name, and nothing that another user put there."""
    owned, roots, foreign, named = (tree.home / name for name in ("own", "roots", "foreign", "named"))
    shared, user_file = tree.shared / "root", tree.shared / "theirs"
    for path, uid in ((owned, 1), (roots, 0), (foreign, 2), (named, 1), (shared, 0), (user_file, 1)):
        path.write_text(TEXT)
        os.chown(path, uid, uid)
    os.link(named, tree.home / "second")
    tree.home.chmod(mode)
    exposed = tree.root / "exposed"
    exposed.mkdir()
    exposed.chmod(mode)
    (exposed / "theirs").write_text(TEXT)
    os.chown(exposed / "theirs", 1, 1)
    for path in (owned, shared):
        assert file_access.text(str(path)) == TEXT
    for path in (roots, foreign, named, user_file, exposed / "theirs"):
        with pytest.raises(file_access.FileRefusedError, match=f"^{path} is in a directory .*: root does not read it$"):
            file_access.text(str(path))
    (tree.precious / "theirs").write_text(TEXT)
    os.chown(tree.precious / "theirs", 2, 2)
    assert file_access.text(str(tree.precious / "theirs")) == TEXT
    # With root's rights in a folder of root, whoever the file is meant for.
    state = file_access.path_state(str(tree.precious / "secret"), USER.pw_uid)
    assert state is not None
    assert (state.data, state.shared, state.mode, state.uid) == (f"{SECRET}\n".encode(), False, 0o600, 0)
    state = file_access.path_state(str(tree.precious), USER.pw_uid)
    assert state is not None
    assert (state.kind, state.data) == ("a directory", None)
    assert file_access.path_state(str(shared)).shared
    assert file_access.path_state(str(shared), most=3).data is None


def test_whoever_is_not_root_follows_every_link(tree: World) -> None:
    """``trusted`` is None for them: the kernel alone decides what they reach."""
    link = tree.shared / "link"
    link.symlink_to(tree.precious / "secret")
    os.lchown(link, USER.pw_uid, USER.pw_gid)
    with file_access.opened(str(link), trusted=None) as at:
        assert at.inode == (tree.precious / "secret").stat()
        file_access.refuse_foreign_place(at, 0, None)
    with file_access.opened(str(link), trusted=None, follow=False) as at:
        assert at.inode == link.lstat()
        file_access.refuse_foreign_place(at, 0, None)
    with pytest.raises(file_access.FileRefusedError, match="root does not follow it"):
        file_access.text(str(link))


def test_the_limits_of_a_text(tree: World) -> None:
    path = tree.root / "text"
    path.write_bytes(b"x" * 2048)
    assert file_access.read(str(path), 2048) == b"x" * 2048
    for name, most in ((str(path), 2047), ("/proc/meminfo", 1024)):
        with pytest.raises(file_access.FileRefusedError, match=f"^{name} is larger than 1 KiB$"):
            file_access.read(name, most)
    path.write_bytes(b"ab\xff")
    with pytest.raises(file_access.FileRefusedError, match=r"is not UTF-8 text \(byte 2\)"):
        file_access.text(str(path))
    with pytest.raises(FileNotFoundError, match="No such file"):
        file_access.text(str(tree.root / "none"))
    with pytest.raises(file_access.FileRefusedError, match="NUL character"):
        file_access.text("/etc/\0hostname")
    for kind, path in (("device", Path("/dev/null")), ("directory", tree.precious)):
        with pytest.raises(file_access.FileRefusedError, match=f"^{path} is a {kind}, not a file$"):
            file_access.read(str(path))


def test_the_ends_of_a_path(tree: World, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tree.precious / "secret"
    assert file_access.names("/") == os.listdir("/")  # noqa: PTH208
    monkeypatch.chdir(tree.precious)
    assert file_access.text("./folder/../secret") == f"{SECRET}\n"
    for missing in (text / "x", tree.root / "none", tree.root / "none" / "x"):
        assert file_access.status(str(missing)) is None
        assert file_access.path_state(str(missing)) is None
        file_access.remove(str(missing), 0)
    with pytest.raises(NotADirectoryError, match="Not a directory"):
        file_access.read(f"{text}/x")
    # As many links as the kernel follows, and a circle.
    for number in range(41):
        (tree.precious / f"link{number}").symlink_to(f"link{number - 1}" if number else "secret")
    assert file_access.text(str(tree.precious / "link39")) == f"{SECRET}\n"
    (tree.precious / "circle").symlink_to("circle")
    for name in ("link40", "circle"):
        outcome = within(LIMIT_S, partial(file_access.text, str(tree.precious / name)))
        assert "Too many levels of symbolic links" in outcome
    # An own open file has no folder in which it could be replaced.
    with text.open("rb") as stream:
        path = f"/proc/self/fd/{stream.fileno()}"
        with file_access.opened(path, trusted=file_access.ours()) as at:
            assert (at.folder, at.name, at.inode) == (-1, str(stream.fileno()), os.fstat(stream.fileno()))
    monkeypatch.setattr(file_access, "STARTED_AS", 1234)
    assert file_access.ours() == {0, 1234}


def test_where_root_writes_and_how_it_refuses(tree: World) -> None:
    me, user = (0, 0), (USER.pw_uid, USER.pw_gid)
    user_file, locked = tree.shared / "theirs", tree.home / "locked"
    user_file.write_text("theirs")
    user_folder = tree.precious / "given"
    user_folder.mkdir()
    for path in (user_file, user_folder):
        os.chown(path, *user)
    locked.mkdir(mode=0o700)
    write, foreign = file_access.write, "belongs to another user (daemon, uid 1)"
    refused = {
        f"{tree.home}/x: {tree.home} {foreign}: root does not write there": partial(
            write, f"{tree.home}/x", b"", 0o600, me
        ),
        f"{user_file} {foreign}, in a directory that others can write to: root does not replace it: remove it, or "
        "select another directory": partial(write, str(user_file), b"", 0o600, me),
        f"{locked}/x: Permission denied for user daemon, who must own the file and its directory": partial(
            write, f"{locked}/x", b"", 0o600, user
        ),
        f"{locked}: {tree.home} {foreign}: root does not write there": partial(file_access.remove_folder, str(locked)),
        f"{tree.precious}/folder: Is a directory": partial(write, f"{tree.precious}/folder", b"", 0o600, me),
        f"{tree.precious}/secret is not a directory: move it": partial(
            file_access.make_folder, f"{tree.precious}/secret", 0o700
        ),
        f"{user_folder} {foreign}, who can change what is in it: move it, or give it to root with its content": partial(
            file_access.make_folder, str(user_folder), 0o700
        ),
    }
    for message, act in refused.items():
        with pytest.raises(file_access.FileRefusedError) as err:
            act()
        assert str(err.value) == message
    with pytest.raises(file_access.FileRefusedError, match="root does not replace it"):
        file_access.remove(str(user_file), 0)
    left = sorted(path.name for folder in (tree.home, tree.precious) for path in folder.iterdir())
    assert left == ["folder", "given", "locked", "secret"], "no draft is left"
    file_access.remove_folder(str(user_folder))
    assert not user_folder.exists()
    assert user_file.read_text() == "theirs"
    # What a user owns in a folder of root is written with root's rights; a user's file is that user's to replace.
    for path in (tree.precious / "of-user", user_file):
        write(str(path), b"new", 0o640, user)
        status = path.stat()
        assert (path.read_text(), status.st_uid, stat.S_IMODE(status.st_mode)) == ("new", USER.pw_uid, 0o640)


@pytest.mark.parametrize("mask", [0, 0o077])
def test_new_folders_are_closed_until_their_mode_is_set(
    tree: World, monkeypatch: pytest.MonkeyPatch, mask: int
) -> None:
    """Whatever the umask: for all to enter in folders of root, for their owner alone in a home."""
    seen = []

    def noting(act: Callable[[Any, int], None], at: Any, mode: int) -> None:
        seen.append(stat.S_IMODE((Path("/proc/self/fd") / str(at)).stat().st_mode))
        act(at, mode)

    for name in ("chmod", "fchmod"):
        monkeypatch.setattr(os, name, partial(noting, getattr(os, name)))
    before = os.umask(mask)
    try:
        file_access.make_folder(str(tree.root / "a" / "b"), 0o750)
        file_access.write(str(tree.root / "c" / "file"), b"", 0o644, (0, 0))
        file_access.write(str(tree.home / "d" / "file"), b"", 0o644, (USER.pw_uid, USER.pw_gid))
    finally:
        os.umask(before)
    assert seen == [0o700, 0o700, 0o700, 0o600], "the folders a, b and c and the file; a child made d"
    made = {path: stat.S_IMODE((tree.root / path).stat().st_mode) for path in ("a", "a/b", "c", "c/file", "home/d")}
    assert made == {"a": 0o755, "a/b": 0o750, "c": 0o755, "c/file": 0o644, "home/d": 0o700}


def test_a_copy_is_kept_only_of_a_file_that_was_there(tree: World) -> None:
    path, copy = tree.precious / "file", tree.precious / "file~"
    file_access.write(str(path), b"old", 0o640, (0, 3), keep_as="~")
    assert not copy.exists()
    file_access.write(str(path), b"new", 0o600, (0, 0), keep_as="~")
    status = copy.stat()
    assert (copy.read_text(), stat.S_IMODE(status.st_mode), status.st_gid) == ("old", 0o640, 3)
    file_access.remove(str(path), 0, keep_as="~")
    assert (path.exists(), copy.read_text()) == (False, "new")
    file_access.rename(str(copy), "file", 0)
    assert (path.read_text(), copy.exists()) == ("new", False)


@pytest.mark.parametrize("refused", ["security.selinux", "user.note"])
def test_only_a_label_that_cannot_be_set_is_an_error_and_only_for_root(
    tree: World, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Programs may not read a file of root without its label."""
    attributes = []

    def set_one(_: str, name: str, value: bytes) -> None:
        if name == refused:
            raise OSError(95, "Operation not supported")
        attributes.append((name, value))

    monkeypatch.setattr(os, "listxattr", lambda _: ["security.selinux", "user.note", "trusted.x"])
    monkeypatch.setattr(os, "getxattr", lambda _, name: name.encode())
    monkeypatch.setattr(os, "setxattr", set_one)
    path = str(tree.precious / "secret")
    if refused == "security.selinux":
        with pytest.raises(file_access.FileRefusedError, match=f"^{path}: Operation not supported$"):
            file_access.copy_attributes(path, path, 0)
    file_access.write(path, b"", 0o600, (0, 0))
    others = {"security.selinux", "user.note"} - {refused}
    assert attributes == [(name, name.encode()) for name in sorted(others)]


def test_the_controllers_module_is_that_of_the_nodes() -> None:
    root = Path(__file__).parents[3]
    package, collection = root / "gpunode" / "file_access.py", root / "plugins" / "module_utils" / "file_access.py"
    assert package.read_bytes() == collection.read_bytes()
