"""Answers of GET /v1/models."""

from __future__ import annotations

from pydantic import BaseModel, Field


class StateTensor(BaseModel):
    """One tensor of a sequence's state."""

    name: str
    shape: list[int] = Field(description="Layers first.")
    dtype: str = Field(description="F32 or BF16.")


class PathCard(BaseModel):
    """A way to run the model: an execution path, or a backend that is not used."""

    name: str
    used: bool = Field(description="Whether it can be chosen; which sizes use it is measured.")
    reason: str | None = Field(description="Why it is not used.")


class BackendCard(BaseModel):
    """The implementation that runs the model."""

    name: str = Field(description="cpu, hopper or eager.")
    paths: list[PathCard] = Field(
        description="Backends that come before it and cannot run the model, then its own paths."
    )


class StartCard(BaseModel):
    """A text that the model's folder offers to begin from (its file starts.json)."""

    name: str = Field(description="Unique among the starts.")
    title: str = Field(description="What people are shown.")
    text: str = Field(description="What to read into a state.")


class ModelCard(BaseModel):
    """A model: OpenAI's fields, its architecture and how it is run."""

    id: str = Field(description="The model's name in requests.")
    object: str
    created: int = Field(description="When it was loaded, in seconds since 1970.")
    owned_by: str
    root: str = Field(description="The checkpoint's own name.")
    family: str = Field(description="Family of models, such as minrnn.")
    cell: str = Field(description="The recurrence, such as mingru or minlstm.")
    parameters: int = Field(description="Number of weights.")
    vocab_size: int = Field(description="Number of tokens in the vocabulary.")
    eos_token_id: int | None = Field(description="The first of eos_token_ids.")
    eos_token_ids: list[int] = Field(description="Tokens that end a text.")
    dtype: str = Field(description="Data type of the computation.")
    quantization: str | None = Field(description="Quantisation of the weights: int8, fp8 or null.")
    deterministic: bool = Field(description="Whether logits are independent of the batch.")
    device: str = Field(description="Product name of the GPU or processor that computes it.")
    backend: BackendCard
    state_bytes: int = Field(description="Size of one sequence's state, whatever its length.")
    state: list[StateTensor] = Field(description="The tensors of that state.")
    fingerprint: str = Field(description="Fingerprint of the weights and the configuration.")
    max_states: int = Field(description="Most states that one key may keep; 0: none.")
    starts: list[StartCard] = Field(description="Texts to begin from.")


class ModelList(BaseModel):
    """The models that requests may name."""

    object: str
    data: list[ModelCard]
