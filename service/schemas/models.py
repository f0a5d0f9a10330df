"""GET /v1/models."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ModelCard(BaseModel):
    """OpenAI's fields, and what there is to know of the model."""

    id: str = Field(description="what requests call it")
    object: str
    created: int = Field(description="when it was loaded, in seconds since 1970")
    owned_by: str
    root: str = Field(description="the checkpoint's own name")
    cell: str
    parameters: int
    vocab_size: int
    eos_token_id: int | None = Field(description="the first of those that end a text")
    eos_token_ids: list[int] = Field(description="each of them ends a text")
    dtype: str
    quantization: str | None
    deterministic: bool
    device: str
    state_bytes: int = Field(description="of one sequence, whatever its length")
    fingerprint: str = Field(description="of the weights and the configuration")


class ModelList(BaseModel):
    object: str
    data: list[ModelCard]
