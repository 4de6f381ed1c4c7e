"""RPM packages, their module streams and their repository, with the real tools."""

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from pack import Tools, run  # type: ignore[import-not-found]

_TAGS = {"Depends": "Requires", "Recommends": "Recommends", "Provides": "Provides", "Conflicts": "Conflicts"}
_TAGS |= {"Replaces": "Obsoletes"}
_ARCHITECTURES = {"amd64": "x86_64", "all": "noarch"}
_MODULE_VERSION = "20261120000000"
_CONTEXT = "6910a1ab"
# The default stream. From the README of NVIDIA's packaging, not read again.
_DEFAULT_STREAM = "latest-dkms"


def build(tools: Tools, package: dict[str, Any], to: Path) -> None:
    """Build one package into ``to``."""
    epoch, version, release = _evr(package["version"])
    head = {
        "Name": package["name"],
        "Epoch": epoch,
        "Version": version,
        "Release": release,
        "Summary": package["description"],
        "License": "simulated",
        "Vendor": "NVIDIA CORPORATION",
        "Packager": package["fields"]["Maintainer"],
        "AutoReqProv": "no",
        "BuildArch": "noarch" if package["architecture"] == "all" else "",
        **{tag: package["fields"].get(field, "") for field, tag in _TAGS.items()},
    }
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        if package["repack"]:
            tools.repacked(package, tree)
            shutil.rmtree(tree / "DEBIAN")
        tools.tree(package, tree)
        listed = []
        for path in sorted(tree.rglob("*")):
            relative = str(path.relative_to(tree))
            if path.is_symlink() or path.is_file():
                listed.append(("%config(noreplace) " if relative in package["conffiles"] else "") + f'"/{relative}"')
        spec = [f"{tag}: {text}" for tag, text in head.items() if text]
        spec += [
            "%description",
            package["description"],
            "%install",
            f"cp -a {tree}/. %{{buildroot}}",
            *(line for name, text in package["scripts"].items() for line in (f"%{name}", text.replace("%", "%%"))),
            "%files",
            *listed,
        ]
        Path(folder, "spec").write_text("\n".join(spec) + "\n", encoding="utf-8")
        defined = {
            "_topdir": folder,
            "_rpmdir": str(to),
            "_build_name_fmt": "%{NAME}-%{VERSION}-%{RELEASE}.%{ARCH}.rpm",
            "__os_install_post": "%{nil}",
            "_binary_payload": "w1.gzdio",
            "use_source_date_epoch_as_buildtime": "1",
            "_buildhost": "gpunodelab",
        }
        options = [word for name, text in defined.items() for word in ("--define", f"{name} {text}")]
        run(["rpmbuild", "-bb", "--quiet", "--target", "x86_64", *options, f"{folder}/spec"])


def sign(folder: Path, home: Path, user: str) -> None:
    """Sign all packages in a folder with that user's key."""
    packages = sorted(str(path) for path in folder.glob("*.rpm"))
    defined = {"_gpg_name": user, "_gpg_path": str(home), "__gpg": "/usr/bin/gpg"}
    options = [word for name, text in defined.items() for word in ("--define", f"{name} {text}")]
    run(["rpmsign", *options, "--addsign", *packages])


def index(repository: dict[str, Any], folder: Path, to: Path, without: set[str]) -> None:
    """Write ``repodata`` of the packages in ``folder`` into ``to``; ``without``: file names to omit."""
    excluded = [word for name in sorted(without) for word in ("--excludes", name)]
    run(["createrepo_c", "--quiet", "--no-database", "--outputdir", str(to), *excluded, str(folder)])
    if repository["module"]:
        kept = [package for package in repository["packages"] if file_name(package) not in without]
        with tempfile.TemporaryDirectory() as scratch:
            modules = Path(scratch, "modules.yaml")
            modules.write_text(_modules(repository["module"], kept), encoding="utf-8")
            run(["modifyrepo_c", "--mdtype=modules", str(modules), str(to / "repodata")])


def file_name(package: dict[str, Any]) -> str:
    """Return the name of a package's file."""
    _, version, release = _evr(package["version"])
    return f"{package['name']}-{version}-{release}.{_ARCHITECTURES[package['architecture']]}.rpm"


def _evr(text: str) -> tuple[str, str, str]:
    epoch, _, rest = text.rpartition(":")
    version, _, release = rest.partition("-")
    return epoch, version, release


def _modules(module: str, packages: list[dict[str, Any]]) -> str:
    """Return the module's streams as documents of modulemd 2 (JSON is YAML)."""
    branches = sorted({package["release"].partition(".")[0] for package in packages if package["streams"]})
    streams = {f"{branch}-{kind}": (branch, kind) for branch in branches for kind in ("open", "dkms")}
    streams |= {"open-dkms": ("", "open"), "latest-dkms": ("", "dkms")}
    documents: list[dict[str, Any]] = []
    for name, (branch, kind) in streams.items():
        held = [
            package
            for package in packages
            if kind in package["streams"] and package["release"].startswith(f"{branch}." if branch else "")
        ]
        top = "nvidia-open" if kind == "open" else "cuda-drivers"
        data = {
            "name": module,
            "stream": name,
            "version": int(_MODULE_VERSION),
            "context": _CONTEXT,
            "arch": "x86_64",
            "summary": f"driver, stream {name} (simulated by gpunode lab)",
            "description": "Simulated: drives nothing.",
            "license": {"module": ["MIT"]},
            "profiles": {"default": {"rpms": [top]}, "fm": {"rpms": [top, *_fabric_managers(held)]}},
            "artifacts": {"rpms": sorted(_nevra(package) for package in held)},
        }
        documents.append({"document": "modulemd", "version": 2, "data": data})
    default = {"module": module, "stream": _DEFAULT_STREAM, "profiles": {name: ["default"] for name in streams}}
    documents.append({"document": "modulemd-defaults", "version": 1, "data": default})
    return "".join(f"---\n{json.dumps(document, indent=1)}\n...\n" for document in documents)


def _fabric_managers(packages: list[dict[str, Any]]) -> list[str]:
    return sorted({package["name"] for package in packages if re.fullmatch("nvidia-fabric-?manager", package["name"])})


def _nevra(package: dict[str, Any]) -> str:
    epoch, version, release = _evr(package["version"])
    return f"{package['name']}-{epoch or 0}:{version}-{release}.{_ARCHITECTURES[package['architecture']]}"
