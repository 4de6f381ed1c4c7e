"""What a lock refuses to hold, whatever the parsers let through."""

from functools import cache
from typing import Any

import pytest
from stack_samples import stack

from gpunode.errors import UsageError
from gpunode.stack import Stack, lock_document

TEMPLATES = ("{{lookup('pipe', 'touch x')}}", "{% set x = 1 %}", "{# x #}", "6.1.0-99{{1}}")


@cache
def _well() -> Stack:
    return stack(platform="hgx-h100-8", driver="580")


def changed(field: str, value: Any) -> Stack:
    """A stack that is well, but for one field."""
    document = _well().model_dump(by_alias=True)
    *above, last = field.split(".")
    parent: Any = document
    for name in above:
        parent = parent[int(name) if name.isdigit() else name]
    parent[last] = value
    return Stack.model_validate(document)


def test_a_stack_of_ours_is_locked() -> None:
    assert lock_document(_well())["gpunode_stack"]["driver"]["branch"] == 580


@pytest.mark.parametrize("text", TEMPLATES)
@pytest.mark.parametrize(
    "field",
    ["kernel", "os", "driver.version", "driver.constraint", "packages.0.name", "packages.0.version", "pin.pattern",
     "warnings.0.text", "warnings.0.rule", "reasons.source.text", "reasons.source.rule", "frameworks.pytorch"],
)  # fmt: skip
def test_a_template_is_in_no_field(field: str, text: str) -> None:
    document = _well().model_dump(by_alias=True)
    if field.startswith("warnings") and not document["warnings"]:
        lock = changed("warnings", [{"rule": "catalog", "text": text}])
    else:
        lock = changed(field, text)
    with pytest.raises(UsageError, match=r"gpunode_stack: .* which is not allowed in a lock") as refused:
        lock_document(lock)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["a b", "a/b", "$(x)", "a\nb", "a;b", "`x`", "\x1b[2J", "ä", "x" * 300])
@pytest.mark.parametrize("field", ["kernel", "driver.version", "remove"])
def test_a_node_s_word_is_a_plain_word(field: str, text: str) -> None:
    with pytest.raises(UsageError, match="is not allowed in a lock"):
        lock_document(changed(field, (text,) if field == "remove" else text))


@pytest.mark.parametrize("text", TEMPLATES)
def test_a_template_is_no_key(text: str) -> None:
    reasons = _well().reasons
    with pytest.raises(UsageError, match="is not allowed in a lock"):
        lock_document(changed("reasons", {**reasons, text: reasons["source"]}))


@pytest.mark.parametrize("kernel", ["6.8.0-60-generic", "5.14.0-427.el9.x86_64+rt", "6.1.0-rc1~x", None])
def test_real_releases_stay(kernel: str | None) -> None:
    assert lock_document(changed("kernel", kernel))["gpunode_stack"]["kernel"] == kernel
