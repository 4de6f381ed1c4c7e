"""Root and a hostile user: obstacles at every component of a path, and swaps at any time, through the modules' code."""

import os
import pwd
import stat
import time
from collections.abc import Iterator
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


@pytest.fixture(name="place")
def _place() -> Iterator[World]:
    with world() as made:
        yield made


def file(path: Path, content: str | None = TEXT, owner: str = USER.pw_name, mode: str = "0600") -> dict[str, Any]:
    group = managed._group(pwd.getpwnam(owner).pw_gid)
    rest = {"encoding": "utf-8", "validate_with": None, "backup": False, "expect_sha256": None, "private": False}
    return {"path": str(path), "content": content, "mode": mode, "owner": owner, "group": group, **rest}


def account(home: Path) -> dict[str, Any]:
    entry = pwd.struct_passwd((*USER[:5], str(home), "/bin/sh"))
    found: dict[str, Any] = ssh_state.account(entry, "!", [".ssh/authorized_keys"])
    return found


def acts(home: Path, path: Path) -> dict[str, Any]:
    """What the modules do with a path in a home."""
    return {
        "node_state": lambda: files_state.taken([str(path)], [], [str(path)]),
        "account": lambda: account(home),
        "check": lambda: managed.brought_about([file(path)], [], True),
        "write": lambda: managed.brought_about([file(path)], [], False),
        "remove": lambda: managed.brought_about([file(path, None)], [], False),
    }


@pytest.mark.parametrize("act", ["node_state", "account", "check", "write", "remove"])
def test_no_obstacle_in_a_home_misleads_or_stops_root(place: World, act: str) -> None:
    before = place.snapshot()
    for way, path in place.ways(place.home, ".ssh", "authorized_keys"):
        found = within(LIMIT_S, acts(place.home, path)[act])
        assert found != "hangs", way
        assert SECRET not in found, way
        assert place.snapshot() == before, way
        if act == "write" and found.startswith("([") and way.rpartition(" at ")[0] != "hard link":
            status = path.lstat()
            assert (status.st_uid, stat.S_IMODE(status.st_mode), path.read_text()) == (USER.pw_uid, 0o600, TEXT), way
            assert path.resolve() == path, way
        elif act == "write":
            assert str(path) in found, way
            assert "\n" not in found, way


def test_what_a_refusal_names(place: World) -> None:
    path = place.home / ".ssh" / "authorized_keys"
    refused = {}
    for way, _ in place.ways(place.home, ".ssh", "authorized_keys"):
        try:
            managed.brought_about([file(path)], [], True)
        except OSError as err:
            refused[way] = str(err)
    assert refused["pipe at authorized_keys"] == f"{path} is a named pipe, expected a file: move it"
    assert refused["link at authorized_keys"] == f"{path} is a symbolic link, expected a file: move it"
    assert ".ssh is a symbolic link that user daemon or others can change" in refused["link at .ssh"]
    assert "nothing at .ssh" not in refused


def test_users_cannot_redirect_root_while_it_works(place: World) -> None:
    before = place.snapshot()
    path, folder = place.home / ".ssh" / "authorized_keys", place.home / ".ssh"
    folder.mkdir()
    os.chown(folder, USER.pw_uid, USER.pw_gid)
    managed.brought_about([file(path)], [], False)
    outcomes = set()
    with swapped(folder, place.precious, 1):
        for number in range(effort(60, 600)):
            wanted = [file(path, f"{TEXT}{number}\n")]
            found = within(LIMIT_S, partial(managed.brought_about, wanted, [], False))
            outcomes.add(found.startswith("(["))
            assert SECRET not in found
    assert place.snapshot() == before
    assert outcomes == {True, False}, "some rounds meet the link, some the folder"


def test_users_cannot_redirect_the_look(place: World) -> None:
    path = place.home / "authorized_keys"
    path.write_text(TEXT)
    os.chown(path, USER.pw_uid, USER.pw_gid)
    with swapped(path, place.precious / "secret", 2):
        for _ in range(effort(300, 3000)):
            assert SECRET not in repr(files_state.taken([], [], [str(path)]))
        for _ in range(effort(30, 200)):
            assert SECRET not in within(LIMIT_S, lambda: managed.brought_about([file(path)], [], True))


def test_a_users_text_is_in_no_diff(place: World) -> None:
    path = place.home / "authorized_keys"
    path.write_text("ssh-ed25519 BBBB laptop\nprivate words\n")
    os.chown(path, USER.pw_uid, USER.pw_gid)
    _, (diff,) = managed.brought_about([file(path, f"ssh-ed25519 BBBB laptop\n{TEXT}")], [], True)
    assert TEXT in diff["after"]
    assert "laptop" not in str(diff)
    assert "private words" not in str(diff)
    assert "1 lines of daemon that are removed" in diff["before"]


@pytest.mark.parametrize("owner", ["root", USER.pw_name])
def test_a_folder_that_all_can_write_to(place: World, owner: str) -> None:
    """Only what nobody else made is replaced there, and root's folders in it are root's."""
    before = place.snapshot()
    for way, path in place.ways(place.shared, "cache", "x"):
        for act in (
            lambda path=path: files_state.taken([str(path)], [], [str(path)]),
            lambda path=path: managed.brought_about([file(path, owner=owner)], [], False),
            lambda path=path: managed.brought_about(
                [], [{"path": str(path.parent), "state": "present", "mode": "0700"}], False
            ),
        ):
            found = within(LIMIT_S, act)
            assert found != "hangs", way
            assert SECRET not in found, way
            assert place.snapshot() == before, way


def test_a_cache_folder_of_somebody_else_is_refused_by_name(place: World) -> None:
    path = place.shared / "cache"
    wanted = [{"path": str(path), "state": "present", "mode": "0700"}]
    assert managed.brought_about([], wanted, False)[0] == [str(path)]
    assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (0, 0o700)
    os.chown(path, USER.pw_uid, USER.pw_gid)
    path.chmod(0o755)
    with pytest.raises(managed.FileRefusedError, match=rf"^{path} belongs to another user \(daemon, uid 1\)"):
        managed.brought_about([], wanted, False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_links_of_root_in_folders_of_root_are_followed(place: World) -> None:
    """As /etc/resolv.conf and /var/run are."""
    (place.root / "run").symlink_to("precious")
    (place.precious / "link").symlink_to("/etc/hostname")
    assert file_access.text(str(place.root / "run" / "secret")) == f"{SECRET}\n"
    assert file_access.text(str(place.precious / "link")) == Path("/etc/hostname").read_text()
    place.root.chmod(0o777)
    with pytest.raises(
        file_access.FileRefusedError, match="run is a symbolic link that user root or others can change"
    ):
        file_access.text(str(place.root / "run" / "secret"))


def test_a_process_with_a_users_rights_is_limited(place: World) -> None:
    began = time.monotonic()
    with pytest.raises(file_access.FileRefusedError, match="did not answer in time"):
        file_access.limited(USER.pw_uid, lambda: time.sleep(60), 0.3)
    assert time.monotonic() - began < 5
    with pytest.raises(PermissionError):
        file_access.limited(USER.pw_uid, (place.precious / "secret").read_bytes)
    with pytest.raises(file_access.FileRefusedError, match="larger than 8 MiB"):
        file_access.limited(USER.pw_uid, lambda: "x" * (9 << 20))
    with pytest.raises(file_access.FileRefusedError, match="ended early"):
        file_access.limited(USER.pw_uid, lambda: os.kill(os.getpid(), 9))
    with pytest.raises(file_access.FileRefusedError, match="ValueError: a bug"):
        file_access.limited(None, lambda: (_ for _ in ()).throw(ValueError("a bug")))
    assert file_access.limited(USER.pw_uid, lambda: [os.getuid(), os.getgid(), os.getgroups()])[:2] == [1, 1]


def test_the_controllers_module_is_that_of_the_nodes() -> None:
    root = Path(__file__).parents[3]
    ours, theirs = root / "gpunode" / "file_access.py", root / "plugins" / "module_utils" / "file_access.py"
    assert ours.read_bytes() == theirs.read_bytes()
