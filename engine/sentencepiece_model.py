"""Converts a SentencePiece tokenizer.model to the content of a tokenizer.json.

The file is a protocol buffer, read with Google's library (extra: sentencepiece). Its messages are
declared here, with the fields that are used; nothing else of SentencePiece is needed. BPE and
unigram models give the ids that SentencePiece gives, with its rules for text: byte fallback, the
space that it puts before a text, its normalisation (a compiled table of characters). Names and
flags of special tokens come from tokenizer_config.json, special_tokens_map.json and
added_tokens.json, as transformers reads them.

This module does not import torch.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from engine.config import is_integer
from engine.errors import CheckpointError
from engine.model_files import has_file, unreadable

ADDED_TOKENS = "added_tokens.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
EXTRA = "reading a tokenizer.model needs protobuf: pip install 'minserve[sentencepiece]'"

SPACE = "\u2581"  # in pieces, a space is this character
UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5  # SentencePiece.type
# The names of special tokens in tokenizer_config.json and special_tokens_map.json.
_ROLES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
# Tokenizer classes of transformers that put bos_token before each text unless add_bos_token is
# false. So does a folder that names no class.
_WITH_BOS = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")

# Characters of a piece of a BPE model, of which every way to cut it is looked up. SentencePiece's
# own limit is 16 by default.
MOST_PIECE = 512
MOST_ID = 2**24  # ids are below it, as a model's vocabulary is

# Fields of sentencepiece_model.proto (proto2): message -> name -> number, type, default. A type
# that is a message's name is that message, repeated for `pieces`.
_MESSAGES: dict[str, dict[str, tuple[int, str, object]]] = {
    "Piece": {
        "piece": (1, "string", None),
        "score": (2, "float", None),
        "type": (3, "int32", 1),
    },
    "Trainer": {
        "model_type": (3, "int32", UNIGRAM),
        "treat_whitespace_as_suffix": (24, "bool", False),
        "byte_fallback": (35, "bool", False),
    },
    "Normalizer": {
        "precompiled_charsmap": (2, "bytes", None),
        "add_dummy_prefix": (3, "bool", True),
        "remove_extra_whitespaces": (4, "bool", True),
        "escape_whitespaces": (5, "bool", True),
    },
    "Model": {
        "pieces": (1, "Piece", None),
        "trainer": (2, "Trainer", None),
        "normalizer": (3, "Normalizer", None),
    },
}


def tokenizer_json(path: Path) -> dict[str, Any]:
    """Return what a tokenizer.json would contain for a tokenizer.model.

    Raises CheckpointError if the file cannot be read or converted, or if the extra is missing.
    """
    try:
        return _converted(_parsed(path), path.parent)
    except OSError as error:
        raise unreadable(path, error) from error
    except _Unsupported as error:
        raise CheckpointError(f"{error.file or path}: {error}") from error


class _Unsupported(ValueError):
    """What a file asks for has no counterpart in a tokenizer.json.

    `file`: a file beside the tokenizer.model; None: that one.
    """

    def __init__(self, message: str, file: Path | None = None) -> None:
        super().__init__(message)
        self.file = file


def _parsed(path: Path) -> Any:
    """Return the file's message."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
    except ImportError as error:
        raise CheckpointError(f"{path}: {EXTRA}") from error
    file = descriptor_pb2.FileDescriptorProto(name="pieces.proto", package="p", syntax="proto2")
    for name, fields in _MESSAGES.items():
        declared = file.message_type.add(name=name)
        for field, (number, kind, default) in fields.items():
            one = declared.field.add(name=field, number=number)
            one.label = one.LABEL_REPEATED if field == "pieces" else one.LABEL_OPTIONAL
            if kind in _MESSAGES:
                one.type, one.type_name = one.TYPE_MESSAGE, f".p.{kind}"
            else:
                one.type = getattr(one, f"TYPE_{kind.upper()}")
            if default is not None:
                one.default_value = str(default).lower()
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    read = message_factory.GetMessageClass(pool.FindMessageTypeByName("p.Model"))()
    try:
        read.ParseFromString(path.read_bytes())
    except (message.DecodeError, ValueError) as error:
        raise _Unsupported(f"damaged, or not a SentencePiece model ({error})") from error
    if not read.pieces:
        raise _Unsupported("not a SentencePiece model: it has no pieces")
    for id, piece in enumerate(read.pieces):
        if not isinstance(piece.piece, str):  # protobuf returns such bytes as they are
            raise _Unsupported(f"damaged: piece {id} is not UTF-8")
    return read


def _converted(read: Any, folder: Path) -> dict[str, Any]:
    trainer, rules = read.trainer, read.normalizer
    if trainer.model_type not in (UNIGRAM, BPE):
        raise _Unsupported(f"its model_type is {trainer.model_type}; allowed: 1 (unigram), 2 (BPE)")
    if trainer.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise _Unsupported(
            "treat_whitespace_as_suffix is set or escape_whitespaces is not; allowed: spaces as "
            "the beginning of pieces"
        )
    ids = {piece.piece: id for id, piece in enumerate(read.pieces)}
    if len(ids) != len(read.pieces):
        raise _Unsupported("two pieces are the same")
    settings = _read_json(folder / TOKENIZER_CONFIG)
    added = _added_tokens(read.pieces, ids, settings, folder)
    # A text after a special token begins with a space, too, unless `legacy` is false.
    every = settings.get("legacy") is not False
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _normalizer(rules, every),
        "pre_tokenizer": None
        if every or not rules.add_dummy_prefix
        else {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False},
        "post_processor": _post_processor(settings, added),
        "decoder": _decoder(rules.add_dummy_prefix),
        "model": _bpe(read, ids) if trainer.model_type == BPE else _unigram(read),
    }


def _bpe(read: Any, ids: Mapping[str, int]) -> dict[str, Any]:
    unknown = [piece.piece for piece in read.pieces if piece.type == UNKNOWN]
    # Text never becomes one of these pieces by merging.
    skipped = {piece.piece for piece in read.pieces if piece.type in (UNKNOWN, CONTROL, UNUSED)}
    for id, piece in enumerate(read.pieces):
        if len(piece.piece) > MOST_PIECE:
            raise _Unsupported(
                f"piece {id} has {len(piece.piece)} characters; allowed: at most {MOST_PIECE}"
            )
    # SentencePiece merges the pair whose piece has the highest score; a tokenizer.json lists the
    # pairs in this order.
    merges = [
        (-piece.score, id, cut, left, right)
        for id, piece in enumerate(read.pieces)
        if piece.piece not in skipped
        for cut, left, right in _halves(piece.piece)
        if left in ids and right in ids and left not in skipped and right not in skipped
    ]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown[0] if unknown else None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": read.trainer.byte_fallback,
        "ignore_merges": False,
        "vocab": dict(ids),
        "merges": [[left, right] for *_, left, right in sorted(merges)],
    }


def _halves(piece: str) -> Iterator[tuple[int, str, str]]:
    return ((cut, piece[:cut], piece[cut:]) for cut in range(1, len(piece)))


def _unigram(read: Any) -> dict[str, Any]:
    unknown = [id for id, piece in enumerate(read.pieces) if piece.type == UNKNOWN]
    return {
        "type": "Unigram",
        "unk_id": unknown[0] if unknown else None,
        "byte_fallback": read.trainer.byte_fallback,
        "vocab": [[piece.piece, piece.score] for piece in read.pieces],
    }


def _normalizer(rules: Any, prepends: bool) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    if rules.precompiled_charsmap:
        table = base64.b64encode(rules.precompiled_charsmap).decode()
        parts.append({"type": "Precompiled", "precompiled_charsmap": table})
    if rules.remove_extra_whitespaces:
        parts += [
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    if rules.add_dummy_prefix and prepends:
        parts.append({"type": "Prepend", "prepend": SPACE})
    parts.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": parts}


def _decoder(strips: bool) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strips:
        parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": parts}


def _added_tokens(
    pieces: Any, ids: Mapping[str, int], settings: Mapping[str, Any], folder: Path
) -> list[dict[str, Any]]:
    """Return the tokens at which a text is split, in the order of their ids."""
    found: dict[str, dict[str, Any]] = {}

    def add(name: object, id: int | None = None, file: Path | None = None, **flags: bool) -> None:
        if not isinstance(name, str) or not name:
            raise _Unsupported(f"the name of a special token is {name!r}; allowed: a text", file)
        known = ids.get(name, found[name]["id"] if name in found else None)
        if id is None:
            id = next(free) if known is None else known
        elif id != (id if known is None else known) or (id < len(pieces) and name not in ids):
            raise _Unsupported(f"gives token {name!r} the id {id}", file)
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        found[name] = {"id": id, "content": name, **plain, **found.get(name, {}), **flags}

    for piece in pieces:
        if piece.type in (UNKNOWN, CONTROL):
            add(piece.piece, special=True)
        elif piece.type == USER_DEFINED:
            add(piece.piece)
    others = _read_json(others_file := folder / ADDED_TOKENS)
    for name, id in others.items():
        if not is_integer(id) or not 0 <= id < MOST_ID:
            raise _Unsupported(
                f"the id of token {name!r} is {id!r}; allowed: an integer from 0 on", others_file
            )
    settings_file = folder / TOKENIZER_CONFIG
    declared = settings.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict) or not all(
        re.fullmatch("[0-9]{1,8}", id) and isinstance(token, dict) for id, token in declared.items()
    ):
        raise _Unsupported(
            "added_tokens_decoder is no object of token ids, each with an object", settings_file
        )
    # Tokens without an id get the next ones that are free.
    free = count(1 + max([len(pieces) - 1, *map(int, declared), *others.values()]))
    for name, id in others.items():
        add(name, id, others_file)
    for id, token in declared.items():
        flags = {flag: token[flag] for flag in token if flag != "content"}
        kept = {flag: value for flag, value in flags.items() if isinstance(value, bool)}
        add(token.get("content"), int(id), settings_file, **kept)
    names_file = folder / "special_tokens_map.json"
    for file, names in ((names_file, _read_json(names_file)), (settings_file, settings)):
        more = names.get("additional_special_tokens") or []
        if not isinstance(more, list):
            raise _Unsupported(
                f"additional_special_tokens is {more!r}; allowed: a list of names", file
            )
        for token in [*(names.get(role) for role in _ROLES), *more]:
            if token is not None:
                add(_content(token), file=file, special=True)
    listed = sorted(found.values(), key=lambda token: token["id"])
    beyond = [token["id"] for token in listed if token["id"] >= len(pieces)]
    if beyond != list(range(len(pieces), len(pieces) + len(beyond))):
        raise _Unsupported(
            f"the files beside it add tokens {beyond[:3]}; allowed: ids from {len(pieces)} on, "
            "without gaps"
        )
    return listed


def _content(token: object) -> object:
    """Return the name of a special token, which may be an object with flags."""
    return token.get("content") if isinstance(token, dict) else token


def _post_processor(
    settings: Mapping[str, Any], added: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """Return what puts special tokens around a text, if anything does."""
    ids = {token["content"]: token["id"] for token in added}
    kind = str(settings.get("tokenizer_class") or _WITH_BOS[0]).removesuffix("Fast")
    begins = settings.get("add_bos_token")
    begins = kind in _WITH_BOS if begins is None else bool(begins)
    bos = _content(settings.get("bos_token", "<s>" if "<s>" in ids else None)) if begins else None
    ends = bool(settings.get("add_eos_token"))
    eos = _content(settings.get("eos_token", "</s>" if "</s>" in ids else None)) if ends else None
    if bos is None and eos is None:
        return None

    def around(*texts: str) -> list[dict[str, Any]]:
        parts = []
        for kind, text in enumerate(texts):
            one = [("SpecialToken", bos), ("Sequence", text), ("SpecialToken", eos)]
            parts += [{of: {"id": id, "type_id": kind}} for of, id in one if id is not None]
        return parts

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A", "B"),
        "special_tokens": {
            str(name): {"id": name, "ids": [ids[str(name)]], "tokens": [name]}
            for name in (bos, eos)
            if name is not None
        },
    }


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is no file."""
    if not has_file(path):
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must contain a JSON object")
    return values
