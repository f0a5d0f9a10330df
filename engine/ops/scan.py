"""The recurrence h_t = a_t h_{t-1} + b_t, for given coefficients and for the cells.

    linear_scan      given a and b, differentiable
    CELL_scan        prefill: packed sequences, in place on state rows
    CELL_step        decode: one token of each row, in place on state rows
    CELL_scan_train  training: packed sequences, differentiable

Of the cells (`CELLS`), mingru and minlstm are those of "Were RNNs All We Needed?" (arXiv
2410.01201), minGRU of section 3.1 and minLSTM of section 3.2:

    minGRU:   z = sigma(k),  h_t = (1 - z) h_{t-1} + z g(v),  with 1 - z computed as sigma(-k)
    minLSTM:  f' = sigma(log sigma(f) - log sigma(i)),  i' = 1 - f',  h_t = f' h_{t-1} + i' g(v)
              (without normalisation f' = sigma(f), i' = sigma(i))

with g(x) = x + 0.5 for x >= 0 and sigma(x) otherwise (or g(x) = x: the paper's vanilla form).
hgrn is that of HGRN (Qin et al. 2023, arXiv 2311.04823), with a lower bound l of each channel:

    HGRN:     f' = l + (1 - l) sigma(f),  h_t = f' h_{t-1} + (1 - f') silu(i),
              with 1 - f' computed as (1 - l) sigma(-f)

Everything is computed in linear space with float32 accumulation (float64 for float64). The
log-space form of Heinsen (arXiv 2311.06281), used by that paper, is only a reference here, because
it loses accuracy with length. On the CPU, subnormal numbers are treated as zeros.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops.library import preactivations_of


def linear_scan(a: Tensor, b: Tensor, h0: Tensor | None = None, reverse: bool = False) -> Tensor:
    """Compute the scan h_t = a_t * h_{t-1} + b_t along time.

    Two layouts are computed without copies: channels contiguous, and time contiguous (strides
    (channels * time, 1, time), the transpose of a contiguous [batch, channels, time]). The layout
    of `a` decides; results and gradients have its strides.

    Args:
        a: coefficients [batch, time, channels]; float32, float64, bfloat16 or float16. Either
            channels or time may be contiguous; other strides are copied to the former.
        b: inputs, same shape, dtype and device as a; copied if its layout differs from a's.
        h0: state before the first step [batch, channels], dtype of a or float32 (float64 with
            float64); None is zero.
        reverse: run from the last step to the first: h_t = a_t * h_{t+1} + b_t.

    Returns:
        h [batch, time, channels] in a's dtype, time contiguous if that of a is, else channels.
        Differentiable in a, b and h0.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; the message names the argument.
    """
    h: Tensor = torch.ops.minserve.linear_scan(a, b, h0, reverse)
    return h


def mingru_scan(
    pre: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
) -> Tensor:
    """Run minGRU over packed sequences, each from its state row, which then has the last h.

    A sequence's result is bitwise the same whatever the rest of the batch, the number of threads,
    and where it was split at multiples of SCAN_CHUNK tokens.

    Args:
        pre: gate pre-activations [tokens, 2 * channels] = [k | v]; float32, bfloat16 or float16.
        cu_seqlens: start of each sequence, int32 [sequences + 1], beginning with 0, non-decreasing.
            Tokens beyond the last entry are padding: their rows of h are zero.
        state: float32 [num_slots, channels], channels contiguous; **changed in place**.
        slots: state row of each sequence, int32 [sequences]; negative: a padding sequence, which is
            skipped; its rows of h are zero. No row may occur twice.
        linear_candidate: g(x) = x.

    Returns:
        h [tokens, channels] in pre's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also bad values in cu_seqlens
            and slots (on CUDA, sequences with a slot out of range are skipped, because checking
            would stall the GPU).
    """
    h: Tensor = torch.ops.minserve.mingru_scan(pre, cu_seqlens, state, slots, linear_candidate)
    return h


def minlstm_scan(
    pre: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> Tensor:
    """Run minLSTM over packed sequences, each from its state row, which then has the last h.

    Reproducibility is as for `mingru_scan`.

    Args:
        pre: gate pre-activations [tokens, 3 * channels] = [f | i | v]; float32, bfloat16 or
            float16.
        cu_seqlens, state, slots, linear_candidate: as for `mingru_scan`; state is **changed in
            place**.
        normalize_gates: scale the gates to f' + i' = 1.

    Returns:
        h [tokens, channels] in pre's dtype.

    Raises:
        RuntimeError: as for `mingru_scan`.
    """
    h: Tensor = torch.ops.minserve.minlstm_scan(
        pre, cu_seqlens, state, slots, linear_candidate, normalize_gates
    )
    return h


def mingru_step(
    pre: Tensor, state: Tensor, slots: Tensor, linear_candidate: bool = False
) -> Tensor:
    """Run one minGRU step: row r of pre updates state row slots[r].

    Bitwise equal to a scan of length 1.

    Args:
        pre: gate pre-activations [batch, 2 * channels] = [k | v]; float32, bfloat16 or float16.
        state: float32 [num_slots, channels], channels contiguous; **changed in place**.
        slots: int32 [batch]; negative: a padding row, which is skipped; its h is zero. No row may
            occur twice.
        linear_candidate: g(x) = x.

    Returns:
        h [batch, channels] in pre's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also slots out of range (on
            CUDA those rows are skipped).
    """
    h: Tensor = torch.ops.minserve.mingru_step(pre, state, slots, linear_candidate)
    return h


def minlstm_step(
    pre: Tensor,
    state: Tensor,
    slots: Tensor,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> Tensor:
    """Run one minLSTM step: row r of pre updates state row slots[r].

    Bitwise equal to a scan of length 1.

    Args:
        pre: gate pre-activations [batch, 3 * channels] = [f | i | v]; float32, bfloat16 or float16.
        state, slots, linear_candidate: as for `mingru_step`; state is **changed in place**.
        normalize_gates: scale the gates to f' + i' = 1.

    Returns:
        h [batch, channels] in pre's dtype.

    Raises:
        RuntimeError: as for `mingru_step`.
    """
    h: Tensor = torch.ops.minserve.minlstm_step(
        pre, state, slots, linear_candidate, normalize_gates
    )
    return h


def mingru_scan_train(
    pre: Tensor, cu_seqlens: Tensor, h0: Tensor | None = None, linear_candidate: bool = False
) -> tuple[Tensor, Tensor]:
    """Run minGRU over packed sequences from given initial states, differentiably.

    The backward pass recomputes the gates from pre instead of storing them, and takes h_{t-1} from
    the saved output. With bfloat16 or float16 that is the rounded h, which saves a pass over memory
    and costs one rounding.

    Args:
        pre: gate pre-activations [tokens, 2 * channels] = [k | v]; float32, float64, bfloat16 or
            float16.
        cu_seqlens: start of each sequence, int32 [sequences + 1], beginning with 0, non-decreasing;
            rows of h beyond its last entry are zero.
        h0: initial states [sequences, channels], float32 (float64 with float64 pre); None is zero.
        linear_candidate: g(x) = x.

    Returns:
        h [tokens, channels] in pre's dtype and h_last [sequences, channels] in h0's dtype.
        Differentiable in pre and h0.

    Raises:
        RuntimeError: shapes, dtypes, devices or (on the CPU) cu_seqlens do not fit.
    """
    h, h_last = torch.ops.minserve.mingru_scan_train(pre, cu_seqlens, h0, linear_candidate)
    return h, h_last


def minlstm_scan_train(
    pre: Tensor,
    cu_seqlens: Tensor,
    h0: Tensor | None = None,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
) -> tuple[Tensor, Tensor]:
    """Run minLSTM over packed sequences from given initial states, differentiably.

    The backward pass is like that of `mingru_scan_train`.

    Args:
        pre: gate pre-activations [tokens, 3 * channels] = [f | i | v]; float32, float64, bfloat16
            or float16.
        cu_seqlens, h0, linear_candidate: as for `mingru_scan_train`.
        normalize_gates: scale the gates to f' + i' = 1.

    Returns:
        h [tokens, channels] in pre's dtype and h_last [sequences, channels] in h0's dtype.
        Differentiable in pre and h0.

    Raises:
        RuntimeError: as for `mingru_scan_train`.
    """
    h, h_last = torch.ops.minserve.minlstm_scan_train(
        pre, cu_seqlens, h0, linear_candidate, normalize_gates
    )
    return h, h_last


def hgrn_scan(
    pre: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    lower_bound: Tensor | None = None,
) -> Tensor:
    """Run HGRN over packed sequences, each from its state row, which then has the last h.

    Reproducibility is as for `mingru_scan`.

    Args:
        pre: pre-activations [tokens, 3 * channels] = [i | f | g]; float32, bfloat16 or float16.
            The output gate g is not read: h is the state, not gated.
        cu_seqlens, state, slots: as for `mingru_scan`; state is **changed in place**.
        lower_bound: of the forget gate, in [0, 1), float32 [channels]; None is zero.

    Returns:
        h [tokens, channels] in pre's dtype.

    Raises:
        RuntimeError: as for `mingru_scan`.
    """
    h: Tensor = torch.ops.minserve.hgrn_scan(pre, cu_seqlens, state, slots, lower_bound)
    return h


def hgrn_step(
    pre: Tensor, state: Tensor, slots: Tensor, lower_bound: Tensor | None = None
) -> Tensor:
    """Run one HGRN step: row r of pre updates state row slots[r].

    Bitwise equal to a scan of length 1.

    Args:
        pre, lower_bound: as for `hgrn_scan`, with one row for each sequence.
        state, slots: as for `mingru_step`; state is **changed in place**.

    Returns:
        h [batch, channels] in pre's dtype.

    Raises:
        RuntimeError: as for `mingru_step`.
    """
    h: Tensor = torch.ops.minserve.hgrn_step(pre, state, slots, lower_bound)
    return h


def hgrn_scan_train(
    pre: Tensor,
    cu_seqlens: Tensor,
    h0: Tensor | None = None,
    lower_bound: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run HGRN over packed sequences from given initial states, differentiably.

    Composed of torch's operators and one `linear_scan` over all tokens; coefficients are float32
    (float64 with float64 pre). Equal to `hgrn_scan` to rounding.

    Args:
        pre: pre-activations [tokens, 3 * channels] = [i | f | g]; float32, float64, bfloat16 or
            float16. The gradient of the output gate g is zero.
        cu_seqlens, h0: as for `mingru_scan_train`; the values of cu_seqlens are not checked.
        lower_bound: of the forget gate, in [0, 1), [channels]; None is zero.

    Returns:
        h [tokens, channels] in pre's dtype and h_last [sequences, channels] in float32 (float64
        with float64 pre). Differentiable in pre, h0 and lower_bound.

    Raises:
        RuntimeError: shapes or dtypes do not fit.
    """
    dtype, tokens = _accumulation_dtype(pre.dtype), pre.shape[0]
    _check_train("hgrn_scan_train", pre, cu_seqlens, h0, lower_bound)
    channels, sequences = pre.shape[1] // preactivations_of("hgrn"), cu_seqlens.shape[0] - 1
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    start = pre.new_zeros((sequences, channels), dtype=dtype) if h0 is None else h0.to(dtype)
    padding = (torch.arange(tokens, device=pre.device) >= cu_seqlens[-1]).unsqueeze(1)
    a, b = hgrn_coefficients(pre.masked_fill(padding, 0).to(dtype), lower_bound)
    # The sequences follow each other in one scan: at its first token each forgets what comes before
    # and adds its own start. Those without tokens have theirs behind all others.
    empty = begin == end
    first = begin.masked_fill(empty, tokens)
    starts = a.new_zeros((tokens + 1, channels)).index_copy(0, first, start)[:tokens]
    begins = padding.new_zeros(tokens + 1).index_fill(0, first, True)[:tokens].unsqueeze(1)
    b = (b + a * starts).masked_fill(padding, 0)
    h = linear_scan(a.masked_fill(begins | padding, 0).unsqueeze(0), b.unsqueeze(0)).squeeze(0)
    ends = torch.cat([h, h.new_zeros((1, channels))])[(end - 1).masked_fill(empty, tokens)]
    return h.to(pre.dtype), torch.where(empty.unsqueeze(1), start, ends)


def _check_train(
    name: str,
    pre: Tensor,
    cu_seqlens: Tensor,
    h0: Tensor | None,
    parameter: Tensor | None,
) -> None:
    """Raise RuntimeError if the arguments of a composed training scan do not fit each other."""

    def require(holds: bool, what: str) -> None:
        if not holds:
            raise RuntimeError(f"minserve::{name}: {what}")

    require(
        pre.dim() == 2 and pre.shape[1] % 3 == 0,
        f"pre must be [tokens, 3 * channels], got {list(pre.shape)}",
    )
    require(
        cu_seqlens.dim() == 1 and cu_seqlens.dtype == torch.int32 and len(cu_seqlens) > 0,
        f"cu_seqlens must be int32 [sequences + 1], got {cu_seqlens.dtype} of {cu_seqlens.dim()}"
        " dimensions",
    )
    channels = pre.shape[1] // 3
    for what, given, shape in (
        ("h0", h0, [len(cu_seqlens) - 1, channels]),
        ("lower_bound", parameter, [channels]),
    ):
        require(
            given is None or list(given.shape) == shape,
            f"{what} must be {shape}, got {None if given is None else list(given.shape)}",
        )


# References, step by step in plain torch.


def linear_scan_reference(
    a: Tensor, b: Tensor, h0: Tensor | None = None, reverse: bool = False
) -> Tensor:
    """Reference of linear_scan in float64."""
    a, b = a.double(), b.double()
    h = a.new_zeros(a.shape[0], a.shape[2]) if h0 is None else h0.double()
    rows: list[Tensor] = []
    steps = list(zip(a.unbind(1), b.unbind(1), strict=True))
    for a_t, b_t in reversed(steps) if reverse else steps:
        h = a_t * h + b_t
        rows.append(h)
    if not rows:
        return torch.zeros_like(a)
    return torch.stack(rows[::-1] if reverse else rows, dim=1)


def heinsen_reference(a: Tensor, b: Tensor, h0: Tensor | None = None) -> Tensor:
    """Compute linear_scan in log space for a > 0, b > 0, h0 > 0, in the given dtype.

    log h_t = a*_t + logcumsumexp(log b - a*)_t with a*_t = sum of log a up to t; h0 is prepended to
    b (Heinsen, arXiv 2311.06281).
    """
    log_a, log_b = a.log(), b.log()
    if h0 is not None:
        log_a = functional.pad(log_a, (0, 0, 1, 0))
        log_b = torch.cat([h0.log().unsqueeze(1), log_b], dim=1)
    total = log_a.cumsum(dim=1)
    h = (total + torch.logcumsumexp(log_b - total, dim=1)).exp()
    return h if h0 is None else h[:, 1:]


def _candidate(v: Tensor, linear: bool) -> Tensor:
    """Return g(v), or v itself if `linear`."""
    return v if linear else torch.where(v >= 0, v + 0.5, torch.sigmoid(v))


def mingru_coefficients(pre: Tensor, linear_candidate: bool = False) -> tuple[Tensor, Tensor]:
    """Return (a, b) of h_t = a_t h_{t-1} + b_t from [k | v]."""
    k, v = pre.chunk(2, dim=-1)
    return torch.sigmoid(-k), torch.sigmoid(k) * _candidate(v, linear_candidate)


def minlstm_coefficients(
    pre: Tensor, linear_candidate: bool = False, normalize_gates: bool = True
) -> tuple[Tensor, Tensor]:
    """Return (a, b) of h_t = a_t h_{t-1} + b_t from [f | i | v]."""
    f, i, v = pre.chunk(3, dim=-1)
    if normalize_gates:
        log_ratio = functional.logsigmoid(f) - functional.logsigmoid(i)
        forget, keep = torch.sigmoid(log_ratio), torch.sigmoid(-log_ratio)
    else:
        forget, keep = torch.sigmoid(f), torch.sigmoid(i)
    return forget, keep * _candidate(v, linear_candidate)


def hgrn_coefficients(pre: Tensor, lower_bound: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (a, b) of h_t = a_t h_{t-1} + b_t from [i | f | g]."""
    i, f, _ = pre.chunk(3, dim=-1)
    bound = pre.new_zeros(()) if lower_bound is None else lower_bound.to(pre.dtype)
    rest = 1 - bound
    return bound + rest * torch.sigmoid(f), rest * torch.sigmoid(-f) * functional.silu(i)


@dataclass(frozen=True, slots=True)
class Cell:
    """What tells a cell's operators from another's, besides the number of pre-activations."""

    # (a, b) of h_t = a_t h_{t-1} + b_t from (pre, *options), in any dtype
    coefficients: Callable[..., tuple[Tensor, Tensor]]
    flags: int  # how many of (linear_candidate, normalize_gates) are its options
    train: bool = True  # whether its training scan is an operator of its own


CELLS = {
    "mingru": Cell(mingru_coefficients, flags=1),
    "minlstm": Cell(minlstm_coefficients, flags=2),
    "hgrn": Cell(hgrn_coefficients, flags=0, train=False),
}


def spans(cu_seqlens: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (sequence, begin, end) of a packed batch."""
    edges = cu_seqlens.tolist()
    for sequence, (begin, end) in enumerate(itertools.pairwise(edges)):
        yield sequence, begin, end


def _recur(a: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Iterate h = a_t h + b_t over the first dimension; return all h and the last."""
    rows = []
    for a_t, b_t in zip(a, b, strict=True):
        h = a_t * h + b_t
        rows.append(h)
    return (torch.stack(rows) if rows else torch.zeros_like(a)), h


def _scan(
    a: Tensor, b: Tensor, cu_seqlens: Tensor, state: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Scan packed sequences, without side effects; return (h, the new state)."""
    h, new_state = torch.zeros_like(a), state.to(a.dtype).clone()
    rows = slots.tolist()
    for sequence, begin, end in spans(cu_seqlens):
        slot = rows[sequence]
        if slot >= 0:
            h[begin:end], new_state[slot] = _recur(a[begin:end], b[begin:end], new_state[slot])
    return h, new_state


def _step(a: Tensor, b: Tensor, state: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Scan sequences of one token each."""
    return _scan(a, b, torch.arange(len(a) + 1, dtype=torch.int32), state, slots)


def _scan_train(
    a: Tensor, b: Tensor, cu_seqlens: Tensor, h0: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scan packed sequences from explicit initial states; return (h, h_last)."""
    sequences = cu_seqlens.numel() - 1
    h0 = a.new_zeros(sequences, a.shape[1]) if h0 is None else h0.to(a.dtype)
    pieces, last = [], []
    for sequence, begin, end in spans(cu_seqlens):
        h, final = _recur(a[begin:end], b[begin:end], h0[sequence])
        pieces.append(h)
        last.append(final)
    used = sum(piece.shape[0] for piece in pieces)
    pieces.append(a.new_zeros(a.shape[0] - used, a.shape[1]))
    return torch.cat(pieces), (torch.stack(last) if last else h0)


def scan_reference(
    cell: str, pre: Tensor, cu_seqlens: Tensor, state: Tensor, slots: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """Reference of a cell's scan in float64, without side effects; returns (h, the new state)."""
    return _scan(*CELLS[cell].coefficients(pre.double(), *options), cu_seqlens, state, slots)


def step_reference(
    cell: str, pre: Tensor, state: Tensor, slots: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    """Reference of a cell's step in float64, without side effects; returns (h, the new state)."""
    return _step(*CELLS[cell].coefficients(pre.double(), *options), state, slots)


def scan_train_reference(
    cell: str, pre: Tensor, cu_seqlens: Tensor, h0: Tensor | None = None, *options: Any
) -> tuple[Tensor, Tensor]:
    """Reference of a cell's training scan in float64, differentiable by autograd."""
    return _scan_train(*CELLS[cell].coefficients(pre.double(), *options), cu_seqlens, h0)


# Fakes name only the arguments that determine the results, so that cells, whose flags differ, share
# them.


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _time_contiguous(a: Tensor) -> bool:
    """Return whether time is contiguous in the layout that csrc/scan/linear_op.cpp supports."""
    batch, time, channels = a.shape
    return (
        a.stride(1) == 1
        and a.stride(2) == time
        and time > 1
        and channels > 1
        and (batch <= 1 or a.stride(0) == time * channels)
    )


def _empty_with_layout_of(a: Tensor) -> Tensor:
    if _time_contiguous(a):
        _, time, channels = a.shape
        return a.new_empty_strided(a.shape, (channels * time, 1, time))
    return a.new_empty(a.shape)


def _register_linear_scan() -> None:
    def fake(a: Tensor, *_: Any) -> Tensor:
        return _empty_with_layout_of(a)

    def fake_backward(grad_h: Tensor, a: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        grad_h0 = a.new_empty((a.shape[0], a.shape[2]), dtype=_accumulation_dtype(a.dtype))
        return _empty_with_layout_of(a), _empty_with_layout_of(a), grad_h0

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, _, h0, ctx.reverse = inputs
        ctx.save_for_backward(a, output, h0)

    def backward(ctx: Any, grad_h: Tensor) -> tuple[Tensor | None, ...]:
        a, h, h0 = ctx.saved_tensors
        grad_a, grad_b, grad_h0 = torch.ops.minserve.linear_scan_backward(
            grad_h, a, h, h0, ctx.reverse
        )
        return grad_a, grad_b, None if h0 is None else grad_h0.to(h0.dtype), None

    torch.library.register_fake("minserve::linear_scan", fake)
    torch.library.register_fake("minserve::linear_scan_backward", fake_backward)
    torch.library.register_autograd("minserve::linear_scan", backward, setup_context=setup)


def _register_cell(cell: str) -> None:
    """Register a cell's operators for serving: the scan and the step."""

    def fake_scan(pre: Tensor, cu_seqlens: Tensor, state: Tensor, *_: Any) -> Tensor:
        return pre.new_empty((pre.shape[0], state.shape[1]))

    def fake_step(pre: Tensor, state: Tensor, *_: Any) -> Tensor:
        return pre.new_empty((pre.shape[0], state.shape[1]))

    torch.library.register_fake(f"minserve::{cell}_scan", fake_scan)
    torch.library.register_fake(f"minserve::{cell}_step", fake_step)


def _register_training(cell: str) -> None:
    """Register a cell's operators for training.

    They have the same leading arguments, followed by their own flags:

        name(pre, cu_seqlens, h0?, *flags) -> (h, h_last)
        name_backward(grad_h, grad_h_last?, pre, h, cu_seqlens, h0?, *flags) -> (grad_pre, grad_h0)
    """
    train, columns = f"{cell}_scan_train", preactivations_of(cell)
    backward_operator = getattr(torch.ops.minserve, f"{train}_backward")

    def empty_states(pre: Tensor, cu_seqlens: Tensor, channels: int) -> Tensor:
        shape = (cu_seqlens.shape[0] - 1, channels)
        return pre.new_empty(shape, dtype=_accumulation_dtype(pre.dtype))

    def fake_train(pre: Tensor, cu_seqlens: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        channels = pre.shape[1] // columns
        return pre.new_empty((pre.shape[0], channels)), empty_states(pre, cu_seqlens, channels)

    def fake_backward(
        grad_h: Tensor,
        grad_h_last: Tensor | None,
        pre: Tensor,
        h: Tensor,
        cu_seqlens: Tensor,
        *_: Any,
    ) -> tuple[Tensor, Tensor]:
        return pre.new_empty(pre.shape), empty_states(pre, cu_seqlens, h.shape[1])

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        pre, cu_seqlens, h0, *ctx.flags = inputs
        ctx.save_for_backward(pre, output[0], cu_seqlens, h0)

    def backward(ctx: Any, grad_h: Tensor, grad_h_last: Tensor) -> tuple[Tensor | None, ...]:
        pre, h, cu_seqlens, h0 = ctx.saved_tensors
        grad_pre, grad_h0 = backward_operator(
            grad_h, grad_h_last, pre, h, cu_seqlens, h0, *ctx.flags
        )
        return grad_pre, None, None if h0 is None else grad_h0, *(None for _ in ctx.flags)

    torch.library.register_fake(f"minserve::{train}", fake_train)
    torch.library.register_fake(f"minserve::{train}_backward", fake_backward)
    torch.library.register_autograd(f"minserve::{train}", backward, setup_context=setup)


_register_linear_scan()
for _name, _cell in CELLS.items():
    _register_cell(_name)
    if _cell.train:
        _register_training(_name)
