"""The base of the project's models."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable, and closed: an unknown field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
