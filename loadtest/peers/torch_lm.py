"""A minserve model in plain PyTorch operators with the same weights, as users write it today.

- Decoding: `Decoder`, eager, captured in a CUDA graph, or under torch.compile with frozen weights.
- Reading a prompt: `read_prompt`, the scan in log space as in the paper (arXiv 2410.01201, appendix
  B), over pieces of the prompt so that memory stays bounded.
- minGRU-pytorch's `minLM` of the same shape, where the package is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM, Layer
from loadtest.lm_models import head_matrix
from loadtest.peers.decoder import Mode, PlainDecoder, compiled

#: Tokens of a prompt that the log-space scan takes at once.
PIECE = 4096


def _g(x: Tensor) -> Tensor:
    return torch.where(x >= 0, x + 0.5, x.sigmoid())


def _log_g(x: Tensor) -> Tensor:
    return torch.where(x >= 0, (x.clamp(min=0) + 0.5).log(), functional.logsigmoid(x))


def _supported(config: MinRnnConfig) -> None:
    if config.candidate != "g" or (config.cell == "minlstm" and not config.normalize_gates):
        raise ValueError("the peer knows the paper's cells only: candidate g, normalised gates")


def _logits(model: LM, hidden: Tensor) -> Tensor:
    logits = functional.linear(hidden, head_matrix(model)).float()
    return logits if model.head_bias is None else logits + model.head_bias


def _cell(gates: Tensor, hidden: Tensor, cell: str) -> Tensor:
    """Return the next state [batch, inner] fp32 from pre-activations [batch, gates * inner]."""
    if cell == "mingru":
        k, v = gates.float().chunk(2, dim=-1)
        return torch.lerp(hidden, _g(v), k.sigmoid())
    f, i, v = gates.float().chunk(3, dim=-1)
    forget = (functional.logsigmoid(f) - functional.logsigmoid(i)).sigmoid()
    return torch.lerp(_g(v), hidden, forget)


def _initial(model: LM) -> Tensor:
    """Return every layer's h_0 [layers, inner]."""
    return model.new_state(1)["cell"][:, 0]


def _layers(model: LM) -> Iterable[Layer]:
    return cast("Iterable[Layer]", model.layers)


class Decoder(PlainDecoder):
    """Decodes minGRU and minLSTM; see PlainDecoder. Raises ValueError for an unknown cell."""

    def __init__(self, model: LM, batch: int, mode: Mode) -> None:
        _supported(model.config)
        config, weight = model.config, model.embedding.weight
        self._model = model
        self._hidden = [
            torch.empty(batch, config.inner, device=weight.device) for _ in range(config.n_layers)
        ]
        taps = max(0, config.conv_kernel - 1)
        self._inputs = [
            torch.empty(taps, batch, config.d_model, device=weight.device, dtype=weight.dtype)
            for _ in range(config.n_layers)
        ]
        super().__init__(batch, mode, weight.device)

    @torch.no_grad()
    def reset(self) -> None:
        """Reset every sequence to its beginning, about to read token 0."""
        self.tokens.zero_()
        for hidden, initial in zip(self._hidden, _initial(self._model), strict=True):
            hidden.copy_(initial.expand_as(hidden))
        for window in self._inputs:
            window.zero_()

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Read tokens [batch]; return logits [batch, vocab] fp32, always eagerly."""
        model, config = self._model, self._model.config
        x = functional.embedding(tokens, model.embedding.weight)
        for layer, hidden, window in zip(_layers(model), self._hidden, self._inputs, strict=True):
            if layer.conv is not None:
                taps = torch.cat((window, x[None]))  # [kernel, batch, d_model]
                mixed = (taps * layer.conv.weight.t()[:, None]).sum(0)
                if layer.conv.bias is not None:
                    mixed = mixed + layer.conv.bias
                window.copy_(taps[1:])
                x = x + layer.conv.pointwise(mixed)
            hidden.copy_(_cell(layer.cell.gates(layer.cell_norm(x)), hidden, config.cell))
            x = x + layer.cell.out(hidden.to(x.dtype))
            if layer.mlp is not None:
                x = x + layer.mlp(x)
        return _logits(model, model.last_norm(x))


def prompt_reader(model: LM, length: int, mode: Mode) -> Callable[[Tensor], Tensor]:
    """Return `read_prompt` of `model` for prompts of `length` tokens.

    Only mode `compile` differs from eager, and only up to PIECE tokens: longer prompts would
    compile the same pieces one by one.
    """

    def read(tokens: Tensor) -> Tensor:
        return read_prompt(model, tokens)

    if mode != "compile" or length > PIECE:
        return read
    return compiled(read, torch.zeros(length, dtype=torch.int64, device=model.device))


@torch.no_grad()
def read_prompt(model: LM, tokens: Tensor) -> Tensor:
    """Read a prompt [tokens] from the initial state; return its last logits [1, vocab]."""
    _supported(model.config)
    config = model.config
    states = list(_initial(model).clamp(min=1e-30).log())
    taps = max(0, config.conv_kernel - 1)
    windows = [
        torch.zeros(taps, config.d_model, device=tokens.device, dtype=model.embedding.weight.dtype)
        for _ in range(config.n_layers)
    ]
    for piece in tokens.split(PIECE):
        x = functional.embedding(piece, model.embedding.weight)  # [tokens, d_model]
        for index, layer in enumerate(_layers(model)):
            if layer.conv is not None:
                padded = torch.cat((windows[index], x))
                windows[index] = padded[len(padded) - taps :]
                mixed = functional.conv1d(
                    padded.t()[None],
                    layer.conv.weight[:, None],
                    layer.conv.bias,
                    groups=config.d_model,
                )
                x = x + layer.conv.pointwise(mixed[0].t())
            pre = layer.cell.gates(layer.cell_norm(x)).float()
            log_h = _log_scan(*_log_coefficients(pre, config.cell), states[index])
            states[index] = log_h[-1]
            x = x + layer.cell.out(log_h.exp().to(x.dtype))
            if layer.mlp is not None:
                x = x + layer.mlp(x)
    return _logits(model, model.last_norm(x[-1:]))


def _log_coefficients(pre: Tensor, cell: str) -> tuple[Tensor, Tensor]:
    """Return log a and log b [tokens, inner] of h_t = a_t h_{t-1} + b_t."""
    if cell == "mingru":
        k, v = pre.chunk(2, dim=-1)
        return -functional.softplus(k), -functional.softplus(-k) + _log_g(v)
    f, i, v = pre.chunk(3, dim=-1)
    difference = functional.softplus(-f) - functional.softplus(-i)
    return -functional.softplus(difference), -functional.softplus(-difference) + _log_g(v)


def _log_scan(log_a: Tensor, log_b: Tensor, log_h: Tensor) -> Tensor:
    """Return log h of every token [tokens, inner], from the log state [inner] before it."""
    total = log_a.cumsum(0)
    return total + torch.logcumsumexp(torch.cat((log_h[None], log_b - total)), 0)[1:]


def min_lm(config: MinRnnConfig, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return minGRU-pytorch's model of the same shape, with random fp32 weights of its own.

    It maps ids [tokens] to the logits of every token. Raises ImportError if the package is not
    installed.
    """
    from minGRU_pytorch.minLM import minLM

    with device:
        model = minLM(
            num_tokens=config.vocab_size,
            dim=config.d_model,
            depth=config.n_layers,
            ff_mult=config.mlp_ratio,
            expansion=config.inner / config.d_model,
            conv_kernel_size=config.conv_kernel or 3,
            enable_conv=config.conv_kernel > 0,
            use_lstm=config.cell == "minlstm",
        ).eval()

    @torch.no_grad()
    def read(tokens: Tensor) -> Tensor:
        logits: Tensor = model(tokens[None])
        return logits

    return read
