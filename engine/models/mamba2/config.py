"""Mamba2Config: the shape of a Mamba-2 language model (arXiv 2405.21060)."""

from __future__ import annotations

import math
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
class Mamba2Config(ModelConfig):
    """The shape of one model; lm.py shows what each field builds.

    Raises ConfigError for values that no model can have.
    """

    family: ClassVar[str] = "mamba2"

    cell: Literal["mamba2"] = "mamba2"
    heads: int
    head_dim: int  # channels of a head
    state_size: int  # states of each channel
    groups: int = 1  # heads // groups heads share B, C and a part of the gated norm
    conv_kernel: int = 4  # taps of the causal depthwise convolution
    bias: bool = False  # biases of in and out projection
    conv_bias: bool = True
    # Time steps are clamped to these after softplus; null: to no largest one.
    least_dt: float = 0.0
    most_dt: float | None = None
    # The residual stream is fp32 with 16-bit weights too; else it has the weights' type.
    residual_in_fp32: bool = True
    state_dtype: StateDtypeName = "float32"  # of `ssm`; operators compute in fp32 in any case

    def __post_init__(self) -> None:
        check(self.cell == "mamba2", "cell", self.cell, '"mamba2"')
        super().__post_init__()
        check_integers(
            self,
            ("heads", 1, MOST_INNER, False),
            ("head_dim", 1, MOST_INNER, False),
            ("state_size", 1, 4096, False),
            ("groups", 1, MOST_INNER, False),
            ("conv_kernel", 2, 256, False),
        )
        check_state_dtype(self.state_dtype, self.n_layers * self.inner * self.state_size)
        most = MOST_INNER // self.heads
        check(self.head_dim <= most, "head_dim", self.head_dim, f"at most {most} of so many heads")
        check(
            self.heads % self.groups == 0, "groups", self.groups, f"divisors of {self.heads} heads"
        )
        least, largest = self.least_dt, self.most_dt
        check(is_number(least) and least >= 0, "least_dt", least, "a number from 0")
        check(
            largest is None or (is_number(largest) and least <= largest),
            "most_dt",
            largest,
            f"null or a number from {least}",
        )

    @property
    def inner(self) -> int:
        """Channels of the recurrence."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: those of x, B and C."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def dt_limit(self) -> tuple[float, float]:
        """The least and the largest time step."""
        return self.least_dt, math.inf if self.most_dt is None else self.most_dt

    @property
    def state(self) -> tuple[StateSpec, ...]:
        """`ssm`: states [heads, head_dim, state_size]; `conv`: last inputs [taps - 1, channels]."""
        return (
            StateSpec(
                "ssm",
                self.n_layers,
                (self.heads, self.head_dim, self.state_size),
                spec_dtype(self.state_dtype),
            ),
            StateSpec("conv", self.n_layers, (self.conv_kernel - 1, self.convolved)),
        )
