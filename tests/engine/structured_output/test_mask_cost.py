"""Masks that take long: everybody goes on, and those who have them take turns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from engine.engine import Engine
from engine.protocol.sampling_params import Grammar, SamplingParams
from engine.structured_output import masks as mask_cost
from engine.structured_output import matchers as constraints_module
from engine.structured_output.grammar_cache import GrammarCache
from engine.structured_output.masks import ROUND_SECONDS, SLOW_SECONDS, MaskBudget, MaskCost
from engine.structured_output.matchers import GrammarMatchers
from tests.engine.fake import FakeRunner
from tests.engine.structured_output.test_constrained_engine import ask
from tests.engine.structured_output.test_grammar_cache import settle
from tests.engine.structured_output.test_matchers import allowed
from tests.engine.texts import save_bytes

LETTERS = Grammar("regex", "[a-z]{60}")


def test_a_budget_counts_slow_ones_alone() -> None:
    budget, slow = MaskBudget(), MaskCost(ROUND_SECONDS * 0.4)
    quick = MaskCost(SLOW_SECONDS / 2)
    assert all(budget.has_room(cost) for cost in [None, quick] * 1000)
    assert [budget.has_room(slow) for _ in range(5)] == [True] * 3 + [False] * 2
    assert budget.has_room(quick) and budget.has_room(None)
    assert MaskBudget().has_room(MaskCost(100.0)), "the first one"


def test_what_a_mask_takes_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When its grammar is compiled, and then by those that are slow."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += step
        return now

    grammars = GrammarCache(tmp_path, save_bytes(tmp_path))
    settle(grammars, LETTERS)
    cost = grammars.cost(LETTERS)
    assert cost is not None and 0 < cost.seconds < 1
    assert grammars.cost(Grammar("regex", "other")) is None
    constraints = GrammarMatchers(grammars, ())
    constraints.admit(1, SamplingParams(grammar=LETTERS))
    monkeypatch.setattr(constraints_module.time, "perf_counter", clock)
    cost.seconds, step = 0.0, 2 * SLOW_SECONDS
    for _ in range(20):
        allowed(constraints, 1)
    assert cost.seconds == pytest.approx(step, rel=0.1)
    step = SLOW_SECONDS / 10
    for _ in range(20):
        allowed(constraints, 1)
    assert cost.seconds < SLOW_SECONDS


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("most_steps", [1, 8])
def test_they_take_turns(
    most_steps: int, overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_bytes(tmp_path)
    monkeypatch.setattr(GrammarCache, "cost", lambda *_: MaskCost(ROUND_SECONDS * 0.6))
    runner = FakeRunner(slots=12, folder=tmp_path, most_steps=most_steps, overlaps=overlaps)
    engine = Engine(runner)
    slow, quick = range(7), range(7, 10)
    for id in (*slow, *quick):
        fields = {"max_tokens": 60, "ignore_eos": True}
        request = ask(id, LETTERS if id in slow else None, **fields)
        engine.add("c", msgspec.structs.replace(request, stream=True))
    ends, tokens, rounds = 0, Counter[int](), 0
    while engine.has_work:
        rounds += 1
        assert rounds < 2000
        for events in engine.step().values():
            assert not events.failed
            ends += len(events.finished)
            drawn = Counter(events.requests)
            for run in events.runs:
                drawn.update({id: run.length for id in run.requests})
            assert sum(drawn[id] for id in slow) <= 4, "two of a round, and two first tokens"
            tokens += drawn
            told = [tokens[id] for id in slow if 0 < tokens[id] < 60]
            assert max(told, default=0) - min(told, default=0) <= 16, "nobody is left behind"
    assert ends == 10 and tokens == Counter(dict.fromkeys(range(10), 60))
    assert mask_cost.SLOW_SECONDS < ROUND_SECONDS * 0.6
