"""Adjustments: slots go from one request to the next, and so does what is asked for in them."""

from __future__ import annotations

import pytest
import torch

from engine.ops.upload import UploadRing
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.runner.sampling.logits_processors import LogitsProcessors
from engine.step_plan import Admission

VOCAB, EOS = 50, 49


def admit(adjustments: LogitsProcessors, slot: int, prompt: list[int], **sampling: object) -> None:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    request = Request(id=1, prompt=pack_ids(prompt), sampling=params)
    adjustments.admit([Admission(request, key=7, slot=slot, source=None, cached_tokens=0)])


def laid_on(
    adjustments: LogitsProcessors, slot: int, device: str, position: int = 0
) -> dict[int, float]:
    """What changes of logits of 1, by token."""
    logits = torch.ones(1, VOCAB, device=device)
    place = torch.tensor([slot], dtype=torch.int32, device=device)
    at = torch.tensor([position], device=device)
    adjustments.apply(logits, torch.zeros_like(place), place, at)
    return {id: value for id, value in enumerate(logits[0].tolist()) if value != 1}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_slot_has_what_its_latest_request_asked_for(device: str) -> None:
    adjustments = LogitsProcessors(30, VOCAB, (EOS,), UploadRing(torch.device(device)))
    for turn in range(3):
        for slot in range(30):
            assert adjustments.concern([slot]) == (turn > 0 and slot % 3 < 2)
            admit(adjustments, slot, [slot, 40 + turn], repetition_penalty=2.0)
            assert laid_on(adjustments, slot, device) == {slot: 0.5, 40 + turn: 0.5}
            if slot % 3 == 0:
                admit(adjustments, slot, [1], logit_bias={3: 1.5, 4: -1.0})
                assert laid_on(adjustments, slot, device) == {3: 2.5, 4: 0.0}
            if slot % 3 == 2:
                admit(adjustments, slot, [1])
                assert laid_on(adjustments, slot, device) == {}
        assert adjustments.concern(range(30))
        assert not adjustments.concern(range(2, 30, 3))


def test_ends_are_ruled_out_until_there_are_min_tokens() -> None:
    adjustments = LogitsProcessors(1, VOCAB, (EOS,), UploadRing(torch.device("cpu")))
    admit(adjustments, 0, [1], min_tokens=3, stop_token_ids=(5,), ignore_eos=True, max_tokens=9)
    banned = {5: -torch.inf, EOS: -torch.inf}
    assert [laid_on(adjustments, 0, "cpu", at) for at in (0, 2, 3)] == [banned, banned, {}]


def test_there_may_be_a_bias_for_every_token() -> None:
    adjustments = LogitsProcessors(2, VOCAB, (), UploadRing(torch.device("cpu")))
    admit(adjustments, 1, [1], logit_bias={id: 1.0 + id for id in range(VOCAB)})
    assert laid_on(adjustments, 1, "cpu") == {id: 2.0 + id for id in range(VOCAB)}


def test_who_draws_nothing_asks_for_nothing() -> None:
    adjustments = LogitsProcessors(1, VOCAB, (EOS,), UploadRing(torch.device("cpu")))
    admit(adjustments, 0, [1], logit_bias={1: 1.0}, max_tokens=0)
    assert not adjustments.concern([0]) and laid_on(adjustments, 0, "cpu") == {}


def test_a_request_that_fails_leaves_the_slot_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its record names is in use until that is another's."""
    adjustments = LogitsProcessors(2, VOCAB, (EOS,), UploadRing(torch.device("cpu")))
    admit(adjustments, 0, [1], logit_bias={3: 1.5})
    kept = adjustments._asked[0]

    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.raises(torch.OutOfMemoryError):
            admit(adjustments, 0, [1], repetition_penalty=2.0)
    assert adjustments._asked[0] is kept and laid_on(adjustments, 0, "cpu") == {3: 2.5}
    admit(adjustments, 0, [1])
    assert not adjustments.concern([0]) and laid_on(adjustments, 0, "cpu") == {}
    admit(adjustments, 0, [7], repetition_penalty=2.0)
    assert laid_on(adjustments, 0, "cpu") == {7: 0.5}
