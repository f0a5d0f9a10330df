"""Sums of a whole step in a fixed order are those of the linear maps, whatever the numbers: the
tensor cores' instructions for few and for many columns round alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops.gemm import linear_embed, linear_map
from engine.ops.persistent_decode import EIGHT, Phase, Program
from tests.ops.helpers import int32

pytestmark = pytest.mark.gpu

EPS = 1e-5
#: channels, inputs: one to eight parts, some of uneven lengths or cut within a stage; blocks
#: without any, several rounds of jobs for a warp.
SHAPES = [
    (72, 384),
    (768, 1152),
    (768, 3072),
    (1536, 384),
    (3072, 768),
    (2048, 3072),
    (8192, 2048),
    (35_000, 704),
    (128_000, 768),
]


def numbers(kind: str, *shape: int) -> Tensor:
    """bfloat16 of one distribution."""
    x = torch.randn(shape, device="cuda")
    if kind == "wide":  # most of a sum is lost beside its largest product
        x *= torch.exp(4 * torch.randn_like(x))
    elif kind == "cancelling":
        x = torch.where(torch.rand_like(x) < 0.5, 1.0, -1.0) * (1 + x.abs() / 64)
    elif kind == "tiny":  # some are subnormal, and most products
        x *= 2.0**-124
    elif kind == "not finite":
        x[torch.rand_like(x) < 1e-3] = float("inf")
        x[torch.rand_like(x) < 1e-5] = float("nan")
    return x.bfloat16()


def bits(x: Tensor) -> Tensor:
    """Of finite numbers and infinities; zeros have no sign, NaNs are one."""
    return torch.where(x.isnan(), torch.nan, x + 0.0).view(torch.int32)


@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling", "tiny", "not finite"])
@pytest.mark.parametrize(("channels", "inputs"), SHAPES)
def test_a_product_has_the_bits_of_a_linear_map(channels: int, inputs: int, kind: str) -> None:
    torch.manual_seed(channels + inputs)
    table, weight = numbers(kind, 64, inputs), numbers(kind, channels, inputs)
    norm = numbers("normal", inputs)
    no_state = torch.zeros(0, 2, 2, device="cuda")[..., :0]
    for weights_of_norm in (None, norm):
        phases = [
            Phase(kind="embed", weight=table),
            Phase(kind="logits", weight=weight, norm=weights_of_norm),
        ]
        program = Program(
            phases, cell="mingru", linear_candidate=False, normalize_gates=True, fixed_order=True
        )
        for batch in (1, 2, 3, EIGHT):
            ids = torch.randint(64, (batch,), dtype=torch.int32, device="cuda")
            x, scaled, squares = linear_embed(ids, table, weights_of_norm)
            given = (x, None) if weights_of_norm is None else (scaled, squares)
            expected = linear_map(*given, EPS, weight, logits=True, fixed_order=True)
            got = program.run(ids, int32(*[-1] * batch, device="cuda"), no_state, None, EPS)
            assert torch.equal(bits(got), bits(expected))
