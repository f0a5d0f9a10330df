"""Requirements of fused kernels on model and device, for all execution paths.

Every check returns None if the kernels run, or the reason why not, to complete "not used: ". What
the kernels of a path compute is the SUPPORT of the path's module.
"""

from __future__ import annotations

import torch

from engine.models.backends.blocks import Support, refusal
from engine.models.language_model import LanguageModel
from engine.ops import library


def lacks_bfloat16_kernels(
    model: LanguageModel, device: torch.device, support: Support
) -> str | None:
    """Return why kernels for bfloat16 activations cannot run `model` on `device`, any GPU.

    A model on the meta device is judged as if it were on `device`.
    """
    if device.type != "cuda" or model.device.type not in ("cuda", "meta"):
        return "not on a GPU"
    if not library.has_cuda_kernels():
        return "the operators were built without CUDA"
    return refuses_model(model, support)


def refuses_model(model: LanguageModel, support: Support) -> str | None:
    """Return why kernels for bfloat16 activations cannot run `model` on any GPU.

    In float16, products with the residual stream itself, before its norm, could overflow.
    """
    if model.activations != torch.bfloat16:
        return f"activations are {model.activations}, not bfloat16"
    return refusal(model, support)


def lacks_hopper_kernels(
    model: LanguageModel, device: torch.device, support: Support
) -> str | None:
    """Return why kernels for Hopper cannot run `model` on `device`; weights may be quantised."""
    reason = lacks_bfloat16_kernels(model, device, support)
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "not a Hopper GPU"
    if "90a" not in library.cuda_archs():
        return "the operators were not built for Hopper (90a)"
    return None
