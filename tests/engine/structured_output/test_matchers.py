"""Constraints: masks say what may follow, ends come where the text matches and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.protocol.sampling_params import Grammar, SamplingParams
from engine.structured_output import compiler as grammar_module
from engine.structured_output import matchers as module
from engine.structured_output.grammar_cache import GrammarCache
from engine.structured_output.masks import MaskThreads, Rows
from engine.structured_output.matchers import GrammarMatchers
from tests.engine.structured_output.test_grammar_cache import finish, settle
from tests.engine.texts import save_bytes, save_characters

EOS = 256
Admit = Callable[..., GrammarMatchers]


@pytest.fixture
def admit(tmp_path: Path) -> Admit:
    """Admits requests of one regular expression, or one each, with keys 0, 1, ..."""
    size = save_bytes(tmp_path)

    def admit(*texts: str, eos: tuple[int, ...] = (EOS,), **params: object) -> GrammarMatchers:
        grammars = GrammarCache(tmp_path, size)
        constraints = GrammarMatchers(grammars, eos)
        settle(grammars, *(Grammar("regex", text) for text in texts))
        for key, text in enumerate(texts):
            sampling = SamplingParams(grammar=Grammar("regex", text), **params)  # type: ignore[arg-type]
            constraints.admit(key, sampling)
        return constraints

    return admit


def allowed(constraints: GrammarMatchers, *keys: int, position: int = 0) -> list[set[int]]:
    bits = np.full((len(keys), constraints.words), 0x55555555, np.int32)
    constraints.fill(keys, [position] * len(keys), bits)
    each = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    return [{int(token) for token in np.flatnonzero(row)} for row in each]


def write(constraints: GrammarMatchers, key: int, text: str) -> list[bool]:
    """Takes a text's tokens, each of which must be allowed; after which the text was complete."""
    complete = []
    for token in text.encode():
        assert token in allowed(constraints, key)[0]
        complete.append(constraints.take(key, token))
    return complete


def ids(text: str) -> set[int]:
    return set(text.encode())


def test_the_end_is_allowed_where_the_text_matches(admit: Admit) -> None:
    constraints = admit("ab*|xyz")
    assert allowed(constraints, 0) == [ids("ax")]
    assert write(constraints, 0, "ab") == [False, False]
    assert allowed(constraints, 0) == [ids("b") | {EOS}]
    assert not constraints.take(0, EOS) and constraints.rejected() == {}


def test_a_text_that_nothing_can_follow_is_complete(admit: Admit) -> None:
    constraints = admit("ab?")
    assert write(constraints, 0, "ab") == [False, True]


@pytest.mark.parametrize(
    ("params", "eos", "ends"),
    [
        ({}, (), set()),
        ({"ignore_eos": True}, (EOS, 7), set()),
        ({"stop_token_ids": (7, 9)}, (EOS,), {7, 9, EOS}),
        ({"stop_token_ids": (7,)}, (), {7}),
        ({}, (EOS, 7), {EOS, 7}),
        ({"stop_token_ids": (9,)}, (7, EOS), {7, 9, EOS}),
    ],
)
def test_all_that_ends_an_answer_is_an_end(
    params: dict[str, object], eos: tuple[int, ...], ends: set[int], admit: Admit
) -> None:
    constraints = admit("a+", eos=eos, **params)
    assert allowed(constraints, 0) == [ids("a")]
    write(constraints, 0, "a")
    assert allowed(constraints, 0) == [ids("a") | ends]
    assert write(constraints, 0, "aa") == [False, False]


def test_a_stop_id_that_is_text_is_allowed_as_text_too(admit: Admit) -> None:
    newline = ord("\n")
    constraints = admit("a\n+b", stop_token_ids=(newline,))
    write(constraints, 0, "a")
    assert allowed(constraints, 0) == [{newline}]
    write(constraints, 0, "\n")  # its request has not ended by it: min_tokens
    assert allowed(constraints, 0) == [{newline, ord("b")}]


def test_special_tokens_are_no_text(tmp_path: Path) -> None:
    size = save_bytes(tmp_path)
    grammars = GrammarCache(tmp_path, size)
    constraints = GrammarMatchers(grammars, (EOS,))
    named = Grammar("grammar", 'start: "a" | <[256]> "b"')
    settle(grammars, named)
    constraints.admit(0, SamplingParams(grammar=named))
    assert allowed(constraints, 0) == [ids("a")]


def test_the_end_cannot_be_asked_for_by_its_number(tmp_path: Path) -> None:
    size = save_bytes(tmp_path)
    grammars = GrammarCache(tmp_path, size)
    constraints = GrammarMatchers(grammars, (EOS,))
    named = [
        Grammar("grammar", f"start: {text}")
        for text in ('"a" (<[257]> | <[256]>) "b"', '"a" | <[257]> "b"')
    ]
    settle(grammars, *named)
    for key, one in enumerate(named):
        constraints.admit(key, SamplingParams(grammar=one))
    assert allowed(constraints, 0, 1) == [ids("a"), ids("a")]
    constraints.take(0, ord("a"))
    allowed(constraints, 0)
    assert "tokens can spell" in constraints.rejected()[0]


def test_a_token_that_is_not_allowed_ends_in_a_rejection_of_that_sequence_alone(
    admit: Admit,
) -> None:
    constraints = admit("abc", "abd")
    assert not constraints.take(0, ord("x"))
    assert set(constraints.rejected()) == {0} and constraints.rejected() == {}
    first, second = allowed(constraints, 0, 1)
    assert len(first) >= 257 and second == ids("a")  # whatever it draws, it has failed
    assert set(constraints.rejected()) == {0}
    constraints.release([0])
    assert constraints.rows([0, 1, 2]) == [1] and constraints.rejected() == {}


def test_a_dead_end_of_a_vocabulary_is_told(tmp_path: Path) -> None:
    size = save_characters(tmp_path, "abcd")
    grammars, one = GrammarCache(tmp_path, size), Grammar("regex", "a[bc]X|ad+")
    constraints = GrammarMatchers(grammars, ())
    settle(grammars, one)
    constraints.admit(0, SamplingParams(grammar=one))
    for token in (0, 1):  # "ab", after which nothing but X can follow
        assert token in allowed(constraints, 0)[0]
        constraints.take(0, token)
    allowed(constraints, 0)
    assert "tokens can spell" in constraints.rejected()[0]


def test_masks_do_not_depend_on_who_else_has_one(admit: Admit) -> None:
    texts = [f"[a-{letter}]+{letter}" for letter in "bcdefghijk"]
    constraints = admit(*texts)
    keys = list(range(len(texts)))
    for _ in range(5):
        masks = allowed(constraints, *keys)
        assert masks == [allowed(constraints, key)[0] for key in keys]
        for key in keys:
            constraints.take(key, max(masks[key] - {EOS}))


class Calls:
    """Of the library's threads."""

    def __init__(self) -> None:
        self.masks: list[int] = []
        self.threads: list[str] = []  # who called
        self.broken = True  # every other one


@pytest.fixture
def broken_threads(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every other call of the library's threads raises, unless a test says no."""
    calls = Calls()

    def compute(self: MaskThreads, rows: Rows, out: NDArray[np.int32]) -> None:
        calls.masks.append(len(rows))
        calls.threads.append(threading.current_thread().name)
        if calls.broken and len(calls.masks) % 2 == 0:
            raise RuntimeError("a defect")
        real(self, rows, out)

    real = MaskThreads.compute
    monkeypatch.setattr(MaskThreads, "compute", compute)
    return calls


def two_crowds(folder: Path, sequences: int) -> GrammarMatchers:
    """Every other sequence writes "a"s, the others "b"s; there are two threads."""
    some = [Grammar("regex", text) for text in ("a+", "b+")]
    grammars = GrammarCache(folder, save_bytes(folder))
    settle(grammars, *some)
    constraints = GrammarMatchers(grammars, (EOS,), threads=2)
    for key in range(sequences):
        constraints.admit(key, SamplingParams(grammar=some[key % 2]))
    return constraints


@pytest.mark.parametrize("ahead", [False, True])
def test_threads_compute_the_masks_that_one_computes(
    ahead: bool, broken_threads: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of few grammars come and go, each at its own place in a text of its own."""
    monkeypatch.setattr(module, "CROWD", 2)
    monkeypatch.setattr(module, "SEVERAL", 6)
    monkeypatch.setattr(module, "WORTH_SECONDS", 0.0)
    some = [Grammar("regex", text) for text in ("(ab?c|d[a-f]*)+", "[abx]+y")]
    grammars = GrammarCache(tmp_path, save_bytes(tmp_path))
    settle(grammars, *some)
    alone, together = (
        GrammarMatchers(grammars, (EOS,)),
        GrammarMatchers(grammars, (EOS,), threads=3),
    )
    random, drawn = Random(0), dict[int, int]()  # how many tokens, by key
    for step in range(60):
        for key in range(10 * step, 10 * step + random.randrange(6)):
            sampling = SamplingParams(grammar=some[random.random() < 0.2], min_tokens=2)
            alone.admit(key, sampling)
            together.admit(key, sampling)
            drawn[key] = 0
        finish(grammars)
        keys = random.sample(sorted(drawn), len(drawn))
        masks, expected = (np.zeros((len(keys), alone.words), np.int32) for _ in range(2))
        alone.fill(keys, [drawn[key] for key in keys], expected)
        together.fill(keys, [drawn[key] for key in keys], masks)
        assert np.array_equal(masks, expected)
        for key, row in zip(keys, masks, strict=True):
            each = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token = int(random.choice(each)) if random.random() > 0.05 else ord("z")
            assert together.take(key, token) == alone.take(key, token)
            drawn[key] += 1
        if ahead:
            together.begin(keys)
        rejected = alone.rejected()
        assert rejected == together.rejected()
        ended = [key for key in keys if key in rejected or random.random() < 0.1]
        alone.release(ended)
        together.release(ended)
        for key in ended:
            del drawn[key]
    assert len(broken_threads.masks) > 20 and min(broken_threads.masks) >= 6
    assert ("masks_0" in broken_threads.threads) == ahead
    assert [len(grammars.originals(one)) for one in some] == [3, 3], "one for each thread"


#: Each text adds states to the lexer, the same ones only where it has the same letters.
WINDOW = r"(.|\n)*[A-Z](.|\n){0,30}[.!?]|TAG"


def walk(constraints: GrammarMatchers, keys: list[int], random: Random, tokens: int) -> None:
    """Writes on, any text that is allowed."""
    for position in range(tokens):
        for key, allows in zip(keys, allowed(constraints, *keys, position=position), strict=True):
            letters = sorted(allows & ids("ABCabc .?!") - {EOS})
            assert not constraints.take(key, random.choice(letters or [ord(".")]))


@pytest.mark.parametrize("together", [1, 3])
def test_a_lexer_that_others_have_filled_is_replaced(
    together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "LEXER_STATES", 600)
    one, grammars = Grammar("regex", WINDOW), GrammarCache(tmp_path, save_bytes(tmp_path))
    settle(grammars, one)
    (first,) = grammars.originals(one)
    constraints, random = GrammarMatchers(grammars, (EOS,)), Random(1)
    for begin in range(0, 24, together):
        keys = list(range(begin, begin + together))
        for key in keys:
            constraints.admit(key, SamplingParams(grammar=one))
        walk(constraints, keys, random, 25)
        assert constraints.rejected() == {}
        constraints.release(keys)
        if not grammars.originals(one):
            settle(grammars, one)  # as the next request does
    assert first not in grammars.originals(one), "it was full"


def test_a_full_lexer_ends_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is to be found out whether the model's tokens can go on."""
    monkeypatch.setattr(grammar_module, "LEXER_STATES", 400)
    letters = "ABCabc .?!"
    one = Grammar("regex", r"(.|\n)*[A-Z](.|\n){0,80}")
    grammars = GrammarCache(tmp_path, save_characters(tmp_path, letters))
    settle(grammars, one)
    (first,) = grammars.originals(one)
    constraints, random = GrammarMatchers(grammars, ()), Random(1)
    for key in range(60):
        constraints.admit(key, SamplingParams(grammar=one))
        written = ""
        for position in range(25):
            (allows,) = allowed(constraints, key, position=position)
            choices = [token for token in sorted(allows) if token < len(letters)]
            token = random.choice(choices)
            written += letters[token]
            complete = constraints.take(key, token)
            assert constraints.rejected() == {} and not complete, written
        constraints.release([key])
        if not grammars.originals(one):
            settle(grammars, one)
    assert first not in grammars.originals(one), "it was full"


def test_a_panic_while_a_lexer_is_replaced_costs_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object) -> None:
        raise Panic("a defect")

    monkeypatch.setattr(grammar_module, "LEXER_STATES", 600)
    one, other = Grammar("regex", WINDOW), Grammar("regex", "[ab]+")
    grammars = GrammarCache(tmp_path, save_bytes(tmp_path))
    settle(grammars, one, other)
    constraints, random = GrammarMatchers(grammars, (EOS,)), Random(1)
    for key, grammar in enumerate((one, one, other)):
        constraints.admit(key, SamplingParams(grammar=grammar))
    monkeypatch.setattr(GrammarCache, "replace", panic)
    while not (rejected := constraints.rejected()):
        walk(constraints, [0], random, 1)
    assert rejected == {0: "the matcher failed: Panic"}
    assert allowed(constraints, 2) == [ids("ab")]


def test_a_text_that_fills_a_lexer_by_itself_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody else, before or after."""
    monkeypatch.setattr(grammar_module, "LEXER_STATES", 600)
    one, grammars = Grammar("regex", WINDOW), GrammarCache(tmp_path, save_bytes(tmp_path))
    settle(grammars, one)
    constraints, random = GrammarMatchers(grammars, (EOS,)), Random(1)
    for key in range(2):
        constraints.admit(key, SamplingParams(grammar=one))
    while not (rejected := constraints.rejected()):
        walk(constraints, [1], random, 1)
    assert "too many states" in rejected[1] and set(rejected) == {1}
    settle(grammars, one)
    constraints.admit(2, SamplingParams(grammar=one))
    walk(constraints, [0, 2], random, 5)
    assert constraints.rejected() == {}


@pytest.mark.parametrize("worth", [1.0, 1e-9])
def test_threads_are_for_masks_that_take_long(
    worth: float, broken_threads: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CROWD", 1)
    monkeypatch.setattr(module, "SEVERAL", 4)
    monkeypatch.setattr(module, "WORTH_SECONDS", worth)
    one, grammars = Grammar("regex", "[ab]+"), GrammarCache(tmp_path, save_bytes(tmp_path))
    settle(grammars, one)
    constraints = GrammarMatchers(grammars, (EOS,), threads=2)
    for key in range(20):
        constraints.admit(key, SamplingParams(grammar=one))
        assert allowed(constraints, *range(key + 1)) == [ids("ab")] * (key + 1)
        finish(grammars)
    is_worth = worth < 1.0
    assert len(grammars.originals(one)) == 1 + is_worth
    assert bool(broken_threads.masks) == is_worth


def test_how_long_masks_take_is_learned_again(
    broken_threads: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What made threads worth their while may have gone."""
    broken_threads.broken = False
    monkeypatch.setattr(module, "LEARN_EVERY", 3)
    monkeypatch.setattr(module, "WORTH_SECONDS", 0.0)
    constraints = two_crowds(tmp_path, 16)
    for _ in range(6):
        allowed(constraints, *range(16))
    assert broken_threads.masks == [16] * 4, "two of three"
    monkeypatch.setattr(module, "WORTH_SECONDS", 1.0)
    allowed(constraints, *range(16))
    assert len(broken_threads.masks) == 4


def test_few_masks_are_not_begun_nor_those_of_one_crowd(
    broken_threads: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(module, "SEVERAL", 4)
    monkeypatch.setattr(module, "CROWD", 99)
    constraints = two_crowds(tmp_path, 6)
    constraints.begin([])
    constraints.begin([0, 1, 2, 99])
    assert broken_threads.masks == []
    constraints.begin([0, 1, 2, 3])
    constraints.begin([0, 1, 2, 3, 4])
    assert broken_threads.masks == [4, 5] and set(broken_threads.threads) == {"masks_0"}
    constraints.release([1, 3])
    constraints.begin([0, 2, 4, 5])
    assert len(broken_threads.masks) == 2, "three of four would wait for each other"


def test_without_a_thread_masks_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    monkeypatch.setattr(module, "WORTH_SECONDS", 0.0)
    constraints = two_crowds(tmp_path, 16)
    constraints.begin(range(16))
    assert allowed(constraints, *range(16)) == [ids("a"), ids("b")] * 8


def test_sequences_share_the_originals_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, grammars = Grammar("regex", "[ab]+"), GrammarCache(tmp_path, save_bytes(tmp_path))
    settle(grammars, one)
    monkeypatch.setattr(module, "CROWD", 4)
    monkeypatch.setattr(module, "WORTH_SECONDS", 0.0)
    constraints = GrammarMatchers(grammars, (EOS,), threads=2)

    def admit(*keys: int) -> None:
        for key in keys:
            constraints.admit(key, SamplingParams(grammar=one))
            finish(grammars)

    def copies() -> list[int]:
        return [constraints.copies_of(original) for original in grammars.originals(one)]

    admit(*range(4))
    assert copies() == [4], "no crowd yet"
    admit(*range(4, 12))
    assert copies() == [6, 6]
    constraints.release([*range(4), 99])
    admit(*range(12, 16))
    assert copies() == [6, 6]
    constraints.release(range(20))
    assert copies() == [0, 0]


def test_min_tokens_rules_ends_out_while_something_else_is_left(admit: Admit) -> None:
    constraints = admit("ab*", min_tokens=3, max_tokens=9, stop_token_ids=(98,))
    write(constraints, 0, "a")
    assert allowed(constraints, 0, position=1) == [ids("b") | {EOS}], "these are all ends"
    constraints = admit("a[bc]*", min_tokens=3, max_tokens=9, stop_token_ids=(98,))
    write(constraints, 0, "a")
    assert allowed(constraints, 0, position=2) == [ids("c")]
    assert allowed(constraints, 0, position=3) == [ids("bc") | {EOS}]


def test_samples_of_one_grammar_go_their_own_ways(admit: Admit) -> None:
    constraints = admit("(ab|cd)+", "(ab|cd)+")
    write(constraints, 0, "a")
    write(constraints, 1, "cd")
    assert allowed(constraints, 1, 0) == [ids("ac") | {EOS}, ids("b")]


def test_sequences_without_a_grammar_have_no_row(admit: Admit) -> None:
    constraints = admit("a")
    constraints.admit(5, SamplingParams())
    assert constraints.rows([5, 0, 6]) == [1]
    constraints.release([5])
    constraints.release([0])
    assert constraints.rows([5, 0, 6]) == []


class Panic(BaseException):
    """As panics of the library's language are raised."""


class Panicking:
    """A matcher with a defect."""

    def unsafe_compute_mask_ptr(self, *_: int) -> None:
        raise Panic("mask")

    def consume_token(self, _: int) -> bool:
        raise Panic("token")

    def is_error(self) -> bool:
        return False


def test_a_defect_of_the_library_costs_one_sequence(
    admit: Admit, caplog: pytest.LogCaptureFixture
) -> None:
    constraints = admit(*["[a-z]+"] * 6)
    constraints._texts[2].matcher = Panicking()  # type: ignore[assignment]
    masks = allowed(constraints, *range(6))
    assert [mask == set(range(97, 123)) for mask in masks] == [True, True, False, True, True, True]
    assert not constraints.take(2, 97)
    assert "Panic" in constraints.rejected()[2] and constraints.rejected() == {}
    assert not constraints.take(2, 97)
    assert set(constraints.rejected()) == {2}
    assert "a matcher failed" in caplog.text
