"""The kernels of a node and the packages that own them."""

import re

from gpunode.facts.bundle_reader import BundleReader, is_word, word
from gpunode.facts.models.base import Fact, FactArea, fact
from gpunode.facts.packages import rpm_lines
from gpunode.facts.system import uname

_OWNER_LINE = re.compile(r"(?!diversion by |local diversion )(?P<names>.+): (?P<path>/.*)")
_KERNEL_RPM = re.compile(r"kernel(?:-(?P<variant>(?!core$|devel$)[a-z0-9-]+?))?(?P<part>-core|-devel)?")
_RELEASE_PART = re.compile(r"[0-9]+|[a-z]+|~", re.I)
_END = (1, 0, "")
_PARTS = ("-devel", None, "-core")
"""The parts of a kernel that RPM packages contain, the image last; before EL 8 the package without a suffix had all."""


class Kernel(Fact):
    """One kernel of the node: installed, running, or both."""

    release: str
    package: str | None
    """The installed package that contains its image, else its headers; None if no package does (a container's host, a
    kernel built by hand)."""
    running: bool
    newest: bool
    """True for the newest kernel with an image; if none has one (a container), for the newest with headers."""
    headers: bool
    """True if ``/lib/modules/RELEASE/build`` leads to a tree that a module can be built against."""
    image: bool = True
    """True if the kernel itself is installed, not only its headers."""


def read_kernels(bundle: BundleReader) -> tuple[Kernel, ...]:
    """Return the kernels with an image or headers in ``/lib/modules``, oldest first, always including the running
    one."""
    running, _ = uname(bundle)
    # A folder with any other name is a backup, not a kernel.
    releases = tuple(name for name in bundle.folder("/lib/modules/") or () if is_word(name))
    images = {release for release in releases if _has_image(bundle, release)}
    headers = {release for release in releases if "Makefile" in (bundle.folder(f"/lib/modules/{release}/build/") or ())}
    owners = _owners(bundle, releases) if releases else {}
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


def _has_image(bundle: BundleReader, release: str) -> bool:
    """Return True if the kernel has an image; modules that DKMS built remain after a kernel is removed and do not
    count."""
    names = bundle.folder(f"/lib/modules/{release}/") or ()
    return "kernel" in names or "vmlinuz" in names


def _owners(bundle: BundleReader, releases: tuple[str, ...]) -> dict[str, str]:
    if bundle.ran("dpkg-kernels"):
        return _dpkg_owners(bundle.output("dpkg-kernels", good=(0, 1)), releases)
    if bundle.ran("rpm-packages"):
        return _rpm_owners(rpm_lines(bundle), releases)
    raise bundle.not_collected()


def _dpkg_owners(text: str, releases: tuple[str, ...]) -> dict[str, str]:
    """Return owners by ``dpkg-query -S``: of the image, else of the modules, else of the headers' link."""
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
    """Return owners by name: ``kernel-core`` 5.14.0-427.el9 is ``5.14.0-427.el9.x86_64``, ``kernel-rt-core`` has
    ``+rt``."""
    owners: dict[str, tuple[int, str]] = {}
    for line in lines:
        name, version, revision, arch = line.split("\t")[:4]
        match = _KERNEL_RPM.fullmatch(name)
        if not match:
            continue
        plain = f"{version}-{revision}.{arch}"
        release = plain if match["variant"] in {None, "uek"} else f"{plain}+{match['variant']}"
        if release in releases:
            candidate = (_PARTS.index(match["part"]), f"{name}-{plain}")
            owners[release] = max(owners.get(release, candidate), candidate)
    return {release: package for release, (_, package) in owners.items()}


def release_key(release: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that places newer kernel releases later.

    Numbers compare as numbers (``6.1.0-9`` before ``6.1.0-42``) and are newer than words, as in RPM's order
    (``5.14.0-427.el9`` before ``5.14.0-427.13.1.el9``); ``~`` and ``rc`` come before everything, including the end.
    """
    parts = []
    for part in _RELEASE_PART.findall(release):
        if part[0].isdigit():
            # Nine digits are more than any release has; the order of longer numbers does not matter.
            parts.append((3, int(part[:9]), ""))
        elif part in {"~", "rc"}:
            parts.append((0, 0, ""))
        else:
            parts.append((2, 0, part))
    return (*parts, _END)


class KernelsFacts(FactArea):
    """Kernels."""

    kernels: tuple[Kernel, ...] | None = fact(read_kernels)

    @property
    def running_kernel(self) -> str | None:
        """Return the release of the running kernel; None if it is unknown."""
        return next((kernel.release for kernel in self.kernels or () if kernel.running), None)
