"""``nvidia-smi -q`` as text, whole or with ``-d``: drivers 270 to 620."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.models.smi import Failure, SmiGpu, SmiLog
from gpunode.facts.parsers import smi_base, smi_gpu
from gpunode.facts.parsers.smi_base import TreeLabel, label_of
from gpunode.facts.parsers.values import MOST_GPUS, bus_id, found_text, lines_of, version

_BANNER = re.compile(r"\s*=+NVSMI LOG=+\s*")
_HEADING = re.compile(r"(\s*)GPU ([0-9a-fA-F]{1,8}:[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}(?:\.[0-7])?)\s*")
_ELISION = re.compile(r"\s*[\[(<]?(?:\.{2,}|…|snip)[\])>]?\s*", re.I)
_LINE_LIMIT = 4096
_FIRST_WITH_PROCESSES = 290
_FIRST_WITH_DISPLAY_CLOCK_REASON = 400


def parse(text: str) -> SmiLog | Failure:
    """Parse the text into the model of ``smi_xml.parse``; fields that ``-d`` left out are None.

    A fragment without a head or without the GPU's heading is accepted (its fields are None); a list of processes may be
    truncated. If nvidia-smi failed, return its error.

    Raise ParseError for other text, for a truncated GPU block, and for several logs in one.
    """
    lines = lines_of(text)
    root, elided = _tree(lines)
    blocks = root.all("gpu")
    if not blocks:
        answer = smi_base.find_error(text) or _headless(root)
        if answer is None:
            raise ParseError(f"expected the text of nvidia-smi -q, {found_text(text)}")
        return answer
    if sum(1 for line in lines if _BANNER.fullmatch(line[:_LINE_LIMIT])) > 1:
        raise ParseError("expected one log of nvidia-smi -q, found several in one text")
    _refuse_repeated(blocks)
    driver = _major(root)
    for block in blocks:
        if not (elided and _is_whole_listing(block)):
            _refuse_cut(block, driver)
    _refuse_shorter_last(blocks)
    gpus = [smi_gpu.gpu(block, index, block.value) for index, block in enumerate(blocks)]
    return smi_gpu.document(root, gpus, _messages(lines))


def _tree(lines: list[str]) -> tuple[TreeLabel, bool]:
    """Return head and GPUs by indentation, and whether lines were left out by hand (``[...]``)."""
    root = TreeLabel("")
    open_nodes: list[tuple[int, TreeLabel]] = [(-1, root)]
    elided = False
    for raw in lines:
        line = raw[:_LINE_LIMIT].expandtabs(8).rstrip()
        if not line or _BANNER.fullmatch(line) or smi_base.is_error_line(line):
            continue
        if _ELISION.fullmatch(line):
            elided = True
            continue
        heading = _HEADING.fullmatch(line)
        if heading:
            node = TreeLabel("gpu", heading[2])
            if sum(child.label == "gpu" for child in root.children) >= MOST_GPUS:
                raise ParseError(f"expected the text of nvidia-smi -q, found more than {MOST_GPUS} GPUs")
            root.children.append(node)
            open_nodes = [(-1, root), (len(heading[1]), node)]
            continue
        indent = len(line) - len(line.lstrip())
        label, colon, value = line.partition(":")
        node = TreeLabel(label_of(label), value.strip() if colon else None)
        while open_nodes[-1][0] >= indent:
            open_nodes.pop()
        open_nodes[-1][1].children.append(node)
        open_nodes.append((indent, node))
    for block in [root, *root.all("gpu")]:
        _gather_processes(block)
    return root, elided


def _gather_processes(block: TreeLabel) -> None:
    """Give each ``Process ID`` line its own node, as in the XML; a process without its last line was truncated: left
    out."""
    for processes in (node for node in block.children if node.label in {"processes", "compute_processes"}):
        processes.children = [
            TreeLabel("process_info", None, [TreeLabel("pid", entry.value), *entry.children])
            for entry in processes.all("process_id")
            if entry.has("used_gpu_memory")
        ]


def _headless(root: TreeLabel) -> SmiLog | None:
    """Return a fragment without the GPU's heading as one GPU; None if it has no fact of a GPU."""
    gpu = smi_gpu.gpu(root, 0, None)
    if not _knows_something(gpu):
        return None
    _refuse_cut(root, _major(root))
    return smi_gpu.document(root, [gpu], [])


def _knows_something(gpu: SmiGpu) -> bool:
    """Return True if a field beside the index has a value."""
    pending = list(gpu.model_dump(exclude={"index"}).values())
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
        elif value not in (None, ()):
            return True
    return False


def _major(root: TreeLabel) -> int | None:
    text = version(root.get("kmd_version")) or version(root.get("driver_version"))
    return int(text.split(".")[0]) if text else None


def _is_whole_listing(block: TreeLabel) -> bool:
    """Return True for a listing without ``-d``, in which a GPU's block begins with its name."""
    return block.has("product_name")


def _refuse_repeated(blocks: list[TreeLabel]) -> None:
    seen: set[str | None] = set()
    for block in blocks:
        address = bus_id(block.value)
        if address in seen:
            raise ParseError(f"expected every GPU once in nvidia-smi -q, found {address} twice")
        seen.add(address)


def _refuse_cut(block: TreeLabel, driver: int | None) -> None:
    """Raise ParseError for a truncated block: its sums and lists would be wrong instead of absent."""
    where = f"GPU {block.value}" if block.value else "a GPU"
    if not block.children:
        raise ParseError(
            f"expected fields below the heading of {where} in nvidia-smi -q, found nothing: the text is cut"
        )
    if _is_whole_listing(block) and block.value:
        processes = block.has("processes", "compute_processes")
        before_processes = driver is not None and driver < _FIRST_WITH_PROCESSES and block.get("clocks/memory")
        if not processes and not before_processes:
            last = block.children[-1].label
            raise ParseError(f"expected the whole block of {where} in nvidia-smi -q, found it cut after '{last}'")
        return
    for name, whole in (
        ("ecc_errors", _ecc_is_whole(block.child("ecc_errors"))),
        ("retired_pages", _retired_pages_are_whole(block.child("retired_pages"))),
        ("remapped_rows", _remapped_rows_are_whole(block.child("remapped_rows"))),
        ("clocks_event_reasons", _reasons_are_whole(block, driver)),
    ):
        if not whole:
            raise ParseError(f"expected a whole section '{name}' of {where} in nvidia-smi -q, found it cut")
    if block.children[-1].value is None and not block.children[-1].children:
        raise ParseError(f"expected a value for '{block.children[-1].label}' of {where}, found the text cut there")


def _ecc_is_whole(errors: TreeLabel) -> bool:
    volatile = {leaf.label for leaf in errors.child("volatile").leaves()}
    aggregate = {leaf.label for leaf in errors.child("aggregate").leaves() if leaf.value}
    return volatile <= aggregate or not errors.has("volatile")


def _retired_pages_are_whole(pages: TreeLabel) -> bool:
    return not pages.children or any(child.label.startswith("pending") for child in pages.children)


def _remapped_rows_are_whole(rows: TreeLabel) -> bool:
    return not rows.children or rows.has("remapping_failure_occurred")


def _reasons_are_whole(block: TreeLabel, driver: int | None) -> bool:
    reasons = block.child("clocks_event_reasons", "clocks_throttle_reasons")
    if not reasons.children:
        return True
    if driver is not None and driver < _FIRST_WITH_DISPLAY_CLOCK_REASON:
        return reasons.has("hw_slowdown")
    return reasons.has("display_clock_setting")


def _refuse_shorter_last(blocks: list[TreeLabel]) -> None:
    """Raise ParseError if the last GPU has only the first fields of the others: with ``-d`` all GPUs have the same
    fields."""
    if len(blocks) < 2 or any(_is_whole_listing(block) for block in blocks):
        return
    before = [leaf.label for leaf in blocks[-2].leaves()]
    last = [leaf.label for leaf in blocks[-1].leaves()]
    if len(last) < len(before) and before[: len(last)] == last:
        raise ParseError(f"expected the whole block of GPU {blocks[-1].value} in nvidia-smi -q, found it cut")


def _messages(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if smi_base.is_remark(line)]
