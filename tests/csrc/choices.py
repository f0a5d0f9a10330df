"""Builds and asks the program that chooses forms of linear maps (choice_driver.cpp)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.csrc.build import CSRC, HERE, compiler


class Example(NamedTuple):
    """A small shape that takes a wide form."""

    form: int
    gates: int
    channels: int
    inputs: int
    tokens: int


def build_chooser(folder: Path) -> Path | None:
    """The program, in `folder`; None without a C++ compiler."""
    build_with = compiler()
    if build_with is None:
        return None
    program = folder / "choice"
    source = HERE / "choice_driver.cpp"
    subprocess.run(
        [build_with, "-std=c++17", "-O1", f"-I{CSRC}", str(source), "-o", str(program)], check=True
    )
    return program


def examples(program: Path) -> list[Example]:
    """For each wide form and number of gates that some shape takes, the least of them."""
    said = subprocess.run([program, "examples"], capture_output=True, text=True, check=True).stdout
    return [Example(*map(int, line.split())) for line in said.splitlines()]
