"""Language models around torch.nn.GRU and torch.nn.LSTM, as other projects write them.

The logits of these modules, in float64, are what the families of this project are compared with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 61
KINDS = {"gru": nn.GRU, "lstm": nn.LSTM}


class RNNModel(nn.Module):
    """As pytorch/examples' word_language_model: `encoder`, `rnn`, `decoder`; tied or not."""

    def __init__(
        self,
        kind: str,
        *,
        embedding: int = 24,
        hidden: int = 24,
        layers: int = 2,
        bias: bool = True,
        tied: bool = False,
        head_bias: bool = True,
    ) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, embedding)
        self.rnn = KINDS[kind](embedding, hidden, layers, bias=bias)
        self.decoder = nn.Linear(hidden, VOCABULARY, bias=head_bias)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [time] -> logits [time, vocabulary]; dropout is off."""
        output, _ = self.rnn(self.encoder(tokens.long()).unsqueeze(1))
        logits: Tensor = self.decoder(output.squeeze(1))
        return logits


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "another width of embedding": {"embedding": 10},
    "wide embedding, no biases": {"embedding": 40, "bias": False, "head_bias": False},
    "tied": {"tied": True},
    "tied without biases": {"tied": True, "bias": False, "head_bias": False},
    "three layers": {"layers": 3, "hidden": 19},
    "one layer": {"layers": 1},
}


def published(kind: str, seed: int = 0, **options: Any) -> RNNModel:
    """A random module in which every weight matters."""
    torch.manual_seed(seed)
    module = RNNModel(kind, **options).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "rnn" in name:
                parameter.mul_(2)
            elif "bias" in name:
                parameter.normal_(std=0.5)
    return module


def logits(module: nn.Module, tokens: Tensor) -> Tensor:
    """tokens [time] -> [time, vocabulary], float64."""
    with torch.no_grad():
        exact = module.double()(tokens)
        module.float()
    result: Tensor = exact
    return result
