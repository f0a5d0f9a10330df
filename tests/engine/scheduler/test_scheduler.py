"""The scheduler alone: what it plans and how requests end, without torch and without a model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from engine.cache.prefix_cache import FEW_TOKENS
from engine.config import SCAN_CHUNK
from engine.errors import StepFailed
from engine.protocol.events import Finished
from engine.protocol.failed import Failed
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.scheduler.scheduler import Scheduler
from engine.slot_allocator import SlotAllocator
from engine.step_plan import Sampled, StepPlan, StepResult
from tests.engine.schedulers import make_scheduler

ROOT = Path(__file__).resolve().parents[3]
EOS = 9


def make(**changes: int) -> Scheduler:
    return make_scheduler(eos_token_ids=(EOS,), **changes)


def ask(id: int, length: int = 1, max_tokens: int = 4, token: int = 1, **fields: object) -> Request:
    sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens)
    prompt = pack_ids([token] * length)
    return Request(id=id, prompt=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


def run(scheduler: Scheduler, token: int = 2, now: float = 0.0) -> StepPlan:
    """One step in which every sequence that draws draws `token`."""
    plan = scheduler.schedule(now)
    keys = [chunk.key for chunk in plan.prefill if chunk.sample]
    keys += [row.key for row in plan.decode]
    scheduler.commit(plan, StepResult([Sampled(key, token, None) for key in keys]), now)
    return plan


def finish(scheduler: Scheduler, log: Log | None = None) -> list[StepPlan]:
    """Steps until everything has ended; the plans of these steps."""
    plans = []
    for _ in range(1000):
        if not scheduler.has_work:
            return plans
        plans.append(run(scheduler))
        if log is None:
            scheduler.events()
        else:
            log.read()
    raise AssertionError("the scheduler does not come to an end")


def lengths(plan: StepPlan) -> dict[int, int]:
    return {chunk.key: len(chunk.tokens) for chunk in plan.prefill}


class Log:
    """Everything a scheduler has said to one client."""

    def __init__(self, scheduler: Scheduler, client: object = "c") -> None:
        self.scheduler = scheduler
        self.client = client
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Finished | Failed] = {}

    def read(self) -> Log:
        events = self.scheduler.events().get(self.client)
        if events is None:
            return self
        for request, token in zip(events.requests, events.tokens, strict=True):
            self.tokens.setdefault(request, []).append(token)
        ends: Iterable[Finished | Failed] = [*events.finished, *events.failed]
        for end in ends:
            assert end.request not in self.ends, "a second terminal event"
            self.ends[end.request] = end
        return self

    def reason(self, id: int) -> str:
        end = self.ends[id]
        return end.reason if isinstance(end, Finished) else end.code


def test_scheduling_needs_no_torch() -> None:
    code = "import sys, engine.engine, engine.client.client; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "False"


# How requests end.


def test_max_tokens_end_with_length_and_eos_with_stop() -> None:
    scheduler = make()
    log = Log(scheduler)
    scheduler.enqueue("c", ask(0, max_tokens=2), 0)
    scheduler.enqueue("c", ask(1, max_tokens=5), 0)
    run(scheduler)
    run(scheduler)
    assert log.read().reason(0) == "length" and log.tokens == {0: [2, 2], 1: [2, 2]}
    run(scheduler, token=EOS)
    end = log.read().ends[1]
    assert isinstance(end, Finished)
    assert end.reason == "stop" and end.completion_tokens == 2
    assert log.tokens[1] == [2, 2], "the token that stops is not part of the answer"
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        (SamplingParams(max_tokens=9, stop_token_ids=(3,)), 3, "stop"),
        (SamplingParams(max_tokens=9, ignore_eos=True), EOS, None),
        (SamplingParams(max_tokens=9, min_tokens=1), EOS, None),
        (SamplingParams(max_tokens=9, min_tokens=1, stop_token_ids=(3,)), 3, None),
        (SamplingParams(max_tokens=1), 3, "length"),
        (SamplingParams(max_tokens=1), EOS, "stop"),
    ],
)
def test_finish_rule(sampling: SamplingParams, token: int, reason: str | None) -> None:
    scheduler = make()
    log = Log(scheduler)
    scheduler.enqueue("c", ask(0, sampling=sampling), 0)
    run(scheduler, token)
    log.read()
    assert (log.reason(0) if log.ends else None) == reason


def test_unstreamed_tokens_come_with_the_end() -> None:
    scheduler = make()
    log = Log(scheduler)
    scheduler.enqueue("c", ask(0, max_tokens=3, stream=False), 0)
    for token in (4, 5, 6):
        run(scheduler, token)
        log.read()
    end = log.ends[0]
    assert isinstance(end, Finished) and end.tokens == [4, 5, 6] and log.tokens == {}


def test_scoring_alone_ends_without_a_draw() -> None:
    scheduler = make()
    log = Log(scheduler)
    scheduler.enqueue("c", ask(0, length=3, max_tokens=0, score=True), 0)
    plan = run(scheduler)
    (chunk,) = plan.prefill
    assert chunk.targets is not None and list(chunk.targets) == [1, 1, -1] and not chunk.sample
    end = log.read().ends[0]
    assert isinstance(end, Finished)
    assert end.reason == "length" and end.completion_tokens == 0


def test_targets_begin_at_score_from_in_every_chunk() -> None:
    scheduler = make(max_step_tokens=SCAN_CHUNK)
    prompt = pack_ids([token % 9 for token in range(300)])
    request = Request(id=0, prompt=prompt, score=True, score_from=200)
    scheduler.enqueue("c", request, 0)
    first, second, third = run(scheduler), run(scheduler), run(scheduler)
    assert first.prefill[0].targets is None
    assert list(second.prefill[0].targets or []) == [-1] * (199 - 128) + [
        token % 9 for token in range(200, 257)
    ]
    assert list(third.prefill[0].targets or []) == [token % 9 for token in range(257, 300)] + [-1]


def test_timeouts_end_waiting_and_running_requests_with_what_they_have() -> None:
    scheduler = make(slots=1)
    log = Log(scheduler)
    scheduler.enqueue("c", ask(0, max_tokens=99, timeout=5.0), 0)
    scheduler.enqueue("c", ask(1, timeout=3.0), 0)
    scheduler.enqueue("c", ask(2, max_tokens=1), 0)
    run(scheduler, now=1.0)
    run(scheduler, now=4.0)
    assert log.read().reason(1) == "timeout" and 0 not in log.ends
    run(scheduler, now=6.0)
    end = log.read().ends[0]
    assert isinstance(end, Finished)
    assert (end.reason, end.completion_tokens) == ("timeout", 2)
    assert log.reason(2) == "length", "the slot is free again"


def test_abort_waiting_running_and_unknown() -> None:
    scheduler = make(slots=1)
    log = Log(scheduler)
    scheduler.enqueue("c", ask(0, max_tokens=99), 0)
    scheduler.enqueue("c", ask(1), 0)
    run(scheduler)
    scheduler.abort("c", [0], "stop", 0)
    scheduler.abort("c", [1, 1, 77], "abort", 0)
    scheduler.abort("other", [0], "abort", 0)
    assert log.read().reason(0) == "stop" and log.reason(1) == "abort"
    assert not scheduler.has_work and scheduler.schedule(0).empty


def test_abort_between_plan_and_commit_delivers_nothing_more() -> None:
    scheduler = make()
    log = Log(scheduler)
    scheduler.enqueue("c", ask(0, max_tokens=99), 0)
    plan = scheduler.schedule(0)
    scheduler.abort("c", [0], "abort", 0)
    scheduler.commit(plan, StepResult([Sampled(plan.prefill[0].key, 2, None)]), 0)
    assert log.read().tokens == {} and log.reason(0) == "abort"
    scheduler.enqueue("c", ask(1), 0)
    assert scheduler.schedule(0).release == [plan.prefill[0].key]


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (ask(0, length=0), "prompt"),
        (Request(id=0, prompt=b"abc"), "prompt"),
        (ask(0, token=10), "prompt"),
        (ask(0, token=-1), "prompt"),
        (ask(0, max_tokens=-1), "max_tokens"),
        (ask(0, length=3, score=True, score_from=0), "score_from"),
        (ask(0, length=3, score=True, score_from=4), "score_from"),
        (ask(0, length=3, score_top=-1), "score_top"),
        (ask(0, length=3, cache_points=(0,)), "cache_points"),
        (ask(0, length=3, cache_points=(2, 4)), "cache_points"),
        (ask(0, length=99, cache_points=tuple(range(1, 99))), "cache_points"),
        (ask(0, owner="x" * 65), "owner"),
        (ask(0, timeout=0.0), "timeout"),
        (ask(0, timeout=float("nan")), "timeout"),
        (ask(0, sampling=SamplingParams(temperature=float("nan"))), "temperature"),
        (ask(0, sampling=SamplingParams(temperature=-0.1)), "temperature"),
        (ask(0, sampling=SamplingParams(top_p=-0.1)), "top_p"),
        (ask(0, sampling=SamplingParams(top_p=1.1)), "top_p"),
        (ask(0, sampling=SamplingParams(min_p=-0.1)), "min_p"),
        (ask(0, sampling=SamplingParams(top_k=-1)), "top_k"),
        (ask(0, sampling=SamplingParams(repetition_penalty=0.0)), "repetition_penalty"),
        (ask(0, sampling=SamplingParams(presence_penalty=float("inf"))), "presence_penalty"),
        (ask(0, sampling=SamplingParams(frequency_penalty=float("nan"))), "frequency_penalty"),
        (ask(0, sampling=SamplingParams(logit_bias={10: 1.0})), "logit_bias"),
        (ask(0, sampling=SamplingParams(logit_bias={1: float("nan")})), "logit_bias"),
        (ask(0, sampling=SamplingParams(stop_token_ids=(-1,))), "stop_token_ids"),
        (ask(0, sampling=SamplingParams(seed=-1)), "seed"),
        (ask(0, sampling=SamplingParams(choice=-1)), "choice"),
        (ask(0, sampling=SamplingParams(logprobs=11)), "logprobs"),
        (ask(0, sampling=SamplingParams(max_tokens=2, min_tokens=3)), "min_tokens"),
    ],
)
def test_bad_requests_fail_alone(request_: Request, param: str) -> None:
    scheduler = make()
    log = Log(scheduler)
    scheduler.enqueue("c", ask(1, max_tokens=1), 0)
    scheduler.enqueue("c", request_, 0)
    run(scheduler)
    failed = log.read().ends[0]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.param) == ("invalid_request", param)
    assert failed.message.startswith(param) and "allowed" in failed.message
    assert log.reason(1) == "length"


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    scheduler = make(slots=2, max_waiting=3)
    log = Log(scheduler)
    for id in range(7):
        scheduler.enqueue("c", ask(id, max_tokens=1), 0)
    failed = [log.read().ends[id] for id in (5, 6)]
    assert len(log.ends) == 2
    assert all(isinstance(one, Failed) and one.code == "queue_full" for one in failed)
    waits = [one.retry_after for one in failed if isinstance(one, Failed)]
    assert 0 < (waits[0] or 0) < (waits[1] or 0), "those refused do not all come back at once"
    assert all("try again in" in one.message for one in failed if isinstance(one, Failed))
    run(scheduler)
    scheduler.enqueue("c", ask(7, max_tokens=1), 0)
    finish(scheduler, log)
    assert [log.reason(id) for id in (0, 1, 2, 3, 4, 7)] == ["length"] * 6


def test_retry_after_follows_the_pace_of_departures() -> None:
    scheduler = make(slots=1, max_waiting=1)
    log = Log(scheduler)
    for id in range(20):
        scheduler.enqueue("c", ask(id, max_tokens=1), 3.0 * id)
        scheduler.enqueue("c", ask(100 + id, max_tokens=1), 3.0 * id)
        run(scheduler, now=3.0 * id)
        log.read()
    for id in (200, 201):
        scheduler.enqueue("c", ask(id, max_tokens=1), 60.0)
    refused = [end for end in log.read().ends.values() if isinstance(end, Failed)]
    assert refused
    assert all(end.retry_after == pytest.approx(3.0, rel=0.5) for end in refused[-1:])


def test_the_stats_tell_the_pace_of_the_queue() -> None:
    scheduler = make(slots=1, max_waiting=50)
    for id in range(40):
        scheduler.enqueue("c", ask(id, max_tokens=1), 0.0)
    for step in range(40):
        run(scheduler, now=3.0 * step)
        pace = scheduler.events()["c"].stats.pace
    assert pace == pytest.approx(3.0, rel=0.1)


def test_no_refusal_promises_room_in_no_time() -> None:
    """However quick the queue moves: the header Retry-After has whole seconds too."""
    scheduler = make(slots=1, max_waiting=1)
    log = Log(scheduler)
    for id in range(20):
        scheduler.enqueue("c", ask(id, max_tokens=1), 1e-3 * id)
        run(scheduler, now=1e-3 * id)
    for id in range(200, 204):
        scheduler.enqueue("c", ask(id, max_tokens=1), 0.02)
    refused = [end for end in log.read().ends.values() if isinstance(end, Failed)]
    assert refused and all("try again in 1 s" in end.message for end in refused)


def test_no_waiting_allowed_still_uses_free_slots() -> None:
    scheduler = make(slots=2, max_waiting=0)
    log = Log(scheduler)
    for id in range(3):
        scheduler.enqueue("c", ask(id, max_tokens=1), 0)
    run(scheduler)
    assert [log.read().reason(id) for id in range(3)] == ["length", "length", "queue_full"]


def test_an_id_in_flight_is_not_taken_twice_but_clients_do_not_clash() -> None:
    scheduler = make()
    ours, theirs = Log(scheduler, "ours"), Log(scheduler, "theirs")
    scheduler.enqueue("ours", ask(0, max_tokens=2), 0)
    scheduler.enqueue("ours", ask(0, max_tokens=9), 0)
    scheduler.enqueue("theirs", ask(0, max_tokens=1), 0)
    run(scheduler)
    events = scheduler.events()
    assert [end.request for end in events["theirs"].finished] == [0]
    assert events["ours"].tokens == [2] and not events["ours"].finished
    run(scheduler)
    assert ours.read().reason(0) == "length" and theirs.read().ends == {}


def test_a_failed_step_fails_who_took_part_and_nobody_else() -> None:
    scheduler = make(slots=2, max_step_tokens=SCAN_CHUNK)
    log = Log(scheduler)
    scheduler.enqueue("c", ask(0, length=500, max_tokens=1), 0)
    run(scheduler)
    scheduler.enqueue("c", ask(1, length=200, max_tokens=1, cache_points=(150,)), 0)
    run(scheduler)  # admits 1, which gets no part of the budget
    run(scheduler)  # but has its turn, and then it is the first's again
    scheduler.enqueue("c", ask(2, length=200, max_tokens=1, cache_points=(150,)), 0)
    plan = scheduler.schedule(0)
    scheduler.fail(plan, StepFailed("boom"))
    assert log.read().reason(0) == "step_failed" and set(log.ends) == {0}
    plan = scheduler.schedule(0)
    assert 0 in plan.release
    scheduler.fail(plan, StepFailed("boom"))
    assert log.read().reason(1) == "step_failed"
    finish(scheduler, log)
    assert log.reason(2) == "length", "who waited for a prefix reads it when its reader failed"


def test_what_one_owner_has_read_or_reads_just_now_is_nothing_to_another() -> None:
    scheduler = make(slots=4)
    log = Log(scheduler)
    scheduler.enqueue("c", ask(0, length=9, max_tokens=1, cache_points=(8,), owner="a"), 0)
    scheduler.enqueue("c", ask(1, length=9, max_tokens=1, cache_points=(8,), owner="b"), 0)
    scheduler.enqueue("c", ask(2, length=9, max_tokens=1, cache_points=(8,), owner="a"), 0)
    first = run(scheduler).admit
    assert [(admission.request.id, admission.cached_tokens) for admission in first] == [
        (0, 0),
        (1, 0),  # does not wait for 0 to read the same tokens, as 2 does
    ]
    (again,) = run(scheduler).admit
    assert (again.request.id, again.cached_tokens) == (2, 8)
    finish(scheduler, log)
    scheduler.enqueue("c", ask(3, length=9, max_tokens=1), 0)
    scheduler.enqueue("c", ask(4, length=9, max_tokens=1, owner="c"), 0)
    scheduler.enqueue("c", ask(5, length=9, max_tokens=1, owner="b"), 0)
    assert [admission.cached_tokens for admission in run(scheduler).admit] == [0, 0, 9]


def test_sequences_with_infinite_logits_fail() -> None:
    scheduler = make()
    log = Log(scheduler)
    scheduler.enqueue("c", ask(0, max_tokens=1, length=5, cache_points=(5,)), 0)
    scheduler.enqueue("c", ask(1, max_tokens=1), 0)
    plan = scheduler.schedule(0)
    drawn = [Sampled(chunk.key, 2, None) for chunk in plan.prefill]
    scheduler.commit(plan, StepResult(drawn, non_finite=[plan.admit[0].key]), 0)
    assert log.read().reason(0) == "step_failed" and log.reason(1) == "length"
    assert log.tokens == {1: [2]}
    scheduler.enqueue("c", ask(2, length=6), 0)
    assert scheduler.schedule(0).admit[0].cached_tokens == 1, "a spoiled state is not shared"


# What a step reads.


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    scheduler = make()
    scheduler.enqueue("c", ask(0, max_tokens=99), 0)
    run(scheduler)
    scheduler.enqueue("c", ask(1, length=5000), 0)
    for position in range(1, 8):
        plan = run(scheduler)
        assert [(row.key, row.token, row.position) for row in plan.decode] == [(0, 2, position)]
        assert lengths(plan) == {1: 512}


@pytest.mark.parametrize("arrivals", [2, 5])
def test_short_prompts_overtake_a_long_one_but_do_not_starve_it(arrivals: int) -> None:
    scheduler = make(slots=50, max_waiting=1000, share_slots=0)
    log = Log(scheduler)
    scheduler.enqueue("c", ask(0, length=10_000, max_tokens=1), 0)
    newest = steps = 0
    while 0 not in log.read().ends:
        steps += 1
        for _ in range(arrivals):
            newest += 1
            scheduler.enqueue("c", ask(newest, length=100, max_tokens=1), 0)
        run(scheduler)
        if arrivals * 100 <= 256:
            assert log.read().reason(newest) == "length", "short prompts do not wait for it"
    assert steps <= 10_000 / 256 + 1, "half of the budget is the oldest prompt's"


def test_every_prompt_of_many_long_ones_is_read_in_the_end() -> None:
    scheduler = make(slots=3, max_step_tokens=256)
    log = Log(scheduler)
    for id in range(9):
        scheduler.enqueue("c", ask(id, length=2000 - 100 * id, max_tokens=1), 0)
    total = sum(2000 - 100 * id for id in range(9))
    for _ in range(2 * total // 256):
        run(scheduler)
    assert set(log.read().ends) == set(range(9))


def test_chunks_end_at_multiples_and_use_the_budget() -> None:
    scheduler = make(max_step_tokens=300)
    scheduler.enqueue("c", ask(0, length=1000), 0)
    assert [lengths(run(scheduler)) for _ in range(5)] == [
        {0: 256},
        {0: 256},
        {0: 256},
        {0: 232},
        {},
    ]


def test_a_budget_below_the_chunk_is_used_as_it_is() -> None:
    scheduler = make(max_step_tokens=50)
    scheduler.enqueue("c", ask(0, length=120), 0)
    assert [lengths(run(scheduler)) for _ in range(3)] == [{0: 50}, {0: 50}, {0: 20}]


def test_several_prompts_share_a_step() -> None:
    scheduler = make(max_step_tokens=512)
    for id, length in enumerate((700, 300, 30)):
        scheduler.enqueue("c", ask(id, length=length), 0)
    assert lengths(run(scheduler)) == {0: 256, 2: 30, 1: 128}
    assert lengths(run(scheduler)) == {0: 256, 1: 172}
    assert lengths(run(scheduler)) == {0: 188}


# Shared prefixes.


def test_one_reads_a_shared_prefix_and_the_others_start_from_it() -> None:
    scheduler = make(slots=4, share_slots=1)
    for id in range(3):
        prompt = pack_ids([1] * 300 + [id + 2] * 100)
        scheduler.enqueue("c", Request(id=id, prompt=prompt, cache_points=(300,)), 0)
    plan = run(scheduler)
    assert [one.key for one in plan.admit] == [0] and lengths(plan) == {0: 300}
    assert [(copy.source, copy.target) for copy in plan.after] == [(0, 4)]
    plan = run(scheduler)
    assert [(one.key, one.source, one.cached_tokens) for one in plan.admit] == [
        (1, 4, 300),
        (2, 4, 300),
    ]
    assert [(c.key, c.start, len(c.tokens)) for c in plan.prefill] == [
        (0, 300, 100),
        (1, 300, 100),
        (2, 300, 100),
    ]
    stats = scheduler.events()["c"].stats
    assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (800, 600)
    assert stats.state_bytes == 4 * 10
    assert (stats.prefix_hits, stats.prefix_misses) == (2, {"new": 1})


def test_chunks_count_from_the_mark_on_a_miss_and_on_a_hit() -> None:
    scheduler = make(slots=1, max_step_tokens=256)
    for id in range(2):
        prompt = pack_ids([1] * 300 + [id + 2] * 500)
        sampling = SamplingParams(max_tokens=1)
        scheduler.enqueue(
            "c", Request(id=id, prompt=prompt, cache_points=(300,), sampling=sampling), 0
        )
    read = [
        (chunk.key, chunk.start, len(chunk.tokens))
        for plan in finish(scheduler)
        for chunk in plan.prefill
    ]
    miss = [(0, 0, 256), (0, 256, 44), (0, 300, 256), (0, 556, 244)]
    assert read == [*miss, (1, 300, 256), (1, 556, 244)]


def test_the_next_in_line_reads_when_the_reader_leaves() -> None:
    scheduler = make(max_step_tokens=SCAN_CHUNK)
    for id in range(3):
        scheduler.enqueue("c", ask(id, length=400, max_tokens=1, cache_points=(300,)), 0)
    scheduler.enqueue("c", ask(3, max_tokens=1, token=5), 0)
    plan = run(scheduler)
    assert [one.key for one in plan.admit] == [0, 3], "those who wait hold up nobody else"
    scheduler.abort("c", [0], "abort", 0)
    assert [one.key for one in run(scheduler).admit] == [1]


@pytest.mark.parametrize(
    ("length", "points", "choices", "admitted"),
    [
        (FEW_TOKENS - 1, (), (0, 0, 0), [0, 1, 2]),
        (FEW_TOKENS, (), (0, 0, 0), [0]),
        (20, (20,), (0, 0, 0), [0]),
        (20, (18,), (0, 0, 0), [0]),
        (20, (), (0, 1, 2), [0, 1]),  # samples of one prompt: the third waits for the second
    ],
)
def test_while_rows_are_short_nobody_waits_for_a_short_prompt(
    length: int, points: tuple[int, ...], choices: tuple[int, ...], admitted: list[int]
) -> None:
    """Its state would not be kept."""
    scheduler = make(slots=100, max_step_tokens=4096)

    def keys_admitted(first: int, prompts: list[list[int]], **fields: object) -> list[int]:
        for id, ids in enumerate(prompts):
            sampling = SamplingParams(max_tokens=1, choice=choices[id] if fields else 0)
            request = Request(id=first + id, prompt=pack_ids(ids), sampling=sampling, **fields)  # type: ignore[arg-type]
            scheduler.enqueue("c", request, 0)
        return [one.key - first for one in run(scheduler).admit]

    twins = [[1] * length] * 2
    assert keys_admitted(0, twins) == [0], "the second goes on from the first's state"
    finish(scheduler)
    flood = [[2 + id % 6, 2 + id // 6] * 10 for id in range(36)]
    assert keys_admitted(2, flood) == list(range(36))
    finish(scheduler)
    assert keys_admitted(38, [[8] * length] * 3, cache_points=points) == admitted


@pytest.mark.parametrize(
    ("fields", "cached"),
    [
        ({"length": 301}, 300),
        ({"length": 300}, None),  # one token has to be read
        ({"length": 400, "score": True, "score_from": 301}, 300),
        ({"length": 400, "score": True, "score_from": 300}, None),
        ({"length": 400, "token": 2}, None),
    ],
)
def test_how_much_a_hit_may_cover(fields: dict[str, int], cached: int | None) -> None:
    scheduler = make()
    sampling = SamplingParams(max_tokens=0)
    scheduler.enqueue("c", ask(0, length=350, cache_points=(300,), sampling=sampling), 0)
    finish(scheduler)
    scheduler.enqueue("c", ask(1, **fields), 0)  # type: ignore[arg-type]
    (admission,) = scheduler.schedule(0).admit
    assert admission.cached_tokens == (cached or 0)
    assert (admission.source is None) == (cached is None)


def test_the_longest_prefix_wins_and_the_least_recently_used_goes() -> None:
    scheduler = make(share_slots=2)

    def serve(id: int, length: int, **fields: object) -> int:
        scheduler.enqueue("c", ask(id, length=length, max_tokens=1, **fields), 0)
        plan = run(scheduler)
        finish(scheduler)
        return plan.admit[0].cached_tokens

    assert serve(0, 100) == 0
    assert serve(1, 120) == 100
    assert serve(2, 100) == 100  # now 120 is the least recently used
    assert serve(3, 100, token=5) == 0
    assert serve(4, 130) == 100
    assert serve(5, 100, token=5) == 0, "130 has taken its row"


def test_marks_of_whole_chunks_split_prompts_nowhere_else() -> None:
    scheduler = make(with_whole_chunks=True, max_step_tokens=300)
    marks = (5, SCAN_CHUNK - 1, 2 * SCAN_CHUNK + 7, 3 * SCAN_CHUNK)
    scheduler.enqueue("c", ask(0, length=500, cache_points=marks, max_tokens=1), 0)
    plans = finish(scheduler)
    ends = [chunk.start + len(chunk.tokens) for plan in plans for chunk in plan.prefill]
    assert ends == [2 * SCAN_CHUNK, 3 * SCAN_CHUNK, 500]
    assert sum(len(plan.after) for plan in plans) == 3  # states kept: there, and at the end
    scheduler.enqueue("c", ask(1, length=2 * SCAN_CHUNK + 7, max_tokens=1), 0)
    (admission,) = scheduler.schedule(0).admit
    assert admission.cached_tokens == 2 * SCAN_CHUNK


def test_without_rows_nothing_is_shared_and_nobody_waits() -> None:
    scheduler = make(share_slots=0)
    for id in range(3):
        scheduler.enqueue("c", ask(id, length=100, cache_points=(50,)), 0)
    plan = run(scheduler)
    assert len(plan.admit) == 3 and not plan.after
    assert all(chunk.start + len(chunk.tokens) == 50 for chunk in plan.prefill)


def test_more_marks_in_a_step_than_rows() -> None:
    scheduler = make(slots=8, share_slots=1)
    log = Log(scheduler)
    for id in range(6):
        token = id % 3
        scheduler.enqueue("c", ask(id, length=60, token=token, cache_points=(50,), max_tokens=1), 0)
    for plan in finish(scheduler, log):
        assert len(plan.after) <= 1
    assert set(log.ends) == set(range(6))


@pytest.mark.parametrize("how", ["fails", "is aborted"])
def test_a_row_comes_back_when_its_snapshot_does_not_stand(how: str) -> None:
    scheduler = make(share_slots=1)
    scheduler.enqueue("c", ask(0, length=60, cache_points=(50,)), 0)
    plan = scheduler.schedule(0)
    assert [copy.target for copy in plan.after] == [4]
    if how == "fails":
        scheduler.fail(plan, StepFailed("boom"))
    else:
        scheduler.abort("c", [0], "abort", 0)
        scheduler.commit(plan, StepResult(), 0)
    scheduler.enqueue("c", ask(1, length=60, cache_points=(50,)), 0)
    plan = scheduler.schedule(0)
    assert plan.admit[0].source is None and [copy.target for copy in plan.after] == [4]


def test_slots_are_never_freed_twice() -> None:
    slots = SlotAllocator(3, first=5)
    assert [slots.allocate() for _ in range(3)] == [5, 6, 7]
    with pytest.raises(IndexError):
        slots.allocate()
    slots.release(6)
    for wrong in (6, 4, 8):
        with pytest.raises(ValueError, match="not allocated"):
            slots.release(wrong)
    assert slots.allocate() == 6 and slots.used == 3
