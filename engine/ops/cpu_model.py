"""lm_step, lm_prefill, lm_logits: a whole packed language model on the CPU, one call per step.

`weights` and `plan` come from engine/models/backends/cpu.py, which describes them. The models'
equations are those of the lm.py of engine/models/minrnn, hgrn, mamba, mamba2 and gated_rnn. All
threads go through a call's phases together and meet at barriers. Matrices are read once per call
and block of rows. Factors of bfloat16 weights are rounded to bfloat16 first; all else is fp32.
"""

import torch
from torch import Tensor

from engine.ops import library  # noqa: F401  (registers the operators)


def lm_step(
    tokens: Tensor,
    slots: Tensor,
    weights: Tensor,
    plan: Tensor,
    cell: Tensor,
    conv: Tensor | None,
    i_conv: Tensor | None = None,
    f_conv: Tensor | None = None,
    memory: Tensor | None = None,
) -> Tensor:
    """Read one token of every row.

    Args:
        tokens: int32 or int64 [batch].
        slots: int32 [batch]; negative: a padding row, which is skipped. No row may occur twice.
        weights: uint8 [bytes], aligned to 64 bytes.
        plan: int64 [numbers].
        cell: float32 [layers, slots, inner], of Mamba float32 or bfloat16 [layers, slots, inner,
            states], of Mamba-2 [layers, slots, heads, head_dim, states]; **changed in place**.
        conv: float32 [layers, slots, taps - 1, d_model], of Mamba [layers, slots, taps - 1, inner],
            of Mamba-2 as many channels as x, B and C have; **changed in place**; None without
            convolutions before the layers' first norms.
        i_conv, f_conv: float32 [layers, slots, taps - 1, inner], **changed in place**; None without
            convolutions of HGRN's input and forget gates.
        memory: c of LSTM layers, whose h is in `cell`, float32 [layers, slots, inner]; **changed in
            place**; None for all other models.

    Returns:
        Logits, float32 [batch, vocab].

    Raises:
        RuntimeError: shapes, types or devices do not fit, tokens or slots are out of range, or the
            plan refers to bytes outside of the weights.
    """
    logits: Tensor = torch.ops.minserve.lm_step(
        tokens, slots, weights, plan, cell, conv, i_conv, f_conv, memory
    )
    return logits


def lm_prefill(
    tokens: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    weights: Tensor,
    plan: Tensor,
    cell: Tensor,
    conv: Tensor | None,
    i_conv: Tensor | None = None,
    f_conv: Tensor | None = None,
    memory: Tensor | None = None,
) -> Tensor:
    """Read packed prompts: sequence s has the tokens from cu_seqlens[s] to cu_seqlens[s + 1].

    Args:
        tokens: int32 or int64 [tokens].
        cu_seqlens: int32 [sequences + 1].
        slots: int32 [sequences]; negative: skipped.
        weights, plan, cell, conv, i_conv, f_conv, memory: as for `lm_step`.

    Returns:
        Hidden states after the final norm, if there is one, float32 [tokens, d_model].

    Raises:
        RuntimeError: as for `lm_step`.
    """
    hidden: Tensor = torch.ops.minserve.lm_prefill(
        tokens, cu_seqlens, slots, weights, plan, cell, conv, i_conv, f_conv, memory
    )
    return hidden


def lm_logits(hidden: Tensor, weights: Tensor, plan: Tensor) -> Tensor:
    """Return the logits of hidden states after the final norm.

    hidden: float32 [n, d_model] -> logits float32 [n, vocab].

    Raises:
        RuntimeError: shapes, types or devices do not fit.
    """
    logits: Tensor = torch.ops.minserve.lm_logits(hidden, weights, plan)
    return logits
