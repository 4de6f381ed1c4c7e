"""What the role nvidia_driver changes: questions, files, transaction, builds, what is loaded; from a state alone."""

import hashlib
from typing import Any

import pytest
from driver_samples import BUNDLE, HGX, facts_of
from plan_samples import planned, state_of

from gpunode.errors import UsageError
from gpunode.provisioning.driver import files
from gpunode.provisioning.driver.model import Build, ModuleExchange, answered
from gpunode.provisioning.driver.modules import NO_KEY
from gpunode.provisioning.driver.plan import ROLE, DriverResult
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.roles import LOOKS
from gpunode.provisioning.state import FileState, NodeState

KERNEL = "6.1.0-56-cloud-amd64"
IMAGE = f"/boot/initrd.img-{KERNEL}"
GOES = {"version": "580.95.05"}
ABSENT = {"state": "absent"}
ANSWER = {
    "target": "580.95.05",
    "exact": ["nvidia-driver-cuda=580.95.05-1"],
    "install": {"nvidia-driver-cuda": "580.95.05-1"},
    "sources": {"nvidia-driver-cuda": "nvidia-graphics-drivers"},
    "remove": ["libnvidia-old"],
}
CLOSURE = ("nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-fabricmanager", "libnvidia-nscq", "libcuda1")
OTHERS = ("nvidia-persistenced", f"linux-headers-{KERNEL}", "linux-headers-cloud-amd64")


def package(name: str, version: str = "580.95.05-1", held: bool = True) -> dict[str, Any]:
    row = {"name": name, "version": version, "architecture": "amd64", "source": name, "installed": True}
    row |= {"maintainer": "NVIDIA CORPORATION <cudatools@nvidia.com>", "state": "hold ok installed", "held": held}
    return row


@pytest.fixture
def bare() -> dict[str, Any]:
    """A Debian 12 node with HGX H100 and no driver."""
    return {**facts_of(BUNDLE), "pci": HGX, "packages": [], "module_files": [], "dkms": [], "loaded_driver": None}


def unit(name: str) -> dict[str, Any]:
    return {"name": f"{name}.service", "load": "loaded", "active": "active", "sub": "running", "enabled": "enabled"}


def driven(bare: dict[str, Any], loaded: str | None = "580.95.05", **changes: Any) -> dict[str, Any]:
    """The same with driver 580.95.05 from NVIDIA, built for its kernel."""
    module: dict[str, Any] = {
        "kernel": KERNEL,
        "path": "/lib/modules/x/nvidia.ko",
        "version": "580.95.05",
        "flavour": "open",
    }
    module |= {"vermagic": KERNEL, "signed": False}
    flags = {"running": True, "newest": True, "headers": True, "image": True}
    kernels = [{**kernel, **flags} for kernel in bare["kernels"]]
    memory = loaded and {"version": loaded, "flavour": "open"}
    return {
        **bare,
        "kernels": kernels,
        "packages": [package(name) for name in CLOSURE],
        "module_files": [module],
        "loaded_driver": memory,
        "gpu_processes": [],
        "units": [unit("nvidia-persistenced")],
        "modules": ["nvidia"] if loaded else [],
        **changes,
    }


def state(facts: dict[str, Any], apt: dict[str, Any] | None = None, **more: Any) -> NodeState:
    installed = {row["name"]: row["version"] for row in facts["packages"]} | dict.fromkeys(OTHERS, "1")
    held = [row["name"] for row in facts["packages"] if row["held"]]
    known = {"installed": installed, "held": held, "own_holds": held, "lists": True}
    return state_of(facts, {**known, **(apt or {})}, **more)


def result_of(manifest: Manifest) -> DriverResult:
    assert isinstance(manifest.result, DriverResult)
    return manifest.result


def commands_of(manifest: Manifest) -> list[list[str]]:
    """The commands that rebuild images."""
    return [list(command.argv) for command in manifest.commands]


def as_it_has_to_be(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """The manifest's files as they are after it was carried out."""
    return {
        file.path: {"kind": "absent"}
        if file.content is None
        else {
            "kind": "file",
            "sha256": hashlib.sha256(file.content.encode()).hexdigest(),
            "mode": file.mode,
            "owner": file.owner,
            "group": file.group,
            "mtime": 100.0,
        }
        for file in manifest.files
    }


def test_a_bare_node_is_asked_about_before_anything_is_decided(bare: dict[str, Any]) -> None:
    first = planned("nvidia_driver", state_of(bare), {"nvidia_driver": GOES})
    question = first.questions["driver"]
    assert question.kind == "package_transaction"
    assert {*question.body["bound"]} >= {"nvidia-driver-cuda=@RELEASE@-*", "nvidia-fabricmanager=@RELEASE@-*"}
    assert "Pin: version @RELEASE@-*" in question.body["files"][files.PREFERENCES]
    assert question.body["files"][files.SOURCES_FILE] == ""


def test_the_answer_becomes_one_transaction(bare: dict[str, Any]) -> None:
    manifest = planned("nvidia_driver", state_of(bare), {"nvidia_driver": GOES}, answers={"driver": ANSWER})
    assert (manifest.questions, manifest.refusals) == ({}, ())
    change = manifest.packages
    assert change is not None
    assert change.manager == "apt"
    assert change.install == ("nvidia-driver-cuda=580.95.05-1",)
    assert change.remove == ("libnvidia-old",)
    assert set(change.hold) >= {"nvidia-driver-cuda", "nvidia-fabricmanager"}
    assert "version 580.95.05-*" in change.files[files.PREFERENCES]
    assert manifest.pending
    assert result_of(manifest).changes
    assert (result_of(manifest).builds, manifest.commands) == ((), ()), "the packages build and rebuild"


def test_a_refusal_leaves_nothing_to_do(bare: dict[str, Any]) -> None:
    answer = {"lacking": {"nvidia-fabricmanager": ["580.65.06"]}, "common": [], "constraint": "580.95.05"}
    manifest = planned("nvidia_driver", state_of(bare), {"nvidia_driver": GOES}, answers={"driver": answer})
    assert [line.partition(":")[0] for line in manifest.refusals] == ["closure-lags"]
    assert (manifest.files, manifest.packages) == ((), None)


def test_a_settled_node_has_nothing_pending_and_is_asked_nothing(bare: dict[str, Any]) -> None:
    facts = driven(bare)
    draft = planned("nvidia_driver", state(facts))
    written = as_it_has_to_be(draft) | {IMAGE: {"kind": "file", "mtime": 200.0}}
    manifest = planned("nvidia_driver", state(facts, files=written))
    assert manifest.pending_reasons == ()
    assert (manifest.questions, manifest.reboot_reasons) == ({}, ())
    assert result_of(manifest).closure_problems == result_of(manifest).module_problems == ()


@pytest.mark.parametrize("path", [files.PREFERENCES, files.UNATTENDED, files.NOUVEAU, files.PERSISTENCED])
@pytest.mark.parametrize("damage", [{"sha256": "0"}, {"mode": "0600"}, {"owner": "nobody"}, {"kind": "absent"}])
def test_each_damage_of_a_file_is_pending(bare: dict[str, Any], path: str, damage: dict[str, Any]) -> None:
    facts = driven(bare)
    written = as_it_has_to_be(planned("nvidia_driver", state(facts))) | {IMAGE: {"kind": "file", "mtime": 200.0}}
    manifest = planned("nvidia_driver", state(facts, files={**written, path: {**written[path], **damage}}))
    assert len(manifest.pending_reasons) == 1
    assert path in manifest.pending_reasons[0]


def test_what_is_not_held_is_held_and_what_is_missing_is_asked_for(bare: dict[str, Any]) -> None:
    loose = driven(bare, packages=[package(name, held=name != "libcuda1") for name in CLOSURE])
    assert "libcuda1 is not held" in planned("nvidia_driver", state(loose)).pending_reasons
    short = driven(bare, packages=[package(name) for name in CLOSURE if name != "libnvidia-nscq"])
    assert "driver" in planned("nvidia_driver", state(short)).questions


@pytest.mark.parametrize(
    ("tool", "argv"),
    [
        ("initramfs-tools", ["update-initramfs", "-u", "-k", KERNEL]),
        # Ubuntu from 25.10 on, as in /etc/kernel/postinst.d/dracut.
        ("dracut", ["dracut", "--quiet", "--force", IMAGE, KERNEL]),
    ],
)
def test_an_image_older_than_the_nouveau_blacklist_is_rebuilt(bare: dict[str, Any], tool: str, argv: list[str]) -> None:
    facts = driven(bare)
    more = {**dict.fromkeys(CLOSURE, "580.95.05-1"), **dict.fromkeys([*OTHERS, tool], "1")}
    draft = planned("nvidia_driver", state(facts, {"installed": more}))
    written = as_it_has_to_be(draft) | {IMAGE: {"kind": "file", "mtime": 50.0}}
    manifest = planned("nvidia_driver", state(facts, {"installed": more}, files=written))
    assert commands_of(manifest) == [argv]
    (reason,) = manifest.pending_reasons
    assert reason.startswith(f"{IMAGE} is older than ")
    fresh = written | {IMAGE: {"kind": "file", "mtime": 150.0}}
    assert not planned("nvidia_driver", state(facts, {"installed": more}, files=fresh)).pending
    gone = planned("nvidia_driver", state(facts, {"installed": more}, files=fresh), {"nvidia_driver": ABSENT})
    assert commands_of(gone) == [argv]


def test_dracut_keeps_nouveau_out_of_images_for_any_machine(bare: dict[str, Any]) -> None:
    facts = driven(bare)
    more = {**dict.fromkeys(CLOSURE, "580.95.05-1"), **dict.fromkeys([*OTHERS, "dracut"], "1")}
    manifest = planned("nvidia_driver", state(facts, {"installed": more}))
    texts = {file.path: file.content for file in manifest.files}
    assert (texts[files.DRACUT] or "").splitlines()[-1] == 'omit_drivers+=" nouveau "'
    written = as_it_has_to_be(manifest) | {IMAGE: {"kind": "file", "mtime": 150.0}}
    written[files.DRACUT]["mtime"] = 160.0
    late = planned("nvidia_driver", state(facts, {"installed": more}, files=written))
    assert commands_of(late) == [["dracut", "--quiet", "--force", IMAGE, KERNEL]]
    assert late.pending_reasons == (f"{IMAGE} is older than {files.DRACUT}",)
    without = planned("nvidia_driver", state(facts))
    assert [file.content for file in without.files if file.path == files.DRACUT] == [None]


def test_with_dnf_nouveau_is_kept_out_of_the_images_of_dracut(bare: dict[str, Any]) -> None:
    image = f"/boot/initramfs-{EL}.img"
    dracut = {**dict.fromkeys(["dracut"], "057-70"), **rpm_node(bare).installed}
    written = {image: {"kind": "file", "mtime": 50.0}}
    first = planned("nvidia_driver", rpm_node(bare, {"installed": dracut}, module_files=[built()]))
    written |= as_it_has_to_be(first)
    node = rpm_node(bare, {"installed": dracut}, module_files=[built()]).model_copy(
        update={"files": {path: FileState.model_validate(row) for path, row in written.items()}}
    )
    manifest = planned("nvidia_driver", node)
    assert written[files.NOUVEAU]["kind"] == "file"
    assert commands_of(manifest) == [["dracut", "--quiet", "--force", image, EL]]
    assert planned("nvidia_driver", rpm_node(bare, module_files=[built()])).commands == ()
    gone = planned("nvidia_driver", node, {"nvidia_driver": ABSENT})
    assert [file.content for file in gone.files if file.path == files.NOUVEAU] == [None]
    assert commands_of(gone) == [["dracut", "--quiet", "--force", image, EL]]


def holds(kernel: str, image: str, size: int) -> dict[str, Any]:
    """An initramfs that is older than the module on disk, with a module of its own."""
    modules = [{"path": f"/usr/lib/modules/{kernel}/nvidia.ko", "size": size}]
    return {"initramfs": [{"kernel": kernel, "path": image, "newer": False, "modules": modules}]}


@pytest.mark.parametrize(("size", "rebuilt"), [(5, True), (7, False)])
def test_an_image_with_another_module_than_the_disk_is_rebuilt(bare: dict[str, Any], size: int, rebuilt: bool) -> None:
    facts = driven(bare)
    facts["module_files"][0]["size"] = 7
    written = as_it_has_to_be(planned("nvidia_driver", state(facts))) | {IMAGE: {"kind": "file", "mtime": 200.0}}
    more = {**dict.fromkeys(CLOSURE, "580.95.05-1"), **dict.fromkeys([*OTHERS, "initramfs-tools"], "1")}
    manifest = planned("nvidia_driver", state(facts | holds(KERNEL, IMAGE, size), {"installed": more}, files=written))
    assert commands_of(manifest) == ([["update-initramfs", "-u", "-k", KERNEL]] if rebuilt else [])
    assert manifest.pending_reasons == ((f"{IMAGE} has another nvidia module than the disk",) if rebuilt else ())


def test_with_dnf_an_image_with_another_module_is_rebuilt_too(bare: dict[str, Any]) -> None:
    image = f"/boot/initramfs-{EL}.img"
    dracut = {**dict.fromkeys(["dracut"], "057-70"), **rpm_node(bare).installed}
    facts = {"module_files": [built()], **holds(EL, image, 5)}
    written = as_it_has_to_be(planned("nvidia_driver", rpm_node(bare, {"installed": dracut}, **facts)))
    written |= {image: {"kind": "file", "mtime": 200.0}}
    node = rpm_node(bare, {"installed": dracut}, **facts).model_copy(
        update={"files": {path: FileState.model_validate(row) for path, row in written.items()}}
    )
    manifest = planned("nvidia_driver", node)
    assert commands_of(manifest) == [["dracut", "--quiet", "--force", image, EL]]
    assert f"{image} has another nvidia module than the disk" in manifest.pending_reasons


def test_a_kernel_without_a_module_is_built_for(bare: dict[str, Any]) -> None:
    manifest = planned("nvidia_driver", state(driven(bare, loaded=None, module_files=[])))
    (build,) = result_of(manifest).builds
    assert build.argv == ("dkms", "install", "--force", "-m", "nvidia", "-v", "580.95.05", "-k", KERNEL)
    assert result_of(manifest).module_problems == (f"no module 580.95.05 for {KERNEL}",)


def test_another_loaded_release_takes_a_reboot_or_an_exchange(bare: dict[str, Any]) -> None:
    units = [unit(name) for name in ("nvidia-persistenced", "nvidia-fabricmanager", "docker")]
    facts = driven(bare, loaded="570.211.01", units=units)
    (reason,) = planned("nvidia_driver", state(facts)).reboot_reasons
    assert reason.startswith("module 570.211.01 is loaded, 580.95.05 is installed")
    assert result_of(planned("nvidia_driver", state(facts))).exchange is None
    settings = {"nvidia_driver": {"reload": True}}
    assert result_of(planned("nvidia_driver", state(facts), settings)).exchange == ModuleExchange(
        version="580.95.05",
        units=("nvidia-fabricmanager.service", "nvidia-persistenced.service"),
        unit_versions={"nvidia-fabricmanager.service": "580.95.05"},
    )
    busy = {"pid": 1, "name": "python3", "type": "C"}
    assert result_of(planned("nvidia_driver", state({**facts, "gpu_processes": [busy]}), settings)).exchange is None
    unknown = {**facts, "gpu_processes": None}
    assert result_of(planned("nvidia_driver", state(unknown), settings)).exchange is None


@pytest.mark.parametrize(
    ("key", "mok_hash", "expected", "words"),
    [
        ({"enrolled": True, "waits": False, "fresh": False}, "", (False, False), ""),
        ({"enrolled": False, "waits": True, "fresh": True}, "", (False, True), "must be confirmed at the console"),
        ({"enrolled": False, "waits": True, "fresh": False}, "", (False, False), "must be confirmed at the console"),
        ({"enrolled": False, "waits": False, "fresh": False}, "grub.x", (True, False), "must be confirmed"),
        ({"enrolled": None, "waits": False, "fresh": False}, "", (False, False), "nvidia_driver_mok_hash stages it"),
        (None, "", (False, False), "nvidia_driver_mok_hash stages it"),
        (None, "grub.x", (True, False), "must be confirmed"),
    ],
)
def test_no_module_is_loaded_while_the_key_waits(
    bare: dict[str, Any], key: Any, mok_hash: str, expected: tuple[bool, bool], words: str
) -> None:
    facts = driven(bare, loaded=None, secure_boot=True)
    known = {**dict.fromkeys(CLOSURE, "580.95.05-1"), **dict.fromkeys([*OTHERS, "mokutil", "openssl"], "1")}
    machine = state(facts, {"installed": known, "key": key and {"path": "/var/lib/dkms/mok.pub", **key}})
    manifest = planned("nvidia_driver", machine, {"nvidia_driver": {"mok_hash": mok_hash}})
    assert bool(manifest.modules) is not bool(words)
    reboots = any("key" in reason for reason in manifest.reboot_reasons)
    assert (result_of(manifest).stage_key, reboots) == expected
    assert words in " ".join(manifest.notes)
    assert (NO_KEY in result_of(manifest).module_problems) is (expected[0] and key is None)


def test_a_board_with_nvswitches_is_refused_without_its_fabric_manager(bare: dict[str, Any]) -> None:
    settings = {"nvidia_driver": GOES, "nvidia_fabric": {"state": "absent"}}
    for machine in (state_of(bare), state(driven(bare))):
        (line,) = planned("nvidia_driver", machine, settings).refusals
        assert line.startswith("fabric-manager:")
    single = {**bare, "pci": [row for row in HGX if row["slot"] == "0000:10:00.0"]}
    assert planned("nvidia_driver", state_of(single), settings).refusals == ()


def test_absent_removes_everything_and_a_removed_driver_leaves_nothing_pending(bare: dict[str, Any]) -> None:
    gone = {"nvidia_driver": {"state": "absent"}}
    removal = planned("nvidia_driver", state(driven(bare)), gone)
    assert removal.packages is not None
    assert removal.packages.manager == "apt"
    assert removal.packages.state == "absent"
    assert set(CLOSURE) <= set(removal.packages.remove)
    assert {file.content for file in removal.files} == {None}
    assert removal.reboot_reasons == ("module 580.95.05 is loaded, none is installed",)
    clean = {
        path: {"kind": "absent"} for path in (*ROLE.files, ROLE.record, *(folder.path for folder in removal.folders))
    }
    assert planned("nvidia_driver", state_of(bare, files=clean), gone).pending_reasons == ()
    looked_at = {path for look in LOOKS.values() for path in (*look.paths, *look.contents)}
    for role in ("nvidia_driver", "nvidia_fabric"):
        manifest = planned(role, state_of(bare), gone)
        paths = {file.path for file in manifest.files} | {folder.path for folder in manifest.folders}
        assert paths <= looked_at, "else they are never settled"


def test_neither_apt_nor_dnf_is_refused(bare: dict[str, Any]) -> None:
    nothing = state_of(bare).model_copy(update={"apt": None})
    assert planned("nvidia_driver", nothing).refusals[0].startswith("no-package-manager:")
    with pytest.raises(ValueError, match="no package manager"):
        nothing.by_manager(apt="a", dnf="d")


# --- dnf


def rocky(bare: dict[str, Any], **changes: Any) -> dict[str, Any]:
    system = {"id": "rocky", "version_id": "9.6", "codename": None, "pretty_name": "Rocky 9.6", "id_like": ["rhel"]}
    return {**bare, "os": {**bare["os"], **system}, "kernels": [], **changes}


DNF: dict[str, Any] = {"error": None, "versionlock": True}
RPMS = {"nvidia-driver-cuda": "3:580.95.05-1.el9", "dkms": "3.2-1.el9"}


def test_dnf_is_asked_and_its_answer_is_one_transaction(bare: dict[str, Any]) -> None:
    facts = rocky(bare)
    first = planned("nvidia_driver", state_of(facts, dnf=DNF), {"nvidia_driver": GOES})
    assert first.questions["driver"].body["manager"] == "dnf"
    answer = {"target": "580.95.05", "install": RPMS, "remove": [], "stream": "nvidia-driver:580-open"}
    manifest = planned("nvidia_driver", state_of(facts, dnf=DNF), {"nvidia_driver": GOES}, answers={"driver": answer})
    assert manifest.packages is not None
    assert manifest.packages.manager == "dnf"
    assert manifest.packages.stream == "nvidia-driver:580-open"
    assert manifest.packages.constraint == "580.95.05"
    assert "nvidia-fabricmanager" in manifest.packages.bound
    assert manifest.pending


def test_a_dnf_that_cannot_be_used_is_refused(bare: dict[str, Any]) -> None:
    (line,) = planned("nvidia_driver", state_of(rocky(bare), dnf={"error": "no module dnf"})).refusals
    assert line.startswith("no-dnf:")


EL = "5.14.0-570.12.1.el9_6.x86_64"
OLD_EL = "5.14.0-503.11.1.el9_5.x86_64"


def kernel_of_rpm(release: str, **changes: Any) -> dict[str, Any]:
    flags = {"running": True, "newest": True, "headers": True, "image": True}
    return {"release": release, "package": f"kernel-core-{release}", **flags, **changes}


def rpm_node(bare: dict[str, Any], dnf: dict[str, Any] | None = None, **changes: Any) -> NodeState:
    """A Rocky 9 that has every package of 580.95.05, added to DKMS and built for no kernel."""
    facts = rocky(bare, kernels=[kernel_of_rpm(EL)], gpu_processes=[], modules=[])
    first = planned("nvidia_driver", state_of(facts, dnf=DNF), {"nvidia_driver": GOES})
    names = [*first.questions["driver"].body["bound"], "nvidia-kmod-common"]
    packages = [{**package(name, "3:580.95.05-1.el9"), "maintainer": "NVIDIA CORPORATION"} for name in names]
    added = {"name": "nvidia-open", "version": "580.95.05", "kernel": None, "architecture": None, "state": "added"}
    known = {"installed": dict.fromkeys(names, "3:580.95.05-1.el9"), "streams": {"nvidia-driver": "580-open"}}
    return state_of({**facts, "packages": packages, "dkms": [added], **changes}, dnf={**DNF, **known, **(dnf or {})})


def built(kernel: str = EL, version: str = "580.95.05") -> dict[str, Any]:
    row = {"kernel": kernel, "path": f"/lib/modules/{kernel}/extra/nvidia.ko", "version": version, "flavour": "open"}
    return {**row, "vermagic": kernel, "signed": False}


def test_dnf_does_not_report_a_module_that_was_not_built(bare: dict[str, Any]) -> None:
    manifest = planned("nvidia_driver", rpm_node(bare), {"nvidia_driver": GOES})
    assert manifest.questions == {}, "the packages are all there"
    argv = ["dkms", "install", "--force", "-m", "nvidia-open", "-v", "580.95.05", "-k", EL]
    assert result_of(manifest).builds == (Build(kernel=EL, argv=tuple(argv)),)
    assert result_of(manifest).module_problems == (f"no module 580.95.05 for {EL}",)
    assert manifest.pending
    settled = planned("nvidia_driver", rpm_node(bare, module_files=[built()]), {"nvidia_driver": GOES})
    assert (result_of(settled).builds, result_of(settled).module_problems) == ((), ())


def test_a_module_that_dnf_brought_is_loaded_at_once(bare: dict[str, Any]) -> None:
    manifest = planned("nvidia_driver", rpm_node(bare, module_files=[built()]), {"nvidia_driver": GOES})
    assert manifest.modules == ("nvidia-uvm",)
    assert manifest.reboot_reasons == ()
    busy = rpm_node(bare, module_files=[built()], modules=["nouveau"])
    manifest = planned("nvidia_driver", busy, {"nvidia_driver": GOES})
    assert manifest.modules == ()
    assert manifest.reboot_reasons == ("nouveau is loaded and keeps NVIDIA's module off the GPU",)


def test_nothing_is_built_for_headers_left_by_a_removed_kernel(bare: dict[str, Any]) -> None:
    left = kernel_of_rpm(OLD_EL, running=False, newest=False, image=False)
    state_ = rpm_node(bare, kernels=[left, kernel_of_rpm(EL)], module_files=[built()])
    assert result_of(planned("nvidia_driver", state_, {"nvidia_driver": GOES})).builds == ()


def test_an_older_kernel_that_runs_gets_its_headers_and_its_module(bare: dict[str, Any]) -> None:
    older = kernel_of_rpm(OLD_EL, newest=False, headers=False)
    state_ = rpm_node(bare, kernels=[older, kernel_of_rpm(EL, running=False)], module_files=[built()])
    body = planned("nvidia_driver", state_, {"nvidia_driver": GOES}).questions["driver"].body
    assert body["install"] == [f"kernel-devel-{OLD_EL}"]
    both = [kernel_of_rpm(OLD_EL, newest=False), kernel_of_rpm(EL, running=False)]
    manifest = planned("nvidia_driver", rpm_node(bare, kernels=both, module_files=[built()]), {"nvidia_driver": GOES})
    assert [build.kernel for build in result_of(manifest).builds] == [OLD_EL]
    assert manifest.reboot_reasons == (f"kernel {OLD_EL} runs and has no module, {EL} has",)


def test_an_older_kernel_that_is_only_kept_needs_no_headers(bare: dict[str, Any]) -> None:
    """installonly_limit keeps it, and its kernel-devel is in the vault of the minor release before."""
    kernels = [kernel_of_rpm(OLD_EL, running=False, newest=False, headers=False), kernel_of_rpm(EL, headers=False)]
    state_ = rpm_node(bare, kernels=kernels)
    body = planned("nvidia_driver", state_, {"nvidia_driver": GOES}).questions["driver"].body
    assert body["install"] == [f"kernel-devel-{EL}"]


@pytest.mark.parametrize("reload", [False, True])
def test_a_loaded_module_of_another_release_is_exchanged_on_request_with_dnf(
    bare: dict[str, Any], reload: bool
) -> None:
    loaded = {"version": "570.211.01", "flavour": "open"}
    state_ = rpm_node(bare, module_files=[built()], loaded_driver=loaded, modules=["nvidia"])
    manifest = planned("nvidia_driver", state_, {"nvidia_driver": {**GOES, "reload": reload}})
    assert bool(result_of(manifest).exchange) is reload
    assert "module 570.211.01 is loaded, 580.95.05 is installed" in manifest.reboot_reasons[0]


@pytest.mark.parametrize(
    ("enrolled", "mok_hash", "stage", "load"),
    [(True, "", False, True), (False, "", False, False), (False, "grub.x", True, False), (None, "", False, False)],
)
def test_with_dnf_too_no_module_is_loaded_while_the_key_waits(
    bare: dict[str, Any], enrolled: bool | None, mok_hash: str, stage: bool, load: bool
) -> None:
    key = {"path": "/var/lib/dkms/mok.pub", "enrolled": enrolled, "waits": False, "fresh": False}
    tools = dict.fromkeys(["mokutil", "openssl"], "1")
    machine = rpm_node(bare, {"key": key}, module_files=[built()], secure_boot=True)
    assert machine.dnf is not None
    dnf = machine.dnf.model_copy(update={"installed": {**machine.dnf.installed, **tools}})
    settings = {"nvidia_driver": {**GOES, "mok_hash": mok_hash}}
    manifest = planned("nvidia_driver", machine.model_copy(update={"dnf": dnf}), settings)
    assert (result_of(manifest).stage_key, bool(manifest.modules)) == (stage, load)
    assert result_of(manifest).key == "/var/lib/dkms/mok.pub"
    requested = planned("nvidia_driver", machine, settings).questions["driver"].body.get("install")
    assert requested == ["mokutil", "openssl"]


ZFS = {"name": "zfs", "version": "2.1", "kernel": None, "architecture": None, "state": "added"}


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("dnf", [False, True])
def test_headers_go_with_the_driver_unless_dkms_builds_other_modules(
    bare: dict[str, Any], dnf: bool, other: bool
) -> None:
    """Whether they came with the driver, the node decides by its record."""
    state_ = rpm_node(bare, {"installed": {"nvidia-driver-cuda": "3:580.95.05-1.el9"}, "own_locks": []})
    state_ = state_ if dnf else state(driven(bare))
    modules = [{**ZFS, "name": "nvidia"}, *([ZFS] if other else [])]
    facts = type(state_.facts).model_validate({**state_.facts.model_dump(mode="json"), "dkms": modules})
    manifest = planned("nvidia_driver", state_.model_copy(update={"facts": facts}), {"nvidia_driver": ABSENT})
    assert manifest.packages is not None
    headers = manifest.packages.remove_new
    assert bool(headers) is not other
    assert ("zfs" in " ".join(manifest.notes)) is other


@pytest.mark.parametrize(
    "part",
    [
        {"target": "5" * 5000},
        {"install": {"libcuda1": "5" * 5000}},
        {"sources": {"s" * 5000: "nvidia"}},
        {"remove": ["libcuda1"] * 60_000},
        {"lacking": {"libcuda1": "580.95.05-1"}},
        {"error": ["no such package"]},
    ],
)
def test_an_answer_out_of_bounds_is_refused(part: dict[str, Any]) -> None:
    assert answered(ANSWER) is not None
    (name,) = part
    with pytest.raises(UsageError, match=f"answer is malformed: {name}"):
        answered({**ANSWER, **part})
