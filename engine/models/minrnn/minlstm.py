"""minLSTM: h_t = f'_t h_{t-1} + i'_t g(v_t) (arXiv 2410.01201, section 3.2).

With normalised gates f' = sigmoid(f) / (sigmoid(f) + sigmoid(i)) and i' = 1 - f'; without, f' and
i' are the sigmoids themselves.
"""

from __future__ import annotations

from torch import Tensor

from engine.config import ModelConfig
from engine.models.minrnn.cell import Cell
from engine.ops import minlstm_scan, minlstm_scan_train, minlstm_step


class MinLSTM(Cell):
    """The minLSTM cell; pre-activations [f | i | v]: forget gate, input gate, candidate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.linear_candidate = config.candidate == "linear"
        self.normalize_gates = config.normalize_gates

    def recur(self, pre: Tensor, state: Tensor, cu_seqlens: Tensor, slots: Tensor) -> Tensor:
        return minlstm_scan(
            pre, cu_seqlens, state, slots, self.linear_candidate, self.normalize_gates
        )

    def recur_step(self, pre: Tensor, state: Tensor, slots: Tensor) -> Tensor:
        return minlstm_step(pre, state, slots, self.linear_candidate, self.normalize_gates)

    def recur_train(self, pre: Tensor, cu_seqlens: Tensor, h0: Tensor | None) -> Tensor:
        return minlstm_scan_train(pre, cu_seqlens, h0, self.linear_candidate, self.normalize_gates)[
            0
        ]
