"""The greedy texts of the bundled models, in fp32: the weights, the models and the operators
together still say what they said. Every choice has a margin that no rounding reaches."""

from __future__ import annotations

import pytest

from tests.golden.greedy import GOLDEN, LEAST_MARGIN, Golden, Writer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "golden", GOLDEN, ids=lambda one: f"{one['model']}-{one['prompt'].split(chr(10))[0][:12]}"
)
def test_greedy_text(golden: Golden, device: str) -> None:
    writer = Writer(golden["model"], device)
    text, margin = writer.write(golden["prompt"], golden["tokens"])
    assert text == golden["text"]
    assert margin > LEAST_MARGIN
