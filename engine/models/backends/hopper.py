"""HopperBackend: a model in bfloat16 on a Hopper GPU, by the fastest of its execution paths.

- Fused linear maps (fused_gemm.py) read everything, and are fastest up to some hundred tokens; the
  head may be better as a separate kernel.
- More tokens are read with library products (cublas.py), completely or except for the middle of a
  layer (out projection and MLP up with its activation).
- A step of a few sequences is one kernel (persistent_decode.py), also with 8-bit weights.
- A step of up to about a hundred sequences of a small model is one kernel (cluster_decode.py).
"""

from __future__ import annotations

import torch

from engine.backend_info import BackendInfo, PathInfo
from engine.models.backends import cluster_decode, cublas, fused_gemm, persistent_decode
from engine.models.backends.cublas import CublasPath
from engine.models.backends.dispatch import PathBackend, Row, usable_paths
from engine.models.backends.fused_gemm import FusedGemmPath
from engine.models.backends.lm_head import LmHead, SeparateHead
from engine.models.backends.persistent_decode import PersistentDecode
from engine.models.backends.tuning_cache import TuningCache
from engine.models.backends.weight_transforms import move_norm_weights
from engine.models.language_model import LanguageModel
from engine.ops.gemm import IN_ONE_PART
from engine.ops.persistent_decode import EIGHT

BACKEND = "hopper"
_SUMS = "deterministic is set, but its sums depend on the number of rows"


def supports(model: LanguageModel, device: torch.device) -> str | None:
    """Return why HopperBackend cannot run `model`, whose weights are on `device`; None: it can."""
    return fused_gemm.supports(model, device)


def explain(model: LanguageModel, device: torch.device) -> BackendInfo:
    """Return the info that a HopperBackend of `model` would have, without making it.

    The model may be on the meta device. Whether there is room on the device is not considered.
    """
    reasons = {
        module.NAME: module.supports(model, device)
        for module in (fused_gemm, cublas, persistent_decode, cluster_decode)
    }
    return BackendInfo(
        BACKEND, tuple(PathInfo(name, reason is None, reason) for name, reason in reasons.items())
    )


class HopperBackend(PathBackend):
    """A ModelBackend of `model`, which must pass `supports`.

    It changes the model's weights, as move_norm_weights does.

    Args:
        model: the model.
        deterministic: a row's bits depend only on that row. Nothing is timed, and only paths that
            sum in a fixed order are used. Otherwise many tokens and the logits of prompts are
            library products, whose order of summation depends on the number of rows and on what was
            measured at start.
        few: the same model with 8-bit weights. It computes steps of a few sequences unless the
            model's own kernel is faster for them.
        tuning: earlier measurements; None: everything is measured.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        deterministic: bool = False,
        few: PersistentDecode | None = None,
        tuning: TuningCache | None = None,
    ) -> None:
        device, vocabulary = model.device, model.config.vocab_size
        head = LmHead.of(model)
        move_norm_weights(model)
        chain = FusedGemmPath(model, head, fixed_order=deterministic)
        persistent = Row(
            persistent_decode.NAME,
            persistent_decode.supports(model, device, fixed_order=deterministic),
            lambda: [
                persistent_decode.path(
                    PersistentDecode(model, head, fixed_order=deterministic),
                    vocabulary,
                    few=EIGHT,
                    unmeasured_from=1 if few is None else few.rows + 1,
                )
            ],
        )
        if deterministic:
            # With one part, the bests are bitwise those of the logits.
            bests = vocabulary > IN_ONE_PART
            rows = [
                Row(fused_gemm.NAME, None, lambda: [fused_gemm.path(chain, bests=bests)]),
                Row(cublas.NAME, _SUMS, list),
                persistent,
                Row(cluster_decode.NAME, _SUMS, list),
            ]
            usable = usable_paths(rows)
            super().__init__(
                model,
                usable.paths,
                lambda hidden: chain.logits(hidden, None),
                info=BackendInfo(BACKEND, usable.told),
            )
        else:
            products = CublasPath(model, head, tuning)
            apart = SeparateHead(
                head,
                vocabulary,
                few=lambda hidden: chain.logits(hidden, None),
                many=products.logits,
                tune_many=products.tune_logits,
            )
            # Of equally fast paths the first one is taken.
            rows = [
                Row(
                    fused_gemm.NAME,
                    None,
                    lambda: [fused_gemm.path(chain), fused_gemm.path_to_head(chain, apart)],
                ),
                Row(
                    cublas.NAME,
                    cublas.supports(model, device),
                    lambda: cublas.paths_of_many(model, products, chain.middle, apart),
                ),
                persistent,
                Row(
                    cluster_decode.NAME,
                    cluster_decode.supports(model, device),
                    lambda: cluster_decode.paths(model, apart),
                ),
            ]
            if few is not None:
                in_8_bits = persistent_decode.path(few, vocabulary, few=EIGHT)
                rows.insert(1, Row(persistent_decode.NAME_8_BIT, None, lambda: [in_8_bits]))
            usable = usable_paths(rows)
            super().__init__(
                model,
                usable.paths,
                products.logits,
                tune_logits=products.tune_logits,
                tuning=tuning,
                info=BackendInfo(BACKEND, usable.told),
            )
        # Kernels may prefetch weights before the previous kernel on the stream has ended.
        torch.cuda.synchronize(device)
