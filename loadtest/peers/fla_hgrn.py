"""HGRN of the package flash-linear-attention (fla) with the same weights, on a GPU.

It runs eagerly, with the package's own cache and kernels, as its users run it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.models.hgrn.lm import HgrnLM
from loadtest.peers.published import published_state_dict


class FlaModel:
    """The package's `HGRNForCausalLM`. Raises ImportError if the package is not installed."""

    def __init__(self, model: HgrnLM) -> None:
        from fla.models.hgrn import HGRNConfig, HGRNForCausalLM

        config = model.config
        theirs = HGRNConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layers,
            expand_ratio=config.inner // config.d_model,
            intermediate_size=config.mlp_hidden,
            use_short_conv=config.conv_kernel > 0,
            conv_size=config.conv_kernel or 4,
            use_lower_bound=config.lower_bounds,
            norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            fuse_cross_entropy=False,
        )
        with torch.device("meta"):
            made = HGRNForCausalLM(theirs)
        # the form in which gate and up of an MLP are tensors of their own
        apart = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(config.n_layers)]
        weights = published_state_dict(model, apart, "model.embeddings.weight")
        made.load_state_dict(weights, strict=True, assign=True)
        self._model: Any = made.to(model.activations).to(model.device).eval()

    @torch.no_grad()
    def prompt(self, tokens: Tensor) -> Tensor:
        """Read a prompt [tokens]; return the logits of its last token [vocab]."""
        found = self._model(input_ids=tokens[None], use_cache=True, logits_to_keep=1)
        logits: Tensor = found.logits[0, -1]
        return logits

    @torch.no_grad()
    def decoder(self, batch: int, device: torch.device) -> Callable[[], Tensor]:
        """Return a function that decodes one token of `batch` sequences greedily."""
        tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        cache: Any = None

        @torch.no_grad()
        def step() -> Tensor:
            nonlocal tokens, cache
            found = self._model(input_ids=tokens, past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            drawn: Tensor = found.logits[:, -1].argmax(-1, keepdim=True)
            tokens = drawn
            return drawn

        for _ in range(2):  # the first calls, without and with a cache, compile and tune kernels
            step()
        return step
