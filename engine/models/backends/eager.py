"""EagerBackend: a model operator by operator, on any device, with fused kernels where supported."""

from __future__ import annotations

from functools import cache, partial
from typing import cast

import torch
from torch import Tensor

from engine.backend_info import BackendInfo, PathInfo
from engine.models.backends import cublas, persistent_decode
from engine.models.backends.cublas import CublasPath
from engine.models.backends.dispatch import ANY, ExecutionPath, PathBackend, Row, usable_paths
from engine.models.backends.lm_head import LmHead
from engine.models.backends.persistent_decode import PersistentDecode
from engine.models.backends.tuning_cache import TuningCache
from engine.models.language_model import LanguageModel
from engine.models.state import ModelState

NAME = "torch"
BACKEND = "eager"
_INSTEAD = f"{cublas.NAME} is used instead"


class EagerBackend(PathBackend):
    """A ModelBackend of any `model`.

    It is the model itself, or with one kernel between two of its products; steps of a few sequences
    may be one kernel. Only products are timed. May change the model's weights, as move_norm_weights
    does. `tuning` has earlier measurements; None: everything is measured.
    """

    def __init__(self, model: LanguageModel, *, tuning: TuningCache | None = None) -> None:
        device, vocabulary = model.device, model.config.vocab_size
        head = cache(partial(LmHead.of, model))  # it may be a copy, so it is made once for both
        no_products = cublas.supports(model, device)
        products = None if no_products else CublasPath(model, head(), tuning)
        rows = [
            Row(cublas.NAME, no_products, lambda: [cublas.base_path(cast(CublasPath, products))]),
            Row(NAME, None if products is None else _INSTEAD, lambda: [_by_torch(model)]),
            Row(
                persistent_decode.NAME,
                persistent_decode.supports(model, device),
                lambda: [_few(PersistentDecode(model, head()), vocabulary)],
            ),
        ]
        usable = usable_paths(rows)
        super().__init__(
            model,
            usable.paths,
            model.logits if products is None else products.logits,
            tune_logits=None if products is None else products.tune_logits,
            tuning=tuning,
            info=BackendInfo(BACKEND, usable.told),
        )


def explain(model: LanguageModel, device: torch.device) -> BackendInfo:
    """Return the info that an EagerBackend of `model` would have, without making it.

    The model may be on the meta device. Whether there is room on the device is not considered.
    """
    no_products = cublas.supports(model, device)
    no_steps = persistent_decode.supports(model, device)
    return BackendInfo(
        BACKEND,
        (
            PathInfo(cublas.NAME, no_products is None, no_products),
            PathInfo(NAME, no_products is not None, None if no_products else _INSTEAD),
            PathInfo(persistent_decode.NAME, no_steps is None, no_steps),
        ),
    )


def _few(kernel: PersistentDecode, vocabulary: int) -> ExecutionPath:
    return persistent_decode.path(kernel, vocabulary, few=kernel.rows)


def _by_torch(model: LanguageModel) -> ExecutionPath:
    """Return the path that uses the model's own methods, with its weights as they are now."""
    with torch.no_grad():
        per_channel = model.channel_parameters()

    def step(tokens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        return model.logits(model.step(tokens, state, slots, per_channel))

    def prefill(tokens: Tensor, cu_seqlens: Tensor, state: ModelState, slots: Tensor) -> Tensor:
        return model.prefill(tokens, cu_seqlens, state, slots, per_channel)

    return ExecutionPath(
        name=NAME,
        sizes={"step": ANY, "prompt": ANY},
        unmeasured={"step": ANY, "prompt": ANY},
        step=step,
        prefill=prefill,
    )
