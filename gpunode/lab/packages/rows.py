"""Declared packages of the vendor repository: YAML rows parsed to typed rows."""

from functools import cache
from importlib.resources import files as resource_files
from importlib.resources.abc import Traversable
from typing import Any, Literal, Self, TypeVar

import yaml
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gpunode.errors import UsageError
from gpunode.yaml_file import LOADER

DATA: Traversable = resource_files("gpunode.lab.packages").joinpath("data")  # also inside a zipapp
_Row = TypeVar("_Row", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Payload(_Strict):
    """One item in a package: a tool, library, unit, file, link, DKMS tree or module; exactly one of them."""

    tool: str | None = None
    """A program that calls the simulator with the package's release."""
    library: str | None = None
    """A shared object by its soname."""
    unit: str | None = None
    """A systemd unit, from ``data/units``."""
    file: str | None = None
    """A path without leading slash; its content is ``text`` or the file ``from`` in ``data/files``."""
    link: str | None = None
    """A symbolic link; its target is ``to``."""
    dkms: Literal["open", "proprietary"] | None = None
    """A DKMS source tree of that flavour; ``name`` is its name in DKMS."""
    module: Literal["open", "proprietary"] | None = None
    """Built kernel modules of that flavour, signed, for the row's ``{kernel}``."""

    at: str | None = None
    name: str = "nvidia"
    only: tuple[str, ...] = ()
    """Of a DKMS tree: only these files."""
    without: tuple[str, ...] = ()
    """Of a DKMS tree: all files but these."""
    text: str | None = None
    source: str | None = Field(default=None, alias="from")
    pin: str = ""
    to: str = ""
    mode: str = "0644"
    conffile: bool = False
    enable: bool = False
    """Whether installing the package enables and starts the unit."""
    from_version: str = "0"
    """The first release that has it."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = (self.tool, self.library, self.unit, self.file, self.link, self.dkms, self.module)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("expected exactly one of tool, library, unit, file, link, dkms, module")
        if self.file is not None and (self.text is None) == (self.source is None):
            raise ValueError(f"{self.file}: expected one of text and from")
        return self


class Alternative(_Strict):
    """A row of update-alternatives."""

    link: str
    name: str
    path: str
    priority: str


class PackageRow(_Strict):
    """One row: a package in every release of the list ``over``. Text may contain the list's keys in braces."""

    name: str
    over: str
    description: str
    version: str = "{release}-{revision}"
    architecture: Literal["amd64", "all"] = "amd64"
    section: str = "devel"
    source: str = ""
    component: str = ""
    """The archive's component, in a repository with suites."""
    depends: tuple[str, ...] = ()
    recommends: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    payload: tuple[Payload, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    users: tuple[str, ...] = ()
    """System accounts that installing the package creates."""
    kernel: str = ""
    """The release of the kernel of this image; its hooks run."""
    headers: str = ""
    """The release of the kernel of these headers."""
    depmod: str = ""
    """The release of the kernel for which the module index is rebuilt."""
    streams: tuple[str, ...] = ()
    """rpm only: the kinds of module stream that the package belongs to (``open``, ``dkms``); empty: no module."""
    breaks: tuple[str, ...] = ()
    repack: str = ""
    """The package of the tools' system from which this package has its files and scripts, under its own name and
    version; for rpm several, without their scripts.
    """
    scriptlets: dict[Literal["post", "preun", "postun"], str] = {}
    """rpm only: scripts that run when the package is installed or removed."""

    def parts(self, release: str) -> list[Payload]:
        """Return the content of the package in that release."""
        return [
            part for part in self.payload if part.from_version == "0" or Version(part.from_version) <= Version(release)
        ]


class Content(_Strict):
    """The content of a package with recorded name, versions and dependencies."""

    description: str
    section: str = "devel"
    needs: tuple[str, ...] = ()
    """Dependencies of the lab's own scripts."""
    payload: tuple[Payload, ...] = ()
    users: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    repack: str = ""


class ServedRepository(_Strict):
    """One repository: its path on the server and its content."""

    path: str
    kind: Literal["flat", "suites", "rpm"]
    key: str
    """The one of the lab's keys that signs it."""
    family: Literal["debian", "ubuntu", "rhel"]
    """The conventions that its packages follow: suffixes of versions, paths of libraries."""
    maintainer: str
    rows: tuple[str, ...] = ()
    """Files of package rows, without the suffix."""
    recorded: str = ""
    """The recorded index that it is built from."""
    releases: tuple[str, ...] = ()
    """The releases of the driver in it, a subset of the recorded ones."""
    contents: str = ""
    """The file that lists the content of the recorded packages."""
    key_file: str = ""
    """The file name of the key that the vendor publishes there; empty: the key's id."""
    repo: str = ""
    """rpm only: the id of the repository in the file that its vendor publishes for dnf."""
    suites: dict[str, str] = {}
    """For an archive: its suites, and the release that each names (24.04)."""
    components: tuple[str, ...] = ()
    """The components of a repository with suites."""
    release: dict[str, str] = {}
    """Fields of its Release file."""
    module: str = ""
    """rpm only: the module with the driver's streams."""
    first_cuda: str = "0"
    """The oldest toolkit in it."""
    keyring: str = ""
    """The name of the repository in cuda-keyring's source list; empty: no cuda-keyring package here."""


@cache
def releases() -> dict[str, list[dict[str, str]]]:
    """Return the lists of versions: list name → entries, all text."""
    content: dict[str, list[dict[str, str]]] = loaded("releases")
    return content


@cache
def repositories() -> dict[str, ServedRepository]:
    """Return the repositories by name."""
    return {
        name: _typed(ServedRepository, row, f"repositories.yml: {name}") for name, row in loaded("repositories").items()
    }


def repository_of(system: str) -> str:
    """Return the name of NVIDIA's repository for a lab system: ``ubuntu2404`` for ubuntu-24.04."""
    return system.replace("rocky", "rhel").replace("-", "").replace(".", "")


@cache
def packages(name: str) -> tuple[PackageRow, ...]:
    """Return the package rows of ``data/NAME.yml``, each merged over the file's ``defaults``; UsageError names an
    invalid one.
    """
    content = loaded(name)
    defaults = content.get("defaults", {})
    rows = [_typed(PackageRow, defaults | row, f"{name}.yml: {row.get('name')}") for row in content["packages"]]
    for row in rows:
        if row.over not in releases():
            raise UsageError(f"{name}.yml: {row.name}: over: releases.yml has no list {row.over}")
    return tuple(rows)


@cache
def content_rows(name: str) -> dict[str, Content]:
    """Return the content of the recorded packages, by name without branch and release."""
    return {stem: _typed(Content, row, f"{name}.yml: {stem}") for stem, row in loaded(name).items()}


def text_of(name: str) -> str:
    """Return the content of a file below ``data``."""
    return DATA.joinpath(*name.split("/")).read_text(encoding="utf-8")


def loaded(name: str) -> Any:
    """Return the content of ``data/NAME.yml``; UsageError names an invalid file."""
    path = DATA.joinpath(*f"{name}.yml".split("/"))
    try:
        return yaml.load(path.read_text(encoding="utf-8"), LOADER)  # noqa: S506 (a safe one)
    except (OSError, yaml.YAMLError) as err:
        raise UsageError(f"{path}: {' '.join(str(err).split())}") from None


def _typed(model: type[_Row], row: object, where: str) -> _Row:
    try:
        return model.model_validate(row)
    except ValidationError as err:
        first = err.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{where}: {field or 'row'}: {first['msg']}") from None
