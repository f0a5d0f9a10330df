"""The byte-level tokenizer: 256 tokens, one for each byte value, and an end-of-text token.

It has no merges, so every text can be encoded, and every byte of its UTF-8 form is one token.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

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
