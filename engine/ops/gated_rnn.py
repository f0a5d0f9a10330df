"""The recurrences of GRU and LSTM as torch.nn has them: over packed sequences, and one step.

Per token, from pre-activations W x + b and from U h_{t-1} + c (Cho et al. 2014, arXiv 1406.1078,
with the reset gate after the product; Hochreiter and Schmidhuber 1997 with a forget gate):

    GRU    r = sigma(pre_r + U_r h + c_r)      z = sigma(pre_z + U_z h + c_z)
           n = tanh(pre_n + r (U_n h + c_n))   h' = (1 - z) n + z h
    LSTM   i, f, o = sigma(pre + U h + c)      g = tanh(pre_g + U_g h + c_g)
           c' = f c + i g                      h' = o tanh(c')

Gates lie in torch's order, r | z | n and i | f | g | o, each `units` wide. The state is float32 and
so is everything between products and results. What U multiplies is h rounded to the dtype of pre
(on a CPU float16 weights multiply h as it is).

The operators of the library (csrc/gated_rnn) read a prompt in one call: on a GPU in one kernel over
time. For float64 `composed_*` do the same by torch's operators, step by step; they wait for the
device.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.scan import spans

_MOST_DECODE_ROWS = 8  # kDecodeRows in csrc/gated_rnn/args.h
_MOST_DECODE_WIDTHS = 4096  # of x and h: fits the shared memory of GPUs from 8.0 on


def gru_scan(
    pre: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    hidden: Tensor,
    slots: Tensor,
) -> Tensor:
    """Read packed sequences with a GRU, each from its row of `hidden`, which then has the last h.

    A sequence's result is bitwise the same whatever the rest of the batch, the number of threads,
    and wherever it was split.

    Args:
        pre: W x + b of every token [tokens, 3 units], r | z | n; float32, float64, bfloat16 or
            float16. Rows may lie apart.
        weight: U [3 units, units], pre's dtype.
        bias: c [3 units], pre's dtype or float32; None: zeros.
        cu_seqlens: start of each sequence, int32 [sequences + 1], beginning with 0, non-decreasing.
            Tokens beyond the last entry are padding: their rows of h are zero.
        hidden: float32 (float64 with float64 pre) [num_slots, units], each row contiguous;
            **changed in place**.
        slots: state row of each sequence, int32 [sequences]; negative: a padding sequence, which is
            skipped; its rows of h are zero. No row may occur twice.

    Returns:
        h [tokens, units] in pre's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also bad values in cu_seqlens
            and slots (on CUDA and composed, sequences with a slot out of range are skipped).
    """
    if _is_composed(pre):
        return composed_scan(pre, weight, bias, cu_seqlens, hidden, None, slots)
    h: Tensor = torch.ops.minserve.gru_scan(pre, weight, bias, cu_seqlens, hidden, slots)
    return h


def gru_step(pre: Tensor, recurrent: Tensor, hidden: Tensor, slots: Tensor) -> Tensor:
    """Read one token of every sequence with a GRU: row r updates hidden row slots[r].

    Args:
        pre: W x + b [batch, 3 units], as for `gru_scan`.
        recurrent: U h + c [batch, 3 units], pre's dtype; its rows may lie apart.
        hidden: as for `gru_scan`; **changed in place**.
        slots: int32 [batch]; negative: a padding row, which is skipped; its h is zero. No row may
            occur twice.

    Returns:
        h [batch, units] in pre's dtype.

    Raises:
        RuntimeError: as for `gru_scan`.
    """
    if _is_composed(pre):
        return composed_step(pre, recurrent, hidden, None, slots)
    h: Tensor = torch.ops.minserve.gru_step(pre, recurrent, hidden, slots)
    return h


def lstm_scan(
    pre: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    hidden: Tensor,
    cell: Tensor,
    slots: Tensor,
) -> Tensor:
    """Read packed sequences with an LSTM, each from its rows of `hidden` and `cell`.

    Args:
        pre: W x + b of every token [tokens, 4 units], i | f | g | o, as for `gru_scan`.
        weight: U [4 units, units], pre's dtype.
        bias: c [4 units], pre's dtype or float32; None: zeros.
        cu_seqlens, slots: as for `gru_scan`.
        hidden, cell: h and c, as `hidden` of `gru_scan`; **changed in place**.

    Returns:
        h [tokens, units] in pre's dtype.

    Raises:
        RuntimeError: as for `gru_scan`.
    """
    if _is_composed(pre):
        return composed_scan(pre, weight, bias, cu_seqlens, hidden, cell, slots)
    h: Tensor = torch.ops.minserve.lstm_scan(pre, weight, bias, cu_seqlens, hidden, cell, slots)
    return h


def lstm_step(
    pre: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor, slots: Tensor
) -> Tensor:
    """Read one token of every sequence with an LSTM: row r updates rows slots[r].

    Args:
        pre: W x + b [batch, 4 units], as for `lstm_scan`.
        recurrent: U h + c [batch, 4 units], pre's dtype; its rows may lie apart.
        hidden, cell: as for `lstm_scan`; **changed in place**.
        slots: as for `gru_step`.

    Returns:
        h [batch, units] in pre's dtype.

    Raises:
        RuntimeError: as for `gru_scan`.
    """
    if _is_composed(pre):
        return composed_step(pre, recurrent, hidden, cell, slots)
    h: Tensor = torch.ops.minserve.lstm_step(pre, recurrent, hidden, cell, slots)
    return h


def decodes(x: Tensor, units: int) -> bool:
    """Return whether `gated_decode` takes these rows x [batch, width] and a layer of `units`."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and len(x) <= _MOST_DECODE_ROWS
        and x.shape[1] % 8 == units % 8 == 0
        and x.shape[1] + units <= _MOST_DECODE_WIDTHS
    )


def gated_decode(
    x: Tensor,
    input_weight: Tensor,
    input_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    slots: Tensor,
) -> Tensor:
    """Compute a step with both of its products, W x + b and U h + c, of a few rows.

    CUDA alone, where `decodes` says so. A row's bits depend on that row only. Weights and biases
    are read before the previous kernel on the stream has ended, so no kernel may be writing them.

    Args:
        x: inputs [batch, width], bfloat16 or float16; up to 8 rows.
        input_weight, input_bias: W [gates * units, width] and b [gates * units], x's dtype.
        weight, bias: U [gates * units, units] and c [gates * units], x's dtype. All four
            contiguous; width and units are multiples of 8.
        hidden, cell, slots: as for `lstm_step`, or without `cell` for `gru_step`; hidden and cell
            are **changed in place**.

    Returns:
        h [batch, units] in x's dtype.

    Raises:
        RuntimeError: shapes, dtypes, alignments or devices do not fit; NotImplementedError on the
            CPU.
    """
    h: Tensor = torch.ops.minserve.gated_decode(
        x, input_weight, input_bias, weight, bias, hidden, cell, slots
    )
    return h


def gru_cell(pre: Tensor, recurrent: Tensor, h: Tensor) -> Tensor:
    """Return the next h of a GRU [..., units] by torch's operators, differentiably."""
    pre_r, pre_z, pre_n = pre.chunk(3, dim=-1)
    of_r, of_z, of_n = recurrent.chunk(3, dim=-1)
    z = torch.sigmoid(pre_z + of_z)
    n = torch.tanh(pre_n + torch.sigmoid(pre_r + of_r) * of_n)
    return (1 - z) * n + z * h


def lstm_cell(pre: Tensor, recurrent: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next h and c of an LSTM [..., units] by torch's operators, differentiably."""
    i, f, g, o = (pre + recurrent).chunk(4, dim=-1)
    cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _is_composed(pre: Tensor) -> bool:
    return pre.dtype == torch.float64


def composed_scan(
    pre: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    slots: Tensor,
) -> Tensor:
    """Compute `lstm_scan`, or without `cell` `gru_scan`, by torch's operators."""
    wide = hidden.dtype
    out = pre.new_zeros(pre.shape[0], hidden.shape[1])
    rows = slots.tolist()
    runs = [
        (begin, end, rows[sequence])
        for sequence, begin, end in spans(cu_seqlens)
        if begin < end and 0 <= rows[sequence] < hidden.shape[0]
    ]
    if not runs:
        return out
    runs.sort(key=lambda run: run[0] - run[1])  # the longest first: those that go on lie in front
    starts = torch.tensor([begin for begin, _, _ in runs], device=pre.device)
    at = torch.tensor([row for _, _, row in runs], device=pre.device)
    h, c = hidden[at], None if cell is None else cell[at]
    U, offset = weight.to(wide), None if bias is None else bias.to(wide)
    for t in range(runs[0][1] - runs[0][0]):
        going = sum(end - begin > t for begin, end, _ in runs)
        recurrent = functional.linear(h[:going].to(pre.dtype).to(wide), U, offset)
        x = pre[starts[:going] + t].to(wide)
        if c is None:
            new = gru_cell(x, recurrent, h[:going])
        else:
            new, c[:going] = lstm_cell(x, recurrent, c[:going])
        h[:going] = new
        out[starts[:going] + t] = new.to(pre.dtype)
    hidden[at] = h
    if cell is not None and c is not None:
        cell[at] = c
    return out


def composed_step(
    pre: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor | None, slots: Tensor
) -> Tensor:
    """Compute `lstm_step`, or without `cell` `gru_step`, by torch's operators."""
    wide = hidden.dtype
    out = pre.new_zeros(pre.shape[0], hidden.shape[1])
    live = ((slots >= 0) & (slots < hidden.shape[0])).nonzero().squeeze(1)
    rows = slots[live].long()
    x, of_h = pre[live].to(wide), recurrent[live].to(wide)
    if cell is None:
        h = gru_cell(x, of_h, hidden[rows])
    else:
        h, cell[rows] = lstm_cell(x, of_h, cell[rows])
    hidden[rows] = h
    out[live] = h.to(pre.dtype)
    return out


# References, step by step in float64.


def scan_reference(
    pre: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    slots: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Reference of the scans in float64, without side effects: h, and the new hidden and cell."""
    pre, weight = pre.double(), weight.double()
    hidden, cell = hidden.double().clone(), None if cell is None else cell.double().clone()
    bias = None if bias is None else bias.double()
    out = pre.new_zeros(pre.shape[0], hidden.shape[1])
    for sequence, begin, end in spans(cu_seqlens):
        slot = int(slots[sequence])
        if not 0 <= slot < len(hidden):
            continue
        for t in range(begin, end):
            recurrent = functional.linear(hidden[slot], weight, bias)
            if cell is None:
                hidden[slot] = gru_cell(pre[t], recurrent, hidden[slot])
            else:
                hidden[slot], cell[slot] = lstm_cell(pre[t], recurrent, cell[slot])
            out[t] = hidden[slot]
    return out, hidden, cell


def _fake_scan(pre: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return pre.new_empty(pre.shape[0], weight.shape[1])


def _fake_step(pre: Tensor, recurrent: Tensor, hidden: Tensor, *_: Any) -> Tensor:
    return pre.new_empty(pre.shape[0], hidden.shape[1])


def _fake_decode(x: Tensor, input_weight: Tensor, b: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


torch.library.register_fake("minserve::gated_decode", _fake_decode)
for _cell in ("gru", "lstm"):
    torch.library.register_fake(f"minserve::{_cell}_scan", _fake_scan)
    torch.library.register_fake(f"minserve::{_cell}_step", _fake_step)
