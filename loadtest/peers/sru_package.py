"""Layers of the package `sru` and of torch.nn.LSTM (cuDNN's on a GPU), beside ours.

The package compiles its C++ and, with nvcc, its CUDA code when it is imported. On a CPU its
compiled code takes float32 alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

Layer = Callable[[Tensor], object]


@cache
def package() -> Any:
    """Return the package. Raises ImportError, with the reason, if it cannot be had."""
    try:
        import sru
    except ImportError:
        raise
    except Exception as error:  # whatever its compilation raises
        raise ImportError(f"the sru package does not compile: {error}") from error
    return sru


def sru_layer(width: int, dtype: torch.dtype, device: torch.device) -> Layer:
    """Return a layer [time, batch, width] -> (h, c) of the package.

    Raises ImportError if it cannot be had, and whatever a first call raises.
    """
    layer = package().SRU(width, width, 1).eval().to(device, dtype)
    layer(torch.zeros(1, 1, width, dtype=dtype, device=device))
    call: Layer = layer
    return call


def lstm_layer(width: int, dtype: torch.dtype, device: torch.device) -> Layer:
    """Return a layer [time, batch, width] -> (h, states) of torch.nn.LSTM."""
    layer = nn.LSTM(width, width).eval().to(device, dtype)
    layer.flatten_parameters()  # else cuDNN copies the weights at every call
    return layer


PEERS: dict[str, Callable[[int, torch.dtype, torch.device], Layer]] = {
    "sru package": sru_layer,
    "LSTM": lstm_layer,
}
