"""The simple recurrent unit (SRU): over packed sequences, one step, and training.

Per channel, from u = W x (Lei et al. 2018, arXiv 1709.02755, as the `sru` package has it):

    f_t = sigma(u1_t + v_f c_{t-1} + b_f)       r_t = sigma(u2_t + v_r c_{t-1} + b_r)
    c_t = f_t c_{t-1} + (1 - f_t) u0_t
    h_t = r_t g(c_t) + (1 - r_t) x'_t           g is the identity or tanh

The highway's x' is `scale_x` x, or u3, or it is absent: h_t = r_t g(c_t). u lies in planes, u0 | u1
| u2 (| u3), each as wide as the state, so that neighbouring channels are neighbours in memory. (The
`sru` package has the parts of a channel side by side: its weight's columns are reordered once, at
load.) What is computed between inputs and results is float32 (float64 for float64).

With v = 0 the recurrence is affine in c. On a GPU a few long sequences are then read by chunks of
128 tokens side by side; a chunk's carry is formed in one way however many are.

The operators of the library (csrc/sru) read a prompt in one call. For float64 torch's operators do
the same here, step by step; they wait for the device.
"""

from typing import Any

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)
from engine.ops.scan import spans


def sru_scan(
    u: Tensor,
    x: Tensor | None,
    weight_c: Tensor | None,
    bias: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    scale_x: float = 1.0,
    tanh: bool = False,
) -> Tensor:
    """Read packed sequences, each from its state row, which then has the last c.

    A sequence's result is bitwise the same whatever the rest of the batch and the number of
    threads, and wherever it was split; without weight_c on a GPU, where it was split at multiples
    of 128 tokens.

    Args:
        u: [tokens, 3 * channels], u0 | u1 | u2, or [tokens, 4 * channels] with u3, the highway's
            input; float32, float64, bfloat16 or float16. Rows of u and x may lie apart.
        x: the highway's input [tokens, channels], u's dtype; None: it is u3, or there is none.
        weight_c: v_f | v_r, float32 (float64 with float64 u) [2 * channels]; None: zeros.
        bias: b_f | b_r, as weight_c.
        cu_seqlens: start of each sequence, int32 [sequences + 1], beginning with 0, non-decreasing.
            Tokens beyond the last entry are padding: their rows of h are zero.
        state: c, float32 (float64 with float64 u) [num_slots, channels], each row contiguous;
            **changed in place**.
        slots: state row of each sequence, int32 [sequences]; negative: a padding sequence, which is
            skipped; its rows of h are zero. No row may occur twice.
        scale_x: factor of x.
        tanh: whether g is tanh.

    Returns:
        h [tokens, channels] in u's dtype.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also bad values in cu_seqlens
            and slots (on CUDA and composed, sequences with a slot out of range are skipped).
    """
    if _is_composed(u):
        h, new = _scan(u, x, weight_c, bias, cu_seqlens, state, slots, scale_x, tanh)
        state.copy_(new)
        return h
    result: Tensor = torch.ops.minserve.sru_scan(
        u, x, weight_c, bias, cu_seqlens, state, slots, scale_x, tanh
    )
    return result


def sru_step(
    u: Tensor,
    x: Tensor | None,
    weight_c: Tensor | None,
    bias: Tensor,
    state: Tensor,
    slots: Tensor,
    scale_x: float = 1.0,
    tanh: bool = False,
) -> Tensor:
    """Read one token of every sequence: row r updates state row slots[r].

    Bitwise equal to a scan of length 1.

    Args:
        u, x, weight_c, bias, scale_x, tanh: as for `sru_scan`, with one row for each sequence.
        state: as for `sru_scan`; **changed in place**.
        slots: int32 [batch]; negative: a padding row, which is skipped; its h is zero. No row may
            occur twice.

    Returns:
        h [batch, channels] in u's dtype.

    Raises:
        RuntimeError: as for `sru_scan`.
    """
    if _is_composed(u):
        bounds = torch.arange(len(u) + 1, dtype=torch.int32)
        h, new = _scan(u, x, weight_c, bias, bounds, state, slots, scale_x, tanh)
        state.copy_(new)
        return h
    result: Tensor = torch.ops.minserve.sru_step(u, x, weight_c, bias, state, slots, scale_x, tanh)
    return result


def sru_scan_train(
    u: Tensor,
    x: Tensor | None,
    weight_c: Tensor | None,
    bias: Tensor,
    cu_seqlens: Tensor,
    c0: Tensor | None = None,
    scale_x: float = 1.0,
    tanh: bool = False,
) -> tuple[Tensor, Tensor]:
    """Read packed sequences from explicit states, differentiably.

    c of all tokens is kept for the backward pass, in float32; the gates are computed again there.

    Args:
        u, x, weight_c, bias, cu_seqlens, scale_x, tanh: as for `sru_scan`.
        c0: states before the first tokens [sequences, channels], as weight_c; None: zeros.

    Returns:
        h [tokens, channels] in u's dtype, and each sequence's last c [sequences, channels].
        Differentiable in u, x, weight_c, bias and c0.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also bad values in
            cu_seqlens.
    """
    if _is_composed(u):
        return _scan_train(u, x, weight_c, bias, cu_seqlens, c0, scale_x, tanh)
    results: tuple[Tensor, Tensor, Tensor] = torch.ops.minserve.sru_scan_train(
        u, x, weight_c, bias, cu_seqlens, c0, scale_x, tanh
    )
    return results[0], results[2]


def planes_of(weight: Tensor, parts: int) -> Tensor:
    """Return a weight of the `sru` package, [inputs, channels * parts], as that of a Linear.

    The result [parts * channels, inputs] has the rows of u0 first, then those of u1, and so on.
    """
    return weight.reshape(len(weight), -1, parts).permute(2, 1, 0).flatten(0, 1)


def _is_composed(u: Tensor) -> bool:
    return u.dtype == torch.float64


def _recur(
    u: Tensor,
    x: Tensor | None,
    weight_c: Tensor | None,
    bias: Tensor,
    before: Tensor,
    scale_x: float,
    tanh: bool,
) -> tuple[Tensor, Tensor]:
    """Read one sequence [time, ...] from c [channels]; return h [time, channels] and the last c."""
    channels = before.shape[-1]
    u0, u1, u2, *highway = u.split(channels, dim=1)
    given = highway[0] if highway else None if x is None else x * scale_x
    v_f, v_r = (0.0, 0.0) if weight_c is None else weight_c.split(channels)
    b_f, b_r = bias.split(channels)
    rows: list[Tensor] = []
    c = before
    for t in range(len(u)):
        f = torch.sigmoid(u1[t] + v_f * c + b_f)
        r = torch.sigmoid(u2[t] + v_r * c + b_r)
        c = f * c + (1 - f) * u0[t]
        h = r * (torch.tanh(c) if tanh else c)
        rows.append(h if given is None else h + (1 - r) * given[t])
    return torch.stack(rows), c


def _wide(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def _scan(
    u: Tensor,
    x: Tensor | None,
    weight_c: Tensor | None,
    bias: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    scale_x: float,
    tanh: bool,
) -> tuple[Tensor, Tensor]:
    """Read packed sequences without side effects, in the state's dtype; return (h, new state)."""
    wide, of_x, v, b = _wide(state.dtype, u, x, weight_c, bias)
    h, new = wide.new_zeros(len(u), state.shape[1]), state.clone()
    for sequence, begin, end in spans(cu_seqlens):
        slot = int(slots[sequence])
        if begin == end or not 0 <= slot < len(state):
            continue
        own = None if of_x is None else of_x[begin:end]
        h[begin:end], new[slot] = _recur(wide[begin:end], own, v, b, new[slot], scale_x, tanh)
    return h.to(u.dtype), new


def _scan_train(
    u: Tensor,
    x: Tensor | None,
    weight_c: Tensor | None,
    bias: Tensor,
    cu_seqlens: Tensor,
    c0: Tensor | None,
    scale_x: float,
    tanh: bool,
) -> tuple[Tensor, Tensor]:
    wide, of_x, v, b = _wide(bias.dtype, u, x, weight_c, bias)
    channels, sequences = bias.shape[0] // 2, cu_seqlens.shape[0] - 1
    before = wide.new_zeros(sequences, channels) if c0 is None else c0
    pieces, last = [], []
    for sequence, begin, end in spans(cu_seqlens):
        c = before[sequence]
        if begin < end:
            own = None if of_x is None else of_x[begin:end]
            h, c = _recur(wide[begin:end], own, v, b, c, scale_x, tanh)
            pieces.append(h)
        last.append(c)
    used = sum(len(piece) for piece in pieces)
    pieces.append(wide.new_zeros(len(u) - used, channels))
    return torch.cat(pieces).to(u.dtype), torch.stack(last) if last else before


def sru_scan_reference(
    u: Tensor,
    x: Tensor | None,
    weight_c: Tensor | None,
    bias: Tensor,
    cu_seqlens: Tensor,
    state: Tensor,
    slots: Tensor,
    scale_x: float = 1.0,
    tanh: bool = False,
) -> tuple[Tensor, Tensor]:
    """Reference of sru_scan in float64, without side effects; returns (h, the new state)."""
    u, x, weight_c, bias = _wide(torch.float64, u, x, weight_c, bias)
    return _scan(u, x, weight_c, bias, cu_seqlens, state.double(), slots, scale_x, tanh)


def _register() -> None:
    def fake(u: Tensor, x: Any, weight_c: Any, bias: Tensor, *_: Any) -> Tensor:
        return u.new_empty((u.shape[0], bias.shape[0] // 2))

    def fake_train(
        u: Tensor,
        x: Any,
        weight_c: Any,
        bias: Tensor,
        cu_seqlens: Tensor,
        *_: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, channels = u.shape[0], bias.shape[0] // 2
        c = u.new_empty((tokens, channels), dtype=torch.float32)
        last = c.new_empty((cu_seqlens.shape[0] - 1, channels))
        return u.new_empty((tokens, channels)), c, last

    def fake_backward(
        grad_h: Tensor,
        grad_last: Any,
        u: Tensor,
        x: Tensor | None,
        weight_c: Any,
        bias: Tensor,
        cu_seqlens: Tensor,
        c: Tensor,
        *_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sequences, channels = cu_seqlens.shape[0] - 1, bias.shape[0] // 2
        of_x = u.new_empty((0 if x is None else u.shape[0], channels))
        c0 = c.new_empty((sequences, channels))
        return u.new_empty(u.shape), of_x, c0, c.new_empty((4, sequences, channels))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        u, x, weight_c, bias, cu_seqlens, c0, ctx.scale_x, ctx.tanh = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # that of c would be as large as c
        ctx.save_for_backward(u, x, weight_c, bias, cu_seqlens, output[1], c0)

    def backward(
        ctx: Any, grad_h: Tensor | None, _: Any, grad_last: Tensor | None
    ) -> tuple[Any, ...]:
        u, x, weight_c, bias, cu_seqlens, c, c0 = ctx.saved_tensors
        if grad_h is None:
            grad_h = torch.zeros_like(c, dtype=u.dtype)
        of_u, of_x, of_c0, vectors = torch.ops.minserve.sru_scan_train_backward(
            grad_h, grad_last, u, x, weight_c, bias, cu_seqlens, c, c0, ctx.scale_x, ctx.tanh
        )
        of_weight, of_bias = vectors.sum(1).view(2, -1)
        return (
            of_u,
            None if x is None else of_x,
            None if weight_c is None else of_weight,
            of_bias,
            None,
            None if c0 is None else of_c0,
            *(None, None),
        )

    torch.library.register_fake("minserve::sru_scan", fake)
    torch.library.register_fake("minserve::sru_step", fake)
    torch.library.register_fake("minserve::sru_scan_train", fake_train)
    torch.library.register_fake("minserve::sru_scan_train_backward", fake_backward)
    torch.library.register_autograd("minserve::sru_scan_train", backward, setup_context=setup)


_register()
