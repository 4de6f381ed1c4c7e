"""NodeFacts: the typed facts of one node, their paths, and their conversion from a bundle.

A field that is None is unknown; ``NodeFacts.gaps`` then has the reason under the field's name. An empty tuple was read
and is empty. Each area of facts (``gpunode/facts/AREA.py``) declares its fields beside their readers and models.
"""

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from gpunode.facts.boot import BootFacts
from gpunode.facts.bundle_reader import BundleReader, UnknownFactError
from gpunode.facts.containers import ContainersFacts
from gpunode.facts.disks import DisksFacts
from gpunode.facts.driver import DriverFacts, LibrariesFacts
from gpunode.facts.errors import ParseError
from gpunode.facts.exposure import ExposureFacts, SshFacts
from gpunode.facts.gpu import GpuFacts, LinksFacts
from gpunode.facts.host import HostFacts
from gpunode.facts.kernel_log import KernelLogFacts
from gpunode.facts.models import FactSource
from gpunode.facts.modules import ModulesFacts
from gpunode.facts.network import NetworkFacts
from gpunode.facts.packages import KernelsFacts, PackagesFacts, SourcesFacts
from gpunode.facts.pci import PciFacts
from gpunode.facts.rdma import RdmaFacts
from gpunode.facts.running import RunningFacts, UnitsFacts
from gpunode.facts.settings import GpuSettingsFacts, SettingsFacts
from gpunode.facts.slurm import SlurmFacts
from gpunode.facts.system import BmcFacts, SystemFacts
from gpunode.facts.tools import ToolsFacts
from gpunode.facts.updates import UpdatesFacts
from gpunode.facts.workload import WorkloadFacts
from gpunode.probe.bundle import Bundle
from gpunode.text import one_line


class NodeFacts(
    SystemFacts,
    KernelsFacts,
    PciFacts,
    ModulesFacts,
    BootFacts,
    PackagesFacts,
    GpuFacts,
    UnitsFacts,
    GpuSettingsFacts,
    ToolsFacts,
    DisksFacts,
    DriverFacts,
    LinksFacts,
    ContainersFacts,
    LibrariesFacts,
    SourcesFacts,
    UpdatesFacts,
    HostFacts,
    NetworkFacts,
    RdmaFacts,
    ExposureFacts,
    SshFacts,
    BmcFacts,
    SettingsFacts,
    RunningFacts,
    KernelLogFacts,
    SlurmFacts,
    WorkloadFacts,
):
    """All facts of one node. Fields are documented by their types."""

    model_config = ConfigDict(defer_build=False)

    host: str
    collected_at: str
    simulated: bool = False
    gaps: dict[str, str] = Field(default_factory=dict)

    def gap(self, field: str) -> str | None:
        """Return the reason why ``field`` is unknown; None if it is known."""
        return self.gaps.get(field)


FACTS: Mapping[str, FactSource] = {
    name: field.json_schema_extra
    for name, field in NodeFacts.model_fields.items()
    if isinstance(field.json_schema_extra, FactSource)
}
"""How each field of NodeFacts that is a fact of the node is read."""
MAY_BE_NONE = frozenset(name for name, source in FACTS.items() if source.none_means is not None)
"""Fields for which None without a gap has a meaning of its own; any other None is unknown."""
NEEDS_ROOT = frozenset(name for name, source in FACTS.items() if source.needs_root)
"""Fields that the probe can read only as root, or reads incompletely without root."""
NodeFacts.VOLATILE = frozenset(NodeFacts.model_fields) - FACTS.keys() | {
    name for name, source in FACTS.items() if source.volatile
}


def facts_from_bundle(bundle: Bundle) -> NodeFacts:
    """Return every fact of a node. Raises nothing: a fact that cannot be read becomes a gap with its reason."""
    reader = BundleReader(bundle)
    values: dict[str, Any] = {}
    gaps: dict[str, str] = {}
    for name, source in FACTS.items():
        try:
            values[name] = source.read(reader)
        except (UnknownFactError, ParseError) as err:
            gaps[name] = one_line(str(err))
    return NodeFacts(
        host=bundle.host, collected_at=bundle.collected_at, simulated=bundle.simulated, gaps=gaps, **values
    )


IN_WORDS: Mapping[Any, str] = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any"}


def paths(kind: type[BaseModel] = NodeFacts, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of every value in the facts, each with its type in words."""
    for name, field in kind.model_fields.items():
        if kind is NodeFacts and name not in FACTS:
            continue
        path, field_type = f"{before}{name}", plain_type(field.annotation)
        if get_origin(field_type) in (tuple, list):
            path, field_type = f"{path}[]", plain_type(get_args(field_type)[0])
        field_type = get_args(field_type)[0] if get_origin(field_type) is Annotated else field_type
        if isinstance(field_type, type) and issubclass(field_type, BaseModel):
            yield from paths(field_type, f"{path}.")
        elif get_origin(field_type) is Literal:
            yield path, " or ".join(map(str, get_args(field_type)))
        else:
            yield path, IN_WORDS.get(field_type, getattr(field_type, "__name__", "any"))


def plain_type(annotation: Any) -> Any:
    """Return a type without None; Any for a union of several types, and for a mapping."""
    if get_origin(annotation) in (Union, types.UnionType):
        others = [kind for kind in get_args(annotation) if kind is not type(None)]
        return plain_type(others[0]) if len(others) == 1 else Any
    return Any if get_origin(annotation) in (dict, Mapping) or annotation is Mapping else annotation
