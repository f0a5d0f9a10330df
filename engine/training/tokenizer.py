"""Tokenizers to train with: bytes, or byte-level BPE trained on the text.

The byte-level tokenizer has 256 tokens, one for each byte value, and an end-of-text token. It has
no merges, so every byte of a text's UTF-8 form is one token. Byte-level BPE (Sennrich et al.,
arXiv 1508.07909, on bytes) begins with the same 256 and adds merges. Both encode every text.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)

from engine.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 256
VOCAB_SIZE = 257


def byte_characters() -> list[str]:
    """Return the printable stand-in of each byte in the `tokenizers` library's byte-level alphabet.

    The alphabet is GPT-2's: bytes that are printable in Latin-1 stand for themselves, the others,
    in order, for the code points from 256 on.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(0xA1, 0xAD),
        *range(0xAE, 0x100),
    }
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def byte_level_tokenizer() -> Tokenizer:
    """Build the tokenizer; `.save(path)` writes its tokenizer.json."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


# What merges never cross: contractions, words with the sign or blank before them, numbers of up to
# three digits, signs with the line ends behind them, line ends, blanks. Line ends stay together, so
# that a text can be cut behind an empty line without changing its tokens.
WORDS = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_byte_bpe(texts: Iterable[str], vocab_size: int, end_of_text: str) -> Tokenizer:
    """Train byte-level BPE on texts, with so many tokens in all.

    The last id is the end-of-text token's. Raises ConfigError if vocab_size is below 257, or if the
    texts do not have so many merges.
    """
    if vocab_size < VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size is {vocab_size}; allowed: at least {VOCAB_SIZE}", param="vocab_size"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found < vocab_size - 1:
        raise ConfigError(
            f"vocab_size is {vocab_size}; allowed for this text: at most {found + 1}",
            param="vocab_size",
        )
    tokenizer.add_special_tokens([AddedToken(end_of_text, special=True, normalized=False)])
    return tokenizer
