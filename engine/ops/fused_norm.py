"""The operations between matrix products: norms, GELU, SwiGLU and steps.

RMSNorm(x) W^T is x (norm_weight * W)^T divided by the root mean square of each row of x. So the
library's product can read the residual stream x itself, with the norm's weight folded into the
matrix. The kernel that reads the product next divides it, adds the bias and then does its own work.
For the sum of squares it must read x once more, which is still in the cache.

`ahead` is the bias of the next product that the library will add to x without a bias; it is added
to x in advance.

rms_norm is the norm itself (Zhang and Sennrich, arXiv 1910.07467), for cases where no product
follows. Unlike torch's, it can start before the previous kernel has ended. added_rms_norm_ is for
residual streams to which no product can add, since they are wider than the products' types.

gated_rms_norm and swiglu are for models with gates (HGRN, Mamba-2; Shazeer, arXiv 2002.05202). They
run anywhere: on a GPU in one kernel, else as the plain torch of their references. All others are
for CUDA alone.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops import scan
from engine.ops.library import has_cuda_kernels

_HAS_KERNELS = has_cuda_kernels()


def rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, row by row, in fp32 and then rounded once.

    Args:
        x: [rows, width], bfloat16.
        eps: added to the mean of the squares.
        weight: [width], bfloat16.

    Both are contiguous, aligned to 16 bytes and have a width that is a multiple of 8.

    Returns:
        [rows, width], bfloat16.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    normed: Tensor = torch.ops.minserve.rms_norm(x, eps, weight)
    return normed


def normed_gelu_(
    x: Tensor, eps: float, y: Tensor, bias: Tensor | None = None, ahead: Tensor | None = None
) -> None:
    """Compute y = GELU(y / norm(x) + bias), exact, in place; then x += ahead.

    Args:
        x: the residual stream [rows, width], bfloat16; **changed in place** if `ahead` is given.
        eps: the norm's epsilon.
        y: W x, [rows, columns], bfloat16; **changed in place**.
        bias: [columns].
        ahead: [width].

    All are contiguous, aligned to 16 bytes and have row lengths that are multiples of 8.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    torch.ops.minserve.normed_gelu_(x, eps, y, bias, ahead)


def normed_swiglu_(
    x: Tensor, eps: float, y: Tensor, bias: Tensor | None = None, ahead: Tensor | None = None
) -> Tensor:
    """Return silu(gate) * up of gate | up = y / norm(x) + bias; then x += ahead.

    Args:
        x, eps, ahead: as for normed_gelu_.
        y: W x, [rows, gate | up], bfloat16; each a multiple of 8 wide.
        bias: [columns of y].

    Returns:
        [rows, columns / 2], bfloat16.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    out: Tensor = torch.ops.minserve.normed_swiglu_(x, eps, y, bias, ahead)
    return out


def added_rms_norm_(x: Tensor, y: Tensor | None, eps: float, weight: Tensor) -> Tensor:
    """Compute x += y, then return x / sqrt(mean(x^2) + eps) * weight, rounded to bfloat16.

    Args:
        x: the residual stream [rows, width], float32 or bfloat16; **changed in place**.
        y: the product before, [rows, width], bfloat16; None: nothing is added.
        eps: added to the mean of the squares.
        weight: [width], bfloat16.

    All are contiguous, aligned to 16 bytes and have a width that is a multiple of 8.

    Returns:
        [rows, width], bfloat16.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    normed: Tensor = torch.ops.minserve.added_rms_norm_(x, y, eps, weight)
    return normed


def gated_rms_norm(
    h: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    groups: int = 1,
    gate_first: bool = False,
) -> Tensor:
    """Return h / sqrt(mean(h^2) + eps) * weight * silu(gate), row by row, in fp32, rounded once.

    Args:
        h: [..., channels], float32, bfloat16 or float16. On a GPU contiguous, aligned to 16 bytes,
            channels a multiple of 8.
        gate: of h's shape and dtype; rows may lie apart, as the last third of pre-activations
            does, but at multiples of 16 bytes.
        weight: [channels] in h's dtype; None is ones.
        eps: added to the mean of the squares.
        groups: parts of the channels, each with a mean of its own; on a GPU each a multiple of 8.
        gate_first: return g / sqrt(mean(g^2) + eps) * weight with g = h silu(gate).

    Returns:
        [..., channels] in h's dtype. On a GPU there is no gradient.

    Raises:
        RuntimeError: on a GPU, shapes, dtypes, alignments or devices do not fit.
    """
    if h.is_cuda and _HAS_KERNELS:
        normed: Tensor = torch.ops.minserve.gated_rms_norm(
            h.flatten(0, -2), gate.flatten(0, -2), weight, eps, groups, gate_first
        )
        return normed.view(h.shape)
    wide = h.float()
    if gate_first:
        wide = wide * functional.silu(gate.float())
    parts = wide.view(*wide.shape[:-1], groups, wide.shape[-1] // groups)
    wide = (parts * (parts.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2)
    if weight is not None:
        wide = wide * weight.float()
    if not gate_first:
        wide = wide * functional.silu(gate.float())
    return wide.to(h.dtype)


def swiglu(y: Tensor) -> Tensor:
    """Return silu(gate) * up of y = gate | up, in fp32 and then rounded once.

    Args:
        y: [..., 2 * hidden], float32, bfloat16 or float16. On a GPU contiguous, aligned to 16
            bytes, hidden a multiple of 8.

    Returns:
        [..., hidden] in y's dtype. On a GPU there is no gradient.

    Raises:
        RuntimeError: on a GPU, shapes, dtypes or alignments do not fit.
    """
    if y.is_cuda and _HAS_KERNELS:
        out: Tensor = torch.ops.minserve.swiglu(y.flatten(0, -2))
        return out.view(*y.shape[:-1], y.shape[-1] // 2)
    gate, up = y.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(y.dtype)


def normed_step_(
    x: Tensor,
    eps: float,
    y: Tensor,
    bias: Tensor | None,
    ahead: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cell: str,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
    lower_bound: Tensor | None = None,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """Compute one step of a cell with the pre-activations y / norm(x) + bias; then x += ahead.

    Args:
        x, eps, bias, ahead: as for normed_gelu_.
        y: W x, [rows, columns], bfloat16; columns are a cell's pre-activations of all channels.
        state: float32 [num_slots, channels], rows aligned to 16 bytes; **changed in place**.
        slots: int32 [rows]; negative: a padding row, which is skipped; its h is zero. No row may
            occur twice.
        cell: "mingru", "minlstm" or "hgrn". What hgrn returns is gated_rms_norm(h, g, norm_weight,
            eps), with h rounded to bfloat16 first.
        linear_candidate: g(x) = x.
        normalize_gates: for minLSTM: f' + i' = 1.

        lower_bound: for hgrn: of the forget gate, float32 [channels], contiguous and aligned to 16
            bytes; None is zero.
        norm_weight: for hgrn: [channels], bfloat16; None is ones.

    Returns:
        h [rows, channels], bfloat16.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; NotImplementedError on the CPU.
    """
    h: Tensor = torch.ops.minserve.normed_step_(
        x,
        eps,
        y,
        bias,
        ahead,
        state,
        slots,
        cell,
        linear_candidate,
        normalize_gates,
        lower_bound,
        norm_weight,
    )
    return h


def _divided(x: Tensor, eps: float, y: Tensor, bias: Tensor | None) -> Tensor:
    scale = (x.double().square().mean(1, keepdim=True) + eps).rsqrt()
    return y.double() * scale + (0 if bias is None else bias.double())


def rms_norm_reference(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Reference of rms_norm in float64."""
    return _divided(x, eps, x, None) * weight.double()


def added_norm_reference(
    x: Tensor, y: Tensor | None, eps: float, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Reference of added_rms_norm_, without side effects; returns (normed in float64, new x)."""
    total = (x.double() + (0 if y is None else y.double())).to(x.dtype)
    return rms_norm_reference(total, eps, weight), total


def gelu_reference(
    x: Tensor, eps: float, y: Tensor, bias: Tensor | None = None, ahead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Reference of normed_gelu_ in float64, without side effects; returns (new y, new x)."""
    pre = _divided(x, eps, y, bias)
    return functional.gelu(pre), x.double() + (0 if ahead is None else ahead.double())


def step_reference(
    x: Tensor,
    eps: float,
    y: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cell: str,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
    lower_bound: Tensor | None = None,
    norm_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference of normed_step_ in float64, without side effects; returns (h, the new state)."""
    pre = _divided(x, eps, y, bias)
    if cell != "hgrn":
        flags = (linear_candidate, normalize_gates)[: scan.CELLS[cell].flags]
        return scan.step_reference(cell, pre, state, slots, *flags)
    h, after = scan.step_reference(cell, pre, state, slots, lower_bound)
    gate = pre[:, 2 * state.shape[1] :]
    return gated_norm_reference(h, gate, norm_weight, eps), after


def gated_norm_reference(
    h: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int = 1,
    gate_first: bool = False,
) -> Tensor:
    """Reference of gated_rms_norm in float64."""
    gates = functional.silu(gate.double())
    own = h.double() * gates if gate_first else h.double()
    parts = own.reshape(len(h) * groups, h.shape[1] // groups)
    normed = _divided(parts, eps, parts, None).view(h.shape)
    normed = normed * (1 if weight is None else weight.double())
    return normed if gate_first else normed * gates


def swiglu_reference(y: Tensor) -> Tensor:
    """Reference of swiglu in float64."""
    gate, up = y.double().chunk(2, dim=-1)
    return functional.silu(gate) * up


def _fake_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def _fake_gelu(
    x: Tensor, eps: float, y: Tensor, bias: Tensor | None = None, ahead: Tensor | None = None
) -> None:
    return None


def _fake_step(
    x: Tensor,
    eps: float,
    y: Tensor,
    bias: Tensor | None,
    ahead: Tensor | None,
    state: Tensor,
    slots: Tensor,
    cell: str,
    linear_candidate: bool = False,
    normalize_gates: bool = True,
    lower_bound: Tensor | None = None,
    norm_weight: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], state.shape[1]))


def _fake_swiglu(
    x: Tensor, eps: float, y: Tensor, bias: Tensor | None = None, ahead: Tensor | None = None
) -> Tensor:
    return y.new_empty((y.shape[0], y.shape[1] // 2))


def _fake_gated(
    h: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    groups: int = 1,
    gate_first: bool = False,
) -> Tensor:
    return h.new_empty(h.shape)


torch.library.register_fake("minserve::rms_norm", _fake_norm)
torch.library.register_fake(
    "minserve::added_rms_norm_",
    lambda x, y, eps, weight: x.new_empty(x.shape, dtype=torch.bfloat16),
)
torch.library.register_fake("minserve::normed_gelu_", _fake_gelu)
torch.library.register_fake("minserve::normed_step_", _fake_step)
torch.library.register_fake("minserve::normed_swiglu_", _fake_swiglu)
torch.library.register_fake("minserve::gated_rms_norm", _fake_gated)
torch.library.register_fake(
    "minserve::swiglu", lambda y: y.new_empty((y.shape[0], y.shape[1] // 2))
)
