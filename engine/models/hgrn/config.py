"""HgrnConfig: the shape of an HGRN language model (arXiv 2311.04823)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from engine.config import MOST_INNER, ModelConfig, check, check_integers
from engine.state_spec import StateSpec

MOST_MLP_HIDDEN = 2**24


@dataclass(frozen=True, kw_only=True)
class HgrnConfig(ModelConfig):
    """The shape of one model; lm.py shows what each field builds.

    Raises ConfigError for values that no model can have.
    """

    family: ClassVar[str] = "hgrn"

    cell: Literal["hgrn"] = "hgrn"
    inner: int  # channels of the recurrence
    mlp_hidden: int  # hidden width of the MLP
    # taps of the causal depthwise convolutions of input and forget gate; 0 = none
    conv_kernel: int = 0
    lower_bounds: bool = True  # learned least forget gates, which rise from layer to layer

    def __post_init__(self) -> None:
        check(self.cell == "hgrn", "cell", self.cell, '"hgrn"')
        super().__post_init__()
        check_integers(
            self,
            ("inner", 1, MOST_INNER, False),
            ("mlp_hidden", 1, MOST_MLP_HIDDEN, False),
            ("conv_kernel", 0, 256, False),
        )
        check(self.conv_kernel != 1, "conv_kernel", 1, "0 (none) or at least 2")

    @property
    def state(self) -> tuple[StateSpec, ...]:
        """`hidden`: hidden states [inner] per layer.

        With convolutions also `i_conv` and `f_conv`: their last inputs [taps - 1, inner].
        """
        hidden = StateSpec("hidden", self.n_layers, (self.inner,))
        if not self.conv_kernel:
            return (hidden,)
        window = (self.conv_kernel - 1, self.inner)
        return (
            hidden,
            StateSpec("i_conv", self.n_layers, window),
            StateSpec("f_conv", self.n_layers, window),
        )
