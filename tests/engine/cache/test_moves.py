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
    """Places of a pool beside what each should hold: a state, and a hidden state where known."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        uploads = UploadRing(torch.device(device))
        self.pool = StatePool(CONFIG, SLOTS + KEPT, uploads, {"cell": START})
        self.places = StateCopier(self.pool, SLOTS, HOST, CONFIG.d_model, dtype, uploads)
        self.dtype = dtype
        self.start = self.pool.gather([self.pool.initial_row])[0].cpu()
        self.states = dict.fromkeys(range(SLOTS + KEPT), self.start)
        self.hidden: dict[int, Tensor] = {}
        self.chance = random.Random(0)

    def put(self, place: int, hidden: bool) -> Load:
        """Something new at a place that has a hidden state or not."""
        width = self.pool.width + CONFIG.d_model * hidden
        whole = torch.tensor([self.chance.random() for _ in range(width)])
        whole[self.pool.width :] = whole[self.pool.width :].to(self.dtype)
        self.states[place] = whole[: self.pool.width]
        self.hidden.pop(place, None)
        if hidden:
            self.hidden[place] = whole[self.pool.width :]
        return Load(place, array("f", whole.tolist()).tobytes())

    def copy(self, source: int, target: int) -> Copy:
        self.states[target] = self.start if source == INITIAL else self.states[source]
        found = self.hidden.get(source)
        self.hidden.pop(target, None)
        if found is not None and not 0 <= target < SLOTS:
            self.hidden[target] = found
        return Copy(source, target)

    def check(self) -> None:
        exports = [
            Store(ticket, place, place in self.hidden) for ticket, place in enumerate(self.states)
        ]
        found = self.places.export(exports)
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize()
        for one in exports:
            state = torch.frombuffer(bytearray(exported(found)[one.ticket]), dtype=torch.float32)
            expected = self.states[one.source]
            if one.hidden:
                expected = torch.cat([expected, self.hidden[one.source]])
            assert torch.equal(state, expected), one.source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_random_moves(device: str, dtype: torch.dtype) -> None:
    rows = Rows(device, dtype)
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
    rows = Rows(device, torch.float32)
    first, second, out = SLOTS, SLOTS + 1, ~0
    rows.places.carry_out([rows.put(first, True), rows.put(second, True), rows.put(0, False)])
    chain = [(first, out), (second, first), (0, second), (out, 1), (INITIAL, 0), (1, 2), (out, ~1)]
    rows.places.carry_out([rows.copy(*one) for one in chain])
    rows.check()
    assert torch.equal(rows.states[2], rows.states[out]) and out in rows.hidden


@pytest.mark.parametrize("device", DEVICES)
def test_slots_begin_anew_or_from_what_is_kept(device: str) -> None:
    rows = Rows(device, torch.float32)
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
