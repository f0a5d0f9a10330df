"""MambaConfig: the shape of a Mamba language model (arXiv 2312.00752), or of Falcon-Mamba."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from engine.config import (
    MOST_INNER,
    ModelConfig,
    check,
    check_integers,
    check_state_dtype,
    is_number,
)
from engine.state_spec import StateDtypeName, StateSpec, spec_dtype


@dataclass(frozen=True, kw_only=True)
class MambaConfig(ModelConfig):
    """The shape of one model; lm.py shows what each field builds.

    Raises ConfigError for values that no model can have.
    """

    family: ClassVar[str] = "mamba"

    cell: Literal["mamba"] = "mamba"
    inner: int  # channels of the recurrence
    state_size: int  # states of each channel
    dt_rank: int  # width of the time steps before their projection to all channels
    conv_kernel: int = 4  # taps of the causal depthwise convolution
    bias: bool = False  # biases of in and out projection
    conv_bias: bool = True
    # epsilon of RMSNorms, without weights, of dt, B and C (Falcon-Mamba); None: there are none
    selection_norm_eps: float | None = None
    # The residual stream is fp32 with 16-bit weights too; else it has the weights' type.
    residual_in_fp32: bool = True
    state_dtype: StateDtypeName = "float32"  # of `ssm`; operators compute in fp32 in any case

    def __post_init__(self) -> None:
        check(self.cell == "mamba", "cell", self.cell, '"mamba"')
        super().__post_init__()
        check_integers(
            self,
            ("inner", 1, MOST_INNER, False),
            ("state_size", 1, 4096, False),
            ("dt_rank", 1, MOST_INNER, False),
            ("conv_kernel", 2, 256, False),
        )
        check_state_dtype(self.state_dtype, self.n_layers * self.inner * self.state_size)
        eps = self.selection_norm_eps
        check(
            eps is None or (is_number(eps) and 0 < eps < 1),
            "selection_norm_eps",
            eps,
            "null or a number between 0 and 1",
        )

    @property
    def state(self) -> tuple[StateSpec, ...]:
        """`ssm`: states [inner, state_size] per layer; `conv`: last inputs [taps - 1, inner]."""
        return (
            StateSpec(
                "ssm", self.n_layers, (self.inner, self.state_size), spec_dtype(self.state_dtype)
            ),
            StateSpec("conv", self.n_layers, (self.conv_kernel - 1, self.inner)),
        )
