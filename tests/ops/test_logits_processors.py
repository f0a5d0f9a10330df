"""apply_logits_processors_: each row by its slot's record, against float64; what is not finite."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import ops
from engine.ops.logits_processors import (
    IN_ANSWER,
    IN_PROMPT,
    RECORD_WORDS,
    Entry,
    pack_entries,
    record,
    reference,
)
from tests.ops.helpers import DEVICES, int32, same_bits

VOCABULARIES = [1, 7, 16, 17, 66, 5003, 8192, 32_000, 100_001]
NOTHING = (1.0, 0.0, 0.0)
ALWAYS = 2**31 - 1


@dataclass
class Asked:
    """What one slot's request asks for; no counts: nothing is penalised."""

    penalties: tuple[float, float, float] = NOTHING
    counts: list[int] | None = None
    entries: list[Entry] = field(default_factory=list)


class Records:
    """On a device, with the memory that they name."""

    def __init__(self, asked: Sequence[Asked], device: str) -> None:
        self.counts: list[Tensor | None] = []
        self.memory: list[Tensor] = []
        packed = b""
        for one in asked:
            there = 0
            if one.entries:
                self.memory.append(self._words(pack_entries(one.entries), device))
                there = self.memory[-1].data_ptr()
            counts = None
            if one.counts is not None:
                counts = torch.tensor(one.counts, dtype=torch.int32, device=device)
            self.counts.append(counts)
            at = 0 if counts is None else counts.data_ptr()
            packed += record(at, one.penalties, there, len(one.entries))
        self.words = self._words(packed, device).view(-1, RECORD_WORDS)

    def _words(self, packed: bytes, device: str) -> Tensor:
        return torch.frombuffer(bytearray(packed), dtype=torch.int32).to(device)


def random_asked(chance: random.Random, vocab: int) -> Asked:
    """Mostly of few tokens; entries may name one that is counted, and one is banned for a while."""
    asked = Asked()
    if chance.random() < 0.7:
        asked.penalties = (
            chance.choice([1.0, 1.25, 0.5, 3.0]),
            chance.choice([0.0, 0.75, -0.5]),
            chance.choice([0.0, 0.3, -0.1]),
        )
        asked.counts = [0] * vocab
        for _ in range(min(vocab, 300)):
            asked.counts[chance.randrange(vocab)] = chance.choice([1, 2, 3, 6, 101])
    if chance.random() < 0.7:
        ids = chance.sample(range(vocab), min(vocab, chance.choice([1, 5, 400])))
        asked.entries = [(id, chance.choice([2.5, -1.25, -100.0]), ALWAYS) for id in ids]
        banned = ids[: chance.choice([0, 1, 3])]
        asked.entries += [(id, -math.inf, 10) for id in banned]
    return asked


def random_masks(chance: random.Random, rows: int, vocab: int) -> tuple[list[Tensor], list[int]]:
    """Some masks, bool [vocab] each, with a word more than there has to be; whose each row's is."""
    masks = []
    for _ in range(3):
        few = torch.rand(vocab, generator=torch.Generator().manual_seed(chance.randrange(10**6)))
        masks.append(few < chance.choice([0.01, 0.5, 0.99]))
    return masks, [chance.choice([-1, 0, 1, 2, 3]) for _ in range(rows)]


def packed(masks: list[Tensor]) -> Tensor:
    vocab = len(masks[0])
    each = np.ones((len(masks), (vocab + 31) // 32 * 32 + 32), np.uint8)
    each[:, :vocab] = torch.stack(masks).numpy()
    return torch.from_numpy(np.packbits(each, axis=1, bitorder="little").view(np.int32))


def logits_of(rows: int, vocab: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_every_row_follows_the_record_of_its_slot(device: str, vocab: int) -> None:
    chance, slots = random.Random(vocab), 12
    asked = [random_asked(chance, vocab) for _ in range(slots)]
    records = Records(asked, device)
    of_rows = chance.sample(range(slots), slots)
    positions = [chance.choice([0, 1, 9, 10, 5000]) for _ in of_rows]
    tokens = [chance.randrange(vocab) for _ in of_rows]
    masks, mask_of = random_masks(chance, slots, vocab)
    logits = logits_of(slots, vocab, vocab)
    given = logits.clone().to(device)
    ops.apply_logits_processors_(
        given,
        int32(*tokens).to(device),
        int32(*of_rows).to(device),
        torch.tensor(positions, device=device),
        records.words,
        packed(masks).to(device),
        int32(*mask_of).to(device),
    )
    changed = 0
    for row, slot in enumerate(of_rows):
        one, before = asked[slot], logits[row]
        counts = torch.tensor(one.counts or [0] * vocab, dtype=torch.int32)
        if positions[row] > 0 and one.counts is not None:
            counts[tokens[row]] += IN_ANSWER
        possible = masks[mask_of[row]] if 0 <= mask_of[row] < len(masks) else None
        wanted = reference(before, counts, one.penalties, one.entries, positions[row], possible)
        got = given[row].cpu()
        torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-6)
        untouched = wanted == before.double()
        same_bits(got[untouched], before[untouched])
        changed += int((~untouched).sum())
        after = records.counts[slot]
        assert after is None or after.tolist() == counts.tolist()
    assert changed > 0


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_gpu_has_the_bits_of_a_cpu(vocab: int) -> None:
    chance = random.Random(vocab + 1)
    asked = [random_asked(chance, vocab) for _ in range(40)]
    logits, tokens = logits_of(40, vocab, 1), int32(*(chance.randrange(vocab) for _ in asked))
    slots, positions = int32(*range(40)), torch.tensor([i % 13 for i in range(40)])
    masks, mask_of = random_masks(chance, 40, vocab)
    both = []
    for device in ("cpu", "cuda"):
        records, given = Records(asked, device), logits.clone().to(device)
        places = (tokens.to(device), slots.to(device), positions.to(device))
        for _ in range(3):
            ops.apply_logits_processors_(
                given, *places, records.words, packed(masks).to(device), int32(*mask_of).to(device)
            )
        both.append(given.cpu())
    same_bits(*both)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_a_record_are_left_alone(device: str) -> None:
    """Padding, slots beyond the records and empty ones, also of what is not finite."""
    records = Records([Asked(), Asked(entries=[(1, 5.0, ALWAYS)])], device)
    logits = logits_of(4, 9, 0)
    logits[0, 3] = math.nan
    given = logits.clone().to(device)
    ops.apply_logits_processors_(
        given, int32(0, 0, 0, 0).to(device), int32(-1, 0, 2, 1).to(device),
        torch.zeros(4, dtype=torch.int64, device=device), records.words,
    )  # fmt: skip
    same_bits(given[:3].cpu(), logits[:3])
    assert float(given[3, 1]) == pytest.approx(float(logits[3, 1]) + 5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_is_counted_when_it_is_read_and_not_of_the_prompt(device: str) -> None:
    """Step after step: at position 0 it is the prompt's last, which was counted there."""
    records = Records([Asked((1.0, 0.5, 0.25), [0, IN_PROMPT, 0, 0])], device)
    read, told = [1, 2, 2, 3], []
    for position, token in enumerate(read):
        logits = torch.ones(1, 4, device=device)
        ops.apply_logits_processors_(
            logits, int32(token).to(device), int32(0).to(device),
            torch.tensor([position], device=device), records.words,
        )  # fmt: skip
        told.append(logits[0].tolist())
    assert told == [[1, 1, 1, 1], [1, 1, 0.25, 1], [1, 1, 0, 1], [1, 1, 0, 0.25]]
    assert records.counts[0] is not None and records.counts[0].tolist() == [0, 1, 4, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_finite_logits_stay_so_and_others_as_they_are(device: str) -> None:
    """So that a draw sees which rows are broken, and none is broken here."""
    most = torch.finfo(torch.float32).max
    counts = [IN_PROMPT] * 6
    entries: list[Entry] = [(5, most, ALWAYS), (0, -math.inf, ALWAYS), (6, -math.inf, ALWAYS)]
    records = Records([Asked((1e-30, -most, 0.0), [*counts, 0], entries)], device)
    row = [math.inf, -math.inf, math.nan, most, 1e38, 2.0, 1.0]
    mask = torch.tensor([False, False, False, True, True, True, True])
    for masked in (False, True):
        given = torch.tensor([row], device=device)
        masks = (packed([mask]).to(device), int32(0).to(device)) if masked else ()
        ops.apply_logits_processors_(
            given, int32(0).to(device), int32(0).to(device),
            torch.zeros(1, dtype=torch.int64, device=device), records.words, *masks,
        )  # fmt: skip
        got = given[0].tolist()
        assert got[:2] == [math.inf, -math.inf] and math.isnan(got[2])
        assert got[3:] == [most, most, most, -math.inf]


@pytest.mark.parametrize("device", DEVICES)
def test_extreme_penalties_rule_nothing_out(device: str) -> None:
    """However far each goes: it is a draw's to find none possible, or infinity minus itself."""
    most = torch.finfo(torch.float32).max
    for penalties in ((0.0, most, most), (most, -most, -most), (1.0, most, most)):
        counts = [IN_PROMPT + 4 * IN_ANSWER, IN_ANSWER, IN_PROMPT]
        records = Records([Asked(penalties, counts, [(0, -most, ALWAYS)])], device)
        given = torch.tensor([[5.0, -5.0, 3e38]], device=device)
        ops.apply_logits_processors_(
            given, int32(0).to(device), int32(0).to(device),
            torch.zeros(1, dtype=torch.int64, device=device), records.words,
        )  # fmt: skip
        assert given.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_no_penalty_makes_nan_of_an_impossible_token(device: str) -> None:
    """One of 1e-300 is 0 as float32."""
    records = Records([Asked((0.0, 0.0, 0.0), [IN_PROMPT] * 3)], device)
    given = torch.tensor([[1.0, -1.0, 2.0]], device=device)
    ops.apply_logits_processors_(
        given, int32(0).to(device), int32(0).to(device),
        torch.zeros(1, dtype=torch.int64, device=device), records.words,
        packed([torch.tensor([False, True, True])]).to(device), int32(0).to(device),
    )  # fmt: skip
    assert given[0].tolist() == [-math.inf, 0.0, torch.finfo(torch.float32).max]


@pytest.mark.gpu
def test_in_a_graph_rows_follow_the_records_as_they_are_then() -> None:
    records = Records([Asked(entries=[(1, 5.0, ALWAYS)]), Asked(entries=[(2, -9.0, 2)])], "cuda")
    logits, slots = torch.zeros(2, 40, device="cuda"), int32(0, 1).to("cuda")
    positions = torch.zeros(2, dtype=torch.int64, device="cuda")
    places = int32(0, 0).to("cuda"), slots, positions
    ops.apply_logits_processors_(logits, *places, records.words)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.apply_logits_processors_(logits, *places, records.words)
    logits.zero_()
    slots.copy_(int32(1, 0))
    positions.fill_(1)
    graph.replay()
    assert logits[0].tolist() == [0, 0, -9] + [0] * 37 and float(logits[1, 1]) == 5
    records.words[1] = 0  # who had the slot is gone
    logits.zero_()
    graph.replay()
    assert logits[0].abs().sum() == 0 and float(logits[1, 1]) == 5


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    records = Records([Asked(entries=[(1, 5.0, ALWAYS)])], device)
    places = int32(0, 0).to(device), int32(0, -1).to(device), torch.zeros(2).long().to(device)
    torch.library.opcheck(
        torch.ops.minserve.adjust_.default, (torch.zeros(2, 5).to(device), *places, records.words)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(2, 5, dtype=torch.float16), "logits must be float32"),
        (0, torch.zeros(5, 2).T, "rows must be contiguous, got stride"),
        (0, torch.zeros(2, 0), "1 to 2\\*\\*24 - 1 tokens"),
        (1, int32(0), "tokens must be \\[rows\\]"),
        (2, torch.zeros(2, dtype=torch.int64), "slots must be int32"),
        (3, int32(0, 0), "positions must be int64"),
        (4, torch.zeros(3, 7, dtype=torch.int32), "records must be \\[slots, 8\\]"),
        (4, torch.zeros(8, 3, dtype=torch.int32).T, "records must be contiguous"),
        (5, None, "masks and mask_of come together"),
        (5, torch.zeros(1, 1), "masks must be int32"),
        (5, torch.zeros(1, 0, dtype=torch.int32), "a bit for each of 5 tokens"),
        (6, int32(0), "mask_of must be \\[rows\\]"),
    ],
)
def test_bad_arguments_are_refused(
    device: str, index: int, value: Tensor | None, message: str
) -> None:
    arguments: list[Tensor | None] = [
        torch.zeros(2, 5), int32(0, 0), int32(0, 0), torch.zeros(2, dtype=torch.int64),
        torch.zeros(3, RECORD_WORDS, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32),
        int32(0, 0),
    ]  # fmt: skip
    arguments[index] = value
    with pytest.raises(RuntimeError, match=message):
        ops.apply_logits_processors_(
            *(None if one is None else one.to(device) for one in arguments)
        )
