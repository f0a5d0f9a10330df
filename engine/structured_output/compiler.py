"""Grammars: what a request asks of its text, made into matchers; the only user of llguidance.

A matcher follows one text, token by token, and says which tokens may come next. Its masks are bits,
one per token of the model, and one more, `TextTokens.end`: the text may end here. No token of the
model stands behind that one, so models without an end-of-text token are no exception.

Compiling takes under a millisecond as a rule, but text exists that keeps the library busy for
minutes or wants gigabytes, and nothing can interrupt it. So whoever compiles what strangers sent
does it in a process that can be killed (engine.structured_output.sandbox); the limits here bound
the rest.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import InvalidRequest
from engine.protocol.sampling_params import Grammar
from engine.structured_output.schema_checks import can_spell, dead_end, has_all_bytes, prepared
from engine.tokenizer_layout import mid_sentence

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Of the library's own units: about 4 ms to compile regular expressions, 4 ms for a mask, and 40 MB
# of lexer states. A schema with 1,000 required properties and an enumeration of 5,000 values stay
# below. Time also grows with the square of what may come next: 500 optional properties, the most
# that ROW_ITEMS allow, take 6 ms for a mask; 1,000 would take 23 ms, and grammars exist that would
# then take 50 ms for each token, while everybody waits.
LEXER_FUEL, STEP_LEXER_FUEL = 200_000, 50_000
STEP_ITEMS, LEXER_STATES, GRAMMAR_SIZE = 20_000, 20_000, 100_000
ROW_ITEMS = 2000
_NO_SPELLING = "no text was found that matches it and that the model's tokens can spell"
_SPECIAL_NAMES = "; following special tokens"  # the names that `_add_end` makes up are nobody's
_OF_LEXERS = "too many states", "too many expressions"  # limits, in the library's words
_MOST_REASON = 500  # characters of the library's own words


class TextTokens(NamedTuple):
    """A model's tokens as the library knows them."""

    library: LLTokenizer
    end: int  # the bit that says that the text may end; not a text token of the model
    complete: bool  # they can write every text

    @property
    def words(self) -> int:
        """32-bit words of a mask."""
        return -(-self.library.vocab_size // 32)


def load_tokens(folder: Path, vocab_size: int) -> TextTokens:
    """Reads a model's tokenizer.json. Raises InvalidRequest, which says why no text of the model
    can be told what to match."""
    from llguidance import LLTokenizer

    try:
        layout = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            "the model has no tokenizer.json, so there is no text to match a grammar"
        ) from error
    try:
        # The text that has to match goes on from the prompt: no space is put before it.
        layout = mid_sentence(layout) or layout
        layout["normalizer"] = _verbatim(layout.get("normalizer"))
        end = _add_end(layout)
        layout["decoder"] = _spelled_out(layout["decoder"])
        library = LLTokenizer(json.dumps(layout), n_vocab=max(vocab_size, end + 1), eos_token=end)
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidRequest(
            f"the model's tokenizer does not tell which bytes its tokens stand for: {error}"
        ) from error
    return TextTokens(library, end, has_all_bytes(library))


def _add_end(layout: dict[str, Any]) -> int:
    """Adds a token to a tokenizer.json that ends a text; its id, beyond all others. This one, the
    special tokens and those of ids that have none get names that nobody can know: where a grammar
    asks for the text `<|endoftext|>`, the library would take it for the token of that name, which
    is no text. Other added tokens are ordinary ones where the vocabulary has them, else no text."""
    model, secret = layout["model"], secrets.token_hex(16)
    vocab = model["vocab"]
    named = isinstance(vocab, dict)
    known = {*vocab.values()} if named else {*range(len(vocab))}
    special = {token["id"]: token["special"] for token in layout["added_tokens"]}
    end = 1 + max({*known, *special}, default=-1)
    silent = [id for id in range(end + 1) if id not in known or special.get(id)]
    names = {id: f"<|no text {id} {secret}|>" for id in silent}
    if named:
        unknown = vocab.get(model.get("unk_token"))
        if unknown in names:  # it has to be in the vocabulary
            model["unk_token"] = names[unknown]
        model["vocab"] = {names.get(id, name): id for name, id in vocab.items()}
        model["vocab"] |= {name: id for id, name in names.items()}  # else numbered by their order
    else:
        vocab += [["", 0.0] for _ in range(end + 1 - len(vocab))]
        model["vocab"] = [[names.get(id, piece), score] for id, (piece, score) in enumerate(vocab)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    layout["added_tokens"] = [
        {"id": id, "content": name, "special": True, **flags} for id, name in names.items()
    ]
    return end


def _verbatim(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer that changes no text, but writes spaces as the vocabulary has them. The library
    encodes what a grammar leaves no choice about, and expects these very characters."""
    if normalizer is None:
        return None
    if "normalizers" in normalizer:
        kept = [one for one in map(_verbatim, normalizer["normalizers"]) if one is not None]
        return {**normalizer, "normalizers": kept} if kept else None
    of_spaces = normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": " "}
    return normalizer if of_spaces else None


def _spelled_out(decoder: dict[str, Any] | None) -> dict[str, Any] | None:
    """A decoder that the library knows, where it does not know one that means the same."""
    kind = (decoder or {}).get("type")
    parts: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if kind == "Fuse":
        return {"type": "Sequence", "decoders": parts}
    if kind == "Metaspace":
        space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
        return {"type": "Sequence", "decoders": [space, *parts]}
    return decoder


def compile_grammar(tokens: TextTokens, grammar: Grammar) -> LLMatcher:
    """A matcher at the beginning of a text, to be copied. Raises InvalidRequest, which says what is
    wrong with the grammar; so it does where no text but the empty one matches."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_ITEMS,
        max_items_in_row=ROW_ITEMS,
        max_lexer_states=LEXER_STATES,
        max_grammar_size=GRAMMAR_SIZE,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokens.library, _source(grammar), log_level=0, limits=limits)
    first = int.from_bytes(matcher.compute_bitmask(), "little")  # keeps what this needs ready
    if matcher.is_error():
        raise InvalidRequest(reason(matcher))
    if not first & ~(1 << tokens.end):
        empty = "no text but the empty one matches it"
        raise InvalidRequest(empty if matcher.is_accepting() else _NO_SPELLING)
    if not tokens.complete and not can_spell(matcher, tokens.library, tokens.end):
        raise InvalidRequest(_NO_SPELLING)
    return matcher


def check_grammar(tokens: TextTokens, grammar: Grammar) -> None:
    """Compiles one, to find out whether it can be followed. Raises InvalidRequest as
    `compile_grammar`, and where every text that is tried leads beyond the limits above."""
    matcher = compile_grammar(tokens, grammar)
    failed = dead_end(matcher, tokens.end) if tokens.complete else None  # else it was spelled
    if failed is not None:
        raise InvalidRequest(f"the texts that were tried all failed: {reason(failed)}")


def is_full(matcher: LLMatcher) -> bool:
    """Whether it goes no further because its lexer, which copies share, has no room left."""
    return matcher.is_error() and any(limit in matcher.get_error() for limit in _OF_LEXERS)


def reason(matcher: LLMatcher) -> str:
    """Why a matcher goes no further, in the library's words."""
    error = matcher.get_error()
    if not error or error.startswith("NoExtension"):
        return _NO_SPELLING
    text = error.replace("<non-verbose/>", "").strip()
    text = text.partition(_SPECIAL_NAMES)[0]
    return text if len(text) <= _MOST_REASON else text[:_MOST_REASON] + "..."


def _source(grammar: Grammar) -> str:
    """The grammar as the library reads it. Raises InvalidRequest."""
    from llguidance import LLMatcher, grammar_from

    try:
        match grammar.kind:
            case "json":
                return LLMatcher.grammar_from_json_schema(prepared(grammar.text))
            case "choice":
                return LLMatcher.grammar_from_regex(
                    "|".join(map(_escaped, json.loads(grammar.text)))
                )
            case "regex":
                if _ends_in_escape(grammar.text):  # which the library leaves out
                    raise ValueError(
                        "the expression ends in a backslash that escapes nothing; "
                        r"a backslash itself is written \\"
                    )
                return LLMatcher.grammar_from_regex(grammar.text)
            case "grammar":
                return grammar_from("grammar", grammar.text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(str(error)[:_MOST_REASON] or type(error).__name__) from error


def _ends_in_escape(text: str) -> bool:
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _escaped(text: str) -> str:
    """A regular expression for this very text."""
    plain = (c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
    return "".join(plain)
