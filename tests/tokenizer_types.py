"""Tokenizers of every type that published models have, small: what reads or writes text is tested
over all of them. `TYPES` makes each by its name; `save_model` writes a model folder around one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from engine.models import loader as checkpoint
from engine.models.minrnn.config import MinRnnConfig
from engine.models.minrnn.lm import LM
from engine.vocabulary_files import vocabulary_json

TEXT = [
    "The quick brown fox quickly jumps over the lazy dog, don't you see? Yes, no; 1, 2, 3!",
    "To be, or not to be: that is the question.\nWhether 'tis nobler in the mind to suffer\n",
    "naïve café, größer und schöner; 日本語と日曜日, привет приём, 🙂🙃",
    "def f(x):\n    return {'a': [1, 2], \"b\": x}\n\n\nyes no maybe likely kindly",
] * 8
SPACE = "▁"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }} {{ eos_token }}{% endif %}{% endfor %}"
)


def _byte_level(*special: str, add_prefix_space: bool = False, size: int = 420) -> Tokenizer:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return library


def _around(library: Tokenizer, template: str, *names: str) -> Tokenizer:
    """With special tokens that stand around each text, as in "<s> $A"."""
    ids = [(name, library.token_to_id(name)) for name in names]
    library.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return library


def byte_level() -> Tokenizer:
    """As GPT-2 and its kin, with the special tokens of ChatML."""
    return _byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level_prefix_space() -> Tokenizer:
    """A space is put before each text (RoBERTa's way)."""
    return _byte_level("<|endoftext|>", add_prefix_space=True)


def with_bos() -> Tokenizer:
    """Each text begins with a special token (Llama 3's way)."""
    library = _byte_level("<|begin_of_text|>", "<|end_of_text|>")
    return _around(library, "<|begin_of_text|> $A", "<|begin_of_text|>")


def with_bos_and_end() -> Tokenizer:
    """Each text stands between two special tokens."""
    return _around(_byte_level("<s>", "</s>"), "<s> $A </s>", "<s>", "</s>")


def with_added_tokens() -> Tokenizer:
    """Added tokens of both kinds, one of which takes the space to its left."""
    library = _byte_level("<|endoftext|>")
    library.add_special_tokens([AddedToken("<|tool|>", special=True, lstrip=True)])
    library.add_tokens([AddedToken("<think>", lstrip=True), AddedToken("quickest")])
    return library


def without_end() -> Tokenizer:
    """No special token at all."""
    return _byte_level()


def byte_level_in_parts() -> Tokenizer:
    """As DeepSeek: several pre-tokenizers, and a decoder that is one of a sequence."""
    library = _byte_level("<|begin|>", "<|end|>")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[\r\n]"), "isolated"),
            pre_tokenizers.Split(Regex(r"\s?\p{L}+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return _around(library, "<|begin|> $A", "<|begin|>")


def _sentencepiece_model() -> models.BPE:
    """Pieces and merges, and a token for each byte."""
    library = Tokenizer(models.BPE(unk_token="<unk>"))
    library.normalizer = _spaces_as_pieces()
    library.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=\n)|(?=▁)"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
        limit_alphabet=60,
    )  # fmt: skip
    library.train_from_iterator([text.split("\n")[0] for text in TEXT], trainer)
    layout = json.loads(library.to_str())["model"]
    bytes_ = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary = {
        name: id if id < 3 else id + len(bytes_) for name, id in layout["vocab"].items()
    } | bytes_
    merges = [tuple(merge) for merge in layout["merges"]]
    return models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def _spaces_as_pieces() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral: "▁" before each text, bytes for what has no piece, and a space that
    is taken off again."""
    library = Tokenizer(_sentencepiece_model())
    library.normalizer = _spaces_as_pieces()
    library.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    return _around(library, "<s> $A", "<s>")


def sentencepiece_as_it_is() -> Tokenizer:
    """As Gemma: nothing is put before a text, and runs of spaces or lines are added tokens."""
    library = Tokenizer(_sentencepiece_model())
    library.normalizer = normalizers.Replace(" ", SPACE)
    library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    library.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    library.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>")])
    library.add_tokens(["\n\n", SPACE * 2, "<b>"])
    return _around(library, "<s> $A", "<s>")


def _metaspace(scheme: Any) -> Tokenizer:
    library = Tokenizer(models.BPE(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False
    )
    library.train_from_iterator(TEXT, trainer)
    return library


def metaspace_first() -> Tokenizer:
    """ "▁" before a text's first word alone."""
    return _metaspace("first")


def metaspace_always() -> Tokenizer:
    """ "▁" before whatever stands between special tokens."""
    return _metaspace("always")


def unigram() -> Tokenizer:
    """NFKC, runs of spaces made one."""
    library = Tokenizer(models.Unigram())
    library.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.train_from_iterator(
        TEXT,
        trainers.UnigramTrainer(
            vocab_size=250,
            special_tokens=["<unk>", "<s>", "</s>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return library


def unigram_words() -> Tokenizer:
    """As T5, ALBERT and XLM-R: words without the spaces between them, of which each gets one; an
    end mark; special tokens that take the spaces around them."""
    library = unigram()
    library.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), SPACE),
        ]
    )
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    library.add_special_tokens([AddedToken("<extra>", special=True, lstrip=True, rstrip=True)])
    return _around(library, "$A </s>", "</s>")


def wordpiece() -> Tokenizer:
    """As BERT: lower case, words between spaces, "##" inside of a word."""
    library = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=260, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    library.train_from_iterator(TEXT, trainer)
    return _around(library, "[CLS] $A [SEP]", "[CLS]", "[SEP]")


def _of_vocabulary(tokens: list[str]) -> Tokenizer:
    layout = vocabulary_json(json.dumps(tokens), Path("vocabulary.json"))
    return Tokenizer.from_str(json.dumps(layout))


def words() -> Tokenizer:
    """A list of words with one for all others, and one for the end of a line."""
    seen = dict.fromkeys(" ".join(TEXT).split())
    return _of_vocabulary([*seen, "日本", "日本語", "<unk>", "<eos>"])


def words_and_lines() -> Tokenizer:
    """A list of words and a line break."""
    seen = dict.fromkeys(" ".join(TEXT).split())
    return _of_vocabulary([*seen, "日本", "\n", "<unk>"])


def characters() -> Tokenizer:
    """A list of characters with a token for all others."""
    return _of_vocabulary([*sorted(set("".join(TEXT))), "<unk>"])


TYPES: dict[str, Callable[[], Tokenizer]] = {
    make.__name__: make
    for make in (
        byte_level, byte_level_prefix_space, with_bos, with_bos_and_end, with_added_tokens,
        without_end, byte_level_in_parts, sentencepiece, sentencepiece_as_it_is, metaspace_first,
        metaspace_always, unigram, unigram_words, wordpiece, words, words_and_lines, characters,
    )
}  # fmt: skip
# The special token that ends a text, and the chat template.
ENDS = {
    "byte_level": "<|im_end|>",
    "byte_level_prefix_space": "<|endoftext|>",
    "with_bos": "<|end_of_text|>",
    "with_bos_and_end": "</s>",
    "with_added_tokens": "<|endoftext|>",
    "byte_level_in_parts": "<|end|>",
    "sentencepiece": "</s>",
    "sentencepiece_as_it_is": "</s>",
    "metaspace_first": "</s>",
    "metaspace_always": "</s>",
    "unigram": "</s>",
    "unigram_words": "</s>",
    "wordpiece": "[SEP]",
}
TEMPLATES = {"byte_level": CHATML, "sentencepiece": ALTERNATING}


def save_tokenizer(folder: Path, name: str) -> Tokenizer:
    """Writes the files of a tokenizer of this type into a model's folder."""
    library = TYPES[name]()
    library.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {}
    if name in ENDS:
        config["eos_token"] = ENDS[name]
    if name == "sentencepiece":
        config["bos_token"] = "<s>"
    if name in TEMPLATES:
        config["chat_template"] = TEMPLATES[name]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return library


def end_of(name: str, library: Tokenizer) -> int | None:
    """The token that ends a text; None for none."""
    return library.token_to_id(ENDS[name]) if name in ENDS else None


def save_model(folder: Path, name: str) -> Tokenizer:
    """A checkpoint of random weights, tiny, with a tokenizer of this type."""
    library = save_tokenizer(folder, name)
    torch.manual_seed(1)
    config = MinRnnConfig(
        cell="mingru",
        vocab_size=library.get_vocab_size(),
        d_model=32,
        n_layers=1,
        eos_token_id=end_of(name, library),
    )
    checkpoint.save_model(folder, LM(config), config, "float32")
    return library
