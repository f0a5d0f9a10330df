"""Compiles grammars into matchers, with llguidance.

A matcher follows one text, token by token, and says which tokens may come next. A mask has one bit
for each token of the model, and one more, `TextTokens.end`: the text may end here. That bit belongs
to no token of the model, so models without an end-of-text token need no special case.

Compiling usually takes less than a millisecond. But some inputs keep the library busy for minutes
or use gigabytes, and nothing can interrupt it. Grammars from clients are therefore compiled in a
process that can be killed first (engine.structured_output.sandbox); the limits here bound the rest.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import CheckpointError, InvalidRequest
from engine.protocol.sampling_params import Grammar
from engine.structured_output.schema_checks import can_spell, dead_end, has_all_bytes, prepared
from engine.tokenizer_files import read_tokenizer
from engine.tokenizer_layout import mid_sentence

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Limits in the library's units: about 4 ms to compile regular expressions, 4 ms for a mask, and 40
# MB of lexer states. A schema with 1,000 required properties and an enum of 5,000 values is within
# them. Time also grows with the square of what may come next: 500 optional properties, the most
# within ROW_ITEMS, take 6 ms for a mask; 1,000 would take 23 ms, and some grammars would then take
# 50 ms per token, delaying every request.
LEXER_FUEL, STEP_LEXER_FUEL = 200_000, 50_000
STEP_ITEMS, LEXER_STATES, GRAMMAR_SIZE = 20_000, 20_000, 100_000
ROW_ITEMS = 2000
_NO_SPELLING = "no text was found that matches it and that the model's tokens can spell"
_SPECIAL_NAMES = "; following special tokens"  # what follows are names that `_add_end` has made up
_OF_LEXERS = "too many states", "too many expressions"  # limits, in the library's words
_MOST_REASON = 500  # the most characters of the library's messages


class TextTokens(NamedTuple):
    """A model's tokens as llguidance knows them."""

    library: LLTokenizer
    end: int  # the bit that says that the text may end; not a token of the model
    complete: bool  # the tokens can spell every text

    @property
    def words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-self.library.vocab_size // 32)


def load_tokens(folder: Path, vocab_size: int) -> TextTokens:
    """Read a model's tokenizer.

    Raises InvalidRequest, which says why grammars cannot be used with this model.
    """
    from llguidance import LLTokenizer

    try:
        read = read_tokenizer(folder)
        layout = None if read is None else json.loads(read.text)
    except (CheckpointError, ValueError) as error:
        raise InvalidRequest(
            f"the model's tokenizer cannot be read, so grammars cannot be matched: {error}"
        ) from error
    if layout is None:
        raise InvalidRequest(
            "the model has no tokenizer.json or tokenizer.model, so grammars cannot be matched "
            "against its text"
        )
    try:
        # The text to match continues the prompt, so no space may be put before it.
        layout = mid_sentence(layout) or layout
        layout["normalizer"] = _verbatim(layout.get("normalizer"))
        end = _add_end(layout)
        _name_by_texts(layout)
        layout["decoder"] = _spelled_out(layout["decoder"])
        library = LLTokenizer(json.dumps(layout), n_vocab=max(vocab_size, end + 1), eos_token=end)
    except (ValueError, LookupError, TypeError) as error:
        raise InvalidRequest(
            f"cannot tell from the model's tokenizer which bytes its tokens stand for: {error}"
        ) from error
    return TextTokens(library, end, has_all_bytes(library))


def _add_end(layout: dict[str, Any]) -> int:
    """Add a token that ends a text to a tokenizer.json, and return its id, the highest one.

    This token, the special tokens and unused ids get names that nobody can guess. Otherwise the
    library would take the text `<|endoftext|>` in a grammar for the token of that name, which is
    not text. Other added tokens are ordinary ones if the vocabulary has them; otherwise they are
    not text.
    """
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
        if unknown in names:  # it must be in the vocabulary
            model["unk_token"] = names[unknown]
        model["vocab"] = {names.get(id, name): id for name, id in vocab.items()}
        # otherwise they would be numbered in their order
        model["vocab"] |= {name: id for id, name in names.items()}
    else:
        vocab += [["", 0.0] for _ in range(end + 1 - len(vocab))]
        model["vocab"] = [[names.get(id, piece), score] for id, (piece, score) in enumerate(vocab)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    layout["added_tokens"] = [
        {"id": id, "content": name, "special": True, **flags} for id, name in names.items()
    ]
    return end


def _verbatim(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the normalizer reduced to its replacement of spaces; None if nothing is left.

    The library encodes text for which a grammar leaves no choice, and expects exactly these
    characters.
    """
    if normalizer is None:
        return None
    if "normalizers" in normalizer:
        kept = [one for one in map(_verbatim, normalizer["normalizers"]) if one is not None]
        return {**normalizer, "normalizers": kept} if kept else None
    of_spaces = normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": " "}
    return normalizer if of_spaces else None


def _name_by_texts(layout: dict[str, Any]) -> None:
    """Apply the replacements after a Metaspace decoder to the names of tokens, in place.

    The library does not support them; a word for line breaks (engine/vocabulary_files.py) has one.
    """
    vocab = layout["model"]["vocab"]
    match layout["decoder"]:
        case {"type": "Sequence", "decoders": [{"type": "Metaspace"} as first, *others]}:
            pairs = [_replaced(one) for one in others]
            if isinstance(vocab, dict) and all(pairs):
                for old, new in filter(None, pairs):
                    vocab = {name.replace(old, new): id for name, id in vocab.items()}
                layout["model"]["vocab"], layout["decoder"] = vocab, first


def _replaced(decoder: dict[str, Any]) -> tuple[str, str] | None:
    """Return what a decoder replaces by what; None if it does anything else."""
    match decoder:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return old, new
    return None


def _spelled_out(decoder: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return an equivalent decoder that the library supports, if it does not support this one."""
    kind = (decoder or {}).get("type")
    parts: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if kind == "Fuse":
        return {"type": "Sequence", "decoders": parts}
    if kind == "Metaspace":
        space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
        return {"type": "Sequence", "decoders": [space, *parts]}
    return decoder


def compile_grammar(tokens: TextTokens, grammar: Grammar) -> LLMatcher:
    """Compile a grammar to a matcher at the beginning of a text, to be copied for each text.

    Raises InvalidRequest, which says what is wrong with the grammar, also if only the empty text
    matches.
    """
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
    first = int.from_bytes(matcher.compute_bitmask(), "little")  # also precomputes what masks need
    if matcher.is_error():
        raise InvalidRequest(reason(matcher))
    if not first & ~(1 << tokens.end):
        empty = "it matches no text except the empty one"
        raise InvalidRequest(empty if matcher.is_accepting() else _NO_SPELLING)
    if not tokens.complete and not can_spell(matcher, tokens.library, tokens.end):
        raise InvalidRequest(_NO_SPELLING)
    return matcher


def check_grammar(tokens: TextTokens, grammar: Grammar) -> None:
    """Compile a grammar, to find out whether it can be followed.

    Raises InvalidRequest as `compile_grammar` does, and if every text that is tried exceeds the
    limits.
    """
    matcher = compile_grammar(tokens, grammar)
    # without all bytes, can_spell has found a text
    failed = dead_end(matcher, tokens.end) if tokens.complete else None
    if failed is not None:
        raise InvalidRequest(f"all texts that were tried failed: {reason(failed)}")


def is_full(matcher: LLMatcher) -> bool:
    """Return whether a matcher has stopped because its lexer, which copies share, is full."""
    return matcher.is_error() and any(limit in matcher.get_error() for limit in _OF_LEXERS)


def reason(matcher: LLMatcher) -> str:
    """Return why a matcher has stopped, in the library's words."""
    error = matcher.get_error()
    if not error or error.startswith("NoExtension"):
        return _NO_SPELLING
    text = error.replace("<non-verbose/>", "").strip()
    text = text.partition(_SPECIAL_NAMES)[0]
    return text if len(text) <= _MOST_REASON else text[:_MOST_REASON] + "..."


def _source(grammar: Grammar) -> str:
    """Return the grammar in the library's notation. Raises InvalidRequest."""
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
                if _ends_in_escape(grammar.text):  # which the library would ignore
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
    """Return a regular expression that matches exactly this text."""
    plain = (c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
    return "".join(plain)
