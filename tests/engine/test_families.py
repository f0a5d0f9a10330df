"""Models of every family, served whole by the engine: answers, scores, cached and kept states."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.models import registry
from engine.models.gated_rnn.config import GruConfig, LstmConfig
from engine.models.hgrn.config import HgrnConfig
from engine.models.loader import load_config, load_model, save_model
from engine.models.mamba.config import MambaConfig
from engine.models.mamba2.config import Mamba2Config
from engine.models.minrnn.config import MinRnnConfig
from engine.models.sru.config import SruConfig
from engine.protocol.events import Finished
from engine.protocol.logprobs import TokenLogprobs
from engine.protocol.requests import KeepState, Request
from engine.protocol.sampling_params import Grammar, SamplingParams
from engine.protocol.state_calls import StateCall, StateReply
from engine.protocol.token_ids import pack_ids
from engine.training.tokenizer import byte_level_tokenizer

CLOSE = 1e-4  # log-probabilities of a text that was read in other pieces
SHAPE: dict[str, Any] = {"vocab_size": 257, "d_model": 32, "n_layers": 3, "dtype": "float32"}
HGRN: dict[str, Any] = {**SHAPE, "inner": 48, "mlp_hidden": 64, "eos_token_id": 256}
MAMBA: dict[str, Any] = {
    **SHAPE, "inner": 64, "state_size": 16, "dt_rank": 2, "eos_token_id": 256,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    **SHAPE, "heads": 8, "head_dim": 8, "state_size": 16, "groups": 2, "eos_token_id": 256,
}  # fmt: skip
GATED: dict[str, Any] = {**SHAPE, "d_embedding": 32, "eos_token_id": 256}
CONFIGS: dict[str, ModelConfig] = {
    "hgrn": HgrnConfig(**HGRN),
    "hgrn convolved": HgrnConfig(**HGRN, conv_kernel=4, tie_embeddings=True),
    "mamba": MambaConfig(**MAMBA, tie_embeddings=True),
    "falcon mamba": MambaConfig(**MAMBA, selection_norm_eps=1e-6, bias=True, conv_kernel=3),
    "mamba2": Mamba2Config(**MAMBA2, least_dt=0.01, most_dt=0.5, bias=True),
    "gru": GruConfig(**{**GATED, "d_embedding": 20}, head_bias=True),
    "lstm": LstmConfig(**GATED, tie_embeddings=True),
    "sru": SruConfig(**{**GATED, "d_embedding": 20}, projection=9, layer_norm=True, tanh=True),
    "sru, v = 0": SruConfig(**GATED, tie_embeddings=True, weight_c=False, scale_x=1.5),
    "own block with hgrn": MinRnnConfig(cell="hgrn", **SHAPE, conv_kernel=3, eos_token_id=256),
    "own block with sru": MinRnnConfig(cell="sru", **SHAPE, conv_kernel=3, eos_token_id=256),
}
PROMPT = list(b"the quick brown fox jumps over the lazy dog. " * 7)


def save_random(folder: Path, config: ModelConfig) -> Path:
    torch.manual_seed(3)
    model = registry.build(config)
    with torch.no_grad():  # sharper than random logits are, so that no answer is like another's
        (model.embedding if model.head is None else model.head).weight.mul_(3)
        for name, parameter in model.named_parameters():
            if "norm" in name or name == "lower_bounds":
                parameter.add_(0.3 * torch.randn_like(parameter))
    save_model(folder, model, config, "float32")
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=list(CONFIGS.values()), ids=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("model"), request.param)


def load(folder: Path, **fields: Any) -> Engine:
    given = {"max_slots": 4, "share_slots": 4, "threads": 1, "device": "cpu", **fields}
    return Engine.load(EngineConfig(model=str(folder), tuning_cache="off", **given))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    yield load(folder)


_ids = itertools.count(1)


def run(
    engine: Engine, prompt: list[int], *, score: bool = False, **fields: Any
) -> tuple[Finished, list[TokenLogprobs]]:
    """The end of a greedy request, and its prompt's scores."""
    count = fields.pop("count", 12)
    grammar = fields.pop("grammar", None)
    sampling = SamplingParams(
        max_tokens=count, temperature=0.0, logprobs=0, ignore_eos=grammar is None, grammar=grammar
    )
    request = Request(
        id=next(_ids), prompt=pack_ids(prompt), sampling=sampling, stream=False, score=score,
        **fields,
    )  # fmt: skip
    engine.add("c", request)
    scores: list[TokenLogprobs] = []
    for _ in range(3000):
        events = engine.step().get("c")
        if events is None:
            continue
        assert not events.failed
        for part in events.scores:
            scores += part.reports.unpack()
        for end in events.finished:
            if end.request == request.id:
                return end, scores
    raise AssertionError("the request never ends")


def ask(engine: Engine, action: Any, **fields: Any) -> StateReply:
    engine.ask("c", StateCall(call=next(_ids), action=action, **fields))
    for _ in range(1000):
        for _, reply in engine.replies():
            assert reply.failed is None
            return reply
        engine.step()
    raise AssertionError("a call is never answered")


def solo(folder: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and log-probabilities of prompt[1:] and of them, by the model itself."""
    model, _ = load_model(folder, "cpu")
    text, logprobs = list(prompt), []
    for _ in range(count):
        row = model(torch.tensor([text]))[0].log_softmax(-1).detach()
        text.append(int(row[-1].argmax()))
    rows = model(torch.tensor([text]))[0].log_softmax(-1).detach()
    logprobs = [float(row[token]) for row, token in zip(rows, text[1:], strict=False)]
    return text[len(prompt) :], logprobs


def assert_close(reports: list[TokenLogprobs], expected: list[float]) -> None:
    assert [report.logprob for report in reports] == pytest.approx(expected, abs=CLOSE)


def test_answers_and_scores_are_the_model_s(folder: Path, engine: Engine) -> None:
    answer, logprobs = solo(folder, PROMPT, 12)
    end, scores = run(engine, PROMPT, score=True)
    assert end.tokens == answer
    assert_close(scores, logprobs[: len(PROMPT) - 1])
    assert_close(end.logprobs, logprobs[len(PROMPT) - 1 :])


def test_a_prefix_from_the_cache_gives_the_uncached_answer(folder: Path, engine: Engine) -> None:
    prompt = [*PROMPT[:200], *b" and then"]
    expected, _ = run(load(folder, share_slots=0, host_state_bytes=0), prompt)
    run(engine, [*PROMPT[:200], *b" some other"], cache_points=(200,))
    end, _ = run(engine, prompt)
    assert end.cached_tokens == 200 and expected.cached_tokens == 0
    assert end.tokens == expected.tokens
    assert_close(end.logprobs, [report.logprob for report in expected.logprobs])


def test_a_named_state_goes_on_here_and_in_another_engine(folder: Path, engine: Engine) -> None:
    first, _ = run(engine, PROMPT, count=5, keep=KeepState(id="fox"))
    whole, _ = run(engine, [*PROMPT, *first.tokens, *b" And"])
    ask(engine, "fork", id="fox", target="other-fox")
    out = ask(engine, "export", id="other-fox")
    other = load(folder)
    assert ask(other, "import", content=out.content, target="moved").states[0].tokens == (
        len(PROMPT) + 5
    )
    for one, name in ((engine, "fox"), (engine, "other-fox"), (other, "moved")):
        end, _ = run(one, list(b" And"), state=name)
        assert end.tokens == whole.tokens
        assert_close(end.logprobs, [report.logprob for report in whole.logprobs])


def test_a_batch_answers_as_each_request_alone(folder: Path, engine: Engine) -> None:
    prompts = [PROMPT[start : start + 3 + 40 * start] for start in range(4)]
    alone = [run(engine, prompt)[0].tokens for prompt in prompts]
    fresh = load(folder)
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for id, prompt in enumerate(prompts):
        fresh.add("c", Request(id=id, prompt=pack_ids(prompt), sampling=sampling, stream=False))
    ends: dict[int, list[int]] = {}
    while len(ends) < len(prompts):
        events = fresh.step().get("c")
        ends |= {} if events is None else {end.request: end.tokens for end in events.finished}
    assert [ends[id] for id in range(4)] == alone


def test_an_answer_obeys_a_grammar(engine: Engine) -> None:
    schema = json.dumps({"enum": ["king", "queen"]})
    end, _ = run(engine, PROMPT, grammar=Grammar("json", schema), count=20)
    assert bytes(end.tokens) in (b'"king"', b'"queen"') and end.reason == "stop"


def test_8_bit_weights_are_served(folder: Path) -> None:
    end, _ = run(load(folder, quantize="int8"), PROMPT)
    again, _ = run(load(folder, quantize="int8"), PROMPT)
    assert len(end.tokens) == 12 and end.tokens == again.tokens


def test_deterministic_is_refused_where_no_kernel_promises_it(folder: Path) -> None:
    message = "deterministic is not possible .*: weights are torch.float16; allowed: float32"
    cell = load_config(folder).cell
    if cell == "sru":
        message = "deterministic is not possible .*; allowed: false with the cell 'sru'"
    with pytest.raises(ConfigError, match=message):
        load(folder, deterministic=True, dtype="float16")
