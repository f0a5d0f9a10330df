"""PlainDecoder: decodes a model that is written in plain PyTorch operators, as users run it today.

Eagerly, captured in a CUDA graph, or under torch.compile with frozen weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Mode = Literal["eager", "graph", "compile"]


class PlainDecoder(ABC):
    """Decodes `batch` sequences from the initial state; the state stays on the device.

    Mode `compile` freezes the weights, so that torch may change their layout. The constructor
    raises whatever capturing and compiling raise.
    """

    def __init__(self, batch: int, mode: Mode, device: torch.device) -> None:
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.reset()
        self._replay = self._made(mode)
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Reset every sequence to its beginning, about to read token 0."""

    @abstractmethod
    def logits(self, tokens: Tensor) -> Tensor:
        """Read tokens [batch]; return logits [batch, vocab] fp32, always eagerly."""

    def step(self) -> None:
        """Read `tokens` [batch], and replace them by the greedy next ones."""
        self._replay()

    def _step(self) -> None:
        self.tokens.copy_(self.logits(self.tokens).argmax(-1))

    def _made(self, mode: Mode) -> Callable[[], object]:
        if mode == "graph":
            return self._captured()
        if mode == "compile":
            return compiled(self._step)
        return self._step

    def _captured(self) -> Callable[[], object]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay


def compiled(step: Callable[..., Result], *example: Tensor) -> Callable[..., Result]:
    """Compile `step` with torch.compile for inputs like `example`, with constant weights."""
    import torch._inductor.config as inductor  # slow to import

    torch._dynamo.reset()
    fast = torch.compile(step, dynamic=False)
    with torch.no_grad(), inductor.patch(freezing=True):
        fast(*example)

    @torch.no_grad()
    def run(*inputs: Tensor) -> Result:
        return fast(*inputs)

    return run
