"""MinRnnConfig: the shape of a language model of "Were RNNs All We Needed?" (arXiv 2410.01201)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from engine.config import ModelConfig, check, check_integers, is_number
from engine.state_spec import StateSpec

CellName = Literal["mingru", "minlstm", "hgrn", "sru"]
Candidate = Literal["g", "linear"]


@dataclass(frozen=True, kw_only=True)
class MinRnnConfig(ModelConfig):
    """The shape of one model; lm.py shows what each field builds.

    Raises ConfigError for values that no model can have.
    """

    family: ClassVar[str] = "minrnn"

    cell: CellName
    expansion: float = 2.0  # inner width = int(d_model * expansion)
    # project inner -> d_model; may be False only where the two are equal
    out_projection: bool = True
    # taps of the causal depthwise-separable convolution before the cell; 0 = none
    conv_kernel: int = 0
    mlp_ratio: float = 4.0  # hidden width = int(d_model * mlp_ratio); 0 = no MLP
    cell_bias: bool = False  # bias of the gate and candidate projections
    out_bias: bool = False  # bias of the out projection
    mlp_bias: bool = True
    conv_bias: bool = True
    head_bias: bool = False
    candidate: Candidate = "g"  # minGRU and minLSTM
    normalize_gates: bool = True  # minLSTM: scale the gates so that f' + i' = 1
    lower_bounds: bool = True  # HGRN: learned least forget gates, which rise from layer to layer
    learned_initial_state: bool = False  # h_0 = g(parameter) instead of 0

    def __post_init__(self) -> None:
        cells = get_args(CellName)
        named = ", ".join(f'"{cell}"' for cell in cells[:-1]) + f' or "{cells[-1]}"'
        check(self.cell in cells, "cell", self.cell, named)
        super().__post_init__()
        check_integers(self, ("conv_kernel", 0, 256, False))
        check(self.conv_kernel != 1, "conv_kernel", 1, "0 (none) or at least 2")
        for name, least_number in (("expansion", 1e-3), ("mlp_ratio", 0.0)):
            value = getattr(self, name)
            check(
                is_number(value) and least_number <= value <= 1024,
                name,
                value,
                f"a number from {least_number} to 1024",
            )
        check(self.inner >= 1, "expansion", self.expansion, "d_model * expansion of at least 1")
        check(self.candidate in get_args(Candidate), "candidate", self.candidate, '"g", "linear"')
        check(
            self.cell in ("mingru", "minlstm") or self.candidate == "g",
            "candidate",
            self.candidate,
            f'"g" with the cell "{self.cell}", which has no other candidate',
        )
        check(
            self.out_projection or self.inner == self.d_model,
            "out_projection",
            self.out_projection,
            "true, unless expansion is 1",
        )

    @property
    def inner(self) -> int:
        """Channels of the recurrence."""
        return int(self.d_model * self.expansion)

    @property
    def mlp_hidden(self) -> int:
        """Hidden width of the MLP; 0 = no MLP."""
        return int(self.d_model * self.mlp_ratio)

    @property
    def state(self) -> tuple[StateSpec, ...]:
        """`cell`: hidden states [inner] per layer; `conv`: the last inputs [taps - 1, d_model]."""
        cell = StateSpec("cell", self.n_layers, (self.inner,))
        if not self.conv_kernel:
            return (cell,)
        return cell, StateSpec("conv", self.n_layers, (self.conv_kernel - 1, self.d_model))

    def to_dict(self) -> dict[str, Any]:
        """Return the config as the object of a config.json; "minrnn" is the default family.

        Other cells' folders stay as they were before there was HGRN.
        """
        values = super().to_dict()
        del values["family"]
        if self.cell != "hgrn":
            del values["lower_bounds"]
        return values
