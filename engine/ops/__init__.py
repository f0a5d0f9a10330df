"""The compiled operators as Python functions; importing this loads the library.

Each operator's module holds its wrapper and a float64 reference in plain torch, and registers the
shape function and, where there is one, the gradient. Those of the differentiable scans differ in
the number of gates alone and are written once, in scan_train.
"""

from engine.ops.conv1d import conv_scan
from engine.ops.conv_step import conv_step
from engine.ops.library import cpu_isa, cuda_archs, has_cuda_kernels
from engine.ops.scan import linear_scan
from engine.ops.logits_processors import adjust_
from engine.ops.logprobs import (
    Logprobs,
    read_reports,
    report_logprobs_,
    target_logprobs,
)
from engine.ops.mingru_scan import mingru_scan
from engine.ops.mingru_scan_train import mingru_scan_train
from engine.ops.mingru_step import mingru_step
from engine.ops.minlstm_scan import minlstm_scan
from engine.ops.minlstm_scan_train import minlstm_scan_train
from engine.ops.minlstm_step import minlstm_step
from engine.ops.pinned_copy import copy_words_
from engine.ops.sampling import draw_

__all__ = [
    "Logprobs",
    "adjust_",
    "conv_scan",
    "conv_step",
    "copy_words_",
    "cpu_isa",
    "cuda_archs",
    "draw_",
    "has_cuda_kernels",
    "linear_scan",
    "mingru_scan",
    "mingru_scan_train",
    "mingru_step",
    "minlstm_scan",
    "minlstm_scan_train",
    "minlstm_step",
    "read_reports",
    "report_logprobs_",
    "target_logprobs",
]
