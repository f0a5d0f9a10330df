"""The peers of a model by its family: plain PyTorch, and the package that publishes such models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.models.hgrn.lm import HgrnLM
from engine.models.language_model import LanguageModel
from engine.models.mamba.lm import MambaLM
from engine.models.mamba2.lm import Mamba2LM
from engine.models.minrnn.lm import LM
from loadtest.peers import torch_hgrn, torch_lm, torch_mamba
from loadtest.peers.decoder import Mode, PlainDecoder
from loadtest.peers.fla_hgrn import FlaModel
from loadtest.peers.llama_cpp import LlamaCpp
from loadtest.peers.mamba_ssm import MambaSsm
from loadtest.peers.transformers_mamba import TransformersMamba

#: minGRU-pytorch keeps the logits of all tokens, and its scans all layers' logarithms.
MIN_LM_TOKENS = 16_384


def plain_decoder(model: LanguageModel, batch: int, mode: Mode) -> PlainDecoder:
    """Return a decoder in plain PyTorch with the same weights.

    Raises ValueError for models that no peer computes.
    """
    if isinstance(model, HgrnLM):
        return torch_hgrn.Decoder(model, batch, mode)
    if isinstance(model, MambaLM):
        return torch_mamba.Decoder(model, batch, mode)
    if isinstance(model, Mamba2LM):
        raise ValueError("plain PyTorch is no peer of Mamba-2")
    return torch_lm.Decoder(_minrnn(model), batch, mode)


def plain_prompt_reader(
    model: LanguageModel, length: int, mode: Mode
) -> Callable[[Tensor], Tensor]:
    """Return a function that reads prompts of `length` tokens to their last logits [1, vocab].

    Raises ValueError for models that plain PyTorch cannot read in parallel.
    """
    if isinstance(model, HgrnLM):
        raise ValueError("plain PyTorch has no parallel form of HGRN")
    if isinstance(model, MambaLM):
        raise ValueError("plain PyTorch has no parallel form of Mamba that fits in memory")
    if isinstance(model, Mamba2LM):
        raise ValueError("plain PyTorch is no peer of Mamba-2")
    return torch_lm.prompt_reader(_minrnn(model), length, mode)


def _minrnn(model: LanguageModel) -> LM:
    if not isinstance(model, LM):
        raise ValueError(f"no peer for the family {model.config.family!r}")
    return model


class PackagePeer(Protocol):
    """The package that publishes such models; methods raise ImportError if it is not there."""

    name: str
    decodes: bool  # whether it has a step whose cost does not grow with the text

    def prompt(self, tokens: Tensor) -> Tensor:
        """Read a prompt [tokens]; return logits whose last row is that of the last token."""

    def step(self, batch: int, device: torch.device) -> Callable[[], Tensor]:
        """Return a function that decodes one token of `batch` sequences, if it `decodes`."""


class MinGruPytorch:
    """minGRU-pytorch, for prompts, with random fp32 weights of its own."""

    name = "minGRU-pytorch"
    decodes = False

    def __init__(self, model: LM) -> None:
        self._config, self._device = model.config, model.device

    @cached_property
    def _read(self) -> Callable[[Tensor], Tensor]:
        return torch_lm.min_lm(self._config, self._device)

    def prompt(self, tokens: Tensor) -> Tensor:
        """Read a prompt [tokens]; return the logits [vocab] of its last token."""
        if len(tokens) > MIN_LM_TOKENS:
            raise ValueError("needs memory for the logits of every token")
        return self._read(tokens)[0, -1]

    def step(self, batch: int, device: torch.device) -> Callable[[], Tensor]:
        """Raise ValueError."""
        raise ValueError("the package is measured for prompts only")


class Fla:
    """flash-linear-attention, with the same weights."""

    name = "fla"
    decodes = True

    def __init__(self, model: HgrnLM) -> None:
        self._given = model

    @cached_property
    def _model(self) -> FlaModel:
        return FlaModel(self._given)

    def prompt(self, tokens: Tensor) -> Tensor:
        """Read a prompt [tokens]; return the logits [vocab] of its last token."""
        return self._model.prompt(tokens)

    def step(self, batch: int, device: torch.device) -> Callable[[], Tensor]:
        """Return a function that decodes one token of `batch` sequences."""
        return self._model.decoder(batch, device)


class Mamba:
    """mamba_ssm on a GPU, llama.cpp on a CPU, without them transformers, with the same weights.

    Of Mamba-2 mamba_ssm alone.
    """

    decodes = True

    def __init__(self, model: MambaLM | Mamba2LM) -> None:
        self._given: Any = model
        self._kind: type[MambaSsm | LlamaCpp | TransformersMamba] = TransformersMamba
        on_gpu = model.device.type == "cuda"
        if isinstance(model, Mamba2LM) or (on_gpu and importlib.util.find_spec("mamba_ssm")):
            self._kind = MambaSsm
        elif not on_gpu and importlib.util.find_spec("llama_cpp"):
            self._kind = LlamaCpp
        self.name = self._kind.name

    @cached_property
    def _model(self) -> MambaSsm | LlamaCpp | TransformersMamba:
        return self._kind(self._given)

    def prompt(self, tokens: Tensor) -> Tensor:
        """Read a prompt [tokens]; return the logits [vocab] of its last token."""
        return self._model.prompt(tokens)

    def step(self, batch: int, device: torch.device) -> Callable[[], Tensor]:
        """Return a function that decodes one token of `batch` sequences."""
        return self._model.step(batch, device)


def package_peer(model: LanguageModel) -> PackagePeer | None:
    """Return the package that publishes models of this family, if it is a peer."""
    if isinstance(model, Mamba2LM):
        return Mamba(model) if model.device.type == "cuda" else None
    if isinstance(model, MambaLM):
        return Mamba(model)
    if isinstance(model, HgrnLM):
        return Fla(model)
    return MinGruPytorch(model) if isinstance(model, LM) else None
