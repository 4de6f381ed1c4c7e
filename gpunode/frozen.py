"""The base of the project's models."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable, and closed: an unknown field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FrozenByName(Frozen):
    """The same; a field with an alias is set by its own name too."""

    model_config = ConfigDict(populate_by_name=True)
