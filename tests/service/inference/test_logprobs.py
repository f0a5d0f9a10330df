"""What is told of an answer that came whole is what its pieces tell one by one."""

from __future__ import annotations

import math
import random

import pytest

from engine.client.request_stream import Update
from engine.models.loader import resolve
from engine.protocol.events import Finished
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.token_ids import pack_ids
from service.inference.generation import Outcome
from service.inference.logprobs import LEAST_LOGPROB, LogprobArrays
from service.inference.output_text import OutputText, Piece
from service.text.tokenizer import Tokenizer
from tests.reports import in_float32, packed

VOCAB = 257
LOADED = Tokenizer.load(resolve("shakespeare-mingru"), VOCAB)
assert LOADED is not None
BYTES = LOADED


def random_reports(chance: random.Random, tokens: list[int], top: int) -> list[TokenLogprobs]:
    """Some impossible tokens; at times the token is among the best, and at times not."""
    told = []
    for token in tokens:
        best = chance.sample(range(VOCAB), top)
        values = sorted((in_float32(-chance.random() * 9) for _ in best), reverse=True)
        if top and chance.random() < 0.1:
            values[-1] = -math.inf
        if token in best:
            own = values[best.index(token)]
        else:
            own = chance.choice([in_float32(-chance.random()), -math.inf])
        told.append(TokenLogprobs(own, best, values, chance.random() < 0.5))
    return told


def update_of(tokens: list[int], told: list[TokenLogprobs], top: int) -> Update:
    finished = Finished(
        0, "length", 1, 0, len(tokens), answer=pack_ids(tokens), reports=packed(told, top)
    )
    return Update(list(tokens), [], [], finished)


def arrays_of(outcome: Outcome, shift: int) -> dict[str, object]:
    arrays = LogprobArrays(BYTES)
    arrays.add_told(outcome.told, shift)
    return arrays.to_dict()


def shown(piece: Piece) -> tuple[object, ...]:
    """All but how the answer ends, which an outcome's pieces do not say."""
    return piece.text, piece.offset, piece.count, piece.token, piece.logprobs


@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize("text", ["ascii", "mixed", "any"])
def test_columns_say_what_pieces_say(top: int, text: str) -> None:
    """Whole characters, characters of several tokens, and bytes that are none."""
    chance = random.Random(f"{top} {text}")
    mixed = "añ€😀b".encode()
    for _ in range(60):
        count = chance.choice([0, 1, 2, 9, 40])
        if text == "ascii":
            tokens = chance.choices(range(97, 123), k=count)
        elif text == "mixed":
            tokens = list((mixed * 9)[:count])
        else:
            tokens = chance.choices(range(VOCAB), k=count)
        told = random_reports(chance, tokens, top)
        prompt = [*"é".encode()][: chance.choice([1, 2])]
        whole = Outcome(OutputText(BYTES, prompt), wants_pieces=True)
        whole.take(update_of(tokens, told, top))
        one_by_one = OutputText(BYTES, prompt)
        update = update_of(tokens, told, top)
        assert update.finished is not None
        update.logprobs = update.finished.logprobs
        pieces = one_by_one.take(update)
        arrays = LogprobArrays(BYTES)
        arrays.add_told(pieces, shift=3)
        assert arrays_of(whole, 3) == arrays.to_dict()
        assert whole.text == "".join([piece.text for piece in pieces])
        assert whole.tokens == tokens
        assert [shown(one) for one in whole.pieces] == [shown(one) for one in pieces]
        output = whole.output
        assert (output.finish_reason, output.completion_tokens) == ("length", count)
        assert (one_by_one.finish_reason, one_by_one.completion_tokens) == ("length", count)


def test_what_json_cannot_hold_has_a_stand_in() -> None:
    told = [TokenLogprobs(-math.inf, [98, 99], [-0.5, -math.inf], False)]
    outcome = Outcome(OutputText(BYTES, [97]), wants_pieces=True)
    outcome.take(update_of([97], told, 2))
    arrays = arrays_of(outcome, 0)
    assert arrays["token_logprobs"] == [LEAST_LOGPROB]
    assert arrays["top_logprobs"] == [{"b": -0.5, "c": LEAST_LOGPROB, "a": LEAST_LOGPROB}]


def test_tokens_that_come_in_several_updates_keep_their_log_probabilities() -> None:
    """As those of an answer with stop strings do, of which the engine tells each."""
    told = random_reports(random.Random(1), [97, 98, 99], 2)
    outcome = Outcome(OutputText(BYTES, [96]), wants_pieces=True)
    outcome.take(Update([97, 98], told[:2], [], None))
    outcome.take(Update([99], told[2:], [], Finished(0, "length", 1, 0, 3)))
    assert [piece.logprobs for piece in outcome.pieces] == told
    assert (outcome.text, outcome.tokens) == ("abc", [97, 98, 99])
