"""Rounds of several steps that overlap: the same answers, whatever comes in between.

Random lives of an engine whose fake device keeps the rows of a batch by itself. Prompts are short
and answers long, so that batches go on for many rounds.
"""

from __future__ import annotations

import logging
import random
from collections import Counter

import msgspec
import pytest

from engine.cache.prefix_cache import PrefixCache
from engine.engine import Engine
from engine.errors import DeviceLost
from engine.protocol.events import Finished, StepEvents
from engine.protocol.requests import Request
from engine.protocol.sampling_params import MOST_STOP_IDS, SamplingParams
from engine.protocol.token_ids import pack_ids, unpack_ids
from engine.scheduler.decode_batch import DecodeBatch
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence
from engine.step_plan import Drawn, Sampled, StepPlan, StepResult
from engine.structured_output.grammar_cache import GrammarCache
from tests.engine.fake import FakeRunner, recite
from tests.engine.schedulers import make_scheduler
from tests.engine.witness import VOCAB, StrictRunner, Witness


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Injected failures log a traceback each."""
    caplog.set_level(logging.CRITICAL, logger="engine.engine")


def random_request(random: random.Random, hosted: float = 0.1) -> Request:
    stops = tuple(random.choices(range(VOCAB), k=random.random() < 0.2))
    if random.random() < hosted:  # the host has a part in its draws
        stops = (stops or (0,)) * MOST_STOP_IDS
    return Request(
        id=0,
        prompt=pack_ids(random.choices(range(VOCAB), k=random.choice([1, 1, 2, 5, 140]))),
        sampling=SamplingParams(
            temperature=0,
            max_tokens=random.choice([1, 2, 5, 20, 60, 150]),
            min_tokens=random.choice([0, 0, 1]),
            logprobs=random.choice([None, None, None, 0, 2]),
            ignore_eos=random.random() < 0.8,
            stop_token_ids=stops,
        ),
        stream=random.random() < 0.7,
        timeout=random.choice([None, None, 1]),
    )


def live(seed: int, most_steps: int, overlaps: bool) -> Witness:
    """A random life to its end; the witness has checked it."""
    chance = random.Random(seed)
    witness = Witness(
        slots=chance.choice([1, 2, 3, 6]),
        share_slots=chance.choice([0, 1, 5]),
        host_rows=chance.choice([0, 20]),
        max_waiting=chance.choice([0, 3, 50]),
        most_steps=most_steps,
        overlaps=overlaps,
    )
    witness.runner.decode_seconds = chance.choice([1e-6, 0.0004, 0.001])
    sent: list[tuple[str, int]] = []
    hosted = chance.choice([0.05, 0.1, 0.5])
    # What happens often differs from life to life.
    weights = [chance.choice([0, 1, 3]) for _ in range(7)]
    for _ in range(60):
        match chance.choices(range(8), [2, *weights])[0]:
            case 0 | 1:
                sent.append(witness.submit(chance.choice("ab"), random_request(chance, hosted)))
            case 2 | 3 | 4:
                witness.step()
            case 5 if sent:
                witness.abort(chance.choice(sent[-6:]))
            case 6 if sent:
                witness.step_with_abort_meanwhile(chance.choice(sent[-6:]))
            case 7:
                trouble = chance.randrange(5)
                if trouble == 0:
                    witness.failing_step(witness.runner.failures)
                elif trouble == 1:
                    witness.failing_step(witness.runner.start_failures)
                elif trouble == 2 and sent:
                    witness.runner.spoiled.add(sent[-1][1])
                elif trouble == 3:
                    witness.clock.now += 2
                else:  # somebody comes while a round is under way
                    request = random_request(chance, hosted)
                    witness.step(lambda request=request: sent.append(witness.submit("a", request)))
    witness.finish()
    return witness


QUICK = ((1, False), (2, True), (32, True))


@pytest.mark.parametrize(
    ("most_steps", "overlaps"),
    [
        pytest.param(steps, overlaps, marks=[] if (steps, overlaps) in QUICK else pytest.mark.slow)
        for steps in (1, 2, 7, 32)
        for overlaps in (False, True)
    ],
)
def test_every_life_keeps_the_promises(
    most_steps: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the lives are full enough to mean something."""
    seen: Counter[str] = Counter()
    carry_out = StrictRunner._carry_out

    def counting(runner: StrictRunner, plan: StepPlan) -> StepResult:
        ended = plan.again and any(row.slot < 0 for row in runner.batch)
        seen["several steps"] += plan.steps > 1
        seen["again"] += plan.again
        seen["again, some rows ended"] += ended
        seen["before the result"] += len(runner.begun) == 1
        seen["beside a prompt"] += plan.plain and bool(plan.prefill)
        seen["apart, before the result"] += plan.apart and len(runner.begun) == 1
        seen["apart, beside a batch"] += plan.apart and any(row.slot >= 0 for row in runner.batch)
        return carry_out(runner, plan)

    def handing_over(batch: DecodeBatch, sequence: Sequence) -> None:
        seen["slots handed over"] += 1
        seen["their states saved"] += sequence.key in saved
        hand_over(batch, sequence)

    def saving(cache: PrefixCache, sequence: Sequence) -> None:
        copy_answer(cache, sequence)
        if sequence.key in cache._answers:
            saved.add(sequence.key)

    saved: set[int] = set()
    hand_over, copy_answer = DecodeBatch.hand_over, PrefixCache.copy_answer
    monkeypatch.setattr(DecodeBatch, "hand_over", handing_over)
    monkeypatch.setattr(PrefixCache, "copy_answer", saving)
    monkeypatch.setattr(StrictRunner, "_carry_out", counting)
    ends: Counter[str] = Counter()
    for seed in range(150):
        witness = live(seed, most_steps, overlaps)
        ends.update(
            one.reason if isinstance(one, Finished) else one.code for one in witness.ends.values()
        )
    assert min(ends[way] for way in ("stop", "length", "abort", "timeout", "step_failed")) >= 10
    if most_steps > 1:
        assert min(seen[kind] for kind in ("several steps", "again", "beside a prompt")) >= 100
        assert seen["again, some rows ended"] >= 50
    unseen = overlaps and most_steps > 1
    kinds = "before the result", "slots handed over", "their states saved"
    for kind in (*kinds, "apart, before the result", "apart, beside a batch"):
        assert (seen[kind] >= 100) == unseen, kind


# One thing at a time.

LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


def ask(id: int, sampling: SamplingParams = LONG) -> Request:
    return Request(id=id, prompt=pack_ids([id]), sampling=sampling)


def tokens_of(events: StepEvents) -> dict[int, list[int]]:
    """What a message says, by request."""
    tokens: dict[int, list[int]] = {}
    for request, token in zip(events.requests, events.tokens, strict=True):
        tokens.setdefault(request, []).append(token)
    for request, several, _ in events.in_runs():
        tokens.setdefault(request, []).extend(several)
    return tokens


def test_a_round_lasts_about_two_milliseconds() -> None:
    """Of steps as long as the latest ones were; at most `most_steps`, at least one."""
    for seconds, steps in ((0.00057, 4), (0.0001, 20), (1e-7, 32), (0.5, 1)):
        runner = FakeRunner(most_steps=32)
        runner.decode_seconds = seconds
        engine = Engine(runner)
        engine.add("c", ask(1))
        lengths = [len(tokens_of(engine.step()["c"])[1]) for _ in range(5)]
        assert lengths == [2, 1, steps, steps, steps]


@pytest.mark.parametrize(
    ("stream", "may_stop", "answer", "steps"),
    [
        (False, True, 100, 8),
        (False, True, 600, 12),
        (False, False, 140, 13),
        (False, True, 5000, 16),
        (True, False, 5000, 4),
    ],
)
def test_rounds_of_a_large_batch_grow_with_its_answers(
    stream: bool, may_stop: bool, answer: int, steps: int
) -> None:
    """Of steps of half a millisecond, where nobody hears of a token before the end; more than
    four times as fast where all know how long their answers will be."""
    runner = FakeRunner(slots=100, max_waiting=100, most_steps=32, max_step_tokens=100)
    runner.decode_seconds = 0.0005
    engine = Engine(runner)
    sampling = SamplingParams(
        temperature=0, max_tokens=answer, ignore_eos=True, stop_token_ids=(0,) * may_stop
    )
    for id in range(100):
        request = Request(id=id, prompt=pack_ids([1]), sampling=sampling, stream=stream)
        engine.add("c", request)
    for _ in range(4):
        engine.step()
    assert [engine.step()["c"].stats.decode_steps for _ in range(3)] == [steps] * 3


@pytest.mark.parametrize(("answer", "steps"), [(26, 7), (24, 5), (22, 8), (40, 8)])
def test_a_round_ends_where_many_answers_do(answer: int, steps: int) -> None:
    """Unless that makes it half as long; else the rows of all these would be idle to its end."""
    runner = FakeRunner(slots=100, max_waiting=100, most_steps=32, max_step_tokens=100)
    runner.decode_seconds = 0.0005
    engine = Engine(runner)
    for id in range(100):
        count = answer if id < 90 else 100
        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        request = Request(id=id, prompt=pack_ids([1]), sampling=sampling, stream=False)
        engine.add("c", request)
    rounds = [engine.step()["c"].stats.decode_steps for _ in range(5)]
    assert rounds == [1, 1, 8, 8, steps], "the first two are untimed; 19 tokens, then the next ones"


def test_no_round_goes_beyond_the_longest_answer() -> None:
    runner = FakeRunner(most_steps=32)
    engine = Engine(runner)
    for id, length in enumerate((5, 12, 20)):
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        engine.add("c", ask(id, sampling))
    rounds = [tokens_of(engine.step()["c"]) for _ in range(3)]
    lengths = [{id: len(tokens) for id, tokens in one.items()} for one in rounds]
    assert lengths == [{0: 2, 1: 2, 2: 2}, {0: 1, 1: 1, 2: 1}, {0: 2, 1: 9, 2: 17}]
    assert not engine.has_work


# The host has a part in its draws.
HOSTED = msgspec.structs.replace(LONG, stop_token_ids=(0,) * MOST_STOP_IDS)


def told_in(engine: Engine, steps: int) -> list[dict[int, int]]:
    """How many tokens each request is told of, step after step."""
    told = [tokens_of(engine.step()["c"]) for _ in range(steps)]
    return [{id: len(tokens) for id, tokens in one.items()} for one in told]


def test_whom_the_host_draws_for_takes_turns_with_the_batch() -> None:
    """A step at a time; those of the batch have as many as ever. All are begun unseen."""
    runner = FakeRunner(most_steps=32, overlaps=True)
    engine = Engine(runner)
    engine.add("c", ask(1))
    engine.add("c", ask(2, HOSTED))
    assert told_in(engine, 4) == [{1: 2}, {2: 1}, {1: 1}, {2: 1}], "untimed rounds have one step"
    for _ in range(3):
        assert told_in(engine, 2) == [{1: 32}, {2: 1}]
        assert len(runner.begun) == 1, "the next one was begun before this one was known"
    engine.abort("c", [2])
    assert told_in(engine, 3) == [{1: 32}] * 3
    engine.add("c", ask(3, HOSTED))
    engine.abort("c", [1])
    assert told_in(engine, 4)[1:] == [{3: 1}] * 3


def test_without_a_device_beside_the_host_all_decode_together() -> None:
    """While the host draws for one, every round is one step: another would cost as much again."""
    engine = Engine(FakeRunner(most_steps=32))
    engine.add("c", ask(1))
    engine.add("c", ask(2, msgspec.structs.replace(HOSTED, max_tokens=4)))
    assert told_in(engine, 4) == [{1: 1, 2: 1}] * 4
    assert told_in(engine, 3) == [{1: 1}, {1: 32}, {1: 32}], "the first is untimed"


@pytest.mark.parametrize(("seconds", "steps"), [(0.0001, 4), (0.004, 8), (1.0, 16)])
def test_the_batch_goes_on_while_the_host_sees_to_the_others(seconds: float, steps: int) -> None:
    """Of steps of half a millisecond: as many as the host took, from 2 ms to 8."""

    class Slow(FakeRunner):
        def _carry_out(self, plan: StepPlan) -> StepResult:
            result = super()._carry_out(plan)
            result.host_seconds = seconds if plan.apart else 0.0
            return result

    runner = Slow(slots=100, max_waiting=100, most_steps=32, max_step_tokens=100, overlaps=True)
    runner.decode_seconds = 0.0005
    engine = Engine(runner)
    engine.add("c", ask(100, HOSTED))
    for id in range(90):
        engine.add("c", msgspec.structs.replace(ask(id), stream=False))
    told_in(engine, 8)
    rounds = [engine.step()["c"].stats.decode_steps for _ in range(6)]
    assert rounds == [1, steps] * 3


def test_a_prompt_that_waits_for_its_turn_does_not_hold_the_others_up() -> None:
    """Nor is it forgotten: those that wait are admitted in their order."""
    engine = Engine(FakeRunner(slots=3, most_steps=32, overlaps=True))
    engine.add("c", ask(1))
    told_in(engine, 3)
    for id, params in ((2, HOSTED), (3, LONG), (4, HOSTED)):
        engine.add("c", ask(id, params))
    told = [{*one} for one in told_in(engine, 6)]
    assert told == [{1}, {2}, {1, 3}, {2}, {1, 3}, {2}]
    engine.abort("c", [3])
    assert {2, 4} in [{*one} for one in told_in(engine, 4)]


def test_many_for_whom_the_host_draws_do_not_make_a_plain_prompt_wait() -> None:
    """Not for the sake of a batch that there is none of."""
    runner = FakeRunner(slots=200, max_waiting=200, most_steps=32, overlaps=True)
    engine = Engine(runner)
    for id in range(150):
        engine.add("c", ask(id, HOSTED))
    told_in(engine, 10)
    engine.add("c", ask(200))
    assert any(200 in told for told in told_in(engine, 4))


def test_prompts_share_the_budget_whatever_the_host_does_in_between() -> None:
    """A short one waits no longer for a long one beside somebody whom the host draws for."""
    waited = []
    for sampling in (LONG, HOSTED):
        runner = FakeRunner(slots=8, most_steps=32, overlaps=True, max_step_tokens=128)
        engine = Engine(runner)
        engine.add("c", ask(0, sampling))
        told_in(engine, 5)
        long = Request(id=1, prompt=pack_ids([5] * 12_800), sampling=LONG)
        engine.add("c", long)
        told_in(engine, 3)
        engine.add("c", ask(2))
        waited.append(next(step for step, told in enumerate(told_in(engine, 100)) if 2 in told))
    assert waited[0] <= 4 and waited[1] <= 2 * waited[0] + 2


def test_while_one_kind_of_prompts_is_held_the_other_decodes_without_a_gap() -> None:
    """Of those who wait for a prompt that another one reads, nobody can be admitted."""
    runner = FakeRunner(slots=40, max_waiting=60, most_steps=8, overlaps=True, max_step_tokens=128)
    engine = Engine(runner)
    for id in range(4):
        engine.add("c", ask(id))
    told_in(engine, 6)
    long = pack_ids([7] * 1280)
    engine.add("c", Request(id=10, prompt=long, sampling=LONG))
    told_in(engine, 2)
    for id in range(8):
        engine.add("c", Request(id=20 + id, prompt=long, sampling=HOSTED))
        engine.add("c", ask(40 + id))
    seen: set[int] = set()
    for told in told_in(engine, 12):
        assert told and len(runner.begun) == 1
        seen.update(told)
    assert seen >= {40 + id for id in range(8)}


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_slots_are_taken_whatever_kind_is_next_in_the_queue(share: float) -> None:
    """Prompts of one kind are admitted along with those of the other."""
    slots, chance = 64, random.Random(1)
    runner = FakeRunner(
        slots=slots, max_waiting=200, most_steps=32, overlaps=True, max_step_tokens=4096
    )
    runner.decode_seconds = 0.0005
    engine = Engine(runner)
    asked, waiting, running = 0, 0, []
    for step in range(150):
        for _ in range(slots + 30 - waiting):
            kind = HOSTED if chance.random() < share else LONG
            sampling = msgspec.structs.replace(kind, max_tokens=10 if kind is HOSTED else 60)
            prompt = pack_ids([asked % 200, 1])
            engine.add("c", Request(id=asked, prompt=prompt, sampling=sampling, stream=False))
            asked += 1
        stats = engine.step()["c"].stats
        waiting = stats.waiting
        if step >= 50:
            running.append(stats.running)
    assert sum(running) / len(running) > 0.9 * slots


def test_slots_are_handed_over_while_a_grammar_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarCache, "pending", True)
    handed: list[Sequence] = []
    hand_over = DecodeBatch.hand_over

    def noting(batch: DecodeBatch, sequence: Sequence) -> None:
        handed.append(sequence)
        hand_over(batch, sequence)

    monkeypatch.setattr(DecodeBatch, "hand_over", noting)
    engine = Engine(FakeRunner(slots=4, max_waiting=60, most_steps=8, overlaps=True))
    for id in range(40):
        engine.add("c", ask(id, msgspec.structs.replace(LONG, max_tokens=17)))
    while engine.has_work:
        engine.step()
    assert len(handed) > 10


def test_a_plan_of_those_the_host_draws_for_that_cannot_start_leaves_the_batch_alone() -> None:
    runner = FakeRunner(most_steps=4, overlaps=True)
    engine = Engine(runner)
    engine.add("c", ask(1))
    engine.add("c", ask(2, HOSTED))
    told_in(engine, 5)
    begun = []
    start = runner.start

    def failing(plan: StepPlan) -> StepResult | Exception:
        begun.append((plan.apart, plan.again))
        if plan.apart:
            raise RuntimeError("boom")
        return start(plan)

    runner.start = failing  # type: ignore[method-assign]
    told_in(engine, 4)
    assert begun.count((True, False)) == 1 and (False, False) not in begun
    assert (False, True) in begun


def test_slots_are_handed_over_to_those_who_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a plan that has nobody for them."""
    handed: list[int] = []
    hand_over = DecodeBatch.hand_over

    def noting(batch: DecodeBatch, sequence: Sequence) -> None:
        handed.append(sequence.request.id)
        hand_over(batch, sequence)

    monkeypatch.setattr(DecodeBatch, "hand_over", noting)
    engine = Engine(FakeRunner(slots=3, max_waiting=60, most_steps=4, overlaps=True))
    engine.add("c", ask(0, HOSTED))
    short = msgspec.structs.replace(LONG, max_tokens=9)
    for id in range(1, 30):
        engine.add("c", ask(id, short))
    started: list[int] = []
    for _ in range(60):
        before = len(handed)
        started = engine.step()["c"].started
        assert len(handed) - before <= len(started) + 1


def test_what_was_drawn_for_one_that_was_aborted_meanwhile_is_nobodys() -> None:
    """Also where a plan of the others has forgotten it before its round is over."""
    engine = Engine(FakeRunner(slots=2, most_steps=4, overlaps=True))
    engine.add("c", ask(1))
    engine.add("c", ask(2, HOSTED))
    engine.step()
    engine.step(lambda: engine.abort("c", [2]))
    engine.add("c", ask(3, HOSTED))
    told: dict[int, list[int]] = {1: [], 3: []}
    for _ in range(8):
        for id, tokens in tokens_of(engine.step()["c"]).items():
            told[id] += tokens
    assert told[3] == recite([3], len(told[3])) and len(told[3]) >= 3
    assert len(told[1]) > 8


def test_who_can_be_admitted_does_not_wait_for_the_batch_to_end() -> None:
    engine = Engine(FakeRunner(slots=2, most_steps=32, overlaps=True))
    engine.add("c", ask(1))
    for _ in range(4):
        engine.step()
    engine.add("c", ask(2))
    told = [tokens_of(engine.step()["c"]) for _ in range(2)]
    assert 2 in told[1], "a round was under way when it came, and then its prompt is read"


@pytest.mark.parametrize(
    ("batch", "seconds", "gathered"),
    [(10, 0.0005, [1, 1, 1, 1]), (500, 0.0005, [1, 3]), (500, 0.1, [1, 1, 1, 1])],
)
def test_prompts_are_gathered_for_a_large_and_quick_batch(
    batch: int, seconds: float, gathered: list[int]
) -> None:
    """One comes in every round, the first one after many without; how many are read together."""
    runner = FakeRunner(
        slots=600, max_waiting=600, most_steps=4, max_step_tokens=600, share_slots=0
    )
    runner.decode_seconds = seconds
    engine = Engine(runner)
    for id in range(batch):
        engine.add("c", Request(id=id, prompt=pack_ids([1]), sampling=LONG))
    for _ in range(7):
        engine.step()
    together: list[int] = []
    for id in range(600, 608):
        if id < 604:
            engine.add("c", Request(id=id, prompt=pack_ids([1]), sampling=LONG))
        together.append(engine.step()["c"].stats.prefill_tokens)
    assert [count for count in together if count] == gathered


def test_who_waits_without_a_free_slot_does_not_stop_the_batch() -> None:
    runner = FakeRunner(slots=1, most_steps=32, overlaps=True)
    engine = Engine(runner)
    engine.add("c", ask(1))
    engine.add("c", ask(2))
    for _ in range(4):
        engine.step()
    assert len(runner.begun) == 1
    assert len(tokens_of(engine.step()["c"])[1]) == 32


def plain_scheduler(slots: int) -> Scheduler:
    return make_scheduler(slots, share_slots=0, vocab_size=100, most_steps=32, overlaps=True)


def first_result(plan: StepPlan) -> StepResult:
    """Every chunk draws 5; a row draws 6 more than its number."""
    sampled = [Sampled(chunk.key, 5, None) for chunk in plan.prefill if chunk.sample]
    return StepResult(sampled, Drawn(pack_ids([6 + row for row in plan.at]), {}))


def test_the_row_of_an_aborted_sequence_ends_before_others_take_it_and_its_slot() -> None:
    scheduler = plain_scheduler(slots=4)
    for id in range(4):
        scheduler.enqueue("c", ask(id), 0.0)
    first = scheduler.schedule(0.0)
    assert first.plain and not first.again and first.at == [0, 1, 2, 3]
    assert [(row.token, row.position) for row in first.decode] == [(-1, 1)] * 4
    second = scheduler.schedule_ahead(0.0)
    assert second.again and (second.decode, second.leave) == ([], [])
    assert scheduler.schedule_ahead(0.0).empty, "one round ahead is enough"
    scheduler.abort("c", [2], "abort", 0.0)
    scheduler.enqueue("c", ask(9), 0.0)
    assert scheduler.events()["c"].stats.slots_used == 3
    scheduler.commit(first, first_result(first), 0.0)
    events = scheduler.events()["c"]
    assert tokens_of(events) == {0: [5, 6], 1: [5, 7], 3: [5, 9]}
    third = scheduler.schedule_ahead(0.0)
    assert third.again and third.leave == [2] and third.at == [2]
    assert [admission.slot for admission in third.admit] == [first.admit[2].slot]
    drawn = Drawn(pack_ids([16, 17, 18, 19]), {})
    scheduler.commit(second, StepResult(drawn=drawn), 0.0)
    assert tokens_of(scheduler.events()["c"]) == {0: [16], 1: [17], 3: [19]}
    result = StepResult([Sampled(third.prefill[0].key, 5, None)], drawn)
    scheduler.commit(third, result, 0.0)
    assert tokens_of(scheduler.events()["c"]) == {0: [16], 1: [17], 3: [19], 9: [5, 18]}


def test_what_a_sequence_has_drawn_is_known_when_it_leaves_its_batch() -> None:
    """However many rounds that was, and whenever it joined."""
    scheduler = plain_scheduler(slots=3)
    plain = Request(id=0, prompt=pack_ids([1]), sampling=LONG, stream=False)
    scheduler.enqueue("c", plain, 0.0)
    expected: dict[int, list[int]] = {0: [], 1: []}
    for step in range(700):
        if step == 450:
            scheduler.enqueue("c", msgspec.structs.replace(plain, id=1), 0.0)
        plan = scheduler.schedule(0.0)
        token = 10 + step % 80
        for chunk in plan.prefill:
            expected[chunk.key].append(5)
        for row in range(1 + (step >= 450)):
            expected[row].append(token + row)
        sampled = [Sampled(chunk.key, 5, None) for chunk in plan.prefill]
        assert plan.steps == 1
        drawn = Drawn(pack_ids([token, token + 1][: 1 + (step >= 450)]), {})
        scheduler.commit(plan, StepResult(sampled, drawn, decode_seconds=1.0), 0.0)
    scheduler.abort("c", None, "abort", 0.0)
    ended = {end.request: end.tokens for end in scheduler.events()["c"].finished}
    assert ended == expected


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_token_is_counted_once(overlaps: bool) -> None:
    """In the stats, whatever else the engine has begun when they are told."""
    engine = Engine(FakeRunner(slots=2, most_steps=4, overlaps=overlaps, share_slots=0))
    for id in range(5):
        sampling = SamplingParams(temperature=0, max_tokens=10 + id, ignore_eos=True)
        engine.add("c", Request(id=id, prompt=pack_ids([1, 2, 3]), sampling=sampling))
    stats = []
    while engine.has_work:
        stats.append(engine.step()["c"].stats)
    assert sum(one.decode_tokens for one in stats) == 10 + 11 + 12 + 13 + 14
    assert sum(one.prefill_tokens for one in stats) == 15
    assert all(one.batch_size in (1, 2) for one in stats)


def test_a_batch_goes_on_without_those_that_ended_until_it_is_thin() -> None:
    runner = FakeRunner(slots=8, most_steps=2, overlaps=True)
    engine = Engine(runner)
    for id in range(8):
        # The last two end early, then three more.
        length = 40 if id < 3 else 20 if id < 6 else 8
        engine.add("c", ask(id, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)))
    sizes = []
    while engine.has_work:
        engine.step()
        sizes.append(len(runner.batch))
    assert sorted(set(sizes), reverse=True) == [8, 3]


def test_what_the_device_ends_and_the_host_does_not_goes_on() -> None:
    """The host has the last word: a row that ended by mistake costs time, no token."""

    class Hasty(FakeRunner):
        def _carry_out(self, plan: StepPlan) -> StepResult:
            result = super()._carry_out(plan)
            if self.steps == 4:
                assert result.drawn is not None and self.batch[0].slot >= 0
                self.batch[0].slot = -1
                result.drawn.ended[0] = plan.steps
            return result

    def answer(runner: FakeRunner) -> list[int]:
        engine = Engine(runner)
        engine.add("c", Request(id=1, prompt=pack_ids(b"a"), sampling=LONG, stream=False))
        engine.add("c", ask(2))
        while True:
            for end in engine.step()["c"].finished:
                if end.request == 1:
                    return end.tokens

    hasty = Hasty(most_steps=8, overlaps=True)
    assert answer(hasty) == answer(FakeRunner())
    assert hasty.steps < 1.2 * 1000 / 8, "it went on at once, not when its neighbour had ended"


def test_a_round_that_fails_takes_the_one_started_after_it_along() -> None:
    runner = FakeRunner(most_steps=32, overlaps=True)
    engine = Engine(runner)
    engine.add("c", ask(1))
    for _ in range(3):
        engine.step()
    assert len(runner.begun) == 1
    runner.begun[0] = error = RuntimeError("boom")
    engine._started = type(engine._started)(engine._started.plan, error, None)  # type: ignore[union-attr]
    failed = engine.step()["c"].failed
    assert [(one.request, one.code) for one in failed] == [(1, "step_failed")]
    assert not engine.has_work and runner.begun == []
    engine.add("c", ask(2))
    assert tokens_of(engine.step()["c"]) == {2: recite([2], 2)}


def test_a_round_ahead_that_cannot_start_fails_after_the_one_before_it_is_told() -> None:
    runner = FakeRunner(most_steps=4, overlaps=True)
    engine = Engine(runner)
    engine.add("c", ask(1))
    for _ in range(3):
        engine.step()
    runner.start_failures = [RuntimeError("boom")]
    events = engine.step()["c"]
    assert tokens_of(events)[1] and [one.request for one in events.failed] == [1]
    assert not engine.has_work


def test_a_cuda_error_of_the_round_ahead_is_none_of_the_other_failures() -> None:
    """It spoils the process, whatever the round before it failed by."""
    runner = FakeRunner(most_steps=4, overlaps=True)
    engine = Engine(runner)
    engine.add("c", ask(1))
    for _ in range(3):
        engine.step()
    runner.begun[0] = error = RuntimeError("boom")
    engine._started = type(engine._started)(engine._started.plan, error, None)  # type: ignore[union-attr]
    runner.failures = [DeviceLost("CUDA error: device-side assert")]
    assert [one.code for one in engine.step()["c"].failed] == ["step_failed"]
    assert engine.broken is not None


def test_a_batch_shrinks_beside_requests_that_never_decode() -> None:
    """Those wait, and are read; they will not fill the rows of others that have ended."""
    runner = FakeRunner(slots=40, max_waiting=1000, most_steps=4, overlaps=True, share_slots=0)
    engine = Engine(runner)
    for id in range(20):
        length = 1000 if id < 2 else 20
        engine.add("c", ask(id, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)))
    nothing = SamplingParams(max_tokens=0)
    for id in range(20, 300):
        prompt = pack_ids([1, 2, 3])
        engine.add("c", Request(id=id, prompt=prompt, sampling=nothing, score=True, score_from=1))
        if id % 4 == 0:
            engine.step()
    assert len(runner.batch) == 2


def test_a_prompt_that_was_not_read_took_no_time() -> None:
    """Also where the round that is to read it has been planned."""
    engine = Engine(FakeRunner(most_steps=4, overlaps=True))
    engine.add("c", ask(1))
    for _ in range(3):
        engine.step()
    engine.add("c", ask(2))
    ended: list[Finished] = []
    while not ended:
        ended = engine.step(lambda: engine.abort("c", [2]))["c"].finished
    assert (ended[0].timing.prefill, ended[0].timing.decode) == (None, None)


def test_tokens_in_runs_are_packed_request_after_request() -> None:
    engine = Engine(FakeRunner(most_steps=3))
    for id in (1, 2):
        engine.add("c", ask(id))
    for _ in range(2):
        engine.step()
    (run,) = engine.step()["c"].runs
    assert (run.requests, run.length) == ([1, 2], 3)
    assert unpack_ids(run.tokens).tolist() == [*recite([1], 6)[-3:], *recite([2], 6)[-3:]]
