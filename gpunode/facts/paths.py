"""The paths of the values in a node's facts, as checks of a site name them."""

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from gpunode.facts.node import FACTS, NodeFacts

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
