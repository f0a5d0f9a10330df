"""The forms that linear maps on Hopper are chosen to take (csrc/linear/choice.h) can be run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.csrc.choices import build_chooser, examples


@pytest.fixture(scope="module")
def chooser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = build_chooser(tmp_path_factory.mktemp("choice"))
    if program is None:
        pytest.skip("no C++ compiler")
    return program


def test_every_choice_can_be_run(chooser: Path) -> None:
    """Parts divide a block's tokens, have inputs each, and only forms that can have any do."""
    result = subprocess.run([chooser], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:]
    shapes = int(result.stdout.split()[0])
    assert shapes > 100_000


def test_wide_forms_are_chosen_for_every_number_of_gates(chooser: Path) -> None:
    """What tests/ops/test_wide_maps.py runs."""
    found = examples(chooser)
    assert {example.gates for example in found} == {1, 2, 3}
    assert all(example.channels % 64 == 0 and example.inputs % 8 == 0 for example in found)
