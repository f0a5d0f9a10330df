"""GruConfig and LstmConfig: the shape of a language model of torch.nn's GRU or LSTM layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from engine.config import MOST_WIDTH, ModelConfig, check, check_integers
from engine.state_spec import StateSpec


@dataclass(frozen=True, kw_only=True)
class GatedRnnConfig(ModelConfig):
    """The shape of one model; lm.py shows what each field builds. `d_model` is the hidden width.

    Raises ConfigError for values that no model can have.
    """

    gates: ClassVar[int]  # pre-activations of a channel

    d_embedding: int  # width of the embedding; d_model if it is tied
    head_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, ("d_embedding", 1, MOST_WIDTH, False))
        check(
            not self.tie_embeddings or self.d_embedding == self.d_model,
            "tie_embeddings",
            self.tie_embeddings,
            "false, unless d_embedding is d_model",
        )

    @property
    def embedding_width(self) -> int:
        """Width of the embedding and of the first layer's input."""
        return self.d_embedding

    def to_dict(self) -> dict[str, Any]:
        """Return the config as the object of a config.json; there are no norms."""
        values = super().to_dict()
        del values["norm_eps"]
        return values


@dataclass(frozen=True, kw_only=True)
class GruConfig(GatedRnnConfig):
    """The shape of a model of GRU layers. Raises ConfigError for values that none can have."""

    family: ClassVar[str] = "gru"
    gates: ClassVar[int] = 3

    cell: Literal["gru"] = "gru"

    def __post_init__(self) -> None:
        check(self.cell == "gru", "cell", self.cell, '"gru"')
        super().__post_init__()

    @property
    def state(self) -> tuple[StateSpec, ...]:
        """`hidden`: h [d_model] per layer."""
        return (StateSpec("hidden", self.n_layers, (self.d_model,)),)


@dataclass(frozen=True, kw_only=True)
class LstmConfig(GatedRnnConfig):
    """The shape of a model of LSTM layers. Raises ConfigError for values that none can have."""

    family: ClassVar[str] = "lstm"
    gates: ClassVar[int] = 4

    cell: Literal["lstm"] = "lstm"

    def __post_init__(self) -> None:
        check(self.cell == "lstm", "cell", self.cell, '"lstm"')
        super().__post_init__()

    @property
    def state(self) -> tuple[StateSpec, ...]:
        """`hidden` and `cell`: h and c [d_model] per layer."""
        return (
            StateSpec("hidden", self.n_layers, (self.d_model,)),
            StateSpec("cell", self.n_layers, (self.d_model,)),
        )
