"""Requirements of fused kernels on model and device, for all execution paths.

Every check returns None if the kernels run, or the reason why not, to complete "not used: ".
"""

from __future__ import annotations

import torch

from engine.config import ModelConfig
from engine.models.minrnn.lm import LM
from engine.ops import library

# Recurrences that kernels support. A kernel tells them apart by their number of gates, so it would
# compute a third one wrongly as one of these.
CELLS = ("mingru", "minlstm")


def lacks_cell(config: ModelConfig) -> str | None:
    """Return why kernels cannot compute the recurrence of such a model; None: they can."""
    if config.cell in CELLS:
        return None
    return f"cell {config.cell!r}, but kernels support only {' and '.join(CELLS)}"


def lacks_bfloat16_kernels(model: LM, device: torch.device) -> str | None:
    """Return why kernels for bfloat16 activations cannot run `model` on `device`, any GPU.

    In float16, products with the residual stream itself, before its norm, could overflow.
    """
    if device.type != "cuda" or not model.norm.weight.is_cuda:
        return "not on a GPU"
    if not library.has_cuda_kernels():
        return "the operators were built without CUDA"
    if model.norm.weight.dtype != torch.bfloat16:
        return f"activations are {model.norm.weight.dtype}, not bfloat16"
    if not model.config.out_projection:
        return "no out projection"
    return lacks_cell(model.config)


def lacks_hopper_kernels(model: LM, device: torch.device) -> str | None:
    """Return why kernels for Hopper cannot run `model` on `device`; weights may be quantised."""
    reason = lacks_bfloat16_kernels(model, device)
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "not a Hopper GPU"
    if "90a" not in library.cuda_archs():
        return "the operators were not built for Hopper (90a)"
    return None
