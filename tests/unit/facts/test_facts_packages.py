"""Packages from dpkg and RPM: state, origin and holds; kernels: which are there, and which is the newest."""

import pytest
from facts_samples import answer, facts_with

from gpunode.facts import NodeFacts, packages
from gpunode.facts.errors import ParseError
from gpunode.facts.packages import release_key
from gpunode.probe import CommandResult

DEBIAN = "Debian NVIDIA Maintainers <pkg-nvidia-devel@lists.alioth.debian.org>"


@pytest.mark.parametrize(
    ("status", "installed", "held"),
    [
        ("install ok installed", True, False),
        ("hold ok installed", True, True),
        ("install ok triggers-pending", True, False),
        ("deinstall ok config-files", False, False),
        ("install ok half-configured", False, False),
        ("hold ok unpacked", False, True),
    ],
)
def test_dpkg_states(status: str, installed: bool, held: bool) -> None:
    line = f"nvidia-smi\t535.1-1\tamd64\t{status}\tnvidia-graphics-drivers\t535.1-1\t{DEBIAN}\n"
    (package,) = packages.parse_dpkg(line)
    assert (package.installed, package.held, package.state) == (installed, held, status)
    assert (package.name, package.version, package.architecture) == ("nvidia-smi", "535.1-1", "amd64")
    assert (package.source, package.maintainer) == ("nvidia-graphics-drivers", DEBIAN)


@pytest.mark.parametrize("line", ["nvidia-smi\t535\n", "a\tb\tc\td\te\tf\tg\n", "x\n"])
def test_cut_dpkg_lines_are_refused(line: str) -> None:
    with pytest.raises(ParseError, match="seven fields"):
        packages.parse_dpkg(line)


def test_nothing_of_the_gpu_stack_is_seen_as_nothing() -> None:
    facts = facts_with({"dpkg-packages": answer("")})
    assert facts.packages == ()
    assert "packages" not in facts.gaps


RPM = (
    "nvidia-driver\t570.86.15\t1.el9\tx86_64\tnvidia-driver-570.86.15-1.el9.src.rpm\tNVIDIA\tNVIDIA Corp\t3\n"
    "kernel-core\t5.14.0\t427.el9\tx86_64\tkernel-5.14.0-427.el9.src.rpm\tRocky\tRelease\t0\n"
    "kmod-nvidia-open-dkms\t570.86.15\t1.el9\tnoarch\tkmod-nvidia-570.86.15-1.el9.src.rpm\t(none)\tRPM Fusion\t0\n"
)


def rpm_node(files: dict[str, str | None] | None = None) -> NodeFacts:
    commands = {"dpkg-packages": None, "dpkg-kernels": None, "rpm-packages": answer(RPM)}
    return facts_with(commands, files)


def test_rpm_packages() -> None:
    facts = rpm_node()
    assert facts.packages is not None
    assert [(p.name, p.version, p.source, p.maintainer, p.held) for p in facts.packages] == [
        ("nvidia-driver", "3:570.86.15-1.el9", "nvidia-driver", "NVIDIA", False),
        ("kmod-nvidia-open-dkms", "570.86.15-1.el9", "kmod-nvidia", "RPM Fusion", False),
    ]


@pytest.mark.parametrize(
    "files",
    [
        {"/etc/dnf/plugins/versionlock.list": "# Added lock\nnvidia-driver-3:570.86.15-1.el9.*\n"},
        {"/etc/dnf/plugins/versionlock.list": "nvidia-driver-*\n"},
        {"/etc/yum/pluginconf.d/versionlock.list": "3:nvidia-driver-570.86.15-1.el9.*\n"},
        {"/etc/dnf/versionlock.toml": 'version = "1.0"\n[[packages]]\nname = "nvidia-driver"\n'},
    ],
)
def test_rpm_locks(files: dict[str, str | None]) -> None:
    facts = rpm_node(files)
    assert facts.packages is not None
    assert {package.name: package.held for package in facts.packages} == {
        "nvidia-driver": True,
        "kmod-nvidia-open-dkms": False,
    }


def test_an_exclusion_is_no_lock() -> None:
    facts = rpm_node({"/etc/dnf/plugins/versionlock.list": "!nvidia-driver-*\n"})
    assert facts.packages is not None
    assert not any(package.held for package in facts.packages)


def test_no_rpm_is_a_gap() -> None:
    facts = facts_with({"dpkg-packages": None, "rpm-packages": answer("", 127, "", "rpm")})
    assert facts.gaps["packages"] == "rpm is not installed"


def test_cut_rpm_lines_are_a_gap() -> None:
    facts = facts_with({"dpkg-packages": None, "rpm-packages": answer("nvidia-driver\t570\n")})
    assert "eight fields" in facts.gaps["packages"]


@pytest.mark.parametrize("text", ["{{ 1 }}", "a b", "x;y", "$(id)", "a/b", "\x1b[2J", "a" * 300])
@pytest.mark.parametrize("field", [0, 1])
def test_a_name_or_version_that_is_no_word_is_a_gap(field: int, text: str) -> None:
    fields = ["nvidia-smi", "535.1-1", "amd64", "install ok installed", "nvidia-graphics-drivers", "535.1-1", DEBIAN]
    fields[field] = text
    facts = facts_with({"dpkg-packages": answer("\t".join(fields) + "\n")})
    assert "of letters, digits and" in facts.gaps["packages"]
    fields = RPM.splitlines()[0].split("\t")
    fields[field] = text
    rpm = answer("\t".join(fields) + "\n")
    facts = facts_with({"dpkg-packages": None, "dpkg-kernels": None, "rpm-packages": rpm})
    assert "of letters, digits and" in facts.gaps["packages"]


def test_versions_as_distributions_write_them_pass() -> None:
    line = "crun\t1.14.3^20240101git1\t1.el9\tx86_64\tcrun.src.rpm\tRocky\tRelease\t0\n"
    (package,) = facts_with({"dpkg-packages": None, "dpkg-kernels": None, "rpm-packages": answer(line)}).packages or ()
    assert package.version == "1.14.3^20240101git1-1.el9"
    removed = "nvidia-smi\t\tamd64\tunknown ok not-installed\tnvidia-graphics-drivers\t\t\n"
    (package,) = packages.parse_dpkg(removed)
    assert package.version == ""


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("6.1.0-9-amd64", "6.1.0-42-amd64"),
        ("6.1.0-42-cloud-amd64", "6.1.0-56-amd64"),
        ("5.10.0-28-amd64", "6.1.0-9-amd64"),
        ("6.8.0-60-generic", "6.8.12-4-pve"),
        ("5.15.0-91-generic", "5.15.0-101-generic"),
        ("5.14.0-427.el9.x86_64", "5.14.0-427.13.1.el9_4.x86_64"),
        ("5.14.0-427.el9_4.x86_64", "5.14.0-503.el9_5.x86_64"),
        ("6.12~rc5-amd64", "6.12-amd64"),
        ("6.12.0-rc7", "6.12.0"),
        ("6.1.9", "6.1.10"),
        ("6.12", "6.12.1"),
    ],
)
def test_order_of_releases(older: str, newer: str) -> None:
    assert release_key(older) < release_key(newer)


def test_a_release_of_many_digits_is_no_trouble() -> None:
    assert release_key("9" * 10_000) > release_key("6.1.0")


def node(releases: dict[str, str], commands: dict[str, CommandResult | None], running: str) -> NodeFacts:
    """A node with folders in /lib/modules: names in each, and ``headers`` for a build tree."""
    files: dict[str, str | None] = {"/lib/modules/": "".join(f"{release}\n" for release in releases)}
    for release, names in releases.items():
        files[f"/lib/modules/{release}/"] = "".join(f"{name}\n" for name in names.split() if name != "headers")
        files[f"/lib/modules/{release}/build/"] = "Makefile\ninclude\n" if "headers" in names else None
    return facts_with({"uname": answer(f"Linux {running} x86_64\n"), **commands}, files)


def test_debian_kernels() -> None:
    owners = (
        "diversion by foo from: /boot/vmlinuz-6.1.0-9-amd64\n"
        "linux-image-6.1.0-9-amd64: /boot/vmlinuz-6.1.0-9-amd64\n"
        "linux-image-6.1.0-42-amd64: /usr/lib/modules/6.1.0-42-amd64/kernel\n"
        "linux-headers-6.1.0-42-amd64, other:amd64: /lib/modules/6.1.0-42-amd64/build\n"
    )
    facts = node(
        {"6.1.0-9-amd64": "kernel headers", "6.1.0-42-amd64": "kernel headers", "6.1.0-99-amd64": "headers"},
        {"dpkg-kernels": answer(owners, rc=1)},
        "6.1.0-9-amd64",
    )
    assert facts.kernels is not None
    assert [(k.release, k.package, k.running, k.newest, k.headers, k.image) for k in facts.kernels] == [
        ("6.1.0-9-amd64", "linux-image-6.1.0-9-amd64", True, False, True, True),
        ("6.1.0-42-amd64", "linux-image-6.1.0-42-amd64", False, True, True, True),
        ("6.1.0-99-amd64", None, False, False, True, False),
    ]


def test_headers_alone_belong_to_their_package() -> None:
    owners = "linux-headers-6.1.0-42-amd64: /lib/modules/6.1.0-42-amd64/build\n"
    facts = node({"6.1.0-42-amd64": "headers"}, {"dpkg-kernels": answer(owners, rc=1)}, "6.18.0-host")
    assert facts.kernels is not None
    assert [(k.release, k.package, k.running, k.newest) for k in facts.kernels] == [
        ("6.1.0-42-amd64", "linux-headers-6.1.0-42-amd64", False, True),
        ("6.18.0-host", None, True, False),
    ]


def test_a_link_that_leads_nowhere_is_no_headers_and_leftovers_are_no_kernel() -> None:
    facts = node({"6.1.0-42-amd64": "kernel build", "6.1.0-9-amd64": "updates modules.dep"}, {}, "6.1.0-42-amd64")
    assert facts.kernels is not None
    assert [(k.release, k.headers, k.newest) for k in facts.kernels] == [("6.1.0-42-amd64", False, True)]


def test_rpm_kernels() -> None:
    def row(name: str) -> str:
        return f"{name}\t5.14.0\t427.el9\tx86_64\tkernel-5.14.0-427.el9.src.rpm\tRocky\tRelease\t0\n"

    plain, real_time = "5.14.0-427.el9.x86_64", "5.14.0-427.el9.x86_64+rt"
    rows = (
        row("kernel-devel") + row("kernel-core") + row("kernel-rt-core") + row("kernel-rt-devel") + row("kernel-tools")
    )
    facts = node(
        {plain: "vmlinuz kernel headers", real_time: "vmlinuz kernel"},
        {"dpkg-kernels": None, "dpkg-packages": None, "rpm-packages": answer(rows)},
        plain,
    )
    assert facts.kernels is not None
    assert {k.release: k.package for k in facts.kernels} == {
        plain: "kernel-core-5.14.0-427.el9.x86_64",
        real_time: "kernel-rt-core-5.14.0-427.el9.x86_64",
    }
    assert facts.packages == ()


def test_a_container_without_kernels_has_its_hosts_alone() -> None:
    facts = facts_with({"dpkg-kernels": None}, {"/lib/modules/": None})
    assert facts.kernels is not None
    assert [(k.running, k.package, k.newest) for k in facts.kernels] == [(True, None, False)]
    assert facts.module_files == ()


def test_owners_that_were_not_asked_are_a_gap() -> None:
    assert "did not read it" in facts_with({"dpkg-kernels": None}).gaps["kernels"]


def test_a_failing_package_database_is_a_gap() -> None:
    facts = facts_with({"dpkg-kernels": answer("", 2, "dpkg-query: error: parsing file\n", "dpkg-query", "-S")})
    assert facts.gaps["kernels"] == "dpkg-query -S failed with exit status 2: dpkg-query: error: parsing file"
