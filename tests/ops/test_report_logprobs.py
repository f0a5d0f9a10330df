"""report_logprobs_: what sample_ has drawn is reported once, where a row asks for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.protocol.logprobs import words_of_report
from engine.protocol.sampling_params import SamplingParams
from tests.ops.helpers import DEVICES, int32, same_bits
from tests.ops.sampling_rows import STEPS, rows_of
from tests.ops.test_target_logprobs import with_ties

pytestmark = pytest.mark.parametrize("device", DEVICES)
UNTOUCHED = -7


class Reporting:
    """Rows that draw step after step; `tops` is what each asks for."""

    def __init__(self, tops: list[int], steps: int, room: int, device: str) -> None:
        rows = len(tops)
        self.tops = int32(*tops).to(device)
        self.told = torch.zeros(rows, dtype=torch.int32, device=device)
        self.cursor = torch.zeros_like(self.told)
        self.out = torch.full((steps, rows), -1, dtype=torch.int32, device=device)
        shape = steps, rows, words_of_report(room)
        self.reports = torch.full(shape, UNTOUCHED, dtype=torch.int32, device=device)

    def sample(self, row: int, token: int) -> None:
        """As sample_ writes it down."""
        self.out[int(self.cursor[row]), row] = token
        self.cursor[row] += 1

    def report(self, logits: Tensor) -> None:
        ops.report_logprobs_(logits, self.tops, self.cursor, self.out, self.told, self.reports)


@pytest.mark.parametrize("vocab", [20, 66, 5001, 32_000])
def test_each_step_reports_whom_has_drawn_and_asks(device: str, vocab: int) -> None:
    """As target_logprobs does, to the bit; nothing else is written."""
    tops = [0, -1, 20, 3, 1, 7]
    steps = [with_ties(len(tops), vocab, device) + step for step in range(3)]
    drawing = [[0, 1, 2, 3, 4], [0, 1, 3], [3, 1]]  # the others have ended; row 5 is padding
    rows = Reporting(tops, steps=4, room=20, device=device)
    wanted = rows.reports.clone()
    for step, (logits, who) in enumerate(zip(steps, drawing, strict=True)):
        for row in who:
            rows.sample(row, token := (row * 17 + step) % vocab)
            if tops[row] >= 0:
                target = torch.tensor([token], device=device)
                one = ops.target_logprobs(logits[row : row + 1], target, tops[row])
                wanted[step, row, : one.shape[1]] = one[0]
        rows.report(logits)
    same_bits(rows.reports, wanted)
    assert rows.told.tolist() == [2, 0, 1, 3, 1, 0]


def test_more_than_there_is_room_for_is_cut(device: str) -> None:
    rows = Reporting([20, 2], steps=1, room=3, device=device)
    logits = with_ties(2, 66, device)
    for row in range(2):
        rows.sample(row, 5)
    rows.report(logits)
    three = ops.target_logprobs(logits, torch.tensor([5, 5], device=device), 3)
    same_bits(rows.reports[0, 0], three[0])
    same_bits(rows.reports[0, 1, :6].contiguous(), three[1, :6].contiguous())
    assert rows.reports[0, 1, 6:].tolist() == [UNTOUCHED] * 2


def test_a_draw_of_logits_that_are_not_finite_spoils_no_neighbour(device: str) -> None:
    """Such a row has drawn -1."""
    rows = Reporting([2, 2], steps=1, room=2, device=device)
    logits = with_ties(2, 300, device)
    logits[0, 9] = torch.nan
    rows.sample(0, -1)
    rows.sample(1, 9)
    rows.report(logits)
    got = ops.read_reports(rows.reports[0])
    assert got.chosen.isnan().tolist() == [True, False]
    same_bits(
        rows.reports[0, 1:],
        ops.target_logprobs(logits[1:], torch.tensor([9], device=device), 2),
    )


def test_after_real_draws(device: str) -> None:
    """Of rows that end by a stop id and by max_tokens the last token is reported, and no more."""
    drawn = rows_of([SamplingParams(temperature=0)] * 3, device)
    drawn.stop_ids[1, 0] = 4
    drawn.remaining[2] = 2
    asking = Reporting([1, 1, 1], STEPS, room=1, device=device)
    for step in range(STEPS):
        logits = torch.zeros(3, 9, device=device)
        logits[:, 3 + step] = 2.0
        drawn.sample(logits)
        cursor, out = drawn.cursor, drawn.out
        ops.report_logprobs_(logits, asking.tops, cursor, out, asking.told, asking.reports)
    assert asking.told.tolist() == [3, 2, 2]
    got = ops.read_reports(asking.reports)
    assert got.is_greedy[:, 0].all() and got.top_ids[:, 0, 0].tolist() == [3, 4, 5]
    assert got.top_ids[:2, 1, 0].tolist() == got.top_ids[:2, 2, 0].tolist() == [3, 4]
    assert (asking.reports[2:, 1:] == UNTOUCHED).all()
