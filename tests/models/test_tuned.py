"""TunedProducts: what is chosen, and that it multiplies."""

from __future__ import annotations

import pytest
import torch

from engine.models import tuned
from engine.models.tuned import TunedProducts


@pytest.mark.parametrize(
    ("times", "chosen"),
    [([3.0, 2.0, 1.0], 2), ([1.005, 1.0], 0), ([1.0, 0.9], 1), ([float("inf"), 5.0], 1)],
)
def test_the_quickest_is_chosen_and_of_equals_the_first(times: list[float], chosen: int) -> None:
    assert tuned._first_of_the_best(times) == chosen


@pytest.mark.gpu
def test_one_that_fails_is_not_timed() -> None:
    def fails() -> None:
        raise RuntimeError("no")

    x = torch.ones(256, 256, device="cuda")
    times = tuned._times([fails, lambda: x.mul_(1), fails])
    assert times[0] == times[2] == float("inf") and 0 < times[1] < 1000


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [384, 66])  # rows of 66 numbers are left to torch
@pytest.mark.parametrize("tuning", [False, True])
def test_products(rows: int, tuning: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(8, rows, 256, device="cuda", generator=generator).bfloat16() / 16
    x = torch.randn(300, 256, device="cuda", generator=generator).bfloat16()
    products = TunedProducts()
    if tuning:
        for add, single in ((False, False), (True, False), (False, True)):
            products.tune(list(weights), len(x), add=add, single=single)
    expected = x.double() @ weights[0].double().t()
    close = {"rtol": 2.0**-7, "atol": 2.0**-7}
    torch.testing.assert_close(products.product(x, weights[0]).double(), expected, **close)
    out = torch.ones(300, rows, device="cuda", dtype=torch.bfloat16)
    products.add_(out, x, weights[0])
    torch.testing.assert_close(out.double(), 1 + expected, **close)
    single = products.single(x, weights[0])
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-4)
    fewer = products.product(x[:7], weights[0])  # a shape that nobody has looked for
    torch.testing.assert_close(fewer.double(), expected[:7], **close)
