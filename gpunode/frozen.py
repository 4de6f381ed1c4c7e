"""The base of the project's models, and the reason why a model refuses a document."""

from pydantic import BaseModel, ConfigDict, ValidationError


class Frozen(BaseModel):
    """Immutable model that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FrozenByName(Frozen):
    """The same model, in which a field with an alias can also be set by its own name."""

    model_config = ConfigDict(populate_by_name=True)


def invalid_field(err: ValidationError, whole: str = "") -> tuple[str, str]:
    """Return the first field that a model refuses (``nodes.0.host``; ``whole`` for the whole document), and why."""
    first = err.errors(include_url=False, include_input=False)[0]
    return ".".join(map(str, first["loc"]))[:100] or whole, first["msg"]
