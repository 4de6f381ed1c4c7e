"""The plan of the role rdma: packages, modules at boot, the path to GPU memory, and what is refused by name."""

import base64
from pathlib import Path
from typing import Any

import pytest
from driver_samples import BUNDLE, H100, HGX, facts_of
from node_samples import RHEL
from plan_samples import planned, state_of

from gpunode.errors import UsageError
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.rdma import KEY, MARKER, MODULES, NAMES, PREFERENCES, ROLE, SOURCES, RdmaResult, Undo
from gpunode.provisioning.state import NodeState
from gpunode.provisioning.transaction import MARK

BASE = facts_of(BUNDLE)
URL = "https://linux.mellanox.com/public/repo/doca/3.2.1/debian12/x86_64"
DEBIAN = ("rdma-core", "ibverbs-providers", "ibverbs-utils", "rdmacm-utils", "infiniband-diags")
OFFERED = {name: ["44.0-2"] for name in DEBIAN}
KERNEL = {"release": "6.1.0-30-amd64", "package": None, "running": True, "newest": True}
B200, RTX_4090, GB10 = "2901", "2684", "2e12"
CONTAINER_SAFE = {"virtualization": "none"}
ARMOUR = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n{}\n-----END PGP PUBLIC KEY BLOCK-----\n"


def gpus(device: str, count: int = 8) -> list[dict[str, Any]]:
    """Functions of that many GPUs of one model."""
    return [
        {"slot": f"0000:{at:02x}:00.0", **H100, "device_id": device, "subsystem_id": None}
        for at in range(16, 16 + count)
    ]


def node(
    *installed: str,
    pci: list[dict[str, Any]] | None = None,
    files: dict[str, Any] | None = None,
    contents: dict[str, str] | None = None,
    dnf: bool = False,
    headers: bool = True,
    **facts: Any,
) -> NodeState:
    """A Debian or Rocky machine with these packages and GPUs; files that are not named are absent."""
    document = {
        **BASE,
        **CONTAINER_SAFE,
        "pci": HGX if pci is None else pci,
        "kernels": [{**KERNEL, "headers": headers}],
        "modules": [],
        "peer_memory": None,
        **facts,
    }
    if dnf:
        document["os"] = {**BASE["os"], **RHEL}
        document["packages"] = []
    everything = {path: {"kind": "absent"} for path in (*ROLE.look.paths, *ROLE.look.contents)}
    names = dict.fromkeys(installed, "44.0-2")
    more: dict[str, Any] = {"dnf": {"error": None, "installed": names}} if dnf else {"apt": {"installed": names}}
    return state_of(
        document,
        files={**everything, **(files or {})},
        contents={**dict.fromkeys(ROLE.look.contents), **(contents or {})},
        **more,
    )


def made(
    state: NodeState, offered: dict[str, list[str]] | None = None, driver: dict[str, Any] | None = None, **settings: Any
) -> Manifest:
    """The plan after the node answered what its repositories offer."""
    requested = {"state": "present", **settings}
    answers = {} if offered is None else {"answers": {"offers": {"offered": offered}}}
    return planned("rdma", state, {"rdma": requested, "nvidia_driver": driver or {}}, **answers)


def result_of(manifest: Manifest) -> RdmaResult:
    assert isinstance(manifest.result, RdmaResult)
    return manifest.result


def undo_of(manifest: Manifest) -> Undo:
    undo = result_of(manifest).undo
    assert undo is not None
    return undo


def modules_of(manifest: Manifest) -> list[str]:
    """The modules that are loaded at boot."""
    text = next(file.content for file in manifest.files if file.path == MODULES)
    return [line for line in (text or "").splitlines() if not line.startswith("#")]


def written(manifest: Manifest) -> set[str]:
    return {file.path for file in manifest.files if file.content is not None}


OPEN = {"source": "nvidia", "version": "580.95.05", "flavour": "open"}
CLOSED = {**OPEN, "flavour": "proprietary"}


def test_by_default_nothing_is_done() -> None:
    manifest = planned("rdma", node())
    assert (manifest.pending_reasons, manifest.files, manifest.packages, manifest.questions) == ((), (), None, {})


def test_missing_packages_are_asked_for_first_and_a_settled_node_is_asked_nothing() -> None:
    first = made(node("rdma-core"), driver=OPEN)
    assert first.questions["offers"].body == {"names": sorted(DEBIAN[1:]), "files": {}}
    manifest = made(node("rdma-core"), OFFERED, driver=OPEN)
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == DEBIAN
    assert manifest.pending
    text = "x\n"
    memory = {"/var/lib/gpunode/rdma": {"kind": "folder", "mode": "0755", "entries": 1}}
    settled = made(node(*DEBIAN, files=memory, contents={ROLE.record: text}), driver=OPEN)
    assert (settled.questions, settled.pending_reasons) == ({}, ())


def test_dnf_gets_the_names_of_its_own() -> None:
    names = ("rdma-core", "libibverbs", "libibverbs-utils", "librdmacm-utils", "infiniband-diags")
    manifest = made(node(dnf=True), {name: ["57.0-1.el9"] for name in names}, driver=OPEN)
    assert manifest.packages is not None
    assert manifest.packages.manager == "dnf"
    assert manifest.packages.install == names


def test_a_package_that_is_not_offered_is_named_and_rdma_core_is_required() -> None:
    manifest = made(node(), {name: ["1"] for name in DEBIAN if name != "rdmacm-utils"}, driver=OPEN)
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert "rdmacm-utils" not in manifest.packages.install
    assert any(note.startswith("rdmacm-utils: no configured repository") for note in manifest.notes)
    assert made(node(), {}, driver=OPEN).refusals[0].startswith("no-rdma-core: ")


# --- the path to GPU memory


def test_dma_buf_needs_no_module() -> None:
    manifest = made(node(*DEBIAN), driver=OPEN)
    assert (modules_of(manifest), manifest.notes) == ([], ())


def test_a_kernel_that_no_package_has_counts_as_it_runs() -> None:
    old = [{**KERNEL, "release": "5.4.0-1-generic", "headers": True}]
    assert "through main memory" in made(node(*DEBIAN, kernels=old), driver=OPEN).notes[0]


def test_nvidia_peermem_is_loaded_where_dma_buf_does_not_do_and_the_kernel_has_its_interface() -> None:
    loaded = {"version": "580.95.05", "flavour": "proprietary"}
    manifest = made(node(*DEBIAN, peer_memory=True, loaded_driver=loaded), driver=CLOSED)
    assert modules_of(manifest) == ["nvidia_peermem"]
    assert manifest.modules == ("nvidia_peermem",)
    settled = made(node(*DEBIAN, peer_memory=True, loaded_driver=loaded, modules=["nvidia_peermem"]), driver=CLOSED)
    assert settled.modules == ()


def test_nvidia_peermem_is_listed_for_boot_by_the_run_that_loads_it(key: Path) -> None:
    loaded = {"version": "580.95.05", "flavour": "proprietary"}
    files = {path: {"kind": "file"} for path in (SOURCES, KEY, PREFERENCES)}
    waits = node("doca-ofed", files=files, contents={MARKER: "x\n"}, peer_memory=True, loaded_driver=loaded)
    settings: dict[str, Any] = {"source": "doca", "doca_url": URL, "doca_key": str(key)}
    assert modules_of(made(waits, driver=CLOSED, **settings)) == []
    after = node("doca-ofed", files=files, peer_memory=True, loaded_driver=loaded)
    assert modules_of(made(after, driver=CLOSED, **settings)) == ["nvidia_peermem"]
    # Where ib_core is not loaded, a request is tried.
    tried = made(node(*DEBIAN, loaded_driver=loaded), driver=CLOSED, gpudirect="peermem")
    assert (modules_of(tried), list(tried.modules)) == (["nvidia_peermem"], ["nvidia_peermem"])


@pytest.mark.parametrize("interface", [False, None])
def test_a_module_that_would_fail_at_boot_is_not_listed(interface: bool | None) -> None:
    manifest = made(node(*DEBIAN, peer_memory=interface), driver=CLOSED)
    assert modules_of(manifest) == []
    assert "the modules are proprietary" in manifest.notes[0]


@pytest.mark.parametrize(
    ("facts", "driver", "requested", "word"),
    [
        ({}, CLOSED, "dma-buf", "gpudirect-dma-buf: "),
        ({"peer_memory": False}, OPEN, "peermem", "gpudirect-peermem: "),
        ({"pci": gpus(RTX_4090, 2)}, OPEN, "peermem", "gpudirect-hardware: "),
        ({"pci": []}, {**OPEN, "state": "absent"}, "dma-buf", "gpudirect: "),
    ],
)
def test_a_requested_path_that_is_not_there_is_refused_by_name(
    facts: dict[str, Any], driver: dict[str, Any], requested: str, word: str
) -> None:
    manifest = made(node(*DEBIAN, **facts), driver=driver, gpudirect=requested)
    assert [refusal for refusal in manifest.refusals if refusal.startswith(word)] == list(manifest.refusals)
    assert len(manifest.refusals) == 1
    assert manifest.packages is None


def test_fifth_generation_nvlink_gets_the_module_of_management_datagrams() -> None:
    manifest = made(node(*DEBIAN, pci=gpus(B200)), driver=OPEN)
    assert "ib_umad" in modules_of(manifest)
    assert "ib_umad" in manifest.modules
    assert any("module ib_umad is not loaded" in reason for reason in manifest.pending_reasons)
    # The kernel of a container is the host's.
    inside = made(node(*DEBIAN, pci=gpus(B200), virtualization="docker", simulated=False), driver=OPEN)
    assert inside.modules == ()


# --- GDRCopy and GDS


def test_gdrcopy_and_gds_come_on_request_and_their_modules_are_loaded_at_boot() -> None:
    offers = {"gdrdrv-dkms": ["2.5.1-1"], "libgdrapi": ["2.5.1-1"], "nvidia-fs": ["2.29.4-1"]}
    manifest = made(node(*DEBIAN), offers, driver=OPEN, gdrcopy=True, gds=True)
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == (*DEBIAN, "gdrdrv-dkms", "libgdrapi", "nvidia-fs")
    assert modules_of(manifest) == ["gdrdrv", "nvidia_fs"]
    assert manifest.modules == ()
    loaded = {"version": "580.95.05", "flavour": "open"}
    after = made(node(*DEBIAN, *offers, loaded_driver=loaded), driver=OPEN, gdrcopy=True, gds=True)
    assert after.modules == ("gdrdrv", "nvidia_fs")


@pytest.mark.parametrize(("version", "refused"), [("2.29.4-1", True), ("2.13.5~11.8.0-5~deb12u1", False)])
def test_a_gds_that_needs_the_open_modules_is_refused_with_proprietary_ones(version: str, refused: bool) -> None:
    manifest = made(node(*DEBIAN), {"nvidia-fs-dkms": [version]}, driver=CLOSED, gds=True)
    assert bool(manifest.refusals) is refused
    assert all(refusal.startswith("gds: ") and "open kernel modules" in refusal for refusal in manifest.refusals)


@pytest.mark.parametrize("part", ["gdrcopy", "gds"])
def test_hardware_and_repositories_without_a_part_are_named(part: str) -> None:
    offers = {"gdrdrv-dkms": ["1"], "libgdrapi": ["1"], "nvidia-fs": ["2.29.4"]}
    consumer = made(node(*DEBIAN, pci=gpus(RTX_4090, 1)), offers, driver=OPEN, **{part: True})
    assert consumer.refusals[0].startswith(f"{part}: ")
    lacking = made(node(*DEBIAN), {}, driver=OPEN, **{part: True})
    assert "no configured repository has" in lacking.refusals[0]
    nothing = made(node(*DEBIAN), offers, driver={"state": "absent"}, **{part: True})
    assert "needs an NVIDIA driver" in nothing.refusals[0]


# --- DOCA-OFED


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The key of a site: one packet of a public key of version 4 (RFC 4880, 5.5.2)."""
    packet = bytes((0xC6, 6, 4, 0, 0, 0, 1, 1))
    file = tmp_path / "doca.asc"
    file.write_text(ARMOUR.format(base64.b64encode(packet).decode()), encoding="ascii")
    return file


def doca(state: NodeState, key: Path, offered: dict[str, list[str]] | None = None, **more: Any) -> Manifest:
    settings = {"source": "doca", "doca_url": URL, "doca_key": str(key), **more}
    return made(state, offered, driver=OPEN, **settings)


def test_a_doca_release_is_asked_for_with_its_repository_before_anything_is_written(key: Path) -> None:
    first = doca(node(), key)
    body = first.questions["offers"].body
    assert body["names"] == ["doca-ofed"]
    assert URL in body["files"][SOURCES]
    assert "PGP PUBLIC KEY" in body["files"][KEY]
    manifest = doca(node(), key, {"doca-ofed": ["3.2.1-044000"]})
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == ("doca-ofed",)
    assert {SOURCES, KEY, PREFERENCES} <= written(manifest)
    undo = undo_of(manifest)
    assert undo.packages is not None
    assert undo.packages.manager == "apt"
    assert undo.packages.remove_new == ("doca-ofed",)
    assert {file.path for file in undo.files} >= {SOURCES, KEY, MARKER}
    assert manifest.restart_mark == MARKER


def test_with_dnf_what_reverts_doca_names_it_before_it_is_installed() -> None:
    """The plan is made before the transaction: the record on the node then decides what the role installed."""
    manifest = made(node("rdma-core", dnf=True), {"doca-ofed": ["3.2.1"]}, driver=OPEN, source="doca")
    undo = undo_of(manifest).packages
    assert undo is not None
    assert undo.manager == "dnf"
    assert (undo.remove_new, undo.memory) == (("doca-ofed",), ROLE.record)


def test_a_doca_that_is_not_for_this_node_is_named_and_nothing_is_changed(key: Path) -> None:
    system = doca(node(), key, {"htop": ["1"]})
    assert system.refusals[0].startswith("doca-not-offered: ")
    kernel = doca(node(headers=False), key, {"doca-ofed": ["3.2.1"]})
    assert kernel.refusals[0].startswith("doca-kernel: ")
    assert "linux-headers-6.1.0-30-amd64" in kernel.refusals[0]
    boot = doca(node(secure_boot=True), key, {"doca-ofed": ["3.2.1"]})
    assert boot.refusals[0].startswith("doca-secure-boot: ")
    for manifest in (system, kernel, boot):
        assert (manifest.files, manifest.packages) == ((), None)
    offers = {"doca-ofed": ["3.2.1"], "linux-headers-6.1.0-30-amd64": ["6.1.119-1"]}
    assert doca(node(headers=False), key, offers).refusals == ()


def test_a_repository_that_does_not_answer_is_named(key: Path) -> None:
    requested = {"rdma": {"state": "present", "source": "doca", "doca_url": URL, "doca_key": str(key)}}
    answers = {"offers": {"error": f"E: The repository '{URL} ./ Release' does not have a Release file."}}
    manifest = planned("rdma", node(), {**requested, "nvidia_driver": OPEN}, answers=answers)
    assert manifest.refusals[0].startswith("doca-unreachable: E: The repository")
    assert manifest.packages is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"doca_url": URL, "doca_key": ""}, "rdma_doca_key: set the key"),
        (
            {"doca_url": "linux.mellanox.com/doca", "doca_key": "k"},
            "rdma_doca_url: linux.mellanox.com/doca is not a valid URL",
        ),
        ({"doca_url": f"{URL} /x", "doca_key": "k"}, "is not a valid URL"),
    ],
)
def test_a_malformed_repository_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        made(node(), source="doca", **settings)


def test_doca_of_the_nodes_own_sources_needs_no_file() -> None:
    manifest = made(node(), {"doca-ofed": ["3.2.1"]}, driver=OPEN, source="doca")
    assert written(manifest) == set()
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert manifest.packages.install == ("doca-ofed",)


def test_new_modules_wait_for_a_boot(key: Path) -> None:
    files = {path: {"kind": "file"} for path in (SOURCES, KEY, PREFERENCES)}
    manifest = doca(
        node("doca-ofed", files=files, contents={MARKER: "DOCA-OFED was installed\n"}, peer_memory=True), key
    )
    assert manifest.reboot_reasons == ("DOCA-OFED's kernel modules are loaded at the next boot",)
    assert result_of(manifest).undo is None
    assert doca(node("doca-ofed", files=files), key).reboot_reasons == ()


@pytest.mark.parametrize(
    ("kernel", "problem"), [("6.1.0-29-amd64", True), (None, True), (KERNEL["release"], False)], ids=str
)
@pytest.mark.parametrize("record", ["rdma-core\n", f"{MARK}\ndoca-ofed\n"], ids=["earlier", "own"])
def test_modules_that_dkms_did_not_build_for_this_kernel_are_named(
    key: Path, kernel: str | None, problem: bool, record: str
) -> None:
    state = "added" if kernel is None else "installed"
    row = {"name": "mlnx-ofed-kernel", "version": "25.10", "kernel": kernel, "architecture": None, "state": state}
    files = {path: {"kind": "file"} for path in (SOURCES, KEY, PREFERENCES)}
    manifest = doca(node("doca-ofed", files=files, contents={ROLE.record: record}, dkms=[row]), key)
    text = result_of(manifest).problem
    assert bool(text) is problem
    assert [note for note in manifest.notes if note.startswith("doca-kernel: ")] == ([text] if text else [])
    # It came with this role: what takes it back is there.
    undo = undo_of(manifest).packages
    assert undo is not None
    assert undo.manager == "apt"
    assert undo.remove_new == ("doca-ofed",)
    assert "rdma-core" in undo.restore


# --- removal


def test_removal_leaves_what_was_there_before_and_returns_docas_versions() -> None:
    state = node(
        *DEBIAN,
        "doca-ofed",
        "gdrdrv-dkms",
        files={MODULES: {"kind": "file"}},
        contents={ROLE.record: "rdma-core\nibverbs-providers\n"},
        modules=["nvidia_peermem"],
    )
    manifest = planned("rdma", state, {"rdma": {"state": "absent"}})
    gone = {
        reason.removesuffix(" must be removed")
        for reason in manifest.pending_reasons
        if reason.endswith(" must be removed")
    }
    assert gone == {"ibverbs-utils", "rdmacm-utils", "infiniband-diags", "doca-ofed", "gdrdrv-dkms", MODULES}
    assert manifest.packages is not None
    assert manifest.packages.manager == "apt"
    assert "rdma-core" in manifest.packages.restore
    assert [note.partition(" stays ")[0].partition(" stay ")[0] for note in manifest.notes] == [
        "module nvidia_peermem",
        "DOCA-OFED's modules",
    ]
    assert planned("rdma", node("rdma-core"), {"rdma": {"state": "absent"}}).pending_reasons == ()


def rules(manifest: Manifest) -> list[str]:
    text = next(file.content for file in manifest.files if file.path == NAMES)
    return [line for line in (text or "").splitlines() if not line.startswith("#")]


def test_names_of_devices_replace_the_rule_of_rdma_core() -> None:
    first = made(node(*DEBIAN), names="pci", fixed_names={"rail1": "0000:3c:00.0", "rail0": "0000:1a:00.0"})
    rail0, rail1, others, end = rules(first)
    assert 'KERNELS=="0000:1a:00.0", PROGRAM="rdma_rename %k NAME_FIXED rail0", GOTO="named"' in rail0
    assert "0000:3c:00.0" in rail1
    assert (others, end) == (
        'ACTION=="add", SUBSYSTEM=="infiniband", PROGRAM="rdma_rename %k NAME_PCI"',
        'LABEL="named"',
    )
    assert "rdma_fixed_names: rail0: no RDMA device at 0000:1a:00.0" in first.notes
    # What is not named keeps the rule of rdma-core.
    assert "NAME_FALLBACK" in rules(made(node(*DEBIAN), fixed_names={"rail0": "0000:1a:00.0"}))[1]
    assert rules(made(node(*DEBIAN))) == []
    text = next(file.content for file in first.files if file.path == NAMES)
    device = {"name": "mlx5_0", "slot": "0000:1a:00.0"}
    empty = {"firmware": None, "board_id": None, "type": None, "numa_node": None, "ports": ()}
    booted = node(
        *DEBIAN,
        files={NAMES: {"kind": "file"}},
        contents={NAMES: str(text)},
        infiniband=[{**device, **empty}, {**empty, "name": "rail1", "slot": "0000:3c:00.0"}],
    )
    again = made(booted, names="pci", fixed_names={"rail1": "0000:3c:00.0", "rail0": "0000:1a:00.0"})
    assert [note for note in again.notes if "name" in note] == [
        "RDMA device mlx5_0 at 0000:1a:00.0 is named rail0 at the next boot"
    ]


def test_a_rule_file_of_the_site_is_not_replaced_and_not_removed() -> None:
    foreign = node(*DEBIAN, files={NAMES: {"kind": "file"}}, contents={NAMES: "# ours\n"})
    assert [text.partition(":")[0] for text in made(foreign, names="pci").refusals] == ["names"]
    for manifest in (made(foreign), planned("rdma", foreign, {"rdma": {"state": "absent"}})):
        assert NAMES not in {file.path for file in manifest.files}
    managed = node(
        *DEBIAN, files={NAMES: {"kind": "file"}}, contents={NAMES: "# Managed by gpunode (role rdma): names\n"}
    )
    assert NAMES in {file.path for file in planned("rdma", managed, {"rdma": {"state": "absent"}}).files}


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ({"rail 0": "0000:1a:00.0"}, "rail 0 is not a name"),
        ({'x", RUN+="reboot': "0000:1a:00.0"}, "is not a name"),
        ({"rail0": "1a:00.0"}, "is not a PCI address"),
        ({"rail0": "0000:1a:00.0", "rail1": "0000:1a:00.0"}, "two names"),
    ],
)
def test_names_that_udev_would_not_understand_are_refused(names: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        made(node(*DEBIAN), fixed_names=names)
