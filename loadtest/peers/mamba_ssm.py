"""Mamba and Mamba-2 of the package mamba_ssm with the same weights, on a GPU.

Prompts are read as its users read them; a step runs in a CUDA graph, as its own generation does
with `cg=True`. The package keeps states in the type of the weights. causal-conv1d, if it is
installed, makes it quicker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.models.mamba.config import MambaConfig
from engine.models.mamba.lm import MambaLM
from engine.models.mamba2.config import Mamba2Config
from engine.models.mamba2.lm import Mamba2LM
from loadtest.peers.published import published_state_dict

WARM_UP_STEPS = 2


def _ssm_cfg(config: MambaConfig | Mamba2Config) -> dict[str, Any]:
    """Return the package's config of a layer.

    Raises ValueError for one that it does not compute.
    """
    if config.bias or not config.conv_bias:
        raise ValueError("the package is measured with its usual biases only")
    shared = {
        "d_state": config.state_size,
        "d_conv": config.conv_kernel,
        "expand": config.inner // config.d_model,
    }
    if isinstance(config, Mamba2Config):
        return {
            "layer": "Mamba2",
            "headdim": config.head_dim,
            "ngroups": config.groups,
            "dt_limit": config.dt_limit,
            **shared,
        }
    if config.selection_norm_eps is not None:
        raise ValueError("the package has no norms of what is selected")
    return {"layer": "Mamba1", "dt_rank": config.dt_rank, **shared}


class MambaSsm:
    """The package's `MambaLMHeadModel`. Raises ImportError if the package is not installed."""

    name = "mamba_ssm"
    decodes = True

    def __init__(self, model: MambaLM | Mamba2LM) -> None:
        from mamba_ssm.models.config_mamba import MambaConfig as TheirConfig
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

        config = model.config
        theirs = TheirConfig(
            d_model=config.d_model,
            n_layer=config.n_layers,
            vocab_size=config.vocab_size,
            ssm_cfg=_ssm_cfg(config),
            rms_norm=True,
            residual_in_fp32=config.residual_in_fp32,
            fused_add_norm=True,
            pad_vocab_size_multiple=1,
            tie_embeddings=config.tie_embeddings,
        )
        made = MambaLMHeadModel(theirs, device=model.device, dtype=model.activations)
        embedding = "backbone.embedding.weight"  # in the singular, unlike that of transformers
        made.load_state_dict(published_state_dict(model, [embedding], embedding), strict=True)
        self._model: Any = made.eval()
        self._dtype = model.activations

    @torch.no_grad()
    def prompt(self, tokens: Tensor) -> Tensor:
        """Read a prompt [tokens]; return the logits of its last token [vocab]."""
        found = self._model(tokens[None], num_last_tokens=1)
        logits: Tensor = found.logits[0, -1]
        return logits

    @torch.no_grad()
    def step(self, batch: int, device: torch.device) -> Callable[[], Tensor]:
        """Return a function that decodes one token of `batch` sequences greedily."""
        from mamba_ssm.utils.generation import InferenceParams

        length = 2  # the states do not grow with the text
        params = InferenceParams(max_seqlen=length, max_batch_size=batch)
        params.key_value_memory_dict = self._model.allocate_inference_cache(
            batch, length, dtype=self._dtype
        )
        params.seqlen_offset = 1  # not 0: a step
        tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)

        def read() -> None:
            found = self._model(tokens, inference_params=params, num_last_tokens=1)
            tokens.copy_(found.logits[:, -1].argmax(-1, keepdim=True))

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                read()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            read()

        def step() -> Tensor:
            graph.replay()
            return tokens

        return step
