"""Where modules open or change files other than through ``file_access``: in folders to which only root writes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ACTS = {
    *("open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "truncate", "touch", "utime"),
    *("rename", "renames", "replace", "move", "copy", "copy2", "copyfile", "copytree", "rmtree", "remove", "unlink"),
    *("chmod", "lchmod", "fchmod", "chown", "lchown", "fchown", "mkdir", "makedirs", "rmdir", "removedirs"),
    *("symlink", "symlink_to", "link", "hardlink_to", "link_to", "mkfifo", "mknod", "mkstemp", "mkdtemp"),
    *("NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory"),
}
OF_TEXT = {"replace", "remove", "copy"}
"""Names that lists and texts have too."""
KERNEL = "/proc, /sys and /dev: made by the kernel"
PACKAGES = "folders of the package manager and /var/lib/gpunode: root's alone"
PRIVATE = "a new folder of mode 0700 from tempfile"
PROGRAMS = ("gpunode/onnode/gpu_settings.py", "gpunode/onnode/pending_updates.py")
"""Programs that roles install, started as root by systemd."""
EXCEPTIONS = {
    "gpunode/onnode/gpu_settings.py": f"/etc/gpunode, /run/gpunode, /var/lib/gpunode; {KERNEL}",
    "gpunode/onnode/pending_updates.py": "/etc/gpunode, /var/lib/gpunode",
    "module_utils/apt_release.py": f"{PRIVATE}; {PACKAGES}",
    "module_utils/apt_private.py": f"{PRIVATE}; {PACKAGES}",
    "module_utils/apt_state.py": f"{PACKAGES}; {KERNEL}",
    "module_utils/apt_transaction.py": PACKAGES,
    "module_utils/commands.py": f"{PRIVATE}; /etc/ssh",
    "module_utils/block_devices.py": KERNEL,
    "module_utils/dnf_state.py": f"{PACKAGES}; {KERNEL}",
    "module_utils/dnf_transaction.py": f"{PRIVATE}; {PACKAGES}",
    "module_utils/engine_state.py": "/etc/containers",
    "module_utils/gpu_use.py": KERNEL,
    "module_utils/guard.py": "/var/lib/gpunode/guard; units in /etc",
    "module_utils/kernel_state.py": f"{KERNEL}; /var/lib/gpunode",
    "module_utils/managed.py": PRIVATE,
    "module_utils/module_key.py": "/etc/dkms; /var/lib/gpunode",
    "module_utils/old_keys.py": PACKAGES,
    "module_utils/package_record.py": PACKAGES,
    "module_utils/scratch_disks.py": KERNEL,
    "module_utils/signing_key.py": PRIVATE,
    "module_utils/ssh_state.py": KERNEL,
    "modules/driver_exchange.py": KERNEL,
    "modules/kept_packages.py": f"/var/lib/gpunode; {PACKAGES}",
    "modules/module_build.py": PRIVATE,
    "modules/node_state.py": f"{KERNEL}; /etc/os-release",
}
"""Files that open or change files themselves, and where: folders to which only root writes."""
OF_USERS = re.compile(r"^(~.|/home|/tmp|/var/tmp|/dev/shm|/root|/mnt|/srv|/scratch)(/|$)")


def acts(tree: ast.AST) -> Iterator[str]:
    """Names of calls that open or change files."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        of = call.func.value if isinstance(call.func, ast.Attribute) else None
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        module = of.id if isinstance(of, ast.Name) else ""
        if name not in ACTS or module in ("file_access", "managed"):
            continue
        if name in OF_TEXT and module not in ("os", "shutil") and (name != "replace" or len(call.args) != 1):
            continue
        yield name


def sources() -> dict[str, ast.Module]:
    """The code that runs on nodes as root, but for ``file_access``."""
    folder = ROOT / "plugins"
    paths = [path for part in ("modules", "module_utils") for path in sorted((folder / part).glob("*.py"))]
    modules = {str(path.relative_to(folder)): path for path in paths if path.name != "file_access.py"}
    programs = {name: ROOT / name for name in PROGRAMS}
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in {**modules, **programs}.items()}


def test_files_are_opened_by_file_access_or_where_only_root_writes() -> None:
    assert {name for name, tree in sources().items() if any(acts(tree))} == EXCEPTIONS.keys()


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_names_no_folder_of_users(name: str) -> None:
    tree = sources()[name]
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [text for text in texts if OF_USERS.match(text)] == []
    assert not {"expanduser", "home", "pw_dir", "gettempdir"} & {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    } - ({"pw_dir"} if name.endswith("ssh_state.py") else set()), "homes are read through file_access.limited"
    folders = {parent for text in texts if re.fullmatch(r"/[\w./-]+", text) for parent in Path(text).parents}
    for folder in folders:
        if folder.is_dir() and not str(folder).startswith(("/proc", "/sys", "/dev")):
            status = folder.stat()
            assert (status.st_uid, status.st_mode & 0o002) == (0, 0), f"{folder}: others can write to it"


def test_the_search_finds_each_way_to_open_a_file() -> None:
    code = "open(p); Path(p).read_text(); os.rename(a, b); p.replace(q); t.replace(a, b); os.chown(p, 0, 0)"
    assert sorted(acts(ast.parse(code))) == ["chown", "open", "read_text", "rename", "replace"]
