"""LanguageModel: the base class of every family's model in plain torch.

A model is an embedding, layers, a last norm and a head (the embedding's matrix if tied). Families
differ in their layers; some have no last norm, or an embedding of another width. Three methods
compute the same function: `prefill` (packed prompts, state in place), `step` (one token of every
sequence, state in place) and `forward` (differentiable). `prefill`, `step` and `logits` never wait
for the device, so they can be captured in a CUDA graph.

With `config.quantization` the matrices of layers and head are quantised, or the embedding if it is
the head. An untied embedding (of which a token reads one row), norms, biases, convolution taps and
initial states are not. Such a model cannot be trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.config import ModelConfig
from engine.models.program import LayerProgram, ModelProgram
from engine.models.quantize import QUANTIZED_DTYPES
from engine.models.quantized import QuantEmbedding, QuantLinear, linear
from engine.models.state import ModelState, new_state


class RecurrentLayer(nn.Module, ABC):
    """One layer; `scan`, `step` and `forward` compute the same function.

    x is [..., d_model], that of the first layer [..., embedding_width]. `state` has the layer's
    state tensors [rows, *shape] by name, updated in place. `per_channel` is the layer's entry of
    `LanguageModel.channel_parameters`.
    """

    @abstractmethod
    def scan(
        self,
        x: Tensor,
        state: Mapping[str, Tensor],
        cu_seqlens: Tensor,
        slots: Tensor,
        per_channel: Tensor | None,
    ) -> Tensor:
        """Read packed x [tokens, d_model]; return [tokens, d_model]."""

    @abstractmethod
    def step(
        self, x: Tensor, state: Mapping[str, Tensor], slots: Tensor, per_channel: Tensor | None
    ) -> Tensor:
        """Read one token each, x [batch, d_model]; return [batch, d_model]."""

    @abstractmethod
    def forward(self, x: Tensor, per_channel: Tensor | None) -> Tensor:
        """Read x [batch, time, d_model], differentiably, from the initial state."""

    @abstractmethod
    def program(self, per_channel: Tensor | None) -> LayerProgram:
        """Return the layer's stages."""


class LanguageModel(nn.Module, ABC):
    """A recurrent language model; parameter names are those of minserve's own folders.

    Args:
        config: the model's shape.
        layer: makes the layer of an index, from 0.
    """

    has_last_norm: ClassVar[bool] = True

    # names of parameters [layers, channels] that are a vector of each layer instead of a matrix
    vectors_of_layers: ClassVar[frozenset[str]] = frozenset()
    # ends of the names of other parameters that are no matrix of a product, whatever their shape
    no_matrices: ClassVar[tuple[str, ...]] = ()
    # ends of the names of parameters that are held and stored in float32 beside 16-bit weights
    float32_parameters: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ModelConfig, layer: Callable[[int], RecurrentLayer]) -> None:
        super().__init__()
        self.config = config
        self.embedding = _embedding(config)
        self.layers = nn.ModuleList(map(layer, range(config.n_layers)))
        self.norm: nn.RMSNorm | None = None
        if self.has_last_norm:
            self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.head: nn.Linear | QuantLinear | None = None
        self.head_bias: nn.Parameter | None = None
        if not config.tie_embeddings:
            self.head = linear(config, config.d_model, config.vocab_size, bias=False)

    @property
    def recurrent_layers(self) -> Sequence[RecurrentLayer]:
        """The layers, with their type."""
        return cast("Sequence[RecurrentLayer]", self.layers)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embedding.weight.device

    @property
    def activations(self) -> torch.dtype:
        """Type of the activations: that of the weights that are not quantised."""
        if self.norm is not None:
            return self.norm.weight.dtype
        return next(
            weight.dtype
            for name, weight in self.named_parameters()
            if weight.dtype not in QUANTIZED_DTYPES.values()
            and not name.endswith(self.float32_parameters)
        )

    def last_norm(self, x: Tensor) -> Tensor:
        """Norm x [..., d_model] behind the last layer, if the model has such a norm."""
        if self.norm is None:
            return x
        normed: Tensor = self.norm(x)
        return normed

    @torch.no_grad()
    def prefill(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        state: ModelState,
        slots: Tensor,
        per_channel: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Read packed sequences, each continuing from its row of `state`; updates `state`.

        Args:
            tokens: int32 or int64 [tokens]; ids must be in range.
            cu_seqlens: int32 [sequences + 1].
            state: the rows of all sequences.
            slots: int32 [sequences].
            per_channel: the result of `channel_parameters` if the weights have not changed since;
                None: it is computed again.

        Returns:
            Hidden states [tokens, d_model], after the last norm if there is one.
        """
        x = self.embed(tokens)  # [tokens, d_model]
        if per_channel is None:
            per_channel = self.channel_parameters()
        for index, layer in enumerate(self.recurrent_layers):
            x = layer.scan(x, state.layer(index), cu_seqlens, slots, per_channel[index])
        return self.last_norm(x)

    @torch.no_grad()
    def step(
        self,
        tokens: Tensor,
        state: ModelState,
        slots: Tensor,
        per_channel: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Read one token of every sequence; updates `state` in place.

        tokens [batch], slots [batch] int32 -> hidden states [batch, d_model], as those of `prefill`
        (and `per_channel` is as there).
        """
        x = self.embed(tokens)  # [batch, d_model]
        if per_channel is None:
            per_channel = self.channel_parameters()
        for index, layer in enumerate(self.recurrent_layers):
            x = layer.step(x, state.layer(index), slots, per_channel[index])
        return self.last_norm(x)

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up tokens [...]; return [..., embedding_width], of the type `activations`."""
        x: Tensor
        if isinstance(self.embedding, QuantEmbedding):
            x = self.embedding(tokens, self.activations)
        else:
            x = self.embedding(tokens)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits fp32 [n, vocab_size] of hidden [n, d_model].

        They are fp32 with 16-bit weights too (fp64 in a fp64 model, which can only be trained).
        With 16-bit weights the products are summed in fp32 and not rounded to 16 bits, which would
        change a bf16 logit by up to 1 part in 256.
        """
        head = self.embedding if self.head is None else self.head
        weight = head.weight
        if isinstance(head, QuantEmbedding | QuantLinear):
            logits = head.product(hidden)
        elif weight.dtype in (torch.float32, torch.float64):
            logits = functional.linear(hidden, weight).to(weight.dtype)  # autocast may round it
        elif weight.is_cuda and not torch.is_grad_enabled():  # this form of mm has no gradient
            logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        else:
            logits = functional.linear(hidden.float(), weight.float())
        return logits if self.head_bias is None else logits + self.head_bias

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits differentiably, every sequence from the initial state.

        tokens [batch, time] -> logits fp32 [batch, time, vocab_size].
        """
        return self._read(self.embed(tokens))

    def _read(self, x: Tensor) -> Tensor:
        """Return the logits [batch, time, vocab_size] of embedded tokens [batch, time, width]."""
        for layer, per_channel in zip(self.layers, self.channel_parameters(), strict=True):
            x = layer(x, per_channel)
        hidden = self.last_norm(x)
        return self.logits(hidden.flatten(0, 1)).view(*hidden.shape[:-1], -1)

    def channel_parameters(self) -> Sequence[Tensor | None]:
        """Return what each layer's recurrence needs per channel, computed from weights.

        fp32 [channels, ...] for each layer, or None; differentiable. HGRN's lower bounds, which
        follow from a softmax over all layers, and Mamba's A are of this kind. Backends compute it
        once.
        """
        return [None] * len(self.layers)

    def initial_state(self) -> dict[str, Tensor]:
        """Return the state tensors [layers, *shape] that do not begin as zeros, by name."""
        return {}

    def new_state(self, rows: int) -> ModelState:
        """Return the state of `rows` sequences that have read nothing."""
        state = new_state(self.config.state, rows, self.initial_state(), self.device)
        if self.activations == torch.float64:
            state = ModelState({name: tensor.double() for name, tensor in state.named.items()})
        return state

    @torch.no_grad()
    def program(self) -> ModelProgram:
        """Return what the model computes as stages, for backends to compile."""
        return ModelProgram(
            self.embedding,
            tuple(
                layer.program(per_channel)
                for layer, per_channel in zip(
                    self.recurrent_layers, self.channel_parameters(), strict=True
                )
            ),
            self.norm,
            self.embedding if self.head is None else self.head,
            self.head_bias,
        )


def _embedding(config: ModelConfig) -> nn.Embedding | QuantEmbedding:
    """Return an embedding table with torch's initial values, N(0, 1).

    A tied embedding is also the head, where N(0, 1) would start training with logits of standard
    deviation sqrt(d_model). It is therefore initialized from N(0, 1 / d_model), which makes that 1.
    """
    if config.quantization is not None and config.tie_embeddings:
        return QuantEmbedding(config.vocab_size, config.embedding_width, config.quantization)
    weight = torch.empty(config.vocab_size, config.embedding_width)
    # on the meta device, normal_ imports torch's compiler, which takes a second
    if not weight.is_meta:
        nn.init.normal_(weight, std=config.d_model**-0.5 if config.tie_embeddings else 1.0)
    embedding: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)
    return embedding
