"""What all facts have in common."""

from pydantic import BaseModel, ConfigDict


class Fact(BaseModel):
    """Base of all facts: immutable, closed."""

    model_config = ConfigDict(frozen=True, extra="forbid")
