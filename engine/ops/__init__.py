"""The compiled operators as Python functions; importing this loads the library.

Each module has the wrappers of operators that share a kernel or a recurrence, and float64
references in plain torch. It registers the operators' shape functions and, where there are any,
their gradients.
"""

from engine.ops.conv1d import conv_scan, conv_step
from engine.ops.gated_rnn import gru_scan, gru_step, lstm_scan, lstm_step
from engine.ops.library import cpu_isa, cuda_archs, has_cuda_kernels
from engine.ops.logits_processors import apply_logits_processors_
from engine.ops.logprobs import (
    Logprobs,
    read_reports,
    report_logprobs_,
    target_logprobs,
)
from engine.ops.pinned_copy import copy_words_
from engine.ops.sampling import sample_
from engine.ops.scan import (
    hgrn_scan,
    hgrn_scan_train,
    hgrn_step,
    linear_scan,
    mingru_scan,
    mingru_scan_train,
    mingru_step,
    minlstm_scan,
    minlstm_scan_train,
    minlstm_step,
)
from engine.ops.selective import selective_scan, selective_scan_train, selective_step
from engine.ops.sru import sru_scan, sru_scan_train, sru_step
from engine.ops.ssd import ssd_scan, ssd_scan_train, ssd_step

__all__ = [
    "Logprobs",
    "apply_logits_processors_",
    "conv_scan",
    "conv_step",
    "copy_words_",
    "cpu_isa",
    "cuda_archs",
    "gru_scan",
    "gru_step",
    "has_cuda_kernels",
    "hgrn_scan",
    "hgrn_scan_train",
    "hgrn_step",
    "linear_scan",
    "lstm_scan",
    "lstm_step",
    "mingru_scan",
    "mingru_scan_train",
    "mingru_step",
    "minlstm_scan",
    "minlstm_scan_train",
    "minlstm_step",
    "read_reports",
    "report_logprobs_",
    "sample_",
    "selective_scan",
    "selective_scan_train",
    "selective_step",
    "sru_scan",
    "sru_scan_train",
    "sru_step",
    "ssd_scan",
    "ssd_scan_train",
    "ssd_step",
    "target_logprobs",
]
