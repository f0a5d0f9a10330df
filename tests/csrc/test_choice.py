"""The forms that linear maps on Hopper are chosen to take (csrc/linear) can be run, and those whose
sums have a fixed order have the same one for every number of tokens."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.csrc.build import CSRC, HERE, compiler
from tests.ops.fixed_order import SHAPES, TOKENS


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build_with = compiler()
    if build_with is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("choice") / "choice"
    source = HERE / "choice_driver.cpp"
    subprocess.run(
        [build_with, "-std=c++17", "-O1", f"-I{CSRC}", str(source), "-o", str(program)], check=True
    )
    return program


def _run(driver: Path, shapes: Sequence[int] = ()) -> tuple[int, set[str]]:
    """How many shapes were looked at, and the kinds of forms on which a choice fell."""
    result = subprocess.run([driver, *map(str, shapes)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:]
    count, *kinds = [line for line in result.stdout.splitlines() if "tokens:" not in line]
    return int(count.split()[0]), set(kinds)


def test_every_choice_can_be_run(driver: Path) -> None:
    """Parts divide a block's tokens, have inputs each, and only forms that can have any do; in a
    fixed order there are as many for every number of tokens."""
    shapes, _ = _run(driver)
    assert shapes > 100_000


def test_the_gpu_test_of_fixed_orders_takes_every_form(driver: Path) -> None:
    _, every = _run(driver)
    tried = [number for shape in SHAPES for tokens in TOKENS for number in (*shape, tokens)]
    shapes, kinds = _run(driver, tried)
    assert shapes == len(SHAPES) * len(TOKENS)
    assert every - kinds == set()
    assert len(every) > 40
