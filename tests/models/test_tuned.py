"""TunedProducts: what is chosen, and that it multiplies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models.backends import autotune
from engine.models.backends.autotune import TunedProducts
from engine.models.backends.tuning_cache import TuningCache


class Library:
    """Stands for cuBLASLt on the CPU: three algorithms, of which the second does not run, and how
    often each was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, quickest: int) -> None:
        self.calls = [0, 0, 0]
        monkeypatch.setattr(autotune, "product_algorithms", lambda *_: torch.arange(3).unsqueeze(1))
        monkeypatch.setattr(autotune, "product_", self.product_)
        monkeypatch.setattr(autotune, "_enough", lambda weight: 6)
        monkeypatch.setattr(autotune, "quickest_of", self.quickest_of)
        self.quickest, self.timed = quickest, 0

    def product_(
        self, out: Tensor, x: Tensor, weight: Tensor, algorithm: Tensor, *, add: bool = False
    ) -> None:
        self.calls[int(algorithm)] += 1
        if int(algorithm) == 1:
            raise RuntimeError("not with these shapes")
        product = x.float() @ weight.float().t()
        out.copy_(product + out.float() if add else product)

    def quickest_of(self, runs: list[Callable[[], object]]) -> int:
        self.timed = len(runs)
        for run in runs:
            run()
        return self.quickest


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("quickest", [0, 1, 2])
def test_products_go_the_way_that_was_quickest(
    quickest: int, add: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(monkeypatch, quickest)
    weights = list(torch.randn(3, 16, 8).bfloat16())
    products = TunedProducts()
    products.tune(weights, 5, add=add)
    assert library.timed == 3  # torch's call, and the two that run
    before = library.calls.copy()
    assert before[0] == before[2] == 6 and before[1] == 1
    products.tune(weights, 5, add=add)
    assert library.calls == before  # it is known
    for tokens in (5, 4):
        x, out = torch.randn(tokens, 8).bfloat16(), torch.ones(tokens, 16).bfloat16()
        expected = x.float() @ weights[0].float().t() + (1 if add else 0)
        if add:
            products.add_(out, x, weights[0])
        else:
            out = products.product(x, weights[0])
        torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
    asked = [now - then for now, then in zip(library.calls, before, strict=True)]
    assert asked == {0: [0, 0, 0], 1: [1, 0, 0], 2: [0, 0, 1]}[quickest]


@pytest.mark.parametrize("quickest", [0, 2])
def test_products_that_were_measured_before_are_taken(
    quickest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, weight = tmp_path / "of a model.json", torch.randn(16, 8).bfloat16()
    library, tuning = Library(monkeypatch, quickest), TuningCache(file)
    TunedProducts(tuning).tune([weight], 5)
    tuning.save()
    again = Library(monkeypatch, 1 - library.quickest // 2)  # would choose another now
    tuning = TuningCache(file)
    products = TunedProducts(tuning)
    products.tune([weight], 5)
    assert again.timed == 0 and (tuning.read, tuning.measured) == (1, 0)
    x = torch.randn(5, 8).bfloat16()
    torch.testing.assert_close(products.product(x, weight), x @ weight.t(), rtol=0.02, atol=0.02)
    assert again.calls == {0: [0, 0, 0], 2: [0, 0, 1]}[quickest]
    products.tune([weight], 4)  # of another shape
    assert again.timed == 3 and (tuning.read, tuning.measured) == (1, 1)


@pytest.mark.parametrize(("rows", "single"), [(66, False), (66, True), (36, False)])
def test_rows_that_do_not_fit_are_left_to_torch(
    rows: int, single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(monkeypatch, 1)
    TunedProducts().tune([torch.randn(rows, 8).bfloat16()], 5, single=single)
    assert library.timed == 0


def test_without_memory_to_try_in_it_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("no")

    library, tuning = Library(monkeypatch, 1), TuningCache()
    monkeypatch.setattr(autotune, "product_algorithms", no_memory)
    weight, x = torch.randn(16, 8).bfloat16(), torch.randn(5, 8).bfloat16()
    products = TunedProducts(tuning)
    products.tune([weight], 5)
    torch.testing.assert_close(products.product(x, weight), x @ weight.t())
    assert library.calls == [0, 0, 0] and tuning.measured == 0


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
