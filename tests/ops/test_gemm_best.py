"""linear_best finds the best of every part of the logits, and sample_best_ the best of these."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.ops.gemm import (
    IN_ONE_PART,
    PART,
    SQUARE_ROWS,
    best_of,
    ids_of,
    linear_best,
    linear_map,
    linear_map_reference,
)
from engine.protocol.sampling_params import SamplingParams
from tests.ops.helpers import exact
from tests.ops.sampling_rows import Rows, rows_of
from tests.ops.test_gemm import close, on_gpu

# rows, inputs, rows of weight, vocabulary: one tile and several, of either; no whole tile of rows,
# of inputs or of weights; padding that begins within a tile; more tiles than multiprocessors.
SHAPES = [
    (1, 64, 256, 256),
    (7, 72, 264, 260),
    (128, 768, 1000, 1000),
    (129, 200, 520, 250),
    (300, 2048, 4096, 4090),
    (1030, 136, 8200, 8195),
    (1030, 256, 8200, 8195),  # the ring's stages are as many as a tile's, and then fewer
    (1030, 328, 8200, 8195),
]
GREEDY = SamplingParams(temperature=0.0)
_LOW = 2**32 - 1


def unpacked(key: int) -> tuple[int, int]:
    """What orders a logit, and the id that an element of `best` tells."""
    return (key >> 32) & _LOW, _LOW - (key & _LOW)


def test_bests_order_as_logits_and_ids_do() -> None:
    values = torch.randn(4, 2 * PART + 3, generator=torch.Generator().manual_seed(0))
    values[0] = (values[0] * 2).round() * 0.5  # many alike, also -0
    values[1, :PART] = -values[1, :PART].abs()
    values[2, 5], values[2, 300] = math.nan, math.inf
    values[3] = -math.inf
    best = best_of(values)
    assert best.shape == (4, 3)
    for row, keys in zip(values, best.tolist(), strict=True):
        for part, key in zip(row.split(PART), keys, strict=True):
            _, id = unpacked(key)
            if part.isnan().any():
                assert row[id].isnan()
            else:
                assert row[id] == part.max()
    parts = values[0].split(PART)
    ids = [PART * n + int((p == p.max()).nonzero()[0]) for n, p in enumerate(parts)]
    assert [unpacked(key)[1] for key in best[0].tolist()] == ids
    assert ids_of(best)[0] == (values[0] == values[0].max()).nonzero()[0]
    assert ids_of(best)[1] == values[1].argmax()
    of_row = [unpacked(key)[0] for key in best[2].tolist()]  # NaN, infinity, a number
    assert of_row[0] > of_row[1] > of_row[2]


def test_they_say_where_they_run() -> None:
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="linear_best"):
        linear_best(x, None, 0.0, x, None, 2)
    with pytest.raises(NotImplementedError, match="draw_best_"):
        rows_of([GREEDY] * 2).sample_best(torch.zeros(2, 1, dtype=torch.int64))


def given(shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    rows, inputs, channels, _ = shape
    x = on_gpu(exact(rows, inputs, seed=1))
    weight = on_gpu(exact(channels, inputs, seed=2, scale=inputs**-0.5))
    return x, weight, on_gpu(exact(channels, seed=3))


def logits_of(best: Tensor) -> Tensor:
    """Of each part the logit that is its best: float32 [rows, parts]."""
    order = (best >> 32) & _LOW
    bits = torch.where(order >= 2**31, order - 2**31, _LOW - order)
    return torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)


def test_logits_are_told_in_full() -> None:
    values = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    expected = [part.amax(1) for part in values.split(PART, dim=1)]
    assert torch.equal(logits_of(best_of(values)), torch.stack(expected, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bests_are_those_of_the_logits(shape: tuple[int, int, int, int]) -> None:
    x, weight, some_bias = given(shape)
    rows, _, channels, vocabulary = shape
    for bias in (None, some_bias):
        exactly = linear_map_reference(x, None, 0.0, weight, bias)[:, :vocabulary]
        best = linear_best(x, None, 0.0, weight, bias, vocabulary)
        parts = exactly.split(PART, dim=1)
        assert best.shape == (rows, -(-channels // PART))
        at = _LOW - (best & _LOW)  # ids
        real = slice(0, len(parts))  # a part may have nothing but padding
        assert (at[:, real] // PART == torch.arange(len(parts), device="cuda")).all()
        close(logits_of(best)[:, real], exactly.gather(1, at[:, real]))
        close(logits_of(best)[:, real], torch.stack([part.amax(1) for part in parts], 1))
        assert (logits_of(best)[:, len(parts) :] == -math.inf).all()

        one = slice(rows // 2, rows // 2 + 1)
        assert torch.equal(linear_best(x[one], None, 0.0, weight, bias, vocabulary), best[one])


@pytest.mark.gpu
def test_of_equal_logits_the_first_is_the_best() -> None:
    """In one thread, in neighbouring ones, in different tiles."""
    for first, second in ((3, 5), (8, 9), (7, 250), (255, 256), (100, 511)):
        x = torch.ones(2, 64, device="cuda", dtype=torch.bfloat16)
        weight = torch.zeros(512, 64, device="cuda", dtype=torch.bfloat16)
        weight[[first, second]] = 1
        torch.cuda.synchronize()  # weights are read early
        assert ids_of(linear_best(x, None, 0.0, weight, None, 512)).tolist() == [first, first]
        assert ids_of(linear_best(-x, None, 0.0, weight, None, 512)).tolist() == [0, 0]


@pytest.mark.gpu
def test_logits_that_are_not_finite() -> None:
    """NaN is the best, then infinity; only a row of which they are the best draws nothing."""
    x, weight, bias = given((4, 64, 768, 768))
    x[1] = math.nan
    bias[100], bias[300] = -math.inf, math.inf
    best = linear_best(x, None, 0.0, weight, bias, 768)
    logits = logits_of(best)
    assert logits[1].isnan().all()
    assert logits[:, [0, 2]][[0, 2, 3]].isfinite().all()
    assert (logits[[0, 2, 3], 1] == math.inf).all()
    assert ids_of(best)[[0, 2, 3]].tolist() == [300] * 3
    rows = rows_of([GREEDY] * 4, "cuda")
    rows.sample_best(best)
    assert rows.out[0].tolist() == [-1] * 4

    bias[300] = bias[:256].clamp(min=-100).amin()
    best = linear_best(x, None, 0.0, weight, bias, 768)
    rows = rows_of([GREEDY] * 4, "cuda")
    rows.sample_best(best)
    assert rows.out[0, 1] == -1
    assert (rows.out[0, [0, 2, 3]] >= 0).all()
    assert rows.out[0, [0, 2, 3]].tolist() == ids_of(best)[[0, 2, 3]].tolist()
    bias[:] = -math.inf
    rows = rows_of([GREEDY] * 4, "cuda")
    rows.sample_best(linear_best(x, None, 0.0, weight, bias, 768))
    assert rows.out[0].tolist() == [-1] * 4


@pytest.mark.gpu
@pytest.mark.parametrize(("vocabulary", "count"), [(1, 1), (300, 5), (5000, 131), (40_000, 1001)])
@pytest.mark.parametrize("stop_ids", [0, 3, 40])
def test_draws_what_draw_does(vocabulary: int, count: int, stop_ids: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(count, vocabulary, generator=generator).mul(3).round().cuda()
    logits[count // 2, vocabulary // 3] = math.nan
    logits[count - 1, vocabulary // 2] = math.inf
    logits[count // 5] = -math.inf

    def ready() -> Rows:
        rows = rows_of([GREEDY] * count, "cuda", stop_ids=stop_ids)
        rows.slots[count // 3] = -1
        rows.remaining[count // 4] = 1
        rows.cursor[count // 6] = len(rows.out)
        if stop_ids:
            at = max(0, count - 2)
            rows.stop_ids[at, stop_ids - 1] = logits[at].argmax()
        return rows

    drawn, wanted = ready(), ready()
    wanted.sample(logits)
    drawn.sample_best(best_of(logits))
    for one, other in zip(drawn.all(), wanted.all(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_head_of_its_own_agrees() -> None:
    """With logits of few numbers, whose sums are exact in any order."""
    x = torch.randint(-2, 3, (200, 128), device="cuda").bfloat16()
    weight = torch.randint(-2, 3, (3000, 128), device="cuda").bfloat16()
    torch.cuda.synchronize()  # weights are read early
    logits = linear_map(x, None, 0.0, weight, logits=True)
    assert torch.equal(linear_best(x, None, 0.0, weight, None, 2997), best_of(logits[:, :2997]))


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", [64, 200, 768, 2048])
def test_bests_are_to_the_bit_those_of_logits_in_a_fixed_order(inputs: int) -> None:
    """Whatever the number of rows, which decides about the form of the linear map. That the tensor
    cores add up alike when rows and columns change places is nowhere written."""
    channels = IN_ONE_PART + 200
    x = torch.randn(1030, inputs, device="cuda").bfloat16()
    weight = torch.randn(channels, inputs, device="cuda").bfloat16()
    some_bias = torch.randn(channels, device="cuda").bfloat16()
    squares = torch.rand(-(-inputs // SQUARE_ROWS), 1030, device="cuda") * SQUARE_ROWS
    torch.cuda.synchronize()  # weights are read early
    for rows in (1, 7, 33, 64, 100, 200, 300, 520, 1030):
        some, of_some = x[:rows], squares[:, :rows].contiguous()
        for norm, bias in ((None, None), (of_some, None), (of_some, some_bias)):
            logits = linear_map(some, norm, 1e-6, weight, bias, logits=True, fixed_order=True)
            best = linear_best(some, norm, 1e-6, weight, bias, channels - 7)
            assert torch.equal(best, best_of(logits[:, : channels - 7]))


@pytest.mark.gpu
def test_unfit_arguments_are_refused() -> None:
    x, weight, bias = given((2, 64, 16, 16))
    for wrong, said in (
        ((x, None, 0.0, weight, None, 17), "vocabulary must be 1 to"),
        ((x, None, 0.0, weight, None, 0), "vocabulary must be 1 to"),
        ((x, None, 0.0, weight, bias[:8], 16), "bias"),
        ((x, torch.ones(2, 2, device="cuda"), 0.0, weight, None, 16), "squares"),
        ((x.float(), None, 0.0, weight.float(), None, 16), "must be bfloat16, got float32"),
        ((x.half(), None, 0.0, weight.half(), None, 16), "must be bfloat16, got float16"),
        ((x, None, 0.0, weight[:12], None, 12), "multiple of 8"),
    ):
        with pytest.raises(RuntimeError, match=said):
            linear_best(*wrong)
    rows = rows_of([GREEDY] * 2, "cuda")
    with pytest.raises(RuntimeError, match="tokens"):
        rows.sample_best(torch.zeros(3, 1, dtype=torch.int64, device="cuda"))
    with pytest.raises(RuntimeError, match="at least one part"):
        rows.sample_best(torch.zeros(2, 0, dtype=torch.int64, device="cuda"))
    with pytest.raises(RuntimeError, match="best"):
        rows.sample_best(torch.zeros(2, 1, device="cuda"))
