"""The shape of a role: what it owns on a node, from which what is read, the plan, the removal and the tags follow."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import Field, ValidationError

from gpunode.errors import UsageError
from gpunode.frozen import Frozen, invalid_field
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import (
    ManagedFile,
    ManagedFolder,
    Manifest,
    NodeCommand,
    UnitState,
    file_reasons,
    no_package_manager,
)
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.templates import program, rendered
from gpunode.provisioning.transaction import Transaction, installed_by_role, lock_plugin, removable
from gpunode.text import did_you_mean, nearest
from gpunode.yaml_file import LOADER

SPECIAL_TAGS = frozenset({"all", "always", "never", "tagged", "untagged"})
"""Tags with a meaning of their own in Ansible."""


class Variables(Frozen):
    """Base of settings: each field is one variable, ``ROLE_FIELD``, declared here and nowhere else.

    ``tests/contract/role_files.py`` writes ``defaults/main.yml`` and ``meta/argument_specs.yml`` from the fields.
    """


S = TypeVar("S", bound=Variables)
Texts = Callable[..., str]
"""Function that renders a template of a role: its name, and its values as keywords."""
Present = Callable[[NodeState, S, Context], Manifest]
Absent = Callable[[NodeState, Manifest, Context], Manifest]


def option(default: Any, description: str, **spec: Any) -> Any:
    """Return the field of a variable: its default, and what is printed of it by ``ansible-doc`` and above the default.

    ``spec`` are further keys of its argument specification.
    """
    return Field(default, description=description, json_schema_extra={"spec": spec})


class Settings(Variables):
    """Base of the settings of a role that changes a node."""

    tasks_before: str = option("", "Task file of the site that is included before the role, in each run.")
    tasks_after: str = option("", "Task file of the site that is included after the role, in each run.")


class PackageSettings(Settings):
    """Base of settings of a role that changes packages."""

    lock_wait_s: int = option(300, "How long to wait for the package lock, in seconds.")


def role_tags(name: str) -> tuple[str, ...]:
    """Return the tags of a role: its own, and those of its parts."""
    return (name, *(f"{name}_{part}" for part in ("install", "configure", "service")))


Value = str | int | float | bool | None
"""A value that people write in YAML; None: null."""


@dataclass(kw_only=True)
class Role(Generic[S]):
    """A role: its variables, what it owns on a node, and the plan of what it makes present."""

    name: str
    title: str
    """What the role does, in one line."""
    about: tuple[str, ...]
    """Sentences that ``ansible-doc`` prints."""
    settings: type[S]
    result: type[Frozen] | None = None
    """Type of what the role's own tasks read, as ``manifest.result``."""
    for_gpus: bool = False
    """For nodes with a GPU; the others are judged by what they need, also on a login or storage node."""
    for_images: bool = False
    """In ``playbooks/image.yml`` too. The plans of the others follow from a machine: they are for the first boot."""
    files: tuple[str, ...] = ()
    """Files of the role alone: they are removed with it, after the packages."""
    folders: tuple[str, ...] = ()
    """Folders that are removed with the role if they are empty."""
    packages: tuple[str, ...] = ()
    """Shell patterns of names that the role may install; a removal removes those that it installed."""
    held: tuple[str, ...] = ()
    """Shell patterns of further packages that the removal includes if they are held."""
    locks: bool = False
    """Packages are held: with dnf in a section of the versionlock list."""
    kernel: bool = False
    """Values of the running kernel are set; a removal restores them."""
    restart_mark: str | None = None
    """Record of a restart that new packages require. It is below /run, because a boot makes the restart unnecessary."""
    more: Look = field(default_factory=Look)
    """What is read in addition to the above."""
    reads: tuple[str, ...] = ()
    """Further parts of the state that its plan needs (``gpunode.provisioning.context``); packages are one."""
    _present: Present[S] | None = None
    _absent: Absent | None = None

    def present(self, function: Present[S]) -> Present[S]:
        """Set the plan of what the role makes present (a decorator)."""
        self._present = function
        return function

    def absent(self, function: Absent) -> Absent:
        """Set what completes the manifest of the removal with what only this role has (a decorator)."""
        self._absent = function
        return function

    def variable(self, field: str) -> str:
        """Return the variable of a field of the settings; those of the playbooks have their whole name there."""
        return field if field.startswith("gpunode_") else f"{self.prefix}{field}"

    @property
    def prefix(self) -> str:
        """Return the beginning of the names of the role's variables."""
        return f"{self.name}_"

    @property
    def folder(self) -> str:
        """Return the folder of the role's records on the node."""
        return f"/var/lib/gpunode/{self.name}"

    @property
    def record(self) -> str:
        """Return the file that records which packages the role installed."""
        return f"{self.folder}/packages-before"

    @property
    def kernel_memory(self) -> str:
        """Return the file that records the values of the running kernel from before the role."""
        return f"{self.folder}/values-before.json"

    @property
    def lock_mark(self) -> str:
        """Return the mark of the role's section in dnf's versionlock list."""
        return f"gpunode (role {self.name})" if self.locks else ""

    @property
    def look(self) -> Look:
        """Return what is read from a node for the role."""
        return Look(
            paths=(*self.files, *self._folders, *([self.kernel_memory] if self.kernel else []), *self.more.paths),
            globs=self.more.globs,
            contents=(*self._records, *self.more.contents),
        )

    @property
    def needs(self) -> frozenset[str]:
        """Return the parts of the state that its plan needs."""
        return frozenset((*self.reads, *(("packages",) if self.packages else ())))

    @property
    def _folders(self) -> tuple[str, ...]:
        return (*self.folders, *([self.folder] if self.packages or self.kernel else []))

    @property
    def _records(self) -> tuple[str, ...]:
        """Return the files in which the role keeps what it reads again."""
        return tuple(filter(None, (self.record if self.packages else None, self.restart_mark)))

    def read(self, settings: Mapping[str, Any]) -> S:
        """Return settings as their model. Raises UsageError for invalid ones."""
        try:
            return self.settings.model_validate(dict(settings))
        except ValidationError as err:
            name, why = invalid_field(err)
            key = re.sub(r"\.([0-9]+)", r"[\1]", name)
            # What contradicts between variables has no field; the sentence names them.
            where = f"{self.variable(key)}: " if key else ""
            raise UsageError(f"{where}{why.removeprefix('Value error, ')}") from None

    def of(self, context: Context) -> S:
        """Return the role's settings in a run."""
        return self.read(context.settings_of(self.name))

    def texts(self, context: Context) -> Texts:
        """Return the function that renders the role's templates."""
        return partial(rendered, self.name, site=context.templates)

    def program(self, name: str) -> str:
        """Return a program for nodes, one of the role's ``files``."""
        return program(self.name, name)

    def plan(self, state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
        """Return the manifest of the role. Raises UsageError for invalid settings."""
        model = self.read(settings)
        requested = getattr(model, "state", "present")
        if requested == "keep":
            return Manifest(role=self.name)
        if self.packages and state.manager is None:
            return no_package_manager(self.name)
        if requested == "absent":
            return self.gone(state, model, context)
        assert self._present is not None, self.name  # noqa: S101 - the role's module sets it
        return self._present(state, model, context)

    def gone(self, state: NodeState, settings: S, context: Context) -> Manifest:
        """Return the manifest that removes what the role made, and the packages that it installed."""
        manifest = self._removal(state, settings)
        return self._absent(state, manifest, context) if self._absent is not None else manifest

    def _removal(self, state: NodeState, settings: S) -> Manifest:
        packages, reasons = None, list[str]()
        if self.packages:
            new = (*self.packages, *getattr(settings, "extra_packages", ()), *_of_the_site(settings))
            going = removable(state, self.record, new, self.held)
            packages = self._change(
                state,
                state="absent",
                # The transaction reads the record again, which an aborted one of this run may have completed.
                remove_new=new,
                hold=self.held,
                lock_wait_s=int(getattr(settings, "lock_wait_s", 0)),
            )
            reasons = [f"{name} must be removed" for name in going]
        if self.recorded(state):
            reasons.append("the kernel's settings have to be restored")
        gone = (*self.files, *self._records)
        # A folder of several roles that is empty may be one of the system.
        exists = any(map(state.exists, gone))
        return Manifest(
            role=self.name,
            files=tuple(ManagedFile(path=path, content=None, phase="after") for path in gone),
            # The values of the kernel are recorded in the role's folder until they are restored.
            folders=tuple(
                ManagedFolder(path=path, state="absent_if_empty", phase="last" if self.kernel else "after")
                for path in self._folders
                if exists or path == self.folder
            ),
            packages=packages,
            kernel_values={} if self.kernel else None,
            kernel_memory=self.kernel_memory if self.kernel else None,
            pending_reasons=tuple(reasons),
        )

    def transaction(  # noqa: PLR0913
        self,
        state: NodeState,
        settings: S,
        install: Iterable[str],
        *,
        remove: Iterable[str] = (),
        never: Iterable[str] = (),
        hold: Iterable[str] = (),
        files: Mapping[str, str | dict[str, str]] | None = None,
    ) -> Transaction:
        """Return the transaction that installs packages on this node; ``files`` are apt's, which it applies."""
        plugins = lock_plugin(state.dnf) if self.locks else ()
        return self._change(
            state,
            install=(*install, *plugins),
            remove=tuple(remove),
            never=tuple(never),
            hold=tuple(hold),
            files=state.by_manager(apt=dict(files or {}), dnf={}),
            lock_wait_s=int(getattr(settings, "lock_wait_s", 300)),
        )

    def _change(self, node: NodeState, **fields: Any) -> Transaction:
        """Return a transaction of the node's package manager with the role's record and its section of locks."""
        section = {"lock_mark": self.lock_mark} if self.locks and node.manager == "dnf" else {}
        return Transaction(manager=node.package_manager, memory=self.record, **section, **fields)

    def recorded(self, state: NodeState) -> bool:
        """Return whether values of the running kernel are recorded that a removal restores."""
        return self.kernel and state.kind(self.kernel_memory) == "file"

    def restarted(self, state: NodeState, unit: str, *files: ManagedFile) -> tuple[UnitState, ...]:
        """Return a unit that reads its files when it starts, to be restarted if one of them changes."""
        changes = any(True for file in files for _ in file_reasons(file, state))
        return (UnitState(name=unit, state="restarted"),) if changes else ()

    def stopped(self, state: NodeState, *names: str) -> tuple[UnitState, ...]:
        """Return the units among ``names`` that the node has, to be stopped before their packages are removed."""
        existing = [name for name in names if state.unit(name) is not None]
        return tuple(UnitState(name=name, enabled=False, state="stopped", phase="before") for name in existing)


def keeping(manifest: Manifest, state: NodeState, names: Collection[str]) -> Manifest:
    """Return a removal in which packages stay that somebody else uses, though the role installed them.

    They stay in its record, for a removal that comes later; apt does not remove them as dependencies of others.
    """
    change, installed = manifest.packages, [name for name in names if name in state.installed]
    if change is None or not installed:
        return manifest
    going = tuple(name for name in change.remove_new if name not in names)
    recorded = {*installed} & installed_by_role(state, change.memory or "")
    manual = NodeCommand(argv=("apt-mark", "manual", *installed), changes=False, phase="before")
    return manifest.updated(
        files=tuple(file for file in manifest.files if not (recorded and file.path == change.memory)),
        packages=change.model_copy(update={"remove_new": going, "never": tuple(names)}),
        commands=state.by_manager(apt=(manual,), dnf=()),
        pending_reasons=tuple(
            reason for reason in manifest.pending_reasons if reason not in {f"{name} must be removed" for name in names}
        ),
    )


def _of_the_site(settings: Variables) -> list[str]:
    """Return the names of the packages that the site adds to a role."""
    return [entry.partition("=")[0] for entry in getattr(settings, "gpunode_extra_packages", ())]


def refuse_unknown_tags(root: Path, tags: Sequence[str]) -> None:
    """Raise UsageError for a tag that does not exist: Ansible runs nothing for it and reports success."""
    if not tags:
        return
    known = SPECIAL_TAGS.union(
        *(_tags(file) for file in (*root.glob("playbooks/*.yml"), *root.glob("roles/*/*/*.yml"))),
        # The common tasks have those of every role.
        *(role_tags(path.parts[-3]) for path in root.glob("roles/*/meta/main.yml")),
    )
    for tag in (argument.strip() for value in tags for argument in value.split(",") if argument.strip()):
        if tag not in known:
            near = did_you_mean(nearest(tag, known, likeness=0.5))
            hint = near or f"known: {', '.join(sorted(known - SPECIAL_TAGS))}"
            raise UsageError(f"no task has the tag {tag}; {hint}")


def _tags(file: Path) -> set[str]:
    """Return all tags in a playbook or a file of tasks, at every level; ``--list-tags`` omits included files."""

    def walk(node: yaml.Node | None) -> Iterator[str]:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                yield from _tag_names(value) if key.value == "tags" else walk(value)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                yield from walk(item)

    try:
        return set(walk(yaml.compose(file.read_text(encoding="utf-8"), Loader=LOADER)))
    except yaml.YAMLError as err:
        raise UsageError(f"{file} is not valid YAML: reinstall gpunode: {str(err).splitlines()[0]}") from None


def _tag_names(node: yaml.Node) -> Iterator[str]:
    scalars = node.value if isinstance(node, yaml.SequenceNode) else [node]
    for scalar in scalars:
        yield from (name.strip() for name in str(scalar.value).split(",") if name.strip())
