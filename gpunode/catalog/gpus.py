"""Look-up of GPUs by PCI id, by product name and by user input. Names are never matched by substring."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from gpunode.catalog.hardware import Gpu
from gpunode.errors import UsageError
from gpunode.text import did_you_mean, nearest

_OWN = {"id", "name", "families", "aliases", "product_names", "pci", "subsystems", "known_from"}
_OWN |= {"note", "source", "date", "unsure"}
"""Fields that identify a model and do not describe its capabilities."""

_PCI_ID = re.compile(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{4}")


@lru_cache(maxsize=8192)
def normal(text: str) -> str:
    """Return a name for comparison: lower case, blanks for dashes, without the manufacturer."""
    words = re.sub(r"[\s_\-]+", " ", text.strip().lower())
    return words.removeprefix("nvidia ")


@dataclass(frozen=True)
class GpuMatch:
    """The models that a name or id stands for: one, or several that share it."""

    text: str
    gpus: tuple[Gpu, ...]

    @property
    def gpu(self) -> Gpu | None:
        """Return the model if there is exactly one; else None."""
        return self.gpus[0] if len(self.gpus) == 1 else None

    @cached_property
    def common(self) -> Mapping[str, Any]:
        """Return the fields on which all models agree, with their value."""
        first = self.gpus[0]
        return {
            name: getattr(first, name)
            for name in type(first).model_fields
            if name not in _OWN and name not in self.differs
        }

    @cached_property
    def differs(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the fields on which the models differ: field → model's id → value."""
        return {
            name: {gpu.id: getattr(gpu, name) for gpu in self.gpus}
            for name in type(self.gpus[0]).model_fields
            if name not in _OWN and any(getattr(gpu, name) != getattr(self.gpus[0], name) for gpu in self.gpus)
        }


class GpuIndex:
    """An index of GPU models by PCI id and name."""

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self._names: dict[str, list[Gpu]] = {}
        self._products: dict[str, list[Gpu]] = {}
        self._pci: dict[str, list[Gpu]] = {}
        self._shown: dict[str, str] = {}
        for gpu in gpus:
            for text in (gpu.name, gpu.id, *gpu.aliases, *gpu.product_names, *gpu.families):
                held = self._names.setdefault(normal(text), [])
                if gpu not in held:
                    held.append(gpu)
                self._shown.setdefault(normal(text), text)
            for text in gpu.product_names:
                self._products.setdefault(text.lower(), []).append(gpu)
            for pci in gpu.pci:
                self._pci.setdefault(pci, []).append(gpu)

    def by_pci(self, device: str, subsystem: str | None) -> GpuMatch | None:
        """Return the model of a PCI function; several if they share the id and the subsystem does not identify one."""
        device = device.lower().removeprefix("0x")
        device = device if ":" in device else f"10de:{device}"
        held = self._pci.get(device)
        if not held:
            return None
        subsystem = (subsystem or "").lower()
        exact = [gpu for gpu in held if subsystem in gpu.subsystems]
        open_to_all = [gpu for gpu in held if not gpu.subsystems]
        return GpuMatch(device, tuple(exact or open_to_all or held))

    def by_product(self, name: str) -> GpuMatch | None:
        """Return the models that print exactly this name."""
        held = self._products.get(name.strip().lower())
        return GpuMatch(name, tuple(held)) if held else None

    def find(self, text: str) -> GpuMatch:
        """Return the models of a product name, id, name, alias, family or PCI id; raise UsageError with the nearest
        known.

        ``NVIDIA H200`` is a product name and one model, ``H200`` a family.
        """
        match = self.known(text)
        if match is not None:
            return match
        if _PCI_ID.fullmatch(text.strip()):
            raise UsageError(f"no GPU of the catalog has the PCI id {text}; see `gpunode catalog list gpus`")
        raise UsageError(f"unknown GPU {text!r}; {similar(normal(text), self._shown)}")

    def known(self, text: str) -> GpuMatch | None:
        """Return the models as ``find`` does; None if the name is unknown."""
        if _PCI_ID.fullmatch(text.strip()):
            return self.by_pci(text.strip(), None)
        held = self._products.get(text.strip().lower()) or self._names.get(normal(text))
        return GpuMatch(text, tuple(held)) if held else None


def similar(text: str, shown: Mapping[str, str]) -> str:
    """Return a message's hint: the known names similar to an unknown one. ``shown``: normal form → as shown."""
    close = nearest(text, shown, most=4, likeness=0.5)
    first_word = text.split(" ", maxsplit=1)[0]
    close += [key for key in shown if key.split(" ", maxsplit=1)[0] == first_word and key not in close][:2]
    names = list(dict.fromkeys(shown[key] for key in close))[:5]
    return did_you_mean(names) or f"known: {', '.join(sorted(set(shown.values()))[:12])} …"
