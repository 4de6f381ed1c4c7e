"""The kernels of a node, and which package each one comes from."""

import re

from gpunode.facts.node import Kernel
from gpunode.facts.packages import rpm_lines
from gpunode.facts.seen import Seen, Unseen, is_word, word
from gpunode.facts.system import uname

_OWNER_LINE = re.compile(r"(?!diversion by |local diversion )(?P<names>.+): (?P<path>/.*)")
_KERNEL_RPM = re.compile(r"kernel(?:-(?P<variant>(?!core$|devel$)[a-z0-9-]+?))?(?P<part>-core|-devel)?")
_RELEASE_PART = re.compile(r"[0-9]+|[a-z]+|~", re.I)
_END = (1, 0, "")
_PARTS = ("-devel", None, "-core")
"""What an RPM of a kernel holds, the image last; before EL 8 one without a suffix held all of it."""


def kernels(seen: Seen) -> tuple[Kernel, ...]:
    """Kernels with an image or headers in ``/lib/modules``, oldest first, and the running one in any case."""
    running, _ = uname(seen)
    # A folder under any other name is somebody's backup, and no kernel.
    releases = tuple(name for name in seen.folder("/lib/modules/") or () if is_word(name))
    images = {release for release in releases if _has_image(seen, release)}
    headers = {release for release in releases if "Makefile" in (seen.folder(f"/lib/modules/{release}/build/") or ())}
    owners = _owners(seen, releases) if releases else {}
    newest = max(images or headers, key=release_key, default=None)
    return tuple(
        Kernel(
            release=release,
            package=owners.get(release),
            running=release == running,
            newest=release == newest,
            headers=release in headers,
            image=release in images,
        )
        for release in sorted(images | headers | {running}, key=lambda release: (release_key(release), release))
    )


def _has_image(seen: Seen, release: str) -> bool:
    """What a removed kernel leaves behind (modules that DKMS built) is not one."""
    names = seen.folder(f"/lib/modules/{release}/") or ()
    return "kernel" in names or "vmlinuz" in names


def _owners(seen: Seen, releases: tuple[str, ...]) -> dict[str, str]:
    if seen.ran("dpkg-kernels"):
        return _dpkg_owners(seen.output("dpkg-kernels", good=(0, 1)), releases)
    if seen.ran("rpm-packages"):
        return _rpm_owners(rpm_lines(seen), releases)
    raise Unseen("the packages of the kernels were not queried")


def _dpkg_owners(text: str, releases: tuple[str, ...]) -> dict[str, str]:
    """By ``dpkg-query -S``: the owner of the image, else of the modules, else of the headers' link."""
    by_path: dict[str, str] = {}
    for line in text.splitlines():
        match = _OWNER_LINE.fullmatch(line)
        if match:
            name = word(match["names"].split(", ")[0].partition(":")[0], "a package name")
            by_path[match["path"].removeprefix("/usr")] = name
    owners = {}
    for release in releases:
        paths = (f"/boot/vmlinuz-{release}", f"/lib/modules/{release}/kernel", f"/lib/modules/{release}/build")
        owner = next((by_path[path] for path in paths if path in by_path), None)
        if owner:
            owners[release] = owner
    return owners


def _rpm_owners(lines: list[str], releases: tuple[str, ...]) -> dict[str, str]:
    """By name: ``kernel-core`` 5.14.0-427.el9 is release ``5.14.0-427.el9.x86_64``, ``kernel-rt-core`` has ``+rt``."""
    found: dict[str, tuple[int, str]] = {}
    for line in lines:
        name, version, revision, arch = line.split("\t")[:4]
        match = _KERNEL_RPM.fullmatch(name)
        if not match:
            continue
        plain = f"{version}-{revision}.{arch}"
        release = plain if match["variant"] in {None, "uek"} else f"{plain}+{match['variant']}"
        if release in releases:
            candidate = (_PARTS.index(match["part"]), f"{name}-{plain}")
            found[release] = max(found.get(release, candidate), candidate)
    return {release: package for release, (_, package) in found.items()}


def release_key(release: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key by which newer kernel releases come later.

    Numbers compare as numbers (``6.1.0-9`` before ``6.1.0-42``) and are newer than words, as in RPM's order
    (``5.14.0-427.el9`` before ``5.14.0-427.13.1.el9``); ``~`` and ``rc`` come before everything, the end included.
    """
    parts = []
    for part in _RELEASE_PART.findall(release):
        if part[0].isdigit():
            # Nine digits are more than any release has; a longer run of them is rubbish and need not be exact.
            parts.append((3, int(part[:9]), ""))
        elif part in {"~", "rc"}:
            parts.append((0, 0, ""))
        else:
            parts.append((2, 0, part))
    return (*parts, _END)
