"""What grammars cost: a mask, a compilation, and streams that have one.

    python -m loadtest.grammars

Masks are those of a vocabulary of 32,000 tokens: byte pairs of the Python sources on this machine.
Each grammar follows the tokens of a text that matches it, on one thread; a batch uses several.

The engine then runs a bundled model, or one with random weights and that vocabulary. All streams
have a grammar, or none, or penalties, or log-probabilities. Last, a few of these run beside streams
without, to see what they cost the others.
"""

from __future__ import annotations

import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.config import SLOTS, EngineConfig
from engine.engine import Engine
from engine.protocol.requests import Request
from engine.protocol.sampling_params import Grammar, SamplingParams
from engine.protocol.token_ids import pack_ids
from engine.structured_output.compiler import compile_grammar, load_tokens
from engine.structured_output.grammar_cache import GrammarCache
from engine.structured_output.matchers import GrammarMatchers
from loadtest.lm_models import SIZES, subject
from loadtest.report import command_line, print_environment, print_table, save_json

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "roles": {"type": "array", "items": {"enum": ["reader", "writer", "owner"]}},
    },
    "required": ["name", "age", "roles"],
    "additionalProperties": False,
}
SOME = {"name": "Ann of the long name", "age": 41, "roles": ["reader", "owner"]}
TEXTS = {
    "any JSON object": (Grammar("json", '{"type":"object"}'), json.dumps({"a": [SOME] * 3})),
    "a schema": (
        Grammar("json", json.dumps({"type": "array", "items": PERSON})),
        json.dumps([SOME] * 4),
    ),
    "a regular expression": (
        Grammar("regex", r"([A-Za-z]+ ?)+[.!]"),
        "Words and words " * 12 + ".",
    ),
    "one of 1,000 choices": (
        Grammar("choice", json.dumps([f"choice number {i}" for i in range(1000)])),
        "choice number 500",
    ),
}  # fmt: skip
RUNS = 5
BESIDE_SECONDS = 2.0
PROMPT = pack_ids(range(14))  # of any model's vocabulary


@dataclass(frozen=True)
class Masks:
    """Times of the masks of one grammar, in microseconds."""

    grammar: str
    compile: float
    first: float  # mask of a matcher that is new
    median: float
    p90: float
    batch: float  # of one mask, where `streams` are computed at a time


@dataclass(frozen=True)
class Served:
    """The speed of an engine with streams of one kind."""

    requests: str
    tokens_per_second: float
    per_processor_second: float  # tokens; of all threads, so that a busy machine matters less


@dataclass(frozen=True)
class Beside:
    """Plain streams and streams of another kind in one engine; tokens per second."""

    others: str
    streams: int  # of the others
    plain: float  # of all streams that ask for nothing
    of_others: float


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """Save a tokenizer.json whose byte pairs come from Python's own sources."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))[:3000]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Some are there to be read wrongly.
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in sources)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def measure_masks(folder: Path, vocab_size: int, streams: int, threads: int) -> list[Masks]:
    """Measure masks along the texts of TEXTS. Raises RuntimeError if a text does not match."""
    tokens, rows = load_tokens(folder, vocab_size), []
    mask = np.zeros((1, tokens.words), np.int32)
    for name, (grammar, text) in TEXTS.items():
        ids = tokens.library.tokenize_str(text)
        compiling: list[float] = []
        firsts: list[float] = []
        each: list[float] = []
        for _ in range(9):
            began = time.perf_counter()
            matcher = compile_grammar(tokens, grammar)
            compiling.append(time.perf_counter() - began)
            matcher = matcher.deep_copy()
            for position, token in enumerate(ids):
                began = time.perf_counter()
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                (each if position else firsts).append(time.perf_counter() - began)
                if not matcher.consume_token(token):
                    raise RuntimeError(f"{name}: {matcher.get_error()}")
        batch = _batch(folder, vocab_size, grammar, ids, streams, threads)
        rows.append(
            Masks(
                name,
                compile=statistics.median(compiling) * 1e6,
                first=statistics.median(firsts) * 1e6,
                median=statistics.median(each) * 1e6,
                p90=statistics.quantiles(each, n=10)[-1] * 1e6,
                batch=batch * 1e6,
            )
        )
    return rows


def _batch(
    folder: Path, vocab_size: int, grammar: Grammar, ids: list[int], streams: int, threads: int
) -> float:
    """Return the median seconds per mask, for `streams` streams that began one after the other.

    The time to advance the matchers by the sampled tokens is included.
    """
    grammars = GrammarCache(folder, vocab_size)
    grammars.ask(grammar)
    constraints, seconds = GrammarMatchers(grammars, (0,), threads), []
    for step in range(len(ids) + streams - 1):
        while grammars.busy:
            grammars.wait(1.0)
            grammars.collect()
        if step < streams:
            constraints.admit(step, SamplingParams(grammar=grammar))
        alive = [key for key in range(streams) if 0 <= step - key < len(ids)]  # each at its place
        masks = np.zeros((len(alive), constraints.words), np.int32)
        began = time.perf_counter()
        constraints.fill(alive, [step - key for key in alive], masks)
        for key in alive:
            constraints.take(key, ids[step - key])
        seconds.append((time.perf_counter() - began) / len(alive))
    return statistics.median(seconds)


KINDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties and a bias": {"repetition_penalty": 1.1, "logit_bias": {0: -1.0}},
    "log-probabilities": {"logprobs": 0},
    "a schema": {
        "grammar": Grammar(
            "json", json.dumps({"type": "array", "items": PERSON, "minItems": 100_000})
        )
    },
    "a regular expression": {"grammar": Grammar("regex", "[A-Za-z ,.\n]+")},
}


def kinds_for(folder: Path) -> list[str]:
    """Return those of KINDS that a model's folder can serve.

    Without a tokenizer.json these are the kinds without a grammar.
    """
    has_text = (folder / "tokenizer.json").exists()
    return [name for name, fields in KINDS.items() if has_text or "grammar" not in fields]


def measure_engine(engine: Engine, kinds: Sequence[str], streams: int, tokens: int) -> list[Served]:
    """Measure streams of `tokens` tokens each; the quickest of RUNS in turns counts."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(RUNS):
        for name in kinds:
            runs[name].append(_serve(engine, streams, tokens, KINDS[name]))
    rows = []
    for name, seconds in runs.items():
        wall, processor = map(min, zip(*seconds, strict=True))
        rows.append(Served(name, streams * tokens / wall, streams * tokens / processor))
    return rows


def _serve(
    engine: Engine, streams: int, tokens: int, fields: dict[str, Any]
) -> tuple[float, float]:
    """Return the seconds until all streams have ended, and the processor seconds.

    Raises RuntimeError if tokens are missing.
    """
    for id in range(streams):
        engine.add("c", _request(id, tokens, fields))
    drawn, began, worked = 0, time.perf_counter(), time.process_time()
    while engine.has_work:
        for events in engine.step().values():
            drawn += sum(one.completion_tokens for one in events.finished)
    seconds = time.perf_counter() - began, time.process_time() - worked
    if drawn != streams * tokens:
        raise RuntimeError(f"{drawn} tokens instead of {streams * tokens}")
    return seconds


def _request(id: int, tokens: int, fields: dict[str, Any]) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=id, **fields)
    return Request(id=id, prompt=PROMPT, sampling=params, stream=True)


def measure_beside(engine: Engine, kinds: Sequence[str], streams: int) -> list[Beside]:
    """Measure streams, at least two, of which none, one and half are of each other kind."""
    none, *others = kinds
    cases = [(none, 0), *((name, count) for name in others for count in (1, streams // 2))]
    return [Beside(name, count, *_beside(engine, streams, name, count)) for name, count in cases]


def _beside(engine: Engine, streams: int, name: str, count: int) -> tuple[float, float]:
    """Return the tokens per second of plain streams, and of `count` others.

    Counted over BESIDE_SECONDS, after a warm-up that is as long.
    """
    for id in range(streams):
        engine.add("c", _request(id, 10**6, KINDS[name] if id < count else {}))
    began, last = 0.0, time.perf_counter() + 2 * BESIDE_SECONDS
    plain = of_others = 0
    while (now := time.perf_counter()) < last:
        if not began and now > last - BESIDE_SECONDS:
            began, plain, of_others = now, 0, 0
        for events in engine.step().values():
            if events.failed:
                raise RuntimeError(events.failed[0].message)
            for requests, length in [(events.requests, 1)] + [
                (run.requests, run.length) for run in events.runs
            ]:
                theirs = sum(id < count for id in requests)
                of_others += theirs * length
                plain += (len(requests) - theirs) * length
    seconds = now - began
    engine.abort("c", None)
    while engine.has_work:
        engine.step()
    return plain / seconds, of_others / seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the tables; return the exit code."""
    parser = command_line("grammars", __doc__)
    parser.add_argument(
        "--vocab-size", type=int, default=32_000, help="tokens of the tokenizer for the masks"
    )
    parser.add_argument("--streams", type=int, default=32, help="streams in one engine")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the engine")
    parser.add_argument(
        "--model",
        default="shakespeare-mingru",
        help=f"a bundled one, a folder, or random weights in bfloat16: {', '.join(SIZES)}, "
        "with grammars if its vocabulary is of --vocab-size",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--tokenizer", type=Path, help="a folder with a tokenizer.json of --vocab-size tokens"
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args(argv)
    print_environment()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.tokenizer or Path(temporary)
        if options.tokenizer is None:
            make_tokenizer(folder, options.vocab_size)
        masks = measure_masks(folder, options.vocab_size, options.streams, options.threads)
        tokenizer = (folder / "tokenizer.json").read_bytes()
    print_table(
        f"microseconds, {options.vocab_size} tokens",
        ["grammar", "compile", "first mask", "median", "p90", f"one of {options.streams}"],
        [
            [one.grammar, *(f"{value:,.1f}" for value in list(asdict(one).values())[1:])]
            for one in masks
        ],
    )
    device = torch.device(options.device)
    with subject(options.model, "mingru", device, "bfloat16") as one:
        if one.size is not None and one.config.vocab_size == options.vocab_size:
            (one.folder / "tokenizer.json").write_bytes(tokenizer)
        config = EngineConfig(
            model=str(one.folder),
            device=options.device,
            threads=options.threads,
            max_slots=max(options.streams, SLOTS),
        )
        engine, kinds = Engine.load(config), kinds_for(one.folder)
    served = measure_engine(engine, kinds, options.streams, options.tokens)
    print_table(
        f"{options.model}, {options.device}, {options.streams} streams of {options.tokens} tokens",
        ["requests", "tokens/s", "per processor second"],
        [
            [one.requests, f"{one.tokens_per_second:,.0f}", f"{one.per_processor_second:,.0f}"]
            for one in served
        ],
    )
    beside = measure_beside(engine, kinds, options.streams) if options.streams > 1 else []
    print_table(
        f"{options.streams} streams in company",
        ["others", "streams", "tokens/s of those who ask for nothing", "of the others"],
        [
            [one.others, str(one.streams), f"{one.plain:,.0f}", f"{one.of_others:,.0f}"]
            for one in beside
        ],
    )
    tables: dict[str, Sequence[Any]] = {"masks": masks, "engine": served, "beside": beside}
    save_json(options.json, {name: [asdict(one) for one in rows] for name, rows in tables.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
