"""Answers of GET /v1/models."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ModelCard(BaseModel):
    """A model: OpenAI's fields, its architecture and how it is run."""

    id: str = Field(description="The model's name in requests.")
    object: str
    created: int = Field(description="When it was loaded, in seconds since 1970.")
    owned_by: str
    root: str = Field(description="The checkpoint's own name.")
    cell: str = Field(description="mingru or minlstm.")
    parameters: int = Field(description="Number of weights.")
    vocab_size: int = Field(description="Number of tokens in the vocabulary.")
    eos_token_id: int | None = Field(description="The first of eos_token_ids.")
    eos_token_ids: list[int] = Field(description="Tokens that end a text.")
    dtype: str = Field(description="Data type of the computation.")
    quantization: str | None = Field(description="Quantisation of the weights: int8, fp8 or null.")
    deterministic: bool = Field(description="Whether logits are independent of the batch.")
    device: str = Field(description="Product name of the GPU or processor that computes it.")
    state_bytes: int = Field(description="Size of one sequence's state, whatever its length.")
    fingerprint: str = Field(description="Fingerprint of the weights and the configuration.")


class ModelList(BaseModel):
    """The models that requests may name."""

    object: str
    data: list[ModelCard]
