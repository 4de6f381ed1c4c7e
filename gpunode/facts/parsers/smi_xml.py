"""``nvidia-smi -q -x``: any DTD version, drivers 375 and later."""

import re
from xml.parsers import expat

from gpunode.facts.errors import ParseError
from gpunode.facts.models.smi import Failure, SmiLog
from gpunode.facts.parsers import smi_base, smi_gpu
from gpunode.facts.parsers.smi_base import TreeLabel, label_of
from gpunode.facts.parsers.values import MOST_GPUS, found_text, lines_of, shorten

_ROOT = "nvidia_smi_log"
_BEGIN = re.compile(r"<\?xml|<!DOCTYPE|<[A-Za-z_]")
_DEPTH = 40
_ELEMENTS = 200_000
"""Eight GPUs with seven MIG instances each and a hundred processes have about twenty thousand."""


def parse(text: str) -> SmiLog | Failure:
    """Parse the node's driver and GPUs from ``nvidia-smi -q -x``.

    Identifiers are in sysfs form; absent blocks are objects of None. Lines such as ``WARNING: infoROM is corrupted``
    around the document are ``messages``. If nvidia-smi failed, return its error.

    Raise ParseError for other text: not well formed (truncated), another root element, no GPU in it.
    """
    begin = _BEGIN.search(text)
    if begin is None:
        error = smi_base.find_error(text)
        if error is None:
            raise ParseError(f"expected the XML of nvidia-smi -q -x, {found_text(text)}")
        return error
    closing = f"</{_ROOT}>"
    last = text.rfind(closing)
    end = last + len(closing) if last >= 0 else len(text)
    outside = [line for part in (text[: begin.start()], text[end:]) for line in lines_of(part) if line.strip()]
    for line in outside:
        if not smi_base.is_remark(line):
            raise ParseError(f"expected one XML document of nvidia-smi -q -x only, also found '{shorten(line)}'")
    root, bus_ids = _tree(text[begin.start() : end])
    gpus = [smi_gpu.gpu(node, index, bus_ids[index]) for index, node in enumerate(root.all("gpu"))]
    if not gpus:
        raise ParseError("expected at least one <gpu> in the XML of nvidia-smi -q -x, found none")
    return smi_gpu.document(root, gpus, [line.strip() for line in outside])


class _Builder:
    """A builder of the tree from expat's events, which keeps each GPU's ``id`` attribute."""

    def __init__(self) -> None:
        self.root = TreeLabel("")
        self.bus_ids: list[str | None] = []
        self._open = [self.root]
        self._text: list[str] = []
        self._elements = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if len(self._open) > _DEPTH:
            raise ParseError(f"expected the XML of nvidia-smi -q -x, found elements nested more than {_DEPTH} deep")
        node = TreeLabel(label_of(tag))
        if len(self._open) == 1 and tag != _ROOT:
            raise ParseError(f"expected the root element <{_ROOT}>, found <{shorten(tag)}>")
        self._elements += 1
        if self._elements > _ELEMENTS or len(self.bus_ids) > MOST_GPUS:
            raise ParseError(
                f"expected the XML of nvidia-smi -q -x, found more than {MOST_GPUS} GPUs or {_ELEMENTS} elements"
            )
        if len(self._open) == 2 and node.label == "gpu":
            self.bus_ids.append(attributes.get("id"))
        self._open[-1].children.append(node)
        self._open.append(node)
        self._text.clear()

    def data(self, text: str) -> None:
        self._text.append(text)

    def end(self, _tag: str) -> None:
        node = self._open.pop()
        text = "".join(self._text).strip()
        if not node.children or text:
            node.value = text
        self._text.clear()


def _tree(text: str) -> tuple[TreeLabel, list[str | None]]:
    """Return the root's node and each GPU's ``id`` attribute."""
    builder = _Builder()
    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.EntityDeclHandler = _refuse_entity
    parser.SkippedEntityHandler = _refuse_entity
    try:
        parser.Parse(text.encode("utf-8", "replace"), True)
    except expat.ExpatError as err:
        raise ParseError(f"expected well-formed XML of nvidia-smi -q -x, found: {err}") from None
    return builder.root.child(_ROOT), builder.bus_ids


def _refuse_entity(name: str, *_rest: object) -> None:
    raise ParseError(f"expected the XML of nvidia-smi -q -x, found the entity '{shorten(name)}'")
