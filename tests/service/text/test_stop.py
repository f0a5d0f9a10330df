"""StopMatcher against a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.text.stop import StopMatcher, StopStrings


def expected(text: str, stops: list[str]) -> str:
    """The text up to the stop string that is complete first, the longest of those."""
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text
    end, length = min(ends)
    return text[: end + length]


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(StopStrings(stops))
    text = "".join(matcher.feed(piece) for piece in pieces)
    return text + matcher.flush(), matcher.stopped


letters = st.text(alphabet="ab", max_size=30)


@given(letters, st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4), st.data())
def test_it_is_a_search_wherever_the_text_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(pieces, stops) == (expected(text, stops), any(stop in text for stop in stops))


@given(st.lists(letters, max_size=6), st.lists(st.text(alphabet="ab", min_size=1), max_size=3))
def test_only_what_could_begin_a_stop_string_is_held(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    read = emitted = ""
    for piece in pieces:
        read += piece
        emitted += matcher.feed(piece)
        if matcher.stopped:
            break
        held = read[len(emitted) :]
        assert read.startswith(emitted)
        longest = max(
            (size for stop in stops for size in range(len(stop)) if read.endswith(stop[:size])),
            default=0,
        )
        assert len(held) == longest


def test_the_longer_of_two_that_end_together() -> None:
    assert run(["xa", "b"], ["b", "ab"]) == ("x", True)


def test_what_was_held_comes_when_it_cannot_be_the_beginning() -> None:
    matcher = StopMatcher(StopStrings(["aab"]))
    assert [matcher.feed(piece) for piece in ("a", "a", "a", "c")] == ["", "", "a", "aac"]
