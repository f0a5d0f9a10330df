"""Language models around the SRU of the `sru` package, as other projects write them.

`Published` has the package's names, shapes and equations (version 2.6.0: sru/modules.py and
`elementwise_recurrence_naive` of sru/ops.py). Its logits, in float64, are what the family of this
project is compared with. Where the package is installed, it is compared with the package itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 61


class Cell(nn.Module):
    """One layer: the package's SRUCell of one direction."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        projection_size: int,
        use_tanh: bool,
        layer_norm: bool,
        has_skip_term: bool,
        rescale: bool,
        v1: bool,
        normalize_after: bool,
    ) -> None:
        super().__init__()
        self.hidden, self.use_tanh, self.skip = hidden, use_tanh, has_skip_term
        self.normalize_after = normalize_after
        self.parts = 4 if has_skip_term and inputs != hidden else 3
        self.weight_proj: nn.Parameter | None = None
        if 0 < projection_size < min(inputs, hidden):
            self.weight_proj = nn.Parameter(torch.randn(inputs, projection_size) / inputs**0.5)
            inputs_of_weight = projection_size
        else:
            inputs_of_weight = inputs
        self.weight = nn.Parameter(
            torch.randn(inputs_of_weight, hidden * self.parts) / inputs_of_weight**0.5
        )
        self.weight_c = nn.Parameter(torch.zeros(2 * hidden) if v1 else torch.randn(2 * hidden) / 2)
        self.bias = nn.Parameter(torch.randn(2 * hidden) / 2)
        self.scale_x: Tensor
        scale = 3.0**0.5 if rescale and has_skip_term else 1.0
        self.register_buffer("scale_x", torch.tensor([scale]))
        self.layer_norm: nn.LayerNorm | None = None
        if layer_norm:
            self.layer_norm = nn.LayerNorm(hidden if normalize_after else inputs)
            nn.init.normal_(self.layer_norm.weight, 1.0, 0.3)
            nn.init.normal_(self.layer_norm.bias, 0.0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        """x [time, inputs] -> h [time, hidden]."""
        y = x
        if self.layer_norm is not None and not self.normalize_after:
            y = self.layer_norm(y)
        if self.weight_proj is not None:
            y = y @ self.weight_proj
        u = (y @ self.weight).view(len(x), self.hidden, self.parts)
        forget_c, reset_c = self.weight_c.chunk(2)
        forget, reset = self.bias.chunk(2)
        c, rows = x.new_zeros(self.hidden), []
        for t in range(len(x)):
            f = torch.sigmoid(u[t, :, 1] + c * forget_c + forget)
            r = torch.sigmoid(u[t, :, 2] + c * reset_c + reset)
            c = u[t, :, 0] + (c - u[t, :, 0]) * f
            g = c.tanh() if self.use_tanh else c
            if not self.skip:
                rows.append(g * r)
                continue
            highway = u[t, :, 3] if self.parts == 4 else x[t] * self.scale_x
            rows.append(highway + (g - highway) * r)
        h = torch.stack(rows)
        if self.layer_norm is not None and self.normalize_after:
            h = self.layer_norm(h)
        return h


class Stack(nn.Module):
    """The package's SRU of one direction."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        layers: int,
        *,
        proj_input_to_hidden_first: bool,
        **options: Any,
    ) -> None:
        super().__init__()
        self.input_to_hidden: nn.Linear | None = None
        if proj_input_to_hidden_first and inputs != hidden:
            self.input_to_hidden = nn.Linear(inputs, hidden, bias=False)
            inputs = hidden
        self.rnn_lst = nn.ModuleList(
            Cell(hidden if index else inputs, hidden, **options) for index in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [time, inputs] -> h [time, hidden]."""
        if self.input_to_hidden is not None:
            x = self.input_to_hidden(x)
        for cell in self.rnn_lst:
            x = cell(x)
        return x


OPTIONS: dict[str, Any] = {
    "projection_size": 0,
    "use_tanh": False,
    "layer_norm": False,
    "has_skip_term": True,
    "rescale": False,
    "v1": False,
    "normalize_after": False,
    "proj_input_to_hidden_first": False,
}


class Published(nn.Module):
    """As the package's language model: `embedding_layer`, `rnn`, `output_layer`; tied or not."""

    def __init__(
        self,
        *,
        embedding: int = 24,
        hidden: int = 24,
        layers: int = 2,
        tied: bool = False,
        head_bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = {**OPTIONS, **options}
        self.shape = embedding, hidden, layers
        self.embedding_layer = nn.Embedding(VOCABULARY, embedding)
        self.rnn = Stack(embedding, hidden, layers, **self.options)
        self.output_layer = nn.Linear(hidden, VOCABULARY, bias=head_bias)
        if tied:
            self.output_layer.weight = self.embedding_layer.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [time] -> logits [time, vocabulary]; dropout is off."""
        logits: Tensor = self.output_layer(self.rnn(self.embedding_layer(tokens.long())))
        return logits


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rescaled": {"rescale": True, "layers": 3, "hidden": 19, "embedding": 19},
    "four parts": {"embedding": 10, "rescale": True},
    "four parts, layer norm, tanh": {"embedding": 40, "layer_norm": True, "use_tanh": True},
    "projection": {"projection_size": 7, "tied": True},
    "projection, input to hidden": {
        "projection_size": 9, "embedding": 10, "proj_input_to_hidden_first": True,
    },
    "projection of some layers": {"projection_size": 12, "embedding": 10, "head_bias": False},
    "layer norm, v = 0": {"layer_norm": True, "v1": True, "rescale": True},
    "layer norm behind": {"layer_norm": True, "normalize_after": True, "tied": True},
    "no skip term": {"has_skip_term": False, "use_tanh": True},
    "no skip term, another width": {"has_skip_term": False, "embedding": 10, "v1": True},
    "one layer, tanh": {"layers": 1, "use_tanh": True},
}  # fmt: skip


def published(seed: int = 0, **options: Any) -> Published:
    """A random module in which every weight matters."""
    torch.manual_seed(seed)
    return Published(**options).eval()


def conversion_options(options: dict[str, Any]) -> dict[str, Any]:
    """What must be said of a module's state dict, besides its tensors."""
    given = {
        "tanh": options.get("use_tanh"),
        "skip_term": options.get("has_skip_term"),
        "normalize_after": options.get("normalize_after"),
    }
    return {name: value for name, value in given.items() if value is not None}


def logits(module: nn.Module, tokens: Tensor) -> Tensor:
    """tokens [time] -> [time, vocabulary], float64."""
    with torch.no_grad():
        exact = module.double()(tokens)
        module.float()
    result: Tensor = exact
    return result
