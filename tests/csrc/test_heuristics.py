"""The tile configs that GEMMs on Hopper are chosen to take (csrc/gemm) can be run, and those of
batch-invariant calls have the same split-K for every number of tokens."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.csrc.build import CSRC, HERE, compiler
from tests.once import made_once
from tests.ops import every_kernel, fixed_order, wide_forms


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build_with = compiler()
    if build_with is None:
        pytest.skip("no C++ compiler")
    source = HERE / "heuristics_driver.cpp"

    def make(folder: Path) -> None:
        compiled = [build_with, "-std=c++17", "-O1", f"-I{CSRC}", source, "-o", folder / "driver"]
        subprocess.run(compiled, check=True)

    return made_once(tmp_path_factory, "heuristics", make) / "driver"


def _run(driver: Path, shapes: Sequence[int] = ()) -> tuple[int, set[str]]:
    """How many shapes were looked at, and the kinds of forms on which a choice fell."""
    result = subprocess.run([driver, *map(str, shapes)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:]
    count, *kinds = result.stdout.splitlines()
    return int(count.split()[0]), set(kinds)


def _of(rule: str, kinds: set[str]) -> set[str]:
    return {kind for kind in kinds if kind.startswith(rule)}


def test_every_choice_can_be_run(driver: Path) -> None:
    """Parts divide a block's tokens, have inputs each, and only forms that can have any do; in a
    fixed order there are as many for every number of tokens, one of more than IN_ONE_PART rows."""
    shapes, _ = _run(driver)
    assert shapes > 100_000


def test_the_gpu_test_of_fixed_orders_takes_every_form(driver: Path) -> None:
    _, every = _run(driver)
    cases = [(*shape, tokens) for shape in fixed_order.SHAPES for tokens in fixed_order.TOKENS]
    shapes, kinds = _run(driver, [number for case in cases for number in case])
    assert shapes == len(cases)
    assert _of("fixed", every) - kinds == set()
    assert len(_of("fixed", every)) > 40
    # SwiGLU takes those of a cell with two gates. One form of three gates has no tile of 64
    # channels less than full.
    gated = [(*shape, tokens) for shape in fixed_order.GATED for tokens in fixed_order.TOKENS]
    _, kinds = _run(driver, [number for case in gated for number in case])
    of_three = {kind for kind in _of("fixed", every) if "3 gates" in kind}
    assert of_three - kinds == {"fixed tokens_64 3 gates shared"}


def test_the_gpu_test_of_wide_maps_takes_every_wide_form(driver: Path) -> None:
    _, every = _run(driver)
    shapes, kinds = _run(driver, [number for case in wide_forms.SHAPES for number in case])
    assert shapes == len(wide_forms.SHAPES)
    assert _of("usual persistent", every) == _of("usual", kinds)
    assert len(_of("usual persistent", every)) == 23
    _, kinds = _run(driver, [number for case in wide_forms.GATED for number in case])
    of_three = {kind for kind in _of("usual persistent", every) if "3 gates" in kind}
    assert of_three == {kind for kind in kinds if kind.startswith("usual persistent")} != set()


def test_every_kernel_takes_every_form(driver: Path) -> None:
    _, every = _run(driver)
    usual = _kinds_of(driver, every_kernel.MAPS)
    assert _of("usual", usual) == _of("usual", every)
    # Of epilogues that only small batches have, of which one takes channels by 64.
    small = _kinds_of(driver, every_kernel.MAPS, gates=(1,), multiple=64)
    assert _of("small", small) == _of("small", every) != set()
    fixed = _kinds_of(driver, every_kernel.FIXED)
    of_fixed_alone = {
        kind for kind in _of("fixed", every) if kind.replace("fixed", "usual") not in every
    }
    assert of_fixed_alone - fixed == set()
    assert len(of_fixed_alone) == 18
    # Of the cell with an output gate, whose channels are a multiple of 64.
    usual = _kinds_of(driver, every_kernel.MAPS, gates=(3,), multiple=64)
    assert {kind for kind in _of("usual", every) if "3 gates" in kind} == _of("usual", usual)
    fixed = _kinds_of(driver, every_kernel.FIXED, gates=(3,), multiple=64)
    assert {kind for kind in of_fixed_alone if "3 gates" in kind} - fixed == set()


def _kinds_of(
    driver: Path,
    maps: Sequence[tuple[int, int, Sequence[int]]],
    gates: Sequence[int] = (1, 2, 3),
    multiple: int = 8,
) -> set[str]:
    cases = [
        (-(-channels // multiple) * multiple, inputs, number, tokens)
        for channels, inputs, counts in maps
        for tokens in counts
        for number in gates
    ]
    return _run(driver, [number for case in cases for number in case])[1]
