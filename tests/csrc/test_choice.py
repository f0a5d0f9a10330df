"""The forms that linear maps on Hopper are chosen to take (csrc/linear/choice.h) can be run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.csrc.build import CSRC, HERE, compiler


def test_every_choice_can_be_run(tmp_path: Path) -> None:
    """Parts divide a block's tokens, have inputs each, and only forms that can have any do."""
    build_with = compiler()
    if build_with is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "choice"
    source = HERE / "choice_driver.cpp"
    subprocess.run(
        [build_with, "-std=c++17", "-O1", f"-I{CSRC}", str(source), "-o", str(program)], check=True
    )
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:]
    shapes = int(result.stdout.split()[0])
    assert shapes > 100_000
