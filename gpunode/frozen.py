"""The base of the project's models."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable model that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FrozenByName(Frozen):
    """The same model, in which a field with an alias can also be set by its own name."""

    model_config = ConfigDict(populate_by_name=True)
