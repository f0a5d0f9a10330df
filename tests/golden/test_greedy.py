"""The greedy texts of the bundled models, in fp32: the weights, the models and the operators
together still say what they said. Every choice has a margin that no rounding reaches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.protocol.events import Finished
from engine.protocol.requests import Request
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.token_ids import pack_ids

GOLDEN = json.loads((Path(__file__).parent / "greedy.json").read_text(encoding="utf-8"))
LEAST_MARGIN = 0.01  # nats between the two best tokens
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _answer(engine: Engine, request: Request) -> Finished:
    engine.add(None, request)
    finished: list[Finished] = []
    while engine.has_work:
        for events in engine.step().values():
            assert not events.failed
            finished += events.finished
    assert len(finished) == 1
    return finished[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda one: f"{one['model']}-{one['prompt'][:5]}")
def test_greedy_text(golden: dict[str, str], device: str) -> None:
    engine = Engine.load(
        EngineConfig(model=golden["model"], device=device, dtype="float32", max_slots=2)
    )
    sampling = SamplingParams(
        max_tokens=len(golden["text"]), temperature=0, ignore_eos=True, logprobs=2
    )
    prompt = pack_ids(golden["prompt"].encode())
    answer = _answer(engine, Request(id=1, prompt=prompt, sampling=sampling, stream=False))
    assert bytes(answer.tokens).decode() == golden["text"]
    margins = [best.top_logprobs[0] - best.top_logprobs[1] for best in answer.logprobs]
    assert min(margins) > LEAST_MARGIN
