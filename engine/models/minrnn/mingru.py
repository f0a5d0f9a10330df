"""minGRU: h_t = (1 - z_t) h_{t-1} + z_t g(v_t) with z = sigmoid(k) (arXiv 2410.01201, section 3.1).

The gates depend on the input only, so a prompt can be read in parallel.
"""

from __future__ import annotations

from torch import Tensor

from engine.config import ModelConfig
from engine.models.minrnn.cell import Cell
from engine.ops import mingru_scan, mingru_scan_train, mingru_step


class MinGRU(Cell):
    """The minGRU cell; pre-activations [k | v]: update gate, candidate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.linear_candidate = config.candidate == "linear"

    def recur(self, pre: Tensor, state: Tensor, cu_seqlens: Tensor, slots: Tensor) -> Tensor:
        return mingru_scan(pre, cu_seqlens, state, slots, self.linear_candidate)

    def recur_step(self, pre: Tensor, state: Tensor, slots: Tensor) -> Tensor:
        return mingru_step(pre, state, slots, self.linear_candidate)

    def recur_train(self, pre: Tensor, cu_seqlens: Tensor, h0: Tensor | None) -> Tensor:
        return mingru_scan_train(pre, cu_seqlens, h0, self.linear_candidate)[0]
