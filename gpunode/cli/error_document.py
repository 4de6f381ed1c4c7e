"""The document that a verb with ``--format json`` prints in place of its result: ``gpunode.error/1``."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ErrorDocument(BaseModel):
    """Why there is no result: wrong usage, or an answer that could not be determined."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_name: Literal["gpunode.error/1"] = Field("gpunode.error/1", alias="schema")
    message: str
    """The line on stderr: what is wrong, where, what to do."""
    exit_code: Literal[2, 3]
    """2: wrong usage or configuration; 3: could not be determined."""
