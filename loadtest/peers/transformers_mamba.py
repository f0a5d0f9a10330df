"""Mamba of the package transformers with the same weights, as its users run it: eagerly.

Without mamba_ssm's and causal-conv1d's kernels it loops over the time steps of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.models.mamba.lm import MambaLM
from loadtest.peers.published import published_state_dict


class TransformersMamba:
    """The package's `MambaForCausalLM`. Raises ImportError if the package is not installed."""

    name = "transformers"
    decodes = True

    def __init__(self, model: MambaLM) -> None:
        from transformers import MambaConfig, MambaForCausalLM

        config = model.config
        if config.selection_norm_eps is not None:
            raise ValueError("the peer is Mamba, without norms of dt, B and C")
        theirs = MambaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            state_size=config.state_size,
            num_hidden_layers=config.n_layers,
            layer_norm_epsilon=config.norm_eps,
            expand=config.inner // config.d_model,
            conv_kernel=config.conv_kernel,
            use_bias=config.bias,
            use_conv_bias=config.conv_bias,
            residual_in_fp32=config.residual_in_fp32,
            time_step_rank=config.dt_rank,
            tie_word_embeddings=config.tie_embeddings,
        )
        weights = published_state_dict(model, embedding="backbone.embeddings.weight")
        with torch.device("meta"):
            made: Any = MambaForCausalLM(theirs)
        made.load_state_dict(weights, strict=True, assign=True)
        if config.tie_embeddings:
            made.tie_weights()
        self._model = made.eval()

    @torch.no_grad()
    def prompt(self, tokens: Tensor) -> Tensor:
        """Read a prompt [tokens]; return the logits of its last token [vocab]."""
        found = self._model(tokens[None], use_cache=True, logits_to_keep=1)
        logits: Tensor = found.logits[0, -1]
        return logits

    @torch.no_grad()
    def step(self, batch: int, device: torch.device) -> Callable[[], Tensor]:
        """Return a function that decodes one token of `batch` sequences greedily."""
        tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        cache: Any = None

        @torch.no_grad()
        def step() -> Tensor:
            nonlocal tokens, cache
            found = self._model(tokens, cache=cache, use_cache=True)
            cache = found.cache
            drawn: Tensor = found.logits[:, -1].argmax(-1, keepdim=True)
            tokens = drawn
            return drawn

        step()  # without a cache it is another path
        return step
