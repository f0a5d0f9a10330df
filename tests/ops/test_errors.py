"""Bad arguments are refused: the message names them and what was given, nothing is touched."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.helpers import DEVICES, int32, same_bits
from tests.ops.test_contract import STATE_AT, arguments, call, copied


def _with(name: str, device: str, index: int, value: Any) -> tuple[Any, ...]:
    args = list(copied(arguments(name, device)))
    args[index] = _moved(value, device) if isinstance(value, Tensor) else value
    return tuple(args)


def _moved(value: Tensor, device: str) -> Tensor:
    """Return a tensor on a device with its strides, which `to` would not keep if it has gaps."""
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return moved.copy_(value)


# operator, index of the argument, bad value, what the message must say
BAD_TENSORS = [
    ("linear_scan", 0, torch.ones(2, 5), "a must be"),
    ("linear_scan", 0, torch.ones(2, 70, 5, dtype=torch.int64), "a must be float32"),
    ("linear_scan", 1, torch.ones(2, 70, 4), "b must be"),
    ("linear_scan", 1, torch.ones(2, 70, 5, dtype=torch.float16), "b must be float32"),
    ("linear_scan", 2, torch.ones(3, 5), "h0 must be"),
    ("linear_scan", 2, torch.ones(2, 5, dtype=torch.float16), "h0 must have the dtype"),
    ("linear_scan_backward", 0, torch.ones(2, 70, 4), "grad_h must be"),
    ("linear_scan_backward", 2, torch.ones(2, 69, 5), "h must be"),
    ("mingru_scan", 0, torch.ones(340, 11), "pre must be"),
    ("mingru_scan", 0, torch.ones(340, 10, dtype=torch.float64), "pre must be float32"),
    ("mingru_scan", 1, torch.zeros(6), "cu_seqlens must be int32"),
    ("mingru_scan", 1, torch.zeros(6, dtype=torch.int64), "cu_seqlens must be int32"),
    ("mingru_scan", 1, torch.zeros(0, dtype=torch.int32), "cu_seqlens must be"),
    ("mingru_scan", 2, torch.ones(6, 4), "state must be"),
    ("mingru_scan", 2, torch.ones(6, 5, dtype=torch.bfloat16), "state must be float32"),
    ("mingru_scan", 2, torch.ones(5, 6).T, "last dimension must be contiguous"),
    ("mingru_scan", 3, int32(0, 1), "slots must be"),
    ("mingru_scan", 3, torch.zeros(5, dtype=torch.int64), "slots must be int32"),
    ("minlstm_scan", 0, torch.ones(340, 16), "pre must be"),
    ("minlstm_scan", 2, torch.ones(6, 4), "state must be"),
    ("mingru_step", 0, torch.ones(5, 9), "pre must be"),
    ("mingru_step", 1, torch.ones(6, 5, dtype=torch.float64), "state must be float32"),
    ("mingru_step", 2, int32(0, 1), "slots must be"),
    ("minlstm_step", 0, torch.ones(5, 10), "pre must be"),
    ("mingru_scan_train", 2, torch.ones(5, 4), "h0 must be"),
    ("mingru_scan_train", 2, torch.ones(5, 5, dtype=torch.bfloat16), "h0 must be float32"),
    ("minlstm_scan_train", 0, torch.ones(340, 16), "pre must be"),
    ("mingru_scan_train_backward", 0, torch.ones(340, 4), "grad_h must be"),
    ("mingru_scan_train_backward", 1, torch.ones(4, 5), "grad_h_last must be"),
    ("minlstm_scan_train_backward", 3, torch.ones(3, 5), "h must be"),
    ("conv_scan", 0, torch.ones(12), "x must be"),
    ("conv_scan", 0, torch.ones(12, 5, dtype=torch.float64), "x must be float32"),
    ("conv_scan", 1, torch.ones(4, 4), "weight must be"),
    ("conv_scan", 1, torch.ones(5, 0), "weight must have at least one tap"),
    ("conv_scan", 2, torch.ones(4), "bias must be"),
    ("conv_scan", 4, torch.ones(4, 2, 5), "state must be"),
    ("conv_scan", 4, torch.ones(4, 5, 3).mT, "last dimension must be contiguous"),
    ("conv_step", 3, torch.ones(4, 3, 5, dtype=torch.float16), "state must be float32"),
    ("conv_step", 4, int32(0), "slots must be"),
    ("sru_scan", 0, torch.ones(15), "u must be [tokens, 3 or 4 * channels]"),
    ("sru_scan", 0, torch.ones(12, 10), "3 or 4 * channels] with 5 channels, got"),
    ("sru_scan", 0, torch.ones(12, 15, dtype=torch.float64), "u must be float32, bfloat16"),
    ("sru_scan", 0, torch.ones(12, 20), "x must be None where u has four parts"),
    ("sru_scan", 1, torch.ones(12, 4), "x must be [tokens, channels] or None = [12, 5]"),
    ("sru_scan", 1, torch.ones(12, 5, dtype=torch.float16), "x must be float32"),
    ("sru_scan", 2, torch.ones(5), "weight_c must be [2 * channels] or None = [10]"),
    ("sru_scan", 3, torch.ones(10, dtype=torch.bfloat16), "bias must be float32"),
    ("sru_scan", 4, torch.zeros(4), "cu_seqlens must be int32"),
    ("sru_scan", 5, torch.ones(4), "state must be [num_slots, channels]"),
    ("sru_scan", 5, torch.ones(4, 5, dtype=torch.bfloat16), "state must be float32"),
    ("sru_scan", 6, int32(0), "slots must be"),
    ("sru_step", 0, torch.ones(3, 16), "u must be [batch, 3 or 4 * channels]"),
    ("sru_step", 5, int32(0), "slots must be"),
    ("sru_scan_train", 3, torch.ones(9), "bias must be [2 * channels]"),
    ("sru_scan_train", 5, torch.ones(3, 4), "c0 must be [sequences, channels] = [3, 5]"),
    ("sru_scan_train_backward", 0, torch.ones(12, 4), "grad_h must be [tokens, channels]"),
    ("sru_scan_train_backward", 7, torch.ones(12, 4), "c must be [tokens, channels]"),
    ("selective_scan", 0, torch.ones(12), "x must be [tokens, channels]"),
    ("selective_scan", 0, torch.ones(12, 5, dtype=torch.float64), "x must be float32, bfloat16"),
    ("selective_scan", 1, torch.ones(11, 5), "dt must be [tokens, channels] = [12, 5]"),
    ("selective_scan", 1, torch.ones(12, 5, dtype=torch.float16), "dt must be float32"),
    ("selective_scan", 2, torch.ones(4, 16), "A must be [channels, states] = [5, any]"),
    ("selective_scan", 2, torch.ones(5, 16, dtype=torch.bfloat16), "A must be float32"),
    ("selective_scan", 2, torch.ones(5, 0), "A must have 1 to 4096 states"),
    ("selective_scan", 2, torch.ones(5, 4097), "A must have 1 to 4096 states"),
    ("selective_scan", 3, torch.ones(12, 15), "B must be [tokens, states] = [12, 16]"),
    ("selective_scan", 4, torch.ones(12, 16, dtype=torch.bfloat16), "C must be float32"),
    ("selective_scan", 5, torch.ones(4), "D must be [channels] = [5]"),
    (
        "selective_scan",
        5,
        torch.ones(5, dtype=torch.float16),
        "D must be float32 or have the dtype",
    ),
    ("selective_scan", 6, torch.ones(6), "dt_bias must be [channels] = [5]"),
    ("selective_scan", 7, torch.ones(12, 4), "z must be [tokens, channels] = [12, 5]"),
    ("selective_scan", 8, torch.zeros(4), "cu_seqlens must be int32"),
    ("selective_scan", 9, torch.ones(4, 5, 15), "state must be [num_slots, channels, states]"),
    ("selective_scan", 9, torch.ones(4, 5, 16).half(), "state must be float32 or bfloat16"),
    ("selective_scan", 9, torch.ones(4, 16, 5).mT, "rows [channels, states] must be contiguous"),
    ("selective_scan", 9, torch.ones(4, 5, 17)[..., :16], "rows [channels, states] must be cont"),
    ("selective_scan", 10, int32(0, 1), "slots must be"),
    ("selective_step", 0, torch.ones(3), "x must be [batch, channels]"),
    ("selective_step", 9, torch.zeros(3, dtype=torch.int64), "slots must be int32"),
    ("ssd_scan", 0, torch.ones(12, 20), "x must be [tokens, heads, head_dim]"),
    ("ssd_scan", 0, torch.ones(12, 4, 5).double(), "x must be float32, bfloat16 or float16"),
    ("ssd_scan", 1, torch.ones(11, 4), "dt must be [tokens, heads] = [12, 4]"),
    ("ssd_scan", 1, torch.ones(12, 4).half(), "dt must be float32"),
    ("ssd_scan", 2, torch.ones(5), "A must be [heads] = [4]"),
    ("ssd_scan", 2, torch.ones(4).bfloat16(), "A must be float32"),
    ("ssd_scan", 3, torch.ones(12, 32), "B must be [tokens, groups, states] = [12, any, any]"),
    ("ssd_scan", 3, torch.ones(12, 3, 16), "the groups of B must divide the 4 heads"),
    ("ssd_scan", 3, torch.ones(12, 0, 16), "the groups of B must divide the 4 heads"),
    ("ssd_scan", 3, torch.ones(12, 2, 0), "B must have 1 to 1024 states"),
    ("ssd_scan", 3, torch.ones(12, 2, 1025), "B must have 1 to 1024 states"),
    ("ssd_scan", 3, torch.ones(12, 2, 16).half(), "B must be float32"),
    ("ssd_scan", 4, torch.ones(12, 2, 15), "C must be [tokens, groups, states] = [12, 2, 16]"),
    ("ssd_scan", 4, torch.ones(12, 2, 16).half(), "C must be float32"),
    ("ssd_scan", 5, torch.ones(4, 5), "D must be [heads] = [4]"),
    ("ssd_scan", 5, torch.ones(4).half(), "D must be float32 or have the dtype"),
    ("ssd_scan", 6, torch.ones(5), "dt_bias must be [heads] = [4]"),
    ("ssd_scan", 7, (0.0,), "dt_limit must be the least and the largest time step, got 1 numbers"),
    ("ssd_scan", 8, torch.zeros(4), "cu_seqlens must be int32"),
    ("ssd_scan", 9, torch.ones(4, 4, 5, 15), "state must be [num_slots, heads, head_dim, states]"),
    ("ssd_scan", 9, torch.ones(4, 4, 5, 16).half(), "state must be float32 or bfloat16"),
    ("ssd_scan", 9, torch.ones(4, 4, 16, 5).mT, "rows [heads, head_dim, states] must be cont"),
    ("ssd_scan", 9, torch.ones(4, 4, 6, 16)[:, :, :5], "must be contiguous, got strides [384, 96,"),
    ("ssd_scan", 10, int32(0, 1), "slots must be"),
    ("ssd_step", 0, torch.ones(3, 20), "x must be [batch, heads, head_dim]"),
    ("ssd_step", 9, torch.zeros(3, dtype=torch.int64), "slots must be int32"),
    ("target_logprobs", 0, torch.ones(3), "logits must be [rows, vocab]"),
    ("target_logprobs", 0, torch.ones(3, 70, dtype=torch.float16), "logits must be float32"),
    ("target_logprobs", 0, torch.ones(3, 0), "logits must have a vocabulary of 1 to"),
    ("target_logprobs", 1, torch.ones(2, dtype=torch.int64), "targets must be [rows] = [3]"),
    ("target_logprobs", 1, int32(1, 2, 3), "targets must be int64"),
    ("target_logprobs", 2, -1, "top must be 0 to 20, got -1"),
    ("target_logprobs", 2, 21, "top must be 0 to 20, got 21"),
]
# Values in index tensors, which only the CPU looks at.
BAD_VALUES = [
    ("mingru_scan", 1, int32(1, 5, 5, 135, 200, 331), "cu_seqlens must start at 0, got 1"),
    ("mingru_scan", 1, int32(0, 5, 4, 135, 200, 331), "cu_seqlens must not fall, got 4 after 5"),
    ("mingru_scan", 1, int32(0, 5, 5, 135, 200, 341), "cu_seqlens must end at or below the 340"),
    ("mingru_scan", 3, int32(3, 0, 6, -1, 1), "slots must be below the 6 rows of state"),
    ("minlstm_step", 2, int32(3, 0, 9, -1, 1), "slots must be below the 6 rows of state"),
    ("mingru_scan_train", 1, int32(0, 341), "cu_seqlens must end at or below the 340"),
    ("conv_scan", 5, int32(2, -1, 4), "slots must be below the 4 rows of state"),
    ("conv_step", 4, int32(4, 0, 1), "slots must be below the 4 rows of state"),
    ("selective_scan", 8, int32(0, 2, 1, 10), "cu_seqlens must not fall, got 1 after 2"),
    ("selective_scan", 8, int32(0, 2, 7, 13), "cu_seqlens must end at or below the 12"),
    ("selective_scan", 10, int32(2, -1, 4), "slots must be below the 4 rows of state"),
    ("selective_step", 9, int32(4, 0, 1), "slots must be below the 4 rows of state"),
    ("ssd_scan", 8, int32(0, 2, 1, 10), "cu_seqlens must not fall, got 1 after 2"),
    ("ssd_scan", 8, int32(0, 2, 7, 13), "cu_seqlens must end at or below the 12"),
    ("ssd_scan", 10, int32(2, -1, 4), "slots must be below the 4 rows of state"),
    ("ssd_step", 9, int32(4, 0, 1), "slots must be below the 4 rows of state"),
    ("target_logprobs", 1, torch.tensor([0, 70, 1]), "targets must be tokens of the vocabulary of"),
    ("target_logprobs", 1, torch.tensor([0, 1, -1]), "targets must be tokens of the vocabulary of"),
]


def _refused(name: str, args: tuple[Any, ...], message: str) -> None:
    before = copied(args)
    with pytest.raises(RuntimeError) as raised:
        call(name)(*args)
    assert f"minserve::{name}: " in str(raised.value)
    assert message in str(raised.value)
    index = STATE_AT.get(name)
    if index is not None:
        same_bits(args[index], before[index])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "index", "value", "message"), BAD_TENSORS)
def test_bad_tensors(device: str, name: str, index: int, value: Tensor, message: str) -> None:
    _refused(name, _with(name, device, index, value), message)


@pytest.mark.parametrize(("name", "index", "value", "message"), BAD_VALUES)
def test_bad_index_values(name: str, index: int, value: Tensor, message: str) -> None:
    _refused(name, _with(name, "cpu", index, value), message)


def test_strides_are_kept_on_every_device() -> None:
    gaps = torch.ones(4, 5, 17)[..., :16]
    assert gaps.to("cpu", copy=True).stride() != gaps.stride()
    assert _moved(gaps, "cpu").stride() == gaps.stride()


def test_the_message_says_what_was_given() -> None:
    with pytest.raises(RuntimeError, match=r"\[2, 70, 5\], got float32\[2, 70, 4\] on cpu"):
        call("linear_scan")(torch.ones(2, 70, 5), torch.ones(2, 70, 4))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "index", "argument"),
    [
        ("linear_scan", 1, "b"),
        ("linear_scan", 2, "h0"),
        ("mingru_scan", 1, "cu_seqlens"),
        ("mingru_scan", 2, "state"),
        ("minlstm_scan", 3, "slots"),
        ("mingru_step", 1, "state"),
        ("minlstm_scan_train", 2, "h0"),
        ("conv_scan", 1, "weight"),
        ("conv_step", 3, "state"),
        ("selective_scan", 2, "A"),
        ("selective_step", 8, "state"),
    ],
)
def test_tensors_on_two_devices(name: str, index: int, argument: str) -> None:
    args = list(arguments(name, "cuda"))
    args[index] = args[index].cpu()
    _refused(name, tuple(args), f"{argument} must be on the device of")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["mingru_scan", "minlstm_step", "conv_scan", "conv_step", "selective_scan", "selective_step"],
)
def test_slots_out_of_range_are_skipped_on_cuda(name: str) -> None:
    """They cannot be refused without stalling the GPU; they must not write anywhere."""
    args = list(arguments(name, "cuda"))
    at = next(i for i, x in enumerate(args) if isinstance(x, Tensor) and x.dtype == torch.int32)
    if name.endswith("_scan"):
        at += 2  # that was cu_seqlens; the state stands between it and the slots
    args[at] = torch.full_like(args[at], 1000)
    before = args[STATE_AT[name]].clone()
    result = call(name)(*args)
    torch.cuda.synchronize()
    assert not result.any()
    same_bits(args[STATE_AT[name]], before)


def test_serving_operators_refuse_other_devices() -> None:
    args = _with("mingru_step", "meta", 2, int32(0, 1, 2, 3, 4))
    assert call("mingru_step")(*args).device.type == "meta"  # shapes only, nothing is computed


_LOST = """
import torch
from engine.ops import copy_words_, mingru_step
words, host = torch.zeros(8, dtype=torch.int32, device="cuda"), torch.zeros(8).int().pin_memory()
pre, state = torch.zeros(1, 8, device="cuda"), torch.zeros(1, 4, device="cuda")
copy_words_(host, words), mingru_step(pre, state, words[:1], False)
torch.cuda.synchronize()
try:
    torch.zeros(3, device="cuda")[torch.full((1,), 5, device="cuda")]
    torch.cuda.synchronize()
except RuntimeError:
    pass
for call in (
    lambda: copy_words_(host, words), lambda: mingru_step(pre, state, words[:1], False)
):
    try:
        call()
    except RuntimeError as error:
        print("refused", error)
try:
    torch.cuda.synchronize()
except torch.AcceleratorError as error:
    print("lost", str(error).splitlines()[0])
"""


@pytest.mark.gpu
def test_a_lost_device_says_so_when_it_is_waited_for() -> None:
    """By this the runner knows it, whichever operator has met it first."""
    done = subprocess.run([sys.executable, "-c", _LOST], capture_output=True, text=True)
    said = [line.partition(" ")[0] for line in done.stdout.splitlines()]
    assert said.count("refused") == 2 and said[-1] == "lost", done.stdout + done.stderr
