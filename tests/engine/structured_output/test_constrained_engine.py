"""Requests with grammars among others: held while theirs is compiled, each ends once, and what they
answer matches unless it was cut."""

from __future__ import annotations

import json
import random
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.protocol.events import Finished
from engine.protocol.failed import Failed
from engine.protocol.requests import Request
from engine.protocol.sampling_params import Grammar, SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.structured_output import grammar_cache as grammars_module
from engine.structured_output.compiler import compile_grammar
from tests.engine.fake import FakeClock, FakeRunner, recite
from tests.engine.structured_output.test_grammar_cache import settle
from tests.engine.test_engine import ends_of, serve
from tests.engine.texts import (
    matches,
    save_bytes,
    save_characters,
    save_merges,
    schemas,
    text_of,
)

DIGITS = Grammar("regex", "[0-9]{2,4}")
MOST_TOKENS = 400


def ask(id: int, grammar: Grammar | None = DIGITS, **sampling: Any) -> Request:
    params = {"max_tokens": 20, "seed": id, "grammar": grammar, **sampling}
    timeout = params.pop("timeout", None)
    return Request(
        id=id,
        prompt=pack_ids(b"abc"),
        sampling=SamplingParams(**params),
        stream=False,
        timeout=timeout,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_bytes(tmp_path)
    return tmp_path


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is compiled before this is set."""
    released = threading.Event()

    def compile_later(*arguments: Any) -> Any:
        assert released.wait(20)
        return compile_grammar(*arguments)

    monkeypatch.setattr(grammars_module, "compile_grammar", compile_later)
    return released


def text(end: Finished | Failed) -> str:
    assert isinstance(end, Finished), end
    return bytes(end.tokens).decode()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("most_steps", [1, 8])
def test_lives_of_all_kinds(
    most_steps: int, overlaps: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of many steps, of one, ahead of their results, with samples, aborts and failures."""
    for seed in range(12):
        chance = random.Random(seed)
        monkeypatch.setattr(grammars_module, "MOST_KEPT", chance.choice([1, 2, 128]))
        monkeypatch.setattr(grammars_module, "MOST_PENDING", chance.choice([1, 8]))
        runner = FakeRunner(
            slots=4, folder=folder, most_steps=most_steps, overlaps=overlaps, max_step_tokens=16
        )
        clock = FakeClock()
        engine, sent, ends = Engine(runner, clock), {}, {}
        for id in range(30):
            limit = chance.choice([1, 2, 6, 30])
            grammar = chance.choice([None, None, DIGITS, Grammar("regex", f"x{{{id % 5 + 1}}}y*")])
            sent[id] = ask(
                id, grammar, max_tokens=limit, min_tokens=chance.choice([0, limit]),
                ignore_eos=chance.random() < 0.5, timeout=chance.choice([None, None, 3.0]),
                temperature=chance.choice([0.0, 1.0]), logprobs=chance.choice([None, 1]),
            )  # fmt: skip
            owner, priority = chance.choice(["", "A", "B"]), chance.choice([-1, 0, 0, 3])
            sent[id] = msgspec.structs.replace(
                sent[id], owner=owner, priority=priority, cache_points=chance.choice([(), (2,)])
            )
            engine.add("c", sent[id])
            for _ in range(chance.randrange(4)):
                for key, end in ends_of(engine.step()).items():
                    assert ends.setdefault(key, end) is end, "it ended twice"
            if chance.random() < 0.2:
                engine.abort("c", [chance.randrange(id + 1)])
            if chance.random() < 0.1:
                clock.now += 2
        for key, end in serve(engine).items():
            assert ends.setdefault(key, end) is end, "it ended twice"
        assert {id for _, id in ends} == set(sent)
        for (_, id), end in ends.items():
            grammar = sent[id].sampling.grammar
            if grammar is not None and isinstance(end, Finished) and end.reason == "stop":
                assert re.fullmatch(grammar.text, text(end)), (id, end)
        waiting = engine._scheduler._queue
        assert len(waiting) == 0 and not waiting._levels and not waiting._held
        # Another round of requests finds everything as it was.
        engine.add("c", ask(99))
        assert re.fullmatch(DIGITS.text, text(serve(engine)["c", 99]))


def test_others_go_on_while_a_grammar_is_compiled(folder: Path, slow: threading.Event) -> None:
    engine = Engine(FakeRunner(folder=folder))
    engine.add("c", ask(0))
    engine.add("c", ask(1, None, temperature=0, max_tokens=8, ignore_eos=True))
    ends = {}
    for _ in range(9):
        ends |= ends_of(engine.step())
    assert set(ends) == {("c", 1)} and ends["c", 1].tokens == recite(b"abc", 8)
    slow.set()
    assert re.fullmatch(DIGITS.text, text(serve(engine)["c", 0]))


def test_plain_rounds_ahead_of_their_results_let_a_compiled_one_in(
    folder: Path, slow: threading.Event
) -> None:
    engine = Engine(FakeRunner(folder=folder, most_steps=8, overlaps=True))
    engine.add("c", ask(1, None, max_tokens=100_000, ignore_eos=True))
    engine.step()
    engine.add("c", ask(0))
    for _ in range(5):
        assert not ends_of(engine.step())
    slow.set()
    ends: dict[Any, Any] = {}
    for _ in range(3000):
        ends |= ends_of(engine.step())
        if ends:
            break
    assert set(ends) == {("c", 0)}
    engine.abort_all()
    serve(engine)


def test_rounds_take_many_steps_again_when_the_grammar_has_left(folder: Path) -> None:
    runner, letters = FakeRunner(folder=folder, most_steps=8), Grammar("regex", "[a-z]{200}")
    settle(runner.grammars, letters)
    engine = Engine(runner)

    def steps() -> int:
        return max(engine.step()["c"].stats.decode_steps for _ in range(6))

    engine.add("c", ask(0, None, max_tokens=100_000, ignore_eos=True))
    assert steps() == 8
    engine.add("c", ask(1, letters, max_tokens=200))
    for _ in range(6):
        engine.step()
    assert steps() == 1
    engine.abort("c", [1])
    assert steps() == 8
    engine.abort("c", [0])
    serve(engine)


def test_messages_are_heard_while_a_grammar_is_all_there_is(
    folder: Path, slow: threading.Event
) -> None:
    engine = Engine(FakeRunner(folder=folder))
    engine.add("c", ask(0))
    ends = ends_of(engine.step(lambda: engine.abort("c", [0])))
    assert ends["c", 0].reason == "abort"
    assert not engine.has_work
    slow.set()


def test_time_runs_out_while_a_grammar_is_compiled(folder: Path, slow: threading.Event) -> None:
    clock = FakeClock()
    engine = Engine(FakeRunner(folder=folder), clock)
    engine.add("c", ask(0, timeout=5.0))
    assert not ends_of(engine.step())
    clock.now += 6
    assert ends_of(engine.step())["c", 0].reason == "timeout"
    slow.set()


def test_more_grammars_than_are_kept_change_no_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "MOST_KEPT", 3)
    monkeypatch.setattr(grammars_module, "MOST_PENDING", 2)
    engine = Engine(FakeRunner(slots=1, folder=folder, step_seconds=0.01))
    for id in range(12):
        engine.add("c", ask(id, Grammar("regex", f"x{{{id % 4 + 1}}}y{{{id + 1}}}")))
    ends = serve(engine)
    assert [id for _, id in ends] == list(range(12))
    assert all(isinstance(end, Finished) for end in ends.values())


def test_a_flood_of_grammars_of_one_owner_does_not_hold_up_another(folder: Path) -> None:
    engine = Engine(FakeRunner(slots=2, folder=folder, max_waiting=1000))
    for id in range(200):
        request = ask(id, Grammar("regex", f"x{{{id + 1}}}"), max_tokens=3)
        engine.add("c", msgspec.structs.replace(request, owner="flood"))
    engine.add("c", msgspec.structs.replace(ask(200, max_tokens=3), owner="late"))
    ends: dict[Any, Any] = {}
    while ("c", 200) not in ends:
        ends |= ends_of(engine.step())
    assert len(ends) < 20
    engine.abort_all()
    serve(engine)


def test_a_wrong_grammar_fails_its_request_alone(folder: Path) -> None:
    engine = Engine(FakeRunner(folder=folder))
    for id, grammar in enumerate([Grammar("regex", "("), DIGITS, None]):
        engine.add("c", ask(id, grammar))
    ends = serve(engine)
    wrong = ends["c", 0]
    assert isinstance(wrong, Failed)
    assert wrong.code == "invalid_request" and "unclosed" in wrong.message
    assert isinstance(ends["c", 1], Finished) and isinstance(ends["c", 2], Finished)


@pytest.mark.parametrize("most_steps", [1, 8])
def test_a_dead_end_fails_its_request_alone(most_steps: int, tmp_path: Path) -> None:
    size = save_characters(tmp_path, "abcd")
    engine = Engine(FakeRunner(vocab_size=size, eos=None, folder=tmp_path, most_steps=most_steps))
    dead, alive = Grammar("regex", "a[bc]X|ad{30}"), Grammar("regex", "ad{30}")
    for id, grammar in enumerate([dead, alive, None]):
        bias = {1: 100.0} if grammar is dead else {}
        params = SamplingParams(max_tokens=40, grammar=grammar, logit_bias=bias)
        request = Request(id=id, prompt=pack_ids([2]), sampling=params, stream=False)
        engine.add("c", request)
    ends = serve(engine)
    failed = ends["c", 0]
    assert isinstance(failed, Failed) and failed.code == "invalid_request"
    assert "cannot be met" in failed.message and "tokens can spell" in failed.message
    assert ends["c", 1].tokens == [0] + [3] * 30 and len(ends["c", 2].tokens) == 40


@pytest.mark.parametrize("eos", [None, 3])
@pytest.mark.parametrize("sampling", [{}, {"min_tokens": 9}, {"ignore_eos": True}])
def test_what_the_tokens_cannot_go_on_with_is_complete(
    eos: int | None, sampling: dict[str, Any], tmp_path: Path
) -> None:
    size = save_characters(tmp_path, "abcd")
    engine = Engine(FakeRunner(vocab_size=size, eos=eos, folder=tmp_path))
    params = SamplingParams(max_tokens=9, grammar=Grammar("regex", "(ab){1,2}X?"), **sampling)
    engine.add("c", Request(id=0, prompt=pack_ids([2]), sampling=params, stream=False))
    end = serve(engine)["c", 0]
    assert isinstance(end, Finished), end
    assert (end.tokens, end.reason) in (([0, 1], "stop"), ([0, 1, 0, 1], "stop"))


def test_an_engine_without_texts_refuses(tmp_path: Path) -> None:
    for folder, reason in ((None, "does not support grammars"), (tmp_path, "tokenizer.json")):
        engine = Engine(FakeRunner(folder=folder))
        engine.add("c", ask(0))
        failed = serve(engine)["c", 0]
        assert isinstance(failed, Failed) and reason in failed.message
    engine.add("c", ask(1, Grammar("regex", "x" * (2**20 + 1))))
    failed = serve(engine)["c", 1]
    assert isinstance(failed, Failed) and failed.param == "grammar"


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        ({}, b"12", "stop"),
        ({"max_tokens": 2}, b"12", "stop"),  # complete with its last token
        ({"max_tokens": 1}, b"1", "length"),
        ({"min_tokens": 9}, b"12", "stop"),  # nothing can follow
        ({"ignore_eos": True}, b"12", "stop"),
        ({"stop_token_ids": (ord("2"),)}, b"1", "stop"),
    ],
)
def test_how_answers_end(
    sampling: dict[str, Any], tokens: bytes, reason: str, folder: Path
) -> None:
    engine = Engine(FakeRunner(folder=folder))
    engine.add("c", ask(0, Grammar("choice", '["12"]'), **sampling))
    end = serve(engine)["c", 0]
    assert isinstance(end, Finished)
    assert (bytes(end.tokens), end.reason) == (tokens, reason)
    assert end.completion_tokens == len(tokens)


def test_min_tokens_and_ignore_eos_hold_the_end_back_where_the_text_may_go_on(folder: Path) -> None:
    some = Grammar("regex", "(ab){1,6}")
    bias = {256: 100.0}
    ends = {}
    for id, sampling in enumerate([{}, {"min_tokens": 5}, {"ignore_eos": True}]):
        engine = Engine(FakeRunner(folder=folder))
        engine.add("c", ask(id, some, logit_bias=bias, **sampling))
        ends |= serve(engine)
    assert [text(ends["c", id]) for id in range(3)] == ["ab", "ababab", "ab" * 6]
    assert all(end.reason == "stop" for end in ends.values())


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schema=schemas(), seed=st.integers(0, 2**62), merged=st.booleans())
def test_answers_match_their_schemas(
    schema: dict[str, Any], seed: int, merged: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    size = (save_merges if merged else save_bytes)(folder)
    eos = 0 if merged else 256
    engine = Engine(FakeRunner(vocab_size=size, eos=eos, folder=folder, slots=4))
    grammar = Grammar("json", json.dumps(schema))
    for id in range(4):
        request = ask(id, grammar, max_tokens=MOST_TOKENS, seed=seed, choice=id, temperature=1.0)
        engine.add("c", request)
    for end in serve(engine).values():
        assert isinstance(end, Finished), end
        if end.reason == "stop":
            assert matches(json.loads(text_of(folder, end.tokens)), schema)
        else:
            assert (end.reason, len(end.tokens)) == ("length", MOST_TOKENS)
