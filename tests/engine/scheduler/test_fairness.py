"""The scheduler between owners and priorities: who gets slots, who gets a step's prompt tokens."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.config import SCAN_CHUNK
from engine.protocol.events import Finished
from engine.protocol.failed import Failed
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.scheduler.prefill_budget import PrefillBudget
from engine.sequence import Sequence
from tests.engine.witness import Witness


def ask(length: int = 1, max_tokens: int = 1, owner: str = "", priority: int = 0) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    prompt = pack_ids([1] * length)
    return Request(id=0, prompt=prompt, sampling=sampling, owner=owner, priority=priority)


def endings(witness: Witness) -> list[str]:
    """Owners in the order in which their requests ended."""
    return [witness.requests[whom].owner for whom in witness.ends]


def test_a_flood_of_one_owner_does_not_hold_up_another() -> None:
    witness = Witness(slots=2, share_slots=0, max_step_tokens=256, max_waiting=1000)
    for _ in range(500):
        witness.submit("c", ask(owner="flood", max_tokens=4))
    late = [witness.submit("c", ask(owner="late", max_tokens=4)) for _ in range(3)]
    while not set(late) <= set(witness.ends):
        witness.step()
    assert len(witness.ends) <= 3 + 5
    witness.finish()


def test_slots_go_to_owners_by_tokens_not_by_requests() -> None:
    witness = Witness(slots=1, share_slots=0, max_step_tokens=256, max_waiting=1000)
    for _ in range(40):
        witness.submit("c", ask(owner="long", max_tokens=40))
    for _ in range(400):
        witness.submit("c", ask(owner="short", max_tokens=4))
    while len(witness.ends) < 110:
        witness.step()
    ended = Counter(endings(witness))
    assert ended["short"] == pytest.approx(10 * ended["long"], rel=0.2)
    witness.finish()


def test_answers_that_end_early_cost_what_they_took() -> None:
    """Both owners generate four tokens a request, but one asks for up to a thousand."""
    witness = Witness(slots=1, share_slots=0, max_step_tokens=256, max_waiting=1000)

    def submit(owner: str, most: int) -> None:
        # From token 3 on the fake model says 4, 5, 6, end-of-text.
        sampling = SamplingParams(max_tokens=most, temperature=0)
        prompt = pack_ids([3])
        witness.submit("c", Request(id=0, prompt=prompt, sampling=sampling, owner=owner))

    for _ in range(100):
        submit("modest", 4)
        submit("generous", 1000)
    while len(witness.ends) < 60:
        witness.step()
    ended = Counter(endings(witness))
    assert abs(ended["modest"] - ended["generous"]) <= 2
    witness.finish()


def test_urgent_requests_overtake_and_the_others_end_too() -> None:
    witness = Witness(slots=1, share_slots=0, max_step_tokens=256, max_waiting=1000)
    for _ in range(20):
        witness.submit("c", ask(priority=5, max_tokens=2))
    for _ in range(20):
        witness.submit("c", ask(priority=-5, max_tokens=2))
    witness.finish()
    order = [witness.requests[whom].priority for whom in witness.ends]
    assert order[:7] == [-5] * 7 and order[7] == 5
    assert sum(priority == -5 for priority in order[:23]) == 20


def test_one_owner_cannot_have_others_refused() -> None:
    witness = Witness(slots=1, share_slots=0, max_step_tokens=256, max_waiting=8)
    flood = [witness.submit("c", ask(owner="flood", max_tokens=3)) for _ in range(50)]
    others = [witness.submit("c", ask(owner=owner, max_tokens=3)) for owner in "ab"]
    witness.finish()
    refused = [whom for whom in flood if isinstance(witness.ends[whom], Failed)]
    assert len(refused) == 50 - 1 - 6, "a slot, and three quarters of the queue"
    assert all(isinstance(witness.ends[whom], Finished) for whom in others)
    message = witness.ends[refused[-1]]
    assert isinstance(message, Failed) and message.code == "share_full"


def test_the_queue_is_bounded_in_tokens_too() -> None:
    witness = Witness(
        slots=1, share_slots=0, max_step_tokens=256, max_waiting=1000, max_waiting_tokens=1000
    )
    first = witness.submit("c", ask(length=5000))
    witness.step()
    queued = [witness.submit("c", ask(length=400)) for _ in range(4)]
    witness.finish()
    ends = [witness.ends[whom] for whom in (first, *queued)]
    assert [isinstance(end, Finished) for end in ends] == [True, True, True, False, False]
    assert isinstance(ends[3], Failed) and "800 prompt tokens" in ends[3].message


@pytest.mark.parametrize("priority", [-101, 101])
def test_priorities_are_bounded(priority: int) -> None:
    witness = Witness(slots=1, share_slots=0, max_step_tokens=256, max_waiting=8)
    whom = witness.submit("c", ask(priority=priority))
    witness.step()
    failed = witness.ends[whom]
    assert isinstance(failed, Failed) and failed.param == "priority"


# A step's prompt tokens.


def reading(key: int, length: int, owner: str) -> Sequence:
    return Sequence(key, "c", ask(length, owner=owner), (), 0.0)


def shared(
    budget: PrefillBudget, sequences: list[Sequence], in_chunks: bool = True
) -> Counter[str]:
    """One step: what each owner reads in it."""
    tokens: Counter[str] = Counter()
    for sequence, length in budget.share(sequences):
        assert length > 0
        assert not in_chunks or length == sequence.remaining or length % SCAN_CHUNK == 0
        sequence.position += length
        tokens[sequence.owner] += length
    return tokens


def test_owners_have_equal_parts_of_a_step() -> None:
    megabytes = [reading(key, 1_000_000, "a") for key in range(9)]
    other = reading(9, 1_000_000, "b")
    budget = PrefillBudget(2048)
    for _ in range(5):
        assert shared(budget, [*megabytes, other]) == {"a": 1024, "b": 1024}


def test_what_one_owner_leaves_goes_to_the_others() -> None:
    sequences = [reading(0, 10_000, "a"), reading(1, 10_000, "b"), reading(2, 100, "c")]
    tokens = shared(PrefillBudget(2048), sequences)
    assert tokens["c"] == 100
    assert sum(tokens.values()) > 2048 - SCAN_CHUNK, "no chunk is left over"
    assert abs(tokens["a"] - tokens["b"]) <= 2 * SCAN_CHUNK


@pytest.mark.parametrize("tokens", [50, SCAN_CHUNK, 3 * SCAN_CHUNK])
def test_parts_go_round_where_chunks_are_few(tokens: int) -> None:
    """Also where one owner's prompts are always new and short."""
    budget, total = PrefillBudget(tokens), Counter[str]()
    lasting = [reading(key, 10**6, owner) for key, owner in enumerate("abcde")]
    for step in range(60):
        brief = [reading(100 + step * 9 + i, 40, "brief") for i in range(9)]
        shares = budget.share([*lasting, *brief])
        assert 0 < sum(length for _, length in shares) <= tokens
        for sequence, length in shares:
            sequence.position += length
            total[sequence.owner] += length
    for owner in "abcde":
        assert total[owner] >= 60 * tokens / 6 * 0.7, total


@pytest.mark.parametrize("owners", ["a", "ab"])
@pytest.mark.parametrize("tokens", [50, SCAN_CHUNK, 200])
def test_the_first_and_the_others_take_turns_where_a_part_is_one_chunk(
    tokens: int, owners: str
) -> None:
    """Neither waits for the other to end, however long it is or however many of them come."""
    budget = PrefillBudget(tokens)
    long = [reading(key, 10**6, owner) for key, owner in enumerate(owners)]
    brief: list[Sequence] = []
    for step in range(120):
        if step % (4 * len(owners)) == 0:
            brief += [reading(1000 + step + key, 40, owner) for key, owner in enumerate(owners)]
        asking = [*long, *(one for one in brief if one.remaining)]
        shared(budget, asking, in_chunks=tokens >= SCAN_CHUNK)
    assert sum(one.remaining > 0 for one in brief) <= len(owners), "the last ones"
    for first in long:
        assert first.position >= 0.4 * 120 / len(owners) * min(tokens, SCAN_CHUNK)


def test_the_first_has_its_turn_also_when_others_never_end() -> None:
    budget, first = PrefillBudget(SCAN_CHUNK), reading(0, 10**6, "a")
    for step in range(100):
        shared(budget, [first, *(reading(1 + 9 * step + i, 100, "a") for i in range(9))])
    assert first.position == 50 * SCAN_CHUNK


def test_alone_an_owner_has_the_whole_step() -> None:
    first, second = reading(0, 5000, "a"), reading(1, 300, "a")
    assert PrefillBudget(1024).share([first, second]) == [(first, 640), (second, 300)]
    assert PrefillBudget(1024).share([]) == []
