"""What Python says of a cell is what was compiled."""

from __future__ import annotations

import pytest

from engine.models.recurrence import CELLS
from engine.ops import library


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell != "sru"])
def test_gates_are_those_of_the_compiled_cell(cell: str) -> None:
    assert CELLS[cell].gates == library.preactivations_of(cell)
