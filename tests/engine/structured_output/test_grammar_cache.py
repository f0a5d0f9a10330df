"""Grammars: compiled once, on a thread, and kept within bounds."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from engine.errors import EngineError, InvalidRequest
from engine.protocol.sampling_params import Grammar, SamplingParams
from engine.structured_output import grammar_cache as module
from engine.structured_output.grammar_cache import GrammarCache
from tests.engine.texts import save_bytes


@pytest.fixture
def grammars(tmp_path: Path) -> GrammarCache:
    return GrammarCache(tmp_path, save_bytes(tmp_path))


def number(n: int) -> Grammar:
    return Grammar("regex", f"x{{{n + 1}}}")


def settle(grammars: GrammarCache, *some: Grammar) -> list[Grammar]:
    """Asks and waits; what was collected, in its order."""
    for one in some:
        grammars.ask(one)
    return finish(grammars)


def finish(grammars: GrammarCache) -> list[Grammar]:
    """Waits for all that is being compiled; what was collected, in its order."""
    collected: list[Grammar] = []
    deadline = time.monotonic() + 10
    while grammars.busy:
        assert time.monotonic() < deadline
        grammars.wait(0.1)
        collected += grammars.collect()
    return collected


def test_the_first_asks_and_all_others_find(grammars: GrammarCache) -> None:
    one = number(3)
    assert grammars.ask(one) is None and grammars.pending
    assert grammars.ask(one) is None
    assert settle(grammars) == [one]
    compiled = grammars.ask(Grammar("regex", one.text))
    assert compiled is not None and grammars.ask(one) is compiled
    assert not grammars.pending and grammars.collect() == []


def test_what_lacks(grammars: GrammarCache) -> None:
    wrong, right = Grammar("regex", "("), number(0)
    assert grammars.lacking(SamplingParams()) is None
    assert grammars.lacking(SamplingParams(grammar=right)) == right
    assert settle(grammars, wrong) == [right, wrong]
    assert grammars.lacking(SamplingParams(grammar=right)) is None
    assert isinstance(grammars.lacking(SamplingParams(grammar=wrong)), InvalidRequest)


def test_the_least_recently_used_are_forgotten(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_KEPT", 3)
    settle(grammars, *map(number, range(3)))
    assert grammars.ask(number(0)) is not None
    settle(grammars, number(3))
    assert grammars.ask(number(1)) is None
    assert all(grammars.ask(number(n)) for n in (0, 2, 3))


def test_kept_texts_are_bounded_but_the_latest_stays(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_KEPT_BYTES", 10)
    long = Grammar("choice", '["a text of its own length"]')
    settle(grammars, number(0))
    settle(grammars, number(1))
    settle(grammars, long)
    assert grammars.ask(long) is not None
    assert grammars.ask(number(0)) is None and grammars.ask(number(1)) is None


def test_those_that_took_long_are_few(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: Counter[int] = Counter()  # at the clock, by thread: others of this process have theirs

    def thread_time() -> float:
        looks[threading.get_ident()] += 1
        return float(looks[threading.get_ident()])

    monkeypatch.setattr(module.time, "thread_time", thread_time)
    monkeypatch.setattr(module, "MOST_KEPT_SECONDS", 3.0)  # each took one
    for n in range(5):
        settle(grammars, number(n))
    assert [grammars.ask(number(n)) is None for n in range(2, 5)] == [False] * 3
    assert grammars.ask(number(1)) is None


def test_one_is_compiled_again_beside_others(grammars: GrammarCache) -> None:
    one = number(3)
    assert grammars.originals(one) == []
    grammars.compile_again(one)  # of which nothing is known: nothing happens
    assert not grammars.busy
    settle(grammars, one)
    (first,) = grammars.originals(one)
    assert first is grammars.ask(one)
    grammars.compile_again(one)
    grammars.compile_again(one)  # one at a time
    assert grammars.busy and not grammars.pending, "nobody waits for it"
    assert finish(grammars) == [], "it is no news"
    found = grammars.originals(one)
    assert len(found) == 2 and found[0] is first is grammars.ask(one)
    assert found[1] is not first
    for original in found:
        copy = original.copy()
        assert all(copy.consume_token(ord("x")) for _ in range(4)) and copy.is_accepting()


def test_so_many_are_kept_beside_the_first_ones(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the least recently used grammar give way."""
    monkeypatch.setattr(module, "MOST_AGAIN", 3)
    some = [number(n) for n in range(3)]
    settle(grammars, *some)
    monkeypatch.setattr(module, "SECONDS_AGAIN", 10.0)

    def again(grammar: Grammar, times: int) -> list[int]:
        for _ in range(times):
            grammars.compile_again(grammar)
            finish(grammars)
        return [len(grammars.originals(one)) for one in some]

    assert again(some[0], 2) == [3, 1, 1]
    assert again(some[1], 1) == [3, 2, 1]
    grammars.ask(some[0])
    assert again(some[2], 1) == [3, 1, 2]
    assert again(some[0], 1) == [4, 1, 1]
    assert again(some[0], 1) == [4, 1, 1], "there is nobody else's"


def test_what_takes_long_or_is_wrong_is_compiled_once(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Grammar("regex", "(")
    settle(grammars, wrong, number(0))
    grammars.compile_again(wrong)
    monkeypatch.setattr(module, "SECONDS_AGAIN", 0.0)
    grammars.compile_again(number(0))
    assert not grammars.busy
    assert grammars.originals(wrong) == [] and len(grammars.originals(number(0))) == 1


def test_what_was_forgotten_meanwhile_stays_forgotten(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(grammars, number(0))
    grammars.compile_again(number(0))
    monkeypatch.setattr(module, "MOST_KEPT", 1)
    grammars.ask(number(1))
    assert finish(grammars) == [number(1)]
    assert grammars.ask(number(0)) is None
    assert finish(grammars) == [number(0)] and len(grammars.originals(number(0))) == 1


def test_a_model_without_texts_says_so_every_time(tmp_path: Path) -> None:
    grammars = GrammarCache(tmp_path, 257)
    settle(grammars, number(0), number(1))
    for n in range(2):
        found = grammars.ask(number(n))
        assert isinstance(found, InvalidRequest) and "tokenizer.json" in found.message
    assert isinstance(GrammarCache(None).ask(number(0)), InvalidRequest)


class Panic(BaseException):
    """As panics of the library's language are raised."""


@pytest.mark.parametrize("defect", [KeyError, Panic])
def test_a_tokenizer_that_cannot_be_read_is_told_too(
    defect: type[BaseException], grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise defect("a defect")

    monkeypatch.setattr(module, "load_tokens", broken)
    grammars.prepare()
    settle(grammars, number(0))
    assert isinstance(grammars.ask(number(0)), EngineError)


@pytest.mark.parametrize("defect", [KeyError, Panic])
def test_an_unforeseen_error_is_no_fault_of_the_request(
    defect: type[BaseException], grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise defect("a defect")

    monkeypatch.setattr(module, "compile_grammar", broken)
    settle(grammars, number(0))
    found = grammars.ask(number(0))
    assert isinstance(found, EngineError) and not isinstance(found, InvalidRequest)
    monkeypatch.undo()
    settle(grammars, number(1))
    assert not isinstance(grammars.ask(number(1)), EngineError)


PROGRAM = """
import sys, time
from pathlib import Path
from engine.structured_output.grammar_cache import GrammarCache
from engine.protocol.sampling_params import Grammar
grammars = GrammarCache(Path(sys.argv[1]), 257)
for n in range(5000):
    grammars.ask(Grammar("regex", f"(a|b|c){{{n + 100}}}x*"))
grammars.wait(20)
print(len(grammars.collect()))
"""


def test_a_process_ends_well_while_grammars_are_compiled(tmp_path: Path) -> None:
    save_bytes(tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < 5000
