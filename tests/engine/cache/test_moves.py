"""Places: copies that are made at once are what they would be one after the other."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from torch import Tensor

from engine.models.minrnn.config import MinRnnConfig
from engine.ops.upload import UploadRing
from engine.protocol.requests import Request
from engine.runner.state_copies import StateCopier, exported
from engine.runner.state_pool import StatePool
from engine.step_plan import INITIAL, Admission, Copy, Load, Store

CONFIG = MinRnnConfig(cell="mingru", vocab_size=5, d_model=8, n_layers=2, conv_kernel=3)
START = torch.linspace(-1, 1, CONFIG.n_layers * CONFIG.inner).view(CONFIG.n_layers, -1)
SLOTS, KEPT, HOST = 3, 4, 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Rows:
    """Places of a pool beside what each should hold: a state, and logits where they are known."""

    def __init__(self, device: str) -> None:
        uploads = UploadRing(torch.device(device))
        self.pool = StatePool(CONFIG, SLOTS + KEPT, uploads, {"cell": START})
        self.places = StateCopier(self.pool, SLOTS, HOST, CONFIG.vocab_size, uploads)
        self.start = self.pool.gather([self.pool.initial_row])[0].cpu()
        self.states = dict.fromkeys(range(SLOTS + KEPT), self.start)
        self.logits: dict[int, Tensor] = {}
        self.chance = random.Random(0)

    def put(self, place: int, logits: bool) -> Load:
        """Something new at a place that has logits or not."""
        width = self.pool.width + CONFIG.vocab_size * logits
        whole = torch.tensor([self.chance.random() for _ in range(width)])
        self.states[place] = whole[: self.pool.width]
        self.logits.pop(place, None)
        if logits:
            self.logits[place] = whole[self.pool.width :]
        return Load(place, array("f", whole.tolist()).tobytes())

    def copy(self, source: int, target: int) -> Copy:
        self.states[target] = self.start if source == INITIAL else self.states[source]
        found = self.logits.get(source)
        self.logits.pop(target, None)
        if found is not None and not 0 <= target < SLOTS:
            self.logits[target] = found
        return Copy(source, target)

    def check(self) -> None:
        exports = [
            Store(ticket, place, place in self.logits) for ticket, place in enumerate(self.states)
        ]
        found = self.places.export(exports)
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize()
        for one in exports:
            state = torch.frombuffer(bytearray(exported(found)[one.ticket]), dtype=torch.float32)
            expected = self.states[one.source]
            if one.logits:
                expected = torch.cat([expected, self.logits[one.source]])
            assert torch.equal(state, expected), one.source


@pytest.mark.parametrize("device", DEVICES)
def test_random_moves(device: str) -> None:
    rows = Rows(device)
    chance = rows.chance
    everywhere = [*range(SLOTS + KEPT), *(~row for row in range(HOST))]
    for _ in range(60 if device == "cuda" else 300):
        moves: list[Copy | Load] = []
        for _ in range(chance.randrange(12)):
            target = chance.choice(everywhere)
            if chance.random() < 0.1:
                moves.append(rows.put(target, target >= SLOTS or target < 0))
            else:
                moves.append(rows.copy(chance.choice([INITIAL, *rows.states]), target))
        rows.places.carry_out(moves)
        rows.check()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_make_room_for_each_other_in_a_chain(device: str) -> None:
    """To main memory and on the device, and back again, by way of a row that is needed at once."""
    rows = Rows(device)
    first, second, out = SLOTS, SLOTS + 1, ~0
    rows.places.carry_out([rows.put(first, True), rows.put(second, True), rows.put(0, False)])
    chain = [(first, out), (second, first), (0, second), (out, 1), (INITIAL, 0), (1, 2), (out, ~1)]
    rows.places.carry_out([rows.copy(*one) for one in chain])
    rows.check()
    assert torch.equal(rows.states[2], rows.states[out]) and out in rows.logits


@pytest.mark.parametrize("device", DEVICES)
def test_slots_begin_anew_or_from_what_is_kept(device: str) -> None:
    rows = Rows(device)
    kept, out = SLOTS, ~0
    rows.places.carry_out([rows.put(kept, True), *(rows.put(row, False) for row in range(SLOTS))])
    # The state of a slot that is handed over is kept before another one begins there.
    rows.places.carry_out([rows.copy(0, out)])
    beginnings = [(0, None), (1, kept), (2, None)]
    rows.places.begin(
        [Admission(Request(id=slot, prompt=b""), slot, slot, one, 0) for slot, one in beginnings]
    )
    for slot, one in beginnings:
        rows.copy(INITIAL if one is None else one, slot)
    rows.check()
    rows.places.begin([])
    rows.check()
