"""SruConfig: the shape of a language model of SRU layers (arXiv 1709.02755)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from engine.config import MOST_WIDTH, ModelConfig, check, check_integers, is_number
from engine.state_spec import StateSpec


@dataclass(frozen=True, kw_only=True)
class SruConfig(ModelConfig):
    """The shape of one model; lm.py shows what each field builds. `d_model` is the hidden width.

    Raises ConfigError for values that no model can have.
    """

    family: ClassVar[str] = "sru"

    cell: Literal["sru"] = "sru"
    norm_eps: float = 1e-5  # of the layer norms
    d_embedding: int  # width of the embedding; d_model if it is tied
    input_to_hidden: bool = False  # a linear map from d_embedding to d_model before the layers
    # inner width of a layer's matrix as a product of two, where both its sides are wider; 0 = none
    projection: int = 0
    weight_c: bool = True  # whether the gates see the state (v); false: they depend on x alone
    skip_term: bool = True  # h = r g(c) + (1 - r) x', not r g(c)
    scale_x: float = 1.0  # x' = scale_x x, in layers whose input is as wide as they are
    tanh: bool = False  # g
    layer_norm: bool = False  # of a layer's input
    normalize_after: bool = False  # of its output instead
    head_bias: bool = False

    def __post_init__(self) -> None:
        check(self.cell == "sru", "cell", self.cell, '"sru"')
        super().__post_init__()
        check_integers(
            self,
            ("d_embedding", 1, MOST_WIDTH, False),
            ("projection", 0, MOST_WIDTH, False),
        )
        check(
            not self.tie_embeddings or self.d_embedding == self.d_model,
            "tie_embeddings",
            self.tie_embeddings,
            "false, unless d_embedding is d_model",
        )
        check(
            is_number(self.scale_x) and abs(self.scale_x) <= 1e6,
            "scale_x",
            self.scale_x,
            "a number from -1e6 to 1e6",
        )
        check(
            self.layer_norm or not self.normalize_after,
            "normalize_after",
            self.normalize_after,
            "false without layer_norm",
        )

    @property
    def embedding_width(self) -> int:
        """Width of the embedding and of the first layer's input."""
        return self.d_embedding

    def inputs(self, index: int) -> int:
        """Width of the input of a layer's recurrence."""
        return self.d_model if index or self.input_to_hidden else self.d_embedding

    def parts(self, index: int) -> int:
        """Vectors of d_model that a layer's matrix gives: u0, u1, u2 and, for the highway, u3."""
        return 4 if self.skip_term and self.inputs(index) != self.d_model else 3

    def projected(self, index: int) -> int:
        """Inner width of a layer's two matrices; 0: it has one."""
        return self.projection if self.projection < min(self.inputs(index), self.d_model) else 0

    @property
    def state(self) -> tuple[StateSpec, ...]:
        """`cell`: c [d_model] per layer."""
        return (StateSpec("cell", self.n_layers, (self.d_model,)),)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as the object of a config.json."""
        values = super().to_dict()
        if not self.layer_norm:
            del values["norm_eps"]
        return values
